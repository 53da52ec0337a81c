"""Calibration: tests that keep their level, promises that are kept on other prompts, and what is stored."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsd_bench.base import Answer, TimedRun, Turn
from fsd_bench.evidence.calibrate import NATS, SCORE, SPEED, Promise, calibrate, certify, check, loss_p_value, split
from fsd_bench.evidence.settings import SweepOptions, parse_settings
from fsd_infer import FsdError, FuzzyDecoder, TreeShape
from fsd_infer.cli.main import main
from fsd_infer.decoder.calibrated import FILE, Calibrated, calibrated, write_calibrated
from fsd_infer.errors import CheckpointError, DataError
from tests.bench_toys import Toy
from tests.text_toys import write_rows


@pytest.fixture(scope="module")
def toy(toy: Toy) -> Toy:
    write_rows(toy.prompts, [{"question": f"the cat sat on {n} mats", "answer": str(n)} for n in range(12)])
    return toy


def options(toy: Toy, **changes: Any) -> SweepOptions:
    values = {"prompts": [toy.prompts], "rules": ["fuzzy:js:0.02/0.3"], "temperatures": [0.0], "max_new_tokens": 6}
    return SweepOptions(**{**toy.options, **values, "examples": 0, **changes})


# the level of the test ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "won", "prompts"), [(0.03, 0.01, 60), (0.02, 0.0, 200), (0.15, 0.13, 200)])
def test_a_setting_that_just_breaks_the_promise_rarely_passes(lost: float, won: float, prompts: int) -> None:
    """At the edge of the hypothesis, a true loss of 2 points, whatever the share of prompts that change."""
    draws = np.random.default_rng(prompts).random((3000, prompts))
    losses = (draws < lost).astype(float) - (draws > 1 - won)
    passed = np.mean([loss_p_value(one, 0.02) <= 0.1 for one in losses])
    assert passed <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 3000)


@pytest.mark.parametrize(("whole", "noise"), [(0.02, 0.0), (0.01, 0.06)])
def test_graded_scores_rarely_pass_either(whole: float, noise: float) -> None:
    """ROUGE-L of about 0.15, a true loss of 2 points: of whole answers, or half of it of a little everywhere."""
    generator = np.random.default_rng(105)
    scores = generator.beta(2, 11, (2000, 105))
    lost = generator.random(scores.shape) < whole / scores.mean(1, keepdims=True)
    losses = lost * scores + generator.normal(0.02 - whole, noise, scores.shape)
    worth = (scores**2).sum(1) / scores.sum(1)
    passed = np.mean([loss_p_value(one, 0.02, scale) <= 0.1 for one, scale in zip(losses, worth, strict=True)])
    assert passed <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 2000)


def fake(losses: dict[str, float], prompts: int = 400, speeds: dict[str, float] | None = None) -> list[Turn]:
    """Exact is always right; each setting is wrong on that share of the prompts."""
    turns = []
    for index in range(prompts):
        runs = {"exact": TimedRun(1.0, 0.1, [Answer([1] * 10, 5, 9, score=1.0)])}
        for name, share in losses.items():
            right = float(index >= share * prompts)
            seconds = 1.0 / (speeds or {}).get(name, 1.0)
            runs[name] = TimedRun(seconds, 0.1, [Answer([1] * 10, 5, 9, score=right, divergence_spent=1.0)])
        turns.append(Turn(index, 0, [index], runs))
    return turns


def test_a_list_ends_at_its_first_failure() -> None:
    """From careful to bold, for a promise of speed the other way round. A list has one level, whatever comes later."""

    def certified(rules: list[str], turns: list[Turn], promise: Promise) -> list[str]:
        return [one["setting"] for one in certify(turns, parse_settings(rules), promise, 0.9)]

    losses = {"fuzzy:js:0.1": 0.0, "fuzzy:js:0.2": 0.2, "fuzzy:js:0.3": 0.0, "random:0.1": 0.3, "random:0.2": 0.0}
    rules = ["fuzzy:js:0.1/0.2/0.3", "random:0.1/0.2"]
    assert certified(rules, fake(losses), Promise(SCORE, 0.02)) == ["exact", "fuzzy:js:0.1"]
    speeds = {"fuzzy:js:0.1": 1.2, "fuzzy:js:0.2": 1.6, "fuzzy:js:0.3": 2.0}
    turns = fake(dict.fromkeys(speeds, 0.0), 50, speeds)
    assert certified(rules[:1], turns, Promise(SPEED, 1.5)) == ["fuzzy:js:0.3", "fuzzy:js:0.2"]
    for turn in turns:
        for name, run in turn.runs.items():
            run.answers[0].copied_4grams = 0.2 + 0.1 * (name == "fuzzy:js:0.2")
            run.answers[0].repeated_4grams = 0.1
    assert len(certified(rules[:1], turns, Promise(NATS, 9.0))) == 4
    bounded = Promise(NATS, 9.0, copies=0.2, repeats=0.2)
    assert len(certified(rules[:1], turns, bounded)) == 4, "a rise of 10 points is allowed"
    assert certified(rules[:1], turns, replace(bounded, copies=0.05)) == ["exact", "fuzzy:js:0.1"]
    assert not check(turns, "fuzzy:js:0.2", Promise(NATS, 9.0, copies=0.05))["kept"]
    with pytest.raises(FsdError, match="a bound on copied_4grams must be between 0 and 1"):
        Promise(NATS, 1.0, copies=2.0)


# from prompts to a stored setting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--at-most-score-loss 50", "at most 50 points of score below exact"),
        ("--at-most-nats 0.4 --at-most-copies 50", "at most 0.4 nats per answer, at most 50 points of copied"),
    ],
)
def test_promises_are_kept_on_the_other_half(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, said: str
) -> None:
    drafter, out = shutil.copytree(toy.drafter, tmp_path / "drafter"), tmp_path / "out"
    argv = ["--target", str(toy.target), "--drafter", str(drafter), "--dtype", "fp32", "--max-new-tokens", "6"]
    argv += ["--prompts", str(toy.prompts), "--rules", "fuzzy:js:0.02/0.3", "--output", str(out)]
    assert main(["calibrate", *argv, *asked.split()]) == 0
    shown = capsys.readouterr().out
    record = json.loads((out / "record.json").read_text())
    assert shown.startswith(said) and f"confidence 0.9: {record['setting']}\n" in shown and "written to" in shown
    names = [one["setting"] for one in record["certified"]]
    assert any(name.startswith("fuzzy") for name in names) and record["setting"] in names
    assert record["calibration"]["kept"] and record["verification"]["kept"]
    if record["setting"] != "exact":
        texts = [
            {row["text"] for row in json.loads((out / f"{half}.jsonl").read_text().splitlines()[0])["prompts"]}
            for half in ("calibration", "verification")
        ]
        assert not texts[0] & texts[1]
        assert "<svg" in (out / "verification.html").read_text()
    if "--at-most-nats" in asked:
        assert all(name == "exact" or name.endswith(":budget=0.4") for name in names)
        assert record["verification"]["prompts"] == 0 or record["verification"]["nats_per_answer"]["most"] <= 0.4
    decoder = FuzzyDecoder.from_pretrained(str(toy.target), str(drafter), dtype=None)
    made = decoder.generate("the cat", "calibrated", max_new_tokens=4, temperature=0)
    wanted = decoder.generate("the cat", record["setting"], max_new_tokens=4, temperature=0)
    assert made.stats.rule == wanted.stats.rule and made.sequences == wanted.sequences
    assert record["file"] == str(drafter / FILE)


def test_halves_share_no_text(toy: Toy, tmp_path: Path) -> None:
    twice = [{"question": f"how many {n % 20}?", "answer": "1"} for n in range(40)]
    rows = write_rows(tmp_path / "twice.jsonl", [*twice, {"prompt": "no reference"}])
    first, second = split(options(toy, prompts=[rows]), [], needs_score=True)
    texts = [{row.messages[0]["content"] for row in half} for half in (first, second)]
    assert not texts[0] & texts[1] and len(texts[0] | texts[1]) == 20 and len(first) + len(second) == 40
    with pytest.raises(DataError, match=r"twice.jsonl:1: this prompt is among those to calibrate on"):
        split(options(toy, prompts=[rows]), [rows], needs_score=False)
    lone = write_rows(tmp_path / "lone.jsonl", [{"prompt": "x"}])
    with pytest.raises(DataError, match="no prompts to"):
        split(options(toy, prompts=[lone]), [], needs_score=False)


@pytest.mark.parametrize(
    ("changes", "kind", "value", "confidence", "message"),
    [
        ({"temperatures": [0.0, 0.7]}, NATS, 1.0, 0.9, "one temperature at a time"),
        ({}, NATS, 1.0, 0.2, "confidence must be at least 0.5"),
        ({"rules": ["fuzzy:js:0.3:budget=2"]}, NATS, 1.0, 0.9, "sets the budget itself"),
        ({"drafter": "lookup"}, NATS, 1.0, 0.9, "has no directory to write a setting to"),
        ({}, SCORE, 2.0, 0.9, "a promise of score must be between 0 and 1"),
        ({}, SPEED, 1000.0, 0.9, "no candidate is certainly 1000 times as fast as exact; the best measured"),
    ],
)
def test_what_cannot_be_promised_is_refused(
    toy: Toy, tmp_path: Path, changes: dict[str, Any], kind: str, value: float, confidence: float, message: str
) -> None:
    drafter = shutil.copytree(toy.drafter, tmp_path / "drafter")
    with pytest.raises(FsdError, match=message):
        asked = options(toy, **{"drafter": str(drafter), **changes})
        calibrate(asked, Promise(kind, value), tmp_path / "out", confidence=confidence)
    assert not (drafter / FILE).exists()
    assert kind == SPEED or not (tmp_path / "out").exists(), "nothing was measured"


def test_the_file_beside_the_drafter(toy: Toy, tmp_path: Path) -> None:
    drafter = shutil.copytree(toy.drafter, tmp_path / "drafter")
    decoder = FuzzyDecoder.from_pretrained(str(toy.target), str(drafter))
    with pytest.raises(FsdError, match=r"calibrated.json: nothing was calibrated yet"):
        decoder.generate("the cat", "calibrated", max_new_tokens=2)
    setting = Calibrated(0.7, "fuzzy:js:0.2", TreeShape(4, 1, 5), {"kind": SCORE, "value": 0.02}, {})
    write_calibrated(drafter, decoder.target, setting)
    write_calibrated(drafter, decoder.target, replace(setting, temperature=0.0, rule="random:0.5"))
    write_calibrated(drafter, decoder.target, replace(setting, rule="fuzzy:js:0.4"))
    assert len(json.loads((drafter / FILE).read_text())["settings"]) == 2, "the newest of a temperature"
    rules = [calibrated(decoder.drafter, decoder.target, value)[0].describe() for value in (0.7, 0.0)]
    assert rules[0]["threshold"] == 0.4 and rules[1]["rule"] == "random"
    made = decoder.generate("the cat", "calibrated", max_new_tokens=2, do_sample=True, temperature=0.7, seed=1)
    assert made.stats.rule["threshold"] == 0.4
    with pytest.raises(FsdError, match=r"nothing was calibrated for temperature 1 \(there is: 0, 0.7\)"):
        decoder.generate("the cat", "calibrated", max_new_tokens=2, do_sample=True, temperature=1.0)
    with pytest.raises(FsdError, match="is read beside a drafter's files, but lookup has none"):
        decoder.generate("the cat", "calibrated", drafter=decoder.load_drafter("lookup"), max_new_tokens=2)
    (drafter / FILE).write_text('{"settings": 3}')
    with pytest.raises(CheckpointError, match="expected a list of settings. Delete it"):
        decoder.generate("the cat", "calibrated", max_new_tokens=2)
