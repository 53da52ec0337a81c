"""Drafts from the text at hand: the automaton, its estimates, the trees, and that they change no answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsd_infer.drafters import LookupDrafter
from fsd_infer.drafters.automaton import Automaton
from fsd_infer.drafters.free import best_first
from fsd_infer.drafters.memory import LENGTHS, Recall, prior
from fsd_infer.rules import parse_rule
from fsd_infer.tree import DraftTree
from tests.families import VOCAB
from tests.rules_enumeration import Enumeration
from tests.rules_toy import ALARM, ROWS, TextToy, Toy, V, p_value, simulate, text_of
from tests.test_free import drafted

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def recall_of(text: list[int], width: int = 3) -> Recall:
    recall = Recall(Automaton(), [], {}, width)
    for token in text:
        recall.append(token)
    return recall


def scan(spoken: list[tuple[int, int]], context: list[int]) -> list[tuple[int, int, int, int]]:
    """What an automaton should say follows, by reading all texts again: ``spoken`` has (text, token) in turns."""
    texts: dict[int, list[int]] = {}
    ends: list[list[int]] = []  # of each token what its text was before
    for text, token in spoken:
        ends.append(list(texts.setdefault(text, [])))
        texts[text].append(token)
    found, seen = [], set()
    for size in range(len(context), 0, -1):
        after = [token for before, (_, token) in zip(ends, spoken) if before[-size:] == context[-size:]]
        total = sum(
            text[place : place + size] == context[-size:] for text in texts.values() for place in range(len(text))
        )
        for token in dict.fromkeys(reversed(after)):
            if token not in seen:
                seen.add(token)
                found.append((token, size, after.count(token), total))
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXTS, st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 3), max_size=6))
def test_an_automaton_knows_what_a_scan_of_all_texts_finds(
    text: list[int], turns: list[int], drafts: list[int]
) -> None:
    """Longest match, continuations, the latest first, and counts; of one text, and of three that grow in turns."""
    for speakers in ([0] * len(text), [*turns, *[0] * len(text)]):
        spoken = list(zip(speakers, text))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fsd_infer.drafters.automaton.HOPS", 1000)
            automaton, lasts = Automaton(), [0, 0, 0]
            match, context = (0, 0), []
            for speaker, token in spoken:
                if speaker == 0:  # whose text is followed while it grows
                    match = automaton.step(match, token)
                    context.append(token)
                lasts[speaker] = automaton.append(lasts[speaker], token)
        for token in drafts:
            match = automaton.step(match, token)
        context += drafts
        found, seen = [], set()
        for token, size, count, total in automaton.followers(match, 99):
            if token not in seen:
                seen.add(token)
                found.append((token, size, count, total))
        wanted = scan(spoken, context)
        assert found == wanted
        assert match[1] >= max((size for _, size, _, _ in wanted), default=0)


def test_a_token_costs_a_bounded_number_of_steps() -> None:
    """Whatever the text repeats: states and transitions are linear, and counts are kept for few suffixes."""
    for text in ([1] * 3000, [1, 2] * 1500, [*range(50)] * 60):
        automaton, last = Automaton(), 0
        for token in text:
            last = automaton.append(last, token)
        assert len(automaton.next) <= 2 * len(text) and sum(map(len, automaton.next)) <= 3 * len(text)


def test_estimates_follow_the_text() -> None:
    def chance(recall: Recall, rank: int, length: int) -> float:
        kinds = [chance for kind, chance in recall.chances.items() if kind[:3] == (0, rank, length)]
        return max(kinds, key=lambda chance: chance.trials).value

    longest = len(LENGTHS) - 1
    assert chance(recall_of([5, 6, 7, 8, 9] * 40), 0, longest) > 0.95
    # 1 is always followed by something new: matches of one token are never right
    fresh = recall_of([token for new in range(2, 140) for token in (1, new)])
    assert chance(fresh, 0, 0) < 0.05 < prior((0, 0, 0, 0))
    # after 1 comes what came the time before the last, 2 or 3: the first candidate is wrong, the second right
    turns = recall_of([token for turn in range(140) for token in (turn + 100, 1, 2 + turn % 2)])
    assert chance(turns, 0, 0) < 0.15
    assert chance(turns, 1, 0) > 0.8


def test_priors_are_chances() -> None:
    assert all(
        0.0 < prior((source, rank, length, agreement)) < 1.0
        for source in range(3)
        for rank in range(3)
        for length in range(len(LENGTHS))
        for agreement in range(4)
    )


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
