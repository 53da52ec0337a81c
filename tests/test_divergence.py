"""Divergences: values against a float64 reference, gradients against finite differences, limits, memory, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax
from torch import Tensor

from fsd_core.divergence import divergence, expand_draft, reduced
from fsd_core.errors import FsdError, UnknownNameError, VocabularyMismatchError
from fsd_infer.rules import parse_rule

INF = math.inf
PLAIN = ["kl_qp", "kl_pq", "js", "ag", "tv"]
NAMES = [*PLAIN, *(f"top_k_{name}:3" for name in PLAIN)]
FULL_SUPPORT = settings(max_examples=25, deadline=None, derandomize=True)


def reference(name: str, p: np.ndarray, q: np.ndarray) -> float:
    """The formulas, in float64, from probabilities of one context."""
    stem, _, k = name.partition(":")
    if stem.startswith("top_k_"):
        top = np.argsort(-p, kind="stable")[: int(k or 50)]
        rest = np.setdiff1d(np.arange(len(p)), top)
        p, q = (np.append(x[top], x[rest].sum()) for x in (p, q))
        stem = stem.removeprefix("top_k_")
    m = (p + q) / 2
    formulas = {
        "kl_qp": rel_entr(q, p).sum(), "kl_pq": rel_entr(p, q).sum(),
        "js": rel_entr(p, m).sum() / 2 + rel_entr(q, m).sum() / 2,
        "ag": rel_entr(m, p).sum() / 2 + rel_entr(m, q).sum() / 2, "tv": np.abs(p - q).sum() / 2,
    }  # fmt: skip
    return float(formulas[stem])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two contexts' logits [V] each, with -inf at some tokens but never at all."""
    size = draw(st.integers(2, 12))
    entries = st.one_of(st.floats(-20, 20, width=32, allow_subnormal=False), st.just(-INF))
    rows = st.lists(entries, min_size=size, max_size=size).filter(lambda row: max(row) > -INF)
    return torch.tensor(draw(rows)), torch.tensor(draw(rows))


def probabilities(logits: Tensor) -> np.ndarray:
    return softmax(logits.double().numpy())


def has_near_ties(p: Tensor) -> bool:
    """Are two scores so close, but not equal, that rounding decides which of their tokens are in the top k?"""
    gaps = p.double().sort().values.diff()
    return bool(((gaps > 0) & (gaps < 1e-5)).any())


