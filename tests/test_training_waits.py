"""Training on the simulated device and on CUDA: losses are the CPU's, and no step waits.

`make test-gpu` runs those on CUDA.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import EagleDrafter
from fsd_train.callbacks import DecodedTau, ExportHead
from fsd_train.losses import DraftBatch, LMHead, Schedule
from fsd_train.models import DistillationModule, EagleModule, LMModule, MtpModule
from tests import train_toys
from tests.families import load_head, reference
from tests.loss_toys import VARIANTS, build_loss, make_batch
from tests.simulated_device import SIM, SimulatedDevice
from tests.train_toys import TRAINER, answers_of, batch_of, eagle_module, ready, save_toy_target

LOSSES: list[tuple[Any, dict[str, Any]]] = [
    ("eagle", {"w_feature": 0.3}), ("kl_pq", {}), ("lk", {}), ("fsd", {"threshold": [0.2, 0.4], "w_feature": 0.1}),
    ([{"name": "js"}, {"name": "fsd", "weight": Schedule(0.1, 1.0)}], {}),
]  # fmt: skip


def eagle(toys: Path, loss: Any = "eagle", args: dict[str, Any] | None = None, **options: Any) -> EagleModule:
    head = {"final_norm": True, "feature_scale": True, **options.pop("head", {})}
    fixed: dict[str, Any] = {"draft_vocab_size": 40, "context_ids": True, "unroll_steps": 3, "chain_share": 0.6}
    chosen = {"head": head, "loss": loss, "loss_args": args or None, **fixed, "noise": 0.1, **options}
    return eagle_module(toys, **chosen)


def small(toys: Path, **options: Any) -> LMModule:
    return LMModule(str(toys / "target"), str(save_toy_target(toys / "small", seed=1)), **options)


def step_of(module: DistillationModule, toys: Path, device: torch.device, watch: list[int]) -> Any:
    """A step with its gradients and the optimizer's, to be run."""
    torch.manual_seed(0)
    target = ready(module).target
    target.capture_layers(watch)
    module.to(device)
    target.model.to(device)
    batch: Any = answers_of(toys).on_before_batch_transfer(batch_of(toys, 8), 0)
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    optimizer = torch.optim.AdamW(module.head.parameters(), lr=1e-3)

    def step() -> Tensor:
        drafts = module.draft(batch, module.unroll_steps)
        loss = module.loss(drafts).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def check_steps(module: Any, toys: Path, device: SimulatedDevice, watch: list[int] | None = None) -> None:
    here, there = (step_of(module(), toys, where, watch or []) for where in (torch.device("cpu"), SIM))
    losses = [[step().cpu() for step in (here, there)]]  # what happens once may wait
    device.waits.clear()
    second = there()
    assert not device.waits
    losses.append([here(), second.cpu()])
    for of_cpu, of_sim in losses:
        torch.testing.assert_close(of_sim, of_cpu)


# the module of toys/
MODULES: dict[str, Callable[[Path], DistillationModule]] = {
    "small model": small, "LoRA": lambda toys: small(toys, lora={"r": 4}),
    "MTP": lambda toys: MtpModule(str(toys / "target"), loss=build_loss("fsd")),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_steps_do_not_wait(name: str, toys: Path, device: SimulatedDevice) -> None:
    """Those of heads: below, with slots and in a run."""
    check_steps(lambda: MODULES[name](toys), toys, device)


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsd": {"head": {"fused_layers": [0, 1]}},
    "eagle": {"head": {"layout": "eagle", "final_norm": False, "feature_scale": False}},
    "eagle3": {
        "head": {"layout": "eagle3", "fused_layers": [0, 1], "final_norm": False, "feature_scale": False}, "noise": 0.0
    },
}  # fmt: skip
FAST = [("eagle3", n) for n in (2, 5, 9)] + [("fsd", 7), ("eagle", 7)]  # by row, by chain, by gate, of the likeliest
WITH_SLOTS = [
    pytest.param(loss, args, layout, marks=() if (layout, n) in FAST else pytest.mark.slow)
    for layout in LAYOUTS for n, (loss, args) in enumerate(VARIANTS)
]  # fmt: skip


@pytest.mark.parametrize(("loss", "args", "layout"), WITH_SLOTS, ids=str)
def test_steps_with_slots_do_not_wait(
    toys: Path, loss: str, args: dict[str, Any], layout: str, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of compiled steps, uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    if layout == "eagle3" and loss == "eagle":
        args = {"w_feature": 0.0}
    fixed = {**LAYOUTS[layout], "compile": True, "chain_share": 1.0, "context_ids": False}
    check_steps(lambda: eagle(toys, loss, args, **fixed), toys, device, LAYOUTS[layout]["head"].get("fused_layers"))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("loss", "args"), [*VARIANTS, ("adaspec", {"reference": "x"}), LOSSES[-1]], ids=str)
