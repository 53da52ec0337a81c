"""Divergences between the target's and the drafter's next-token distributions.

``p`` is the target, ``q`` the drafter, ``m = (p + q) / 2``; all values are in nats. Acceptance rules and training share
this module, so every value is differentiable in both arguments::

    from fsd_core.divergence import divergence
    d = divergence("js")(target_logits, draft_logits)  # [..., V], [..., V] -> [...]

Numerics, for every divergence here:

* Computed in fp32 (fp64 if an argument is fp64), from log-softmax, with ``0 log 0 = 0``. A log-probability of -1e30 or
  less counts as probability 0, so ``finfo.min`` masks are equivalent to ``-inf``.
* Never NaN for distributions: equal arguments give exactly 0, disjoint ones the upper bound or ``inf``. A row of NaN,
  +inf or only -inf gives NaN.
* Gradients are finite. Terms that make a value infinite are constants to the gradient.
* Rows are processed in chunks, and the backward pass recomputes each chunk. So besides arguments and gradients, the
  memory is that of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsd_core.errors import FsdError, VocabularyMismatchError
from fsd_core.functional import at_nodes, is_host, replaceable
from fsd_core.registry import Registry, read_int

LN2 = math.log(2.0)
ZERO = -1e30  # log-probabilities up to this mean probability 0; finite, to avoid inf - inf
DEFAULT_K, MAX_K = 50, 2**20  # no vocabulary is larger

RowFunction = Callable[[Tensor, Tensor], Tensor]  # log p [n, V], log q [n, V], both >= ZERO -> [n]


def _total(terms: Tensor, infinite: Tensor) -> Tensor:
    """Sum [n, V] terms per row; the sum is ``inf`` if a term is, without a gradient of that term."""
    finite = terms.masked_fill(infinite, 0.0).sum(-1)
    return finite + torch.zeros_like(finite).masked_fill(infinite.any(-1), math.inf)


def _kl_qp(log_p: Tensor, log_q: Tensor) -> Tensor:
    return _total(log_q.exp() * (log_q - log_p), (log_p <= ZERO) & (log_q > ZERO))


def _kl_pq(log_p: Tensor, log_q: Tensor) -> Tensor:
    return _kl_qp(log_q, log_p)


def _js(log_p: Tensor, log_q: Tensor) -> Tensor:
    # ln(p/m) = ln 2 - softplus(ln q - ln p): exactly 0 where p = q, and no logarithm of a sum of tiny numbers
    gap = log_q - log_p
    terms = log_p.exp() * (LN2 - F.softplus(gap)) + log_q.exp() * (LN2 - F.softplus(-gap))
    return 0.5 * terms.sum(-1)


def _ag(log_p: Tensor, log_q: Tensor) -> Tensor:
    gap = log_q - log_p
    terms = (log_p.exp() + log_q.exp()) * (F.softplus(gap) + F.softplus(-gap) - 2 * LN2)
    return 0.25 * _total(terms, (log_p <= ZERO) != (log_q <= ZERO))


def _tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def _lump(log_p: Tensor, log_q: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Keep the k most likely tokens of p, in both, and lump all others into one bin: [n, V] -> [n, k + 1]."""
    if k >= log_p.shape[-1]:
        return log_p, log_q
    top = log_p.detach().topk(k, dim=-1).indices

    def lump(logs: Tensor) -> Tensor:
        rest = logs.scatter(-1, top, ZERO).logsumexp(-1, keepdim=True)  # only zeros: ZERO + ln V == ZERO in floats
        return torch.cat([logs.gather(-1, top), rest], dim=-1)

    return lump(log_p), lump(log_q)


def _log_probs(values: Tensor, normalised: bool) -> Tensor:
    values = values if values.dtype == torch.float64 else values.float()
    return (values if normalised else values.log_softmax(-1)).clamp_min(ZERO)


