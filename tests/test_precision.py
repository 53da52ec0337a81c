"""Training computes in fp32 where the processor has no fast bf16."""

from __future__ import annotations

from pathlib import Path

import pytest

import fsd_train.commands.fit as fit
from tests.train_toys import fit_command


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
