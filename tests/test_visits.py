"""Trees for laws that favour drafts: which nodes are visited, and what drafters make of it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters.eagle import EagleDrafter
from fsd_infer.drafters.graft import GraftedDrafter
from fsd_infer.drafters.lookup import LookupDrafter
from fsd_infer.drafters.shape import LITTLE_TILT_SHAPES, TILTED_SHAPES
from fsd_infer.drafters.visits import visit_scores, visit_scores_by_level
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.head import EagleHead
from fsd_infer.rules import parse_rule
from tests.families import tiny_model

PARENTS = [0, 0, 0, 1, 1, 2, 3, 3]
STEPS = [1.0, 0.5, 0.3, 0.6, 0.2, 0.9, 0.7, 0.1]


def cumulative(steps: list[float], parents: list[int]) -> list[float]:
    scores = [0.0]
    for step, parent in zip(steps[1:], parents[1:]):
        scores.append(scores[parent] + math.log(step))
    return scores


def by_enumeration(steps: list[float], parents: list[int], tilt: float) -> list[float]:
    """Chances that walks visit nodes when each walk's chance under q is weighed by e^(tilt · its drafts)."""
    visited, total = [0.0] * len(steps), 0.0
    for end in range(len(steps)):
        path = [end]
        while path[-1]:
            path.append(parents[path[-1]])
        ends_here = 1 - sum(steps[node] for node in range(1, len(steps)) if parents[node] == end)
        weight = ends_here * math.prod(steps[node] for node in path) * math.exp(tilt * (len(path) - 1))
        total += weight
        for node in path:
            visited[node] += weight
    return [weight / total for weight in visited]


@pytest.mark.parametrize("tilt", [0.3, 1.0, 2.5])
def test_visits_are_those_of_the_tilted_law(tilt: float) -> None:
    """The law r ∝ q·e^(v·tilt) by one backward pass is, over whole walks, q times e^(tilt · drafts)."""
    scores = visit_scores(cumulative(STEPS, PARENTS), PARENTS, tilt)
    found = [math.exp(score - scores[0]) for score in scores]
    assert found == pytest.approx(by_enumeration(STEPS, PARENTS, tilt))
    assert visit_scores(cumulative(STEPS, PARENTS), PARENTS, 0.0) == cumulative(STEPS, PARENTS)


@pytest.mark.parametrize("tilt", [0.0, 0.7, 9.0])
def test_levels_and_lists_agree_and_children_never_exceed_parents(tilt: float) -> None:
    """Also where q is all but 1, so that rounding decides."""
    generator = torch.Generator().manual_seed(0)
    width, batch = 3, 2
    levels, parents = [], [[0] for _ in range(batch)]
    expanded, before, first = torch.zeros(batch, 1, dtype=torch.long), torch.zeros(batch, 1), 1
    for depth in range(6):
        sharp = 30.0 if depth % 2 else 2.0
        log_q = (sharp * torch.randn(batch, expanded.shape[1], width, generator=generator)).log_softmax(-1)
        scores = (before[..., None] + log_q).flatten(1)
        levels.append((scores, expanded, before))
        for row, nodes in enumerate(expanded.tolist()):
            parents[row] += itertools.chain.from_iterable([node] * width for node in nodes)
        before, best = scores.topk(2, dim=-1)
        expanded, first = first + best, first + scores.shape[1]
    found = visit_scores_by_level(levels, tilt)
    for row in range(batch):
        scores = [0.0, *torch.cat([level[0][row] for level in levels]).tolist()]
        visits = visit_scores(scores, parents[row], tilt)
        assert found[row].tolist() == pytest.approx(visits[1:], abs=1e-4)
        for values in (visits, [visits[0], *found[row].tolist()]):
            assert all(values[node] <= values[parent] for node, parent in enumerate(parents[row]) if node)


def test_the_rule_chooses_the_default_tree_and_exact_decoding_stays_exact() -> None:
    target = Target(tiny_model("llama"))
    decoder = FuzzyDecoder(target, EagleDrafter(EagleHead(EagleConfig.for_target(target)), target))
    drafter = decoder.drafter
    assert isinstance(drafter, EagleDrafter)
    assert drafter.for_batch(1) is drafter
    tilted = drafter.for_batch(1, parse_rule("tilted:2").tilt(greedy=True))
    assert isinstance(tilted, EagleDrafter) and tilted.shape == TILTED_SHAPES["cpu"]
    sampled = drafter.for_batch(1, parse_rule("tilted:2").tilt(greedy=False))
    assert isinstance(sampled, EagleDrafter) and sampled.shape == LITTLE_TILT_SHAPES["cpu"]
    given = drafter.reshaped(TreeShape(2, 2, 4))
    assert given.for_batch(1, 1.0) is given, "a tree that was asked for stays"
    plain = decoder.generate([[1, 2, 3]], drafter=given, max_new_tokens=12).sequences
    for grafted in (drafter, GraftedDrafter(drafter, LookupDrafter(decoder.target.vocab_size))):
        options = {"drafter": grafted, "max_new_tokens": 12}
        assert decoder.generate([[1, 2, 3]], "tilted:inf", **options).sequences == plain
        assert decoder.generate([[1, 2, 3]], "tilted:1", **options).stats.drafter["depth"] >= 7
