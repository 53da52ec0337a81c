"""The CUDA stack on a CPU, under Triton's interpreter: as transformers' layers over texts, trees, windows and heads."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.backends.cuda import interface
from fsd_infer.backends.cuda.backend import CudaBackend, uses_triton
from fsd_infer.backends.cuda.fused import fused
from fsd_infer.backends.cuda.stack import CudaStack, fusible, knows_layers
from fsd_infer.device.cache import SlotCache, cache_argument, visible_slots
from fsd_infer.targets.masks import layer_windows
from fsd_infer.targets.stack import StackInputs
from tests.families import WINDOW, tiny_head, tiny_model

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
FAMILIES = {
    "llama": {}, "mistral": {}, "qwen3": {"num_key_value_heads": 2},
    "qwen2": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
}  # fmt: skip


def owner_of(model: Any) -> Any:
    return SimpleNamespace(decoder=model.model, final_norm=model.model.norm, lm_head_is_plain=True, plain_stack=None)


@pytest.mark.parametrize("family, told", [("llama", False), *((family, True) for family in FAMILIES)])
def test_a_tree_is_read_as_its_paths(family: str, told: bool) -> None:
    """Two rows of different lengths; node 3 follows node 1. Each path's outputs are those of its whole text."""
    model = tiny_model(family, num_attention_heads=2, **{"num_key_value_heads": 1, **FAMILIES[family]}).to(DEVICE)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of queries and keys that differ, and biases
            parameter.data += 0.3 * torch.randn_like(parameter)
    owner = owner_of(model)
    assert knows_layers(owner)
    stack, window = CudaStack(owner, None), getattr(model.config, "sliding_window", None)
    lengths = torch.tensor([12, 17], device=DEVICE)
    texts = torch.randint(1, 97, (2, 21), device=DEVICE)
    cache = SlotCache(model.config, 2, 30)
    with torch.inference_mode():
        for row in range(2):  # transformers' layers read the texts
            part, count = cache.row(row), int(lengths[row])
            ordered = torch.arange(count, device=DEVICE)[None]
            part.set_write_slots(ordered, 0, count)
            causal = torch.ones(1, count, count, dtype=torch.bool, device=DEVICE).tril()
            whole = {kind: mask[:, None] for kind, mask in masks(causal, ordered, model.config).items()}
            options = {"attention_mask": whole if len(whole) > 1 else whole.popitem()[1]}
            options[cache_argument(type(model.model))] = part
            model.model(texts[row : row + 1, :count], position_ids=ordered, **options)
        visible_after = torch.eye(4, dtype=torch.bool, device=DEVICE)
        visible_after[:, 0] = visible_after[3, 1] = True
        slots = lengths[:, None] + torch.arange(4, device=DEVICE)
        positions = lengths[:, None] + torch.tensor([0, 1, 1, 2], device=DEVICE)
        cache.set_write_slots(slots, None, 21)
        visible = visible_slots(lengths.cpu(), visible_after.expand(2, -1, -1).contiguous())
        if told:
            cache.text = lengths, visible_after.expand(2, -1, -1)
        nodes = texts.gather(1, slots)
        given = masks(visible, positions, model.config, slots)
        final, captured, _ = stack(StackInputs(nodes, positions, given, cache, [0, 1]))
        read_out = model.model.norm(captured[1])  # the last layer's output is from before the norm
        for row in range(2):
            for path in ([0], [0, 1, 3], [0, 2]):
                text = torch.cat([texts[row, : lengths[row]], nodes[row, path]])[None]
                right = model.model(text, output_hidden_states=True).hidden_states
                for found, states in ((final, right[-1]), (captured[0], right[1]), (read_out, right[2])):
                    torch.testing.assert_close(found[row, path[-1]], states[0, -1], atol=2e-5, rtol=2e-5)
    assert window in (None, WINDOW)


def masks(visible: Tensor, positions: Tensor, config: Any, slots: Tensor | None = None) -> dict[str, Tensor]:
    """Masks by layer type; windows count positions."""
    at = torch.arange(visible.shape[-1], device=DEVICE).repeat(len(visible), 1)
    at = at if slots is None else at.scatter(1, slots, positions)
    return {
        kind: visible if window is None else visible & (positions[:, :, None] - at[:, None] < window)
        for kind, window in layer_windows(config).items()
    }


