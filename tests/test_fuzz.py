"""Malformed rules, options and rows, by the hundred: each ends in one line or in an answer.

Rules, divergences and options come from the registries and the parsers, so new ones are covered. Heads and the files
that commands read have their own suites, tests/test_head_malformed.py and tests/test_fuzz_files.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from fsd_bench.cli import build_parser as build_bench_parser
from fsd_bench.cli import main as bench_main
from fsd_bench.score import asked_options, read_references
from fsd_core.console import BAD_INPUT
from fsd_core.divergence import DIVERGENCES
from fsd_core.errors import DataError
from fsd_core.registry import read_float
from fsd_core.text.conversations import row_conversation, row_questions
from fsd_core.text.encoding import encode_chat, read_prompts
from fsd_core.text.masks import encode_conversation
from fsd_core.text.rows import read_rows
from fsd_infer import FuzzyDecoder
from fsd_infer.cli.main import build_parser, main
from fsd_infer.rules import RULES, parse_rule, rule_text
from fsd_train.commands.command_lines import PARSERS
from tests.bench_toys import Toy
from tests.fuzzing import FUZZ, JUNK, NUMERALS, one_line, refusal, spoilt, values


@st.composite
def rule_texts(draw: st.DrawFn) -> str:
    """Draw a rule's text: mostly a known name, with parameters by position or by name, perhaps repeated."""
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
    """Return whether Python reads a number from text that is no plain numeral."""
    try:
        return read_float(text) is None and not math.isnan(float(text))
    except ValueError:
        return False


@settings(FUZZ, max_examples=200)
@given(text=rule_texts(), warm=st.booleans())
def test_rules_as_text(text: str, warm: bool, toy_decoder: FuzzyDecoder) -> None:
    made: list[Any] = []
    if refusal(lambda: made.append(parse_rule(text))) is not None:
        return
    [rule] = made
    assert not any(is_a_slip(part.rpartition("=")[2]) for part in text.split(":")), "read as another number"
    said = json.dumps(rule.describe())
    assert "NaN" not in said and parse_rule(rule_text(rule)) == rule
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 1} if warm else {"do_sample": False}
    error = refusal(lambda: toy_decoder.generate([5, 6, 7], rule=rule, max_new_tokens=4, **sampling))
    assert error is None or "temperature 0" in str(error) or "no such phase" in str(error)


@st.composite
def arguments(draw: st.DrawFn, parser: argparse.ArgumentParser, least: int) -> list[str]:
    """Draw up to four options of a parser with valid or invalid values, and at times a stray argument."""
    known = [action for action in parser._actions if action.dest not in ("help", "debug")]
    argv = []
    for action in draw(st.lists(st.sampled_from(known), min_size=least, max_size=4, unique_by=id)):
        name = draw(st.sampled_from(action.option_strings)) if action.option_strings else ""
        value = draw(st.sampled_from(list(action.choices)) if action.choices and draw(st.booleans()) else values)
        argv.append(name if action.nargs == 0 else f"{name}={value}" if name else str(value))
    if draw(st.integers(0, 19)) == 0:
        argv.append(draw(values))
    return argv


