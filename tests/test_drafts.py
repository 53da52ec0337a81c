"""The regret of a drafter's first choices, as a request reports it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsd_infer import FuzzyDecoder, LMDrafter, Target, TreeShape
from fsd_infer.rules import Exact, Rule, Tilted
from tests.families import tiny_model


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
