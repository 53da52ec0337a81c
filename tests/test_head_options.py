"""Every option of a head, alone and with the others: trained, exported, loaded, and decoded with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import EagleDrafter
from fsd_train.callbacks import ExportHead
from fsd_train.commands.export import load_module
from tests.families import load_head, options_of, reference
from tests.test_training import make

PROMPTS = [[5, 9, 11], [7, 3, 20, 33, 8]]
EAGLE3: dict[str, Any] = {"noise": 0.0, "loss_args": {"w_feature": 0.0}, "unroll_steps": 3}
CASES: dict[str, dict[str, Any]] = {
    "initial layers": {"initial_layers": [1]},
    "draft vocabulary with context ids": {"draft_vocab_size": 30, "context_ids": True},
    "layout eagle": {"head": {"layout": "eagle", "fc_bias": True}, "draft_vocab_size": 30},
    "layout eagle3": {"head": {"layout": "eagle3"}, "draft_vocab_size": 30, **EAGLE3},
    "layout eagle3, whole vocabulary": {"head": {"layout": "eagle3"}, **EAGLE3},
    "layout eagle3 with the target's LM head": {
        "head": {"layout": "eagle3", "own_lm_head": False, "intermediate_size": 16},
        "draft_vocab_size": 30,
        "context_ids": True,
        "noise": 0.0,
    },
    "layout eagle3 with all norms": {
        "head": {"layout": "eagle3", "fc_norm": True, "norm_output": True, "num_layers": 2, "fused_layers": [0]},
        "draft_vocab_size": 30,
        **EAGLE3,
        "unroll_steps": 7,
        "loss": "lk",
        "loss_args": {},
    },
    "all with initial layers": {
        "head": {"num_layers": 2, "fused_layers": [0, 1], "final_norm": True, "feature_scale": True},
        "initial_layers": [0, 1],
        "draft_vocab_size": 30,
        "context_ids": True,
        "unroll_steps": 7,
    },
    "all with a narrow MLP": {  # into which the target's layers do not fit
        "head": {"num_layers": 2, "fused_layers": [0, 1], "intermediate_size": 16},
        "draft_vocab_size": 30,
        "context_ids": True,
        "unroll_steps": 7,
    },
}


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
def test_option_trains_exports_and_decodes(toys: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"head": {}, "draft_vocab_size": None, "unroll_steps": 1}
    module, data = make(toys, cached=False, **{**plain, **options})
    trainer = Trainer(
        max_steps=3, max_epochs=-1, accelerator="cpu", devices=1, callbacks=[ExportHead(str(tmp_path / "head"))],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, data)
    assert trainer.global_step == 3
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert options_of(load_module(tmp_path / "last.ckpt").head) == options_of(module.head)
    target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    head = load_head(tmp_path / "head", target)
    assert options_of(head) == options_of(module.head)
    for name, value in options.get("head", {}).items():
        held = head.config.layer if name == "intermediate_size" else options_of(head)
        assert held[name] == value
    for name, value in module.head.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value, atol=1e-2, rtol=2**-7)
    expected = reference(target.model, PROMPTS, max_new_tokens=16)
    found = FuzzyDecoder(target, EagleDrafter(head, target)).generate(PROMPTS, max_new_tokens=16, do_sample=False)
    assert found.sequences == expected
