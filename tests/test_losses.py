"""Losses against plain formulas; what all losses share: the LM head, the feature term, arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer.errors import DataError, UnknownNameError
from fsd_train.losses import LMHead
from tests.loss_toys import (
    PLAIN,
    Grid,
    H,
    N,
    S,
    build_loss,
    check,
    distributions,
    grid_loss,
    make_batch,
    mean,
    overlap,
    plain_kl,
)
from tests.train_toys import toy_target

HEADS: list[dict[str, Any]] = [{}, {"bias": True, "scale": 0.4}, {"cap": 2.0, "scale": 1.5}]
Formula = Callable[[Grid, Tensor, Tensor], Tensor]  # batch, p [1, N, Vd], q [S, N, Vd] -> [S, N]


def feature_gap(batch: Grid) -> Tensor:
    """SmoothL1 in the space that the head reads."""
    scale = torch.ones(H) if batch.feature_scale is None else batch.feature_scale
    gap = (batch.estimates - batch.features) / scale
    return torch.where(gap.abs() < 1, 0.5 * gap**2, gap.abs() - 0.5).mean(-1)


def by_step(values: Tensor, batch: Grid) -> Tensor:
    """Each step's weighted mean in place of its values."""
    return ((values * batch.weights).sum(1, keepdim=True) / batch.weights.sum(1, keepdim=True)).expand(S, N)


def adaptive(rate: Tensor, p: Tensor, q: Tensor) -> Tensor:
    mix = (-2.0 * rate.detach()).exp()
    return mix * plain_kl(p, q) + (1 - mix) * (1 - overlap(p, q))


FORMULAS: list[tuple[str, dict[str, Any], Formula]] = [
    *((name, {}, lambda batch, p, q, rows=rows: rows(p, q)) for name, rows in PLAIN.items()),
    (
        "eagle",
        {"w_feature": 0.3, "w_ce": 0.7},
        lambda batch, p, q: 0.3 * feature_gap(batch) - 0.7 * (p * q.log()).sum(-1),
    ),
    ("tv", {"w_feature": 0.7}, lambda batch, p, q: PLAIN["tv"](p, q) + 0.7 * feature_gap(batch)),
    ("lk", {"form": "log", "level": "row"}, lambda batch, p, q: -overlap(p, q).log()),
    ("lk", {"form": "log", "level": "step"}, lambda batch, p, q: -by_step(overlap(p, q), batch).log()),
    (
        "lk",
        {"eta": 2.0, "level": "row", "w_feature": 0.7},
        lambda batch, p, q: adaptive(overlap(p, q), p, q) + 0.7 * feature_gap(batch),
    ),
    ("lk", {"eta": 2.0, "level": "step"}, lambda batch, p, q: adaptive(by_step(overlap(p, q), batch), p, q)),
]


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize(("name", "args", "rows"), FORMULAS, ids=lambda value: "" if callable(value) else str(value))
def test_value_and_gradient_are_the_formulas(
    name: str, args: dict[str, Any], rows: Formula, head: dict[str, Any]
) -> None:
    batch, estimates = make_batch(**head)
    batch = replace(batch, feature_scale=torch.rand(H) + 0.5)
    p, q = distributions(batch)
    out = grid_loss(name, args)(batch)
    check(batch, estimates, out.loss, mean(rows(batch, p, q), batch.weights))
    assert out.agreement is not None
    assert torch.equal(out.agreement, (q.argmax(-1) == p.argmax(-1)) & (batch.weights > 0))


@pytest.mark.parametrize("name", [*PLAIN, "lk", "fsd"])
def test_perfect_drafts_cost_nothing(name: str) -> None:
    batch, _ = make_batch()
    same = replace(batch, estimates=batch.features.expand(S, N, H).clone().requires_grad_())
    out = grid_loss(name)(same)
    assert abs(out.loss.item()) < 1e-5
    assert out.agreement is not None and torch.equal(out.agreement, batch.weights > 0)


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_lm_head_is_the_targets(family: str) -> None:
    target = toy_target(family)
    ids = torch.tensor([2, 5, 9, 33])
    hidden = torch.randn(4, target.hidden_size)
    torch.testing.assert_close(LMHead.of(target)(hidden), target.lm_logits(hidden))
    torch.testing.assert_close(LMHead.of(target, ids)(hidden), target.lm_logits(hidden)[:, ids])


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("eagel", {}, "eagle"),
        ("reverse_kl", {}, "kl_pq is"),
        ("eagle", {"w_feature": 0.0, "w_ce": 0.0}, "both 0"),
        ("fsd", {"divergence": "jsd"}, "js"),
        *(("fsd", {"threshold": wrong}, "threshold") for wrong in ([], [0.3, math.nan], -1.0)),
    ],
)
def test_wrong_arguments_are_named(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, UnknownNameError), match=message):
        build_loss(name, args)
