"""The kernels' answers for :mod:`fsd_core.functional`: NotImplemented where plain torch has to compute.

That is for dtypes other than bf16 and fp32, under autograd, without AVX2, and with FSD_KERNELS=0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional, sampling
from fsd_core.functional import TreeTensors
from fsd_infer.backends.cpu import sampled
from fsd_infer.backends.cpu.kernels import PLAIN_DIVERGENCES, Kernels, address_of, kernels
from fsd_infer.backends.cpu.structs import Tree

_FEW_NODES = 256
_FEW_LARGEST = 256  # the kernel inserts into a sorted list, which is slower than torch's selection for more


def row_max(logits: Tensor) -> Any:
    compiled = _compiled(logits)
    return NotImplemented if compiled is None else compiled.row_statistics(logits.contiguous(), None, log_sum=False)[:2]


def row_stats(logits: Tensor, where: Tensor | None = None) -> Any:
    compiled = _compiled(logits)
    return NotImplemented if compiled is None else compiled.row_statistics(logits.contiguous(), where)


def row_entropy(logits: Tensor, where: Tensor | None = None) -> Any:
    compiled = _compiled(logits)
    if compiled is None:
        return NotImplemented
    if where is None:
        return compiled.row_entropies(logits.contiguous())
    flat, rows = _chosen(logits, where)
    return _spread(compiled.row_entropies(flat, rows), rows, where)


def topk_logprobs(logits: Tensor, k: int, where: Tensor | None = None) -> Any:
    compiled = _compiled(logits)
    if compiled is None:
        return NotImplemented
    if where is None:
        return compiled.likeliest(logits.contiguous(), k)
    flat, rows = _chosen(logits, where)
    return tuple(_spread(values, rows, where) for values in compiled.likeliest(flat[rows], k))


def keep_top_k(scores: Tensor, k: int, other: float = -math.inf) -> Any:
    compiled = _compiled(scores) if scores.dtype == torch.float32 and k <= _FEW_LARGEST else None
    return NotImplemented if compiled is None else compiled.keep_largest(scores.contiguous(), k, other)


def divergence_rows(
    p_logits: Tensor, q_logits: Tensor, measure: Any, draft_ids: Tensor | None = None, q_index: Tensor | None = None
) -> Any:
    """Compute the five plain forms; over a reduced vocabulary, only those that are finite where q is 0."""
    if measure.name not in PLAIN_DIVERGENCES or draft_ids is not None and measure.infinite_on_reduced_vocabulary:
        return NotImplemented
    width = p_logits.shape[-1] if draft_ids is None else draft_ids.shape[0]
    compiled = _compiled(p_logits, q_logits)
    fits = q_logits.shape[-1] == width and (q_index is not None or p_logits.shape[:-1] == q_logits.shape[:-1])
    if compiled is None or not fits:
        return NotImplemented
    if q_index is None:
        return compiled.divergence(measure.name, p_logits.contiguous(), q_logits.contiguous(), _wide(draft_ids))
    arguments = p_logits.contiguous(), q_logits.contiguous().flatten(0, 1), _wide(draft_ids)
    return compiled.divergence(measure.name, *arguments, _rows_of_q(q_logits, q_index))


def residual_mass(
    p_logits: Tensor, q_logits: Tensor, weight: Tensor, q_index: Tensor, draft_ids: Tensor | None = None
) -> Any:
    compiled = _compiled(p_logits, q_logits)
    if compiled is None:
        return NotImplemented
    arguments = p_logits.contiguous(), q_logits.contiguous().flatten(0, 1), _wide(draft_ids)
    weights = weight.float().contiguous()
    return compiled.divergence("residual", *arguments, _rows_of_q(q_logits, q_index), weights).to(weight.dtype)


def draw_rest(rest: sampling.Rest, uniforms: Tensor) -> Any:
    of_q = () if rest.q_logits is None else (rest.q_logits,)
    compiled = _compiled(rest.p_logits, *of_q) if uniforms.dtype == torch.float32 else None
    if compiled is None:
        return NotImplemented
    return compiled.draw_rest(rest._replace(weight=rest.weight.float(), draft_ids=_wide(rest.draft_ids)), uniforms)


def sample_rows(logits: Tensor, uniforms: Tensor, where: Tensor) -> Tensor:
    """Compute only the rows that count: choosing them is free on the host, while it costs a GPU a transfer."""
    compiled = _compiled(logits)
    if compiled is not None and uniforms.dtype == torch.float32:
        return compiled.sample(logits.contiguous(), uniforms, where)
    tokens = sampling.draw(logits[where].softmax(-1), uniforms[where]).clamp_max(logits.shape[-1] - 1)
    return torch.zeros_like(where, dtype=torch.long).masked_scatter(where, tokens)


def mixed_children(scores: Tensor, width: int, accept_log_probs: Tensor, *rest: Any) -> Any:
    """In torch this takes fifty small operations. ``rest``: the other arguments."""
    compiled = _compiled(scores) if accept_log_probs.dtype == torch.float32 else None
    if compiled is None:
        return NotImplemented
    return sampled.mixed_children(compiled, scores, width, accept_log_probs, *rest)


def exact_walk(scores: Tensor, inputs: Any) -> Any:
    """Compute walks with scores and uniforms in fp32, laid out as rounds draw them, and q over one vocabulary."""
    tree, uniforms, numbers = inputs.tree, inputs.round.uniforms, [scores, inputs.round.logits]
    if tree.q_scores is not None:
        numbers += [tree.q_scores, tree.q_logits]
    compiled = _compiled(*numbers)
    shape = scores.shape[:2]
    fits = tree.scores.dtype == uniforms.dtype == torch.float32 and uniforms.stride()[1:] == (3, 1)
    fits &= uniforms.shape[:2] == tree.scores.shape == shape == inputs.round.logits.shape[:2]
    fits &= _numbers_fit(shape, tree.drawn, tree.tokens, tree.parents, tree.q_index)
    if compiled is None or not fits or tree.sampled and tree.q_scores.shape != tree.q_logits.shape:
        return NotImplemented
    return sampled.exact_walk(compiled, scores, inputs, _wide(tree.draft_ids))


def host_max(values: Tensor, bound: int) -> int:
    return int(values.max()) if values.numel() else 0


def host_nonzero(mask: Tensor) -> Tensor | None:
    return None if bool(mask.all()) else mask.nonzero()[:, 0]


def _chosen(logits: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [..., V] as [M, V], and the rows [R] that count."""
    return logits.contiguous().view(-1, logits.shape[-1]), where.flatten().nonzero().squeeze(-1)


