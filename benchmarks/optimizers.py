"""Optimizers and weights of later steps for a head of the built-in model, from nothing, at equal CPU time.

    python -m benchmarks.optimizers --json benchmarks/results/optimizers.json

Each arm trains the head of recipes/smollm2-135m.yaml in one thread. Its number of steps follows from the CPU seconds of
its first steps, so that all arms take the same time, also on a busy machine. Arms take turns, seed by seed. The figures
are teacher-forced on held-out answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.optim import AdamW

from benchmarks.recorded import BUILT_IN, ROOT, parser_of, record_main
from fsd_core.tables import table
from fsd_infer import Target
from fsd_train.data import AnswersDataModule, cache_features
from fsd_train.losses import EagleLoss
from fsd_train.models import EagleModule, HeadOptions, MuonAdamW, WarmupCosine

HEAD = HeadOptions(final_norm=True, feature_scale=True, fused_layers=[5, 14, 23])
ARMS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": partial(AdamW, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95))},
    "muon": {"optimizer": partial(MuonAdamW, lr=1e-3, weight_decay=0.01)},
    "adamw, step_decay 1": {
        "optimizer": partial(AdamW, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95)), "step_decay": 1.0,
    },
}  # fmt: skip
TRIED, TOKENS, WARMUP = 6, 1152, 8  # steps whose time is taken; tokens of a batch; steps of warm-up


class _CPUClock(Callback):
    """CPU seconds of the process at each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, *args: Any, **options: Any) -> None:
        self.seconds.append(time.process_time())

    @property
    def each(self) -> float:
        return (self.seconds[-1] - self.seconds[1]) / (len(self.seconds) - 2)


def train(arm: str, seed: int, steps: int, data: AnswersDataModule, out: Path) -> tuple[dict[str, float], float]:
    """Train an arm from nothing; return its figures on held-out answers, and the CPU seconds of a step."""
    seed_everything(seed, verbose=False)
    clock = _CPUClock()
    options = {"step_decay": 0.8, **ARMS[arm]}
    module = EagleModule(
        BUILT_IN, HEAD, draft_vocab_size=8192, context_ids=True, chain_share=0.35, noise=0.1, seed=seed,
        loss=EagleLoss(w_feature=0.3, w_ce=1.0), unroll_steps=4, eval_steps=4, eval_rules=["exact"],
        lr_scheduler=partial(WarmupCosine, warmup_steps=WARMUP), **options,
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, limit_val_batches=1.0, val_check_interval=steps, logger=False,
        check_val_every_n_epoch=None, num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, use_distributed_sampler=False, default_root_dir=out, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(module, data)
    wanted = ("val_tau", "val_loss", "val_agreement_0", "val_agreement_3")
    return {name: float(trainer.callback_metrics[name]) for name in wanted}, clock.each


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train all arms; return the runs."""
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    with TemporaryDirectory() as scratch:
        features = Path(args.work or scratch) / "features"

        def rows(**more: Any) -> AnswersDataModule:
            file = str(ROOT / "data" / "smollm2-135m-answers.jsonl.gz")
            return AnswersDataModule([file], max_length=512, batch_tokens=TOKENS, validation_fraction=0.1, **more)

        data = rows()
        data.setup()
        assert data.train_set is not None and data.validation_set is not None
        target = Target.from_pretrained(BUILT_IN, dtype=torch.bfloat16)
        target.capture_layers(HEAD.capture_layers(target))
        for part, share in ((data.validation_set, 0.15), (data.train_set, 0.85)):
            least = sum(len(ids) for ids in part.texts)
            done = 0 if not (features / "index.json").exists() else args.tokens * 0.15
            cache_features(target, part.texts, features, max_tokens=int(min(least, args.tokens * share) + done))
        cost = {arm: train(arm, 0, TRIED, rows(features=str(features)), Path(scratch))[1] for arm in ARMS}
        for seed in range(args.seeds):
            for arm in ARMS:
                steps = max(round(args.seconds / cost[arm]), 2)
                found, _ = train(arm, seed, steps, rows(features=str(features)), Path(scratch))
                runs.append({"arm": arm, "seed": seed, "steps": steps, "cpu_seconds_per_step": cost[arm], **found})
                print(runs[-1], file=sys.stderr, flush=True)
    return {"runs": runs}


def report(record: dict[str, Any]) -> str:
    """Return a table of the arms, means over seeds."""
    lines = []
    for arm in dict.fromkeys(run["arm"] for run in record["runs"]):
        own = [run for run in record["runs"] if run["arm"] == arm]
        figures = [
            f"{mean(run[name] for run in own):.3f}" for name in ("val_tau", "val_agreement_0", "val_agreement_3")
        ]
        lines.append([arm, str(own[0]["steps"]), *figures, " ".join(f"{run['val_tau']:.3f}" for run in own)])
    return table(["arm", "steps", "val_tau", "first draft agrees", "fourth", "val_tau by seed"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = parser_of(
        "benchmarks.optimizers", __doc__, seconds=(110.0, "CPU seconds of training per arm and seed"),
        seeds=(2, "number of seeds"), tokens=(40000, "tokens of answers"), json=None,
        work=(None, "directory for the features; default: a temporary one"),
    )  # fmt: skip
    return record_main("benchmarks.optimizers", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
