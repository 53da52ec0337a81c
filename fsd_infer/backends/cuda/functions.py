"""Triton's answers for :mod:`fsd_core.functional`; NotImplemented where plain torch has to compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_core.sampling import Rest
from fsd_infer.backends.cuda import clipped, compare, draws, kernels, mixed, rules, trees, walk

_LONGEST_NGRAM = 16  # for which a kernel's loops are unrolled
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def row_max(logits: Tensor) -> Any:
    return kernels.row_max(logits) if _takes(logits) else NotImplemented


def row_stats(logits: Tensor, where: Tensor | None = None) -> Any:
    return kernels.row_stats(logits, where) if _takes(logits) else NotImplemented


def row_entropy(logits: Tensor, where: Tensor | None = None) -> Any:
    return kernels.row_entropy(logits, where) if _takes(logits) else NotImplemented


def topk_logprobs(logits: Tensor, k: int, where: Tensor | None = None) -> Any:
    takes = _takes(logits) and k <= kernels.MAX_LIKELY
    return kernels.topk_logprobs(logits, k, where) if takes else NotImplemented


def search_clipped(log_p: Tensor, log_q: Tensor, gain: Tensor, steps: int, near: float) -> Any:
    takes = _takes(log_p) and log_p.dtype == log_q.dtype == gain.dtype == torch.float32
    return clipped.search_clipped(log_p, log_q, gain, steps, near) if takes else NotImplemented


def emitted(log_r: Tensor, at: Any) -> Any:
    takes = _takes(log_r) and log_r.dtype == at.scores.dtype == torch.float32
    return clipped.emitted(log_r, at) if takes else NotImplemented


def not_above_p(log_r: Tensor, p: Tensor, where: Tensor) -> Any:
    takes = _takes(log_r) and log_r.dtype == p.dtype == torch.float32
    return clipped.not_above_p(log_r, p, where) if takes else NotImplemented


def reduced_drafts(r: Tensor, slot: Tensor, at: Any) -> Any:
    return clipped.reduced_drafts(r, slot, at) if _takes(r) and r.dtype == torch.float32 else NotImplemented


def reduced_rows(scores: Tensor, at: Any) -> Any:
    takes = _takes(scores, at.inputs.tree.q_scores) if at.inputs.sampled else _takes(scores)
    return clipped.reduced_rows(scores, at) if takes else NotImplemented


def ancestors(parents: Tensor) -> Any:
    return trees.ancestors(parents) if parents.numel() else NotImplemented


def slot_masks(lengths: Tensor, visible_after: Tensor, used: int) -> Any:
    return trees.slot_masks(lengths, visible_after, used) if visible_after.numel() and used else NotImplemented


def divergence_rows(
    p_logits: Tensor,
    q_logits: Tensor,
    measure: Any,
    draft_ids: Tensor | None = None,
    q_index: Tensor | None = None,
) -> Any:
    """Take the five plain forms, over a reduced vocabulary those that are finite where q is 0."""
    width = p_logits.shape[-1] if draft_ids is None else draft_ids.shape[0]
    fits = q_logits.shape[-1] == width and (q_index is not None or p_logits.shape[:-1] == q_logits.shape[:-1])
    kinds = set(compare.KINDS if draft_ids is None else compare.OUTSIDE) - {compare.RESIDUAL}
    fits &= measure.name in kinds and p_logits.dim() > 1
    if not fits or not _takes(p_logits, q_logits):
        return NotImplemented
    p, q = (compare.with_totals(x) for x in (p_logits, q_logits))
    return compare.compare(measure.name, p, q, draft_ids, q_index)


def residual_mass(
    p_logits: Tensor, q_logits: Tensor, weight: Tensor, q_index: Tensor, draft_ids: Tensor | None = None
) -> Any:
    if not _takes(p_logits, q_logits):
        return NotImplemented
    p, q = (compare.with_totals(x) for x in (p_logits, q_logits))
    return compare.compare(compare.RESIDUAL, p, q, draft_ids, q_index, weight)


def keep_nodes(tokens: Tensor, parents: Tensor, scores: Tensor, *others: Any) -> Any:
    """``others``: the other arguments, the kept nodes last."""
    fits = 0 < others[-1].shape[1] <= walk.MAX_NODES and scores.dtype == torch.float32
    return trees.keep_nodes(tokens, parents, scores, *others) if fits else NotImplemented


def sample_rows(logits: Tensor, uniforms: Tensor, where: Tensor) -> Any:
    return draws.sample_rows(logits, uniforms, where) if _takes(logits) else NotImplemented


def mixed_children(scores: Tensor, width: int, accept_log_probs: Tensor, *others: Any) -> Any:
    takes = _takes(scores) and width <= kernels.MAX_LIKELY and accept_log_probs.dtype == torch.float32
    return mixed.mixed_children(scores, width, accept_log_probs, *others) if takes else NotImplemented


def draw_rest(rest: Rest, uniforms: Tensor) -> Any:
    of_q = () if rest.q_logits is None or not rest.q_logits.shape[1] else (rest.q_logits,)
    rest = rest if of_q else rest._replace(q_logits=None, q_index=None, draft_ids=None)
    return draws.draw_rest(rest, uniforms) if _takes(rest.p_logits, *of_q) else NotImplemented


def completes_ngram(tokens: Tensor, texts: Any, tree: Any, n: int) -> Any:
    return rules.completes_ngram(tokens, texts, tree, n) if n <= _LONGEST_NGRAM else NotImplemented


def repeating_tokens(rows: Tensor, nodes: Tensor, texts: Any, tree: Any, n: int, *others: Any) -> Any:
    return rules.repeating_tokens(rows, nodes, texts, tree, n, *others) if n <= _LONGEST_NGRAM else NotImplemented


def biased_sampled(logit_bias: Tensor, inputs: Any, applies: Tensor) -> Any:
    takes = 1 < logit_bias.shape[1] <= walk.MAX_NODES
    return rules.biased_sampled(logit_bias, inputs, applies) if takes else NotImplemented


def accept_prob_under(r: Tensor, log_r: Tensor, residual: Tensor, inputs: Any) -> Any:
    takes = 1 < r.shape[1] <= walk.MAX_NODES
    return rules.accept_prob_under(r, log_r, residual, inputs) if takes else NotImplemented


def accepted_path(p_draft: Tensor, *others: Any) -> Any:
    """``others``: the other arguments, the round's inputs last."""
    takes = 1 < p_draft.shape[1] <= walk.MAX_NODES
    return walk.accepted_path(p_draft, *others) if takes else NotImplemented


