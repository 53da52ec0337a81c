"""Rows padded to few numbers, and compiled layers and losses: the same values, parts and gradients, and few shapes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch._dynamo.utils import counters

import fsd_train.commands.fit as fit
from fsd_core.errors import DataError
from fsd_train.data import collate
from fsd_train.losses import Schedule
from fsd_train.models import DistillationModule, MtpModule
from fsd_train.models.compiled import padded_count
from tests.covering import fast_only
from tests.loss_toys import VARIANTS, build_loss
from tests.published_mtp import checkpoint
from tests.test_packed import HEADS
from tests.train_toys import VOCAB, answers_of, eagle_module, fit_command, ready, small_lm, trainer

ROW = 190
Step = tuple[dict[str, torch.Tensor], list[tuple[int, ...]]]


def packs(toys: Path, *groups: Sequence[int]) -> list[dict[str, Any]]:
    data = answers_of(toys)
    data.setup()
    rows = data.train_set
    return [dict(collate([rows[place] for place in places], ROW)) for places in groups]


def step_of(module: DistillationModule, batch: dict[str, Any], compiled: bool) -> Step:
    """(loss, parts, agreement and gradients of a batch by name, sizes of its rows)."""
    module.compile_option = compiled
    drafts = module.draft(batch, module.unroll_steps)
    out = module.loss(drafts)
    module.zero_grad()
    out.loss.backward()
    rows = drafts.rows
    assert drafts.compiled == compiled and out.agreement is not None
    found = {f"gradient {name}": each.grad for name, each in module.named_parameters() if each.grad is not None}
    agree = rows.sum_by_step((out.agreement & rows.counted).float())
    found |= {"loss": out.loss.detach(), "agreement": agree, **out.parts}
    return found, [tuple(each.shape) for each in (drafts.estimates, drafts.features, rows.chains)]


def same_when_padded(module: Any, toys: Path) -> None:
    """Two batches, one of a single conversation."""
    shapes = set()
    for batch in packs(toys, range(6), range(8, 9)):
        (found, sizes), (expected, _) = (step_of(module, batch, compiled) for compiled in (True, False))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-4)
        shapes.add(str(sizes))
    assert any(float(value.abs().max()) > 1e-4 for name, value in expected.items() if name.startswith("gradient"))
    assert len(shapes) == 2


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding alone."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.parametrize(("loss", "args", "head"), [(*each, HEADS[n % 3]) for n, each in enumerate(VARIANTS)], ids=str)
def test_padding_changes_nothing_of_a_head(
    loss: str, args: dict[str, Any], head: dict[str, Any], toys: Path, uncompiled: None
) -> None:
    if "layout" in head["head"] and loss == "eagle":
        args = {"w_feature": 0.0}
    module = ready(eagle_module(toys, loss=loss, loss_args=args or None, unroll_steps=3, step_decay=0.7, **head))
    if head["head"].get("fused_layers"):
        module.target.capture_layers(head["head"]["fused_layers"])
    same_when_padded(module, toys)


def test_padding_changes_no_choice_of_tokens(toys: Path, tmp_path: Path, uncompiled: None) -> None:
    ready(eagle_module(toys, seed=3)).export(tmp_path / "reference")
    chosen = {"loss": "adaspec", "loss_args": {"reference": str(tmp_path / "reference"), "keep": 0.3}}
    same_when_padded(ready(eagle_module(toys, unroll_steps=3, **chosen)), toys)


@pytest.mark.parametrize(("loss", "lora"), [("kl_pq", {"r": 4, "lora_alpha": 8}), ("fsd", None)], ids=str)
def test_padding_changes_nothing_of_a_small_lm(
    loss: str, lora: Any, toys: Path, tmp_path: Path, uncompiled: None
) -> None:
    same_when_padded(small_lm(toys, tmp_path, loss=loss, lora=lora, unroll_steps=2), toys)


@pytest.mark.parametrize(("family", "loss"), [("llama", "kl_pq"), ("mimo", "fsd"), ("glm4_moe_lite", "fsd")])
def test_padding_changes_nothing_of_an_mtp_layer(family: str, loss: str, toys: Path, uncompiled: None) -> None:
    source = toys / "target" if family == "llama" else checkpoint(family, 1, VOCAB)
    same_when_padded(ready(MtpModule(str(source), loss=build_loss(loss))), toys)


@pytest.mark.parametrize(
    ("kind", "backend"),
    fast_only(  # inductor compiles C++ here
        [("eagle3", "eager"), *((kind, "inductor") for kind in ("eagle3", "lm", "lora"))], [("eagle3", "eager")]
    ),
)
def test_compiled_steps_are_those_of_torch(
    kind: str, backend: str, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the second batch, in another order, needs no further graph."""
    monkeypatch.setattr("fsd_train.losses.rows.BACKEND", backend)
    torch._dynamo.reset()
    if kind == "eagle3":
        module: Any = ready(eagle_module(toys, loss="fsd", unroll_steps=3, **HEADS[1]))
    else:
        module = small_lm(toys, tmp_path, lora={"r": 4} if kind == "lora" else None)
    module.target.capture_layers(HEADS[1]["head"]["fused_layers"])
    counters.clear()
    graphs = []
    for batch in packs(toys, range(6), range(5, -1, -1)):
        (found, _), (expected, _) = (step_of(module, batch, compiled) for compiled in (True, False))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[1]


