"""Training answers: rows of data files as token ids with a loss mask, and batches of them."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import NotRequired

from fsd_core.errors import DataError
from fsd_core.registry import check_listed, is_whole
from fsd_core.text.conversations import WEIGHT, row_questions
from fsd_core.text.encoding import row_id
from fsd_core.text.row_check import RowCheck
from fsd_core.text.rows import Example, read_rows
from fsd_core.text.templates import fields_of
from fsd_infer.targets.image_inputs import ImageInput
from fsd_train import MAX_LENGTH
from fsd_train.data.features import FeatureStore, sequence_key
from fsd_train.data.images import ImageReader, SequenceImages
from fsd_train.data.row_encoding import Sequenced, check_id, encode_row, encode_row_with_images
from fsd_train.data.sampler import stable_seed
from fsd_train.repository import find

log = logging.getLogger(__name__)

MAX_STEPS = 7  # of a chain in training, see fsd_train.types.ChainSteps


class _Sequence(NamedTuple):
    """A sequence of a row, on its way into a dataset.

    Attributes:
        split_hash: number from 0 to 1 by the hash of the prompt; those below the validation fraction are held out.
        row_id: id of the row.
        ids, mask: token ids and loss mask [M].
        images: its images, or None.
        max_id: the highest token id of the row, and the row's place ("file:line").
    """

    split_hash: float
    row_id: str
    ids: list[int]
    mask: list[int]
    images: SequenceImages | None
    max_id: tuple[int, str]


class Item(TypedDict):
    """One sequence: ``input_ids`` and ``loss_mask`` [M], its ``index`` in the dataset and the ``id`` of its row."""

    index: int
    id: str
    input_ids: Tensor
    loss_mask: Tensor
    features: NotRequired[Tensor]  # [M, F], if cached
    images: NotRequired[dict[str, Tensor]]  # other inputs of the target; with features, those that place tokens
    digest: NotRequired[str]  # of the images


class AnswersDataset(Dataset[Item]):
    """Sequences in memory, in the order of their files.

    Args:
        rows: (id of the row, ids, loss mask) per sequence.
        max_id: the highest token id in the files and its row ("file:line").
        store: cached features of all rows, or None.
        max_ids: the highest token id of each sequence's row and its place ("file:line"), for :meth:`within`.
        images: the images of each sequence, or None; empty: there are none.
        reader: reader of the images.

    Attributes:
        texts: the token ids of all sequences.
    """

    def __init__(
        self,
        rows: Sequence[tuple[str, Sequence[int] | Tensor, Sequence[int] | Tensor]],
        max_id: tuple[int, str],
        store: FeatureStore | None = None,
        max_ids: Sequence[tuple[int, str]] = (),
        images: Sequence[SequenceImages | None] = (),
        reader: ImageReader | None = None,
    ) -> None:
        self.max_id, self.store, self.max_ids = max_id, store, list(max_ids)
        self.images, self.reader = list(images) if any(images) else [None] * len(rows), reader
        self.row_ids = [name for name, _, _ in rows]
        self.lengths = [len(ids) for _, ids, _ in rows]
        self.texts = [torch.as_tensor(ids, dtype=torch.int32) for _, ids, _ in rows]
        self._masks = [torch.as_tensor(mask, dtype=torch.bool) for _, _, mask in rows]
        self._supervised: dict[int, Tensor] = {}
        self.recorded: FeatureStore | None = None  # features of some rows, see fsd_train.data.recording

    @property
    def has_images(self) -> bool:
        return any(self.images)

    @cached_property
    def keys(self) -> list[str]:
        """The key of each sequence in a cache of features."""
        return [
            sequence_key(ids, "" if images is None else images.digest)
            for ids, images in zip(self.texts, self.images, strict=True)
        ]

    def image_inputs(self, index: int) -> dict[str, Tensor]:
        """Return the target's inputs of a sequence's images; none without images. Raises DataError for a lost image."""
        images = self.images[index]
        return {} if images is None or self.reader is None else self.reader.inputs(self.texts[index], images)

    def prompt_images(self, index: int, count: int) -> ImageInput | None:
        """Return the images among the first ``count`` tokens of a sequence, for decoding; None without any."""
        images, ids = self.images[index], self.texts[index].tolist()[:count]
        return None if images is None or self.reader is None else self.reader.image_input(ids, images)

    def __len__(self) -> int:
        return len(self.row_ids)

    def __getitem__(self, index: int) -> Item:
        ids, mask = self.texts[index].long(), self._masks[index].long()
        item: Item = {"index": index, "id": self.row_ids[index], "input_ids": ids, "loss_mask": mask}
        key, images = self.keys[index], self.images[index]
        if self.store is not None:
            item["features"] = self.store.get(key)
        elif self.recorded is not None and key in self.recorded:
            item["features"] = self.recorded.get(key)
        if images is not None:
            item["digest"] = images.digest
            # a batch may lack the features of other sequences, and then runs the target
            cached = self.store is not None
            item["images"] = images.position_inputs(ids.tolist()) if cached else self.image_inputs(index)
        return item

    def supervised(self, index: int) -> Tensor:
        """Count a sequence's supervised rows by chain step: [:data:`MAX_STEPS`].

        A row of step s needs s + 2 answer tokens in a row, none of them the sequence's first token
        (:mod:`fsd_train.models.unroll`).
        """
        if index not in self._supervised:
            run = answer = self._masks[index][1:]
            counts = []
            for step in range(MAX_STEPS):
                run = run[:-1] & answer[step + 1 :]
                counts.append(run.sum())
            self._supervised[index] = torch.stack(counts)
        return self._supervised[index]

    def prompt_length(self, index: int) -> int:
        """Return the number of tokens before a sequence's first answer."""
        return int(self._masks[index].int().argmax())

    def answer_share(self, index: int) -> float:
        """Return the share of a sequence's tokens under the loss mask."""
        return float(self._masks[index].float().mean())

    def cached(self, store: FeatureStore) -> AnswersDataset:
        """Return a dataset of the rows whose features are cached, with their features."""
        return self._subset([index for index, key in enumerate(self.keys) if key in store], store)

    def within(self, vocab_size: int, check: RowCheck) -> AnswersDataset:
        """Return a dataset of the rows whose token ids are all in this vocabulary; ``check`` records the others."""
        if self.max_id[0] < vocab_size:
            return self
        bad = {where: token for token, where in self.max_ids if token >= vocab_size}  # a row may be several sequences
        for where, token in bad.items():
            with check.using(where):
                check_id(token, where, vocab_size)
        return self._subset([index for index, (_, where) in enumerate(self.max_ids) if where not in bad], self.store)

    def _subset(self, indices: Sequence[int], store: FeatureStore | None) -> AnswersDataset:
        max_ids = [self.max_ids[index] for index in indices] if self.max_ids else []
        rows = [(self.row_ids[index], self.texts[index], self._masks[index]) for index in indices]
        images = [self.images[index] for index in indices]
        return AnswersDataset(rows, max(max_ids, default=self.max_id), store, max_ids, images, self.reader)

    def check_lengths(self, positions: int | None) -> None:
        """Raise DataError if a sequence exceeds a model's context of this many positions; None: any length fits."""
        longest = max(self.lengths, default=0)
        if positions is not None and longest > positions:
            raise DataError(
                f"a row has {longest} tokens, but the model has a context of {positions}. Set data.max_length "
                f"(--max-length) to {positions} or less."
            )

    def answer_counts(self, vocab_size: int) -> Tensor:
        """Count each id under the loss mask: [V]. Raises DataError with a row for an id outside this vocabulary."""
        check_id(*self.max_id, vocab_size)
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for ids, mask in zip(self.texts, self._masks, strict=True):
            counts += torch.bincount(ids[mask], minlength=vocab_size)
        return counts

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that identify the rows' ids and masks, in their order."""
        digest = hashlib.sha256()
        for ids, mask in zip(self.texts, self._masks, strict=True):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.numpy().astype("<i4", copy=False).tobytes())
            digest.update(mask.numpy().tobytes())
        for images in filter(None, self.images):
            digest.update(images.digest.encode())
        return digest.hexdigest()[:16]

    @property
    def answer_tokens(self) -> int:
        """Number of tokens under the loss mask."""
        return sum(int(mask.sum()) for mask in self._masks)


