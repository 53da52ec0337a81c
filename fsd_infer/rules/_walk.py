"""How a rule's decisions at single contexts become a round's verdict.

A rule decides, for any set of contexts (a row of the batch and a node of its tree each), which token is emitted there.
The walk goes down from the root as long as the emitted token is one of the node's children. On a CPU it asks for
decisions level by level, so that only visited contexts cost vocabulary-sized work; elsewhere, where launches cost more
than arithmetic, it asks for all nodes at once. A budget couples the levels and always goes level by level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fsd_infer.divergence import expand_draft
from fsd_infer.errors import FsdError, NonFiniteLogitsError
from fsd_infer.rules.base import Source, Verdict, Verification


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no fp64


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row by inverse CDF: weights [R, M] >= 0 (any positive total), uniforms [R] in [0, 1) -> [R].

    The index is the first whose cumulative weight exceeds the uniform's share of the total, so an index of weight 0 is
    never returned. fp64, where the device has it, keeps the sum over a large vocabulary exact enough.
    """
    cdf = weights.cumsum(-1, dtype=_wide(weights.device))
    total = cdf[:, -1]
    share = torch.minimum(uniforms.to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, share[:, None], right=True).squeeze(-1)


class Evidence:
    """A round's evidence, checked, with what several contexts share."""

    def __init__(self, round: Verification) -> None:
        self.round = round
        self.tree = round.tree
        self.greedy = round.greedy
        self.sampled = round.tree.sampled and not round.greedy  # at temperature 0 drafts are what they are
        if round.uniforms is None and not round.greedy:
            raise FsdError("a round at temperature above 0 needs uniforms [B, N, 3]; pass them in Verification.")
        self._check_finite()
        if self.sampled and bool((self.is_child.sum(-1) > 1).any()):
            raise FsdError("sampled drafts (q_scores) must form a chain; give deterministic trees without q_scores.")

    @cached_property
    def is_child(self) -> Tensor:
        """[B, N, N] bool; is node j a child of node i."""
        parents = self.tree.parents
        index = torch.arange(parents.shape[1], device=parents.device)
        return (parents[:, None, :] == index[:, None]) & (index > 0)

    @cached_property
    def draft_scores(self) -> Tensor:
        """[B, I, V] processed drafter logits."""
        if self.tree.q_scores is not None:
            return self.tree.q_scores
        if self.round.process_draft is not None:
            return self.round.process_draft(self.tree)
        return expand_draft(self.tree.q_logits, self.tree.draft_ids, self.round.logits.shape[-1])

    def _check_finite(self) -> None:
        def refuse(bad: Tensor, who: str, mend: str) -> None:
            if bool(bad.any()):
                row = int(bad.nonzero()[0, 0])
                raise NonFiniteLogitsError(f"{who} in row {row} are NaN, +inf or all -inf. {mend}")

        def broken(logits: Tensor) -> Tensor:
            return ~logits.amax(-1).isfinite()  # amax keeps NaN

        round, tree = self.round, self.tree
        advice = "Check its weights and dtype (fp16 overflows; bf16 or fp32 do not)."
        refuse(broken(round.logits), "the target's logits", advice)
        if round.scores is not round.logits:
            refuse(broken(round.scores), "the target's processed logits", "Check the request's logits processors.")
        if tree.q_logits.shape[1]:
            bad = broken(tree.q_logits).gather(1, tree.q_index.clamp_min(0)) & (tree.q_index >= 0)
            refuse(bad, "the drafter's logits", advice)


class Contexts:
    """R contexts at which a rule decides: row ``rows[r]`` of the batch at node ``nodes[r]`` of its tree."""

    def __init__(self, evidence: Evidence, rows: Tensor, nodes: Tensor, whole: bool = False) -> None:
        self.evidence = evidence
        self.greedy = evidence.greedy
        self.sampled = evidence.sampled
        self.rows, self.nodes = rows, nodes
        self._whole = whole  # all nodes of all rows in order: views instead of copies

    def select(self, index: Tensor) -> Contexts:
        """The contexts ``index`` [S] of these."""
        if index.shape[0] == self.rows.shape[0]:
            return self
        return Contexts(self.evidence, self.rows[index], self.nodes[index])

    def _at(self, values: Tensor) -> Tensor:
        """[B, N, ...] -> [R, ...]"""
        return values.flatten(0, 1) if self._whole else values[self.rows, self.nodes]

    def _draft_at(self, values: Tensor) -> Tensor:
        """[B, I, ...] -> [R, ...], only to be read where ``has_q``."""
        return values[self.rows, self._q_index.clamp_min(0)]

    @cached_property
    def _q_index(self) -> Tensor:
        return self._at(self.evidence.tree.q_index)

    @cached_property
    def logits(self) -> Tensor:
        """[R, V] the target's raw logits."""
        return self._at(self.evidence.round.logits).float()

    @cached_property
    def scores(self) -> Tensor:
        """[R, V] the target's processed scores."""
        round = self.evidence.round
        return self.logits if round.scores is round.logits else self._at(round.scores).float()

    @cached_property
    def p(self) -> Tensor:
        """[R, V] the processed target distribution."""
        return self.scores.softmax(-1)

    @cached_property
    def q_logits(self) -> Tensor:
        """[R, Vd] the drafter's raw logits."""
        return self._draft_at(self.evidence.tree.q_logits).float()

    @cached_property
    def q_scores(self) -> Tensor:
        """[R, V] the drafter's processed scores."""
        return self._draft_at(self.evidence.draft_scores).float()

    @cached_property
    def q(self) -> Tensor:
        """[R, V] the processed drafter distribution."""
        return self.q_scores.softmax(-1)

    @cached_property
    def children(self) -> Tensor:
        """[R, N] bool."""
        return self._at(self.evidence.is_child)

    @cached_property
    def has_children(self) -> Tensor:
        """[R] bool."""
        return self.children.any(-1)

    @cached_property
    def has_q(self) -> Tensor:
        """[R] bool; are there children and is the distribution that proposed them known."""
        return self.has_children & (self._q_index >= 0)

    @cached_property
    def draft_tokens(self) -> Tensor:
        """[R, N] the tokens of all nodes of each context's row."""
        return self.evidence.tree.tokens[self.rows]

    @cached_property
    def only_child(self) -> Tensor:
        """[R] token of the (first) child, only to be read where ``has_children``."""
        first = self.children.int().argmax(-1, keepdim=True)
        return self.draft_tokens.gather(1, first).squeeze(-1)

    def among_children(self, tokens: Tensor) -> Tensor:
        """[R] tokens -> [R, N] bool; the child that carries the token."""
        return self.children & (self.draft_tokens == tokens[:, None])

    def at_tokens(self, values: Tensor, tokens: Tensor) -> Tensor:
        """[R, V], [R] -> [R]"""
        return values.gather(1, tokens[:, None]).squeeze(-1)

    def uniform(self, column: int) -> Tensor:
        """[R] one column of the uniforms."""
        uniforms = self.evidence.round.uniforms
        if uniforms is None:
            raise FsdError("this rule draws at random at every temperature; pass uniforms [B, N, 3] in Verification.")
        return self._at(uniforms[..., column])


