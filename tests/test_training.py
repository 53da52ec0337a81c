"""Training of a toy head: it learns and resumes, checkpoints hold the head alone, metrics are those of decoding."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch.optim import AdamW
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, OneCycleLR, StepLR

from fsd_core.divergence import divergence, expand_draft
from fsd_core.errors import CheckpointError, DataError
from fsd_infer import Target
from fsd_train.callbacks import ExportHead, LossCurve, TokenRate
from fsd_train.cli import main as cli
from fsd_train.data import AnswersDataModule
from fsd_train.losses import LMHead
from fsd_train.losses.metrics import ValidationMetrics, compare
from fsd_train.models import EagleModule
from tests import train_toys
from tests.families import load_head
from tests.loss_toys import make_batch, plain_lengths
from tests.train_toys import (
    assert_same,
    fit_command,
    in_bf16,
    in_recipe,
    logged,
    run_group,
    save_toy_target,
)  # fmt: skip

STEPS = 24
Whole = tuple[EagleModule, Trainer, Path]
AVERAGING = {
    "class_path": "lightning.pytorch.callbacks.EMAWeightAveraging",
    "init_args": {"decay": 0.9, "use_buffers": False},
}


def make(toys: Path, cached: bool = True, **options: Any) -> tuple[EagleModule, AnswersDataModule]:
    values: dict[str, Any] = {
        "head": {"final_norm": True, "feature_scale": True}, "draft_vocab_size": 40, "unroll_steps": 2,
        "chain_share": 0.6, "loss_args": {"w_feature": 0.3, "w_ce": 1.0}, "noise": 0.1, "lr": 6e-3, "warmup_steps": 4,
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
def whole(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    return *fit(toys, out), out


def test_a_run_leaves_heads_and_curves(whole: Whole, toys: Path, tmp_path: Path) -> None:
    module, trainer, out = whole
    logs, checkpoint = Path(trainer.log_dir or ""), out / "ckpt" / "step=20.ckpt"
    assert (logs / "curves.png").read_bytes()[:4] == b"\x89PNG"
    losses, agreement = logged(logs, "loss"), logged(logs, "agreement_0")
    assert sum(losses[-6:]) < 0.97 * sum(losses[:6]) and sum(agreement[-6:]) > sum(agreement[:6])  # two epochs
    assert all(1 <= tau <= 4 for tau in logged(logs, "val_tau")) and min(logged(logs, "tokens_per_s")) > 0
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


def test_export_with_other_draft_ids(whole: Whole, toys: Path, tmp_path: Path, capsys: Any) -> None:
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
    state = torch.load(checkpoint, weights_only=True)
    state["state_dict"]["head.fc.weight"][0, 0] = float("nan")
    torch.save(state, tmp_path / "nan.ckpt")
    assert cli(["export", str(tmp_path / "nan.ckpt"), str(tmp_path / "other")]) == 2
    assert "nan.ckpt holds NaN or infinity in 1 tensors, first 'head.fc.weight'" in capsys.readouterr().err


def test_a_time_limit_ends_the_schedule(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))  # every look at the clock takes a second
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time.monotonic", lambda: float(next(clock)))
    _, trainer = fit(toys, tmp_path, steps=1000, max_time="00:00:01:00")
    assert 5 < trainer.global_step < 30
    assert trainer.optimizers[0].param_groups[0]["lr"] < 6e-4  # a tenth of the peak


def command(toys: Path, out: Path, *more: str) -> list[str]:
    checkpoints = in_recipe("ModelCheckpoint", dirpath=out / "ckpt", every_n_train_steps=5, save_last=True)
    callbacks = [checkpoints, in_recipe("ExportHead", directory=out / "head")]
    trainer = {"max_steps": 10, "log_every_n_steps": 1, "limit_val_batches": 0, "callbacks": callbacks}
    model = {"target": toys / "target", "draft_vocab_size": 40, "noise": 0.1}
    data = {"train_files": [toys / "answers.jsonl"], "features": toys / "features", "batch_tokens": 128}
    return [*fit_command(out, trainer, model, data), *more]


class Kill(Callback):
    """Ends the process after seven steps, between the batches of the next one."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(rank: int, port: int, argv: list[str]) -> None:
    torch.set_num_threads(1)
    cli([*argv, "--trainer.callbacks+", "tests.test_training.Kill"])


