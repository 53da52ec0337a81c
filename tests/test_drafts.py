"""The regret of a drafter's first choices: in verdicts, in what a request reports, and pooled."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import GraftedDrafter, LMDrafter, LookupDrafter, TreeShape
from fsd_infer.engine.drafts import Drafts, drafts_text
from fsd_infer.files import jsonable
from fsd_infer.rules import Exact, Rule, Tilted, Verification
from tests.families import VOCAB, tiny_model
from tests.tree_rounds import tree_of, verdict_of

NAN = math.nan


def by_hand(greedy: bool) -> Verification:
    """Two rows. Row 0: root -> 1 (scored -2), 2 (-1); 2 -> 3. Row 1: root -> 4, and padding."""
    rows = ([0, 1, 2, 3], [0, 0, 0, 2], [0.0, -2.0, -1.0, -1.5]), ([0, 4], [0, 0], [0.0, -0.5])
    index = [[0, -1, 1, -1], [0, -1, -1, -1]]
    tree = tree_of(*rows, vocab=6, q_logits=torch.zeros(2, 2, 6), q_index=index)
    scores = torch.zeros(2, 4, 6)
    scores[0, 0, 2], scores[0, 0, 5] = 9.0, 8.75  # the first choice is the likeliest token
    scores[0, 2, 3], scores[0, 2, 5] = 2.25, 33.0
    scores[1, 0, 4], scores[1, 0, 1] = 6.5, 7.25
    scores[1, 1, 2] = 30.0
    uniforms = torch.zeros(2, 4, 3)
    uniforms[:, :, 0] = torch.tensor([[0.3, 0.5, 0.5, 0.5], [0.4, 0.5, 0.5, 0.5]])
    return Verification(tree, scores, scores, greedy, uniforms)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_verdict_has_the_regret_of_each_first_choice(greedy: bool, lazy: bool) -> None:
    round = by_hand(greedy)
    verdict = verdict_of(Tilted(1.0, 0.0, novel=0), round, lazy)
    assert verdict.path[:, :2].tolist() == [[0, 2], [0, 1]]  # a regret of 0.75 is let through, one of 30.75 is not
    assert verdict.first.tolist() == [[2, 3, -1], [1, -1, -1]]
    wanted = torch.tensor([[0.0, 30.75, NAN], [0.75, NAN, NAN]])
    torch.testing.assert_close(verdict.regret, wanted, equal_nan=True)
    exact = verdict_of(Exact(), round, lazy)  # whichever way a row goes, its root's regret is the same
    assert torch.equal(exact.regret[:, 0], wanted[:, 0])


def test_of_equal_children_the_first_is_the_first_choice() -> None:
    scores = torch.zeros(1, 3, 6)
    scores[0, 0, :3] = torch.tensor([0.0, 1.0, 3.0])
    tree = tree_of(([0, 1, 2], [0, 0, 0], [0.0, -0.5, -0.5]), vocab=6)
    for lazy in (True, False):
        verdict = verdict_of(Exact(), Verification(tree, scores, scores, True), lazy)
        assert verdict.accepted.tolist() == [1] and verdict.first.tolist() == [[1, -1]]
        assert verdict.regret[0, 0] == 2.0


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rule", [Exact(), Tilted(0.5, 0.0)])
def test_requests_report_what_the_drafter_and_the_target_say_of_the_answer(rule: Rule, sampled: bool) -> None:
    model = tiny_model("llama")
    target, small = Target(model), Target(tiny_model("llama", seed=3))
    chance: dict[str, Any] = dict(temperature=0.7, do_sample=True) if sampled else dict(do_sample=False)
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 3]]
    made = FuzzyDecoder(target, LMDrafter(small, target, TreeShape.chain(3))).generate(
        prompts, rule, max_new_tokens=12, seed=1, eos_token_id=None, **chance
    )
    for prompt, answer, row, record in zip(prompts, made.sequences, made.stats.rows, made.records, strict=True):
        found = [(*emission.first_choice, emission.depth) for emission in record.emissions if emission.first_choice]
        assert row.drafts.summary()["count"] == len(found) > 4
        if sampled:
            continue  # drafts that were drawn are not kept
        place, forwards = 0, 0
        with torch.inference_mode():
            theirs, ours = (
                m(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1) for m in (model, small.model)
            )
        regrets = []
        while (place := place + 1) < len(answer):  # a round begins after the answer's first ``place`` tokens
            forwards += 1
            for depth in range(3):
                at = len(prompt) + place - 1
                draft = int(ours[at].argmax())
                regrets.append((0, float(theirs[at].max() - theirs[at, draft]), depth + 1))
                if draft != answer[place] or (place := place + 1) == len(answer):
                    break
        assert forwards == record.target_forwards
        assert [choice[::2] for choice in found] == [choice[::2] for choice in regrets]
        torch.testing.assert_close(
            [nats for _, nats, _ in found], [nats for _, nats, _ in regrets], rtol=1e-4, atol=1e-5
        )


def test_mistakes_are_counted_by_proposer_and_depth() -> None:
    target = Target(tiny_model("llama"))
    small = LMDrafter(Target(tiny_model("llama", seed=3)), target, TreeShape.chain(3))
    drafter = GraftedDrafter(small, LookupDrafter(VOCAB), nodes=6)
    made = FuzzyDecoder(target, drafter).generate([[1, 2, 3, 1, 2, 3, 1, 2]], max_new_tokens=24, do_sample=False)
    facts = json.loads(json.dumps(jsonable(made.stats.to_dict())))
    found = facts["drafts"]
    assert found == jsonable(made.stats.drafts.summary()) and facts["rows"][0]["drafts"] == found
    for parts in (found["by_proposer"], found["by_depth"]):
        assert sum(part["count"] for part in parts.values()) == found["count"] > 0
    assert set(found["by_proposer"]) <= set(drafter.proposers)


def test_summaries_of_known_regrets() -> None:
    one, two = Drafts(), Drafts()
    for depth, regret in ((1, 0.0), (1, 0.25), (2, 0.0), (2, 1.5)):
        one.add("eagle", depth, regret)
    two.add("lookup", 3, 3.123456)
    two.add("eagle", 1, math.inf)
    pooled = Drafts.pooled([one, Drafts(two.regrets()), Drafts()])
    assert two.regrets() == {"lookup": [[], [], [3.12]], "eagle": [[math.inf]]}
    found = pooled.summary()
    assert (found["count"], found["agreement"], found["regret_median"]) == (6, 1 / 3, (1.5 + 3.12) / 2)
    assert found["below"] == {"0.5": 0.25, "1": 0.25, "2": 0.5}
    assert found["by_proposer"]["lookup"]["agreement"] == 0.0
    assert [(depth, part["count"]) for depth, part in found["by_depth"].items()] == [("1", 3), ("2", 2), ("3", 1)]
    assert found["by_depth"]["1"]["below"]["0.5"] == 0.5
    assert not Drafts() and Drafts().summary()["agreement"] is None
    assert drafts_text(Drafts().summary()) == "no drafts"
    assert drafts_text(found).startswith("33% of 6 first drafts are the target's likeliest token, the others cost 2.31")
