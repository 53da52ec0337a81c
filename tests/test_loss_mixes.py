"""Mixes of losses, schedules, and the choice of tokens by a reference drafter."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer.errors import DataError
from fsd_infer.targets.target import Target
from fsd_train.losses import Schedule, as_loss
from tests.loss_toys import H, N, S, build_loss, check, distributions, grid_loss, make_batch, plain_kl
from tests.train_toys import eagle_module, ready, save_toy_target, write_answers

# schedules


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"start": 1.0, "end": 0.0, "kind": "linear"}, [1.0, 0.75, 0.5, 0.0, 0.0]),
        ({"start": 1.0, "end": 0.0, "kind": "cosine"}, [1.0, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0.0, 0.0]),
        ({"start": 1.0, "end": 0.0, "kind": "constant"}, [1.0, 1.0, 1.0, 0.0, 0.0]),
        (0.3, [0.3] * 5),
    ],
)
def test_shares_and_steps_follow_one_shape(schedule: Any, expected: list[float]) -> None:
    share, steps = (
        Schedule(**schedule, over=over) if isinstance(schedule, dict) else Schedule.of(schedule) for over in (0.5, 200)
    )
    assert share.moves == isinstance(schedule, dict)
    assert [share.at(progress, 0) for progress in (0.0, 0.125, 0.25, 0.5, 0.9)] == pytest.approx(expected)
    assert [steps.at(0.0, step) for step in (0, 50, 100, 200, math.inf)] == pytest.approx(expected)


# mixes

FADING: list[dict[str, Any]] = [
    {"name": "kl_pq", "weight": Schedule(start=1.0, end=0.0, over=0.5)},
    {"name": "lk", "weight": 0.5, "args": {"form": "log"}},
    {"name": "lk", "weight": Schedule(start=0.0, end=2.0)},
    {"name": "js", "weight": Schedule(start=1.0, end=0.0, over=10)},
]


@pytest.mark.parametrize(("progress", "step"), [(0.0, 0), (0.25, 4), (1.0, math.inf)])
def test_a_mix_is_the_weighted_sum_of_its_parts(progress: float, step: float) -> None:
    batch, estimates = make_batch()
    batch = replace(batch, progress=progress, step=step)
    weights = [max(1 - 2 * progress, 0.0), 0.5, 2 * progress, max(1 - step / 10, 0.0)]
    singles = [grid_loss(part["name"], part.get("args")) for part in FADING]
    values = [single(batch).loss for single in singles]
    out = grid_loss(FADING)(batch)
    check(batch, estimates, out.loss, sum(weight * value for weight, value in zip(weights, values)))
    for label, weight, value in zip(("kl_pq", "lk", "lk_2", "js"), weights, values):
        if weight:
            torch.testing.assert_close(out.parts[f"{label}/loss"], value.detach())
        else:  # not computed
            assert f"{label}/loss" not in out.parts
    assert float(out.parts["kl_pq/weight"]) == pytest.approx(weights[0])
    assert "lk/weight" not in out.parts  # it never changes
    assert out.agreement is not None and out.agreement.shape == (S, N)


@pytest.mark.parametrize(
    ("parts", "args", "problem"),
    [
        ([], None, "parts is empty"),
        ([{"name": "kl_qp", "weight": 0}], None, "all weights are 0 at the beginning"),
        ([{"name": "kl_qp", "weight": Schedule(start=1.0, end=0.0)}], None, "all weights are 0 at the end"),
        ([{"name": "adaspec", "args": {"reference": name}} for name in "ab"], None, "two references, a, b"),
        ("adaspec", {"reference": ""}, "directory of an exported head"),
        ("adaspec", {"reference": "a", "keep": 0}, "above 0 and up to 1"),
        ("adaspec", {"reference": "a", "keep": Schedule(1.0, 1.5)}, "above 0 and up to 1"),
        ("adaspec", {"reference": "a", "loss": [{"name": "fsd"}]}, "whole chains"),
        ("adaspec", {"reference": "a", "loss": "adaspec", "loss_args": {"reference": "b"}}, "inner loss is adaspec"),
    ],
)
def test_malformed_mixes_are_refused(parts: Any, args: dict[str, Any] | None, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        build_loss(parts, args)
    with pytest.raises(DataError, match="'adaspec' needs reference: give it as class_path"):
        as_loss("adaspec")


# selection


@pytest.mark.parametrize("keep", [0.25, 1.0])
def test_adaspec_trains_on_the_largest_gaps_alone(keep: float) -> None:
    batch, estimates = make_batch()
    other = torch.randn(S, N, H, generator=torch.Generator().manual_seed(9))
    p, q = distributions(batch)
    rows = plain_kl(p, q)
    gap = (rows - plain_kl(*distributions(replace(batch, estimates=other)))).detach()
    counted = torch.zeros(S, N)
    for step in range(S):
        supervised = [row for row in range(N) if batch.weights[step, row] > 0]
        supervised.sort(key=lambda row: -float(gap[step, row]))
        for row in supervised[: math.ceil(keep * len(supervised))]:
            counted[step, row] = batch.weights[step, row]
    out = grid_loss("adaspec", {"reference": "first", "keep": keep})(replace(batch, reference=other))
    check(replace(batch, weights=counted), estimates, out.loss, (rows * counted).sum() / counted.sum())
    for name, weights in (("gap", batch.weights), ("gap_kept", counted)):
        expected = ((gap * weights).sum() / weights.sum()).float()
        torch.testing.assert_close(out.parts[name], expected, atol=1e-5, rtol=1e-5)


# in training


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, its answers, and an exported head."""
    folder = tmp_path_factory.mktemp("mixes")
    save_toy_target(folder / "target")
    write_answers(folder / "answers.jsonl", Target.from_pretrained(str(folder / "target")), rows=12)
    first = ready(eagle_module(folder, head={"final_norm": True}))
    torch.nn.init.normal_(first.head.fc.weight, std=0.1)
    first.export(folder / "first")
    return folder


def test_reference_estimates_are_what_that_head_would_train_on(toys: Path) -> None:
    """A module whose own head has the reference's weights estimates the same features."""
    args = {"reference": str(toys / "first")}
    module = ready(eagle_module(toys, head={"final_norm": True}, unroll_steps=3, loss="adaspec", loss_args=args))
    rows = json.loads((toys / "answers.jsonl").read_text().splitlines()[0])
    ids = torch.tensor([rows["prompt_ids"] + rows["response_ids"]])
    mask = (torch.arange(ids.shape[1]) >= len(rows["prompt_ids"]))[None]
    with torch.no_grad():
        features = module.target.features(ids)
    batch = {"input_ids": ids, "loss_mask": mask, "features": features}
    drafts = module.draft(batch, 3)
    assert drafts is not None and drafts.reference is not None
    assert not torch.allclose(drafts.reference, drafts.estimates, atol=1e-2)
    module.head.load_state_dict(module._frozen.reference.state_dict())
    again = module.draft(batch, 3)
    assert again is not None and again.reference is not None
    torch.testing.assert_close(again.estimates.detach(), again.reference)
    torch.testing.assert_close(again.reference, drafts.reference)
    module.eval()
    in_validation = module.draft(batch, 3)
    assert in_validation is not None and in_validation.reference is None
