"""The loss of the expected accepted length against plain formulas and against simulated rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer.errors import DataError
from fsd_infer.rules import Exact, Fuzzy, FuzzyStrict, Verification
from fsd_infer.tree import DraftTree
from fsd_train.losses import DraftBatch, build_loss
from fsd_train.losses.base import Rows
from fsd_train.losses.fsd import chain_rows, expected_length, soft_gate, threshold_points
from tests.loss_toys import (
    PLAIN,
    N,
    S,
    check,
    distributions,
    make_batch,
    mean,
    overlap,
    plain_js,
    plain_kl,
)


def plain_chains(batch: DraftBatch) -> list[list[tuple[int, int]]]:
    """For each chain whose steps are all supervised, its (step, row) pairs, by search."""
    rows = {int(position): row for row, position in enumerate(batch.positions)}
    chains = []
    for start in rows:
        chain = [(step, rows.get(start + step, -1)) for step in range(S)]
        if all(row >= 0 and batch.weights[step, row] > 0 for step, row in chain):
            chains.append(chain)
    return chains


def plain_lengths(batch: DraftBatch, acceptance: Tensor) -> Tensor:
    lengths = []
    for chain in plain_chains(batch):
        product, total = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for step, row in chain:
            product = product * acceptance[step, row]
            total = total + product
        lengths.append(total)
    return torch.stack(lengths)


def plain_spending(batch: DraftBatch, acceptance: Tensor, charge: Tensor) -> Tensor:
    spent = []
    for chain in plain_chains(batch):
        arrive, total = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for step, row in chain:
            total = total + arrive * charge[step, row]
            arrive = arrive * acceptance[step, row]
        spent.append(total)
    return torch.stack(spent)


def test_chains_start_at_every_position_that_has_all_steps() -> None:
    batch, _ = make_batch()
    rows = chain_rows(batch.rows)
    assert [list(enumerate(column)) for column in rows.T.tolist()] == plain_chains(batch)
    # 7 positions hold 5 chains of 3; the hole at step 1 in row 11 breaks the chain that begins in row 10
    assert rows[0].tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 11]
    shuffled = torch.randperm(N)
    other = chain_rows(Rows(batch.positions[shuffled], batch.weights[:, shuffled] > 0))
    assert sorted(shuffled[other].T.tolist()) == sorted(rows.T.tolist())


@pytest.mark.parametrize("objective", ["log", "log_mean", "linear"])
@pytest.mark.parametrize(
    "args",
    [
        {"rule": "exact", "anchor": 0.0},
        {"rule": "exact", "anchor": 0.3},
        {"divergence": "js", "threshold": 0.2, "anchor": 0.0},
        {"divergence": "kl", "threshold": [0.0, 0.5, math.inf], "softness": 0.3},
        {"divergence": "top_k_tv:4", "threshold": [0.1, 0.4], "anchor": 0.0},
        {"width": 3, "temperature": 0.7, "anchor": 0.0},
        {"width": 2, "temperature": 0.6, "price": 1.5, "threshold": [0.0, 0.2], "anchor": 0.7},
        {"price": 0.5, "temperature": 1.4, "threshold": [0.1, math.inf], "anchor": 0.0},
        {"rule": "fuzzy-strict", "price": 0.5, "temperature": 1.4, "threshold": [0.0, 0.2, math.inf], "anchor": 0.0},
        {"rule": "fuzzy-strict", "width": 3, "price": 1.5, "temperature": 0.6, "threshold": [0.2, math.inf]},
    ],
    ids=str,
)
def test_fsd_loss(args: dict[str, Any], objective: str) -> None:
    batch, estimates = make_batch()
    p, q = distributions(batch)
    p = p.expand_as(q)
    t = args.get("temperature", 1.0)
    hot_p, hot_q = (x.pow(1 / t) / x.pow(1 / t).sum(-1, keepdim=True) for x in (p, q))
    rule = args.get("rule", "fuzzy")
    opened: Tensor | float = 1.0
    drafts = hot_q
    if "width" in args:
        drafts = q  # a tree's children come from the raw q
        drawn = 1 - (1 - drafts) ** args["width"]
        closed = (hot_p * drawn).sum(-1)
        opened = (hot_q * drawn).sum(-1) if rule == "fuzzy-strict" else 1.0
    else:
        closed = (hot_p * hot_q).sum(-1) if rule == "fuzzy-strict" else overlap(hot_p, hot_q)
    name = args.get("divergence", "js")
    if name == "top_k_tv:4":
        top = p.topk(4, dim=-1).indices
        kept = [torch.cat([x.gather(-1, top), 1 - x.gather(-1, top).sum(-1, keepdim=True)], -1) for x in (p, q)]
        distance = PLAIN["tv"](*kept)
    else:
        distance = PLAIN[name](p, q)
    thresholds = args.get("threshold", 0.3)
    thresholds = thresholds if isinstance(thresholds, list) else [thresholds]
    gates = {0.0: 0.0, math.inf: 1.0}
    expected = torch.zeros((), dtype=torch.float64)
    for threshold in thresholds:
        gate = gates.get(threshold, torch.sigmoid((threshold - distance) / args.get("softness", 0.1)))
        survival = closed if rule == "exact" else (1 - gate) * closed + gate * opened
        lengths = plain_lengths(batch, survival)
        if "price" in args:
            of_children = "width" in args and rule == "fuzzy"
            cost = t * (-closed.log() if of_children else plain_kl(hot_q, hot_p))
            spent = plain_spending(batch, survival, gate * cost).sum() / (1 + lengths).sum()
            expected = expected + args["price"] * spent / len(thresholds)
        expected = expected + {
            "log": -(lengths / S).log().mean(),
            "log_mean": -(lengths.mean() / S).log(),
            "linear": (S - lengths).mean(),
        }[objective] / len(thresholds)
    expected = expected + args.get("anchor", 0.1) * mean(plain_kl(hot_p, drafts), batch.weights)
    out = build_loss("fsd", {**args, "objective": objective})(batch)
    check(batch, estimates, out.loss, expected)


def test_fsd_of_one_step_is_lk_log() -> None:
    batch, estimates = make_batch()
    one = replace(batch, estimates=batch.estimates[:1], weights=batch.weights[:1])
    lk = build_loss("lk", {"form": "log", "level": "row"})(one).loss
    check(batch, estimates, build_loss("fsd", {"rule": "exact", "anchor": 0.0})(one).loss, lk)


def test_fsd_without_a_whole_chain_keeps_its_anchor() -> None:
    batch, estimates = make_batch()
    weights = batch.weights.clone()
    weights[2] = 0
    short = replace(batch, weights=weights)
    out = build_loss("fsd", {"anchor": 0.5})(short)
    check(short, estimates, out.loss, 0.5 * build_loss("reverse_kl")(short).loss)
    alone = build_loss("fsd", {"anchor": 0.0})(short).loss
    assert alone.item() == 0.0
    assert float(torch.autograd.grad(alone, estimates)[0].abs().max()) == 0.0


def passes(
    rule: str, is_open: bool, p: Tensor, q: Tensor, draws: int, width: int | None, generator: torch.Generator
) -> Tensor:
    """[draws] bool: drafts are drawn from q at one context and put to the rule's own test, its gate open or closed."""

    def drawn(law: Tensor, count: int = 1) -> Tensor:
        return torch.multinomial(law, draws * count, replacement=True, generator=generator).view(draws, count)

    if is_open and (rule == "fuzzy" or width is None):  # the draft of a chain is the strict rule's draw from q
        return torch.ones(draws, dtype=torch.bool)
    drafts = drawn(q, width or 1)
    if width is None and rule != "fuzzy-strict":
        uniform = torch.rand(draws, generator=generator, dtype=torch.float64)
        return uniform * q[drafts[:, 0]] < p[drafts[:, 0]]
    return (drafts == drawn(q if is_open else p)).any(1)


