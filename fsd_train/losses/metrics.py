"""Teacher-forced metrics of a draft head on validation batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from fsd_core.divergence import divergence, reduced
from fsd_core.errors import DataError
from fsd_infer.rules import Exact, Fuzzy, parse_rule
from fsd_train.losses.base import DraftBatch, LMHead, LossIndex
from fsd_train.losses.fsd import expected_length
from fsd_train.losses.rows import blocks

DEFAULT_RULES = ("exact", "fuzzy:js:0.3")
POSITION_STARTS = (0, 512, 1024, 2048, 4096)  # from which on the lengths of chains are averaged separately


@dataclass(frozen=True)
class DraftAgreement:
    """Comparison of drafter and target at every row, [R] each.

    Attributes:
        agree: bool, both have the same most likely token of the target's whole vocabulary.
        overlap: Σ_v min(p, q), the probability that a token drawn from q passes the exact test.
        distances: D(p, q) by the divergence's name, in nats (tv: dimensionless).
    """

    agree: Tensor
    overlap: Tensor
    distances: dict[str, Tensor]


@torch.no_grad()
def compare(
    batch: DraftBatch,
    full_head: LMHead,
    draft_ids: Tensor | None,
    divergences: Sequence[str] = (),
    chunk_size: int | None = None,
) -> DraftAgreement:
    """Compare drafter and target over the target's whole vocabulary; q is 0 outside the draft vocabulary.

    A rule's gate sees these raw distributions in decoding, while losses renormalise p within the draft vocabulary.

    Args:
        batch: estimates [R, H] and features [N, H].
        full_head: the target's whole LM head.
        draft_ids: [Vd] target id of each draft vocabulary entry; None if it is the target's vocabulary.
        divergences: names of :mod:`fsd_core.divergence`.
        chunk_size: rows of [V] logits alive at a time; None: 128 on a CPU, elsewhere a quarter of a GiB.
    """
    count, device = len(batch.estimates), batch.features.device
    if chunk_size is None:
        chunk_size = 128 if device.type == "cpu" else max(128, 2**26 // len(full_head.weight))
    agree = torch.empty(count, dtype=torch.bool, device=device)
    overlap = torch.empty(count, device=device)
    measures = [divergence(name) for name in divergences]
    distances = {name: torch.empty(count, device=device) for name in divergences}
    for block in blocks(batch.rows.offsets, chunk_size):
        rows_here = block.rows  # n rows at m positions
        position = batch.rows.position_index[rows_here] - block.positions.start  # [n] position of each row
        p = full_head(batch.features[block.positions])  # [m, V] logits
        best = p.argmax(-1)[position]  # [n]
        log_p = p.log_softmax(-1)
        inside, merged = log_p, log_p
        if draft_ids is not None:
            inside = log_p[:, draft_ids]  # [m, Vd]
            merged, _ = reduced(p, inside, draft_ids)  # [m, Vd + 1], one bin for all tokens outside
        q = batch.draft_lm_head(batch.estimates[rows_here])  # [n, Vd] logits
        drafted = q.argmax(-1)
        agree[rows_here] = (drafted if draft_ids is None else draft_ids[drafted]) == best
        log_q = q.log_softmax(-1)
        overlap[rows_here] = torch.minimum(inside[position], log_q).exp().sum(-1)
        if draft_ids is not None:
            log_q = torch.nn.functional.pad(log_q, (0, 1), value=-torch.inf)
        for measure, values in zip(measures, distances.values(), strict=True):
            if measure.is_reducible:
                values[rows_here] = measure(merged[position], log_q, log_probs=True)
            else:
                values[rows_here] = measure.with_reduced_drafter(p[position], q, draft_ids)
    return DraftAgreement(agree, overlap, distances)


class StepMean(Metric):
    """Mean of a quantity over the supervised rows of each chain step."""

    total: Tensor
    rows: Tensor

    def __init__(self, steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros(steps, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(steps, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, step: Tensor) -> None:
        """Add values [R] (bool for a share) with their steps [R]."""
        values = values.to(self.total.dtype)  # DeepSpeed casts a module's metrics, too
        self.total.index_add_(0, step, values)
        self.rows.index_add_(0, step, torch.ones_like(values))

    def compute(self) -> Tensor:
        """Return the means [S], NaN for a step without rows."""
        return self.total / self.rows


def chain_lengths(acceptance: Tensor, chains: Tensor) -> Tensor:
    """Return the teacher-forced acceptance length 1 + Σ_{k=1…S} Π_{s<k} a_s of each chain: [C] fp64.

    Args:
        acceptance: [R] a, the probability that a row's draft is accepted, or bool for greedy drafts.
        chains: [S, C] rows of the chains whose S steps are all supervised.
    """
    return 1 + expected_length(acceptance.double()[chains])


class ValidationMetrics(nn.Module):
    """Teacher-forced metrics, the last three for acceptance rules at temperature 1:

    - ``loss``: mean loss over positions;
    - ``agreement_0``: share of drafts at depth 0, 1, … that are the target's most likely token;
    - ``tau``: mean of :func:`chain_lengths` with greedy drafts; NaN without a whole chain;
    - ``tau_from_512``: the same of chains whose first draft is at this position of its conversation or later, up to the
      next of :data:`POSITION_STARTS`; absent without such chains, and altogether if all begin before the second;
    - ``divergence_js_0``: mean D(p, q) at depth 0, 1, … for each divergence of a rule;
    - ``gate_open_0/fuzzy:js:0.3``: share of contexts with D ≤ T;
    - ``expected_tau/fuzzy:js:0.3``: mean of :func:`chain_lengths` with a = e + (1 − e)·[D ≤ T] and e = Σ min(p, q).

    Args:
        rules: "exact" and "fuzzy:DIVERGENCE:T".
        steps: number of depths.

    Raises:
        UnknownNameError, FsdError: a rule is unknown or malformed.
        DataError: a rule is neither of these, or its gate reads processed distributions.
    """

    def __init__(self, rules: Sequence[str], steps: int) -> None:
        super().__init__()
        self.gates: dict[str, tuple[str, float] | None] = {}  # divergence and threshold by rule, None without a gate
        for text in rules:
            rule = parse_rule(text)
            if isinstance(rule, Fuzzy) and rule.gate_on == "raw":
                self.gates[text] = divergence(rule.divergence).name, rule.threshold
            elif isinstance(rule, Exact):
                self.gates[text] = None
            else:
                raise DataError(f"eval_rules: {text!r} is neither exact nor fuzzy on raw distributions.")
        self.divergences = sorted({gate[0] for gate in self.gates.values() if gate is not None})
        gated = [f"gate_open/{text}" for text, gate in self.gates.items() if gate is not None]
        by_step = ["agreement", *(f"divergence_{name}" for name in self.divergences), *gated]
        means = ["loss", "tau", *(f"expected_tau/{text}" for text in self.gates)]
        self._named: dict[str, Metric] = {name: StepMean(steps) for name in by_step}
        for name in means:  # without the NaN check, which would wait for the device
            self._named[name] = MeanMetric(nan_strategy="disable").set_dtype(torch.float64)
        self._by_position = StepMean(len(POSITION_STARTS))
        self.metrics = nn.ModuleList([*self._named.values(), self._by_position])  # they move with the module

    def update(self, agreement: DraftAgreement, rows: LossIndex, loss: Tensor, positions: Tensor) -> None:
        """Add a batch.

        Args:
            agreement: :func:`compare` of its rows.
            rows: its rows.
            loss: its loss.
            positions: [M] position of each token in its conversation.
        """
        self._named["loss"].update(loss.expand(len(rows.position)))
        self._named["agreement"].update(agreement.agree, rows.step)
        lengths = chain_lengths(agreement.agree, rows.chains)  # [C]
        self._named["tau"].update(lengths)
        start = positions[rows.position[rows.position_index[rows.chains[0]]]]  # [C]
        bucket = sum(((start >= bound).long() for bound in POSITION_STARTS[1:]), torch.zeros_like(start))  # [C]
        self._by_position.update(lengths, bucket)
        for name in self.divergences:
            self._named[f"divergence_{name}"].update(agreement.distances[name], rows.step)
        for text, gate in self.gates.items():
            acceptance = agreement.overlap
            if gate is not None:
                name, threshold = gate
                is_open = ((agreement.distances[name] <= threshold) & (threshold > 0)).to(acceptance.dtype)
                self._named[f"gate_open/{text}"].update(is_open, rows.step)
                acceptance = acceptance + (1 - acceptance) * is_open
            self._named[f"expected_tau/{text}"].update(chain_lengths(acceptance, rows.chains))

    def compute(self) -> dict[str, Tensor]:
        """Return the scalars by name and reset all metrics."""
        values: dict[str, Tensor] = {}
        for name, metric in self._named.items():
            value = metric.compute().float()
            if isinstance(metric, StepMean):  # torchmetrics makes a scalar of one step
                quantity, slash, rule = name.partition("/")
                values |= {f"{quantity}_{step}{slash}{rule}": each for step, each in enumerate(value.reshape(-1))}
            else:
                values[name] = value
            metric.reset()
        taus = self._by_position.compute().float()
        self._by_position.reset()
        if not taus[1:].isnan().all():
            by_start = zip(POSITION_STARTS, taus, strict=True)
            values |= {f"tau_from_{start}": tau for start, tau in by_start if not tau.isnan()}
        return values
