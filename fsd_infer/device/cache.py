"""A static KV cache with explicit slots: tree nodes are written after the text, then the accepted path is moved up.

Slot = position for every token of the text. A round writes its N tree nodes to the N slots after the text. Committing a
path copies that path's keys and values to their final slots. The next round overwrites all slots after the text.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from functools import cache
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from fsd_core.functional import is_host, slot_masks
from fsd_core.tensors import kept_rows, to_device
from fsd_infer.device.pool import KVPool, RowTensors
from fsd_infer.device.states import STATE, Branches, RecurrentStates

RECURRENT = {"linear_attention", "conv", "mamba"}  # types of layers that keep a state
ATTENDS = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # with a recurrence in the same layer
WITHOUT_KEYS = {*RECURRENT, "moe", "mlp"}  # types of layers without keys and values


def cache_argument(module_class: type[nn.Module]) -> str:
    """Return the name under which a model or layer of this class takes its cache.

    It is ``cache`` since transformers 5.24. Earlier versions, and code from the Hub, say ``past_key_values``, or
    ``cache_params`` where layers are recurrent.
    """
    return _argument_of(module_class.forward)


@cache
def _argument_of(forward: Hashable) -> str:
    parameters = inspect.signature(cast(Any, forward)).parameters
    return next((name for name in ("cache", "cache_params") if name in parameters), "past_key_values")


class _SlotLayer(CacheLayerMixin):
    """One layer's view of the cache."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: SlotCache, index: int) -> None:
        super().__init__()
        # a weak reference: keys and values are freed with the cache's last reference, not by a later garbage collection
        self._cache = weakref.ref(cache)
        self.index = index

    @property
    def cache(self) -> SlotCache:
        cache = self._cache()
        assert cache is not None, "the cache is gone"
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        cache, index = self.cache, self.cache.indices[self.index]
        self.keys = cache.layered("keys", key_states)[index]
        self.values = cache.layered("values", value_states)[index]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def _written(self, stored: Tensor, states: Tensor) -> Tensor:
        """Write states [B, heads, M, width] to their slots, and return those of all used slots."""
        cache = self.cache
        if cache.start is not None:
            stored[:, :, cache.start : cache.start + states.shape[2]] = states
        else:
            stored.scatter_(2, cache.slots[:, None, :, None].expand_as(states), states)
        return stored[:, :, : cache.used]

    def update_indexer(self, states: Tensor) -> Tensor:
        """As :meth:`update` for the keys [B, M, width] by which DeepSeek's sparse attention chooses what it reads."""
        states = states[:, None]
        return self._written(self.cache.layered("indexer", states)[self.cache.indices[self.index]], states)[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.used, 0

    def get_seq_length(self) -> int:
        return 0  # the engine passes positions

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # before transformers 5.24


class SlotCache(Cache):
    """Keys and values of all layers, [layers, B, heads, slots, head_dim]; layers of one shape share an allocation.

    Layers whose type in the config says that they attend to nothing have none. Recurrent layers have states instead.

    Args:
        config: the (text) config of the model.
        batch: B.
        slots: slots per row, for the longest text plus the largest tree.
        pool: allocations of as many rows and slots each, made on demand (default: private ones).

    Attributes:
        prefilled: [B] length of each row's text when it was last read at once, on the device; None: unknown.
        window: slots that a forward attends to where the host does not know the lengths; the texts lie within.
        recurrent: the states of recurrent layers.
        offsets: [B] rotary position less index in the text, of tokens after the images (M-RoPE), on the device; None:
            indices are positions.
        prompt_offsets: [3, B, P] the same difference for each token of a prompt with images, while a draft head reads
            it; else None.
    """

    def __init__(self, config: Any, batch: int, slots: int, pool: KVPool | None = None) -> None:
        self.config, self.capacity = config, slots
        self.tensors = RowTensors(batch, KVPool() if pool is None else pool)
        self.num_layers = int(config.num_hidden_layers)
        types = getattr(config, "layer_types", None) or [None] * self.num_layers
        have_keys = (layer_type not in WITHOUT_KEYS for layer_type in types)
        # index of each layer among those with keys and values; the last entry is their number
        self.indices = list(accumulate(have_keys, initial=0))
        self.recurrent = RecurrentStates(self.tensors)
        self.start: int | None = 0
        self.slots = torch.zeros(batch, 0, dtype=torch.long)
        self.used = 0
        self.positions: Tensor | None = None
        self.prefilled: Tensor | None = None
        self.offsets: Tensor | None = None
        self.prompt_offsets: Tensor | None = None
        # lengths [B] and visible_after [B, M, E], as after_text() was given them
        self.text: tuple[Tensor, Tensor] | None = None
        self.window = slots
        super().__init__(layers=[_SlotLayer(self, index) for index in range(self.num_layers)])

    @property
    def batch(self) -> int:
        """B."""
        return self.tensors.batch

    def keys_and_values(
        self, heads: int, width: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return writable keys and values [layers, B, heads, slots, width] of all layers with this many heads."""
        like = torch.empty(self.batch, heads, 0, width, dtype=dtype, device=device)
        return self.layered("keys", like), self.layered("values", like)

    def layered(self, kind: str, like: Tensor) -> Tensor:
        """Return the tensor [layers, B, heads, slots, head_dim] that holds "keys" or "values" of one shape.

        ``like``: states [B, heads, M, head_dim] of a layer. The tensor is allocated on first use.
        """
        _, heads, _, width = like.shape
        return self.tensors.get((kind, heads, width, like.dtype), like, self.indices[-1], (heads, self.capacity, width))

    def row(self, index: int) -> SlotCache:
        """Return one batch row as a cache that shares this cache's memory."""
        return self._sharing(self.tensors.row(index), slice(index, index + 1))

    def _sharing(self, tensors: RowTensors, rows: slice) -> SlotCache:
        """Return a cache of these rows in the same memory, whose keys, values and states are ``tensors``."""
        result = SlotCache(self.config, tensors.batch, self.capacity)
        result.tensors, result.recurrent = tensors, RecurrentStates(tensors)
        result.prefilled = None if self.prefilled is None else self.prefilled[rows]
        result.offsets = None if self.offsets is None else self.offsets[rows]
        return result

    def rotary(self, positions: Tensor) -> Tensor:
        """Return the rotary positions of tokens at these indices [B, M] of the text: [B, M], or [3, B, M] in a prompt
        with :attr:`prompt_offsets`.
        """
        if (offsets := self.prompt_offsets) is not None:
            return positions + offsets.gather(2, positions.clamp_max(offsets.shape[2] - 1).expand(3, -1, -1))
        return positions if self.offsets is None else positions + self.offsets[:, None]

    def saved(self, row: int, count: int) -> dict[Any, Tensor]:
        """Return copies of a row's first ``count`` keys and values, and of its states, for :meth:`restore`."""
        tensors = self.tensors.held.items()
        return {key: (x[:, row] if key[0] == STATE else x[:, row, :, :count]).clone() for key, x in tensors}

    def restore(self, states: dict[Any, Tensor]) -> None:
        """Write the result of :meth:`saved` to the first slots of this cache's only row."""
        for key, state in states.items():
            first, *rest = state.shape
            if key[0] != STATE:
                rest[1] = self.capacity
            self.tensors.get(key, state, first, rest)[:, 0][tuple(map(slice, state.shape))] = state

    def set_write_slots(self, slots: Tensor, start: int | None, used: int, positions: Tensor | None = None) -> None:
        """Set where the next forward writes.

        Args:
            slots: [B, M] slot of each new token.
            start: the first slot if all rows write the same run of slots (a slice is then faster), else None.
            used: the forward attends to this many slots, from slot 0.
            positions: [B, used] positions of the tokens in those slots; None: equal to the slots.
        """
        self.slots, self.start, self.used, self.positions = slots, start, used, positions
        self.text = self.recurrent.branches = self.recurrent.counts = None

    def after_text(self, lengths: Tensor, visible_after: Tensor, depth: int | None = None) -> tuple[Tensor, Tensor]:
        """Set the write slots of new tokens that follow the texts, such as the nodes of a tree.

        Args:
            lengths: [B] slots of each row's text.
            visible_after: [B, M, E] bool; whether token i may attend to the e-th slot after the text. The new tokens
                are written to the last M of these E slots.
            depth: at least the depth of the deepest token, as far as the host knows.

        Returns:
            The slots [B, M], and [B, M, S] bool, which of all slots each new token may attend to. On a CPU S is as
            small as possible, elsewhere it is :attr:`window`, so that nothing is read on the host.
        """
        new, extra = visible_after.shape[1:]
        slots, used = self._write_after(lengths, extra, new)
        self.text = lengths, visible_after
        self.recurrent.branches = Branches(visible_after, new - 1 if depth is None else depth)
        return slots, visible_slots(lengths, visible_after, used)

    def in_text(self, starts: Tensor, count: int, used: int | None = None) -> tuple[Tensor, Tensor]:
        """Set the write slots of ``count`` tokens of each text, from slots ``starts`` [B], which attend causally.

        Returns:
            The slots [B, count] and the mask [B, count, S], as for :meth:`after_text`. ``used``: S, if the caller
            knows it.
        """
        slots, used = self._write_after(starts, count, count, used)
        if not is_host(starts.device):  # on the host the stack reads only the mask
            causal = torch.ones(count, count, dtype=torch.bool, device=starts.device).tril()
            self.text = starts, causal.expand(len(starts), -1, -1)
        return slots, torch.arange(used, device=starts.device) <= slots[..., None]

    def _write_after(self, lengths: Tensor, extra: int, new: int, used: int | None = None) -> tuple[Tensor, int]:
        """Set the last ``new`` of ``extra`` slots after texts of these lengths [B] as write slots.

        Returns:
            These slots, [B, new], and S: ``used`` or :attr:`window`; but on a CPU as few as possible.
        """
        start = None
        if is_host(lengths.device):
            used = int(lengths.max()) + extra
            start = used - new if len(lengths) == 1 else None
        used = self.window if used is None else used
        if start is None:
            slots = lengths[:, None] + torch.arange(extra - new, extra, device=lengths.device)
        else:
            slots = torch.arange(start, used)[None]
        self.set_write_slots(slots, start, used)
        return slots, used

    def commit(self, lengths: Tensor, path: Tensor, accepted: Tensor) -> None:
        """Move the keys and values of accepted nodes to the end of the text, and apply them to the states.

        Args:
            lengths: [B] slots of each row's text, which the nodes follow.
            path: [B, D+1] nodes, the root first.
            accepted: [B] number of nodes after the root; the others stay where they are.
        """
        if self.recurrent.kept:
            self.recurrent.commit(path, accepted)
        if path.shape[1] == 1:  # only roots, which are in place
            return
        steps = torch.arange(path.shape[1], device=path.device)
        nodes = path.where(steps <= accepted[:, None], steps)
        if is_host(path.device) and bool((nodes == steps).all()):  # in place already
            return
        self.move(lengths[:, None] + nodes, lengths[:, None] + steps)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy keys and values from slots [B, K] to slots [B, K] of the same row, in all layers."""
        if self.batch == 1:
            for layers in self._layered():
                layers.index_copy_(3, destinations[0], layers.index_select(3, sources[0]))
            return
        rows = torch.arange(self.batch, device=sources.device)[:, None]
        for layers in self._layered():
            # advanced indices around a slice: [B, K, layers, heads, width]
            layers[:, rows, :, destinations] = layers[:, rows, :, sources]

    def _layered(self) -> list[Tensor]:
        """All keys and values, [layers, B, heads, slots, width] each."""
        return [tensor for key, tensor in self.tensors.held.items() if key[0] != STATE]

    def keep_rows(self, rows: Tensor) -> None:
        """Keep these batch rows [B'] (ascending, on the CPU) and move them up in place."""
        self.tensors.keep_rows(rows)
        self.prefilled, self.offsets = kept_rows(self.prefilled, rows), kept_rows(self.offsets, rows)
        for layer in self.layers:
            if isinstance(layer, _SlotLayer) and layer.is_initialized:
                layer.lazy_initialization(layer.keys[: self.batch], layer.values[: self.batch])

    def detached(self) -> SlotCache:
        """Return a cache of the same rows in the same memory, to which :meth:`keep_rows` can be applied separately."""
        return self._sharing(self.tensors.detached(), slice(None))

    def reallocated(self, into: Callable[[], SlotCache]) -> SlotCache:
        """Return an empty cache of as many rows, which may lie in the same memory, with all that this one holds."""
        cloned = {key: tensor.clone() for key, tensor in self.tensors.held.items()}
        result = into()
        for key, tensor in cloned.items():
            result.tensors.get(key, tensor, tensor.shape[0], tensor.shape[2:]).copy_(tensor)
        result.prefilled, result.offsets = self.prefilled, self.offsets
        return result

    @property
    def nbytes(self) -> int:
        """Allocated bytes, 0 before the first forward."""
        return sum(tensor.nbytes for tensor in self.tensors.pool.values())

    @property
    def state_bytes(self) -> int:
        """Those of recurrent layers' states, which do not grow with the slots."""
        return sum(tensor.nbytes for key, tensor in self.tensors.pool.items() if key[0] == STATE)


def visible_slots(lengths: Tensor, visible_after: Tensor, used: int | None = None) -> Tensor:
    """Return which cache slots new tokens may attend to: the whole text, and chosen slots after it.

    Args:
        lengths: [B] text length of each row; the text occupies slots 0 to length - 1.
        visible_after: [B, M, E] bool; whether token i may attend to the e-th slot after the text.
        used: S, at least the longest text + E; None: that, for lengths on the CPU.

    Returns:
        [B, M, S] bool on the device of ``visible_after``.
    """
    extra = visible_after.shape[2]
    if is_host(lengths.device):
        used = int(lengths.max()) + extra if used is None else used
        if lengths.shape[0] == 1:  # no offsets between rows
            visible = torch.nn.functional.pad(visible_after, (int(lengths), 0), value=True)
            more = used - visible.shape[-1]
            return torch.nn.functional.pad(visible, (0, more)) if more else visible
    assert used is not None, "lengths on a device tell the host nothing"
    return slot_masks(to_device(lengths, visible_after.device), visible_after, used)
