"""The order of training batches: similar lengths, within a token budget, resumable within an epoch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from fsd_core.errors import CheckpointError, DataError

MOST_PADDING = 0.1  # share of a batch's positions


def stable_seed(*parts: object) -> int:
    """Return a 31-bit seed that depends only on the parts, not on the process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class TokenBudgetSampler(Sampler[list[int]]):
    """Sampler of batches with rows of similar length, within a budget of padded tokens.

    Each epoch deals the rows to new windows with equal shares of every length. Within a window, rows sorted by length
    fill batches up to B·M <= ``max_tokens``; the batches are then shuffled. If padding exceeds a tenth, as with few
    rows and a large budget, the budget is lowered. The order depends only on seed and epoch. All epochs have the same
    number of batches, because Trainer counts only the first. Each of n replicas gets every n-th batch, and the first
    batches repeat at the end to give all replicas the same number.

    `start_at` begins the next pass within an epoch.

    Args:
        lengths: tokens per row.
        max_tokens: padded tokens per batch; a longer row forms its own batch.
        seed: seed of the order.
        shuffle: False keeps the same order in every epoch, independent of the seed, with long and short batches mixed
            so that the first ones (``limit_val_batches``) represent all.
        window: most rows sorted together.
        rank, replicas: which replica this is, of how many.
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
            raise DataError(f"max_tokens is {max_tokens}. Give at least 1.")
        self.lengths, self.max_tokens, self.seed = list(lengths), max_tokens, seed
        self.shuffle, self.window, self.rank, self.replicas = shuffle, window, rank, replicas
        self.epoch = 0
        self._skip = 0
        self._batches: tuple[int, list[list[int]]] | None = None

    @property
    def sampler(self) -> TokenBudgetSampler:
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
        batches = self._all()
        size = math.ceil(len(batches) / self.replicas)
        return [batches[i % len(batches)] for i in range(self.rank, size * self.replicas, self.replicas)]

    @property
    def own(self) -> int:
        """Number of this replica's batches before the repeated ones."""
        return len(self._all()[self.rank :: self.replicas])

    def _all(self) -> list[list[int]]:
        """Return the batches of all replicas in the current epoch."""
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
        # their number does not depend on the draw.
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
        """Divide groups into batches, alike for all windows; ``widths``: longest row per group, ascending."""
        budget, tokens = float(self.max_tokens), sum(self.lengths)
        while True:
            parts: list[list[int]] = []
            for number, width in enumerate(widths):
                # the last row is the longest and sets the padded width
                if not parts or (len(parts[-1]) + 1) * width > budget:
                    parts.append([])
                parts[-1].append(number)
            padded = windows * sum(len(part) * widths[part[-1]] for part in parts)
            if len(parts) == len(widths) or 1 - tokens / padded <= MOST_PADDING:
                return parts
            budget *= 0.8

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


class ResumableLoader(DataLoader[Any]):
    """A DataLoader whose position Trainer stores in checkpoints, to resume with the next batch.

    In validation, batches that the sampler repeats have an empty loss mask, so that no row counts twice.

    Args:
        dataset: dataset indexed by the sampler's batches; in validation these collate to batches with a ``loss_mask``.
        sampler: the order.
        options: options of DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], sampler: TokenBudgetSampler, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self.order = sampler
        self._given = 0  # batches of the epoch so far, those before a resume included

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # a generator, since Trainer asks for the iterator before it sets the epoch
        self._given = self.order.skip
        for batch in super().__iter__():
            self._given += 1
            if not self.order.shuffle and self._given > self.order.own:
                batch["loss_mask"].zero_()
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.order.epoch, "batch": self._given, "replicas": self.order.replicas}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume where n replicas stopped: their k-th batches are the first n·k of the order.

        Raises CheckpointError if the current replicas cannot share these batches evenly.
        """
        given, replicas = state["batch"] * state["replicas"], self.order.replicas
        if given % replicas:
            raise CheckpointError(
                f"{state['replicas']} devices wrote the checkpoint after {given} batches of its epoch. {replicas} "
                "devices cannot share these evenly. Use a checkpoint of another step, or another number of devices."
            )
        self.order.start_at(state["epoch"], given // replicas)
        self._given = self.order.skip
