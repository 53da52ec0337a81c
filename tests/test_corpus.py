"""The corpus of the drafter memory: what is read, how it is indexed, and which index is refused."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from fsd_core.errors import DataError
from fsd_infer import FsdError, FuzzyDecoder, Target
from fsd_infer.cli.main import main
from fsd_infer.drafters import corpus as corpora
from fsd_infer.drafters.corpus import SUFFIX, open_corpus
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.drafters.suffix_store import END
from tests.test_free import drafted
from tests.text_toys import write_rows

ROWS: list[dict[str, Any]] = [{"text": f"the cat sat {n} times"} for n in range(30)]


@pytest.fixture(scope="module")
def target(toy_decoder: FuzzyDecoder) -> Target:
    return toy_decoder.target


def test_a_corpus_is_indexed_once_and_mapped(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    said = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    rows = [{"prompt_ids": ids[:3], "response_ids": ids[3:]}, {"text": "the cat sat on the mat"}, {"messages": said}]
    file = write_rows(tmp_path / "said.jsonl", rows)
    made = open_corpus(file, target)
    assert "indexing" in capsys.readouterr().err and made.tokens[:9].tolist() == [*ids, END]
    monkeypatch.setattr(corpora, "_build", None)
    again = open_corpus(str(file), target)
    assert np.array_equal(made.array, again.array) and np.array_equal(made.order, again.order)
    _, tree = drafted(load_drafter(f"memory:{file}", target), [[7, 4, 1, 5]])  # type: ignore[arg-type]
    assert tree.tokens[0].tolist()[1:4] == ids[5:]
    monkeypatch.undo()
    write_rows(file, [{"text": "the dog"}])
    os.utime(file, ns=(1, 1))
    assert len(open_corpus(file, target)) < 9, "a corpus that changed is indexed again"


def test_a_killed_indexing_begins_again(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed while it writes the index: none is there, and the next call makes it.

    What the kill left is removed, and what a process that lives is writing stays.
    """
    file = write_rows(tmp_path / "said.jsonl", [{"text": "the cat sat on the mat"}] * 5)

    def killed(tensors: Any, draft: Path, facts: Any) -> None:
        draft.write_bytes(b"half an index")
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as child:
        child.setattr(corpora, "save_file", killed)
        process = multiprocessing.get_context("fork").Process(target=open_corpus, args=(file, target))
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    index = tmp_path / f"said.jsonl{SUFFIX}"
    (left,) = tmp_path.glob(".*.partial")
    other = left.with_name(left.name.replace(f"-{process.pid}-", f"-{os.getppid()}-"))
    other.touch()
    assert not index.exists() and len(open_corpus(file, target)) > 5
    assert index.exists() and list(tmp_path.glob(".*.partial")) == [other]


ENDED = torch.tensor([1, END], dtype=torch.int32)


NO_INDEX = [
    (ENDED[:0], ENDED[:0]), (ENDED.bfloat16(), ENDED.bfloat16()), (ENDED[0], ENDED[0]), (ENDED, ENDED[:1]),
    (ENDED[None], ENDED[None]), (ENDED, ENDED), (ENDED.flip(0), ENDED.flip(0)), (ENDED.long(), ENDED.abs().long()),
]  # fmt: skip


def array_index(index: Path, tokens: torch.Tensor, order: torch.Tensor) -> bytes:
    """The content of an index with other arrays."""
    with safe_open(index, "pt") as file:
        return save({"tokens": tokens.clone(), "order": order.clone()}, file.metadata())


