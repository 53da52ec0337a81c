"""Losses against plain formulas, simulated rounds and the rule that decodes; chunks, memory and low precision."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer.errors import DataError, UnknownNameError
from fsd_infer.rules import Exact, Fuzzy, Verification
from fsd_infer.tree import DraftTree
from fsd_train.losses.base import DraftBatch, LMHead, weighted_mean
from fsd_train.losses.rows import LIVE, RowFunction
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
    ("eagle", {"w_feature": 0.3, "w_ce": 0.7},
     lambda batch, p, q: 0.3 * feature_gap(batch) - 0.7 * (p * q.log()).sum(-1)),
    ("tv", {"w_feature": 0.7}, lambda batch, p, q: PLAIN["tv"](p, q) + 0.7 * feature_gap(batch)),
    ("lk", {"form": "log", "level": "row"}, lambda batch, p, q: -overlap(p, q).log()),
    ("lk", {"form": "log", "level": "step"}, lambda batch, p, q: -by_step(overlap(p, q), batch).log()),
    ("lk", {"eta": 2.0, "level": "row", "w_feature": 0.7},
     lambda batch, p, q: adaptive(overlap(p, q), p, q) + 0.7 * feature_gap(batch)),
    ("lk", {"eta": 2.0, "level": "step"}, lambda batch, p, q: adaptive(by_step(overlap(p, q), batch), p, q)),
]  # fmt: skip


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


def plain_lengths(batch: Grid, acceptance: Tensor) -> Tensor:
    lengths = []
    for chain in batch.chains():
        product, total = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for step, row in chain:
            product = product * acceptance[step, row]
            total = total + product
        lengths.append(total)
    return torch.stack(lengths)


@pytest.mark.parametrize(
    "args",
    [
        {"threshold": 0.0, "anchor": 0.0},
        {"threshold": 0.2, "anchor": 0.3},
        {"divergence": "kl_qp", "threshold": [0.0, 0.5, math.inf], "softness": 0.3},
        {"divergence": "top_k_tv:4", "threshold": [0.1, 0.4], "anchor": 0.0},
        {"width": 3, "temperature": 0.7, "anchor": 0.0},
        {"width": 2, "temperature": 0.6, "threshold": [0.0, 0.2], "anchor": 0.7},
        {"temperature": 1.4, "threshold": [0.1, math.inf]},
    ],
    ids=str,
)
def test_fsd_loss(args: dict[str, Any]) -> None:
    batch, estimates = make_batch()
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
    check(batch, estimates, grid_loss("fsd", args)(batch).loss, expected)


def one_chain(batch: Grid) -> tuple[Grid, Tensor, Tensor]:
    """The batch with a single whole chain, and p and q [S, V] at its contexts."""
    p, q = distributions(batch)
    chain = torch.tensor([place for _, place in batch.chains()[3]])
    weights = torch.zeros(S, N)
    weights[torch.arange(S), chain] = 1.0
    return replace(batch, weights=weights), p[0, chain].detach(), q[torch.arange(S), chain].detach()


@pytest.mark.parametrize("rule", [Exact(), Fuzzy("js")], ids=lambda rule: rule.name)
def test_expected_length_of_a_chain_is_what_the_rule_accepts(rule: Any) -> None:
    """Chains of sampled drafts before the rule that decodes: its mean accepted length."""
    generator = torch.Generator().manual_seed(7)
    alone, p, q = one_chain(make_batch(spread=0.8, seed=3)[0])
    threshold = 0.0 if rule.name == "exact" else float(plain_js(p, q).sort().values[1:].mean())  # opens at two of three
    parts = grid_loss("fsd", {"threshold": threshold, "softness": 1e-6})(alone).parts
    draws = 8_000
    drafts = torch.multinomial(q, draws, replacement=True, generator=generator).T
    tokens = torch.cat([torch.zeros(draws, 1, dtype=torch.long), drafts], 1)
    q_logits = q.log().float().expand(draws, S, -1)
    logits = torch.cat([p, p[:1]]).log().float().expand(draws, S + 1, -1)  # the last one's law does not matter
    uniforms = torch.rand(draws, S + 1, 3, generator=generator)
    round = Verification(DraftTree.chain(tokens, q_logits, q_scores=q_logits), logits, logits, False, uniforms)
    lengths = (replace(rule, threshold=threshold) if threshold else rule)(round).accepted.double()
    error = float(lengths.std()) / math.sqrt(draws)
    assert abs(float(parts[f"soft_tau_{threshold:g}"]) - 1 - float(lengths.mean())) < 4.5 * error


def test_fsd_stays_finite_where_q_is_certain() -> None:
    batch, estimates = make_batch(spread=60.0)
    loss = grid_loss("fsd", {"width": 4, "temperature": 0.5})(batch).loss
    (slope,) = torch.autograd.grad(loss, estimates)
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


@pytest.mark.parametrize(
    ("name", "args"),
    [
        *((name, {**args, **KEPT}) for name, args in VARIANTS),
        ("adaspec", {"reference": "first", "loss_args": KEPT, **KEPT}),
        ([{"name": name, "args": KEPT} for name in ("lk", "fsd")], {}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("cap", "own"), [(None, False), (5.0, True)])
def test_memory_bound(name: Any, args: dict[str, Any], cap: float | None, own: bool) -> None:
    """Forward and backward stay within 1.3 times the logits of chunk_size rows, however many rows there are."""
    vocab, rows, width = 4096, 3 * LIVE, 4
    weight = torch.randn(vocab, width)
    batch = Grid(
        torch.randn(2, rows, width, requires_grad=True), torch.randn(rows, width), torch.ones(2, rows),
        torch.arange(rows), LMHead(weight, cap=cap),
        own_head=LMHead(weight.clone().requires_grad_(), cap=cap) if own else None,
        reference=torch.randn(2, rows, width) if name == "adaspec" else None,
    ).batch()  # fmt: skip
    loss = build_loss(name, args)
    peak = peak_memory(lambda: loss(batch).loss.backward())
    assert 4 * vocab * 4 < peak < 1.3 * KEPT["chunk_size"] * vocab * 4


def test_no_gradient_asked_and_low_precision() -> None:
    batch, _ = make_batch()
    low = replace(
        batch,
        estimates=batch.estimates.detach().bfloat16().requires_grad_(),
        features=batch.features.bfloat16(),
        head=LMHead(batch.head.weight.bfloat16()),
    )
    for name in ("eagle", "js", "lk", "fsd"):
        exact = grid_loss(name)(batch).loss.detach()
        with torch.no_grad():
            assert not grid_loss(name)(batch).loss.requires_grad
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = grid_loss(name)(low).loss
        (grad,) = torch.autograd.grad(loss, low.estimates)
        assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
        torch.testing.assert_close(loss.detach(), exact, atol=0.02, rtol=0.05)


def plain_rows(function: RowFunction, batch: DraftBatch, chunk_size: int | None) -> tuple[Tensor, Tensor]:
    """What :func:`chunked_rows` computes, by autograd over everything at once."""
    log_p = batch.head(batch.features).log_softmax(-1)[batch.rows.feature]
    log_q = batch.draft_head(batch.estimates).log_softmax(-1)
    values = function.values(log_p.exp() if function.of_p else log_p, log_q)
    return values, log_q.argmax(-1) == log_p.argmax(-1)


def plain_mean(function: RowFunction, batch: DraftBatch, chunk_size: int | None) -> tuple[Tensor, Tensor]:
    values, agree = plain_rows(function, batch, chunk_size)
    return weighted_mean(values[0], batch.weights), agree


REPLACED: list[tuple[str, Any]] = [
    *((f"{module}.mean_of_rows", plain_mean) for module in ("eagle", "divergences")),
    *((f"{module}.chunked_rows", plain_rows) for module in ("lk", "fsd", "adaspec")),
]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("name", "args"), [*VARIANTS, ("eagle", {"w_feature": 0.0, "w_ce": 0.7})], ids=str)
def test_rows_in_chunks_are_rows_at_once(
    name: str, args: dict[str, Any], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, also of an LM head of the drafter's own, in any chunks, are those of plain autograd."""
    if own and name == "eagle" and not args:
        return  # its features are the target's, which another LM head does not read
    batch, estimates = make_batch()
    weight = (batch.head.weight + 0.3 * torch.randn_like(batch.head.weight)).requires_grad_()
    batch = replace(batch, own_head=LMHead(weight, scale=0.9, cap=30.0)) if own else batch

    def measure(chunk_size: int) -> list[Tensor]:
        out = grid_loss(name, {**args, "chunk_size": chunk_size})(batch)
        assert out.agreement is not None
        return [out.loss.detach(), out.agreement, *torch.autograd.grad(2 * out.loss, [estimates, weight][: 1 + own])]

    found = [measure(chunk_size) for chunk_size in (1, 3 * LIVE, 1000 * LIVE)]
    assert all(bool(each[-1].any()) for each in found)
    for module, function in REPLACED:
        monkeypatch.setattr(f"fsd_train.losses.{module}", function)
    for ours in found:
        torch.testing.assert_close(ours, measure(1), atol=1e-6, rtol=1e-4)
