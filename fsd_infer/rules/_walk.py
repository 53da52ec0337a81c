"""The walk: which path of each tree is accepted, which token follows it, and what that costs.

It is one computation over all nodes of all rows. Every draft has a chance to follow its parent, under the target's law
and under the rule's; one uniform number per context decides between its children and every other token; and the nodes
whose ancestors were all taken are the path. So only one token per row, the last, is drawn from the vocabulary.

What takes work over the vocabulary at a context, dense laws and gates, is done on a CPU for contexts that the walk
reaches: it starts over when it knows more. Elsewhere, where launches cost more than arithmetic and waiting more than
both, it is done for all at once, and what was found comes to the host in one transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fsd_infer.device.transfer import on_host, to_device, wide
from fsd_infer.divergence import divergence
from fsd_infer.errors import FsdError
from fsd_infer.rules.evidence import Contexts, Evidence, refuse
from fsd_infer.rules.laws import Law, closed, lifted
from fsd_infer.rules.verification import Source, Verdict, Verification

Groups = Sequence[tuple[Callable[[Evidence], Law], list[int]]]  # each rule's law and the rows that it holds for


def walk(round: Verification, laws: Groups, budgets: Sequence[float], lazy: bool | None = None) -> Verdict:
    """Runs one round.

    Args:
        round: the evidence.
        laws: of every row.
        budgets: [B] nats for this round where the round itself brings no ``budget_left``.
        lazy: see :class:`Evidence`.

    Raises:
        NonFiniteLogitsError: target or drafter logits that are no distribution.
        FsdError: uniforms are missing, or sampled drafts do not form a chain.
    """
    evidence = Evidence(round, lazy)
    if evidence.lazy:
        for who, unfit in evidence.unfit().items():
            refuse(who, unfit)
    left = torch.tensor(budgets, dtype=torch.float64) if round.budget_left is None else round.budget_left
    return _Walk(evidence, laws, left).verdict()


def affordable(evidence: Evidence, cost: Tensor, left: Tensor) -> Tensor:
    """[B, N] bool; the contexts whose ``cost`` [B, N] is paid from ``left`` [B] nats after those of the contexts above."""
    parents, roots = evidence.tree.parents, evidence.tree.depths == 0
    budget = left = left.to(cost.dtype)[:, None].expand_as(cost)
    steps = int(evidence.tree.depths.max()) if parents.device.type == "cpu" else parents.shape[1] - 1
    for _ in range(steps):
        spent = cost.masked_fill((cost > budget) | cost.isinf(), 0.0)  # an infinite budget pays infinite costs
        budget = torch.where(roots, left, (budget - spent).gather(1, parents))
    return cost <= budget


class _Walk:
    """What is known of a round's chances and costs, [B, N] each.

    Attributes:
        closed: chance of each draft under the target's law.
        open: under the rule's.
        cost: nats at each context that the rule's law costs.
        applies: contexts with a law other than the target's.
        opened: the token of a dense law at temperature 0.
        slot: where a dense law r is known, above temperature 0: row of ``dense`` [·, V]. -1 elsewhere.
    """

    def __init__(self, evidence: Evidence, laws: Groups, left: Tensor) -> None:
        self.evidence, self.tree = evidence, evidence.tree
        batch, self.count = evidence.tree.tokens.shape
        self.device = evidence.tree.tokens.device
        self.left = to_device(left, self.device) if bool(left.isfinite().any()) else None
        self.rows = torch.arange(batch, device=self.device)
        self.nodes = torch.arange(self.count, device=self.device)
        self.closed = self.open = closed(evidence)
        self.cost, self.opened = torch.zeros_like(self.closed), evidence.likeliest
        self.applies = self.asked = torch.zeros_like(evidence.inner)
        self.slot = torch.full_like(evidence.tree.parents, -1)
        self.dense: list[Tensor] = []
        self.laws = [self._add(law(evidence), rows) for law, rows in laws]

    def _add(self, law: Law, rows: list[int]) -> tuple[Law, Tensor]:
        """The law, and its rows [B, 1] bool, with what is known of it before a context is looked at."""
        mine = to_device(torch.zeros(len(self.rows), 1, dtype=torch.bool).index_fill_(0, torch.tensor(rows), True), self.device)
        if law.lift is not None:
            odds = lifted(self.evidence, law.lift, law.applies)
            law = replace(law, applies=odds.applies)
            self.open, self.cost = torch.where(mine, odds.chance, self.open), torch.where(mine, odds.cost, self.cost)
        if law.test is not None:
            self.closed = torch.where(mine, law.test.chance.to(self.closed.dtype), self.closed)
        self.applies = torch.where(mine, law.applies, self.applies)
        if law.gate is not None or law.log_r is not None:
            self.asked = torch.where(mine, ~self.applies, self.asked)
            if not self.evidence.lazy:
                index = to_device(torch.tensor(rows), self.device)
                self._ask(law, self.evidence.whole if len(rows) == len(self.rows) else self.evidence.all_of(index))
        return law, mine

    def _ask(self, law: Law, at: Contexts) -> None:
        """What a law needs of the vocabulary at these contexts."""
        where = at.rows, at.nodes
        if law.gate is not None:
            is_open = at.of(self.applies) & law.gate(at)
            self.applies = self.applies.index_put(where, is_open)
            if self.evidence.lazy and law.log_r is not None:
                at = Contexts(self.evidence, at.rows[is_open], at.nodes[is_open])
                where = at.rows, at.nodes
        if law.log_r is None or not at.rows.shape[0]:
            return
        log_r, tree = law.log_r(at), self.tree
        slot = torch.full_like(self.slot, -1).index_put(where, torch.arange(log_r.shape[0], device=self.device))
        above = self.evidence.above(slot)
        if self.evidence.greedy:
            token = log_r.argmax(-1)
            self.opened = self.opened.index_put(where, token)
            pair = at.scores.gather(1, torch.stack([at.of(self.evidence.likeliest), token], 1))
            cost = (pair[:, 0] - pair[:, 1]).clamp_min(0.0)
            chance = tree.tokens == self.evidence.above(self.opened)
        else:
            r, cost = log_r.softmax(-1), divergence("kl")(at.scores, log_r)
            self.slot = torch.where(slot >= 0, slot + sum(map(len, self.dense)), self.slot)
            self.dense.append(r)
            chance = r.flatten()[above.clamp_min(0) * r.shape[1] + tree.tokens]
            chance = chance / self.evidence.log_q.exp() if self.evidence.sampled else chance
        known = (above >= 0) & self.evidence.is_draft
        self.open = torch.where(known, chance.to(self.open.dtype), self.open)
        self.cost = self.cost.index_put(where, cost.to(self.cost.dtype))

    def _taken(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B, N] bool each: contexts whose law is the rule's; drafts that follow their parent; that exact decoding, too,
        would let follow."""
        evidence, pays = self.evidence, self.applies
        if self.left is not None:
            pays = pays & affordable(evidence, self.cost.masked_fill(~pays, 0.0), self.left)
        chance = torch.where(evidence.above(pays), self.open, self.closed)
        if evidence.greedy:
            return pays, chance > 0, self.closed > 0
        # one number decides between the children, one after the other on a scale, and every other token
        place = evidence.above(evidence.uniform(0)).to(chance.dtype)
        if not evidence.sampled:
            place = place - (self._earlier @ chance[..., None]).squeeze(-1)
        return pays, (place >= 0) & (place < chance), place < self.closed

    def verdict(self) -> Verdict:
        tree, evidence = self.tree, self.evidence
        if not evidence.greedy and not evidence.sampled:
            siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & evidence.is_draft[:, None]
            self._earlier = siblings.tril(-1).to(self.closed.dtype)
        while True:
            pays, taken, exact = self._taken()
            taken = taken | (self.nodes == 0)
            reached = ~(tree.ancestors & ~taken[:, None]).any(-1)
            if not evidence.lazy or not self._learns(reached):
                break
        return self._gathered(reached, pays, exact)

    def _learns(self, reached: Tensor) -> bool:
        """Ask the laws at contexts that were reached and not asked yet; are there any."""
        new = reached & ~self.asked & self.applies
        if not new.any():
            return False
        self.asked = self.asked | new
        for law, mine in self.laws:
            if law.gate is not None or law.log_r is not None:
                rows, nodes = (new & mine).nonzero(as_tuple=True)
                if rows.shape[0]:
                    self._ask(law, Contexts(self.evidence, rows, nodes))
        return True

    def _gathered(self, reached: Tensor, pays: Tensor, exact: Tensor) -> Verdict:
        """The verdict on the CPU."""
        tree, evidence = self.tree, self.evidence
        end = torch.where(reached, self.nodes, 0).amax(1, keepdim=True)
        path = torch.where(reached, self.nodes, self.count).sort(-1).values.minimum(end)
        accepted = reached.sum(1, keepdim=True) - 1
        final = self._drawn(end[:, 0], pays.gather(1, end)) if not evidence.greedy else None
        open_end = pays.gather(1, end)
        if final is None:
            final = torch.where(open_end, self.opened.gather(1, end), evidence.likeliest.gather(1, end))
        below, last = path.roll(-1, 1), self.nodes == accepted
        tokens = torch.where(last, final, tree.tokens.gather(1, below))
        dense = sum(mine & (law.log_r is not None) for law, mine in self.laws)
        by_rule = torch.where(last, dense.bool() & open_end & (not evidence.sampled), ~exact.gather(1, below))
        sources = torch.where(by_rule, Source.GATE, torch.where(last, Source.TARGET, Source.EXACT))
        beyond, numbers = self.nodes > accepted, {
            "path": path, "tokens": tokens, "sources": sources, "gate_open": pays.gather(1, path),
            "spent": self.cost.masked_fill(~pays, 0.0).gather(1, path),
        }  # fmt: skip
        columns = [path, *(x.masked_fill(beyond, 0) for x in list(numbers.values())[1:])]
        first = evidence.first.gather(1, path).masked_fill(beyond, -1)
        regret = evidence.regret.gather(1, first.clamp_min(0)).masked_fill(first < 0, math.nan)
        columns += [first, regret]
        crowded = (evidence.total(evidence.is_draft.int()) > 1).any(1, keepdim=True) & evidence.sampled
        unfit = {} if evidence.lazy else evidence.unfit()
        accepted_, depth, crowded_, *found = on_host(
            accepted, tree.depths.amax(1, keepdim=True), crowded, *unfit.values(), *columns
        )
        for who in unfit:
            refuse(who, found.pop(0) > 0)
        if crowded_.any():
            raise FsdError("sampled drafts (q_scores) must form a chain; give deterministic trees without q_scores.")
        width = int(depth.max()) + 1
        path, tokens, sources, gate_open, spent, first, regret = (x[:, :width] for x in found)
        return Verdict(
            path.long(), accepted_[:, 0].long(), tokens.long(), sources.long(), gate_open > 0, spent, first.long(), regret
        )

    def _drawn(self, end: Tensor, is_open: Tensor) -> Tensor:
        """[B, 1] the token after the path, none of those that were drafted there, above temperature 0."""
        evidence, tree = self.evidence, self.tree
        at = Contexts(evidence, self.rows, end)
        weights = law = at.p
        if self.dense:
            slot = self.slot.gather(1, end[:, None])[:, 0]
            dense = torch.cat(self.dense) if len(self.dense) > 1 else self.dense[0]
            law = weights = torch.where(is_open & (slot >= 0)[:, None], dense[slot.clamp_min(0)], law)
        if evidence.sampled:
            weights = torch.where(at.has_q[:, None], (law - at.q).clamp_min(0.0), law)
            for own, mine in self.laws:
                if own.test is not None:
                    rest = law if own.test.rest is None else own.test.rest(at)
                    weights = torch.where(mine & ~is_open & at.has_q[:, None], rest, weights)
        child = evidence.is_draft & (tree.parents == end[:, None])
        weights = weights.scatter_reduce(1, tree.tokens, torch.where(child, 0.0, math.inf), "amin")
        weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, law)  # where rounding left nothing
        return draw(weights, evidence.uniform(1).gather(1, end[:, None])[:, 0])[:, None]


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row by inverse CDF: weights [R, M] >= 0 (any positive total), uniforms [R] in [0, 1) -> [R].

    The index is the first whose cumulative weight exceeds the uniform's share of the total, so an index of weight 0 is
    never returned. fp64, where the device has it, keeps the sum over a large vocabulary exact enough.
    """
    cdf = weights.cumsum(-1, dtype=wide(weights.device))
    total = cdf[:, -1]
    share = torch.minimum(uniforms.to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, share[:, None], right=True).squeeze(-1)
