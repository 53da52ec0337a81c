"""The draft head: saved and loaded, and its unrolled training view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_train.models.start import initialise_from
from fsd_train.models.unroll import chain_roots, plan_chains, supervised, unroll
from fsd_train.packed import TextMask
from tests.families import options_of
from tests.train_toys import toy_target

CPU = torch.device("cpu")
OWN = ["llama", "qwen2", "qwen3", "mistral", "granite", "olmo2", "phi3", "gemma2"]


def make_head(family: str = "llama", seed: int = 0, **options: object) -> EagleHead:
    torch.manual_seed(seed)
    target = toy_target(family)
    head = EagleHead(EagleConfig.for_target(target, **options))
    initialise_from(head, target)
    return head.eval()


@pytest.mark.parametrize("family", OWN)
@torch.no_grad()
def test_a_loaded_head_is_the_head_that_was_saved(family: str, tmp_path: Path) -> None:
    """In the data type that is asked for; the rotary frequencies, which no file holds, are never rounded."""
    head = make_head(family, final_norm=True, feature_scale=True, draft_vocab_size=20)
    head.config.training = {"steps": 3}
    head.save_pretrained(tmp_path)
    embeds, features, positions = torch.randn(1, 9, 32), torch.randn(1, 9, 32), torch.arange(9)[None] + 100
    loaded = EagleHead.from_pretrained(tmp_path, toy_target(family))
    assert not loaded.training and loaded.dtype == torch.float32 and loaded.config.training == head.config.training
    assert options_of(loaded) == options_of(head)
    torch.testing.assert_close(loaded(embeds, features, positions), head(embeds, features, positions), atol=0, rtol=0)
    assert torch.equal(loaded.draft_ids, head.draft_ids)  # type: ignore[arg-type]
    half = EagleHead.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert half.dtype == torch.bfloat16 and half.draft_ids.dtype == torch.int64  # type: ignore[union-attr]
    assert torch.equal(half.rotary_emb.inv_freq, head.rotary_emb.inv_freq)
    expected = head.cast(torch.bfloat16)(embeds.bfloat16(), features.bfloat16(), positions)
    assert torch.equal(half(embeds.bfloat16(), features.bfloat16(), positions), expected)


def decode_chain(
    head: EagleHead, embeds: torch.Tensor, features: torch.Tensor, root: int, steps: int
) -> list[torch.Tensor]:
    """What decoding computes: the text up to position ``root``, then one token at a time on the head's own output."""
    cache = DynamicCache()
    out = head(embeds[:, : root + 1], features[:, : root + 1], torch.arange(root + 1)[None], cache=cache)[:, -1:]
    outputs = [out]
    for step in range(1, steps):
        at = root + step
        out = head(embeds[:, at : at + 1], out, torch.tensor([[at]]), cache=cache)
        outputs.append(out)
    return outputs


FSD = {"final_norm": True, "feature_scale": True}
LAYOUTS = {
    **{family: (family, FSD) for family in OWN},
    "two layers": ("llama", {**FSD, "num_layers": 2}),
    "eagle": ("llama", {"layout": "eagle", "fc_bias": True}),
    "eagle3": ("llama", {"layout": "eagle3"}),
    "eagle3.1": ("llama", {"layout": "eagle3", "fc_norm": True, "norm_output": True, "num_layers": 2}),
}


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("roots", [range(14), [2, 6, 8, 10]])
def test_unrolled_training_is_token_by_token_drafting(layout: str, roots: Sequence[int]) -> None:
    """Of each of two conversations in a packed sequence, apart from the other."""
    family, options = LAYOUTS[layout]
    head, lengths, steps, compared = make_head(family, **options), (5, 9), 4, 0
    torch.manual_seed(1)
    embeds, features = torch.randn(1, 14, 32), torch.randn(1, 14, head.config.feature_width)
    unrolled = unroll(head, embeds, features, TextMask(lengths, CPU), steps, torch.tensor(list(roots)))
    for chain, root in enumerate(roots):
        begin, end = (0, 5) if root < 5 else (5, 14)
        own = embeds[:, begin:end], features[:, begin:end]
        for step, out in enumerate(decode_chain(head, *own, root - begin, min(steps, end - root))):
            found = unrolled[step][:, chain if step else root]
            torch.testing.assert_close(found, out[:, 0], atol=2e-5, rtol=1e-4)
            compared += step > 0
    assert compared >= 10


