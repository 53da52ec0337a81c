"""Account of the rows that a command reads: those that it cannot use, and the fields that nothing reads.

Rows that cannot be used are skipped and counted by reason. More than :data:`MAX_SKIPPED` of them end the command, and
so does the first one if the check is strict.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsd_core.errors import DataError
from fsd_core.files import write_text
from fsd_core.text.conversations import ANSWERS, THOUGHTS, TOOLS, WEIGHT, role_of, turn_fields

MAX_SKIPPED = 0.05  # share of the rows
LISTING = "skipped-rows.jsonl"  # in the directory of an output; an output that is a file gets it as suffix
_MAX_COMPARED = 1000  # rows that are read after the last one needed, to see whether few of them are bad
_HOPELESS = 100  # rows without a usable one, after which the rest is not read
_MAX_REPORTED = 5  # reasons and fields named on the terminal
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|-?\d+")  # parts of a reason that differ from row to row
# where a row comes from and how its answer was made: no one has to read it
PROVENANCE = frozenset({"id", "question_id", "prompt_id", "key", "source", "category", "ids_from"}) | {
    "temperature", "top_k", "top_p", "finish_reason",
}  # fmt: skip
CONVERSATIONS = ("messages", "conversations", "conversation", "prompt", *ANSWERS)  # fields that may hold turns
_Row = TypeVar("_Row")


class RowFields(dict[str, Any]):
    """The values of a row by field; ``seen`` are the fields that were read, ``noted`` if an account has them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()
        self.noted = False

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)

    def items(self) -> Any:
        self.seen.update(self)
        return super().items()

    def unread(self) -> list[str]:
        """Return the fields that hold something and were not read, except :data:`PROVENANCE`.

        Only the template tells whether `tools` are read, and thoughts and weights (:meth:`RowCheck.name_unread`).
        """
        read = self.seen - {TOOLS} | PROVENANCE
        columns = [name for name, value in dict.items(self) if name not in read and value not in _EMPTY]
        talks = [name for name in CONVERSATIONS if name in self.seen]
        return [*columns, *(f"{name}[].{key}" for name in talks for key in _turn_fields(dict.get(self, name)))]


def _turn_fields(turns: Any) -> list[str]:
    """Return the fields of chat turns that hold something and that no reader of conversations takes."""
    unread: set[str] = set()
    for turn in turns if isinstance(turns, list) else ():
        if not isinstance(turn, Mapping):
            continue
        known, role = turn_fields(turn), role_of(turn)
        unexpected = [key for key, value in turn.items() if key not in known and value not in _EMPTY]
        thoughts = [name for name in THOUGHTS if name in unexpected]
        for key in unexpected:
            if key in (WEIGHT, *THOUGHTS) and role != "assistant":
                unread.add(f"{key} of turns of the role {role}")
            else:
                unread.add(f"{key} next to {thoughts[0]}" if key in thoughts[1:] else str(key))
        content = turn.get("content")
        parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
        others = {key for part in parts for key in part if part[key] not in _EMPTY}
        unread |= {f"content[].{key}" for key in others - {"type", "text"}}
    return sorted(unread)


class BadRow(NamedTuple):
    """A row that cannot be used: "file:number", and why."""

    where: str
    reason: str

    @property
    def kind(self) -> str:
        """The reason without what differs from row to row."""
        return _VARYING.sub("…", self.reason)