@pytest.mark.parametrize("name", NAMES)
@FULL_SUPPORT
@given(pair=pairs())
def test_values_and_gradients_agree_with_float64_and_stay_in_range(name: str, pair: tuple[Tensor, Tensor]) -> None:
    def found(dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        p, q = (x.to(dtype, copy=True).requires_grad_() for x in pair)
        value = divergence(name)(p, q)
        return value.detach(), torch.autograd.grad(value, (p, q))

    (value, single), (_, double) = found(torch.float32), found(torch.float64)
    assert value.dtype == torch.float32 and value.shape == ()
    low, high = divergence(name).bounds
    assert low <= value.item() <= torch.tensor(high).item()
    p, near = pair[0], name.startswith("top_k") and has_near_ties(pair[0])
    if not near and not (
        name.startswith("top_k") and len(set(p.tolist())) < len(p)
    ):  # which of equals are in the top k
        assert value.item() == pytest.approx(reference(name, *map(probabilities, pair)), rel=2e-5, abs=2e-6)
    for x, y, logits in zip(single, double, pair, strict=True):
        assert x.dtype == torch.float32 and x.isfinite().all() and (x[logits == -INF] == 0).all()
        if "tv" not in name and not near:  # it has a kink where p = q, on either side of which rounding may fall
            torch.testing.assert_close(x, y.float(), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_equal_rows_give_exactly_zero(name: str) -> None:
    for size in (5, 4099):
        logits = torch.randn(3, size, generator=torch.Generator().manual_seed(1)) * 5
        logits[1, ::3] = -INF
        assert divergence(name)(logits, logits.clone()).tolist() == [0.0, 0.0, 0.0]
        log_p = logits.log_softmax(-1)
        assert divergence(name)(log_p, log_p, log_probs=True).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_against_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64) * 2
    zeros = torch.full((4, 2), -INF, dtype=torch.float64)
    measure = divergence(name)

    def value(p: Tensor, q: Tensor) -> Tensor:
        return measure(torch.cat([p, zeros], -1), torch.cat([q, zeros], -1), chunk_size=3)

    def value_of_log_probs(p: Tensor, q: Tensor) -> Tensor:
        return measure(p, q, log_probs=True)

    assert torch.autograd.gradcheck(value, (p.requires_grad_(), q.requires_grad_()))
    assert torch.autograd.gradcheck(value, (p.detach(), q))
    assert torch.autograd.gradcheck(value, (p, q.detach()))
    logs = [x.detach().log_softmax(-1).requires_grad_() for x in (p, q)]
    assert torch.autograd.gradcheck(value_of_log_probs, logs)


@pytest.mark.parametrize("name", NAMES)
def test_any_leading_shape_any_chunk(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    p, q = torch.randn(2, 2, 3, 4, 9, generator=generator)
    p[..., 0] = q[..., 0] = torch.finfo(torch.float32).min  # zeros that both share change nothing
    torch.testing.assert_close(divergence(name)(p, q), divergence(name)(p[..., 1:], q[..., 1:]))
    whole, whole_grad = value_and_gradients(name, p, q, None)
    assert whole.shape == (2, 3, 4)
    for chunk_size in (1, 5, 24, 1000):
        value, gradients = value_and_gradients(name, p, q, chunk_size)
        torch.testing.assert_close(value, whole)
        torch.testing.assert_close(gradients, whole_grad)
    assert divergence(name)(p[0, 0, 0], q[0, 0, 0]).shape == ()
    assert divergence(name)(p[:0], q[:0]).shape == (0, 3, 4)


def value_and_gradients(name: str, p: Tensor, q: Tensor, chunk_size: int | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    p, q = p.clone().requires_grad_(), q.clone().requires_grad_()
    value = divergence(name)(p, q, chunk_size=chunk_size)
    weights = torch.arange(value.numel(), dtype=value.dtype).view(value.shape)
    return value.detach(), torch.autograd.grad((value * weights).sum(), (p, q))


@pytest.mark.parametrize("name", NAMES)
def test_reduced_drafter_vocabulary_is_exact(name: str) -> None:
    generator = torch.Generator().manual_seed(8)
    draft_ids = torch.tensor([1, 2, 5, 8, 11])
    p = torch.randn(2, 3, 12, generator=generator) * 3
    q = torch.randn(2, 3, 5, generator=generator) * 3
    p[0, 0, 0], p[0, 1, 5], q[0, 2, 1] = -INF, -INF, -INF
    p[1, 2] = expand_draft(q[1, 2] + 0.5, draft_ids, 12)  # no target mass outside, either
    p[1, 1, draft_ids], p[1, 0, 3] = -200.0, 90.0  # none inside, all on one token outside
    whole = expand_draft(q, draft_ids, 12)
    assert whole.softmax(-1)[..., draft_ids].sum(-1).allclose(torch.ones(2, 3))
    expected = divergence(name)(p, whole)
    torch.testing.assert_close(divergence(name).with_reduced_drafter(p, q, draft_ids), expected)
    if not name.startswith("top_k"):
        torch.testing.assert_close(divergence(name)(*reduced(p, q, draft_ids), log_probs=True), expected)
        logs, logs_with_gradient = (reduced(x, q, draft_ids)[0] for x in (p, p.clone().requires_grad_()))
        torch.testing.assert_close(logs, logs_with_gradient.detach())
    assert torch.equal(divergence(name).with_reduced_drafter(p, whole, None), divergence(name)(p, whole))


def test_types_and_rows_that_are_no_distribution() -> None:
    p, q = (torch.randn(2, 8, generator=torch.Generator().manual_seed(5)) * 3).bfloat16()
    p.requires_grad_()
    value = divergence("js")(p, q)
    assert value.dtype == torch.float32 and torch.equal(value, divergence("js")(p.float(), q.float()))
    value.backward()
    assert p.grad is not None and p.grad.dtype == torch.bfloat16
    broken = torch.tensor([[0.0, math.nan], [-INF, -INF], [0.0, 1.0]])
    for name in PLAIN:
        assert divergence(name)(broken, torch.zeros(3, 2)).isnan().tolist() == [True, True, False]


FORMER = "kl_qp is .*once called kl; kl_pq is .*once reverse_kl"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: divergence("jss"), UnknownNameError, "unknown divergence 'jss'.*Did you mean 'js'"),
        (lambda: divergence("reverse_kl"), UnknownNameError, FORMER),
        (lambda: divergence("top_k_kl:2"), UnknownNameError, FORMER),
        (lambda: parse_rule("fuzzy:kl:0.3"), UnknownNameError, FORMER),
        (lambda: divergence("top_k_js:0"), FsdError, "k must be a whole number from 1"),
        (lambda: divergence("top_k_js:2.5"), FsdError, "k must be a whole number from 1"),
        (lambda: divergence("top_k_js:"), FsdError, "k must be a whole number from 1"),
        (lambda: divergence("js:3"), FsdError, "takes no parameter"),
        (lambda: divergence("js")(torch.zeros(4), torch.zeros(5)), VocabularyMismatchError,
         "p has 4 entries per row, q has 5"),
        (lambda: divergence("js")(torch.zeros(2, 4), torch.zeros(3, 4)), FsdError, "shapes"),
        (lambda: divergence("js")(torch.zeros(4), torch.zeros(4), chunk_size=0), FsdError, "chunk_size is 0"),
        (lambda: reduced(torch.zeros(4), torch.zeros(3), torch.tensor([0, 1])), VocabularyMismatchError,
         "3 logits but draft_ids names 2"),
    ],
)  # fmt: skip
def test_bad_input(make: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
