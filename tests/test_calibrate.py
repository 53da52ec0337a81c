"""Sweeps, whose files survive kills, and calibration: tests keep their level, and promises hold on other prompts."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsd_bench.base import Comparison, MeasuredAnswer, TimedRun
from fsd_bench.cli import main
from fsd_bench.sweep.calibrate import calibrate, split
from fsd_bench.sweep.certify import NATS, SCORE, SPEED, Promise, certify, check, loss_p_value, quality_levels
from fsd_bench.sweep.page import write_page
from fsd_bench.sweep.runner import read_sweep, sweep
from fsd_bench.sweep.settings import SweepOptions, parse_settings
from fsd_bench.sweep.summary import summarise
from fsd_core.errors import CheckpointError, DataError
from fsd_infer import FsdError, FuzzyDecoder, TreeShape
from fsd_infer.decoder.calibrated import FILE, Calibrated, calibrated, check_calibrated, write_calibrated
from fsd_infer.rules import Fuzzy, Tilted
from fsd_infer.targets.builtin import SHIPPED
from tests.bench_toys import Toy, save_toy
from tests.text_toys import write_rows


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = save_toy(tmp_path_factory.mktemp("questions"))
    write_rows(toy.prompts, [{"question": f"the cat sat on {n} mats", "answer": str(n)} for n in range(12)])
    return toy


def options(toy: Toy, **changes: Any) -> SweepOptions:
    values = {"prompts": [toy.prompts], "rules": ["fuzzy:js:0.02/0.3"], "temperatures": [0.0], "max_new_tokens": 6}
    return SweepOptions(**{**toy.options, **values, "examples": 0, **changes})


# the level of the test ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "won", "prompts"), [(0.03, 0.01, 60), (0.15, 0.13, 200)])
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


def fake(losses: dict[str, float], prompts: int = 400, speeds: dict[str, float] | None = None) -> list[Comparison]:
    """Exact is always right; each setting is wrong on that share of the prompts."""
    comparisons = []
    for index in range(prompts):
        runs = {"exact": TimedRun(1.0, 0.1, [MeasuredAnswer([1] * 10, 5, 9, score=1.0)])}
        for name, share in losses.items():
            right = float(index >= share * prompts)
            seconds = 1.0 / (speeds or {}).get(name, 1.0)
            runs[name] = TimedRun(seconds, 0.1, [MeasuredAnswer([1] * 10, 5, 9, score=right, divergence_spent=1.0)])
        comparisons.append(Comparison(index, 0, [index], runs))
    return comparisons


def test_a_list_ends_at_its_first_failure() -> None:
    """From careful to bold, for a promise of speed the other way round. A list has one level, whatever comes later."""

    def certified(rules: list[str], comparisons: list[Comparison], promise: Promise) -> list[str]:
        return [one["setting"] for one in certify(comparisons, parse_settings(rules), promise, 0.9)]

    losses = {"fuzzy:js:0.1": 0.0, "fuzzy:js:0.2": 0.2, "fuzzy:js:0.3": 0.0, "random:0.1": 0.3, "random:0.2": 0.0}
    rules = ["fuzzy:js:0.1/0.2/0.3", "random:0.1/0.2"]
    assert certified(rules, fake(losses), Promise(SCORE, 0.02)) == ["exact", "fuzzy:js:0.1"]
    speeds = {"fuzzy:js:0.1": 1.2, "fuzzy:js:0.2": 1.6, "fuzzy:js:0.3": 2.0}
    comparisons = fake(dict.fromkeys(speeds, 0.0), 50, speeds)
    assert certified(rules[:1], comparisons, Promise(SPEED, 1.5)) == ["fuzzy:js:0.3", "fuzzy:js:0.2"]
    for comparison in comparisons:
        for name, run in comparison.runs.items():
            run.answers[0].copied_4grams = 0.2 + 0.1 * (name == "fuzzy:js:0.2")
            run.answers[0].repeated_4grams = 0.1
    assert len(certified(rules[:1], comparisons, Promise(NATS, 9.0))) == 4
    bounded = Promise(NATS, 9.0, copies=0.2, repeats=0.2)
    assert len(certified(rules[:1], comparisons, bounded)) == 4, "a rise of 10 points is allowed"
    assert certified(rules[:1], comparisons, replace(bounded, copies=0.05)) == ["exact", "fuzzy:js:0.1"]
    assert not check(comparisons, "fuzzy:js:0.2", Promise(NATS, 9.0, copies=0.05))["kept"]
    with pytest.raises(FsdError, match="a bound on copied_4grams must be between 0 and 1"):
        Promise(NATS, 1.0, copies=2.0)


def test_a_quality_is_a_promise_of_its_own() -> None:
    """Exact is always right. Rules of several losses and speeds: each level has the fastest that is certain."""
    losses = {"fuzzy:js:0.1": 0.0, "fuzzy:js:0.2": 0.03, "fuzzy:js:0.3": 0.07, "fuzzy:js:0.4@8x1x9": 0.0}
    speeds = {name: 1.2 + 0.2 * place for place, name in enumerate(losses)}
    settings = parse_settings(["fuzzy:js:0.1/0.2/0.3", "fuzzy:js:0.4@8x1x9"])
    comparisons = fake(losses, speeds=speeds)
    facts = summarise(comparisons, [setting.name for setting in settings])
    promise = Promise(NATS, 9.0)
    found = quality_levels(comparisons, settings, facts, promise, 0.9)
    assert [(one["quality"], one["rule"], round(one["speed"], 6)) for one in found] == [
        (0.99, "fuzzy:js:0.1", 1.2), (0.95, "fuzzy:js:0.2", 1.4), (0.9, "fuzzy:js:0.3", 1.6),
    ]  # fmt: skip
    for comparison in comparisons:
        for run in comparison.runs.values():
            run.answers[0].score = None
    assert quality_levels(comparisons, settings, facts, promise, 0.9) == []


# from prompts to a stored setting -------------------------------------------------------------------------------------


PROMISES = [
    ("--at-most-score-loss 50", "at most 50 points of score below exact"),
    ("--at-most-nats 0.4 --at-most-copies 50", "at most 0.4 nats per answer, at most 50 points of copied"),
]


@pytest.mark.parametrize(("asked", "said"), PROMISES)
def test_promises_are_kept(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, asked: str, said: str
) -> None:
    if "--at-most-nats" in asked:  # one report is drawn
        monkeypatch.setattr("fsd_bench.sweep.calibrate.write_page", lambda *arguments: None)
    drafter, out = shutil.copytree(toy.drafter, tmp_path / "drafter"), tmp_path / "out"
    words = f"calibrate --target {toy.target} --drafter {drafter} --dtype fp32 --max-new-tokens 4 --output {out}"
    assert main([*words.split(), "--prompts", str(toy.prompts), "--rules", "fuzzy:js:0.02/0.3", *asked.split()]) == 0
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
        assert "--at-most-nats" in asked or "<svg" in (out / "verification.html").read_text()
    if "--at-most-nats" in asked:
        assert all(name == "exact" or name.endswith(":budget=0.4") for name in names)
        assert record["verification"]["prompts"] == 0 or record["verification"]["nats_per_answer"]["most"] <= 0.4
    decoder = FuzzyDecoder.from_pretrained(str(toy.target), str(drafter), dtype=None)
    made = decoder.generate("the cat", rule="calibrated", max_new_tokens=4, temperature=0)
    wanted = decoder.generate("the cat", rule=record["setting"], max_new_tokens=4, temperature=0)
    assert made.stats.rule == wanted.stats.rule and made.sequences == wanted.sequences
    assert record["file"] == str(drafter / FILE)
    for name in ("record.json", "calibration.html"):
        (tmp_path / name).write_text("[1]")  # of another program
        again = [*words.split(), "--output", str(tmp_path), "--prompts", str(toy.prompts), *asked.split()]
        assert main(again) == 2 and f"{name} is of no calibration" in capsys.readouterr().err
        (tmp_path / name).unlink()


def test_halves_share_no_text(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And count each once: copies of a prompt are no further evidence."""
    twice = [{"question": f"how many {n % 20}?", "answer": "1"} for n in range(40)]
    rows = write_rows(tmp_path / "twice.jsonl", [*twice, {"prompt": "no reference"}])
    first, second = split(options(toy, prompts=[rows]), [], needs_score=True)
    assert "notice: 20 of 41 prompts repeat another. They are left out." in capsys.readouterr().err
    texts = [{row.messages[0]["content"] for row in half} for half in (first, second)]
    assert not texts[0] & texts[1] and len(texts[0] | texts[1]) == 20 == len(first) + len(second)
    with pytest.raises(DataError, match=r"twice.jsonl:1: this prompt is among those to calibrate on"):
        split(options(toy, prompts=[rows]), [rows], needs_score=False)
    lone = write_rows(tmp_path / "lone.jsonl", [{"prompt": "x"}])
    with pytest.raises(DataError, match="no prompts to"):
        split(options(toy, prompts=[lone]), [], needs_score=False)


