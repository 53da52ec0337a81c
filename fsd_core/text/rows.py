"""Read rows of JSON lines, JSON arrays, tables, plain texts, Parquet files, and directories of the `datasets` library.

pyarrow and datasets come with the extra `train` and are imported only when a file needs them.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fsd_core.errors import DataError, imported
from fsd_core.files import parse_json, parse_text, sha256_of
from fsd_core.text.hub_rows import HubRows, is_hub_name
from fsd_core.text.row_check import RowCheck, RowFields

LONGEST_LINE = 2**28  # bytes
_ADVICE = "Write one JSON object per line, in UTF-8."
_parse_row = partial(parse_json, unique=True)
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_UNREAD = (".arrow", ".feather", ".bz2", ".xz", ".zst", ".zip", ".tar", ".xlsx")
_SPLIT = re.compile(r"(train|validation|valid|val|dev|test|eval)(?![a-z])")


class Example(NamedTuple):
    """One row of a data file.

    Attributes:
        file: the file, or the directory of `datasets`.
        number: number of the row, from 1.
        values: by field.
    """

    file: Path
    number: int
    values: RowFields

    @property
    def where(self) -> str:
        """The row's name in errors, "file:number"."""
        return f"{self.file}:{self.number}"

    @property
    def folder(self) -> Path:
        """Where relative paths in the row begin."""
        return self.file if self.file.is_dir() else self.file.parent


def read_rows(path: str | Path, check: RowCheck | None = None) -> Iterator[Example]:
    """Yield the rows of a data file or directory.

    A file that begins with "[" is a JSON array. The first row of a .csv or .tsv table names the fields. Each line of a
    .txt file is the ``text`` of a row. Other files, and .txt files that begin with "{", are JSON lines. All may be
    gzip-compressed. If a directory has several splits, ``train`` is read.

    Args:
        path: a file, "-" (standard input), a dataset's name on the Hub (:mod:`fsd_core.text.hub_rows`), a directory
            of `Dataset.save_to_disk`, or a directory with .parquet files in it or in its subdirectory ``data``.
        check: takes account of the rows, also of lines that are no row, which are skipped. None: those are errors.

    Raises:
        DataError: a missing file, or one that cannot be read to its end, several splits without ``train``, a missing
            package, or what ``check`` raises.
    """
    check = check or RowCheck(strict=True)
    for file, number, parsed in _items(Path(path)):
        where, values = f"{file}:{number}", None
        with check.reading(where):
            values = RowFields(_object(parsed(), where))
        if values is not None:
            yield Example(file, number, values)


# file, number, and what parses the row; that one may raise DataError, and the next row can still be read
_Item = tuple[Path, int, Callable[[], Any]]


def _items(path: Path) -> Iterator[_Item]:
    if is_hub_name(path):
        yield from _parsed(path, HubRows.parse(str(path)).rows())
    elif os.path.isdir(path):  # unlike Path.is_dir, False for names that are too long
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            yield from _parsed(path, _saved_rows(path))
            return
        for file in _parquet_files(path):
            yield from _parsed(file, _parquet_rows(file))
    elif path.suffix == ".parquet":
        yield from _parsed(path, _parquet_rows(path))
    else:
        yield from _text_rows(path)


def _parsed(path: Path, rows: Iterable[Any]) -> Iterator[_Item]:
    for number, values in enumerate(rows, start=1):
        yield path, number, partial(_same, values)


def _same(values: Any) -> Any:
    return values


def _text_rows(path: Path) -> Iterator[_Item]:
    """Yield the rows of a file of text, which is read once, because it may be a pipe."""
    suffix, lines = Path(path.name.removesuffix(".gz")).suffix, _lines(path)
    if suffix in _UNREAD:
        raise DataError(f"{path}: files of this kind are not read. Unpack it, or write .jsonl, .csv or .parquet.")
    leading = []
    for line, raw in lines:
        leading.append((line, raw))
        if raw.strip():
            break
    opening, lines = leading[-1][1].lstrip()[:1] if leading else b"", chain(leading, lines)
    if opening == b"[" and suffix not in (".txt", *_DELIMITERS):
        all_lines = list(lines)
        is_array, lines = _is_array([raw for _, raw in all_lines if raw.strip()]), iter(all_lines)
    else:
        is_array = False
    if suffix in _DELIMITERS:
        yield from _table_rows(path, lines, _DELIMITERS[suffix])
    elif is_array:
        yield from _parsed(path, parse_json(b"".join(raw for _, raw in lines), str(path), _ADVICE))
    else:
        parse = _parse_line if suffix == ".txt" and opening != b"{" else _parse_row
        for line, raw in lines:
            if raw.strip():
                yield path, line, partial(parse, raw, f"{path}:{line}", _ADVICE)


def _is_array(lines: Sequence[bytes]) -> bool:
    """Whether lines that begin with a bracket are one array of rows, and not a row each."""
    try:
        json.loads(lines[0])
    except (ValueError, RecursionError):
        return True
    return len(lines) == 1


