"""Token recycling: what is remembered, its estimates, the trees, and that drafts from it change no answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fsd_bench.engine import EngineMethod
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import DraftRequest, GraftedDrafter, LookupDrafter, RecycleDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.drafters.recycle import BUCKET_NATS, BUCKETS, PRIORS, Recycled
from fsd_infer.errors import ModelLoadError
from fsd_infer.rules import parse_rule
from fsd_infer.tree import DraftTree
from tests.families import VOCAB, circling_model, reference, tiny_model, tiny_prompts


def logs(*chances: float) -> list[float]:
    return [math.log(chance) for chance in chances]


def test_two_tokens_count_before_one() -> None:
    memory = Recycled(width=3, most=100)
    assert memory.candidates([1, 2]) == []
    memory.remember([1, 2], [5, 6, 7], logs(0.9, 0.08, 0.001))  # the last is too unlikely to be kept
    memory.remember([3, 2], [6, 8], logs(0.5, 0.5))
    assert [token for token, _, _ in memory.candidates([1, 2])] == [5, 6, 8]
    assert [kind for _, kind, _ in memory.candidates([1, 2])] == [0, 0, 2]
    assert [(token, kind) for token, kind, _ in memory.candidates([4, 2])] == [(6, 1), (8, 1)]
    assert memory.candidates([2]) == memory.candidates([4, 2])
    assert memory.candidates([5]) == []


def test_estimates_follow_what_happens() -> None:
    memory = Recycled(width=2, most=100)
    memory.remember([1, 2], [5, 6], logs(0.6, 0.3))
    (_, kind, likely), (_, _, unlikely) = memory.candidates([1, 2])
    assert memory.chances[kind][likely].value == pytest.approx(PRIORS[0] * math.exp(-BUCKET_NATS * 1.5))
    for _ in range(400):
        memory.learn([1, 2], 6)
    assert memory.chances[kind][likely].value < 0.02 and memory.chances[kind][unlikely].value > 0.98
    for _ in range(1000):  # old evidence fades
        memory.learn([1, 2], 5)
    assert memory.chances[kind][likely].value > 0.9 and memory.chances[kind][unlikely].value < 0.1
    assert all(
        0.0 < memory.chances[kind][bucket].value < 1.0 for kind in range(len(PRIORS)) for bucket in range(BUCKETS)
    )


def test_what_was_not_seen_for_longest_is_forgotten() -> None:
    memory = Recycled(width=1, most=4)
    for last in (1, 2, 1, 3):
        memory.remember([0, last], [last + 10], [0.0])
    assert len(memory) == 4
    assert memory.candidates([0, 2]) == []
    assert memory.candidates([0, 1])[0][0] == 11 and memory.candidates([0, 3])[0][0] == 13


def observed(session: Any, text: list[int], root: int, likely: list[int], emitted_token: int) -> None:
    """One plain round: the text ends with ``root``, the target likes ``likely`` and emits ``emitted_token``."""
    logits = torch.full((1, 1, VOCAB), -9.0)
    for rank, token in enumerate(likely):
        logits[0, 0, token] = 3.0 - rank
    one = torch.zeros(1, 1, dtype=torch.long)
    session.observe(
        DraftTree.root_only(torch.tensor([root]), VOCAB), logits, one, one + emitted_token, torch.zeros(1).long()
    )
    session.extend(torch.tensor([[emitted_token]]), torch.empty(1, 1, 0), torch.tensor([1]))


def test_drafts_are_judged_before_their_answer_is_known() -> None:
    drafter = RecycleDrafter(VOCAB)
    session = drafter.start(torch.tensor([1]), DraftRequest(1, 100))
    session.extend(torch.tensor([[1, 2]]), torch.empty(1, 2, 0), torch.tensor([2]))

    def trials() -> list[float]:
        return [chance.trials for row in drafter.recycled.chances for chance in row]

    before = trials()
    observed(session, [1, 2], 2, [7, 8], 7)
    assert trials() == before, "nothing had been remembered that could be judged"
    assert [token for token, _, _ in drafter.recycled.candidates([1, 2])][:2] == [7, 8]
    session.extend(torch.tensor([[1, 2]]), torch.empty(1, 2, 0), torch.tensor([2]))
    observed(session, [1, 2], 2, [9], 7)
    assert trials() != before
    tree = session.draft(torch.tensor([7]))
    assert tree.tokens[0, 0] == 7


def test_without_keep_an_answer_depends_on_its_request_alone() -> None:
    decoder = FuzzyDecoder(Target(circling_model()), RecycleDrafter(VOCAB, keep=False))
    first, again = (decoder.generate(tiny_prompts((9, 5)), max_new_tokens=64, do_sample=False) for _ in range(2))
    assert again.sequences == first.sequences and again.stats.tau == first.stats.tau > 2


def test_names() -> None:
    target = Target(tiny_model("llama"), name="tiny")
    recycle = load_drafter("recycle", target, TreeShape(4, 2, 9))
    assert isinstance(recycle, RecycleDrafter) and recycle.nodes == 9
    both = load_drafter("lookup+recycle", target, TreeShape(4, 2, 9))
    assert isinstance(both, GraftedDrafter) and both.name == "lookup+recycle"
    assert isinstance(both.main, LookupDrafter) and isinstance(both.side, RecycleDrafter)
    for name in ("lookup+lookup", "lookup+recycle+lookup", "recycle+recycle"):
        with pytest.raises(ModelLoadError, match="twice"):
            load_drafter(name, target)
    prompts = tiny_prompts()
    expected = reference(target.model, prompts, max_new_tokens=24)
    for _ in range(2):
        assert FuzzyDecoder(target, both).generate(prompts, max_new_tokens=24, do_sample=False).sequences == expected
    assert len(both.side.recycled) > 0, "grafted, too, it sees what the target thought"
    both.forget()
    assert len(both.side.recycled) == 0


def test_a_repeated_prompt_is_not_measured_from_memory() -> None:
    target = Target(tiny_model("llama"))
    drafter = GraftedDrafter(LookupDrafter(VOCAB), RecycleDrafter(VOCAB))
    method = EngineMethod("exact", FuzzyDecoder(target, drafter), parse_rule("exact"), drafter)
    runs = [method.answer(tiny_prompts(), dict(max_new_tokens=24, do_sample=False), 0) for _ in range(2)]
    first, second = ([answer.target_forwards for answer in run.answers] for run in runs)
    assert first == second
