"""Packed sequences: a conversation attends to itself alone, in any model; losses and gradients as of each alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from fsd_infer import Target
from fsd_train.data import collate
from fsd_train.models import DistillationModule
from fsd_train.packed import BLOCK, TextMask, forward_packed, packed_attention, supports_packing, use_packed_attention
from fsd_train.packed.attention import _in_blocks
from tests.families import FAMILIES, tiny_model
from tests.loss_toys import VARIANTS
from tests.train_toys import answers_of, eagle_module, ready, small_lm

CPU = torch.device("cpu")
ALONE = {"stablelm", "falcon"}  # attention of their own that takes no function
LENGTHS = (9, 30, 5, 20)


def by_search(
    lengths: tuple[int, ...], roots: list[int] | None = None, step: int = 0, window: int = 10**6, size: int = 0
) -> Tensor:
    """Who sees whom, spelled out: [Q, K] bool."""
    of = [number for number, length in enumerate(lengths) for _ in range(length)]
    places = range(len(of))
    if roots is None:
        return torch.tensor([[of[k] == of[q] and k <= q < k + window for k in places] for q in places])
    rows = []
    for number, root in enumerate(roots):
        for at in range(size):  # the slots of a block
            text = [of[k] == of[root] and k < root and root + at - k < window for k in places]
            slots = [(block, slot) for block in range(len(roots)) for slot in range(size)]
            rows.append(text + [block == number and at - slot < window for block, slot in slots])
    for number, root in enumerate(roots if not size else []):
        text = [of[k] == of[root] and k <= root and root + step - k < window for k in places]
        rows.append(text + [chain == number for _ in range(step) for chain in range(len(roots))])
    return torch.tensor(rows)


MASKS = {
    "text": (TextMask((40, 300, 1, 59), CPU), None, by_search((40, 300, 1, 59))),
    "window": (TextMask((40, 300, 1, 59), CPU), 16, by_search((40, 300, 1, 59), window=16)),
    "chains": (
        TextMask((40, 300, 60), CPU).chains(torch.arange(20, 340, 2), 3), None,
        by_search((40, 300, 60), list(range(20, 340, 2)), 3),
    ),
    "chains in a window": (
        TextMask((40, 600), CPU).chains(torch.arange(0, 640, 4), 2), 30,
        by_search((40, 600), list(range(0, 640, 4)), 2, 30),
    ),
    "blocks": (
        TextMask((40, 300, 60, 9), CPU).blocks(torch.arange(41, 399, 6), 7), None,
        by_search((40, 300, 60, 9), list(range(41, 399, 6)), size=7),
    ),
    "blocks in a window": (
        TextMask((40, 600), CPU).blocks(torch.arange(1, 640, 9), 4), 3,
        by_search((40, 600), list(range(1, 640, 9)), window=3, size=4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_all_readings_of_a_mask_agree(name: str) -> None:
    mask, window, expected = MASKS[name]
    queries, keys = mask.shape
    assert expected.shape == mask.shape
    assert torch.equal(mask.visible(torch.arange(queries)[:, None], torch.arange(keys), window), expected)
    spread = torch.zeros_like(expected)
    for span in mask.spans(window):
        query, places = span.queries, mask.keys_of(span)
        causal = torch.ones(query.stop - query.start, len(places), dtype=torch.bool).tril()
        block = causal if span.visible is None else span.visible
        spread[torch.arange(query.start, query.stop)[:, None], places] = block
    assert torch.equal(spread, expected)
    blocks = mask.block_mask(window).to_dense()[0, 0].bool()
    wide = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:queries, :keys]
    assert not (expected & ~wide).any() and blocks.sum() < blocks.numel()


@torch.no_grad()
@pytest.mark.parametrize("name", MASKS)
def test_flex_attention_sees_the_same(name: str) -> None:
    """What CUDA runs, interpreted; one of its kernels needs the hardware."""
    mask, window, expected = MASKS[name]
    mask = replace(mask)  # that no tensor of it is made before its function is traced
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, mask.shape[0], 8), torch.randn(1, 2, mask.shape[1], 8)
    flexed = flex_attention(query, key, key, block_mask=mask.block_mask(window), enable_gqa=True)
    found = packed_attention(torch.nn.Module(), query, key, key, mask, sliding_window=window)[0].transpose(1, 2)
    repeated = key.repeat_interleave(2, 1)
    plain = torch.nn.functional.scaled_dot_product_attention(query, repeated, repeated, expected)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(flexed, plain, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@torch._dynamo.config.patch(recompile_limit=2)  # pytest's monkeypatch would delete the setting afterwards
def test_flex_attention_is_compiled_for_every_mask_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past torch's limit it would run uncompiled, with the scores of all queries and keys in memory."""
    made = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        made.append(graph)
        return graph.forward

    torch.compiler.reset()
    flexed = torch.compile(flex_attention, backend=compiler)
    monkeypatch.setattr(
        "transformers.integrations.flex_attention.WrappedFlexAttention", lambda training: lambda: flexed
    )
    text = TextMask((40, 24), CPU)
    steps = [text.chains(torch.arange(0, 64, 2), step) for step in range(2)]
    blocks = text.blocks(torch.arange(1, 64, 8), 4)
    kinds_of = [*((each, 30, 16) for each in (text, *steps)), (text, None, 16), (text, None, 32), (blocks, None, 16)]
    for mask, window, width in kinds_of:
        query, key = torch.randn(1, 4, mask.shape[0], width), torch.randn(1, 2, mask.shape[1], width)
        blocks = replace(mask).block_mask(window)
        found = _in_blocks(torch.nn.Module(), query, key, key, blocks)
        spans, _ = packed_attention(torch.nn.Module(), query, key, key, mask, sliding_window=window)
        torch.testing.assert_close(found, spans, atol=1e-5, rtol=1e-4)
    kinds = len(made)
    assert kinds > torch._dynamo.config.recompile_limit
    _in_blocks(torch.nn.Module(), query, key, key, replace(mask).block_mask(window))
    assert len(made) == kinds


