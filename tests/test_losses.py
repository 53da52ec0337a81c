"""Losses against plain formulas and simulated rounds, in chunks and in low precision; mixes, schedules, references."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_core.errors import DataError, FsdError
from fsd_infer.rules import Fuzzy, RoundInput
from fsd_infer.trees.tree import DraftTree
from fsd_train.losses import LMHead, Schedule, as_loss
from fsd_train.losses.rows import LIVE
from tests.loss_toys import (
    PLAIN,
    VARIANTS,
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
    plain_js,
    plain_kl,
    plain_lengths,
)
from tests.train_toys import batch_of, eagle_module, ready, toy_target
from tests.tree_rounds import OneByOne

# the LM head, and how many rows of logits are computed at once
HEADS: list[tuple[dict[str, Any], int | None]] = [
    ({}, None), ({"bias": True, "scale": 0.4}, 1), ({"cap": 2.0, "scale": 1.5}, 3 * LIVE),
    ({"own": True}, 1), ({"own": True, "cap": 30.0, "scale": 0.9}, None),
]  # fmt: skip
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
    ("eagle", {"w_feature": 0.3, "w_ce": 0.7},
     lambda batch, p, q: 0.3 * feature_gap(batch) - 0.7 * (p * q.log()).sum(-1)),
    ("tv", {"w_feature": 0.7}, lambda batch, p, q: PLAIN["tv"](p, q) + 0.7 * feature_gap(batch)),
    ("lk", {"form": "log", "level": "row"}, lambda batch, p, q: -overlap(p, q).log()),
    ("lk", {"form": "log", "level": "step"}, lambda batch, p, q: -by_step(overlap(p, q), batch).log()),
    ("lk", {"eta": 2.0, "level": "row", "w_feature": 0.7},
     lambda batch, p, q: adaptive(overlap(p, q), p, q) + 0.7 * feature_gap(batch)),
    ("lk", {"eta": 2.0, "level": "step"}, lambda batch, p, q: adaptive(by_step(overlap(p, q), batch), p, q)),
]  # fmt: skip


@pytest.mark.parametrize(("head", "chunk_size"), HEADS, ids=str)
@pytest.mark.parametrize(("name", "args", "rows"), FORMULAS, ids=lambda value: "" if callable(value) else str(value))
def test_a_loss_is_its_plain_formula(
    name: str, args: dict[str, Any], rows: Formula, head: dict[str, Any], chunk_size: int | None
) -> None:
    batch = replace(make_batch(**head), feature_scale=torch.rand(H) + 0.5)
    p, q = distributions(batch)
    out = grid_loss(name, {**args, "chunk_size": chunk_size})(batch)
    check(batch, out.loss, mean(rows(batch, p, q), batch.weights))
    assert torch.equal(out.agreement, (q.argmax(-1) == p.argmax(-1)) & (batch.weights > 0))


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_lm_head_is_the_targets(family: str) -> None:
    target = toy_target(family)
    ids = torch.tensor([2, 5, 9, 33])
    hidden = torch.randn(4, target.hidden_size)
    torch.testing.assert_close(LMHead.of(target)(hidden), target.lm_logits(hidden))
    torch.testing.assert_close(LMHead.of(target, ids)(hidden), target.lm_logits(hidden)[:, ids])


FSD = [
    {"threshold": 0.0, "anchor": 0.0}, {"threshold": 0.2, "anchor": 0.3},
    {"divergence": "kl_qp", "threshold": [0.0, 0.5, math.inf], "softness": 0.3},
    {"divergence": "top_k_tv:4", "threshold": [0.1, 0.4], "anchor": 0.0},
    {"width": 3, "temperature": 0.7, "anchor": 0.0},
    {"width": 2, "temperature": 0.6, "threshold": [0.0, 0.2], "anchor": 0.7},
    {"temperature": 1.4, "threshold": [0.1, math.inf]},
]  # fmt: skip


@pytest.mark.parametrize("args", FSD, ids=str)
@pytest.mark.parametrize(("own", "chunk_size"), [(False, None), (True, 1)])
def test_the_fsd_loss_is_its_plain_formula(args: dict[str, Any], own: bool, chunk_size: int | None) -> None:
    batch = make_batch(own=own)
    p, q = distributions(batch)
    p = p.expand_as(q)
    t = args.get("temperature", 1.0)
    hot_p, hot_q = (x.pow(1 / t) / x.pow(1 / t).sum(-1, keepdim=True) for x in (p, q))
    drafts = q if "width" in args else hot_q  # a tree's children come from the raw q
    passed = (hot_p * (1 - (1 - q) ** args["width"])).sum(-1) if "width" in args else overlap(hot_p, hot_q)
    name = args.get("divergence", "js")
    if name == "top_k_tv:4":
        top = p.topk(4, dim=-1).indices
        kept = [torch.cat([x.gather(-1, top), 1 - x.gather(-1, top).sum(-1, keepdim=True)], -1) for x in (p, q)]
        distance = PLAIN["tv"](*kept)
    else:
        distance = PLAIN[name](p, q)
    thresholds = args.get("threshold", 0.3)
    thresholds = thresholds if isinstance(thresholds, list) else [thresholds]
    expected = args.get("anchor", 0.1) * mean(plain_kl(hot_p, drafts), batch.weights)
    for threshold in thresholds:
        soft = torch.sigmoid((threshold - distance) / args.get("softness", 0.1))
        gate = {0.0: torch.zeros_like(soft), math.inf: torch.ones_like(soft)}.get(threshold, soft)
        lengths = plain_lengths(batch, passed + (1 - passed) * gate)
        expected = expected - (lengths / S).log().mean() / len(thresholds)
    check(batch, grid_loss("fsd", {**args, "chunk_size": chunk_size})(batch).loss, expected)


def one_chain(batch: Grid) -> tuple[Grid, Tensor, Tensor]:
    """The batch with a single whole chain, and p and q [S, V] at its contexts."""
    p, q = distributions(batch)
    chain = torch.tensor([place for _, place in batch.chains()[3]])
    weights = torch.zeros(S, N)
    weights[torch.arange(S), chain] = 1.0
    return replace(batch, weights=weights), p[0, chain].detach(), q[torch.arange(S), chain].detach()


@pytest.mark.parametrize("rule", [OneByOne(), Fuzzy("js")], ids=["exact", "fuzzy"])
def test_expected_length_of_a_chain_is_what_the_rule_accepts(rule: Any) -> None:
    """Chains of sampled drafts before the rule that decodes: its mean accepted length."""
    generator = torch.Generator().manual_seed(7)
    alone, p, q = one_chain(make_batch(spread=0.8, seed=3))
    gated = isinstance(rule, Fuzzy)
    threshold = float(plain_js(p, q).sort().values[1:].mean()) if gated else 0.0  # opens at two of three
    parts = grid_loss("fsd", {"threshold": threshold, "softness": 1e-6})(alone).parts
    draws = 8_000
    drafts = torch.multinomial(q, draws, replacement=True, generator=generator).T
    tokens = torch.cat([torch.zeros(draws, 1, dtype=torch.long), drafts], 1)
    q_logits = q.log().float().expand(draws, S, -1)
    logits = torch.cat([p, p[:1]]).log().float().expand(draws, S + 1, -1)  # the last one's distribution does not matter
    uniforms = torch.rand(draws, S + 1, 3, generator=generator)
    round = RoundInput(DraftTree.chain(tokens, q_logits, q_scores=q_logits), logits, logits, False, uniforms)
    lengths = (replace(rule, threshold=threshold) if threshold else rule)(round).accepted.double()
    error = float(lengths.std()) / math.sqrt(draws)
    assert abs(float(parts[f"soft_tau_{threshold:g}"]) - 1 - float(lengths.mean())) < 4.5 * error


def test_fsd_stays_finite_where_q_is_certain() -> None:
    batch = make_batch(spread=60.0)
    loss = grid_loss("fsd", {"width": 4, "temperature": 0.5})(batch).loss
    (slope,) = torch.autograd.grad(loss, batch.estimates)
    assert bool(loss.isfinite()) and bool(slope.isfinite().all())


def peak_memory(run: Any) -> int:
    """Bytes allocated at the highest moment of a call, above those before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.collect()  # what other tests left must not be freed, and counted, in the middle of this one
    gc.disable()
    try:
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            run()
    finally:
        gc.enable()
    records = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for record in sorted(records, key=lambda event: event.start_ns()):
        total += record.nbytes()
        peak = max(peak, total)
    return peak