def _by_chunks(p: Tensor, q: Tensor, rows: RowFunction, normalised: bool, chunk: int) -> Tensor:
    """Apply a row function to chunks of logits [n, V]; a backward pass computes each chunk again."""

    def of_chunk(p: Tensor, q: Tensor) -> Tensor:
        return rows(_log_probs(p, normalised), _log_probs(q, normalised))

    run: Callable[[Tensor, Tensor], Tensor] = of_chunk
    if torch.is_grad_enabled() and (p.requires_grad or q.requires_grad):
        run = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([run(*parts) for parts in zip(p.split(chunk), q.split(chunk), strict=True)])


@dataclass(frozen=True)
class Divergence:
    """A named divergence D(p, q) of the drafter's distribution q from the target's p.

    Attributes:
        name: its registered name (``top_k_js:20`` for a top-k form with its own k).
        formula: the formula, with p the target and q the drafter.
        direction: which argument is measured from which.
        bounds: smallest and largest value in nats (tv: dimensionless).
        symmetric: whether D(p, q) = D(q, p).
        rows: the row function, log p [n, V] and log q [n, V] (zeros as ``ZERO``) -> [n].
        k: for top-k forms, the number of the target's likeliest tokens with a bin each.
        where_q_is_zero: a token's term at q = 0 as a function of p: "linear", "infinite" unless p is 0, or "else". The
            first two allow lumping the tokens outside a reduced draft vocabulary (:func:`reduced`).
    """

    name: str
    formula: str
    direction: str
    bounds: tuple[float, float]
    symmetric: bool
    rows: RowFunction
    k: int | None = None
    where_q_is_zero: Literal["linear", "infinite", "else"] = "else"

    def __call__(self, p: Tensor, q: Tensor, *, log_probs: bool = False, chunk_size: int | None = None) -> Tensor:
        """Return D(p, q) per row.

        Args:
            p: [..., V] the target's logits, or log-probabilities if ``log_probs``.
            q: [..., V] the drafter's, same shape.
            log_probs: the arguments are normalised log-probabilities.
            chunk_size: rows per chunk (default: by device, to fit a cache or a small part of a GPU's memory).

        Returns:
            [...] nats, fp32 (fp64 if an argument is).

        Raises:
            VocabularyMismatchError: the last dimensions differ.
            FsdError: the leading shapes differ, or ``chunk_size`` is not positive.
        """
        if p.shape[-1] != q.shape[-1]:
            raise VocabularyMismatchError(
                f"divergence {self.name!r}: p has {p.shape[-1]} entries per row, q has {q.shape[-1]}. "
                "Bring both to one vocabulary first (see fsd_core.divergence.reduced)."
            )
        if p.shape != q.shape:
            raise FsdError(f"divergence {self.name!r}: shapes {tuple(p.shape)} and {tuple(q.shape)} differ.")
        if chunk_size is None:
            elements = 2**20 if is_host(p.device) else 2**25
            chunk_size = max(1, elements // p.shape[-1])
        elif chunk_size < 1:
            raise FsdError(f"chunk_size is {chunk_size}; it must be at least 1.")
        flat_p, flat_q = p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1])
        value = _by_chunks(flat_p, flat_q, self._row_function, log_probs, chunk_size)
        return value.clamp(*self.bounds).view(p.shape[:-1])  # rounding may leave the range

    @property
    def _row_function(self) -> RowFunction:
        k = self.k
        return self.rows if k is None else lambda log_p, log_q: self.rows(*_lump(log_p, log_q, k))

    def with_reduced_drafter(self, p_logits: Tensor, q_logits: Tensor, draft_ids: Tensor | None) -> Tensor:
        """Return D(p, q) for a drafter over only the target's tokens ``draft_ids``; q is 0 elsewhere.

        Args:
            p_logits: [..., V].
            q_logits: [..., Vd].
            draft_ids: [Vd]; None if Vd = V.

        Returns:
            [...]. Lumpable forms (``where_q_is_zero``) use Vd + 1 bins; others expand q.
        """
        if draft_ids is None:
            return self(p_logits, q_logits)
        draft_ids = draft_ids.long()  # files may store narrower integers
        if self.is_reducible:
            return self(*reduced(p_logits, q_logits, draft_ids), log_probs=True)
        return self(p_logits, expand_draft(q_logits, draft_ids, p_logits.shape[-1]))

    @property
    def is_reducible(self) -> bool:
        """Whether one bin for all tokens with q = 0 leaves the value unchanged (:func:`reduced`)."""
        return self.k is None and self.where_q_is_zero != "else"

    @property
    def infinite_on_reduced_vocabulary(self) -> bool:
        """Whether it is infinite if the target has mass outside the draft vocabulary."""
        return self.k is None and self.where_q_is_zero == "infinite"

    def describe(self) -> dict[str, object]:
        """Return name, direction, formula and unit, for records of runs."""
        unit = "dimensionless" if self.rows is _tv else "nats"
        return {"divergence": self.name, "direction": self.direction, "formula": self.formula, "unit": unit}


