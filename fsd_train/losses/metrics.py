"""Metrics of a draft head, teacher-forced: they need no decoding and run on validation batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fsd_infer.divergence import divergence, reduced
from fsd_infer.errors import DataError
from fsd_infer.rules import Exact, Fuzzy, parse_rule
from fsd_train.losses.base import DraftBatch, LMHead
from fsd_train.losses.fsd import expected_length

DEFAULT_RULES = ("exact", "fuzzy:js:0.3")


@dataclass(frozen=True)
class Comparison:
    """The drafter beside the target at every row and step, [S, N] each.

    Attributes:
        agree: bool, the drafter's most likely token is the target's most likely one in its whole vocabulary.
        overlap: Σ_v min(p, q), the chance that a token drawn from q passes the exact test.
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
) -> Comparison:
    """Drafter and target over the target's whole vocabulary, where q is 0 outside the draft vocabulary.

    These are the raw distributions that a rule's gate sees in decoding, not p renormalised within the draft vocabulary
    as losses see it.

    Args:
        batch: estimates [S, N, H] and features [N, H]; steps that share one tensor (stride 0) are computed once.
        full_head: the target's whole LM head.
        draft_ids: [Vd] target id of each draft vocabulary entry; None if the draft vocabulary is the target's.
        divergences: names of :mod:`fsd_infer.divergence`.
        chunk_size: rows whose [V] logits are alive at a time; None for 128 on a CPU, elsewhere a quarter of a GiB.
    """
    steps, rows = batch.estimates.shape[:2]
    own = 1 if steps > 1 and batch.estimates.stride(0) == 0 else steps
    device = batch.features.device
    if chunk_size is None:
        chunk_size = 128 if device.type == "cpu" else max(128, 2**26 // len(full_head.weight))
    agree = torch.empty(own, rows, dtype=torch.bool, device=device)
    overlap = torch.empty(own, rows, device=device)
    measures = [divergence(name) for name in divergences]
    distances = {name: torch.empty(own, rows, device=device) for name in divergences}
    for start in range(0, rows, chunk_size):
        piece = slice(start, start + chunk_size)
        p = full_head(batch.features[piece])
        best = p.argmax(-1)
        log_p = p.log_softmax(-1)
        inside, lumped = log_p, log_p
        if draft_ids is not None:
            inside = log_p[:, draft_ids]
            # one bin for all tokens that the drafter lacks, made once for all steps
            lumped, _ = reduced(p, inside, draft_ids)
        for step in range(own):
            q = batch.draft_head(batch.estimates[step, piece])
            drafted = q.argmax(-1)
            agree[step, piece] = (drafted if draft_ids is None else draft_ids[drafted]) == best
            log_q = q.log_softmax(-1)
            overlap[step, piece] = torch.minimum(inside, log_q).exp().sum(-1)
            if draft_ids is not None:
                log_q = torch.nn.functional.pad(log_q, (0, 1), value=-torch.inf)
            for measure, values in zip(measures, distances.values(), strict=True):
                if measure.lumpable:
                    values[step, piece] = measure(lumped, log_q, log_probs=True)
                else:
                    values[step, piece] = measure.with_reduced_drafter(p, q, draft_ids)
    return Comparison(
        agree.expand(steps, -1),
        overlap.expand(steps, -1),
        {name: values.expand(steps, -1) for name, values in distances.items()},
    )


class StepMean(Metric):
    """Mean of a quantity over the supervised rows of each unrolled step."""

    total: Tensor
    rows: Tensor

    def __init__(self, steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros(steps, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(steps, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor) -> None:
        """values [S, N], bool for a share, weights [S, N] (0: not supervised)."""
        counted = weights > 0
        self.total += values.double().masked_fill(~counted, 0.0).sum(1)
        self.rows += counted.sum(1)

    def compute(self) -> Tensor:
        """[S], of one step a scalar (torchmetrics has it so); NaN for a step that was never supervised."""
        return self.total / self.rows

    def by_step(self) -> list[Tensor]:
        """What :meth:`compute` gives as S scalars."""
        return list(self.compute().reshape(-1))


class ExpectedTau(Metric):
    """Expected accepted length 1 + Σ_{k=1…S} Π_{s<k} a_s of a chain, teacher-forced.

    a_s is the chance that the draft of step s survives: what a rule accepts of a draft sampled from q, or 1 where a
    greedy draft agrees with the target and 0 where it does not. The leading 1 is the target's own token. Averaged over
    the roots whose S steps are all supervised.
    """

    total: Tensor
    roots: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("roots", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, acceptance: Tensor, chains: Tensor) -> None:
        """acceptance [S, N] in [0, 1] or bool, chains [S, C] of :func:`.chain_rows` on the same device."""
        lengths = 1 + expected_length(acceptance.double().gather(1, chains))
        self.total += lengths.sum()
        self.roots += len(lengths)

    def compute(self) -> Tensor:
        """Scalar, NaN if no chain was long enough."""
        return self.total / self.roots


class RuleMetrics(nn.Module):
    """What acceptance rules would make of the drafter, teacher-forced at temperature 1, by name:

    - ``divergence_js_0``: mean D(p, q) at depth 0, 1, …, for each divergence that a rule names;
    - ``gate_open_0/fuzzy:js:0.3``: share of contexts with D ≤ T;
    - ``expected_tau/fuzzy:js:0.3``: see :class:`ExpectedTau`, with a = e + (1 − e)·[D ≤ T] and e = Σ min(p, q).

    Args:
        rules: "exact" and "fuzzy:DIVERGENCE:T".
        steps: depths looked at.

    Raises:
        UnknownNameError, FsdError: a rule that does not exist or is malformed.
        DataError: a rule other than these two, or a gate on processed distributions.
    """

    def __init__(self, rules: Sequence[str], steps: int) -> None:
        super().__init__()
        self.rules: list[tuple[str, str | None, float]] = []
        for text in rules:
            rule = parse_rule(text)
            if isinstance(rule, Exact):
                self.rules.append((text, None, 0.0))
            elif isinstance(rule, Fuzzy) and rule.gate_on == "raw":
                self.rules.append((text, divergence(rule.divergence).name, rule.threshold))
            else:
                raise DataError(f"eval_rules: {text!r} is neither exact nor fuzzy on raw distributions.")
        self.divergences = sorted({name for _, name, _ in self.rules if name is not None})
        self.distance = [StepMean(steps) for _ in self.divergences]
        self.gate = [StepMean(steps) for _ in self.rules]
        self.tau = [ExpectedTau() for _ in self.rules]
        self.metrics = nn.ModuleList([*self.distance, *self.gate, *self.tau])  # so that they move with the module

    def update(self, seen: Comparison, weights: Tensor, chains: Tensor) -> None:
        """Add a batch: what :func:`compare` saw, weights [S, N] and chains [S, C] of :func:`.chain_rows`."""
        for name, metric in zip(self.divergences, self.distance, strict=True):
            metric.update(seen.distances[name], weights)
        for (_, gated, threshold), gate, tau in zip(self.rules, self.gate, self.tau, strict=True):
            acceptance = seen.overlap
            if gated is not None:
                is_open = ((seen.distances[gated] <= threshold) & (threshold > 0)).to(acceptance.dtype)
                gate.update(is_open, weights)
                acceptance = acceptance + (1 - acceptance) * is_open
            tau.update(acceptance, chains)

    def compute(self) -> dict[str, Tensor]:
        """Scalars by name, and a clean slate for the next epoch."""
        values: dict[str, Tensor] = {}
        for name, metric in zip(self.divergences, self.distance, strict=True):
            values.update({f"divergence_{name}_{step}": value for step, value in enumerate(metric.by_step())})
            metric.reset()
        for (text, gated, _), gate, tau in zip(self.rules, self.gate, self.tau, strict=True):
            if gated is not None:
                values.update({f"gate_open_{step}/{text}": value for step, value in enumerate(gate.by_step())})
            values[f"expected_tau/{text}"] = tau.compute()
            gate.reset()
            tau.reset()
        return {name: value.float() for name, value in values.items()}
