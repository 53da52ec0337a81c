"""Steps of rounds above temperature 0 in one call of the kernels each: torch starts many small operations."""

from __future__ import annotations

from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from fsd_core.sampling import ACCEPT_IF_SURE, ACCEPT_IF_UNSURE, MIN_REST, MixedChildren
from fsd_infer.backends.cpu.kernels import Kernels, address_of, threads_for
from fsd_infer.backends.cpu.structs import Mixing, SampledRound, WalkedRound


def exact_walk(kernels: Kernels, scores: Tensor, inputs: Any, draft_ids: Tensor | None) -> Any:
    """Compute :func:`fsd_infer.rules.walk.exact_walk` of logits in bf16 or fp32. ``draft_ids`` are int64.

    NotImplemented: something is wrong with the round, which torch then says.
    """
    tree, logits, uniforms = inputs.tree, inputs.round.logits, inputs.round.uniforms
    q, q_logits = (None, None) if tree.q_scores is None else (tree.q_scores, tree.q_logits)
    rows = [None if x is None else x.contiguous() for x in (scores, q, None if scores is logits else logits, q_logits)]
    nodes = [tree.tokens, tree.parents, tree.q_index, tree.scores, tree.drawn]
    nodes = [None if x is None else x.contiguous() for x in nodes]
    round = SampledRound(
        *scores.shape, *((0, 0) if q is None else q.shape[1:]), *map(address_of, rows),
        *(x is not None and x.dtype == torch.bfloat16 for x in rows), *map(address_of, (*nodes, draft_ids, uniforms)),
        uniforms.stride(0),
    )  # fmt: skip
    (batch, count, columns), width = scores.shape, tree.max_depth + 1
    numbers, gaps = torch.empty(4, batch, width, dtype=torch.long), torch.empty(batch, width)
    accepted = torch.empty(batch, dtype=torch.long)
    walked = WalkedRound(width, *(x.data_ptr() for x in (*numbers, gaps, accepted)))
    if kernels.exact_walk(byref(round), byref(walked), threads_for(batch * count, columns)):
        return NotImplemented
    if max(accepted.tolist()) >= width:  # a tree that is deeper than it says
        return NotImplemented
    path, tokens, sources, first_choices = numbers
    return {
        "path": path, "accepted": accepted, "tokens": tokens, "sources": sources, "first_choices": first_choices,
        "logprob_gap": gaps, "relaxed": torch.zeros(batch, width, dtype=torch.bool),
        "spent": torch.zeros(batch, width, dtype=torch.double), "proposers": tree.proposers,
    }  # fmt: skip


def mixed_children(
    kernels: Kernels,
    scores: Tensor,
    width: int,
    accept_log_probs: Tensor,
    ancestors: Tensor,
    reserved: Tensor,
    free_nodes: Tensor,
    ratios: tuple[float, float],
    min_log_prob: float,
) -> MixedChildren:
    """Compute :func:`fsd_core.sampling.mixed_children` of scores in bf16 or fp32."""
    batch, count, drafted = scores.shape
    how = Mixing(*ratios, ACCEPT_IF_UNSURE, ACCEPT_IF_SURE, MIN_REST, min_log_prob)
    log_q, drawn = torch.empty(batch, count, width), torch.empty(batch, count, width, dtype=torch.bool)
    entries, fixed = torch.empty(2, batch, count, width, dtype=torch.long)
    state = (x.clone() for x in (reserved, free_nodes))
    children = MixedChildren(log_q, entries, drawn, fixed, torch.empty(scores.shape), *state)
    x, accept, above = (each.contiguous() for each in (scores, accept_log_probs, ancestors))
    of_rows = x.dtype == torch.bfloat16, x.data_ptr(), *x.shape, width, accept.data_ptr()
    out, threads = (each.data_ptr() for each in children), threads_for(batch * count, drafted)
    kernels.mixed_children(*of_rows, above.data_ptr(), above.shape[-1], byref(how), *out, threads)
    return children
