"""Mixes of losses, schedules, and the choice of tokens by a reference drafter."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from torch import Tensor

from fsd_infer.errors import CheckpointError, DataError, UnknownNameError
from fsd_infer.targets.target import Target
from fsd_train.data import AnswersDataModule
from fsd_train.eagle_module import EagleModule
from fsd_train.export import load_module
from fsd_train.losses import DraftBatch, LMHead, MixLoss, Schedule, build_loss, reference_of
from fsd_train.losses.adaspec import largest
from tests.train_toys import save_toy_target, write_answers

S, N, H, VD = 2, 12, 8, 19


def make_batch(seed: int = 0, **fields: Any) -> tuple[DraftBatch, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(N, H, generator=generator)
    estimates = (features + 0.6 * torch.randn(S, N, H, generator=generator)).requires_grad_()
    weights = torch.ones(S, N)
    weights[1] = 0.5
    weights[1, 0] = weights[0, 4] = 0
    head = LMHead(torch.randn(VD, H, generator=generator))
    batch = DraftBatch(estimates, features, weights, torch.zeros(N, dtype=torch.long), torch.arange(N), head)
    return replace(batch, **fields), estimates


def kl_rows(batch: DraftBatch, estimates: Tensor) -> Tensor:
    """KL(p||q) at every row, [S, N], unchunked."""
    p = (batch.features @ batch.head.weight.T).softmax(-1)
    q = (estimates @ batch.head.weight.T).softmax(-1)
    return (p * (p / q).log()).sum(-1)


# schedules


def test_a_number_stays() -> None:
    schedule = Schedule.read(0.3, "x")
    assert [schedule.at(share, 7) for share in (0.0, 0.4, 1.0)] == [0.3] * 3
    assert not schedule.moves


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.0, 0.0]),
        ("cosine", [1.0, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0.0, 0.0]),
        ("constant", [1.0, 1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_shares_and_steps_follow_one_shape(kind: str, expected: list[float]) -> None:
    share = Schedule.read({"from": 1.0, "to": 0.0, "over": 0.5, "kind": kind}, "x")
    steps = Schedule.read({"from": 1, "to": 0, "over": 200, "kind": kind}, "x")
    assert share.moves
    assert [share.at(progress, 0) for progress in (0.0, 0.125, 0.25, 0.5, 0.9)] == pytest.approx(expected)
    assert [steps.at(0.0, step) for step in (0, 50, 100, 200, math.inf)] == pytest.approx(expected)


def test_a_schedule_takes_the_whole_run_by_default() -> None:
    assert Schedule.read({"from": 2.0, "to": 4.0}, "x").at(0.5, 0) == 3.0


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("much", "x must be a finite number"),
        (True, "x must be a finite number"),
        (math.nan, "x must be a finite number"),
        ({"from": 1.0}, "keys from and to"),
        ({"from": 1.0, "to": 0.0, "until": 0.5}, "keys from and to"),
        ({"from": 1.0, "to": 0.0, "over": 0}, "over must be positive"),
        ({"from": 1.0, "to": None}, "x: to must be a finite number"),
    ],
)
def test_malformed_schedules_are_refused(value: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        Schedule.read(value, "x")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="cosine"):
        Schedule.read({"from": 1.0, "to": 0.0, "kind": "cubic"}, "x")


# mixes

FADING: list[dict[str, Any]] = [
    {"name": "reverse_kl", "weight": {"from": 1.0, "to": 0.0, "over": 0.5}},
    {"name": "lk", "weight": 0.5, "args": {"form": "log"}},
    {"name": "lk", "weight": {"from": 0.0, "to": 2.0}},
]


@pytest.mark.parametrize("progress", [0.0, 0.25, 0.8, 1.0])
def test_a_mix_is_the_weighted_sum_of_its_parts(progress: float) -> None:
    batch, estimates = make_batch(progress=progress)
    weights = [max(1 - 2 * progress, 0.0), 0.5, 2 * progress]
    singles = [build_loss("reverse_kl"), build_loss("lk", {"form": "log"}), build_loss("lk")]
    values = [single(batch).loss for single in singles]
    expected = sum(weight * value for weight, value in zip(weights, values))
    out = build_loss(FADING)(batch)
    torch.testing.assert_close(out.loss, expected)
    grads = [torch.autograd.grad(loss, estimates)[0] for loss in (out.loss, expected)]
    torch.testing.assert_close(*grads)
    for label, weight, value in zip(("reverse_kl", "lk", "lk_2"), weights, values):
        if weight:
            torch.testing.assert_close(out.parts[f"{label}/loss"], value.detach())
        else:  # not computed
            assert f"{label}/loss" not in out.parts
    assert float(out.parts["reverse_kl/weight"]) == pytest.approx(weights[0])
    assert "lk/weight" not in out.parts  # it never changes
    assert out.agreement is not None and out.agreement.shape == (S, N)


def test_a_schedule_in_steps_follows_the_step() -> None:
    mix = [{"name": "kl", "weight": {"from": 1.0, "to": 0.0, "over": 10}}, {"name": "js"}]
    kl, js = (build_loss(name)(make_batch()[0]).loss for name in ("kl", "js"))
    for step, weight in ((0, 1.0), (4, 0.6), (11, 0.0)):
        torch.testing.assert_close(build_loss(mix)(make_batch(step=step)[0]).loss, weight * kl + js)
    torch.testing.assert_close(build_loss(mix)(make_batch()[0]).loss, js)  # outside of training: the end


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([], "the list is empty"),
        (["kl"], "entry 1 of the list must be a mapping with a name"),
        ([{"name": "kl"}, {"weight": 1.0}], "entry 2 of the list must be a mapping with a name"),
        ([{"name": "kl", "wieght": 1.0}], "no key wieght"),
        ([{"name": "kl", "weight": -1.0}], "weight of kl must not be negative"),
        ([{"name": "kl", "args": {"w": 1}}], "no argument w"),
        ([{"name": "kl", "weight": 0}], "all weights are 0 at the beginning"),
        ([{"name": "kl", "weight": {"from": 1.0, "to": 0.0}}], "all weights are 0 at the end"),
        (
            [{"name": "adaspec", "args": {"reference": name}} for name in ("first", "second")],
            "one reference at a time",
        ),
    ],
)
def test_malformed_mixes_are_refused(parts: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        build_loss(parts)


def test_a_gap_between_schedules_is_told_when_it_is_reached() -> None:
    gap = build_loss(
        [
            {"name": "kl", "weight": {"from": 1.0, "to": 0.0, "over": 0.3}},
            {"name": "js", "weight": {"from": 0.0, "to": 1.0, "over": 0.6, "kind": "constant"}},
        ]
    )
    gap(make_batch(progress=0.2)[0])
    with pytest.raises(DataError, match="all weights are 0 when 40%"):
        gap(make_batch(progress=0.4)[0])


def test_arguments_of_a_mix_stand_in_the_list() -> None:
    with pytest.raises(DataError, match="write args into its entries"):
        build_loss([{"name": "kl"}], {"w_feature": 1.0})


# selection


def test_the_largest_supervised_values_of_each_step_are_chosen() -> None:
    values = torch.tensor([[9.0, 1.0, 3.0, 2.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    weights = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0, 0.0]])
    assert largest(values, weights, 0.5).int().tolist() == [[0, 0, 1, 0, 1], [0, 1, 1, 0, 0]]  # 2 of 4, 2 of 3
    assert torch.equal(largest(values, weights, 1.0), weights > 0)
    assert not largest(values, torch.zeros(2, 5), 0.5).any()


@pytest.mark.parametrize("keep", [0.25, 0.5, 1.0])
def test_adaspec_trains_on_the_largest_gaps_alone(keep: float) -> None:
    reference = torch.randn(S, N, H, generator=torch.Generator().manual_seed(9))
    batch, estimates = make_batch(reference=reference)
    rows = kl_rows(batch, estimates)
    gap = (rows - kl_rows(batch, reference)).detach()
    expected = torch.zeros(())
    counted = torch.zeros(S, N)
    for step in range(S):
        supervised = [row for row in range(N) if batch.weights[step, row] > 0]
        supervised.sort(key=lambda row: -float(gap[step, row]))
        for row in supervised[: math.ceil(keep * len(supervised))]:
            expected = expected + batch.weights[step, row] * rows[step, row]
            counted[step, row] = batch.weights[step, row]
    expected = expected / counted.sum()
    out = build_loss("adaspec", {"reference": "first", "keep": keep})(batch)
    torch.testing.assert_close(out.loss, expected, atol=1e-5, rtol=1e-5)
    (grad,), (wanted,) = torch.autograd.grad(out.loss, estimates), torch.autograd.grad(expected, estimates)
    torch.testing.assert_close(grad, wanted, atol=1e-6, rtol=1e-4)
    assert torch.equal(grad.abs().sum(-1) > 0, counted > 0)
    torch.testing.assert_close(out.parts["gap_kept"], (gap * counted).sum() / counted.sum(), atol=1e-5, rtol=1e-5)


def test_a_reference_that_is_the_drafter_has_no_gap() -> None:
    batch, estimates = make_batch()
    out = build_loss("adaspec", {"reference": "first"})(replace(batch, reference=estimates.detach()))
    assert float(out.parts["gap"]) == 0.0


def test_the_kept_share_follows_its_schedule_and_any_loss_serves() -> None:
    reference = torch.zeros(S, N, H)
    args = {"reference": "first", "keep": {"from": 1.0, "to": 0.25}, "loss": "lk", "loss_args": {"form": "log"}}
    loss = build_loss("adaspec", args)
    early, _ = make_batch(reference=reference, progress=0.0)
    torch.testing.assert_close(loss(early).loss, build_loss("lk", {"form": "log"})(early).loss)
    late, estimates = make_batch(reference=reference)
    (grad,) = torch.autograd.grad(loss(late).loss, estimates)
    assert (grad.abs().sum(-1) > 0).sum(1).tolist() == [3, 3]  # a quarter of 11


def test_without_a_reference_all_tokens_count() -> None:
    batch, _ = make_batch()
    loss = build_loss("adaspec", {"reference": "first"})
    torch.testing.assert_close(loss(batch).loss, build_loss("reverse_kl")(batch).loss)
    assert reference_of(loss) == "first" and reference_of(build_loss("kl")) is None
    assert reference_of(build_loss([{"name": "kl"}, {"name": "adaspec", "args": {"reference": "first"}}])) == "first"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({}, "needs the argument reference"),
        ({"reference": ""}, "directory of an exported head"),
        ({"reference": "first", "keep": 0}, "above 0 and up to 1"),
        ({"reference": "first", "keep": {"from": 1.0, "to": 1.5}}, "above 0 and up to 1"),
        ({"reference": "first", "loss": "fsd"}, "whole chains"),
        ({"reference": "first", "loss": [{"name": "fsd"}]}, "whole chains"),
        ({"reference": "a", "loss": "adaspec", "loss_args": {"reference": "b"}}, "must not choose tokens itself"),
    ],
)
def test_bad_arguments_of_adaspec_are_told(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        build_loss("adaspec", args)


# in training


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, its answers, and an exported head."""
    folder = tmp_path_factory.mktemp("mixes")
    save_toy_target(folder / "target")
    write_answers(folder / "answers.jsonl", Target.from_pretrained(str(folder / "target")), rows=12)
    first = EagleModule(str(folder / "target"), head={"final_norm": True})
    first.configure_model()
    torch.nn.init.normal_(first.head.fc.weight, std=0.1)
    first.export(folder / "first")
    return folder


