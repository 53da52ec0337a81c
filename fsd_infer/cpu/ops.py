"""The operations that the rest of the package asks of a CPU. Nothing else of this folder is imported from outside.

Each computes by our kernels where these can be had (:mod:`fsd_infer.cpu.kernels`), and in plain torch otherwise: on
other devices, for other data types, under autograd, on processors without AVX512-BF16 and with FSD_KERNELS=0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fsd_infer.cpu.blocks import Blocks
from fsd_infer.cpu.kernels import PLAIN_DIVERGENCES, Kernels, TreeTensors, kernels
from fsd_infer.cpu.packing import (
    Packed,
    hold_blocks,
    holds_blocks,
    is_plain,
    own_memory,
    pack_linears,
    packed_in,
    packed_of,
    rows_of,
    table_size,
)
from fsd_infer.cpu.stack import DecoderStack

__all__ = [
    "Blocks",
    "DecoderStack",
    "ancestors",
    "forget_stacks",
    "hold_blocks",
    "holds_blocks",
    "is_plain",
    "keep_largest",
    "kernel_kind",
    "likeliest",
    "packed_products",
    "plain_divergence",
    "replace_parameter",
    "restore",
    "row_entropies",
    "row_maxima",
    "row_statistics",
    "speed_up",
    "stack_of",
    "table_size",
    "tree_union",
    "weight_rows",
]

_FEW_LARGEST = 256  # the kernel inserts each into a sorted list; of more, torch's selection is faster
_STACK = "_decoder_stack"  # of a module that owns decoder layers, among its own attributes


def kernel_kind() -> str | None:
    """Which of our kernels run on this machine: "amx", "avx512", or None for torch alone. Compiles them if needed."""
    compiled = kernels()
    return None if compiled is None else "amx" if compiled.panel == 32 else "avx512"


# rows of logits ---------------------------------------------------------------------------------------------------


def row_maxima(logits: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The largest number of each row and where it first stands.

    Args:
        logits: [..., V]; [M, V] with ``rows``.
        rows: [R] int64, the rows that are meant; None for all.

    Returns:
        (values [...] or [R] in fp32, NaN where a row has one; int64 indices of the same shape, arbitrary for NaN).

    Raises:
        IndexError: a row that is not there.
    """
    compiled = _compiled(logits)
    if compiled is not None:
        highest, best, _ = compiled.row_statistics(logits.contiguous(), rows, log_sum=False)
        return highest, best
    logits = logits if rows is None else logits[rows]
    return logits.amax(-1).float(), logits.argmax(-1)


def row_statistics(logits: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`row_maxima`, and ln Σ exp of each row in fp32: its largest number where that is infinite or NaN."""
    compiled = _compiled(logits)
    if compiled is not None:
        highest, best, total = compiled.row_statistics(logits.contiguous(), rows)
        assert total is not None
        return highest, best, total
    logits = logits if rows is None else logits[rows]
    return logits.amax(-1).float(), logits.argmax(-1), logits.float().logsumexp(-1)


def row_entropies(logits: Tensor, rows: Tensor | None = None) -> Tensor:
    """Entropy of softmax of each row in nats, [...] or [R] in fp32; arguments as of :func:`row_maxima`.

    Of a row that is no logits of a distribution anything.
    """
    compiled = _compiled(logits)
    if compiled is not None:
        return compiled.row_entropies(logits.contiguous(), rows)
    log_p = (logits if rows is None else logits[rows]).float().log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)  # 0 · ln 0 = 0


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits [..., V] -> (the ``count`` highest log-probabilities [..., count] in fp32, falling; their tokens)."""
    compiled = _compiled(logits)
    if compiled is not None:
        return compiled.likeliest(logits.contiguous(), count)
    values, tokens = logits.topk(count, dim=-1)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), tokens


def keep_largest(scores: Tensor, count: int, other: float = -math.inf) -> Tensor:
    """A copy of scores [..., V] whose numbers below the ``count``-th largest of their row are ``other``."""
    compiled = _compiled(scores) if scores.dtype == torch.float32 and count <= _FEW_LARGEST else None
    if compiled is not None:
        return compiled.keep_largest(scores.contiguous(), count, other)
    return scores.masked_fill(scores < scores.topk(count).values[..., -1:], other)


def plain_divergence(
    name: str, p: Tensor, q: Tensor, ids: Tensor | None, rows: tuple[Tensor | None, Tensor | None] = (None, None)
) -> Tensor | None:
    """D(p, q) per row by the kernels, or None where :mod:`fsd_infer.divergence`, which defines it, has to compute it.

    In torch it is a dozen passes over V, and a fuzzy rule asks every round.

    Args:
        name: of the divergence. Only the five plain forms are known here.
        p: [..., V] logits; [M, V] with ``rows``.
        q: [..., Vd] logits; [I, Vd] with ``rows``.
        ids: [Vd] int64, the tokens that q is about, for forms that are finite where q is 0; None: V = Vd.
        rows: [R] each, which rows of p and of q are compared; None: all, in order.

    Raises:
        IndexError: a row or a token that is not there.
    """
    shapes = [x.shape[:-1] if which is None else which.shape for x, which in zip((p, q), rows, strict=True)]
    width = p.shape[-1] if ids is None else ids.shape[0]
    compiled = _compiled(p, q) if name in PLAIN_DIVERGENCES else None
    if compiled is None or shapes[0] != shapes[1] or q.shape[-1] != width:
        return None
    ids, of_p, of_q = (x if x is None else x.contiguous() for x in (ids, *rows))
    return compiled.divergence(name, p.contiguous(), q.contiguous(), ids, (of_p, of_q))