def test_weights_are_held_once(tmp_path: Path) -> None:
    """Fused weights are the module's own: the same values, the same memory, saved and moved as before."""
    model = tiny_model("qwen2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = fusible(model)
    assert [len(group) for group in groups] == [3, 2, 3, 2]
    made = [fused(group) for group in groups]
    for group, (weight, bias) in zip(groups, made, strict=True):
        assert weight.untyped_storage().data_ptr() == group[1].weight.untyped_storage().data_ptr()
        assert torch.equal(weight, torch.cat([part.weight for part in group]))
        assert (bias is None) == (group[0].bias is None)
        assert bias is None or torch.equal(bias, torch.cat([part.bias for part in group]))
        again = fused(group)[0]
        assert again.data_ptr() == weight.data_ptr()
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in model.parameters()}
    assert sum(held.values()) == sum(value.nbytes for value in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in before.items()), "saved whole"
    with torch.no_grad():
        groups[0][1].weight.mul_(2.0)  # as merging an adapter does
        assert torch.equal(fused(groups[0])[0], torch.cat([part.weight for part in groups[0]]))
    groups[0][2].weight.data = groups[0][2].weight.data.clone() + 1.0  # moved
    assert torch.equal(fused(groups[0])[0], torch.cat([part.weight for part in groups[0]]))


@pytest.mark.parametrize("family", ["gemma2", "cohere", "gpt2", "mixtral"])
def test_other_layers_are_not_taken(family: str) -> None:
    model = tiny_model(family)
    decoder = model.get_decoder()
    owner = SimpleNamespace(decoder=decoder, final_norm=None, lm_head_is_plain=True)
    assert not knows_layers(owner)  # type: ignore[arg-type]


def test_hooks_and_quantised_layers_are_seen() -> None:
    model = tiny_model("llama")
    stack = CudaStack(owner_of(model), lambda *_, **__: "fallback")  # type: ignore[arg-type, return-value]
    cache = SlotCache(model.config, 1, 8)
    one = torch.zeros(1, 1, dtype=torch.long)
    cache.set_write_slots(one, 0, 1)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert stack(StackInputs(one, one, {"full_attention": torch.ones(1, 1, 1, dtype=torch.bool)}, cache)) == "fallback"
    handle.remove()
    model.model.layers[1].mlp.up_proj = nn.Sequential(model.model.layers[1].mlp.up_proj)
    assert not knows_layers(owner_of(model))


def test_what_triton_lacks_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a compiler its first kernel would fail within the first forward."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    uses_triton.cache_clear()
    assert CudaBackend().report() == (None, "Triton finds no C compiler")
    assert caplog.messages == [
        "Triton finds no C compiler, so layers run on torch's kernels: install gcc, or name one in CC"
    ]
    monkeypatch.undo()
    uses_triton.cache_clear()


def test_other_families_attend_without_copies() -> None:
    """transformers' layers call the tree's attention, and are the same model; cuDNN stays the caller's choice."""
    model = tiny_model("granite", num_attention_heads=2, num_key_value_heads=1)
    tokens = torch.randint(1, 97, (2, 5))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    mask[1, 0, 3, 2] = False
    backend = CudaBackend()
    with torch.inference_mode():
        right = model(tokens, attention_mask=mask).logits
        backend.prepare(model)
        assert model.config._attn_implementation == interface.NAME
        calls: list[bool] = []
        owner = SimpleNamespace(decoder=model.model, lm_head_is_plain=True, plain_stack=lambda *_, **__: calls.append(
            torch.backends.cuda.cudnn_sdp_enabled()))  # fmt: skip
        torch.testing.assert_close(model(tokens, attention_mask=mask).logits, right, atol=1e-4, rtol=1e-4)
        backend.stack_for(owner)(StackInputs(tokens, tokens, None, None))
    assert calls == [False] and torch.backends.cuda.cudnn_sdp_enabled()
    backend.restore(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "rule, options",
    [
        ("tilted:2", {}),
        ("exact", {"own_lm_head": False, "draft_vocab_size": 20}),
        ("exact", {"norm_before_residual": True}),
    ],
)
def test_decoding_by_the_stack(rule: str, options: dict[str, Any]) -> None:
    """Target and EAGLE-3 head run by the stack, which takes the head's step whole: the answer of transformers' layers.

    A draft vocabulary grows by ids of the text, 1 to 5 and what follows, that it lacks.
    """
    model = tiny_model("llama", num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1)
    target = Target(model)
    drafter = tiny_head(target, TreeShape(2, 2, 4), layout="eagle3", fused_layers=[0, 1, 2], **options)
    decoder, prompt = FuzzyDecoder(target, drafter), list(range(1, 6))
    right = decoder.generate([prompt], rule=rule, max_new_tokens=4, do_sample=False).sequences
    backend, owners = CudaBackend(), [target, *drafter.stack_owners()]
    assert len(owners) == 2
    for owner in owners:
        backend.prepare(owner.decoder)
        owner.stack = backend.stack_for(owner)
        assert isinstance(owner.stack, CudaStack)
    assert drafter._find_fused_step() is not None
    assert decoder.generate([prompt], rule=rule, max_new_tokens=4, do_sample=False).sequences == right
    decoder.restore()
