"""Python interface of the CPU kernels: products over packed weights, decoder layers, and operations on rows of logits.

A round runs the target over about one to twenty tokens. At that size oneDNN's products take twice the time of reading
the weights, and starting small operations takes a third of a forward. ``kernels.cpp`` computes products of a few rows,
and a whole decoder layer of the Llama kind in one call. It is compiled once with the local C++ compiler and cached.
Without a compiler or AVX2, or with FSD_KERNELS=0, torch computes the same results within bf16 rounding.

There are three sets of kernels (:mod:`fsd_infer.backends.cpu.sets`), which read all packed weights. "avx2" and "avx512"
compute on vectors. "amx" computes products on tiles, but those of at most four rows with blocks. FSD_KERNELS forces a
set.

A row's result depends neither on the number of rows beside it nor on slots that it does not see. So a tree's logits
equal those of decoding token by token, bit by bit.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsd_core.errors import KernelsError
from fsd_core.functional import TreeTensors
from fsd_core.sampling import Rest
from fsd_infer.backends.cpu.codebooks import rewritten
from fsd_infer.backends.cpu.pages import zeroed
from fsd_infer.backends.cpu.sets import VARIABLE, allowed_sets
from fsd_infer.backends.cpu.structs import Forward, Head, HeadStepArguments, Linear, StackStruct, Tree
from fsd_infer.device.cores import team_size

logger = logging.getLogger(__name__)

PLAIN_DIVERGENCES = ("kl_qp", "kl_pq", "js", "ag", "tv")
_KINDS = (*PLAIN_DIVERGENCES, "residual")  # numbered as ``Kind`` in statistics.h
_FEW_NUMBERS = 2**18  # one thread reads these before a second one wakes up
MAX_ROWS = 512  # above, oneDNN's products and torch's attention are as fast
SIDES = (64, 32)  # columns of a packed weight's panels that the kernels know
FEW_TOKENS = 64  # per text: forwards over at most this many agree bit by bit, whatever runs beside them


_ROWS = (c_int, c_void_p, c_void_p, c_int64)  # bf16 or fp32, numbers, which rows, and a length
# result and arguments of the functions of kernels.cpp, whose names begin with fsd_
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "prepare": (c_int,),
    "name": (c_char_p,),
    "block_side": (c_int64,),
    "linear_forward": (None, c_void_p, POINTER(Linear), c_void_p, c_int64, c_int, c_int),
    "stack_forward": (c_int64, POINTER(StackStruct), POINTER(Forward)),
    "scratch": (c_int64, POINTER(StackStruct), POINTER(Forward)),
    "row_statistics": (None, *_ROWS, c_int64, *[c_void_p] * 3, c_int),
    "row_entropies": (None, *_ROWS, c_int64, c_void_p, c_int),
    "head_step": (c_int64, POINTER(StackStruct), POINTER(Forward), POINTER(Head), POINTER(HeadStepArguments)),
    "rows": (c_int64, POINTER(Linear), c_void_p, c_int64, c_int, c_void_p, c_int),
    "block_bytes": (c_int64, *[c_int64] * 3),
    "block_pack": (c_int64, c_int64, *[c_void_p] * 2, *[c_int64] * 2, c_void_p, c_int),
    "divergence": (None, c_int, c_int64, *_ROWS, *_ROWS, *[c_void_p] * 3, c_int),
    "likeliest": (None, c_int, c_void_p, *[c_int64] * 3, *[c_void_p] * 2, c_int),
    "sample": (None, *_ROWS, c_int64, *[c_void_p] * 2, c_int),
    "draw_rest": (None, *[*_ROWS, c_int64] * 2, *[c_void_p] * 4, *[c_int64] * 2, c_void_p, c_int),
    "mixed_children": (None, *_ROWS[:2], *[c_int64] * 4, *[c_void_p] * 2, c_int64, *[c_void_p] * 8, c_int),
    "exact_walk": (c_int64, *[c_void_p] * 2, c_int),
    "keep_nodes": (c_int64, c_int64, POINTER(Tree), *[c_void_p] * 3, c_int64, *[c_void_p] * 6),
    "keep_largest": (None, c_void_p, *[c_int64] * 3, c_float, c_void_p, c_int),
    "ancestors": (None, c_void_p, *[c_int64] * 2, c_void_p),
    "union": (None, c_int64, POINTER(Tree), POINTER(Tree), c_int64, *[c_void_p] * 4),
}


class Kernels:
    """The compiled library. Tensors are bf16, contiguous, and on the CPU.

    Attributes:
        name: of the set, see :mod:`fsd_infer.backends.cpu.sets`.
        block_side: the columns that a weight in blocks counts as a panel.

    Raises:
        OSError: the library cannot be loaded, or the system does not grant AMX.
    """

    def __init__(self, path: Path) -> None:
        library = self._library = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, f"fsd_{name}")
            function.restype, function.argtypes = result, arguments
        if library.fsd_prepare():
            raise OSError("the system does not grant the use of AMX")
        self.name: str = library.fsd_name().decode()
        self.block_side: int = library.fsd_block_side()
        self.block_bytes, self.exact_walk = library.fsd_block_bytes, library.fsd_exact_walk
        self.mixed_children, self.keep_nodes = library.fsd_mixed_children, library.fsd_keep_nodes
        self._memory = threading.local()

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        """Multiply x [..., depth] with a packed weight and add its bias: [..., columns]."""
        y = x.new_empty((*x.shape[:-1], layer.columns))
        rows, many = x.numel() // x.shape[-1], x.dim() > 1 and x.shape[-2] > FEW_TOKENS
        self._library.fsd_linear_forward(x.data_ptr(), layer, y.data_ptr(), rows, many, team_size())
        return y

    def pack_blocks(self, ggml_type: int, rows: np.ndarray, depth: int, order: Tensor | None) -> Tensor | None:
        """Reorder rows of a GGUF tensor into panels that the products read; None for an unsupported type or size.

        Args:
            ggml_type: ggml's number of the tensor type.
            rows: [columns, bytes] uint8, contiguous.
            depth: numbers in a row.
            order: [columns] int64, the row of each column; None: in order.

        Raises:
            ValueError: a scale is not finite.
        """
        size = self.block_bytes(ggml_type, len(rows), depth)
        if not size:
            return None
        panels = zeroed(size)
        rows = rewritten(ggml_type, rows)
        source = rows.ctypes.data, address_of(order), len(rows), depth, panels.data_ptr(), team_size()
        wrong = self._library.fsd_block_pack(ggml_type, *source)
        if wrong:
            raise ValueError(f"{wrong} scales that are not finite numbers")
        return panels

    def rows(self, layer: Linear, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return rows ids [...] of a weight that is not fp8: [..., depth], in bf16, or of blocks in fp32.

        Raises:
            IndexError: an id is outside the weight.
        """
        result = torch.empty(*ids.shape, layer.depth, dtype=dtype)
        narrow, threads = dtype == torch.bfloat16, team_size() if ids.numel() > FEW_TOKENS else 1
        if self._library.fsd_rows(layer, ids.data_ptr(), ids.numel(), narrow, result.data_ptr(), threads):
            low, high = int(ids.min()), int(ids.max())
            raise IndexError(f"token ids from {low} to {high}, but the vocabulary has {layer.columns}.")
        return result

    def row_statistics(
        self, logits: Tensor, where: Tensor | None = None, log_sum: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute :func:`fsd_core.functional.row_stats` of logits [..., V]; 0 in rows outside ``where`` [...]."""
        where, shape = None if where is None else where.contiguous(), logits.shape[:-1]
        highest, best, total = torch.empty(shape), torch.empty(shape, dtype=torch.long), torch.empty(shape)
        sizes, totals = (highest.numel(), logits.shape[-1]), total if log_sum else None
        out = highest.data_ptr(), best.data_ptr(), address_of(totals)
        self._library.fsd_row_statistics(*_rows(logits, where), *sizes, *out, threads_for(*sizes))
        return highest, best, totals

    def row_entropies(self, logits: Tensor, rows: Tensor | None = None) -> Tensor:
        """Compute :func:`fsd_core.functional.row_entropy` of logits [..., V] or of rows [R] of [M, V]."""
        rows = _checked(rows, logits)
        result = torch.empty(logits.shape[:-1] if rows is None else rows.shape)
        sizes = result.numel(), logits.shape[-1]
        self._library.fsd_row_entropies(*_rows(logits, rows), *sizes, result.data_ptr(), threads_for(*sizes))
        return result

    def likeliest(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Compute :func:`fsd_core.functional.topk_logprobs` of logits [..., V] in bf16 or fp32; count <= V."""
        log_q, columns = torch.empty(*logits.shape[:-1], count), logits.shape[-1]
        where, (narrow, numbers, _) = torch.empty(log_q.shape, dtype=torch.long), _rows(logits, None)
        sizes, out = (logits.numel() // columns, columns, count), (log_q.data_ptr(), where.data_ptr())
        self._library.fsd_likeliest(narrow, numbers, *sizes, *out, team_size())
        return log_q, where

    def sample(self, logits: Tensor, uniforms: Tensor, where: Tensor) -> Tensor:
        """Compute :func:`fsd_core.sampling.sample_rows` by uniforms in fp32; 0 in rows outside ``where``."""
        uniforms, where = uniforms.contiguous(), where.contiguous()
        tokens, sizes = torch.empty(where.shape, dtype=torch.long), (where.numel(), logits.shape[-1])
        out = uniforms.data_ptr(), tokens.data_ptr()
        self._library.fsd_sample(*_rows(logits, where), *sizes, *out, threads_for(*sizes))
        return tokens

    def draw_rest(self, rest: Rest, uniforms: Tensor) -> Tensor:
        """Compute :func:`fsd_core.sampling.draw_rest` of weights and uniforms in fp32."""
        p, nodes, uniforms = rest.p_logits.contiguous(), rest.nodes.contiguous(), uniforms.contiguous()
        weight, refused, q, index, ids = (None if x is None else x.contiguous() for x in rest[2:7])
        of_p, tokens = (*_rows(p, nodes), *p.shape[1:]), torch.empty(len(uniforms), dtype=torch.long)
        of_q = (False, None, None, 0, 0) if q is None or index is None else (*_rows(q, index), *q.shape[1:])
        arguments = *(address_of(x) for x in (ids, weight, uniforms, refused)), rest.refused.shape[1]
        out, threads = (len(tokens), tokens.data_ptr()), threads_for(len(tokens), of_p[-1])
        self._library.fsd_draw_rest(*of_p, *of_q, *arguments, *out, threads)
        return tokens

    def keep_largest(self, scores: Tensor, count: int, other: float) -> Tensor:
        """Compute :func:`fsd_core.functional.keep_top_k` of scores [..., V] in fp32."""
        result, columns = torch.empty_like(scores), scores.shape[-1]
        rows, threads = scores.numel() // columns, team_size()
        self._library.fsd_keep_largest(scores.data_ptr(), rows, columns, count, other, result.data_ptr(), threads)
        return result

    def ancestors(self, parents: Tensor) -> Tensor:
        """Compute :func:`fsd_core.functional.ancestors` of int64 parents."""
        result = torch.empty(*parents.shape, parents.shape[1], dtype=torch.bool)
        self._library.fsd_ancestors(parents.data_ptr(), *parents.shape, result.data_ptr())
        return result

    def union(
        self, main: TreeTensors, grafted: TreeTensors, main_proposers: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :func:`fsd_core.functional.tree_union`: int64, but scores in fp32."""
        batch, count = len(main[0]), main[0].shape[1] + grafted[0].shape[1] - 1
        tokens, parents, proposers = (torch.empty(batch, count, dtype=torch.long) for _ in range(3))
        scores = torch.empty(batch, count)
        fields = [[None if x is None else x.contiguous() for x in tree] for tree in (main, grafted)]
        sizes = main[0].shape[1], grafted[0].shape[1]
        trees = (Tree(*map(address_of, tree), size) for tree, size in zip(fields, sizes))
        out = (x.data_ptr() for x in (tokens, parents, scores, proposers))
        self._library.fsd_union(batch, *trees, main_proposers, *out)
        return tokens, parents, scores, proposers

    def divergence(
        self,
        name: str,
        p: Tensor,
        q: Tensor,
        ids: Tensor | None,
        q_rows: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Compute D(p, q) in fp32, see :func:`fsd_core.divergence.divergence`, or as "residual" Σ (w·p - q)+.

        Args:
            name: "residual" or one of :data:`PLAIN_DIVERGENCES`; with ``ids`` one that is finite where q is 0.
            p, q: [..., V] and [..., Vd] logits in bf16 or fp32.
            ids: [Vd] int64, the tokens of q's columns; None: V = Vd.
            q_rows: [...] int64, the row of q [I, Vd] for each of p, -1 for none; None: all in order.
            weights: [...] w in fp32, of a residual.

        Returns:
            [...], infinite where there is no q; of a residual 0.

        Raises:
            IndexError: a row or a token is out of range.
        """
        if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < p.shape[-1]:
            raise IndexError(f"tokens {int(ids.min())} to {int(ids.max())} of logits with {p.shape[-1]} columns.")
        q_rows = None if q_rows is None else _checked(q_rows.flatten(), q, first=-1)
        out, of_p, of_q = torch.empty(p.shape[:-1]), (*_rows(p, None), p.shape[-1]), (*_rows(q, q_rows), q.shape[-1])
        number, addresses = _KINDS.index(name), (address_of(ids), address_of(weights), out.data_ptr())
        self._library.fsd_divergence(number, out.numel(), *of_p, *of_q, *addresses, team_size())
        return out

    def stack(self, stack: StackStruct, forward: Forward) -> None:
        """Run decoder layers. Sets ``forward.scratch`` to memory of this thread, which its forwards reuse.

        Raises:
            IndexError: a slot or a position is out of range; then nothing was written.
        """
        self._give_scratch(stack, forward)
        if self._library.fsd_stack_forward(stack, forward):
            raise IndexError(f"slots or positions beyond a cache with {forward.capacity} slots.")

    def head_step(self, stack: StackStruct, forward: Forward, head: Head, step: HeadStepArguments) -> None:
        """Run a draft head's step. Sets ``forward.scratch`` and raises as :meth:`stack`, also for a wrong id."""
        self._give_scratch(stack, forward)
        if self._library.fsd_head_step(stack, forward, head, step):
            raise IndexError(f"slots, positions or ids beyond {forward.capacity} slots or {head.embed.columns} ids.")

    def _give_scratch(self, stack: StackStruct, forward: Forward) -> None:
        size = self._library.fsd_scratch(stack, forward)
        scratch: Tensor | None = getattr(self._memory, "scratch", None)
        if scratch is None or scratch.numel() < size:
            scratch = self._memory.scratch = torch.empty(size, dtype=torch.uint8)
        forward.scratch = scratch.data_ptr()


@dataclass(frozen=True)
class LoadedKernels:
    """The kernels of this process, None if torch computes everything, and why.

    Attributes:
        forced: whether FSD_KERNELS asked for them, or for none.
        failed: whether better ones could not be compiled or loaded.
    """

    kernels: Kernels | None
    why: str
    forced: bool
    failed: bool = False


@cache
def loaded() -> LoadedKernels:
    """Return the best kernels that this machine can run, compiled if needed. A warning says what failed.

    Raises:
        KernelsError: FSD_KERNELS names kernels that do not exist, that this processor cannot run, or that cannot be
            compiled.
    """
    sets = allowed_sets()
    if not sets.names:
        return LoadedKernels(None, sets.why, sets.forced)
    from fsd_infer.backends.cpu.build import build  # imported late: rules need no compiler

    compiled, failed = build(Kernels, sets.names)
    if compiled is None and sets.forced:
        raise KernelsError(f"{VARIABLE} asks for kernels that cannot be compiled or loaded here ({failed}).")
    if failed:
        without = "our CPU kernels" if compiled is None else "AMX"
        logger.warning("decoding runs slower, without %s: %s", without, failed)
    return LoadedKernels(compiled, failed or sets.why, sets.forced, bool(failed))


def kernels() -> Kernels | None:
    """Return the kernels of :func:`loaded`; None if this machine cannot run them."""
    return loaded().kernels


def _checked(rows: Tensor | None, of: Tensor, first: int = 0) -> Tensor | None:
    """Return contiguous rows, from ``first`` on. Raises IndexError for one outside [M, V], which kernels would read."""
    if rows is not None and not all(first <= row < len(of) for row in rows.tolist()):
        raise IndexError(f"rows {rows.tolist()} of logits with {len(of)} rows.")
    return None if rows is None else rows.contiguous()


def address_of(x: Tensor | None) -> int | None:
    """Return the address of a tensor's memory."""
    return None if x is None else x.data_ptr()


def _rows(logits: Tensor, rows: Tensor | None) -> tuple[bool, int, int | None]:
    return logits.dtype == torch.bfloat16, logits.data_ptr(), address_of(rows)


def threads_for(count: int, columns: int) -> int:
    return team_size() if count * columns > _FEW_NUMBERS else 1


def panels_of(weight: Tensor, packed: Tensor) -> tuple[int, int] | None:
    """Return where a weight's packed copy is and the columns of its panels, if the kernels can read its layout.

    oneDNN chooses the layout by machine and version, so this compares the bytes of the first and last panel.

    Args:
        weight: [out, in] in bf16.
        packed: oneDNN's packed copy.
    """
    columns, depth = weight.shape
    size = columns * depth * weight.element_size()
    if kernels() is None or depth % 32 or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    if torch.ops.mkldnn._nbytes(packed) != size:
        return None
    address = int(torch.ops.mkldnn.data_ptr(packed))
    raw = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.int16)
    numbers = weight.view(torch.int16)

    def agrees(side: int) -> bool:
        panels, rows = raw.view(-1, depth * side), numbers.unflatten(0, (-1, side))
        return all(torch.equal(panels[at], in_panels(rows[at], side).flatten()) for at in (0, -1))

    sides = [side for side in SIDES if columns % side == 0 and agrees(side)]
    if len(sides) > 1:  # rows that are alike, such as zeros, at both ends: compare all
        sides = [side for side in sides if torch.equal(raw, in_panels(numbers, side).flatten())]
    return (address, sides[0]) if sides else None


def in_panels(weight: Tensor, side: int) -> Tensor:
    """Return a weight [out, in] in panels [out / side, in / 2, side, 2]."""
    return weight.view(-1, side, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()
