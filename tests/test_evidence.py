"""Sweeps: what is measured, files that survive kills, reports that a browser shows."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsd_bench.evidence.page import write_page
from fsd_bench.evidence.settings import SweepOptions, parse_settings
from fsd_bench.evidence.summary import summarise
from fsd_bench.evidence.sweep import read_sweep, sweep
from fsd_infer.cli.main import main
from fsd_infer.errors import FsdError
from fsd_infer.rules import Fuzzy, Tilted
from tests.bench_toys import Toy
from tests.text_toys import write_rows


@pytest.fixture(scope="module")
def toy(toy: Toy) -> Toy:
    rows = [{"question": f"the cat sat on {n} mats", "answer": str(n), "source": "sums"} for n in range(4)]
    write_rows(toy.prompts, [*rows, {"prompt": "<b>it</b> is & there", "category": "ends"}])
    return toy


def options(toy: Toy, **changes: Any) -> SweepOptions:
    values = {"prompts": [toy.prompts], "rules": ["fuzzy:js:0.02/0.3"], "temperatures": [0.0, 0.8], "max_new_tokens": 8}
    return SweepOptions(**{**toy.options, **values, "examples": 1, **changes})


@pytest.fixture(scope="module")
def finished(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep(options(toy), tmp_path_factory.mktemp("sweep") / "all.jsonl")


def untimed(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0].pop("environment")
    lines = [line for line in lines if "described" not in line]  # what trees took in this process is part of that
    for line in lines:
        for name in ("seconds", "prefill_seconds", "phases"):
            line.get("run", {}).pop(name, None)
    return lines


def test_settings_are_products_of_lists() -> None:
    found = parse_settings(["fuzzy:js/tv:0.1/0.2@4x2x8", "exact", "fuzzy:js:0.1"])
    assert [one.name for one in found] == [
        "exact", "fuzzy:js:0.1@4x2x8", "fuzzy:js:0.2@4x2x8", "fuzzy:tv:0.1@4x2x8", "fuzzy:tv:0.2@4x2x8", "fuzzy:js:0.1",
    ]  # fmt: skip
    assert found[4].rule == Fuzzy("tv", threshold=0.2) and found[4].tree is not None and found[4].tree.nodes == 8
    assert found[1].family == found[4].family and found[5].tree is None
    named = [one.rule for one in parse_settings(["tilted:2/1:novel=0/4"])[1:]]
    assert named == [Tilted(price, novel=novel) for price in (2, 1) for novel in (0, 4)]
    for text, message in (
        ("fuzzy@4x2", "a tree is written depth,width,nodes"),
        ("exact", "no rule besides exact"),
        ("fuzy:js:0.1", "fuzy"),
    ):
        with pytest.raises(FsdError, match=message):
            parse_settings([text])


def test_every_setting_answers_every_prompt(toy: Toy, finished: Path) -> None:
    found = read_sweep(finished)
    assert found.settings == ["exact", "fuzzy:js:0.02", "fuzzy:js:0.3", "random:0.1", "random:0.25", "random:0.5"]
    for at in found.at:
        assert len(at.turns) == 5
        for name in found.settings:
            for turn, answer in zip(at.turns, at.answers(name), strict=True):
                assert answer.trace is not None and answer.tokens is not None and answer.log_likelihood is not None
                assert sum(answer.trace.rounds) == len(answer.tokens) == len(answer.trace.sources) <= 8
                assert len(answer.trace.rounds) == answer.target_forwards + 1  # type: ignore[operator]
                assert (answer.score is None) == (turn.group == 4) and answer.log_likelihood < 0
                assert (answer.trace.pieces is not None) == (turn.group == 0)
                spent = sum(nats for _, nats in answer.trace.spent)
                assert spent == pytest.approx(answer.divergence_spent, abs=1e-3) and (name != "exact" or spent == 0)
        facts = summarise(at.turns, found.settings)
        assert facts["exact"]["ratios"]["speed"]["ratio"] == pytest.approx(1)
        assert facts["exact"]["differences"]["score"] == {"mean": 0, "low": 0, "high": 0, "prompts": 4}
        loose = facts["fuzzy:js:0.3"]
        forwards = [facts[name]["means"]["target_forwards"]["mean"] for name in ("fuzzy:js:0.3", "exact")]
        assert loose["ratios"]["target_forwards"]["ratio"] == pytest.approx(forwards[0] / forwards[1])
        assert loose["tau"] / facts["exact"]["tau"] == pytest.approx(loose["ratios"]["tau"]["ratio"])
        assert 0 < facts["random:0.5"]["gate_open_fraction"] < 1 and facts["random:0.5"]["divergence_spent"] > 0


def test_a_sweep_goes_on_wherever_it_was_killed(toy: Toy, tmp_path: Path) -> None:
    """Lines are appended and synced one by one, so a kill leaves a beginning of the file, cut anywhere."""
    small = options(toy, rules=["fuzzy:js:0.3", "random:0.5"], temperatures=[0.8], limit=3)
    finished = sweep(small, tmp_path / "all.jsonl")
    whole, wanted = finished.read_bytes(), untimed(finished)
    first = whole.index(b"\n") + 1
    cuts = [0, first, len(whole) - 1, *random.Random(0).sample(range(first, len(whole)), 3)]
    for number, cut in enumerate(cuts):
        file = tmp_path / f"{number}.jsonl"
        file.write_bytes(whole[:cut])
        sweep(small, file)
        assert untimed(file) == wanted, f"cut at byte {cut}"
    damaged = whole.replace(b'"sources": "', b'"sources": "x', 1)
    for content in (whole + b"3\n", damaged):
        file.write_bytes(content)
        sweep(small, file)
        assert untimed(file) == wanted, "what is no line of a sweep is dropped"
    assert damaged != whole
    before = file.read_bytes()
    sweep(small, file)
    assert file.read_bytes() == before, "a finished sweep is left as it is"


def test_nothing_is_mixed_or_overwritten(toy: Toy, finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    shutil.copy(finished, copy)
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": "it"}])
    for changes, named in (({"max_new_tokens": 9}, "max_new_tokens"), ({"prompts": [other]}, "prompts, rows_sha256")):
        with pytest.raises(FsdError, match=rf"copy.jsonl was made with other settings \({named}\)"):
            sweep(options(toy, **changes), copy)
    copy.write_text("".join(finished.read_text().splitlines(keepends=True)[:3]))  # two settings of six
    with pytest.raises(FsdError, match="no prompt has been answered under every setting yet"):
        write_page(copy, tmp_path / "page.html")
    copy.write_text("notes\n")
    with pytest.raises(FsdError, match="no file of a sweep, or of another version, and is not overwritten"):
        sweep(options(toy), copy)
    with pytest.raises(FsdError, match="holds no sweep"):
        write_page(tmp_path / "nothing.jsonl", tmp_path / "page.html")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": [-1.0]}, "temperature must be 0 or above"),
        ({"temperatures": [0.5, 0.5]}, "at least one temperature, and none twice"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"tree": "auto"}, "a sweep compares rules on named trees"),
    ],
)
def test_options_that_make_no_sense(toy: Toy, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FsdError, match=message):
        sweep(options(toy, **changes), tmp_path / "x.jsonl")
    assert not (tmp_path / "x.jsonl").exists()


def test_the_command_writes_lines_and_a_page(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.jsonl"
    argv = ["sweep", "--prompts", str(toy.prompts), "--rules", "fuzzy:js:0.1,random:0.5", "--limit", "2", *toy.models]
    assert main([*argv, "--max-new-tokens", "4", "--output", str(file)]) == 0
    assert len(file.read_text().splitlines()) == 1 + 2 * 3 + 3  # and what the methods are
    assert "<svg" in (tmp_path / "out.html").read_text() and "report:" in capsys.readouterr().err
    assert main([*argv, "--max-new-tokens", "5", "--output", str(file)]) == 2
    assert "made with other settings" in capsys.readouterr().err
    assert main([*argv, "--output", str(file), "--temperatures", "warm"]) == 2
