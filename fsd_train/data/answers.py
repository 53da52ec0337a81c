"""Training answers: rows of data files as token ids with a loss mask, and batches of them."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import NotRequired

from fsd_core.errors import DataError
from fsd_core.text.conversations import WEIGHT, row_conversation, row_questions, template_options
from fsd_core.text.encoding import row_id
from fsd_core.text.masks import encode_conversation
from fsd_core.text.row_check import RowCheck
from fsd_core.text.rows import Example, read_rows
from fsd_core.text.templates import fields_of
from fsd_train import MAX_LENGTH
from fsd_train.data.features import FeatureStore, sequence_key
from fsd_train.data.sampler import stable_seed
from fsd_train.repository import find

log = logging.getLogger(__name__)

MOST_ID = 2**31 - 1  # ids are kept as 32-bit numbers
MOST_STEPS = 7  # of a chain in training, see fsd_train.types.ChainSteps
_Sided = tuple[float, tuple[str, list[int], list[int]], tuple[int, str]]  # point, row, its highest id and place


class Item(TypedDict):
    """One sequence: ``input_ids`` and ``loss_mask`` [M], its ``index`` in the dataset and the ``id`` of its row."""

    index: int
    id: str
    input_ids: Tensor
    loss_mask: Tensor
    features: NotRequired[Tensor]  # [M, F], if cached


class AnswersDataset(Dataset[Item]):
    """Sequences in memory, in the order of their files.

    Args:
        rows: (id of the row, ids, loss mask) per sequence.
        highest: the highest token id in the files and its row ("file:line").
        store: cached features of all rows, or None.
        tops: the highest token id of each row and its place ("file:line"), for :meth:`within`.
    """

    def __init__(
        self,
        rows: Sequence[tuple[str, Sequence[int] | Tensor, Sequence[int] | Tensor]],
        highest: tuple[int, str],
        store: FeatureStore | None = None,
        tops: Sequence[tuple[int, str]] = (),
    ) -> None:
        self.highest, self.store, self.tops = highest, store, list(tops)
        self.row_ids = [name for name, _, _ in rows]
        self.lengths = [len(ids) for _, ids, _ in rows]
        self._ids = [torch.as_tensor(ids, dtype=torch.int32) for _, ids, _ in rows]
        self._masks = [torch.as_tensor(mask, dtype=torch.bool) for _, _, mask in rows]
        self._supervised: dict[int, Tensor] = {}
        self.recorded: FeatureStore | None = None  # features of some rows, see fsd_train.data.recording

    @property
    def texts(self) -> list[Tensor]:
        """The token ids of all sequences."""
        return self._ids

    def __len__(self) -> int:
        return len(self.row_ids)

    def __getitem__(self, index: int) -> Item:
        ids, mask = self._ids[index].long(), self._masks[index].long()
        item: Item = {"index": index, "id": self.row_ids[index], "input_ids": ids, "loss_mask": mask}
        if self.store is not None:
            item["features"] = self.store.get(sequence_key(ids))
        elif self.recorded is not None and sequence_key(ids) in self.recorded:
            item["features"] = self.recorded.get(sequence_key(ids))
        return item

    def supervised(self, index: int) -> Tensor:
        """Count a sequence's supervised rows by chain step: [:data:`MOST_STEPS`].

        A row of step s needs s + 2 answer tokens in a row, none of them the sequence's first token
        (:mod:`fsd_train.models.unroll`).
        """
        if index not in self._supervised:
            run = answer = self._masks[index][1:]
            counts = []
            for step in range(MOST_STEPS):
                run = run[:-1] & answer[step + 1 :]
                counts.append(run.sum())
            self._supervised[index] = torch.stack(counts)
        return self._supervised[index]

    def cached(self, store: FeatureStore) -> AnswersDataset:
        """Return a dataset of the rows whose features are cached, with their features."""
        return self._some([place for place, ids in enumerate(self._ids) if sequence_key(ids) in store], store)

    def within(self, vocab_size: int, check: RowCheck) -> AnswersDataset:
        """Return a dataset of the rows without token ids outside this vocabulary; ``check`` takes account of others."""
        if self.highest[0] < vocab_size:
            return self
        bad = {where: token for token, where in self.tops if token >= vocab_size}  # a row may be several sequences
        for where, token in bad.items():
            with check.using(where):
                check_id(token, where, vocab_size)
        return self._some([place for place, (_, where) in enumerate(self.tops) if where not in bad], self.store)

    def _some(self, places: Sequence[int], store: FeatureStore | None) -> AnswersDataset:
        tops = [self.tops[place] for place in places] if self.tops else []
        rows = [(self.row_ids[place], self._ids[place], self._masks[place]) for place in places]
        return AnswersDataset(rows, max(tops, default=self.highest), store, tops)

    def check_ids(self, vocab_size: int) -> None:
        """Raise DataError with a row if the files hold a token id outside this vocabulary."""
        check_id(*self.highest, vocab_size)

    def check_lengths(self, positions: int | None) -> None:
        """Raise DataError if a sequence exceeds a model's context of this many positions; None: any length fits."""
        longest = max(self.lengths, default=0)
        if positions is not None and longest > positions:
            raise DataError(
                f"a row has {longest} tokens, but the model has a context of {positions}. Set data.max_length "
                f"(--max-length) to {positions} or less."
            )

    def answer_counts(self, vocab_size: int) -> Tensor:
        """Count each id under the loss mask: [V]. Raises as :meth:`check_ids`."""
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
        """Number of tokens under the loss mask."""
        return sum(int(mask.sum()) for mask in self._masks)


