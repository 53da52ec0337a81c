"""Generated word problems: the work is right, texts and wordings are held out, files are reproducible."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import pytest

from fsd_infer.bench.score import read_references
from fsd_infer.chat.encoding import read_prompts
from fsd_infer.chat.rows import read_jsonl

ROOT = Path(__file__).parent.parent
EQUATION = re.compile(r"(\d+(?:\.\d+)?) ([-+*/]) (\d+(?:\.\d+)?) = (\d+(?:\.\d+)?)")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))  # as for a command; its worker processes import it too
    try:
        return importlib.import_module("make_word_problems")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def worked_result(solution: str) -> Decimal:
    """The result of the last equation, after a check of all of them."""
    *lines, last = solution.split("\n")
    result = Decimal(0)
    for line in lines:
        found = EQUATION.findall(line)
        assert len(found) == 1, line
        a, sign, b, result = (Decimal(part) if part not in "+-*/" else part for part in found[0])
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]
        assert value == result, line
    assert last == f"#### {result}"
    return result


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("unseen", [False, True])
def test_every_line_of_work_is_right_and_there_are_as_many_as_asked_for(
    script: ModuleType, steps: int, unseen: bool
) -> None:
    rng = random.Random(steps)
    kinds = set()
    for _ in range(400):
        made = script.make_problem(rng, steps, unseen)
        assert len(made.steps) == steps and made.unseen == unseen
        assert worked_result(made.solution) == made.answer
        assert not re.search(r"[\[\]{}<>|]|  | [.,?!]|[a-z]\.[A-Z]", made.question), made.question
        assert made.question.endswith(("?", "."))
        kinds.add(made.kind)
    assert len(kinds) >= 8


def test_every_text_of_a_tale_states_the_numbers_of_its_formula(script: ModuleType) -> None:
    tales = importlib.import_module("word_problems.everyday").TALES
    assert len(tales) > 20
    for tale in tales:
        letters = set(re.findall(r"[a-d]", tale.formula))
        assert len(tale.work) == len(re.findall(r"[-+*/;]", tale.formula))
        slots = {name for names in tale.slots for name in names.split()}
        known = letters | slots | {"who", "he", "him", "his", "other", "eq"}
        for text in tale.texts:
            used = set(re.findall(r"{(\w+)}", text))
            assert used & set("abcd") == letters and used <= known, text
        for line in tale.work:
            assert set(re.findall(r"{(\w+)}", line)) <= known and "{eq}" in line, line


def test_the_shipped_problems_are_those_that_the_command_makes(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(["heldout", "--output", str(tmp_path / "again.jsonl.gz")]) == 0
    assert (tmp_path / "again.jsonl.gz").read_bytes() == script.HELD_OUT.read_bytes()
    rows = [row for _, row in read_jsonl(script.HELD_OUT)]
    assert sum(row["steps"] == 3 for row in rows) == 1000 and len({row["question"] for row in rows}) == len(rows)
    assert sum(row["unseen"] for row in rows) * 2 == len(rows)
    # read as tasks by the harness, with the results as references
    prompts = list(read_prompts(script.HELD_OUT))
    for row, prompt, reference in zip(rows, prompts, read_references(prompts)):
        assert prompt.messages == [{"role": "user", "content": row["question"]}]
        assert reference is not None and reference.value == worked_result(row["answer"])


def test_training_leaves_out_held_out_texts_and_is_the_same_on_any_number_of_processes(
    script: ModuleType, tmp_path: Path
) -> None:
    def lines(name: str, *options: str) -> list[str]:
        output = tmp_path / name
        assert script.main(["train", "--count", "3000", "--output", str(output), *options]) == 0
        return output.read_text().splitlines()

    whole = lines("one", "--workers", "1")
    assert whole == lines("two", "--workers", "2") and len(whole) == 3000
    questions = {json.loads(line)["messages"][0]["content"] for line in whole}
    assert len(questions) == 3000
    assert not questions & {row["question"] for _, row in read_jsonl(script.HELD_OUT)}
    # texts that are held out are not made
    gone = sorted(questions)[:50]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in gone))
    fewer = lines("three", "--without", str(tmp_path / "held.jsonl"))
    assert not set(gone) & {json.loads(line)["messages"][0]["content"] for line in fewer}


def test_gsm8k_answers_lose_their_annotations(script: ModuleType) -> None:
    text = "She sold 48/2 = <<48/2=24>>24 clips.\nThat is 0.2 x 50 = $<<0.2*50=10>>10 and 3+4=7.\n#### 1,072"
    assert script.gsm8k_answer(text) == "She sold 48 / 2 = 24 clips.\nThat is 0.2 * 50 = $10 and 3 + 4 = 7.\n#### 1,072"


def test_training_rows_mix_problems_gsm8k_and_general_answers(script: ModuleType, tmp_path: Path) -> None:
    gsm8k, general = tmp_path / "gsm8k.jsonl", tmp_path / "general.jsonl"
    gsm8k.write_text(json.dumps({"question": "1 + 1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}) + "\n")
    ids = {"id": "x", "prompt_ids": [1], "response_ids": [2]}
    rows = [{**ids, "source": "chat"}, {**ids, "source": "gsm8k_train"}]
    general.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "train.jsonl"
    options = ["--gsm8k", str(gsm8k), "--gsm8k-repeat", "2", "--general", str(general), "--output", str(output)]
    assert script.main(["train", "--count", "5", *options]) == 0
    made = [row for _, row in read_jsonl(output)]
    assert [row["source"].split("/")[0] for row in made] == ["word-problems"] * 5 + ["gsm8k_train"] * 2 + ["chat"]
    assert made[5]["messages"][1]["content"] == "1 + 1 = 2\n#### 2"
