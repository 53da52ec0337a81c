"""Configs of heads that other programs publish: what they may say in several ways, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_core.errors import FsdError
from fsd_infer.drafters.loading import load_drafter
from tests.published_blocks import THETA, WINDOW, z_lab
from tests.published_heads import layout
from tests.test_published_heads import PROMPTS, TREE, drafted, target

Z_LAB = "dflash of z-lab"
SLIDING = {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": ...}
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
SAID: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # a layout, and two ways to say the same
    "M-RoPE, which block heads copy": (Z_LAB, {"rope_scaling": MROPE, "partial_rotary_factor": 0.25}, {}),
    "M-RoPE of P-EAGLE": ("p-eagle", {"rope_scaling": MROPE}, {}),
    "rotary options by their new name": (
        Z_LAB,
        {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_type": "default", "rope_theta": THETA}},
        {},
    ),
    "windows by their first layer": (
        Z_LAB, {**SLIDING, "max_window_layers": 1}, {**SLIDING, "layer_types": ["full_attention", "sliding_attention"]}
    ),
    "no window before the 28th layer": (Z_LAB, SLIDING, {}),
}  # fmt: skip


@pytest.mark.parametrize("way", SAID)
def test_options_may_be_said_in_several_ways(way: str, tmp_path: Path) -> None:
    name, *ways = SAID[way]
    found, wanted = (
        drafted(load_drafter(str(layout(name).write(tmp_path / f"{i}", **each)), target(name), TREE), PROMPTS)
        for i, each in enumerate(ways)
    )
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.q_logits, wanted.q_logits)


Changed = dict[str, Any]
REFUSED: dict[str, tuple[str, Changed, str]] = {
    "a slot that could mean two things": (
        "dflash of z-lab", {"architectures": ["MyDraft"]}, '"sample_from_anchor": false'
    ),
    "a default that differs": ("dspark of speculators", {"sample_from_anchor": ...}, "must say sample_from_anchor"),
    "two numberings": ("dflash of speculators", {"target_layer_ids": [1, 3]}, "the latter should be one less"),
    "a layer that is not there": (
        "dflash of z-lab", z_lab(target_layer_ids=[0, 9]), r"layers \[0, 9\]; .* has 0 to 3, each once"
    ),
    "another target": ("dflash of z-lab", {"num_target_layers": 36}, "for a target of 36 layers"),
    "the embeddings": ("dflash of z-lab", z_lab(target_layer_ids=[-1, 2]), "-1\\) are not read here"),
    "a second version": ("dflash of z-lab", z_lab(conv_kernel_size=4), "conv_kernel_size, which is not known here"),
    "sinks": ("dflash of z-lab", z_lab(attention_sink_bias=True), "attention_sink_bias"),
    "two values": ("dflash of z-lab", z_lab(block_size=8), "says block_size twice"),
    "no mask": ("dflash of z-lab", z_lab(mask_token_id=None), "no mask_token_id"),
    "another vocabulary": ("dflash of z-lab", {"vocab_size": 9}, "drafts over 9 tokens"),
    "a missing correction": ("dflash of z-lab", z_lab(projector_type="domino"), "whose tensors are missing"),
    "another Markov head": ("dspark of DeepSpec, gated", {"markov_head_type": "rnn"}, "those of a gated head"),
    "Gemma's layers": ("dflash of DeepSpec", {"architectures": ["Gemma4DSparkModel"]}, "layers are Gemma's"),
    "too many layers": ("dflash of z-lab", {"num_hidden_layers": 3}, "names 3 layers"),
    "another architecture": ("hydra", {"hydra_head_arch": "prefix-mlp"}, "'prefix-mlp': only \"mlp\""),
    "ungrounded": ("hydra", {"grounded_heads": False}, "unexpected"),
    "an inner state": ("hydra", {"hidden_state_offset": 1}, "hidden_state_offset of 1"),
    "fewer steps": ("mlp speculator", {"n_predict": 2}, "unexpected"),
    "ties that differ": ("mlp speculator", {"tie_weights": True}, "its emb.1.weight differs from emb.0.weight"),
    "an unknown tensor": ("mlp speculator, tied", {}, r"unexpected \['strange.weight'\]"),
    "no masks": ("p-eagle", {"mask_token_id": ...}, "no token of its masks"),
    "LM heads of some": ("medusa", {}, "3 with 2 LM heads"),
    "truncated": ("medusa of vLLM", {"truncated_vocab_size": 2}, "truncated vocabulary"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_told_or_run_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    name, changes, words = REFUSED[fault]
    made = layout(name)
    if fault == "LM heads of some":
        made = replace(made, tensors={name: value for name, value in made.tensors.items() if name != "2.2.weight"})
    if fault == "an unknown tensor":
        made = replace(made, tensors={**made.tensors, "strange.weight": torch.ones(1)})
    with pytest.raises(FsdError, match=words):
        load_drafter(str(made.write(tmp_path / "head", **changes)), target(), None)