def simulated_length(
    p: Tensor, q: Tensor, draws: int, rule: str, threshold: float, width: int | None, generator: torch.Generator
) -> tuple[float, float]:
    """Mean number of accepted drafts and its standard error; every draft is drawn and put to the rule's own test.

    p, q: [S, V], the distributions at the chain's contexts. threshold: of a js gate, which the exact rule has not.
    """
    alive = torch.ones(draws, dtype=torch.bool)
    lengths = torch.zeros(draws, dtype=torch.float64)
    for p_k, q_k in zip(p, q, strict=True):
        is_open = rule != "exact" and float(plain_js(p_k, q_k)) <= threshold
        alive = alive & passes(rule, is_open, p_k, q_k, draws, width, generator)
        lengths += alive
    return float(lengths.mean()), float(lengths.std() / math.sqrt(draws))


def one_chain(batch: DraftBatch) -> tuple[DraftBatch, Tensor, Tensor]:
    """The batch with a single whole chain, and p and q [S, V] at its contexts."""
    p, q = distributions(batch)
    chain = chain_rows(batch.rows)[:, 3]
    weights = torch.zeros(S, N)
    weights[torch.arange(S), chain] = 1.0
    return replace(batch, weights=weights), p[0, chain].detach(), q[torch.arange(S), chain].detach()


