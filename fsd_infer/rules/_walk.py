"""How a rule's decisions at single contexts become a round's verdict.

A rule decides, for any set of contexts (a row of the batch and a node of its tree each), which token is emitted there.
The walk goes down from the root as long as the emitted token is one of the node's children. On a CPU it asks for
decisions step by step, so that only visited contexts cost vocabulary-sized work, and at temperature 0 for those that it
expects to visit in one question; elsewhere, where launches cost more than arithmetic, it asks for all nodes at once. A
budget couples the levels and always goes step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsd_infer.rules._contexts import Contexts, Decision, Evidence
from fsd_infer.rules.base import Source, Verdict, Verification

Decide = Callable[[Contexts], Decision]


def walk(
    round: Verification,
    decide: Decide,
    budget: float | None = None,
    by_level: bool | None = None,
    gated: bool = True,
) -> Verdict:
    """Runs one round.

    Args:
        round: the evidence.
        decide: the rule's decision function.
        budget: nats for this round where the round itself brings no ``budget_left``.
        by_level: ask step by step (True) or for all nodes at once (False, impossible with a budget); None picks.
        gated: does the rule have gates at all.

    Raises:
        NonFiniteLogitsError: target or drafter logits that are no distribution.
        FsdError: uniforms are missing, or sampled drafts do not form a chain.
    """
    evidence = Evidence(round)
    tokens = round.tree.tokens
    left = round.budget_left
    if left is None and budget is not None:
        left = torch.full((tokens.shape[0],), budget, device=tokens.device)
    if by_level is None:
        by_level = left is not None or tokens.device.type == "cpu"
    if by_level:
        return _Walk(evidence, decide, gated).verdict(left)
    rows = torch.arange(tokens.shape[0], device=tokens.device).repeat_interleave(tokens.shape[1])
    nodes = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0])
    return _verdict(round, decide(Contexts(evidence, rows, nodes, whole=True)))


# At temperature 0 a child this much less likely than the target's choice, exp(-3), is not expected to be forced.
_FORCED_WITHIN = 3.0


class _Walk:
    """The walk in Python, over decisions asked for as they are needed."""

    def __init__(self, evidence: Evidence, decide: Decide, gated: bool) -> None:
        self.evidence, self.decide, self.gated = evidence, decide, gated
        tree = evidence.tree
        self.tokens: list[list[int]] = tree.tokens.tolist()
        self.children: list[dict[int, dict[int, int]]] = []  # per row: node -> token -> child
        self.depth = 0
        for parents, tokens in zip(tree.parents.tolist(), self.tokens, strict=True):
            children: dict[int, dict[int, int]] = {}
            depths = [0]
            for node in range(1, len(parents)):
                children.setdefault(parents[node], {})[tokens[node]] = node
                depths.append(depths[parents[node]] + 1)
            self.children.append(children)
            self.depth = max(self.depth, max(depths))
        self.expected = self._expected() if evidence.greedy else [{} for _ in self.tokens]
        self.known: dict[tuple[int, int], tuple[int, int, bool, bool, float]] = {}

    def verdict(self, left: Tensor | None) -> Verdict:
        """left: [B] nats, None for no limit."""
        rows = [_Steps(nats) for nats in ([math.inf] * len(self.tokens) if left is None else left.tolist())]
        waiting = list(range(len(rows)))
        while waiting:
            self._ask([(row, rows[row].path[-1]) for row in waiting])
            waiting = [row for row in waiting if not self._advance(row, rows[row])]

        def table(values: Callable[[_Steps], list[Any]], padding: Any = None) -> list[list[Any]]:
            found = [values(steps) for steps in rows]
            return [row + [row[-1] if padding is None else padding] * (self.depth + 1 - len(row)) for row in found]

        device = self.evidence.tree.tokens.device
        return Verdict(
            path=torch.tensor(table(lambda steps: steps.path), device=device),
            accepted=torch.tensor([len(steps.path) - 1 for steps in rows], device=device),
            tokens=torch.tensor(table(lambda steps: steps.tokens, 0), device=device),
            sources=torch.tensor(table(lambda steps: steps.sources, int(Source.TARGET)), device=device),
            gate_open=torch.tensor(table(lambda steps: steps.open, False), device=device),
            spent=torch.tensor(table(lambda steps: steps.spent, 0.0), device=device),
        )

    def _expected(self) -> list[dict[int, int]]:
        """Per row: node -> the child to which a greedy walk is likely to go, if to any. Only a guess."""
        evidence = self.evidence
        scores, highest = evidence.child_scores.tolist(), evidence.highest.tolist()
        q_index = evidence.tree.q_index.tolist()
        expected: list[dict[int, int]] = []
        for row, children in enumerate(self.children):
            guess = {}
            for node, by_token in children.items():
                child = max(by_token.values(), key=scores[row].__getitem__)
                short = highest[row][node] - scores[row][child]
                if short == 0 or (self.gated and q_index[row][node] >= 0 and short < _FORCED_WITHIN):
                    guess[node] = child
            expected.append(guess)
        return expected

    def _ask(self, contexts: list[tuple[int, int]]) -> None:
        """Have these contexts decided, and those that are expected to follow them."""
        ahead = list(contexts)
        for row, node in contexts:
            while node in self.expected[row]:
                node = self.expected[row][node]
                ahead.append((row, node))
        # leaves last: a rule that looks at the others only need not copy them
        ahead.sort(key=lambda context: context[1] not in self.children[context[0]])
        device = self.evidence.tree.tokens.device
        rows, nodes = torch.tensor(ahead, device=device).unbind(1)
        found = self.decide(Contexts(self.evidence, rows, nodes))
        columns = (found.closed, found.opened, found.opens, found.forced, found.cost)
        self.known.update(zip(ahead, zip(*(column.tolist() for column in columns), strict=True), strict=True))

    def _advance(self, row: int, steps: _Steps) -> bool:
        """Go down as far as decisions are known; is this the end of the row's round."""
        children = self.children[row]
        while True:
            node = steps.path[-1]
            decided = self.known.get((row, node))
            if decided is None:
                return False
            closed, opened, opens, forced, cost = decided
            opens = opens and cost <= steps.left
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


