"""Acceptance rules: their base classes, the exact rule, and the verdict on a round by the rules of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from inspect import get_annotations
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fsd_core.errors import FsdError
from fsd_core.former import FormerName, Renamed
from fsd_core.functional import at_nodes, wide
from fsd_core.registry import Registry
from fsd_core.tensors import to_device
from fsd_infer.rules.checks import described, former_order, not_bool
from fsd_infer.rules.distributions import OutputDistribution
from fsd_infer.rules.inputs import RuleInputs
from fsd_infer.rules.parameters import FORMER, parameter, parameters_of, reads_former_names
from fsd_infer.rules.texts import markers
from fsd_infer.rules.verification import RoundInput, Verdict, row_index
from fsd_infer.rules.walk import walk
from fsd_infer.trees.tree import Draws


class Rule(Renamed):
    """An acceptance rule. Subclasses are frozen dataclasses whose fields are the parameters; they define
    :meth:`output`.

    Attributes:
        name: the name of the class in :data:`RULES`.
        budget: nats a request may spend; None for no limit.
        exact_ngram_size, only_in, exact_start, exact_sentence_start, draw: see :class:`LossyRule`. These defaults hold
            for other rules.
        greedy_only: the rule needs temperature 0.
        measured: what settings of it gained and lost beside exact on fresh prompts; "" where that was not measured.

    Raises:
        FsdError: a parameter of the wrong type, or out of range.
    """

    former_members = {
        "law": "output", "charged_law": "restricted_output", "tilt": "draft_bonus", "settled": "exact_answer_tokens",
        "leading": "exact_sentence_tokens",
    }  # fmt: skip

    name: ClassVar[str] = ""
    budget: float | None = None
    exact_ngram_size: int = 0
    only_in: str | None = None
    exact_start: int | None = None
    exact_sentence_start: int | None = None
    draw: bool = True
    greedy_only: ClassVar[bool] = False
    measured: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, checks in parameters_of(type(self)).items():
            object.__setattr__(self, name, checks.checked(getattr(self, name)))

    @property
    def exact_answer_tokens(self) -> int:
        """How many first tokens of an answer are from p."""
        return self.exact_start or 0

    @property
    def exact_sentence_tokens(self) -> int:
        """How many first tokens of each sentence are from p."""
        return self.exact_sentence_start or 0

    def lossy_at(self, inputs: RuleInputs) -> Tensor | None:
        """[B, N] bool; contexts where the rule may be lossy: elsewhere it decodes exactly, whatever its distribution.
        None: everywhere.
        """
        conditions = []
        if self.exact_answer_tokens:
            conditions.append(inputs.answer_position >= self.exact_answer_tokens)
        if self.exact_sentence_tokens:
            conditions.append(inputs.sentence_position >= self.exact_sentence_tokens)
        if self.only_in is not None:
            conditions.append(inputs.in_phase(self.only_in))
        return reduce(torch.logical_and, conditions) if conditions else None

    @property
    def max_nats(self) -> float:
        """The budget; inf for no limit."""
        return math.inf if self.budget is None else self.budget

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        """Return the output distribution r: a function of only the text, the tree and ``inputs.gate_uniform``."""
        raise NotImplementedError

    def check_greedy(self, inputs: RuleInputs) -> None:
        """Raise FsdError above temperature 0, for rules with :attr:`greedy_only`."""
        if not inputs.greedy:
            raise FsdError(f"rule {self.name!r} compares drafts with the target's choices: it needs temperature 0.")

    def restricted_output(self, inputs: RuleInputs) -> OutputDistribution:
        """Return :meth:`output` with the parameters that all rules share applied.

        Raises FsdError if it is no distribution of these inputs.
        """
        output = self.output(inputs)
        _check_output(output, inputs, f"rule {self.name!r}: ")
        output = output.without_copies(self.exact_ngram_size) if self.exact_ngram_size else output
        where = self.lossy_at(inputs)
        return output if where is None else output.where(where)

    def __call__(self, round: RoundInput) -> Verdict:
        """Return the verdict on a round with this rule for every row; see :func:`apply_rules`."""
        return apply_rules([self] * round.tree.tokens.shape[0], round)

    @property
    def draws(self) -> Draws:
        """Which drafts should be drawn above temperature 0."""
        return Draws.TREE if self.draw else Draws.NONE

    def draft_bonus(self, greedy: bool) -> float:
        """Return roughly how many nats the distribution pays for an accepted draft; 0 for p. Only tree shapes depend on
        it.

        Args:
            greedy: at temperature 0.
        """
        return 0.0

    def kl_target(self, scores: Tensor, greedy: bool) -> Tensor | None:
        """Return the nats that an adaptive KL coefficient allows at each context; None for other rules.

        Args:
            scores: [..., V] of the target, after the request's processors.
            greedy: at temperature 0.
        """
        return None

    def describe(self) -> dict[str, object]:
        """Return name, parameters and units, for records of runs."""
        values = {name: getattr(self, name) for name in parameters_of(type(self))}
        for name in ("only_in", "exact_start", "exact_sentence_start"):
            if values.get(name) is None:
                values.pop(name, None)
        return {"rule": self.name, **values, **({"budget_unit": "nats"} if "budget" in values else {})}


# a rule may have a parameter of a former name: then that is what it reads
for _old, _new in {**FORMER, "nats": "max_nats"}.items():
    setattr(Rule, _old, FormerName(Rule, _old, _new, f"{_old} of a rule"))

MAX_TOKENS = 64  # of an n-gram


@dataclass(frozen=True)
class LossyRule(Rule):
    """A rule whose distribution differs from the target's.

    Args:
        budget: nats that a request may spend; None for no limit. A context that costs more than the remaining budget
            emits from p.
        exact_ngram_size: a draft that completes an n-gram of this many tokens which the prompt or the answer already
            has is tested exactly: copies and repetitions, which drafters predict best, earn nothing. 0: no such test.
        only_in: emit from p outside this phase of the text (:mod:`fsd_infer.rules.texts`), "think" or "A..B".
        exact_start: emit the answer's first tokens, as many as this, from p: they decide what the answer will be.
        exact_sentence_start: emit the first tokens of each sentence and line, as many as this, from p: they decide what
            is said, and whether the answer ends; later ones mostly how it is said.
        draw: from temperature 0.5 on, let trees have drawn nodes (:mod:`fsd_infer.drafters.drawing`). More drafts for
            fewer nats; but on a CPU the dense distributions that most rules take then cost more time than they win.
    """

    budget: float | None = parameter(None, low=0, infinite=True, keyword=True)
    exact_ngram_size: int = parameter(0, low=0, high=MAX_TOKENS, keyword=True)
    only_in: str | None = parameter(None, keyword=True)
    exact_start: int | None = parameter(None, low=0, high=2**31 - 1, keyword=True)
    exact_sentence_start: int | None = parameter(None, low=0, high=2**31 - 1, keyword=True)
    draw: bool = parameter(False, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only_in is not None:
            markers(self.only_in)


R = TypeVar("R", bound=type[Rule])


class _Rules(Registry[type[Rule]]):
    def register(self, name: str) -> Callable[[R], R]:
        """Return a decorator that registers a rule's class under ``name``, which becomes its ``name``.

        The decorator raises TypeError for a class that is no rule, or has fields and is no dataclass.
        """
        add: Any = super().register(name)

        def add_rule(rule: R) -> R:
            if not issubclass(rule, Rule) or rule.output is Rule.output:
                raise TypeError(f"rule {name!r} must be a class that derives from LossyRule or Rule and has output().")
            fields = [kind for kind in get_annotations(rule).values() if "ClassVar" not in str(kind)]
            if fields and "__dataclass_params__" not in vars(rule):
                raise TypeError(f"rule {name!r}: put @dataclass(frozen=True) between @RULES.register and the class.")
            rule.name = name
            reads_former_names(rule)
            return add(rule)

        return add_rule

    def unknown(self, name: str) -> str:
        if name in ("plain", "none"):  # a method of benchmarks, and a drafter
            return f"{name!r} is not a rule: to decode without drafts, name the drafter 'none' (--drafter none)."
        return super().unknown(name)


RULES = _Rules("rule", takes_yours=True)


@RULES.register("exact")
@dataclass(frozen=True)
class Exact(Rule):
    """Lossless: the output has the target's distribution.

    On a deterministic tree draw y ~ p and accept the child y, if there is one. No rule with distribution p accepts
    more. Drawn drafts are tested together, see :func:`block_test`.

    Args:
        block: draft chains, every token of them drawn from q, above temperature 0. False: draft trees. None: from
            temperature 0.5 on chains with a small LM whose trees have no requested shape, else trees.
        draw: from temperature 0.5 on, let trees have drawn nodes (:mod:`fsd_infer.drafters.drawing`). The distribution
            is the same; more drafts are accepted. False: draft only likely tokens.

    Raises:
        FsdError: block=True with draw=False.
    """

    block: bool | None = parameter(None)
    draw: bool = parameter(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block and not self.draw:
            raise FsdError("rule 'exact': block=true draws all drafts, and draw=false none: leave out one of the two.")

    @property
    def draws(self) -> Draws:
        if self.block is None and self.draw:
            return Draws.ANY
        return Draws.CHAIN if self.block else super().draws

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        return OutputDistribution(inputs, torch.zeros_like(inputs.tree.is_draft), in_blocks=True)


def apply_rules(rules: Sequence[Rule], round: RoundInput) -> Verdict:
    """Return the verdict on one round, on the CPU, with a rule per row.

    Raises:
        NonFiniteLogitsError: target or drafter logits are NaN, +inf or all -inf.
        FsdError: uniforms or texts are missing, or sampled drafts do not form a chain.
    """
    return device_verdict(rules, round).on_host()


def device_verdict(rules: Sequence[Rule], round: RoundInput) -> Verdict:
    """Return the verdict of :func:`apply_rules` on the device of the tree, unchecked and without a sync."""
    rows: dict[Rule, list[int]] = {}
    for row, rule in enumerate(rules):
        rows.setdefault(rule, []).append(row)
    has_own = any(not type(rule).__module__.startswith("fsd_infer.") for rule in rows)
    inputs, budget = RuleInputs(round, checks=has_own), round.budget_left
    budget = budgets_of(rules, inputs.nodes.device) if budget is None else budget
    verdict = walk(inputs, [(rule.restricted_output(inputs), rule_rows) for rule, rule_rows in rows.items()], budget)
    if round.max_accepted is not None:
        verdict.cut(round.max_accepted)
    for rule, rule_rows in rows.items():
        nats = _allowed(rule, rule_rows, inputs, verdict)
        if nats is not None:
            verdict.allowed = nats if verdict.allowed is None else verdict.allowed + nats
    return verdict


def budgets_of(rules: Sequence[Rule], device: torch.device) -> Tensor | None:
    """Return each row's budget [B] on a device; None if no rule has one."""
    budgets = [rule.max_nats for rule in rules]
    return to_device(torch.tensor(budgets, dtype=wide(device)), device) if min(budgets) < math.inf else None


