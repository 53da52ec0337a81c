"""Features that are kept on disk while a run makes them: first epoch and first validation run the target, later read.

A thread writes them, so no step waits for the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from fsd_infer.targets.target import Target
from fsd_train.data.features import (
    SHARD_TOKENS,
    FeatureStore,
    check_disk,
    open_cache,
    save_shard,
    sequence_key,
    token_bytes,
)

_Row = tuple[str, Tensor]


class FeatureWriter:
    """Writes the features of conversations to a cache, shard by shard, in a thread.

    Args:
        target: the target that makes them.
        directory: directory of the cache, which is continued if it exists.
        lengths: tokens of the conversations that may come by their keys, to check the disk.

    Attributes:
        store: read access to what is on disk, as of the last :meth:`flush`.

    Raises:
        DataError: as :func:`.open_cache`, or the disk lacks space.
    """

    def __init__(self, target: Target, directory: str | Path, lengths: Mapping[str, int]) -> None:
        self.directory = Path(directory)
        self.store: FeatureStore = open_cache(self.directory, target)
        missing = sum(length for key, length in lengths.items() if key not in self.store)
        check_disk(self.directory, missing * token_bytes(target))
        self._queued: set[str] = set()
        self._queue: SimpleQueue[list[_Row] | threading.Event | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._write, daemon=True, name="features")
        self._thread.start()

    def add(self, texts: Sequence[Tensor], features: Tensor, digests: Sequence[str] = ()) -> None:
        """Keep the features [1, M, F] of a packed sequence that begins with these conversations.

        ``digests`` are of their images, if any has some. Raises what stopped the thread, for example a full disk.
        """
        if self._failure is not None:
            raise self._failure
        parts = features[0].detach().split([*map(len, texts), features.shape[1] - sum(map(len, texts))])
        keys = map(sequence_key, texts, digests or [""] * len(texts))
        rows = list(zip(keys, parts, strict=False))
        rows = [(key, part) for key, part in rows if key not in self.store and key not in self._queued]
        self._queued |= {key for key, _ in rows}
        if rows:
            self._queue.put([(key, part.to(torch.bfloat16, copy=True)) for key, part in rows])

    def flush(self) -> None:
        """Write what has come so far, and find it on disk. Raises as :meth:`add`."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        if self._failure is not None:
            raise self._failure
        self.store.refresh()

    def close(self) -> None:
        """Write what has come so far, end the thread, and let other runs write to the cache."""
        self._queue.put(None)
        self._thread.join()
        self.store.release()

    def _write(self) -> None:
        """Write shards, in the thread."""
        shard: dict[str, Tensor] = {}
        item: list[_Row] | threading.Event | None = []
        while item is not None:
            item = self._queue.get()
            try:
                if isinstance(item, list) and self._failure is None:
                    shard |= {key: part.cpu() for key, part in item}  # waits for the device, here alone
                if shard and (not isinstance(item, list) or sum(map(len, shard.values())) >= SHARD_TOKENS):
                    save_shard(self.directory, shard)
                    shard = {}
            except Exception as error:  # whatever it is, flush() must not wait forever
                self._failure, shard = error, {}
            if isinstance(item, threading.Event):
                item.set()
