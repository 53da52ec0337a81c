"""Programs of benchmarks/: heads and ladders of drafters that they train and compare, near ties, a training step."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import ladder, stories, train_step
from benchmarks.beginnings import WORDS
from benchmarks.near_ties import read_answer
from benchmarks.recorded import Finished
from benchmarks.shipped_quality import counted, setting
from fsd_bench.roofline import peak_of
from fsd_core.files import jsonable
from fsd_infer.targets.target import Target
from fsd_train.models import LMModule
from tests.bench_toys import Toy
from tests.families import tiny_model
from tests.loss_toys import check, distributions, make_batch
from tests.train_toys import batch_of, eagle_module, ready, save_toy_target


def test_beginnings_to_judge_by_share_nothing_with_those_to_train_on() -> None:
    train, judge = ([text for texts in WORDS[kind].values() for text in texts] for kind in ("train", "judge"))
    assert not set(train) & set(judge)


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
    monkeypatch.chdir(tmp_path)
    assert ladder.main([*words.split(), "--join", "ladder.json"]) == 0, "a joined rung only gains its forecast"
    assert len(before) == 2 and [file.stat().st_mtime_ns for file in kept] == before, "a finished rung is kept"
    assert (tmp_path / "ladder.png").stat().st_size > 1000
    assert json.loads((tmp_path / "ladder.json").read_text())["rungs"] == record["rungs"]


# the quality of the built-in model's head ----------------------------------------------------------------------------


def test_the_shipped_file_is_what_the_records_say(repo_root: Path) -> None:
    file = repo_root / "fsd_infer" / "shipped" / "smollm2-135m" / "calibrated.json"
    (entry,) = json.loads(file.read_text("utf-8"))["settings"]
    del entry["target"]
    assert entry == json.loads(json.dumps(jsonable(asdict(setting())))), "run python -m benchmarks.shipped_quality"
    assert all("odd" not in name for name in counted()), "the odd rows verify, they do not calibrate"


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
