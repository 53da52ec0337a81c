"""Sampled answers with published heads follow the target's distribution, and lossy rules their own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fsd_infer.drafters import TreeShape
from fsd_infer.rules import parse_rule
from fsd_infer.trees.tree import DraftTree, Draws
from tests.covering import fast_only
from tests.published_blocks import States
from tests.published_heads import LAYOUTS, layout
from tests.rules_toy import ALARM, DEPTH, LENGTH, ROWS, Toy, V, child_of, p_value, simulate, target_distribution
from tests.test_published_heads import FAST, drafted, load, over_all, target
from tests.test_published_heads import root as root  # a fixture

PROMPT, DEEPEST = [1, 2, 3, 0, 2], LENGTH + DEPTH + 1
SHAPES = {name: (TreeShape(3, 3, 8) if place % 2 else TreeShape.chain(3)) for place, name in enumerate(LAYOUTS)}
SHAPES |= {"dspark of SpecForge": TreeShape(3, 1, 4, 0.41)}  # its confidence head cuts


@cache
def table(name: str = "") -> Tensor:
    """[CONTEXTS, V] the target's logits after the prompt and every text of up to six tokens."""
    texts = [torch.tensor([[*PROMPT, *text] for text in itertools.product(range(V), repeat=n)]) for n in range(DEEPEST)]
    with torch.no_grad():
        return torch.cat([target(name).model(ids).logits[:, -1].float() for ids in texts])


def text_of(context: int) -> list[int]:
    text: list[int] = []
    while context:
        text, context = [(context - 1) % V, *text], (context - 1) // V
    return text


@dataclass(frozen=True)
class HeadToy(Toy):
    """The tiny target with a head's trees."""

    drafter: Any = None
    draws: Draws = Draws.TREE

    def draft(self, contexts: Tensor, generator: torch.Generator) -> tuple[DraftTree, Tensor]:
        texts = [PROMPT + text_of(context) for context in contexts.tolist()]
        tree = drafted(self.drafter, texts, 1, greedy=False, draws=self.draws, generator=generator)
        where = contexts[:, None].repeat(1, tree.tokens.shape[1])
        for node in range(1, where.shape[1]):
            above = where.gather(1, tree.parents[:, node : node + 1])[:, 0]
            where[:, node] = torch.where(tree.is_draft[:, node], child_of(above, tree.tokens[:, node]), above)
        return tree, where


@pytest.mark.parametrize("name", fast_only(LAYOUTS, FAST))
def test_sampled_answers_have_the_targets_distribution(root: Path, name: str) -> None:
    toy = HeadToy(table(name), table(name), drafter=load(root, name, SHAPES[name]))
    tree, _ = toy.draft(torch.zeros(64, dtype=torch.long), torch.Generator().manual_seed(1))
    assert tree.drawn is not None and tree.drawn.any(), "nodes are drawn"
    assert p_value(simulate(toy, parse_rule("exact"), ROWS, seed=3).codes, target_distribution(toy)) > ALARM


LOSSY = fast_only(LAYOUTS, ["dflash of speculators", "mtp of mimo"])


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_has_its_distribution(root: Path, name: str) -> None:
    """The open gate chooses among two drafts, by the target's chances. The token after them is the target's own."""
    toy = HeadToy(table(name), table(name), drafter=load(root, name, TreeShape(1, 2, 3)), draws=Draws.NONE)
    made, distribution = layout(name), []
    for text in itertools.product(range(V), repeat=LENGTH):
        chance = 1.0
        for place, token in enumerate(text):
            p = table(name)[code_of(text[:place])].double().softmax(-1)
            if place % 2 == 0:  # at a root
                known = PROMPT + list(text[:place])
                q = over_all(made.estimate(States.of(target(name).model, known), known, []), made.ids)
                p = p * torch.zeros_like(p).index_fill(0, q.topk(2).indices, 1.0)
            chance *= float(p[token] / p.sum())
        distribution.append(chance)
    codes = simulate(toy, parse_rule("fuzzy:js:inf"), ROWS, seed=3).codes
    assert p_value(codes, np.array(distribution)) > ALARM
    assert p_value(codes, target_distribution(toy)) < ALARM


def code_of(text: tuple[int, ...]) -> int:
    context = 0
    for token in text:
        context = V * context + 1 + token
    return context
