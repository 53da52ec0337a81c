"""The data module: batches of answers in an order that checkpoints record."""

from __future__ import annotations

import logging
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from fsd_core.errors import DataError
from fsd_core.registry import check_listed
from fsd_core.text.control import set_control_tokens
from fsd_core.text.row_check import LISTING, RowCheck
from fsd_infer.targets.loading import load_tokenizer
from fsd_infer.targets.target import Target
from fsd_train import MAX_LENGTH
from fsd_train.checkpoints import check_order
from fsd_train.data.answers import AnswersDataset, Item, conclude, read_answers
from fsd_train.data.features import FeatureStore
from fsd_train.data.images import ImageReader
from fsd_train.data.packs import collate, keep_on_host
from fsd_train.data.recording import FeatureWriter
from fsd_train.data.sampler import PackingSampler, ResumableLoader
from fsd_train.types import HeldOut, Length, NonNegativeInt, PositiveInt, Seed

log = logging.getLogger(__name__)

MAX_WORKERS = 64  # on any machine


class AnswersDataModule(LightningDataModule):
    """Batches of answers for training and validation.

    The sampler divides batches among replicas, so Trainer needs ``use_distributed_sampler: false``, which `fsd-train`
    sets. Checkpoints hold the position within an epoch. It is valid for the same rows, ``batch_tokens``, ``seed`` and
    number of replicas.

    Args:
        train_files: files of answers, see docs/training.md.
        validation_files: rows for validation (default: a share of the training prompts).
        validation_fraction: share of training prompts to hold out, chosen by the hash of the prompt.
        max_length: most tokens of a sequence; longer ones are cut.
        batch_tokens: tokens of a training batch: a row that conversations fill side by side.
        validation_batch_tokens: the same in validation (default: ``batch_tokens``).
        tokenizer: built-in name, directory or hub id, for rows without token ids.
        allow_control_tokens: names of special tokens in messages become the tokens; by default they are text.
        features: directory of `fsd-train cache-features`; rows without cached features are skipped. None: the target
            runs in every step.
        record_features: directory in which features are kept as a run makes them. The first epoch and the first
            validation run the target, later ones read where all rows of a batch are there, in bf16. For one device;
            excludes ``features``.
        num_workers: processes that collate (default: some with CUDA, none on a CPU).
        pin_memory: use pinned memory for asynchronous copies (default: with CUDA).
        seed: seed of the order of batches.
        strict: stop at the first row that cannot be used. False: such rows are skipped, named and listed in
            skipped-rows.jsonl in the trainer's ``default_root_dir``; more than 5 % of them still stop the run.

    Attributes:
        row_check: account of the rows.
        feature_store: the cached features after ``setup``, or None.
    """

    def __init__(
        self,
        train_files: list[str],
        validation_files: list[str] | None = None,
        validation_fraction: HeldOut = 0.02,
        max_length: Length = MAX_LENGTH,
        batch_tokens: PositiveInt = 4096,
        validation_batch_tokens: PositiveInt | None = None,
        tokenizer: str | None = None,
        allow_control_tokens: bool = False,
        features: str | None = None,
        record_features: str | None = None,
        num_workers: NonNegativeInt | None = None,
        pin_memory: bool | None = None,
        seed: Seed = 0,
        strict: bool = False,
    ) -> None:
        super().__init__()
        if not train_files:
            raise DataError("train_files is empty. Name at least one file of answers.")
        check_listed("train_files", train_files, " of files", DataError)
        check_listed("validation_files", validation_files, " of files", DataError)
        self.train_files, self.validation_files = list(train_files), list(validation_files or [])
        self.validation_fraction, self.max_length = validation_fraction, max_length
        self.batch_tokens, self.validation_batch_tokens = batch_tokens, validation_batch_tokens or batch_tokens
        self.tokenizer_name, self.allow_control_tokens = tokenizer, allow_control_tokens
        self.num_workers, self.pin_memory, self.seed = num_workers, pin_memory, seed
        self.features, self.record_features = features, record_features
        if features is not None and record_features is not None:
            raise DataError("features reads a cache and record_features makes one. Unset one of them.")
        most = max(os.cpu_count() or 1, MAX_WORKERS)
        if num_workers is not None and num_workers > most:
            raise DataError(f"data.num_workers is {num_workers}, a process each: give at most {most}, or leave it out.")
        self.writer: FeatureWriter | None = None
        self._validated = False  # whether features of validation rows may be recorded
        self.row_check = RowCheck(strict)
        self.feature_store: FeatureStore | None = None
        self.train_set: AnswersDataset | None = None
        self.validation_set: AnswersDataset | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the files (idempotent). Raises DataError without rows, or for too many malformed ones."""
        if self.train_set is not None:
            return
        tokenizer = None if self.tokenizer_name is None else load_tokenizer(self.tokenizer_name)
        if tokenizer is not None:
            set_control_tokens(tokenizer, self.allow_control_tokens)
        elif self.tokenizer_name is not None:
            raise DataError(f"data.tokenizer: {self.tokenizer_name} has no tokenizer. Name the target's.")
        reader = None if self.tokenizer_name is None else ImageReader.named(self.tokenizer_name, tokenizer)
        fraction = 0.0 if self.validation_files else self.validation_fraction
        train, validation = read_answers(
            self.train_files, tokenizer, validation_fraction=fraction, max_length=self.max_length,
            check=self.row_check, reader=reader,
        )  # fmt: skip
        if self.validation_files:
            validation, _ = read_answers(
                self.validation_files, tokenizer, max_length=self.max_length, check=self.row_check, reader=reader
            )
            repeated = {*train.keys} & {*validation.keys}
            if repeated:
                log.warning("data.validation_files: %d of their sequences are trained on, too", len(repeated))
        self._conclude(tokenizer)
        self.train_set, self.validation_set = train, validation
        if self.features is not None:
            self.feature_store = FeatureStore(self.features)
            self.train_set = self._cached(self.train_set, self.feature_store)
            self.validation_set = self._cached(validation, self.feature_store) if len(validation) else validation

    def _conclude(self, tokenizer: Any = None) -> None:
        root = getattr(self.trainer, "default_root_dir", None)
        first = getattr(self.trainer, "is_global_zero", True)  # of several processes
        conclude(self.row_check, tokenizer, None if root is None else Path(root) / LISTING, report=first)

    def state_dict(self) -> dict[str, Any]:
        """Return the facts that determine the order of training batches, for checkpoints."""
        assert self.train_set is not None, "setup() has not run"
        self._flush_features()  # a kill must not cost what a checkpoint counts as read
        replicas = 1 if self.trainer is None else self.trainer.world_size
        order = {
            "batch_tokens": int(self.batch_tokens),
            "seed": int(self.seed),
            "replicas": replicas,
            "accumulated": int(getattr(self.trainer, "accumulate_grad_batches", 1)),
            "batches": "packed",
        }
        return {"rows": self.train_set.digest, **order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise CheckpointError if training would resume in another order of batches."""
        if self.trainer is not None and self.trainer.training:
            check_order(self.trainer, self.state_dict(), state_dict)

    def _cached(self, rows: AnswersDataset, store: FeatureStore) -> AnswersDataset:
        """Return the rows with cached features. Raises DataError if there are none."""
        cached = rows.cached(store)
        if not len(cached):
            raise DataError(
                f"{self.features} holds the features of none of the {len(rows)} rows. Run `fsd-train cache-features` "
                f"on these files with --max-length {self.max_length}."
            )
        if len(cached) < len(rows):
            log.warning("%d of %d rows have no cached features and are skipped", len(rows) - len(cached), len(rows))
        return cached

    def check(self, vocab_size: int, positions: int | None) -> None:
        """Leave out rows with token ids outside this vocabulary.

        Raises DataError for too many of them, if a row exceeds this context, or if no answer to train on, or to
        validate, has two tokens.
        """
        self._keep_within(vocab_size)
        for name, rows in (("training", self.train_set), ("validation", self.validation_set)):
            assert rows is not None, "setup() has not run"
            rows.check_lengths(positions)
            used = name == "training" or len(rows) and getattr(self.trainer, "limit_val_batches", 1)
            if used and not any(int(rows.supervised(index)[0]) for index in range(len(rows))):
                raise DataError(
                    f"no {name} row has two tokens of an answer in a row, and a drafter learns the second. Add longer "
                    "answers, or raise data.max_length."
                )

    def _keep_within(self, vocab_size: int) -> None:
        assert self.train_set is not None and self.validation_set is not None, "setup() has not run"
        self.train_set = self.train_set.within(vocab_size, self.row_check)
        self.validation_set = self.validation_set.within(vocab_size, self.row_check)
        self._conclude()

    def begin_recording(self, target: Target) -> None:
        """Keep the features that this target makes from now on, if ``record_features`` says so.

        Raises DataError with several devices, and as :class:`.FeatureWriter`.
        """
        if self.record_features is None or self.trainer is None or not self.trainer.training:
            return
        if self.trainer.world_size > 1:
            raise DataError("record_features is for one device. Run `fsd-train cache-features`, and set data.features.")
        assert self.train_set is not None and self.validation_set is not None, "setup() has not run"
        lengths = {
            key: length
            for rows in (self.train_set, self.validation_set)
            for key, length in zip(rows.keys, rows.lengths)
        }
        self.writer = FeatureWriter(target, self.record_features, lengths)
        self.train_set.recorded = self.validation_set.recorded = self.writer.store

    def _flush_features(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    def _flush_for_validation(self) -> None:
        """Find the features of the validation before; the first one has none to find."""
        if self._validated:
            self._flush_features()
        self._validated = self.writer is not None

    def teardown(self, stage: str) -> None:
        """Write what is recorded."""
        self._flush_features()
        self._stop_recording()

    def on_exception(self, exception: BaseException) -> None:
        self._stop_recording()

    def _stop_recording(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    @property
    def has_images(self) -> bool:
        """Whether any row has images."""
        return any(rows is not None and rows.has_images for rows in (self.train_set, self.validation_set))

    def answer_counts(self, vocab_size: int) -> Tensor:
        """Count each id in the training answers: [V]. Leaves out rows as :meth:`check`."""
        self._keep_within(vocab_size)
        assert self.train_set is not None
        return self.train_set.answer_counts(vocab_size)

    def train_dataloader(self) -> DataLoader[Item]:
        """Return batches of the training rows, in another order each epoch."""
        assert self.train_set is not None, "setup() has not run"
        return self._loader(self.train_set, self.batch_tokens, shuffle=True)

    def val_dataloader(self) -> DataLoader[Item] | list[Any]:
        """Return batches of the held-out rows in a fixed order, or an empty list without any.

        Replicas get equally many batches. Repeated ones have an empty loss mask.
        """
        if not self.validation_set:
            return []
        return self._loader(self.validation_set, self.validation_batch_tokens, shuffle=False)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return keep_on_host(batch)

    def _min_tokens(self, tokens: int) -> int:
        """Return the least tokens of a batch of ``tokens``: all of them where steps are compiled, or planned by shape.

        On a CPU padding would only take time.
        """
        trainer = self.trainer
        if trainer is None or trainer.strategy.root_device.type != "cpu":
            return tokens
        module = getattr(trainer, "lightning_module", None)
        return tokens if getattr(module, "compile_option", None) else 0

    def _loader(self, rows: AnswersDataset, tokens: int, shuffle: bool) -> ResumableLoader:
        trainer, store = self.trainer, self.feature_store
        rank, replicas = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        on_cuda = trainer is not None and trainer.strategy.root_device.type == "cuda"
        workers = self.num_workers or 0
        if trainer is not None and on_cuda and self.num_workers is None:
            cores = (os.cpu_count() or 1) // max(1, trainer.num_devices)
            workers = min(max(1, cores), 2 if store is None else 8)  # features are read from files
        sampler = PackingSampler(rows.lengths, tokens, self.seed, shuffle, rank=rank, replicas=replicas)
        return ResumableLoader(
            rows, sampler, lambda: int(getattr(trainer, "accumulate_grad_batches", 1)),
            lambda: float(getattr(trainer, "num_training_batches", math.inf)),
            self._flush_features if shuffle else self._flush_for_validation,
            collate_fn=partial(collate, size=self._min_tokens(tokens)), num_workers=workers,
            pin_memory=on_cuda if self.pin_memory is None else self.pin_memory,
            persistent_workers=workers > 0 and self.record_features is None,  # or they miss what is recorded
        )  # fmt: skip
