"""Layouts of public data sets: each maps a row of the published file to a prompt, a reference, and how it is scored.

=================  =========================================================  ==========================================
layout             fields of its public file                                  scored by
=================  =========================================================  ==========================================
``gpqa``           Question, Correct Answer, Incorrect Answer 1 to 3          the option named last, options in a fixed
                                                                              random order
``aime``           Problem or problem, Answer or answer                       ``math``
``math-500``       problem, answer, subject, level                            ``math``
``hle``            question, answer, answer_type, image                       option, or equal text. Its authors let a
                                                                              model judge, so scores are lower here
``humaneval``      task_id, prompt, entry_point, test                         ``code``
``livecodebench``  question_content, starter_code, public_test_cases,         ``code``
                   private_test_cases, metadata
``speed-bench``    turns, category, sub_category                              –
``spec-bench``     turns, category                                            –
``mt-bench``       turns, category, reference                                 –
=================  =========================================================  ==========================================

Other files are read by naming their fields: ``--field prompt=Frage --field answer=Antwort``.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from fsd_core.errors import DataError, FsdError
from fsd_core.registry import Registry, did_you_mean
from fsd_core.text.conversations import PROMPT_FIELDS

Values = Mapping[str, Any]
Layout = Callable[[Values], dict[str, Any]]
LAYOUTS: Registry[Layout] = Registry("layout")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BOXED = "Reason step by step, and put your final answer within \\boxed{}."
LETTER = "Reason step by step. End with a line that says ANSWER: and the letter of your choice."
OURS = (
    "id", "answer", "reference", "category", "scored_by", "letters", "instruction_id_list", "kwargs", "test",
    "entry_point", "tools", "image", "images", *PROMPT_FIELDS,
)  # fmt: skip
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench, where a source's licence forbids copies


def layout_of(name: str | None, fields: Mapping[str, str] | None = None) -> Layout | None:
    """Return what converts rows: a layout's name, or own ``fields`` (our name -> the file's); None for neither.

    Raises:
        FsdError: an unknown layout, or a layout and fields together.
    """
    if name is not None and fields:
        raise FsdError(f"layout {name} knows its fields: leave out --field, or --layout.")
    if name is not None:
        return LAYOUTS.get(name)
    return renamed(fields) if fields else None


def renamed(fields: Mapping[str, str]) -> Layout:
    """Return a layout that gives a file's fields our names: {"prompt": "Frage"}. Other fields keep theirs.

    Raises:
        FsdError: a name that is not one of ours.
    """

    for ours in fields:
        if ours not in OURS:
            raise FsdError(
                f"--field {ours}=...: this is not a name of ours.{did_you_mean(ours, OURS)} Known: {', '.join(OURS)}."
            )

    def convert(row: Values) -> dict[str, Any]:
        for ours, theirs in fields.items():
            if row.get(theirs) in (None, ""):
                raise DataError(f"no field {theirs}, which --field {ours}={theirs} names. It has {', '.join(row)}.")
        others = {key: row[key] for key in row if key not in fields.values()}
        return others | {ours: row[theirs] for ours, theirs in fields.items()}

    return convert


def _need(row: Values, *names: str) -> Any:
    """Return the first of these fields that the row has. Raises DataError if it has none."""
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    raise DataError(f"no field {' or '.join(names)}. Give the data set's published file, or another --layout.")


def options_text(options: list[str]) -> str:
    """Return options, a line each, with letters."""
    return "\n".join(f"{letter}) {option.strip()}" for letter, option in zip(LETTERS, options))


@LAYOUTS.register("gpqa")
def gpqa(row: Values) -> dict[str, Any]:
    """Four options in an order that depends on the question alone, so that it never changes."""
    question, correct = (str(_need(row, name)).strip() for name in ("Question", "Correct Answer"))
    options = [correct, *(str(_need(row, f"Incorrect Answer {number}")).strip() for number in (1, 2, 3))]
    random.Random(question).shuffle(options)
    return {
        "prompt": f"{question}\n\n{options_text(options)}\n\n{LETTER}",
        "answer": LETTERS[options.index(correct)], "letters": LETTERS[:4], "scored_by": "letter",
        "category": row.get("High-level domain") or "gpqa",
    }  # fmt: skip


@LAYOUTS.register("aime")
@LAYOUTS.register("math-500")
def mathematics(row: Values) -> dict[str, Any]:
    """A problem whose final answer is compared by math-verify."""
    return {
        "prompt": f"{_need(row, 'problem', 'Problem')}\n\n{BOXED}", "answer": str(_need(row, "answer", "Answer")),
        "scored_by": "math", "category": str(row.get("subject") or "maths"),
    }  # fmt: skip


@LAYOUTS.register("hle")
def hle(row: Values) -> dict[str, Any]:
    """A question of text. Questions with an image are refused: no target here sees it."""
    if row.get("image"):
        raise DataError("the question has an image. Leave such rows out.")
    choice = _need(row, "answer_type") == "multipleChoice"
    instruction = (
        LETTER if choice else "Reason step by step. End with a line that says ANSWER: and your answer, nothing else."
    )
    fields = {"letters": LETTERS} if choice else {}
    return {
        "prompt": f"{_need(row, 'question')}\n\n{instruction}", "answer": str(_need(row, "answer")).strip(), **fields,
        "scored_by": "letter" if choice else "text", "category": str(row.get("category") or "hle"),
    }  # fmt: skip


@LAYOUTS.register("humaneval")
def humaneval(row: Values) -> dict[str, Any]:
    """Complete a function; its unit tests run."""
    prompt, entry = str(_need(row, "prompt")), str(_need(row, "entry_point"))
    tests = f"{_need(row, 'test')}\n\ncheck({entry})\n"
    prompt_text = (
        f"Complete this function. Answer with the whole function in one Python code block.\n\n```python\n{prompt}```"
    )
    program = {"kind": "asserts", "begun": prompt, "entry": entry, "tests": tests}
    return {"prompt": prompt_text, "answer": json.dumps(program), "scored_by": "code", "category": "code"}


@LAYOUTS.register("livecodebench")
def livecodebench(row: Values) -> dict[str, Any]:
    """Write a program that reads standard input, or a method of ``Solution``; public and private tests run."""
    starter = str(row.get("starter_code") or "")
    tests = json.loads(_need(row, "public_test_cases")) + private_tests(row.get("private_test_cases") or "[]")
    metadata = json.loads(row.get("metadata") or "{}")
    prompt_text = f"{_need(row, 'question_content')}\n\nAnswer with one Python code block. "
    if starter:
        prompt_text += f"Complete this code:\n\n```python\n{starter}\n```"
    else:
        prompt_text += "The program reads standard input and writes standard output."
    program = {"kind": "cases", "begun": "", "entry": metadata.get("func_name"), "tests": tests}
    category = str(row.get("difficulty") or "code")
    return {"prompt": prompt_text, "answer": json.dumps(program), "scored_by": "code", "category": category}


class _Texts(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def private_tests(text: str) -> list[dict[str, Any]]:
    """Return LiveCodeBench's private tests: JSON, or as published, JSON pickled, compressed and in base64.

    Raises:
        DataError: neither. A pickle may only hold text: none of its code runs.
    """
    try:
        return list(json.loads(text))
    except ValueError:
        pass
    try:
        tests = _Texts(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load()
        return list(json.loads(tests))
    except (ValueError, TypeError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"private_test_cases cannot be read ({error}). Fetch the file again.") from error


@LAYOUTS.register("speed-bench")
@LAYOUTS.register("spec-bench")
@LAYOUTS.register("mt-bench")
def turns(row: Values) -> dict[str, Any]:
    """A conversation whose user turns are known, see :mod:`fsd_bench.later_turns`."""
    user_turns = _need(row, "turns")
    if not isinstance(user_turns, (list, tuple)) or not all(isinstance(turn, str) for turn in user_turns):
        raise DataError("turns is not a list of texts.")
    if any(turn.startswith(PLACEHOLDER) for turn in user_turns):
        raise DataError("a turn is a placeholder. Fetch the full benchmark by its authors' script.")
    category = str(row.get("category") or "turns")
    return {"turns": list(user_turns), "category": category, "scored_by": "none"}
