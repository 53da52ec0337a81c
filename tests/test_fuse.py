"""Decoder blocks in fewer operations compute what the model's own do, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer import EagleDrafter, FuzzyDecoder, NoDrafter, Target, TreeShape
from fsd_infer.cpu.fused_ops import fuse_layers, speed_up
from fsd_infer.cpu.packing import Packed, can_pack, is_replaced, pack_linears, restore
from fsd_infer.heads.checkpoint import save_head
from fsd_infer.heads.head import EagleConfig, EagleHead
from tests.families import FAMILIES, VOCAB, OracleDrafter, reference, tiny_model, tiny_prompts

ATTENTION_KNOWN = {"llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "granite"}
NORM_KNOWN = ATTENTION_KNOWN | {"olmo2", "phi3"}


def logits_through_cache(target: Target, nodes: int = 6, length: int = 20) -> Tensor:
    """Logits [1, nodes, V] of a tree of siblings and chains behind a text longer than the tested window."""
    tokens = torch.tensor(tiny_prompts((length + nodes,)))
    text, cache = torch.arange(length)[None], target.new_cache(1, length + nodes)
    cache.set_write_slots(text, 0, length)
    target.forward(tokens[:, :length], text, text[:, None] <= text[..., None], cache)
    slots = torch.arange(length, length + nodes)[None]
    positions = length + torch.tensor([[0, 1, 1, 2, 2, 3]])
    parents = [0, 0, 0, 1, 2, 3]
    sees = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        sees[node] |= sees[parents[node]]
    visible = torch.cat([torch.ones(nodes, length, dtype=torch.bool), sees], dim=1)[None]
    cache.set_write_slots(slots, length, length + nodes)
    return target.forward(tokens[:, length:], positions, visible, cache)[0].float()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_answers_are_the_same(family: str) -> None:
    model = tiny_model(family)
    prompts = tiny_prompts((5, 13))
    expected = reference(model, prompts, max_new_tokens=12)
    target = Target(model)
    plain = logits_through_cache(target)
    replaced = fuse_layers(model)
    names = {type(part).__name__ for part in model.modules() if is_replaced(part)}
    assert any(name.endswith("Attention") for name in names) == (family in ATTENTION_KNOWN)
    assert (replaced > 0) == (family in NORM_KNOWN)
    torch.testing.assert_close(logits_through_cache(target), plain, atol=1e-4 * float(plain.abs().max()), rtol=1e-4)
    assert reference(model, prompts, max_new_tokens=12) == expected, "with transformers' own cache"
    decoder = FuzzyDecoder(target, OracleDrafter(target))
    assert decoder.generate(prompts, max_new_tokens=12, do_sample=False).sequences == expected


@pytest.mark.skipif(not can_pack(), reason="needs oneDNN with bf16")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "granite", "olmo2", "stablelm", "gpt2"])
def test_bf16_logits_are_close(family: str) -> None:
    model = tiny_model(family, scale=2.0).to(torch.bfloat16)
    target = Target(model)
    plain = logits_through_cache(target)
    speed_up(model)
    fast = logits_through_cache(target)
    assert float((fast - plain).norm()) < 0.03 * float(plain.norm())


@pytest.mark.skipif(not can_pack(), reason="needs oneDNN with bf16")
def test_every_linear_layer_is_packed_once() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    fused = fuse_layers(model)
    layers = model.config.num_hidden_layers
    assert fused == layers * 5 + 2  # layer, two norms, attention and MLP; the final norm and the angles
    assert pack_linears(model) == 1, "all but the LM head are packed within attentions and MLPs"
    assert fuse_layers(model) == pack_linears(model) == 0, "nothing is done twice"


def test_restore_undoes_everything() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    target = Target(model)
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    plain = logits_through_cache(target)
    speed_up(model)
    state = model.state_dict()
    assert list(state) == list(before)
    assert all(state[name].data_ptr() == pointer for name, (pointer, _) in before.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert restore(model) > 0
    assert not any(is_replaced(part) for part in model.modules())
    assert torch.equal(logits_through_cache(target), plain)
    assert all(torch.equal(value, before[name][1]) for name, value in model.state_dict().items())


@pytest.mark.skipif(not can_pack(), reason="needs oneDNN with bf16")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "phi3", "gpt2", "opt"])
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
    # transformers' own cache or none: layers that share a product are asked one by one
    assert float((target.features(ids) - expected[1]).float().norm()) < 0.03 * float(expected[1].float().norm())
    restore(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], value) for name, value in before.items())
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


@pytest.mark.skipif(not can_pack(), reason="needs oneDNN with bf16")
def test_layers_that_share_a_product_compute_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [torch.nn.Linear(32, width, dtype=torch.bfloat16) for width in (64, 32, 16)]
    x, y = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    whole = Packed(*layers)
    plain = [layer(x) for layer in layers], [layer(y) for layer in layers]
    whole.release(layers)
    calls = []
    product = Packed.__call__
    monkeypatch.setattr(Packed, "__call__", lambda self, z: calls.append(z) or product(self, z))
    for z, expected in ((x, plain[0]), (y, plain[1]), (x, plain[0])):
        for layer, value in zip(layers, expected):
            torch.testing.assert_close(layer(z), value, atol=1e-2, rtol=1e-2)
    assert len(calls) == 3 and whole.latest is None, "one product per input, and none is kept behind the last layer"
    torch.testing.assert_close(layers[1](y), plain[1][1], atol=1e-2, rtol=1e-2)


@pytest.mark.skipif(not can_pack(), reason="needs oneDNN with bf16")
def test_a_drafter_that_is_handed_over_keeps_its_weights(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "target")
    target = Target(tiny_model("llama").to(torch.bfloat16))
    head = EagleHead(EagleConfig.for_target(target))
    save_head(tmp_path / "head", head, target.fingerprint())
    decoder = FuzzyDecoder.from_pretrained(str(tmp_path / "target"), str(tmp_path / "head"), device="cpu")
    assert isinstance(decoder.drafter, EagleDrafter)
    assert any(weight.is_meta for weight in decoder.drafter.head.parameters())
    assert any(weight.is_meta for weight in decoder.target.model.parameters())
    own = EagleDrafter(head, decoder.target, TreeShape(2, 2, 4))
    decoder.load_drafter(own)
    assert not any(weight.is_meta for weight in head.parameters())


def test_layers_of_other_kinds_keep_their_forward() -> None:
    model: Any = tiny_model("llama")
    model.config._attn_implementation = "eager"
    fuse_layers(model)
    names = {type(part).__name__ for part in model.modules() if is_replaced(part)}
    assert names == {"LlamaRMSNorm", "LlamaRotaryEmbedding"}, "attention by other means than sdpa is left alone"


def test_a_heads_drafts_are_the_same() -> None:
    target = Target(tiny_model("llama"))
    torch.manual_seed(1)
    head = EagleHead(EagleConfig.for_target(target, final_norm=True))
    drafter = EagleDrafter(head, target, TreeShape(depth=3, width=3, nodes=8))
    prompts = tiny_prompts()
    options: dict[str, Any] = dict(max_new_tokens=16, do_sample=False)
    plain = FuzzyDecoder(target, drafter).generate(prompts, "fuzzy:js:0.5", **options)
    assert fuse_layers(head) >= 2
    fast = FuzzyDecoder(target, drafter).generate(prompts, "fuzzy:js:0.5", **options)
    assert fast.sequences == plain.sequences
    assert fast.stats.tau == plain.stats.tau


def test_from_pretrained_speeds_up_unless_told_not_to(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    expected = reference(tiny_model("llama"), tiny_prompts((7,)), max_new_tokens=10)
    for pack in (True, False):
        decoder = FuzzyDecoder.from_pretrained(str(tmp_path), "none", dtype=torch.float32, device="cpu", pack=pack)
        assert any(is_replaced(part) for part in decoder.target.model.modules()) == pack
        assert isinstance(decoder.drafter, NoDrafter) and decoder.target.vocab_size == VOCAB
        out = decoder.generate(tiny_prompts((7,)), max_new_tokens=10, do_sample=False)
        assert out.sequences == expected


@pytest.mark.parametrize("scaling", ["default", "linear", "llama3", "dynamic"])
def test_angles_from_a_table(scaling: str) -> None:
    options: dict[str, Any] = {
        "default": {},
        "linear": dict(factor=4.0),
        "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        "dynamic": dict(factor=2.0),
    }
    model = tiny_model("llama", rope_parameters=dict(rope_type=scaling, rope_theta=1e4, **options[scaling]))
    rotary = model.model.rotary_emb
    cases = [(torch.float32, [[0, 7, 3]]), (torch.bfloat16, [[2, 600], [5, 5]]), (torch.float32, [[1999]])]
    asked = [(torch.zeros(1, dtype=dtype), torch.tensor(positions)) for dtype, positions in cases]
    expected = [rotary(*given) for given in asked]
    fuse_layers(model)
    assert is_replaced(rotary) == (scaling != "dynamic"), "whose angles depend on the length of the text"
    for given, angles in zip(asked, expected, strict=True):
        assert all(map(torch.equal, rotary(*given), angles))
