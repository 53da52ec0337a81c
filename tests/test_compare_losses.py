"""The comparison of losses: it trains, decodes, resumes and compares where heads spend the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from benchmarks import compare_losses
from benchmarks.compare_losses import Judge, main
from benchmarks.equal_divergence import COUNTS, compare_at_equal, gather, markdown, summarise, tau_at
from benchmarks.loss_plan import read_plan
from fsd_infer.target import Target
from fsd_train.data import read_answers
from tests.train_toys import save_toy_target, write_answers

RULES = ["exact", "fuzzy:js:0.2", "fuzzy:js:0.6"]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with target/, answers.jsonl and config.yaml: two arms and an extra one, one seed, four steps."""
    root = tmp_path_factory.mktemp("toys")
    target = Target.from_pretrained(str(save_toy_target(root / "target")), dtype=torch.float32)
    write_answers(root / "answers.jsonl", target, rows=24)
    config = {
        "steps": 4,
        "seeds": [0],
        "baselines": ["kl"],
        "model": {
            "target": str(root / "target"),
            "head": {"final_norm": True},
            "draft_vocab_size": 40,
            "unroll_steps": 2,
            "warmup_steps": 1,
            "eval_steps": 2,
        },
        "data": {
            "train_files": [str(root / "answers.jsonl")],
            "validation_fraction": 0.4,
            "max_length": 64,
            "batch_tokens": 128,
        },
        "trainer": {"accelerator": "cpu", "log_every_n_steps": 1, "limit_val_batches": 1},
        "arms": [
            {"name": "kl", "loss": "kl"},
            {"name": "fsd", "loss": "fsd", "loss_args": {"threshold": [0.2, 0.6]}, "head": {"feature_scale": True}},
            {"name": "other", "loss": "tv", "extra": True, "steps": 7},
        ],
        "evaluation": {
            "rules": RULES, "prompts": 5, "part": "all", "max_new_tokens": 12, "batch_size": 3,
            "tree": {"depth": 3, "width": 3, "nodes": 8},
        },
    }  # fmt: skip
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root


def command(toys: Path, out: Path, *more: str) -> list[str]:
    config = str(toys / "config.yaml")
    return ["--config", config, "--output", str(out / "runs"), "--json", str(out / "record.json"), "--quiet", *more]


def test_it_compares_and_goes_on_where_it_stopped(
    toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # stopped in the second training, after its first checkpoint
    fits: list[list[str]] = []
    fit = compare_losses.fsd_train

    def stopped(argv: list[str]) -> int:
        fits.append(argv)
        if len(fits) < 2:
            return fit(argv)
        config = Path(argv[2])
        values = yaml.safe_load(config.read_text())
        values["trainer"]["max_steps"] = 2
        values["trainer"]["callbacks"] = values["trainer"]["callbacks"][:1]  # no head yet
        config.with_name("stopped.yaml").write_text(yaml.safe_dump(values))
        fit(["fit", "--config", str(config.with_name("stopped.yaml"))])
        raise SystemExit(1)

    monkeypatch.setattr(compare_losses, "fsd_train", stopped)
    assert main(command(toys, tmp_path)) == 130
    first = json.loads((tmp_path / "record.json").read_text())
    assert not first["complete"] and first["summary"] is None
    assert len(list((tmp_path / "runs").glob("kl-*/decoded-*.json"))) == len(RULES)

    def counted(argv: list[str]) -> int:
        fits.append(argv)
        return fit(argv)

    monkeypatch.setattr(compare_losses, "fsd_train", counted)
    assert main(command(toys, tmp_path)) == 0
    assert [("--ckpt_path" in argv, "fsd-seed0" in argv[2]) for argv in fits] == [
        (False, False), (False, True), (True, True)
    ]  # fmt: skip
    assert "min left" in capsys.readouterr().err
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["complete"] and [row["steps"] for row in record["runs"]] == [4, 4]
    assert record["environment"]["command"].startswith("python -m benchmarks.compare_losses --config")
    for rules in record["summary"]["arms"].values():
        assert rules["exact"]["spent_per_token"]["mean"] == rules["exact"]["gate_open_fraction"]["mean"] == 0
        assert rules["fuzzy:js:0.6"]["spent_per_token"]["mean"] > 0
        assert 1 <= rules["exact"]["tau"]["mean"] < rules["fuzzy:js:0.6"]["tau"]["mean"] <= 4
    # exact decoding emits the target's text, whatever the head
    counts = [json.loads(path.read_text())["counts"] for path in (tmp_path / "runs").glob("*/decoded-exact-*.json")]
    lengths, scores = ([found[name] for found in counts] for name in ("tokens", "log_likelihood"))
    assert lengths[0] == lengths[1] and scores[0] == pytest.approx(scores[1], rel=0.02)
    text = (tmp_path / "record.md").read_text()
    assert "| fsd | fuzzy:js:0.6 |" in text and "τ divided by that of `kl`" in text

    # a lost result is decoded again and alone; equal settings give equal numbers
    lost = next((tmp_path / "runs").glob("fsd-*/decoded-fuzzy-js-0.2-*.json"))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json") if path != lost}
    before = json.loads(lost.read_text())["counts"]
    lost.unlink()
    assert main(command(toys, tmp_path)) == 0
    assert json.loads(lost.read_text())["counts"] == before
    assert len(fits) == 3 and all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())


