"""N-gram lookup: the index, its estimates, the trees, and that drafts from it change no answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsd_infer.drafters import LookupDrafter
from fsd_infer.drafters.free import best_first
from fsd_infer.drafters.lookup import LONGEST_MATCH, PRIOR_CHANCES, TextIndex
from fsd_infer.rules import parse_rule
from fsd_infer.tree import DraftTree
from tests.families import VOCAB
from tests.rules_enumeration import Enumeration
from tests.rules_toy import ALARM, ROWS, TextToy, Toy, V, p_value, simulate, text_of
from tests.test_free import drafted

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def index_of(text: list[int], max_ngram: int = 4, min_ngram: int = 1, width: int = 3) -> TextIndex:
    index = TextIndex(max_ngram, min_ngram, width)
    for token in text:
        index.append(token)
    return index


def scan(text: list[int], context: list[int], max_ngram: int, min_ngram: int, width: int) -> list[tuple[int, int]]:
    """What the index should answer, by reading the whole text again."""
    found: list[tuple[int, int]] = []
    for n in range(max_ngram, min_ngram - 1, -1):
        ends = [p for p in range(n, len(text)) if len(context) >= n and text[p - n : p] == context[-n:]]
        latest = {text[p]: p for p in ends}  # of each following token the last position
        level = []
        for position in sorted(latest.values(), reverse=True)[:width]:
            if text[position] in [text[p] for _, p in found]:
                continue
            length = 0
            while (
                length < min(LONGEST_MATCH, len(context), position)
                and text[position - 1 - length] == context[-1 - length]
            ):
                length += 1
            level.append((length, position))
        found += sorted(level, key=lambda candidate: -candidate[0])
    return found[:width]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=4), st.sampled_from([(4, 1, 3), (3, 2, 2), (1, 1, 1), (8, 1, 4)]))
def test_index_knows_what_a_scan_of_the_text_finds(text: list[int], drafts: list[int], options: tuple) -> None:
    context = (text + drafts)[-LONGEST_MATCH:]
    assert index_of(text, *options).candidates(context) == scan(text, context, *options)


def test_estimates_follow_the_text() -> None:
    period = index_of([5, 6, 7, 8, 9] * 12)
    assert period.chance(0, LONGEST_MATCH).value > 0.9 > PRIOR_CHANCES[-1]
    assert period.chance(0, 2).value == pytest.approx(PRIOR_CHANCES[1], abs=0.2)
    # 1 is always followed by something new: matches of one token are never right
    fresh = index_of([token for new in range(2, 40) for token in (1, new)])
    assert fresh.chance(0, 1).value < 0.1 < PRIOR_CHANCES[0]
    # after 1 comes what came the time before the last, 2 or 3: the first candidate is wrong, the second right
    turns = index_of([token for turn in range(40) for token in (turn + 100, 1, 2 + turn % 2)], max_ngram=1)
    assert turns.chance(0, 1).value < 0.15
    assert turns.chance(1, 1).value > 0.8


def test_a_period_is_continued_beyond_the_end_of_the_text() -> None:
    _, tree = drafted(LookupDrafter(VOCAB, depth=10), [[1, 2, 3] * 4])
    assert tree.max_depth == 10
    path = [0]
    while len(path) <= 10:  # the most likely child each time
        path.append(int((tree.parents[0] == path[-1]).nonzero()[1 if path == [0] else 0]))
    assert tree.tokens[0, path].tolist() == [3, *[1, 2, 3] * 3, 1]


def test_other_continuations_are_branches() -> None:
    # "1 2" went on with 3, then with 4; "2" alone with 5 as well
    _, tree = drafted(LookupDrafter(VOCAB), [[1, 2, 3, 8, 1, 2, 4, 9, 2, 5, 1, 2]])
    children = tree.tokens[0, 1:][tree.parents[0, 1:] == 0].tolist()
    assert children == [4, 3, 5]


@dataclass(frozen=True)
class LookupToy(TextToy):
    """Drafts by lookup in a fixed prompt and what the context says was emitted."""

    prompt: tuple[int, ...] = (0, 1, 2, 3, 0, 2, 1, 3, 3, 0, 1, 0, 2, 2, 0)

    def trees(self, contexts: Tensor) -> DraftTree:
        texts = [[*self.prompt, *text_of(context)] for context in contexts.tolist()]
        rows = [best_first(index_of(text).options, text[-LONGEST_MATCH:], LONGEST_MATCH, 7, 3, 0.01) for text in texts]
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