def read_answers(
    paths: Sequence[str | Path],
    tokenizer: Any = None,
    *,
    max_length: int = MAX_LENGTH,
    validation_fraction: float = 0.0,
    vocab_size: int | None = None,
    check: RowCheck | None = None,
    reader: ImageReader | None = None,
) -> tuple[AnswersDataset, AnswersDataset]:
    """Read files of answers.

    Args:
        paths: files or directories, see :func:`fsd_core.text.rows.read_rows` and :func:`fsd_train.repository.find`.
        tokenizer: tokenizer for rows without ids.
        max_length: most tokens of a sequence. Longer ones are cut, and skipped if no answer token remains.
        validation_fraction: share of the prompts in the second dataset, at least one prompt unless 0. All sequences of
            a row stay together.
        vocab_size: size of the target's vocabulary; rows with other ids are malformed. None:
            :meth:`AnswersDataset.within` checks later.
        check: takes account of the rows, and of malformed ones, which are skipped. None: those are errors.
        reader: reader of images in rows. None: such rows are malformed.

    Returns:
        (training, validation)

    Raises:
        DataError: a single path, numbers out of range, no row, or what ``check`` raises (with file and line or row
            number).
    """
    check_listed("paths", paths, " of files", DataError)
    if not is_whole(max_length, 1):
        raise DataError(f"max_length is {max_length!r:.60}: give a whole number from 1 on.")
    if not 0 <= validation_fraction <= 1:
        raise DataError(f"validation_fraction is {validation_fraction:g}: give a share from 0 to 1.")
    named, check = ", ".join(map(str, paths)), check or RowCheck(strict=True)
    read_before, too_long = check.read, 0
    sequences: list[_Sequence] = []
    for path in paths:
        for row in read_rows(find(path), check):
            with check.using(row.where):
                marked, sources = (row, []) if reader is None else reader.mark_images(row)
                encoded = _encode(marked, tokenizer, max_length, vocab_size, reader, sources)
                too_long += not encoded
                sequences += encoded
                check.note(marked.values)
    read = check.read - read_before
    if not sequences:
        check.finish()
        cure = "Raise data.max_length, or shorten the prompts." if too_long else "Add rows with answers."
        raise DataError(f"{named}: no row to train on ({read} read, max_length {max_length}). {cure}")
    _warn_of_duplicates(sequences, named)
    if too_long:
        what = "%s: %d of %d rows have no answer in their first %d tokens and are skipped. Raise data.max_length."
        log.warning(what, named, too_long, read, max_length)
    splits = _split(sequences, validation_fraction)
    if not splits[0]:
        raise DataError(f"{named}: all {len(sequences)} rows were held out. Lower validation_fraction, or add rows.")
    max_id = max(sequence.max_id for sequence in sequences)
    train, validation = (_dataset(split, max_id, reader) for split in splits)
    return train, validation