def test_prompts_are_held_out_and_halves_are_disjoint(toys: Path) -> None:
    def prompts(part: str) -> set[tuple[int, ...]]:
        changes = [f"evaluation.part={part}", "evaluation.prompts=100"]
        return set(map(tuple, Judge(read_plan(toys / "config.yaml", changes=changes)).prompts))

    learned, held = read_answers([toys / "answers.jsonl"], validation_fraction=0.4)
    asked = [tuple(row["input_ids"][: int(row["loss_mask"].argmax())].tolist()) for row in held]  # type: ignore[attr-defined]
    seen = [tuple(row["input_ids"][: int(row["loss_mask"].argmax())].tolist()) for row in learned]  # type: ignore[attr-defined]
    assert prompts("all") == set(asked) and not prompts("all") & set(seen)
    assert prompts("tune") | prompts("report") == prompts("all")
    assert prompts("tune") and prompts("report") and not prompts("tune") & prompts("report")


def test_a_run_is_named_by_all_that_its_head_depends_on(toys: Path, tmp_path: Path) -> None:
    config = toys / "config.yaml"

    def names(*changes: str, **options: Any) -> list[str]:
        return [run.directory.name for run in read_plan(config, changes=changes, **options).runs(tmp_path)]

    assert names() == names() and len(set(names())) == 2
    assert [name[:9] for name in names(seeds=[3, 5])] == ["kl-seed3-", "fsd-seed3", "kl-seed5-", "fsd-seed5"]
    assert not set(names()) & set(names("model.lr=0.5"))
    assert not set(names()) & set(names(steps=5))
    assert names("evaluation.max_new_tokens=5", "baselines=[fsd]") == names()
    copy = tmp_path / "moved.jsonl"
    copy.write_bytes((toys / "answers.jsonl").read_bytes())
    assert names(f"data.train_files=[{copy}]") == names()
    with copy.open("a") as file:
        file.write("\n")
    assert not set(names(f"data.train_files=[{copy}]")) & set(names())
    chosen = read_plan(config, arms=["other", "fsd"], steps=5)
    assert [(arm.name, arm.steps) for arm in chosen.arms] == [("other", 7), ("fsd", 5)] and chosen.baselines == []
    assert chosen.arms[1].model["head"] == {"final_norm": True, "feature_scale": True}


def test_the_shipped_configurations_are_sound(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)
    for name, rules in (("compare_losses", 6), ("compare_losses_late", 6)):
        path = Path("benchmarks") / f"{name}.yaml"
        entries = yaml.safe_load(path.read_text())["arms"]
        every = read_plan(path, arms=[entry["name"] for entry in entries], changes=["data.features=data"])
        assert len(every.arms) == len(entries)
        plan = read_plan(path, changes=["data.features=data"])
        assert plan.baselines and len(plan.evaluation.rules) == rules and plan.evaluation.rules[0] == "exact"


# curves --------------------------------------------------------------------------------------------------------------


def made_up(
    arms: dict[str, list[tuple[float, float]]], seeds: int = 3, prompts: int = 8, noise: float = 0.0
) -> dict[tuple[str, int, str], dict[str, list[float]]]:
    """Results whose pooled points are the arms' (spent per token, tau): each prompt has 1001 tokens."""
    rng = np.random.default_rng(0)
    hard = 1 + noise * rng.uniform(-1, 1, prompts)  # what all arms find hard
    made = {}
    for arm, pairs in arms.items():
        for seed in range(seeds):
            for number, (spent, tau) in enumerate(pairs):
                made[arm, seed, f"rule{number}"] = {
                    **{name: [0.0] * prompts for name in COUNTS},
                    "tokens": [1001.0] * prompts,
                    "forwards": list(1000 / tau * hard),
                    "spent": [1001.0 * spent] * prompts,
                }
    return made