KEPT = {"chunk_size": 4 * LIVE}


BOUNDED = [
    *((name, {**args, **KEPT}) for name, args in VARIANTS),
    ("adaspec", {"reference": "first", "loss_args": KEPT, **KEPT}),
    ([{"name": name, "args": KEPT} for name in ("lk", "fsd")], {}),
]


@pytest.mark.parametrize(("name", "args"), BOUNDED, ids=str)
def test_a_step_holds_the_logits_of_one_chunk(name: Any, args: dict[str, Any]) -> None:
    """Forward and backward stay within 1.3 times the logits of chunk_size rows, however many rows there are."""
    vocab, rows, width = 2048, 3 * LIVE, 4
    weight = torch.randn(vocab, width)
    batch = Grid(
        torch.randn(2, rows, width, requires_grad=True), torch.randn(rows, width), torch.ones(2, rows),
        torch.arange(rows), LMHead(weight, cap=5.0), own_lm_head=LMHead(weight.clone().requires_grad_(), cap=5.0),
        reference=torch.randn(2, rows, width) if name == "adaspec" else None,
    ).batch()  # fmt: skip
    loss = build_loss(name, args)
    peak = peak_memory(lambda: loss(batch).loss.backward())
    assert 4 * vocab * 4 < peak < 1.3 * KEPT["chunk_size"] * vocab * 4


