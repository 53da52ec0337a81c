"""Our own CPU kernels for the few tokens of a round: products over oneDNN's packed weights, and whole decoder layers.

A round runs the target over one to some twenty tokens. There oneDNN's products take twice the time that reading the
weights takes, and a third of a forward goes into starting small operations. ``kernels.cpp`` holds a product for few
rows and a decoder layer of the Llama kind in one call, which leave little beside the reading. It is compiled once, in
seconds, by the machine's own C++ compiler, and kept in the user's cache. Where there is none, or no AVX512-BF16, or
where FSD_KERNELS=0 is set, everything runs through torch as before: the same results within bf16 rounding.

A row's result does not depend on how many rows are computed with it, nor on what lies in slots that it does not see:
a tree's logits are those of decoding token by token, bit by bit.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fsd_infer.device.cpuinfo import cpu_flags

PLAIN_DIVERGENCES = ("kl_qp", "kl_pq", "js", "ag", "tv")  # as ``Kind`` of kernels.cpp numbers them
_FEW_NUMBERS = 2**18  # are looked through by one thread before a second one is awake
MOST_ROWS = 512  # above, oneDNN's products and torch's attention are as fast
FEW_TOKENS = 64  # of a text, as in a tree: their forwards agree bit by bit, whatever is computed with them
NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma"}


TreeTensors = tuple[Tensor, Tensor, Tensor, Tensor | None]  # tokens, parents, scores and proposers of a DraftTree


class Linear(Structure):
    """``fsd_linear`` of kernels.cpp."""

    _fields_ = [
        ("panels", c_void_p),
        ("kind", c_int64),
        *((name, c_void_p) for name in ("scales", "bias")),
        *((name, c_int64) for name in ("columns", "depth")),
    ]


class Layer(Structure):
    """``fsd_layer`` of kernels.cpp."""

    _fields_ = [
        *((name, Linear) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, c_void_p) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
    ]


class Stack(Structure):
    """``fsd_stack`` of kernels.cpp."""

    _fields_ = [
        ("layers", POINTER(Layer)),
        *((name, c_int64) for name in ("number", "hidden", "inner", "query_heads", "key_heads", "width")),
        *((name, c_float) for name in ("epsilon", "scale")),
    ]


class Forward(Structure):
    """``fsd_forward`` of kernels.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "count")),
        *((name, c_void_p) for name in ("x", "attended", "positions", "slots", "cosine", "sine")),
        ("angles", c_int64),
        ("visible", POINTER(c_void_p)),
        ("used", c_int64),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("capacity", "layer_stride", "batch_stride", "head_stride", "slot_stride")),
        ("outputs", POINTER(c_void_p)),
        *((name, c_void_p) for name in ("final_norm", "out", "scratch")),
        *((name, c_int64) for name in ("many", "threads")),
    ]


class Tree(Structure):
    """``fsd_tree`` of kernels.cpp."""

    _fields_ = [*((name, c_void_p) for name in ("tokens", "parents", "scores", "proposers")), ("count", c_int64)]