class RowCheck:
    """Account of the rows of one or several files.

    Args:
        strict: the first row that cannot be used is an error.

    Attributes:
        read: number of rows so far.
        bad: those that cannot be used.
        unread: how often a field held something that nothing read.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.read = 0
        self.bad: list[BadRow] = []
        self.unread: Counter[str] = Counter()
        self._reported = 0  # how many of ``bad`` were logged
        self._last: int | None = None  # row, if enough were found

    @contextmanager
    def reading(self, where: str) -> Iterator[None]:
        """Count a row. A DataError within the block is noted as by :meth:`refuse`."""
        self.read += 1
        with self.using(where):
            yield

    @contextmanager
    def using(self, where: str, values: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Note a DataError within the block as by :meth:`refuse`, else the fields of ``values`` that it left unread."""
        try:
            yield
        except DataError as error:
            self.refuse(where, error)
        else:
            if values is not None:
                self.note(values)

    def refuse(self, where: str, error: DataError) -> None:
        """Note that the row ``where`` cannot be used.

        Raises:
            DataError: the check is strict, none of many rows can be used, or too many of those after the last one
                needed cannot.
        """
        reason = str(error).removeprefix(where).removeprefix(":").strip()
        if self.strict:
            raise DataError(f"{where}: {reason}") from error
        self.bad.append(BadRow(where, reason))
        if len(self.bad) == self.read >= _HOPELESS or self._is_over and self.too_many:
            raise self._error()

    def note(self, values: Mapping[str, Any]) -> None:
        """Count the fields of a row that hold something and were not read."""
        if isinstance(values, RowFields) and not values.noted:
            values.noted = True
            self.unread.update(values.unread())

    @property
    def too_many(self) -> bool:
        """Whether more than :data:`MAX_SKIPPED` of the rows so far cannot be used."""
        return len(self.bad) > MAX_SKIPPED * self.read

    @property
    def _is_over(self) -> bool:
        return self._last is not None and self.read >= self._last

    def first(self, rows: Iterable[_Row], limit: int | None) -> list[_Row]:
        """Return the first ``limit`` usable rows.

        Too many others among them are compared with the rows that follow, at most :data:`_MAX_COMPARED`.
        """
        kept: list[_Row] = []
        for row in rows:
            if limit is None or len(kept) < limit:
                kept.append(row)
            if limit is not None and len(kept) >= limit:
                self._last = self._last or self.read + _MAX_COMPARED
                if not self.too_many or self._is_over:
                    break
        return kept

    def finish(self, listing: Path | None = None, report: bool = True) -> None:
        """Say on standard error which rows are skipped, and write them to ``listing``, once for each new state.

        Args:
            listing: a JSON Lines file with ``row`` ("file:number") and ``reason``. A file of an earlier run is removed
                if no row is skipped.
            report: False: neither print nor write, as the other processes of a run.

        Raises:
            DataError: too many rows cannot be used.
        """
        if report and listing is not None and not self.bad:
            listing.unlink(missing_ok=True)
        if len(self.bad) == self._reported:
            return
        if report and listing is not None:
            listing.parent.mkdir(parents=True, exist_ok=True)
            rows = [json.dumps({"row": row.where, "reason": row.reason}) + "\n" for row in self.bad]
            write_text(listing, "".join(rows))
        if self.too_many:
            raise self._error(listing)
        self._reported = len(self.bad)
        if report:
            print("\n".join(self._lines(listing)), file=sys.stderr)

    def _error(self, listing: Path | None = None) -> DataError:
        (where, reason), count = self.bad[0], len(self.bad)
        more = f" {count} of {self.read} rows cannot be used, more than {MAX_SKIPPED:.0%}"
        listed = "" if listing is None or count == 1 else f"; {listing} lists them"
        return DataError(f"{where}: {reason.rstrip('.')}.{more}{listed}.")

    def _lines(self, listing: Path | None) -> list[str]:
        kinds = Counter(row.kind for row in self.bad)
        firsts = {row.kind: row for row in reversed(self.bad)}
        listed = "" if listing is None else f"; {listing} lists them"
        lines = [f"warning: skipped {len(self.bad)} of {self.read} rows, which cannot be used{listed}"]
        for kind, count in kinds.most_common(_MAX_REPORTED):
            where, reason = firsts[kind]
            lines.append(f"  {count} x {where}: {reason}")
        if len(kinds) > _MAX_REPORTED:
            lines.append(f"  and {len(kinds) - _MAX_REPORTED} more reasons")
        return lines

    def name_unread(self, known: Iterable[str] = ()) -> None:
        """Print once, on standard error, which fields nothing reads, except turns' fields and `tools` in ``known``."""
        read = {TOOLS} & {*known}
        ends = tuple(f"[].{name}" for name in known)
        unread = Counter({n: count for n, count in self.unread.items() if n not in read and not n.endswith(ends)})
        self.unread.clear()
        if unread:
            named = ", ".join(f"`{name}` ({count} rows)" for name, count in unread.most_common(2 * _MAX_REPORTED))
            more = f" and {len(unread) - 2 * _MAX_REPORTED} more" if len(unread) > 2 * _MAX_REPORTED else ""
            print(f"notice: nothing reads the fields {named}{more} (docs/training.md)", file=sys.stderr)


def listing_of(output: str | Path | None) -> Path | None:
    """Return the file of skipped rows next to an output that is a file; None without an output."""
    return None if output is None else Path(f"{output}.{LISTING}")
