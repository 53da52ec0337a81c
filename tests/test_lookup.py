"""Drafts from the text at hand: the index, its estimates, the trees, and that they change no answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsd_infer.drafters import LookupDrafter
from fsd_infer.drafters.free import Chance, best_first
from fsd_infer.drafters.memory import FILED, NEAR, Recall
from fsd_infer.drafters.prefixes import match_size
from fsd_infer.rules import parse_rule
from fsd_infer.tree import DraftTree
from tests.families import VOCAB
from tests.rules_enumeration import Enumeration
from tests.rules_toy import ALARM, ROWS, TextToy, Toy, V, p_value, simulate, text_of
from tests.test_free import drafted

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def recall_of(text: list[int]) -> Recall:
    recall = Recall()
    for token in text:
        recall.append(token)
    return recall


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXTS, st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 3), max_size=6))
def test_an_index_knows_what_a_scan_of_all_texts_finds(text: list[int], turns: list[int], drafts: list[int]) -> None:
    """A context's longest matches, and whether an n-gram was said: of one text, and of three that grow in turns."""
    for speakers in ([0] * len(text), [*turns, *[0] * len(text)]):
        first = Recall()
        recalls = [first, *(Recall(index=first.index) for _ in range(2))]
        for speaker, token in zip(speakers, text):
            recalls[speaker].append(token)
        context = [*first.tokens, *drafts]
        places = [(recall.tokens, at) for recall in recalls for at in range(1, len(recall.tokens))]
        matches = Counter((match_size(tokens, at, context), tokens[at]) for tokens, at in places)
        matches = Counter({match: count for match, count in matches.items() if match[0]})
        found = Counter((size, tokens[at]) for size, _, tokens, at in first.at(context))
        assert found <= matches and found.total() == min(matches.total(), NEAR)
        if left := matches - found:
            assert min(min(found)[0], FILED) >= min(max(left)[0], FILED)
        for n in range(1, min(len(context), 6) + 1):
            assert first.has(context[-n:]) == any(size >= n for size, _ in matches)


def test_estimates_follow_the_text() -> None:
    """Whatever the votes: a kind of candidate is worth what its last trials were."""

    def chances(texts: list[list[int]]) -> dict[int, float]:
        """What follows the last text, if every text was drafted for token by token."""
        known: dict[tuple[int, int], Chance] = {}
        for text in texts:
            recall = Recall(chances=known)
            for token in text:
                recall.append(token)
                recall.look()
        return dict(recall.options(recall.here))

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


@dataclass(frozen=True)
class LookupToy(TextToy):
    """Drafts from a fixed prompt and what the context says was emitted."""

    prompt: tuple[int, ...] = (0, 1, 2, 3, 0, 2, 1, 3, 3, 0, 1, 0, 2, 2, 0)

    def trees(self, contexts: Tensor) -> DraftTree:
        texts = [[*self.prompt, *text_of(context)] for context in contexts.tolist()]
        recalls = [recall_of(text) for text in texts]
        rows = [best_first(recall, recall.look(), text[-1], 7, 3, 0.01) for recall, text in zip(recalls, texts)]
        return DraftTree.of_lists(rows, V, contexts.device)


@pytest.mark.parametrize("spec", ["exact", "fuzzy:js:inf", "fuzzy-strict:js:inf", "random:1.0", "draft-only"])
@pytest.mark.parametrize("processed", [False, True])
def test_every_rules_law_is_the_targets(spec: str, processed: bool) -> None:
    plain = Toy.make(21, processed=processed)
    toy = LookupToy(plain.p, plain.q, processed=processed)
    got = simulate(toy, parse_rule(spec), ROWS // 4, seed=5)
    assert p_value(got.codes, Enumeration(toy, "exact").target_law()) > ALARM
    assert got.spent.sum() == 0
    assert got.gates.sum() == 0
