"""Functions of tensors that decoding calls in every round, in plain torch.

A backend that has something faster for its kind of processor registers it by :func:`register` when it is loaded. Each
function then asks the kernel first. A kernel returns NotImplemented for what it does not take (a dtype, a shape,
arguments under autograd), and the body here computes it. So these bodies define the results and know no processor.

Those that only rounds above temperature 0 call are in :mod:`fsd_core.sampling`; another is :func:`.divergence_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from fsd_core.errors import UnknownNameError
from fsd_core.registry import unknown_name

P = ParamSpec("P")
R = TypeVar("R")
TreeTensors = tuple[Tensor, Tensor, Tensor, Tensor | None]  # tokens, parents, scores and proposers of a DraftTree
NEVER = -1e4  # a logit whose q underflows to 0 in every dtype; -inf would make 0 · ln 0 NaN
MIN_WRONG = 0.001  # probability that all steps of the main drafter from a node are wrong

# kernels by function, of this module and of those above, and by device type
KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    name: {}
    for name in (
        "accept_prob_under", "accepted_and_expected", "accepted_path", "ancestors", "biased_sampled",
        "block_accept_probs", "child_offsets", "completes_ngram", "divergence_rows", "draft_numbers", "draw_rest",
        "drawn_weights", "emitted", "exact_walk", "host_max", "host_nonzero", "keep_nodes", "keep_top_k",
        "mixed_children", "not_above_p", "reduced_drafts", "reduced_rows", "repeating_tokens", "residual_mass",
        "row_entropy", "row_max", "row_stats", "sample_rows", "search_clipped", "slot_masks", "tilted_bias",
        "topk_logprobs", "tree_union",
    )
}  # fmt: skip


def register(name: str, device: str, kernel: Callable[..., Any]) -> None:
    """Let a kernel answer for a function on one type of device.

    Args:
        name: name of the function, one of :data:`KERNELS`.
        device: type of the first tensor's device, such as "cpu".
        kernel: takes the function's arguments. Returns its result, or NotImplemented.

    Raises:
        UnknownNameError: no function of this name can be replaced.
    """
    if name not in KERNELS:
        raise UnknownNameError(unknown_name("function with kernels", name, sorted(KERNELS)))
    KERNELS[name][device] = kernel


def replaceable(plain: Callable[P, R]) -> Callable[P, R]:
    """Let kernels of the first tensor's device answer before a function of :data:`KERNELS` itself."""
    kernels = KERNELS[plain.__name__]

    @wraps(plain)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        kernel = kernels.get((first if isinstance(first, Tensor) else first[0]).device.type)
        result = NotImplemented if kernel is None else kernel(*args, **kwargs)
        return plain(*args, **kwargs) if result is NotImplemented else result

    return function


# rows of logits ---------------------------------------------------------------------------------------------------


@replaceable
def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest number of each row of [..., V] and its first index.

    Returns:
        Values [...] in fp32, NaN if the row has one. Indices [...] in int64, arbitrary for NaN.
    """
    return logits.amax(-1).float(), logits.argmax(-1)


@replaceable
def row_stats(logits: Tensor, where: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`row_max` and each row's ln Σ exp in fp32, or its largest number if that is infinite or NaN.

    Args:
        logits: [..., V].
        where: [...] bool, the rows that count; results of others are arbitrary. None: all.
    """
    return logits.amax(-1).float(), logits.argmax(-1), logits.float().logsumexp(-1)


@replaceable
def row_entropy(logits: Tensor, where: Tensor | None = None) -> Tensor:
    """Return the entropy of each row's softmax in nats: [...] in fp32.

    Arguments as for :func:`row_stats`. The result is arbitrary for a row of invalid logits.
    """
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)  # 0 · ln 0 = 0


