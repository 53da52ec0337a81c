"""Operations with fast CPU kernels. Code outside :mod:`fsd_infer.cpu` imports this module only.

Each operation runs in our kernels (:mod:`fsd_infer.cpu.kernels`) where they apply. Otherwise it runs in torch: on other
devices, for other dtypes, under autograd, without AVX512-BF16, and with FSD_KERNELS=0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fsd_core.errors import KernelsError
from fsd_infer.cpu.blocks import Blocks, keep_groups
from fsd_infer.cpu.kernels import PLAIN_DIVERGENCES, Kernels, TreeTensors, found, kernels
from fsd_infer.cpu.losses import READS, say, say_what_is_lost
from fsd_infer.cpu.packing import (
    hold_blocks,
    holds_blocks,
    is_plain,
    own_memory,
    pack_linears,
    packed_of,
    packed_products,
    table_size,
    weight_rows,
)
from fsd_infer.cpu.stack import DecoderStack

__all__ = [
    "READS",
    "Blocks",
    "DecoderStack",
    "ancestors",
    "compiler_line",
    "forget_stacks",
    "hold_blocks",
    "holds_blocks",
    "is_plain",
    "keep_groups",
    "keep_largest",
    "kernel_choice",
    "kernel_kind",
    "likeliest",
    "packed_products",
    "plain_divergence",
    "replace_parameter",
    "restore",
    "row_entropies",
    "row_maxima",
    "row_statistics",
    "say",
    "speed_up",
    "stack_of",
    "table_size",
    "tree_union",
    "weight_rows",
]

_FEW_LARGEST = 256  # the kernel inserts into a sorted list, which is slower than torch's selection for more
_STACK = "_decoder_stack"  # attribute of a module that owns decoder layers


def kernel_kind() -> str | None:
    """Return which set of kernels runs here: "amx", "avx512", or None for torch alone. Compiles them if needed."""
    compiled = kernels()
    return None if compiled is None else compiled.name


def kernel_choice() -> tuple[str | None, str]:
    """Return :func:`kernel_kind` and why, for a report: an FSD_KERNELS that is wrong is no error but the reason."""
    try:
        return kernel_kind(), found().why
    except KernelsError as error:
        return None, str(error)


def compiler_line() -> str:
    """Return the C++ compiler's command and the first line of its version, or why there is none."""
    from fsd_infer.cpu.build import compiler_line as line  # imported late: rules need no compiler

    return line()


# rows of logits ---------------------------------------------------------------------------------------------------


