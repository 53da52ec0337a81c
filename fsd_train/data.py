"""Answers to train on: rows of data files as token ids with a mask on what the target said, in batches."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import NotRequired

from fsd_infer.chat.conversations import row_conversation, row_questions
from fsd_infer.chat.encoding import encode_conversation, row_id
from fsd_infer.chat.rows import read_rows
from fsd_infer.errors import DataError
from fsd_train import MAX_LENGTH
from fsd_train.backends import stable_seed
from fsd_train.features import FeatureStore, WithFeatures, sequence_key
from fsd_train.repository import find
from fsd_train.safety import check_order
from fsd_train.sampler import ResumableLoader, TokenBudgetSampler, ValidationLoader

log = logging.getLogger(__name__)


class Item(TypedDict):
    """One sequence: ``input_ids`` and ``loss_mask`` [M]; ``index``: place in the dataset; ``id``: its row's."""

    index: int
    id: str
    input_ids: Tensor
    loss_mask: Tensor


class Batch(TypedDict):
    """Right-padded sequences: tensors [B, M]; ``index`` [B]; ``ids`` the rows' ids."""

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    index: Tensor
    ids: list[str]
    features: NotRequired[Tensor]  # [B, M, F], where they are cached


class AnswersDataset(Dataset[Item]):
    """Sequences in memory, in the order of their files; the index of one never changes while the files do not.

    Args:
        rows: (id of the row, ids, loss mask) per sequence.
        highest: the highest token id in the files, and the row ("file:line") it was found in.
    """

    def __init__(self, rows: Sequence[tuple[str, Sequence[int], Sequence[int]]], highest: tuple[int, str]) -> None:
        self.highest = highest
        self.row_ids = [name for name, _, _ in rows]
        self.lengths = [len(ids) for _, ids, _ in rows]
        self._ids = [torch.tensor(ids, dtype=torch.int32) for _, ids, _ in rows]
        self._masks = [torch.tensor(mask, dtype=torch.bool) for _, _, mask in rows]

    def __len__(self) -> int:
        return len(self.row_ids)

    def __getitem__(self, index: int) -> Item:
        return {
            "index": index,
            "id": self.row_ids[index],
            "input_ids": self._ids[index].long(),
            "loss_mask": self._masks[index].long(),
        }

    def subset(self, indices: Sequence[int]) -> AnswersDataset:
        """The rows with these indices, in this order, as a dataset of its own."""
        chosen = AnswersDataset([], self.highest)
        chosen.row_ids = [self.row_ids[i] for i in indices]
        chosen.lengths = [self.lengths[i] for i in indices]
        chosen._ids = [self._ids[i] for i in indices]
        chosen._masks = [self._masks[i] for i in indices]
        return chosen

    def check_ids(self, vocab_size: int) -> None:
        """Raise DataError, which names a row, if the files hold ids that a target of this vocabulary lacks."""
        check_id(*self.highest, vocab_size)

    def answer_counts(self, vocab_size: int) -> Tensor:
        """[V] how often each id occurs under the loss mask. Raises as :meth:`check_ids`."""
        self.check_ids(vocab_size)
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for ids, mask in zip(self._ids, self._masks, strict=True):
            counts += torch.bincount(ids[mask], minlength=vocab_size)
        return counts

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that identify the rows' ids and masks, in their order."""
        digest = hashlib.sha256()
        for ids, mask in zip(self._ids, self._masks, strict=True):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.numpy().astype("<i4", copy=False).tobytes())
            digest.update(mask.numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def answer_tokens(self) -> int:
        """Tokens under the loss mask."""
        return sum(int(mask.sum()) for mask in self._masks)


def encode_row(row: Mapping[str, Any], tokenizer: Any, where: str = "row") -> list[tuple[list[int], list[int]]]:
    """Token ids and loss mask of one row of answers: one sequence, or several as `encode_conversation` has it.

    Rows with ``prompt_ids`` and ``response_ids`` are taken as they are: these are the target's own tokens. Others are
    conversations (see :func:`.row_conversation`) and encoded with the chat template, as decoding
    does; every assistant turn is an answer.

    Args:
        row: the row.
        tokenizer: needed for rows without ids only; may be None otherwise.
        where: how errors name the row, "file:line".

    Raises:
        DataError: the row has neither form, its ids are no token ids, or the template does not allow it.
    """
    if row.get("response_ids") is not None or row.get("prompt_ids") is not None:
        prompt, response = (_token_ids(row, field, where) for field in ("prompt_ids", "response_ids"))
        return [(prompt + response, [0] * len(prompt) + [1] * len(response))]
    if tokenizer is None:
        raise DataError(f"{where}: no prompt_ids and response_ids, and no tokenizer was given to encode the text.")
    try:
        complete = row.get("finish_reason") in (None, "stop")
        return encode_conversation(tokenizer, row_conversation(row, where), complete)
    except DataError as error:
        raise error if str(error).startswith(where) else DataError(f"{where}: {error}") from error


def _token_ids(row: Mapping[str, Any], field: str, where: str) -> list[int]:
    ids = row.get(field)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise DataError(f"{where}: `{field}` must be a list of token ids (whole numbers from 0), and not empty.")
    return ids


def check_id(token: int, where: str, vocab_size: int) -> None:
    """Raise DataError if a token id, that of the row ``where``, is none of a vocabulary's."""
    if token >= vocab_size:
        raise DataError(
            f"{where}: token id {token} is outside the target's vocabulary of {vocab_size}. "
            "Regenerate the answers with this target."
        )


def _point(prompt: Any) -> float:
    """A prompt's place in [0, 1), by its hash: those below the fraction are held out, equal ones together."""
    return stable_seed("validation", prompt) / 2**31


def read_answers(
    paths: Sequence[str | Path],
    tokenizer: Any = None,
    *,
    max_length: int = MAX_LENGTH,
    validation_fraction: float = 0.0,
    vocab_size: int | None = None,
) -> tuple[AnswersDataset, AnswersDataset]:
    """Reads files of answers.

    Args:
        paths: files or directories, see :func:`fsd_infer.chat.rows.read_rows`; what ships is found from anywhere, see
            :func:`fsd_train.repository.find`.
        tokenizer: for rows without ids.
        max_length: longer sequences are cut to their first tokens, and left out if no answer token remains.
        validation_fraction: share of the prompts that goes to the second dataset, one at least unless it is 0; all
            sequences of a row together.
        vocab_size: the target's; ids beyond it are an error. Without it see :meth:`AnswersDataset.check_ids`.

    Returns:
        (training, validation)

    Raises:
        DataError: a malformed row, with file and line or row number, or no row at all.
    """
    found: list[tuple[float, tuple[str, list[int], list[int]]]] = []  # with its prompt's place between 0 and 1
    read = left_out = 0
    highest = (-1, "")
    for path in paths:
        for row in read_rows(find(path)):
            sequences = encode_row(row.values, tokenizer, row.where)
            highest = max(highest, (max(max(ids) for ids, _ in sequences), row.where))
            if vocab_size is not None:
                check_id(*highest, vocab_size)
            kept = [(ids, mask) for ids, mask in sequences if any(mask[:max_length])]
            read += 1
            if not kept:
                left_out += 1
                continue
            # what was asked, without the answers: by text where there is one, since ids depend on the target
            asked = row_questions(row.values, row.where)
            ids, mask = kept[0]
            first = next((place for place, turn in enumerate(asked, start=1) if turn["role"] == "user"), len(asked))
            # all turns of a conversation stand on one side, in one row or in several
            key: Any = [(turn["role"], turn["content"]) for turn in asked[:first]] or ids[: mask.index(1)]
            name = row.values.get("id")
            if not isinstance(name, str):
                name = row_id(row.file.name, row.number, asked)
            point = _point(key)
            found += [(point, (name, ids[:max_length], mask[:max_length])) for ids, mask in kept]
    named = ", ".join(map(str, paths))
    if not found:
        raise DataError(f"{named}: no row to train on ({read} read, max_length {max_length}).")
    if left_out:
        what = "%s: %d of %d rows have no answer in their first %d tokens and are left out: see data.max_length"
        log.warning(what, named, left_out, read, max_length)
    points = {point for point, _ in found}
    border = validation_fraction
    if border and len(points) > 1:
        border = max(border, math.nextafter(min(points), 1.0))  # one at least is held out
    parts = [[row for point, row in found if (point < border) is held] for held in (False, True)]
    if not parts[0]:
        raise DataError(f"{named}: all {len(found)} rows were held out; lower validation_fraction, or give more rows.")
    return AnswersDataset(parts[0], highest), AnswersDataset(parts[1], highest)


def collate(items: Sequence[Mapping[str, Any]]) -> Batch:
    """Items of a dataset as one right-padded batch."""
    width = max(len(item["input_ids"]) for item in items)
    shape = (len(items), width)
    batch: Batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "loss_mask": torch.zeros(shape, dtype=torch.long),
        "index": torch.tensor([item["index"] for item in items]),
        "ids": [item["id"] for item in items],
    }
    for row, item in enumerate(items):
        length = len(item["input_ids"])
        batch["input_ids"][row, :length] = item["input_ids"]
        batch["attention_mask"][row, :length] = 1
        batch["loss_mask"][row, :length] = item["loss_mask"]
    if "features" in items[0]:
        features = items[0]["features"]
        batch["features"] = torch.zeros(*shape, features.shape[-1], dtype=features.dtype)
        for row, item in enumerate(items):
            batch["features"][row, : len(item["features"])] = item["features"]
    return batch


