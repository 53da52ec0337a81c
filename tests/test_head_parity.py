"""Our logits of public heads are those of their authors' own modelling code, step by step, to 1e-5."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsd_infer import Target
from fsd_infer.heads.checkpoint import load_head
from fsd_train.unroll import unroll
from tests.parity_toys import (
    GOLDEN,
    LENGTH,
    SHOWN,
    STEPS,
    inputs,
    target_model,
    write_heads,
)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(target_model())


def our_logits(directory: Path, target: Target) -> Tensor:
    """[STEPS, L, Vd or V]: of step s at the position where its chain began."""
    head = load_head(directory, target)
    tokens, final, fused = inputs()
    eagle3 = head.config.layout == "eagle3"
    features = torch.cat([final, fused], -1) if eagle3 else final
    if eagle3:
        assert head.config.fused_layers == [1, 3, 4]
    with torch.no_grad():
        outputs = unroll(head, head.embed(tokens, target), features, STEPS, torch.arange(LENGTH)[None])
        read = head.readout(torch.cat(outputs))
        return target.lm_logits(read) if head.lm_head is None else head.lm_head(read)


def check(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    for step in range(STEPS):  # a chain's step s reads token r + s + 1, which the last ones lack
        end = LENGTH - step
        torch.testing.assert_close(ours[step, :end], theirs[step, :end], atol=1e-5, rtol=1e-5)
        assert float(ours[step, :end].std()) > 0.1


@pytest.mark.parametrize("name", json.loads(GOLDEN.read_text()))
def test_logits_are_those_that_the_authors_code_gave(name: str, heads: dict[str, Path], target: Target) -> None:
    """Golden numbers, see tests/parity_toys.py."""
    theirs = torch.tensor(json.loads(GOLDEN.read_text())[name])
    check(our_logits(heads[name], target)[..., SHOWN], theirs)
