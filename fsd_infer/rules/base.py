"""The base of all rules: a name, parameters, and a law."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fsd_infer.device.rows import at_nodes
from fsd_infer.device.transfer import to_device
from fsd_infer.registry import Registry
from fsd_infer.rules._walk import walk
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter, parameters_of
from fsd_infer.rules.phases import markers
from fsd_infer.rules.verification import Verdict, Verification


class Rule:
    """An acceptance rule. Subclasses are frozen dataclasses whose fields are the parameters; they define :meth:`law`.

    Attributes:
        name: under which the class is registered in :data:`RULES`.
        budget: nats that a request may spend, None for no limit.
        only_in: the phase of the text outside of which it emits from p, None for the whole text.

    Raises:
        FsdError: a parameter of another type, or out of range; rule, parameter, value and range are named.
    """

    name: ClassVar[str] = ""
    budget: float | None = None
    only_in: str | None = None

    def __post_init__(self) -> None:
        for name, checks in parameters_of(type(self)).items():
            object.__setattr__(self, name, checks.checked(getattr(self, name)))

    def law(self, evidence: Evidence) -> Law:
        """What is emitted: a function of the text, the tree and ``evidence.coin``, and of nothing else."""
        raise NotImplementedError

    def charged_law(self, evidence: Evidence) -> Law:
        """:meth:`law`, with what all rules of its kind have in common."""
        return self.law(evidence)

    def __call__(self, round: Verification) -> Verdict:
        """The verdict on a round in which this is every row's rule; see :func:`apply_rules`."""
        return apply_rules([self] * round.tree.tokens.shape[0], round)

    def tilt(self, greedy: bool) -> float:
        """Nats that the law gives for an accepted draft, roughly; 0 for p. Trees are chosen by it, no law is.

        Args:
            greedy: at temperature 0.
        """
        return 0.0

    def allowance(self, scores: Tensor, greedy: bool) -> Tensor | None:
        """Nats that may be spent for the token emitted at each context, where the rule's price is learned; else None.

        Args:
            scores: [..., V] the target's, after the request's processors.
            greedy: at temperature 0.
        """
        return None

    def describe(self) -> dict[str, object]:
        """What every record of a run stores: name, parameters, units."""
        values = {name: getattr(self, name) for name in parameters_of(type(self))}
        if self.only_in is None:
            values.pop("only_in", None)
        return {"rule": self.name, **values, **({"budget_unit": "nats"} if "budget" in values else {})}


MOST_NOVEL = 64  # tokens of an n-gram; texts that repeat as many repeat shorter ones too


@dataclass(frozen=True)
class LossyRule(Rule):
    """What all rules with another law than the target's have in common.

    Args:
        budget: nats that may be spent per request; None for no limit. A context that costs more than is left emits
            from p.
        novel: drafts must be novel to be favoured: one that would complete an n-gram of this length that prompt or
            answer already has is tested exactly, so that copying and repetition, which drafters predict best, are not
            paid for. 0: no such test.
        only_in: emit from p outside this phase of the text (:mod:`fsd_infer.rules.phases`), "think" or "A..B".
    """

    budget: float | None = parameter(None, low=0, infinite=True, keyword=True)
    novel: int = parameter(0, low=0, high=MOST_NOVEL, keyword=True)
    only_in: str | None = parameter(None, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only_in is not None:
            markers(self.only_in)

    def charged_law(self, evidence: Evidence) -> Law:
        law = self.law(evidence)
        law = law.novel(evidence, self.novel) if self.novel else law
        return law if self.only_in is None else law.where(evidence.inside(self.only_in))


R = TypeVar("R", bound=type[Rule])


class _Rules(Registry[type[Rule]]):
    def register(self, name: str) -> Callable[[R], R]:
        """Decorator that files a rule's class under ``name`` and gives it that name."""
        file: Any = super().register(name)

        def named(rule: R) -> R:
            rule.name = name
            return file(rule)

        return named


RULES = _Rules("rule")


def apply_rules(rules: Sequence[Rule], round: Verification) -> Verdict:
    """The verdict on one round, with a rule per row.

    Raises:
        NonFiniteLogitsError: target or drafter logits that are no distribution.
        FsdError: uniforms or texts are missing, or sampled drafts do not form a chain.
    """
    rows: dict[Rule, list[int]] = {}
    for row, rule in enumerate(rules):
        rows.setdefault(rule, []).append(row)
    budgets = [math.inf if rule.budget is None else rule.budget for rule in rules]
    verdict = walk(round, [(rule.charged_law, of_rule) for rule, of_rule in rows.items()], budgets)
    verdict.allowed = _allowed(rows, round, verdict)
    return verdict


def _allowed(rows: Mapping[Rule, Sequence[int]], round: Verification, verdict: Verdict) -> Tensor | None:
    """:attr:`Verdict.allowed`. Stays on the device: nothing waits."""
    learned = [(rule, of_rule) for rule, of_rule in rows.items() if type(rule).allowance is not Rule.allowance]
    if not learned:
        return None
    found: Tensor | None = None
    path = to_device(verdict.path, round.scores.device)
    emitted = to_device(torch.arange(path.shape[1]) <= verdict.accepted[:, None], path.device)
    for rule, of_rule in learned:
        index = to_device(torch.tensor(of_rule), path.device)
        nats = rule.allowance(at_nodes(round.scores[index], path[index]), round.greedy)
        if nats is not None:
            if rule.only_in is not None:  # nothing is spent elsewhere, and nothing allowed
                nats = nats * Evidence(round).inside(rule.only_in).gather(1, path)[index]
            found = path.new_zeros(len(path), dtype=torch.float32) if found is None else found
            found = found.index_copy(0, index, (nats * emitted[index]).sum(1))
    return found