REFUSED = [
    ({"temperatures": [0.0, 0.7]}, NATS, 1.0, 0.9, "one temperature at a time"),
    ({}, NATS, 1.0, 0.2, "confidence must be at least 0.5"),
    ({"rules": ["fuzzy:js:0.3:budget=2"]}, NATS, 1.0, 0.9, "sets the budget itself"),
    ({"drafter": "lookup"}, NATS, 1.0, 0.9, "has no directory to write a setting to"),
    ({}, SCORE, 2.0, 0.9, "a promise of score must be between 0 and 1"),
    ({"max_new_tokens": 2}, SPEED, 1000.0, 0.9, "certainly 1000 times as fast as exact; the best measured"),
]


@pytest.mark.parametrize(("changes", "kind", "value", "confidence", "message"), REFUSED)
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
        decoder.generate("the cat", rule="calibrated", max_new_tokens=2)
    setting = Calibrated(0.7, "fuzzy:js:0.2", TreeShape(4, 1, 5), {"kind": SCORE, "value": 0.02}, {})
    write_calibrated(drafter, decoder.target, setting)
    write_calibrated(drafter, decoder.target, replace(setting, temperature=0.0, rule="random:0.5"))
    write_calibrated(drafter, decoder.target, replace(setting, rule="fuzzy:js:0.4"))
    assert len(json.loads((drafter / FILE).read_text())["settings"]) == 2, "the newest of a temperature"
    rules = [calibrated(decoder.drafter, decoder.target, value)[0].describe() for value in (0.7, 0.0)]
    assert rules[0]["threshold"] == 0.4 and rules[1]["rule"] == "random"
    made = decoder.generate("the cat", rule="calibrated", max_new_tokens=2, do_sample=True, temperature=0.7, seed=1)
    assert made.stats.rule["threshold"] == 0.4
    with pytest.raises(FsdError, match=r"nothing was calibrated for temperature 1 \(there is: 0, 0.7\)"):
        decoder.generate("the cat", rule="calibrated", max_new_tokens=2, do_sample=True, temperature=1.0)
    with pytest.raises(FsdError, match="is read from a drafter's directory, but lookup has none"):
        decoder.generate("the cat", rule="calibrated", drafter=decoder.load_drafter("lookup"), max_new_tokens=2)
    levels = [{"quality": 0.99, "rule": "fuzzy:js:0.1", "speed": 1.2}, {"quality": 0.9, "rule": "tilted", "speed": 1.4}]
    write_calibrated(drafter, decoder.target, replace(setting, temperature=0.0, levels=levels))
    for quality, name in ((1.0, "exact"), (0.995, "exact"), (0.95, "fuzzy"), (0.9, "tilted"), (0.1, "tilted")):
        assert decoder.generate(["the cat"], quality=quality, max_new_tokens=2).stats.rule["rule"] == name
    mixed = decoder.generate(["the cat"] * 2, rule=["quality:0.9", "exact"], max_new_tokens=2)
    assert [rule["rule"] for rule in mixed.stats.rule["rows"]] == ["tilted", "exact"]
    for quality in (0.0, 1.01, math.nan):
        with pytest.raises(FsdError, match="quality is above 0 and at most 1"):
            decoder.generate("the cat", quality=quality, max_new_tokens=2)
    with pytest.raises(FsdError, match="leave out quality, or the rule 'tilted'"):
        decoder.generate("the cat", rule="tilted", quality=0.9, max_new_tokens=2)
    (tmp_path / "link").symlink_to(SHIPPED)
    for directory in (SHIPPED / "smollm2-135m", tmp_path / "link" / "smollm2-135m"):
        with pytest.raises(FsdError, match="part of the installed package"):
            check_calibrated(directory)
    with pytest.raises(FsdError, match=r"cannot be written \(No such file .*copy the drafter elsewhere"):
        write_calibrated(tmp_path / "gone", decoder.target, setting)
    (drafter / FILE).write_text('{"settings": 3}')
    with pytest.raises(CheckpointError, match="expected a list of settings. Delete it"):
        decoder.generate("the cat", rule="calibrated", max_new_tokens=2)