def test_a_share_of_the_chains_stands_for_all() -> None:
    answer = torch.zeros(120)
    answer[5:9], answer[43:80], answer[100:110] = 1, 1, 1
    wanted = supervised(answer, 2)
    possible, totals, rounds = int(wanted[1].sum()), torch.zeros(120), 800
    generator = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        roots, weights = chain_roots(wanted, 0.4, generator)
        assert len(roots) == math.ceil(0.4 * possible) and (roots.diff() > 0).all()
        assert float(weights.sum()) == pytest.approx(possible)
        totals.scatter_add_(0, roots, weights)
    expected = torch.nn.functional.pad(wanted[1][1:].float(), (0, 1))
    # a draw is w = n/k with chance 1/w, so its variance is w - 1: six standard errors
    variance = possible / len(roots) - 1
    assert torch.allclose(totals / rounds, expected, atol=6 * float(variance / rounds) ** 0.5)
    assert (totals[expected == 0] == 0).all()


@pytest.mark.parametrize(("answer", "steps"), [
    # x_0..x_3 prompt, x_4..x_8 answer, x_9 padding. The second answer token x_5 is drafted at position 3, from the
    # last prompt token's feature and x_4's embedding. Step s predicts x_{i+2} where x_{i-s+1} is of the answer.
    ([0, 0, 0, 0, 1, 1, 1, 1, 1, 0], [[3, 4, 5, 6], [4, 5, 6], [5, 6]]),
    ([0, 1, 1, 0, 0, 1, 1, 1, 1], [[0, 4, 5, 6], [5, 6]]),  # several turns
    ([0, 1], [[], []]), ([0], [[], []]),
])  # fmt: skip
def test_supervised_positions(answer: list[int], steps: list[list[int]]) -> None:
    wanted = supervised(torch.tensor(answer), len(steps))
    assert wanted.shape == (len(steps), len(answer))
    assert [row.nonzero().squeeze(1).tolist() for row in wanted] == steps


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_plans_rows_are_what_is_supervised(steps: int, share: float) -> None:
    """By search: every row of every step, where its output stands, and the chains that are whole."""
    torch.manual_seed(0)
    mask, decay = torch.rand(90) < 0.8, 0.5
    mask[0], mask[30:61] = False, False
    wanted, length = supervised(mask, steps), len(mask)
    plan = plan_chains(mask, steps, decay, share, torch.Generator().manual_seed(1))
    rows, roots = plan.rows, plan.roots.tolist()
    assert rows.position.tolist() == wanted[0].nonzero().squeeze(1).tolist()
    assert rows.position_index.diff().min() >= 0
    assert rows.offsets == [int((rows.position_index < number).sum()) for number in range(len(rows.position) + 1)]
    outputs = [(i, 0) for i in range(length)]  # (position, step) of unroll's
    outputs += [(root + s, s) for s in range(1, steps) for root in roots]
    found = list(zip(rows.position[rows.position_index].tolist(), rows.step.tolist()))
    assert [outputs[place] for place in plan.output.tolist()] == found and len(set(found)) == len(found)
    expected, chains = {(int(place), 0) for place in rows.position}, set()
    for root in roots if steps > 1 else range(length):
        chain = [(root + s, s) for s in range(steps) if root + s < length and wanted[s, root + s]]
        expected |= set(chain)
        if len(chain) == steps:
            chains.add(tuple(chain))
    assert set(found) == expected
    assert {tuple(found[row] for row in column) for column in rows.chains.T.tolist()} == chains
    assert rows.chains.shape == (steps, len(chains))
    for step in range(steps if share == 1.0 else 1):
        assert (rows.weight[rows.step == step] == decay**step).all()
    if steps > 1:  # what is drawn stands for all: of the steps that all chains have, the sum is the same
        total = float(rows.weight[rows.step == 1].sum())
        assert total == pytest.approx(float(wanted[1].sum()) * decay)
    counts = wanted.sum(1).tolist()
    assert float(rows.total) == pytest.approx(sum(n * decay**s for s, n in enumerate(counts)))
    assert float(rows.chain_total) == counts[-1]


def test_a_row_without_answers_has_one_chain_and_no_rows() -> None:
    plan = plan_chains(torch.zeros(8), 3)
    assert len(plan.roots) == 1 and not len(plan.output) and not len(plan.rows.position)
    assert plan.rows.chains.shape == (3, 0) and float(plan.rows.total) == 0
