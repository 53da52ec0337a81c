"""What records say about goals; the profile of one method; throughput by batch size."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import batch_throughput
from benchmarks.goals import BEGIN, END, Goal, goals, main
from fsd_infer import FsdError
from fsd_infer.bench import profile, run
from fsd_infer.bench.profile import (
    default_method,
    peak_bytes,
    profile_method,
    resident_bytes,
    restart_peak,
    tensor_bytes,
)
from fsd_infer.decoder import FuzzyDecoder
from tests.bench_toys import Toy, save_toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def record_file(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "bench.json"
    methods = ["hf-generate", "plain", "mine=exact", "fuzzy:js:0.3"]
    models = dict(target=str(toy.target), drafter=str(toy.drafter), dtype="fp32")
    run(toy.prompts, methods, json_path=path, max_new_tokens=8, log_likelihood=True, **models)  # type: ignore[arg-type]
    return path


def ours(rule: str, drafter: str, speed: float, likelihood: float = -1.0, **more: float) -> dict[str, Any]:
    return {
        "by": "fsd_infer", "rule": {"rule": rule}, "drafter": {"name": drafter}, "tokens_per_second": speed,
        "log_likelihood_per_token": likelihood, **more,
    }  # fmt: skip


def pair(value: float) -> dict[str, Any]:
    interval = {"median": value, "low": value - 0.1, "high": value + 0.1, "pairs": 8}
    return {"tokens_per_second": interval, "decode_tokens_per_second": interval}


def made_up(target: str = "smollm2-135m") -> dict[str, Any]:
    """A record in which `js 0.5` is fastest but too unlikely, and the n-gram server is vLLM's better mode."""
    methods = {
        "hf-generate": {"by": "transformers", "tokens_per_second": 40.0, "log_likelihood_per_token": -1.0},
        "plain": ours("exact", "none", 98.0),
        "exact": ours("exact", "eagle", 150.0, round_overhead_fraction=0.2),
        "exact+lookup": ours("exact", "eagle+lookup", 160.0, -1.0, round_overhead_fraction=0.04),
        "js 0.1": ours("fuzzy", "eagle", 210.0, -1.019, round_overhead_fraction=0.06),
        "js 0.5": ours("fuzzy", "eagle", 300.0, -1.021),
        "vllm": {"by": "server", "tokens_per_second": 100.0},
        "vllm-ngram": {"by": "server", "tokens_per_second": 120.0},
    }
    ratios = {
        "hf-generate": {"exact+lookup": pair(4.0), "js 0.1": pair(5.25), "js 0.5": pair(7.5)},
        "vllm": {"plain": pair(0.98), "exact+lookup": pair(1.6)},
        "vllm-ngram": {"exact+lookup": pair(1.33), "js 0.1": pair(1.75)},
    }
    curve = {"1": 0.010, "8": 0.011, "16": 0.014}
    memory = {"above_weights_and_caches": 0.08}
    return {
        "methods": methods,
        "ratios": ratios,
        "settings": {"target": target},
        "profile": {"method": "exact+lookup", "forward_seconds": curve, "memory": memory},
    }


def by_wanted(record: dict[str, Any]) -> list[tuple[str, bool | None]]:
    return [(goal.wanted, goal.holds) for goal in goals(record)]


def test_each_goal_is_judged_by_the_method_it_speaks_of() -> None:
    assert by_wanted(made_up()) == [
        ("≥ 0.9", True), ("≥ 3.5", True), ("≥ 1.3", True), ("≥ 5.0", True), ("≥ 1.8", False), ("≤ 5 %", False),
        ("≤ 1.3", False), ("≤ 10 %", True),
    ]  # fmt: skip
    rows = goals(made_up())
    assert rows[2].what.startswith("`exact+lookup` / `vllm-ngram`") and "1.33 (1.23–1.43)" in rows[2].reached
    assert rows[3].what == "`js 0.1` / `hf-generate`, log-likelihood falls by 1.9 %"
    assert rows[5].what == "round time outside forwards and drafter (`exact+lookup`, `js 0.1`)"
    assert rows[5].reached == "4.0 %, 6.0 %", "the worse of the two decides"
    assert rows[6].reached == "1.40 (14.0 / 10.0 ms)"
    assert by_wanted(made_up("some-model"))[1] == ("≥ 3.0", True), "a target without a head of its own"


def test_what_a_record_does_not_tell_is_not_measured() -> None:
    record = made_up()
    del record["profile"], record["methods"]["exact+lookup"]["round_overhead_fraction"]
    for name in ("vllm", "vllm-ngram"):
        del record["methods"][name], record["ratios"][name]
    record["methods"]["js 0.1"]["log_likelihood_per_token"] = None  # so that no fuzzy rule qualifies
    holds = {goal.wanted: (goal.holds, goal.reached) for goal in goals(record)}
    assert holds.pop("≥ 3.5")[0] is True
    assert len(holds) == 7 and set(holds.values()) == {(None, "not measured")}


