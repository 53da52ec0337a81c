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

from fsd_core.tensors import to_device, visible_slots
from fsd_infer.device.pool import KVPool
from fsd_infer.device.states import Branches, RecurrentStates

RECURRENT = {"linear_attention", "conv", "mamba"}  # types of layers that keep a state
WITHOUT_KEYS = {*RECURRENT, "moe", "mlp"}  # types of layers without keys and values


def cache_argument(kind: type[nn.Module]) -> str:
    """Return the name under which a model or layer of this class takes its cache.

    It is ``cache`` since transformers 5.24. Earlier versions, and code from the Hub, say ``past_key_values``, or
    ``cache_params`` where layers are recurrent.
    """
    return _argument_of(kind.forward)


@cache
def _argument_of(forward: Hashable) -> str:
    taken = inspect.signature(cast(Any, forward)).parameters
    return next((name for name in ("cache", "cache_params") if name in taken), "past_key_values")


class _SlotLayer(CacheLayerMixin):
    """One layer's view of the cache."""

    is_compileable = False
    is_sliding = False

    keys: Tensor
    values: Tensor

    def __init__(self, pool: SlotCache, index: int) -> None:
        super().__init__()
        # a weak reference: keys and values are freed with the cache's last reference, not by a later garbage collection
        self._pool = weakref.ref(pool)
        self.index = index

    @property
    def pool(self) -> SlotCache:
        pool = self._pool()
        assert pool is not None, "the cache is gone"
        return pool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        place = self.pool.places[self.index]
        self.keys = self.pool._pool("keys", key_states)[place]
        self.values = self.pool._pool("values", value_states)[place]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def _written(self, kept: Tensor, states: Tensor) -> Tensor:
        """Write states [B, heads, M, width] to their slots, and return those of all used slots."""
        pool = self.pool
        if pool.start is not None:
            kept[:, :, pool.start : pool.start + states.shape[2]] = states
        else:
            kept.scatter_(2, pool.slots[:, None, :, None].expand_as(states), states)
        return kept[:, :, : pool.used]

    def update_indexer(self, states: Tensor) -> Tensor:
        """As :meth:`update` for the keys [B, M, width] by which DeepSeek's sparse attention chooses what it reads."""
        states = states[:, None]
        return self._written(self.pool._pool("indexer", states)[self.pool.places[self.index]], states)[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.pool.used, 0

    def get_seq_length(self) -> int:
        return 0  # the engine passes positions

    def get_max_length(self) -> int:
        return self.pool.capacity

    def get_max_cache_shape(self) -> int:
        return self.pool.capacity


class SlotCache(Cache):
    """Keys and values of all layers, [layers, B, heads, slots, head_dim]; layers of one shape share an allocation.

    Layers whose type in the config says that they attend to nothing have none. Recurrent layers have states instead.

    Args:
        config: the (text) config of the model.
        batch: B.
        slots: slots per row, for the longest text plus the largest tree.
        memory: allocations of ``rows`` rows and as many slots each, filled on demand (default: private ones).
        rows: rows of ``memory``, at least ``batch``.

    Attributes:
        prefilled: [B] length of each row's text when it was last read at once, on the device; None: unknown.
        window: slots that a forward attends to where the host does not know the lengths; the texts lie within.
        recurrent: the states of recurrent layers.
        offsets: [B] what a token's rotary position exceeds its place in the text by (M-RoPE, after images), on the
            device; None: places are positions.
    """

    def __init__(self, config: Any, batch: int, slots: int, memory: KVPool | None = None, rows: int = 0) -> None:
        self.config, self.batch, self.capacity = config, batch, slots
        self._memory, self._rows = KVPool() if memory is None else memory, max(rows, batch)
        self.parent: tuple[SlotCache, int] | None = None
        self.num_layers = int(config.num_hidden_layers)
        types = getattr(config, "layer_types", None) or [None] * self.num_layers
        have_keys = (kind not in WITHOUT_KEYS for kind in types)
        self.places = list(accumulate(have_keys, initial=0))  # of each layer in the pools; at the end their number
        self.recurrent = RecurrentStates(batch, self._memory, self._rows)
        self.start: int | None = 0
        self.slots = torch.zeros(batch, 0, dtype=torch.long)
        self.used = 0
        self.positions: Tensor | None = None
        self.prefilled: Tensor | None = None
        self.offsets: Tensor | None = None
        self.text: tuple[Tensor, Tensor] | None = None  # lengths [B] and sees [B, M, E], if a caller says them
        self.window = slots
        self._pools: dict[tuple[str, int, int, torch.dtype], Tensor] = {}
        super().__init__(layers=[_SlotLayer(self, index) for index in range(self.num_layers)])

    def pools(
        self, heads: int, width: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return writable keys and values [layers, B, heads, slots, width] of all layers with this many heads."""
        like = torch.empty(self.batch, heads, 0, width, dtype=dtype, device=device)
        return self._pool("keys", like), self._pool("values", like)

    def _pool(self, kind: str, like: Tensor) -> Tensor:
        """Return the pool [layers, B, heads, slots, head_dim] for states [B, heads, M, head_dim] like ``like``."""
        if self.parent is not None:
            whole, row = self.parent
            return whole._pool(kind, like)[:, row : row + 1]
        _, heads, _, width = like.shape
        key = (kind, heads, width, like.dtype)
        if key not in self._pools:
            if key not in self._memory:
                shape = (self.places[-1], self._rows, heads, self.capacity, width)
                self._memory.zeros(key, shape, like)
            self._pools[key] = self._memory[key][:, : self.batch]
        return self._pools[key]

    def row(self, index: int) -> SlotCache:
        """Return one batch row as a cache that shares this cache's memory."""
        row = SlotCache(self.config, 1, self.capacity)
        row.parent = self, index
        row.recurrent = self.recurrent.row(index)
        row.prefilled = None if self.prefilled is None else self.prefilled[index : index + 1]
        row.offsets = None if self.offsets is None else self.offsets[index : index + 1]
        return row

    def rotary(self, positions: Tensor) -> Tensor:
        """Return the rotary positions of tokens at these places in the text, [B, M]."""
        return positions if self.offsets is None else positions + self.offsets[:, None]

    def saved(self, row: int, count: int) -> dict[Any, Tensor]:
        """Return copies of a row's first ``count`` keys and values, and of its states, for :meth:`restore`."""
        keys = {key: pool[:, row, :, :count].clone() for key, pool in self._pools.items()}
        return {**keys, **self.recurrent.saved(row)}

    def restore(self, states: dict[Any, Tensor]) -> None:
        """Write the result of :meth:`saved` to the first slots of this cache's only row."""
        self.recurrent.restore({key: state for key, state in states.items() if key[0] == "recurrent"})
        for (kind, heads, width, dtype), state in ((key, x) for key, x in states.items() if key[0] != "recurrent"):
            like = torch.empty(1, heads, 0, width, dtype=dtype, device=state.device)
            self._pool(kind, like)[:, 0, :, : state.shape[2]] = state

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

    def after_text(self, lengths: Tensor, sees: Tensor, depth: int | None = None) -> tuple[Tensor, Tensor]:
        """Set the write slots of new tokens that follow the texts, such as the nodes of a tree.

        Args:
            lengths: [B] slots of each row's text.
            sees: [B, M, E] bool; whether token i may attend to the e-th slot after the text. The new tokens are written
                to the last M of these E slots.
            depth: at least the depth of the deepest token, as far as the host knows.

        Returns:
            The slots [B, M], and [B, M, S] bool, which of all slots each new token may attend to. On a CPU S is as
            small as possible, elsewhere it is :attr:`window`, so that nothing is read on the host.
        """
        new, extra = sees.shape[1:]
        start, used = None, self.window
        if lengths.device.type == "cpu":
            used = int(lengths.max()) + extra
            start = used - new if len(lengths) == 1 else None
        if start is None:
            slots = lengths[:, None] + torch.arange(extra - new, extra, device=lengths.device)
        else:
            slots = torch.arange(start, used)[None]
        self.set_write_slots(slots, start, used)
        self.text = lengths, sees
        self.recurrent.branches = Branches(sees, new - 1 if depth is None else depth)
        return slots, visible_slots(lengths, sees, used)

    def in_text(self, starts: Tensor, count: int, used: int | None = None) -> tuple[Tensor, Tensor]:
        """Set the write slots of ``count`` tokens of each text, from slots ``starts`` [B], which attend causally.

        Returns:
            The slots [B, count] and the mask [B, count, S], as of :meth:`after_text`. ``used`` is S if the caller knows
            it.
        """
        slots, start = starts[:, None] + torch.arange(count, device=starts.device), None
        if starts.device.type == "cpu":
            used = int(starts.max()) + count
            start = used - count if len(starts) == 1 else None
        used = self.window if used is None else used
        self.set_write_slots(slots, start, used)
        if starts.device.type != "cpu":  # whose stack reads the mask alone
            causal = torch.ones(count, count, dtype=torch.bool, device=starts.device).tril()
            self.text = starts, causal.expand(len(starts), -1, -1)
        return slots, torch.arange(used, device=starts.device) <= slots[..., None]

    def commit(self, lengths: Tensor, path: Tensor, accepted: Tensor) -> None:
        """Move the keys and values of accepted nodes to the end of the text, and apply them to the states.

        Args:
            lengths: [B] slots of each row's text, which the nodes follow.
            path: [B, D+1] nodes, the root first.
            accepted: [B] number of nodes after the root; the others stay where they are.
        """
        if self.recurrent.kept:
            self.recurrent.commit(path, accepted)
        steps = torch.arange(path.shape[1], device=path.device)
        nodes = path.where(steps <= accepted[:, None], steps)
        if path.device.type == "cpu" and bool((nodes == steps).all()):  # in place already
            return
        self.move(lengths[:, None] + nodes, lengths[:, None] + steps)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy keys and values from slots [B, K] to slots [B, K] of the same row, in all layers."""
        if self.batch == 1:
            for pool in self._pools.values():
                pool.index_copy_(3, destinations[0], pool.index_select(3, sources[0]))
            return
        rows = torch.arange(self.batch, device=sources.device)[:, None]
        for pool in self._pools.values():
            # advanced indices around a slice: [B, K, layers, heads, width]
            pool[:, rows, :, destinations] = pool[:, rows, :, sources]

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows [B'] (ascending, on the CPU) and move them up in place."""
        self.batch = rows.shape[0]
        self.recurrent.select(rows)
        for name in ("prefilled", "offsets"):
            if (of_rows := getattr(self, name)) is not None:
                setattr(self, name, of_rows.index_select(0, to_device(rows, of_rows.device)))
        for key, pool in self._pools.items():
            for place, row in enumerate(rows.tolist()):
                if place != row:
                    pool[:, place] = pool[:, row]
            self._pools[key] = pool[:, : self.batch]
        for layer in self.layers:
            if isinstance(layer, _SlotLayer) and layer.is_initialized:
                layer.lazy_initialization(layer.keys[: self.batch], layer.values[: self.batch])

    def detached(self) -> SlotCache:
        """Return a cache of the same rows in the same memory, which :meth:`select` changes alone."""
        made = SlotCache(self.config, self.batch, self.capacity, self._memory, self._rows)
        made._pools, made.recurrent.states = dict(self._pools), dict(self.recurrent.states)
        made.prefilled, made.offsets = self.prefilled, self.offsets
        return made

    def reallocated(self, into: Callable[[], SlotCache]) -> SlotCache:
        """Return an empty cache of as many rows, which may lie in the same memory, with all that this one holds."""
        pools = {key: pool.clone() for key, pool in self._pools.items()}
        states = {name: state.clone() for name, state in self.recurrent.states.items()}
        made = into()
        for (kind, heads, width, dtype), pool in pools.items():
            like = torch.empty(self.batch, heads, 0, width, dtype=dtype, device=pool.device)
            made._pool(kind, like).copy_(pool)
        for name, state in states.items():
            made.recurrent.place(name, state).copy_(state)
        made.prefilled, made.offsets = self.prefilled, self.offsets
        return made

    @property
    def nbytes(self) -> int:
        """Allocated bytes, 0 before the first forward."""
        return sum(pool.nbytes for pool in self._memory.values())

    @property
    def slot_bytes(self) -> int:
        """Allocated bytes that grow with the slots: all but the states."""
        return self.nbytes - self.recurrent.nbytes