@pytest.mark.parametrize("kind", fast_only(["lm", "eagle", "eagle3", "lora", "mtp"], ["lm"]))
def test_a_batch_whose_sizes_were_met_makes_no_graph(
    kind: str, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its rows and the progress of the run; the target's layers, the drafter's and the losses are compiled."""
    monkeypatch.setattr("fsd_train.losses.rows.BACKEND", "eager")
    torch._dynamo.reset()
    mix = [{"name": "kl_pq", "weight": Schedule(1.0, 0.1)}, {"name": "fsd", "weight": Schedule(0.0, 1.0)}]
    if kind.startswith("eagle"):
        module: Any = ready(eagle_module(toys, loss=mix, unroll_steps=3, **HEADS[1 if kind == "eagle3" else 2]))
        module.target.capture_layers(module.head.config.fused_layers)
    elif kind == "mtp":
        module = ready(MtpModule(str(checkpoint("glm4_moe_lite", 1, VOCAB)), loss=build_loss(mix)))
    else:
        lora = {"r": 4} if kind == "lora" else None
        module = small_lm(toys, tmp_path, loss=build_loss(mix), unroll_steps=2, lora=lora)
    module.compile_option = True
    order, made = random.Random(0), dict[str, list[int]]()
    for number in range(12):
        (batch,) = packs(toys, order.sample(range(36), order.choice((2, 6))))
        before = counters["stats"]["unique_graphs"]
        drafts = replace(module.draft(batch, module.unroll_steps), progress=number / 12, step=number)
        module.loss(drafts).loss.backward()
        sizes = str([each.shape for each in (drafts.estimates, drafts.features, drafts.rows.chains)])
        made.setdefault(sizes, []).append(counters["stats"]["unique_graphs"] - before)
    assert 2 <= len(made) <= 8 and all(first[0] for first in list(made.values())[:2])
    assert not any(sum(again[1:]) for again in made.values()), made


def test_padded_numbers_are_eighths_of_a_row() -> None:
    assert [padded_count(count, 190) for count in (0, 1, 24, 25, 190)] == [24, 24, 24, 48, 192]
    assert {padded_count(count, 8192) for count in range(8193)} == {1024 * n for n in range(1, 9)}
    assert padded_count(1, 1500) == 256, "whole blocks of attention"


@pytest.mark.parametrize(
    ("options", "says"),
    [({"chain_share": 0.5}, "chain_share is 0.5"), ({"context_ids": True, "draft_vocab_size": 40}, "context_ids")],
    ids=str,
)
def test_settings_that_exclude_compiled_steps(options: dict[str, Any], says: str, toys: Path) -> None:
    module = eagle_module(toys, compile=True, **options)
    with pytest.raises(DataError, match=f"model.compile is true, but model.{says}"):
        module.setup("fit")


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("loss", ["kl_pq", "fsd"])
def test_compiled_steps_on_cuda(loss: str, half: bool, toys: Path) -> None:
    """The default there. They have the values of plain steps, and wait for nothing."""
    device = torch.device("cuda")
    module = ready(eagle_module(toys, loss=loss, unroll_steps=3, **HEADS[1]))
    module.target.capture_layers(HEADS[1]["head"]["fused_layers"])
    module.to(device)
    module.target.model.to(device)
    assert module.is_compiled
    batch: Any = answers_of(toys).on_before_batch_transfer(packs(toys, range(6))[0], 0)
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        (found, _), (expected, _) = (step_of(module, batch, compiled) for compiled in (True, False))
        step_of(module, batch, True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            module.loss(module.draft(batch, module.unroll_steps)).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    del found["agreement"], expected["agreement"]  # ties
    torch.testing.assert_close(found, expected, atol=3e-2 if half else 1e-4, rtol=5e-2 if half else 1e-3)


# what a CPU does instead ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "has_products", "precision"),
    [("bf16-mixed", True, "bf16-mixed"), ("bf16-mixed", False, "32-true"), ("32-true", True, "32-true")],
)
def test_a_cpu_without_bf16_products_trains_in_fp32(
    asked: str, has_products: bool, precision: str, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(fit, "has_bf16_products", lambda: has_products)
    model, data = {"target": str(toys / "target")}, {"train_files": [str(toys / "answers.jsonl")]}
    with caplog.at_level("INFO", logger="fsd_train"):
        _, *argv = fit_command(tmp_path, {"precision": asked}, model, data)
        assert fit.configured(argv).trainer.precision == precision
    assert ("bf16 is several times slower" in caplog.text) == (asked != precision)


@pytest.mark.parametrize(("compiled", "padded"), [(None, False), (True, True)])
def test_batches_are_padded_for_compiled_steps_alone(
    compiled: bool | None, padded: bool, toys: Path, tmp_path: Path
) -> None:
    class Seen(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            module.compile_option = False  # the batches are planned; compiling takes long

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            lengths.append((batch["input_ids"].shape[1], int(batch["lengths"].sum())))

    lengths: list[tuple[int, int]] = []
    run = trainer(tmp_path, 2, Seen())
    module = eagle_module(toys)
    module.compile_option = compiled
    run.fit(module, answers_of(toys, batch_tokens=300))
    assert all(tokens == total for tokens, total in lengths)
    assert all((tokens == 300) == padded for tokens, _ in lengths), lengths
