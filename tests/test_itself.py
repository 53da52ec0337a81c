"""Drafters made of the target: what they share, what they compute, how they are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsd_infer import FsdError, FuzzyDecoder, LMDrafter, NoDrafter, Target, TreeShape, load_drafter
from fsd_infer.cli.main import main
from fsd_infer.cpu.ops import packed_products, speed_up, weight_rows
from fsd_infer.cpu.packing import can_pack
from fsd_infer.drafters.itself import Itself, spelled
from fsd_infer.targets.rounding import round_weight
from tests.bench_toys import save_toy
from tests.families import FAMILIES, VOCAB, reference, tiny_model, tiny_prompts

CHAIN = TreeShape.chain(3)
LAYERS = 3


def toy(family: str, **options: Any) -> Target:
    return Target(tiny_model(family, **{"num_hidden_layers": 7 if family == "gemma3_text" else LAYERS, **options}))


def made_of(target: Target, name: str, tree: TreeShape = CHAIN) -> LMDrafter:
    drafter = load_drafter(name, target, tree)
    assert isinstance(drafter, LMDrafter)
    return drafter


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    """All layers draft what the target says, eight bits nearly so, and what is left out changes drafts alone."""
    target = toy(family)
    count = int(target.config.num_hidden_layers)
    prompts = tiny_prompts()
    expected = reference(target.model, prompts, max_new_tokens=12)
    taus = {}
    for name in (f"self:layers=0-{count - 1}", "self:layers=0,2", "self:bits=8", "self:layers=1-2:bits=2"):
        drafter = made_of(target, name)
        out = FuzzyDecoder(target, drafter).generate(prompts, max_new_tokens=12, do_sample=False)
        assert out.sequences == expected, name
        taus[name] = out.stats.tau
        own = {id(parameter) for parameter in drafter.model.model.parameters()}
        shared = {id(parameter) for parameter in target.model.parameters()}
        assert own <= shared or "bits" in name, "nothing is copied"
    full, _, rounded, _ = taus.values()
    assert full == pytest.approx(11 / 3), "after the prompt's token three rounds: always right"
    assert rounded > 0.7 * full
    assert reference(target.model, prompts, max_new_tokens=12) == expected, "the target is as it was"


@pytest.mark.skipif(not can_pack(), reason="needs bf16 products by oneDNN")
def test_packed_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made before the target is packed or after, with freed weights: the same drafts."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    target = Target(tiny_model("llama", num_hidden_layers=LAYERS, **sizes).to(torch.bfloat16))
    expected = {
        name: layer.weight.clone() for name, layer in target.model.named_modules() if isinstance(layer, nn.Linear)
    }
    decoder = FuzzyDecoder(target, NoDrafter(VOCAB))
    speed_up(target.model, release=True)
    prompts = tiny_prompts()
    plain = decoder.generate(prompts, max_new_tokens=12, do_sample=False).sequences
    whole = decoder.load_drafter("self:layers=0-2", CHAIN)
    assert {id(p) for p in packed_products(whole.modules()[0])} == {id(p) for p in packed_products(target.model)}
    out = decoder.generate(prompts, drafter=whole, max_new_tokens=12, do_sample=False)
    assert out.sequences == plain and out.stats.tau >= 2.5
    rounded = decoder.load_drafter("self:layers=0,2:bits=3", CHAIN)
    assert isinstance(rounded, LMDrafter)
    assert decoder.generate(prompts, drafter=rounded, max_new_tokens=12, do_sample=False).sequences == plain
    for place, number in enumerate((0, 2)):
        layer = rounded.model.decoder.layers[place].mlp.up_proj  # type: ignore[index, union-attr]
        wanted = round_weight(expected[f"model.layers.{number}.mlp.up_proj"], 3)
        torch.testing.assert_close(weight_rows(layer, None), wanted)
    head = target.model.get_output_embeddings()
    torch.testing.assert_close(weight_rows(head, None), expected["lm_head"], msg="the target keeps its weights")


def test_names() -> None:
    assert Itself.parse("self:layers=0-2,7,9-9") == Itself((0, 1, 2, 7, 9))
    assert Itself.parse("self:bits=4:layers=3") == Itself((3,), 4)
    assert spelled((0, 1, 2, 7, 9, 10)) == "self:layers=0-2,7,9-10"
    target = toy("llama")
    assert made_of(target, "self:layers=0,2").describe()["model"] == "self:layers=0,2"
    assert load_drafter("self:layers=0+lookup", target).auto is not None
    for name, words in {
        "self:": "cannot use", "self:bits": "cannot use", "self:bits=": "cannot use", "self:bits=1": "2 to 8",
        "self:bits=9": "2 to 8", "self:bits=x": "2 to 8", "self:bits=3:bits=3": "cannot use", "self:a=3": "a=3",
        "self:layers=": "cannot use", "self:layers=2-1": "nor a range", "self:layers=a": "'a' is neither a layer",
        "self:layers=1-2-3": "nor a range", "self:layers=1,1": "once", "self:layers=2,0": "ascending",
        "self:layers=0-3": "has no layer 3", "self:layers=0-99999": "nor a range",
    }.items():  # fmt: skip
        with pytest.raises(FsdError, match=words) as refused:
            load_drafter(name, target)
        assert "\n" not in str(refused.value)
    target.config.num_kv_shared_layers = 1
    with pytest.raises(FsdError, match="depend on their numbers"):
        load_drafter("self:layers=0", target)


def test_rounding() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 192) * torch.rand(24, 1)
    errors = []
    for bits in range(2, 9):
        made = round_weight(weight, bits)
        groups = weight.view(-1, 64)
        assert max(len(group.unique()) for group in made.view(-1, 64)) <= 2**bits
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = (high - low) / (2**bits - 1)
        nearest = ((groups - low) / scale).round() * scale + low
        errors.append(float((made - weight).square().mean()))
        assert errors[-1] < (0.8 if bits < 4 else 1.0) * float((nearest - groups).square().mean()), bits
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-3 * errors[0]
    constant = torch.full((3, 40), 0.5)
    assert torch.equal(round_weight(constant, 2), constant)


def test_which_layers_to_skip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer that adds nothing goes first, and nothing is lost by it."""
    toys = save_toy(tmp_path)
    model = Target.from_pretrained(str(toys.target), dtype=torch.float32).model
    idle = model.model.layers[1]
    for product in (idle.self_attn.o_proj, idle.mlp.down_proj):
        product.weight.data.zero_()
    model.save_pretrained(toys.target)
    words = ["skip-layers", "--target", str(toys.target), "--prompts", str(toys.prompts), "--dtype", "fp32"]
    words += ["--device", "cpu", "--max-new-tokens", "8", "--layers"]
    count = len(model.model.layers)
    assert main([*words, str(count - 1)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{count} layers, agreement 1.000: self:layers=0-{count - 1}")
    left = tuple(number for number in range(count) if number != 1)
    assert second == f"{count - 1} layers, agreement 1.000: {spelled(left)}"
    assert main([*words, str(count)]) == 2 and "--layers goes from 1" in capsys.readouterr().err