@replaceable
def topk_logprobs(logits: Tensor, k: int, where: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the k highest log-probabilities of each row and their tokens.

    Args:
        logits: [..., V], with k <= V.
        k: how many to return.
        where: see :func:`row_stats`.

    Returns:
        Log-probabilities [..., k] in fp32, falling, and tokens [..., k] in int64.
    """
    values, tokens = logits.topk(k, dim=-1)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), tokens


@replaceable
def keep_top_k(scores: Tensor, k: int, other: float = -math.inf) -> Tensor:
    """Replace every score below the k-th largest of its row by ``other``. scores: [..., V]."""
    return scores.masked_fill(scores < scores.topk(k).values[..., -1:], other)


class Memory(NamedTuple):
    """How the host reaches a kind of device.

    Attributes:
        is_host: whether it reads tensors there without waiting.
        is_shared: whether the two share memory, so that copies need no pinned pages.
        wide: the widest floating-point type.
    """

    is_host: bool = False
    is_shared: bool = False
    wide: torch.dtype = torch.float64


_MEMORIES = {"cpu": Memory(is_host=True, is_shared=True), "mps": Memory(is_shared=True, wide=torch.float32)}
_APART = Memory()  # all other devices


def memory_of(device: torch.device) -> Memory:
    """The one place where decoding asks for the kind of a device."""
    return _MEMORIES.get(device.type, _APART)


def is_host(device: torch.device) -> bool:
    """Whether the host reads tensors of this device without waiting, so that shapes may follow from values."""
    return memory_of(device).is_host


def wide(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device, which holds any token id exactly."""
    return memory_of(device).wide


# what the host may read without a transfer (kernels of a CPU do): loops end sooner, and shapes are smaller ----------


@replaceable
def host_max(values: Tensor, bound: int) -> int:
    """Return the largest of some whole numbers where the host may read them, else ``bound``, which none exceeds."""
    return bound


def host_all(mask: Tensor) -> bool:
    """Return whether all hold, where the host may read them, else False."""
    return host_max(~mask, 1) == 0


@replaceable
def host_nonzero(mask: Tensor) -> Tensor | None:
    """Return the indices where a mask [R] holds, where the host may read it; None: all, or it may not."""
    return None


# trees ------------------------------------------------------------------------------------------------------------


@replaceable
def slot_masks(lengths: Tensor, visible_after: Tensor, used: int) -> Tensor:
    """Return which of the first ``used`` cache slots new tokens may attend to: the text's, and chosen ones after it.

    Args:
        lengths: [B] slots of each row's text.
        visible_after: [B, M, E] bool, of the E slots after it.
        used: S.

    Returns:
        [B, M, S] bool
    """
    new, extra = visible_after.shape[1:]
    offset = torch.arange(used, device=lengths.device) - lengths[:, None]  # [B, S]
    index = offset.clamp(0, max(extra - 1, 0))[:, None].expand(-1, new, -1)
    inside = ((offset >= 0) & (offset < extra))[:, None]
    return torch.where(inside, visible_after.gather(2, index) if extra else inside, (offset < 0)[:, None])


def at_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """Pick values [B, N, ...] at nodes [B, K] -> [B, K, ...]. Copies whole entries, unlike gather."""
    if len(values) == 1:
        return values[0].index_select(0, nodes[0])[None]
    count = values.shape[1]
    index = nodes + count * torch.arange(nodes.shape[0], device=nodes.device)[:, None]
    return values.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, nodes.shape)


@replaceable
def ancestors(parents: Tensor) -> Tensor:
    """Return whether node j is on the path from the root to node i, itself included: [B, N, N] bool.

    Args:
        parents: [B, N] int64 node numbers, each less than its node's own; 0 for the root.
    """
    count = parents.shape[1]
    reached = torch.eye(count, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    for _ in range((count - 1).bit_length()):  # each pass doubles the known part of a path
        reached = reached | reached.gather(1, parents[..., None].expand(-1, -1, count))
        parents = parents.gather(1, parents)
    return reached


@replaceable
def keep_nodes(
    tokens: Tensor,
    parents: Tensor,
    scores: Tensor,
    q_index: Tensor,
    proposers: Tensor | None,
    drawn: Tensor | None,
    nodes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Return a tree's tensors [B, N] with only these nodes [B, K], as :meth:`fsd_infer.trees.tree.DraftTree.keep`.

    The last of what is returned is the part's ``is_draft`` and ``is_child`` where they were computed on the way.
    """
    kept_nodes = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
    new_index = torch.zeros_like(parents).scatter(1, nodes, kept_nodes)  # 0 for other nodes
    parents, scores = new_index.gather(1, parents.gather(1, nodes)), scores.gather(1, nodes)
    is_draft = scores != -math.inf
    is_draft[:, 0] = False
    is_child = (parents[:, None] == kept_nodes[..., None]) & is_draft[:, None]
    proposers, drawn = (None if x is None else x.gather(1, nodes) for x in (proposers, drawn))
    q_index = torch.where(is_child.any(-1), q_index.gather(1, nodes), -1)
    scores = scores - scores[:, :1]
    return tokens.gather(1, nodes), parents, scores, q_index, proposers, drawn, (is_draft, is_child)


@replaceable
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