def fit(toys: Path, loss: Any, steps: int = 4, loss_args: dict[str, Any] | None = None, **options: Any) -> Any:
    """Trains a few steps; returns (module, batches that its loss saw in training)."""
    module = EagleModule(
        str(toys / "target"), head={"final_norm": True}, unroll_steps=2, loss=loss, loss_args=loss_args, lr=5e-3,
        warmup_steps=0, **options,
    )  # fmt: skip
    seen: list[DraftBatch] = []
    inner = module.loss

    def watched(batch: DraftBatch) -> Any:
        if module.training:
            seen.append(batch)
        return inner(batch)

    watched.reference = reference_of(inner)  # type: ignore[attr-defined]
    module.loss = watched
    data = AnswersDataModule([str(toys / "answers.jsonl")], batch_tokens=128, validation_fraction=0.0)
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        default_root_dir=toys / "runs", gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, data)
    return module, seen, trainer


def test_training_moves_a_schedule_and_logs_the_parts(toys: Path) -> None:
    module, seen, trainer = fit(toys, FADING)
    assert [batch.progress for batch in seen] == [0.0, 0.25, 0.5, 0.75]
    assert [batch.step for batch in seen] == [0, 1, 2, 3]
    assert all(batch.reference is None for batch in seen)
    logged = trainer.callback_metrics
    assert float(logged["lk_2/weight"]) == 1.5 and float(logged["reverse_kl/weight"]) == 0.0
    assert {"loss", "lk/loss", "lk_2/loss", "lk/acceptance"} <= set(logged)


