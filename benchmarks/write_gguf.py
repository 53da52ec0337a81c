"""Write a GGUF file of a Llama checkpoint, with its matrices in blocks.

    python -m benchmarks.write_gguf MODEL_DIR OUT_DIR [--kind Q4_1] [--rest Q8_0]

OUT_DIR gets ``model.gguf`` and the tokenizer of MODEL_DIR. gguf-py quantises to Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0, by
rounding to the nearest code. Public files use better roundings and K kinds; their size and speed are alike.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, PretrainedConfig

REST = ("token_embd", "output_norm", "output")  # tensors outside the decoder layers
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def interleave_rope(weight: Tensor, heads: int) -> Tensor:
    """Put rows [heads · d, ...] of queries or keys in ggml's rotary order."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def facts_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the sizes of a Llama-style model, by the name of the writer's method."""
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": getattr(config, "rms_norm_eps", 1e-5),
        "rope_freq_base": config.rope_parameters["rope_theta"],
    }


def names_of(layers: int) -> dict[str, str]:
    """Return ggml's name of each module of transformers, both without ``.weight``."""
    return {theirs: ours for theirs, (_, ours) in get_tensor_name_map(MODEL_ARCH.QWEN3, layers).mapping.items()}


def finish(writer: GGUFWriter) -> None:
    """Write the file of a writer that has all its facts and tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of a checkpoint's tensors."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)


def write(source: Path, out_dir: Path, kind: str, rest: str) -> Path:
    """Write ``out_dir/model.gguf``; embeddings and LM head are of kind ``rest``."""
    config = AutoConfig.from_pretrained(source)
    if config.model_type != "llama":
        raise SystemExit(f"{source} is a {config.model_type} model; only llama checkpoints can be written.")
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "model.gguf"
    writer = GGUFWriter(path, "llama")
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    for name, value in {**facts_of(config), **ends}.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    names = names_of(config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, value in tqdm(tensors(source), desc="tensors"):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        ours = names[name.removesuffix(".weight")]
        head_count = heads.get(ours.rpartition(".")[2])
        numbers = (value if head_count is None else interleave_rope(value, head_count)).float().numpy()
        if value.dim() < 2:
            writer.add_tensor(f"{ours}.weight", numbers)
            continue
        stored = GGMLQuantizationType[rest if ours in REST else kind]
        writer.add_tensor(f"{ours}.weight", quantize(numbers, stored), raw_dtype=stored)
    finish(writer)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copy(source / name, out_dir / name)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.write_gguf", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("source", type=Path, help="a Llama checkpoint: config.json, safetensors and tokenizer")
    parser.add_argument("out_dir", type=Path, help="gets model.gguf and the tokenizer")
    parser.add_argument("--kind", choices=KINDS, default="Q4_1", help="of the layers' matrices (%(default)s)")
    parser.add_argument("--rest", choices=KINDS, default="Q8_0", help="of embeddings and LM head (%(default)s)")
    args = parser.parse_args(argv)
    with torch.inference_mode():
        path = write(args.source, args.out_dir, args.kind, args.rest)
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
