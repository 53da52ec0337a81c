"""Conversations in the forms and files that data sets come in, and their masks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fsd_infer.chat import rows as rowfiles
from fsd_infer.chat.conversations import row_conversation, row_messages
from fsd_infer.chat.encoding import encode_conversation, read_prompts
from fsd_infer.chat.rows import read_rows
from fsd_infer.errors import DataError
from fsd_train.data import read_answers
from tests.text_toys import CHATML, tiny_tokenizer, write_rows

SYSTEM = {"role": "system", "content": "assistant"}
ASK = {"role": "user", "content": "what is the answer"}
TELL = {"role": "assistant", "content": "it is there"}
MORE = {"role": "user", "content": "the cat"}
LAST = {"role": "assistant", "content": "sat on the mat"}
TURNS = [SYSTEM, ASK, TELL, MORE, LAST]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}.get(turn["role"], turn["role"]), "value": turn["content"]}
    for turn in TURNS
]

# forms of a row -> the turns before the last answer, and all of them
FORMS: list[tuple[dict[str, Any], list[dict[str, str]], list[dict[str, str]]]] = [
    ({"messages": TURNS}, TURNS[:-1], TURNS),
    ({"conversations": SHAREGPT}, TURNS[:-1], TURNS),
    ({"conversations": TURNS}, TURNS[:-1], TURNS),
    ({"messages": TURNS[:-1], "response": LAST["content"]}, TURNS[:-1], TURNS),
    ({"messages": TURNS, "response": "it"}, TURNS[:-1], [*TURNS[:-1], {"role": "assistant", "content": "it"}]),
    ({"prompt": ASK["content"], "response": TELL["content"]}, [ASK], [ASK, TELL]),
    ({"prompt": ASK["content"], "completion": TELL["content"]}, [ASK], [ASK, TELL]),
    ({"prompt": TURNS[:-1], "completion": [LAST]}, TURNS[:-1], TURNS),
    ({"messages": None, "prompt": ASK["content"], "response": None, "completion": TELL["content"]}, [ASK], [ASK, TELL]),
    ({"conversations": [SHAREGPT[2], *SHAREGPT[1:3]]}, [ASK], [ASK, TELL]),  # an answer to nothing
    ({"messages": [*TURNS, MORE]}, [*TURNS, MORE], TURNS),  # a question without an answer
]


@pytest.mark.parametrize(
    ("row", "prompt", "whole"), FORMS, ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_forms(row: dict[str, Any], prompt: list[dict[str, str]], whole: list[dict[str, str]]) -> None:
    assert row_messages(row) == prompt
    assert row_conversation(row) == whole


# files

ROWS: list[dict[str, Any]] = [
    {"conversations": SHAREGPT, "id": "first"},
    {"conversations": SHAREGPT[:3], "id": "second"},
]


def write(kind: str, folder: Path) -> Path:
    """The rows as a file or directory of that kind; returns what a user would name."""
    folder.mkdir(exist_ok=True)
    if kind == "jsonl.gz":
        path = folder / "a.jsonl.gz"
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
        return path
    if kind.startswith("parquet"):
        import pyarrow
        from pyarrow import parquet

        names = {
            "parquet": ["a.parquet"],
            "parquet folder": ["part-0.parquet", "part-1.parquet"],
            "parquet hub folder": ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
        }[kind]
        for number, name in enumerate(names):
            (folder / name).parent.mkdir(exist_ok=True)
            rows = ROWS if kind != "parquet folder" else ROWS[number : number + 1]
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
        return folder / names[0] if kind == "parquet" else folder
    from datasets import Dataset, DatasetDict

    saved = Dataset.from_list(ROWS)
    (saved if kind == "saved" else DatasetDict({"train": saved, "test": saved})).save_to_disk(str(folder / "set"))
    return folder / "set"


KINDS = ["jsonl.gz", "parquet", "parquet folder", "parquet hub folder", "saved", "saved splits"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_holds_the_same_rows(tmp_path: Path, kind: str) -> None:
    path = write(kind, tmp_path / "data")
    tokenizer = tiny_tokenizer()
    found, _ = read_answers([path], tokenizer)
    assert found.row_ids == ["first", "second"]
    for number, turns in enumerate((TURNS, TURNS[:3])):
        [(ids, mask)] = encode_conversation(tokenizer, turns)
        assert found[number]["input_ids"].tolist() == ids and found[number]["loss_mask"].tolist() == mask
    prompts = list(read_prompts(path))
    assert [row.messages for row in prompts] == [TURNS[:-1], TURNS[:2]]
    assert len({row.id for row in prompts}) == 2
    assert [row.id for row in prompts] == [row.id for row in read_prompts(path)]


def test_a_digest_changes_with_any_file_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "set" / "data").mkdir(parents=True)
    one = write_rows(tmp_path / "set" / "data" / "a.jsonl", ROWS)
    before = rowfiles.rows_digest(tmp_path / "set")
    assert before == rowfiles.rows_digest(tmp_path / "set") != rowfiles.rows_digest(one)
    write_rows(one, ROWS[:1])
    assert rowfiles.rows_digest(tmp_path / "set") != before


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        list(read_rows(tmp_path / "none.parquet"))
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"cut\.parquet: unreadable after row 0"):
        list(read_rows(tmp_path / "cut.parquet"))
    with pytest.raises(DataError, match=r"neither \.parquet files nor a dataset"):
        list(read_rows(write(KINDS[0], tmp_path / "other").parent))
    (tmp_path / "splits").mkdir()
    for name in ("test-0.parquet", "validation-0.parquet"):
        (tmp_path / "splits" / name).touch()
    with pytest.raises(DataError, match="none called train"):
        list(read_rows(tmp_path / "splits"))


# masks

OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"


def marked(answer: str) -> str:
    """CHATML with a block for assistant turns; it is written as in the `answer` given."""
    return (
        "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        + answer
        + "{% else %}"
        "{{ m['content'] + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
    )


@pytest.mark.parametrize("complete", [True, False])
def test_generation_markers_give_the_mask_of_the_exact_method(complete: bool) -> None:
    template = marked(OPEN + "{{ m['content'] + '<|end|>' }}" + CLOSE)
    tools = "{% if tools %}{{ tools[0].name }}{% endif %}"
    options = {"tools": [{"name": "the cat"}]}
    expected = encode_conversation(tiny_tokenizer(CHATML), TURNS, complete)
    with_tools = encode_conversation(tiny_tokenizer(tools + CHATML), TURNS, complete, options)
    for given, same in (({}, expected), (options, with_tools)):
        assert encode_conversation(tiny_tokenizer(tools + template), TURNS, complete, given) == same
    [(ids, mask)] = expected
    assert sum(b > a for a, b in zip(mask, mask[1:])) == 2 and len(with_tools[0][0]) > len(ids)


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        # the block holds what the template puts behind the end, too
        (OPEN + "{{ m['content'] + '<|end|>\n' }}" + CLOSE, "it is <|start|> there<|end|>sat on the mat<|end|>"),
        # earlier answers are shortened
        (
            OPEN + "{{ (m['content'] if loop.last else m['content'].split()[-1]) + '<|end|>' }}" + CLOSE,
            "there<|end|>sat on the mat<|end|>",
        ),
        # without the end it is taken as it is
        (OPEN + "{{ m['content'] }}" + CLOSE + "{{ '<|end|>' }}", "it is <|start|> theresat on the mat"),
    ],
    ids=["newline", "shortened", "no end"],
)
def test_blocks_are_taken_up_to_the_end(answer: str, kept: str) -> None:
    tokenizer = tiny_tokenizer(marked(answer))
    inside = {"role": "assistant", "content": "it is <|start|> there"}  # a special token within the answer
    [(ids, mask)] = encode_conversation(tokenizer, [ASK, inside, MORE, LAST])
    assert tokenizer.decode([token for token, wanted in zip(ids, mask) if wanted]) == kept


def test_markers_that_leave_out_a_turn_are_refused() -> None:
    only_last = marked(
        "{% if loop.last %}" + OPEN + "{{ m['content'] + '<|end|>' }}" + CLOSE
        + "{% else %}{{ m['content'] + '<|end|>' }}{% endif %}"
    )  # fmt: skip
    encode_conversation(tiny_tokenizer(only_last), [ASK, TELL])
    with pytest.raises(DataError, match="mark 1 of 2 assistant turns"):
        encode_conversation(tiny_tokenizer(only_last), [ASK, TELL, MORE, LAST])


def test_a_conversation_does_not_begin_with_an_answer() -> None:
    with pytest.raises(DataError, match="not begin with one"):
        encode_conversation(tiny_tokenizer(), [TELL, ASK, LAST])
