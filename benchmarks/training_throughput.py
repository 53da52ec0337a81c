"""How many supervised tokens per second training takes, through the whole data path: cache, loader, Trainer.

A recipe's model is trained for some steps with each wanted number of unrolled steps, on a feature cache made of a
part of the answers in a temporary directory. The rate counts predictions that step 0 supervises (answer tokens but
the first of each answer), each once however often the head is unrolled, and the wait for data; not validation.

Run: python -m benchmarks.training_throughput --json benchmarks/results/training-throughput.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.recorded import record_main, settings_of
from fsd_bench.environment import environment
from fsd_infer.cli.report import number, table
from fsd_infer.errors import FsdError
from fsd_infer.target import Target
from fsd_train.data import AnswersDataModule, AnswersDataset, read_answers
from fsd_train.eagle_module import EagleModule
from fsd_train.features import cache_features
from fsd_train.unroll import supervised


class StepClock(Callback):
    """Notes seconds and supervised tokens of every training step; a step begins where the one before ended."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self._last: float | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._last is None:
            self._last = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self.seconds.append(now - (self._last or now))
        self._last = now
        self.tokens.append(int(supervised(batch["loss_mask"], 1).sum()))


def choose_rows(rows: AnswersDataset, min_answer_share: float) -> AnswersDataset:
    """Rows with at least this share of answer tokens, as `fsd-train cache-features --min-answer-share` keeps them."""
    keep = [
        i
        for i in range(len(rows))
        if int(rows[i]["loss_mask"].sum()) >= max(3, min_answer_share * len(rows[i]["input_ids"]))
    ]
    if not keep:
        raise FsdError("no row has enough answer tokens: lower --min-answer-share, or give other --data.")
    return rows.subset(keep)


def make_cache(model: dict[str, Any], args: argparse.Namespace, directory: str) -> int:
    """Cache the features of ``args.rows`` rows, evenly spread over the data; returns their tokens."""
    target = Target.from_pretrained(model["target"], dtype=torch.bfloat16)
    target.watch((model.get("head") or {}).get("fused_layers") or [])
    target.check_lm_head()
    found, _ = read_answers(args.data, max_length=args.max_length, vocab_size=target.vocab_size)
    found = choose_rows(found, args.min_answer_share)
    count = min(args.rows, len(found))
    sequences = [found[index * len(found) // count]["input_ids"] for index in range(count)]
    return cache_features(target, sequences, directory, progress=False).tokens


def measure(
    model: dict[str, Any], trainer: dict[str, Any], unroll: int, args: argparse.Namespace, features: str
) -> dict[str, Any]:
    """Train ``args.warmup + args.steps`` steps: {"seconds", "tokens"} of each measured one and their rate."""
    clock = StepClock()
    data = AnswersDataModule(
        args.data, validation_fraction=0.0, max_length=args.max_length, batch_tokens=args.batch_tokens,
        features=features, seed=args.seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        fit = Trainer(
            accelerator="cpu", devices=1, precision=trainer.get("precision", "32-true"),
            gradient_clip_val=trainer.get("gradient_clip_val"), max_steps=args.warmup + args.steps, max_epochs=-1,
            limit_val_batches=0, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=scratch, callbacks=[clock],
        )  # fmt: skip
        fit.fit(EagleModule(**{**model, "unroll_steps": unroll, "seed": args.seed}), datamodule=data)
    seconds, tokens = clock.seconds[args.warmup :], clock.tokens[args.warmup :]
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": sum(tokens) / sum(seconds)}


def read_recipe(path: str | Path, changes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(model, trainer) of a recipe, the model's options changed by ``KEY=VALUE``. Raises FsdError."""
    recipe = yaml.safe_load(Path(path).read_text())
    model = dict(recipe["model"])
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise FsdError(f"--set {change!r}: write KEY=VALUE, an option of the model.")
        model[key] = yaml.safe_load(value)
    return model, recipe.get("trainer") or {}


def report(record: dict[str, Any]) -> str:
    """The record's table."""
    rows = [
        [
            f"{facts['unroll_steps']}",
            number(facts["median_seconds"], 3),
            number(facts["tokens_per_second"], 0),
            ", ".join(f"{run['tokens_per_second']:.0f}" for run in facts["runs"]),
        ]
        for facts in record["unrolled"]
    ]
    return table(["unrolled steps", "s/step", "supervised tok/s", "each run"], rows)


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_throughput", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the record")
    parser.add_argument("--recipe", default="recipes/smollm2-135m.yaml", help="whose model and precision are taken")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another option of the model, as in --set noise=0",
    )
    parser.add_argument("--data", nargs="+", default=["data/smollm2-135m-answers-2.jsonl.gz"], help="answers")
    parser.add_argument("--unroll", default="1,3", help="numbers of unrolled steps, comma-separated")
    parser.add_argument("--rows", type=int, default=200, help="answers that are cached")
    parser.add_argument("--steps", type=int, default=25, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--repeats", type=int, default=2, help="runs with each number of unrolled steps, in turns")
    parser.add_argument("--batch-tokens", type=int, default=2304)
    parser.add_argument("--max-length", type=int, default=768)
    parser.add_argument("--min-answer-share", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The whole measurement; returns the record. Raises FsdError."""
    torch.set_num_threads(args.threads)
    model, trainer = read_recipe(args.recipe, args.set)
    unrolls = [int(word) for word in args.unroll.split(",")]
    runs: dict[int, list[dict[str, Any]]] = {unroll: [] for unroll in unrolls}
    with tempfile.TemporaryDirectory() as features:
        print(f"caching the features of {args.rows} answers", file=sys.stderr, flush=True)
        cached = make_cache(model, args, features)
        for repeat in range(args.repeats):
            for unroll in unrolls:
                found = measure(model, trainer, unroll, args, features)
                runs[unroll].append(found)
                rate = found["tokens_per_second"]
                print(f"run {repeat + 1}, {unroll} unrolled: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
    return {
        "environment": environment(command),
        "settings": settings_of(args),
        "model": model,
        "precision": trainer.get("precision", "32-true"),
        "cached_tokens": cached,
        "unrolled": [
            {
                "unroll_steps": unroll,
                "tokens_per_second": statistics.median(found["tokens_per_second"] for found in each),
                "median_seconds": statistics.median(value for found in each for value in found["seconds"]),
                "runs": each,
            }
            for unroll, each in runs.items()
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return record_main("benchmarks.training_throughput", build_parser(), run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