_HOST = "host_"  # before the names of arrays that stay in host memory when a batch goes to its device


def keep_on_host(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with views of its ids and mask that stay in host memory: a step is planned by them.

    Asking the device for them would wait for all that it still has to do.
    """
    views = {_HOST + name: batch[name].numpy() for name in ("input_ids", "loss_mask")}  # tensors would be moved
    return {**batch, **views}


def on_host(batch: Mapping[str, Any], name: str) -> Tensor:
    """A batch's ``input_ids`` or ``loss_mask`` in host memory. Waits for the device where no view was kept."""
    kept = batch.get(_HOST + name)
    return batch[name].cpu() if kept is None else torch.from_numpy(kept)


class AnswersDataModule(LightningDataModule):
    """Batches of answers for training and validation.

    The sampler shares batches out among replicas itself; set ``use_distributed_sampler: false`` on Trainer, which
    cannot know how to split a batch sampler of this kind (`fsd-train` does so). The place within an epoch is stored in
    checkpoints and resumed from, with the same rows, ``batch_tokens``, ``seed`` and number of replicas only.

    Args:
        train_files: files that `fsd-train regenerate` wrote, or conversations as JSON lines, Parquet or directories of
            the `datasets` library: see docs/training-data.md.
        validation_files: rows to validate on; without them a share of the training prompts is held out.
        validation_fraction: that share, chosen by the hash of the prompt.
        max_length: tokens per sequence at most; longer ones are cut.
        batch_tokens: padded tokens per training batch.
        validation_batch_tokens: the same for validation; as ``batch_tokens`` by default.
        tokenizer: built-in name, directory or hub id; needed only for rows without token ids.
        vocab_size: the target's, to stop reading at the first row that it does not fit. Without it training and
            validation compare the rows with their target once all are read.
        features: directory that `fsd-train cache-features` wrote; rows it does not hold are left out. Without it the
            target runs in every step.
        num_workers: processes that collate; None for some on a CUDA device and none on a CPU.
        pin_memory: copies to the device do not wait; None for where there is a CUDA device.
        seed: of the order of batches.

    Attributes:
        feature_store: the cached features, after ``setup``; None where features are computed during training.
    """

    def __init__(
        self,
        train_files: list[str],
        validation_files: list[str] | None = None,
        validation_fraction: float = 0.02,
        max_length: int = MAX_LENGTH,
        batch_tokens: int = 4096,
        validation_batch_tokens: int | None = None,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        features: str | None = None,
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= validation_fraction < 1:
            raise DataError(
                f"validation_fraction is {validation_fraction}; give a share from 0 up to, not including, 1."
            )
        if max_length < 2:
            raise DataError(f"max_length is {max_length}; a conversation needs at least 2 tokens.")
        self.train_files, self.validation_files = list(train_files), list(validation_files or [])
        self.validation_fraction, self.max_length = validation_fraction, max_length
        self.batch_tokens, self.validation_batch_tokens = batch_tokens, validation_batch_tokens or batch_tokens
        self.tokenizer_name, self.vocab_size = tokenizer, vocab_size
        self.num_workers, self.pin_memory, self.seed = num_workers, pin_memory, seed
        self.features = features
        self.feature_store: FeatureStore | None = None
        self.train_set: AnswersDataset | None = None
        self.validation_set: AnswersDataset | None = None

    def setup(self, stage: str | None = None) -> None:
        """Reads the files, once. Raises DataError on a malformed row."""
        if self.train_set is not None:
            return
        tokenizer = self._tokenizer()
        options: dict[str, Any] = {"max_length": self.max_length, "vocab_size": self.vocab_size}
        fraction = 0.0 if self.validation_files else self.validation_fraction
        self.train_set, held = read_answers(self.train_files, tokenizer, validation_fraction=fraction, **options)
        if self.validation_files:
            held, _ = read_answers(self.validation_files, tokenizer, **options)
        self.validation_set = held
        if self.features is not None:
            self.feature_store = FeatureStore(self.features)
            self.train_set = self._cached(self.train_set, self.feature_store)
            self.validation_set = self._cached(held, self.feature_store) if len(held) else held

    def state_dict(self) -> dict[str, Any]:
        """What the order of training batches follows from. Checkpoints hold it."""
        assert self.train_set is not None, "setup() has not run"
        replicas = 1 if self.trainer is None else self.trainer.world_size
        return {
            "rows": self.train_set.digest, "batch_tokens": self.batch_tokens, "seed": self.seed, "replicas": replicas
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise CheckpointError if training would go on in another order than the checkpoint's."""
        if self.trainer is not None and self.trainer.training:
            check_order(self.trainer, self.state_dict(), state_dict)

    def _cached(self, rows: AnswersDataset, store: FeatureStore) -> AnswersDataset:
        """The rows whose features are in the cache. Raises DataError if there are none."""
        keep = [i for i in range(len(rows)) if sequence_key(rows[i]["input_ids"]) in store]
        if not keep:
            raise DataError(
                f"{self.features} holds the features of none of the {len(rows)} rows: run `fsd-train cache-features` "
                f"on these files with --max-length {self.max_length}."
            )
        if len(keep) < len(rows):
            log.warning("%d of %d rows have no cached features and are left out", len(rows) - len(keep), len(rows))
        return rows.subset(keep)

    def check_ids(self, vocab_size: int) -> None:
        """Raise DataError, which names file and row, if rows hold ids that a target of this vocabulary lacks."""
        for rows in (self.train_set, self.validation_set):
            assert rows is not None, "setup() has not run"
            rows.check_ids(vocab_size)

    def answer_counts(self, vocab_size: int) -> Tensor:
        """[V] how often each id occurs in the training answers (draft vocabularies are chosen by it).

        Raises DataError as :meth:`check_ids`.
        """
        assert self.train_set is not None, "setup() has not run"
        return self.train_set.answer_counts(vocab_size)

    def _tokenizer(self) -> Any:
        if self.tokenizer_name is None:
            return None
        from fsd_infer.targets.loading import load_tokenizer

        return load_tokenizer(self.tokenizer_name)

    def train_dataloader(self) -> DataLoader[Item]:
        """Batches of the training rows, in another order each epoch."""
        assert self.train_set is not None, "setup() has not run"
        sampler = self._make_sampler(self.train_set, self.batch_tokens, shuffle=True)
        return ResumableLoader(self._with_features(self.train_set), sampler, **self._loader_options())

    def val_dataloader(self) -> DataLoader[Item] | list[Any]:
        """Batches of the held-out rows, always in the same order; an empty list if there are none.

        So that all replicas have the same number, some may get an earlier one again, but without its loss mask.
        """
        if not self.validation_set:
            return []
        sampler = self._make_sampler(self.validation_set, self.validation_batch_tokens, shuffle=False)
        return ValidationLoader(self._with_features(self.validation_set), sampler, **self._loader_options())

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return keep_on_host(batch)

    def _make_sampler(self, dataset: AnswersDataset, tokens: int, shuffle: bool) -> TokenBudgetSampler:
        trainer = self.trainer
        rank, replicas = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        return TokenBudgetSampler(dataset.lengths, tokens, self.seed, shuffle, rank=rank, replicas=replicas)

    def _with_features(self, rows: AnswersDataset) -> Dataset[Any]:
        return rows if self.feature_store is None else WithFeatures(rows, self.feature_store)

    def _loader_options(self) -> dict[str, Any]:
        trainer = self.trainer
        on_cuda = trainer is not None and trainer.strategy.root_device.type == "cuda"
        workers = self.num_workers
        if workers is None:
            workers = 0
            if trainer is not None and on_cuda:
                cores = max(1, (os.cpu_count() or 1) // max(1, trainer.num_devices))
                workers = min(cores, 2 if self.feature_store is None else 8)  # features are read from files
        return {
            "collate_fn": collate,
            "num_workers": workers,
            "pin_memory": on_cuda if self.pin_memory is None else self.pin_memory,
            "persistent_workers": workers > 0,
        }
