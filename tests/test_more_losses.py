"""Divergence, LK and expected-length losses against plain formulas, and heads trained by them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer.errors import DataError, UnknownNameError
from fsd_infer.target import Target
from fsd_train.losses import LOSSES, DraftBatch, LMHead, build_loss
from fsd_train.losses.fsd import chain_rows, expected_length, soft_gate, threshold_points
from fsd_train.losses.rows import LIVE, chunked_rows
from fsd_train.module import EagleModule
from tests.train_toys import VOCAB, save_toy_target

S, N, H, VD = 3, 14, 8, 19

# two sequences whose answers take flat positions 3..9 and 20..26
POSITIONS = torch.cat([torch.arange(3, 10), torch.arange(20, 27)])


def make_batch(spread: float = 0.6, seed: int = 0, **head: Any) -> tuple[DraftBatch, Tensor]:
    """A batch whose step s stands on the positions of its answer from the s-th on, and leaves a hole at step 1."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(N, H, generator=generator)
    estimates = (features + spread * torch.randn(S, N, H, generator=generator)).requires_grad_()
    weights = torch.ones(S, N) * torch.tensor([1.0, 0.5, 0.25])[:, None]
    for step in range(S):
        weights[step, :step] = weights[step, 7 : 7 + step] = 0
    weights[1, 11] = 0
    bias = torch.randn(VD, generator=generator) if head.pop("bias", False) else None
    lm_head = LMHead(torch.randn(VD, H, generator=generator), bias, **head)
    return DraftBatch(estimates, features, weights, torch.zeros(N, dtype=torch.long), POSITIONS, lm_head), estimates


def plain_logits(hidden: Tensor, head: LMHead) -> Tensor:
    raw = hidden @ head.weight.double().T
    raw = (raw if head.bias is None else raw + head.bias.double()) * head.scale
    return raw if head.cap is None else torch.tanh(raw / head.cap) * head.cap


def distributions(batch: DraftBatch) -> tuple[Tensor, Tensor]:
    """p [1, N, Vd] and q [S, N, Vd] in fp64, nothing chunked or fused."""
    q = plain_logits(batch.estimates.double(), batch.head).softmax(-1)
    return plain_logits(batch.features.double(), batch.head).softmax(-1)[None], q


def plain_kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a / b).log()).sum(-1)


