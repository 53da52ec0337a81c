"""Distributions over the vocabulary [R, V] at R contexts of a round, for dense distributions."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from fsd_core import functional
from fsd_core.divergence import Divergence, expand_draft
from fsd_core.sampling import TINY
from fsd_infer.rules.inputs import JointProperty, RuleInputs
from fsd_infer.rules.texts import repeating_tokens


class VocabRows:
    """Distributions over the vocabulary at R contexts, the argument of dense distributions; computed on first use.

    Context r is node ``nodes[r]`` of the tree of batch row ``rows[r]``, [R] each.
    """

    def __init__(self, inputs: RuleInputs, rows: Tensor, nodes: Tensor, is_every: bool = False) -> None:
        self.inputs, self.rows, self.nodes = inputs, rows, nodes
        self._is_every = is_every  # all nodes of all rows in order, so views replace copies
        self._repeating: dict[int, Tensor] = {}

    @cached_property
    def _joint_values(self) -> dict[str, Tensor]:
        return {}

    @classmethod
    def every(cls, inputs: RuleInputs, rows: Tensor | None = None) -> VocabRows:
        """Return all contexts in order, R = B·N; or those of batch rows ``rows``."""
        batch, nodes = inputs.tree.tokens.shape[0], inputs.nodes
        index = torch.arange(batch, device=nodes.device) if rows is None else rows
        return cls(
            inputs, index[:, None].repeat(1, len(nodes)).flatten(), nodes.repeat(len(index)), is_every=rows is None
        )

    def subset(self, index: Tensor | None) -> VocabRows:
        """The contexts at these indices [R'] among the rows; the same object for None, which means all."""
        return self if index is None else type(self)(self.inputs, self.rows[index], self.nodes[index])

    def of(self, values: Tensor) -> Tensor:
        """[B, N, ...] -> [R, ...]"""
        return values.flatten(0, 1) if self._is_every else values[self.rows, self.nodes]

    def spread(self, values: Tensor, other: int) -> Tensor:
        """[R] -> [B, N], ``other`` at other contexts."""
        if self._is_every:
            return values.view(self.inputs.tree.tokens.shape)
        return values.new_full(self.inputs.tree.tokens.shape, other).index_put((self.rows, self.nodes), values)

    def _of_drafter(self, values: Tensor) -> Tensor:
        """[B, I, ...] -> [R, ...] in fp32."""
        return values[self.rows, self.of(self.inputs.tree.q_index).clamp_min(0)].float()

    @cached_property
    def logits(self) -> Tensor:
        """[R, V] the target's raw logits, fp32."""
        return self.of(self.inputs.round.logits).float()

    @JointProperty
    def scores(self) -> Tensor:
        """[R, V] the logits after the request's processors: ln p up to a constant."""
        round = self.inputs.round
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
        return self.of(self.inputs.has_q)

    @cached_property
    def q_logits(self) -> Tensor:
        """[R, Vd] the drafter's raw logits over its own vocabulary, valid where ``has_q``."""
        q_logits = self.inputs.tree.q_logits
        if not q_logits.shape[1]:  # as with lookups: any numbers will do
            return self.scores.new_zeros(len(self.rows), q_logits.shape[2])
        return self._of_drafter(q_logits)

    @cached_property
    def q_scores(self) -> Tensor:
        """[R, V] ln q up to a constant, over the target's vocabulary; ln p where no q is known."""
        tree = self.inputs.tree
        if not tree.q_logits.shape[1]:
            return self.scores
        scores = self.inputs.draft_scores
        q_scores = self.q_logits if scores is tree.q_logits else self._of_drafter(scores)
        return torch.where(self.has_q[:, None], q_scores, self.scores)

    @cached_property
    def q(self) -> Tensor:
        """[R, V]"""
        return self.q_scores.softmax(-1)

    @JointProperty
    def proposal(self) -> Tensor:
        """[R, V] the distribution from which a child was drawn, 0 at contexts without a drawn child."""
        tree = self.inputs.tree
        assert tree.q_scores is not None
        q = self._of_drafter(tree.q_scores).softmax(-1)
        return self._over_all(q.masked_fill_(~self.of(self.inputs.has_drawn_child)[:, None], 0.0))

    def _over_all(self, q: Tensor) -> Tensor:
        """Return probabilities [R, Vd] of the drafter's vocabulary over the target's."""
        return expand_draft(q, self.inputs.tree.draft_ids, self.scores.shape[-1], 0.0)

    @JointProperty
    def fixed(self) -> Tensor:
        """[R, V] bool; candidates that were fixed before any draw at or below the context, verified or not."""
        tree, none = self.inputs.tree, torch.zeros_like(self.scores, dtype=torch.bool)
        if tree.fixed is None:
            return none
        entries = tree.fixed[self.rows, self.of(tree.q_index).clamp_min(0)]  # [R, w]
        entries = torch.where(self.has_q[:, None] & (entries >= 0), self._columns(entries.clamp_min(0)), none.shape[1])
        return torch.nn.functional.pad(none, (0, 1)).scatter(1, entries, True)[:, :-1]

    def _columns(self, entries: Tensor) -> Tensor:
        """Return the columns of these entries of the drafter's vocabulary."""
        ids = self.inputs.tree.draft_ids
        return entries if ids is None else ids[entries]

    def reduced(self) -> VocabRows:
        """Return these contexts with one column for all tokens that the drafter lacks, if it lacks any."""
        inputs = self.inputs
        if inputs.tree.draft_ids is None or inputs.greedy:
            return self
        return ReducedVocabRows(inputs, self.rows, self.nodes, self._is_every)

    def of_drafts(self, r: Tensor, slot: Tensor) -> Tensor:
        """Return the probability [B, N] of each draft's token under row ``slot`` [B, N] of r [R, V]."""
        return r.flatten()[slot * r.shape[1] + self.inputs.tree.tokens]

    def over_all(self, r: Tensor, slot: Tensor, p: Tensor) -> Tensor:
        """Return rows ``slot`` [B] of r [R, V] over all tokens: [B, V]. p: [B, V] of the target there."""
        return r[slot]

    def divergence(self, measure: str | Divergence, processed: bool = False) -> Tensor:
        """[R] D(p, q), infinite where no q is known; see :meth:`RuleInputs.divergence`."""
        return self.of(self.inputs.divergence(measure, processed))

    def repeating_tokens(self, n: int) -> Tensor:
        """[R, V] bool; would a token, as the next, complete an n-gram that prompt, answer and path already have, or as
        a draft one of other texts that the drafter reads."""
        if n not in self._repeating:
            self._repeating[n] = self._find_repeating(n)
        return self._repeating[n]

    def _find_repeating(self, n: int) -> Tensor:
        inputs, tree = self.inputs, self.inputs.tree
        repeats = repeating_tokens(self.rows, self.nodes, inputs.texts, tree, n, inputs.round.scores.shape[-1])
        if inputs.round.seen_ngrams is not None and not tree.sampled:
            copied = tree.is_child[self.rows, self.nodes] & inputs.repeats_ngram(n)[self.rows]  # [R, N]
            column = tree.tokens[self.rows].where(copied, repeats.shape[1])  # one more than there are, for the others
            repeats = torch.nn.functional.pad(repeats, (0, 1)).scatter(1, column, True)[:, :-1]
        return repeats


class ReducedVocabRows(VocabRows):
    """Contexts over the drafter's vocabulary, [R, Vd + 1]; the last column stands for all other tokens together.

    A distribution that is linear in p where q is 0 gives all these tokens the same multiple of p. So the sums of a
    distribution, its cost and its drafts' probabilities are those over the whole vocabulary. A reduced vocabulary has a
    sixth of the tokens.
    """

    @cached_property
    def _joint_values(self) -> dict[str, Tensor]:
        return reduced_rows(self.inputs.round.scores, self)

    @property
    def _ids(self) -> Tensor:
        ids = self.inputs.tree.draft_ids
        assert ids is not None
        return ids.long()  # files may store narrower integers

    @JointProperty
    def scores(self) -> Tensor:
        inputs = self.inputs
        own = inputs.round.scores[self.rows[:, None], self.nodes[:, None], self._ids].float()
        log_p = own - self.of(inputs.log_total)[:, None].float()
        others = (1.0 - log_p.exp().sum(-1, keepdim=True)).clamp_min(0.0).log()
        return torch.cat([log_p, others], 1)

    @cached_property
    def q_scores(self) -> Tensor:
        inputs = self.inputs
        if not inputs.tree.q_logits.shape[1]:
            return self.scores
        scores = inputs.tree.q_logits if inputs.round.process_draft is None else inputs.draft_scores
        rows = self._of_drafter(scores)
        q_scores = rows if scores is inputs.tree.q_logits else rows[:, self._ids]
        q_scores = torch.nn.functional.pad(q_scores, (0, 1), value=-math.inf)
        return torch.where(self.has_q[:, None], q_scores, self.scores)

    def _over_all(self, q: Tensor) -> Tensor:
        return torch.nn.functional.pad(q, (0, 1))

    def _columns(self, entries: Tensor) -> Tensor:
        return entries

    def _find_repeating(self, n: int) -> Tensor:
        inputs = self.inputs
        if inputs.round.seen_ngrams is not None and not inputs.tree.sampled:
            return torch.nn.functional.pad(super()._find_repeating(n)[:, self._ids], (0, 1))
        width, texts = len(self._ids) + 1, inputs.texts
        return repeating_tokens(self.rows, self.nodes, texts, inputs.tree, n, width, inputs.draft_index)

    def of_drafts(self, r: Tensor, slot: Tensor) -> Tensor:
        return reduced_drafts(r, slot, self)

    def over_all(self, r: Tensor, slot: Tensor, p: Tensor) -> Tensor:
        share = r[:, -1] / self.p[:, -1].clamp_min(TINY)
        return (share[slot, None] * p).index_copy(1, self._ids, r[slot, :-1])


@functional.replaceable
def reduced_rows(scores: Tensor, at: ReducedVocabRows) -> dict[str, Tensor]:
    """Return quantities of contexts that a kernel computes at once, by name, as :func:`.draft_numbers` does.

    scores: [B, N, V] those of the round.
    """
    return {}


@functional.replaceable
def reduced_drafts(r: Tensor, slot: Tensor, at: ReducedVocabRows) -> Tensor:
    """Compute :meth:`VocabRows.of_drafts` over a reduced vocabulary."""
    entries, width = at.inputs.draft_entries, r.shape[1]
    own = r.flatten()[slot * width + torch.where(entries < 0, width - 1, entries)]
    share = (r[:, -1] / at.p[:, -1].clamp_min(TINY))[slot]
    return torch.where(entries < 0, share * at.inputs.log_p.exp(), own)
