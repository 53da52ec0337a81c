"""The loss of the expected accepted length against plain formulas and against simulated rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer.errors import DataError
from fsd_train.losses import DraftBatch, build_loss
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
    rows = chain_rows(batch.positions, batch.weights)
    assert [list(enumerate(column)) for column in rows.T.tolist()] == plain_chains(batch)
    # 7 positions hold 5 chains of 3; the hole at step 1 in row 11 breaks the chain that begins in row 10
    assert rows[0].tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 11]
    shuffled = torch.randperm(N)
    other = chain_rows(batch.positions[shuffled], batch.weights[:, shuffled])
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
    ],
    ids=str,
)
def test_fsd_loss(args: dict[str, Any], objective: str) -> None:
    batch, estimates = make_batch()
    p, q = distributions(batch)
    p = p.expand_as(q)
    t = args.get("temperature", 1.0)
    hot_p, hot_q = (x.pow(1 / t) / x.pow(1 / t).sum(-1, keepdim=True) for x in (p, q))
    if "width" in args:
        hot_q = q  # a tree's children come from the raw q
        exact = (hot_p * (1 - (1 - hot_q) ** args["width"])).sum(-1)
    else:
        exact = overlap(hot_p, hot_q)
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
        survival = exact if "rule" in args else exact + (1 - exact) * gate
        lengths = plain_lengths(batch, survival)
        if "price" in args:
            cost = t * (-exact.log() if "width" in args else plain_kl(hot_q, hot_p))
            spent = plain_spending(batch, survival, gate * cost).sum() / (1 + lengths).sum()
            expected = expected + args["price"] * spent / len(thresholds)
        expected = expected + {
            "log": -(lengths / S).log().mean(),
            "log_mean": -(lengths.mean() / S).log(),
            "linear": (S - lengths).mean(),
        }[objective] / len(thresholds)
    expected = expected + args.get("anchor", 0.1) * mean(plain_kl(hot_p, hot_q), batch.weights)
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


def exact_passes(p: Tensor, q: Tensor, draws: int, width: int | None, generator: torch.Generator) -> Tensor:
    """[draws] bool: drafts are drawn from q at one context and put to the exact rule's own test."""
    drafts = torch.multinomial(q, draws * (width or 1), replacement=True, generator=generator).view(draws, -1)
    if width is None:
        uniform = torch.rand(draws, generator=generator, dtype=torch.float64)
        return uniform * q[drafts[:, 0]] < p[drafts[:, 0]]
    wanted = torch.multinomial(p, draws, replacement=True, generator=generator)
    return (drafts == wanted[:, None]).any(1)


def simulated_length(
    p: Tensor, q: Tensor, draws: int, threshold: float | None, width: int | None, generator: torch.Generator
) -> tuple[float, float]:
    """Mean number of accepted drafts and its standard error; every draft is drawn and put to the rule's own test.

    p, q: [S, V], the distributions at the chain's contexts. threshold: of a js gate, or None for the exact rule.
    """
    alive = torch.ones(draws, dtype=torch.bool)
    lengths = torch.zeros(draws, dtype=torch.float64)
    for p_k, q_k in zip(p, q, strict=True):
        passes = exact_passes(p_k, q_k, draws, width, generator)
        if threshold is not None and float(plain_js(p_k, q_k)) <= threshold:
            passes = torch.ones_like(passes)
        alive = alive & passes
        lengths += alive
    return float(lengths.mean()), float(lengths.std() / math.sqrt(draws))


