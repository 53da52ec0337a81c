"""How losses are computed: in chunks, within bounds of memory, in low precision."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_train.losses.base import DraftBatch, LMHead, weighted_mean
from fsd_train.losses.rows import LIVE, RowFunction
from tests.loss_toys import VARIANTS, Grid, build_loss, grid_loss, make_batch


@pytest.mark.parametrize(("name", "args"), VARIANTS, ids=str)
def test_chunk_size_does_not_matter(name: str, args: dict[str, Any]) -> None:
    batch, estimates = make_batch()
    found = []
    for chunk_size in (1, 5 * LIVE, 1000 * LIVE):
        loss = grid_loss(name, {**args, "chunk_size": chunk_size})(batch).loss
        found.append((loss, torch.autograd.grad(3 * loss, estimates)[0]))
    for loss, grad in found[1:]:
        torch.testing.assert_close(loss, found[0][0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(grad, found[0][1], atol=1e-6, rtol=1e-5)


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


PLAIN: list[tuple[str, Any]] = [
    *((f"{module}.mean_of_rows", plain_mean) for module in ("eagle", "divergences")),
    *((f"{module}.chunked_rows", plain_rows) for module in ("lk", "fsd", "adaspec")),
]


@pytest.mark.parametrize(
    ("name", "args"),
    [*((name, args) for name, args in VARIANTS if not args.get("w_feature") and name != "eagle")]
    + [("eagle", {"w_feature": 0.0, "w_ce": 0.7})],
    ids=str,
)
def test_an_lm_head_of_the_drafters_own_is_trained(
    name: str, args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, estimates = make_batch()
    weight = (batch.head.weight + 0.3 * torch.randn_like(batch.head.weight)).requires_grad_()
    batch = replace(batch, own_head=LMHead(weight, scale=0.9, cap=30.0))

    def measure() -> list[Tensor]:
        out = grid_loss(name, {**args, "chunk_size": 3 * LIVE})(batch)
        assert out.agreement is not None
        return [out.loss.detach(), out.agreement, *torch.autograd.grad(2 * out.loss, [estimates, weight])]

    found = measure()
    for module, function in PLAIN:
        monkeypatch.setattr(f"fsd_train.losses.{module}", function)
    for ours, plain in zip(found, measure(), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-4)
    assert bool(found[-1].any())
