"""The experiments on drafters: made beginnings, the loss that knows its rule, recipes by loss, and the ladder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ladder, stories
from benchmarks.beginnings import WORDS, beginnings, tasks
from fsd_train.commands.fit import read_recipe
from tests.bench_toys import Toy
from tests.loss_toys import check, distributions, make_batch


def test_beginnings_to_judge_by_share_nothing_with_those_to_train_on() -> None:
    train, judge = ([text for texts in WORDS[kind].values() for text in texts] for kind in ("train", "judge"))
    assert not set(train) & set(judge)
    made = beginnings("train", 400)
    assert len(set(made)) == 400 and made[:50] == beginnings("train", 50) != beginnings("train", 50, seed=1)
    asked = [row["prompt"].partition("\n")[0] for row in tasks(48)]
    assert not any("{" in text or "  " in text or text != text.strip() for text in made + asked)


def test_the_value_of_a_chain_is_what_tilted_gives_for_it() -> None:
    batch, estimates = make_batch()
    p, q = distributions(batch)
    regret = p.log().amax(-1, keepdim=True) - p.log()
    kept = (q * (1 - 0.3 * regret).clamp_min(0)).sum(-1)  # [S, N]
    # chains that begin at rows 0..4 of the first text, and in the second at those that miss the hole at (1, 11)
    starts = torch.tensor([0, 1, 2, 3, 4, 7, 8, 9, 11])
    steps = torch.arange(3)[:, None]
    lengths = kept[steps, starts + steps].cumprod(0).sum(0)
    anchor = ((p * (p.log() - q.log())).sum(-1) * batch.weights).sum() / batch.weights.sum()
    expected = 0.1 * anchor - (lengths / 3).log().mean()
    check(batch, estimates, stories.ValueLoss(price=0.3)(batch.batch()).loss, expected)


def test_every_loss_has_its_recipe(tmp_path: Path) -> None:
    args = argparse.Namespace(work=tmp_path, target="models/target", drafter="models/drafter", steps=7)
    for loss, written in stories.LOSSES.items():
        recipe = read_recipe(stories.write_recipe(args, loss, tmp_path / loss))
        asked = recipe.model["loss"]
        assert (asked if isinstance(written, str) else asked["class_path"].rpartition(".")[2]) == (
            written if isinstance(written, str) else written["class_path"].rpartition(".")[2]
        )
        assert recipe.model["unroll_steps"] == (4 if loss.startswith(stories.CHAINED) else 1)
        assert recipe.trainer["max_steps"] == 7 and recipe.trainer["default_root_dir"] == str(tmp_path / loss)
        assert recipe.data["train_files"] == [str(tmp_path / "answers.jsonl")]


def test_a_ladder_compares_rules_on_every_rung(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--target", str(toy.target), "--rungs", str(toy.drafter), "noise:0.02", "--prompts", str(toy.prompts)]
    words += ["--rules", "draft-only", "alone", "--batch", "2", "--depth", "4", "--max-new-tokens", "8", "--forecast"]
    words += ["--work", "work", "--json", "ladder.json", "--figure", "ladder.png"]
    assert ladder.main(words) == 0
    record = json.loads((tmp_path / "ladder.json").read_text())
    assert record["settings"]["target"] == "target" and str(tmp_path) not in json.dumps(record["rungs"])
    assert list(record["rungs"]) == ["drafter", "noise:0.02"] and (tmp_path / "ladder.png").stat().st_size > 1000
    for rung in record["rungs"].values():
        exact, lossy, alone = (rung["rules"][rule] for rule in ("exact", "draft-only", "alone"))
        assert exact["tau"] < lossy["tau"] and lossy["gain"]["ratio"] == pytest.approx(
            lossy["tau"] / exact["tau"], rel=1e-4
        )
        assert alone["gain"] is None and alone["differences"].keys() == lossy["differences"].keys()
        assert rung["forecast"]["exact"]["tau"] == pytest.approx(exact["tau"], rel=0.2)
        assert rung["drafts"]["count"] > 0
    assert record["forecast_error"]["cases"] == 2 and record["forecast_error"]["mean_error"] < 0.3
    kept = [tmp_path / "work" / name for name in ("drafter.json", "drafter.forecast.json")]
    before = [file.stat().st_mtime_ns for file in kept]
    old = json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    (tmp_path / "old.json").write_text(json.dumps({"rungs": {f"old {name}": rung for name, rung in old.items()}}))
    monkeypatch.chdir(tmp_path)
    assert ladder.main([*words, "--join", "old.json"]) == 0
    assert [file.stat().st_mtime_ns for file in kept] == before, "a finished rung is kept"
    joined = json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    assert list(joined) == ["old drafter", "old noise:0.02", "drafter", "noise:0.02"]
    assert joined["old drafter"] == joined["drafter"]


def test_numbers_of_drafters_are_ranked_with_what_rules_gain() -> None:
    def rung(agreement: float, regret: float, below: float, gain: float, equal: bool) -> dict[str, Any]:
        drafts = {"agreement": agreement, "regret_median": regret, "below": {"1": below}}
        lossy = {"gain": {"ratio": gain}, "equal": equal, "divergence_spent": 2.0, "answer_tokens": 40.0}
        return {"drafts": drafts, "rules": {"exact": {"gain": None}, "tilted": lossy}}

    rungs = {
        "a": rung(0.9, 0.5, 0.9, 1.2, True),
        "b": rung(0.8, 1.0, 0.7, 1.4, True),
        "c": rung(0.4, 3, 0.5, 1.3, False),
    }
    found = ladder.correlations_of(rungs)
    assert list(found) == ["gain at equal quality", "gain of tilted"], "what is spent is the same on each rung"
    by_gain, by_equal = found["gain of tilted"], found["gain at equal quality"]
    assert by_gain["rungs"] == 3 and by_gain["agreement"] == pytest.approx(-0.5)
    assert by_gain["regret_median"] == pytest.approx(0.5) and by_gain["near_ties"] == pytest.approx(0.5)  # .09 .14 .30
    assert by_equal["below_1"] == pytest.approx(0.5), "without an equal rule the gain is exact's"


def test_quality_is_equal_within_the_bounds() -> None:
    assert ladder.is_model("smollm2-135m-maths") and not ladder.is_model("shipped")
    same = {name: {"mean": 0.0} for name in ladder.BOUNDS}
    assert ladder.within(same) and ladder.within({"copied_4grams": {"mean": -0.5}})
    assert not ladder.within({**same, "copied_4grams": {"mean": 0.03}})
    assert not ladder.within({**same, "score": {"mean": -0.03}})
