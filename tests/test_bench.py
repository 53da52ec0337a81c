"""The benchmark: its record, its ratios, the order of jobs, and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsd_bench import Answer, Method, TimedRun, build_record, run
from fsd_bench.base import Turn
from fsd_bench.jobs import Asked, Session, in_turns, run_jobs
from fsd_bench.prompts import group_prompts
from fsd_bench.record import BenchPrompt, write_record
from fsd_bench.report import bench_table, fitted_tables, head_trees, short_names
from fsd_bench.runner import partial_path
from fsd_bench.runs import Job, RunFile
from fsd_infer import FsdError, FuzzyDecoder, TreeShape
from fsd_infer.chat.encoding import encode_chat, read_prompts
from fsd_infer.cli.report import table
from fsd_infer.files import jsonable
from fsd_infer.targets.loading import parse_dtype
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


def test_the_file_holds_summaries_and_a_hash_per_answer(record: dict[str, Any], record_file: Path) -> None:
    filed = json.loads(record_file.read_text())
    assert filed.keys() == record.keys() and filed["methods"].keys() == record["methods"].keys()
    assert filed["methods"]["exact"]["tau"] == pytest.approx(record["methods"]["exact"]["tau"], rel=1e-5)
    for row, whole in zip(filed["prompts"], record["prompts"], strict=True):
        assert row.keys() == {"id", "category", "prompt_tokens", "answers"} and row["id"] == whole["id"]
        assert row["answers"] == {name: runs[0]["tokens_sha256"] for name, runs in whole["methods"].items()}
    write_record(record_file, filed)  # read and written again it stays what it is
    assert json.loads(record_file.read_text()) == filed


def test_record_holds_what_is_reported_together(record: dict[str, Any], record_file: Path) -> None:
    assert list(record["methods"]) == METHODS and record["baseline"] == "hf-generate"
    for facts in record["methods"].values():
        assert facts["answers"] == 4 and 0 < facts["prefill_seconds"] < facts["seconds_per_answer"]
        assert list(facts["categories"]) == ["cats", "ends"]
    phases = record["methods"]["exact"]["phases"]
    assert set(phases) == {"prefill", "target", "draft", "rule", "cache", "rest"} and min(phases.values()) >= 0
    environment = record["environment"]
    assert {"torch", "transformers", "cpu", "threads", "commit", "date", "load_average"} <= set(environment)
    assert environment["dtype"] == "fp32" and environment["seed"] == 5 and environment["command"] == "fsd-infer bench"
    assert "second copy" in environment["hf_model"]
    assert record["methods"]["fuzzy:js:0.3"]["rule"]["threshold"] == 0.3
    assert [path.name for path in record_file.parent.iterdir()] == ["bench.json"], "no partial file is left"


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


def test_log_likelihood_is_the_targets(toy: Toy, record: dict[str, Any]) -> None:
    decoder = FuzzyDecoder.from_pretrained(str(toy.target), "none", dtype=parse_dtype("fp32"))
    for row, prompt in zip(record["prompts"], read_prompts(toy.prompts), strict=True):
        ids = encode_chat(decoder.tokenizer, prompt.messages)
        out = decoder.generate([ids], max_new_tokens=NEW, temperature=0, measure_log_likelihood=True)
        assert row["prompt_tokens"] == len(ids)
        for name in ("plain", "hf-generate", "exact"):
            found = row["methods"][name][0]["log_likelihood_per_token"]
            assert found == pytest.approx(out.stats.rows[0].mean_log_likelihood, abs=1e-4)
    lossy = record["methods"]["fuzzy:js:0.3"]["log_likelihood_per_token"]
    assert lossy != record["methods"]["exact"]["log_likelihood_per_token"]


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


class Recorder(Method):
    """Writes down who was asked what."""

    def __init__(self, name: str, calls: list[tuple[str, int, int, int]]) -> None:
        self.name, self.calls = name, calls

    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        self.calls.append((self.name, prompts[0][0], options["max_new_tokens"], seed))
        return made(3, 2, 1.0, 0.5)

    def describe(self) -> dict[str, Any]:
        return {}


def test_methods_take_turns_after_an_uncounted_warm_up() -> None:
    calls: list[tuple[str, int, int, int]] = []
    file = RunFile(None, "bench", {}, {})
    session = Session("abc", lambda: [Recorder(name, calls) for name in "abc"], in_turns("abc", 4, {0.0: 1}))
    run_jobs([session], Asked([[[i]] for i in range(4)], 64), file, title="test")
    assert calls[:3] == [("a", 0, 16, 0), ("b", 0, 16, 0), ("c", 0, 16, 0)]
    order = ["".join(name for name, prompt, *_ in calls[3:] if prompt == i) for i in range(4)]
    assert order == ["abc", "bca", "cab", "abc"]
    assert all(count == 64 for _, _, count, _ in calls[3:]) and len(file.runs) == 12
    for i in range(4):  # every method draws with the same seed on the same prompt
        assert len({seed for _, prompt, _, seed in calls[3:] if prompt == i}) == 1


def test_batches_keep_to_one_category_and_agree(toy: Toy) -> None:
    assert group_prompts("abaab", 2) == [[0, 2], [3], [1, 4]]
    assert group_prompts("abaab", 1) == [[0], [1], [2], [3], [4]]
    record = toy_run(toy, ["plain", "exact", "hf-generate"], batch_size=2)
    for row in record["prompts"]:
        runs = [row["methods"][name][0] for name in record["methods"]]
        assert len({made["tokens_sha256"] for made in runs}) == 1
        assert all(made["batch"] == 2 for made in runs)


def test_sampled_runs_repeat_with_their_seed(toy: Toy) -> None:
    def hashes(seed: int) -> list[str]:
        options = dict(temperature=1.0, limit=2, seed=seed, warmup=False)
        record = toy_run(toy, ["exact", "hf-generate"], tree=TreeShape.chain(3), **options)  # auto reads the clock
        return [runs[0]["tokens_sha256"] for row in record["prompts"] for runs in row["methods"].values()]

    assert hashes(1) == hashes(1) != hashes(2)


def test_rows_that_are_not_asked_for_are_not_read(toy: Toy, tmp_path: Path) -> None:
    whole = toy_run(toy, ["plain"], warmup=False)["prompts"]
    some = toy_run(toy, ["plain"], warmup=False, every=2)["prompts"]
    assert [row["id"] for row in some] == [row["id"] for row in whole][::2]
    broken = Toy(toy.target, toy.drafter, tmp_path / "prompts.jsonl")
    broken.prompts.write_text(toy.prompts.read_text().splitlines()[0] + "\nnot json\n")
    assert len(toy_run(broken, ["hf-generate"], limit=1)["prompts"]) == 1
    with pytest.raises(FsdError, match="prompts.jsonl:2: not JSON"):
        toy_run(broken, ["hf-generate"])


def test_where_no_record_can_be_written_is_found_before_anything_is_loaded(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FsdError, match="cannot be written"):  # what else cannot: test_command_lines
        toy_run(toy, ["plain"], target="no/such-target", json_path=tmp_path / "file" / "r.json")
    (tmp_path / "file").write_text('{"a": 1}')
    with pytest.raises(FsdError, match="file is no record"):
        toy_run(toy, ["plain"], json_path=tmp_path / "file")
    assert (tmp_path / "file").read_text() == '{"a": 1}', "it is not overwritten"
    finished = tmp_path / "r.json"
    finished.write_text('{"methods": {}}')
    with pytest.raises(FsdError, match="finished run: leave --resume out"):
        partial_path(finished, resume=True)
    for seed in (1, 2):  # what ended before its first run is no obstacle
        assert RunFile(partial_path(finished, resume=False), "bench", {"seed": seed}, {}).runs == {}


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


def test_tables_are_aligned_and_complete(record: dict[str, Any]) -> None:
    text = bench_table(record)
    assert max(map(len, text.splitlines())) <= 100
    speed, by_category, phases = (
        text[text.index(title) :].splitlines() for title in ("speed", "tau by", "where the time goes")
    )
    assert [line.split()[0] for line in speed[3:8]] == METHODS
    assert len({len(line) for line in speed[1:8]}) == 1, "numbers end in one column"
    assert [line.split()[0] for line in by_category[3:6]] == ["cats", "ends", "mean"]
    assert [line.split()[0] for line in phases[3:6]] == METHODS[2:]
    assert f"{record['methods']['exact']['tau']:.2f}" in text and "log-lik" in text
    head = {"name": "eagle", "nodes": 8, "depth": 4, "width": 3, "stop_below": 0.5}
    drafters = {"a": head, "b": {"name": "eagle+lookup", "main": head}, "c": {**head, "stop_below": 0.0}, "d": None}
    drawn = {name: {"drafter": drafter} for name, drafter in drafters.items()}
    assert head_trees(drawn) == {"4,3,8,0.5": ["a", "b"], "4,3,8": ["c"]}


def test_wide_tables_are_broken_and_long_names_cut() -> None:
    text = fitted_tables(["name", "aaaaaaaa", "bbbbbbbb", "c"], [["x", "1", "2", "3"]], width=24)
    assert text == table(["name", "aaaaaaaa", "bbbbbbbb"], [["x", "1", "2"]]) + "\n\n" + table(
        ["name", "c"], [["x", "3"]]
    )
    long = [f"exact@/some/where/far/away/heads/{name}/last" for name in "ab"]
    shown = list(short_names(["plain", *long], width=20).values())
    assert shown[0] == "plain" and len(set(shown)) == 3 and max(map(len, shown)) <= 20


def test_numbers_that_json_lacks() -> None:
    values = {"a": float("nan"), "b": [float("inf"), (-float("inf"), 1)]}
    assert jsonable(values) == {"a": None, "b": ["inf", ["-inf", 1]]}