def _allowed(rule: Rule, rule_rows: Sequence[int], inputs: RuleInputs, verdict: Verdict) -> Tensor | None:
    """Return what a rule's rows ``rule_rows`` add to :attr:`Verdict.allowed`, [B], without a sync.

    None: the rule has no adaptive KL coefficient.
    """
    if type(rule).kl_target is Rule.kl_target:
        return None
    path, scores = verdict.path, inputs.round.scores
    if len(rule_rows) == len(path):
        nats = rule.kl_target(at_nodes(scores, path), inputs.greedy)  # [B, D+1]
    else:
        rows = row_index(tuple(rule_rows), path.device)
        nats = rule.kl_target(at_nodes(scores[rows], path[rows]), inputs.greedy)
        nats = None if nats is None else nats.new_zeros(path.shape).index_copy(0, rows, nats)
    if nats is None:
        return None
    where = rule.lossy_at(inputs)
    if where is not None:  # elsewhere nothing is spent, so nothing is allowed
        nats = nats * where.gather(1, path)
    emitted = inputs.nodes[: path.shape[1]] <= verdict.accepted[:, None]
    return (nats * emitted).sum(1)


def _check_output(output: OutputDistribution, inputs: RuleInputs, where: str) -> None:
    """Raise FsdError, with ``where`` in front, if a rule returns anything but a distribution for these inputs."""
    if not isinstance(output, OutputDistribution):
        raise FsdError(
            f"{where}output() returns {output!r:.80}, not an OutputDistribution, for example "
            "OutputDistribution.target(inputs)."
        )
    if not isinstance(output.inputs, RuleInputs):  # it would be p in silence
        raise former_order(output, where)
    shape, bias = inputs.tree.tokens.shape, output.logit_bias
    if not isinstance(output.applies, Tensor) or output.applies.shape != shape or output.applies.dtype != torch.bool:
        raise not_bool(f"{where}applies is", output.applies, shape)
    if bias is not None and not (isinstance(bias, Tensor) and bias.shape == shape and bias.is_floating_point()):
        raise FsdError(f"{where}logit_bias is {described(bias)}: give {tuple(shape)} floats (rows, nodes), in nats.")
    if output.test is not None:
        if inputs.greedy:
            raise FsdError(f"{where}a test is of drafts above temperature 0: leave it out where inputs.greedy.")
        for name, values in vars(output.test).items():
            if values is not None and (not isinstance(values, Tensor) or values.shape != shape):
                raise FsdError(f"{where}test.{name} is {described(values)}: give {tuple(shape)} numbers (rows, nodes).")
    if output.log_r is not None and not callable(output.log_r):
        raise FsdError(f"{where}log_r is {described(output.log_r)}: give a function of contexts.")
