"""The benchmark: its record, its ratios and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsd_bench import Answer, TimedRun, build_record, run
from fsd_bench.base import Turn
from fsd_bench.record import BenchPrompt
from fsd_bench.report import bench_table
from fsd_bench.runs import Job, RunFile
from fsd_infer import FsdError, TreeShape
from tests.bench_toys import Toy

METHODS = ["hf-generate", "hf-lookup:4", "plain", "exact", "fuzzy:js:0.3"]
NEW = 10


def toy_run(toy: Toy, methods: list[str], **options: Any) -> dict[str, Any]:
    return run(toy.prompts, methods, **{**toy.options, "max_new_tokens": NEW, **options})


@pytest.fixture(scope="module")
def record_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record") / "results" / "bench.json"


@pytest.fixture(scope="module")
def record(toy: Toy, record_file: Path) -> dict[str, Any]:
    options = dict(repeat=2, log_likelihood=True, seed=5, command=["fsd-infer", "bench"])
    chain = TreeShape.chain(5)  # left to itself a drafter as large as its target drafts nothing
    return toy_run(toy, METHODS, json_path=record_file, tree=chain, **options)


def test_greedy_exact_methods_agree_token_for_token(record: dict[str, Any]) -> None:
    for row in record["prompts"]:  # two repeats of four methods
        assert len({run["tokens_sha256"] for name in METHODS[:4] for run in row["methods"][name]}) == 1
    methods = record["methods"]
    assert all(methods[name]["identical_to_baseline"] == 1.0 for name in METHODS[:4])
    for name in ("plain", "hf-generate"):
        assert methods[name]["tau"] == 1.0
        assert methods[name]["target_forwards"] == methods[name]["answer_tokens"] - 1
    for row in record["prompts"]:  # a forward of lookup may emit several; what the prefill emitted is left out
        for once in row["methods"]["hf-lookup:4"]:
            assert 0 < once["target_forwards"] and once["tau"] * once["target_forwards"] <= once["answer_tokens"] - 1
    exact, lossy = methods["exact"], methods["fuzzy:js:0.3"]
    assert lossy["tau"] > exact["tau"] > 1.2
    assert lossy["divergence_spent"] > exact["divergence_spent"] == 0 and lossy["gate_open_fraction"] > 0


def made(tokens: int, forwards: int, seconds: float, prefill: float) -> TimedRun:
    return TimedRun(seconds, prefill, [Answer(list(range(tokens)), forwards, tokens - 1)])


def test_numbers_on_a_worked_example() -> None:
    prompts = [BenchPrompt(str(i), category, f"f:{i}", [1]) for i, category in enumerate("aab")]
    turns = [
        Turn(0, 0, [0], {"plain": made(5, 4, 1.0, 0.2), "exact": made(5, 2, 0.5, 0.1)}),
        Turn(0, 1, [0], {"plain": made(5, 4, 3.0, 0.2), "exact": made(5, 2, 0.5, 0.1)}),
        Turn(1, 0, [1], {"plain": made(9, 8, 1.8, 0.2), "exact": made(9, 2, 0.45, 0.05)}),
        Turn(2, 0, [2], {"plain": made(7, 6, 1.4, 0.2), "exact": made(7, 3, 2.8, 0.4)}),
    ]
    record = build_record(prompts, {"plain": {}, "exact": {}}, turns)
    exact, plain = record["methods"]["exact"], record["methods"]["plain"]
    # by prompt: plain (5/1 + 5/3)/2, 5, 5 and exact 10, 20, 2.5 tokens per second
    assert plain["tokens_per_second"] == pytest.approx(5) and exact["tokens_per_second"] == pytest.approx(10)
    ratios = record["ratios"]["plain"]["exact"]
    assert ratios["tokens_per_second"]["median"] == pytest.approx(3.0)  # of 10 / (10/3), 4 and 0.5
    assert ratios["seconds_per_answer"]["median"] == pytest.approx(4.0)  # of 2 / 0.5, 4 and 0.5
    assert ratios["decode_tokens_per_second"]["median"] == pytest.approx(10 / ((4 / 0.8 + 4 / 2.8) / 2))
    # 4/2 twice, 8/2 and 6/3: pooled by category, then pooled over all
    assert exact["categories"]["a"]["tau"] == pytest.approx(16 / 6) and exact["categories"]["b"]["tau"] == 2.0
    assert exact["tau_category_mean"] == pytest.approx((16 / 6 + 2) / 2) and exact["tau"] == pytest.approx(22 / 9)
    assert exact["identical_to_baseline"] == 1.0 and exact["answers"] == 3
    assert exact["seconds_total"] == pytest.approx(0.5 + 0.45 + 2.8)


def test_damaged_lines_of_an_unfinished_run_are_measured_again(tmp_path: Path) -> None:
    job, jobs = Job("plain", 0), {Job("plain", 0): 1, Job("plain", 1): 1}
    made = RunFile(tmp_path / "r.jsonl", "bench", {"seed": 1}, jobs)
    made.add(job, TimedRun(1.0, 0.1, [Answer([1], 1, 1, divergence_spent=float("inf"))], {"draft": 0.5}))
    assert made.path is not None
    whole = made.path.read_bytes()
    foreign = whole.splitlines()[1].replace(b'"group": 0', b'"group": "x"')
    other = whole.splitlines()[1].replace(b'"group": 0', b'"group": 7')
    for line in (b'{"job": 1', b"[]", b"{}", foreign, other, b"\xff", b"[" * 9999):
        made.path.write_bytes(whole + line + b"\n")
        again = RunFile(made.path, "bench", {"seed": 1}, jobs)
        assert again.runs == made.runs and made.path.read_bytes() == whole
    for header in (b"hello\n", b"[]\n", b'{"bench": 3, "settings": 7}\n', b'{"settings": {"seed": 1}}\n', b"\xff\n"):
        made.path.write_bytes(header)
        with pytest.raises(FsdError, match="r.jsonl is no file of a bench, or of another version"):
            RunFile(made.path, "bench", {"seed": 1}, jobs)


def test_the_table_of_speeds_names_every_method(record: dict[str, Any]) -> None:
    text = bench_table(record)
    assert max(map(len, text.splitlines())) <= 100
    speed = text[text.index("speed") :].splitlines()
    assert [line.split()[0] for line in speed[3:8]] == METHODS
