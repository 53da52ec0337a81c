"""The dynamic tree of a head: the best candidates, found in lists on a CPU and in tensors elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsd_infer.cpu.ops import likeliest
from fsd_infer.drafters.candidates import Level, _best_in_lists, _best_in_tensors, keep_best
from fsd_infer.drafters.shape import TreeShape
from fsd_infer.tree import DraftTree, ancestors_of

VOCABULARY = 40


def levels_of(shape: TreeShape, batch: int, peaked: float) -> list[Level]:
    """Candidates as a head would draft them; peaked logits make many that are certain, hence equal scores."""
    expanded, path_scores, first, levels = torch.zeros(batch, 1, dtype=torch.long), torch.zeros(batch, 1), 1, []
    for _ in range(shape.depth):
        logits = torch.randn(batch, expanded.shape[1], VOCABULARY)
        logits[..., 3] += peaked
        log_q, tokens = likeliest(logits, shape.width)
        scores = (path_scores[..., None] + log_q).flatten(1)
        levels.append(Level(tokens.flatten(1), scores, expanded, path_scores, logits))
        path_scores, best = scores.topk(shape.width)
        expanded, first = first + best, first + scores.shape[1]
    return levels


def paths(tree: DraftTree) -> list[dict[tuple[int, ...], tuple[float, list[float] | None]]]:
    """Per row: the tokens from the root to a node -> its score and its row of q."""
    found = []
    for number, row in enumerate(zip(*map(Tensor.tolist, (tree.tokens, tree.parents, tree.scores, tree.q_index)))):
        named: list[tuple[int, ...]] = []
        of_row = {}
        for token, parent, score, index in zip(*row):
            named.append((*(named[parent] if named else ()), token))
            of_row[named[-1]] = score, None if index < 0 else tree.q_logits[number, index].tolist()
        found.append(of_row)
    return found


@pytest.mark.parametrize("peaked", [0.0, 5.0, 200.0])
@pytest.mark.parametrize("shape", [TreeShape(1, 3, 9), TreeShape(3, 1, 4), TreeShape(4, 3, 8), TreeShape(5, 6, 16)])
@pytest.mark.parametrize(("batch", "tilt"), [(1, 0.0), (3, 0.0), (3, 1.0)])
def test_lists_and_tensors_give_the_same_tree(shape: TreeShape, batch: int, tilt: float, peaked: float) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        levels = levels_of(shape, batch, peaked)
        roots, ids = torch.arange(batch), torch.arange(VOCABULARY)
        lists, tensors = (make(roots, levels, shape, ids, tilt) for make in (_best_in_lists, _best_in_tensors))
        assert paths(lists) == paths(tensors) or (tilt and peaked == 200.0)  # where rounding chooses among equals
        for tree in (lists, tensors):
            assert torch.equal(tree.ancestors, ancestors_of(tree.parents))
            assert torch.equal(tree.depths, tree.ancestors.sum(-1) - 1)
        for row in lists.to_rows():  # down the likeliest path first
            node = 0
            while inner := [child for child, parent in enumerate(row.parents) if child and parent == node]:
                assert min(inner) == node + 1 and row.scores[node + 1] == max(row.scores[child] for child in inner)
                node += 1
        best = torch.cat([level.scores for level in levels], 1).sort(descending=True).values
        kept = lists.scores[:, 1:].sort(descending=True).values
        assert tilt or torch.equal(kept, best[:, : shape.max_nodes - 1])
        assert torch.equal(keep_best(roots, levels, shape, ids, tilt).tokens, lists.tokens)


def test_what_is_not_a_number_comes_through_to_be_refused() -> None:
    shape = TreeShape(2, 3, 8)
    levels = levels_of(shape, 1, 0.0)
    levels[0].logits[0, 0, 5] = levels[0].scores[0, 1] = torch.nan
    assert keep_best(torch.zeros(1, dtype=torch.long), levels, shape, None, 0.0).q_logits.isnan().any()
