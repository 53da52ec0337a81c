"""What bounds a forward: the record of benchmarks/forward_limits.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import forward_limits
from fsd_infer import FsdError, Target
from fsd_infer.cpu.ops import speed_up
from fsd_infer.cpu.packing import can_pack
from tests.families import tiny_model


@pytest.mark.skipif(not can_pack(), reason="needs oneDNN with bf16")
def test_every_linear_weight_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forward_limits, "READ", 2**16)
    monkeypatch.setattr(forward_limits, "SIDE", 64)
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "target")
    linear = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
    file = tmp_path / "new" / "limits.json"
    argv = ["--target", str(tmp_path / "target"), "--nodes", "1", "4", "--context", "8", "--repeats", "3"]
    assert forward_limits.main([*argv, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["linear_bytes"] == 2 * linear and record["linear_layers"] == 7 * model.config.num_hidden_layers + 1
    one, four = record["rows"]
    assert (one["nodes"], four["nodes"]) == (1, 4) and min(one["forward_ms"], one["linear_ms"]) > 0
    assert four["computing_ms"] == pytest.approx(4 * one["computing_ms"]) and four["reading_ms"] == one["reading_ms"]
    assert one["reading_ms"] == pytest.approx(1e3 * 2 * linear / record["bytes_read_per_second"])
    assert "limit by reading" in capsys.readouterr().out


def test_without_packed_layers_there_is_nothing_to_measure() -> None:
    target = Target(tiny_model("llama"))
    speed_up(target.model)  # fp32: blocks are replaced, nothing is packed
    with pytest.raises(FsdError, match="nothing is packed"):
        forward_limits.packed_layers(target)
