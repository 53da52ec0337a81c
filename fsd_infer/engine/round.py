"""One round of speculative decoding: a function of tensors on the target's device, read from top to bottom.

B rows, N nodes of each tree with the root first, D at least the depth of a tree, V tokens, F features. Nothing is read
on the host, so a device may run a round in one go. On a CPU, where reading is free, shapes are as small as the round
allows; elsewhere they are fixed. :mod:`fsd_infer.engine.loop` calls :func:`decode_round` until all rows are finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsd_core.tensors import at_nodes, trimmed_on_host
from fsd_infer.engine.state import DecodeState
from fsd_infer.engine.verified import VerifiedTree
from fsd_infer.rules import Verdict
from fsd_infer.rules.base import device_verdict
from fsd_infer.rules.tilted import INITIAL_KL_COEF
from fsd_infer.trees.tree import DraftTree


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
    """Run one round: draft a tree, verify it in one target forward, and accept a path of it by the rules."""
    # 1. Draft a tree under each text's last token, which the target has not read.
    tree = state.session.draft(state.roots)
    state.on_phase("draft")
    # 2. Verify: run the target over all nodes, which gives logits [B, N, V] and features [B, N, F].
    verified = verify(state, tree)
    state.on_phase("target")
    result = accept_and_commit(state, verified)
    # 6. Advance: the drafter reads the emitted tokens [B, D+1] with the features [B, D+1, F] before them.
    advance(state, result, result.verdict.tokens, result.verdict.accepted + 1)
    state.on_phase("advance")
    return result


def accept_and_commit(state: DecodeState, verified: VerifiedTree) -> RoundTensors:
    """Accept a path of a verified tree, and commit it to the target's cache and to the texts."""
    # 3. Accept: a path [B, D+1] of nodes, and the token after each of them, by each row's rule.
    result = accept(state, verified)
    state.on_phase("rule")
    # 4. Commit: the path's keys and values move to the end of the text.
    verdict = result.verdict
    state.cache.commit(state.lengths, verdict.path, verdict.accepted)
    # 5. The emitted tokens extend the texts.
    state.lengths += verdict.accepted + 1
    state.extend(verdict.tokens, verdict.accepted)
    state.on_phase("cache")
    return result


def verify(state: DecodeState, tree: DraftTree) -> VerifiedTree:
    """Run the target over the nodes."""
    slots, visible = state.cache.after_text(state.lengths, tree.ancestors, tree.max_depth)  # [B, N], [B, N, S]
    positions = slots[:, :1] + tree.depths
    limit = state.target.max_positions
    if limit is not None:  # the answer ends before nodes beyond the context matter
        positions = positions.clamp_max(limit - 1)
    return VerifiedTree(state, tree, *state.target.forward(tree.tokens, positions, visible, state.cache))


def accept(state: DecodeState, verified: VerifiedTree) -> RoundTensors:
    """Apply each row's rule, and charge its budget and its adaptive KL coefficient."""
    tree, logits = verified.tree, verified.logits
    rows, nodes = tree.tokens.shape
    # [B, N, 3], drawn for the largest tree: padding of a tree changes no later draw
    uniforms = torch.rand(rows, max(nodes, state.max_nodes), 3, generator=state.generator, device=logits.device)
    verdict = device_verdict(state.rules, verified.round_input(uniforms[:, :nodes], max_accepted(state, tree)))
    if state.live is not None:  # finished rows emit nothing; the host may not know yet which have reached their limit
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
    """Take what a round spent from each row's budget, and add what it spent beyond its KL target to the excess."""
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
    return (longest - 1 - state.lengths).clamp_min(0).where(prefilled <= longest, tree.tokens.shape[1])


def advance(state: DecodeState, result: RoundTensors, tokens: Tensor, counts: Tensor) -> None:
    """Extend the drafter's texts by tokens [B, K], of which ``counts`` [B] are real.

    ``result.features`` [B, K, F] are those before the tokens.
    """
    tokens, features = trimmed_on_host(counts, tokens, result.features)
    state.session.extend(tokens, features, counts)
