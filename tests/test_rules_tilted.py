"""The optimal rule: optimality, options, numbers, and the adaptive kl_coef. Its draws:
tests/test_rules_distributions.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax

from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.rules import Exact, RoundInput, Rule, RuleInputs, TokenHistory, apply_rules, parse_rule
from fsd_infer.rules.optimal import clipped_distribution
from fsd_infer.rules.texts import repeating_tokens, repeats_ngram
from fsd_infer.rules.tilted import INITIAL_KL_COEF, MIN_KL_COEF, Tilted, sampling_cost
from fsd_infer.trees.tree import DraftTree
from tests.output_probs import output_probs
from tests.tree_rounds import INF, SPECS, any_round, assert_same, chain_round, tree_round, verdict_of


def plain(kl_coef: float, **options: Any) -> Tilted:
    """The rule without min_p and exact n-grams unless they are given."""
    return Tilted(kl_coef, **{"min_p": 0.0, "exact_ngram_size": 0, **options})


def distribution_table(rule: Rule, round: RoundInput) -> np.ndarray:
    """[B, N, V] what the rule emits from at every node."""
    inputs = RuleInputs(round)
    return output_probs(rule.restricted_output(inputs), inputs).numpy()


def children_of(tree: DraftTree, row: int, node: int) -> dict[int, int]:
    """Token -> child."""
    parents = tree.parents[row].tolist()
    return {int(tree.tokens[row, c]): c for c in range(1, len(parents)) if parents[c] == node}


def outcome(round: RoundInput, row: int, distribution: np.ndarray, node: int = 0) -> tuple[float, float]:
    """(expected accepted drafts, KL(distribution || p)) of a round that is at ``node`` under a distribution [N, V]."""
    below = children_of(round.tree, row, node)
    if not below:
        return 0.0, 0.0
    p = softmax(round.scores[row, node].double().numpy())
    drafts, nats = 0.0, float(rel_entr(distribution[node], p).sum())
    for token, child in below.items():
        further, cost = outcome(round, row, distribution, child)
        drafts += distribution[node, token] * (1 + further)
        nats += distribution[node, token] * cost if distribution[node, token] else 0.0
    return drafts, nats


def probabilities(round: RoundInput, row: int) -> list[list[Any]]:
    """p at each node, in mpmath's digits."""
    raised = [[mpmath.exp(mpmath.mpf(x)) for x in line] for line in round.scores[row].double().tolist()]
    return [[x / mpmath.fsum(line) for x in line] for line in raised]


def value(tree: DraftTree, row: int, p: list[list[Any]], kl_coef: Any, node: int = 0) -> Any:
    """V by the recursion that defines it."""
    below = children_of(tree, row, node)
    if not below:
        return mpmath.mpf(0)
    rest = 1 - mpmath.fsum(p[node][token] for token in below)
    worth = {token: 1 + value(tree, row, p, kl_coef, child) for token, child in below.items()}
    return kl_coef * mpmath.log(
        rest + mpmath.fsum(p[node][token] * mpmath.exp(v / kl_coef) for token, v in worth.items())
    )


@pytest.mark.parametrize("kl_coef", [0.05, 0.5, 2.0])
def test_its_distribution_reaches_the_value_that_the_recursion_promises(kl_coef: float) -> None:
    for seed in range(4):
        round = tree_round(seed, batch=2, nodes=6, vocab=5, mask=seed % 2 == 1)
        distribution = distribution_table(plain(kl_coef), round)
        np.testing.assert_allclose(distribution.sum(-1), 1.0, atol=1e-6)
        for row in range(2):
            drafts, nats = outcome(round, row, distribution[row])
            promised = float(value(round.tree, row, probabilities(round, row), kl_coef))
            assert drafts - kl_coef * nats == pytest.approx(promised, abs=2e-5)
            for spec in SPECS:  # no rule reaches more
                drafts, nats = outcome(round, row, distribution_table(parse_rule(spec), round)[row])
                assert drafts - kl_coef * nats <= promised + 2e-5


def ways(tree: DraftTree, row: int) -> list[list[int]]:
    """Every way from the root down, to inner nodes too."""
    found = [[0]]
    for way in found:
        found += [[*way, child] for child in children_of(tree, row, way[-1]).values()]
    return found


