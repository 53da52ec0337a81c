"""Programs of benchmarks/: heads and ladders of drafters that they train and compare, near ties, a training step."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy.stats import spearmanr
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import ladder, stories, train_step
from benchmarks.beginnings import WORDS, beginnings
from benchmarks.near_ties import compare, read_answer, summary
from benchmarks.recorded import Finished
from benchmarks.results_page import ties
from benchmarks.shipped_quality import CONFIDENCE, counted, levels, setting
from fsd_bench.roofline import peak_of
from fsd_bench.sweep.certify import QUALITIES, loss_p_value
from fsd_core.files import jsonable
from fsd_infer.targets.target import Target
from fsd_train.commands.fit import read_recipe
from fsd_train.models import LMModule
from tests.bench_toys import Toy
from tests.families import tiny_model
from tests.loss_toys import check, distributions, make_batch
from tests.train_toys import batch_of, eagle_module, ready, save_toy_target


def test_beginnings_to_judge_by_share_nothing_with_those_to_train_on() -> None:
    train, judge = ([text for texts in WORDS[kind].values() for text in texts] for kind in ("train", "judge"))
    assert not set(train) & set(judge)
    made = beginnings("train", 400)
    assert len(set(made)) == 400 and made[:50] == beginnings("train", 50) != beginnings("train", 50, seed=1)


def test_a_stopped_run_keeps_its_finished_parts(tmp_path: Path) -> None:
    file, settings = tmp_path / "runs" / "record.json", {"seconds": 1}
    Finished(file, settings)["one"] = {"tau": (1.5, 2.0)}
    partial = file.with_name("record.json.partial.jsonl")
    with partial.open("a") as torn:  # as a kill leaves it
        torn.write('{"name": "two", "sett')
    again = Finished(file, settings)
    assert again == {"one": {"tau": [1.5, 2.0]}} and Finished(file, {"seconds": 2}) == {}
    again["two"] = 3
    assert Finished(file, settings) == again and Finished(None, settings) == {}
    again.remove()
    assert not partial.exists() and Finished(file, settings) == {}


def test_the_value_of_a_chain_is_what_tilted_gives_for_it() -> None:
    batch = make_batch()
    p, q = distributions(batch)
    gap = p.log().amax(-1, keepdim=True) - p.log()
    kept = (q * (1 - 0.3 * gap).clamp_min(0)).sum(-1)  # [S, N]
    # chains that begin at rows 0..4 of the first text, and in the second at those that miss the hole at (1, 11)
    starts = torch.tensor([0, 1, 2, 3, 4, 7, 8, 9, 11])
    steps = torch.arange(3)[:, None]
    lengths = kept[steps, starts + steps].cumprod(0).sum(0)
    anchor = ((p * (p.log() - q.log())).sum(-1) * batch.weights).sum() / batch.weights.sum()
    expected = 0.1 * anchor - (lengths / 3).log().mean()
    check(batch, stories.ValueLoss(kl_coef=0.3)(batch.batch()).loss, expected)


def test_every_loss_has_its_recipe(tmp_path: Path) -> None:
    args = argparse.Namespace(work=tmp_path, target="models/target", drafter="models/drafter", steps=7)
    for loss, asked in stories.LOSSES.items():
        file = stories.write_recipe(args, loss, 3, tmp_path / loss)
        recipe = read_recipe(file)
        written = yaml.safe_load(file.read_text())
        arguments = written["model"]["init_args"]
        assert {name: arguments[name] for name in asked} == asked and arguments["drafter"] == "models/drafter"
        assert written["seed_everything"] == 3 and recipe.model["drafter"] == "models/drafter"
        assert recipe.trainer["max_steps"] == 7 and recipe.trainer["default_root_dir"] == str(tmp_path / loss)
        assert recipe.data["train_files"] == [str(tmp_path / "answers.jsonl")]


def test_losses_are_compared_over_seeds_on_the_best_chain() -> None:
    args = argparse.Namespace(seeds=[0, 1], losses=["lk", "js"], chains=[8, 4], rules=["exact"])
    tau = {"public": (2.0, 1.6), "lk-0": (3.0, 2.9), "lk-1": (3.0, 2.7), "js-0": (4.0, 2.0), "js-1": (3.0, 2.0)}
    facts = {
        "tau": 3.0, "log_likelihood_per_token": -1.0, "repeated_4grams": 0.5, "divergence_spent": 3.2,
        "answer_tokens": 64.0, "drafts": {"agreement": 0.7, "regret_median": 1.25, "below": {"1": 0.4}},
    }  # fmt: skip
    names = {stories.label(name, "exact", n): both[i] for name, both in tau.items() for i, n in enumerate(args.chains)}
    answers = {name: [{"tau": value, "target_forwards": 10}] for name, value in names.items()}
    record = {"methods": dict.fromkeys(names, facts), "prompts": [{"methods": answers}] * 2}
    lk, js = (stories.over_seeds(record, loss, "exact", args) for loss in args.losses)
    assert (lk["chain"], js["chain"]) == (4, 8) and lk["nats_per_token"] == pytest.approx(0.05)
    assert lk["tokens_per_cost"] == pytest.approx(2.8 / 1.24) and js["tokens_per_cost"] == pytest.approx(3.5 / 1.48)
    assert js["x_public"]["ratio"] == pytest.approx(3.5 / 1.48 / (2.0 / 1.48))
    assert js["x_first"]["ratio"] == pytest.approx(3.5 / 1.48 / (2.8 / 1.24)) and lk["x_first"]["ratio"] == 1.0


def test_a_ladder_compares_rules_on_every_rung(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RULES", "MATCHING"):
        monkeypatch.setattr(f"fsd_bench.worth.forecasts.{name}", ())
    words = f"--target {toy.target} --rungs noise:0.02 --prompts {toy.prompts} --rules draft-only alone --batch 2"
    words += " --depth 4 --max-new-tokens 8 --forecast --work work --json ladder.json --figure ladder.png"
    assert ladder.main(words.split()) == 0
    record = json.loads((tmp_path / "ladder.json").read_text())
    assert record["settings"]["target"] == "target" and str(tmp_path) not in json.dumps(record["rungs"])
    rung = record["rungs"]["noise:0.02"]
    exact, lossy, alone = (rung["rules"][rule] for rule in ("exact", "draft-only", "alone"))
    assert lossy["gain"]["ratio"] == pytest.approx(lossy["tau"] / exact["tau"], rel=1e-4) and lossy["tau"] > 1
    assert alone["gain"] is None and alone["differences"].keys() == lossy["differences"].keys()
    assert rung["forecast"]["exact"]["tau"] == pytest.approx(exact["tau"], rel=0.2) and rung["drafts"]["count"] > 0
    assert record["forecast_error"]["cases"] == 1 and record["forecast_error"]["mean_error"] < 0.3
    kept = list((tmp_path / "work").glob("*.json"))
    before = [file.stat().st_mtime_ns for file in kept]
    old = {name: json.loads(json.dumps(rung)) for name in ("first", "second", "third")}
    agreement, gains = [0.1, 0.2, 0.3, rung["drafts"]["agreement"]], [10.0, 20.0, 30.0, lossy["gain"]["ratio"]]
    for other, share, gain in zip(old.values(), agreement[:3], gains[:3], strict=True):
        other["drafts"]["agreement"], other["rules"]["draft-only"]["gain"]["ratio"] = share, gain
    (tmp_path / "old.json").write_text(json.dumps({"rungs": old}))
    monkeypatch.chdir(tmp_path)
    assert ladder.main([*words.split(), "--join", "old.json"]) == 0
    assert len(before) == 2 and [file.stat().st_mtime_ns for file in kept] == before, "a finished rung is kept"
    assert (tmp_path / "ladder.png").stat().st_size > 1000
    joined = json.loads((tmp_path / "ladder.json").read_text())
    assert joined["rungs"] == {**old, "noise:0.02": rung}
    monkeypatch.chdir(tmp_path)
    assert ladder.main([*words.split(), "--join", "ladder.json"]) == 0, "a joined rung only gains its forecast"
    assert json.loads((tmp_path / "ladder.json").read_text())["rungs"] == joined["rungs"]
    ranked = joined["correlations"]["gain of draft-only"]
    assert ranked["rungs"] == 4 and ranked["agreement"] == pytest.approx(spearmanr(agreement, gains).statistic)


def test_routing_mixes_the_target_with_the_drafter_alone(tmp_path: Path) -> None:
    facts = {"exact": (2.0, 0.6), "tilted": (4.0, 0.5), "alone": (None, 0.0)}
    rules = {rule: {"tau": tau, "score": score} for rule, (tau, score) in facts.items()}
    found = ladder.routing_of(rules, depth=4, cost=0.1)  # rounds of 1.4 forwards: 0.7, 0.35 and 0.1 per token
    assert {rule: row["tokens_per_cost"] for rule, row in found.items()} == pytest.approx(
        {"exact": 1 / 0.7, "tilted": 1 / 0.35, "alone": 10.0}
    )
    assert {rule: row["routed"] for rule, row in found.items()} == pytest.approx(
        {"exact": 0.6, "tilted": 0.25, "alone": 0.0}
    )
    half = 1 / (0.5 * 0.7 + 0.5 * 0.1)  # tokens per cost of half of the prompts by either
    assert 1 / 0.7 < half < found["tilted"]["tokens_per_cost"], "so it routes more than half"
    assert ladder.routing_of({**rules, "alone": {"tau": None, "score": None}}, 4, 0.1) == {}
    ladder.write_routing({"a": {"routing": found}, "b": {"routing": {}}}, 0.1, tmp_path / "routing.png")
    assert (tmp_path / "routing.png").stat().st_size > 1000


def test_quality_is_equal_within_the_bounds() -> None:
    assert ladder.is_model("smollm2-135m-maths") and not ladder.is_model("shipped")
    same = {name: {"mean": 0.0} for name in ladder.BOUNDS}
    assert ladder.within(same) and ladder.within({"copied_4grams": {"mean": -0.5}})
    assert not ladder.within({**same, "copied_4grams": {"mean": 0.03}})
    assert not ladder.within({**same, "score": {"mean": -0.03}})


# the quality of the built-in model's head ----------------------------------------------------------------------------


def test_the_shipped_file_is_what_the_records_say(repo_root: Path) -> None:
    file = repo_root / "fsd_infer" / "shipped" / "smollm2-135m" / "calibrated.json"
    (entry,) = json.loads(file.read_text("utf-8"))["settings"]
    del entry["target"]
    assert entry == json.loads(json.dumps(jsonable(asdict(setting())))), "run python -m benchmarks.shipped_quality"
    assert all("odd" not in name for name in counted()), "the odd rows verify, they do not calibrate"


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (4, 4), (10, 2), (60, 0)])
def test_a_level_is_the_highest_quality_that_is_certain(lost: int, gained: int) -> None:
    """Counts of several sets are those of one."""
    tau = {"tau": {"ratio": 1.2}}
    found = levels({
        "one": {"prompts": 100, "right_by_exact": 60, "lost": lost, "gained": gained, **tau},
        "other": {"prompts": 100, "right_by_exact": 40, "lost": 0, "gained": 0, **tau},
    })  # fmt: skip
    losses = np.array([1.0] * lost + [-1.0] * gained + [0.0] * (200 - lost - gained))
    certain = [quality for quality in QUALITIES if loss_p_value(losses, (1 - quality) * 0.5) <= 1 - CONFIDENCE]
    assert [level["quality"] for level in found] == certain[:1] and (lost == 60) == (found == [])
    assert all(level["speed"] == 1.2 for level in found)


# near ties ------------------------------------------------------------------------------------------------------------


def test_an_answer_is_read_as_it_was_decoded() -> None:
    """In fp32 the logits of any number of rows are those of one forward over the whole text."""
    model = tiny_model("llama")
    target = Target(model)
    prompt, answer = [3, 9, 4, 1, 7], [5, 2, 8, 8, 6, 1, 3, 2]
    with torch.no_grad():
        whole = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    for rows in (1, 3, 7, 20):
        torch.testing.assert_close(read_answer(target, prompt, answer, rows), whole, atol=1e-4, rtol=1e-4)


def test_differences_are_counted_by_the_lead_of_the_best_token() -> None:
    true = torch.tensor([[2.0, 1.97, 0.0], [0.0, 1.0, 0.8], [3.0, 0.0, 0.0], [1.0, 1.3, 0.0]])
    plain, verified = true.clone(), true.clone()
    plain[0, :2] = 2.0  # a tie goes to the first
    verified[0, 1], verified[1, 2] = 2.5, 1.5
    found = summary([compare(plain[:2], verified[:2], true[:2]), compare(plain[2:], verified[2:], true[2:])])
    assert found["positions"] == 4 and found["tied_in_bf16"] == 0.25
    pair = found["pairs"]["verified, plain"]
    assert pair["differ"]["mean"] == 0.5 and pair["answers_with_one"] == 1
    assert pair["leads"] == pytest.approx([0.03, 0.2], abs=1e-4)
    assert pair["by_lead"] == [[0.0, 1, 1], [0.05, 0, 0], [0.1, 1, 1], [0.25, 1, 0], [0.5, 0, 0], [1.0, 1, 0]]
    assert found["pairs"]["plain, fp32"]["leads"] == []
    assert "differ, of 4 tokens | answers with one, of 2 |" in ties({**found, "prompts": 2})


# a training step ------------------------------------------------------------------------------------------------------


def test_a_step_is_measured_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    words = ["--shape", str(tmp_path), "--device", "cpu", "--layers", "2", "--tokens", "96", "--steps", "2"]
    assert train_step.main([*words, "--json", str(tmp_path / "step.json")]) == 0
    record = json.loads((tmp_path / "step.json").read_text())
    assert set(record["parts_ms"]) == set(train_step.PARTS) and all(ms > 0 for ms in record["parts_ms"].values())
    assert set(record["beside_ms"]) == {"plan", "validation batch", "export", "checkpoint"}
    assert record["tokens_per_s"] == pytest.approx(record["fill"] * 96 / record["ms"] * 1e3, rel=1e-2)
    assert record["mfu"] is None and record["fill"] > 0.9
    assert "backward" in capsys.readouterr().out


@pytest.mark.parametrize("name", train_step.TRAINERS)
def test_another_trainer_gets_the_same_sequences(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script in its place says what it was asked for."""
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\njob = json.load(sys.stdin)\nbatches = job.pop('batches')\n"
        "assert all(len(b['ids']) == len(b['mask']) == sum(b['lengths']) == 96 for b in batches)\n"
        "print(json.dumps({'seconds': [2.0] * len(batches), 'trained_parameters': job['drafted'], 'loss': 1.0}))"
    )
    peer = replace(train_step.TRAINERS[name], script=str(script))
    monkeypatch.setitem(train_step.TRAINERS, name, peer)
    monkeypatch.setattr(train_step, "install", lambda peer, environment: Path(sys.executable))
    tiny_model("llama").config.save_pretrained(tmp_path)
    words = ["--shape", str(tmp_path), "--device", "cpu", "--tokens", "96", "--steps", "2", "--drafted", "40"]
    assert train_step.main([*words, f"--{name}", ".venv-peer"]) == 0
    assert "2000.0 ms, 0.0 M parameters" in capsys.readouterr().out
    script.write_text("raise SystemExit('no such head')")
    assert train_step.main([*words, f"--{name}", ".venv-peer"]) == 2
    assert f"{name} failed with status 1:\nno such head" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [{}, {"head": {"layout": "eagle3", "fused_layers": [0, 1]}, "draft_vocab_size": 40}, None], ids=str
)
def test_operations_are_those_that_torch_counts(options: dict[str, Any] | None, toys: Path, tmp_path: Path) -> None:
    """But for attention, which is left out, and products that are no weights'."""
    if options is None:
        module = ready(LMModule(str(toys / "target"), str(save_toy_target(tmp_path / "small", seed=1))))
    else:
        module = ready(eagle_module(toys, loss="js", unroll_steps=3, **options))
        module.target.capture_layers([0, 1] if options else [])
    batch = batch_of(toys, 8)
    module.draft(batch, module.unroll_steps)  # what happens once
    with FlopCounterMode(display=False) as counter:
        module.loss(module.draft(batch, module.unroll_steps)).loss.backward()
    counts: dict[Any, int] = counter.get_flop_counts()["Global"]
    linear = counts.get(torch.ops.aten.mm, 0) + counts.get(torch.ops.aten.addmm, 0)
    assert sum(module.operations(batch).values()) == pytest.approx(linear, rel=0.1)


def test_peaks_are_found_by_the_driver_s_names() -> None:
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert [peak_of(name) for name in ("NVIDIA L4", "NVIDIA A100-SXM4-80GB")] == [121e12, 312e12]
    assert {peak_of(name) for name in ("NVIDIA L40S", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090 D")} == {None}