def row_maxima(logits: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the largest number of each row and its first index.

    Args:
        logits: [..., V]; [M, V] with ``rows``.
        rows: [R] int64, indices of the rows to read; None: all rows.

    Returns:
        Values [...] or [R] in fp32, NaN if the row has one. Indices of the same shape in int64, arbitrary for NaN.

    Raises:
        IndexError: a row is out of range.
    """
    compiled = _compiled(logits)
    if compiled is not None:
        highest, best, _ = compiled.row_statistics(logits.contiguous(), rows, log_sum=False)
        return highest, best
    logits = logits if rows is None else logits[rows]
    return logits.amax(-1).float(), logits.argmax(-1)


def row_statistics(logits: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`row_maxima` and each row's ln Σ exp in fp32, or its largest number if that is infinite or NaN."""
    compiled = _compiled(logits)
    if compiled is not None:
        highest, best, total = compiled.row_statistics(logits.contiguous(), rows)
        assert total is not None
        return highest, best, total
    logits = logits if rows is None else logits[rows]
    return logits.amax(-1).float(), logits.argmax(-1), logits.float().logsumexp(-1)


def row_entropies(logits: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the entropy of each row's softmax in nats: [...] or [R] in fp32.

    Arguments as of :func:`row_maxima`. The result is arbitrary for a row of invalid logits.
    """
    compiled = _compiled(logits)
    if compiled is not None:
        return compiled.row_entropies(logits.contiguous(), rows)
    log_p = (logits if rows is None else logits[rows]).float().log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)  # 0 · ln 0 = 0


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the highest log-probabilities and their tokens.

    Args:
        logits: [..., V].
        count: how many to return.

    Returns:
        Log-probabilities [..., count] in fp32, falling, and tokens [..., count] in int64.
    """
    compiled = _compiled(logits)
    if compiled is not None:
        return compiled.likeliest(logits.contiguous(), count)
    values, tokens = logits.topk(count, dim=-1)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), tokens


def keep_largest(scores: Tensor, count: int, other: float = -math.inf) -> Tensor:
    """Replace every score below the ``count``-th largest of its row by ``other``. scores: [..., V]."""
    compiled = _compiled(scores) if scores.dtype == torch.float32 and count <= _FEW_LARGEST else None
    if compiled is not None:
        return compiled.keep_largest(scores.contiguous(), count, other)
    return scores.masked_fill(scores < scores.topk(count).values[..., -1:], other)


def plain_divergence(
    name: str, p: Tensor, q: Tensor, ids: Tensor | None, rows: tuple[Tensor | None, Tensor | None] = (None, None)
) -> Tensor | None:
    """Compute D(p, q) per row in the kernels, or return None if :mod:`fsd_infer.divergence` has to compute it.

    In torch, every round of a fuzzy rule takes a dozen passes over V.

    Args:
        name: of the divergence. The kernels know the five plain forms.
        p: [..., V] logits; [M, V] with ``rows``.
        q: [..., Vd] logits; [I, Vd] with ``rows``.
        ids: [Vd] int64, the tokens of q's columns, for divergences that are finite where q is 0; None: V = Vd.
        rows: [R] int64 each, the rows of p and of q to compare; None: all rows in order.

    Raises:
        IndexError: a row or a token is out of range.
    """
    shapes = [x.shape[:-1] if which is None else which.shape for x, which in zip((p, q), rows, strict=True)]
    width = p.shape[-1] if ids is None else ids.shape[0]
    compiled = _compiled(p, q) if name in PLAIN_DIVERGENCES else None
    if compiled is None or shapes[0] != shapes[1] or q.shape[-1] != width:
        return None
    ids, of_p, of_q = (x if x is None else x.contiguous() for x in (ids, *rows))
    return compiled.divergence(name, p.contiguous(), q.contiguous(), ids, (of_p, of_q))


def ancestors(parents: Tensor) -> Tensor:
    """Return whether node j is on the path from the root to node i, itself included: [B, N, N] bool.

    Args:
        parents: [B, N] int64 node numbers, each less than its node's own; 0 for the root.
    """
    compiled = kernels() if parents.device.type == "cpu" else None
    if compiled is not None:
        return compiled.ancestors(parents.contiguous())
    count = parents.shape[1]
    found = torch.eye(count, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    for _ in range((count - 1).bit_length()):  # each pass doubles the known part of a path
        found = found | found.gather(1, parents[..., None].expand(-1, -1, count))
        parents = parents.gather(1, parents)
    return found


def tree_union(main: TreeTensors, side: TreeTensors, mains: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Merge two draft trees in the kernels: in torch the union takes forty small operations.

    Args:
        main, side: tokens, parents, scores and proposers [B, N] of each tree.
        mains: number of drafters that ``main`` comes from.

    Returns:
        Tokens, parents, scores and proposers of the union, [B, N + M - 1]; None without the kernels, on other devices
        and for scores that are not in fp32.
    """
    fits = main[2].device.type == "cpu" and main[2].dtype == side[2].dtype == torch.float32
    compiled = kernels() if fits else None
    return None if compiled is None else compiled.union(main, side, mains)


def _compiled(*logits: Tensor) -> Kernels | None:
    """Return the kernels if they can read these logits, else None."""
    fits = all(x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) for x in logits)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in logits)
    return kernels() if fits and not differentiated else None


# models -----------------------------------------------------------------------------------------------------------


def speed_up(module: nn.Module, release: bool = False, quantize: bool = False) -> None:
    """Prepare a model or a draft head for decoding on a CPU. On other devices, do nothing.

    Linear layers in bf16 get packed weights. Each part of ``module`` that owns decoder layers known to the kernels gets
    a :class:`DecoderStack`. Targets and heads run the stack instead of the layers (:func:`stack_of`). The model's own
    forward and ``generate`` work as before.

    Args:
        module: the model or head.
        release: whether to free plain weights that only packed layers read, so that memory holds each weight once.
            ``state_dict`` lacks their values until :func:`restore`.
        quantize: whether to hold packed weights in fp8 (:meth:`Packed.quantize`).
    """
    devices = {parameter.device.type for parameter in module.parameters()}
    if "cpu" not in devices or devices - {"cpu", "meta"}:  # "meta": released earlier
        return
    if pack_linears(module, release):
        say_what_is_lost()
    if quantize:
        for packed in packed_products(module):
            packed.quantize()
    if any(parameter.is_meta for parameter in module.parameters()):
        own_memory(module)
    for part in module.modules():
        stack = DecoderStack.of(part)
        if stack is not None:
            vars(part)[_STACK] = stack


def restore(module: nn.Module) -> int:
    """Undo :func:`speed_up`: restore every module's weight and forward. Return the number of packed layers."""
    packed = packed_products(module)
    for product in packed:
        product.unpack()
    forget_stacks(module)
    return len(packed)


def forget_stacks(module: nn.Module) -> None:
    """Drop all stacks after a change of layers. Owners call the layers one by one until the next :func:`speed_up`."""
    for part in module.modules():
        vars(part).pop(_STACK, None)


def replace_parameter(layer: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter of a layer. A layer with a packed weight returns to its own forward."""
    setattr(layer, name, nn.Parameter(value, requires_grad=False))
    if name == "weight" and packed_of(layer) is not None:
        del vars(layer)["forward"]


def stack_of(owner: nn.Module) -> DecoderStack | None:
    """Return the decoder layers of ``owner`` as one call, if :func:`speed_up` made a stack of them.

    Returns None if a module of the layers has a hook, so that the owner calls the layers one by one.
    """
    stack: DecoderStack | None = vars(owner).get(_STACK)
    return None if stack is None or stack.is_hooked else stack