def plain_js(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * plain_kl(p, (p + q) / 2) + 0.5 * plain_kl(q, (p + q) / 2)


PLAIN = {
    "kl": lambda p, q: plain_kl(q, p),
    "reverse_kl": plain_kl,
    "js": plain_js,
    "tv": lambda p, q: 0.5 * (p - q).abs().sum(-1),
}


def overlap(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


def mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum()


def check(batch: DraftBatch, estimates: Tensor, loss: Tensor, expected: Tensor) -> None:
    """Same value and same gradient on the estimates; there is a gradient, and none where nothing is supervised."""
    torch.testing.assert_close(loss.double(), expected.double(), atol=2e-6, rtol=1e-5)
    (grad,) = torch.autograd.grad(loss, estimates)
    (wanted,) = torch.autograd.grad(expected, estimates)
    torch.testing.assert_close(grad, wanted, atol=2e-6, rtol=2e-4)
    assert grad.abs().max() > 1e-3
    assert (grad[batch.weights == 0] == 0).all()


HEADS: list[dict[str, Any]] = [{}, {"bias": True, "scale": 0.4}, {"cap": 2.0, "scale": 1.5}]


@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_divergence_losses(name: str, options: dict[str, Any]) -> None:
    batch, estimates = make_batch(**options)
    p, q = distributions(batch)
    expected = mean(PLAIN[name](p, q), batch.weights)
    out = build_loss(name)(batch)
    check(batch, estimates, out.loss, expected)
    torch.testing.assert_close(out.parts[f"{name}_loss"], out.loss.detach())
    assert out.agreement is not None
    assert torch.equal(out.agreement, (q.argmax(-1) == p.argmax(-1)) & (batch.weights > 0))


def test_the_two_directions_differ_and_reverse_kl_has_the_gradient_of_soft_cross_entropy() -> None:
    batch, estimates = make_batch()
    losses = {name: build_loss(name)(batch).loss for name in ("kl", "reverse_kl")}
    assert abs(losses["kl"] - losses["reverse_kl"]) > 0.01
    (grad,) = torch.autograd.grad(losses["reverse_kl"], estimates)
    entropy = build_loss("eagle", {"w_feature": 0.0, "w_ce": 1.0})(batch).loss
    (other,) = torch.autograd.grad(entropy, estimates)
    torch.testing.assert_close(grad, other, atol=2e-6, rtol=2e-4)


@pytest.mark.parametrize("name", ["tv", "lk", "fsd"])
def test_feature_term_is_eagles(name: str) -> None:
    batch, estimates = make_batch()
    batch = replace(batch, feature_scale=torch.rand(H) + 0.5)
    gap = build_loss(name, {"w_feature": 0.7})(batch).loss - build_loss(name)(batch).loss
    check(batch, estimates, gap, build_loss("eagle", {"w_feature": 0.7, "w_ce": 0.0})(batch).loss)


@pytest.mark.parametrize("level", ["row", "step"])
def test_lk_log(level: str) -> None:
    batch, estimates = make_batch()
    alpha = overlap(*distributions(batch))
    if level == "step":
        alpha = ((alpha * batch.weights).sum(1, keepdim=True) / batch.weights.sum(1, keepdim=True)).expand(S, N)
    check(
        batch,
        estimates,
        build_loss("lk", {"form": "log", "level": level})(batch).loss,
        mean(-alpha.log(), batch.weights),
    )


@pytest.mark.parametrize("level", ["row", "step"])
def test_lk_adaptive(level: str) -> None:
    batch, estimates = make_batch()
    p, q = distributions(batch)
    alpha = overlap(p, q)
    rate = alpha.detach()
    if level == "step":
        rate = (rate * batch.weights).sum(1, keepdim=True) / batch.weights.sum(1, keepdim=True)
    mix = (-2.0 * rate).exp()
    expected = mean(mix * plain_kl(p, q) + (1 - mix) * (1 - alpha), batch.weights)
    check(batch, estimates, build_loss("lk", {"eta": 2.0, "level": level})(batch).loss, expected)


def test_lk_lies_between_kl_and_tv() -> None:
    batch, _ = make_batch()
    ends = {name: float(build_loss(name)(batch).loss.detach()) for name in ("reverse_kl", "tv")}
    assert float(build_loss("lk", {"eta": 0.0})(batch).loss.detach()) == pytest.approx(ends["reverse_kl"], rel=1e-5)
    assert float(build_loss("lk", {"eta": 1e4})(batch).loss.detach()) == pytest.approx(ends["tv"], rel=1e-5)


def test_lk_log_learns_where_tv_does_not() -> None:
    """Where p and q hardly overlap the gradient of TV is lost, that of −ln α is not."""
    batch, estimates = make_batch()
    far = replace(batch, estimates=(-6 * batch.features).expand(S, N, H).clone().requires_grad_())
    norms = {}
    for name, args in {"tv": {}, "lk": {"form": "log", "level": "row"}}.items():
        (grad,) = torch.autograd.grad(build_loss(name, args)(far).loss, far.estimates)
        norms[name] = float(grad.norm())
    assert norms["lk"] > 50 * norms["tv"]


# the expected accepted length


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
        lengths = plain_lengths(batch, exact if "rule" in args else exact + (1 - exact) * gate)
        expected = expected + {
            "log": -(lengths / S).log().mean(),
            "log_mean": -(lengths.mean() / S).log(),
            "linear": (S - lengths).mean(),
        }[objective] / len(thresholds)
    expected = expected + args.get("anchor", 0.1) * mean(plain_kl(p, q), batch.weights)
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


def simulated_length(
    p: Tensor, q: Tensor, draws: int, threshold: float | None, width: int | None, generator: torch.Generator
) -> tuple[float, float]:
    """Mean number of accepted drafts and its standard error; every draft is drawn and put to the rule's own test.

    p, q: [S, V], the distributions at the chain's contexts. threshold: of a js gate, or None for the exact rule.
    """
    alive = torch.ones(draws, dtype=torch.bool)
    lengths = torch.zeros(draws, dtype=torch.float64)
    for p_k, q_k in zip(p, q, strict=True):
        drafts = torch.multinomial(q_k, draws * (width or 1), replacement=True, generator=generator).view(draws, -1)
        if width is None:
            uniform = torch.rand(draws, generator=generator, dtype=torch.float64)
            passes = uniform * q_k[drafts[:, 0]] < p_k[drafts[:, 0]]
        else:
            wanted = torch.multinomial(p_k, draws, replacement=True, generator=generator)
            passes = (drafts == wanted[:, None]).any(1)
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


def test_perfect_drafts_cost_nothing() -> None:
    batch, _ = make_batch()
    same = replace(batch, estimates=batch.features.expand(S, N, H).clone().requires_grad_())
    losses = ["kl", "reverse_kl", "js", "tv", "lk", "fsd"]
    for name in losses:
        out = build_loss(name)(same)
        assert abs(out.loss.item()) < 1e-5, name
        assert out.agreement is not None and torch.equal(out.agreement, batch.weights > 0), name


# how it is computed

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("kl", {}),
    ("reverse_kl", {}),
    ("js", {}),
    ("tv", {}),
    ("lk", {}),
    ("lk", {"form": "log"}),
    ("fsd", {}),
    ("fsd", {"rule": "exact", "width": 4, "temperature": 0.7}),
    ("fsd", {"divergence": "top_k_js:4", "threshold": [0.1, 0.3]}),
    ("fsd", {"divergence": "ag", "threshold": 0.5, "width": 4, "temperature": 0.7}),
    ("fsd", {"divergence": "kl", "threshold": 0.5, "temperature": 0.7}),
]
LARGE = 131072  # the vocabulary of today's families


@pytest.mark.parametrize(("name", "args"), VARIANTS, ids=str)
def test_chunk_size_does_not_matter(name: str, args: dict[str, Any]) -> None:
    batch, estimates = make_batch()
    found = []
    for chunk_size in (1, 5 * LIVE, 1000 * LIVE):
        loss = build_loss(name, {**args, "chunk_size": chunk_size})(batch).loss
        found.append((loss, torch.autograd.grad(3 * loss, estimates)[0]))
    for loss, grad in found[1:]:
        torch.testing.assert_close(loss, found[0][0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(grad, found[0][1], atol=1e-6, rtol=1e-5)


def peak_memory(run: Any) -> int:
    """Bytes allocated at the highest moment of a call, above those before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    records = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for record in sorted(records, key=lambda event: event.start_ns()):
        total += record.nbytes()
        peak = max(peak, total)
    return peak


def check_memory(name: Any, args: dict[str, Any], vocab: int, cap: float | None, selects: bool = False) -> None:
    chunk_size, rows, width = 4 * LIVE, 3 * LIVE, 4
    batch = DraftBatch(
        torch.randn(2, rows, width, requires_grad=True), torch.randn(rows, width), torch.ones(2, rows),
        torch.zeros(rows, dtype=torch.long), torch.arange(rows), LMHead(torch.randn(vocab, width), cap=cap),
        reference=torch.randn(2, rows, width) if selects else None,
    )  # fmt: skip
    loss = build_loss(name, {**args, "chunk_size": chunk_size} if isinstance(name, str) else None)
    peak = peak_memory(lambda: loss(batch).loss.backward())
    assert 4 * vocab * 4 < peak < 1.3 * chunk_size * vocab * 4


@pytest.mark.parametrize(("name", "args"), VARIANTS, ids=str)
@pytest.mark.parametrize("cap", [None, 5.0])
def test_memory_bound(name: str, args: dict[str, Any], cap: float | None) -> None:
    """Forward and backward stay within 1.3 times the logits of chunk_size rows, however many rows there are."""
    check_memory(name, args, 4096, cap)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("eagle", {}),
        ("reverse_kl", {}),
        ("lk", {}),
        ("fsd", {"threshold": [0.1, 0.3]}),
        ("adaspec", {"reference": "first", "loss_args": {"chunk_size": 4 * LIVE}}),
        ([{"name": name, "args": {"chunk_size": 4 * LIVE}} for name in ("lk", "fsd")], {}),
    ],
    ids=str,
)
def test_memory_bound_at_a_large_vocabulary(name: Any, args: dict[str, Any]) -> None:
    check_memory(name, args, LARGE, None, selects=name == "adaspec")


def test_rows_scale_with_their_coefficients_in_both_passes() -> None:
    batch, estimates = make_batch()
    coefficients = torch.rand(2, S, N)

    def rows(log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.stack([(log_q.exp() ** 2).sum(-1), (log_p.exp() * log_q).sum(-1)])

    values, _ = chunked_rows(rows, batch, 2 * LIVE, count=2)
    single = [chunked_rows(lambda p, q, i=i: rows(p, q)[i : i + 1], batch, 2 * LIVE)[0] for i in range(2)]
    torch.testing.assert_close(values, torch.cat(single))
    (grad,) = torch.autograd.grad((coefficients * values).sum(), estimates)
    (other,) = torch.autograd.grad((coefficients * torch.cat(single)).sum(), estimates)
    torch.testing.assert_close(grad, other, atol=1e-6, rtol=1e-5)
    p, q = distributions(batch)
    plain = torch.stack([(q**2).sum(-1), (p * q.log()).sum(-1)]) * (batch.weights > 0)
    (wanted,) = torch.autograd.grad((coefficients * plain).sum(), estimates)
    torch.testing.assert_close(grad, wanted, atol=5e-6, rtol=1e-4)


def test_no_gradient_asked_and_low_precision() -> None:
    batch, _ = make_batch()
    low = replace(
        batch,
        estimates=batch.estimates.detach().bfloat16().requires_grad_(),
        features=batch.features.bfloat16(),
        head=LMHead(batch.head.weight.bfloat16()),
    )
    for name in ("js", "lk", "fsd"):
        exact = build_loss(name)(batch).loss.detach()
        with torch.no_grad():
            assert not build_loss(name)(batch).loss.requires_grad
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = build_loss(name)(low).loss
        (grad,) = torch.autograd.grad(loss, low.estimates)
        assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
        torch.testing.assert_close(loss.detach(), exact, atol=0.02, rtol=0.05)


def test_wrong_arguments_are_named() -> None:
    assert {"kl", "reverse_kl", "js", "tv", "lk", "fsd"} <= set(LOSSES.names())
    for name, args, message in [
        ("kl", {"w_divergence": 0.0}, "w_divergence"),
        ("js", {"chunk_size": 0}, "chunk_size"),
        ("lk", {"form": "beta"}, "adaptive, log"),
        ("lk", {"eta": -1.0}, "eta"),
        ("fsd", {"rule": "fuzzy-strict"}, "exact, fuzzy"),
        ("fsd", {"objective": "mean"}, "log_mean"),
        ("fsd", {"threshold": []}, "threshold"),
        ("fsd", {"threshold": [0.3, math.nan]}, "threshold"),
        ("fsd", {"threshold": {"from": 0.3, "to": 0.1}}, "0 <= from < to"),
        ("fsd", {"threshold": {"low": 0.3}}, "from, to and points"),
        ("fsd", {"threshold": [0.1, 0.2], "threshold_weights": [1.0]}, "threshold_weights"),
        ("fsd", {"softness": 0.0}, "softness"),
        ("fsd", {"width": 0}, "width"),
        ("fsd", {"anchor": -0.1}, "anchor"),
        ("tv", {"w_ce": 1.0}, "no argument w_ce"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=message):
            build_loss(name, args)
    with pytest.raises(UnknownNameError, match="js"):
        build_loss("fsd", {"divergence": "jsd"})


# training


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(("name", "args"), VARIANTS, ids=str)
def test_a_head_trains_under_it(target_dir: Path, name: str, args: dict[str, Any]) -> None:
    module = EagleModule(
        str(target_dir), head={"final_norm": True, "feature_scale": True}, unroll_steps=2, loss=name, loss_args=args
    )
    module.configure_model()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (3, 16), generator=generator)
    mask = (torch.arange(16) >= 4).expand(3, -1)
    with torch.no_grad():
        features = Target.from_pretrained(str(target_dir)).features(ids)
    batch = {"input_ids": ids, "loss_mask": mask, "features": features}
    optimizer = torch.optim.Adam(module.head.parameters(), lr=5e-3)
    losses = []
    for _ in range(8):
        drafts = module.draft(batch, 2)
        assert drafts is not None
        loss = module.loss(drafts).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.9 * losses[0], losses
