"""Triton kernels on a CPU: interpreted against dense fp64, and compiled for GPUs that are not there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")


from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from benchmarks.few_rows import TILES, Tile, product
from fsd_core import functional
from fsd_infer.backends.cuda import clipped, kernels, layer, trees
from fsd_infer.backends.cuda.attention import tree_attention
from fsd_infer.rules import optimal

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # see tests/conftest.py
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
DTYPES = [torch.float32, torch.float16]  # the interpreter has no product in bf16


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention in fp64 of q [B, M, heads, D] to k and v [B, key heads, S, D]; visible: [B, M, S]."""
    group = q.shape[2] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("bmhd,bhsd->bhms", q.double(), keys) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhms,bhsd->bmhd", weights, values)


# rows, new tokens, heads, key heads, head size, slots, slots after the text, window, soft cap, splits
ATTENTION = {
    "chain": (1, 1, 8, 2, 64, 300, 1, 0, 0.0, 8), "tree": (2, 20, 2, 1, 128, 100, 20, 0, 0.0, 2),
    "level of a draft": (2, 10, 4, 1, 16, 130, 50, 0, 0.0, 4), "window": (2, 6, 4, 2, 96, 200, 6, 20, 0.0, 4),
    "window and cap": (1, 33, 2, 2, 256, 150, 33, 40, 5.0, 1),
    "more splits than tiles": (3, 5, 3, 1, 8, 40, 5, 0, 30.0, 16),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float32) for case in ATTENTION), ("tree", torch.float16), ("window and cap", torch.float16)],
)
def test_attention_to_text_and_tree(case: str, dtype: torch.dtype) -> None:
    """Slots that a node does not see hold NaN outside of text and tree. Lengths differ between rows; one is 0."""
    batch, count, heads, key_heads, width, slots, beyond, window, softcap, splits = ATTENTION[case]
    q = torch.randn(batch, count, heads, width, device=DEVICE).to(dtype)
    k, v = (torch.randn(batch, key_heads, slots, width, device=DEVICE).to(dtype) for _ in range(2))
    lengths = torch.randint(slots // 2, slots - beyond + 1, (batch,), device=DEVICE)
    lengths[batch - 1 :] = 0 if batch > 1 else slots - beyond
    visible_after = torch.rand(batch, count, beyond, device=DEVICE) < 0.4
    visible_after[:, torch.arange(count), torch.arange(beyond - count, beyond)] = True  # itself
    positions = lengths[:, None] + torch.randint(0, 5, (batch, count), device=DEVICE)
    after = torch.arange(slots, device=DEVICE) - lengths[:, None]  # [B, S]
    for row, length in enumerate(lengths.tolist()):
        k[row, :, length + beyond :] = v[row, :, length + beyond :] = torch.nan
    visible = (after < 0)[:, None] & (positions[..., None] - torch.arange(slots, device=DEVICE) < (window or 2 * slots))
    tree = visible_after.gather(2, after.clamp(0, beyond - 1)[:, None].expand(-1, count, -1))
    visible = torch.where(((after >= 0) & (after < beyond))[:, None], tree, visible)
    found = tree_attention(q, k, v, lengths, visible_after, width**-0.5, positions, window, softcap, splits)
    right = dense(q, k.nan_to_num(0.0), v.nan_to_num(0.0), visible, width**-0.5, softcap)
    torch.testing.assert_close(found.double(), right, atol=1e-5 if dtype == torch.float32 else 4e-3, rtol=0.0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [50, 2500])
def test_a_pass_over_rows(width: int, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(2, 3, width, device=DEVICE)).to(dtype)
    logits[0, 0, : width // 2] = -torch.inf
    log_p = logits.double().log_softmax(-1)
    found, tokens = kernels.topk_logprobs(logits, 10)
    torch.testing.assert_close(found.double(), log_p.topk(10).values, atol=1e-5, rtol=0.0)
    assert torch.equal(log_p.gather(-1, tokens), log_p.topk(10).values) and len(set(tokens[0, 0].tolist())) == 10
    where = torch.tensor([[True, False, True], [False, False, True]], device=DEVICE)
    highest, best, total = kernels.row_stats(logits, where)
    assert torch.equal(highest[where], logits.amax(-1).float()[where]) and best[~where].tolist() == [0, 0, 0]
    assert torch.equal(logits.gather(-1, best[..., None])[..., 0][where], logits.amax(-1)[where])
    torch.testing.assert_close(total[where], logits.float().logsumexp(-1)[where], atol=1e-5, rtol=0.0)
    entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)
    torch.testing.assert_close(kernels.row_entropy(logits).double(), entropy, atol=1e-5, rtol=0.0)


def test_rows_that_are_no_distributions() -> None:
    """As :func:`fsd_core.functional.row_stats` says; of equal numbers the first token is the best."""
    logits = torch.zeros(4, 70, device=DEVICE)
    logits[1, 5], logits[2, 6], logits[3] = -torch.nan, torch.inf, -torch.inf
    highest, best, total = kernels.row_stats(logits)
    assert best.tolist()[:1] + best.tolist()[2:] == [0, 6, 0]
    for found in (highest, total):
        torch.testing.assert_close(
            found[1:], torch.tensor([torch.nan, torch.inf, -torch.inf], device=DEVICE), equal_nan=True
        )


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_product_of_few_rows(tile: Tile) -> None:
    x, weight = torch.randn(3, 2 * tile.depth, device=DEVICE), torch.randn(70, 2 * tile.depth, device=DEVICE)
    torch.testing.assert_close(product(x, weight, tile), F.linear(x, weight), atol=1e-4, rtol=1e-4)


def test_angles_are_those_of_transformers() -> None:
    """Far into a text, of each row's own positions, with a factor."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 4096}
    config = LlamaConfig(hidden_size=96, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=scaling)
    rotary = LlamaRotaryEmbedding(config).to(DEVICE)
    positions = torch.tensor([[0, 16383], [777, 4097]], device=DEVICE)[:, :, None].expand(-1, -1, 3)[..., 0]
    for given in (positions, positions[:, :1].expand(-1, 5)):
        found = layer.rotary_angles(given, rotary.inv_freq, rotary.attention_scaling, torch.float32)
        for part, right in zip(found, rotary(torch.zeros(1, device=DEVICE), given), strict=True):
            torch.testing.assert_close(part, right, atol=2e-6, rtol=0.0)


def test_trees_and_what_they_see() -> None:
    parents = torch.tensor([[0, 0, 0, 1, 3, 3, 2], [0, 0, 1, 2, 3, 4, 5]], device=DEVICE)
    found = trees.ancestors(parents)
    assert torch.equal(found, functional.ancestors.__wrapped__(parents))  # type: ignore[attr-defined]
    lengths, after = torch.tensor([3, 0], device=DEVICE), found[:, 2:]
    right = functional.slot_masks.__wrapped__(lengths, after, 12)  # type: ignore[attr-defined]
    assert torch.equal(trees.slot_masks(lengths, after, 12), right)


@pytest.mark.parametrize("gain", [0.5, 30.0, 1000.0])
def test_a_clipped_distribution_is_that_of_torch(gain: float) -> None:
    """With zeros in p and q, fixed tokens (ln q = inf), a row in which p = q, and more tokens than a block."""
    scale = torch.linspace(0.1, 20, 6, device=DEVICE)[:, None]
    log_p = (torch.randn(6, 5000, device=DEVICE) * scale).log_softmax(-1)
    log_q = (log_p + torch.randn(6, 5000, device=DEVICE) * 3).log_softmax(-1)
    log_q[0] = log_p[0]
    log_q[:, ::3], log_p[1:, 1::7] = -torch.inf, -torch.inf
    log_p, log_q[:, 5:9] = log_p.log_softmax(-1), torch.inf
    gains = gain * (torch.rand(6, 5000, device=DEVICE) < 0.5)
    expected = optimal.search_clipped.__wrapped__(log_p, log_q, gains, 24, 3e-5)  # type: ignore[attr-defined]
    found = clipped.search_clipped(log_p, log_q, gains, 24, 3e-5)
    torch.testing.assert_close(found.exp(), expected.exp(), atol=2e-6, rtol=2e-4)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(6, device=DEVICE))


def builds(*arguments: str) -> list[dict[str, int]]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_builds", *arguments], capture_output=True, text=True, env=environ,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_round_is_few_launches(tmp_path: Path) -> None:
    """Counted with tensors that have shapes alone, of which nothing can be read: 10 for a layer, 33 for a level."""
    LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=500,
    ).save_pretrained(tmp_path)  # fmt: skip
    counts = {tree: launches_of(tmp_path, tree) for tree in ("", "4,1,5", "4,2,6", "5,2,6")}
    assert counts[""]["target"] <= 40 + 13 and sum(counts[""].values()) <= 120
    assert counts["4,2,6"]["target"] <= 40 + 15 and counts["4,2,6"]["advance"] <= 32
    assert counts["5,2,6"]["draft"] - counts["4,2,6"]["draft"] <= 33
    assert counts["4,1,5"]["rule"] <= 21 and counts["4,1,5"]["cache"] <= 17
    sampled = launches_of(tmp_path, "4,2,6", "--sampled")
    assert sampled["rule"] <= 26 and sampled["draft"] <= counts["4,2,6"]["draft"] + 60
    assert launches_of(tmp_path, "4,2,6", "--rule", "tilted")["rule"] <= 72
    assert launches_of(tmp_path, "4,2,6", "--rule", "tilted", "--sampled")["rule"] <= 142


def launches_of(shape: Path, tree: str, *options: str) -> dict[str, int]:
    words = [sys.executable, "-m", "benchmarks.launches", "--shape", str(shape), "--tree", tree, *options]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(words, capture_output=True, text=True, env=environ, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    return {part: int(count) for part, count in re.findall(r"^([a-z]+) +([0-9]+) ", done.stdout, re.M) if part != "all"}


EVERY_GPU = [(capability, dtype) for capability in ("80", "89", "90") for dtype in ("bfloat16", "float16", "float32")]
SLOW_BUILDS = [pytest.param(each, marks=pytest.mark.slow) for each in EVERY_GPU]


@pytest.mark.parametrize("arguments", [("90",), *SLOW_BUILDS], ids="-".join)
def test_kernels_compile_for_a_gpu(arguments: tuple[str, ...]) -> None:
    """To machine code of an 8B model's shapes. They fit the smallest card's shared memory, and its registers."""
    found = builds(*arguments)
    assert {line["kernel"] for line in found} == {
        "_add_norm", "_ancestors", "_angles", "_attend", "_biased", "_clipped", "_compare", "_draw", "_emitted",
        "_few_rows", "_follow", "_join", "_keep_nodes", "_left_sums", "_mix", "_not_above", "_of_drafts", "_pick",
        "_read", "_repeating", "_repeats", "_rotate", "_rows", "_silu_mul", "_slot_masks", "_sum", "_tilt", "_under",
        "_walk", "_weigh", "_without",
    }  # fmt: skip
    assert max(line["shared"] for line in found) <= 99 * 1024
    assert max(line["stack"] for line in found) <= 128, "registers are spilled"  # 88 on 8.0 with window and cap
