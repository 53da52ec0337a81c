"""Training on a CPU: in fp32 where the processor has no fast bf16, and without padding where nothing is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

import fsd_train.commands.fit as fit
from tests.train_toys import answers_of, eagle_module, fit_command, trainer


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
