"""Operations of a training batch, the share of a device's peak, and the benchmark of a training step."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import train_step
from fsd_bench.roofline import peak_of
from fsd_train.data import collate
from fsd_train.models import LMModule
from tests.families import tiny_model
from tests.train_toys import answers_of, eagle_module, ready, save_toy_target


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
    data = answers_of(toys)
    data.setup()
    assert data.train_set is not None
    batch: dict[str, Any] = dict(collate([data.train_set[place] for place in range(8)]))
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