def test_an_index_that_is_not_right_is_refused_in_a_line(tmp_path: Path, target: Target) -> None:
    file = write_rows(tmp_path / "said.jsonl", [{"text": "the cat sat on the mat"}])
    index = tmp_path / f"said.jsonl{SUFFIX}"
    open_corpus(file, target)
    whole = index.read_bytes()
    other: Any = SimpleNamespace(
        fingerprint=lambda: {"vocabulary_sha256": "0"}, vocab_size=target.vocab_size, name="another"
    )
    foreign = "is of another tokenizer than another's. Delete it"
    for content, whose, message in (
        (whole, other, foreign),
        (whole[: len(whole) // 2], target, "truncated or damaged"),
        (b"nonsense" * 9, target, "truncated or damaged"),
        (whole[:-4] + b"\xff\xff\xff\x7f", target, "is damaged"),
        *((array_index(index, *arrays), target, "is damaged") for arrays in NO_INDEX),
    ):
        index.write_bytes(content)
        with pytest.raises(FsdError, match=message) as refused:
            open_corpus(file, whose)
        assert "\n" not in str(refused.value) and str(index) in str(refused.value)
    index.unlink()
    index.mkdir()
    with pytest.raises(FsdError, match="is not a file, where the corpus's index belongs"):
        open_corpus(file, target)
    with pytest.raises(FsdError, match="no rows"):
        open_corpus(write_rows(tmp_path / "empty.jsonl", []), target)
    assert not list(tmp_path.glob("*.lock"))
    with pytest.raises(FsdError, match="corpus .*none.jsonl: No such file"):
        open_corpus(tmp_path / "none.jsonl", target)


BAD_ROWS = [
    ({"prompt_ids": [10**9]}, "lists of whole numbers from 0 to"), ({"prompt_ids": [True]}, "lists of whole numbers"),
    ({"text": 5}, "`text` must hold text, found int"), ({"response_ids": [None]}, "lists of whole numbers"),
    ({"text": None}, "no prompt"), ({"text": "\ud800"}, "half of a surrogate pair"), ({"nothing": 1}, "no prompt"),
    ({"messages": [{"role": "x", "content": "a"}]}, "role 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_rows_without_a_text_are_left_out_and_counted(
    row: dict[str, Any], message: str, tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = open_corpus(write_rows(tmp_path / "whole.jsonl", ROWS), target)
    capsys.readouterr()
    file = write_rows(tmp_path / "some.jsonl", [*ROWS[:4], row, *ROWS[4:]])
    assert np.array_equal(open_corpus(file, target).array, whole.array)
    said = capsys.readouterr().err
    assert "skipped 1 of 31 rows" in said and f"1 x {file}:5: " in said and message in said
    with pytest.raises(DataError, match=rf"few.jsonl:2: .*{message}.* 1 of 2 rows cannot be used") as refused:
        open_corpus(write_rows(tmp_path / "few.jsonl", [ROWS[0], row]), target)
    assert "\n" not in str(refused.value)


def test_a_corpus_is_whatever_rows_are_read_from(tmp_path: Path, target: Target) -> None:
    """Texts, packed or not, Parquet with its nulls, directories of it; tests/test_prompts.py has the rest."""
    rows = [{**row, "prompt_ids": None, "response_ids": None} for row in ROWS[:3]]
    file, folder = write_rows(tmp_path / "said.jsonl", rows), tmp_path / "folder"
    wanted = open_corpus(file, target).array
    (tmp_path / "said.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    for place in (tmp_path / "said.jsonl.gz", folder / "train.parquet", folder):
        assert np.array_equal(open_corpus(place, target).array, wanted), place
    assert (tmp_path / f"folder{SUFFIX}").is_file()
    pq.write_table(pa.Table.from_pylist(rows[:1]), folder / "train.parquet")
    assert len(open_corpus(folder, target)) < len(wanted), "its files changed"


def test_a_pipe_is_no_corpus(tmp_path: Path, target: Target) -> None:
    """Reading one would wait for a writer."""
    (tmp_path / "folder").mkdir()
    for pipe in (tmp_path / "pipe.jsonl", tmp_path / "folder" / "said.parquet", tmp_path / f"said.jsonl{SUFFIX}"):
        os.mkfifo(pipe)
    write_rows(tmp_path / "said.jsonl", ROWS)
    for name, message in {"pipe.jsonl": "is a pipe", "folder": "t is a pipe", "said.jsonl": "is not a file"}.items():
        with pytest.raises(FsdError, match=message):
            open_corpus(tmp_path / name, target)


def test_long_indexing_reports_progress(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpora, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(corpora, "BATCH_ROWS", 10)
    made = open_corpus(write_rows(tmp_path / "said.jsonl", ROWS), target)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said[:3]] == [f"[said.jsonl] read {n} rows" for n in (10, 20, 30)]
    assert said[3] == f"[said.jsonl] indexing {len(made):,} tokens"


def test_the_command_line_names_a_corpus(tmp_path: Path, toy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_rows(tmp_path / "said.jsonl", [{"text": "the cat sat on the mat"}])
    words = ["generate", "--target", str(toy.target), "--prompt", "the cat", "--max-new-tokens", "4", "--json"]
    for drafter in ([], ["--drafter", "recycle+memory"]):
        assert main([*words, *drafter, "--dtype", "fp32", "--memory", str(file)]) == 0
        made = json.loads(capsys.readouterr().out)["stats"]["drafter"]
        assert made["name"] == "recycle+memory" and made["side"]["corpus"] > 5
    assert main([*words, "--memory", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: No such file" in capsys.readouterr().err
