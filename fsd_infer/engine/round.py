"""One round of speculative decoding: a function of tensors on the target's device, read from top to bottom.

B rows, N nodes of each tree with the root first, D at least the depth of a tree, V tokens, F features. The host reads
no tensor, so one CUDA graph can hold a whole round. On a CPU, where reading is free, shapes are as small as the round
allows; elsewhere they are fixed. :mod:`fsd_infer.engine.loop` calls :func:`decode_round` until all rows are finished.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_core.functional import at_nodes
from fsd_infer.engine.state import DecodeState
from fsd_infer.rules import RoundInput, Verdict
from fsd_infer.rules.base import device_verdict
from fsd_infer.rules.tilted import INITIAL_KL_COEF
from fsd_infer.trees.tree import DraftTree

Question = str | int  # of a rule about a tree, see VerifiedTree.answer()


@dataclass
class RoundTensors:
    """The result of a round, on the target's device.

    Attributes:
        tree: the drafts, [B, N].
        logits: [B, N, V] the target's raw logits at every node.
        features: [B, D+1, F] the target's features at the nodes of the accepted path, padded with the last.
        verdict: the accepted path and the emitted tokens, [B, D+1].
        log_p: [B, D+1] the target's log-probability of each emitted token, if measured.
        feedback: for drafters that learn from verification, see :meth:`.DraftSession.feedback`.
        packed: what the host reads of a recorded round, as one tensor.
    """

    tree: DraftTree
    logits: Tensor
    features: Tensor
    verdict: Verdict
    log_p: Tensor | None = None
    feedback: list[Tensor] = field(default_factory=list)
    packed: Tensor | None = None


def decode_round(state: DecodeState) -> RoundTensors:
    """Run one round: draft a tree, verify it in one target forward, and accept a path of it by the rules.

    ``state.on_phase`` is called at the end of each step, with its name.
    """
    # 1. Draft a tree under each text's last token, which the target has not read.
    tree = state.session.draft(state.texts.roots)
    state.on_phase("draft")
    # 2. Verify: run the target over all nodes, which gives logits [B, N, V] and features [B, N, F].
    verified = verify(state, tree)
    state.on_phase("target")
    # 3. Accept: a path [B, D+1] of nodes, and the token after each of them, by each row's rule.
    result = accept(state, verified)
    state.on_phase("rule")
    # 4. Commit: the path's keys and values move to the end of the text, which the emitted tokens extend.
    commit(state, result.verdict)
    state.on_phase("cache")
    # 5. Advance: the drafter reads the emitted tokens [B, D+1] with the features [B, D+1, F] before them.
    advance(state, result)
    state.on_phase("advance")
    return result


def verify(state: DecodeState, tree: DraftTree) -> VerifiedTree:
    """Run the target over the nodes."""
    read = state.texts.lengths - 1  # [B] tokens that the target has read: all but the root
    slots, visible = state.cache.after_text(read, tree.ancestors, tree.max_depth)  # [B, N], [B, N, S]
    positions = slots[:, :1] + tree.depths
    limit = state.target.max_positions
    if limit is not None:  # the answer ends before nodes beyond the context matter
        positions = positions.clamp_max(limit - 1)
    return VerifiedTree(state, tree, *state.target.forward(tree.tokens, positions, visible, state.cache))


def accept(state: DecodeState, verified: VerifiedTree) -> RoundTensors:
    """Apply each row's rule, and charge its budget and its adaptive KL coefficient."""
    tree, logits = verified.tree, verified.logits
    rows, nodes = tree.tokens.shape
    # [B, N, 3], see RoundInput; drawn for the largest tree, so that a tree's size changes no later draw
    uniforms = torch.rand(rows, max(nodes, state.max_nodes), 3, generator=state.generator, device=logits.device)
    verdict = device_verdict(state.rules, verified.round_input(uniforms[:, :nodes], max_accepted(state, tree)))
    if state.live is not None:  # finished rows emit nothing, -1 + 1 tokens; the host may not yet know which they are
        goes_on = state.live & (state.texts.lengths < state.max_lengths)
        verdict.accepted = verdict.accepted.masked_fill(~goes_on, -1)
    charge(state, verdict)
    result = RoundTensors(tree, logits, at_nodes(verified.features, verdict.path), verdict)
    if state.measure_log_likelihood:
        log_p = at_nodes(logits, verdict.path).float().log_softmax(-1)  # [B, D+1, V]
        result.log_p = log_p.gather(2, verdict.tokens[..., None])[..., 0]
    result.feedback = state.session.feedback(tree, logits, verdict)
    return result


def charge(state: DecodeState, verdict: Verdict) -> None:
    """Charge a round's nats to each row's budget, and to ``kl_excess`` what exceeds the rule's KL target."""
    spent = verdict.spent.sum(1)
    if verdict.allowed is not None:
        state.kl_excess += spent.float() - verdict.allowed
        state.kl_excess.clamp_(min=-INITIAL_KL_COEF)  # limits how much an easy text may save up
    if state.budget is not None:  # inf stays inf, whatever was spent: inf - inf is NaN
        state.budget.copy_(torch.where(state.budget.isinf(), state.budget, (state.budget - spent).clamp_min(0.0)))


