"""`fsd-train estimate` and `fsd-bench estimate`: what is predicted is what is there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fsd_bench.cli import main as infer
from fsd_bench.estimate import Planned, by_device, head_on_paper, planned_head
from fsd_bench.planned import count_weights, planned_target
from fsd_bench.probe import Probe
from fsd_bench.roofline import FORWARD_GRAPHS, HARDWARE, Hardware, MemoryItem, Overhead, Work, device_rows, devices_for
from fsd_core.errors import ModelLoadError
from fsd_infer.drafters import EagleDrafter, TreeShape
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.targets.builtin import shipped_drafter
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import BONUS_SHAPES, DEFAULT_SHAPES
from fsd_train.cli import main as cli
from fsd_train.commands.estimate import EFFICIENCY, head_recipe, on_paper
from fsd_train.commands.sizing import BatchSize, facts_of, step_memory
from fsd_train.data import features
from fsd_train.models.unroll import unroll
from fsd_train.packed import TextMask
from tests.families import tiny_model
from tests.train_toys import toy_model


def recipe(root: Path, out: Path, **data: Any) -> Path:
    sections = {
        "trainer": {"accelerator": "cpu", "max_steps": 1000, "accumulate_grad_batches": 2},
        "model": {"target": str(root / "target"), "head": {"fused_layers": [0]}, "unroll_steps": 2},
        "data": {"train_files": [str(root / "answers.jsonl")], "validation_fraction": 0.0, "batch_tokens": 64, **data},
    }
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def test_a_recipe_is_estimated(toys: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli(["estimate", "--config", str(recipe(toys, tmp_path, features="not-yet"))]) == 0
    found = capsys.readouterr().out
    tokens = int(re.search(r"48, (\d+) tokens", found)[1])  # type: ignore[index]
    disk = float(re.search(r"disk for features +([\d.]+) MB", found)[1])  # type: ignore[index]
    assert disk == pytest.approx(tokens * 2 * 2 * 32 / 1e6, abs=0.006)
    assert "1000 steps" in found and f"about {2000 * 64 / tokens:.1f} epochs" in found
    assert "time to cache features" in found and "memory per device" in found
    path = recipe(toys, tmp_path, features=str(toys / "features"))
    path.write_text(path.read_text().replace("fused_layers:\n    - 0", "num_layers: 1"))
    assert cli(["estimate", "--config", str(path)]) == 0
    assert "disk" not in capsys.readouterr().out  # they are there
    monkeypatch.setattr(features, "_DISK_RESERVE", 2**60)
    small_lm = {"class_path": "fsd_train.models.LMModule", "init_args": {"target": "x", "drafter": "y"}}
    config = yaml.safe_load(path.read_text())
    config["data"]["features"] = "not-yet"
    for words, model in {"are to stay free": config["model"], "trains a small LM": small_lm}.items():
        path.write_text(yaml.safe_dump({**config, "model": model}))
        assert cli(["estimate", "--config", str(path)]) == 2
        assert words in capsys.readouterr().err


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Tensors that share their memory are counted once."""
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


HEADS: list[dict[str, Any]] = [
    {"layout": "eagle3", "fused_layers": [0, 1], "draft_vocab_size": 40},
    {"final_norm": True, "fused_layers": [0], "draft_vocab_size": 40},
    {"num_layers": 2},
]


