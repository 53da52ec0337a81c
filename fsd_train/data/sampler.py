"""The order of training batches: which rows share a packed sequence, and when; resumable within an epoch."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import signal
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from fsd_core.errors import CheckpointError, DataError
from fsd_core.registry import is_whole

log = logging.getLogger(__name__)

PATIENCE = 60.0  # seconds without a batch until we say so
_LATE = (
    "the data workers have given no batch for %g seconds: see whether the disk of the data answers. Ctrl-C twice ends "
    "the run, and the same command resumes its last checkpoint."
)
FILL = 0.98  # share of real tokens in batches, if best fit reaches it
WINDOW = 2**14  # most rows packed together
DISORDER = (0.5, 0.25, 0.1)  # standard deviations of noise on the logarithm of lengths, the first that fits


def stable_seed(*parts: object) -> int:
    """Return a 31-bit seed that depends only on the parts, not on the process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class PackingSampler(Sampler[list[int]]):
    """Sampler of rows that fit side by side into batches of ``size`` tokens.

    Each epoch deals the rows to new windows with equal shares of every length. Within a window, rows go to the fullest
    batch that has room, longer ones first, with some disorder; the batches are then shuffled. The order depends only on
    seed and epoch. All epochs have the same number of batches, because Trainer counts only the first. Each of n
    replicas gets every n-th batch, and the first batches repeat at the end to give all replicas the same number.

    `start_at` begins the next pass within an epoch.

    Args:
        lengths: tokens per row.
        size: tokens per batch; a longer row forms its own batch.
        seed: seed of the order.
        shuffle: False keeps the same order in every epoch, independent of the seed.
        rank: number of this replica, from 0.
        replicas: number of replicas.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        size: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        replicas: int = 1,
    ) -> None:
        if not is_whole(size, 1):
            raise DataError(f"batch_tokens is {size}. Give a whole number, at least 1.")
        self.lengths, self.size, self.seed = list(lengths), size, seed
        self.shuffle, self.rank, self.replicas = shuffle, rank, replicas
        self.epoch = 0
        self._skip = 0
        self._batches: tuple[int, list[list[int]]] | None = None

    @property
    def sampler(self) -> PackingSampler:
        """The sampler itself, because Trainer looks for `set_epoch` on a batch sampler's inner sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass with ``epoch``."""
        if epoch != self.epoch:
            self.epoch, self._skip = epoch, 0

    def start_at(self, epoch: int, batch: int) -> None:
        """Begin the next pass at batch ``batch`` of ``epoch``, or with the next epoch if it has no more batches."""
        self.epoch, self._skip = epoch, batch
        if batch >= len(self):
            self.epoch, self._skip = epoch + 1, 0

    def batches(self) -> list[list[int]]:
        """Return all batches of this replica in the current epoch, regardless of `start_at`."""
        batches = self._all_batches()
        size = math.ceil(len(batches) / self.replicas)
        return [batches[i % len(batches)] for i in range(self.rank, size * self.replicas, self.replicas)]

    def step_batches(self, batch: int, accumulate: int, limit: float = math.inf) -> list[list[int]]:
        """Return the batches of all replicas in the optimizer step of this replica's batch number ``batch``.

        The last step of an epoch may have fewer batches, also where Trainer ends epochs after ``limit`` batches.
        """
        batches, first = self._all_batches(), batch // accumulate * accumulate
        last = int(min(first + accumulate, len(self), max(limit, batch + 1)))
        return [batches[i % len(batches)] for i in range(first * self.replicas, last * self.replicas)]

    @property
    def own(self) -> int:
        """Number of this replica's batches before the repeated ones."""
        return len(self._all_batches()[self.rank :: self.replicas])

    def _all_batches(self) -> list[list[int]]:
        """Return the batches of all replicas in the current epoch."""
        epoch = self.epoch if self.shuffle else 0
        if self._batches is None or self._batches[0] != epoch:
            self._batches = epoch, self._plan(epoch)
        return self._batches[1]

    def _plan(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(stable_seed(self.seed if self.shuffle else 0, epoch))
        count = len(self.lengths)
        order = torch.randperm(count, generator=generator).tolist()
        rows = sorted(order, key=self.lengths.__getitem__)
        windows = max(math.ceil(count / WINDOW), 1)
        # Each group gives one row to every window. Batches of the groups' longest rows fit all windows, so their number
        # does not depend on the draw.
        groups = [rows[start : start + windows] for start in range(0, count, windows)]
        widths = [min(self.lengths[group[-1]], self.size) for group in groups]
        groups = [[group[i] for i in torch.randperm(len(group), generator=generator).tolist()] for group in groups]
        batches = []
        for window in range(windows):
            for part in pack(widths, self.size, generator):
                # the last group may be smaller
                batches.append([groups[index][window] for index in part if window < len(groups[index])])
        batches = [batch for batch in batches if batch]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    @property
    def skip(self) -> int:
        """Number of batches that the next pass skips at its begin."""
        return self._skip

    def __iter__(self) -> Iterator[list[int]]:
        skip, self._skip = self._skip, 0
        yield from self.batches()[skip:]

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.batches())