def test_lengths_between_points_and_beyond_them() -> None:
    spent, tau = np.array([0.0, 0.2, 0.1, 0.1]), np.array([2.0, 3.0, 2.4, 2.6])  # in any order, one place twice
    found = tau_at(spent, tau, np.array([0.0, 0.05, 0.1, 0.15, 0.2, 0.21, -0.01]))
    assert found[:5] == pytest.approx([2.0, 2.25, 2.5, 2.75, 3.0])
    assert np.isnan(found[5:]).all()


def test_arms_are_compared_where_both_spend_the_same() -> None:
    # `far` has longer lengths at each rule, yet on the line of `base`; `good` is on a line 10 % above it
    line = lambda x, gain=1.0: (x, gain * (2 + 4 * x))  # noqa: E731
    results = made_up({
        "base": [line(0.0), line(0.1), line(0.2)],
        "far": [line(0.0), line(0.15), line(0.5)],
        "good": [line(0.0, 1.1), line(0.05, 1.1), line(0.15, 1.1)],
    })  # fmt: skip
    counts = gather(results, ["base", "far", "good"])
    assert counts is not None
    table = compare_at_equal(counts, "base", resamples=50)
    assert [place["spent"] for place in table["at"]] == pytest.approx([0.0, 0.1, 0.2])
    far, good = table["arms"]["far"], table["arms"]["good"]
    assert [cell["ratio"] for cell in far["at"]] == pytest.approx([1.0, 1.0, 1.0])
    assert [cell["ratio"] for cell in good["at"][:2]] == pytest.approx([1.1, 1.1])
    assert good["at"][2] == {"tau": None, "ratio": None, "low": None, "high": None}  # it never spends 0.2
    assert good["mean"]["ratio"] == pytest.approx(1.1) and good["mean"]["to"] == pytest.approx(0.15)
    assert far["mean"]["to"] == pytest.approx(0.2)
    assert good["at"][1]["tau"] == pytest.approx(1.1 * 2.4)
    assert table["arms"]["base"]["mean"]["ratio"] == pytest.approx(1.0)


def test_intervals_are_paired_and_hold_what_differs() -> None:
    results = made_up({"base": [(0.0, 2.0), (0.2, 3.0)], "good": [(0.0, 2.0), (0.2, 3.3)]}, noise=0.8)
    counts = gather(results, ["base", "good"])
    assert counts is not None
    cell = compare_at_equal(counts, "base", resamples=100)["arms"]["good"]["at"][1]
    # prompts differ by a factor of nine, the arms on each of them by 10 %: drawn jointly, the ratio does not vary
    assert [cell["ratio"], cell["low"], cell["high"]] == pytest.approx([1.1, 1.1, 1.1])
    for seed, factor in enumerate((0.9, 1.0, 1.1)):
        values = results["good", seed, "rule1"]
        values["forwards"] = [value * factor for value in values["forwards"]]
    counts = gather(results, ["base", "good"])
    assert counts is not None
    cell = compare_at_equal(counts, "base", resamples=200)["arms"]["good"]["at"][1]
    assert cell["low"] < 1.05 < cell["ratio"] < 1.15 < cell["high"] < 1.3


def test_only_seeds_that_all_arms_have_are_summarised() -> None:
    results = made_up({"a": [(0.0, 2.0), (0.1, 2.5)], "b": [(0.0, 2.2), (0.2, 2.6)]}, seeds=2)
    del results["b", 1, "rule1"]
    counts = gather(results, ["a", "b"])
    assert counts is not None and counts.seeds == [0]
    summary = summarise(counts, ["a"], resamples=20)
    assert summary["arms"]["b"]["rule1"]["tau"] == {
        "mean": pytest.approx(2.6),
        "sd": None,
        "seeds": [pytest.approx(2.6)],
    }
    assert "1 seed, 8 held-out prompts" in markdown(summary)
    assert gather({key: value for key, value in results.items() if key[0] == "a"}, ["a", "b"]) is None
