"""Divergences: values against a float64 reference, gradients against finite differences, limits, memory, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsd_infer.divergence import Divergence, divergence, expand_draft, reduced
from fsd_infer.errors import FsdError, UnknownNameError, VocabularyMismatchError
from fsd_infer.rules import parse_rule

INF = math.inf
PLAIN = ["kl_qp", "kl_pq", "js", "ag", "tv"]
NAMES = [*PLAIN, *(f"top_k_{name}:3" for name in PLAIN)]
SOME = ["kl_qp", "kl_pq", "js", "tv", "top_k_ag:3"]
FULL_SUPPORT = settings(max_examples=40, deadline=None, derandomize=True)


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
        "kl_qp": rel_entr(q, p).sum(),
        "kl_pq": rel_entr(p, q).sum(),
        "js": rel_entr(p, m).sum() / 2 + rel_entr(q, m).sum() / 2,
        "ag": rel_entr(m, p).sum() / 2 + rel_entr(m, q).sum() / 2,
        "tv": np.abs(p - q).sum() / 2,
    }
    return float(formulas[stem])


@st.composite
def pairs(draw: st.DrawFn, masked: bool = True) -> tuple[Tensor, Tensor]:
    """Two contexts' logits [V] each, with -inf at some tokens but never at all."""
    size = draw(st.integers(2, 12))
    entries = st.floats(-20, 20, width=32, allow_subnormal=False)
    if masked:
        entries = st.one_of(entries, st.just(-INF))
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
def test_agrees_with_float64_reference_and_stays_in_range(name: str, pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    got = divergence(name)(p, q)
    assert got.dtype == torch.float32
    assert got.shape == ()
    probs_p, probs_q = probabilities(p), probabilities(q)
    ties = len(set(p.tolist())) < len(p)  # which of equal tokens are in the top k
    if name.startswith("top_k") and (ties or has_near_ties(p)):
        assert not got.isnan()
    else:
        assert got.item() == pytest.approx(reference(name, probs_p, probs_q), rel=2e-5, abs=2e-6)
    low, high = divergence(name).bounds
    assert low <= got.item() <= torch.tensor(high).item()


@pytest.mark.parametrize("name", NAMES)
def test_equal_rows_give_exactly_zero(name: str) -> None:
    for size in (5, 4099):
        logits = torch.randn(3, size, generator=torch.Generator().manual_seed(1)) * 5
        logits[1, ::3] = -INF
        assert divergence(name)(logits, logits.clone()).tolist() == [0.0, 0.0, 0.0]
        log_p = logits.log_softmax(-1)
        assert divergence(name)(log_p, log_p, log_probs=True).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", PLAIN)
def test_what_the_registry_says_of_symmetry_and_direction(name: str) -> None:
    measure, (p, q) = divergence(name), torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(2))
    assert measure.symmetric == (name in ("js", "ag", "tv")) == torch.allclose(measure(p, q), measure(q, p))
    directions = {"kl_qp": "KL(q||p), draft from target", "kl_pq": "KL(p||q), target from draft"}
    assert measure.direction == directions.get(name, "symmetric")


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "top_k_kl:20"])
def test_an_old_name_is_an_error_that_names_both(name: str) -> None:
    for text in (name, f"fuzzy:{name}:0.3"):
        with pytest.raises(UnknownNameError, match="kl_qp is .*once called kl; kl_pq is .*once reverse_kl"):
            divergence(text) if text == name else parse_rule(text)


@pytest.mark.parametrize("name", NAMES)
def test_disjoint_supports_give_the_upper_bound(name: str) -> None:
    p = torch.tensor([1.0, 2.0, 0.5, 1.5, -INF, -INF, -INF, -INF])
    q = torch.tensor([-INF, -INF, -INF, -INF, 0.3, 2.0, 1.0, 0.0])
    measure = divergence(name)
    expected = reference(name, probabilities(p), probabilities(q))
    assert measure(p, q).item() == pytest.approx(expected, abs=1e-6)
    if not name.startswith("top_k"):  # one bin for the rest may be shared
        assert measure(p, q).item() == pytest.approx(measure.bounds[1], abs=1e-6)


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
@FULL_SUPPORT
@given(pair=pairs())
def test_gradients_are_finite_and_agree_with_float64(name: str, pair: tuple[Tensor, Tensor]) -> None:
    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        p, q = (x.to(dtype).requires_grad_() for x in pair)
        return torch.autograd.grad(divergence(name)(p, q), (p, q))

    single, double = gradients(torch.float32), gradients(torch.float64)
    for x, y, logits in zip(single, double, pair, strict=True):
        assert x.isfinite().all()
        assert x.dtype == torch.float32
        assert (x[logits == -INF] == 0).all()
        # tv has a kink where p = q, on either side of which rounding may fall
        if "tv" not in name and not (name.startswith("top_k") and has_near_ties(pair[0])):
            torch.testing.assert_close(x, y.float(), rtol=1e-3, atol=2e-5)


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


