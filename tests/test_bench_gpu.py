"""The GPU section's measurements, on a tiny model on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import gpu
from fsd_bench.profile import tensor_bytes
from fsd_infer.drafters import DraftRequest, EagleDrafter, TreeShape
from fsd_infer.heads.head import EagleConfig, EagleHead

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
ARGV = ["--set", *(f"{key}={value}" for key, value in SIZES.items()), "--dtype", "fp32", "--device", "cpu"]
ARGV += ["--draft-vocab", "64", "--tree", "4,2,8", "--copy-bytes", "4096", "--prompts", "1", "--prompt-tokens", "9"]


def test_the_target_counts() -> None:
    target = gpu.counting_target(LlamaConfig(**SIZES), torch.float32, torch.device("cpu"))
    made = target.model.generate(torch.tensor([[5, 80, 93]]), do_sample=False, max_new_tokens=6)[0, 3:]
    assert made.tolist() == [94, 95, 0, 1, 2, 3]


def test_record_of_a_simulated_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "gpu.json"
    argv = [*ARGV, "--chance", "0.6", "1", "--max-new-tokens", "26", "--repeat", "1", "--json", str(file)]
    assert gpu.main(argv) == 0
    record = json.loads(file.read_text())
    methods = record["methods"]
    assert list(methods) == ["hf-generate", "plain", "exact 0.6", "exact 1"]
    assert all(facts["identical_to_baseline"] == 1.0 and facts["answer_tokens"] == 26 for facts in methods.values())
    assert methods["exact 1"]["tau"] == 5.0, "all of four drafts"
    assert methods["exact 0.6"]["tau"] == pytest.approx(1 + 0.6 + 0.6**2 + 0.6**3 + 0.6**4, abs=0.6)
    assert methods["exact 1"]["drafter"]["nodes"] == 8

    target = gpu.counting_target(LlamaConfig(**SIZES), torch.float32, torch.device("cpu"))
    whole, width = tensor_bytes(target.model.parameters()), SIZES["hidden_size"] * 4
    bandwidth = record["bandwidth"]
    assert bandwidth["weight_bytes_per_token"] == whole - (SIZES["vocab_size"] - 1) * width
    rate = methods["plain"]["decode_tokens_per_second"]
    share = bandwidth["weight_bytes_per_token"] * rate / bandwidth["copy_bytes_per_second"]
    assert bandwidth["share"]["plain"] == pytest.approx(share, rel=1e-4)  # of rounded numbers
    for found in record["rounds"].values():
        assert 0 < found["model_milliseconds"] and 0 <= found["overhead_fraction"] < 1
    assert record["environment"]["command"].startswith("python -m benchmarks.gpu --set")
    assert "of the speed of a device copy" in capsys.readouterr().out


def test_siblings_differ_and_the_chance_is_that_of_a_draft() -> None:
    target = gpu.counting_target(LlamaConfig(**SIZES), torch.float32, torch.device("cpu"))
    head = EagleDrafter(EagleHead(EagleConfig.for_target(target)), target, TreeShape(4, 2, 8))
    drafter = gpu.SimulatedDrafter(head, 0.6)
    head.start = lambda *_: SimpleNamespace(draft=lambda roots: None)  # type: ignore[assignment, method-assign]
    session = drafter.start(torch.zeros(1000), DraftRequest(1000, 8))
    tree = session.draft(torch.full((1000,), 90))
    assert tree.depths[0].tolist() == [0, 1, 2, 3, 4, 2, 3, 4] and tree.parents[0].tolist() == [0, 0, 1, 2, 3, 1, 2, 3]
    right = tree.tokens == (90 + tree.depths) % 96
    assert not right[:, 5:].any() and right[:, 0].all()
    assert right[:, 1:5].float().mean(0).tolist() == pytest.approx([0.6] * 4, abs=0.05)
    assert (tree.tokens[:, 2] != tree.tokens[:, 5]).all()


def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([*ARGV, "--chance", "1.2", "--json", str(tmp_path / "gpu.json")]) == 2
    assert "--chance takes probabilities" in capsys.readouterr().err
    assert gpu.main([*ARGV, "--set", "layers", "--json", str(tmp_path / "gpu.json")]) == 2
    assert "--set takes KEY=NUMBER" in capsys.readouterr().err
