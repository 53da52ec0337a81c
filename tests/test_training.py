"""Training of a toy head: it learns, it resumes, its checkpoints hold the head and nothing of the target."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fsd_infer.errors import DataError
from fsd_infer.targets.target import Target
from fsd_train.callbacks import ExportHead, LossCurve, TokenRate
from fsd_train.cli import main as cli
from fsd_train.data import AnswersDataModule
from fsd_train.models.eagle import EagleModule
from tests import train_toys
from tests.families import load_head
from tests.train_toys import assert_same, fit_command, in_bf16, in_recipe, logged, save_toy_target, started

STEPS = 24
AVERAGING = {
    "class_path": "lightning.pytorch.callbacks.EMAWeightAveraging",
    "init_args": {"decay": 0.9, "use_buffers": False},
}


def make(toys: Path, cached: bool = True, **options: Any) -> tuple[EagleModule, AnswersDataModule]:
    values: dict[str, Any] = {
        "head": {"final_norm": True, "feature_scale": True}, "draft_vocab_size": 40, "unroll_steps": 2,
        "chain_share": 0.6, "loss_args": {"w_feature": 0.3, "w_ce": 1.0}, "noise": 0.1, "lr": 3e-3, "warmup_steps": 4,
        "eval_steps": 3, **options,
    }  # fmt: skip
    return train_toys.eagle_module(toys, **values), train_toys.answers_of(
        toys, features=str(toys / "features") if cached else None
    )


def fit(
    toys: Path, out: Path, steps: int = STEPS, ckpt: Path | None = None, max_time: str | None = None, **options: Any
) -> tuple[EagleModule, Trainer]:
    callbacks = [ExportHead(), LossCurve(every_n_train_steps=2), TokenRate(window=3)]
    made = train_toys.trainer(out, steps, *callbacks, every=5, max_time=max_time, val_check_interval=12)
    module, data = make(toys, **options)
    made.fit(module, data, ckpt_path=ckpt, weights_only=True)
    return module, made


@pytest.fixture(scope="module")
def whole(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[EagleModule, Trainer, Path]:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    return *fit(toys, out), out


def test_the_loss_falls(toys: Path, tmp_path: Path) -> None:
    module, trainer = fit(toys, tmp_path, steps=80, lr=1e-2)
    losses = logged(trainer.log_dir, "loss")
    assert len(losses) == 80
    assert sum(losses[-8:]) < 0.88 * sum(losses[:8])  # the target's own entropy is most of what remains
    agreement = logged(trainer.log_dir, "agreement_0")
    assert sum(agreement[-8:]) > sum(agreement[:8]) + 0.4
    assert all(0 <= share <= 1 for share in logged(trainer.log_dir, "val_agreement_0"))
    assert all(1 <= tau <= 4 for tau in logged(trainer.log_dir, "val_tau"))
    assert min(logged(trainer.log_dir, "tokens_per_s")) > 0


def test_a_run_leaves_checkpoints_of_the_head_alone_and_curves(
    whole: tuple[EagleModule, Trainer, Path], toys: Path, tmp_path: Path
) -> None:
    module, trainer, out = whole
    logs, checkpoint = Path(trainer.log_dir or ""), out / "ckpt" / "step=20.ckpt"
    assert (logs / "curves.png").read_bytes()[:4] == b"\x89PNG"
    record = json.loads((logs / "head" / "config.json").read_text())["training"]
    assert record["steps"] == STEPS and record["hyperparameters"]["unroll_steps"] == 2
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert state and all(name.startswith("head.") for name in state)
    size = sum(p.numel() for p in module.head.parameters()) * 4
    assert checkpoint.stat().st_size < 3 * size + 200_000  # weights and two moments
    assert cli(["export", str(checkpoint), str(tmp_path / "head")]) == 0
    target = Target.from_pretrained(str(toys / "target"))
    for head, weights in ((logs / "head", module.state_dict()), (tmp_path / "head", state)):
        found = load_head(head, target).state_dict()
        assert_same(found, {name: in_bf16(weights[f"head.{name}"]) for name in found})


def test_muon_learns_and_resumes(toys: Path, tmp_path: Path) -> None:
    whole, trainer = fit(toys, tmp_path / "whole", optimizer="muon", lr=1e-2)
    losses = logged(trainer.log_dir, "loss")
    assert sum(losses[-5:]) < sum(losses[:5])
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == pytest.approx([0.0, 0.0], abs=1e-6)
    half = tmp_path / "whole" / "ckpt" / "step=10.ckpt"
    again, _ = fit(toys, tmp_path / "again", optimizer="muon", lr=1e-2, ckpt=half)
    assert_same(again.state_dict(), whole.state_dict())


def test_cached_and_online_features_train_alike(
    whole: tuple[EagleModule, Trainer, Path], toys: Path, tmp_path: Path
) -> None:
    module, trainer = fit(toys, tmp_path, cached=False)
    online, cached = logged(trainer.log_dir, "loss"), logged(whole[1].log_dir, "loss")
    assert online[:5] == pytest.approx(cached[:5], rel=0.02)
    assert online != cached  # bf16 rounding


def test_export_with_another_draft_vocabulary(
    whole: tuple[EagleModule, Trainer, Path], toys: Path, tmp_path: Path
) -> None:
    checkpoint = str(whole[2] / "ckpt" / "step=20.ckpt")
    target = Target.from_pretrained(str(toys / "target"))
    answers = str(toys / "answers.jsonl")
    size = target.vocab_size - 1
    assert cli(["export", checkpoint, str(tmp_path / "head"), "--draft-vocab-size", str(size), "--data", answers]) == 0
    head = load_head(tmp_path / "head", target)
    assert head.draft_ids is not None and len(head.draft_ids) == size == head.config.draft_vocab_size
    assert bool((head.draft_ids.diff() > 0).all())
    assert set(target.eos_token_ids) <= set(head.draft_ids.tolist())
    assert cli(["export", checkpoint, str(tmp_path / "other"), "--draft-vocab-size", str(size)]) == 2


def test_time_limit_ends_the_run_with_its_schedule_done(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10_000))  # every look at the clock takes a second
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time.monotonic", lambda: float(next(clock)))
    _, trainer = fit(toys, tmp_path, steps=1000, max_time="00:00:01:00")
    assert 5 < trainer.global_step < 30
    assert trainer.optimizers[0].param_groups[0]["lr"] < 3e-4  # a tenth of the peak


def test_another_targets_features_are_refused(toys: Path, tmp_path: Path) -> None:
    save_toy_target(tmp_path / "target", seed=1)
    for name in ("answers.jsonl", "features"):
        (tmp_path / name).symlink_to(toys / name)
    with pytest.raises(DataError, match="features.*another target.*weights_sha256"):
        fit(tmp_path, tmp_path / "run")


def command(toys: Path, out: Path, *more: str) -> list[str]:
    checkpoints = in_recipe("ModelCheckpoint", dirpath=out / "ckpt", every_n_train_steps=5, save_last=True)
    callbacks = [checkpoints, in_recipe("ExportHead", directory=out / "head")]
    trainer = {"max_steps": 30, "log_every_n_steps": 1, "limit_val_batches": 0, "callbacks": callbacks}
    model = {"target": toys / "target", "draft_vocab_size": 40, "noise": 0.1}
    data = {"train_files": [toys / "answers.jsonl"], "features": toys / "features", "batch_tokens": 128}
    return [*fit_command(out, trainer, model, data), *more]


def test_a_recipe_for_another_target_cannot_resume(
    whole: tuple[EagleModule, Trainer, Path], toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own model section counts, not the checkpoint's."""
    other = save_toy_target(tmp_path / "other", seed=1)
    resume = ["--model.target", str(other), "--ckpt_path", str(whole[2] / "ckpt" / "step=20.ckpt")]
    assert cli(command(toys, tmp_path, *resume, "--data.features", "null")) == 2
    said = capsys.readouterr().err
    assert f"was trained on another target ({toys}/target, weights" in said and "model.initial_head" in said


class Kill(Callback):
    """Ends the process after twelve steps, between the batches of the next one."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 12:
            os.kill(os.getpid(), signal.SIGKILL)


def test_killed_run_resumes(toys: Path, tmp_path: Path) -> None:
    options = [
        "--trainer.accumulate_grad_batches", "2", "--model.unroll_steps", "2",
        "--model.chain_share", "0.6",
        "--trainer.callbacks+", json.dumps(AVERAGING),
    ]  # fmt: skip
    argv = command(toys, tmp_path / "killed", *options)
    done = started([*argv, "--trainer.callbacks+", "tests.test_training.Kill"], tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    last = tmp_path / "killed" / "ckpt" / "last.ckpt"
    assert cli([*argv, "--ckpt_path", str(last)]) == 0
    assert cli(command(toys, tmp_path / "straight", *options)) == 0
    resumed, straight = (
        torch.load(tmp_path / name / "ckpt" / "last.ckpt", weights_only=True) for name in ("killed", "straight")
    )
    for part in ("state_dict", "current_model_state"):  # the averaged weights, and those that are averaged
        assert_same(resumed[part], straight[part])
    heads = [load_head(tmp_path / name / "head").state_dict() for name in ("killed", "straight")]
    assert_same(*heads)
