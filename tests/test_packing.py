"""Packed weights compute what the plain ones do, in every way to run a model, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fsd_infer import Target
from fsd_infer.cpu import build
from fsd_infer.cpu import kernels as module
from fsd_infer.cpu.kernels import Kernels
from fsd_infer.cpu.ops import packed_products, restore, speed_up, stack_of
from fsd_infer.cpu.packing import can_pack, fp8_panels, fp8_values, pack_linears
from tests.families import FAMILIES, reference, tiny_model, tiny_prompts
from tests.kernel_toys import logits_through_cache, needs_kernels

needs_packing = pytest.mark.skipif(not can_pack(), reason="needs oneDNN with bf16")


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_are_close(family: str) -> None:
    model = tiny_model(family, scale=2.0).to(torch.bfloat16)
    target, ids = Target(model), torch.tensor(tiny_prompts((20,)))
    plain = logits_through_cache(target), target.features(ids), model(ids).logits
    linears = sum(type(part) is torch.nn.Linear for part in model.modules())
    speed_up(model, release=True)
    assert len(packed_products(model)) == linears
    assert pack_linears(model) == 0, "nothing is done twice"
    fast = logits_through_cache(target), target.features(ids), model(ids).logits
    for one, other in zip(fast, plain, strict=True):
        assert float((one - other).float().norm()) < 0.03 * float(other.float().norm())
    assert reference(model, tiny_prompts((5,)), max_new_tokens=4)[0], "with transformers' own loop and cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restore_undoes_everything(dtype: torch.dtype) -> None:
    model = tiny_model("llama", tie_word_embeddings=True).to(dtype)
    target = Target(model)
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    plain = logits_through_cache(target)
    speed_up(model)
    state = model.state_dict()
    assert list(state) == list(before)
    assert all(state[name].data_ptr() == pointer for name, (pointer, _) in before.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (restore(model) > 0) == (dtype == torch.bfloat16 and can_pack())
    assert not packed_products(model) and stack_of(target.decoder) is None
    assert not any("forward" in vars(part) for part in model.modules())
    assert torch.equal(logits_through_cache(target), plain)
    assert all(torch.equal(value, before[name][1]) for name, value in model.state_dict().items())


@needs_packing
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "phi3", "gpt2", "opt"])
@pytest.mark.parametrize("tied", [False, True])
def test_released_weights_are_held_once_and_come_back(family: str, tied: bool) -> None:
    model: Any = tiny_model(family, scale=2.0, tie_word_embeddings=tied).to(torch.bfloat16)
    target = Target(model)
    before, digest = {name: value.clone() for name, value in model.state_dict().items()}, target.weights_digest()
    ids = torch.tensor(tiny_prompts((12,)))
    speed_up(model)
    expected = logits_through_cache(target), target.features(ids)
    restore(model)
    speed_up(model, release=True)
    gone = {name for name, value in model.state_dict().items() if value.is_meta}
    head = set() if tied else {"lm_head.weight"}
    assert (len(gone - head) > 0) == any(type(part) is torch.nn.Linear for part in target.decoder.modules())
    assert head <= gone, "an LM head of its own goes; this vocabulary, no multiple of 32, keeps the embedding"
    assert all("proj" in name or "fc" in name for name in gone - head), "embeddings and norms stay"
    rows = torch.tensor([3, 0, 5])
    assert torch.equal(target.lm_head_rows(rows)[0], before["lm_head.weight"][rows])
    assert torch.equal(target.lm_head_rows(None)[0], before["lm_head.weight"])
    assert target.weights_digest() == digest
    assert torch.equal(logits_through_cache(target), expected[0])
    assert torch.equal(target.features(ids), expected[1])
    restore(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], value) for name, value in before.items())
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


@needs_kernels
@pytest.mark.parametrize("tiles", [True, False])
def test_fp8_products_with_and_without_amx(tiles: bool) -> None:
    if tiles and not build._TILES <= module.cpu_flags():
        pytest.skip("needs AMX")
    compiled = build.build_for(Kernels, tiles)
    assert compiled.panel == (32 if tiles else 64)
    weight, x = torch.randn(128, 160).bfloat16(), torch.randn(3, 9, 160).bfloat16()
    numbers, scales = fp8_panels(weight, compiled.panel)
    layer = module.Linear(panels=numbers.data_ptr(), scales=scales.data_ptr(), columns=128, depth=160)
    y = compiled.linear(x, layer)
    sizes = fp8_values()[numbers.transpose(1, 2).reshape(128, 160).int() & 127] * scales[:, None]
    expected = F.linear(x.double(), torch.where(weight.signbit(), -sizes, sizes).double())
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=2**-8)
