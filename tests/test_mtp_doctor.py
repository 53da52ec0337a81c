"""`fsd-train doctor --head mtp` describes MTP layers of a checkpoint, and names each fault that is planted in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsd_infer import Target
from fsd_train.cli import main as cli
from fsd_train.commands.mtp_checks import check_files
from fsd_train.commands.stitch import stitch_mtp
from fsd_train.models import MtpModule
from tests.families import altered
from tests.head_toys import make_target, write_answers
from tests.published_mtp import SPARSE, MiMoConfig, checkpoint, mtp_target
from tests.test_doctor import examine, wrong
from tests.train_toys import answers_of, options, trainer

PREFIX = "model.mtp_layers.0."
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/ is a MiMo with a trained MTP layer in its files, which reads the state first."""
    root = tmp_path_factory.mktemp("mtp-doctor")
    make_target(root / "bare")
    llama = json.loads((root / "bare" / "config.json").read_text())
    mimo = MiMoConfig.from_dict({**llama, "model_type": "mimo", "architectures": ["MiMoForCausalLM"]})
    mimo.save_pretrained(root / "bare")
    state = load_file(root / "bare" / "model.safetensors")
    for name in [name for name in state if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        state[name.replace("weight", "bias")] = torch.zeros(len(state[name]))
    save_file(state, root / "bare" / "model.safetensors", {"format": "pt"})
    target = Target.from_pretrained(str(root / "bare"), dtype=torch.float32)
    write_answers(root / "answers.jsonl", target, 64)
    module = MtpModule(str(root / "bare"), new=True, unroll_steps=2, **options(lr=1e-2, warmup_steps=5, loss="kl_pq"))
    data = answers_of(root, validation_fraction=0.0, batch_tokens=512)
    trainer(root / "run", 60, every=60, limit_val_batches=0, gradient_clip_val=1.0).fit(module, data)
    stitch_mtp(module.export(root / "layer"), root / "bare", root / "target")
    return root


def planted(world: Path, out: Path, change: Callable[[State], Any]) -> Path:
    """A copy of the world whose layer has a fault."""
    shutil.copy(world / "answers.jsonl", out)
    altered(world / "target", out / "target", None, change)
    return out


def test_a_good_layer_is_described(world: Path, tmp_path: Path) -> None:
    """In its target's files and beside them."""
    found = examine(world, Path("mtp"), tmp_path)
    assert wrong(found) == [], found
    assert found["layout"]["says"].startswith(
        "mimo: 1 layer, 16 tensors in model.safetensors; the projection reads the"
    )
    assert "state first, a norm follows" in found["layout"]["says"] and found["types"]["says"] == "16 of BF16"
    assert found["agreement"]["ok"] and "accepted by position: 0%" not in found["decoding"]["says"]
    beside = examine(world, world / "layer", tmp_path)
    assert wrong(beside) == [] and beside["layout"]["says"].startswith("speculators: 1 layer")
    assert beside["decoding"]["says"] == found["decoding"]["says"]


def exchange(state: State) -> None:
    name = PREFIX + "input_proj.weight"
    state[name] = torch.cat(state[name].chunk(2, 1)[::-1], 1)


def lessen(state: State) -> None:
    for name in [name for name in state if name.startswith(PREFIX) and "norm.weight" in name]:
        state[name] = state[name] - 1


def shorten(state: State) -> None:
    del state[PREFIX + "hidden_layernorm.weight"], state[PREFIX + "mlp.up_proj.weight"]
    state[PREFIX + "mlp.gate_proj.weight"] = state[PREFIX + "mlp.gate_proj.weight"][:-1]


def empty(state: State) -> None:
    state[PREFIX + "input_proj.weight"].zero_()
    state[PREFIX + "token_layernorm.weight"][3] = float("nan")


def untrain(state: State) -> None:
    torch.manual_seed(3)
    for name in [name for name in state if name.startswith(PREFIX) and state[name].dim() > 1]:
        state[name] = torch.randn_like(state[name].float()).to(state[name].dtype)


# line: what is planted, and what it says
FAULTS: dict[str, tuple[Callable[[State], Any], list[str]]] = {
    "projection": (exchange, ["with the embedding first in"]),
    "norms": (lessen, ["norm weights larger by 1"]),
    "tensors": (shorten, ["3 faults", "hidden_layernorm.weight", "up_proj.weight", "gate_proj.weight has the shape"]),
    "values": (empty, ["not finite: layer 0 enorm.weight", "zeros alone: layer 0 eh_proj.weight"]),
    "decoding": (untrain, ["accepted by position: "]),
    "layout": (lambda state: [state.pop(name) for name in list(state) if name.startswith(PREFIX)], ["says 1"]),
}  # fmt: skip


@pytest.mark.parametrize("line", FAULTS)
def test_a_planted_fault_is_named(line: str, world: Path, tmp_path: Path) -> None:
    change, words = FAULTS[line]
    found = examine(planted(world, tmp_path, change), Path("mtp"), tmp_path)
    assert wrong(found)[0] == line and {line, "decoding"}.issuperset(wrong(found)), found  # such a layer drafts badly
    assert all(word in found[line]["says"] for word in words), found[line]


@pytest.mark.parametrize(("options", "words"), [
    (["--trained-on", "other"], ["--trained-on: MTP layers belong"]),
    ([], ["is truncated or damaged", "cut off: ", "model.mtp_layers.0."]),
])  # fmt: skip
def test_truncated_files_and_foreign_options_are_named(
    options: list[str], words: list[str], world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = planted(world, tmp_path, dict)
    if not options:
        file = place / "target" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-5000])
    files = ["--target", str(place / "target"), "--data", str(place / "answers.jsonl"), "--head", "mtp"]
    assert cli(["doctor", *files, *options]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert all(word in said for word in words), said


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash", "nemotron_h", "mimo_v2_flash", *SPARSE])
def test_files_of_every_kind_are_examined(family: str) -> None:
    count = 3 if family == "deepseek_v3" else 1
    findings, layers = check_files(mtp_target(family, count), None)
    assert [finding.ok for finding in findings] == [True] * 4 and layers is not None, findings
    assert f"{count} layer" in findings[0].says and str(checkpoint(family, count)) not in findings[0].says
