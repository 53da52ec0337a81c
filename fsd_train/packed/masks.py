"""The attention mask of a packed sequence, in three forms.

A :class:`PackedMask` is a function of a query's and a key's index (FlexAttention's ``mask_mod``), FlexAttention's block
mask, and, for other attention, spans of queries with the keys that they may see.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from fsd_core.tensors import to_device
from fsd_infer.targets.image_inputs import ImagePrompt

BLOCK = 128  # queries and keys of a block of FlexAttention


MaskMod = Callable[[Any, Any, Tensor, Tensor], Tensor]  # FlexAttention's: of batch, head, query and key


class Span(NamedTuple):
    """The queries of one conversation, and the keys that any of them sees.

    Attributes:
        queries: their indices.
        pieces: numbers of the keys' pieces, see :meth:`PackedMask.split_keys`.
        visible: [q, k] bool on the device; None: each query sees the keys up to its own.
    """

    queries: slice
    pieces: Sequence[int]
    visible: Tensor | None = None


class ChainCache:
    """Keys and values of the earlier steps of chains, by attention module. Layers that are compiled do not see them."""

    def __init__(self) -> None:
        self._by_module: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def append(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Add a step's keys and values [1, heads, K, D]; return those of all steps so far."""
        keys, values = self._by_module.setdefault(id(module), ([], []))
        keys.append(key)
        values.append(value)
        return keys, values


