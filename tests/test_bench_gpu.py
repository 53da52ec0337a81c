"""What is measured on a GPU, on tiny models on the CPU, and that the first hour's commands are commands."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import compare, first_gpu, gpu
from fsd_bench.probe import Probe
from fsd_bench.profile import tensor_bytes
from fsd_infer import Target
from fsd_infer.cli.main import build_parser
from fsd_train.commands.fit import read_head_recipe
from tests.families import VOCAB, tiny_model

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
ARGV = ["--set", *(f"{key}={value}" for key, value in SIZES.items()), "--dtype", "fp32", "--device", "cpu"]
ARGV += ["--draft-vocab", "64", "--tree", "4,2,8", "--copy-bytes", "4096", "--prompts", "1", "--prompt-tokens", "9"]


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


def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([*ARGV, "--chance", "1.2", "--json", str(tmp_path / "gpu.json")]) == 2
    assert "--chance takes probabilities" in capsys.readouterr().err
    assert gpu.main([*ARGV, "--set", "layers", "--json", str(tmp_path / "gpu.json")]) == 2
    assert "--set takes KEY=NUMBER" in capsys.readouterr().err


def test_the_commands_for_a_gpu_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals run others with toys: here their options are read as the programs read them."""
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    sizes = first_gpu.full(argparse.Namespace(tinyllama="models/tinyllama"), tmp_path)
    parsers = {"fsd_infer.cli.main": build_parser()}
    parsers |= {f"benchmarks.{each.__name__.rpartition('.')[2]}": each.build_parser() for each in (gpu, compare)}
    steps = [step for step in first_gpu.steps_of(sizes, tmp_path) if step.words[1] in parsers]
    read = {step.name: parsers[step.words[1]].parse_args(step.words[2:]) for step in steps}
    assert len(read) == 6 and read["graphs-on"].cuda_graphs and not read["graphs-off"].cuda_graphs
    assert Path(read["tinyllama"].drafter) == tmp_path / "tinyllama" / "head"
    recipe = read_head_recipe(tmp_path / "recipe.yaml")
    assert recipe["model"]["target"] == read["tinyllama"].target == "models/tinyllama"
    assert recipe["trainer"]["default_root_dir"] == str(tmp_path / "tinyllama")
    assert f"directory: {tmp_path}/tinyllama/head" in (tmp_path / "recipe.yaml").read_text()
    assert recipe["data"]["train_files"] == ["data/tinyllama-1.1b-answers.jsonl.gz"]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_probe_repeats_the_targets_forward(family: str) -> None:
    model = tiny_model(family)
    probe = Probe(Target(model), 20, 6)
    text = torch.arange(26)[None] % VOCAB
    with torch.no_grad():
        expected = model(text).logits[:, 20:]
        features = model.get_decoder()(text[:, :20])[0]
    torch.testing.assert_close(probe.features, features, atol=1e-4, rtol=1e-4)
    for nodes in (6, 1, 4, 6):
        assert torch.equal(probe.tokens(nodes), text[:, 20 : 20 + nodes])
        found = probe(nodes)
        torch.testing.assert_close(found, expected[:, :nodes], atol=1e-4, rtol=1e-4)
        assert torch.equal(probe(nodes, probe.visible(nodes)), found)
