"""Prompts and conversations in every form and file, encoded alike for decoding and training, and their masks."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from fsd_bench.prompts import Encoder, encode_rows
from fsd_core.errors import DataError
from fsd_core.text.conversations import row_conversation, row_messages
from fsd_core.text.encoding import encode_chat, end_of_turn, read_prompts
from fsd_core.text.masks import encode_conversation
from fsd_train.data import read_answers
from tests.text_toys import CHATML, OTHERWISE, tiny_tokenizer, write_rows

USER = {"role": "user", "content": "what is the answer"}
BOT = {"role": "assistant", "content": "it is there"}
MORE = {"role": "user", "content": "the cat"}
LAST = {"role": "assistant", "content": "sat on the mat"}


TEXTS = [
    ("p.txt", "\ufeffa, b\r\n\r\n [c]\n"),
    ("lines.txt", '\n{"text": "a, b"}\n{"text": " [c]"}\n'),
    ("p.csv", '\ufeffid,prompt\n1,"a, b"\n2, [c]\n'),
    ("p.tsv", "id\tquestion\r\n1\ta, b\r\n2\t [c]\r\n"),
    ("p.json", '\ufeff\n["a, b", {"query": " [c]"}]'),
    ("array.jsonl", '[\n"a, b", {"turns": [" [c]", "later"]}]'),
    ("one-line.jsonl", '["a, b", {"turns": [" [c]", "later"]}]\n'),
]


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_texts_and_tables_give_the_same_prompts_packed_or_piped(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode())
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    os.mkfifo(pipe := tmp_path / f"pipe-{name}")
    writer = threading.Thread(target=pipe.write_bytes, args=[text.encode()])
    writer.start()
    for path in (pipe, tmp_path / name, tmp_path / f"{name}.gz"):
        assert [row.messages[0]["content"] for row in read_prompts(path)] == ["a, b", " [c]"]
    writer.join()


MALFORMED = {
    b'{"prompt": "a"': "not JSON", b"[1, 2]": "expected a JSON object", b'{"body": "a"}': "no prompt",
    b'{"prompt": 3}': "must hold text", b'{"prompt": "  "}': "is empty", b'{"turns": []}': "must hold text",
    b'{"messages": []}': "at least one turn",
    b'{"messages": [{"role": "robot", "content": "x"}]}': "role 'robot'",
    b'{"messages": [{"role": "user", "content": ["x"]}]}': "of type text",
    b'{"messages": [{"role": "assistant", "content": "x"}]}': "no turn to answer",
    b'{"prompt": "\xff"}': "not UTF-8",
}  # fmt: skip
# what is read, the files that are there, and what is said of them
UNREADABLE: list[tuple[str, dict[str, bytes], str]] = [
    ("none.jsonl", {}, "no such file"), ("none.parquet", {}, "no such file"),
    ("cut.jsonl.gz", {"": gzip.compress(b'{"prompt": "a"}\n' * 1000)[:40]}, r"cut\.jsonl\.gz: unreadable"),
    ("array.json", {"": b'[{"prompt": "a"}, 3]'}, "array.json:2: expected a JSON object"),
    ("cut.json", {"": b'[{"prompt": "a"}'}, "cut.json: not JSON"),
    ("cells.csv", {"": b"prompt\na\nb,c\n"}, "cells.csv:3: more cells"),
    ("columns.csv", {"": b"prompt,response,prompt\na,b,c\n"}, "columns.csv:1: two columns are called 'prompt'"),
    ("wide.csv", {"": "prompt,response\na,c\n".encode("utf-16")}, "wide.csv:1: .*UTF-8"),
    ("rows.arrow", {"": b"ARROW1"}, "rows.arrow: files of this kind are not read. Unpack it, or write .jsonl"),
    ("quotes.csv", {"": b'prompt\na\n"b\n'}, "quotes.csv:2: no table row"),
    ("cut.parquet", {"": b"PAR1 and then nothing"}, r"cut\.parquet: unreadable after row 0"),
    ("other", {"a.jsonl": b"{}"}, r"neither \.parquet files nor a dataset"),
    ("splits", {"test-0.parquet": b"", "validation-0.parquet": b""}, "none called train"),
    *(("bad.jsonl", {"": b'"fine"\n' + line}, f"bad.jsonl:2.*{problem}") for line, problem in MALFORMED.items()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "files", "message"), UNREADABLE)
def test_files_that_cannot_be_read(name: str, files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    for inner, content in files.items():
        path = tmp_path / name / inner
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_prompts(tmp_path / name))


def test_answers_that_do_not_continue_their_prompt_are_refused() -> None:
    with pytest.raises(DataError, match="prompt before assistant turn 1 are not a prefix"):
        encode_conversation(tiny_tokenizer(OTHERWISE), [USER, BOT, MORE, LAST])
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError, match="not begin with one"):
        encode_conversation(tokenizer, [BOT, USER, LAST])


def test_an_answer_whose_first_characters_join_its_prompt_is_trained_as_decoding_sees_it() -> None:
    tokenizer = tiny_tokenizer()  # the template's newline and the answer's own become one token
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    joined = {"role": "assistant", "content": "\n\nthe"}
    prompt = encode_chat(tokenizer, [USER])
    [(ids, mask)] = encode_conversation(tokenizer, [USER, joined])
    assert ids[: len(prompt)] == prompt and mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    assert tokenizer.decode(ids[len(prompt) :]) == "\n\nthe<|end|>"
    # in a conversation it is a sequence of its own, and the other answers share one
    turns = [USER, BOT, MORE, joined, MORE, LAST]
    alone, shared = encode_conversation(tokenizer, turns)
    prompt = encode_chat(tokenizer, turns[:3])
    assert alone[0] == [*prompt, *ids[-3:]] or tokenizer.decode(alone[0][len(prompt) :]) == "\n\nthe<|end|>"
    assert alone[0][: len(prompt)] == prompt and alone[1].index(1) == len(prompt)
    said = [token for token, wanted in zip(*shared) if wanted]
    assert tokenizer.decode(said) == "it is there<|end|>sat on the mat<|end|>"


ENDS = [
    (CHATML, "<|end|>"),
    (CHATML.replace("<|end|>", "<|pad|>"), "<|pad|>"),
    (CHATML.replace("<|end|>", "<|pad|>") + "{{ eos_token }}", "<|pad|>"),  # the turn's end, then the text's
    (CHATML.replace("<|end|>", "<|pad|><|end|>"), "<|pad|><|end|>"),  # as Command-R's
    ("<|start|>S<|end|>" + CHATML.replace("<|end|>", "<|pad|><|end|>"), "<|pad|><|end|>"),  # as Command-R7B's
    ("{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}" + CHATML, "<|end|>"),
    (CHATML.replace("<|end|>", ""), "<|end|>"),  # no end: the tokenizer's eos
    (None, "<|end|>"),
]


@pytest.mark.parametrize(("template", "end"), ENDS)
def test_the_end_of_a_turn_is_what_the_template_writes_behind_an_answer(template: str | None, end: str) -> None:
    tokenizer = tiny_tokenizer(template)
    assert tokenizer.decode(end_of_turn(tokenizer)) == end


def test_measurements_give_a_rows_tools_to_the_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("{% if tools %}{{ tools[0].function.name }}{% endif %}{{ mood }}" + CHATML)
    offered = [{"type": "function", "function": {"name": "the_cat", "parameters": {}}}]
    rows = [{"prompt": "a", "tools": json.dumps(offered), "chat_template_kwargs": {"mood": "sat"}}, {"prompt": "a"}]
    read = list(read_prompts(write_rows(tmp_path / "p.jsonl", rows)))
    texts = [tokenizer.decode(ids) for ids in encode_rows(read, Encoder("toy", tokenizer))]
    assert texts[0] == "the_catsat" + texts[1]
    for row in (rows[0], {"messages": [{"role": "system", "content": "s"}, USER]}):
        read = list(read_prompts(write_rows(tmp_path / "p.jsonl", [row])))
        with pytest.raises(DataError, match="p.jsonl:1: .*--raw does not support"):
            encode_rows(read, Encoder("toy", tokenizer, raw=True))


SYSTEM = {"role": "system", "content": "assistant"}
IT = {"role": "assistant", "content": "it"}
TURNS = [SYSTEM, USER, BOT, MORE, LAST]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}.get(turn["role"], turn["role"]), "value": turn["content"]}
    for turn in TURNS
]


def asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


PARTS = [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "f"}]}]
# forms of a row -> the turns before the last answer, and all of them if it has one
FORMS: list[tuple[dict[str, Any], list[dict[str, str]], list[dict[str, str]] | None]] = [
    ({"question": "b", "answer": "#### 1"}, asks("b"), None),
    ({"turns": ["c", "later"]}, asks("c"), None),
    ({"instruction": "Add:", "input": "1 and 2", "answer": "3"}, asks("Add:\n\n1 and 2"), None),
    ({"instruction": "Sum up.", "context": "d", "response": "e"}, asks("Sum up.\n\nd"), None),
    ({"instruction": "Add:", "input": "1 and 2", "output": IT["content"]}, asks("Add:\n\n1 and 2"),
     [*asks("Add:\n\n1 and 2"), IT]),
    ({"input": "b", "instruction": None, "output": [IT], "data": "d"}, asks("b"), [*asks("b"), IT]),
    ({"messages": TURNS, "output": "not this"}, TURNS[:-1], TURNS),
    ({"problem": "g", "solution": "h"}, asks("g"), None),
    ({"conversation": [USER, BOT], "language": "English"}, [USER], None),
    ({"messages": PARTS}, [{"role": "system", "content": "s"}, *asks("f")], None),
    ({"messages": TURNS, "prompt": "not this"}, TURNS[:-1], TURNS),
    ({"conversations": SHAREGPT}, TURNS[:-1], TURNS),
    ({"conversations": TURNS}, TURNS[:-1], TURNS),
    ({"messages": TURNS[:-1], "response": LAST["content"]}, TURNS[:-1], TURNS),
    ({"messages": TURNS, "response": "it"}, TURNS[:-1], [*TURNS[:-1], IT]),
    ({"prompt": USER["content"], "response": BOT["content"]}, [USER], [USER, BOT]),
    ({"prompt": TURNS[:-1], "completion": [LAST]}, TURNS[:-1], TURNS),
    ({"messages": None, "prompt": USER["content"], "completion": BOT["content"]}, [USER], [USER, BOT]),
    ({"conversations": [SHAREGPT[2], *SHAREGPT[1:3]]}, [USER], [USER, BOT]),  # an answer to nothing
    ({"messages": [*TURNS, MORE]}, [*TURNS, MORE], TURNS),  # a question without an answer
]  # fmt: skip


@pytest.mark.parametrize(("row", "prompt", "whole"), FORMS)
def test_every_form_of_a_row_gives_its_turns(
    row: dict[str, Any], prompt: list[dict[str, str]], whole: list[dict[str, str]] | None
) -> None:
    assert row_messages(row) == prompt
    assert whole is None or row_conversation(row) == whole


# files

ROWS: list[dict[str, Any]] = [
    {"conversations": SHAREGPT, "id": "first"},
    {"conversations": SHAREGPT[:3], "id": "second"},
]


def write(kind: str, folder: Path) -> Path:
    """Write the rows as a file or directory of that kind; return what a user would name."""
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list(ROWS)
    (folder / "data").mkdir(parents=True)
    if kind == "saved":
        rows.save_to_disk(str(folder))
    elif kind == "saved splits":
        DatasetDict({"train": rows, "test": rows}).save_to_disk(str(folder))
    elif kind == "parquet folder":
        for number in range(2):
            rows.select([number]).to_parquet(folder / f"part-{number}.parquet")
    else:
        for split in ("train", "test"):
            rows.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder / "data" / "train-00000-of-00001.parquet" if kind == "parquet" else folder


KINDS = ["parquet", "parquet folder", "parquet hub folder", "saved", "saved splits"]


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


# masks

OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"


def marked(answer: str) -> str:
    """CHATML with a block for assistant turns; it is written as in the `answer` given."""
    return CHATML.replace(
        "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}",
        "{{ '<|start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}" + answer
        + "{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{{ '\n' }}",
    )  # fmt: skip


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


BLOCKS = [
    # the block also holds what the template puts after the end
    (OPEN + "{{ m['content'] + '<|end|>\n' }}" + CLOSE, "it is <|start|> there<|end|>sat on the mat<|end|>"),
    # earlier answers are shortened: the target produced the whole
    (OPEN + "{{ (m['content'] if loop.last else m['content'].split()[-1]) + '<|end|>' }}" + CLOSE,
     "it is <|start|> there<|end|>sat on the mat<|end|>"),
    # without the end it is taken as it is
    (OPEN + "{{ m['content'] }}" + CLOSE + "{{ '<|end|>' }}", "it is <|start|> theresat on the mat"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "kept"), BLOCKS)
def test_blocks_are_taken_up_to_the_end(answer: str, kept: str) -> None:
    tokenizer = tiny_tokenizer(marked(answer))
    inside = {"role": "assistant", "content": "it is <|start|> there"}  # a special token within the answer
    pairs = [pair for each in encode_conversation(tokenizer, [USER, inside, MORE, LAST]) for pair in zip(*each)]
    assert tokenizer.decode([token for token, wanted in pairs if wanted]) == kept


def test_markers_that_leave_out_a_turn_are_refused() -> None:
    only_last = marked(
        "{% if loop.last %}" + OPEN + "{{ m['content'] + '<|end|>' }}" + CLOSE
        + "{% else %}{{ m['content'] + '<|end|>' }}{% endif %}"
    )  # fmt: skip
    encode_conversation(tiny_tokenizer(only_last), [USER, BOT])
    with pytest.raises(DataError, match="mark 1 of 2 assistant turns"):
        encode_conversation(tiny_tokenizer(only_last), [USER, BOT, MORE, LAST])
