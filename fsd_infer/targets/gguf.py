"""Expand a llama-architecture GGUF file into an ordinary Hugging Face model directory.

Written without the model and tokenizer converters of transformers on purpose: theirs lose the pre-tokenizer of some
vocabularies (SmolLM2 splits digits off *before* the byte-level step, which changes the ids of numbered lists).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fsd_infer.errors import ModelLoadError

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
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def expand_llama_gguf(source: Path, out_dir: Path) -> None:
    """Write config, generation config, bf16 safetensors, tokenizer and chat template of ``source`` to ``out_dir``.

    Args:
        source: a GGUF file of architecture "llama" with a byte-level BPE vocabulary, of any ggml type gguf-py reads.
        out_dir: an existing directory; files of the same names are overwritten.

    Raises:
        ModelLoadError: the file is not a GGUF file, or of an architecture or vocabulary this does not know.
    """
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise ModelLoadError(f"{source} is not a readable GGUF file ({error}); fetch it again.") from error
    facts = {key: field.contents() for key, field in reader.fields.items()}
    family = facts.get("general.architecture")
    if family != "llama":
        raise ModelLoadError(f"{source} holds architecture {family!r}; only 'llama' GGUF files can be expanded.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(facts, vocab_size=int(tensors["token_embd.weight"].shape[1]), tied="output.weight" not in tensors)
    _write_json(out_dir / "config.json", config)
    _write_json(
        out_dir / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    weights = out_dir / "model.safetensors"
    save_file(_state_dict(tensors, config), weights, metadata={"format": "pt"})
    weights.chmod((out_dir / "config.json").stat().st_mode)  # safetensors makes it private to the user
    _write_tokenizer(facts, out_dir, source)


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


def _dequantized(tensor: Any) -> torch.Tensor:
    """One GGUF tensor -> fp32 [rows, columns] or [columns] (GGUF lists its dimensions fastest first)."""
    values = np.array(
        dequantize(tensor.data, tensor.tensor_type), dtype=np.float32
    )  # a copy: the file is mapped read-only
    return torch.from_numpy(values.reshape([int(size) for size in reversed(tensor.shape)]))


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


def _state_dict(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    fixed = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    fixed["output.weight"] = "lm_head.weight"
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name in fixed:
            state[fixed[name]] = _dequantized(tensor).to(torch.bfloat16)
            continue
        block = _BLOCK.fullmatch(name)
        if block is None or block[2] not in _LAYER_TENSORS:
            raise ModelLoadError(f"GGUF tensor {name!r} has no place in a Llama model; the file is of another family.")
        weight = _dequantized(tensor)
        if block[2] in heads:
            weight = split_half_rope(weight, heads[block[2]])
        state[f"model.layers.{block[1]}.{_LAYER_TENSORS[block[2]]}.weight"] = weight.to(torch.bfloat16).contiguous()
    return state


def _write_tokenizer(facts: dict[str, Any], out_dir: Path, source: Path) -> None:
    kind, pre = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre != "smollm":
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
