"""The walks of :mod:`benchmarks.sampled_trees` emit the target's distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.sampled_trees import WALKS, Sampled, mixed, normalised, several, without_replacement
from tests.rules_toy import p_value

V, RUNS = 3, 1500


@pytest.mark.parametrize("name", WALKS)
def test_walks_emit_the_targets_distribution(name: str) -> None:
    """The first two tokens of trees of two children and one grandchild each, completed by the target."""
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.randn(2, 1 + V, V, generator=generator).double() * 1.3).softmax(-1)  # the root, then by first token

    def uniform() -> float:
        return float(torch.rand((), generator=generator))

    def token(distribution: torch.Tensor) -> int:
        return int(distribution.multinomial(1, generator=generator))

    codes = []
    for _ in range(RUNS):
        tokens, parents, where, fixed = [0], [0], [0], [True]
        for parent, width in ((0, 2), (1, 1), (2, 1)):
            distribution = q[where[parent]]
            children = without_replacement(distribution, width, generator).tolist()
            if name == "mixed":
                children = distribution.topk(width - 1).indices.tolist()
                rest = distribution.index_fill(0, torch.tensor(children).long(), 0.0)
                children += without_replacement(normalised(rest), 1, generator).tolist()
            for place, child in enumerate(children):
                tokens.append(child)
                parents.append(parent)
                where.append(1 + child if parent == 0 else 0)
                fixed.append(name == "mixed" and place < width - 1)
        tree = Sampled(tokens, parents, p[where], q[where], fixed)
        count, last, node = WALKS[name](tree, uniform)
        path = [node] if node else []
        while path and parents[path[0]]:
            path.insert(0, parents[path[0]])
        text = [*(tokens[one] for one in path), token(last)]
        text = text if len(text) > 1 else [*text, token(p[1 + text[0]])]
        assert count == len(path)
        codes.append(V * text[0] + text[1])
    distribution = np.array([float(p[0, a] * p[1 + a, b]) for a in range(V) for b in range(V)])
    assert p_value(np.array(codes), distribution) > 1e-4


def test_acceptance_of_nodes() -> None:
    """One draft is the chain's either way, and drafts without replacement cover a vocabulary."""
    p, q = (torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).double() * 1.5).softmax(-1)
    generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(mixed(p, q, 1), torch.minimum(p, q).sum())
    torch.testing.assert_close(several(p, q, 1, 1, generator), torch.minimum(p, q).sum())
    assert several(p, q, 2, 2, generator, 50) > mixed(p, q, 1)
    for k in range(1, 6):  # with one draw it is the mixed scheme
        torch.testing.assert_close(several(p, q, k, 1, generator), mixed(p, q, k))
    torch.testing.assert_close(mixed(p, q, 5), torch.ones(()).double())
