"""Divergence and LK losses against plain formulas; what all losses share: perfect drafts, arguments, training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer.errors import DataError, UnknownNameError
from fsd_infer.targets.target import Target
from fsd_train.eagle_module import EagleModule
from fsd_train.losses import LOSSES, build_loss
from tests.loss_toys import (
    PLAIN,
    VARIANTS,
    H,
    N,
    S,
    check,
    distributions,
    make_batch,
    mean,
    overlap,
    plain_kl,
)
from tests.train_toys import VOCAB, save_toy_target

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


def test_perfect_drafts_cost_nothing() -> None:
    batch, _ = make_batch()
    same = replace(batch, estimates=batch.features.expand(S, N, H).clone().requires_grad_())
    losses = ["kl", "reverse_kl", "js", "tv", "lk", "fsd"]
    for name in losses:
        out = build_loss(name)(same)
        assert abs(out.loss.item()) < 1e-5, name
        assert out.agreement is not None and torch.equal(out.agreement, batch.weights > 0), name


def test_wrong_arguments_are_named() -> None:
    assert {"kl", "reverse_kl", "js", "tv", "lk", "fsd"} <= set(LOSSES.names())
    for name, args, message in [
        ("kl", {"w_divergence": 0.0}, "w_divergence"),
        ("js", {"chunk_size": 0}, "chunk_size"),
        ("lk", {"form": "beta"}, "adaptive, log"),
        ("lk", {"eta": -1.0}, "eta"),
        ("tv", {"w_ce": 1.0}, "no argument w_ce"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=message):
            build_loss(name, args)
    with pytest.raises(UnknownNameError, match="js"):
        build_loss("fsd", {"divergence": "jsd"})


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
