"""A GPU's numerics: logits that are off by a step of bf16, by another one in each call. What must survive does."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer.drafters import Drafter, EagleDrafter, GraftedDrafter, LMDrafter, LookupDrafter, TreeShape
from fsd_infer.engine import Request, decode
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.rules import Verification, parse_rule
from fsd_infer.targets.target import Target
from tests.families import VOCAB, tiny_model, tiny_prompts
from tests.rules_toy import LENGTH, Enumeration, Toy, V, plain_rule, simulate
from tests.test_rules_laws import ALARM, ROWS, RULES, p_value

STEP = 2.0**-8  # of bf16, relative


def noisy(values: Tensor) -> Tensor:
    """The values, each off by up to a step."""
    return values * (1 + STEP * (2 * torch.rand_like(values, dtype=torch.float32) - 1)).to(values.dtype)


@dataclass(frozen=True)
class NoisyToy(Toy):
    def round(self, *args: Any, **options: Any) -> Verification:
        found = super().round(*args, **options)
        tree = replace(found.tree, q_logits=noisy(found.tree.q_logits))
        logits = noisy(found.logits)
        return replace(found, tree=tree, logits=logits, scores=self.scores(logits))


@pytest.mark.parametrize("toy", [Toy.make(1), Toy.make(2, processed=True), Toy.make(5, sampled=True)], ids=str)
@pytest.mark.parametrize("spec", RULES)
def test_laws_are_those_without_noise(spec: str, toy: Toy) -> None:
    """To first order noise without bias leaves the mean law alone, and the second is below what the test resolves."""
    rule = plain_rule(spec)
    got = simulate(NoisyToy(**vars(toy)), rule, ROWS, seed=12)
    assert p_value(got.codes, Enumeration(toy, **RULES[spec]).sequence_law()) > ALARM
    assert got.spent.max() <= (math.inf if rule.budget is None else rule.budget + 1e-6)


@pytest.mark.parametrize("toy", [Toy.make(1), replace(Toy.make(5), parents=(0, 0, 1))], ids=["tree", "chain"])
@pytest.mark.parametrize("spec", RULES)
def test_ties_at_temperature_0_go_either_way(spec: str, toy: Toy) -> None:
    """Two tokens of each context are equally likely, and noise decides between them, for target and drafter apart."""
    best = toy.p.topk(2).indices
    tied = toy.p.scatter(1, best, toy.p.gather(1, best[:, :1]).expand(-1, 2))
    toy, rule = NoisyToy(**{**vars(toy), "p": tied, "q": tied}), parse_rule(spec)
    generator = torch.Generator().manual_seed(3)
    contexts = torch.arange(V + 1).repeat(40)
    round = toy.round(contexts, generator, greedy=True)
    verdict = rule(replace(round, budget_left=torch.full(contexts.shape, 0.3, dtype=torch.float64)))
    assert verdict.tokens.shape[0] == len(contexts)
    assert bool((verdict.spent >= 0).all()) and bool((verdict.spent.sum(1) <= 0.3 + 1e-6).all())
    first = verdict.tokens[:, :1]
    assert bool((best[contexts] == first).any(1).all())  # one of the two, whatever the rule
    assert LENGTH >= verdict.accepted.max() > 0
    assert len({tuple(row) for row in verdict.tokens[contexts == 0].tolist()}) > 1


class NoisyTarget(Target):
    """In bf16, where a hundred logits of a toy tie often."""

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        logits, features = super().forward(*args, **options)
        return noisy(logits).bfloat16(), noisy(features)


def drafter(kind: str, target: Target) -> Drafter:
    if kind == "lm":
        return LMDrafter(NoisyTarget(tiny_model("llama", seed=0)), target, depth=3)
    head = EagleHead(EagleConfig.for_target(target, draft_vocab_size=40))
    return GraftedDrafter(EagleDrafter(head, target, TreeShape(depth=3, width=3, nodes=9)), LookupDrafter(VOCAB))


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
    prompts, new = tiny_prompts((5, 9, 7)), 12
    outcome = decode(target, drafter(kind, target), parse_rule(rule), Request(prompts, new, greedy))
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
