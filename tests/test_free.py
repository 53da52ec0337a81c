"""Drafters without a model: their tables and indices, best-first trees, what they remember; answers stay exact."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsd_core.tensors import padded
from fsd_infer import FsdError, Target
from fsd_infer.drafters import Drafter, DraftRequest, DraftSession, LookupDrafter, MemoryDrafter
from fsd_infer.drafters.free import HitRate, Options, best_first
from fsd_infer.drafters.memory import INDEX_NGRAM, MAX_OCCURRENCES, TextMatcher
from fsd_infer.drafters.recycle import RecycleDrafter, RecycleTable
from fsd_infer.drafters.suffix_store import match_size
from fsd_infer.trees.tree import DraftTree
from tests.families import VOCAB, drafter_of, tell, tiny_model
from tests.tree_rounds import check_tree

KINDS = ["lookup", "memory", "recycle", "forgetful", "lookup+recycle"]


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


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_trees_and_rows_leave(kind: str) -> None:
    """A row's tree follows from its own text, whatever its neighbours have."""
    drafter = drafter_of(kind, Target(tiny_model("llama")))
    texts = [[1, 2, 3, 1, 2, 4, 1, 2], [5], [6, 7] * 9]
    (session, whole), (_, alone) = (drafted(drafter, some) for some in (texts, texts[2:]))
    check_tree(whole)
    assert whole.tokens.shape[1] <= drafter.max_nodes and whole.max_depth <= drafter.max_depth
    assert bool((whole.q_index == -1).all())
    count = alone.tokens.shape[1]
    assert torch.equal(whole.tokens[2:, :count], alone.tokens) and not whole.is_draft[2:, count:].any()
    session.keep_rows(torch.tensor([2]))
    assert torch.equal(session.draft(torch.tensor([7])).tokens, alone.tokens)


def drafted(drafter: Drafter, texts: list[list[int]]) -> tuple[DraftSession, DraftTree]:
    """A session that has read these texts, in pieces of three tokens, and its trees."""
    session = drafter.start(torch.tensor([text[0] for text in texts]), DraftRequest(len(texts), 99))
    for start in range(1, max(map(len, texts)), 3):
        pieces = [text[start : start + 3] for text in texts]
        counts = torch.tensor([len(piece) for piece in pieces])
        tell(session, padded([[*piece, *[9] * (3 - len(piece))] for piece in pieces]), torch.empty(0), counts)
    return session, session.draft(torch.tensor([text[-1] for text in texts]))


BAD: dict[type, list[dict[str, float]]] = {
    LookupDrafter: [{"depth": 0}, {"nodes": 1}, {"min_accept_prob": 0.0}, {"min_accept_prob": math.nan}],
    MemoryDrafter: [{"nodes": 1}, {"store_bytes": -1}],
    RecycleDrafter: [{"nodes": 1}, {"width": 0}, {"max_contexts": 0}, {"min_accept_prob": 1.0}],
}


@pytest.mark.parametrize("kind", BAD)
def test_options_out_of_range_are_named(kind: type) -> None:
    for options in BAD[kind]:
        with pytest.raises(FsdError, match=next(iter(options))):
            kind(VOCAB, **options)


def logs(*chances: float) -> list[float]:
    return [math.log(chance) for chance in chances]


def test_two_tokens_count_before_one() -> None:
    memory = RecycleTable(width=3, max_contexts=100)
    assert memory.candidates([1, 2]) == []
    memory.remember([1, 2], [5, 6, 7], logs(0.9, 0.08, 0.001))  # the last is too unlikely to be kept
    memory.remember([3, 2], [6, 8], logs(0.5, 0.5))
    assert [token for token, _, _ in memory.candidates([1, 2])] == [5, 6, 8]
    assert [kind for _, kind, _ in memory.candidates([1, 2])] == [0, 0, 2]
    assert [(token, kind) for token, kind, _ in memory.candidates([4, 2])] == [(6, 1), (8, 1)]
    assert memory.candidates([2]) == memory.candidates([4, 2])
    assert memory.candidates([5]) == []


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(TEXTS, st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 3), max_size=6))
def test_an_index_knows_what_a_scan_of_all_texts_finds(text: list[int], turns: list[int], drafts: list[int]) -> None:
    """A context's longest matches, and whether an n-gram was said: of one text, and of three that grow in turns."""
    for speakers in ([0] * len(text), [*turns, *[0] * len(text)]):
        first = TextMatcher()
        matchers = [first, *(TextMatcher(index=first.index) for _ in range(2))]
        for speaker, token in zip(speakers, text):
            matchers[speaker].append(token)
        context = [*first.tokens, *drafts]
        places = [(matcher.tokens, at) for matcher in matchers for at in range(1, len(matcher.tokens))]
        matches = Counter((match_size(tokens, at, context), tokens[at]) for tokens, at in places)
        matches = Counter({match: count for match, count in matches.items() if match[0]})
        found = Counter((size, tokens[at]) for size, _, tokens, at in first.at(context))
        assert found <= matches and found.total() == min(matches.total(), MAX_OCCURRENCES)
        if left := matches - found:
            assert min(min(found)[0], INDEX_NGRAM) >= min(max(left)[0], INDEX_NGRAM)
        for n in range(1, min(len(context), 6) + 1):
            assert first.has(context[-n:]) == any(size >= n for size, _ in matches)


