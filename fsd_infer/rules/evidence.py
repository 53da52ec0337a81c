"""The input of a rule: quantities per node [B, N], and distributions over the vocabulary [R, V] at R contexts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from fsd_core.errors import FsdError
from fsd_core.tensors import wide
from fsd_infer.cpu import ops
from fsd_infer.divergence import Divergence, divergence, expand_draft
from fsd_infer.rules.texts import Texts, inside, known, known_tokens
from fsd_infer.rules.verification import Verification


class Evidence:
    """All trees of a round. Quantities are [B, N] unless stated otherwise, and computed on first use.

    A node is two things: a *draft*, its token as a child of its parent, and a *context*, at which the next token is
    drawn. ``p`` is the processed target, ``q`` the distribution that proposed the children. At temperature 0 ``p`` has
    the request's processors but no temperature, and ``q`` is raw.

    Args:
        round: the trees and the logits.
        lazy: do work over the vocabulary only at contexts that need it; None: on a CPU. On other devices launches cost
            more than arithmetic, and a choice of contexts needs a sync.

    Attributes:
        tree: the drafts.
        greedy: temperature 0.
        sampled: whether children were drawn from q. Then a law must not depend on the drafts.
    """

    def __init__(self, round: Verification, lazy: bool | None = None) -> None:
        self.round, self.tree, self.greedy = round, round.tree, round.greedy
        self.sampled = round.tree.sampled and not round.greedy
        self.lazy = round.tree.tokens.device.type == "cpu" if lazy is None else lazy
        self._known: dict[int, Tensor] = {}
        if round.uniforms is None and not round.greedy:
            raise FsdError("a round above temperature 0 needs uniforms [B, N, 3]; pass them in Verification.")

    def above(self, values: Tensor) -> Tensor:
        """Map values of contexts to nodes: each node gets its parent's value."""
        return values.gather(1, self.tree.parents)

    def total(self, values: Tensor) -> Tensor:
        """Sum values of drafts over each context's children."""
        return self.of_children(values, 0.0).sum(-1)

    def of_children(self, values: Tensor, other: float) -> Tensor:
        """Arrange values of drafts as [B, N, N]: each context's children, ``other`` elsewhere."""
        return values[:, None].masked_fill(self._no_child, other)

    def some(self, holds: Tensor) -> Tensor:
        """Whether ``holds``, a bool per draft, is true for any child of each context."""
        return (self.tree.child & holds[:, None]).any(-1)

    @cached_property
    def nodes(self) -> Tensor:
        """[N] 0, 1, …"""
        return torch.arange(self.tree.parents.shape[1], device=self.tree.parents.device)

    @cached_property
    def _no_child(self) -> Tensor:
        return ~self.tree.child

    @property
    def has_q(self) -> Tensor:
        """bool; contexts whose children have a known distribution (n-gram lookup has none)."""
        return self.tree.q_index >= 0

    @cached_property
    def _maxima(self) -> tuple[Tensor, Tensor]:
        return ops.row_maxima(self.round.scores)

    @property
    def likeliest(self) -> Tensor:
        """The target's likeliest token at each context, the first of equals."""
        return self._maxima[1]

    @cached_property
    def log_p_max(self) -> Tensor:
        """ln p of the target's likeliest token, at contexts with children."""
        return self._at_inner(lambda scores, rows: torch.sub(*ops.row_statistics(scores, rows)[::2]))

    @cached_property
    def entropy(self) -> Tensor:
        """-Σ p ln p in nats at contexts with children."""
        return self._at_inner(ops.row_entropies)

    def best(self, k: int) -> Tensor:
        """[B, N, k] ln p of the k likeliest tokens in descending order, at contexts with children. k is at most V."""
        k = min(k, self.round.scores.shape[-1])
        return self._at_inner(lambda scores, rows: ops.likeliest(scores if rows is None else scores[rows], k)[0])

    def _at_inner(self, statistic: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """Evaluate a statistic of rows of [M, V] at contexts with children; if lazy, at those alone."""
        if not self.lazy:
            return statistic(self.whole.scores, None).unflatten(0, self.tree.inner.shape)
        inner = self.tree.inner.flatten().nonzero().squeeze(-1)
        values = statistic(self.round.scores.flatten(0, 1), inner)
        whole = values.new_zeros(self.tree.inner.numel(), *values.shape[1:])
        return whole.index_copy_(0, inner, values).unflatten(0, self.tree.inner.shape)

    @cached_property
    def regret(self) -> Tensor:
        """ln p of the likeliest token at the parent minus ln p of the draft, at least 0; inf at roots and padding."""
        scores, tree = self.round.scores, self.tree
        own = scores.flatten(1).gather(1, tree.parents * scores.shape[-1] + tree.tokens).float()
        return (self.above(self._maxima[0]) - own).clamp_min(0.0).masked_fill(~self.tree.is_draft, math.inf)

    @cached_property
    def log_p(self) -> Tensor:
        """ln p of each draft at its parent; -inf at roots and padding."""
        return self.above(self.log_p_max) - self.regret

    @cached_property
    def draft_mass(self) -> Tensor:
        """p(C), the total probability of each context's children, in the device's widest type."""
        return self.total(self.log_p.to(wide(self.log_p.device)).exp()).clamp_max(1.0)

    @cached_property
    def is_drawn(self) -> Tensor:
        """bool; drafts that were drawn from a known q."""
        drawn = self.tree.is_draft if self.tree.drawn is None else self.tree.drawn
        return drawn & self.above(self.has_q)

    @cached_property
    def draws(self) -> Tensor:
        """bool; contexts with a drawn child."""
        return self.some(self.is_drawn)

    @cached_property
    def draft_scores(self) -> Tensor:
        """[B, I, V] processed drafter logits; at temperature 0 raw ones."""
        if not self.greedy and self.tree.q_scores is not None:
            return expand_draft(self.tree.q_scores, self.tree.draft_ids, self.round.logits.shape[-1])
        if not self.greedy and self.round.process_draft is not None:
            return self.round.process_draft(self.tree)
        return expand_draft(self.tree.q_logits, self.tree.draft_ids, self.round.logits.shape[-1])

    @cached_property
    def log_q(self) -> Tensor:
        """ln q of each draft at its parent, if that has a q."""
        tree, row = self.tree, self.above(self.tree.q_index).clamp_min(0)
        scores, entries = (tree.q_scores, self._entries) if self.sampled else (self.draft_scores, tree.tokens)
        assert scores is not None
        own = scores.flatten(1).gather(1, row * scores.shape[-1] + entries.clamp_min(0)).float()
        return (own - ops.row_statistics(scores)[2].gather(1, row)).masked_fill(entries < 0, -math.inf)

    @property
    def _entries(self) -> Tensor:
        """Place of each node's token in the drafter's vocabulary; -1 if it is not there."""
        ids, vocabulary = self.tree.draft_ids, self.round.logits.shape[-1]
        if ids is None:
            return self.tree.tokens
        places = torch.full((vocabulary,), -1, device=ids.device)
        return places.index_copy(0, ids.long(), torch.arange(len(ids), device=ids.device))[self.tree.tokens]

    @cached_property
    def chance(self) -> Tensor:
        """Probability that each draft is emitted (a sampled one: accepted) under the law p. At temperature 0 bool."""
        if self.greedy:
            return (self.tree.tokens == self.above(self.likeliest)) & self.tree.is_draft
        p = self.log_p.to(wide(self.log_p.device)).exp()
        if not self.sampled:
            return p
        passes = (self.log_p - self.log_q).clamp_max(0.0).to(p.dtype).exp().masked_fill(~self.is_drawn, 0.0)
        return passes if self.tree.drawn is None else self._mixed(p, passes)

    def _mixed(self, p: Tensor, passes: Tensor) -> Tensor:
        """:attr:`chance` on trees, where one child y of a context may be drawn from q (arXiv:2502.18779).

        The draft y is tested first and passes with probability min(1, p/q). If it does not, the token is drawn from
        (p - q)+, which adds up to TV(p, q), and may be another child.

        Args:
            p: probability of each draft.
            passes: probability that each drawn draft passes, 0 for the others.
        """
        both = self.draws & self.some(self.tree.is_draft & ~self.is_drawn)
        fails = 1.0 - self.above(self.total(passes))
        residual = (p - self.log_q.to(p.dtype).exp()).clamp_min(0.0)
        fixed = fails * residual / self.above(self._tv(both)).to(p.dtype).clamp_min(1e-30)
        fixed = torch.where(self.above(self.draws), fixed, p).clamp_max(1.0)
        return torch.where(self.is_drawn, passes, fixed)

    def _tv(self, where: Tensor) -> Tensor:
        """TV(p, q) at contexts with a q; if lazy, at those of ``where`` alone."""
        tree = self.tree
        rows, nodes = where.nonzero(as_tuple=True) if self.lazy else (self.whole.rows, self.whole.nodes)
        assert tree.q_scores is not None
        pair = self.round.scores.flatten(0, 1), tree.q_scores.flatten(0, 1)
        of_q = rows * tree.q_scores.shape[1] + tree.q_index[rows, nodes].clamp_min(0)
        which = rows * tree.tokens.shape[1] + nodes, of_q
        value = divergence("tv").with_reduced_drafter(*pair, tree.draft_ids, which)
        return value.new_zeros(where.shape).index_put((rows, nodes), value)

    @property
    def coin(self) -> Tensor:
        """An independent uniform number in [0, 1) per context, for rules that act at random."""
        return self.uniform(2)

    def uniform(self, column: int) -> Tensor:
        """A column of the uniforms, see :class:`Verification`."""
        if self.round.uniforms is None:
            raise FsdError("this rule draws at random at every temperature; pass uniforms [B, N, 3] in Verification.")
        return self.round.uniforms[..., column]

    @property
    def texts(self) -> Texts:
        """Each batch row's prompt and answer so far. Raises FsdError if the round has none."""
        if self.round.texts is None:
            raise FsdError("this rule reads prompt and answer; pass texts in Verification.")
        return self.round.texts

    def known(self, n: int) -> Tensor:
        """bool; would the draft complete an n-gram that prompt, answer, its path or remembered texts have."""
        if n not in self._known:
            ask = None if self.tree.sampled else self.round.copies
            copies = None if ask is None else ask(n)
            found = known(self.texts, self.tree, n)
            self._known[n] = found if copies is None else found | copies
        return self._known[n]

    def inside(self, phase: str) -> Tensor:
        """bool; whether the token after the context is in a phase, see :mod:`fsd_infer.rules.texts`."""
        if phase not in self.texts.markers:
            raise FsdError(f"only_in={phase}: the texts have no markers for it; pass them to Texts.")
        return inside(self.texts, self.tree, *self.texts.markers[phase])

    @cached_property
    def whole(self) -> Contexts:
        """All contexts in order, R = B·N."""
        return self.all_of(torch.arange(self.tree.tokens.shape[0], device=self.nodes.device), whole=True)

    def all_of(self, rows: Tensor, whole: bool = False) -> Contexts:
        """All contexts of these rows, in order."""
        count = self.nodes.shape[0]
        return Contexts(self, rows[:, None].expand(-1, count).flatten(), self.nodes.repeat(rows.shape[0]), whole)

    def unfit(self, reads_q: bool) -> dict[str, Tensor]:
        """Return by source, [B, N] bool, whether logits are NaN, +inf or all -inf; see :attr:`Verdict.faults`.

        reads_q: check the drafter's logits; otherwise check its trees' scores.
        """
        round, index, raw = self.round, self.tree.q_index, self._maxima[0]
        if round.scores is not round.logits:
            raw = ops.row_maxima(round.logits)[0]
        wrong = {"the target's logits": ~(raw.abs() < math.inf)}
        if round.scores is not round.logits:
            wrong["the target's processed logits"] = ~(self._maxima[0].abs() < math.inf)
        if reads_q and self.tree.q_logits.shape[1]:  # only rows that a node points to count
            largest = ops.row_maxima(self.tree.q_logits)[0].gather(1, index.clamp_min(0))
            wrong["the drafter's logits"] = ~(largest.abs() < math.inf) & (index >= 0)
        elif self.tree.parents.shape[1] > 1:
            wrong["the drafter's logits"] = self.tree.scores.isnan()
        return wrong


class Contexts:
    """Distributions over the vocabulary at R contexts, the argument of gates and dense laws; computed on first use.

    Context r is node ``nodes[r]`` of the tree of batch row ``rows[r]``, [R] each.
    """

    def __init__(self, evidence: Evidence, rows: Tensor, nodes: Tensor, whole: bool = False) -> None:
        self.evidence, self.rows, self.nodes = evidence, rows, nodes
        self._whole = whole  # all nodes of all rows in order, so views replace copies

    def of(self, values: Tensor) -> Tensor:
        """[B, N, ...] -> [R, ...]"""
        return values.flatten(0, 1) if self._whole else values[self.rows, self.nodes]

    def _of_drafter(self, values: Tensor) -> Tensor:
        """[B, I, ...] -> [R, ...] in fp32."""
        return values[self.rows, self.of(self.evidence.tree.q_index).clamp_min(0)].float()

    @cached_property
    def logits(self) -> Tensor:
        """[R, V] the target's raw logits, fp32."""
        return self.of(self.evidence.round.logits).float()

    @cached_property
    def scores(self) -> Tensor:
        """[R, V] the logits after the request's processors: ln p up to a constant."""
        round = self.evidence.round
        return self.logits if round.scores is round.logits else self.of(round.scores).float()

    @cached_property
    def log_p(self) -> Tensor:
        """[R, V]"""
        return self.scores.log_softmax(-1)

    @cached_property
    def p(self) -> Tensor:
        """[R, V]"""
        return self.scores.softmax(-1)

    @cached_property
    def has_q(self) -> Tensor:
        """[R] bool"""
        return self.of(self.evidence.has_q)

    @cached_property
    def q_logits(self) -> Tensor:
        """[R, Vd] the drafter's raw logits over its own vocabulary, valid where ``has_q``."""
        return self._of_drafter(self.evidence.tree.q_logits)

    @cached_property
    def q_scores(self) -> Tensor:
        """[R, V] ln q up to a constant, over the target's vocabulary; ln p where no q is known."""
        tree = self.evidence.tree
        if not tree.q_logits.shape[1]:
            return self.scores
        if self.evidence.sampled:
            assert tree.q_scores is not None
            q_scores = expand_draft(self._of_drafter(tree.q_scores), tree.draft_ids, self.scores.shape[-1])
        else:
            scores = self.evidence.draft_scores
            q_scores = self.q_logits if scores is tree.q_logits else self._of_drafter(scores)
        return torch.where(self.has_q[:, None], q_scores, self.scores)

    @cached_property
    def q(self) -> Tensor:
        """[R, V]"""
        return self.q_scores.softmax(-1)

    def divergence(self, measure: str | Divergence, processed: bool = False) -> Tensor:
        """[R] D(p, q), infinite where no q is known.

        Args:
            measure: see :mod:`fsd_infer.divergence`.
            processed: compare distributions after the request's processors. Temperature 0 always compares raw ones,
                since processed ones are one-hot.
        """
        measure, tree, logits = divergence(measure), self.evidence.tree, self.evidence.round.logits
        if not tree.q_logits.shape[1]:
            return torch.full(self.rows.shape, math.inf, device=self.rows.device)
        if processed and not self.evidence.greedy:
            value = measure(self.scores, self.q_scores)
        elif self._whole:  # fp32 copies that other quantities share
            value = measure.with_reduced_drafter(self.logits, self.q_logits, tree.draft_ids)
        else:
            q_rows = self.rows * tree.q_logits.shape[1] + self.of(tree.q_index).clamp_min(0)
            pair = logits.flatten(0, 1), tree.q_logits.flatten(0, 1)
            which = self.rows * logits.shape[1] + self.nodes, q_rows
            value = measure.with_reduced_drafter(*pair, tree.draft_ids, which)
        return value.masked_fill(~self.has_q, math.inf)

    def known_tokens(self, n: int) -> Tensor:
        """[R, V] bool; would a token, as the next, complete an n-gram that prompt, answer and path already have, or as
        a draft one of remembered texts."""
        tree, vocabulary = self.evidence.tree, self.evidence.round.scores.shape[-1]
        found = known_tokens(self.evidence.texts, tree, self.rows, self.nodes, n, vocabulary)
        if self.evidence.round.copies is not None and not tree.sampled:
            at, child = (tree.child[self.rows, self.nodes] & self.evidence.known(n)[self.rows]).nonzero(as_tuple=True)
            found[at, tree.tokens[self.rows[at], child]] = True
        return found