@dataclass
class _Steps:
    """What a row has emitted so far this round; the last node of the path is not decided yet."""

    left: float
    path: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)


def _verdict(round: Verification, found: Decision) -> Verdict:
    """The path along which every node's token is what was emitted at its parent. found: all B·N contexts in order."""
    tree = round.tree
    shape = tree.tokens.shape
    opens = found.opens.view(shape)
    drawn = torch.where(found.opens, found.opened, found.closed).view(shape)
    match = tree.tokens == drawn.gather(1, tree.parents)
    match[:, 0] = True
    reached = ~(tree.ancestors & ~match[:, None, :]).any(-1)
    accepted = reached.sum(-1) - 1
    depth = tree.max_depth
    index = torch.arange(shape[1], device=match.device).expand_as(tree.tokens)
    path = tree.parents.new_zeros(shape[0], depth + 2)  # the last column takes what was not reached
    path.scatter_(1, torch.where(reached, tree.depths, depth + 1), index)
    step = torch.arange(depth + 1, device=match.device)
    path = path.gather(1, torch.minimum(step, accepted[:, None]))
    emitted = step <= accepted[:, None]
    sources = torch.where(step < accepted[:, None], int(Source.EXACT), int(Source.TARGET))
    forced = opens & found.forced.view(shape)
    sources = torch.where(emitted & forced.gather(1, path), int(Source.GATE), sources)
    cost = found.cost.view(shape).masked_fill(~opens, 0.0)
    return Verdict(
        path=path,
        accepted=accepted,
        tokens=drawn.gather(1, path).masked_fill(~emitted, 0),
        sources=sources,
        gate_open=opens.gather(1, path) & emitted,
        spent=cost.gather(1, path).masked_fill(~emitted, 0.0),
    )