def test_estimates_follow_the_text() -> None:
    """Whatever the votes: a kind of candidate is worth what its last trials were."""

    def chances(texts: list[list[int]]) -> dict[int, float]:
        """What follows the last text, if every text was drafted for token by token."""
        known: dict[tuple[int, int], HitRate] = {}
        for text in texts:
            matcher = TextMatcher(hit_rates=known)
            for token in text:
                matcher.append(token)
                matcher.look_up()
        return dict(matcher.options(matcher.occurrences))

    assert chances([[5, 6, 7, 8, 9] * 40])[5] > 0.95
    # 1 is always followed by something new: matches of one token are never right
    fresh = [token for new in range(2, 140) for token in (1, new)]
    assert max(chances([[*fresh, 1]]).values()) < 0.02 < max(chances([[1, 2, 1]]).values())
    # after 1, 2 comes what came the time before the last: the candidate with fewer votes is right
    turns = [token for turn in range(140) for token in (turn + 100, 1, 2 + turn % 2)]
    last = chances([[*turns, 999, 1]])
    assert set(last) == {2, 3} and min(last.values()) > 0.3


def test_a_period_is_continued_beyond_the_end_of_the_text() -> None:
    _, tree = drafted(LookupDrafter(VOCAB, depth=10), [[1, 2, 3] * 2])
    assert tree.max_depth == 10
    path = [0]
    while len(path) <= 10:  # the most likely child each time
        path.append(int((tree.parents[0] == path[-1]).nonzero()[1 if path == [0] else 0]))
    assert tree.tokens[0, path].tolist() == [3, *[1, 2, 3] * 3, 1]


def test_other_continuations_are_branches() -> None:
    # "1 2" went on with 3, then with 4; "2" alone with 5 as well
    _, tree = drafted(LookupDrafter(VOCAB, nodes=32), [[1, 2, 3, 8, 1, 2, 4, 9, 2, 5, 1, 2]])
    children = tree.tokens[0, 1:][tree.parents[0, 1:] == 0].tolist()
    assert children == [4, 3, 5]


BROKEN: list[tuple[Any, str]] = [
    ([(3, 0.4), (3, 0.2)], "offers one token twice"), ([(3, 1.2)], "probability 1.2"), ([(3, 0.0)], "probability 0.0"),
    (None, "returns None, not a list of pairs"), ([3], "not a list of pairs"), ([(3, "x")], "not a list of pairs"),
    ([(9, 0.4)], "offers the token 9"), ([(-1, 0.4)], "offers the token -1"), ([(2.5, 0.4)], "offers the token 2.5"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BROKEN)
def test_a_table_that_breaks_its_promise_is_refused(options: Any, message: str) -> None:
    with pytest.raises(FsdError, match=message):
        best_first(Pairs({5: options}), 5, 5, nodes=4, depth=2, min_accept_prob=0.1, vocab_size=9)


@pytest.mark.parametrize("states", [None, [], [3]])
def test_states_are_a_pair_for_each_text(states: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = LookupDrafter(VOCAB)
    session = drafter.start(torch.tensor([1]), DraftRequest(1, 64))
    monkeypatch.setattr(session, "states", lambda: states)
    with pytest.raises(FsdError, match=r"drafter 'lookup': states\(\) returns .*, not a list with a pair"):
        session.draft(torch.tensor([1]))
