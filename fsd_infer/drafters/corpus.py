"""A corpus to draft from: a data file with an index of its texts, which is built once and then memory-mapped."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from fsd_core.errors import CheckpointError, DataError, FsdError
from fsd_core.files import cache_dir, open_safetensors, replacing, usable_name
from fsd_core.locks import locked
from fsd_core.text.conversations import check_text, row_conversation
from fsd_core.text.encoding import encode_chat, need_tokenizer
from fsd_core.text.hub_rows import HubRows, is_hub_name
from fsd_core.text.row_check import RowCheck
from fsd_core.text.rows import Example, read_rows
from fsd_infer.drafters.suffix_store import END, SuffixStore, sorted_prefixes
from fsd_infer.targets.target import Target

FORMAT = "fsd-memory-1"
SUFFIX = ".memory"  # appended to the corpus's name for its index
IDS = ("prompt_ids", "response_ids")  # fields with token ids, of files that `fsd-train regenerate` wrote
BATCH_ROWS = 512  # rows that are encoded at once
REPORT_SECONDS = 5.0  # seconds between reports of progress
MAX_TOKENS = 2**31 - 1  # indices are of 32 bits
_ADVICE = "Delete it, and it is made again."


def open_corpus(name: str | os.PathLike[str], target: Target) -> SuffixStore:
    """Return the texts of a corpus. The index is built if it is missing or older than the corpus.

    A row has token ids (``prompt_ids``, ``response_ids`` or both), a ``text``, or a conversation as in training data.
    Others are skipped as by :class:`.RowCheck`. An interrupted call leaves no index, and the next call starts again.

    Args:
        name: what :func:`fsd_core.text.rows.read_rows` reads, but no pipe: a file, a directory, or a dataset's name on
            the Hub, whose index is kept in the cache.
        target: the model whose tokenizer encodes the texts.

    Raises:
        DataError: the corpus cannot be read, or too many rows have none of these forms.
        CheckpointError: the index is damaged, or belongs to another tokenizer.
    """
    text = usable_name(name, "corpus")
    source, index = Path(text), _index_of(text)
    vocabulary = str(target.fingerprint()["vocabulary_sha256"] or target.vocab_size)
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        facts = {"format": FORMAT, "vocabulary": vocabulary, "source": _fingerprint(source, index)}
        if (ready := _read(index, facts, target)) is not None:
            return ready  # without a lock, which a folder that is read-only cannot hold
        with locked(Path(f"{index}.lock"), source.name):
            return _read(index, facts, target) or _build(source, index, facts, target)
    except OSError as error:
        raise DataError(
            f"corpus {source}: {error.strerror or error}. Name a file or directory of texts in a writable folder."
        ) from error


def _index_of(name: str) -> Path:
    if is_hub_name(name):
        return cache_dir() / "memory" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}{SUFFIX}"
    return Path(os.path.abspath(name) + SUFFIX)


def _fingerprint(source: Path, index: Path) -> str:
    """Return a text that changes when the corpus does. Raises DataError for a pipe or a device."""
    if is_hub_name(source):
        try:
            return HubRows.parse(str(source)).digest(str(source))
        except DataError as error:
            if not index.is_file():
                raise
            print(f"[{source}] drafting from the index of an earlier call ({error})", file=sys.stderr, flush=True)
            return _facts_of(index).get("source", "")
    status = source.stat()
    if not stat.S_ISDIR(status.st_mode):
        return _file_fingerprint(source, status)
    files = sorted(file for file in source.rglob("*") if not file.is_dir())
    lines = "".join(f"{file.relative_to(source)} {_file_fingerprint(file, file.stat())}\n" for file in files)
    return hashlib.sha256(os.fsencode(lines)).hexdigest()


def _file_fingerprint(file: Path, status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"corpus {file} is a pipe or a device, which cannot be indexed: save its rows in a file.")
    return f"{status.st_size} {status.st_mtime_ns}"


def _facts_of(index: Path) -> dict[str, str]:
    if not index.is_file():
        raise CheckpointError(f"{index} is not a file, where the corpus's index belongs. {_ADVICE}")
    with open_safetensors(index, _ADVICE) as file:
        return file.metadata() or {}


def _read(index: Path, facts: dict[str, str], target: Target) -> SuffixStore | None:
    """Return the index, or None if it is missing or older than the corpus."""
    if not index.exists():
        return None
    stored = _facts_of(index)
    if stored.get("vocabulary") != facts["vocabulary"]:
        raise CheckpointError(f"{index} is of another tokenizer than {target.name}'s. {_ADVICE}")
    if stored != facts:
        return None
    with open_safetensors(index, _ADVICE) as file:
        tokens, order = (file.get_tensor(name) for name in ("tokens", "order"))
    for values, low, high in ((tokens, END, target.vocab_size), (order, 0, tokens.numel())):
        flat = values.dtype == torch.int32 and values.dim() == 1 and values.shape == tokens.shape and values.numel() > 0
        if not flat or not low <= int(values.min()) <= int(values.max()) < high or int(tokens[-1]) != END:
            raise CheckpointError(f"{index} is damaged: its arrays are not an index. {_ADVICE}")
    return SuffixStore(tokens.numpy(), order.numpy())


def _build(source: Path, index: Path, facts: dict[str, str], target: Target) -> SuffixStore:
    """Write the index and read it."""
    tokens = _tokens_of(source, target)
    print(f"[{source.name}] indexing {len(tokens):,} tokens", file=sys.stderr, flush=True)
    tensors = {"tokens": torch.from_numpy(tokens), "order": torch.from_numpy(sorted_prefixes(tokens))}
    with replacing(index) as draft:
        save_file(tensors, draft, facts)
    result = _read(index, facts, target)
    assert result is not None
    return result


def _tokens_of(source: Path, target: Target) -> NDArray[np.int32]:
    """Return the tokens of all rows, each row's followed by END. Reports progress and the rows that it skips."""
    check, tokens, reported = RowCheck(), array("i"), time.monotonic()
    rows = read_rows(source, check)
    while batch := list(islice(rows, BATCH_ROWS)):
        forms: list[list[int] | str] = []
        for row in batch:
            with check.using(row.where):
                forms.append(_ids_or_text(row, target))
        for ids in _encoded(forms, target):
            tokens.extend(ids)
            tokens.append(END)
        if len(tokens) > MAX_TOKENS:
            raise DataError(f"corpus {source} has more than {MAX_TOKENS:,} tokens: name a part of it.")
        if time.monotonic() - reported >= REPORT_SECONDS:
            print(f"[{source.name}] read {check.read:,} rows, {len(tokens):,} tokens", file=sys.stderr, flush=True)
            reported = time.monotonic()
    check.finish()
    if not tokens:
        raise DataError(f"corpus {source} has no rows: name a file with texts.")
    return np.frombuffer(tokens, np.int32)