def _warn_of_duplicates(sequences: Sequence[_Sequence], named: str) -> None:
    """Warn of sequences that repeat an earlier one of the files ``named``."""
    distinct = {hash((tuple(s.ids), tuple(s.mask), s.images and s.images.digest)) for s in sequences}
    repeated = len(sequences) - len(distinct)
    if repeated:
        what = "%s: %d of %d sequences repeat an earlier one, token by token; each counts."
        log.warning(what, named, repeated, len(sequences))


def _split(sequences: Sequence[_Sequence], fraction: float) -> tuple[list[_Sequence], list[_Sequence]]:
    """Split sequences into training and validation, with at least one prompt in the latter unless ``fraction`` is 0."""
    hashes = {sequence.split_hash for sequence in sequences}
    if fraction and len(hashes) > 1:
        fraction = max(fraction, math.nextafter(min(hashes), 1.0))
    return [s for s in sequences if s.split_hash >= fraction], [s for s in sequences if s.split_hash < fraction]


def conclude(check: RowCheck, tokenizer: Any, listing: Path | None = None, report: bool = True) -> None:
    """Say which rows are skipped and which fields nothing reads. Raises DataError as :class:`.RowCheck`."""
    check.finish(listing, report)
    if report:
        check.name_unread([WEIGHT, *fields_of(tokenizer)])


def _encode(
    row: Example, tokenizer: Any, max_length: int, vocab_size: int | None, reader: ImageReader | None,
    sources: Sequence[Any],
) -> list[_Sequence]:  # fmt: skip
    """Return a row's sequences that have an answer in their first tokens. Raises DataError for a malformed row."""
    sequences: list[Sequenced]
    if sources and reader is not None:
        sequences = encode_row_with_images(row.values, reader, sources, row.where, max_length)
    else:
        sequences = [(ids, mask, None) for ids, mask in encode_row(row.values, tokenizer, row.where, max_length)]
    max_id = max((max(ids) for ids, _, _ in sequences if ids), default=-1)
    if vocab_size is not None:
        check_id(max_id, row.where, vocab_size)
    # the questions, as text if possible, because ids depend on the target
    questions = row_questions(row.values, row.where)
    answered = [sequence for sequence in sequences if any(sequence[1][:max_length])]
    if not answered:
        return []
    ids, mask, images = answered[0]
    first = next((index for index, turn in enumerate(questions, start=1) if turn["role"] == "user"), len(questions))
    # all turns of a conversation go to the same dataset, in one row or in several
    prompt: Any = [(turn["role"], turn["content"]) for turn in questions[:first]] or ids[: mask.index(1)]
    prompt = prompt if images is None else [*prompt, *images.digests[:1]]  # many images have the same question
    split_hash = stable_seed("validation", prompt) / 2**31
    name = row.values.get("id")
    if not isinstance(name, str):
        name = row_id(row.file.name, row.number, questions)
    return [
        _Sequence(split_hash, name, ids[:max_length], mask[:max_length], images, (max_id, row.where))
        for ids, mask, images in answered
    ]


def _dataset(sequences: Sequence[_Sequence], max_id: tuple[int, str], reader: ImageReader | None) -> AnswersDataset:
    rows, images = [(s.row_id, s.ids, s.mask) for s in sequences], [s.images for s in sequences]
    return AnswersDataset(rows, max_id, max_ids=[s.max_id for s in sequences], images=images, reader=reader)
