"""`benchmarks.draft_variants`: one way to draft, with it and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import draft_variants
from fsd_infer import Target
from fsd_infer.cpu import ops
from fsd_infer.heads.checkpoint import save_head
from fsd_infer.heads.head import EagleConfig, EagleHead
from tests.bench_toys import Toy, save_toy


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return save_toy(tmp_path)


def head_of(toy: Toy, directory: Path, **options: Any) -> str:
    target = Target.from_pretrained(str(toy.target), dtype=torch.float32)
    return str(save_head(directory, EagleHead(EagleConfig.for_target(target, **options)), target.fingerprint()))


def command(toy: Toy, varied: str, *more: str, tree: str = "2,2,5") -> list[str]:
    argv = [varied, "--target", str(toy.target), "--prompts", str(toy.prompts), "--dtype", "fp32", "--threads", "1"]
    return [*argv, "--max-new-tokens", "6", "--tree", tree, *more]


def test_ids_of_the_text(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    head = head_of(toy, tmp_path / "head", draft_vocab_size=8)
    assert draft_variants.main(command(toy, "context-ids", "--drafter", head, "--json", str(out))) == 0
    record = json.loads(out.read_text())
    methods = record["methods"]
    assert [methods[name]["drafter"]["context_ids"] for name in ("without", "with")] == [False, True]
    assert methods["with"]["identical_to_baseline"] == 1.0 and record["varied"] == "context-ids"
    shown = capsys.readouterr().out
    assert "mean" in shown and "with / without" in shown
    assert draft_variants.main(command(toy, "context-ids", "--drafter", str(toy.drafter))) == 2
    assert "is no head with a reduced draft vocabulary" in capsys.readouterr().err


def test_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if ops.kernel_kind() is None:
        pytest.skip("needs AVX512-BF16 and a C++ compiler")
    toy = save_toy(tmp_path, hidden_size=64)  # whole panels
    out, head = tmp_path / "record.json", head_of(toy, tmp_path / "head")
    asked = command(toy, "weights", "--drafter", head, "--json", str(out), "--dtype", "bf16")
    assert draft_variants.main(asked) == 0
    methods = json.loads(out.read_text())["methods"]
    assert [methods[name]["drafter"].get("weights") for name in ("without", "with")] == [None, "fp8"]
    capsys.readouterr()
    assert draft_variants.main(command(toy, "weights", "--drafter", head)) == 2
    assert "has no fp8 weights here" in capsys.readouterr().err
