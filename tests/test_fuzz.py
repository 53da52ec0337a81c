"""Malformed rules, options and prompt files, by the hundred: each ends in one line, or in an answer.

Rules, divergences and options are read from the registries and the parser, so that new ones are tried too. Heads have
a suite of their own, tests/test_head_malformed.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsd_bench.score import asked_options, read_references
from fsd_infer import FuzzyDecoder
from fsd_infer.chat.conversations import row_conversation, row_questions
from fsd_infer.chat.encoding import encode_chat, encode_conversation, read_prompts
from fsd_infer.chat.rows import read_rows
from fsd_infer.cli.main import build_parser, main
from fsd_infer.cli.run import BAD_INPUT
from fsd_infer.divergence import DIVERGENCES
from fsd_infer.errors import DataError
from fsd_infer.numerals import read_float
from fsd_infer.rules import RULES, parse_rule
from tests.bench_toys import Toy
from tests.fuzzing import FUZZ, NUMERALS, one_line, refusal, values
from tests.test_head_malformed import JUNK, changed, places


@st.composite
def rule_texts(draw: st.DrawFn) -> str:
    """A rule's name, mostly, and parts that its parameters might be, by position or by name, once or twice."""
    name = draw(st.sampled_from(sorted(RULES)))
    rule: Any = RULES.get(name)
    keys = st.sampled_from([*(field.name for field in dataclasses.fields(rule)), "gate", "name", "budget", ""])
    divergences = st.sampled_from(sorted(DIVERGENCES)).flatmap(
        lambda found: st.just(found) | st.sampled_from(NUMERALS).map(lambda k: f"{found}:{k}")
    )
    value = values | divergences | st.sampled_from(["0.3", "1", "2", "raw", "none"])
    part = value | st.tuples(keys, value).map("=".join)
    parts = draw(st.lists(part, max_size=4))
    if draw(st.integers(0, 9)) == 0:
        name = draw(values)
    return ":".join([name, *parts])


def is_a_slip(text: str) -> bool:
    """Python reads a number here that the text, read as people write numbers, is not."""
    try:
        return read_float(text) is None and not math.isnan(float(text))
    except ValueError:
        return False


@settings(FUZZ, max_examples=400)
@given(text=rule_texts(), warm=st.booleans())
def test_rules_as_text(text: str, warm: bool, toy_decoder: FuzzyDecoder) -> None:
    made: list[Any] = []
    if refusal(lambda: made.append(parse_rule(text))) is not None:
        return
    [rule] = made
    assert not any(is_a_slip(part.rpartition("=")[2]) for part in text.split(":")), "read as another number"
    said = json.dumps(rule.describe())
    assert "NaN" not in said and parse_rule(text) == rule
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 1} if warm else {"do_sample": False}
    error = refusal(lambda: toy_decoder.generate([5, 6, 7], rule, max_new_tokens=4, **sampling))
    assert error is None or "temperature 0" in str(error)


def options_of(command: str) -> list[Any]:
    """What the parser of a command takes, but what would end it at once (--help)."""
    [commands] = [action for action in build_parser()._actions if isinstance(action.choices, dict)]
    assert isinstance(commands.choices, dict)
    actions = commands.choices[command]._actions
    return [action for action in actions if action.option_strings and action.dest not in ("help", "debug")]


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    """(command, options) with one to three options, each of a value that it may or may not take."""
    command = draw(st.sampled_from(["generate", "generate", "bench", "warmup"]))
    argv = []
    for action in draw(st.lists(st.sampled_from(options_of(command)), min_size=1, max_size=3, unique_by=id)):
        option = draw(st.sampled_from(action.option_strings))
        value = draw(st.sampled_from(action.choices) if action.choices and draw(st.booleans()) else values)
        argv.append(option if action.nargs == 0 else f"{option}={value}")
    if draw(st.integers(0, 19)) == 0:
        argv.append(draw(values))
    return command, argv


@settings(FUZZ, max_examples=250)
@given(line=command_lines())
def test_command_lines(
    line: tuple[str, list[str]],
    toy: Toy,
    toy_decoder: FuzzyDecoder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, options = line
    load = FuzzyDecoder.from_pretrained
    usual = {"dtype": torch.float32, "device": torch.device("cpu"), "tree": None}

    def loaded(target: str, drafter: str, **given: Any) -> FuzzyDecoder:
        same = (target, drafter) == (str(toy.target), str(toy.drafter)) and given.items() >= usual.items()
        return toy_decoder if same else load(target, drafter, **given)

    monkeypatch.setattr(FuzzyDecoder, "from_pretrained", loaded)
    monkeypatch.chdir(tmp_path)  # where records of odd names may be written
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    argv = [command, *toy.models, "--device", "cpu"]
    argv += {"generate": ["--prompt", "the cat"], "bench": ["--prompts", str(toy.prompts)], "warmup": []}[command]
    argv += [] if command == "warmup" else ["--max-new-tokens", "3"]
    argv += ["--methods", "plain", "--limit", "1", "--no-warmup"] if command == "bench" else []
    try:
        status = main([*argv, *options])
    except SystemExit as stop:
        status = stop.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert status in (0, BAD_INPUT), said
    if status == BAD_INPUT:
        lines = [text for text in said.replace("\r", "\n").split("\n") if text.strip()]
        assert lines[-1].startswith("fsd-infer") and (len(lines) == 1 or command == "bench"), said
        one_line(lines[-1])


ROWS: list[dict[str, Any]] = [
    {"turns": ["the cat sat", "and then?"], "category": "cats", "id": 7, "answer": "#### 18"},
    {"prompt": "what is it? Answer format: yes/no", "response": "it is", "source": "here", "answer": "yes"},
    {"prompt": [{"role": "user", "content": "the cat"}], "completion": [{"role": "assistant", "content": "sat"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "reference": ["a", "b"]},
    {"conversations": [{"from": "human", "value": "the"}, {"from": "gpt", "value": "cat"}]},
    {"instruction": "the", "input": "cat", "output": "sat"},
    {"question": "the cat?", "answer": 18.0},
]


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_prompt_files(data: st.DataObject, toy_decoder: FuzzyDecoder, tmp_path: Path) -> None:
    """Rows with values replaced, removed or added; lines cut, joined or overwritten; all read as every reader does."""
    rows: list[Any] = data.draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=3))
    for _ in range(data.draw(st.integers(0, 2))):
        path = data.draw(st.sampled_from(places(rows)))
        new = data.draw(st.sampled_from([*JUNK, KeyError]) | st.recursive(st.none() | st.text(), st.lists))
        rows = changed(rows, path, new) or [None]
    suffix = data.draw(st.sampled_from([".jsonl", ".jsonl", ".json", ".parquet", ".jsonl.gz"]))
    text = json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows))
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"[" * 9**5])
        )
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(content)

    def prompts() -> None:
        found = list(read_prompts(file))
        for kind in ("auto", "none"):
            read_references(found, kind)
        for row in found:
            asked_options(row)
            encode_chat(toy_decoder.tokenizer, row.messages)

    def conversations() -> None:
        for row in read_rows(file):
            row_questions(row.values, row.where)
            encode_conversation(toy_decoder.tokenizer, row_conversation(row.values, row.where))

    for read in (prompts, conversations):
        error = refusal(read)
        assert error is None or isinstance(error, DataError)