def _may_take(round: RoundInput, known: torch.Tensor, row: int, node: int, child: int) -> bool:
    """A known draft is taken only where it is the target's choice, and then nothing else is."""
    scores = round.scores[row, node]
    choice = children_of(round.tree, row, node).get(int(scores.argmax()))
    return child == choice if choice is not None and known[row, choice] else not known[row, child]


@pytest.mark.parametrize(
    "options",
    [f":min_p={x}:exact_ngram_size={n}" for x, n in ((0, 0), (0, 2), (0.2, 0))]
    + [":exact_ngram_size=2:deviation_cost=0.6"],
)
@pytest.mark.parametrize("kl_coef", [0.1, 0.5, 1.0, 2.0])
def test_at_temperature_0_it_takes_the_best_way_down(kl_coef: float, options: str) -> None:
    rule = parse_rule(f"tilted:{kl_coef}{options}")
    lossy = 0
    for seed in range(12):
        round = tree_round(seed, greedy=True, mask=seed % 3 == 0)
        answers = [[int(t) % 12 for t in range(row, row + 9)] + [int(round.tree.tokens[row, 0])] for row in range(6)]
        verdict = verdict_of(rule, replace(round, texts=TokenHistory(answers)))
        again = (
            repeats_ngram(TokenHistory(answers), round.tree, rule.exact_ngram_size)
            if rule.exact_ngram_size
            else torch.zeros(6, 9).bool()
        )
        for row in range(6):
            scores = round.scores[row]
            worth = []
            for way in ways(round.tree, row):
                loss = [float(scores[a].max() - scores[a, round.tree.tokens[row, b]]) for a, b in zip(way, way[1:])]
                if any(math.exp(-x) < rule.effective_min_p for x in loss) or INF in loss:
                    continue
                if not all(_may_take(round, again, row, a, b) for a, b in zip(way, way[1:])):
                    continue
                wins = sum(not again[row, node] for node in way[1:])
                other = sum(int(scores[a].argmax()) != round.tree.tokens[row, b] for a, b in zip(way, way[1:]))
                worth.append(
                    (
                        wins - kl_coef * sum(loss) - rule.effective_deviation_cost * other,
                        [round.tree.tokens[row, node] for node in way[1:]],
                        loss,
                    )
                )
            best = max(worth, key=lambda one: one[0])
            taken = int(verdict.accepted[row])
            # where the best way ends, the target's own choice follows, which may be a draft that wins nothing
            assert verdict.tokens[row, : len(best[1])].tolist() == best[1]
            assert verdict.spent[row, : len(best[1])].tolist() == pytest.approx(best[2], abs=1e-5)
            assert verdict.spent[row, len(best[1]) : taken + 1].sum() == 0
            lossy += sum(best[2]) > 0
    assert lossy > 5


