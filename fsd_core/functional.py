"""Functions of tensors that decoding calls in every round, in plain torch.

A backend that has something faster for its kind of processor registers it by :func:`register` when it is loaded. Each
function then asks the kernel first. A kernel returns NotImplemented for what it does not take (a dtype, a shape,
arguments under autograd), and the body here computes it. So these bodies define the results and know no processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fsd_core.errors import UnknownNameError
from fsd_core.registry import unknown_name
from fsd_core.tensors import at_nodes, wide

if TYPE_CHECKING:
    from fsd_core.divergence import Divergence

P = ParamSpec("P")
R = TypeVar("R")
TreeTensors = tuple[Tensor, Tensor, Tensor, Tensor | None]  # tokens, parents, scores and proposers of a DraftTree
# before learning, the chance that the target accepts a draw from the rest of q: where the largest q is 0, and 1
ACCEPT_IF_UNSURE, ACCEPT_IF_SURE = 0.2, 0.95
MIN_REST = 1e-3  # a smaller rest of q is rounding
TINY = 1e-30  # in place of 0 as a divisor
MIN_WRONG = 0.001  # chance that all steps of the main drafter from a node are wrong

KERNELS: dict[str, dict[str, Callable[..., Any]]] = {}  # by function and device type


def register(name: str, device: str, kernel: Callable[..., Any]) -> None:
    """Let a kernel answer for a function of this module on one type of device.

    Args:
        name: of the function.
        device: type of the first tensor's device, such as "cpu".
        kernel: takes the function's arguments. Returns its result, or NotImplemented.

    Raises:
        UnknownNameError: no function of this name can be replaced.
    """
    if name not in KERNELS:
        raise UnknownNameError(unknown_name("function with kernels", name, sorted(KERNELS)))
    KERNELS[name][device] = kernel


def _replaceable(plain: Callable[P, R]) -> Callable[P, R]:
    """Let kernels of the first tensor's device answer before the function itself."""
    kernels = KERNELS[plain.__name__] = {}

    @wraps(plain)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        kernel = kernels.get((first if isinstance(first, Tensor) else first[0]).device.type)
        found = NotImplemented if kernel is None else kernel(*args, **kwargs)
        return plain(*args, **kwargs) if found is NotImplemented else found

    return function


# rows of logits ---------------------------------------------------------------------------------------------------


@_replaceable
def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest number of each row of [..., V] and its first index.

    Returns:
        Values [...] in fp32, NaN if the row has one. Indices [...] in int64, arbitrary for NaN.
    """
    return logits.amax(-1).float(), logits.argmax(-1)


@_replaceable
def row_stats(logits: Tensor, where: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`row_max` and each row's ln Σ exp in fp32, or its largest number if that is infinite or NaN.

    Args:
        logits: [..., V].
        where: [...] bool, the rows that count; results of others are arbitrary. None: all.
    """
    return logits.amax(-1).float(), logits.argmax(-1), logits.float().logsumexp(-1)


@_replaceable
def row_entropy(logits: Tensor, where: Tensor | None = None) -> Tensor:
    """Return the entropy of each row's softmax in nats: [...] in fp32.

    Arguments as of :func:`row_stats`. The result is arbitrary for a row of invalid logits.
    """
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)  # 0 · ln 0 = 0