def _spread(values: Tensor, rows: Tensor, where: Tensor) -> Tensor:
    """Return results [R, ...] at their places in [..., ...], 0 elsewhere."""
    result = values.new_zeros(where.numel(), *values.shape[1:])
    return result.index_copy_(0, rows, values).unflatten(0, where.shape)


def _wide(draft_ids: Tensor | None) -> Tensor | None:
    """Return token ids as the kernels read them: files may store narrower integers."""
    return None if draft_ids is None else draft_ids.long().contiguous()


def _rows_of_q(q_logits: Tensor, q_index: Tensor) -> Tensor:
    """Return rows [B, N] of q [B, I, Vd] as rows of [B · I, Vd]; -1, for none, stays."""
    first = q_logits.shape[1] * torch.arange(len(q_index))[:, None]
    return q_index if len(q_index) == 1 else (q_index + first).where(q_index >= 0, -1)


def drawn_weights(ratio: Tensor, parents: Tensor, drawn: Tensor, depth: int) -> Any:
    """Walk down the few nodes of trees in Python, which takes less time than starting torch's operations."""
    if ratio.numel() > _FEW_NODES:
        return NotImplemented
    result = []
    for ratios, above, is_drawn in zip(ratio.tolist(), parents.tolist(), drawn.tolist()):
        weights = [1.0]
        for node_ratio, parent, follows in zip(ratios[1:], above[1:], is_drawn[1:]):
            weights.append(min(weights[parent] * node_ratio, 1.0) if follows else 1.0)
        result.append(weights)
    return torch.tensor(result, dtype=ratio.dtype)


def block_accept_probs(log_p: Tensor, *of_nodes: Any) -> Any:
    """Walk up the few nodes of trees, as :func:`drawn_weights` walks down. ``of_nodes``: the others, then the depth."""
    if log_p.numel() > _FEW_NODES:
        return NotImplemented
    trees = zip(log_p.tolist(), *(values.tolist() for values in of_nodes[:-1]))
    return torch.tensor([_block_accept_probs(*tree) for tree in trees], dtype=log_p.dtype)


def _block_accept_probs(
    log_p: list[float],
    log_q: list[float],
    weight: list[float],
    residual: list[float],
    parents: list[int],
    drawn: list[bool],
    draws: list[bool],
) -> list[float]:
    """Return the probabilities of one tree's nodes."""
    below, within, probs = [0.0] * len(parents), [0.0] * len(parents), []
    for node in reversed(range(len(parents))):
        here, rest = weight[node], residual[node]
        if draws[node] and here < 1:
            here = rest / max(rest + 1 - here, sampling.TINY)
        within[node] = below[node] + (1 - below[node]) * here
        if drawn[node]:
            below[parents[node]] = within[node]
    for node, parent in enumerate(parents):
        goes_on, prob = min(below[parent] / max(within[parent], sampling.TINY), 1.0), math.exp(log_p[node])
        if draws[parent]:
            rest = max(weight[parent] * prob - math.exp(log_q[node]), 0.0) / max(residual[parent], sampling.TINY)
            prob = (1 - goes_on) * min(rest, 1.0)
        probs.append(goes_on if drawn[node] else prob)
    return probs


