"""The input of a rule: quantities per node [B, N]. :mod:`.vocab_rows` has distributions over the vocabulary."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsd_core import functional, sampling
from fsd_core.divergence import Divergence, divergence, divergence_rows, expand_draft
from fsd_core.errors import FsdError
from fsd_core.former import Renamed
from fsd_core.functional import wide
from fsd_infer.rules.texts import TokenHistory, in_phase, repeats_ngram, sentence_position
from fsd_infer.rules.verification import RoundInput

CHILD, TOKEN, GATE = range(3)  # columns of RoundInput.uniforms, by what they decide


T = TypeVar("T")


class JointProperty(cached_property[T]):
    """A quantity that a kernel may compute together with others: its owner's ``_joint_values`` has them by name."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None:
            vars(instance).update(instance._joint_values)
        return super().__get__(instance, owner)


class RuleInputs(Renamed):
    """All trees of a round. Quantities are [B, N] unless stated otherwise, and computed on first use.

    A node is two things: a *draft*, its token as a child of its parent, and a *context*, at which the next token is
    drawn. ``p`` is the processed target, ``q`` the distribution that proposed the children. At temperature 0 ``p`` has
    the request's processors but no temperature, and ``q`` is raw.

    Args:
        round: the trees and the logits.

    Attributes:
        tree: the drafts.
        greedy: temperature 0.
        sampled: whether drafts were drawn from q. Then the distribution of a context must be decided before the draws
            below it.
        is_chain: whether all of them were, so that they form a chain.
        nodes: [N] 0, 1, …
        compares: whether a rule has compared p with q so far, so that the drafter's logits must be finite.
        checks: whether values of rules are checked on the device: those of a user's own.
        noted: what is wrong with such values, and where, [B, N] bool, for :attr:`Verdict.faults`.
    """

    former_members = {
        "regret": "logprob_gap", "chance": "accept_prob", "tested": "accept_prob_under", "known": "repeats_ngram",
        "draws": "has_drawn_child", "unsettled": "has_drawn_below", "total": "sum_children", "some": "any_child",
        "of_children": "over_children", "above": "at_parents", "entries": "draft_entries",
        "places": "draft_index", "coin": "gate_uniform", "uniform": "uniforms", "best": "topk_log_p",
        "answered": "answer_position", "in_sentence": "sentence_position", "inside": "in_phase",
    }  # fmt: skip

    def __init__(self, round: RoundInput, checks: bool = True) -> None:
        self.checks = checks
        self.round, self.tree, self.greedy = round, round.tree, round.greedy
        self.sampled = not round.greedy and round.tree.sampled
        self.is_chain = self.sampled and round.tree.drawn is None
        self.nodes = torch.arange(round.tree.parents.shape[1], device=round.tree.parents.device)
        self.compares = False
        self._divergences: dict[tuple[str, bool], Tensor] = {}
        self._repeats: dict[int, Tensor] = {}
        self.noted: list[tuple[str, Tensor]] = []
        if round.uniforms is None and not round.greedy:
            raise FsdError("a round above temperature 0 needs uniforms [B, N, 3]; pass them in RoundInput.")

    def at_parents(self, values: Tensor) -> Tensor:
        """Map values of contexts to nodes: each node gets its parent's value."""
        return values.gather(1, self.tree.parents)

    def sum_children(self, values: Tensor) -> Tensor:
        """Sum values of drafts over each context's children."""
        return self.over_children(values, 0.0).sum(-1)

    def over_children(self, values: Tensor, other: float) -> Tensor:
        """Arrange values of drafts as [B, N, N]: each context's children, ``other`` elsewhere."""
        return torch.where(self.tree.is_child, values[:, None], other)

    def any_child(self, holds: Tensor) -> Tensor:
        """Whether ``holds``, a bool per draft, is true for any child of each context."""
        return (self.tree.is_child & holds[:, None]).any(-1)

    @property
    def has_q(self) -> Tensor:
        """bool; contexts whose children have a known distribution (n-gram lookup has none)."""
        return self.tree.q_index >= 0

    @cached_property
    def _joint_values(self) -> dict[str, Any]:
        return draft_numbers(self.round.scores, self)

    @JointProperty
    def _faults(self) -> dict[str, Tensor] | None:
        """:meth:`non_finite` with the drafter's logits if drafts were drawn, else without; None: not yet computed."""
        return None

    @JointProperty
    def _maxima(self) -> tuple[Tensor, Tensor]:
        return functional.row_max(self.round.scores)

    @property
    def likeliest(self) -> Tensor:
        """The target's likeliest token at each context, the first of equals."""
        return self._maxima[1]

    @JointProperty
    def log_p_max(self) -> Tensor:
        """ln p of the target's likeliest token, at contexts with children."""
        highest, _, total = self._row_stats
        return highest - total

    @cached_property
    def log_total(self) -> Tensor:
        """ln Σ e^scores at contexts with children: ln p is a score minus this."""
        return self._row_stats[2]

    @JointProperty
    def _row_stats(self) -> tuple[Tensor, Tensor, Tensor]:
        return functional.row_stats(self.round.scores, self.tree.has_children)

    @cached_property
    def entropy(self) -> Tensor:
        """-Σ p ln p in nats at contexts with children."""
        return functional.row_entropy(self.round.scores, self.tree.has_children)

    def topk_log_p(self, k: int) -> Tensor:
        """[B, N, k] ln p of the k likeliest tokens in descending order, at contexts with children. k is at most V."""
        k = min(k, self.round.scores.shape[-1])
        return functional.topk_logprobs(self.round.scores, k, self.tree.has_children)[0]

    @JointProperty
    def logprob_gap(self) -> Tensor:
        """ln p of the likeliest token at the parent minus ln p of the draft, at least 0; inf at roots and padding."""
        scores, tree = self.round.scores, self.tree
        own = scores.flatten(1).gather(1, tree.parents * scores.shape[-1] + tree.tokens).float()
        return (self.at_parents(self._maxima[0]) - own).clamp_min(0.0).masked_fill(~self.tree.is_draft, math.inf)

    @JointProperty
    def log_p(self) -> Tensor:
        """ln p of each draft at its parent; -inf at roots and padding."""
        return self.at_parents(self.log_p_max) - self.logprob_gap

    @cached_property
    def draft_mass(self) -> Tensor:
        """p(C), the total probability of each context's children, in the device's widest type."""
        return self.sum_children(self.log_p.to(wide(self.log_p.device)).exp()).clamp_max(1.0)

    @cached_property
    def is_drawn(self) -> Tensor:
        """bool; drafts that were drawn from a known q."""
        drawn = self.tree.is_draft if self.tree.drawn is None else self.tree.drawn
        return drawn & self.at_parents(self.has_q)

    @JointProperty
    def has_drawn_child(self) -> Tensor:
        """bool; contexts with a drawn child."""
        return self.any_child(self.is_drawn)

    @cached_property
    def has_drawn_below(self) -> Tensor:
        """bool; contexts with a drawn node below them. The rest of the tree below may depend on its value."""
        drawn = self.is_drawn[..., None] & self.tree.ancestors
        return drawn.sum(1) > self.is_drawn  # a node is its own ancestor

    @cached_property
    def draft_scores(self) -> Tensor:
        """[B, I, V] processed drafter logits; at temperature 0 raw ones."""
        tree = self.tree
        if self.is_chain:
            assert tree.q_scores is not None
            return expand_draft(tree.q_scores, tree.draft_ids, self.round.logits.shape[-1])
        if not self.greedy and self.round.process_draft is not None:
            return self.round.process_draft(tree)
        return expand_draft(tree.q_logits, tree.draft_ids, self.round.logits.shape[-1])

    @JointProperty
    def log_q(self) -> Tensor:
        """ln q of each draft at its parent, if that has a q."""
        tree, row = self.tree, self.at_parents(self.tree.q_index).clamp_min(0)
        if not tree.q_logits.shape[1]:  # as with lookups: no parent has a q
            return torch.full_like(self.logprob_gap, -math.inf)
        scores, entries = (tree.q_scores, self.draft_entries) if self.sampled else (self.draft_scores, tree.tokens)
        assert scores is not None
        own = scores.flatten(1).gather(1, row * scores.shape[-1] + entries.clamp_min(0)).float()
        return (own - functional.row_stats(scores)[2].gather(1, row)).masked_fill(entries < 0, -math.inf)

    @cached_property
    def draft_entries(self) -> Tensor:
        """Index of each node's token in the drafter's vocabulary; -1 if it is not there."""
        return self.tree.tokens if self.draft_index is None else self.draft_index[self.tree.tokens]

    @cached_property
    def draft_index(self) -> Tensor | None:
        """[V] index of each token in the drafter's vocabulary, -1 for none; None if that is the target's."""
        ids, size = self.tree.draft_ids, self.round.logits.shape[-1]
        if ids is None:
            return None
        index = torch.full((size,), -1, device=ids.device)
        return index.index_copy(0, ids.long(), torch.arange(len(ids), device=ids.device))

    @cached_property
    def accept_prob(self) -> Tensor:
        """Probability that each draft is emitted under p (a drawn one: passes its test); at temperature 0 bool."""
        if self.greedy:
            return (self.tree.tokens == self.at_parents(self.likeliest)) & self.tree.is_draft
        p = self.log_p.to(wide(self.log_p.device)).exp()
        if not self.sampled:
            return p
        residual = torch.zeros_like(p) if self.is_chain else self.drawn_residual
        return self.accept_prob_under(p, self.log_p, residual)

    @JointProperty
    def drawn_residual(self) -> Tensor:
        """:meth:`residual_mass` of p itself."""
        return self.residual_mass(torch.ones_like(self.log_p, dtype=wide(self.log_p.device)))

    def residual_mass(self, weight: Tensor) -> Tensor:
        """Σ (w·p - q)+ at contexts with a drawn child, with q of the draw. ``weight``: [B, N] w."""
        tree = self.tree
        assert tree.q_scores is not None
        index = tree.q_index.masked_fill(~self.has_drawn_child, -1)
        return sampling.residual_mass(self.round.scores, tree.q_scores, weight, index, tree.draft_ids)

    def accept_prob_under(self, r: Tensor, log_r: Tensor, residual: Tensor) -> Tensor:
        """:attr:`accept_prob` under any distribution r, above temperature 0.

        A drawn draft y is tested first and passes with probability min(1, r(y)/q(y)), with q the distribution that it
        was drawn from. Otherwise the token is drawn from (r - q)+ and may be another child (arXiv:2502.18779).

        Args:
            r: [B, N] of each draft.
            log_r: [B, N] its logarithm.
            residual: [B, N] Σ (r - q)+ of each context with a drawn child and others.
        """
        return accept_prob_under(r, log_r, residual, self)

    def divergence(self, measure: str | Divergence, processed: bool = False) -> Tensor:
        """D(p, q) at each context, infinite where no q is known.

        Args:
            measure: see :mod:`fsd_core.divergence`.
            processed: compare distributions after the request's processors. Temperature 0 always compares raw ones,
                since processed ones are one-hot.
        """
        self.compares, measure, tree = True, divergence(measure), self.tree
        key = measure.name, processed and not self.greedy
        if key not in self._divergences:
            p, q, ids = self.round.logits, tree.q_logits, tree.draft_ids
            if key[1]:
                p, q, ids = self.round.scores, self.draft_scores, None
            none = torch.full(tree.tokens.shape, math.inf, device=tree.tokens.device)
            has_any = tree.q_logits.shape[1] > 0
            self._divergences[key] = divergence_rows(p, q, measure, ids, tree.q_index) if has_any else none
        return self._divergences[key]

    @property
    def gate_uniform(self) -> Tensor:
        """An independent uniform number in [0, 1) per context, for rules that act at random."""
        return self.uniforms(GATE)

    def uniforms(self, column: int) -> Tensor:
        """A column of :attr:`RoundInput.uniforms`."""
        if self.round.uniforms is None:
            raise FsdError("this rule draws at random at every temperature; pass uniforms [B, N, 3] in RoundInput.")
        return self.round.uniforms[..., column]

    @property
    def texts(self) -> TokenHistory:
        """Each batch row's prompt and answer so far. Raises FsdError if the round has none."""
        if self.round.texts is None:
            raise FsdError("this rule reads prompt and answer; pass texts in RoundInput.")
        return self.round.texts

    def repeats_ngram(self, n: int) -> Tensor:
        """bool; would the draft complete an n-gram of prompt, answer, its path or other texts the drafter reads?"""
        if n not in self._repeats:
            ask_drafter = None if self.tree.sampled else self.round.seen_ngrams
            seen = None if ask_drafter is None else ask_drafter(n)
            repeats = repeats_ngram(self.texts, self.tree, n)
            self._repeats[n] = repeats if seen is None else repeats | seen
        return self._repeats[n]

    @property
    def answer_position(self) -> Tensor:
        """Number of the answer's tokens before the one that is drawn at each context."""
        return self.texts.answer_lengths[:, None] + self.tree.depths

    @cached_property
    def sentence_position(self) -> Tensor:
        """Number of the sentence's tokens before the one that is drawn at each context."""
        return sentence_position(self.texts, self.tree)

    def in_phase(self, phase: str) -> Tensor:
        """bool; whether the token after the context is in a phase, see :mod:`fsd_infer.rules.texts`."""
        if phase not in self.texts.markers:
            raise FsdError(f"only_in={phase}: the texts have no markers for it; pass them to TokenHistory.")
        return in_phase(self.texts, self.tree, *self.texts.markers[phase])

    def non_finite(self, reads_q: bool) -> dict[str, Tensor]:
        """Return by source, [B, N] bool, whether logits are NaN, +inf or all -inf; see :attr:`Verdict.faults`.

        reads_q: check the drafter's logits; otherwise check its trees' scores.
        """
        if self._faults is not None and reads_q == self.sampled:
            return self._faults
        round, index, raw = self.round, self.tree.q_index, self._maxima[0]
        if round.scores is not round.logits:
            raw = functional.row_max(round.logits)[0]
        wrong = {"the target's logits": ~(raw.abs() < math.inf)}
        if round.scores is not round.logits:
            wrong["the target's processed logits"] = ~(self._maxima[0].abs() < math.inf)
        if reads_q and self.tree.q_logits.shape[1]:  # only rows that a node points to count
            largest = functional.row_max(self.tree.q_logits)[0].gather(1, index.clamp_min(0))
            wrong["the drafter's logits"] = ~(largest.abs() < math.inf) & (index >= 0)
        elif self.tree.parents.shape[1] > 1:
            wrong["the drafter's logits"] = self.tree.scores.isnan()
        return wrong


@functional.replaceable
def draft_numbers(scores: Tensor, inputs: RuleInputs) -> dict[str, Any]:
    """Return the quantities that a kernel computes at once, by name; here none: each is computed on first use.

    scores: [B, N, V] those of the round.
    """
    return {}


@functional.replaceable
def accept_prob_under(r: Tensor, log_r: Tensor, residual: Tensor, inputs: RuleInputs) -> Tensor:
    """Compute :meth:`RuleInputs.accept_prob_under`."""
    passes = (log_r - inputs.log_q).clamp_max(0.0).to(r.dtype).exp().masked_fill(~inputs.is_drawn, 0.0)
    if inputs.is_chain:
        return torch.where(inputs.is_drawn, passes, r)
    fails = 1.0 - inputs.at_parents(inputs.sum_children(passes))
    rest = (r - inputs.log_q.to(r.dtype).exp()).clamp_min(0.0)
    rest = rest / inputs.at_parents(residual).to(r.dtype).clamp_min(sampling.TINY)
    fixed = torch.where(inputs.at_parents(inputs.has_drawn_child), fails * rest, r).clamp_max(1.0)
    return torch.where(inputs.is_drawn, passes, fixed)
