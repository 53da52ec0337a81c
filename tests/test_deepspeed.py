"""DeepSpeed on CPUs: the real library, two processes, stage 2, against one process without it."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from fsd_infer.targets.target import Target
from fsd_train.cli import main as cli
from tests.families import load_head
from tests.test_strategies import ACCUMULATE, LR, RANKS, STEPS, command, per_step, toys
from tests.train_toys import started

__all__ = ["toys"]  # a fixture


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's without its insistence on CUDA: DeepSpeed itself runs on CPUs, by gloo."""

    def __init__(self, stage: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
        super().__init__(stage=stage, logging_batch_size_per_gpu=1, process_group_backend="gloo")

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # DeepSpeed wants an index

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        # DeepSpeed would compile collectives by shared memory, for minutes; gloo has them too
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Losses(Callback):
    """Writes the losses of a rank's batches to ``losses-<rank>.json``."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (self.directory / f"losses-{trainer.global_rank}.json").write_text(json.dumps(self.losses))


def fit(toys: Path, out: Path, accumulate: int, *more: str) -> list[str]:
    """The command of the strategies' tests; DeepSpeed keeps states and weights its own way, so fewer callbacks."""
    argv = command(toys, out, accumulate, *more)
    config = json.loads((out / "recipe.json").read_text())
    config["trainer"]["log_every_n_steps"] = 1000  # the logged loss is the rank's own then
    _, checkpoints, _, export = config["trainer"]["callbacks"]
    losses = {"class_path": "tests.test_deepspeed.Losses", "init_args": {"directory": str(out)}}
    config["trainer"]["callbacks"] = [losses, checkpoints, export]
    (out / "recipe.json").write_text(json.dumps(config))
    return argv


def run(argv: list[str], cwd: Path) -> None:
    done = started(argv, cwd)
    assert done.returncode == 0, done.stderr[-4000:]


def losses(out: Path) -> list[float]:
    """Of each step, the mean over ranks and batches."""
    ranks = [json.loads(path.read_text()) for path in sorted(out.glob("losses-*.json"))]
    together = [sum(batch) / len(ranks) for batch in zip(*ranks, strict=True)]
    return per_step(together, RANKS * ACCUMULATE // len(ranks))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_resumes_and_exports_on_cpus(stage: int, toys: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    assert cli(fit(toys, tmp_path / "single", RANKS * ACCUMULATE)) == 0
    expected = losses(tmp_path / "single")
    assert len(expected) == STEPS

    strategy = {"class_path": "tests.test_deepspeed.CPUDeepSpeedStrategy", "init_args": {"stage": stage}}
    spread = ["--trainer.strategy", json.dumps(strategy), "--trainer.devices", str(RANKS)]
    run(fit(toys, tmp_path / "whole", ACCUMULATE, *spread), tmp_path)
    assert losses(tmp_path / "whole") == pytest.approx(expected, rel=2e-4)

    target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32, device="cpu")
    whole, ours = (load_head(tmp_path / name / "head", target).state_dict() for name in ("whole", "single"))
    torch.testing.assert_close(whole, ours, rtol=2**-7, atol=0.1 * LR)  # exported in bf16

    (half,) = (tmp_path / "whole" / "ckpt").glob("*step=2.ckpt")
    run(fit(toys, tmp_path / "again", ACCUMULATE, *spread, "--ckpt_path", str(half)), tmp_path)
    assert losses(tmp_path / "again") == pytest.approx(expected[2:], rel=2e-4)
