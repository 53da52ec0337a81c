"""Public data sets in the layouts of their files: prompts, references and scores on small made rows."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from fsd_bench.code import code_of, run_python, solves
from fsd_bench.layouts import LAYOUTS, layout_of, private_tests
from fsd_bench.score import last_letter, read_references
from fsd_core.errors import DataError, FsdError
from fsd_core.text.encoding import read_prompts
from tests.text_toys import write_rows

CASES = [{"input": "2 3\n", "output": "5\n", "testtype": "stdin"}]
HIDDEN = base64.b64encode(zlib.compress(pickle.dumps(json.dumps([{"input": "1 1", "output": "2"}])))).decode()
CALLS = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]
ROWS: dict[str, dict[str, Any]] = {
    "gpqa": {
        "Record ID": "r", "Question": "Which is a noble gas?", "Correct Answer": "neon",
        "High-level domain": "Chemistry",
        **{f"Incorrect Answer {number}": gas for number, gas in ((1, "iron"), (2, "salt"), (3, "wood"))},
    },
    "aime": {"ID": "2024-I-1", "Problem": "What is $6 \\cdot 7$?", "Solution": "Multiply.", "Answer": 42},
    "math-500": {
        "problem": "Halve 1.", "solution": "...", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1,
        "unique_id": "a/1.json",
    },
    "hle": {"id": "h", "question": "Who?", "image": "", "answer": "Ada Lovelace", "answer_type": "exactMatch"},
    "humaneval": {
        "task_id": "HumanEval/0", "entry_point": "add", "canonical_solution": "    return a + b\n",
        "prompt": "import math\n\n\ndef add(a, b):\n    '''Add.'''\n",
        "test": "def check(f):\n    assert f(1, 2) == 3\n",
    },
    "livecodebench": {
        "question_content": "Add two numbers.", "starter_code": "", "public_test_cases": json.dumps(CASES),
        "private_test_cases": HIDDEN, "metadata": "{}", "difficulty": "easy", "question_id": "1",
    },
    "speed-bench": {"question_id": "s", "category": "math", "sub_category": "x", "turns": ["a?"], "multiturn": False},
    "spec-bench": {"question_id": 1, "category": "qa", "turns": ["a?"]},
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["a?", "and b?"], "reference": ["x", "y"]},
}  # fmt: skip
RIGHT = {
    "aime": "So it is \\boxed{42}.", "math-500": "It is $0.5$, so \\boxed{0.5}.",
    "hle": "Because.\nANSWER: ada  lovelace.",
    "humaneval": "Here:\n```python\ndef add(a, b):\n    return a + b\n```", "gpqa": "",
    "livecodebench": "```python\na, b = map(int, input().split())\nprint(a + b)\n```",
}  # fmt: skip
WRONG = {
    "aime": "\\boxed{41}", "math-500": "2", "hle": "ANSWER: Charles Babbage", "gpqa": "",
    "humaneval": "```python\ndef add(a, b):\n    return a - b\n```", "livecodebench": "```python\nprint(5)\n```",
}  # fmt: skip


@pytest.mark.parametrize("layout", ROWS)
def test_a_published_row_becomes_a_prompt_and_scores(layout: str, tmp_path: Path) -> None:
    (row,) = read_prompts(write_rows(tmp_path / "rows.jsonl", [ROWS[layout]]), convert=LAYOUTS.get(layout))
    assert row.messages[-1]["role"] == "user" and row.source
    if layout in ("aime", "math-500"):
        pytest.importorskip("math_verify")
    (reference,) = read_references([row], run_code=True)
    if layout not in RIGHT:
        assert reference is None and row.messages[-1]["content"] == "a?"
        return
    if layout == "gpqa":
        shown = dict(line.split(") ") for line in row.messages[-1]["content"].splitlines() if line[1:2] == ")")
        assert sorted(shown.values()) == ["iron", "neon", "salt", "wood"]
        letters = {gas: letter for letter, gas in shown.items()}
        assert reference.score(f"Not A.\nANSWER: {letters['neon']}") == 1
        assert reference.score(f"ANSWER: {letters['neon']}, no, ANSWER: {letters['iron']}") == 0
        return
    assert reference.score(RIGHT[layout]) == 1 and reference.score(WRONG[layout]) == 0


def test_programs_run_only_by_permission(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [ROWS["humaneval"]])
    rows = list(read_prompts(file, convert=layout_of("humaneval")))
    with pytest.raises(FsdError, match="add --run-code"):
        read_references(rows)
    assert read_references(rows, "none") == [None]


def test_how_programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of("a\n```py\nx = 1\n```\nb\n```python\ny = 2\n") == "y = 2\n"
    assert run_python("print(input()[::-1])", "abc") == (True, "cba\n")
    assert run_python("raise SystemExit(3)")[0] is False
    with monkeypatch.context() as shorter:
        shorter.setattr("fsd_bench.code.SECONDS", 0.3)
        assert run_python("while True: pass")[0] is False
    assert run_python("print(len(bytearray(10 ** 11)))")[0] is False, "more memory than allowed"
    os.environ["A_SECRET"] = "1"
    assert run_python("import os; print(os.environ.get('A_SECRET'), os.listdir())")[1] == "None []\n"
    begun = "def add(a, b):\n    '''Add.'''\n"
    program = {"kind": "asserts", "begun": begun, "entry": "add", "tests": "assert add(1, 2) == 3"}
    assert solves("    return a + b", program) and not solves("    return a", program)
    method = {"kind": "cases", "begun": "", "entry": "total", "tests": CALLS}
    assert solves("class Solution:\n    def total(self, xs: List[int], more):\n        return sum(xs) + more", method)
    assert not solves("def total(xs, more):\n    return 0", method)


def test_tests_that_are_pickled_run_no_code() -> None:
    assert private_tests(HIDDEN) == [{"input": "1 1", "output": "2"}] and private_tests("[]") == []

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    with pytest.raises(DataError, match="cannot be read"):
        private_tests(base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode())


def test_own_fields_and_rows_that_do_not_fit(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "own.jsonl", [{"Frage": "Was ist 6 mal 7?", "Antwort": "42", "Nummer": 1}])
    (row,) = read_prompts(file, convert=layout_of(None, {"prompt": "Frage", "answer": "Antwort"}))
    (reference,) = read_references([row])
    assert row.messages[-1]["content"] == "Was ist 6 mal 7?" and reference is not None and reference.score("42") == 1
    for layout, changed, message in (
        ("gpqa", {"Correct Answer": None}, "no field Correct Answer"), ("hle", {"image": "data:..."}, "has an image"),
        ("hle", {"answer_type": None}, "no field answer_type"),
        ("mt-bench", {"turns": "a"}, "not a list of texts"),
        ("speed-bench", {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM"]}, "placeholder"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            LAYOUTS.get(layout)({**ROWS[layout], **changed})
    with pytest.raises(FsdError, match="unknown layout 'gpqaa'.*gpqa"):
        layout_of("gpqaa")
    with pytest.raises(FsdError, match="knows its fields"):
        layout_of("gpqa", {"prompt": "q"})


@pytest.mark.parametrize(("text", "letter"), [
    ("ANSWER: B", "B"), ("The answer is (c).", "C"), ("\\boxed{D}", "D"), ("**ANSWER: A**", "A"), ("A\nB\n", "B"),
    ("Answer: [d]", "D"), ("the answer is a cat", None), ("I think a cat", None), ("ANSWER: BED", None),
])  # fmt: skip
def test_the_letter_that_an_answer_names_last(text: str, letter: str | None) -> None:
    assert last_letter(text) == letter
