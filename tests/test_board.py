"""The board: rows of our records and of SpecForge's results, on one page that needs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.findings import main as findings
from fsd_bench.board import BoardRow, read_rows, write_board
from fsd_bench.cli import main

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


def test_the_page_holds_every_row_and_fetches_nothing(tmp_path: Path) -> None:
    """Names that look like HTML stay text."""
    (tmp_path / "a.json").write_text(json.dumps(served(model="</script><b>head")))
    page = tmp_path / "board.html"
    assert write_board([tmp_path / "a.json", RECORDS / "free-drafters.json"], page, "A & B") == 2 + 3
    text = page.read_text("utf-8")
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    rows = [BoardRow(**row) for row in json.loads(data)]
    assert len(rows) == 5 and rows[1].drafter == "</script><b>head" and "<title>A &amp; B</title>" in text
    assert not re.findall(r"(?:src|href)=\"?(?:https?:)?//", text)
