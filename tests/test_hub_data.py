"""Datasets by their names on a hub: streamed, of a split and a revision, with other columns; each fault is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsd_infer.chat.conversations import row_conversation, row_messages
from fsd_infer.chat.hub_rows import HubRows, is_hub_name
from fsd_infer.errors import DataError
from tests.loopback_hub import loopback_hub


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


CHAT = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(5)
]
FILES = {
    "me/chat": {
        "README.md": b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train_sft\n"
        b"    path: sft.jsonl\n  - split: test\n    path: test.jsonl\n---\n",
        "sft.jsonl": lines(CHAT),
        "test.jsonl": lines(CHAT[:1]),
    },
    "me/shares": {
        "train.jsonl": lines(
            [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "id": "x"}]
        ),
    },
    "me/ultra": {"train.jsonl": lines([{"id": "0", "data": ["ask", "answer", "again", "more"]}])},
}
OLD = {"train.jsonl": lines([{"instruction": "say", "said": "old"}])}  # of revision v1


@contextmanager
def data_hub() -> Iterator[str]:
    """The address of a hub with these data sets."""
    with loopback_hub() as hub:
        for name, files in FILES.items():
            hub.add(name, files, kind="datasets")
        hub.add("me/shares", OLD, revision="v1", kind="datasets")
        yield hub.url


@pytest.fixture(scope="module")
def read(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Reads names in a process whose hub is the loopback's: [[row, ...] or the error's text, ...]."""
    home = tmp_path_factory.mktemp("hub")
    code = (
        "import json, sys\nfrom fsd_infer.chat.rows import read_rows, rows_digest\n"
        "from fsd_infer.errors import DataError\n"
        "found = []\nfor name in sys.argv[1:]:\n    try:\n        rows = list(read_rows(name))\n"
        "        found.append([[row.where, row.values] for row in rows] + [rows_digest(name)])\n"
        "    except DataError as error:\n        found.append(str(error))\nprint(json.dumps(found))"
    )
    with data_hub() as address:
        options = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}

        def run(*names: str, **more: str) -> list[Any]:
            environment = {**os.environ, **options, "PYTHONPATH": str(repo_root), **more}
            done = subprocess.run([sys.executable, "-c", code, *names], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        yield run


def test_rows_come_from_the_hub(read: Any) -> None:
    chat, first, shares, old, ultra = read(
        "hf:me/chat?split=train_sft", "hf:me/chat@main?split=train_sft&limit=2", "hf:me/shares",
        "hf:me/shares@v1?response=said", "hf:me/ultra",
    )  # fmt: skip
    assert [row[1]["messages"] for row in chat[:-1]] == [row["messages"] for row in CHAT]
    assert chat[0][0] == "hf:me/chat?split=train_sft:1" and len(first) == 3 and first[:-1][0][1] == chat[0][1]
    assert row_messages(shares[0][1]) == [{"role": "user", "content": "hi"}]
    assert [turn["content"] for turn in row_conversation(old[0][1])] == ["say", "old"]
    assert [turn["role"] for turn in row_conversation(ultra[0][1])] == ["user", "assistant"] * 2
    digests = [found[-1] for found in (chat, first, shares, old, ultra)]
    assert len(set(digests)) == 5 and all(len(digest) == 64 for digest in digests)


def test_each_fault_is_one_line(read: Any) -> None:
    gone, revision, split, column = read(
        "hf:me/nothing", "hf:me/shares@v9", "hf:me/chat?split=valid", "hf:me/shares?prompt=text"
    )
    for text, words in ((gone, "hf:me/nothing"), (revision, "hf:me/shares@v9"), (split, "valid"), (column, "'text'")):
        assert words in text and "\n" not in text
    (offline,) = read("hf:me/chat?split=train_sft", HF_ENDPOINT="http://127.0.0.1:9")
    assert "hf:me/chat: unreadable" in offline


def test_names() -> None:
    assert is_hub_name("hf:me/x") and not is_hub_name("me/x") and is_hub_name(Path("hf:me/x@v1"))
    assert HubRows.parse("hf:me/x.y@v1?config=en&limit=3&prompt=q&response=a") == HubRows(
        "me/x.y", "v1", "train", "en", 3, {"prompt": "q", "response": "a"}
    )
    for wrong in ("hf:me", "hf:me/x?limit=0", "hf:me/x?colour=red", "hf:me/x?split=", "hf:a/b/c"):
        with pytest.raises(DataError, match="hf:"):
            HubRows.parse(wrong)


def test_a_recipe_and_the_bench_take_names(read: Any, repo_root: Path, tmp_path: Path) -> None:
    """One command of each: the names go through paths, records and digests as they are."""
    code = (
        "from fsd_infer.chat.encoding import read_prompts\n"
        "from fsd_train.data.answers import read_answers\nfrom tests.text_toys import tiny_tokenizer\n"
        "rows, held = read_answers(['hf:me/chat?split=train_sft'], tiny_tokenizer(), validation_fraction=0.3)\n"
        "prompts = list(read_prompts('hf:me/chat?split=train_sft&limit=3'))\n"
        "print(len(rows) + len(held), len(prompts), prompts[0].messages[0]['content'])"
    )
    with data_hub() as address:
        environment = {
            **os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path),
            "PYTHONPATH": str(repo_root),
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["5", "3", "q0"], done.stderr