def test_batches_are_judged_by_throughput() -> None:
    methods = {"plain": ours("exact", "none", 300.0), "exact": ours("exact", "eagle", 290.0)}
    part = {"methods": methods, "ratios": {"plain": {"exact": pair(0.97)}}}
    assert goals({"batches": {"1": part, "8": part}}) == [
        Goal(
            "`exact` / `plain` (batch 8)",
            "≥ 1.0",
            "0.97 (0.87–1.07); behind the prefill 0.97; 290 against 300 tok/s",
            False,
        )
    ]


def test_table_goes_to_its_place_in_a_page(
    record_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    for _ in range(2):  # the second time replaces the first
        assert main([str(record_file), "--into", str(page)]) == 0
    assert main([str(record_file)]) == 0
    table = capsys.readouterr().out.strip()
    assert page.read_text() == f"before\n\n{BEGIN}\n\n{table}\n\n{END}\n\nafter\n"
    assert "| `mine` / `hf-generate` | ≥ 3.0 |" in table and "`bench.json`" in table
    page.write_text("no place")
    assert main([str(record_file), "--into", str(page)]) == 2
    assert main([str(page)]) == 2
    assert "is not a record" in capsys.readouterr().err


def test_profile_is_added_to_a_record(record_file: Path, toy: Toy) -> None:
    before = json.loads(record_file.read_text())
    assert profile.main([str(record_file)]) == 0
    record = json.loads(record_file.read_text())
    found = record.pop("profile")
    assert record == before and found["method"] == "mine" == default_method(record).partition("=")[0]
    curve = {int(nodes): seconds for nodes, seconds in found["forward_seconds"].items()}
    assert list(curve) == list(profile.NODES) and all(seconds > 0 for seconds in curve.values())

    memory = found["memory"]
    decoder = FuzzyDecoder.from_pretrained(str(toy.target), str(toy.drafter), dtype=torch.float32)
    modules = [decoder.target.model, *decoder.drafter.modules()]
    expected = tensor_bytes(t for module in modules for t in [*module.parameters(), *module.buffers()])
    longest = max(row["prompt_tokens"] for row in record["prompts"])
    assert memory["weights"] == expected and memory["prompt_tokens"] == longest
    # keys and values of two layers in the target alone: fp32, at least prompt and answer long
    config = decoder.target.config
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert memory["caches"] >= 2 * config.num_hidden_layers * width * 4 * (longest + 8)
    above = (memory["peak"] - memory["libraries"]) / (memory["weights"] + memory["caches"]) - 1
    # no more about the peak: this process has more than libraries, and may lose some of it meanwhile
    assert math.isclose(memory["above_weights_and_caches"], above) and memory["peak"] > 0 < memory["libraries"]


def test_only_methods_of_this_package_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FsdError, match="only methods of this package"):
        profile_method("hf-generate", {}, 10)
    (tmp_path / "no.json").write_text("{}")
    assert profile.main([str(tmp_path / "no.json")]) == 2
    assert "no.json is not a record" in capsys.readouterr().err


def test_shared_memory_counts_once() -> None:
    weight = torch.zeros(10)
    assert tensor_bytes([weight, weight, torch.zeros(3, dtype=torch.bfloat16)]) == 46
    apart = [weight.to("meta"), weight.to("meta")]
    assert tensor_bytes([*apart, apart[0]]) == 80, "weights that are let go have no address, and count all the same"


def test_the_peak_can_be_forgotten() -> None:
    block = bytearray(b"x") * (1 << 26)
    now = resident_bytes()  # first: to ask takes a page itself
    high = peak_bytes()
    assert high >= now > len(block)
    del block
    told_apart = restart_peak()
    assert (peak_bytes() < high - (1 << 25)) == told_apart


def test_batch_sizes_are_measured_on_the_same_prompts(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--target", str(toy.target), "--methods", f"plain,exact@{toy.drafter}", "--prompts", str(toy.prompts)]
    argv += ["--dtype", "fp32", "--max-new-tokens", "6", "--every", "1", "--threads", "1"]
    out = tmp_path / "batches.json"
    assert batch_throughput.main([*argv, "--sizes", "1,4", "--limit", "4", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert list(record["batches"]) == ["1", "4"]
    for size, part in record["batches"].items():
        rows = [row["methods"]["plain"][0] for row in part["prompts"]]
        assert len(rows) == 4 and {row["batch"] for row in rows} == {int(size)}, "batches mix categories"
    tokens = [[row["methods"]["plain"][0]["tokens_sha256"] for row in p["prompts"]] for p in record["batches"].values()]
    assert tokens[0] == tokens[1], "greedy answers do not depend on the batch"
    said = capsys.readouterr().out
    assert "tok/s of a batch of" in said and "(batch 4) | ≥ 1.0 |" in said
    assert batch_throughput.main([*argv, "--sizes", "3", "--limit", "4", "--json", str(out)]) == 2
    assert "do not fill batches of 3" in capsys.readouterr().err
