"""How much a reader of one training step has to follow: which functions it calls across our files, by a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.test_round_trace import PACKAGES, Call, traced
from tests.train_toys import answers_of, eagle_module, trainer

TRAINING = (*PACKAGES, "fsd_train/")
HEADS: dict[str, dict[str, Any]] = {"fsd": {}, "eagle3": {"layout": "eagle3", "own_lm_head": False}}


@pytest.mark.parametrize("loss", ["eagle", "fsd"])
@pytest.mark.parametrize("layout", HEADS)
def test_a_training_step_is_short_to_follow(
    layout: str, loss: str, toys: Path, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a batch to its loss and what is logged, in a Trainer: the target's forward, three steps of the head."""
    module, calls, steps = eagle_module(toys, loss=loss, unroll_steps=3, head=HEADS[layout]), set[Call](), 0
    training_step = module.training_step

    def run(batch: dict[str, Any], batch_idx: int) -> Tensor:
        nonlocal steps
        steps += 1
        if steps != 2:
            return training_step(batch, batch_idx)
        with traced(repo_root, calls, TRAINING):
            return training_step(batch, batch_idx)

    monkeypatch.setattr(module, "training_step", run)
    trainer(tmp_path, 2).fit(module, answers_of(toys))
    functions = {(file, name) for _, file, name in calls}
    assert 25 < len(functions) <= 46, sorted(functions)
    assert len({file for file, _ in functions}) <= 19