DIVERGENCES: Registry[Divergence] = Registry("divergence", takes_yours=True)

_PLAIN = (
    Divergence(
        "kl_qp", "sum q ln(q/p)", "KL(q||p), draft from target", (0.0, math.inf), False, _kl_qp,
        where_q_is_zero="linear",
    ),
    Divergence(
        "kl_pq", "sum p ln(p/q)", "KL(p||q), target from draft", (0.0, math.inf), False, _kl_pq,
        where_q_is_zero="infinite",
    ),
    Divergence(
        "js", "KL(p||m)/2 + KL(q||m)/2, m = (p+q)/2", "symmetric", (0.0, LN2), True, _js, where_q_is_zero="linear"
    ),
    Divergence(
        "ag", "KL(m||p)/2 + KL(m||q)/2, m = (p+q)/2", "symmetric", (0.0, math.inf), True, _ag,
        where_q_is_zero="infinite",
    ),
    Divergence("tv", "sum |p-q| / 2", "symmetric", (0.0, 1.0), True, _tv, where_q_is_zero="linear"),
)  # fmt: skip


def _top_k(plain: Divergence, k: int, name: str) -> Divergence:
    formula = f"{plain.formula}, over the {k} tokens most likely under p and one bin for the rest"
    return replace(plain, name=name, formula=formula, symmetric=False, k=k)  # only p picks the bins


for _plain in _PLAIN:
    DIVERGENCES.register(_plain.name)(_plain)
    DIVERGENCES.register(f"top_k_{_plain.name}")(_top_k(_plain, DEFAULT_K, f"top_k_{_plain.name}"))

RENAMED = ("kl", "reverse_kl")  # the other way round than papers name them
BOTH_KL = "kl_qp is KL(q||p), draft from target, once called kl; kl_pq is KL(p||q), target from draft, once reverse_kl."
for _old in RENAMED:
    DIVERGENCES.retire(_old, BOTH_KL)
    DIVERGENCES.retire(f"top_k_{_old}", f"top_k_kl_qp or top_k_kl_pq. {BOTH_KL}")


def divergence(name: str | Divergence) -> Divergence:
    """Return the divergence called ``name``; ``top_k_<plain>:<k>`` sets k (default: 50). A Divergence passes through.

    Raises:
        UnknownNameError: no such name.
        FsdError: a k that is not a positive integer, or a k on a form that has none.
    """
    return name if isinstance(name, Divergence) else _named(str(name))


@cache  # rules ask in every round
def _named(name: str) -> Divergence:
    stem, colon, parameter = name.partition(":")
    measure = DIVERGENCES.get(stem)
    if not colon:
        return measure
    if measure.k is None:
        raise FsdError(f"divergence {name!r}: {stem!r} takes no parameter; only top_k_* forms do, as in top_k_js:20.")
    k = read_int(parameter)
    if k is None or not 1 <= k <= MAX_K:
        raise FsdError(f"divergence {name!r}: k must be a whole number from 1 to {MAX_K}, not {parameter!r}.")
    return _top_k(DIVERGENCES.get(stem.removeprefix("top_k_")), k, name)