@dataclass(eq=False)  # torch 2.10 compiles again for each value of a field of a frozen one
class PackedMask(ABC):
    """Which keys each query of a sequence may attend to, known in host memory.

    Attributes:
        lengths: tokens of each conversation, in order; together they fill the sequence.
        device: device of its tensors.
        cache: keeps keys and values for the later steps of chains, if there are any.
    """

    lengths: tuple[int, ...]
    device: torch.device
    cache: ChainCache | None = field(default=None, kw_only=True, repr=False, compare=False)
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getitem__(self, index: Any) -> Any:
        """Return the mask itself: stacks drop and add the heads' dimension, for which one mask holds."""
        return self

    @cached_property
    def starts(self) -> np.ndarray:
        """[M] index of the first token of each token's conversation."""
        ends = np.cumsum(self.lengths)
        return np.repeat(ends - self.lengths, self.lengths)

    @cached_property
    def _starts(self) -> Tensor:
        return to_device(torch.from_numpy(self.starts), self.device)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Number of queries and of keys."""

    @abstractmethod
    def mask_mod(self, window: int | None) -> MaskMod:
        """Return the function (batch, head, query, key) -> bool that says whether queries see keys, by index.

        It is of tensors alone, which torch.compile can read. A ``window`` is the number of positions that a query sees,
        itself included.
        """

    def visible(self, query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
        """Return whether queries see keys, by index: bool of the broadcast shape of two integer tensors."""
        return self.mask_mod(window)(None, None, query, key)

    @cached_property
    @abstractmethod
    def key_sizes(self) -> list[list[int]]:
        """Sizes of the pieces of each step's keys, one piece per conversation."""

    def split_keys(self, keys: list[Tensor]) -> list[Tensor]:
        """Split keys (or values) into pieces [1, heads, k, D] of one conversation and step each.

        Pieces are split off, because the gradient of a slice is as large as the whole.

        Args:
            keys: [1, heads, M or K, D] by step, or those of all steps as one.
        """
        sizes = self.key_sizes if len(keys) > 1 else [[size for step in self.key_sizes for size in step]]
        return [piece for step, of_step in zip(keys, sizes, strict=True) for piece in step.split(of_step, dim=2)]

    def spans(self, window: int | None) -> list[Span]:
        """Return the queries by conversation, with their masks."""
        if ("spans", window) not in self._made:
            self._made["spans", window] = [
                span._replace(visible=self._visible_in(span, window)) for span in self._spans()
            ]
        spans: list[Span] = self._made["spans", window]
        return spans

    @abstractmethod
    def _spans(self) -> list[Span]:
        """Return the spans without masks."""

    def _visible_in(self, span: Span, window: int | None) -> Tensor | None:
        queries = torch.arange(span.queries.start, span.queries.stop, device=self.device)
        return self.visible(queries[:, None], self.keys_of(span), window)

    def keys_of(self, span: Span) -> Tensor:
        """Return the indices [k] of a span's keys."""
        sizes = [size for step in self.key_sizes for size in step]
        ends = np.cumsum(sizes).tolist()
        parts = [torch.arange(ends[n] - sizes[n], ends[n], device=self.device) for n in span.pieces]
        return torch.cat(parts)

    @abstractmethod
    def key_ranges(self, window: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ranges of keys [first, last] for each query, which cover all that it sees: integers [Q] each."""

    def block_mask(self, window: int | None = None) -> BlockMask:
        """Return FlexAttention's mask. The blocks are found on the host, so nothing waits for the device."""
        if ("blocks", window) not in self._made:
            queries, keys = self.shape
            occupied = np.zeros((-(-queries // BLOCK), -(-keys // BLOCK)), dtype=bool)
            for first, last in self.key_ranges(window):
                starts = np.arange(0, len(first), BLOCK)  # of the blocks of queries
                low, high = np.minimum.reduceat(first // BLOCK, starts), np.maximum.reduceat(last // BLOCK, starts)
                columns = np.arange(occupied.shape[1])
                occupied |= (columns >= low[:, None]) & (columns <= high[:, None])
            counts = torch.from_numpy(occupied.sum(1).astype(np.int32))[None, None]
            order = torch.from_numpy(np.argsort(~occupied, axis=1, kind="stable").astype(np.int32))[None, None]
            self._made["blocks", window] = BlockMask.from_kv_blocks(
                to_device(counts, self.device), to_device(order, self.device), BLOCK_SIZE=BLOCK,
                mask_mod=self.mask_mod(window), seq_lengths=self.shape,
            )  # fmt: skip
        blocks: BlockMask = self._made["blocks", window]
        return blocks


@dataclass(eq=False)
class TextMask(PackedMask):
    """Causal attention within each conversation: a document mask.

    Attributes:
        image_prompts: the conversations with images by number.
    """

    image_prompts: Mapping[int, ImagePrompt] = field(default_factory=dict, kw_only=True, repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.starts), len(self.starts)

    @cached_property
    def positions(self) -> Tensor:
        """[1, M] position of each token in its conversation."""
        return (torch.arange(len(self.starts), device=self.device) - self._starts)[None]

    @cached_property
    def rotary(self) -> Tensor:
        """Where heads with M-RoPE place tokens: :attr:`positions`, or [3, 1, M] if images move the target's."""
        if not any(prompt.positions.dim() == 3 for prompt in self.image_prompts.values()):
            return self.positions
        parts = list(self.positions.expand(3, 1, -1).split(list(self.lengths), dim=-1))
        for number, prompt in self.image_prompts.items():
            parts[number] = prompt.positions.view(-1, 1, prompt.positions.shape[-1]).expand(3, 1, -1)
        return torch.cat(parts, dim=-1)

    def mask_mod(self, window: int | None) -> MaskMod:
        starts = self._starts

        def mask_mod(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
            seen = (key <= query) & (key >= starts[query])
            return seen if window is None else seen & (query - key < window)

        return mask_mod

    @cached_property
    def key_sizes(self) -> list[list[int]]:
        return [list(self.lengths)]

    def _spans(self) -> list[Span]:
        ends = np.cumsum(self.lengths).tolist()
        return [Span(slice(end - self.lengths[number], end), [number]) for number, end in enumerate(ends)]

    def key_ranges(self, window: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        last = np.arange(len(self.starts))
        yield self.starts if window is None else np.maximum(self.starts, last - window + 1), last

    def _visible_in(self, span: Span, window: int | None) -> Tensor | None:
        if window is None or window >= span.queries.stop - span.queries.start:
            return None
        return super()._visible_in(span, window)

    def with_cache(self) -> TextMask:
        """Return this mask for step 0 of chains, whose keys and values their later steps see."""
        mask = copy.copy(self)
        vars(mask)["cache"] = ChainCache()
        return mask

    def chains(self, roots: Tensor, step: int, roots_on_device: Tensor | None = None) -> ChainMask:
        """Return the mask of step ``step`` ≥ 1 of the chains with these roots [K], ascending, in host memory.

        ``roots_on_device`` is a copy of them on the mask's device, if there is one.
        """
        return self._share(ChainMask(self.lengths, self.device, roots, step, cache=self.cache), roots_on_device)

    def blocks(self, roots: Tensor, size: int, roots_on_device: Tensor | None = None) -> SlotMask:
        """Return the mask of blocks of ``size`` slots with these roots [B]; arguments as of :meth:`chains`."""
        return self._share(SlotMask(self.lengths, self.device, roots, size), roots_on_device)

    def _share(self, mask: Rooted, roots_on_device: Tensor | None) -> Rooted:
        """Fill the cached properties of a mask over the same text from this one's."""
        computed = {"starts": self.starts, "_starts": self._starts, "_roots": roots_on_device}
        vars(mask).update({name: value for name, value in computed.items() if value is not None})
        return mask


@dataclass(eq=False)
class RootedMask(PackedMask):
    """Queries that continue the text from roots: each sees its conversation up to its root, and keys of its own root.

    The keys are the M tokens of the sequence, then the queries' own, of one step or of several.

    Attributes:
        roots: [K] places of the roots, ascending, in host memory.
    """

    roots: Tensor

    @property
    @abstractmethod
    def _layout(self) -> tuple[int, int]:
        """Queries per root, and number of steps whose keys follow the text's; each step has a key per query."""

    @cached_property
    def _roots(self) -> Tensor:
        return to_device(self.roots, self.device)

    @property
    def shape(self) -> tuple[int, int]:
        width, steps = self._layout
        return width * len(self.roots), len(self.starts) + steps * width * len(self.roots)

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of queries of each conversation."""
        return self._layout[0] * np.bincount(np.searchsorted(np.cumsum(self.lengths), self.roots.numpy(), "right"))

    @cached_property
    def key_sizes(self) -> list[list[int]]:
        return [list(self.lengths), *[self.counts[self.counts > 0].tolist()] * self._layout[1]]

    def _spans(self) -> list[Span]:
        texts = np.flatnonzero(self.counts)  # the conversations that have queries
        ends = np.cumsum(self.counts[texts]).tolist()
        spans = []
        for number, (text, end) in enumerate(zip(texts.tolist(), ends, strict=True)):
            first = len(self.lengths) + number
            steps = range(first, first + self._layout[1] * len(texts), len(texts))  # its piece of each step's keys
            spans.append(Span(slice(end - int(self.counts[text]), end), [text, *steps]))
        return spans


Rooted = TypeVar("Rooted", bound=RootedMask)


@dataclass(eq=False)
class ChainMask(RootedMask):
    """A chain's next token sees its conversation up to the root, and the chain's own later tokens.

    The keys are the M tokens of the sequence, then K of each of the steps 1 … ``step``.
    """

    step: int

    @property
    def _layout(self) -> tuple[int, int]:
        return 1, self.step

    def mask_mod(self, window: int | None) -> MaskMod:
        starts, roots, step = self._starts, self._roots, self.step

        def mask_mod(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
            tokens, root = len(starts), roots[query]
            in_text = (key <= root) & (key >= starts[root])
            if window is not None:  # the query stands ``step`` positions after its root
                in_text = in_text & (root + step - key < window)
            return torch.where(key < tokens, in_text, (key - tokens) % len(roots) == query)

        return mask_mod

    def key_ranges(self, window: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        roots, tokens = self.roots.numpy(), len(self.starts)
        yield self.starts[roots], roots
        for at in range(tokens, self.shape[1], len(roots)):
            own = at + np.arange(len(roots))
            yield own, own


@dataclass(eq=False)
class SlotMask(RootedMask):
    """A slot of a block sees its conversation before the root, and its block, whose first slot is the root's.

    The keys are the M tokens of the sequence, then the slots: slot k of block b is number b·size + k.
    """

    size: int

    @property
    def _layout(self) -> tuple[int, int]:
        return self.size, 1

    def mask_mod(self, window: int | None) -> MaskMod:
        starts, roots, size = self._starts, self._roots, self.size

        def mask_mod(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
            tokens, root, slot = len(starts), roots[query // size], (key - len(starts)) % size
            in_text, own = (key < root) & (key >= starts[root]), (key - tokens) // size == query // size
            if window is not None:
                in_text = in_text & (root + query % size - key < window)
                own = own & (query % size - slot < window)
            return torch.where(key < tokens, in_text, own)

        return mask_mod

    def key_ranges(self, window: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        roots = self.roots.numpy().repeat(self.size)
        yield self.starts[roots], roots - 1
        first = len(self.starts) + np.arange(0, len(roots), self.size).repeat(self.size)
        yield first, first + self.size - 1