def encode_row(
    row: Mapping[str, Any], tokenizer: Any, where: str = "row", max_length: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """Return token ids and loss mask of a row's sequences: one, or several by `encode_conversation`.

    ``prompt_ids`` and ``response_ids`` are used unchanged. Other rows are conversations (see
    :func:`.row_conversation`), encoded with the chat template and :func:`template_options` like in decoding; every
    assistant turn is an answer.

    Args:
        row: the row.
        tokenizer: tokenizer for rows without ids; may be None otherwise.
        where: name of the row in errors, "file:line".
        max_length: answers that begin after so many tokens may be left out.

    Raises:
        DataError: the row has neither form, its ids are malformed, or the template refuses it.
    """
    if row.get("response_ids") is not None or row.get("prompt_ids") is not None:
        prompt, response = (token_ids(row, field, where) for field in ("prompt_ids", "response_ids"))
        row.get("response")  # the same answer as text
        return [(prompt + response, [0] * len(prompt) + [1] * len(response))]
    if tokenizer is None:
        raise DataError(f"{where}: no prompt_ids and response_ids, and no tokenizer for the text. Set data.tokenizer.")
    try:
        complete = row.get("finish_reason") in (None, "stop")
        turns, options = row_conversation(row, where), template_options(row)
        return encode_conversation(tokenizer, turns, complete, options, max_length)
    except DataError as error:
        if str(error).startswith(where):
            raise
        raise DataError(f"{where}: {error}") from error


def token_ids(row: Mapping[str, Any], field: str, where: str) -> list[int]:
    """Return a row's field of token ids. Raises DataError if it is none."""
    ids = row.get(field)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i <= MOST_ID for i in ids):
        raise DataError(
            f"{where}: `{field}` must be a list of token ids (whole numbers from 0 to {MOST_ID}), and not empty."
        )
    return ids


def check_id(token: int, where: str, vocab_size: int) -> None:
    """Raise DataError if a token id of the row ``where`` is outside a vocabulary."""
    if token >= vocab_size:
        raise DataError(
            f"{where}: token id {token} is outside the target's vocabulary of {vocab_size}. "
            "Regenerate the answers with this target."
        )


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

    Returns:
        (training, validation)

    Raises:
        DataError: there is no row, or what ``check`` raises (with file and line or row number).
    """
    named, check = ", ".join(map(str, paths)), check or RowCheck(strict=True)
    before, left_out = check.read, 0
    placed: list[_Sided] = []
    for path in paths:
        for row in read_rows(find(path), check):
            with check.using(row.where, row.values):
                found = _placed(row, tokenizer, max_length, vocab_size)
                left_out += not found
                placed += found
    read = check.read - before
    if not placed:
        check.finish()
        cure = "Raise data.max_length, or shorten the prompts." if left_out else "Add rows with answers."
        raise DataError(f"{named}: no row to train on ({read} read, max_length {max_length}). {cure}")
    repeated = len(placed) - len({hash((*map(tuple, row[1:]),)) for _, row, _ in placed})
    if repeated:
        log.warning(
            "%s: %d of %d sequences repeat an earlier one, token by token; each counts.", named, repeated, len(placed)
        )
    if left_out:
        what = "%s: %d of %d rows have no answer in their first %d tokens and are skipped. Raise data.max_length."
        log.warning(what, named, left_out, read, max_length)
    points = {point for point, _, _ in placed}
    border = validation_fraction
    if border and len(points) > 1:
        border = max(border, math.nextafter(min(points), 1.0))  # at least one is held out
    parts = [[each for each in placed if (each[0] < border) is held] for held in (False, True)]
    if not parts[0]:
        raise DataError(f"{named}: all {len(placed)} rows were held out. Lower validation_fraction, or add rows.")
    train, held = (_dataset(part, max(top for _, _, top in placed)) for part in parts)
    return train, held


def conclude(check: RowCheck, tokenizer: Any, listing: Path | None = None, speak: bool = True) -> None:
    """Say which rows are skipped and which fields nothing reads. Raises DataError as :class:`.RowCheck`."""
    check.finish(listing, speak)
    if speak:
        check.name_unread([WEIGHT, *fields_of(tokenizer)])


def _placed(row: Example, tokenizer: Any, max_length: int, vocab_size: int | None) -> list[_Sided]:
    """Return a row's sequences that have an answer in their first tokens. Raises DataError for a malformed row."""
    sequences = encode_row(row.values, tokenizer, row.where, max_length)
    top = max((max(ids) for ids, _ in sequences), default=-1)
    if vocab_size is not None:
        check_id(top, row.where, vocab_size)
    # the questions, as text if possible, because ids depend on the target
    asked = row_questions(row.values, row.where)
    kept = [(ids, mask) for ids, mask in sequences if any(mask[:max_length])]
    if not kept:
        return []
    ids, mask = kept[0]
    first = next((place for place, turn in enumerate(asked, start=1) if turn["role"] == "user"), len(asked))
    # all turns of a conversation go to the same dataset, in one row or in several
    key: Any = [(turn["role"], turn["content"]) for turn in asked[:first]] or ids[: mask.index(1)]
    name = row.values.get("id")
    if not isinstance(name, str):
        name = row_id(row.file.name, row.number, asked)
    return [(_point(key), (name, ids[:max_length], mask[:max_length]), (top, row.where)) for ids, mask in kept]


def _dataset(part: Sequence[_Sided], highest: tuple[int, str]) -> AnswersDataset:
    return AnswersDataset([row for _, row, _ in part], highest, tops=[top for _, _, top in part])
