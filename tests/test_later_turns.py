"""Later user turns: every method continues its own answers, also after a kill, and only where that is asked for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fsd_bench.runner import run
from fsd_core.errors import FsdError
from fsd_core.text.encoding import encode_chat
from fsd_infer import FuzzyDecoder, TreeShape
from tests.bench_toys import Toy
from tests.text_toys import write_rows

ROWS = [
    {"category": "writing", "turns": ["the cat sat", "and then the dog", "on the mat"]},
    {"category": "writing", "turns": ["the dog ran"]},
    {"category": "qa", "turns": ["the mat", "the cat"]},
]
SHAPE = TreeShape(depth=3, width=1, nodes=4)
METHODS = ["exact", "draft-only"]


def digest(tokens: list[int]) -> str:
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:8]


def measured(toy: Toy, file: Path, **options: Any) -> dict[str, Any]:
    given = {
        **toy.options, "max_new_tokens": 5, "batch_size": 2, "warmup": False, "layout": "mt-bench", "tree": SHAPE,
        **options,
    }  # fmt: skip
    return run(write_rows(file.with_suffix(".jsonl"), ROWS), METHODS, json_path=file, **given)


def test_each_method_continues_its_own_answers(toy: Toy, toy_decoder: FuzzyDecoder, tmp_path: Path) -> None:
    record = measured(toy, tmp_path / "all.json", log_likelihood=True)
    names = [prompt["category"] for prompt in record["prompts"]]
    assert names == ["writing", "writing", "qa", "writing, turn 2", "qa, turn 2", "writing, turn 3"]
    tokenizer, drafter = toy_decoder.tokenizer, toy_decoder.drafter.with_shape(SHAPE)
    for method in METHODS:
        for place, later in ((0, (3, 5)), (2, (4,))):
            turns: list[dict[str, str]] = []
            for text, at in zip(ROWS[place]["turns"], (place, *later), strict=True):
                turns.append({"role": "user", "content": text})
                ids = encode_chat(tokenizer, turns)
                made = toy_decoder.generate([ids], method, drafter=drafter, max_new_tokens=5, do_sample=False)
                (answer,) = record["prompts"][at]["methods"][method]
                assert answer["tokens_sha256"] == digest(made.sequences[0]), (method, at)
                turns.append(
                    {"role": "assistant", "content": tokenizer.decode(made.sequences[0], skip_special_tokens=True)}
                )
                assert method != "exact" or record["prompts"][at]["prompt_tokens"] == len(ids)
    firsts = [len(measured(toy, tmp_path / f"{name}.json", **more)["prompts"]) for name, more in (
        ("one", {"turns": 1}), ("two", {"turns": 2}), ("raw", {"raw": True}), ("own", {"layout": None}),
    )]  # fmt: skip
    assert firsts == [3, 5, 3, 3]
    with pytest.raises(FsdError, match="leave out --raw and --isolate"):
        measured(toy, tmp_path / "bad.json", turns=2, raw=True)


def test_a_later_turn_goes_on_after_a_kill(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(toy, tmp_path / "all.json")
    kept: list[str] = []
    monkeypatch.setattr("fsd_bench.runner.write_record", lambda path, record: kept.append(partial.read_text()) or 1 / 0)
    partial = tmp_path / "cut.json.partial.jsonl"
    with pytest.raises(ZeroDivisionError):
        measured(toy, tmp_path / "cut.json")
    monkeypatch.undo()
    lines = kept[0].splitlines(keepends=True)
    runs = [number for number, line in enumerate(lines) if '"trial"' in line]
    partial.write_text("".join(lines[: runs[-3]]))
    again = measured(toy, tmp_path / "cut.json", resume=True)
    made = [[[prompt["methods"][name][0]["tokens_sha256"] for name in METHODS] for prompt in record["prompts"]]
            for record in (whole, again)]  # fmt: skip
    assert made[0] == made[1] and len(json.loads((tmp_path / "cut.json").read_text())["prompts"]) == 6
