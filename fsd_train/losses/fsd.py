"""Expected accepted length under the rule that will judge the drafts. Derivation: docs/losses.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsd_infer.device.transfer import to_device
from fsd_infer.errors import DataError
from fsd_train.losses.base import LOSSES, DraftBatch, LossOutput, Rows, feature_distance, weighted_mean
from fsd_train.losses.rows import LIVE, check_chunk_size, chunked_rows, divergence_rows, log_overlap
from fsd_train.losses.schedule import Schedule

RULES = ("exact", "fuzzy", "fuzzy-strict", "tilted")
OBJECTIVES = ("log", "log_mean", "linear")
LIVE_STRICT = 17  # the strict rule looks at q as a law too: up to 21 tensors of a block's size are alive
_ALMOST_ONE = 1 - 1e-6

_kl, _reverse_kl = divergence_rows("kl"), divergence_rows("reverse_kl")


def chain_rows(rows: Rows) -> Tensor:
    """Which rows make up each chain whose steps are all supervised.

    The chain that begins at flat position i has its step s at the row of position i+s.

    Args:
        rows: distinct flat positions, and which steps count there.

    Returns:
        [S, C] row numbers in host memory: column c is a chain, row s its step s.
    """
    positions, counted = rows.positions, rows.counted
    steps, length = counted.shape
    if not length:
        return positions.new_zeros(steps, 0)
    row_at = positions.new_full((int(positions.max()) + steps,), -1)
    row_at[positions] = torch.arange(length)
    found = row_at[positions + torch.arange(steps)[:, None]]  # [S, N], -1 where there is none
    known = found.clamp_min(0)
    whole = ((found >= 0) & counted.gather(1, known)).all(0)
    return known[:, whole]


def expected_length(acceptance: Tensor) -> Tensor:
    """Σ_k Π_{j≤k} a_j, the expected number of accepted drafts: acceptance [S, C] -> [C]."""
    return acceptance.cumprod(0).sum(0)


def optimal_value(coverage: Tensor, nat: float) -> Tensor:
    """V of the optimal lossy rule at the root of each chain: coverage e = p(C) [S, C] -> [C].

    V_k = λ·ln(1 − e_k + e_k·exp((1 + V_{k+1})/λ)): docs/optimal-rule.md with one V for all children of a node, that of
    the text's own. As λ → ∞, :func:`expected_length`.

    Args:
        coverage: chance that a node's children hold the target's draw.
        nat: λ, accepted drafts that a nat is worth, times the temperature.
    """
    value = torch.zeros_like(coverage[0])
    for covered in coverage.flip(0):
        value = nat * torch.log1p(covered * torch.expm1((1 + value) / nat))
    return value


def spent_by_chain(acceptance: Tensor, gate: Tensor, cost: Tensor) -> Tensor:
    """Σ_k P_{k−1}·g_k·c_k, the nats that open gates are expected to spend: all [S, C] -> [C].

    P_{k−1} = Π_{j<k} a_j is the chance to arrive at step k.
    """
    arrive = torch.cat([torch.ones_like(acceptance[:1]), acceptance[:-1].cumprod(0)])
    return (arrive * gate * cost).sum(0)


def soft_gate(distance: Tensor, threshold: float, softness: float) -> Tensor:
    """σ((T−D)/s), the smooth form of [D ≤ T]; shut at T = 0 and open at T = inf, as the gate itself is."""
    if threshold == 0:
        return torch.zeros_like(distance)
    if math.isinf(threshold):
        return torch.ones_like(distance)
    return torch.sigmoid((threshold - distance) / softness)


def threshold_points(threshold: Any, weights: Sequence[float] | None = None) -> tuple[list[float], list[float]]:
    """The distribution of thresholds that a recipe names, as points and their probabilities.

    Args:
        threshold: one number; several; or ``{from, to, points}``, the uniform distribution between the two, taken at
            the midpoints of ``points`` (5 by default) equal parts.
        weights: relative weights of several thresholds; equal ones by default.

    Raises:
        DataError: no threshold, one that is negative or no number, or weights that do not fit.
    """
    if isinstance(threshold, Mapping):
        if not {"from", "to"} <= set(threshold) <= {"from", "to", "points"}:
            raise DataError(
                f"fsd: a range of thresholds has the keys from, to and points, found {', '.join(map(str, threshold))}."
            )
        low, high, count = threshold["from"], threshold["to"], threshold.get("points", 5)
        if not 0 <= low < high < math.inf or type(count) is not int or count < 1:
            raise DataError(f"fsd: a range of thresholds wants 0 <= from < to and points >= 1, got {dict(threshold)}.")
        points = [low + (high - low) * (number + 0.5) / count for number in range(count)]
    else:
        points = [threshold] if isinstance(threshold, int | float) else list(threshold)
    if not points or not all(value >= 0 for value in points):
        raise DataError(f"fsd: threshold must be one or more numbers that are not negative, got {threshold}.")
    shares = [1.0] * len(points) if weights is None else [float(weight) for weight in weights]
    if len(shares) != len(points) or not all(0 <= share < math.inf for share in shares) or not sum(shares):
        raise DataError(
            f"fsd: threshold_weights must hold a weight for each of the {len(points)} thresholds, not negative and not "
            f"all 0, got {weights}."
        )
    return [float(value) for value in points], [share / sum(shares) for share in shares]


def _schedule(value: Any, name: str, positive: bool = False) -> Schedule:
    """A number or schedule that never goes below 0, or to it if ``positive``. Raises DataError otherwise."""
    schedule = Schedule.read(value, f"fsd: {name}")
    lowest = min(schedule.start, schedule.end)
    if lowest < 0 or (positive and lowest == 0):
        raise DataError(f"fsd: {name} must {'be positive' if positive else 'not be negative'}, got {value!r}.")
    return schedule


def _nats(at: Mapping[str, Tensor]) -> Tensor:
    """KL(law‖p) where a gate is open, [S, C]: that of q, or else of p(·|C) by the expected p(C)."""
    return at["cost"] if "cost" in at else -at["closed"].clamp_min(torch.finfo(torch.float32).tiny).log()


@LOSSES.register("fsd")
class FSDLoss:
    """The expected number of accepted drafts L = Σ_k Π_{j≤k} a_j of every chain, to be made long, plus an anchor.

    a = e + (o−e)·σ((T−D(p, q))/s) is the chance that a drafted token survives, with e and o those at a context whose
    gate is closed and open (``rule`` exact has none). All of it lies over the draft vocabulary, p renormalised within
    it, at the contexts of the training text.

    With ``width`` None drafts are a chain sampled from q: e = Σ min(p, q), or Σ p·q for the strict rule, which draws
    from p without regard to the draft; o = 1. With ``width`` k a node has k children sampled from q, which hold the
    target's draw with chance e = Σ p·(1−(1−q)^k); o = 1, or Σ q·(1−(1−q)^k) for the strict rule, whose open gate draws
    from q and may miss the children.

    What opens gates also spends divergence, and where a gate is open anyway e matters little. With ``price`` λ the
    loss adds λ times the nats that open gates are expected to spend per emitted token, Σ_k P_{k−1}·g_k·c_k / (1 + L):
    c = −ln e on a tree, the cost of p(·|C); KL(q‖p) on a sampled chain and for the strict rule, whose law is q.

    ``softness``, ``temperature``, ``price`` and ``anchor`` are numbers or schedules ``{from, to, over}``: see
    :class:`fsd_train.losses.schedule.Schedule`.

    Args:
        rule: "exact", "fuzzy" (the or-rule), "fuzzy-strict", or "tilted": L is then V, the value of the optimal rule.
        tilted_price: its price.
        divergence: D, a name of :mod:`fsd_infer.divergence`; on raw distributions.
        threshold: T, or a distribution of thresholds, since one head serves many settings: the objective is then its
            mean over them. Several numbers, or a range ``{from, to, points}``: see :func:`threshold_points`.
        threshold_weights: relative weights of several thresholds; equal ones by default.
        softness: s > 0, in the unit of D.
        objective: "log": mean over chains of −ln(L/S); "log_mean": −ln(mean L/S); "linear": mean of S−L, whose
            gradient is that of the negative mean length.
        width: children per node, or None for a sampled chain.
        temperature: of p in e, c and the anchor, and of q as a law: a tree's children come from the raw q at every
            temperature. The gate reads raw distributions, as decoding does. c is multiplied by it, as decoding charges
            the limit of temperature times KL at temperature 0.
        price: λ >= 0, what a nat per emitted token weighs against the objective; 0 leaves spending out.
        anchor: weight of KL(p||q) over all supervised rows, p at the temperature and q as drafts are drawn from it.
            Where a first step is refused, the steps after it get no gradient from L: the anchor keeps them learning.
        w_feature: weight of the ``eagle`` loss's feature term; 0 leaves it out.
        chunk_size: memory bound in rows of logits, see :func:`fsd_train.losses.rows.chunked_rows`.
    """

    couples_rows = True

    def __init__(
        self,
        rule: str = "fuzzy",
        divergence: str = "js",
        threshold: float | Sequence[float] | Mapping[str, Any] = 0.3,
        threshold_weights: Sequence[float] | None = None,
        softness: float | Mapping[str, Any] = 0.1,
        objective: str = "log",
        width: int | None = None,
        temperature: float | Mapping[str, Any] = 1.0,
        price: float | Mapping[str, Any] = 0.0,
        anchor: float | Mapping[str, Any] = 0.1,
        tilted_price: float = 2.0,
        w_feature: float = 0.0,
        chunk_size: int | None = None,
    ) -> None:
        points, shares = threshold_points(threshold, threshold_weights)
        if rule not in RULES or objective not in OBJECTIVES:
            raise DataError(
                f"fsd: rule is one of {', '.join(RULES)} and objective one of {', '.join(OBJECTIVES)}, "
                f"got {rule!r} and {objective!r}."
            )
        if width is not None and width < 1:
            raise DataError(f"fsd: width must be at least 1, or None for a sampled chain, got {width}.")
        if not w_feature >= 0:
            raise DataError(f"fsd: w_feature must not be negative, got {w_feature}.")
        check_chunk_size(chunk_size)
        self.softness = _schedule(softness, "softness", positive=True)
        self.temperature = _schedule(temperature, "temperature", positive=True)
        self.price = _schedule(price, "price")
        self.anchor = _schedule(anchor, "anchor")
        self._gated, self._strict = rule.startswith("fuzzy"), rule == "fuzzy-strict"
        self._tilted_price = tilted_price if rule == "tilted" else math.inf
        self.thresholds, self.shares = (points, shares) if self._gated else ([0.0], [1.0])
        self.objective = objective
        self.width = width
        self.w_feature = w_feature
        self.chunk_size = chunk_size
        self._distance = divergence_rows(divergence)
        used = {  # what is computed per row
            "closed": True,
            "opened": self._strict and width is not None,
            "distance": self._gated,
            "cost": self._gated and (self._strict or width is None) and max(self.price.start, self.price.end) > 0,
            "anchor": max(self.anchor.start, self.anchor.end) > 0,
        }
        self._names = [name for name, wanted in used.items() if wanted]

    def _compared(self, log_p: Tensor, log_q: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """ln p, ln q, and the logarithm of what drafts are drawn from, as decoding at this temperature has them."""
        if temperature == 1.0:
            return log_p, log_q, log_q
        drafts = log_q
        if self.width is None or self._strict:  # elsewhere q is no law
            log_q = (log_q / temperature).log_softmax(-1)
        return (log_p / temperature).log_softmax(-1), log_q, log_q if self.width is None else drafts

    def _rows(self, log_p: Tensor, log_q: Tensor, temperature: float) -> Tensor:
        """The values per row that ``_names`` lists, [R, n]."""
        found = {"distance": self._distance(log_p, log_q)} if self._gated else {}
        raw_p = log_p
        log_p, log_q, drafts = self._compared(log_p, log_q, temperature)
        if self.width is None and not self._strict:
            found["closed"] = log_overlap(log_p, drafts).exp()
        else:  # the draft of a chain is an only child
            # 1−(1−q)^k without loss where q is tiny, as −ln e and its gradient want it; finite where q rounds to 1
            missed = torch.expm1((self.width or 1) * torch.log1p(-drafts.exp().clamp_max(_ALMOST_ONE)))
            p = log_p.exp()
            if math.isfinite(self._tilted_price):  # the rule favours no draft below a quarter of the likeliest one
                p = p * (raw_p >= raw_p.amax(-1, keepdim=True) + math.log(0.25))
            found["closed"] = -torch.linalg.vecdot(p, missed)
            if "opened" in self._names:
                found["opened"] = -torch.linalg.vecdot(log_q.exp(), missed)
        if "cost" in self._names:
            found["cost"] = _kl(log_p, log_q)
        if "anchor" in self._names:
            found["anchor"] = _reverse_kl(log_p, drafts)
        return torch.stack([found[name] for name in self._names])

    def _objective(self, lengths: Tensor, steps: int) -> Tensor:
        """Scalar of the expected lengths [C]; 0, still differentiable, without any chain."""
        if not lengths.numel():
            return lengths.sum()
        tiny = torch.finfo(lengths.dtype).tiny
        if self.objective == "log":
            return -(lengths / steps).clamp_min(tiny).log().mean()
        if self.objective == "log_mean":
            return -(lengths.mean() / steps).clamp_min(tiny).log()
        return steps - lengths.mean()

    def __call__(self, batch: DraftBatch) -> LossOutput:
        steps = batch.estimates.shape[0]
        moving = (self.softness, self.temperature, self.price, self.anchor)
        softness, temperature, price, anchor_weight = (each.at(batch.progress, batch.step) for each in moving)
        measures = partial(self._rows, temperature=temperature)
        live = LIVE_STRICT if self._strict else LIVE
        found, agree = chunked_rows(measures, batch, self.chunk_size, len(self._names), live)
        values = dict(zip(self._names, found, strict=True))
        chains = to_device(chain_rows(batch.rows), batch.weights.device)
        at = {name: rows.gather(1, chains) for name, rows in values.items()}  # [S, C] each
        losses, parts = [], {"acceptance": weighted_mean(values["closed"], batch.weights).detach()}
        for threshold, share in zip(self.thresholds, self.shares):
            accepted, suffix = at["closed"], ""
            if self._gated:
                gate = soft_gate(at["distance"], threshold, softness)
                accepted, suffix = accepted + (at.get("opened", 1.0) - accepted) * gate, f"_{threshold:g}"
            nat = self._tilted_price * temperature
            lengths = expected_length(accepted) if math.isinf(nat) else optimal_value(accepted, nat)
            losses.append(share * self._objective(lengths, steps))
            if not lengths.numel():
                continue
            parts[f"soft_tau{suffix}"] = 1 + lengths.detach().mean()
            if price and threshold > 0:
                spent = spent_by_chain(accepted, gate, temperature * _nats(at)).sum() / (1 + lengths).sum()
                losses.append(share * price * spent)
                parts[f"spent{suffix}"] = spent.detach()
        loss = torch.stack(losses).sum()
        parts["length_loss"] = loss.detach()
        if "anchor" in values:
            anchor = weighted_mean(values["anchor"], batch.weights)
            loss = loss + anchor_weight * anchor
            parts["reverse_kl_loss"] = anchor.detach()
        if self.w_feature:
            feature = weighted_mean(feature_distance(batch), batch.weights)
            loss = loss + self.w_feature * feature
            parts["feature_loss"] = feature.detach()
        return LossOutput(loss, parts, agree)