def test_killed_run_resumes(toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--trainer.accumulate_grad_batches", "2", "--model.unroll_steps", "2",
        "--model.chain_share", "0.6",
        "--trainer.callbacks+", json.dumps(AVERAGING),
    ]  # fmt: skip
    argv = command(toys, tmp_path / "killed", *options)
    assert run_group(in_a_process, [(argv,)]) == [-signal.SIGKILL]
    last = tmp_path / "killed" / "ckpt" / "last.ckpt"
    assert cli([*argv, "--ckpt_path", str(last)]) == 0
    sgd = ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.1"]
    assert cli([*argv, "--ckpt_path", str(last), "--trainer.max_steps", "12", *sgd]) == 2
    assert "holds the state of torch.optim.AdamW, which torch.optim.SGD cannot go on from" in capsys.readouterr().err
    assert cli(command(toys, tmp_path / "straight", *options)) == 0
    resumed, straight = (
        torch.load(tmp_path / name / "ckpt" / "last.ckpt", weights_only=True) for name in ("killed", "straight")
    )
    for part in ("state_dict", "current_model_state"):  # the averaged weights, and those that are averaged
        assert_same(resumed[part], straight[part])
    heads = [load_head(tmp_path / name / "head").state_dict() for name in ("killed", "straight")]
    assert_same(*heads)


def trainer(out: Path, *callbacks: Any, steps: int = 6, **options: Any) -> Trainer:
    return train_toys.trainer(out, steps, *callbacks, val_check_interval=3, **options)


def resumed(toys: Path, out: Path, ckpt: Path, data: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A run that goes on from a checkpoint, with these attributes of the data module and options of the module."""
    module, rows = make(toys, **options)
    for name, value in (data or {}).items():
        setattr(rows, name, value)
    run = trainer(out, limit_val_batches=0)
    run.fit(module, rows, ckpt_path=ckpt, weights_only=True)
    return run


@pytest.fixture(scope="module")
def checkpoint(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the first step."""
    out = tmp_path_factory.mktemp("run")
    trainer(out, steps=1, limit_val_batches=0).fit(*make(toys))
    return out / "ckpt" / "step=1.ckpt"


def test_bad_checkpoints_are_refused_before_training(toys: Path, checkpoint: Path, tmp_path: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)
    names = ("cut", "text", "foreign", "weights", "none", "directory")
    cut, text, foreign, weights, none, directory = (tmp_path / name for name in names)
    cut.write_bytes(checkpoint.read_bytes()[:3000])
    text.write_text("no checkpoint at all")
    torch.save({"model": {}}, foreign)
    torch.save({name: value for name, value in state.items() if name != "optimizer_states"}, weights)
    directory.mkdir()
    elsewhere = save_toy_target(tmp_path / "elsewhere" / "target", seed=1).parent
    (elsewhere / "answers.jsonl").symlink_to(toys / "answers.jsonl")
    another = rf"was trained on another target \({toys}/target, weights.*model.initial_head"
    with pytest.raises(CheckpointError, match=another):
        resumed(elsewhere, tmp_path / "again", checkpoint, cached=False)
    for path, words, options in [
        (cut, "truncated", {}),
        (text, "truncated or no Lightning checkpoint", {}),
        (foreign, "did not write it", {}), (weights, "only weights", {}), (none, "no such checkpoint", {}),
        (directory, "directory, but no sharded", {}),
        (checkpoint, "other settings.*draft_ids", {"draft_vocab_size": 50}),
    ]:  # fmt: skip
        with pytest.raises(CheckpointError, match=f"{path}.*{words}"):
            resumed(toys, tmp_path / "again", path, **options)


def chained(optimizer: Any) -> Any:
    return ChainedScheduler([StepLR(optimizer, 2, 0.5), ConstantLR(optimizer, 0.1, 9)])


@pytest.mark.parametrize(
    "schedule", [None, partial(StepLR, step_size=2, gamma=0.5), chained, partial(OneCycleLR, total_steps=9)]
)
def test_options_of_the_optimizer_may_change_between_runs(schedule: Any, toys: Path, tmp_path: Path) -> None:
    """A lower learning rate was advised for a run that had diverged, and the checkpoint's was used in silence."""

    def groups(ckpt: str | None, **options: Any) -> list[dict[str, Any]]:
        """Options of the optimizer at each step of a run."""
        seen: list[dict[str, Any]] = []
        module, rows = make(toys)
        module.scheduler_of, module.optimizer_of = schedule or module.scheduler_of, partial(AdamW, **options)
        if getattr(schedule, "func", None) is OneCycleLR:  # which moves betas, too
            module.scheduler_of = partial(schedule, max_lr=options["lr"])
        watch = LambdaCallback(
            on_train_batch_start=lambda run, *_: seen.append(run.optimizers[0].param_groups[0] | {"params": 0})
        )
        path = ckpt and tmp_path / "ckpt" / ckpt
        trainer(tmp_path, watch, steps=5, limit_val_batches=0).fit(module, rows, ckpt_path=path, weights_only=True)
        return seen

    before = groups(None, lr=1e-3, weight_decay=0.1)
    assert groups("step=3.ckpt", lr=1e-3, weight_decay=0.1) == before[3:]
    after = groups("step=3.ckpt", lr=1e-5, weight_decay=0.2)
    assert [each["lr"] for each in after] == pytest.approx([each["lr"] / 100 for each in before[3:]])
    assert (before[3]["weight_decay"], after[0]["weight_decay"]) == (0.1, 0.2)


def test_a_checkpoint_is_not_continued_in_another_order(toys: Path, checkpoint: Path, tmp_path: Path) -> None:
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join((toys / "answers.jsonl").read_text().splitlines(keepends=True)[1:]))
    for words, change in {
        "rows": {"train_files": [str(fewer)]},
        r"batch_tokens \(256, now 96\)": {"batch_tokens": 96},
        r"seed \(0, now 1\)": {"seed": 1},
    }.items():
        with pytest.raises(CheckpointError, match=f"{checkpoint} belongs to another order.*by {words}.*initial_head"):
            resumed(toys, tmp_path / "run", checkpoint, change)
    other = make(toys)[1]
    other.batch_tokens = 96
    trainer(tmp_path / "run").validate(make(toys)[0], other, ckpt_path=checkpoint, weights_only=True)


