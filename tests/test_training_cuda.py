"""Training on a CUDA device. `make test-gpu` runs these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer import EagleDrafter, FuzzyDecoder, Target
from fsd_train.cli import main
from tests.families import load_head, reference
from tests.test_training_waits import LOSSES, eagle, step_of
from tests.train_toys import fit_command, in_recipe, logged

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(("cached", "loss"), [(True, "eagle"), (False, "eagle"), (False, "fsd")])
def test_a_recipe_trains_exports_and_decodes(toys: Path, tmp_path: Path, cached: bool, loss: str) -> None:
    callbacks = [
        in_recipe("ModelCheckpoint", dirpath=tmp_path / "ckpt"),
        in_recipe("ExportHead", directory=tmp_path / "head"),
        in_recipe("DecodedTau", prompts=2, max_new_tokens=8),
    ]
    trainer = {
        "accelerator": "gpu", "precision": "bf16-mixed", "max_steps": 60, "callbacks": callbacks,
        "logger": in_recipe("CSVLogger", save_dir=tmp_path, name="logs"), "val_check_interval": 20,
        "log_every_n_steps": 2, "gradient_clip_val": 1.0,
    }  # fmt: skip
    model = {
        "target": toys / "target", "unroll_steps": 3, "chain_share": 0.6, "noise": 0.1, "lr": 1e-2, "warmup_steps": 4,
        "draft_vocab_size": 40, "context_ids": True, "head": {"final_norm": True, "feature_scale": True}, "loss": loss,
    }  # fmt: skip
    data = {"train_files": [toys / "answers.jsonl"], "validation_fraction": 0.2, "batch_tokens": 512}
    if cached:
        data["features"] = toys / "features"
    assert main(fit_command(tmp_path, trainer, model, data)) == 0
    losses = logged(tmp_path, "loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    target = Target.from_pretrained(str(toys / "target"), device=DEVICE)
    decoder = FuzzyDecoder(target, EagleDrafter(load_head(tmp_path / "head", target).to(DEVICE), target))
    prompt = json.loads((toys / "answers.jsonl").read_text().splitlines()[0])["prompt_ids"]
    made = decoder.generate([prompt], max_new_tokens=12, do_sample=False)
    assert made.sequences == reference(target.model, [prompt], max_new_tokens=12, pad_token_id=0)


@pytest.mark.parametrize(("loss", "args"), LOSSES, ids=str)
def test_three_steps_are_those_of_the_cpu(toys: Path, loss: Any, args: dict[str, Any]) -> None:
    steps = [
        step_of(eagle(toys, loss, args, noise=0.0, head={"fused_layers": [0]}), toys, device, [0])
        for device in (DEVICE, torch.device("cpu"))
    ]
    for _ in range(3):
        there, here = (step().cpu() for step in steps)
        torch.testing.assert_close(there, here, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("loss", "args"), LOSSES, ids=str)
def test_a_step_does_not_wait(
    toys: Path, loss: Any, args: dict[str, Any], half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever waits raises, by torch's own account; transformers' look at the positions is left out."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    step = step_of(eagle(toys, loss, args, head={"fused_layers": [0]}), toys, DEVICE, [0])
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        for _ in range(2):
            step()  # what happens once may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss_value = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert bool(loss_value.isfinite())
