"""A corpus to draft from: a file of texts with an index beside it, which is built once and then mapped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from safetensors.torch import save_file

from fsd_infer.chat.conversations import row_conversation
from fsd_infer.chat.encoding import encode_chat, encode_text, need_tokenizer
from fsd_infer.chat.rows import read_jsonl
from fsd_infer.drafters.prefixes import END, Prefixes, sorted_prefixes
from fsd_infer.errors import CheckpointError, DataError, FsdError
from fsd_infer.files import open_safetensors, replacing, usable_name
from fsd_infer.targets.target import Target

FORMAT = "fsd-memory-1"
SUFFIX = ".memory"  # appended to the corpus's name for its index
IDS = ("prompt_ids", "response_ids")  # fields with token ids, of files that `fsd-train regenerate` wrote


def open_corpus(name: str | os.PathLike[str], target: Target) -> Prefixes:
    """Return the texts of a JSONL file. The index is built if it is missing or older than the file.

    A row has token ids (``prompt_ids``, ``response_ids`` or both), a ``text``, or a conversation as in training data.
    An interrupted call leaves no index, and the next call starts again.

    Raises:
        DataError: the file cannot be read, or a row has none of these forms.
        CheckpointError: the index is damaged, or belongs to another tokenizer.
    """
    source = Path(usable_name(name, "corpus"))
    index = source.with_name(source.name + SUFFIX)
    vocabulary = str(target.fingerprint()["vocabulary_sha256"] or target.vocab_size)
    try:
        state = source.stat()
        facts = {"format": FORMAT, "vocabulary": vocabulary, "source": f"{state.st_size} {state.st_mtime_ns}"}
        with FileLock(f"{index}.lock"):
            return _read(index, facts, target) or _build(source, index, facts, target)
    except OSError as error:
        raise DataError(
            f"corpus {source}: {error.strerror or error}. Name a JSONL file in a writable folder."
        ) from error


def _read(index: Path, facts: dict[str, str], target: Target) -> Prefixes | None:
    """Return the index, or None if it is missing or older than the corpus."""
    if not index.exists():
        return None
    advice = "Delete it, and it is made again."
    with open_safetensors(index, advice) as file:
        found = file.metadata() or {}
        if found.get("vocabulary") != facts["vocabulary"]:
            raise CheckpointError(f"{index} is of another tokenizer than {target.name}'s. {advice}")
        if found != facts:
            return None
        tokens, order = (file.get_tensor(name).numpy() for name in ("tokens", "order"))
    for array, low, high in ((tokens, END, target.vocab_size), (order, 0, len(tokens))):
        if array.dtype != np.int32 or array.shape != tokens.shape or array.min() < low or array.max() >= high:
            raise CheckpointError(f"{index} is damaged: its arrays are not an index. {advice}")
    return Prefixes(tokens, order)


def _build(source: Path, index: Path, facts: dict[str, str], target: Target) -> Prefixes:
    """Write the index and read it."""
    for leftover in index.parent.glob(f".{index.name}.*.partial"):  # of killed calls: we hold the lock
        leftover.unlink()
    tokens = np.fromiter(_texts(source, target), np.int32)
    if not len(tokens):
        raise DataError(f"corpus {source} has no rows: name a file with texts.")
    print(f"[{source.name}] indexing {len(tokens):,} tokens", file=sys.stderr, flush=True)
    tensors = {"tokens": torch.from_numpy(tokens), "order": torch.from_numpy(sorted_prefixes(tokens))}
    with replacing(index) as draft:
        save_file(tensors, draft, facts)
    made = _read(index, facts, target)
    assert made is not None
    return made


def _texts(source: Path, target: Target) -> Iterator[int]:
    """The tokens of all rows, each row's followed by END."""
    for line, row in read_jsonl(source):
        where = f"{source}:{line}"
        given = [row[name] for name in IDS if name in row]
        tokens = [token for ids in given for token in ids] if given else _encoded(row, where, target)
        if not all(type(token) is int and 0 <= token < target.vocab_size for token in tokens):
            raise DataError(f"{where}: token ids are whole numbers from 0 to {target.vocab_size - 1}.")
        yield from tokens
        yield END


def _encoded(row: dict[str, Any], where: str, target: Target) -> list[int]:
    tokenizer = need_tokenizer(target.tokenizer, target.name)
    if isinstance(row.get("text"), str):
        return encode_text(tokenizer, row["text"])
    turns = row_conversation(row, where)
    try:
        return encode_chat(tokenizer, turns)
    except FsdError as error:
        raise DataError(f"{where}: {error}") from error
