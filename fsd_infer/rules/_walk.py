"""How a rule's decisions at single contexts become a round's verdict.

A rule decides, for any set of contexts (a row of the batch and a node of its tree each), which token is emitted there.
The walk goes down from the root as long as the emitted token is one of the node's children. On a CPU it asks for
decisions step by step, so that only visited contexts cost vocabulary-sized work, and at temperature 0 for those that it
expects to visit in one question. Elsewhere, where launches cost more than arithmetic and waiting more than both, it
asks for all nodes at once, and decisions, tree and checks come to the host in one transfer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsd_infer.device.transfer import lists
from fsd_infer.errors import FsdError
from fsd_infer.rules._contexts import Contexts, Decision, Evidence, refuse
from fsd_infer.rules.base import Source, Verdict, Verification

Decide = Callable[[Contexts], Decision]
Gate = Callable[[Contexts], Tensor]


def walk(
    round: Verification,
    decide: Decide,
    budget: float | None = None,
    by_level: bool | None = None,
    gated: bool = True,
    gate_over_children: Gate | None = None,
) -> Verdict:
    """Runs one round.

    Args:
        round: the evidence.
        decide: the rule's decision function.
        budget: nats for this round where the round itself brings no ``budget_left``.
        by_level: ask step by step (True) or for all nodes at once (False); None picks by the device.
        gated: does the rule have gates at all.
        gate_over_children: the rule's gate, if at temperature 0 its decisions are the target's likeliest token, and the
            likeliest child where the gate is open (:func:`fsd_infer.rules._laws.children_law`).

    Raises:
        NonFiniteLogitsError: target or drafter logits that are no distribution.
        FsdError: uniforms are missing, or sampled drafts do not form a chain.
    """
    evidence = Evidence(round)
    if by_level is None:
        by_level = round.tree.tokens.device.type == "cpu"
    if not by_level:
        steps = _at_once(evidence, decide)
    else:
        evidence.check()
        known = evidence.greedy and evidence.best is not None
        if known and not gated:
            steps = _likeliest(evidence)
        elif known and gate_over_children is not None:
            steps = _OfGates(evidence, gate_over_children)
        else:
            steps = _OfRule(evidence, decide, gated)
    left = [math.inf if budget is None else budget] * len(steps.tokens)
    return steps.verdict(left if round.budget_left is None else round.budget_left.tolist())


# At temperature 0 a child this much less likely than the target's choice, exp(-3), is not expected to be forced.
_FORCED_WITHIN = 3.0


Known = dict[tuple[int, int], tuple[int, int, bool, bool, float]]  # by row and node; the columns of Decision


class _Walk:
    """The walk in Python, over decisions that are known.

    Args:
        tokens, parents: the trees, [B][N].
        padding: the nodes of each row that only fill it up; no row comes to them.
        sampled: were the drafts sampled.
        known: the decisions, at all nodes that a row may come to.
    """

    def __init__(
        self,
        tokens: list[list[int]],
        parents: list[list[int]],
        padding: list[set[int]],
        sampled: bool,
        known: Known,
    ) -> None:
        self.tokens, self.known = tokens, known
        self.children: list[dict[int, dict[int, int]]] = []  # per row: node -> token -> child
        self.depth = 0
        for row_parents, row_tokens, left_out in zip(parents, tokens, padding, strict=True):
            children: dict[int, dict[int, int]] = {}
            depths = [0]
            for node in range(1, len(row_parents)):
                if node not in left_out:
                    children.setdefault(row_parents[node], {})[row_tokens[node]] = node
                depths.append(depths[row_parents[node]] + 1)
            self.children.append(children)
            self.depth = max(self.depth, max(depths))
            if sampled and len(set(row_parents[1:])) < len(row_parents) - 1:
                raise FsdError(
                    "sampled drafts (q_scores) must form a chain; give deterministic trees without q_scores."
                )

    def verdict(self, left: list[float]) -> Verdict:
        """left: [B] nats that gates may spend."""
        rows = [_Steps(nats) for nats in left]
        self._go(rows)

        def table(values: Callable[[_Steps], list[Any]], padding: Any = None) -> list[list[Any]]:
            found = [values(steps) for steps in rows]
            return [row + [row[-1] if padding is None else padding] * (self.depth + 1 - len(row)) for row in found]

        return Verdict(
            path=torch.tensor(table(lambda steps: steps.path)),
            accepted=torch.tensor([len(steps.path) - 1 for steps in rows]),
            tokens=torch.tensor(table(lambda steps: steps.tokens, 0)),
            sources=torch.tensor(table(lambda steps: steps.sources, int(Source.TARGET))),
            gate_open=torch.tensor(table(lambda steps: steps.open, False)),
            spent=torch.tensor(table(lambda steps: steps.spent, 0.0)),
        )

    def _go(self, rows: list[_Steps]) -> None:
        """Take every row to the end of its round."""
        for row, steps in enumerate(rows):
            self._advance(row, steps)

    def _advance(self, row: int, steps: _Steps) -> bool:
        """Go down as far as decisions are known; is this the end of the row's round."""
        children = self.children[row]
        while True:
            node = steps.path[-1]
            decided = self.known.get((row, node))
            if decided is None:
                return False
            closed, opened, opens, forced, cost = decided
            opens = bool(opens) and cost <= steps.left
            token = opened if opens else closed
            child = children.get(node, {}).get(token)
            steps.tokens.append(token)
            steps.open.append(opens)
            steps.spent.append(cost if opens else 0.0)
            if opens and steps.left < math.inf:  # an infinite budget pays infinite costs
                steps.left -= cost
            source = Source.TARGET if child is None else Source.EXACT
            steps.sources.append(int(Source.GATE if opens and forced else source))
            if child is None:
                return True
            steps.path.append(child)


