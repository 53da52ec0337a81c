"""The order of training batches: like lengths together, within a budget of tokens, resumable inside an epoch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from fsd_infer.errors import CheckpointError, DataError

MOST_PADDING = 0.1  # share of a batch's positions


def stable_seed(*parts: object) -> int:
    """A 31-bit seed that depends on the parts alone, not on the process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of conversations of like length whose padded size stays within a budget of tokens.

    Each epoch deals the rows to new windows, each of which gets its share of every length, fills batches up to
    B·M <= ``max_tokens`` with a window's rows in the order of length, and shuffles the batches. Where that would leave
    more padding than a tenth, as with few rows and a large budget, the budget is lowered until it fits. The
    order follows from seed and epoch alone, and all epochs have the same number of batches: Trainer counts those of the
    first only. With several replicas each gets every n-th batch; the first batches are repeated at the end where
    needed, so that all replicas have the same number.

    `start_at` makes the next pass begin inside an epoch.

    Args:
        lengths: tokens per row.
        max_tokens: padded tokens per batch; a single longer row makes a batch of its own.
        seed: of the order.
        shuffle: False keeps one order in every epoch, whatever the seed: long and short batches mixed, so that the
            first ones (``limit_val_batches``) speak for all.
        window: rows that are sorted together, at most.
        rank, replicas: which share of the batches to give, of how many.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        window: int = 2048,
        rank: int = 0,
        replicas: int = 1,
    ) -> None:
        if max_tokens < 1:
            raise DataError(f"max_tokens is {max_tokens}; a batch needs at least one token.")
        self.lengths, self.max_tokens, self.seed = list(lengths), max_tokens, seed
        self.shuffle, self.window, self.rank, self.replicas = shuffle, window, rank, replicas
        self.epoch = 0
        self._skip = 0
        self._batches: tuple[int, list[list[int]]] | None = None

    @property
    def sampler(self) -> TokenBudgetSampler:
        """Itself: Trainer looks for `set_epoch` on a batch sampler's inner sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``."""
        if epoch != self.epoch:
            self.epoch, self._skip = epoch, 0

    def start_at(self, epoch: int, batch: int) -> None:
        """The next pass is that of ``epoch`` without its first ``batch`` batches, or the one after if none is left."""
        self.epoch, self._skip = epoch, batch
        if batch >= len(self):
            self.epoch, self._skip = epoch + 1, 0

    def batches(self) -> list[list[int]]:
        """All batches of this replica in the current epoch, whatever `start_at` says."""
        batches = self._all()
        size = math.ceil(len(batches) / self.replicas)
        return [batches[i % len(batches)] for i in range(self.rank, size * self.replicas, self.replicas)]

    @property
    def own(self) -> int:
        """How many of this replica's batches no other one has before it; those after them are repeats."""
        return len(self._all()[self.rank :: self.replicas])

    def _all(self) -> list[list[int]]:
        """The batches of all replicas in the current epoch."""
        epoch = self.epoch if self.shuffle else 0
        if self._batches is None or self._batches[0] != epoch:
            self._batches = epoch, self._plan(epoch)
        return self._batches[1]

    def _plan(self, epoch: int) -> list[list[int]]:
        random = torch.Generator().manual_seed(stable_seed(self.seed if self.shuffle else 0, epoch))
        count = len(self.lengths)
        order = torch.randperm(count, generator=random).tolist() if self.shuffle else list(range(count))
        rows = sorted(order, key=self.lengths.__getitem__)
        windows = max(math.ceil(count / self.window), 1) if self.shuffle else 1
        # Each group gives one row to every window. Batches planned for the groups' longest rows fit all windows, so
        # their number is the same whoever gets which row.
        groups = [rows[start : start + windows] for start in range(0, count, windows)]
        parts = self._parts([self.lengths[group[-1]] for group in groups], windows)
        groups = [[group[i] for i in torch.randperm(len(group), generator=random).tolist()] for group in groups]
        batches = [
            [groups[number][window] for number in part if window < len(groups[number])]  # the last group may be smaller
            for window in range(windows)
            for part in parts
        ]
        batches = [batch for batch in batches if batch]
        return [batches[i] for i in torch.randperm(len(batches), generator=random).tolist()]

    def _parts(self, widths: Sequence[int], windows: int) -> list[list[int]]:
        """Which groups' rows make a batch, in each of the windows alike. ``widths``: longest row per group, rising."""
        budget, tokens = float(self.max_tokens), sum(self.lengths)
        while True:
            parts: list[list[int]] = []
            for number, width in enumerate(widths):
                # in rising order the newest row is the longest, so it sets the padded width
                if not parts or (len(parts[-1]) + 1) * width > budget:
                    parts.append([])
                parts[-1].append(number)
            padded = windows * sum(len(part) * widths[part[-1]] for part in parts)
            if len(parts) == len(widths) or 1 - tokens / padded <= MOST_PADDING:
                return parts
            budget *= 0.8

    @property
    def skip(self) -> int:
        """Batches that the next pass leaves out at its beginning."""
        return self._skip

    def __iter__(self) -> Iterator[list[int]]:
        skip, self._skip = self._skip, 0
        yield from self.batches()[skip:]

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.batches())


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that knows how far it is: Trainer stores its state in checkpoints and resumes with the next batch.

    Args:
        dataset: indexed by the sampler's batches.
        sampler: the order.
        options: as for DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], sampler: TokenBudgetSampler, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self.order = sampler
        self._given = 0  # batches of the epoch that were handed out, those before a resumption included

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # a generator, since Trainer asks for the iterator before it sets the epoch
        self._given = self.order.skip
        for batch in super().__iter__():
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.order.epoch, "batch": self._given, "replicas": self.order.replicas}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where n replicas stopped: their k-th batches are the first n·k of the order.

        Raises CheckpointError if this number of replicas cannot have had as many batches each.
        """
        given, replicas = state["batch"] * state["replicas"], self.order.replicas
        if given % replicas:
            raise CheckpointError(
                f"the checkpoint was written by {state['replicas']} devices after {given} batches of its epoch, which "
                f"{replicas} cannot share evenly: use a checkpoint of another step, or another number of devices."
            )
        self.order.start_at(state["epoch"], given // replicas)
        self._given = self.order.skip


class ValidationLoader(DataLoader[Any]):
    """A DataLoader whose repeated batches supervise nothing: replicas keep in step, and no row counts twice.

    Args:
        dataset: indexed by the sampler's batches; it collates to batches with a ``loss_mask``.
        sampler: the order.
        options: as for DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], sampler: TokenBudgetSampler, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self.order = sampler

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for number, batch in enumerate(super().__iter__()):
            if number >= self.order.own:
                batch["loss_mask"].zero_()
            yield batch
