"""Drafters without a model: best-first trees of their tables, answers that stay exact, and options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fsd_infer import FsdError, FuzzyDecoder, Target
from fsd_infer.device.rows import padded
from fsd_infer.drafters import (
    Drafter,
    DraftRequest,
    DraftSession,
    GraftedDrafter,
    LookupDrafter,
    MemoryDrafter,
    RecycleDrafter,
)
from fsd_infer.drafters.free import Chance, Options, best_first
from fsd_infer.tree import DraftTree
from tests.families import VOCAB, circling_model, reference, tiny_model, tiny_prompts
from tests.tree_rounds import check_tree

KINDS: dict[str, Callable[[], Any]] = {
    "lookup": lambda: LookupDrafter(VOCAB),
    "memory": lambda: MemoryDrafter(VOCAB),
    "recycle": lambda: RecycleDrafter(VOCAB),
    "forgetful": lambda: RecycleDrafter(VOCAB, keep=False),
    "both": lambda: GraftedDrafter(LookupDrafter(VOCAB), RecycleDrafter(VOCAB)),
}


class Pairs:
    """A table of what may follow a token. It knows a context by its last token."""

    def __init__(self, after: dict[int, Options]) -> None:
        self.after = after

    def at(self, context: Sequence[int]) -> int:
        return context[-1]

    def step(self, place: int, token: int) -> int:
        return token

    def options(self, place: int) -> Options:
        return self.after.get(place, [])


def test_the_likeliest_nodes_come_first() -> None:
    table = Pairs({1: [(2, 0.6), (3, 0.3)], 2: [(4, 0.4), (5, 0.6)], 5: [(1, 1.0)]})
    tokens, parents, scores = best_first(table, 1, 1, 6, 2, 0.2)
    assert (tokens, parents) == ([1, 2, 5, 3, 4], [0, 0, 1, 0, 1])  # the path from 5 on is too deep
    assert scores == pytest.approx([0.0, *map(math.log, (0.6, 0.36, 0.3, 0.24))])
    assert best_first(table, 1, 1, 3, 9, 0.2)[0] == [1, 2, 5]
    assert best_first(table, 1, 1, 9, 9, 0.7)[0] == [1]


def test_old_evidence_fades() -> None:
    chance = Chance(0.5, memory=64)
    for right, times, low, high in ((True, 1000, 0.95, 1.0), (False, 60, 0.1, 0.5), (False, 1000, 0.0, 0.01)):
        for _ in range(times):
            chance.learn(right)
        assert low < chance.value < high


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_trees_and_rows_leave(kind: str) -> None:
    """A row's tree follows from its own text, whatever its neighbours have."""
    drafter = KINDS[kind]()
    texts = [[1, 2, 3, 1, 2, 4, 1, 2], [5], [6, 7] * 9]
    (session, whole), (_, alone) = (drafted(drafter, some) for some in (texts, texts[2:]))
    check_tree(whole)
    assert whole.tokens.shape[1] <= drafter.max_nodes and whole.max_depth <= drafter.max_depth
    assert bool((whole.q_index == -1).all())
    count = alone.tokens.shape[1]
    assert torch.equal(whole.tokens[2:, :count], alone.tokens) and not whole.is_draft[2:, count:].any()
    session.select(torch.tensor([2]))
    assert torch.equal(session.draft(torch.tensor([7])).tokens, alone.tokens)


def drafted(drafter: Drafter, texts: list[list[int]]) -> tuple[DraftSession, DraftTree]:
    """A session that has read these texts, in pieces of three tokens, and its trees."""
    session = drafter.start(torch.tensor([text[0] for text in texts]), DraftRequest(len(texts), 99))
    for start in range(1, max(map(len, texts)), 3):
        pieces = [text[start : start + 3] for text in texts]
        counts = torch.tensor([len(piece) for piece in pieces])
        session.extend(padded([[*piece, *[9] * (3 - len(piece))] for piece in pieces]), torch.empty(0), counts)
    return session, session.draft(torch.tensor([text[-1] for text in texts]))


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind: str, family: str) -> None:
    model = circling_model() if kind in ("lookup", "memory") and family == "llama" else tiny_model(family)
    drafter: Drafter = KINDS[kind]()
    decoder = FuzzyDecoder(Target(model), drafter)
    prompts = [prompt + prompt[:4] for prompt in tiny_prompts()]
    expected = reference(model, prompts, max_new_tokens=32)
    assert decoder.generate(prompts[:1], max_new_tokens=32, do_sample=False).sequences == expected[:1]
    for rule in ("exact", "draft-only"):  # no distribution is known, so nothing but the target decides
        out = decoder.generate(prompts, rule=rule, max_new_tokens=32, do_sample=False)
        assert out.sequences == expected and out.stats.divergence_spent == 0
    if isinstance(drafter, RecycleDrafter):
        assert bool(len(drafter.recycled)) == drafter.keep
        assert out.stats.tau > 2 or not drafter.keep, "the same prompts again"
        drafter.forget()
        assert not len(drafter.recycled)
    assert out.stats.tau > 2.5 or model.config.model_type != "llama" or kind not in ("lookup", "memory"), (
        "circles are followed"
    )


BAD: dict[type, list[dict[str, float]]] = {
    LookupDrafter: [
        *({"depth": 0}, {"nodes": 1}, {"least": 0.0}, {"least": math.nan}),
    ],
    MemoryDrafter: [{"nodes": 1}, {"store_bytes": -1}],
    RecycleDrafter: [{"nodes": 1}, {"width": 0}, {"most": 0}, {"least": 1.0}],
}


@pytest.mark.parametrize("kind", BAD)
def test_options_out_of_range_are_named(kind: type) -> None:
    for options in BAD[kind]:
        with pytest.raises(FsdError, match=next(iter(options))):
            kind(VOCAB, **options)
