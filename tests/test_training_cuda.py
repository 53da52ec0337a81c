"""Training on a CUDA device. `make test-gpu` runs these."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import EagleDrafter
from fsd_infer.heads.checkpoint import load_head
from fsd_train.cli import main
from fsd_train.data import AnswersDataModule, collate
from fsd_train.eagle_module import EagleModule
from fsd_train.optim import build_optimizer
from tests.test_training_waits import LOSSES
from tests.train_toys import make_toys

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toys(tmp_path_factory.mktemp("toys"))


def recipe(toys: Path, out: Path, cached: bool, **model: Any) -> dict[str, Any]:
    callbacks = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": str(out / "ckpt")}},
        {"class_path": "fsd_train.callbacks.ExportHead", "init_args": {"directory": str(out / "head")}},
        {"class_path": "fsd_train.callbacks.DecodedTau", "init_args": {"prompts": 2, "max_new_tokens": 8}},
    ]
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(out), "name": "logs"}}
    return {
        "trainer": {
            "accelerator": "gpu", "devices": 1, "precision": "bf16-mixed", "max_steps": 60, "max_epochs": -1,
            "default_root_dir": str(out), "logger": logger, "callbacks": callbacks, "val_check_interval": 20,
            "check_val_every_n_epoch": None, "log_every_n_steps": 2, "gradient_clip_val": 1.0,
        },
        "model": {
            "target": str(toys / "target"), "unroll_steps": 3, "chain_share": 0.6, "noise": 0.1, "lr": 1e-2,
            "warmup_steps": 4, "draft_vocab_size": 40, "context_ids": True,
            "head": {"final_norm": True, "feature_scale": True}, **model,
        },
        "data": {
            "train_files": [str(toys / "answers.jsonl")], "validation_fraction": 0.2, "batch_tokens": 512,
            "features": str(toys / "features") if cached else None,
        },
    }  # fmt: skip


@pytest.mark.parametrize(("cached", "loss"), [(True, "eagle"), (False, "eagle"), (False, "fsd")])
def test_a_recipe_trains_exports_and_decodes(toys: Path, tmp_path: Path, cached: bool, loss: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(toys, tmp_path, cached, loss=loss)))
    assert main(["fit", "--config", str(path)]) == 0
    (metrics,) = tmp_path.rglob("metrics.csv")
    with open(metrics) as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row.get("loss")]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    target = Target.from_pretrained(str(toys / "target"), device=DEVICE)
    decoder = FuzzyDecoder(target, EagleDrafter(load_head(tmp_path / "head", target).to(DEVICE), target))
    prompt = json.loads((toys / "answers.jsonl").read_text().splitlines()[0])["prompt_ids"]
    made = decoder.generate([prompt], max_new_tokens=12, do_sample=False)
    ids = torch.tensor([prompt], device=DEVICE)
    plain = target.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert made.sequences[0] == plain[0, len(prompt) :].tolist()


class Step:
    """A head's training step outside Trainer."""

    def __init__(self, toys: Path, device: torch.device, loss: Any, args: dict[str, Any], noise: float) -> None:
        self.module = EagleModule(
            str(toys / "target"), {"final_norm": True, "feature_scale": True, "fused_layers": [0]},
            draft_vocab_size=40, context_ids=True, unroll_steps=3, chain_share=0.6, loss=loss, loss_args=args or None,
            noise=noise,
        )  # fmt: skip
        target = self.module._frozen.target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
        target.watch([0])
        self.module.configure_model()
        self.module.to(device)
        target.model.to(device)
        self.data = AnswersDataModule([str(toys / "answers.jsonl")])
        self.data.setup()
        parameters = list(self.module.head.parameters())
        self.optimizer = build_optimizer("adamw", parameters, 1e-3, 0.0, (0.9, 0.95))

    def __call__(self) -> Tensor:
        assert self.data.train_set is not None
        device = self.module.device
        batch: Any = self.data.on_before_batch_transfer(collate([self.data.train_set[i] for i in range(8)]), 0)
        batch = {
            name: value.pin_memory().to(device, non_blocking=True)
            if isinstance(value, Tensor) and device.type == "cuda"
            else value
            for name, value in batch.items()
        }
        drafts = self.module.training_drafts(batch, 3)
        assert drafts is not None
        loss: Tensor = self.module.loss(drafts).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.head.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize(("loss", "args"), LOSSES, ids=str)
def test_three_steps_are_those_of_the_cpu(toys: Path, loss: Any, args: dict[str, Any]) -> None:
    there, here = (Step(toys, device, loss, args, 0.0) for device in (DEVICE, torch.device("cpu")))
    for _ in range(3):
        torch.testing.assert_close(there().cpu(), here(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("loss", "args"), LOSSES, ids=str)
def test_a_step_does_not_wait(
    toys: Path, loss: Any, args: dict[str, Any], half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever waits raises, by torch's own account; transformers' look at the positions is left out."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    step = Step(toys, DEVICE, loss, args, 0.1)
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        for _ in range(2):
            step()  # what happens once may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss_value = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert bool(loss_value.isfinite())