def ancestors(parents: Tensor) -> Tensor:
    """[B, N] int64 parents, each before its children -> [B, N, N] bool; is node j on the path from the root to node i.

    A node is on its own path. The root's parent is the root.
    """
    compiled = kernels() if parents.device.type == "cpu" else None
    if compiled is not None:
        return compiled.ancestors(parents.contiguous())
    count = parents.shape[1]
    found = torch.eye(count, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    for _ in range((count - 1).bit_length()):  # each time twice as much of the path is known
        found = found | found.gather(1, parents[..., None].expand(-1, -1, count))
        parents = parents.gather(1, parents)
    return found


def tree_union(main: TreeTensors, side: TreeTensors, mains: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Merge two draft trees by the kernels. None where :func:`fsd_infer.drafters.graft.union_of` has to.

    In torch the union is forty small operations, 3 % of a round.

    Args:
        main, side: tokens, parents, scores and proposers [B, N] of each tree.
        mains: number of drafters that ``main`` comes from.

    Returns:
        Tokens, parents, scores and proposers of the union, [B, N + M - 1].
    """
    fits = main[2].device.type == "cpu" and main[2].dtype == side[2].dtype == torch.float32
    compiled = kernels() if fits else None
    return None if compiled is None else compiled.union(main, side, mains)


def _compiled(*logits: Tensor) -> Kernels | None:
    """The kernels, if they take such logits."""
    fits = all(x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) for x in logits)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in logits)
    return kernels() if fits and not differentiated else None


# models -----------------------------------------------------------------------------------------------------------


def speed_up(module: nn.Module, release: bool = False, quantize: bool = False) -> None:
    """Prepare a model or a draft head on a CPU; nothing on other devices.

    Linear layers in bf16 get packed weights. Whatever in ``module`` owns decoder layers that our kernels know gets a
    :class:`DecoderStack`, which targets and heads run in place of the layers (:func:`stack_of`). The model's own
    forward, and so ``generate``, works as before.

    Args:
        module: the model or head.
        release: free the plain weights of packed layers where nobody else reads them, so that memory holds each once.
            ``state_dict`` lacks their values until :func:`restore`.
        quantize: hold packed weights as fp8 numbers (:meth:`Packed.quantize`).
    """
    devices = {parameter.device.type for parameter in module.parameters()}
    if "cpu" not in devices or devices - {"cpu", "meta"}:  # "meta": what was released before
        return
    pack_linears(module, release)
    if quantize:
        for packed in packed_in(module):
            packed.quantize()
    if any(parameter.is_meta for parameter in module.parameters()):
        own_memory(module)
    for part in module.modules():
        stack = DecoderStack.of(part)
        if stack is not None:
            vars(part)[_STACK] = stack


def restore(module: nn.Module) -> int:
    """Undo :func:`speed_up`: every module computes by itself and has its weight; returns how many were packed."""
    packed = packed_in(module)
    for product in packed:
        product.unpack()
    forget_stacks(module)
    return len(packed)


def forget_stacks(module: nn.Module) -> None:
    """Every decoder layer in ``module`` is called by itself until the next :func:`speed_up`: layers have changed."""
    for part in module.modules():
        vars(part).pop(_STACK, None)


def replace_parameter(layer: nn.Module, name: str, value: Tensor) -> None:
    """Give a layer another parameter; if it is a packed weight, the layer computes by itself again."""
    setattr(layer, name, nn.Parameter(value, requires_grad=False))
    if name == "weight" and packed_of(layer) is not None:
        del vars(layer)["forward"]


def stack_of(owner: nn.Module) -> DecoderStack | None:
    """The decoder layers of ``owner`` as one call, if :func:`speed_up` found that our kernels know them.

    None too where a hook waits for a call of one of the layers' modules: the owner then calls them one by one.
    """
    stack: DecoderStack | None = vars(owner).get(_STACK)
    return None if stack is None or stack.is_hooked else stack


def packed_products(module: nn.Module) -> list[Packed]:
    """The packed linear layers in ``module``."""
    return packed_in(module)


def weight_rows(layer: nn.Module, ids: Tensor | None) -> Tensor:
    """Rows ids [K] of a linear layer's or embedding's weight (None: all), packed, quantised or neither: [K, in]."""
    return rows_of(layer, ids)
