"""`fsd-infer bench --isolate`: a process per method and block, blocks in turns, and any program as a method."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from pathlib import Path

import pytest

from benchmarks.peers import HERE
from fsd_bench import Answer, TimedRun, build_record, run
from fsd_bench.base import Turn
from fsd_bench.process import ProcessMethod
from fsd_bench.record import BenchPrompt
from fsd_infer import FsdError
from fsd_infer.cli.main import main
from tests.bench_toys import Toy

# answers with the prompt's last token, once per new token; writes down when it starts, answers and ends
ENGINE = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
from protocol import serve
log = open(sys.argv[1], "a")
def note(what): print(what, os.getpid(), file=log, flush=True)
def load():
    note("start")
    print("noise of a library", file=sys.stderr)
    def answer(prompts, new, temperature, seed):
        note("answer")
        if len(sys.argv) > 2 and new > 3 and open(sys.argv[1]).read().count("answer") > int(sys.argv[2]):
            sys.exit("RuntimeError: out of luck")
        answers = [{{"tokens": [prompt[-1]] * new, "stopped": False}} for prompt in prompts]
        return {{"seconds": 0.5, "first": 0.1, "answers": answers}}
    return answer, {{"by": "test"}}
serve(load, batches=True)
note("end")
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine.py"
    path.write_text(ENGINE)
    return path


def command(*words: str | Path) -> str:
    return "command:" + shlex.join([sys.executable, *map(str, words)])


def test_one_process_per_method_and_block(toy: Toy, engine: Path, tmp_path: Path) -> None:
    methods = [f"{name}={command(engine, tmp_path / 'log')}" for name in ("a", "b")]
    record = run(toy.prompts, methods, target=str(toy.target), dtype="fp32", max_new_tokens=4, isolate=2, repeat=2)
    events = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    lives = [events[i : i + 7] for i in range(0, len(events), 7)]
    assert len(lives) == 4, "two methods, two blocks"
    for life in lives:  # a warm-up and two prompts twice, and no other process meanwhile
        assert [what for what, _ in life] == ["start", *["answer"] * 5, "end"] and len({pid for _, pid in life}) == 1
    facts = record["methods"]["a"]
    assert facts["by"] == "test" and facts["load_seconds"] > 0 and facts["tau"] is None
    assert facts["tokens_per_second"] == 8 and facts["decode_tokens_per_second"] == pytest.approx(3 / 0.4)
    assert record["ratios"]["a"]["b"]["tokens_per_second"] == {"median": 1, "low": 1, "high": 1, "pairs": 2}


def test_answers_are_those_of_the_shared_process(toy: Toy) -> None:
    methods = ["plain", "exact@lookup", "hf-generate"]
    options = {**toy.options, "max_new_tokens": 8, "log_likelihood": True}
    alone, shared = (run(toy.prompts, methods, isolate=n, **options) for n in (1, None))
    for name in methods:
        for own, other in zip(alone["prompts"], shared["prompts"], strict=True):
            assert own["methods"][name][0]["tokens_sha256"] == other["methods"][name][0]["tokens_sha256"]
        for fact in ("tau", "log_likelihood_per_token", "by"):
            assert alone["methods"][name][fact] == shared["methods"][name][fact]
    assert set(alone["methods"]["exact@lookup"]["phases"]) == set(shared["methods"]["exact@lookup"]["phases"])


def test_process_that_dies_loses_nothing(
    toy: Toy, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, log = tmp_path / "record.json", tmp_path / "log"
    argv = ["bench", "--prompts", str(toy.prompts), "--target", str(toy.target), "--dtype", "fp32", "--no-warmup"]
    argv += ["--isolate", "2", "--max-new-tokens", "4", "--json", str(path)]
    argv += ["--methods", f"a={command(engine, log, '3')}"]
    assert main(argv) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "method 'a': its process ended with status 1: RuntimeError: out of luck" in said
    assert "3 finished runs are kept" in said and "--resume" in said
    log.write_text("")
    partial = path.with_name("record.json.partial.jsonl")
    with partial.open("a") as file:  # as a kill leaves it
        file.write('{"job": {"method": "a", "gro')
    for more, message in (([], "add --resume to continue it"), (["--resume", "--seed", "9"], "other settings (seed)")):
        assert main([*argv, *more]) == 2 and message in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0 and not partial.exists()
    assert log.read_text().count("answer") == 1, "what was measured is not measured again"
    record = json.loads(path.read_text())
    assert len(record["prompts"]) == 4 and record["methods"]["a"]["seconds_total"] == 4 * 0.5


def test_ratios_are_of_blocks_totals() -> None:
    def made(tokens: int, seconds: float) -> TimedRun:
        return TimedRun(seconds, 0.0, [Answer([0] * tokens, None, None)])

    prompts = [BenchPrompt(str(i), "x", "", [1]) for i in range(4)]
    slow, fast = [(10, 1.0), (10, 3.0), (20, 2.0), (30, 3.0)], [(10, 1.0), (10, 1.0), (20, 1.0), (30, 1.5)]
    turns = [Turn(i, 0, [i], {"slow": made(*slow[i]), "fast": made(*fast[i])}) for i in range(4)]
    record = build_record(prompts, {"slow": {}, "fast": {}}, turns, blocks={0: 0, 1: 0, 2: 1, 3: 1})
    assert record["methods"]["slow"]["tokens_per_second"] == statistics.median([20 / 4, 50 / 5])
    found = record["ratios"]["slow"]["fast"]["tokens_per_second"]
    assert found["median"] == pytest.approx(statistics.median([(20 / 2) / (20 / 4), (50 / 2.5) / (50 / 5)]))
    assert found["pairs"] == 2 and record["methods"]["slow"]["seconds_per_answer"] == pytest.approx((2 + 2.5) / 2)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (["no/such/program"], "no/such/program cannot be started"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "its process ended with status 3"),
        ([sys.executable, "-c", 'print(\'{"error": "no model there"}\')'], "no model there"),
    ],
)
def test_programs_that_cannot_run_are_named(program: list[str], message: str) -> None:
    with pytest.raises(FsdError, match=f"method 'x': {message}"):
        ProcessMethod("x", program)