def expand_draft(q: Tensor, draft_ids: Tensor | None, vocab_size: int, other: float = -math.inf) -> Tensor:
    """Expand logits of the drafter's tokens to the target's vocabulary: [..., Vd], [Vd] -> [..., V].

    ``other``: value outside ``draft_ids``; 0 expands probabilities.
    """
    if draft_ids is None:
        return q
    return q.new_full((*q.shape[:-1], vocab_size), other).index_copy(-1, draft_ids.long(), q)


def reduced(p_logits: Tensor, q_logits: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return both distributions on the drafter's vocabulary plus one bin for all other tokens, where q is 0.

    Exact for sums of terms f(p_i, q_i) where f(p_i, 0) is linear in p_i, as in kl_qp (0), js (p_i ln(2)/2) and tv
    (p_i/2). Also exact where f(p_i, 0) is infinite unless p_i is 0, as in kl_pq and ag (``is_reducible``).
    The bin's term is then the sum of its tokens' terms. Other divergences and the top-k forms change their value;
    :meth:`Divergence.with_reduced_drafter` handles all of them.

    Args:
        p_logits: [..., V] the target's logits.
        q_logits: [..., Vd] the drafter's, over the tokens ``draft_ids``.
        draft_ids: [Vd] distinct target ids.

    Returns:
        log p [..., Vd + 1] and log q [..., Vd + 1], fp32 (fp64 if the argument is), the lump last. Differentiable.

    Raises:
        VocabularyMismatchError: ``draft_ids`` does not fit ``q_logits``.
    """
    if q_logits.shape[-1] != draft_ids.shape[0]:
        raise VocabularyMismatchError(
            f"the drafter has {q_logits.shape[-1]} logits but draft_ids names {draft_ids.shape[0]} tokens; "
            "they must be equally many."
        )
    p_logits = p_logits if p_logits.dtype == torch.float64 else p_logits.float()
    q_logits = q_logits if q_logits.dtype == torch.float64 else q_logits.float()
    log_q = F.pad(q_logits.log_softmax(-1), (0, 1), value=-math.inf)
    inside = p_logits.index_select(-1, draft_ids)
    outside = p_logits.index_fill(-1, draft_ids, ZERO).clamp_min(ZERO).logsumexp(-1, keepdim=True)
    outside = outside.masked_fill(outside <= ZERO, -math.inf)  # no gradient there, and no inf - inf in it
    return torch.cat([inside, outside], dim=-1).log_softmax(-1), log_q


@replaceable
def divergence_rows(
    p_logits: Tensor,
    q_logits: Tensor,
    measure: Divergence,
    draft_ids: Tensor | None = None,
    q_index: Tensor | None = None,
) -> Tensor:
    """Return D(p, q) per row of p in nats, in fp32 (fp64 if an argument is).

    Args:
        p_logits: [..., V] the target's; [B, N, V] with ``q_index``.
        q_logits: [..., Vd] the drafter's; [B, I, Vd] with ``q_index``.
        measure: D.
        draft_ids: [Vd] the tokens of q's columns, elsewhere q is 0; None: V = Vd.
        q_index: [B, N] int64, the row of q for each row of p, -1 for none; None: all in order.

    Returns:
        [...]; [B, N] with ``q_index``, infinite where it is -1.

    Raises:
        IndexError: a row or a token is out of range.
        VocabularyMismatchError: ``draft_ids`` or V does not fit ``q_logits``.
    """
    if q_index is None:
        return measure.with_reduced_drafter(p_logits, q_logits, draft_ids)
    q_logits = at_nodes(q_logits, q_index.clamp_min(0))
    return measure.with_reduced_drafter(p_logits, q_logits, draft_ids).masked_fill(q_index < 0, math.inf)
