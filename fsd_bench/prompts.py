"""Choose, group and encode the prompts of a measurement."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fsd_bench.layouts import Layout
from fsd_core.errors import DataError
from fsd_core.text.conversations import Message, template_options
from fsd_core.text.encoding import PromptRow, encode_chat, encode_text, need_tokenizer, read_prompts
from fsd_core.text.row_check import RowCheck, listing_of
from fsd_core.text.templates import fields_of
from fsd_infer.decoder import FuzzyDecoder

REFERENCES = ("answer", "reference", "scored_by", "letters")  # fields that answers are scored against


@dataclass(frozen=True)
class Encoder:
    """Encodes prompts for a target.

    Attributes:
        target: its name, for errors.
        tokenizer: its tokenizer.
        positions: tokens of its context, or None.
        raw: encode the only message without the chat template.
    """

    target: str
    tokenizer: Any
    positions: int | None = None
    raw: bool = False

    @classmethod
    def of(cls, decoder: FuzzyDecoder, raw: bool = False) -> Encoder:
        """Return the encoder of a decoder's target."""
        return cls(decoder.target.name, decoder.tokenizer, decoder.target.max_positions, raw)

    def __call__(self, row: PromptRow) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            FsdError: the target has no tokenizer.
            DataError: a conversation that the template refuses, or that ``raw`` does not support, or a prompt that
                fills the context.
        """
        return self._fitting(_encode(row, need_tokenizer(self.tokenizer, self.target), self.raw))

    def conversation(self, row: PromptRow, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of another conversation with the row's template options. Raises as for a row."""
        tokenizer = need_tokenizer(self.tokenizer, self.target)
        return self._fitting(encode_chat(tokenizer, messages, options=template_options(row.row)))

    def _fitting(self, ids: list[int]) -> list[int]:
        if self.positions is not None and len(ids) >= self.positions:
            raise DataError(
                f"the prompt has {len(ids)} tokens, but {self.target} has a context of {self.positions} tokens: "
                "shorten or remove it."
            )
        return ids


def first_rows(
    file: str | Path,
    encode: Encoder,
    limit: int | None = None,
    every: int = 1,
    strict: bool = False,
    output: str | Path | None = None,
    layout: Layout | None = None,
) -> list[PromptRow]:
    """Return every ``every``-th row of a file, at most ``limit``. Later rows are not read.

    Args:
        file: the prompts.
        encode: rows that it refuses cannot be used.
        limit: most rows.
        every: the step between rows.
        strict: see :class:`.RowCheck`.
        output: file of results; skipped rows are listed next to it.
        layout: layout of a public data set's file, see :mod:`fsd_bench.layouts`.

    Raises:
        DataError: no rows, or too many that cannot be used among them.
    """
    check = RowCheck(strict)
    rows = check.first(islice(_usable(file, encode, check, layout), 0, None, every), limit)
    check.finish(listing_of(output))
    return without_copies(_require_rows(file, rows), kept=True)


def spread_rows(
    files: Sequence[str | Path],
    encode: Encoder,
    limit: int | None = None,
    strict: bool = False,
    output: str | Path | None = None,
) -> list[PromptRow]:
    """Return at most ``limit`` rows of each file, evenly spread over it. Arguments and errors as :func:`first_rows`."""
    chosen, check = [], RowCheck(strict)
    for file in files:
        bad_before = len(check.bad)
        rows = list(_usable(file, encode, check))
        if len(check.bad) == bad_before:
            _require_rows(file, rows)
        count = min(limit or len(rows), len(rows))
        chosen += [rows[index * len(rows) // count] for index in range(count)]
    check.finish(listing_of(output))
    return chosen


def without_copies(rows: Sequence[PromptRow], kept: bool = False) -> list[PromptRow]:
    """Return the rows without those that ask what an earlier one asks, and say on stderr how many there are.

    Args:
        rows: in their order.
        kept: whether copies are only counted, for intervals that take prompts for independent draws.
    """
    distinct: dict[str, PromptRow] = {}
    for row in rows:
        distinct.setdefault(json.dumps([row.messages, template_options(row.row)], sort_keys=True), row)
    if copies := len(rows) - len(distinct):
        what = "Each counts, so intervals are too narrow" if kept else "They are left out"
        print(f"notice: {copies} of {len(rows)} prompts repeat another. {what}.", file=sys.stderr)
    return list(rows if kept else distinct.values())


def _usable(file: str | Path, encode: Encoder, check: RowCheck, layout: Layout | None = None) -> Iterator[PromptRow]:
    for row in read_prompts(file, check, layout):
        bad_before = len(check.bad)
        with check.using(row.where):
            encode(row)
        if len(check.bad) == bad_before:
            yield row


def _require_rows(file: str | Path, rows: list[PromptRow]) -> list[PromptRow]:
    if not rows:
        raise DataError(f"{file}: no prompts. Give a file with at least one row.")
    return rows


def rows_digest(rows: Sequence[PromptRow]) -> str:
    """Return a digest of the prompts in their order."""
    return hashlib.sha256("".join(row.id for row in rows).encode()).hexdigest()[:16]


def category_of(row: PromptRow) -> str:
    """Return the row's ``category``, else its source."""
    return str(row.row.get("category") or row.source)


def group_prompts(categories: Sequence[str], size: int) -> list[list[int]]:
    """Return the prompts' indices in batches of ``size`` (fewer at a category's end), each of one category."""
    if size == 1:
        return [[index] for index in range(len(categories))]
    by_category: dict[str, list[int]] = {}
    for index, category in enumerate(categories):
        by_category.setdefault(category, []).append(index)
    return [indices[i : i + size] for indices in by_category.values() for i in range(0, len(indices), size)]


def encode_rows(rows: Sequence[PromptRow], encode: Encoder) -> list[list[int]]:
    """Return the token ids of each prompt, and say which fields of the rows nothing has read.

    Raises:
        FsdError: the target has no tokenizer.
        DataError: as of the encoder, with the row's name.
    """
    prompts, check = [], RowCheck(strict=True)
    for row in rows:
        with check.using(row.where):
            prompts.append(encode(row))
        for name in REFERENCES:
            row.row.get(name)  # a score may need none
        check.note(row.row)
    check.name_unread(fields_of(encode.tokenizer))
    return prompts


def _encode(row: PromptRow, tokenizer: Any, raw: bool) -> list[int]:
    options = template_options(row.row)
    if not raw:
        return encode_chat(tokenizer, row.messages, options=options)
    if options or len(row.messages) > 1:
        raise DataError("a conversation or template options, which --raw does not support. Give one text per row.")
    return encode_text(tokenizer, row.messages[0]["content"])