def test_losses_without_gradients_and_in_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    trained = make_batch(own=True)
    low = replace(
        batch,
        estimates=batch.estimates.detach().bfloat16().requires_grad_(),
        features=batch.features.bfloat16(),
        target_lm_head=LMHead(batch.target_lm_head.weight.bfloat16()),
    )
    for name in ("eagle", "js", "lk", "fsd"):
        exact = grid_loss(name)(batch).loss.detach()
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(LMHead, "grad_products", None)  # validation takes no gradient, not even on a trained LM head
            assert not grid_loss(name)(batch).loss.requires_grad
            assert not grid_loss(name)(trained).loss.requires_grad
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = grid_loss(name)(low).loss
        (grad,) = torch.autograd.grad(loss, low.estimates)
        assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
        torch.testing.assert_close(loss.detach(), exact, atol=0.02, rtol=0.05)


# schedules


SCHEDULES = [
    ({"start": 1.0, "end": 0.0, "kind": "linear"}, [1.0, 0.75, 0.5, 0.0, 0.0]),
    ({"start": 1.0, "end": 0.0, "kind": "cosine"}, [1.0, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0.0, 0.0]),
    ({"start": 1.0, "end": 0.0, "kind": "constant"}, [1.0, 1.0, 1.0, 0.0, 0.0]),
    (0.3, [0.3] * 5),
]


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES)
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
    batch = make_batch()
    batch = replace(batch, progress=progress, step=step)
    weights = [max(1 - 2 * progress, 0.0), 0.5, 2 * progress, max(1 - step / 10, 0.0)]
    singles = [grid_loss(part["name"], part.get("args")) for part in FADING]
    values = [single(batch).loss for single in singles]
    out = grid_loss(FADING)(batch)
    check(batch, out.loss, sum(weight * value for weight, value in zip(weights, values)))
    for label, weight, value in zip(("kl_pq", "lk", "lk_2", "js"), weights, values):
        if weight:
            torch.testing.assert_close(out.parts[f"{label}/loss"], value.detach())
        else:  # not computed
            assert f"{label}/loss" not in out.parts
    assert float(out.parts["kl_pq/weight"]) == pytest.approx(weights[0])
    assert "lk/weight" not in out.parts  # it never changes
    assert out.agreement is not None and out.agreement.shape == (S, N)