@pytest.mark.parametrize("kl_coef", [1e-3, 0.1, 1.0, 1e4])
def test_the_clipped_distribution_is_one_whatever_the_numbers(kl_coef: float) -> None:
    torch.manual_seed(3)
    log_p = (torch.randn(64, 300) * torch.linspace(0.1, 30, 64)[:, None]).log_softmax(-1)
    log_q = (log_p + torch.randn(64, 300) * 3).masked_fill(torch.rand(64, 300) < 0.3, -INF).log_softmax(-1)
    log_p = log_p.masked_fill((torch.rand(64, 300) < 0.3) & (log_p < log_p.amax(-1, True)), -INF).log_softmax(-1)
    gain = (torch.rand(64, 300) < 0.7).float() / kl_coef
    log_r = clipped_distribution(log_p, log_q, gain)
    assert not log_r.isnan().any() and (log_r.exp().sum(-1) - 1).abs().max() < 1e-5
    assert (log_r == -INF)[log_p == -INF].all()
    # by its definition: the token's ratio to p lies between those of the clip, and inside it r = q
    ratio = (log_r.double() - log_p.double()).masked_fill(log_p == -INF, 0.0)
    low = torch.where((log_r < log_q - 1e-4) & (log_p > -INF), ratio - gain, -INF).amax(-1)  # above: gain + ln 1/Z
    high = torch.where((log_r > log_q + 1e-4) & (log_p > -INF), ratio, INF).amin(-1)  # below: ln 1/Z
    both = low.isfinite() & high.isfinite()
    if kl_coef >= 0.1:
        assert both.any()
        torch.testing.assert_close(low[both], high[both], atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("kl_coef", ["0.001", "0.1", "1", "1000"])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_numbers_hold_from_a_kl_coef_of_a_thousandth(kl_coef: str, scale: float) -> None:
    """Against 60 digits; p(C) and e^(1/kl_coef) leave the range of floats here."""
    mpmath.mp.dps = 60
    for seed in range(4):
        base = tree_round(seed, nodes=12, mask=seed % 2 == 1)
        round = replace(base, scores=base.scores * scale)
        logit_bias = plain(float(kl_coef)).output(RuleInputs(round)).logit_bias
        assert logit_bias is not None and not logit_bias.isnan().any()
        exact = mpmath.mpf(kl_coef)
        for row in range(2):
            p = probabilities(round, row)
            for token, child in children_of(round.tree, row, 0).items():
                if p[0][token] > 0:
                    wanted = float((1 + value(round.tree, row, p, exact, child)) / exact)
                    assert float(logit_bias[row, child]) == pytest.approx(wanted, rel=2e-5, abs=1e-4 * scale)
        verdict = plain(float(kl_coef))(round)
        assert verdict.spent.isfinite().all() and (verdict.spent >= 0).all()


def naive_repeats(text: list[int], n: int) -> bool:
    """Is the n-gram that a text ends with in it before."""
    return text[-n:] in [text[i : i + n] for i in range(len(text) - n)]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_repeated_n_grams_are_found_in_answer_and_path(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    answers: list[list[int]] = [[], [1], [1, 2], [0, 1] * 6, [], []]
    grown = TokenHistory(answers, width=200)
    found = 0
    for seed in range(12):
        round = tree_round(seed, vocab=4, nodes=9)
        counts, tokens = torch.zeros(6, dtype=torch.long), torch.full((6, 4), 3)
        for row, answer in enumerate(answers):
            new = torch.randint(0, 3, (1 + row * seed % 3,), generator=generator).tolist()
            answer += new
            counts[row] = len(new)
            tokens[row, : len(new)] = torch.tensor(new)
            round.tree.tokens[row, 0] = answer[-1]
        grown.append(tokens, counts)
        mask = repeats_ngram(grown, round.tree, n)
        rows, nodes = torch.arange(6).repeat_interleave(9), torch.arange(9).repeat(6)
        following = repeating_tokens(rows, nodes, grown, round.tree, n, 4).view(6, 9, 4)
        for row, answer in enumerate(answers):
            for way in ways(round.tree, row):
                text = answer + [int(round.tree.tokens[row, node]) for node in way[1:]]
                if len(way) > 1:
                    assert bool(mask[row, way[-1]]) == naive_repeats(text, n)
                    found += int(mask[row, way[-1]])
                for token in range(4):
                    assert bool(following[row, way[-1], token]) == naive_repeats([*text, token], n)
            assert not mask[row, 0]
    assert found > 20
    grown.keep_rows(torch.tensor([3, 0]))
    assert [row[row >= 0].tolist() for row in grown.tokens] == [answers[3], answers[0]]


@pytest.mark.parametrize(("spec", "greedy"), [
    *product(["tilted:0.1", "fuzzy:js:inf", "random:1", "lenient:0.1", "typical:0:0", "cactus:5"], [False, True]),
    *(("fly:1:0", True), ("asd:inf:9:budget=inf", True), ("mars:inf", False), ("mars:inf", True)),
])  # fmt: skip
def test_a_draft_that_is_no_novelty_is_emitted_only_where_exact_decoding_emits_it(spec: str, greedy: bool) -> None:
    """One child per node, each of which completes a known n-gram, of the prompt or of the answer: the distribution is
    p.
    """
    round = chain_round(0, length=3, vocab=6, greedy=greedy)
    round = replace(round, tree=replace(round.tree, q_scores=None))
    roots = round.tree.tokens[:, :1].tolist()
    copied = TokenHistory(roots, [[*tokens, *tokens] for tokens in round.tree.tokens.tolist()])
    repeated = TokenHistory([[*tokens, *tokens, *root] for tokens, root in zip(round.tree.tokens.tolist(), roots)])
    with pytest.raises(FsdError, match="reads prompt and answer; pass texts"):
        parse_rule(f"{spec}:exact_ngram_size=2")(replace(round, texts=None))
    for texts in (copied, repeated):
        found = parse_rule(f"{spec}:exact_ngram_size=2")(replace(round, texts=texts))
        assert_same(found, Exact()(round))
        assert parse_rule(f"{spec}:exact_ngram_size=0")(round).accepted.sum() > found.accepted.sum()


@pytest.mark.parametrize("t", [0.1, 0.3, 1.0])
def test_a_sample_costs_what_enumeration_says(t: float) -> None:
    """Over a vocabulary that is looked at as a whole; forbidden tokens are never sampled."""
    scores = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)) * 3
    scores[0, 0, 3:] = -INF
    scores[1, 1, 1:] = -INF
    p = scores.softmax(-1)
    warm = (scores / t).softmax(-1)
    gap = (scores.amax(-1, keepdim=True) - scores).masked_fill(warm == 0, 0.0)
    torch.testing.assert_close(sampling_cost(scores, t, greedy=True), (warm * gap).sum(-1))
    warmer = (scores / (1 + t)).softmax(-1)
    divergence = (warmer * (warmer.log() - p.log())).nan_to_num(0.0).sum(-1)
    torch.testing.assert_close(sampling_cost(scores, t, greedy=False), divergence, atol=1e-6, rtol=1e-4)
    assert sampling_cost(scores, t, True)[1, 1] == 0 == sampling_cost(scores, t, False)[1, 1]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_a_row_that_overspent_pays_its_own_fixed_price(shape: str, greedy: bool) -> None:
    """So the learned rule has the distributions of the fixed one, which are tested by enumeration."""
    learned = parse_rule("tilted:exact_ngram_size=0:match_temperature=0.5")
    spent = [-9.0, -1.5, 0.0, 0.7, 3.0, 40.0, 1.0, -1.9]
    different = 0
    for seed in range(8):
        round = any_round(shape, seed, greedy)
        kl_excess = torch.tensor(spent[: round.tree.tokens.shape[0]])
        made = apply_rules([learned] * len(kl_excess), replace(round, kl_excess=kl_excess))
        coefs = [max(INITIAL_KL_COEF + float(nats), MIN_KL_COEF) for nats in kl_excess]
        fixed = [Tilted(kl_coef, learned.effective_min_p, exact_ngram_size=0) for kl_coef in coefs]
        assert_same(made, apply_rules(fixed, round))
        different += int((made.spent != apply_rules([fixed[2]] * len(fixed), round).spent).any())
        assert made.allowed is not None and (made.allowed >= 0).all()
        assert apply_rules(fixed, round).allowed is None
    assert different > 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_spends_about_what_is_allowed(toy_decoder: FuzzyDecoder, temperature: float) -> None:
    """A round's kl_coef λ buys at most depth/λ nats, so the excess grows no faster than √(2·depth·rounds)."""
    sampling = {"do_sample": temperature > 0, "temperature": temperature or None, "top_p": None, "top_k": None}
    prompts = [[5, 6, 7, 8], [9, 3, 4]]

    def answer(rule: str) -> tuple[list[list[int]], list[float], list[int]]:
        made = toy_decoder.generate(prompts, rule, max_new_tokens=40, seed=3, eos_token_id=None, **sampling)
        return made.sequences, [row.divergence_spent for row in made.stats.rows], [
            row.target_forwards for row in made.stats.rows
        ]  # fmt: skip

    exact, _, _ = answer("exact")
    for t in (0.2, 1.0):
        sequences, spent, rounds = answer(f"tilted:match_temperature={t}:min_p=0:exact_ngram_size=0")
        for prompt, sequence, nats, count in zip(prompts, sequences, spent, rounds):
            with torch.inference_mode():
                logits = toy_decoder.target.model(torch.tensor([prompt + sequence])).logits[0, len(prompt) - 1 : -1]
            scores = logits.float() / (temperature or 1.0)
            allowed = float(sampling_cost(scores, t, temperature == 0).sum())
            depth = toy_decoder.drafter.max_depth
            assert (
                nats <= allowed + math.sqrt(INITIAL_KL_COEF**2 + 2 * depth * count * (1 + depth / 8)) - INITIAL_KL_COEF
            )
    # a sure target at next to no temperature allows nothing, and the kl_coef rises with all that is spent
    cool, warm = (sum(answer(f"tilted:match_temperature={t}:min_p=0:exact_ngram_size=0")[1]) for t in (1e-3, 3.0))
    assert cool < warm
    if not temperature:  # above 0 draws depend on trees, which are chosen for the rule
        assert answer("tilted:match_temperature=0.2:budget=0")[0] == exact
