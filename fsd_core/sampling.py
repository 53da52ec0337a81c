"""Functions of tensors that rounds above temperature 0 call. Kernels take their places as those of functional."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fsd_core.divergence import expand_draft
from fsd_core.functional import at_nodes, replaceable, topk_logprobs, wide

# prior probability that the target accepts a draw from the rest of q, where the largest q is 0 and where it is 1
ACCEPT_IF_UNSURE, ACCEPT_IF_SURE = 0.2, 0.95
MIN_REST = 1e-3  # a smaller rest of q is rounding
TINY = 1e-30  # in place of 0 as a divisor
FORKS = "drafts drawn from q"  # the fault of sampled drafts that form no chain


@replaceable
def residual_mass(
    p_logits: Tensor, q_logits: Tensor, weight: Tensor, q_index: Tensor, draft_ids: Tensor | None = None
) -> Tensor:
    """Return Σ (w·p - q)+ per row of p, 0 where there is no q: [B, N]. With w = 1 it is their total variation.

    Args:
        p_logits, q_logits, q_index, draft_ids: see :func:`.divergence_rows`.
        weight: [B, N] w, from 0 to 1.
    """
    p, q = weight[..., None].float() * p_logits.float().softmax(-1), q_logits.float().softmax(-1)
    drafted_p = p if draft_ids is None else p.index_select(-1, draft_ids.long())
    mass = (drafted_p - at_nodes(q, q_index.clamp_min(0))).clamp_min(0.0).sum(-1).to(weight.dtype)
    if draft_ids is not None:
        mass = mass + (weight - drafted_p.sum(-1)).clamp_min(0.0)
    return mass.masked_fill(q_index < 0, 0.0)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index per row by inverse CDF; an index of weight 0 is never drawn.

    Args:
        weights: [R, M], at least 0, of any total; a total of 0 gives M.
        uniforms: [R] in [0, 1).
    """
    cdf = weights.cumsum(-1, dtype=wide(weights.device))
    total = cdf[:, -1]
    share = torch.minimum(uniforms.to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, share[:, None], right=True).squeeze(-1)


class Rest(NamedTuple):
    """What is left of p at a context of each row when its drafts were refused: (w·p - q)+, or w·p where there is no q.

    Attributes:
        p_logits: [B, N, V].
        nodes: [B] int64, each context's row of p.
        weight: [B] w, from 0 to 1.
        refused: [B, K] int64 tokens that are left out, -1 for none.
        q_logits: [B, I, Vd]; None: there is no q.
        q_index: [B] int64, each context's row of q, -1 for none; None: as ``q_logits``.
        draft_ids: [Vd] the tokens of q's columns; None: V = Vd.
        draft_index: [V] the column of each token, -1 for none; None: not known.
    """

    p_logits: Tensor
    nodes: Tensor
    weight: Tensor
    refused: Tensor
    q_logits: Tensor | None = None
    q_index: Tensor | None = None
    draft_ids: Tensor | None = None
    draft_index: Tensor | None = None

    def weights(self) -> Tensor:
        """Return it over the vocabulary, [B, V] in fp32."""
        p = at_nodes(self.p_logits, self.nodes[:, None])[:, 0].float().softmax(-1)
        weights, refused = self.weight[:, None].float() * p, self.refused
        if self.q_logits is not None and self.q_index is not None:
            q = at_nodes(self.q_logits, self.q_index.clamp_min(0)[:, None])[:, 0].float().softmax(-1)
            q = q.masked_fill(self.q_index[:, None] < 0, 0.0)
            weights = (weights - expand_draft(q, self.draft_ids, p.shape[-1], 0.0)).clamp_min(0.0)
        most = torch.zeros_like(refused, dtype=p.dtype).masked_fill(refused < 0, math.inf)
        return weights.scatter_reduce(1, refused.clamp_min(0), most, "amin")


