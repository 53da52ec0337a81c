"""`tilted` without a price: what it may spend, how its price follows, and what comes of it in decoding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.rules import apply_rules, parse_rule
from fsd_infer.rules.tilted import FIRST_PRICE, LEAST_PRICE, Tilted, sampling_cost
from tests.tree_rounds import any_round, assert_same

INF = math.inf


@pytest.mark.parametrize("heat", [0.1, 0.3, 1.0])
def test_a_hot_sample_costs_what_enumeration_says(heat: float) -> None:
    """Over a vocabulary that is looked at as a whole; forbidden tokens are never sampled."""
    scores = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)) * 3
    scores[0, 0, 3:] = -INF
    scores[1, 1, 1:] = -INF
    p = scores.softmax(-1)
    hot = (scores / heat).softmax(-1)
    regret = (scores.amax(-1, keepdim=True) - scores).masked_fill(hot == 0, 0.0)
    torch.testing.assert_close(sampling_cost(scores, heat, greedy=True), (hot * regret).sum(-1))
    warmer = (scores / (1 + heat)).softmax(-1)
    divergence = (warmer * (warmer.log() - p.log())).nan_to_num(0.0).sum(-1)
    torch.testing.assert_close(sampling_cost(scores, heat, greedy=False), divergence, atol=1e-6, rtol=1e-4)
    assert sampling_cost(scores, heat, True)[1, 1] == 0 == sampling_cost(scores, heat, False)[1, 1]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_a_row_that_overspent_pays_its_own_fixed_price(shape: str, greedy: bool) -> None:
    """So the learned rule has the laws of the fixed one, which are tested by enumeration."""
    learned = parse_rule("tilted:novel=0:heat=0.5")
    assert isinstance(learned, Tilted)
    spent = [-9.0, -1.5, 0.0, 0.7, 3.0, 40.0, 1.0, -1.9]
    different = 0
    for seed in range(8):
        round = any_round(shape, seed, greedy)
        overspent = torch.tensor(spent[: round.tree.tokens.shape[0]])
        made = apply_rules([learned] * len(overspent), replace(round, overspent=overspent))
        prices = [max(FIRST_PRICE + float(nats), LEAST_PRICE) for nats in overspent]
        fixed = [Tilted(price, learned.least_share, novel=0) for price in prices]
        assert_same(made, apply_rules(fixed, round))
        different += int((made.spent != apply_rules([fixed[2]] * len(fixed), round).spent).any())
        assert made.allowed is not None and (made.allowed >= 0).all()
        assert apply_rules(fixed, round).allowed is None
    assert different > 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_spends_about_what_is_allowed(toy_decoder: FuzzyDecoder, temperature: float) -> None:
    """A round's price λ buys at most depth/λ nats, so what is overspent grows no faster than √(2·depth·rounds)."""
    sampling = {"do_sample": temperature > 0, "temperature": temperature or None, "top_p": None, "top_k": None}
    prompts = [[5, 6, 7, 8], [9, 3, 4]]

    def answer(rule: str) -> tuple[list[list[int]], list[float], list[int]]:
        made = toy_decoder.generate(prompts, rule, max_new_tokens=40, seed=3, eos_token_id=None, **sampling)
        return made.sequences, [row.divergence_spent for row in made.stats.rows], [
            row.target_forwards for row in made.stats.rows
        ]  # fmt: skip

    exact, _, _ = answer("exact")
    for heat in (0.2, 1.0):
        sequences, spent, rounds = answer(f"tilted:heat={heat}:floor=0:novel=0")
        for prompt, sequence, nats, count in zip(prompts, sequences, spent, rounds):
            with torch.inference_mode():
                logits = toy_decoder.target.model(torch.tensor([prompt + sequence])).logits[0, len(prompt) - 1 : -1]
            scores = logits.float() / (temperature or 1.0)
            allowed = float(sampling_cost(scores, heat, temperature == 0).sum())
            depth = toy_decoder.drafter.max_depth
            assert nats <= allowed + math.sqrt(FIRST_PRICE**2 + 2 * depth * count * (1 + depth / 8)) - FIRST_PRICE
    # a sure target at next to no heat allows nothing, and the price rises with all that is spent
    cool, warm = (sum(answer(f"tilted:heat={heat}:floor=0:novel=0")[1]) for heat in (1e-3, 3.0))
    assert cool < warm
    if not temperature:  # above 0 draws depend on trees, which are chosen for the rule
        assert answer("tilted:heat=0.2:budget=0")[0] == exact


def test_heat_is_for_learned_prices() -> None:
    with pytest.raises(FsdError, match="heat is for a learned price"):
        parse_rule("tilted:2:heat=0.3")
    rule = parse_rule("tilted")
    assert isinstance(rule, Tilted) and rule.learned_heat == 0.3
    assert rule.least_share == pytest.approx(0.25, abs=2e-3)  # what the floor of a given price is by default
    assert Tilted(2.0).least_share == 0.25 and Tilted(2.0).learned_heat is None
    assert Tilted(heat=0.6).least_share == pytest.approx(100**-0.6)
