"""One gradient however an optimizer step's rows are divided: into accumulated batches, or among ranks."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from fsd_train.models import DistillationModule, LMModule, MtpModule
from tests import train_toys
from tests.loss_toys import VARIANTS
from tests.text_toys import write_rows
from tests.train_toys import VOCAB, answers_of, eagle_module, join_group, run_group, save_toy_target

ROWS, LENGTH = 8, 24
EAGLE3 = {"layout": "eagle3", "fused_layers": [0, 1]}


class Gradients(Callback):
    """Keeps the gradient of the first optimizer step, in a file if there are several ranks."""

    def __init__(self, file: Path | None = None) -> None:
        self.file, self.found = file, dict[str, torch.Tensor]()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        named = pl_module.named_parameters()
        self.found = {name: value.grad.clone() for name, value in named if value.grad is not None}
        if self.file is not None and trainer.is_global_zero:
            torch.save(self.found, self.file)


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
    """The first step's gradient over all rows, in so many batches of each rank."""
    ranks = options.get("devices", 1)
    out.mkdir(exist_ok=True)
    keep = Gradients(out / "gradient.pt")
    data = answers_of(rows, validation_fraction=0.0, batch_tokens=ROWS * LENGTH // (batches * ranks))
    fixed = {"accumulate_grad_batches": batches, "limit_val_batches": 0, "logger": False}
    train_toys.trainer(out, 1, keep, **{**fixed, **options}).fit(module, data)
    return keep.found


def head(rows: Path, loss: str, args: dict[str, Any], **options: Any) -> DistillationModule:
    return eagle_module(rows, loss=loss, loss_args=args or None, unroll_steps=3, step_decay=0.7, **options)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found and any(float(value.abs().max()) > 1e-4 for value in expected.values())
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("loss", "args"), [VARIANTS[n] for n in (0, 2, 5, 7, 9)], ids=str)  # of each kind
def test_accumulated_batches_have_the_gradient_of_one(
    loss: str, args: dict[str, Any], rows: Path, tmp_path: Path
) -> None:
    if loss == "lk":  # by step, a batch's own mean is in the loss
        args = {**args, "level": "row"}
    found = [gradient(rows, tmp_path / str(n), head(rows, loss, args), n) for n in (1, 4)]
    same(found[1], found[0])


def test_of_other_drafters(rows: Path, tmp_path: Path) -> None:
    made = {
        "eagle3": lambda: head(rows, "fsd", {}, head=EAGLE3, draft_vocab_size=40),
        "lm": lambda: LMModule(str(rows / "target"), str(rows / "small"), loss="kl_pq"),
        "mtp": lambda: MtpModule(str(rows / "target"), loss="fsd"),
    }
    for name, module in made.items():
        found = [gradient(rows, tmp_path / f"{name}{n}", module(), n) for n in (1, 4)]
        same(found[1], found[0])


def test_rows_of_any_lengths_weigh_by_their_tokens_also_in_a_step_of_few_batches(rows: Path, tmp_path: Path) -> None:
    """Trainer divides by the usual number in any case, which the total makes good."""
    (tmp_path / "target").symlink_to(rows / "target")
    sizes = [(2, 57), (9, 1), (30, 2), (1, 1), (3, 40), (20, 3), (5, 1)]
    made = [{"prompt_ids": [3 + number] * asked, "response_ids": [*range(4, 4 + answer)]}
            for number, (asked, answer) in enumerate(sizes)]  # fmt: skip
    write_rows(tmp_path / "answers.jsonl", made)
    found = []
    for tokens, batches in ((400, 1), (64, 64)):
        keep, data = Gradients(), answers_of(tmp_path, validation_fraction=0.0, batch_tokens=tokens)
        fixed = {"accumulate_grad_batches": batches, "limit_val_batches": 0, "logger": False}
        trainer = train_toys.trainer(tmp_path / str(batches), 1, keep, **fixed)
        trainer.fit(head(rows, "fsd", {}), data)
        assert (trainer.num_training_batches > 2) == (batches > 1)
        found.append(keep.found)
    same(found[1], found[0])


def test_an_epoch_that_is_limited_may_end_within_a_step(rows: Path, tmp_path: Path) -> None:
    """Three of four batches, two per step: the second step's gradient is that of the third batch alone."""
    found = []
    for batches, steps in ((2, 2), (1, 3)):
        keep = Gradients()
        data = answers_of(rows, validation_fraction=0.0, batch_tokens=ROWS * LENGTH // 4)
        fixed = {"accumulate_grad_batches": batches, "limit_val_batches": 0, "limit_train_batches": 3, "logger": False}
        train_toys.trainer(tmp_path / str(steps), steps, keep, **fixed).fit(head(rows, "fsd", {}, lr=0.0), data)
        found.append(keep.found)
    same(*found)


def _rank(rank: int, port: int, rows: Path, out: Path) -> None:
    sys.stdout = sys.stderr = open(out / f"rank{rank}.log", "w", buffering=1)
    join_group(rank, port, NODE_RANK=0)
    gradient(rows, out, head(rows, "fsd", {"w_feature": 0.1}), 2, devices=2, strategy="ddp")


@pytest.mark.slow  # tests/test_strategies.py compares the weights of two ranks and of one
def test_ranks_have_the_gradient_of_one(rows: Path, tmp_path: Path) -> None:
    codes = run_group(_rank, [(rows, tmp_path)] * 2)
    assert codes == [0, 0], "\n".join(log.read_text() for log in tmp_path.glob("*.log"))
    expected = gradient(rows, tmp_path / "one", head(rows, "fsd", {"w_feature": 0.1}), 1)
    same(torch.load(tmp_path / "gradient.pt"), expected)