def _ids_or_text(row: Example, target: Target) -> list[int] | str:
    """Return a row's token ids, or its text. A null counts as a missing field, as in exported tables."""
    fields = [row.values[name] for name in IDS if row.values.get(name) is not None]
    if fields:
        tokens: list[Any] = [token for ids in fields for token in (ids if isinstance(ids, list) else [None])]
        if not all(type(token) is int and 0 <= token < target.vocab_size for token in tokens):
            raise DataError(
                f"{row.where}: {' and '.join(IDS)} are lists of whole numbers from 0 to {target.vocab_size - 1}."
            )
        return tokens
    tokenizer = need_tokenizer(target.tokenizer, target.name)
    text = row.values.get("text")
    if isinstance(text, str):
        return check_text(text, row.where)
    turns = row_conversation(row.values, row.where)
    try:
        return encode_chat(tokenizer, turns)
    except FsdError as error:
        raise DataError(f"{row.where}: {error}") from error


def _encoded(forms: list[list[int] | str], target: Target) -> Iterator[list[int]]:
    """Yield the ids of each row. Texts are encoded together, by all threads of the tokenizer."""
    texts = [form for form in forms if isinstance(form, str)]
    ids = iter(need_tokenizer(target.tokenizer, target.name)(texts)["input_ids"] if texts else ())
    for form in forms:
        yield next(ids) if isinstance(form, str) else form