# sweeps ---------------------------------------------------------------------------------------------------------------


def swept(toy: Toy, **changes: Any) -> SweepOptions:
    """Options of a sweep of five prompts, the last one without a score."""
    rows: list[Any] = [{"question": f"the cat sat on {n} mats", "answer": str(n), "source": "sums"} for n in range(4)]
    file = write_rows(toy.prompts.with_name("five.jsonl"), [*rows, {"prompt": "<b>it</b> is & there"}])
    fixed = {"prompts": [file], "temperatures": [0.0, 0.8], "max_new_tokens": 5, "examples": 1}
    return options(toy, **{**fixed, **changes})


@pytest.fixture(scope="module")
def finished(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep(swept(toy), tmp_path_factory.mktemp("sweep") / "all.jsonl")


def untimed(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0].pop("environment")
    lines = [line for line in lines if "described" not in line]  # what trees took in this process is part of that
    for line in lines:
        line.pop("sha256", None)  # of the times, too
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
    named = [one.rule for one in parse_settings(["tilted:2/1:exact_ngram_size=0/4"])[1:]]
    assert named == [Tilted(price, exact_ngram_size=size) for price in (2, 1) for size in (0, 4)]
    with pytest.raises(FsdError, match="no rule besides exact"):
        parse_settings(["exact"])


def test_every_setting_answers_every_prompt(toy: Toy, finished: Path) -> None:
    found = read_sweep(finished)
    assert found.settings == ["exact", "fuzzy:js:0.02", "fuzzy:js:0.3", "random:0.1", "random:0.25", "random:0.5"]
    for at in found.at:
        assert len(at.comparisons) == 5
        for name in found.settings:
            for comparison, answer in zip(at.comparisons, at.answers(name), strict=True):
                assert sum(answer.trace.rounds) == len(answer.tokens) == len(answer.trace.sources) <= 5
                assert len(answer.trace.rounds) == answer.target_forwards + 1  # type: ignore[operator]
                assert (answer.score is None) == (comparison.group == 4) and answer.log_likelihood < 0
                assert (answer.trace.pieces is not None) == (comparison.group == 0)
                spent = sum(nats for _, nats in answer.trace.spent)
                assert spent == pytest.approx(answer.divergence_spent, abs=1e-3) and (name != "exact" or spent == 0)
        facts = summarise(at.comparisons, found.settings)
        assert facts["exact"]["ratios"]["speed"]["ratio"] == pytest.approx(1)
        assert facts["exact"]["differences"]["score"] == {"mean": 0, "low": 0, "high": 0, "prompts": 4}
        loose = facts["fuzzy:js:0.3"]
        forwards = [facts[name]["means"]["target_forwards"]["mean"] for name in ("fuzzy:js:0.3", "exact")]
        assert loose["ratios"]["target_forwards"]["ratio"] == pytest.approx(forwards[0] / forwards[1])
        assert loose["tau"] / facts["exact"]["tau"] == pytest.approx(loose["ratios"]["tau"]["ratio"])
        assert 0 < facts["random:0.5"]["gate_open_fraction"] < 1 and facts["random:0.5"]["divergence_spent"] > 0


def test_a_sweep_goes_on_wherever_it_was_killed(toy: Toy, tmp_path: Path) -> None:
    """Lines are appended and synced one by one, so a kill leaves a beginning of the file, cut anywhere."""
    small = swept(toy, rules=["fuzzy:js:0.3", "random:0.5"], temperatures=[0.8], limit=3, batch_size=2)
    finished = sweep(small, tmp_path / "all.jsonl")
    assert [each.prompts for each in read_sweep(finished).at[0].comparisons] == [[0, 1], [2]]
    whole, wanted = finished.read_bytes(), untimed(finished)
    first = whole.index(b"\n") + 1
    cuts = [first, len(whole) - 1, *random.Random(0).sample(range(first, len(whole)), 1)]
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
            sweep(swept(toy, **changes), copy)
    copy.write_text("".join(finished.read_text().splitlines(keepends=True)[:3]))  # two settings of six
    with pytest.raises(FsdError, match="no prompt has been answered under every setting yet"):
        write_page(copy, tmp_path / "page.html")
    copy.write_text("notes\n")
    with pytest.raises(FsdError, match="is not a file of a sweep, or has another version, and is not overwritten"):
        sweep(swept(toy), copy)
    copy.write_text('{"sweep": 3, "settings": {"rules": []}}\n')
    for file, match in (("nothing.jsonl", "holds no sweep"), ("copy.jsonl", r"copy.jsonl is damaged .*'prompts'")):
        with pytest.raises(FsdError, match=match):
            write_page(tmp_path / file, tmp_path / "page.html")
    for changes, match in (({"rules": ["exact"]}, "no rule besides exact"), ({"prompts": []}, "no file of prompts")):
        with pytest.raises(FsdError, match=match):
            sweep(swept(toy, **changes), copy)