def test_rule_metrics_against_the_plain_formulas() -> None:
    made, draft_ids = make_batch(), torch.tensor([0, 2, 3, 7, 8])
    full = made.target_lm_head
    grid = replace(made, estimates=made.estimates.detach(), target_lm_head=LMHead(full.weight[draft_ids]))
    batch, steps = grid.batch(), len(grid.weights)
    seen = compare(batch, full, draft_ids, ["js", "top_k_tv:2"], chunk_size=2)
    p = full(grid.features).log_softmax(-1).expand(steps, -1, -1)
    q = expand_draft(grid.target_lm_head(grid.estimates), draft_ids, len(full.weight)).log_softmax(-1)
    counted = grid.weights > 0
    overlap = torch.minimum(p.exp(), q.exp()).sum(-1) * counted
    torch.testing.assert_close(grid.dense(seen.overlap), overlap)
    assert torch.equal(grid.dense(seen.agree), (p.argmax(-1) == q.argmax(-1)) & counted)
    for name, values in seen.distances.items():
        torch.testing.assert_close(grid.dense(values), divergence(name)(p, q, log_probs=True) * counted)

    js = grid.dense(seen.distances["js"])
    threshold = float(js[0].median())  # opens at some rows and not at others
    rule = f"fuzzy:js:{threshold!r}"
    metrics = ValidationMetrics(["exact", rule, "fuzzy:js:0"], steps)
    seen, chains = compare(batch, full, draft_ids, metrics.divergences), batch.rows.chains
    assert chains.shape[1] > 1
    at = batch.rows.position[batch.rows.position_index[chains[0]]]  # places of the chains' first drafts in the batch
    places = torch.zeros(int(at.max()) + 1, dtype=torch.long)
    places[at[0]], places[at[1:]] = 511, 1024  # and in their conversations
    metrics.update(seen, batch.rows, torch.zeros(()), places)
    values = metrics.compute()
    taus = 1 + torch.stack([seen.agree[chains[: step + 1]].all(0) for step in range(steps)]).double().sum(0)
    assert {name: float(tau) for name, tau in values.items() if "tau_from" in name} == {
        "tau_from_0": pytest.approx(float(taus[0])), "tau_from_1024": pytest.approx(float(taus[1:].mean()))
    }  # fmt: skip
    gate = (js <= threshold).float()
    for step in range(steps):
        assert float(values[f"divergence_js_{step}"]) == pytest.approx(float(js[step][counted[step]].mean()), rel=1e-5)
        assert float(values[f"gate_open_{step}/{rule}"]) == pytest.approx(float(gate[step][counted[step]].mean()))
    assert 0 < float(values[f"gate_open_0/{rule}"]) < 1
    for name, chances in {"exact": overlap, rule: overlap + (1 - overlap) * gate, "fuzzy:js:0": overlap}.items():
        expected = 1 + float(plain_lengths(grid, chances).mean())
        assert float(values[f"expected_tau/{name}"]) == pytest.approx(expected, rel=1e-5)
    assert bool(metrics.compute()["expected_tau/exact"].isnan())  # a clean slate
    with pytest.raises(DataError, match="random"):
        ValidationMetrics(["random:0.5"], steps)
