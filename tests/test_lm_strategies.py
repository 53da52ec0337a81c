"""A small LM trained by two processes, sharded: the curve is one process's, and what is exported is the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer.drafters.lm import load_lm
from fsd_infer.targets.target import Target
from fsd_train.cli import main as cli
from tests.test_strategies import ACCUMULATE, LR, RANKS, check_same_run, command, run_ranks, toys  # noqa: F401
from tests.train_toys import assert_same, in_bf16, toy_model

FSDP = ["--trainer.strategy", "fsdp", "--trainer.devices", str(RANKS)]


def lm_command(root: Path, out: Path, accumulate: int, options: dict[str, Any], *more: str) -> list[str]:
    """`fsd-train fit` as for heads, of a small LM."""
    argv = command(root, out, accumulate, *more)
    path = out / "recipe.json"
    config = json.loads(path.read_text())
    shared = {
        name: config["model"][name] for name in ("target", "unroll_steps", "optimizer", "lr_scheduler", "eval_steps")
    }
    values = {**shared, "drafter": str(root / "drafter"), **options}
    config["model"] = {"class_path": "LMModule", "init_args": values}
    path.write_text(json.dumps(config))
    return argv


def save_tied(directory: Path) -> None:
    """Where training starts: a small LM whose LM head is its embeddings, as most small ones' is."""
    model = toy_model(seed=1)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(directory)


def drafter(root: Path, directory: Path) -> Any:
    """An exported drafter's model."""
    return load_lm(directory, Target.from_pretrained(str(root / "target"), dtype=torch.float32)).model


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"lora": {"r": 4, "lora_alpha": 8}}, {"on_policy": 1.0}], ids=["full", "lora", "on-policy"]
)
def test_a_sharded_small_lm_is_trained_and_exported(
    options: dict[str, Any],
    toys: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    save_tied(toys / "drafter")
    single, out = tmp_path / "single", tmp_path / "sharded"
    ranks = run_ranks(lm_command(toys, out, ACCUMULATE, options, *FSDP), out)
    if "on_policy" not in options:  # each rank draws answers of its own
        assert cli(lm_command(toys, single, RANKS * ACCUMULATE, options)) == 0
        check_same_run(ranks, torch.load(single / "rank0.pt"))
    for rank in ranks:
        assert rank["target_share"] == rank["head_share"] == rank["moment_share"] == 1 / RANKS
    # what the callback wrote is what rank 0 gathered, and what the command makes of the checkpoint
    assert cli(["export", str(out / "ckpt" / "last.ckpt"), str(out / "again")]) == 0
    written = drafter(toys, out / "head").state_dict()
    again = drafter(toys, out / "again").state_dict()
    assert_same(again, written)
    start = drafter(toys, toys / "drafter").state_dict()
    assert set(written) == set(start) and any(not torch.equal(value, start[name]) for name, value in written.items())
    if "lora" not in options:
        assert_same(written, {name: in_bf16(ranks[0]["head"][f"model.{name}"]) for name in written})


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 4, "lora_alpha": 8}], ids=["full", "lora"])
def test_its_sharded_checkpoints_are_continued(lora: dict[str, Any] | None, toys: Path, tmp_path: Path) -> None:  # noqa: F811
    save_tied(toys / "drafter")
    options, whole, part = {"lora": lora}, tmp_path / "whole", tmp_path / "part"
    expected = run_ranks(lm_command(toys, whole, ACCUMULATE, options, *FSDP), whole)[0]["head"]
    (half,) = (whole / "ckpt").glob("*step=2.ckpt")
    resume = ["--ckpt_path", str(half)]
    found = run_ranks(lm_command(toys, part, ACCUMULATE, options, *FSDP, *resume), part)[0]["head"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1 * LR)