@replaceable
def draw_rest(rest: Rest, uniforms: Tensor) -> Tensor:
    """Draw a token of each row by inverse CDF: [B] int64, V where nothing is left. uniforms: [B] in [0, 1)."""
    return draw(rest.weights(), uniforms)


@replaceable
def sample_rows(logits: Tensor, uniforms: Tensor, where: Tensor) -> Tensor:
    """Draw an index from each row's softmax by inverse CDF; one of probability 0 is never drawn.

    Args:
        logits: [..., V].
        uniforms: [...] in [0, 1).
        where: [...] bool, the rows that count; results of others are arbitrary.

    Returns:
        [...] int64.
    """
    rows = logits.softmax(-1).flatten(0, -2)
    return draw(rows, uniforms.flatten()).view(uniforms.shape).clamp_max(logits.shape[-1] - 1)


class MixedChildren(NamedTuple):
    """Children of contexts, of which the last may be drawn, [B, E, w] each, and what is left.

    Attributes:
        log_q: ln q of each, of the drawn one the log-probability that the target accepts it; -inf for none.
        entries: of q's columns, int64; that of a drawn child is still to be drawn.
        drawn: bool.
        fixed: entries of the fixed children, -1 for others.
        outside: [B, E, Vd] in fp32, the scores without the fixed children, from which the last one is drawn.
        reserved, free_nodes: as they are then.
    """

    log_q: Tensor
    entries: Tensor
    drawn: Tensor
    fixed: Tensor
    outside: Tensor
    reserved: Tensor
    free_nodes: Tensor


@replaceable
def mixed_children(
    scores: Tensor,
    width: int,
    accept_log_probs: Tensor,
    ancestors: Tensor,
    reserved: Tensor,
    free_nodes: Tensor,
    ratios: tuple[float, float],
    min_log_prob: float,
) -> MixedChildren:
    """Decide which children of a context are fixed, and which contexts draw one more.

    :mod:`fsd_infer.drafters.drawing` says why so. No draw is looked at. Log-probabilities of acceptance are estimates.

    Args:
        scores: [B, E, Vd] ln q of each context up to a constant.
        width: w, most children of a context.
        accept_log_probs: [B, E] log-probability that each context is accepted.
        ancestors: [B, E, n] which expanded nodes are each context's ancestors or itself, the root excluded.
        reserved: [B, n] which of them will be verified because something is drawn below.
        free_nodes: [B] int64, how many nodes of each tree are not reserved.
        ratios: learned ratios of accepted to expected drafts, of likely and of drawn children.
        min_log_prob: a node that is accepted with a smaller log-probability is not worth verifying.
    """
    log_q, entries = topk_logprobs(scores, width)
    likely_ratio, drawn_ratio = ratios
    q_max = log_q[..., :1].exp()
    accept_drawn = drawn_ratio * (ACCEPT_IF_UNSURE + (ACCEPT_IF_SURE - ACCEPT_IF_UNSURE) * q_max)
    accept_drawn = accept_drawn.clamp_max(ACCEPT_IF_SURE)  # [B, E, 1] of each token of the rest of q
    gain = (likely_ratio - accept_drawn).clamp_min(0.0).log()  # of fixing a token, compared with the draw
    fixed = accept_log_probs[..., None] + log_q + gain >= min_log_prob
    fixed[..., -1] = False
    rest = (1.0 - (log_q.exp() * fixed).sum(-1)).clamp_min(0.0)
    drawn_log_probs = (accept_drawn[..., 0] * rest).log()
    wants = (accept_log_probs + drawn_log_probs >= min_log_prob) & (rest > MIN_REST)
    # a draw reserves its child and what is not yet reserved above it; contexts take the free nodes in order
    cost = (1 + (ancestors & ~reserved[:, None]).sum(-1)) * wants
    draws = wants & (cost.cumsum(-1) <= free_nodes[:, None])
    reserved = reserved | (ancestors & draws[..., None]).any(1)
    drawn = torch.zeros_like(fixed)
    drawn[..., -1] = draws
    log_q = log_q.masked_fill(draws[..., None] & ~fixed, -math.inf).where(~drawn, drawn_log_probs[..., None])
    outside = scores.float().scatter(-1, entries, scores.float().gather(-1, entries).masked_fill(fixed, -math.inf))
    left = free_nodes - (cost * draws).sum(-1)
    return MixedChildren(log_q, entries, drawn, entries.masked_fill(~fixed, -1), outside, reserved, left)