@_replaceable
def topk_logprobs(logits: Tensor, k: int, where: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the k highest log-probabilities of each row and their tokens.

    Args:
        logits: [..., V], with k <= V.
        k: how many to return.
        where: as of :func:`row_stats`.

    Returns:
        Log-probabilities [..., k] in fp32, falling, and tokens [..., k] in int64.
    """
    values, tokens = logits.topk(k, dim=-1)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), tokens


@_replaceable
def keep_top_k(scores: Tensor, k: int, other: float = -math.inf) -> Tensor:
    """Replace every score below the k-th largest of its row by ``other``. scores: [..., V]."""
    return scores.masked_fill(scores < scores.topk(k).values[..., -1:], other)


@_replaceable
def divergence_rows(
    p_logits: Tensor,
    q_logits: Tensor,
    measure: Divergence,
    draft_ids: Tensor | None = None,
    q_index: Tensor | None = None,
) -> Tensor:
    """Return D(p, q) per row of p in nats, in fp32 (fp64 if an argument is).

    Args:
        p_logits: [..., V] the target's; [B, N, V] with ``q_index``.
        q_logits: [..., Vd] the drafter's; [B, I, Vd] with ``q_index``.
        measure: D, see :mod:`fsd_core.divergence`.
        draft_ids: [Vd] the tokens of q's columns, elsewhere q is 0; None: V = Vd.
        q_index: [B, N] int64, the row of q for each row of p, -1 for none; None: all in order.

    Returns:
        [...]; [B, N] with ``q_index``, infinite where it is -1.

    Raises:
        IndexError: a row or a token is out of range.
        VocabularyMismatchError: ``draft_ids`` or V does not fit ``q_logits``.
    """
    if q_index is None:
        return measure.with_reduced_drafter(p_logits, q_logits, draft_ids)
    q_logits = at_nodes(q_logits, q_index.clamp_min(0))
    return measure.with_reduced_drafter(p_logits, q_logits, draft_ids).masked_fill(q_index < 0, math.inf)


@_replaceable
def residual_mass(
    p_logits: Tensor, q_logits: Tensor, weight: Tensor, q_index: Tensor, draft_ids: Tensor | None = None
) -> Tensor:
    """Return Σ (w·p - q)+ per row of p, 0 where there is no q: [B, N]. With w = 1 it is their total variation.

    Args:
        p_logits, q_logits, q_index, draft_ids: as of :func:`divergence_rows`.
        weight: [B, N] w, from 0 to 1.
    """
    p, q = weight[..., None].float() * p_logits.float().softmax(-1), q_logits.float().softmax(-1)
    own = p if draft_ids is None else p.index_select(-1, draft_ids.long())
    mass = (own - at_nodes(q, q_index.clamp_min(0))).clamp_min(0.0).sum(-1).to(weight.dtype)
    if draft_ids is not None:
        mass = mass + (weight - own.sum(-1)).clamp_min(0.0)
    return mass.masked_fill(q_index < 0, 0.0)


@_replaceable
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


@_replaceable
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


@_replaceable
def mixed_children(
    log_q: Tensor,
    accept_log_probs: Tensor,
    ancestors: Tensor,
    reserved: Tensor,
    free_nodes: Tensor,
    ratios: tuple[float, float],
    min_log_prob: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Decide which children of a context are fixed, and which contexts draw one more.

    :mod:`fsd_infer.drafters.drawing` says why so. No draw is looked at. Log-probabilities of acceptance are estimates.

    Args:
        log_q: [B, E, w] ln q of the candidates of each context, falling. The last one's index is the drawn child's.
        accept_log_probs: [B, E] log-probability that each context is accepted.
        ancestors: [B, E, n] which expanded nodes are each context's ancestors or itself, the root excluded.
        reserved: [B, n] which of them will be verified because something is drawn below.
        free_nodes: [B] int64, how many nodes of each tree are not reserved.
        ratios: learned ratios of accepted to expected drafts, of likely and of drawn children.
        min_log_prob: a node that is accepted with a smaller log-probability is not worth verifying.

    Returns:
        fixed: [B, E, w] bool.
        draws: [B, E] bool.
        drawn_log_probs: [B, E] log-probability that the target accepts the drawn child, given its context.
        reserved, free_nodes: as they are then.
    """
    likely_ratio, drawn_ratio = ratios
    q_max = log_q[..., :1].exp()
    accept_drawn = drawn_ratio * (ACCEPT_IF_UNSURE + (ACCEPT_IF_SURE - ACCEPT_IF_UNSURE) * q_max)
    accept_drawn = accept_drawn.clamp_max(ACCEPT_IF_SURE)  # [B, E, 1] of each token of the rest of q
    gain = (likely_ratio - accept_drawn).clamp_min(0.0).log()  # of fixing a token instead of leaving it to the draw
    fixed = accept_log_probs[..., None] + log_q + gain >= min_log_prob
    fixed[..., -1] = False
    rest = (1.0 - (log_q.exp() * fixed).sum(-1)).clamp_min(0.0)
    drawn_log_probs = (accept_drawn[..., 0] * rest).log()
    wants = (accept_log_probs + drawn_log_probs >= min_log_prob) & (rest > MIN_REST)
    # a draw reserves its child and what is not yet reserved above it; contexts take the free nodes in order
    cost = (1 + (ancestors & ~reserved[:, None]).sum(-1)) * wants
    draws = wants & (cost.cumsum(-1) <= free_nodes[:, None])
    reserved = reserved | (ancestors & draws[..., None]).any(1)
    return fixed, draws, drawn_log_probs, reserved, free_nodes - (cost * draws).sum(-1)


# what the host may read without a transfer (kernels of a CPU do): loops end sooner, and shapes are smaller ----------


@_replaceable
def host_max(values: Tensor, bound: int) -> int:
    """Return the largest of some whole numbers where the host may read them, else ``bound``, which none exceeds."""
    return bound


def host_all(mask: Tensor) -> bool:
    """Return whether all hold, where the host may read them, else False."""
    return host_max(~mask, 1) == 0


@_replaceable
def host_nonzero(mask: Tensor) -> Tensor | None:
    """Return the indices where a mask [R] holds, where the host may read it; None: all, or it may not."""
    return None


# trees ------------------------------------------------------------------------------------------------------------


@_replaceable
def ancestors(parents: Tensor) -> Tensor:
    """Return whether node j is on the path from the root to node i, itself included: [B, N, N] bool.

    Args:
        parents: [B, N] int64 node numbers, each less than its node's own; 0 for the root.
    """
    count = parents.shape[1]
    found = torch.eye(count, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    for _ in range((count - 1).bit_length()):  # each pass doubles the known part of a path
        found = found | found.gather(1, parents[..., None].expand(-1, -1, count))
        parents = parents.gather(1, parents)
    return found


@_replaceable
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


@_replaceable
def descent_probs(ends_here: Tensor, parents: Tensor, drawn: Tensor, depth: int) -> Tensor:
    """Return the probability that a walk which ends at a node's parent or below its draw ends below its draw: [B, N].

    Args:
        ends_here: [B, N] that it ends at a node, if it does not end below the node's drawn child.
        parents, drawn, depth: as of :func:`drawn_weights`; a node has at most one drawn child.
    """
    none = ends_below = torch.zeros_like(ends_here)
    ends_within = ends_here
    for _ in range(depth):
        ends_below = none.scatter_add(1, parents, ends_within.masked_fill(~drawn, 0.0))
        ends_within = ends_below + (1 - ends_below) * ends_here
    return (ends_below / ends_within.clamp_min(TINY)).clamp_max(1.0).gather(1, parents)


@_replaceable
def tree_union(
    main: TreeTensors, grafted: TreeTensors, main_proposers: int, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge two draft trees with the same roots, as :class:`fsd_infer.drafters.graft.GraftedDrafter` defines it.

    The nodes of ``main`` come first, then those of ``grafted``. Nodes of ``grafted`` that are in ``main`` are padding.

    Args:
        main, grafted: tokens, parents, scores and proposers, [B, N] and [B, M].
        main_proposers: number of drafters that ``main`` comes from.
        depth: at least that of the deepest node.

    Returns:
        Tokens, parents, scores and proposers of the union, [B, N + M - 1].
    """
    numbers, shared = _numbers_in_union(main, grafted, depth)
    parents = torch.cat([main[1], numbers.gather(1, grafted[1])[:, 1:]], 1)
    of_main, of_grafted = _accept_probs(main), _accept_probs(grafted)
    # the probability that all children of main are wrong, by context
    wrong = torch.ones_like(parents, dtype=of_main.dtype).scatter_add(1, main[1][:, 1:], -of_main[:, 1:])
    all_wrong = wrong.clamp_min(MIN_WRONG).gather(1, numbers.gather(1, grafted[1]))
    a = torch.cat([of_main, (of_grafted.masked_fill(shared, 0.0) * all_wrong)[:, 1:]], 1)
    b = torch.zeros_like(a).scatter(1, numbers, of_grafted.masked_fill(~shared, 0.0))
    either = a + b - a * b
    total = torch.zeros_like(either).scatter_add(1, parents[:, 1:], either[:, 1:]).clamp_min(1.0)
    steps = (either / total.gather(1, parents)).clamp_max(1.0).log()
    steps[:, 0] = 0.0
    tokens, scores = torch.cat([main[0], grafted[0][:, 1:]], 1), path_sums(steps, parents, depth)
    proposers = [torch.zeros_like(tree[1]) if tree[3] is None else tree[3] for tree in (main, grafted)]
    return tokens, parents, scores, torch.cat([proposers[0], proposers[1][:, 1:] + main_proposers], 1)


def path_sums(steps: Tensor, parents: Tensor, depth: int) -> Tensor:
    """Return the sum of ``steps`` over each node's path: [B, N].

    Args:
        steps: [B, N], 0 at the root.
        parents: [B, N] node numbers.
        depth: at least that of the deepest node.
    """
    sums = torch.zeros_like(steps)
    for _ in range(depth):  # adding one step to the parent's sum keeps a child at most its parent in spite of rounding
        sums = steps + sums.gather(1, parents)
    return sums


def _accept_probs(tree: TreeTensors) -> Tensor:
    """Return each node's probability of acceptance given its parent: [B, N], 0 at padding."""
    _, parents, scores, _ = tree
    steps = (scores - scores.gather(1, parents)).clamp_max(0.0)
    return steps.masked_fill(scores == -math.inf, -math.inf).exp()  # padding below padding would be NaN


def _numbers_in_union(main: TreeTensors, grafted: TreeTensors, depth: int) -> tuple[Tensor, Tensor]:
    """Return each grafted node's number in the union and whether it is a node of ``main``: [B, M] each."""
    count, others = main[1].shape[1], grafted[1].shape[1]
    of_main, of_grafted = (tree[2] != -math.inf for tree in (main, grafted))
    of_main[:, 0] = of_grafted[:, 0] = False
    same = (main[0][:, :, None] == grafted[0][:, None]) & of_main[:, :, None] & of_grafted[:, None]
    same[:, 0, 0] = True
    # two nodes are one if their tokens are equal and their parents are one
    same, above = same.flatten(1), (main[1][:, :, None] * others + grafted[1][:, None]).flatten(1)
    for _ in range(depth.bit_length()):  # each pass doubles the compared part of the paths
        same, above = same & same.gather(1, above), above.gather(1, above)
    shared, in_main = same.view(-1, count, others).int().max(1)
    appended = torch.arange(count - 1, count - 1 + others, device=in_main.device)
    return torch.where(shared > 0, in_main, appended), shared > 0