MALFORMED: list[tuple[Any, dict[str, Any] | None, str]] = [
    ("eagle", {"w_feature": 0.0, "w_ce": 0.0}, "both 0"),
    ("fsd", {"divergence": "jsd"}, "js"),
    *(("fsd", {"threshold": wrong}, "threshold") for wrong in ([], [0.3, math.nan], -1.0)),
    ([], None, "parts is empty"),
    ([{"name": "kl_qp", "weight": 0}], None, "all weights are 0 at the beginning"),
    ([{"name": "kl_qp", "weight": Schedule(start=1.0, end=0.0)}], None, "all weights are 0 at the end"),
    ([{"name": "adaspec", "args": {"reference": name}} for name in "ab"], None, "two references, a, b"),
    ("adaspec", {"reference": ""}, "directory of an exported head"),
    ("adaspec", {"reference": "a", "keep": 0}, "above 0 and up to 1"),
    ("adaspec", {"reference": "a", "keep": Schedule(1.0, 1.5)}, "above 0 and up to 1"),
    ("adaspec", {"reference": "a", "loss": [{"name": "fsd"}]}, "whole chains"),
    ("adaspec", {"reference": "a", "loss": "adaspec", "loss_args": {"reference": "b"}}, "inner loss is adaspec"),
]


@pytest.mark.parametrize(("parts", "args", "problem"), MALFORMED)
def test_malformed_losses_and_mixes_are_refused(parts: Any, args: dict[str, Any] | None, problem: str) -> None:
    with pytest.raises(FsdError, match=problem):
        build_loss(parts, args)
    with pytest.raises(DataError, match="'adaspec' needs reference: give it as class_path"):
        as_loss("adaspec")


# selection


@pytest.mark.parametrize("keep", [0.25, 1.0])
def test_adaspec_trains_on_the_largest_gaps_alone(keep: float) -> None:
    batch = make_batch()
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
    check(replace(batch, weights=counted), out.loss, (rows * counted).sum() / counted.sum())
    for name, weights in (("gap", batch.weights), ("gap_kept", counted)):
        expected = ((gap * weights).sum() / weights.sum()).float()
        torch.testing.assert_close(out.parts[name], expected, atol=1e-5, rtol=1e-5)


# in training


def test_reference_estimates_are_what_that_head_would_train_on(toys: Path, tmp_path: Path) -> None:
    """A module whose own head has the reference's weights estimates the same features."""
    first = ready(eagle_module(toys, head={"final_norm": True}))
    torch.nn.init.normal_(first.head.fc.weight, std=0.1)
    first.export(tmp_path / "first")
    args = {"reference": str(tmp_path / "first")}
    module = ready(eagle_module(toys, head={"final_norm": True}, unroll_steps=3, loss="adaspec", loss_args=args))
    batch = batch_of(toys, 1)
    drafts = module.draft(batch, 3)
    assert not torch.allclose(drafts.reference, drafts.estimates, atol=1e-2)
    module.head.load_state_dict(module._frozen.reference.state_dict())
    again = module.draft(batch, 3)
    torch.testing.assert_close(again.estimates.detach(), again.reference)
    torch.testing.assert_close(again.reference, drafts.reference)
    module.eval()
    assert module.draft(batch, 3).reference is None  # validation
