"""Training answers: rows of data files as token ids with a loss mask, and batches of them."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

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
from fsd_train.data.images import ImageReader, SeenImages
from fsd_train.data.row_encoding import Sequenced, check_id, encode_row, encode_row_with_images
from fsd_train.data.sampler import stable_seed
from fsd_train.repository import find

log = logging.getLogger(__name__)

MAX_STEPS = 7  # of a chain in training, see fsd_train.types.ChainSteps
# point; id of the row, ids, mask and images; its highest id and place
_Sided = tuple[float, tuple[str, list[int], list[int], SeenImages | None], tuple[int, str]]


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
        highest: the highest token id in the files and its row ("file:line").
        store: cached features of all rows, or None.
        tops: the highest token id of each row and its place ("file:line"), for :meth:`within`.
        seen: the images of each sequence, or None; empty: there are none.
        reader: reader of the images.

    Attributes:
        texts: the token ids of all sequences.
    """

    def __init__(
        self,
        rows: Sequence[tuple[str, Sequence[int] | Tensor, Sequence[int] | Tensor]],
        highest: tuple[int, str],
        store: FeatureStore | None = None,
        tops: Sequence[tuple[int, str]] = (),
        seen: Sequence[SeenImages | None] = (),
        reader: ImageReader | None = None,
    ) -> None:
        self.highest, self.store, self.tops = highest, store, list(tops)
        self.seen, self.reader = list(seen) if any(seen) else [None] * len(rows), reader
        self.row_ids = [name for name, _, _ in rows]
        self.lengths = [len(ids) for _, ids, _ in rows]
        self.texts = [torch.as_tensor(ids, dtype=torch.int32) for _, ids, _ in rows]
        self._masks = [torch.as_tensor(mask, dtype=torch.bool) for _, _, mask in rows]
        self._supervised: dict[int, Tensor] = {}
        self.recorded: FeatureStore | None = None  # features of some rows, see fsd_train.data.recording

    @property
    def has_images(self) -> bool:
        return any(self.seen)

    @cached_property
    def keys(self) -> list[str]:
        """The key of each sequence in a cache of features."""
        return [
            sequence_key(ids, "" if seen is None else seen.digest)
            for ids, seen in zip(self.texts, self.seen, strict=True)
        ]

    def image_inputs(self, index: int) -> dict[str, Tensor]:
        """Return the target's inputs of a sequence's images; none without images. Raises DataError for a lost image."""
        seen = self.seen[index]
        return {} if seen is None or self.reader is None else self.reader.inputs(self.texts[index], seen)

    def prompt_images(self, index: int, count: int) -> ImageInput | None:
        """Return the images among the first ``count`` tokens of a sequence, for decoding; None without any."""
        seen, ids = self.seen[index], self.texts[index].tolist()[:count]
        return None if seen is None or self.reader is None else self.reader.image_input(ids, seen)

    def __len__(self) -> int:
        return len(self.row_ids)

    def __getitem__(self, index: int) -> Item:
        ids, mask = self.texts[index].long(), self._masks[index].long()
        item: Item = {"index": index, "id": self.row_ids[index], "input_ids": ids, "loss_mask": mask}
        key, seen = self.keys[index], self.seen[index]
        if self.store is not None:
            item["features"] = self.store.get(key)
        elif self.recorded is not None and key in self.recorded:
            item["features"] = self.recorded.get(key)
        if seen is not None:
            item["digest"] = seen.digest
            # a batch may lack the features of other sequences, and then runs the target
            cached = self.store is not None
            item["images"] = seen.placing(ids.tolist()) if cached else self.image_inputs(index)
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
        return self._some([index for index, key in enumerate(self.keys) if key in store], store)

    def within(self, vocab_size: int, check: RowCheck) -> AnswersDataset:
        """Return a dataset of the rows without token ids outside this vocabulary; ``check`` takes account of others."""
        if self.highest[0] < vocab_size:
            return self
        bad = {where: token for token, where in self.tops if token >= vocab_size}  # a row may be several sequences
        for where, token in bad.items():
            with check.using(where):
                check_id(token, where, vocab_size)
        return self._some([index for index, (_, where) in enumerate(self.tops) if where not in bad], self.store)

    def _some(self, places: Sequence[int], store: FeatureStore | None) -> AnswersDataset:
        tops = [self.tops[place] for place in places] if self.tops else []
        rows = [(self.row_ids[place], self.texts[place], self._masks[place]) for place in places]
        seen = [self.seen[place] for place in places]
        return AnswersDataset(rows, max(tops, default=self.highest), store, tops, seen, self.reader)

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
        check_id(*self.highest, vocab_size)
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
        for seen in filter(None, self.seen):
            digest.update(seen.digest.encode())
        return digest.hexdigest()[:16]

    @property
    def answer_tokens(self) -> int:
        """Number of tokens under the loss mask."""
        return sum(int(mask.sum()) for mask in self._masks)