@pytest.mark.parametrize("width", [None, 1, 3])
@pytest.mark.parametrize("fuzzy", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_expected_length_is_the_simulated_one(seed: int, fuzzy: bool, width: int | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, _ = make_batch(spread=0.8, seed=seed)
    with torch.no_grad():
        p, q = distributions(batch)
        chain = chain_rows(batch.positions, batch.weights)[:, 3]
        p_chain = p[0, chain]
        q_chain = q[torch.arange(S), chain]
        distances = plain_js(p_chain, q_chain).sort().values
        threshold = float(distances[:2].mean())  # opens at one of the three steps
        # only this chain is whole
        weights = torch.zeros(S, N)
        weights[torch.arange(S), chain] = 1.0
        args = {"rule": "fuzzy" if fuzzy else "exact", "threshold": threshold, "softness": 1e-6, "width": width}
        parts = build_loss("fsd", args)(replace(batch, weights=weights)).parts
    value = next(float(part) for key, part in parts.items() if key.startswith("soft_tau")) - 1
    simulated, error = simulated_length(p_chain, q_chain, 40_000, threshold if fuzzy else None, width, generator)
    assert abs(value - simulated) < 4.5 * error
    assert error < 0.01 and 0.05 < value < S


@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_a_distribution_of_thresholds_is_the_simulated_mean(weights: list[float] | None) -> None:
    """Rounds that draw their threshold first: the linear objective is S less the mean accepted length."""
    generator = torch.Generator().manual_seed(5)
    batch, _ = make_batch(spread=0.8, seed=2)
    with torch.no_grad():
        p, q = distributions(batch)
        chain = chain_rows(batch.positions, batch.weights)[:, 3]
        p_chain, q_chain = p[0, chain], q[torch.arange(S), chain]
        low, middle, high = plain_js(p_chain, q_chain).sort().values.tolist()
        thresholds = [(low + middle) / 2, (middle + high) / 2]  # one and two of the three gates are open
        alone = torch.zeros(S, N)
        alone[torch.arange(S), chain] = 1.0
        args = {
            "threshold": thresholds,
            "threshold_weights": weights,
            "objective": "linear",
            "softness": 1e-6,
            "anchor": 0.0,
        }
        loss = float(build_loss("fsd", args)(replace(batch, weights=alone)).loss)
    shares = [0.5, 0.5] if weights is None else [0.25, 0.75]
    simulated = spread = 0.0
    for threshold, share in zip(thresholds, shares):
        length, error = simulated_length(p_chain, q_chain, 40_000, threshold, None, generator)
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
def test_what_open_gates_spend_is_what_rounds_spend(width: int | None) -> None:
    """Rounds are played with every draft drawn; each arrival at an open gate is charged KL(its law || p)."""
    generator = torch.Generator().manual_seed(3)
    batch, _ = make_batch(spread=0.8, seed=4)
    with torch.no_grad():
        p, q = distributions(batch)
        chain = chain_rows(batch.positions, batch.weights)[:, 3]
        p_chain, q_chain = p[0, chain], q[torch.arange(S), chain]
        threshold = float(plain_js(p_chain, q_chain).sort().values[1:].mean())  # opens at two of the three steps
        alone = torch.zeros(S, N)
        alone[torch.arange(S), chain] = 1.0
        args = {"threshold": threshold, "softness": 1e-6, "width": width, "price": 1.0}
        value = float(build_loss("fsd", args)(replace(batch, weights=alone)).parts[f"spent_{threshold:g}"])
    draws = 40_000
    alive = torch.ones(draws, dtype=torch.bool)
    spent, tokens = torch.zeros(draws, dtype=torch.float64), torch.ones(draws, dtype=torch.float64)
    for p_k, q_k in zip(p_chain, q_chain, strict=True):
        passes = exact_passes(p_k, q_k, draws, width, generator)
        # on a tree with the expected p(C), as the loss has it
        cost = (q_k * (q_k / p_k).log()).sum() if width is None else -passes.double().mean().log()
        if float(plain_js(p_k, q_k)) <= threshold:
            spent += alive * cost
            passes = torch.ones_like(passes)
        alive = alive & passes
        tokens += alive
    simulated = float(spent.mean() / tokens.mean())
    assert simulated > 0.02
    assert value == pytest.approx(simulated, rel=0.03)


def test_fsd_with_a_price_stays_finite_where_q_is_certain() -> None:
    batch, estimates = make_batch(spread=60.0)
    loss = build_loss("fsd", {"width": 4, "price": 2.0, "temperature": 0.5})(batch).loss
    (slope,) = torch.autograd.grad(loss, estimates)
    assert bool(loss.isfinite()) and bool(slope.isfinite().all())


def test_the_anchor_of_fsd_can_fade() -> None:
    batch, estimates = make_batch()
    fading = build_loss("fsd", {"anchor": {"from": 4.0, "to": 1.0, "over": 0.5}})
    for progress, weight in ((0.0, 4.0), (0.25, 2.5), (0.9, 1.0)):
        at = replace(batch, progress=progress)
        check(at, estimates, fading(at).loss, build_loss("fsd", {"anchor": weight})(at).loss)


@pytest.mark.parametrize("args", [{"price": -1.0}, {"price": math.inf}, {"anchor": -0.1}, {"anchor": {"from": 1.0}}])
def test_fsd_refuses_what_cannot_be_weighted(args: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="fsd"):
        build_loss("fsd", args)
