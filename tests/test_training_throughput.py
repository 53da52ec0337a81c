"""The rate of training through the whole data path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import training_throughput
from fsd_infer import Target
from tests.train_toys import save_toy_target, write_answers


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/ and answers.jsonl."""
    root = tmp_path_factory.mktemp("toys")
    target = Target.from_pretrained(str(save_toy_target(root / "target")), dtype=torch.float32)
    write_answers(root / "answers.jsonl", target, rows=16)
    return root


def test_throughput_through_the_data_path(toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {
        "trainer": {"precision": "32-true", "gradient_clip_val": 1.0},
        "model": {
            "target": str(toys / "target"),
            "head": {"final_norm": True, "fused_layers": [0]},
            "draft_vocab_size": 40,
            "unroll_steps": 3,
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = [
        "--json", str(tmp_path / "record.json"), "--recipe", str(tmp_path / "recipe.yaml"), "--data",
        str(toys / "answers.jsonl"), "--unroll", "1,2", "--rows", "8", "--steps", "2", "--warmup", "1", "--repeats",
        "1", "--batch-tokens", "96", "--set", "noise=0.1",
    ]  # fmt: skip
    assert training_throughput.main(words) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert [found["unroll_steps"] for found in record["unrolled"]] == [1, 2]
    assert record["model"]["noise"] == 0.1
    for found in record["unrolled"]:
        (run,) = found["runs"]
        assert len(run["seconds"]) == 2 and min(run["tokens"]) > 0
        assert found["tokens_per_second"] == pytest.approx(sum(run["tokens"]) / sum(run["seconds"]))
    # one order of batches for all
    assert record["unrolled"][0]["runs"][0]["tokens"] == record["unrolled"][1]["runs"][0]["tokens"]
    assert "supervised tok/s" in capsys.readouterr().out
    assert training_throughput.main([*words, "--set", "noise"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