def _point(prompt: Any) -> float:
    """Map a prompt to [0, 1) by its hash; prompts below the validation fraction are held out."""
    return stable_seed("validation", prompt) / 2**31


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
    before, left_out = check.read, 0
    placed: list[_Sided] = []
    for path in paths:
        for row in read_rows(find(path), check):
            with check.using(row.where):
                given, sources = (row, []) if reader is None else reader.taken(row)
                found = _placed(given, tokenizer, max_length, vocab_size, reader, sources)
                left_out += not found
                placed += found
                check.note(given.values)
    read = check.read - before
    if not placed:
        check.finish()
        cure = "Raise data.max_length, or shorten the prompts." if left_out else "Add rows with answers."
        raise DataError(f"{named}: no row to train on ({read} read, max_length {max_length}). {cure}")
    _name_repeats(placed, named)
    if left_out:
        what = "%s: %d of %d rows have no answer in their first %d tokens and are skipped. Raise data.max_length."
        log.warning(what, named, left_out, read, max_length)
    parts = _divided(placed, validation_fraction)
    if not parts[0]:
        raise DataError(f"{named}: all {len(placed)} rows were held out. Lower validation_fraction, or add rows.")
    train, held = (_dataset(part, max(top for _, _, top in placed), reader) for part in parts)
    return train, held


def _name_repeats(placed: Sequence[_Sided], named: str) -> None:
    """Warn of sequences that repeat an earlier one of the files ``named``."""
    distinct = {hash((tuple(ids), tuple(mask), seen and seen.digest)) for _, (_, ids, mask, seen), _ in placed}
    repeated = len(placed) - len(distinct)
    if repeated:
        log.warning(
            "%s: %d of %d sequences repeat an earlier one, token by token; each counts.", named, repeated, len(placed)
        )


def _divided(placed: Sequence[_Sided], fraction: float) -> tuple[list[_Sided], list[_Sided]]:
    """Divide sequences in those to train on and those held out, at least one prompt's unless ``fraction`` is 0."""
    points = {point for point, _, _ in placed}
    if fraction and len(points) > 1:
        fraction = max(fraction, math.nextafter(min(points), 1.0))
    return [row for row in placed if row[0] >= fraction], [row for row in placed if row[0] < fraction]


def conclude(check: RowCheck, tokenizer: Any, listing: Path | None = None, report: bool = True) -> None:
    """Say which rows are skipped and which fields nothing reads. Raises DataError as :class:`.RowCheck`."""
    check.finish(listing, report)
    if report:
        check.name_unread([WEIGHT, *fields_of(tokenizer)])


def _placed(
    row: Example, tokenizer: Any, max_length: int, vocab_size: int | None, reader: ImageReader | None,
    sources: Sequence[Any],
) -> list[_Sided]:  # fmt: skip
    """Return a row's sequences that have an answer in their first tokens. Raises DataError for a malformed row."""
    sequences: list[Sequenced]
    if sources and reader is not None:
        sequences = encode_row_with_images(row.values, reader, sources, row.where, max_length)
    else:
        sequences = [(ids, mask, None) for ids, mask in encode_row(row.values, tokenizer, row.where, max_length)]
    top = max((max(ids) for ids, _, _ in sequences if ids), default=-1)
    if vocab_size is not None:
        check_id(top, row.where, vocab_size)
    # the questions, as text if possible, because ids depend on the target
    asked = row_questions(row.values, row.where)
    kept = [sequence for sequence in sequences if any(sequence[1][:max_length])]
    if not kept:
        return []
    ids, mask, seen = kept[0]
    first = next((index for index, turn in enumerate(asked, start=1) if turn["role"] == "user"), len(asked))
    # all turns of a conversation go to the same dataset, in one row or in several
    key: Any = [(turn["role"], turn["content"]) for turn in asked[:first]] or ids[: mask.index(1)]
    key = key if seen is None else [*key, *seen.digests[:1]]  # many images have the same question
    name = row.values.get("id")
    if not isinstance(name, str):
        name = row_id(row.file.name, row.number, asked)
    return [
        (_point(key), (name, ids[:max_length], mask[:max_length], images), (top, row.where))
        for ids, mask, images in kept
    ]


def _dataset(part: Sequence[_Sided], highest: tuple[int, str], reader: ImageReader | None) -> AnswersDataset:
    rows, seen = [row[:3] for _, row, _ in part], [row[3] for _, row, _ in part]
    return AnswersDataset(rows, highest, tops=[top for _, _, top in part], seen=seen, reader=reader)