def tilted_bias(logprob_gap: Tensor, *others: Any) -> Any:
    takes = 1 < logprob_gap.shape[1] <= walk.MAX_NODES
    return rules.tilted_bias(logprob_gap, *others) if takes else NotImplemented


def _takes_round(scores: Tensor, inputs: Any) -> bool:
    """Whether kernels take a round: trees with drafts, and q over one vocabulary."""
    tree, logits, uniforms = inputs.tree, [scores, inputs.round.logits], inputs.round.uniforms
    if inputs.sampled:
        logits += [tree.q_scores, tree.q_logits]
    fits = 1 < scores.shape[1] <= walk.MAX_NODES and tree.scores.dtype == torch.float32
    fits &= inputs.greedy or uniforms.dtype == torch.float32
    return fits and _takes(*logits) and not (inputs.sampled and tree.q_scores.shape != tree.q_logits.shape)


def draft_numbers(scores: Tensor, inputs: Any) -> Any:
    return walk.draft_numbers(scores, inputs) if _takes_round(scores, inputs) else NotImplemented


def exact_walk(scores: Tensor, inputs: Any) -> Any:
    return walk.exact_walk(scores, inputs) if _takes_round(scores, inputs) else NotImplemented


def _takes(*logits: Tensor) -> bool:
    """Whether kernels read these logits, of which none are under autograd and none are empty."""
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in logits)
    return all(x.dtype in _DTYPES and x.numel() > 0 for x in logits) and not differentiated


def register(device: str) -> None:
    """Let the kernels answer on this type of device."""
    for kernel in (
        row_max, row_stats, row_entropy, topk_logprobs, search_clipped, ancestors, slot_masks, sample_rows,
        mixed_children, draw_rest, exact_walk, divergence_rows, residual_mass, keep_nodes, accepted_path, draft_numbers,
        tilted_bias, emitted, reduced_rows, reduced_drafts, not_above_p, completes_ngram, repeating_tokens,
        biased_sampled, accept_prob_under,
    ):  # fmt: skip
        functional.register(kernel.__name__, device, _where_it_lies(kernel))


def _where_it_lies(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Let a kernel run on its first tensor's device: Triton launches on the current one."""

    def on_device(first: Any, *others: Any, **named: Any) -> Any:
        with torch.cuda.device_of(first if isinstance(first, Tensor) else first[0]):
            return kernel(first, *others, **named)

    return on_device
