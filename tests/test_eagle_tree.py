"""The dynamic tree of a head: the best candidates, found in lists on a CPU and in tensors elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsd_infer.drafters.eagle import TreeShape, _best_in_lists, _best_in_tensors, _keep_best, _Level
from fsd_infer.kernels import likeliest

VOCABULARY = 40


def levels_of(shape: TreeShape, batch: int, peaked: float) -> list[_Level]:
    """Candidates as a head would draft them; peaked logits make many that are certain, hence equal scores."""
    expanded, path_scores, first, levels = torch.zeros(batch, 1, dtype=torch.long), torch.zeros(batch, 1), 1, []
    for _ in range(shape.depth):
        logits = torch.randn(batch, expanded.shape[1], VOCABULARY)
        logits[..., 3] += peaked
        log_q, tokens = likeliest(logits, shape.width)
        scores = (path_scores[..., None] + log_q).flatten(1)
        levels.append(_Level(tokens.flatten(1), scores, expanded, logits))
        path_scores, best = scores.topk(shape.width)
        expanded, first = first + best, first + scores.shape[1]
    return levels


@pytest.mark.parametrize("peaked", [0.0, 5.0, 200.0])
@pytest.mark.parametrize("shape", [TreeShape(1, 3, 9), TreeShape(3, 1, 4), TreeShape(4, 3, 8), TreeShape(5, 6, 16)])
@pytest.mark.parametrize("batch", [1, 3])
def test_lists_and_tensors_give_the_same_tree(shape: TreeShape, batch: int, peaked: float) -> None:
    torch.manual_seed(0)
    drafter: Any = SimpleNamespace(shape=shape, max_nodes=min(shape.nodes, 1 + shape.candidates))
    for _ in range(20):
        levels = levels_of(shape, batch, peaked)
        roots, ids = torch.arange(batch), torch.arange(VOCABULARY)
        lists, tensors = (make(roots, levels, drafter, ids) for make in (_best_in_lists, _best_in_tensors))
        for name in ("tokens", "parents", "depths", "ancestors", "q_index", "scores"):
            assert torch.equal(getattr(lists, name), getattr(tensors, name)), name
        kept = {(row, parent) for row, parents in enumerate(lists.parents.tolist()) for parent in parents[1:]}
        assert kept == {(row, node) for row, node in (lists.q_index >= 0).nonzero().tolist()}
        for row, node in kept:
            one, other = (tree.q_logits[row, int(tree.q_index[row, node])] for tree in (lists, tensors))
            assert torch.equal(one, other)
        best = torch.cat([level.scores for level in levels], 1).sort(descending=True).values
        assert torch.equal(lists.scores[:, 1:].sort(descending=True).values, best[:, : drafter.max_nodes - 1])
        assert torch.equal(_keep_best(roots, levels, drafter, ids).tokens, lists.tokens)


def test_what_is_not_a_number_comes_through_to_be_refused() -> None:
    shape = TreeShape(2, 3, 8)
    drafter: Any = SimpleNamespace(shape=shape, max_nodes=8)
    levels = levels_of(shape, 1, 0.0)
    levels[0].logits[0, 0, 5] = levels[0].scores[0, 1] = torch.nan
    assert _keep_best(torch.zeros(1, dtype=torch.long), levels, drafter, None).q_logits.isnan().any()