@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}, {"s_aux": torch.randn(4)}], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("name", MASKS)
def test_half_precision_attends_alike(name: str, extras: dict[str, Any]) -> None:
    """On a CPU its spans are padded."""
    mask, window, _ = MASKS[name]
    torch.manual_seed(0)
    shapes = [(1, 4, mask.shape[0], 8), (1, 2, mask.shape[1], 8), (1, 2, mask.shape[1], 8)]
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = cast = [each.to(dtype).requires_grad_() for each in inputs]
        out = packed_attention(torch.nn.Module(), query, key, value, mask, sliding_window=window, **extras)[0].float()
        (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        results.append([out.detach(), *(each.grad.float() for each in cast if each.grad is not None)])
    assert len(results[0]) == 4
    for exact, half in zip(*results, strict=True):
        torch.testing.assert_close(half, exact, atol=0.03 * float(exact.abs().max()), rtol=0.05)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_has_the_features_of_its_conversations(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Windows, soft caps, sinks and experts included; a window of 8 is shorter than the conversations."""
    target = Target(tiny_model(family))
    target.capture_layers([0])
    ids, before = torch.randint(3, 60, (1, sum(LENGTHS))), target.config._attn_implementation
    for _ in range(2):
        packed = forward_packed(target.features, target.model, ids, TextMask(LENGTHS, CPU))
    apart = torch.cat([target.features(part) for part in ids.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(packed, apart, atol=2e-5, rtol=1e-4)
    assert supports_packing(target.features, target.model) == (family not in ALONE)
    said = [
        record.message for record in caplog.records if record.levelno >= logging.WARNING and "packed" in record.message
    ]
    assert len(said) == (family in ALONE) and target.config._attn_implementation == before


def summed(module: DistillationModule, batches: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients over all rows of some batches."""
    drafts = [module.draft(batch, module.unroll_steps) for batch in batches]
    counts = [(each.rows.total, each.rows.chain_total) for each in drafts]
    total, chains = (sum(each) for each in zip(*counts))
    losses = []
    for each in drafts:
        each.rows.total.fill_(total)
        each.rows.chain_total.fill_(chains)
        losses.append(module.loss(each).loss)
    module.zero_grad()
    loss = torch.stack(losses).sum()
    loss.backward()
    named = module.named_parameters()
    return loss.detach(), {name: value.grad for name, value in named if value.grad is not None}


HEADS: list[dict[str, Any]] = [
    {"head": {"final_norm": True, "feature_scale": True, "fused_layers": [0]}},
    {"head": {"layout": "eagle3", "fused_layers": [0, 1]}, "draft_vocab_size": 40},
    {"head": {"layout": "eagle", "num_layers": 2}},
]


def check_packed(module: Any, toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of six conversations and padding against six rows, and against a target that reads padded sequences."""
    data = answers_of(toys)
    data.setup()
    items = [data.train_set[place] for place in range(6)]
    loss, gradients = summed(module, [dict(collate(items, 190))])
    alone, expected = summed(module, [dict(collate([item])) for item in items])
    torch.testing.assert_close(loss, alone, atol=1e-6, rtol=2e-5)
    torch.testing.assert_close(gradients, expected, atol=2e-6, rtol=2e-4)
    assert any(float(value.abs().max()) > 1e-4 for value in gradients.values())
    monkeypatch.setattr("fsd_train.packed.reading.supports_packing", lambda forward, model: False)
    padded, expected = summed(module, [dict(collate(items, 190))])
    torch.testing.assert_close(padded, loss, atol=1e-6, rtol=2e-5)
    torch.testing.assert_close(gradients, expected, atol=2e-6, rtol=2e-4)


# every loss on one head, and one of features and one of chains on the others
CASES = [(*loss, head) for head in HEADS for loss in (VARIANTS if head is HEADS[0] else VARIANTS[:8:7])]


@pytest.mark.parametrize(("loss", "args", "head"), CASES, ids=str)
def test_losses_and_gradients_of_a_head(
    loss: str, args: dict[str, Any], head: dict[str, Any], toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "layout" in head["head"] and loss == "eagle":
        args = {"w_feature": 0.0}
    if loss == "lk":  # by step, a batch's own mean is in the loss
        args = {**args, "level": "row"}
    module = ready(eagle_module(toys, loss=loss, loss_args=args or None, unroll_steps=3, **head))
    if head["head"].get("fused_layers"):
        module.target.capture_layers(head["head"]["fused_layers"])
    check_packed(module, toys, monkeypatch)


@pytest.mark.parametrize("lora", [None, {"r": 4, "lora_alpha": 8}], ids=["full", "lora"])
@pytest.mark.parametrize("loss", ["kl_pq", "fsd"])
def test_losses_and_gradients_of_a_small_lm(
    loss: str, lora: dict[str, Any] | None, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_packed(small_lm(toys, tmp_path, loss=loss, lora=lora, unroll_steps=2), toys, monkeypatch)


@pytest.mark.parametrize(("error", "alike"), [(0.0, True), (1e-3, True), (0.2, False)])
def test_a_trial_of_packed_rows_sees_past_huge_values(error: float, alike: bool) -> None:
    """Many models have dimensions whose values are a thousand times those of others, and enlarge the rounding of
    special tokens, which are first in a vocabulary."""
    model = tiny_model("llama")
    usual = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0))
    usual[..., 3] *= 3000

    def read(ids: Tensor, packing: Any = None, **inputs: Any) -> Tensor:
        wrong = torch.where(ids < 8, 0.6, error)[..., None] * (packing is not None)
        return usual[:, ids[0]] * (1 + wrong * torch.randn(1, ids.shape[1], 16))

    assert supports_packing(read, model) == alike


def test_a_model_gets_its_own_attention_back() -> None:
    model = tiny_model("llama")
    with pytest.raises(ZeroDivisionError), use_packed_attention(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