def command(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command of `fsd-infer` or `fsd-bench`."""
    parsers = (build_parser(), build_bench_parser())
    actions = [action for parser in parsers for action in parser._actions if isinstance(action.choices, dict)]
    return {name: parser for action in actions for name, parser in dict(action.choices or {}).items()}[name]


@settings(FUZZ, max_examples=60)
@given(data=st.data(), name=st.sampled_from(["generate", "generate", "run", "warmup"]))
def test_command_lines(
    data: st.DataObject,
    name: str,
    toy: Toy,
    toy_decoder: FuzzyDecoder,
    monkeypatch: pytest.MonkeyPatch,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = data.draw(arguments(command(name), 1))
    load = FuzzyDecoder.from_pretrained
    usual = {"dtype": torch.float32, "device": torch.device("cpu"), "tree": None}

    def loaded(target: str, drafter: str, **given: Any) -> FuzzyDecoder:
        same = (target, drafter) == (str(toy.target), str(toy.drafter)) and given.items() >= usual.items()
        return toy_decoder if same else load(target, drafter, **given)

    monkeypatch.setattr(FuzzyDecoder, "from_pretrained", loaded)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    argv = [name, *toy.models, "--device", "cpu"]
    argv += {"generate": ["--prompt", "the cat"], "run": ["--prompts", str(toy.prompts)], "warmup": []}[name]
    argv += [] if name == "warmup" else ["--max-new-tokens", "3"]
    argv += ["--methods", "plain", "--limit", "1", "--no-warmup"] if name == "run" else []
    try:
        status = (bench_main if name == "run" else main)([*argv, *options])
    except SystemExit as stop:
        status = stop.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert status in (0, BAD_INPUT), said
    if status == BAD_INPUT:
        told = said.replace("\r", "\n").split("\n")
        lines = [text for text in told if text.strip() and not text.startswith("warning: ")]  # of former names
        program = "fsd-bench" if name == "run" else "fsd-infer"
        assert lines[-1].startswith(program) and (len(lines) == 1 or name == "run"), said
        one_line(lines[-1])


@settings(FUZZ, max_examples=150)
@given(data=st.data(), name=st.sampled_from(sorted(PARSERS)))
def test_options_of_the_training_commands(data: st.DataObject, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = PARSERS[name]()
    for action in parser._actions:
        action.required = False  # or most lines would fail here, whatever they hold
    argv = data.draw(arguments(parser, 0))
    try:
        found = parser.parse_args(argv)
    except SystemExit as stop:
        said = capsys.readouterr().err
        assert stop.code == BAD_INPUT and said.startswith(f"fsd-train {name}: ") and said.count("\n") == 1, said
        one_line(said.strip())
    else:
        counts = [value for name, value in vars(found).items() if isinstance(value, int) and name != "seed"]
        assert all(0 <= value < 2**31 for value in counts)


ROWS: list[dict[str, Any]] = [
    {"turns": ["the cat sat", "and then?"], "category": "cats", "id": 7, "answer": "#### 18"},
    {"prompt": "what is it? Answer format: yes/no", "response": "it is", "source": "here", "answer": "yes"},
    {"prompt": [{"role": "user", "content": "the cat"}], "completion": [{"role": "assistant", "content": "sat"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "reference": ["a", "b"]},
    {"conversations": [{"from": "human", "value": "the"}, {"from": "gpt", "value": "cat"}]},
    {"instruction": "the", "input": "cat", "output": "sat"},
    {"question": "the cat?", "answer": 18.0},
    {"prompt_ids": [1, 2, 299], "response_ids": [3, 4], "messages": None, "response": "x"},
    {"data": ["the", "cat", "sat", "on"], "chat_template_kwargs": {"loud": True}, "finish_reason": "length"},
    {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "<|start|>", "thinking": "t", "weight": 0},
    ], "tools": "[]"},
]  # fmt: skip


@settings(FUZZ, max_examples=150)
@given(data=st.data())
def test_prompt_files(data: st.DataObject, toy_decoder: FuzzyDecoder, tmp_path: Path) -> None:
    """Every reader takes or refuses rows with spoilt values and spoilt lines."""
    rows: list[Any] = data.draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=3))
    for _ in range(data.draw(st.integers(0, 2))):
        rows = spoilt(rows, data.draw) or [None]
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


ARGUMENTS = ("seed", "chat", "max_cache_bytes", "streamer", "drafter", "prompts", "rule", "beam_options")
OPTIONS = sorted({*vars(GenerationConfig()), *ARGUMENTS, "logits_processor", "stopping_criteria", "generation_config"})
VALUES = [
    *JUNK, [1, 2], ["the"], {"x": 1}, b"x", object(), 2**70, torch.ones(2), ["exact", "exact"], [{"role": "user"}],
]  # fmt: skip


@settings(FUZZ, max_examples=150)
@given(data=st.data())
def test_options_in_python(data: st.DataObject, toy_decoder: FuzzyDecoder) -> None:
    names = data.draw(st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=2, unique=True))
    given = {name: data.draw(st.sampled_from(VALUES)) for name in names}
    given = {"prompts": [5, 6, 7], "max_new_tokens": 2, "do_sample": False, **given}
    refusal(lambda: toy_decoder.generate(**given))