def test_no_loss_waits_forwards_or_backwards(
    loss: Any, args: dict[str, Any], own: bool, device: SimulatedDevice
) -> None:
    if own and loss == "eagle":
        args = {"w_feature": 0.0}
    found = []
    for where in (torch.device("cpu"), SIM):
        batch = on_device(make_batch(own=own).batch(), where)
        if loss == "adaspec":
            batch = replace(batch, reference=batch.estimates.detach().roll(1, 0))
        leaves = [batch.estimates] if batch.own_lm_head is None else [batch.estimates, batch.own_lm_head.weight]
        device.waits.clear()
        value = build_loss(loss, args)(batch).loss
        gradients = torch.autograd.grad(value, leaves)
        assert not device.waits
        found.append([each.detach().cpu() for each in (value, *gradients)])
    torch.testing.assert_close(found[1], found[0])


def on_device(batch: DraftBatch, where: torch.device) -> DraftBatch:
    """A batch whose estimates, and LM head if it has one of its own, are leaves on another device."""

    def head(of: LMHead | None, trained: bool) -> LMHead | None:
        return None if of is None else replace(of, weight=of.weight.detach().to(where).requires_grad_(trained))

    kept = head(batch.target_lm_head, False)
    return replace(
        batch, estimates=batch.estimates.detach().to(where).requires_grad_(), features=batch.features.to(where),
        rows=batch.rows.to(where), target_lm_head=kept, own_lm_head=head(batch.own_lm_head, True),
    )  # fmt: skip


class Accelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        pass


class Waits(Callback):
    """Notes the lines of ours that waited in each step, and in each validation batch."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.seen = device, list[set[str]]()

    def on_train_batch_start(self, *args: Any) -> None:
        self.device.waits.clear()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append({wait.function for wait in self.device.waits})

    on_validation_batch_start, on_validation_batch_end = on_train_batch_start, on_train_batch_end


def moved(target: Target, device: torch.device) -> None:
    """fsd_train.models.slim.move: ``tensor.data = ...`` across devices is what the simulated device cannot take."""
    for module in target.model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or tensor.is_meta or tensor.device == device:
                continue
            there = tensor.detach().to(device)
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(there, requires_grad=False)
            else:
                module._buffers[name] = there


@pytest.mark.parametrize("cached", [True, False])
def test_a_run(toys: Path, tmp_path: Path, cached: bool, device: SimulatedDevice, monkeypatch: Any) -> None:
    monkeypatch.setattr("fsd_train.models.distillation.move", moved)
    watch = Waits(device)
    options = {**TRAINER, "default_root_dir": tmp_path, "val_check_interval": 2, "limit_val_batches": 1}
    callbacks = [watch, ExportHead(str(tmp_path / "head")), DecodedTau(prompts=2, max_new_tokens=4)]
    options.update(accelerator="auto", devices="auto", strategy=SingleDeviceStrategy(SIM, Accelerator()))
    trainer = Trainer(max_steps=2, gradient_clip_val=1.0, callbacks=callbacks, **options)
    module = eagle(toys)
    trainer.fit(module, answers_of(toys, features=str(toys / "features") if cached else None))
    assert trainer.global_step == 2
    # the verdict on the step before, and in validation nothing
    assert watch.seen[-2:] == [{"on_before_optimizer_step"}, set()]
    assert float(trainer.callback_metrics["val_tau"]) >= 1
    head = load_head(tmp_path / "head")
    torch.testing.assert_close(head.fc.weight, module.head.fc.weight.detach().cpu(), atol=1e-3, rtol=1e-2)  # bf16


# on CUDA

DEVICE = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("cached", "loss"), [(True, "eagle"), (False, "eagle"), (False, "fsd")])
def test_a_run_on_cuda(toys: Path, tmp_path: Path, cached: bool, loss: str) -> None:
    callbacks = [ExportHead(str(tmp_path / "head")), DecodedTau(prompts=2, max_new_tokens=8)]
    made = train_toys.trainer(
        tmp_path, 60, *callbacks, every=60, accelerator="gpu", precision="bf16-mixed", val_check_interval=20,
        gradient_clip_val=1.0,
    )  # fmt: skip
    features = str(toys / "features") if cached else None
    made.fit(eagle(toys, loss, lr=1e-2, warmup_steps=4), answers_of(toys, batch_tokens=512, features=features))
    losses = train_toys.logged(tmp_path, "loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    target = Target.from_pretrained(str(toys / "target"), device=DEVICE)
    decoder = FuzzyDecoder(target, EagleDrafter(load_head(tmp_path / "head", target).to(DEVICE), target))
    prompt = json.loads((toys / "answers.jsonl").read_text().splitlines()[0])["prompt_ids"]
    made = decoder.generate([prompt], max_new_tokens=12, do_sample=False)
    assert made.sequences == reference(target.model, [prompt], max_new_tokens=12, pad_token_id=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("loss", "args"), LOSSES, ids=str)
def test_three_steps_are_those_of_the_cpu(toys: Path, loss: Any, args: dict[str, Any]) -> None:
    steps = [
        step_of(eagle(toys, loss, args, noise=0.0, head={"fused_layers": [0]}), toys, device, [0])
        for device in (DEVICE, torch.device("cpu"))
    ]
    for _ in range(3):
        there, here = (step().cpu() for step in steps)
        torch.testing.assert_close(there, here, atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("loss", "args"), LOSSES, ids=str)
def test_no_wait(toys: Path, loss: Any, args: dict[str, Any], half: bool) -> None:
    """Whatever waits raises, by torch's own account."""
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