@pytest.mark.parametrize(("family", "options"), zip(("llama", "qwen3", "qwen3_moe"), HEADS, strict=True))
def test_bytes_and_operations_on_paper(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """From a directory that has a config.json and nothing else."""
    target, shape = Target(toy_model(family).bfloat16()), TreeShape(3, 4, 9)
    if family == "qwen3_moe":
        target.model.set_experts_implementation("eager")  # joined products are not counted
    target.model.config.save_pretrained(tmp_path)
    drafter = EagleDrafter(EagleHead(EagleConfig.for_target(target, **options)), target, shape)
    paper = planned_target(str(tmp_path))
    planned = Planned(paper, head_on_paper(paper, planned_head(paper, **options)), batch=2, context=20, new=10)
    sizes = {part.name: part.bytes for part in planned.memory(shape)}
    assert sizes["target's weights"] == tensor_bytes(target.model.parameters())
    head = tensor_bytes(weight for module in drafter.modules() for weight in module.parameters())
    assert sizes["head's weights"] == head
    slots = 20 + 10 + shape.nodes
    assert sizes["target's cache"] == target.cache_bytes(2, slots)
    assert sizes["head's cache"] == pytest.approx(drafter.cache_bytes(2, slots))
    for nodes in (1, 9):
        probe = Probe(target, 20, nodes, rows=2)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
            probe(nodes)
        assert planned.forward(nodes).operations == pytest.approx(counted.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("family, chains", [("llama", 60), ("qwen3", 60), ("qwen3", 15)])
def test_activations_on_paper_are_those_that_backward_keeps(family: str, chains: int, tmp_path: Path) -> None:
    sizes = dict(hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    tiny_model(family, **sizes).config.save_pretrained(tmp_path)
    facts, rows, length, steps = facts_of(str(tmp_path)), 2, 60, 3
    head = EagleHead(EagleConfig.for_target(facts.target, layout="eagle3", draft_vocab_size=40)).float()
    weights = {shape for weight in head.parameters() for shape in (weight.shape, weight.shape[::-1])}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape not in weights:  # and their copies in bf16, which count as the head's
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    embeds = torch.randn(1, rows * length, head.config.embed_size)
    features = torch.randn(1, rows * length, head.config.feature_width)
    ends = length * torch.arange(1, rows + 1)
    roots = (ends[:, None] - torch.arange(chains, 0, -1)).flatten()
    text = TextMask((length,) * rows, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        unroll(head, embeds, features, text, steps, roots)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    parts = step_memory(facts, head, BatchSize(rows * length, length, steps, rows * chains), "cpu")
    planned = {part.name: part.bytes for part in parts}
    assert measured == pytest.approx(planned["activations"] + planned["masks"], rel=0.2)
    on_cuda = step_memory(facts, head, BatchSize(rows * length, length, steps, rows * chains), "cuda")
    assert "masks" not in {part.name for part in on_cuda}  # FlexAttention masks blocks of 128 x 128


def test_the_roofline() -> None:
    hardware = Hardware("toy", memory=100.0, bandwidth=10.0, peak=50.0, source="")
    assert Work("reads", 40.0, 100.0, "", times=3).seconds(hardware) == 12.0
    assert Work("computes", 40.0, 400.0, "", shared=True).seconds(hardware, devices=2) == 4.0
    shared, whole = MemoryItem("shared", 300.0, "", shared=True), MemoryItem("whole", 10.0, "")
    assert devices_for([shared, whole], hardware) == 4  # of 90 bytes each
    assert devices_for([MemoryItem("whole", 91.0, "")], hardware) is None
    found = device_rows([MemoryItem("all", 1e15, "")], lambda *_: [], ["device", "count", "ms"])
    assert found[0][1:] == ["over 8", "-"]


@pytest.fixture(scope="module")
def llama() -> Planned:
    """Llama-3.1-8B with an EAGLE-3 head."""
    target = planned_target("llama-3.1-8b")
    head = planned_head(target, layout="eagle3", draft_vocab_size=32000)
    return Planned(target, head_on_paper(target, head), graphs=True)


def test_a_known_shape(llama: Planned, repo_root: Path) -> None:
    """Weights are counted as published, the page has the model's rounds, the recipe what training takes."""
    assert count_weights(llama.target.model) == 8030261248 and llama.target.cache_bytes_per_token == 131072
    shown = (repo_root / "docs" / "performance.md").read_text(encoding="utf-8")
    rows = [f"| {' | '.join(row)} |" for row in by_device(llama, DEFAULT_SHAPES["cuda"], BONUS_SHAPES["cuda"])]
    section = shown.partition("| **Llama-3.1-8B**")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(section) == 3 and set(section) <= set(rows)
    assert f"{sum(part.bytes for part in llama.memory(DEFAULT_SHAPES['cuda'])) / 1e9:.1f} GB with graphs" in shown
    path = repo_root / "recipes" / "llama-3.1-8b.yaml"
    header = re.findall(r"^#   (target|head|activations|logits) .*= +([\d.]+) GB$", path.read_text(), re.M)
    said = on_paper(head_recipe(path), "llama-3.1-8b")
    found = re.findall(r"^memory: (\w+) +([\d.]+) GB", said, re.M)
    assert [(part, f"{float(size):.1f}") for part, size in found] == header and len(header) == 4
    (row,) = re.findall(r"^H200 .*$", said, re.M)
    least, likely = map(float, re.findall(r"\d+\.\d+", row)[:2])
    assert likely == pytest.approx(least / EFFICIENCY, rel=0.03)  # printed with two decimals


# a whole round as one graph, in a prototype outside of the package: a draft step of 0.74 ms
ROUND_GRAPH = Overhead(0.89, 0.055e-3, 0.40e-3, 0.2e-3, "an H200, a prototype with one CUDA graph per round")
MEASURED: list[tuple[Overhead, float, dict[Any, float]]] = [
    (FORWARD_GRAPHS, 9.06, {(3, 1, 4): 17.5, (5, 1, 6): 22.2, (6, 4, 24): 24.3, (6, 10, 60): 23.1}),
    (ROUND_GRAPH, 5.28, {(3, 1, 4): 6.79, (5, 1, 6): 8.28, (6, 4, 24): 8.99, (6, 10, 60): 9.42}),
]


@pytest.mark.parametrize(("overhead", "plain", "rounds"), MEASURED)
def test_measured_rounds_are_predicted(
    overhead: Overhead, plain: float, rounds: dict[Any, float], llama: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Milliseconds on an H200, over about 600 tokens of context."""
    monkeypatch.setattr("fsd_bench.estimate.MEASURED", overhead)
    planned = Planned(llama.target, llama.drafter, context=600)
    h200 = next(each for each in HARDWARE if each.name == "H200")
    assert 1e3 * planned.expected(planned.plain(), h200) == pytest.approx(plain, rel=0.03)
    for shape, measured in rounds.items():
        assert 1e3 * planned.expected(planned.round(TreeShape(*shape)), h200) == pytest.approx(measured, rel=0.08)


def test_decoding_on_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy_model().config.save_pretrained(tmp_path)
    small = ["estimate", "--target", str(tmp_path), "--draft-vocab", "40", "--tree", "3,4,9"]
    assert infer([*small, "--cuda-graphs", "--batch-size", "2"]) == 0
    said = capsys.readouterr().out
    assert "graph's pool" in said and re.search(r"^RTX 4090 +1 ", said, re.M) and "H200 data sheet" in said
    for wrong, message in (
        (["--set", "layers"], "--set takes KEY=NUMBER"),
        (["--set", "num_hidden_layers=0"], "--set takes KEY=NUMBER with a whole number"),
        (["--set", "hidden_size=63"], "no head can be planned for"),
        (["--draft-vocab", "99999999"], "--draft-vocab: "),
        (["--drafter", "none-such"], "--drafter is neither a head nor a small LM: unknown"),
        (["--tree", "auto"], "--tree auto has no shape to estimate"),
    ):
        assert infer([*small, *wrong]) == 2
        assert message in capsys.readouterr().err
    foreign = shipped_drafter("smollm2-135m")
    assert infer(["estimate", "--target", str(tmp_path), "--drafter", str(foreign)]) == 2
    assert "reads features of width 576" in capsys.readouterr().err
    with pytest.raises(ModelLoadError, match="num_hidden_layer is not a size"):
        planned_target(str(tmp_path), {"num_hidden_layer": 3})
    assert planned_target(str(tmp_path), {"num_hidden_layers": 3}).config.num_hidden_layers == 3
