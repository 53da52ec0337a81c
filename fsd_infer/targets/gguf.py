"""Models of GGUF files of architecture "llama": with their weights as the file has them, or expanded.

Written without the model and tokenizer converters of transformers on purpose: theirs lose the pre-tokenizer of some
vocabularies (SmolLM2 splits digits off *before* the byte-level step, which changes the ids of numbered lists).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fsd_infer.cpu import ops
from fsd_infer.errors import ModelLoadError
from fsd_infer.targets.gguf_file import Stored, read_gguf

# ggml block tensor -> transformers LlamaDecoderLayer parameter
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
SMOLLM = ("gpt2", "smollm")  # a vocabulary's model and pre-tokenizer
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def expand_llama_gguf(source: Path, out_dir: Path) -> None:
    """Write config, generation config, bf16 safetensors, tokenizer and chat template of ``source`` to ``out_dir``.

    Args:
        source: a GGUF file of architecture "llama" with a byte-level BPE vocabulary, of any ggml type gguf-py reads.
        out_dir: an existing directory; files of the same names are overwritten.

    Raises:
        ModelLoadError: the file is not a GGUF file, or of an architecture or vocabulary this does not know.
    """
    facts, config, tensors = _read(source)
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", _generation_config(config))
    weights = out_dir / "model.safetensors"
    save_file(_state_dict(tensors, config), weights, metadata={"format": "pt"})
    weights.chmod((out_dir / "config.json").stat().st_mode)  # safetensors makes it private to the user
    _write_tokenizer(facts, out_dir, source)


def load_llama_gguf(
    source: Path, *, dtype: torch.dtype, attn_implementation: str | None, expand: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of ``source`` on the CPU, and its tokenizer.

    Args:
        source: a GGUF file of architecture "llama".
        dtype: of weights that are expanded, and of what is computed.
        attn_implementation: default "sdpa".
        expand: no weight stays as the file has it. Otherwise those do whose blocks our kernels read; the model is then
            ready to decode, and :func:`fsd_infer.cpu.ops.restore` expands it.

    Raises:
        ModelLoadError: a file that is cut or malformed, or of another architecture.
    """
    facts, config, tensors = _read(source)
    made, attention = LlamaConfig(**config), attn_implementation or "sdpa"
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(made, dtype=dtype, attn_implementation=attention)
    missing = {name for name, _ in model.named_parameters()}  # a tied one once, as the embedding
    for name, stored, order in _places(tensors, config):
        path, layer = name.removesuffix(".weight"), model.get_submodule(name.removesuffix(".weight"))
        if stored.shape != layer.weight.shape:
            raise ModelLoadError(
                f"{source}: {name} is {list(stored.shape)} in the file and {list(layer.weight.shape)} in its model; "
                "fetch the file again."
            )
        tied = made.tie_word_embeddings and path == "model.embed_tokens"
        if expand or not _held(model.lm_head if tied else layer, stored, order, name):
            weight = nn.Parameter(_expanded(stored, order).to(dtype), requires_grad=False)
            for each in (layer, model.lm_head) if tied else (layer,):
                each.weight = weight
        missing.discard(name)
    if missing:
        count = len(missing)
        raise ModelLoadError(f"{source} lacks {count} tensors of its model, first {min(missing)!r}; fetch it again.")
    decoder: Any = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=made)  # its buffers are computed, not read
    model.generation_config = GenerationConfig(**_generation_config(config))
    made._name_or_path = str(source)
    if not expand:
        ops.speed_up(model, release=True)  # one that is tied is the embedding's too
    return model, load_gguf_tokenizer(source, facts)


def load_gguf_config(source: Path) -> LlamaConfig:
    """The config alone; errors as of :func:`load_llama_gguf`."""
    return LlamaConfig(**_read(source)[1])


