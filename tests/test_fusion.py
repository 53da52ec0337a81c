"""Heads that read inner layers of the target, and heads that start from weights at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import EagleDrafter, TreeShape
from fsd_infer.errors import CheckpointError, DataError, ModelLoadError
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_train.data.features import FeatureStore, cache_features, sequence_key
from fsd_train.models.start import initialise_from, take_layers
from tests.families import FAMILIES, reference, save_head, tiny_model, tiny_prompts
from tests.test_training import fit, make, whole  # noqa: F401  (fixtures)
from tests.train_toys import toy_target

IDS = torch.arange(3, 15).view(2, 6)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_watched_layers_are_the_models_hidden_states(family: str) -> None:
    model = tiny_model(family)
    target = Target(model)
    plain = target.features(IDS)
    target.capture_layers([0])
    found = target.features(IDS)
    states = model(input_ids=IDS, output_hidden_states=True).hidden_states
    torch.testing.assert_close(target.features_of(found), plain)
    torch.testing.assert_close(found[..., plain.shape[-1] :], states[1])
    assert target.features_of(found, [0]) is found


def test_columns_are_chosen_by_layer() -> None:
    target = Target(tiny_model("llama", num_hidden_layers=3))
    target.capture_layers([2])
    target.capture_layers([0, 2])
    found = target.features(IDS)
    assert target.captured_layers == (0, 2)
    final, first, third = found.chunk(3, -1)
    assert torch.equal(target.features_of(found, [2]), torch.cat([final, third], -1))
    assert torch.equal(target.features_of(found, [0]), torch.cat([final, first], -1))


@pytest.mark.parametrize("number", [-1, 2])
def test_a_layer_that_is_not_there_is_named(number: int) -> None:
    with pytest.raises(ModelLoadError, match=f"no layer {number}: give numbers from 0 to 1"):
        toy_target().capture_layers([number])


def fused_head(target: Target, seed: int = 0, **options: Any) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(EagleConfig.for_target(target, fused_layers=[1, 0], final_norm=True, **options))
    initialise_from(head, target)
    return head


def test_fusion_starts_as_the_head_without_it() -> None:
    target = toy_target()
    head = fused_head(target)
    plain = EagleHead(EagleConfig.for_target(target, final_norm=True))
    plain.load_state_dict({k: v for k, v in head.state_dict().items() if not k.startswith("fusion")})
    embeds, features, positions = torch.randn(1, 4, 32), torch.randn(1, 4, 96), torch.arange(4)[None]
    assert torch.equal(head(embeds, features, positions), plain(embeds, features[..., :32], positions))
    torch.nn.init.normal_(head.fusion.project.weight)
    assert not torch.allclose(head(embeds, features, positions), plain(embeds, features[..., :32], positions))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_greedy_tokens_are_the_targets_with_a_fused_head(family: str) -> None:
    model, prompts = tiny_model(family), tiny_prompts()
    wanted = reference(model, prompts)
    target = Target(model)
    head = fused_head(target)
    torch.nn.init.normal_(head.fusion.project.weight, std=0.1)
    drafter = EagleDrafter(head, target, TreeShape(3, 3, 8))
    assert target.captured_layers == (0, 1)
    found = FuzzyDecoder(target, drafter).generate(prompts, max_new_tokens=24, do_sample=False)
    assert found.sequences == wanted


def test_two_drafters_with_other_layers_share_a_target() -> None:
    model, prompts = tiny_model("llama"), tiny_prompts((7,))
    target = Target(model)
    one = EagleHead(EagleConfig.for_target(target, fused_layers=[1]))
    alone = EagleDrafter(one, target, TreeShape(3, 3, 8))
    first = FuzzyDecoder(target, alone).generate(prompts, max_new_tokens=16, do_sample=False)
    EagleDrafter(fused_head(target), target)  # watches another layer too
    again = FuzzyDecoder(target, alone).generate(prompts, max_new_tokens=16, do_sample=False)
    assert [r.target_forwards for r in first.stats.rows] == [r.target_forwards for r in again.stats.rows]


def test_cache_holds_inner_layers_and_refuses_others(tmp_path: Path) -> None:
    target = toy_target()
    target.capture_layers([1])
    store = cache_features(target, list(IDS), tmp_path, progress=False)
    assert store.layers == [1]
    torch.testing.assert_close(store.get(sequence_key(IDS[0])), target.features(IDS[:1])[0].bfloat16())
    assert FeatureStore(tmp_path).layers == [1]
    target.capture_layers([0])
    with pytest.raises(DataError, match=r"holds inner layers \[1\], not \[0, 1\]"):
        cache_features(target, list(IDS), tmp_path, progress=False)


def test_training_reads_the_layers_online_and_from_the_cache(toys: Path, tmp_path: Path) -> None:
    target = Target.from_pretrained(str(toys / "target"))
    target.capture_layers([0, 1])
    _, data = make(toys, cached=False)
    data.setup()
    rows = [item["input_ids"] for part in (data.train_set, data.validation_set) for item in part]
    cache_features(target, rows, tmp_path / "f", progress=False)
    head = {"final_norm": True, "fused_layers": [1]}
    online, _ = make(toys, cached=False, head=head, noise=0.0)
    online._frozen.target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    online.target.capture_layers([1])
    online.configure_model()
    cached, data = make(toys, head=head, noise=0.0)
    data.features = str(tmp_path / "f")
    data.setup()
    cached.target.captured_layers = (0, 1)
    cached.configure_model()
    with_features = next(iter(data.train_dataloader()))
    batch = {name: value for name, value in with_features.items() if name != "features"}
    without = online.draft(batch, 2)
    torch.nn.init.normal_(online.head.fusion.project.weight, std=0.1)
    cached.head.load_state_dict(online.head.state_dict())
    here, there = online.draft(batch, 2), cached.draft(with_features, 2)
    assert without is not None and here is not None and there is not None
    least = 0.02 * here.estimates.abs().mean()  # cached features are rounded to bf16
    assert (there.estimates - here.estimates).abs().mean() < least < (here.estimates - without.estimates).abs().mean()


def test_missing_layers_in_the_cache_are_named(toys: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lack \[1\]. Cache them again with `--layers 1`"):
        fit(toys, tmp_path, steps=1, head={"fused_layers": [1]})


def test_head_starts_with_the_targets_layers(toys: Path, tmp_path: Path) -> None:
    module, _ = make(toys, initial_layers=[1, 0], head={"num_layers": 2, "input_norm": True})
    module.configure_model()
    layers = Target.from_pretrained(str(toys / "target"), dtype=torch.float32).layers([1, 0])
    for own, source in zip(module.head.layers, layers, strict=True):
        for name, value in own.state_dict().items():
            assert torch.equal(value, source.state_dict()[name].float()), name


def test_layers_that_do_not_fit_are_refused() -> None:
    target = toy_target("falcon")
    head = EagleHead(EagleConfig.for_target(target))
    with pytest.raises(CheckpointError, match="does not fit the head's LlamaDecoderLayer"):
        take_layers(head, target.layers([0]))
    with pytest.raises(CheckpointError, match=r"initial_layers names 2 layer\(s\), but the head has 1"):
        take_layers(head, target.layers([0, 1]))


def test_training_goes_on_from_a_head_and_may_widen_it(
    whole: tuple[Any, Any, Path],  # noqa: F811
    toys: Path,
    tmp_path: Path,
) -> None:
    trained = whole[0]
    trained.export(tmp_path / "head")
    wide = {"final_norm": True, "feature_scale": True, "num_layers": 2, "fused_layers": [0]}
    module, data = make(toys, cached=False, noise=0.0, initial_head=str(tmp_path / "head"), head=wide)
    module._frozen.target = trained._frozen.target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    module.target.capture_layers([0])
    module.configure_model()
    data.setup()
    batch = next(iter(data.train_dataloader()))
    first, second = trained.eval().draft(batch, 2), module.eval().draft(batch, 2)
    assert first is not None and second is not None
    torch.testing.assert_close(first.estimates, second.estimates, atol=0.06, rtol=0.05)  # exported as bf16


def test_an_initial_head_of_other_width_is_refused(toys: Path, tmp_path: Path) -> None:
    target = Target.from_pretrained(str(toys / "target"))
    save_head(tmp_path, EagleHead(EagleConfig.for_target(target, final_norm=True)), target.fingerprint())
    module, _ = make(toys, initial_head=str(tmp_path), head={})
    with pytest.raises(CheckpointError, match=r"does not fit this one \(norm.weight\)"):
        module.configure_model()
