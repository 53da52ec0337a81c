"""A GPU's numerics: logits that are off by a step of bf16, by another one in each call. What must survive does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer.drafters import GraftedDrafter, LMDrafter, LookupDrafter, TreeShape
from fsd_infer.engine import Request, decode
from fsd_infer.rules import parse_rule
from fsd_infer.targets.target import Target
from tests.families import VOCAB, tiny_head, tiny_model, tiny_prompts

STEP = 2.0**-8  # of bf16, relative


def noisy(values: Tensor) -> Tensor:
    """The values, each off by up to a step."""
    return values * (1 + STEP * (2 * torch.rand_like(values, dtype=torch.float32) - 1)).to(values.dtype)


class NoisyTarget(Target):
    """In bf16, where a hundred logits of a toy tie often."""

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        logits, features = super().forward(*args, **options)
        return noisy(logits).bfloat16(), noisy(features)


LOSSY = [
    *("fuzzy:js:0.3", "fuzzy-strict:tv:0.3", "tilted:1", "draft-only", "random:0.5", "cactus:0.3", "cascade-token:0.5"),
    *("ensemble:0.5", "lenient:0.5", "relaxed", "threshold:0.3", "typical"),
]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kind", ["lm", "graft"])
@pytest.mark.parametrize("rule", ["exact", *(f"{rule}:budget=0.5" for rule in LOSSY)])
@pytest.mark.filterwarnings("ignore:lm samples its drafts")
def test_every_row_gets_its_answer_within_its_budget(rule: str, kind: str, greedy: bool) -> None:
    target = NoisyTarget(tiny_model("llama"))
    if kind == "lm":
        drafter: Any = LMDrafter(NoisyTarget(tiny_model("llama")), target, TreeShape.chain(3))
    else:
        drafter = GraftedDrafter(tiny_head(target, draft_vocab_size=40), LookupDrafter(VOCAB))
    prompts, new = tiny_prompts((5, 9, 7)), 12
    outcome = decode(target, drafter, parse_rule(rule), Request(prompts, new, greedy))
    assert [len(answer) for answer in outcome.sequences] == [new] * len(prompts)
    for record, row in zip(outcome.records, outcome.stats.rows, strict=True):
        assert len(record.spent) == len(record.sources) == len(record.gates) == new
        assert min(record.spent) >= 0 and sum(record.spent) <= (0.5 if "budget" in rule else 0) + 1e-6
        assert 1 <= row.target_forwards < new
    if rule == "exact" and greedy:
        for prompt, answer in zip(prompts, outcome.sequences, strict=True):
            text = torch.tensor([prompt + answer])
            logits = target.model(input_ids=text).logits[0, len(prompt) - 1 : -1]
            emitted = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            # noise and rounding of both, at their worst
            assert bool((logits.amax(1) - emitted <= 4 * STEP * logits.abs().amax(1)).all())