def accepted_and_expected(path: Tensor, accepted: Tensor, tree: Any) -> Any:
    """Count the few nodes of trees in Python, as :func:`drawn_weights` walks down."""
    if tree.tokens.numel() > _FEW_NODES:
        return NotImplemented
    of_nodes = [tree.scores, tree.parents]
    of_nodes += [x if x is not None else torch.zeros_like(tree.parents) for x in (tree.drawn, tree.proposers)]
    result = [[0.0] * 8 for _ in range(len(path))]
    for sums, on_path, drafts, *nodes in zip(result, path.tolist(), accepted.tolist(), *(x.tolist() for x in of_nodes)):
        reached, scores = set(on_path if drafts >= 0 else ()), nodes[0]
        for node, (score, parent, drawn, proposer) in enumerate(zip(*nodes)):
            if node and parent in reached and score != -math.inf and not proposer:
                pair = 2 * (2 * drawn + (parent != 0))
                sums[pair] += node in reached
                sums[pair + 1] += math.exp(score - scores[parent])
    return torch.tensor(result)


def child_offsets(probs: Tensor, uniforms: Tensor, parents: Tensor) -> Any:
    """Walk down the few nodes of trees, as :func:`drawn_weights` does."""
    if probs.numel() > _FEW_NODES:
        return NotImplemented
    result = []
    for of_tree, offset, above in zip(probs.tolist(), uniforms.tolist(), parents.tolist()):
        offsets = []
        for prob, parent in zip(of_tree, above):
            offsets.append(offset[parent])
            offset[parent] -= prob
        result.append(offsets)
    return torch.tensor(result, dtype=probs.dtype)


def ancestors(parents: Tensor) -> Any:
    compiled = kernels()
    return NotImplemented if compiled is None else compiled.ancestors(parents.contiguous())


def keep_nodes(tokens: Tensor, parents: Tensor, scores: Tensor, *rest: Any) -> Any:
    """Keep nodes with scores in fp32. In torch this takes fifteen small operations. ``rest``: the other arguments."""
    q_index, proposers, drawn, nodes = rest
    fits = scores.dtype == torch.float32 and nodes.dtype == torch.long
    fits &= _numbers_fit(scores.shape, drawn, tokens, parents, q_index, proposers)
    compiled = kernels() if fits else None
    if compiled is None:
        return NotImplemented
    nodes = nodes.contiguous()
    fields = [None if x is None else x.contiguous() for x in (tokens, parents, scores, *rest[:-1])]
    q_index, proposers, drawn = fields[3:]
    numbers, kept_scores = torch.empty(4, *nodes.shape, dtype=torch.long), torch.empty(nodes.shape)
    of_proposers, of_drawn = None if proposers is None else numbers[3], None
    if drawn is not None:
        of_drawn = torch.empty(nodes.shape, dtype=torch.bool)
    tree = Tree(*map(address_of, (*fields[:3], proposers)), tokens.shape[1])
    inputs, out = (q_index, drawn, nodes), (*numbers[:3], of_proposers, kept_scores, of_drawn)
    if compiled.keep_nodes(len(nodes), tree, *map(address_of, inputs), nodes.shape[1], *map(address_of, out)):
        return NotImplemented  # a node is out of range, which torch says
    return numbers[0], numbers[1], kept_scores, numbers[2], of_proposers, of_drawn, None


def tree_union(main: TreeTensors, grafted: TreeTensors, main_proposers: int, depth: int) -> Any:
    """Compute unions with scores in fp32. In torch this takes forty small operations."""
    fits = all(x[2].dtype == torch.float32 and _numbers_fit(x[2].shape, None, *x[:2], *x[3:]) for x in (main, grafted))
    compiled = kernels() if fits else None
    return NotImplemented if compiled is None else compiled.union(main, grafted, main_proposers)


def _numbers_fit(shape: torch.Size, drawn: Tensor | None, *fields: Tensor | None) -> bool:
    """Whether fields of nodes [B, N] are what kernels read by their addresses: int64, and ``drawn`` bool."""
    tensors = [x for x in (drawn, *fields) if x is not None]
    return all(x.shape == shape and x.dtype == (torch.bool if x is drawn else torch.long) for x in tensors)


def _compiled(*logits: Tensor) -> Kernels | None:
    """Return the kernels if they can read these logits, else None."""
    fits = all(x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) for x in logits)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in logits)
    return kernels() if fits and not differentiated else None


def register() -> None:
    """Let the kernels answer on CPUs."""
    of_rows = (row_max, row_stats, row_entropy, topk_logprobs, keep_top_k, divergence_rows, residual_mass, sample_rows)
    of_trees = (accepted_and_expected, ancestors, drawn_weights, block_accept_probs, child_offsets, keep_nodes)
    others = (draw_rest, exact_walk, mixed_children, host_max, host_nonzero, tree_union)
    for kernel in (*of_rows, *of_trees, *others):
        functional.register(kernel.__name__, "cpu", kernel)
