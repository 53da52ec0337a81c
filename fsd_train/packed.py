"""Packed rows: conversations side by side in one row, each attending to itself alone, in any transformers model.

A :class:`PackedMask` is one mask with three readings: a function of a query's and a key's place, the spans of queries
and the keys that they may see, and FlexAttention's block mask. :func:`packed_attention` is an attention function of
transformers. With CUDA it runs FlexAttention, elsewhere torch's scaled_dot_product_attention span by span.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from fsd_core.tensors import to_device
from fsd_infer.recurrent.mixers import recurrent_layers

log = logging.getLogger(__name__)

NAME = "fsd_packed"  # of the attention function, in transformers' configs
BLOCK = 128  # queries and keys of a block of FlexAttention
SMALL = 2**18  # queries times keys, up to which a span counts as small
ROUND = 32  # numbers of queries and keys are padded to multiples, where products are compiled for each size
FLEX_HEAD = 16  # least width of an attention head that its kernels take
_VERDICT = "_fsd_reads_packed_rows"  # attribute of a model


class Span(NamedTuple):
    """Consecutive queries, and the pieces of the keys that hold all that any of them sees."""

    queries: slice
    pieces: Sequence[int]


@dataclass(frozen=True)
class PackedMask(ABC):
    """Who sees whom among queries and keys in one row, known in host memory.

    Attributes:
        lengths: tokens of each conversation, in order; together they fill the row.
        device: device of the row's tensors.
    """

    lengths: tuple[int, ...]
    device: torch.device
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
    def visible(self, query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
        """Return whether queries see keys, by place: bool of the broadcast shape of two integer tensors.

        A ``window`` is the number of positions that a query sees, itself included.
        """

    @cached_property
    @abstractmethod
    def pieces(self) -> list[int]:
        """Sizes of the pieces into which the keys are split."""

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
        ends = np.cumsum(self.pieces).tolist()
        parts = [torch.arange(ends[n] - self.pieces[n], ends[n], device=self.device) for n in span.pieces]
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
            self._kept["blocks", window] = BlockMask.from_kv_blocks(
                to_device(counts, self.device), to_device(order, self.device), BLOCK_SIZE=BLOCK,
                mask_mod=lambda batch, head, query, key: self.visible(query, key, window), seq_lengths=self.shape,
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

    def visible(self, query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
        seen = (key <= query) & (key >= self._begins[query])
        return seen if window is None else seen & (query - key < window)

    @cached_property
    def pieces(self) -> list[int]:
        return list(self.lengths)

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

    def chains(self, roots: Tensor, step: int) -> ChainMask:
        """Return the mask of step ``step`` ≥ 1 of the chains with these roots [K], ascending, in host memory."""
        return ChainMask(self.lengths, self.device, roots, step)


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

    def visible(self, query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
        tokens, chains, root = len(self.begins), len(self.roots), self._roots[query]
        in_text = (key <= root) & (key >= self._begins[root])
        if window is not None:  # the query stands ``step`` positions after its root
            in_text = in_text & (root + self.step - key < window)
        return torch.where(key < tokens, in_text, (key - tokens) % chains == query)

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of chains of each conversation."""
        return np.bincount(np.searchsorted(np.cumsum(self.lengths), self.roots.numpy(), "right"))

    @cached_property
    def pieces(self) -> list[int]:
        return [*self.lengths, *(self.counts[self.counts > 0].tolist() * self.step)]

    @cached_property
    def spans(self) -> list[Span]:
        texts = np.flatnonzero(self.counts)  # the conversations that have chains
        ends = np.cumsum(self.counts[texts]).tolist()
        found = []
        for number, (text, end) in enumerate(zip(texts.tolist(), ends, strict=True)):
            own = range(len(self.lengths) + number, len(self.pieces), len(texts))  # of each step
            found.append(Span(slice(end - int(self.counts[text]), end), [text, *own]))
        return found

    def sees_first(self, window: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        roots, tokens = self.roots.numpy(), len(self.begins)
        yield self.begins[roots], roots
        for at in range(tokens, self.shape[1], len(roots)):
            own = at + np.arange(len(roots))
            yield own, own


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: PackedMask | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within a :class:`PackedMask`; an attention function of transformers under the name :data:`NAME`.

    Args:
        module: the attention module.
        query, key, value: [1, heads, Q or K, D]; keys and values may have fewer heads.
        attention_mask: the mask; a model that makes masks itself gets it as ``packing``.
        dropout: of attention probabilities.
        scaling: of the scores; None: 1/√D.
        sliding_window: positions that a query sees; None: all.
        packing: see ``attention_mask``.
        softcap: soft cap of the scores.
        s_aux: [heads] scores of attention sinks.
        others: of transformers.

    Returns:
        (outputs [1, Q, heads, D], None)
    """
    mask = attention_mask if packing is None else packing
    assert isinstance(mask, PackedMask), "the model did not hand the mask on"
    if query.is_cuda and query.shape[-1] >= FLEX_HEAD:
        return flex_attention_forward(
            module, query, key, value, mask.block_mask(sliding_window), scaling, softcap, s_aux, dropout=dropout
        )[0], None
    outputs, size = [], _size_step(query, key, value)
    # split, since the gradient of a slice is as large as the whole
    keys, values = (each.split(mask.pieces, dim=2) for each in (key, value))
    parts = query.split([span.queries.stop - span.queries.start for span in mask.spans], dim=2)
    for q, span, visible in zip(parts, mask.spans, mask.span_masks(sliding_window), strict=True):
        k, v = (_rounded(_joined([pieces[number] for number in span.pieces]), size) for pieces in (keys, values))
        count, q = q.shape[2], _rounded(q, size)
        if visible is not None:  # added queries see all, which no output reads
            visible = pad(visible, (0, k.shape[2] - visible.shape[1]))
            visible = pad(visible, (0, 0, 0, q.shape[2] - count), value=True)
        if softcap is None and s_aux is None and not _is_small(q, k):
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
            causal = visible is None
            out = scaled_dot_product_attention(q, k, v, visible, dropout, is_causal=causal, scale=scaling)
        else:
            out = _plain_attention(q, k, v, visible, dropout, scaling, softcap, s_aux)
        outputs.append(out[:, :, :count])
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _size_step(*tensors: Tensor) -> int:
    """Return what numbers of queries and keys are multiples of: :data:`ROUND` in half precision on a CPU.

    There, torch compiles a product for each new size, which takes longer than the product itself. Under autocast some
    of the tensors are in fp32, and the products in half precision.
    """
    half = tensors[0].device.type == "cpu" and any(each.dtype != torch.float32 for each in tensors)
    return ROUND if half else 1


def _rounded(values: Tensor, size: int) -> Tensor:
    """Pad [1, heads, Q or K, D] to a multiple of ``size`` queries or keys."""
    return values if size == 1 else pad(values, (0, 0, 0, -values.shape[2] % size))


def _is_small(query: Tensor, key: Tensor) -> bool:
    """Whether plain products are faster: on a CPU torch's function takes twice as long backwards for such spans."""
    return query.device.type == "cpu" and query.requires_grad and query.shape[2] * key.shape[2] <= SMALL


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, dropout: float, scaling: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of a few products, which also has a soft cap and sinks: [1, heads, Q, D]."""
    if visible is None:
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill(~visible, -torch.inf)
    shared = query.shape[1] // key.shape[1]  # query heads of a key's head, one below the other in the products
    bias = bias.repeat(shared, 1).expand(key.shape[1], -1, -1)
    rows = (query * (query.shape[-1] ** -0.5 if scaling is None else scaling)).reshape(*bias.shape[:2], -1)
    if softcap is None:
        scores = torch.baddbmm(bias, rows, key[0].mT)  # [key's heads, shared * Q, K]
    else:
        scores = softcap * torch.tanh(rows @ key[0].mT / softcap) + bias
    if sinks is not None:
        each = sinks.to(scores.dtype).reshape(len(scores), shared, 1, 1).expand(-1, -1, query.shape[2], -1)
        scores = torch.cat([scores, each.reshape(*scores.shape[:2], 1)], dim=-1)
    chances = scores.softmax(-1, dtype=scores.dtype)[..., : key.shape[2]]
    return (torch.dropout(chances, dropout, train=dropout > 0) @ value[0]).reshape(query.shape)


AttentionInterface.register(NAME, packed_attention)


@contextmanager
def attending(model: nn.Module) -> Iterator[None]:
    """Let a model's layers attend by :func:`packed_attention` within the context."""
    found: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, kind in before:
            config._attn_implementation = kind


def read_packed(read: Callable[..., Tensor], model: nn.Module, ids: Tensor, text: TextMask) -> Tensor:
    """Run a model over a packed row: in one forward, or, if its attention takes no packed rows, in padded rows.

    Args:
        read: runs ``model`` over ids [B, M], with more inputs of its forward; returns [B, M, X].
        model: a transformers model.
        ids: [1, M].
        text: the row's mask.

    Returns:
        [1, M, X]
    """
    if reads_packed_rows(read, model):
        with attending(model):
            return read(ids, position_ids=text.positions, packing=text)
    return _read_rows(read, ids, text.lengths)


def _read_rows(read: Callable[..., Tensor], ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Run a model over the conversations of a packed row, right-padded, in batches of no more tokens than the row."""
    texts = ids[0].split(list(lengths))
    order = sorted(range(len(texts)), key=lengths.__getitem__)
    found: dict[int, Tensor] = {}
    while order:
        longest = lengths[order[-1]]
        count = max(1, ids.shape[1] // longest)
        chosen, order = order[-count:], order[:-count]
        outputs = read(pad_sequence([texts[place] for place in chosen], batch_first=True))
        found |= {place: out[: lengths[place]] for place, out in zip(chosen, outputs, strict=True)}
    return torch.cat([found[place] for place in range(len(texts))])[None]


@torch.no_grad()
def reads_packed_rows(read: Callable[..., Tensor], model: nn.Module) -> bool:
    """Return whether a packed row gives a model's outputs of its conversations; found by trial, and said if not."""
    if _VERDICT not in vars(model):
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        text, ids = TextMask((3, 4), device), torch.arange(7, device=device)[None]
        try:
            with attending(model):
                packed = read(ids, position_ids=text.positions, packing=text)
            apart = torch.cat([read(part) for part in ids.split([3, 4], dim=1)], dim=1)
            alike = packed.shape == apart.shape and torch.allclose(packed, apart, rtol=1e-2, atol=1e-2 * _scale(apart))
            alike = alike and not recurrent_layers(model)  # whose states run on from text to text
        except (TypeError, ValueError, AssertionError, RuntimeError, AttributeError, KeyError):
            alike = False
        model.train(was_training)
        vars(model)[_VERDICT] = alike
        if not alike:
            log.warning("%s cannot read packed rows. It reads padded ones, which take longer.", type(model).__name__)
    return bool(vars(model)[_VERDICT])


def _scale(values: Tensor) -> float:
    return float(values.abs().max())
