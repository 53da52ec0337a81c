"""GGUF files of tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.write_gguf import facts_of, finish, names_of
from tests.families import tiny_model

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*CONTROL, *sorted(ByteLevel.alphabet()), "ĊĊ", "th", "Ġth"]
MERGES = ["Ċ Ċ", "t h", "Ġ th"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"

KINDS: dict[type, Any] = {
    bool: GGUFWriter.add_bool, int: GGUFWriter.add_uint32, float: GGUFWriter.add_float32, str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}  # fmt: skip

FITTING = dict(vocab_size=320, hidden_size=256, intermediate_size=512)  # what our CPU kernels take


def tiny_llama(tied: bool = True, **sizes: int) -> Any:
    torch.manual_seed(3)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    options: dict[str, Any] = dict(rms_norm_eps=1e-5, rope_parameters=rope, tie_word_embeddings=tied)
    model = tiny_model("llama", **{"vocab_size": len(TOKENS), **options, **sizes})
    for parameter in model.parameters():  # not near zero and not constant, so that a swapped tensor is seen
        spread = 0.3 if parameter.dim() < 2 or not sizes else 2 * parameter.shape[1] ** -0.5
        parameter.data = torch.randn_like(parameter).mul(spread).bfloat16().float()  # fp32, exact in bf16
    return model


def family_model(family: str, **options: Any) -> Any:
    """A tiny model whose biases and norms are neither zero nor one."""
    window = {} if family == "llama" else {"use_sliding_window": False}  # files of these families have none
    model = tiny_model(family, rms_norm_eps=1e-5, **{**window, **options})
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data = torch.rand_like(parameter) + 0.5
        parameter.data = parameter.data.bfloat16().float()
    return model


def stablelm(folder: Path, facts: dict[str, Any], more: dict[str, int] | None = None) -> tuple[Path, Any]:
    """A file of an architecture that transformers reads, and its model."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    model = tiny_model("stablelm", vocab_size=len(TOKENS), rope_parameters=rope)
    sizes = {"layer_norm_eps": model.config.layer_norm_eps, "vocab_size": len(TOKENS)}
    return write_gguf(folder / "stablelm.gguf", model, "stablelm", facts={**sizes, **facts}, more=more), model


def interleave_rope(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """transformers' rotary layout -> ggml's, written as an index table: row 2i of a head is i, row 2i+1 is i + d/2."""
    dim = weight.shape[0] // heads
    order = [i // 2 + (i % 2) * dim // 2 for i in range(dim)]
    return weight[[head * dim + row for head in range(heads) for row in order]]


def write_gguf(
    path: Path,
    model: Any,
    arch: str = "llama",
    pre: str = "smollm",
    quantized: Callable[[str, np.ndarray], tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    facts: dict[str, Any] | None = None,
    factors: torch.Tensor | None = None,
    more: dict[str, int] | None = None,
) -> Path:
    """Write a model and a small vocabulary as a GGUF file.

    Args:
        quantized: the rows of a matrix of that name as the file is to have them, and their type; None: in fp32.
        facts: further ones, by the writer's method or, if it has none, their own name; None: not there.
        factors: [d / 2] divisors of rotary frequencies.
        more: sizes of further tensors, by name.
    """
    config = model.config
    tokens = [*TOKENS, *(f"<{number}>" for number in range(len(TOKENS), config.vocab_size))]
    writer = GGUFWriter(path, arch)
    for name, value in {
        **facts_of(config),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "token_list": tokens,
        "token_types": [3 if token in CONTROL else 1 for token in tokens],
        "token_merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        "pad_token_id": 2,
        "chat_template": TEMPLATE,
        **(facts or {}),
    }.items():
        if value is not None:
            add = getattr(writer, f"add_{name}", None)
            add(value) if add is not None else KINDS[type(value)](writer, name, value)
    names = names_of(config.num_hidden_layers)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, kind = key.rpartition(".")
        name = names[base]
        if arch == "llama" and name.endswith(("attn_q", "attn_k")):
            value = interleave_rope(
                value, config.num_attention_heads if name.endswith("attn_q") else config.num_key_value_heads
            )
        if quantized is not None and value.dim() == 2:
            rows, stored = quantized(name, value.float().numpy())
            writer.add_tensor(f"{name}.weight", rows, raw_dtype=stored)
        else:
            writer.add_tensor(f"{name}.{kind}", value.float().numpy())
    for name, size in (more or {}).items():
        writer.add_tensor(name, np.zeros((size, size), np.float32))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    finish(writer)
    return path
