"""A target whose linear layers, and those of its MTP layer, are all fp8 in blocks decodes as its expanded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.trees.shape import TreeShape
from tests.families import altered
from tests.published_mtp import checkpoint, single_experts
from tests.test_published_heads import PROMPTS, drafted, plain_of

BLOCK = 8


def narrowed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in fp8, and a scale for each block of 8 rows and columns."""
    blocks = weight.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
    scales = blocks.abs().amax((2, 3)) / 448
    return (weight / spread(scales)).to(torch.float8_e4m3fn), scales


def spread(scales: Tensor) -> Tensor:
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


@pytest.mark.parametrize("family", ["glm4_moe", "mimo", "qwen3_5_text"])
def test_an_fp8_target_drafts_by_its_fp8_layer(tmp_path: Path, family: str) -> None:
    source, places = checkpoint(family), [tmp_path / "narrow", tmp_path / "wide"]
    state = load_file(source / "model.safetensors")
    single_experts(state)
    wide = dict(state)
    for name in [name for name in state if name.endswith("_proj.weight") and "eh_proj" not in name]:
        state[name], state[f"{name}_scale_inv"] = narrowed(state[name])
        wide[name] = state[name].float() * spread(state[f"{name}_scale_inv"])
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    for place, tensors, config in zip(places, (state, wide), ({"quantization_config": quantised}, {})):
        altered(source, place, config, lambda old, new=tensors: (old.clear(), old.update(new)))
    narrow, expanded = (Target.from_pretrained(str(place), dtype="fp32", device="cpu") for place in places)
    drafters = [load_drafter("mtp", target, TreeShape(3, 3, 10)) for target in (narrow, expanded)]
    trees = [drafted(drafter, PROMPTS) for drafter in drafters]
    torch.testing.assert_close(trees[0].q_logits, trees[1].q_logits, rtol=1e-5, atol=1e-5)
    answers = FuzzyDecoder(narrow, drafters[0]).generate(PROMPTS, max_new_tokens=12, do_sample=False)
    assert answers.sequences == plain_of(expanded, 12)
