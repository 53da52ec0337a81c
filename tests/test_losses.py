"""Losses against plain formulas, and the metrics."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from fsd_infer.errors import DataError, UnknownNameError
from fsd_train.losses import LOSSES, DraftBatch, EagleLoss, LMHead, build_loss, soft_cross_entropy
from fsd_train.losses.base import Rows
from fsd_train.losses.fsd import chain_rows
from fsd_train.metrics import ExpectedTau, StepMean, compare
from tests.train_toys import toy_target

S, N, H, VD = 3, 11, 8, 17


def make_batch(
    scale: float = 1.0, cap: float | None = None, bias: bool = False, scaled: bool = False
) -> tuple[DraftBatch, torch.Tensor]:
    estimates = torch.randn(S, N, H, dtype=torch.float32, requires_grad=True)
    weights = (torch.rand(S, N) > 0.3).float() * torch.tensor([1.0, 0.5, 0.25])[:, None]
    head = LMHead(torch.randn(VD, H), torch.randn(VD) if bias else None, scale, cap)
    batch = DraftBatch(
        estimates, torch.randn(N, H), weights, torch.randint(0, VD, (N,)), torch.arange(N), head,
        torch.rand(H) + 0.5 if scaled else None,
    )  # fmt: skip
    return batch, estimates


def plain_eagle(batch: DraftBatch, w_feature: float, w_ce: float) -> torch.Tensor:
    """The formula row by row, without chunks or fused gradients."""

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        raw = hidden @ batch.head.weight.T
        raw = (raw if batch.head.bias is None else raw + batch.head.bias) * batch.head.scale
        return raw if batch.head.cap is None else torch.tanh(raw / batch.head.cap) * batch.head.cap

    total = torch.zeros(())
    for step in range(S):
        for row in range(N):
            p = logits(batch.features[row]).softmax(-1)
            q = logits(batch.estimates[step, row]).softmax(-1)
            divisor = torch.ones(H) if batch.feature_scale is None else batch.feature_scale
            gap = (batch.estimates[step, row] - batch.features[row]) / divisor
            smooth = torch.where(gap.abs() < 1, 0.5 * gap**2, gap.abs() - 0.5).mean()
            total = total + batch.weights[step, row] * (w_feature * smooth - w_ce * (p * q.log()).sum())
    return total / batch.weights.sum()


@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.3}, {"cap": 2.0, "scale": 1.5}, {"bias": True}, {"scaled": True}], ids=str
)
@pytest.mark.parametrize("chunk_size", [4, 256])
def test_eagle_loss_and_gradient(options: dict, chunk_size: int) -> None:
    batch, estimates = make_batch(**options)
    expected = plain_eagle(batch, 0.3, 1.0)
    (expected_grad,) = torch.autograd.grad(expected, estimates)
    out = EagleLoss(0.3, 1.0, chunk_size)(batch)
    torch.testing.assert_close(out.loss, expected, atol=1e-5, rtol=1e-5)
    (grad,) = torch.autograd.grad(out.loss, estimates)
    torch.testing.assert_close(grad, expected_grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(0.3 * out.parts["feature_loss"] + out.parts["ce_loss"], out.loss.detach())


def test_soft_cross_entropy_gradient_scales_with_the_incoming_one() -> None:
    batch, estimates = make_batch()
    row_weights = torch.rand(S, N)
    losses, _ = soft_cross_entropy(estimates, batch.features, batch.head, 5)
    (grad,) = torch.autograd.grad((losses * row_weights).sum(), estimates)
    p = (batch.features @ batch.head.weight.T).softmax(-1)
    plain = -(p * (estimates @ batch.head.weight.T).log_softmax(-1)).sum(-1)
    (expected,) = torch.autograd.grad((plain * row_weights).sum(), estimates)
    torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-4)


def test_perfect_estimates_reach_the_entropy_and_agree() -> None:
    batch, _ = make_batch()
    same = batch.features.expand(S, N, H).clone().requires_grad_()
    losses, agree = soft_cross_entropy(same, batch.features, batch.head)
    p = (batch.features @ batch.head.weight.T).softmax(-1)
    entropy = torch.distributions.Categorical(p).entropy()
    torch.testing.assert_close(losses, entropy.expand(S, N))
    assert agree.all()
    (grad,) = torch.autograd.grad(losses.sum(), same)
    assert grad.abs().max() < 1e-6


def test_bf16_estimates_stay_close_to_fp32() -> None:
    batch, estimates = make_batch()
    head = LMHead(batch.head.weight.bfloat16())
    losses, _ = soft_cross_entropy(estimates.bfloat16(), batch.features.bfloat16(), head)
    exact, _ = soft_cross_entropy(estimates, batch.features, LMHead(head.weight.float()))
    torch.testing.assert_close(losses, exact, atol=0.15, rtol=0.02)


def test_unsupervised_rows_have_no_influence() -> None:
    batch, estimates = make_batch()
    grad = torch.autograd.grad(EagleLoss(1.0, 1.0)(batch).loss, estimates)[0]
    assert (grad[batch.weights == 0] == 0).all()
    assert (grad[batch.weights > 0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_lm_head_is_the_targets(family: str) -> None:
    target = toy_target(family)
    ids = torch.tensor([2, 5, 9, 33])
    hidden = torch.randn(4, target.hidden_size)
    torch.testing.assert_close(LMHead.of(target)(hidden), target.lm_logits(hidden))
    torch.testing.assert_close(LMHead.of(target, ids)(hidden), target.lm_logits(hidden)[:, ids])


def test_names_and_arguments_are_checked() -> None:
    assert "eagle" in LOSSES.names()
    with pytest.raises(UnknownNameError, match="eagle"):
        build_loss("eagel")
    with pytest.raises(DataError, match="no argument w_tv"):
        build_loss("eagle", {"w_tv": 1})
    with pytest.raises(DataError, match="positive"):
        build_loss("eagle", {"w_feature": -1.0})


def test_agreement_counts_supervised_rows_only() -> None:
    metric = StepMean(2)
    metric.update(torch.tensor([[True, False, True], [True, True, True]]), torch.tensor([[1.0, 1, 0], [0, 0.5, 0]]))
    assert metric.compute().tolist() == [0.5, 1.0]


def test_chain_length() -> None:
    metric = ExpectedTau()
    # one answer, head positions 3..6; two steps, so roots are 3, 4, 5 (step 1 of root r stands at r+1)
    positions = torch.tensor([3, 4, 5, 6])
    weights = torch.tensor([[1.0, 1, 1, 1], [0, 1, 1, 1]])
    agree = torch.tensor([[True, False, True, True], [False, True, True, False]])
    metric.update(agree, chain_rows(Rows(positions, weights > 0)))
    # root 3: step 0 agrees, step 1 at 4 agrees: 3. root 4: step 0 fails: 1. root 5: step 0 agrees, step 1 at 6 fails: 2
    assert float(metric.compute()) == 2.0
    empty = ExpectedTau()
    nothing = torch.zeros(2, 0, dtype=torch.bool)
    empty.update(nothing, chain_rows(Rows(torch.zeros(0, dtype=torch.long), nothing)))
    assert math.isnan(float(empty.compute()))


def test_greedy_agreement_is_over_the_whole_vocabulary() -> None:
    full = LMHead(torch.eye(6))
    draft_ids = torch.tensor([1, 3, 4])
    features = torch.eye(6)[[1, 3, 5]]
    estimates = torch.eye(6)[[1, 4, 4]][None]
    batch = DraftBatch(
        estimates, features, torch.ones(1, 3), torch.zeros(3), torch.arange(3), LMHead(torch.eye(6)[draft_ids])
    )
    # id 5 is outside the draft vocabulary: no draft can agree there
    assert compare(batch, full, draft_ids, chunk_size=2).agree.tolist() == [[True, False, False]]
    assert functional.one_hot(draft_ids, 6).sum() == 3