def max_accepted(state: DecodeState, tree: DraftTree) -> Tensor | None:
    """Return how many drafts each row may accept before its keys and values are recomputed, [B]; None: any number.

    Nodes beyond :attr:`.Target.recompute_length` are read with the rotary angles of shorter texts.
    """
    longest, prefilled = state.target.recompute_length, state.cache.prefilled
    if longest is None or prefilled is None:
        return None
    return (longest - state.texts.lengths).clamp_min(0).where(prefilled <= longest, tree.tokens.shape[1])


def commit(state: DecodeState, verdict: Verdict) -> None:
    """Keep the accepted path in the target's cache, and extend the texts: a row's last token is its next root."""
    state.cache.commit(state.texts.lengths - 1, verdict.path, verdict.accepted)
    state.texts.append(verdict.tokens, verdict.accepted + 1)


def advance(state: DecodeState, result: RoundTensors) -> None:
    """Extend the drafter's texts by the emitted tokens, each with the features before it."""
    counts = result.verdict.accepted + 1
    longest = functional.host_max(counts, result.verdict.tokens.shape[1])  # beyond, all rows have padding
    state.session.extend(result.verdict.tokens[:, :longest], result.features[:, :longest], counts)


class VerifiedTree:
    """A tree with the target's logits and features at its nodes, and the answers to what rules ask of it.

    Answers are computed when they are first asked for. If some need the host (:attr:`.DecodeState.asks_host`), a
    recorded round is two graphs. Between them the host computes the answers, which the second graph reads
    (:meth:`with_answers`).

    Attributes:
        tree: the drafts.
        logits: [B, N, V] the target's, in its dtype.
        features: [B, N, F] the target's.
        recurrent: what recurrent layers keep of the nodes until some are accepted.
    """

    def __init__(self, state: DecodeState, tree: DraftTree, logits: Tensor, features: Tensor) -> None:
        self.tree, self.logits, self.features, self._state = tree, logits, features, state
        self.recurrent: dict[Hashable, Any] = dict(state.cache.recurrent.kept)
        self._answers: dict[Question, Tensor | None] = {}

    def round_input(self, uniforms: Tensor, max_accepted: Tensor | None) -> RoundInput:
        """Return the input of the rules.

        Args:
            uniforms: [B, N, 3] in [0, 1).
            max_accepted: [B] most drafts that each row may accept; None: all.
        """
        state = self._state
        return RoundInput(
            tree=self.tree,
            logits=self.raw_logits,
            scores=self.answer("scores") if state.processors.is_needed else self.logits,
            greedy=state.greedy,
            uniforms=uniforms,
            budget_left=state.budget,
            process_draft=(lambda tree: self.answer("draft_scores")) if state.processors.is_needed else None,
            texts=state.texts,
            kl_excess=state.kl_excess,
            seen_ngrams=self.answer,
            max_accepted=max_accepted,
        )

    @cached_property
    def raw_logits(self) -> Tensor:
        """The logits that processors read: in fp32, as in generate. Rules convert what they look at."""
        return self.logits.float() if self._state.processors.is_needed else self.logits

    @cached_property
    def _texts(self) -> Sequence[Tensor | None]:
        return self._state.history() if self._state.processors.contextual else ()

    def answer(self, question: Question) -> Any:
        """Return what rules ask of the tree, computed at the first call.

        Args:
            question: "scores": the logits after the request's processors, [B, N, V]. "draft_scores": the drafter's
                after them, [B, I, V]. n: drafts that complete an n-gram of other texts that the drafter reads, [B, N]
                bool; None if it reads none.
        """
        if question not in self._answers:
            state = self._state
            processors, vocabulary, filled = state.processors, self.logits.shape[-1], state.prompt_indices
            rows = [*filled, *[0] * (len(state.rules) - len(filled))]  # 0 for rows that no text fills
            if isinstance(question, int):
                self._answers[question] = state.session.seen_ngrams(self.tree, question)
            elif question == "scores":
                self._answers[question] = processors.process_nodes(self.raw_logits, self.tree, self._texts, rows)
            else:
                self._answers[question] = processors.process_drafts(self.tree, vocabulary, self._texts, rows)
        return self._answers[question]

    def answers(self) -> dict[Question, Tensor]:
        """Return the answers so far that the host computed."""
        by_host = self._state.processors.contextual
        return {
            question: values
            for question, values in self._answers.items()
            if values is not None and (by_host or isinstance(question, int))
        }

    def with_answers(self, state: DecodeState, answers: Mapping[Question, Tensor] | None = None) -> VerifiedTree:
        """Return the same tree for ``state``, with these answers and no others."""
        tree = VerifiedTree(state, replace(self.tree), self.logits, self.features)
        tree.recurrent, tree._answers = self.recurrent, dict(answers or {})
        return tree