class LargestOutputs(TorchDispatchMode):
    """Counts the tensors of more than ``limit`` entries that operations make."""

    def __init__(self, limit: int, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.limit, self.made = limit, 0
        self.seen = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.numel() > self.limit:
                storage = tensor.untyped_storage().data_ptr()
                self.made += storage not in self.seen
                self.seen.add(storage)
        return out


@pytest.mark.parametrize("name", SOME)
def test_memory_is_that_of_a_chunk(name: str) -> None:
    rows, size, chunk = 32, 50, 2
    p, q = torch.randn(2, rows, size, generator=torch.Generator().manual_seed(6))
    p, q = p.clone().requires_grad_(), q.clone().requires_grad_()
    saved: list[Tensor] = []
    watch = LargestOutputs(limit=chunk * size, known=(p, q))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x), watch:
        value = divergence(name)(p, q, chunk_size=chunk).sum()
    assert watch.made == 0
    assert {x.data_ptr() for x in saved if x.numel() > rows} == {p.data_ptr(), q.data_ptr()}
    with watch:
        value.backward()
    assert watch.made == 2  # the two gradients


@pytest.mark.parametrize("name", PLAIN)
def test_lumping_never_adds_divergence(name: str) -> None:
    p, q = torch.randn(2, 6, 80, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 2
    plain = divergence(name)(p, q)
    for k in (1, 7, 50):
        assert (divergence(f"top_k_{name}:{k}")(p, q) <= plain + 1e-12).all()
    torch.testing.assert_close(divergence(f"top_k_{name}")(p, q), divergence(f"top_k_{name}:50")(p, q))
    torch.testing.assert_close(divergence(f"top_k_{name}:80")(p, q), plain)


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


@pytest.mark.parametrize("name", NAMES)
def test_what_terms_are_where_q_is_zero(name: str) -> None:
    """As the registry says: what the lump and the kernels rely on."""
    measure = divergence(name)
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.5, 0.3, 0.01, 0.19]], dtype=torch.float64)  # split differently
    inside = torch.tensor([[0.7, 0.3, 0.0, 0.0]], dtype=torch.float64).expand(2, -1)
    lumped_p, lumped_q = (torch.cat([x[:, :2], x[:, 2:].sum(-1, keepdim=True)], -1) for x in (p, inside))
    one, other = measure(p.log(), inside.log(), log_probs=True).tolist()
    lump = measure(lumped_p.log(), lumped_q.log(), log_probs=True)[0].item()
    assert measure.infinite_on_reduced_vocabulary == (one == INF and not name.startswith("top_k"))
    if measure.where_q_is_zero == "linear":
        assert one == pytest.approx(other) == pytest.approx(lump)
    else:
        assert measure.where_q_is_zero == "infinite" and one == other == lump == INF
        without = torch.tensor([[0.6, 0.4, 0.0, 0.0]], dtype=torch.float64)
        assert measure(without.log(), inside[:1].log(), log_probs=True).isfinite().all()


def test_a_divergence_that_is_not_linear_there_expands_the_drafters_vocabulary() -> None:
    """Squared differences: of p² at q = 0 the lump's would be another number."""
    squares = Divergence(
        "squares", "sum (p-q)^2", "symmetric", (0.0, 2.0), True,
        lambda log_p, log_q: (log_p.exp() - log_q.exp()).square().sum(-1),
    )  # fmt: skip
    assert squares.where_q_is_zero == "else"
    draft_ids = torch.tensor([1, 3])
    p, q = torch.randn(3, 6), torch.randn(3, 2)
    expected = (p.softmax(-1) - expand_draft(q, draft_ids, 6).softmax(-1)).square().sum(-1)
    torch.testing.assert_close(squares.with_reduced_drafter(p, q, draft_ids), expected)
    assert not torch.allclose(squares(*reduced(p, q, draft_ids), log_probs=True), expected)


@pytest.mark.parametrize("name", ["kl_qp", "js", "tv"])
def test_gradients_through_the_reduced_vocabulary(name: str) -> None:
    generator = torch.Generator().manual_seed(9)
    draft_ids = torch.tensor([0, 2, 3])
    p = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    q = torch.randn(4, 3, generator=generator, dtype=torch.float64)

    def value(p: Tensor, q: Tensor) -> Tensor:
        return divergence(name)(*reduced(p, q, draft_ids), log_probs=True)

    assert torch.autograd.gradcheck(value, (p.requires_grad_(), q.requires_grad_()))
    masked = p.detach().clone()
    masked[:, [1, 4, 5]] = -INF  # nothing outside the drafter's vocabulary
    masked.requires_grad_()
    gradients = torch.autograd.grad(value(masked, q).sum(), (masked, q))
    assert all(gradient.isfinite().all() for gradient in gradients)


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


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: divergence("jss"), UnknownNameError, "unknown divergence 'jss'.*Did you mean 'js'"),
        (lambda: divergence("top_k_js:0"), FsdError, "k must be a whole number from 1"),
        (lambda: divergence("top_k_js:2.5"), FsdError, "k must be a whole number from 1"),
        (lambda: divergence("top_k_js:"), FsdError, "k must be a whole number from 1"),
        (lambda: divergence("js:3"), FsdError, "takes no parameter"),
        (
            lambda: divergence("js")(torch.zeros(4), torch.zeros(5)),
            VocabularyMismatchError,
            "p has 4 entries per row, q has 5",
        ),
        (lambda: divergence("js")(torch.zeros(2, 4), torch.zeros(3, 4)), FsdError, "shapes"),
        (lambda: divergence("js")(torch.zeros(4), torch.zeros(4), chunk_size=0), FsdError, "chunk_size is 0"),
        (
            lambda: reduced(torch.zeros(4), torch.zeros(3), torch.tensor([0, 1])),
            VocabularyMismatchError,
            "3 logits but draft_ids names 2",
        ),
    ],
)
def test_bad_input(make: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