@replaceable
def drawn_weights(ratio: Tensor, parents: Tensor, drawn: Tensor, depth: int) -> Tensor:
    """Return w of block verification: min(1, w(parent)·ratio) at drawn nodes, 1 at others.

    Args:
        ratio: [B, N] p/q of drawn nodes.
        parents: [B, N] int64 node numbers, each less than its node's own; 0 for the root.
        drawn: [B, N] bool, False for the root.
        depth: at least that of the deepest node.
    """
    weight = ones = torch.ones_like(ratio)
    for _ in range(depth):
        weight = torch.where(drawn, (weight.gather(1, parents) * ratio).clamp_max(1.0), ones)
    return weight


@replaceable
def block_accept_probs(
    log_p: Tensor,
    log_q: Tensor,
    weight: Tensor,
    residual: Tensor,
    parents: Tensor,
    drawn: Tensor,
    draws: Tensor,
    depth: int,
) -> Tensor:
    """Return the probability that block verification goes from a node's parent to the node: [B, N].

    See :func:`fsd_infer.rules.distributions.block_test`.

    Args:
        log_p, log_q: [B, N] ln p and ln q of each node, given its parent.
        weight: [B, N] w of :func:`drawn_weights`.
        residual: [B, N] of :func:`residual_mass`, with these weights.
        parents, drawn, depth: see :func:`drawn_weights`; a node has at most one drawn child.
        draws: [B, N] bool, nodes with a drawn child.
    """
    at_draws = residual / (residual + 1 - weight).clamp_min(TINY)
    goes_on = _descent_probs(torch.where(draws & (weight < 1), at_draws, weight), parents, drawn, depth)
    rest = (weight.gather(1, parents) * log_p.exp() - log_q.exp()).clamp_min(0.0)
    rest = (rest / residual.gather(1, parents).clamp_min(TINY)).clamp_max(1.0)
    return torch.where(drawn, goes_on, torch.where(draws.gather(1, parents), (1 - goes_on) * rest, log_p.exp()))


def _descent_probs(ends_here: Tensor, parents: Tensor, drawn: Tensor, depth: int) -> Tensor:
    """Return the probability that a walk which ends at a node's parent or below its draw ends below its draw: [B, N].

    ``ends_here``: [B, N] that it ends at a node, if it does not end below the node's drawn child.
    """
    none = ends_below = torch.zeros_like(ends_here)
    ends_within = ends_here
    for _ in range(depth):
        ends_below = none.scatter_add(1, parents, ends_within.masked_fill(~drawn, 0.0))
        ends_within = ends_below + (1 - ends_below) * ends_here
    return (ends_below / ends_within.clamp_min(TINY)).clamp_max(1.0).gather(1, parents)


@replaceable
def child_offsets(probs: Tensor, uniforms: Tensor, parents: Tensor) -> Tensor:
    """Return how far each context's uniform number lies from the start of each child's part of [0, 1): [B, N].

    Siblings divide [0, 1) in order, by their probabilities: the number falls on a child if its offset is at least 0 and
    less than its probability.

    Args:
        probs: [B, N] of each node, given its parent; 0 for the root.
        uniforms: [B, N] of each context.
        parents: [B, N] int64 node numbers, each less than its node's own; 0 for the root.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device)
    earlier = (parents[:, :, None] == parents[:, None]) & (nodes < nodes[:, None])  # siblings
    return uniforms.gather(1, parents).to(probs.dtype) - torch.where(earlier, probs[:, None], 0.0).sum(-1)
