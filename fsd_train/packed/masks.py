"""The mask of a packed row: who sees whom among queries and keys, in three readings.

A :class:`PackedMask` is a function of a query's and a key's place, the spans of queries and the keys that they may see,
and FlexAttention's block mask.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from fsd_core.tensors import to_device

BLOCK = 128  # queries and keys of a block of FlexAttention


Sight = Callable[[Tensor, Tensor], Tensor]  # of places of queries and keys, see PackedMask.sight


class Span(NamedTuple):
    """Consecutive queries, and the pieces of the keys that hold all that any of them sees."""

    queries: slice
    pieces: Sequence[int]


class Earlier:
    """Keys and values of the earlier steps of chains, by attention module. Layers that are compiled do not see them."""

    def __init__(self) -> None:
        self._by_module: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def joined(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Add a step's keys and values [1, heads, K, D]; return those of all steps so far."""
        keys, values = self._by_module.setdefault(id(module), ([], []))
        keys.append(key)
        values.append(value)
        return keys, values


@dataclass(frozen=True)
class PackedMask(ABC):
    """Who sees whom among queries and keys in one row, known in host memory.

    Attributes:
        lengths: tokens of each conversation, in order; together they fill the row.
        device: device of the row's tensors.
        earlier: where keys and values are kept for later steps, if there are any.
    """

    lengths: tuple[int, ...]
    device: torch.device
    earlier: Earlier | None = field(default=None, kw_only=True, repr=False, compare=False)
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getitem__(self, index: Any) -> Any:
        """Return the mask itself: stacks drop and add the heads' dimension, for which one mask holds."""
        return self

    @cached_property
    def begins(self) -> np.ndarray:
        """[M] first place of each place's conversation."""
        ends = np.cumsum(self.lengths)
        return np.repeat(ends - self.lengths, self.lengths)

    @cached_property
    def _begins(self) -> Tensor:
        return to_device(torch.from_numpy(self.begins), self.device)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Number of queries and of keys."""

    @abstractmethod
    def sight(self, window: int | None) -> Sight:
        """Return the function that says whether queries see keys, by place.

        It is of tensors alone, which torch.compile can read. A ``window`` is the number of positions that a query sees,
        itself included.
        """

    def visible(self, query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
        """Return whether queries see keys, by place: bool of the broadcast shape of two integer tensors."""
        return self.sight(window)(query, key)

    @cached_property
    @abstractmethod
    def pieces(self) -> list[list[int]]:
        """Sizes of the pieces into which the keys of each step are split."""

    @cached_property
    @abstractmethod
    def spans(self) -> list[Span]:
        """The queries, divided into spans."""

    @abstractmethod
    def sees_first(self, window: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ranges of keys [first, last] for each query, which cover all that it sees: integers [Q] each."""

    def span_masks(self, window: int | None) -> list[Tensor | None]:
        """Return the spans' masks [q, k] bool on the device; None where causal attention is the same."""
        if window not in self._kept:
            self._kept[window] = [self._span_mask(span, window) for span in self.spans]
        found: list[Tensor | None] = self._kept[window]
        return found

    def _span_mask(self, span: Span, window: int | None) -> Tensor | None:
        queries = torch.arange(span.queries.start, span.queries.stop, device=self.device)
        return self.visible(queries[:, None], self.keys_of(span), window)

    def keys_of(self, span: Span) -> Tensor:
        """Return the places of a span's keys."""
        sizes = [size for step in self.pieces for size in step]
        ends = np.cumsum(sizes).tolist()
        parts = [torch.arange(ends[n] - sizes[n], ends[n], device=self.device) for n in span.pieces]
        return torch.cat(parts)

    def block_mask(self, window: int | None = None) -> BlockMask:
        """Return FlexAttention's mask. The blocks are found on the host, so nothing waits for the device."""
        if ("blocks", window) not in self._kept:
            queries, keys = self.shape
            occupied = np.zeros((-(-queries // BLOCK), -(-keys // BLOCK)), dtype=bool)
            for first, last in self.sees_first(window):
                low, high = (reduced(array // BLOCK) for reduced, array in ((_least, first), (_most, last)))
                columns = np.arange(occupied.shape[1])
                occupied |= (columns >= low[:, None]) & (columns <= high[:, None])
            counts = torch.from_numpy(occupied.sum(1).astype(np.int32))[None, None]
            order = torch.from_numpy(np.argsort(~occupied, axis=1, kind="stable").astype(np.int32))[None, None]
            sight = self.sight(window)
            self._kept["blocks", window] = BlockMask.from_kv_blocks(
                to_device(counts, self.device), to_device(order, self.device), BLOCK_SIZE=BLOCK,
                mask_mod=lambda batch, head, query, key: sight(query, key), seq_lengths=self.shape,
            )  # fmt: skip
        found: BlockMask = self._kept["blocks", window]
        return found


def _least(values: np.ndarray) -> np.ndarray:
    """The least value of each block of queries."""
    return np.minimum.reduceat(values, np.arange(0, len(values), BLOCK))


def _most(values: np.ndarray) -> np.ndarray:
    return np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))


@dataclass(frozen=True)
class TextMask(PackedMask):
    """Each token sees those of its conversation up to itself."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.begins), len(self.begins)

    @cached_property
    def positions(self) -> Tensor:
        """[1, M] position of each token in its conversation."""
        return (torch.arange(len(self.begins), device=self.device) - self._begins)[None]

    def sight(self, window: int | None) -> Sight:
        begins = self._begins

        def sees(query: Tensor, key: Tensor) -> Tensor:
            seen = (key <= query) & (key >= begins[query])
            return seen if window is None else seen & (query - key < window)

        return sees

    @cached_property
    def pieces(self) -> list[list[int]]:
        return [list(self.lengths)]

    @cached_property
    def spans(self) -> list[Span]:
        ends = np.cumsum(self.lengths).tolist()
        return [Span(slice(end - self.lengths[number], end), [number]) for number, end in enumerate(ends)]

    def sees_first(self, window: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        last = np.arange(len(self.begins))
        yield self.begins if window is None else np.maximum(self.begins, last - window + 1), last

    def _span_mask(self, span: Span, window: int | None) -> Tensor | None:
        if window is None or window >= span.queries.stop - span.queries.start:
            return None
        return super()._span_mask(span, window)

    def begin(self) -> TextMask:
        """Return this mask for step 0 of chains, whose keys and values their later steps see."""
        mask = copy.copy(self)
        vars(mask)["earlier"] = Earlier()
        return mask

    def chains(self, roots: Tensor, step: int, at: Tensor | None = None) -> ChainMask:
        """Return the mask of step ``step`` ≥ 1 of the chains with these roots [K], ascending, in host memory.

        ``at`` is a copy of the roots on the row's device, if there is one.
        """
        mask = ChainMask(self.lengths, self.device, roots, step, earlier=self.earlier)
        known = {"begins": self.begins, "_begins": self._begins, "_roots": at}
        vars(mask).update({name: value for name, value in known.items() if value is not None})
        return mask


@dataclass(frozen=True)
class ChainMask(PackedMask):
    """A chain's next token sees its conversation up to the root, and the chain's own later tokens.

    The keys are the M tokens of the row, then K of each of the steps 1 … ``step``.
    """

    roots: Tensor
    step: int

    @cached_property
    def _roots(self) -> Tensor:
        return to_device(self.roots, self.device)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.roots), len(self.begins) + self.step * len(self.roots)

    def sight(self, window: int | None) -> Sight:
        begins, roots, step = self._begins, self._roots, self.step

        def sees(query: Tensor, key: Tensor) -> Tensor:
            tokens, root = len(begins), roots[query]
            in_text = (key <= root) & (key >= begins[root])
            if window is not None:  # the query stands ``step`` positions after its root
                in_text = in_text & (root + step - key < window)
            return torch.where(key < tokens, in_text, (key - tokens) % len(roots) == query)

        return sees

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of chains of each conversation."""
        return np.bincount(np.searchsorted(np.cumsum(self.lengths), self.roots.numpy(), "right"))

    @cached_property
    def pieces(self) -> list[list[int]]:
        return [list(self.lengths), *[self.counts[self.counts > 0].tolist()] * self.step]

    @cached_property
    def spans(self) -> list[Span]:
        texts = np.flatnonzero(self.counts)  # the conversations that have chains
        ends = np.cumsum(self.counts[texts]).tolist()
        found = []
        for number, (text, end) in enumerate(zip(texts.tolist(), ends, strict=True)):
            first = len(self.lengths) + number
            own = range(first, first + self.step * len(texts), len(texts))  # of each step
            found.append(Span(slice(end - int(self.counts[text]), end), [text, *own]))
        return found

    def sees_first(self, window: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        roots, tokens = self.roots.numpy(), len(self.begins)
        yield self.begins[roots], roots
        for at in range(tokens, self.shape[1], len(roots)):
            own = at + np.arange(len(roots))
            yield own, own