@dataclass
class Decision:
    """What a rule does at R contexts.

    Attributes:
        tokens: [R] the emitted tokens.
        open: [R] bool; the gate was open.
        forced: [R] bool; only the open gate let this token through.
        cost: [R] nats: KL of the law of the token from the processed target; 0 where closed.
    """

    tokens: Tensor
    open: Tensor
    forced: Tensor
    cost: Tensor

    @classmethod
    def closed(cls, tokens: Tensor) -> Decision:
        """Tokens whose law is the target's."""
        no = torch.zeros_like(tokens, dtype=torch.bool)
        return cls(tokens, no, no, torch.zeros(tokens.shape, device=tokens.device))


Decide = Callable[[Contexts, Tensor], Decision]  # contexts and what each may still spend [R]


def walk(round: Verification, decide: Decide, budget: float | None = None, by_level: bool | None = None) -> Verdict:
    """Runs one round.

    Args:
        round: the evidence.
        decide: the rule's decision function.
        budget: nats for this round where the round itself brings no ``budget_left``.
        by_level: ask level by level (True) or for all nodes at once (False, impossible with a budget); None picks.

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
        return _verdict(round, _by_level(evidence, decide, left))
    rows = torch.arange(tokens.shape[0], device=tokens.device).repeat_interleave(tokens.shape[1])
    nodes = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0])
    unlimited = torch.full(rows.shape, math.inf, device=tokens.device)
    found = decide(Contexts(evidence, rows, nodes, whole=True), unlimited)
    shaped = (x.view(tokens.shape) for x in (found.tokens, found.open, found.forced, found.cost))
    return _verdict(round, Decision(*shaped))


def _by_level(evidence: Evidence, decide: Decide, left: Tensor | None) -> Decision:
    """Decisions [B, N] at the visited nodes; the token is -1 at all others."""
    tokens = evidence.tree.tokens
    flags = torch.zeros_like(tokens, dtype=torch.bool)
    cost = torch.zeros(tokens.shape, device=tokens.device)
    whole = Decision(torch.full_like(tokens, -1), flags, flags.clone(), cost)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    nodes = torch.zeros_like(rows)
    left = torch.full(rows.shape, math.inf, device=tokens.device) if left is None else left.to(_wide(tokens.device))
    while rows.shape[0]:
        at = Contexts(evidence, rows, nodes)
        found = decide(at, left)
        whole.tokens[rows, nodes] = found.tokens
        whole.open[rows, nodes] = found.open
        whole.forced[rows, nodes] = found.forced
        whole.cost[rows, nodes] = found.cost
        hit = at.among_children(found.tokens)
        down = hit.any(-1)
        left = (left - found.cost)[down]
        left = left.masked_fill(left.isnan(), math.inf)  # an infinite budget pays infinite costs
        rows, nodes = rows[down], hit[down].int().argmax(-1)
    return whole


def _verdict(round: Verification, found: Decision) -> Verdict:
    """The path along which every node's token is what was emitted at its parent. found: [B, N]."""
    tree = round.tree
    match = tree.tokens == found.tokens.gather(1, tree.parents)
    match[:, 0] = True
    reached = ~(tree.ancestors & ~match[:, None, :]).any(-1)
    accepted = reached.sum(-1) - 1
    depth = tree.max_depth
    index = torch.arange(tree.tokens.shape[1], device=match.device).expand_as(tree.tokens)
    path = tree.parents.new_zeros(tree.tokens.shape[0], depth + 2)  # the last column takes what was not reached
    path.scatter_(1, torch.where(reached, tree.depths, depth + 1), index)
    step = torch.arange(depth + 1, device=match.device)
    path = path.gather(1, torch.minimum(step, accepted[:, None]))
    emitted = step <= accepted[:, None]
    sources = torch.where(step < accepted[:, None], int(Source.EXACT), int(Source.TARGET))
    sources = torch.where(emitted & found.forced.gather(1, path), int(Source.GATE), sources)
    return Verdict(
        path=path,
        accepted=accepted,
        tokens=found.tokens.gather(1, path).masked_fill(~emitted, 0),
        sources=sources,
        gate_open=found.open.gather(1, path) & emitted,
        spent=found.cost.gather(1, path).masked_fill(~emitted, 0.0),
    )
