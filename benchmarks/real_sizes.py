"""Rehearse training and decoding on a true config with random weights: time and memory of every command.

    python -m benchmarks.real_sizes qwen3-0.6b --directory DIR --json benchmarks/results/real-sizes-qwen3-0.6b.json

Runs new-recipe, estimate, cache-features, two steps of fit, two more after a resume, export and a decode, each in a
process of its own. Weights and answers are random, so the record says nothing about quality. If it is interrupted, a
rerun skips the commands that have ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.workplace import shown_command
from fsd_infer.errors import FsdError

_KEYS = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
_SIZES = {
    "qwen3-0.6b": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960),
    "qwen3-1.7b": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 40960),
    "llama-3.2-1b": ("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072),
    "gemma-3-1b": ("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 256, 32768),
    "qwen3-30b-a3b": ("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128, 40960),
}
_NAMES = ("model_type", *_KEYS.split(), "max_position_embeddings")
SHAPES: dict[str, dict[str, Any]] = {name: dict(zip(_NAMES, sizes, strict=True)) for name, sizes in _SIZES.items()}
SHAPES["qwen3-30b-a3b"] |= {
    "tie_word_embeddings": False, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}  # fmt: skip


def config_of(shape: str, layers: int | None = None, experts: int | None = None) -> Any:
    """Return the config of a shape, cut to so many layers and experts per layer."""
    from transformers import AutoConfig

    sizes = {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | SHAPES[shape]
    config = AutoConfig.for_model(**sizes | ({"num_experts": experts} if experts else {}))
    config.num_hidden_layers = layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def prompt_length(length: int) -> int:
    """Return the tokens before the answer in a row of ``length`` tokens."""
    return max(48, length - 1024)


def make_target(args: argparse.Namespace) -> None:
    """Write weights, tokenizer, answers and prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fsd_infer.targets.loading import builtin_dir

    torch.manual_seed(0)
    config = config_of(args.shape, args.layers, args.experts)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(args.directory / "target")
    AutoTokenizer.from_pretrained(builtin_dir("smollm2-135m")).save_pretrained(args.directory / "target")
    draw, rows = random.Random(0), []
    for number in range(args.rows):
        ids = [draw.randrange(3, config.vocab_size) for _ in range(args.length)]
        begin = prompt_length(args.length)
        rows.append(json.dumps({"id": str(number), "prompt_ids": ids[:begin], "response_ids": ids[begin:]}))
    (args.directory / "answers.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (args.directory / "prompt.txt").write_text("word " * args.prompt, encoding="utf-8")


def measure(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a command; return its peak of resident memory in bytes, its processor and wall seconds, and its output.

    A process starts with the peak of the one that made it, so this one imports no torch before all have run.
    """
    print(name, file=sys.stderr, flush=True)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise FsdError(f"{name} failed with status {os.waitstatus_to_exitcode(status)}; its output is above.")
    return {
        "peak_bytes": 1024 * usage.ru_maxrss, "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "seconds": time.perf_counter() - start, "said": said,
    }  # fmt: skip


def commands(directory: Path, length: int) -> dict[str, list[str]]:
    """The commands by name; ``length``: tokens whose features are cached."""
    target, recipe, run, head = (str(directory / name) for name in ("target", "recipe.yaml", "run", "head"))
    checkpoint = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                  "init_args": {"dirpath": run, "filename": "two", "every_n_train_steps": 2}}  # fmt: skip
    clock = {"class_path": "benchmarks.step_times.StepTimes", "init_args": {"path": str(directory / "times.json")}}
    fit = ["fsd_train.cli", "fit", "--config", recipe, f"--trainer.default_root_dir={run}",
           f"--trainer.callbacks={json.dumps([checkpoint, clock])}", "--trainer.logger=false",
           "--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false"]  # fmt: skip
    return {
        "new-recipe": ["fsd_train.cli", "new-recipe", "--target", target, "--output", recipe,
                       "--data", str(directory / "answers.jsonl")],
        "estimate": ["fsd_train.cli", "estimate", "--config", recipe],
        "cache-features": ["fsd_train.cli", "cache-features", "--config", recipe, "--max-tokens", str(length),
                           "--output", str(directory / "features")],
        "fit": [*fit, "--trainer.max_steps=2", "--overwrite=true"],
        "resume": [*fit, "--trainer.max_steps=4", f"--ckpt_path={run}/two.ckpt"],
        "export": ["fsd_train.cli", "export", f"{run}/two.ckpt", head],
        "decode": ["fsd_infer.cli.main", "generate", "--target", target, "--drafter", head, "--max-new-tokens", "8",
                   "--prompt-file", str(directory / "prompt.txt")],
    }  # fmt: skip


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    recipe, kept = args.directory / "recipe.yaml", args.directory / "measured.json"
    found: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.is_file() else {}
    for name, words in commands(args.directory, args.length).items():
        if name in found:
            continue
        if name == "new-recipe":
            recipe.unlink(missing_ok=True)
        found[name] = measure(name, words)
        if name == "new-recipe":
            text = recipe.read_text("utf-8").replace("accelerator: auto", "accelerator: cpu")
            sizes = {"max_length": args.length, "batch_tokens": args.batch_tokens, "accumulate_grad_batches": 1,
                     "draft_vocab_size": args.draft_vocab or "null"}  # fmt: skip
            for key, value in sizes.items():
                text = re.sub(rf"( {key}: )\w+", rf"\g<1>{value}", text)
            recipe.write_text(text, "utf-8")
        kept.write_text(json.dumps(found), "utf-8")
    kept.unlink()
    text = recipe.read_text("utf-8")
    said = {name: each.pop("said") for name, each in found.items()}["estimate"]
    shown = [line for line in said.splitlines() if line.startswith(("memory", "time"))]
    predicted = 1e9 * float(re.search(r"memory per device +([\d.]+) GB", said)[1])  # type: ignore[index]
    seconds = float(re.search(r"steps of ([\d.]+) s", said)[1])  # type: ignore[index]
    steps = json.loads((args.directory / "times.json").read_text("utf-8"))

    from benchmarks.recorded import settings_of
    from benchmarks.step_times import product_rate
    from fsd_bench.environment import environment
    from fsd_bench.record import write_record
    from fsd_train.commands.estimate import head_recipe, step_work

    work = {part.name: part.times * part.operations for part in step_work(head_recipe(recipe))}
    record = {
        "environment": environment(command),
        "settings": settings_of(args) | {"directory": args.directory.name, "json": args.json.name},
        "recipe": dict(re.findall(r"^ +(draft_vocab_size|unroll_steps|layout): (\S+)", text, re.M)),
        "commands": found, "estimate": shown,
        "memory": {"predicted_bytes": predicted, "peak_bytes": found["resume"]["peak_bytes"],
                   "peak_over_predicted": found["resume"]["peak_bytes"] / predicted},
        "step": {"predicted_seconds": seconds, "seconds": steps[-1][1], "cpu_seconds": steps[-1][0],
                 "operations": work, "arithmetic_seconds": sum(work.values()) / product_rate()},
    }  # fmt: skip
    write_record(args.json, record)
    return record


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description="Rehearse training on a true config with random weights.")
    parser.add_argument("shape", choices=SHAPES, help="the config")
    parser.add_argument("--directory", type=Path, required=True, help="directory of the model and the run")
    parser.add_argument("--json", type=Path, required=True, help="file of the record")
    parser.add_argument("--layers", type=int, help="layers of the target (default: the config's)")
    parser.add_argument("--experts", type=int, help="experts of each layer (default: the config's)")
    sizes = {
        "length": (512, "tokens of a row"), "batch-tokens": (1024, "tokens of a batch"), "rows": (16, "rows"),
        "draft-vocab": (32000, "size of the draft vocabulary, 0 for the target's"),
        "prompt": (128, "words of the prompt"),
    }  # fmt: skip
    for name, (default, what) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--make", action="store_true", help="make the model and answers, then stop")
    args = parser.parse_args(words)
    args.directory = args.directory.resolve()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.make:
        make_target(args)
        return 0
    if not (args.directory / "target" / "config.json").is_file():
        measure("make", ["benchmarks.real_sizes", *words, "--make"])
    record = run(args, shown_command("benchmarks.real_sizes", words))
    print(json.dumps({name: record[name] for name in ("commands", "memory", "step")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