def load_gguf_tokenizer(source: Path, facts: dict[str, Any] | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside ``source``, if one does, else the file's own, of its ``facts`` if they were read.

    Vocabularies other than SmolLM2's are read by transformers' converter.
    """
    if any((source.parent / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return AutoTokenizer.from_pretrained(source.parent)
    facts = read_gguf(source)[0] if facts is None else facts
    if _vocabulary(facts) != SMOLLM:
        return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with tempfile.TemporaryDirectory() as folder:
        _write_tokenizer(facts, Path(folder), source)
        return AutoTokenizer.from_pretrained(folder)


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Stored]]:
    """The facts of a file, the config that they make, and the tensors."""
    facts, tensors = read_gguf(source)
    family = facts.get("general.architecture")
    if family != "llama":
        raise ModelLoadError(f"{source} holds architecture {family!r}; only 'llama' GGUF files can be read.")
    try:
        size, tied = int(tensors["token_embd.weight"].shape[0]), "output.weight" not in tensors
        config = _config(facts, vocab_size=size, tied=tied)
        layers = config["num_hidden_layers"]
        if not 0 < layers <= len(tensors):  # they are built before their weights are looked at
            raise ValueError(f"{layers} layers, but {len(tensors)} tensors")
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise ModelLoadError(f"{source}: what it says of its model is incomplete or wrong ({error!r}).") from error
    return facts, config, tensors


def _held(layer: nn.Module, stored: Stored, order: torch.Tensor | None, name: str) -> bool:
    """Does the layer compute by the file's blocks from now on?"""
    if not isinstance(layer, (nn.Linear, nn.Embedding)) or not ops.holds_blocks(stored.kind, *stored.shape):
        return False
    try:
        ops.hold_blocks(layer, ops.Blocks(int(stored.kind), stored.data, order))
    except ValueError as error:
        raise ModelLoadError(f"{name} of the GGUF file has {error}; fetch it again.") from error
    return True


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(facts: dict[str, Any], *, vocab_size: int, tied: bool) -> dict[str, Any]:
    hidden, heads = int(facts["llama.embedding_length"]), int(facts["llama.attention.head_count"])
    theta = float(facts.get("llama.rope.freq_base", 10_000.0))
    bos, eos = facts.get("tokenizer.ggml.bos_token_id"), facts.get("tokenizer.ggml.eos_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "head_dim": int(facts.get("llama.attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "max_position_embeddings": int(facts["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(facts["llama.block_count"]),
        "num_key_value_heads": int(facts.get("llama.attention.head_count_kv", heads)),
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id", eos),
        # GGUF keeps the epsilon as fp32: 9.9999997e-06 is 1e-05
        "rms_norm_eps": float(f"{float(facts['llama.attention.layer_norm_rms_epsilon']):.6g}"),
        # both spellings, so that other readers of the directory (vLLM, older transformers) find theirs
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _expanded(stored: Stored, order: torch.Tensor | None) -> torch.Tensor:
    """In fp32, its rows in that order."""
    values = torch.from_numpy(stored.values())
    return values if order is None else values[order]


def split_half_rope(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo ggml's interleaved rotary layout of a query or key projection.

    Args:
        weight: [heads * d, hidden], rows of a head ordered (0, d/2, 1, d/2 + 1, ...).
        heads: number of heads in ``weight``.

    Returns:
        [heads * d, hidden], rows of a head ordered (0, 1, ..., d - 1), as transformers rotates them.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _places(tensors: dict[str, Stored], config: dict[str, Any]) -> Iterator[tuple[str, Stored, torch.Tensor | None]]:
    """Of each tensor its parameter's name in transformers' model, and which of its rows is which there (None: all)."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    fixed = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    fixed["output.weight"] = "lm_head.weight"
    for name, tensor in tensors.items():
        block = _BLOCK.fullmatch(name)
        if name in fixed:
            yield fixed[name], tensor, None
        elif block is None or block[2] not in _LAYER_TENSORS or int(block[1]) >= config["num_hidden_layers"]:
            raise ModelLoadError(f"GGUF tensor {name!r} has no place in a Llama model; the file is of another family.")
        else:
            order = None
            if block[2] in heads:
                order = split_half_rope(torch.arange(tensor.shape[0])[:, None], heads[block[2]])[:, 0].contiguous()
            yield f"model.layers.{block[1]}.{_LAYER_TENSORS[block[2]]}.weight", tensor, order


def _state_dict(tensors: dict[str, Stored], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: _expanded(stored, order).to(torch.bfloat16) for name, stored, order in _places(tensors, config)}


def _vocabulary(facts: dict[str, Any]) -> tuple[Any, Any]:
    return facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")


def _write_tokenizer(facts: dict[str, Any], out_dir: Path, source: Path) -> None:
    kind, pre = _vocabulary(facts)
    if (kind, pre) != SMOLLM:
        raise ModelLoadError(
            f"{source} has a {kind!r} vocabulary with pre-tokenizer {pre!r}; only gpt2/smollm is known."
        )
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, facts["tokenizer.ggml.token_type"]) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(out_dir / "tokenizer.json"))

    def named(role: str) -> str | None:
        index = facts.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index]

    special = {"bos_token": named("bos"), "eos_token": named("eos"), "unk_token": named("unknown")}
    special["pad_token"] = named("padding") or special["eos_token"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(facts["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **{role: token for role, token in special.items() if token is not None},
    }
    template = facts.get("tokenizer.chat_template")
    if template:
        # in both places: readers disagree on where they look
        settings["chat_template"] = template
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(out_dir / "tokenizer_config.json", settings)
