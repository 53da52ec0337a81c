"""One gradient however an optimizer step's rows are divided into batches; of ranks: tests/test_strategies.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from fsd_train.models import BlockModule, BlockOptions, DistillationModule, LMModule, MtpModule
from tests import train_toys
from tests.loss_toys import VARIANTS, build_loss
from tests.text_toys import write_rows
from tests.train_toys import VOCAB, answers_of, eagle_module, save_toy_target

ROWS, LENGTH = 8, 24
EAGLE3 = {"layout": "eagle3", "fused_layers": [0, 1]}


class Gradients(Callback):
    """Keeps the gradient of the last optimizer step."""

    found: dict[str, torch.Tensor]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        named = pl_module.named_parameters()
        self.found = {name: value.grad.clone() for name, value in named if value.grad is not None}


@pytest.fixture(scope="module")
def rows(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of one length whose answers have 2 to 20 tokens."""
    rng = random.Random(0)
    made = []
    for number in range(ROWS):
        ids = [rng.randrange(3, VOCAB) for _ in range(LENGTH)]
        begin = LENGTH - (2 if number < ROWS // 2 else 14 + number % 7)
        made.append({"prompt_ids": ids[:begin], "response_ids": ids[begin:]})
    directory = tmp_path_factory.mktemp("rows")
    (directory / "target").symlink_to(toys / "target")
    write_rows(directory / "answers.jsonl", made)
    save_toy_target(directory / "small", seed=1)
    return directory


def gradient(rows: Path, out: Path, module: DistillationModule, batches: int, **options: Any) -> dict[str, Any]:
    """A step's gradient over all rows, in so many batches."""
    keep, tokens, steps = Gradients(), options.pop("tokens", ROWS * LENGTH // batches), options.pop("steps", 1)
    data = answers_of(rows, validation_fraction=0.0, batch_tokens=tokens)
    fixed = {"accumulate_grad_batches": batches, "limit_val_batches": 0, "logger": False}
    train_toys.trainer(out / str(batches), steps, keep, **{**fixed, **options}).fit(module, data)
    return keep.found


def head(rows: Path, loss: str, args: dict[str, Any], **options: Any) -> DistillationModule:
    return eagle_module(rows, loss=loss, loss_args=args or None, unroll_steps=3, step_decay=0.7, **options)


def blocks(rows: Path, loss: str, confidence: bool = False) -> DistillationModule:
    """A block head that trains on every root."""
    options = BlockOptions(rank=8, layers=[0, 1], mask_token_id=3, confidence=confidence)
    return BlockModule(str(rows / "target"), options, block_size=3, blocks=999, loss=build_loss(loss))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found and any(float(value.abs().max()) > 1e-4 for value in expected.values())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


MODULES: dict[str, Callable[[Path], DistillationModule]] = {
    # losses of each kind; with lk by step a batch's own mean would be in the loss
    **{
        f"{loss} {args}": lambda rows, loss=loss, args=args: head(rows, loss, args)  # type: ignore[misc]
        for loss, args in (*(VARIANTS[n] for n in (0, 2, 7, 9)), ("lk", {"level": "row"}))
    },
    "eagle3": lambda rows: head(rows, "fsd", {}, head=EAGLE3, draft_vocab_size=40),
    "lm": lambda rows: LMModule(str(rows / "target"), str(rows / "small"), loss="kl_pq"),
    "blocks": lambda rows: blocks(rows, loss="fsd"),
    "blocks with confidence": lambda rows: blocks(rows, loss="kl_pq", confidence=True),
    "mtp": lambda rows: MtpModule(str(rows / "target"), loss="fsd"),
}


@pytest.mark.parametrize("name", MODULES)
def test_accumulated_batches_have_the_gradient_of_one(name: str, rows: Path, tmp_path: Path) -> None:
    same(*(gradient(rows, tmp_path, MODULES[name](rows), batches) for batches in (4, 1)))


def test_rows_of_any_lengths_weigh_by_their_tokens_also_in_a_step_of_few_batches(rows: Path, tmp_path: Path) -> None:
    """Trainer divides by the usual number in any case, which the total makes good."""
    (tmp_path / "target").symlink_to(rows / "target")
    sizes = [(2, 57), (9, 1), (30, 2), (1, 1), (3, 40), (20, 3), (5, 1)]
    made = [{"prompt_ids": [3 + number] * asked, "response_ids": [*range(4, 4 + answer)]}
            for number, (asked, answer) in enumerate(sizes)]  # fmt: skip
    write_rows(tmp_path / "answers.jsonl", made)
    ways = ({"batches": 64, "tokens": 64}, {"batches": 1, "tokens": 400})
    same(*(gradient(tmp_path, tmp_path / "run", head(rows, "fsd", {}), **way) for way in ways))


def test_an_epoch_that_is_limited_may_end_within_a_step(rows: Path, tmp_path: Path) -> None:
    """Three of four batches, two per step: the second step's gradient is that of the third batch alone."""
    fixed = {"tokens": ROWS * LENGTH // 4, "limit_train_batches": 3}
    ways = ({"batches": 2, "steps": 2}, {"batches": 1, "steps": 3})
    same(*(gradient(rows, tmp_path, head(rows, "fsd", {}, lr=0.0), **way, **fixed) for way in ways))
