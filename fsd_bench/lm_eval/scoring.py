"""Documents and scores of our tasks, from this package's prompt files and matchers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from fsd_bench.code import passes_tests
from fsd_bench.lm_eval.texts import Conversation
from fsd_bench.score import read_references
from fsd_core.errors import DataError
from fsd_core.text.encoding import PromptRow, read_prompts
from fsd_core.text.row_check import RowCheck
from fsd_infer.engine.ngrams import copied_ngrams, repeated_ngrams

DATA = "FSD_TASKS"  # environment variable: folder of the data files, if --metadata does not name it


def rows(file: str, data: str | None = None, category: str = "", score: str = "auto", **_: Any) -> dict[str, Any]:
    """Return the documents of a prompt file that have a reference: {"test": dataset}.

    Args:
        file: its name.
        data: its folder (default: the environment's ``FSD_TASKS``, else "data").
        category: only rows of this ``category``.
        score: kind of reference, see :mod:`fsd_bench.score`.
        _: other arguments of the harness, ignored.

    Raises:
        DataError: no such file, a malformed row, no row with a reference.
    """
    kept = [row for row in _read(file, data) if not category or row.row.get("category") == category]
    pairs = [(row, reference) for row, reference in zip(kept, read_references(kept, score)) if reference is not None]
    return _documents(file, [row for row, _ in pairs])


def programs(file: str, data: str | None = None, **_: Any) -> dict[str, Any]:
    """Return documents as :func:`rows`, of programming problems with ``prompt``, ``test`` and ``entry_point``."""
    problems = _read(file, data)
    for row in problems:
        if not all(isinstance(row.row.get(name), str) for name in ("prompt", "test", "entry_point")):
            raise DataError(f"{row.file}:{row.line}: expected texts in prompt, test and entry_point.")
    return _documents(file, problems)


def _read(file: str, data: str | None) -> list[PromptRow]:
    path = Path(data or os.environ.get(DATA) or "data", file)
    if not path.is_file():
        raise DataError(
            f'{path}: no such file. Name its folder with --metadata \'{{"data": "FOLDER"}}\', or in ${DATA}.'
        )
    check = RowCheck()
    rows = list(read_prompts(path, check))
    check.finish()
    return rows


def _documents(file: str, rows: Sequence[PromptRow]) -> dict[str, Any]:
    if not rows:
        raise DataError(f"{file}: no row has a reference that can be scored.")
    documents = [
        {
            "prompt": Conversation.of(row.messages),
            "messages": json.dumps(row.messages),
            "row": json.dumps(dict(row.row)),
            "line": row.line,
        }
        for row in rows
    ]
    return {"test": datasets.Dataset.from_list(documents)}


def asked(doc: Mapping[str, Any]) -> str:
    """Return a document's prompt with all turns of its conversation, which the model ``fsd`` puts in its template.

    Other models of the harness see a conversation's texts as one turn.
    """
    return Conversation.of(json.loads(doc["messages"]))


def score(doc: Mapping[str, Any], results: Sequence[str], kind: str = "auto") -> dict[str, float]:
    """Return ``score`` of the answer, and ``copied_4grams`` and ``repeated_4grams`` of its words."""
    values = json.loads(doc["row"])
    messages = [{"role": "user", "content": doc["prompt"]}]
    row = PromptRow("", messages, "", "task", doc["line"], values)  # type: ignore[arg-type]
    is_text = "answer" not in values
    reference = read_references([row], "rouge" if is_text else kind)[0]
    assert reference is not None, "rows without one are not documents"
    words = results[0].split()
    copied = copied_ngrams(doc["prompt"].split(), words) or 0.0
    return {
        "score": reference.score(results[0]),
        "copied_4grams": copied,
        "repeated_4grams": repeated_ngrams(words) or 0.0,
    }


def passes(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Run the completed program with its tests, and return whether they pass; the harness asks for consent first.

    It runs as :func:`fsd_bench.code.run_python` runs programs. That stops accidents, not attacks.
    """
    row = json.loads(doc["row"])
    program = f"{row['prompt']}{results[0]}\n\n{row['test']}\n\ncheck({row['entry_point']})\n"
    return {"score": float(passes_tests(program))}