def _parse_line(raw: bytes, where: str, advice: str) -> str:
    return parse_text(raw, where, advice).rstrip("\r\n")


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number, from 1, and object of every line of a JSONL file. Skip blank lines.

    Args:
        path: a file, gzip-compressed or not.

    Raises:
        DataError: an unreadable file, or a line that is no JSON object in UTF-8. The error names file and line.
    """
    for line, raw in _lines(Path(path)):
        if raw.strip():
            yield line, _object(_parse_row(raw, f"{path}:{line}", _ADVICE), f"{path}:{line}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and content of every line. Raises DataError if the file cannot be read."""
    line = 0
    try:
        with open("/dev/stdin" if str(path) == "-" else path, "rb") as file:
            lines: Any = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
            while raw := lines.readline(LONGEST_LINE + 1):
                line += 1
                if len(raw) > LONGEST_LINE:
                    raise DataError(
                        f"{path}:{line}: the line is longer than {LONGEST_LINE >> 20} MiB. Write one row per line."
                    )
                yield line, raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zlib.error) as error:  # ValueError: a NUL in the name
        if not os.path.exists(path):
            raise DataError(f"{path}: no such file. Give a path, or hf:OWNER/NAME for a dataset on the Hub.") from error
        # a truncated gzip file raises EOFError or zlib.error
        raise DataError(f"{path}: unreadable after line {line} ({error}). Fetch or write the file again.") from error


def _table_rows(path: Path, lines: Iterable[tuple[int, bytes]], delimiter: str) -> Iterator[_Item]:
    csv.field_size_limit(LONGEST_LINE)
    texts = (raw.decode("utf-8-sig", "surrogateescape") for _, raw in lines)
    rows = csv.DictReader(texts, delimiter=delimiter, strict=True)
    try:
        names = rows.fieldnames or []
        _table_row(dict(zip(names, names)), f"{path}:1")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{path}:1: two columns are called {twice!r:.60}. Rename one.")
        for values in rows:
            yield path, rows.line_num, partial(_table_row, values, f"{path}:{rows.line_num}")
    except csv.Error as error:
        raise DataError(
            f"{path}:{max(rows.line_num, 1)}: no table row ({error}). Quote cells as in RFC 4180, and write UTF-8."
        ) from error


def _table_row(values: dict[Any, Any], where: str) -> dict[Any, Any]:
    if None in values:
        raise DataError(f"{where}: more cells than the first row has names. Quote the cells.")
    if any(re.search("[\udc80-\udcff]", cell) for cell in values.values() if cell):
        raise DataError(f"{where}: not UTF-8. Write the table in UTF-8.")
    return values


def rows_digest(path: str | Path) -> str:
    """Return a SHA-256 in hexadecimal that identifies the rows.

    Args:
        path: as for :func:`read_rows`. The hash covers a file's contents, a directory's file names and contents, or a
            Hub dataset's name and commit.
    """
    path = Path(path)
    if is_hub_name(path):
        return HubRows.parse(str(path)).digest(str(path))
    if not path.is_dir():
        return sha256_of(path)
    digest = hashlib.sha256()
    for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
        digest.update(f"{file.relative_to(path).as_posix()} {rows_digest(file)}\n".encode())
    return digest.hexdigest()


def _object(row: Any, where: str) -> dict[str, Any]:
    """Return a row of JSON. A text alone is the row's ``text``."""
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}. Write one object per line.")
    return row


def _parquet_files(directory: Path) -> list[Path]:
    """Return a directory's Parquet files by name; the files of ``train`` if there are several splits."""
    files = sorted(directory.glob("*.parquet")) or sorted(directory.glob("data/*.parquet"))
    if not files:
        others = next((f", such as {path}" for path in sorted(directory.glob("*.jsonl"))), "")
        raise DataError(
            f"{directory}: neither .parquet files nor a dataset saved by `datasets`. Give a file{others}, or such a "
            "directory."
        )
    splits = {file: match[1] if (match := _SPLIT.match(file.name)) else None for file in files}
    if len(set(splits.values())) == 1:
        return files
    chosen = [file for file, split in splits.items() if split == "train"]
    if not chosen:
        raise DataError(f"{directory}: files of several splits and none called train-*. Give the files themselves.")
    return chosen


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    arrow, parquet = (imported(name, f"reading {path}", "train", DataError) for name in ("pyarrow", "pyarrow.parquet"))
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield values
    except (OSError, ValueError, OverflowError, arrow.ArrowException) as error:
        if not os.path.exists(path):
            raise DataError(f"{path}: no such file. Give the path of a .parquet file.") from error
        raise DataError(f"{path}: unreadable after row {number} ({error}). Fetch or write the file again.") from error


def _saved_rows(directory: Path) -> Iterator[dict[str, Any]]:
    datasets = imported("datasets", f"reading {directory}", "train", DataError)
    number = 0
    try:
        dataset = datasets.load_from_disk(str(directory))
        if isinstance(dataset, datasets.DatasetDict):
            if "train" not in dataset:
                raise DataError(
                    f"{directory}: its splits are {', '.join(dataset)}, none is called train. Give {directory}/SPLIT."
                )
            dataset = dataset["train"]
        for values in dataset.with_format(None):
            number += 1
            yield dict(values)
    except DataError:
        raise
    except Exception as error:  # `datasets` checks little of what it reads
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{directory}: not a whole dataset, after row {number} ({reason}). Save it again.") from error