@pytest.mark.parametrize("width", [None, 1, 3])
@pytest.mark.parametrize("rule", ["exact", "fuzzy", "fuzzy-strict"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_expected_length_is_the_simulated_one(seed: int, rule: str, width: int | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    alone, p, q = one_chain(make_batch(spread=0.8, seed=seed)[0])
    threshold = float(plain_js(p, q).sort().values[:2].mean())  # opens at one of the three steps
    args = {"rule": rule, "threshold": threshold, "softness": 1e-6, "width": width}
    parts = build_loss("fsd", args)(alone).parts
    value = next(float(part) for key, part in parts.items() if key.startswith("soft_tau")) - 1
    simulated, error = simulated_length(p, q, 40_000, rule, threshold, width, generator)
    assert abs(value - simulated) < 4.5 * error
    assert error < 0.01 and 0.05 < value < S


@pytest.mark.parametrize("rule", [Exact(), Fuzzy("js"), FuzzyStrict("js")], ids=lambda rule: rule.name)
def test_expected_length_of_a_chain_is_what_the_rule_accepts(rule: Any) -> None:
    """Chains of sampled drafts before the rule that decodes: its mean accepted length, and what it spends."""
    generator = torch.Generator().manual_seed(7)
    alone, p, q = one_chain(make_batch(spread=0.8, seed=3)[0])
    threshold = float(plain_js(p, q).sort().values[1:].mean())  # opens at two of the three steps
    args = {"rule": rule.name, "threshold": threshold, "softness": 1e-6, "price": 1.0}
    parts = build_loss("fsd", args)(alone).parts
    draws = 8_000
    drafts = torch.multinomial(q, draws, replacement=True, generator=generator).T
    tokens = torch.cat([torch.zeros(draws, 1, dtype=torch.long), drafts], 1)
    q_logits = q.log().float().expand(draws, S, -1)
    logits = torch.cat([p, p[:1]]).log().float().expand(draws, S + 1, -1)  # the last one's law does not matter
    uniforms = torch.rand(draws, S + 1, 3, generator=generator)
    round = Verification(DraftTree.chain(tokens, q_logits, q_scores=q_logits), logits, logits, False, uniforms)
    verdict = (rule if rule.name == "exact" else replace(rule, threshold=threshold))(round)
    lengths = verdict.accepted.double()
    value = next(float(part) for key, part in parts.items() if key.startswith("soft_tau")) - 1
    assert abs(value - float(lengths.mean())) < 4.5 * float(lengths.std()) / math.sqrt(draws)
    spent = float(verdict.spent.sum() / (1 + lengths).sum())
    assert parts.get(f"spent_{threshold:g}", 0.0) == pytest.approx(spent, rel=0.05)
    assert spent > 0.02 or rule.name == "exact"


@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_a_distribution_of_thresholds_is_the_simulated_mean(weights: list[float] | None) -> None:
    """Rounds that draw their threshold first: the linear objective is S less the mean accepted length."""
    generator = torch.Generator().manual_seed(5)
    alone, p, q = one_chain(make_batch(spread=0.8, seed=2)[0])
    low, middle, high = plain_js(p, q).sort().values.tolist()
    thresholds = [(low + middle) / 2, (middle + high) / 2]  # one and two of the three gates are open
    args = {
        "threshold": thresholds,
        "threshold_weights": weights,
        "objective": "linear",
        "softness": 1e-6,
        "anchor": 0.0,
    }
    loss = float(build_loss("fsd", args)(alone).loss.detach())
    shares = [0.5, 0.5] if weights is None else [0.25, 0.75]
    simulated = spread = 0.0
    for threshold, share in zip(thresholds, shares):
        length, error = simulated_length(p, q, 40_000, "fuzzy", threshold, None, generator)
        simulated += share * length
        spread += (share * error) ** 2
    assert abs((S - loss) - simulated) < 4.5 * math.sqrt(spread)


def test_a_range_of_thresholds_is_its_midpoints() -> None:
    assert threshold_points({"from": 0.1, "to": 0.5, "points": 4})[0] == pytest.approx([0.15, 0.25, 0.35, 0.45])
    assert threshold_points([0.0, math.inf], [1, 3]) == ([0.0, math.inf], [0.25, 0.75])
    assert threshold_points(0.3) == ([0.3], [1.0])
    batch, estimates = make_batch()
    loss = build_loss("fsd", {"threshold": {"from": 0.1, "to": 0.4, "points": 3}})(batch).loss
    check(batch, estimates, loss, build_loss("fsd", {"threshold": [0.15, 0.25, 0.35]})(batch).loss)


def test_soft_gate_and_length_at_their_ends() -> None:
    distance = torch.tensor([0.0, 0.1, 0.3, math.inf])
    assert soft_gate(distance, 0.0, 0.1).tolist() == [0, 0, 0, 0]
    assert soft_gate(distance, math.inf, 0.1).tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(soft_gate(distance, 0.1, 1e-4), torch.tensor([1.0, 0.5, 0.0, 0.0]))
    assert expected_length(torch.tensor([[1.0, 0.5], [1.0, 0.5], [1.0, 0.0]])).tolist() == [3.0, 0.75]


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("rule", ["fuzzy", "fuzzy-strict"])
def test_what_open_gates_spend_is_what_rounds_spend(rule: str, width: int | None) -> None:
    """Rounds are played with every draft drawn; each arrival at an open gate is charged KL(its law || p)."""
    generator = torch.Generator().manual_seed(3)
    alone, p, q = one_chain(make_batch(spread=0.8, seed=4)[0])
    threshold = float(plain_js(p, q).sort().values[1:].mean())  # opens at two of the three steps
    args = {"rule": rule, "threshold": threshold, "softness": 1e-6, "width": width, "price": 1.0}
    value = float(build_loss("fsd", args)(alone).parts[f"spent_{threshold:g}"])
    draws = 40_000
    alive = torch.ones(draws, dtype=torch.bool)
    spent, tokens = torch.zeros(draws, dtype=torch.float64), torch.ones(draws, dtype=torch.float64)
    for p_k, q_k in zip(p, q, strict=True):
        is_open = float(plain_js(p_k, q_k)) <= threshold
        if is_open:
            cost = plain_kl(q_k, p_k)
            if rule == "fuzzy" and width is not None:  # the cost of the expected p(C), as the loss has it
                cost = -passes(rule, False, p_k, q_k, draws, width, generator).double().mean().log()
            spent += alive * cost
        alive = alive & passes(rule, is_open, p_k, q_k, draws, width, generator)
        tokens += alive
    simulated = float(spent.mean() / tokens.mean())
    assert simulated > 0.02
    assert value == pytest.approx(simulated, rel=0.03)


@pytest.mark.parametrize("rule", ["fuzzy", "fuzzy-strict"])
def test_fsd_with_a_price_stays_finite_where_q_is_certain(rule: str) -> None:
    batch, estimates = make_batch(spread=60.0)
    loss = build_loss("fsd", {"rule": rule, "width": 4, "price": 2.0, "temperature": 0.5})(batch).loss
    (slope,) = torch.autograd.grad(loss, estimates)
    assert bool(loss.isfinite()) and bool(slope.isfinite().all())


@pytest.mark.parametrize("option", ["anchor", "softness", "temperature", "price"])
def test_numbers_of_fsd_can_move(option: str) -> None:
    batch, estimates = make_batch()
    moving = build_loss("fsd", {"price": 0.5, option: {"from": 4.0, "to": 1.0, "over": 0.5}})
    for progress, value in ((0.0, 4.0), (0.25, 2.5), (0.9, 1.0)):
        at = replace(batch, progress=progress)
        check(at, estimates, moving(at).loss, build_loss("fsd", {"price": 0.5, option: value})(at).loss)
    torch.testing.assert_close(moving(batch).loss, build_loss("fsd", {"price": 0.5, option: 1.0})(batch).loss)


def test_a_price_of_fsd_can_come_in_later() -> None:
    batch, estimates = make_batch()
    late = build_loss("fsd", {"price": {"from": 0.0, "to": 2.0}})
    check(batch, estimates, late(batch).loss, build_loss("fsd", {"price": 2.0})(batch).loss)
    start = replace(batch, progress=0.0)
    check(start, estimates, late(start).loss, build_loss("fsd")(start).loss)


@pytest.mark.parametrize("args", [{"price": -1.0}, {"price": math.inf}, {"anchor": -0.1}, {"anchor": {"from": 1.0}}])
def test_fsd_refuses_what_cannot_be_weighted(args: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="fsd"):
        build_loss("fsd", args)