def test_training_with_a_reference_head(toys: Path) -> None:
    module, seen, trainer = fit(toys, "adaspec", loss_args={"reference": str(toys / "first"), "keep": 0.5})
    assert module._frozen.reference is not None
    assert not any("reference" in name for name in module.state_dict())
    assert all(not parameter.requires_grad for parameter in module._frozen.reference.parameters())
    for batch in seen:
        assert batch.reference is not None and batch.reference.shape == batch.estimates.shape
        assert not batch.reference.requires_grad
    assert float(trainer.callback_metrics["gap_kept"]) > float(trainer.callback_metrics["gap"])


def test_reference_estimates_are_what_that_head_would_train_on(toys: Path) -> None:
    """A module whose own head has the reference's weights estimates the same features."""
    target = str(toys / "target")
    args = {"reference": str(toys / "first")}
    module = EagleModule(target, head={"final_norm": True}, unroll_steps=3, loss="adaspec", loss_args=args)
    module.configure_model()
    rows = json.loads((toys / "answers.jsonl").read_text().splitlines()[0])
    ids = torch.tensor([rows["prompt_ids"] + rows["response_ids"]])
    mask = (torch.arange(ids.shape[1]) >= len(rows["prompt_ids"]))[None]
    with torch.no_grad():
        features = Target.from_pretrained(target).features(ids)
    batch = {"input_ids": ids, "loss_mask": mask, "features": features}
    drafts = module.draft(batch, 3)
    assert drafts is not None and drafts.reference is not None
    assert not torch.allclose(drafts.reference, drafts.estimates, atol=1e-2)
    assert module._frozen.reference is not None
    module.head.load_state_dict(module._frozen.reference.state_dict())
    again = module.draft(batch, 3)
    assert again is not None and again.reference is not None
    torch.testing.assert_close(again.estimates.detach(), again.reference)
    torch.testing.assert_close(again.reference, drafts.reference)
    module.eval()
    in_validation = module.draft(batch, 3)
    assert in_validation is not None and in_validation.reference is None


def test_a_missing_reference_is_told_and_a_checkpoint_loads_without_it(toys: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json"):
        fit(toys, "adaspec", loss_args={"reference": str(tmp_path / "none")})
    module = EagleModule(str(toys / "target"), loss="adaspec", loss_args={"reference": str(tmp_path / "none")})
    module.configure_model()
    state = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    torch.save(state, tmp_path / "a.ckpt")
    assert load_module(tmp_path / "a.ckpt").options.loss == "adaspec"


def test_a_recipe_may_name_one_loss_or_list_several() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(EagleModule, "model")
    several = parser.parse_object({"model": {"target": "x", "loss": FADING}}).model.loss
    assert several == FADING and isinstance(build_loss(several), MixLoss)
    one = parser.parse_args(["--model.target=x", "--model.loss=lk", "--model.loss_args={form: log}"]).model
    assert (one.loss, dict(one.loss_args)) == ("lk", {"form": "log"})