class Kernels:
    """The compiled library. Tensors are bf16, contiguous, and on the CPU.

    Attributes:
        panel: output columns side by side in the packed weights that it reads.

    Raises:
        OSError: the library cannot be loaded, or the system denies it the use of AMX.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if library.fsd_prepare():
            raise OSError("the system does not grant the use of AMX")
        self.panel: int = library.fsd_panel()
        self._memory = threading.local()
        self._linear = library.fsd_linear_forward
        self._linear.argtypes = (c_void_p, POINTER(Linear), c_void_p, c_int64, c_int, c_int)
        self._linear.restype = None
        self._stack, self._scratch = library.fsd_stack_forward, library.fsd_scratch
        self._stack.argtypes = self._scratch.argtypes = (POINTER(Stack), POINTER(Forward))
        self._stack.restype = self._scratch.restype = c_int64
        self._statistics = library.fsd_row_statistics
        self._statistics.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int)
        self._statistics.restype = None
        self._entropies = library.fsd_row_entropies
        self._entropies.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int)
        self._entropies.restype = None
        self._rows = library.fsd_rows
        self._rows.argtypes, self._rows.restype = (c_void_p, *[c_int64] * 2, c_void_p, c_int64, c_void_p), c_int64
        self.block_bytes, self._block_pack = library.fsd_block_bytes, library.fsd_block_pack
        self.block_bytes.argtypes, self.block_bytes.restype = (c_int64, c_int64, c_int64), c_int64
        self._block_pack.argtypes = (c_int64, c_void_p, c_void_p, *[c_int64] * 2, c_void_p, c_int)
        self._block_rows = library.fsd_block_rows
        self._block_rows.argtypes = (POINTER(Linear), c_void_p, c_int64, c_int, c_void_p, c_int)
        self._block_pack.restype = self._block_rows.restype = c_int64
        self._divergence = library.fsd_divergence
        rows_of = (c_int, c_void_p, c_void_p, c_int64)  # narrow, numbers, which, columns
        self._divergence.argtypes = (c_int, c_int64, *rows_of, *rows_of, *[c_void_p] * 2, c_int)
        self._divergence.restype = None
        self._likeliest = library.fsd_likeliest
        self._likeliest.argtypes = (c_int, c_void_p, *[c_int64] * 3, *[c_void_p] * 2, c_int)
        self._likeliest.restype = None
        self._keep_largest = library.fsd_keep_largest
        self._keep_largest.argtypes = (c_void_p, *[c_int64] * 3, c_float, c_void_p, c_int)
        self._keep_largest.restype = None
        self._ancestors = library.fsd_ancestors
        self._ancestors.argtypes, self._ancestors.restype = (c_void_p, *[c_int64] * 2, c_void_p), None
        self._union = library.fsd_union
        self._union.argtypes = (c_int64, POINTER(Tree), POINTER(Tree), c_int64, *[c_void_p] * 4)
        self._union.restype = None

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        """x [..., depth] -> [..., columns]."""
        y = x.new_empty((*x.shape[:-1], layer.columns))
        rows, many = x.numel() // x.shape[-1], x.dim() > 1 and x.shape[-2] > FEW_TOKENS
        self._linear(x.data_ptr(), layer, y.data_ptr(), rows, many, torch.get_num_threads())
        return y

    def pack_blocks(self, kind: int, rows: np.ndarray, depth: int, order: Tensor | None) -> Tensor | None:
        """Rows of a GGUF file as panels that the products read; None if they cannot be held so.

        Args:
            kind: ggml's number of their type.
            rows: [columns, bytes] uint8, contiguous.
            depth: numbers in a row.
            order: [columns] int64, which row is a column's; None: all in order.

        Raises:
            ValueError: a scale that is no finite number.
        """
        size = self.block_bytes(kind, len(rows), depth)
        if not size:
            return None
        panels = torch.zeros(size, dtype=torch.uint8)
        which = None if order is None else order.data_ptr()
        address, threads = rows.ctypes.data, torch.get_num_threads()
        wrong = self._block_pack(kind, address, which, len(rows), depth, panels.data_ptr(), threads)
        if wrong:
            raise ValueError(f"{wrong} scales that are no finite numbers")
        return panels

    def block_rows(self, layer: Linear, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """:meth:`rows` of a weight in blocks, in bf16 or fp32."""
        found = torch.empty(*ids.shape, layer.depth, dtype=dtype)
        narrow, threads = dtype == torch.bfloat16, torch.get_num_threads() if ids.numel() > FEW_TOKENS else 1
        if self._block_rows(layer, ids.data_ptr(), ids.numel(), narrow, found.data_ptr(), threads):
            raise _no_rows(ids, layer)
        return found

    def rows(self, layer: Linear, ids: Tensor) -> Tensor:
        """Rows ids [...] of the layer's weight, in bf16: [..., depth]. Raises IndexError for an id that is no row."""
        found = torch.empty(*ids.shape, layer.depth, dtype=torch.bfloat16)
        if self._rows(layer.panels, layer.columns, layer.depth, ids.data_ptr(), ids.numel(), found.data_ptr()):
            raise _no_rows(ids, layer)
        return found

    def row_statistics(
        self, logits: Tensor, rows: Tensor | None = None, log_sum: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See :func:`fsd_infer.cpu.ops.row_statistics`: logits [..., V] in bf16 or fp32, rows [R] of [M, V] or None."""
        columns = logits.shape[-1]
        shape = logits.shape[:-1] if rows is None else rows.shape
        if rows is not None:
            _check_rows(rows, logits)
            rows = rows.contiguous()
        highest, where = torch.empty(shape), torch.empty(shape, dtype=torch.long)
        total = torch.empty(shape) if log_sum else None
        count = highest.numel()
        threads = torch.get_num_threads() if count * columns > _FEW_NUMBERS else 1
        self._statistics(
            logits.dtype == torch.bfloat16,
            logits.data_ptr(),
            None if rows is None else rows.data_ptr(),
            count,
            columns,
            highest.data_ptr(),
            where.data_ptr(),
            None if total is None else total.data_ptr(),
            threads,
        )
        return highest, where, total

    def row_entropies(self, logits: Tensor, rows: Tensor | None = None) -> Tensor:
        """See :func:`fsd_infer.cpu.ops.row_entropies`; arguments as of :meth:`row_statistics`."""
        if rows is not None:
            _check_rows(rows, logits)
            rows = rows.contiguous()
        found = torch.empty(logits.shape[:-1] if rows is None else rows.shape)
        which, columns = None if rows is None else rows.data_ptr(), logits.shape[-1]
        threads = torch.get_num_threads() if found.numel() * columns > _FEW_NUMBERS else 1
        narrow = logits.dtype == torch.bfloat16
        self._entropies(narrow, logits.data_ptr(), which, found.numel(), columns, found.data_ptr(), threads)
        return found

    def likeliest(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """logits [..., V] in bf16 or fp32 -> (ln q [..., count] in fp32, falling, tokens [..., count]); count <= V."""
        log_q = torch.empty(*logits.shape[:-1], count)
        where = torch.empty(log_q.shape, dtype=torch.long)
        columns = logits.shape[-1]
        narrow, rows, threads = logits.dtype == torch.bfloat16, logits.numel() // columns, torch.get_num_threads()
        self._likeliest(narrow, logits.data_ptr(), rows, columns, count, log_q.data_ptr(), where.data_ptr(), threads)
        return log_q, where

    def keep_largest(self, scores: Tensor, count: int, other: float) -> Tensor:
        """scores [..., V] in fp32 -> the same with numbers below the ``count``-th largest of their row as ``other``."""
        found, columns = torch.empty_like(scores), scores.shape[-1]
        rows, threads = scores.numel() // columns, torch.get_num_threads()
        self._keep_largest(scores.data_ptr(), rows, columns, count, other, found.data_ptr(), threads)
        return found

    def ancestors(self, parents: Tensor) -> Tensor:
        """See :func:`fsd_infer.cpu.ops.ancestors`: int64."""
        batch, count = parents.shape
        found = torch.empty(batch, count, count, dtype=torch.bool)
        self._ancestors(parents.data_ptr(), batch, count, found.data_ptr())
        return found

    def union(self, main: TreeTensors, side: TreeTensors, mains: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :func:`fsd_infer.cpu.ops.tree_union`: int64, but scores in fp32."""
        batch, count = len(main[0]), main[0].shape[1] + side[0].shape[1] - 1
        tokens, parents, proposers = (torch.empty(batch, count, dtype=torch.long) for _ in range(3))
        scores = torch.empty(batch, count)
        held = [[None if x is None else x.contiguous() for x in tree] for tree in (main, side)]
        sizes = main[0].shape[1], side[0].shape[1]
        trees = (Tree(*(None if x is None else x.data_ptr() for x in tree), size) for tree, size in zip(held, sizes))
        out = (x.data_ptr() for x in (tokens, parents, scores, proposers))
        self._union(batch, *trees, mains, *out)
        return tokens, parents, scores, proposers

    def divergence(
        self,
        name: str,
        p: Tensor,
        q: Tensor,
        ids: Tensor | None,
        rows: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        """D(p, q) in fp32, as :func:`fsd_infer.divergence.divergence` of that name has it.

        Args:
            name: one of :data:`PLAIN_DIVERGENCES`; with ``ids`` none that is infinite where q is 0.
            p: [..., V] logits in bf16 or fp32.
            q: [..., Vd] logits in bf16 or fp32.
            ids: [Vd] int64, the tokens that q is about; None: V = Vd.
            rows: [R] int64, which rows of p [M, V] are compared with which of q [I, Vd]; None: all in order.

        Returns:
            [...], or [R].

        Raises:
            IndexError: a row or a token that is not there.
        """
        if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < p.shape[-1]:
            raise IndexError(f"tokens {int(ids.min())} to {int(ids.max())} of logits with {p.shape[-1]} columns.")
        for x, which in zip((p, q), rows):
            if which is not None:
                _check_rows(which, x)
        out = torch.empty(p.shape[:-1] if rows[0] is None else rows[0].shape)
        kind = PLAIN_DIVERGENCES.index(name)
        of_p, of_q = (
            (x.dtype == torch.bfloat16, x.data_ptr(), None if which is None else which.data_ptr(), x.shape[-1])
            for x, which in zip((p, q), rows, strict=True)
        )
        tokens = None if ids is None else ids.data_ptr()
        self._divergence(kind, out.numel(), *of_p, *of_q, tokens, out.data_ptr(), torch.get_num_threads())
        return out

    def stack(self, stack: Stack, forward: Forward) -> None:
        """Run decoder layers. ``forward.scratch`` is filled in: this thread's memory, whose forwards take turns.

        Raises:
            IndexError: a slot or a position that is not there; then nothing was written.
        """
        size = self._scratch(stack, forward)
        held: Tensor | None = getattr(self._memory, "scratch", None)
        if held is None or held.numel() < size:
            held = self._memory.scratch = torch.empty(size, dtype=torch.uint8)
        forward.scratch = held.data_ptr()
        if self._stack(stack, forward):
            raise IndexError(f"slots or positions beyond a cache with {forward.capacity} slots.")


@cache
def kernels() -> Kernels | None:
    """The kernels, compiled where they have not been; None where they cannot be had (the log says why)."""
    if os.environ.get("FSD_KERNELS") == "0" or not NEEDED <= cpu_flags():
        return None
    from fsd_infer.cpu.build import build  # what only adds up or compares rows of numbers needs no compiler

    return build(Kernels)


def _no_rows(ids: Tensor, layer: Linear) -> IndexError:
    return IndexError(f"token ids from {int(ids.min())} to {int(ids.max())}, but the vocabulary has {layer.columns}.")


def _check_rows(rows: Tensor, of: Tensor) -> None:
    """Raise IndexError for a row [R] that [M, V] does not have: the kernels would read wherever that is."""
    if not all(0 <= row < len(of) for row in rows.tolist()):
        raise IndexError(f"rows {rows.tolist()} of logits with {len(of)} rows.")


def panels_of(weight: Tensor, packed: Tensor) -> int | None:
    """Address of the packed copy of a weight [out, in] if the kernels can read it, else None.

    oneDNN chooses the layout, by machine and version. So bytes of the first and last panel are compared.
    """
    columns, depth = weight.shape
    compiled = kernels()
    if compiled is None or columns % compiled.panel or depth % 32:
        return None
    side = compiled.panel
    size = columns * depth * weight.element_size()
    if not hasattr(torch.ops.mkldnn, "data_ptr") or torch.ops.mkldnn._nbytes(packed) != size:
        return None
    address = int(torch.ops.mkldnn.data_ptr(packed))
    raw = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.int16).view(-1, depth * side)
    for panel in (0, -1):
        rows = weight.view(torch.int16).unflatten(0, (-1, side))[panel]
        if not torch.equal(raw[panel], rows.view(side, depth // 2, 2).transpose(0, 1).reshape(-1)):
            return None
    return address
