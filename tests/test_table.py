"""The field's table: numbers on a worked example, and the command on toys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.findings import main as findings
from fsd_bench.base import Comparison, MeasuredAnswer, TimedRun
from fsd_bench.board import BoardRow, read_rows, write_board
from fsd_bench.cli import main
from fsd_bench.record import BenchPrompt, build_record
from fsd_bench.table import best_exact, parse_sets, rows_of, specbundle
from fsd_core.errors import FsdError
from tests.bench_toys import Toy
from tests.text_toys import write_rows

DRAFTED = {"rule": {"rule": "exact"}, "drafter": {"name": "eagle", "depth": 3, "width": 1, "nodes": 4}}


def made(tokens: int, forwards: int, seconds: float, score: float, accepted: list[int]) -> TimedRun:
    answer = MeasuredAnswer(list(range(tokens)), forwards, tokens - 1, score=score, accepted=accepted)
    return TimedRun(seconds, 0.1, [answer])


def test_numbers_on_a_worked_example() -> None:
    scores = [(1.0, 1.0), (1.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)]
    comparisons = [
        Comparison(i, 0, [i], {
            "plain": made(9, 8, 1.8, plain, []),
            "exact@slow": made(9, 4, 1.2, plain, [4, 0]),
            "exact": made(9, 4, 0.9, plain, [3, 1]),
            "tilted": made(9, 2 + i % 2, 0.6, lossy, [2, 2, 1]),
        })
        for i, (plain, lossy) in enumerate(scores)
    ]  # fmt: skip
    plain = {"rule": {"rule": "exact"}, "drafter": {"name": "none", "depth": 0}}
    methods = {
        "plain": plain, "exact@slow": DRAFTED, "exact": DRAFTED,
        "tilted": {**DRAFTED, "rule": {"rule": "tilted"}},
    }  # fmt: skip
    prompts = [BenchPrompt(str(i), "a", f"f:{i}", [1]) for i in range(6)]
    record = build_record(prompts, methods, comparisons, baselines=["plain", "exact", "exact@slow"])
    record["settings"] = {"batch_size": 1, "target": "models/toy"}
    assert best_exact(record) == "exact"
    rows = {row["method"]: row for row in rows_of(record)}
    assert [row["best_exact"] for row in rows.values()] == [False, False, True, False]
    lossy = rows["tilted"]
    assert lossy["flips"] == {"lost": 2, "gained": 1, "p": pytest.approx(1.0)}  # 1 or 2 of 3 flips of a coin, or more
    assert lossy["retention"]["ratio"] == pytest.approx(3 / 4) and lossy["retention"]["low"] < 0.75
    assert rows["exact"]["retention"]["ratio"] == 1.0 and rows["exact"]["flips"]["lost"] == 0
    assert lossy["tau"] == pytest.approx(48 / 15) and lossy["tau_answer_mean"] == pytest.approx((8 / 2 + 8 / 3) / 2)
    assert lossy["accepted_by_position"] == pytest.approx([12 / 15, 12 / 15, 6 / 15])
    assert lossy["times_plain"]["median"] == pytest.approx(3) and lossy["times_exact"]["median"] == pytest.approx(1.5)
    (result,) = specbundle({"set": record})["toy"]["set"]["results"]
    assert [result[key] for key in ("batch_size", "steps", "topk", "num_draft_tokens")] == [1, 3, 1, 4]
    assert [metrics["Name"] for metrics in result["metrics"]] == ["Without drafts", "exact@slow", "exact", "tilted"]
    assert result["metrics"][2] == {"Name": "exact", "output_throughput": pytest.approx(10), "accept_length": 2.0}


def test_the_command_prints_and_continues(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"what is {word}", "answer": "1"} for word in ("the cat", "the mat", "the answer")]
    sets = f"sums={write_rows(tmp_path / 'a.jsonl', rows)},{write_rows(tmp_path / 'words.jsonl', rows[:2])}"
    out = {name: tmp_path / f"table.{name}" for name in ("json", "markdown", "specbundle")}
    command = ["table", "--sets", sets, "--methods", "plain,exact,tilted:0.1", "--work", str(tmp_path / "work")]
    command += ["--max-new-tokens", "8", "--tree", "4,1,5", "--seed", "1", *toy.models]
    command += [word for name, path in out.items() for word in (f"--{name}", str(path))]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.strip() == out["markdown"].read_text(encoding="utf-8").strip()
    assert "### sums" in text and "### words" in text and "| `exact`* | 3 |" in text
    for stated in ("max_new_tokens: 8", "seed: 1", "template: ", "torch: ", "prefill: ", "batch_size: 1"):
        assert f"- {stated}" in text
    found = json.loads(out["json"].read_text(encoding="utf-8"))
    assert [len(rows) for rows in found["sets"].values()] == [3, 3]
    results = json.loads(out["specbundle"].read_text(encoding="utf-8"))["target"]["sums"]["results"]
    assert [(result["steps"], result["num_draft_tokens"]) for result in results] == [(4, 5)]
    assert main(command) == 2 and "is there already: add --overwrite" in capsys.readouterr().err
    command.append("--overwrite")
    assert main(command) == 0 and capsys.readouterr().out == text  # from the records
    assert main([*command, "--max-new-tokens", "9"]) == 2
    assert "made with other settings (max_new_tokens)" in capsys.readouterr().err
    record = tmp_path / "work" / "sums.json"
    whole = json.loads(record.read_text(encoding="utf-8"))
    del whole["methods"]["exact"]["intervals"]
    for damage in (b"", b"{", b"\xff", b"[]", b'{"settings": 3}', json.dumps(whole).encode()):
        record.write_bytes(damage)
        assert main(command) == 2
        assert "sums.json" in (said := capsys.readouterr().err) and "Delete it to measure again" in said


def test_sets_and_methods_that_make_no_table(tmp_path: Path) -> None:
    assert parse_sets(["a=x/y.jsonl", "dir/z.jsonl.gz"]) == {"a": "x/y.jsonl", "z": "dir/z.jsonl.gz"}
    for wrong in (["a=b", "a=c"], ["a="], []):
        with pytest.raises(FsdError, match="a name of its own|no sets"):
            parse_sets(wrong)
    from fsd_bench.table import measure_sets

    with pytest.raises(FsdError, match="add plain"):
        measure_sets({"a": "b"}, ["exact"], tmp_path)


# boards --------------------------------------------------------------------------------------------------------------

RECORDS = Path(__file__).parent.parent / "benchmarks" / "results"


def served(**more: Any) -> dict[str, Any]:
    plain = {"batch_size": 1, "steps": 0, "topk": 0, "num_draft_tokens": 0, "num_samples": 20}
    return {
        "model": "owner/head",
        "mtbench": [
            {**plain, "metrics": [{"output_throughput": 100.0, "accept_length": 1.0, "accuracy": None}]},
            {**plain, "steps": 3, "topk": 1, "num_draft_tokens": 4, "metrics": [
                {"output_throughput": 180.0, "accept_length": 2.4, "accuracy": 0.5},
                {"output_throughput": 220.0, "accept_length": 2.6, "accuracy": 0.7},
            ]},
        ],
        **more,
    }  # fmt: skip


def test_rows_of_a_record_are_its_numbers() -> None:
    record = json.loads((RECORDS / "compare-smollm2-135m.json").read_text("utf-8"))
    rows = {row.method: row for row in read_rows(RECORDS / "compare-smollm2-135m.json")}
    assert list(rows) == list(record["methods"])
    ratio = record["ratios"]["plain"]["exact"]["tokens_per_second"]
    exact = rows["exact"]
    assert (exact.ratio, exact.low, exact.high) == (ratio["median"], ratio["low"], ratio["high"])
    assert exact.baseline == "plain" and rows["plain"].ratio == 1
    assert exact.acceptance_length == record["methods"]["exact"]["tau"] and exact.task == "spec_bench_dev"
    assert exact.command == record["environment"]["command"] and rows["vllm"].drafter != exact.drafter


def test_rows_of_a_server_are_compared_with_its_plain_run(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(served()))
    plain, drafted = read_rows(file)
    assert (plain.method, plain.ratio, plain.drafter, plain.score) == ("plain", 1.0, "", None)
    assert (drafted.method, drafted.drafter) == ("exact, tree 3,1,4", "owner/head")
    assert (drafted.tokens_per_second, drafted.ratio, drafted.low) == (200.0, 2.0, None)
    assert (drafted.acceptance_length, drafted.score, drafted.answers) == (2.5, 60.0, 20)


def of_run(**facts: Any) -> dict[str, Any]:
    return {"settings": {"target": "t"}, "methods": {"exact": {"tokens_per_second": 1.5, **facts}}}


@pytest.mark.parametrize("held", [
    [], {}, {"model": "x"}, {"mtbench": [{"batch_size": 1}]}, 3, {"settings": {}, "methods": {}},
    {"settings": [], "methods": {"exact": {}}}, {"settings": {}, "methods": {"exact": None}}, of_run(tau=float("nan")),
    of_run(score="high"), of_run(answers=True), of_run(drafter=["x"]), {**of_run(), "ratios": {"plain": [1]}},
    {"mtbench": [{**dict.fromkeys(("batch_size", "steps", "topk", "num_draft_tokens"), 1), "metrics": 3}]},
])  # fmt: skip
def test_a_file_without_measurements_is_named(held: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or with others than numbers in their places, which the page could not show."""
    (tmp_path / "x.json").write_text(json.dumps(held))
    page = tmp_path / "board.html"
    assert main(["board", str(tmp_path / "x.json"), "--output", str(page)]) == 2
    said = capsys.readouterr().err
    assert "x.json: holds no measurements" in said or "x.json is damaged or of another version" in said
    assert not page.exists() and findings([str(tmp_path / "x.json")]) == 2
    assert "findings: " in capsys.readouterr().err


def test_the_page_holds_every_row_and_fetches_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names that look like HTML stay text. A file without measurements among others is skipped with a warning."""
    (tmp_path / "a.json").write_text(json.dumps(served(model="</script><b>head")))
    page = tmp_path / "board.html"
    (tmp_path / "b.json").write_text("no record")
    files = [tmp_path / "a.json", tmp_path / "b.json", RECORDS / "free-drafters.json"]
    assert write_board(files, page, "A & B") == 2 + 3 and "b.json: not JSON" in caplog.text
    text = page.read_text("utf-8")
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    rows = [BoardRow(**row) for row in json.loads(data)]
    assert len(rows) == 5 and rows[1].drafter == "</script><b>head" and "<title>A &amp; B</title>" in text
    assert not re.findall(r"(?:src|href)=\"?(?:https?:)?//", text)