class _StepByStep(_Walk, ABC):
    """Asks at the nodes that the rows have reached, and at temperature 0 at those that they are expected to reach.

    Args:
        evidence: of the round.
        gated: does the rule have gates at all.
    """

    def __init__(self, evidence: Evidence, gated: bool) -> None:
        tree = evidence.tree
        super().__init__(tree.tokens.tolist(), tree.parents.tolist(), tree.padding, evidence.sampled, {})
        self.evidence, self.gated = evidence, gated
        self.q_index = tree.q_index.tolist()
        if evidence.greedy:
            self.scores, self.highest = evidence.child_scores.tolist(), evidence.highest.tolist()
        self.expected = self._expected() if evidence.greedy else [{} for _ in self.tokens]

    def _go(self, rows: list[_Steps]) -> None:
        waiting = list(range(len(rows)))
        while waiting := [row for row in waiting if not self._advance(row, rows[row])]:
            self.known.update(self._decided(self._with_expected([(row, rows[row].path[-1]) for row in waiting])))

    @abstractmethod
    def _decided(self, ahead: list[tuple[int, int]]) -> Known:
        """The decisions at these contexts, of a row and a node each."""

    def _expected(self) -> list[dict[int, int]]:
        """Per row: node -> the child to which a greedy walk is likely to go, if to any. Only a guess."""
        expected: list[dict[int, int]] = []
        for row, children in enumerate(self.children):
            guess = {}
            for node, by_token in children.items():
                child = max(by_token.values(), key=self.scores[row].__getitem__)
                short = self.highest[row][node] - self.scores[row][child]
                if short == 0 or (self.gated and self.q_index[row][node] >= 0 and short < _FORCED_WITHIN):
                    guess[node] = child
            expected.append(guess)
        return expected

    def _with_expected(self, contexts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """These contexts, and those that are expected to follow them."""
        ahead = list(contexts)
        for row, node in contexts:
            while node in self.expected[row]:
                node = self.expected[row][node]
                ahead.append((row, node))
        return ahead


class _OfRule(_StepByStep):
    """By the rule's own decisions."""

    def __init__(self, evidence: Evidence, decide: Decide, gated: bool) -> None:
        super().__init__(evidence, gated)
        self.decide = decide

    def _decided(self, ahead: list[tuple[int, int]]) -> Known:
        # leaves last: a rule that looks at the others only need not copy them
        ahead.sort(key=lambda context: context[1] not in self.children[context[0]])
        device = self.evidence.tree.tokens.device
        rows, nodes = torch.tensor(ahead, device=device).unbind(1)
        found = self.decide(Contexts(self.evidence, rows, nodes))
        columns = (found.closed, found.opened, found.opens, found.forced, found.cost)
        return dict(zip(ahead, zip(*(column.tolist() for column in columns), strict=True), strict=True))


class _OfGates(_StepByStep):
    """At temperature 0, the target's likeliest token, and the likeliest child where the gate is open: only the gates
    are asked for.
    """

    def __init__(self, evidence: Evidence, gate: Gate) -> None:
        assert evidence.best is not None
        super().__init__(evidence, gated=True)
        self.gate, self.best = gate, evidence.best.tolist()

    def _decided(self, ahead: list[tuple[int, int]]) -> Known:
        asked = [(row, node) for row, node in ahead if node in self.children[row] and self.q_index[row][node] >= 0]
        opens: dict[tuple[int, int], bool] = {}
        if asked:
            rows, nodes = torch.tensor(asked, device=self.evidence.tree.tokens.device).unbind(1)
            at = Contexts(self.evidence, rows, nodes)
            at.has_q = torch.ones(len(asked), dtype=torch.bool)
            opens = dict(zip(asked, self.gate(at).tolist(), strict=True))
        return {context: self._decision(*context, opens.get(context, False)) for context in ahead}

    def _decision(self, row: int, node: int, wants: bool) -> tuple[int, int, bool, bool, float]:
        """As :func:`fsd_infer.rules._laws.children_law` has it."""
        closed = self.best[row][node]
        by_token = self.children[row].get(node, {})
        if not wants or closed in by_token:
            return closed, closed, wants, False, 0.0
        scores = self.scores[row]
        # equal scores: the smallest token, as an argmax over the vocabulary would have it
        child = min(by_token, key=lambda token: (-scores[by_token[token]], token))
        score = scores[by_token[child]]
        if score == -math.inf:
            return closed, closed, False, True, 0.0
        return closed, child, True, True, max(0.0, self.highest[row][node] - score)


def _likeliest(evidence: Evidence) -> _Walk:
    """At temperature 0 and without gates every node emits the target's likeliest token, which the checks found."""
    assert evidence.best is not None
    tree = evidence.tree
    known: Known = {
        (row, node): (token, token, False, False, 0.0)
        for row, tokens in enumerate(evidence.best.tolist())
        for node, token in enumerate(tokens)
    }
    return _Walk(tree.tokens.tolist(), tree.parents.tolist(), tree.padding, evidence.sampled, known)


def _at_once(evidence: Evidence, decide: Decide) -> _Walk:
    """Decisions at all nodes, with the trees and the checks in one transfer."""
    tree = evidence.tree
    batch, count = tree.tokens.shape
    device = tree.tokens.device
    rows = torch.arange(batch, device=device)[:, None].expand(batch, count).flatten()
    nodes = torch.arange(count, device=device).repeat(batch)
    found = decide(Contexts(evidence, rows, nodes, whole=True))
    unfit = evidence.unfit()
    decided = [found.closed, found.opened, found.opens, found.forced, found.cost]
    columns = [column.reshape(batch, count) for column in (*decided, *unfit.values())]
    tokens, parents, closed, opened, opens, forced, cost, *wrong = lists(tree.tokens, tree.parents, *columns)
    for who, where in zip(unfit, wrong, strict=True):
        refuse(who, where)
    known: Known = {
        (row, node): decision
        for row, of_row in enumerate(zip(closed, opened, opens, forced, cost))
        for node, decision in enumerate(zip(*of_row))
    }
    return _Walk(tokens, parents, tree.padding, evidence.sampled, known)


@dataclass
class _Steps:
    """What a row has emitted so far this round; the last node of the path is not decided yet."""

    left: float
    path: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
