"""A training step never waits for its device, shown without one: tensors without storage refuse to be read.

Batch, head, target and losses live on the meta device, where `.item()`, `nonzero()` and copies to the host raise; only
what the host planned beforehand, from its own view of ids and mask, can steer the step. Two waits are left out of this:
transformers looks for packed sequences in position ids before the first layer of each model, and StopOnNonFinite reads
the last step's verdict before the next begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer.target import Target
from fsd_train.data import AnswersDataModule, collate
from fsd_train.distillation_module import DistillationModule
from fsd_train.eagle_module import EagleModule
from fsd_train.lm_module import LMModule
from fsd_train.optim import build_optimizer
from tests.train_toys import make_toys, save_toy_target

LOSSES: list[tuple[Any, dict[str, Any]]] = [
    ("eagle", {"w_feature": 0.3}),
    ("reverse_kl", {}),
    ("lk", {}),
    ("fsd", {"threshold": [0.2, 0.4], "price": 0.1, "w_feature": 0.1}),
    ([{"name": "js"}, {"name": "fsd", "weight": {"from": 0.1, "to": 1.0}}], {}),
]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toys(tmp_path_factory.mktemp("toys"), rows=12)


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)


def step_on_meta(module: DistillationModule, data: AnswersDataModule) -> None:
    """One step with its gradients and the optimizer's, everything but the batch's view on the host on meta."""
    data.setup()
    target = module._frozen.target = Target.from_pretrained(module.options.target)
    target.watch((module.hparams.get("head") or {}).get("fused_layers", []))
    module.configure_model()
    assert data.train_set is not None
    batch: Any = data.on_before_batch_transfer(collate([data.train_set[i] for i in range(8)]), 0)
    if module.head.draft_ids is not None and hasattr(module, "_own_ids"):
        module._own_ids = module.head.draft_ids.cpu()  # read once in a run
    module._generator = lambda device: None  # type: ignore[assignment]  # there is none for meta
    module.to("meta")
    target.model.to("meta")
    batch = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    batch["features"] = target.features(batch["input_ids"])
    drafts = module.training_drafts(batch, module.options.unroll_steps)
    assert drafts is not None and drafts.weights.is_meta and not drafts.rows.counted.is_meta
    out = module.loss(drafts)
    out.loss.backward()
    assert all(p.grad is not None for p in module.head.parameters())
    optimizer = build_optimizer("adamw", list(module.head.parameters()), 1e-3, 0.1, (0.9, 0.95))
    torch.nn.utils.clip_grad_norm_(module.head.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize(("loss", "args"), LOSSES, ids=str)
def test_a_step_of_a_head_reads_nothing_from_its_device(toys: Path, loss: Any, args: dict[str, Any]) -> None:
    module = EagleModule(
        str(toys / "target"), {"final_norm": True, "feature_scale": True, "fused_layers": [0]}, draft_vocab_size=40,
        context_ids=True, unroll_steps=3, chain_share=0.6, loss=loss, loss_args=args or None, noise=0.1,
    )  # fmt: skip
    step_on_meta(module, AnswersDataModule([str(toys / "answers.jsonl")]))


def test_a_step_of_a_small_model_reads_nothing_from_its_device(toys: Path, tmp_path: Path) -> None:
    drafter = save_toy_target(tmp_path / "small", seed=1)
    step_on_meta(LMModule(str(toys / "target"), str(drafter)), AnswersDataModule([str(toys / "answers.jsonl")]))
