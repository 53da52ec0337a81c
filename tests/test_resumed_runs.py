"""Kills of a resumed run cost no gradient, and the head that a run leaves is that of its last step."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_train.models import EagleModule
from tests.families import load_head
from tests.test_runs import TWO_BATCHES, Run


@pytest.mark.parametrize("ends", [[(2, 1), (2, 2)], [(3, 2)]], ids=["kills amid a step", "Ctrl-C in the last step"])
def test_a_step_is_whole_and_the_head_is_the_last(
    ends: list[tuple[int, int]], toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run saves again at the first of a step's batches, and a head may be of an earlier step."""
    whole = Run(toys, tmp_path / "whole")
    assert whole.fit(4, *TWO_BATCHES)[0] == 0
    run, step, begun = Run(toys, tmp_path / "run", every=len(ends) % 2 + 2), EagleModule.training_step, list[int]()
    recipe = json.loads((run.root / "recipe.json").read_text())
    recipe["trainer"]["callbacks"][1]["init_args"]["every_n_train_steps"] = 3
    (run.root / "recipe.json").write_text(json.dumps(recipe))

    def training(self: Any, *args: Any) -> Any:
        begun.append(self.trainer.global_step)
        if ends and (begun[-1], begun.count(begun[-1])) == ends[0]:
            ends.pop(0)
            begun.clear()
            if self.trainer.global_step == 2:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)
        return step(self, *args)

    monkeypatch.setattr(EagleModule, "training_step", training)
    statuses = [run.fit(4, *TWO_BATCHES)[0] for _ in range(len(ends) + 1)]
    assert statuses == [*[130] * (len(statuses) - 1), 0]
    assert torch.equal(load_head(run.head).fc.weight, load_head(whole.head).fc.weight)