def pack(lengths: Sequence[int], size: int, generator: torch.Generator) -> list[list[int]]:
    """Divide rows among batches, none of them empty, whose number depends only on the lengths.

    Best fit by descending length fills batches almost entirely. Its order, and so which rows meet, is disturbed as far
    as the rows still fit :data:`FILL`.

    Args:
        lengths: tokens per row, at most ``size`` each.
        size: tokens per batch.
        generator: generator of the disorder.

    Returns:
        indices into ``lengths`` by batch
    """
    sizes = torch.tensor(lengths, dtype=torch.float64)
    densest = best_fit(lengths, size, sizes.argsort(descending=True, stable=True).tolist())
    count = max(len(densest), int(sum(lengths) / (FILL * size)))
    batches = densest
    for disorder in DISORDER:
        noise = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
        order = (sizes.log() + disorder * noise).argsort(descending=True).tolist()
        packed = best_fit(lengths, size, order)
        if len(packed) <= count:
            batches = packed
            break
    while len(batches) < count:  # at most a few
        fullest = max(range(len(batches)), key=lambda index: len(batches[index]))
        rows = batches[fullest]
        batches[fullest], rest = rows[::2], rows[1::2]
        batches.append(rest)
    return batches


def best_fit(lengths: Sequence[int], size: int, order: Sequence[int]) -> list[list[int]]:
    """Put rows, in this order, into the fullest batch that has room, or into a new one."""
    batches: list[list[int]] = []
    by_free_tokens: list[tuple[int, int]] = []  # tokens that are free, and the batch; ascending
    for row in order:
        index = bisect_left(by_free_tokens, (lengths[row], -1))
        free, batch = by_free_tokens.pop(index) if index < len(by_free_tokens) else (size, len(batches))
        if batch == len(batches):
            batches.append([])
        batches[batch].append(row)
        insort(by_free_tokens, (free - lengths[row], batch))
    return batches


def outlive_signals(worker: int = 0) -> None:
    """Let a data worker end with its parent alone, which finishes a step after Ctrl-C, SIGHUP or a scheduler's SIGTERM.

    They come to all processes of a run. Without workers the step would have no batch.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # as on macOS
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return

    def obey_parent() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=obey_parent, daemon=True).start()


class ResumableLoader(DataLoader[Any]):
    """A DataLoader whose position Trainer stores in checkpoints, to resume with the next batch.

    In training, batches get ``supervised``: the number of supervised rows of each chain step, on average over the
    accumulated batches of all replicas in an optimizer step. A loss that divides its sums by them has the same gradient
    however the rows are divided among batches and replicas.

    In validation, batches that the sampler repeats have an empty loss mask, so that no row counts twice.

    Args:
        dataset: dataset indexed by the sampler's batches, with a method ``supervised``.
        sampler: the order.
        accumulate: returns the number of batches per optimizer step.
        limit: returns the number of batches after which Trainer ends an epoch.
        renew: called at the start of each pass.
        options: options of DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: PackingSampler,
        accumulate: Callable[[], int] = lambda: 1,
        limit: Callable[[], float] = lambda: math.inf,
        renew: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_sampler=sampler, worker_init_fn=outlive_signals, **options)
        self.order, self._accumulate, self._limit, self._renew = sampler, accumulate, limit, renew
        self._batches_given = 0  # batches of the epoch so far, those before a resume included

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # a generator, since Trainer asks for the iterator before it sets the epoch
        self._batches_given = self.order.skip
        self._renew()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # all threads of workers inherit it
        try:
            batches = super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            for batch in self._awaited(batches):
                self._batches_given += 1
                if self.order.shuffle:
                    batch["supervised"] = self._mean_supervised(self._batches_given - 1)
                elif self._batches_given > self.order.own:
                    batch["loss_mask"].zero_()
                yield batch
        except DataError as error:  # torch puts a worker's traceback before the message
            raise type(error)(str(error).rpartition(f"{type(error).__name__}: ")[2].strip()) from error

    def _awaited(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and say so if the workers give none for long: a run that waits looks like one that trains."""
        while self.num_workers:
            late = threading.Timer(PATIENCE, log.warning, (_LATE, PATIENCE))
            late.daemon = True
            late.start()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                late.cancel()
            yield batch
        yield from batches

    def _mean_supervised(self, number: int) -> np.ndarray:
        """Return the number of supervised rows of each chain step, on average over a batch's optimizer step.

        A last step of fewer batches divides by the usual number, too, as Trainer does.
        """
        accumulate = self._accumulate()
        dataset: Any = self.dataset
        rows = [index for batch in self.order.step_batches(number, accumulate, self._limit()) for index in batch]
        counts = np.sum([dataset.supervised(index) for index in rows], axis=0)
        return np.asarray(counts / (accumulate * self.order.replicas))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.order.epoch, "batch": self._batches_given, "replicas": self.order.replicas}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume where n replicas stopped: their k-th batches are the first n·k of the order.

        Raises CheckpointError if the current replicas cannot share these batches evenly.
        """
        batches, replicas = state["batch"] * state["replicas"], self.order.replicas
        if batches % replicas:
            raise CheckpointError(
                f"{state['replicas']} devices wrote the checkpoint after {batches} batches of its epoch. {replicas} "
                "devices cannot share these evenly. Use a checkpoint of another step, or another number of devices."
            )
        self.order.start_at(state["epoch"], batches // replicas)
        self._batches_given = self.order.skip
