"""Conversations in the forms and files that data sets come in, their masks, and padding."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer.chat import rows as rowfiles
from fsd_infer.chat.conversations import row_conversation, row_messages
from fsd_infer.chat.encoding import encode_conversation, read_prompts
from fsd_infer.chat.rows import read_rows
from fsd_infer.errors import DataError
from fsd_train.data import encode_row, read_answers
from fsd_train.sampler import TokenBudgetSampler
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


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"conversations": []}, "conversations must be a list of at least one turn"),
        ({"conversations": "text"}, "conversations must be a list"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "turn 0 is from 'narrator'; known are human"),
        ({"conversations": [{"from": "human", "value": 3}]}, r"turn 0 \(from human\) must have `value` of type text"),
        ({"conversations": [{"value": "x"}]}, "turn 0 has role None"),
        ({"conversations": [SHAREGPT[1]]}, "no answer"),
        ({"conversations": [SHAREGPT[2]]}, "no answer"),
        ({"prompt": [{"role": "user"}], "completion": "x"}, "turn 0 .user. must have `content`"),
        ({"prompt": "x", "completion": 3}, "`completion` must hold text, found int"),
        ({"prompt": "x", "completion": []}, "completion must be a list of at least one turn"),
        ({"prompt": "x", "completion": [ASK]}, "no answer|must end with an assistant"),
        ({"prompt": "x"}, "no answer"),
        ({"completion": "x"}, "no prompt"),
    ],
)
def test_malformed_rows_name_file_and_row(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    path = write_rows(tmp_path / "bad.jsonl", [{"messages": [ASK, TELL]}, row])
    with pytest.raises(DataError, match=problem) as caught:
        read_answers([path], tiny_tokenizer())
    assert str(caught.value).startswith(f"{path}:2: ")


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


def test_decoding_needs_neither_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow and datasets come with an extra; the reader asks for them only where a file needs them."""
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it now fails
    spec = importlib.util.spec_from_file_location("rowfiles_again", rowfiles.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    with pytest.raises(DataError, match=r"needs the package pyarrow.*\[train\]"):
        list(again.read_rows("a.parquet"))


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


WITH_END = marked(OPEN + "{{ m['content'] + '<|end|>' }}" + CLOSE)
# the block holds what the template puts behind the end, too
WITH_NEWLINE = marked(OPEN + "{{ m['content'] + '<|end|>\n' }}" + CLOSE)


@pytest.mark.parametrize("complete", [True, False])
def test_generation_markers_give_the_mask_of_the_exact_method(complete: bool) -> None:
    expected = encode_conversation(tiny_tokenizer(CHATML), TURNS, complete)
    assert encode_conversation(tiny_tokenizer(WITH_END), TURNS, complete) == expected
    [(ids, mask)] = expected
    assert sum(b > a for a, b in zip(mask, mask[1:])) == 2


def test_what_follows_the_end_is_no_answer_even_where_a_marker_holds_it() -> None:
    tokenizer = tiny_tokenizer(WITH_NEWLINE)
    [(ids, mask)] = encode_conversation(tokenizer, [ASK, TELL, MORE, LAST])
    assert tokenizer.decode([token for token, kept in zip(ids, mask) if kept]) == (
        "it is there<|end|>sat on the mat<|end|>"
    )


def test_markers_allow_templates_that_shorten_earlier_answers() -> None:
    shortened = marked(OPEN + "{{ (m['content'] if loop.last else m['content'].split()[-1]) + '<|end|>' }}" + CLOSE)
    tokenizer = tiny_tokenizer(shortened)
    [(ids, mask)] = encode_conversation(tokenizer, [ASK, TELL, MORE, LAST])
    assert tokenizer.decode([token for token, kept in zip(ids, mask) if kept]) == "there<|end|>sat on the mat<|end|>"


def test_a_block_without_the_end_is_taken_as_it_is() -> None:
    tokenizer = tiny_tokenizer(marked(OPEN + "{{ m['content'] }}" + CLOSE + "{{ '<|end|>' }}"))
    inside = {"role": "assistant", "content": "it is <|start|> there"}  # a special token within the answer
    [(ids, mask)] = encode_conversation(tokenizer, [ASK, TELL, MORE, inside])
    assert tokenizer.decode([token for token, kept in zip(ids, mask) if kept]) == "it is thereit is <|start|> there"


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


def test_rows_without_a_finish_reason_are_whole() -> None:
    tokenizer = tiny_tokenizer()
    row = {"prompt": "the cat", "completion": "it is", "finish_reason": None}
    [(ids, _)] = encode_row(row, tokenizer)
    assert ids[-1] == tokenizer.eos_token_id


# padding


def chat_lengths(rows: int) -> list[int]:
    """Lengths as in chat data: log-normal, median 200, cut at 1024 tokens."""
    normal = torch.randn(rows, generator=torch.Generator().manual_seed(3))
    return (5.3 + 0.9 * normal).exp().clamp(8, 1024).int().tolist()


@pytest.mark.parametrize("rows", [60, 500, 6000])
@pytest.mark.parametrize("tokens", [2048, 8192])
@pytest.mark.parametrize("shuffle", [True, False])
def test_padding_stays_under_a_tenth(rows: int, tokens: int, shuffle: bool) -> None:
    sampler = TokenBudgetSampler(chat_lengths(rows), tokens, shuffle=shuffle)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(rows))
    widths = [max(sampler.lengths[index] for index in batch) for batch in batches]
    padded = sum(len(batch) * width for batch, width in zip(batches, widths))
    assert 1 - sum(sampler.lengths) / padded == pytest.approx(sampler.padding)
    assert sampler.padding < 0.1
    assert all(len(batch) * width <= tokens for batch, width in zip(batches, widths))
    if rows == 6000:  # a full budget where there are enough rows for it
        assert padded / len(batches) > 0.8 * tokens
