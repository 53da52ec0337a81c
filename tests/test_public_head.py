"""EAGLE-1/2 heads as their authors store them load as they are; other programs' other heads are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from fsd_infer import EagleDrafter, FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import DraftRequest
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.errors import CheckpointError, VocabularyMismatchError
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.tree import DraftTree
from fsd_train.models.start import initialise_from
from tests.families import load_head, reference, save_head, tiny_model, tiny_prompts
from tests.train_toys import toy_target

PROMPTS = tiny_prompts((7, 12))
TREE = TreeShape(3, 3, 8)  # not chosen by the clock


def make_head(target: Target, layer: str = "llama", **options: Any) -> EagleHead:
    """A head whose drafts are sometimes right and whose every weight matters."""
    torch.manual_seed(1)
    head = EagleHead(EagleConfig.for_target(target, layer, **options))
    initialise_from(head, target)
    for parameter in head.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return head.eval().requires_grad_(False)


def public_config(head: EagleHead, **changes: Any) -> dict[str, Any]:
    """As EAGLE's repository has them, written by transformers 4: a base of positions instead of rope_parameters."""
    layer = dict(head.config.layer)
    theta = layer.pop("rope_parameters")["rope_theta"]
    layer.pop("head_dim", None)  # theirs have none
    config = {"architectures": ["LlamaForCausalLM"], "bias": head.config.fc_bias, "torch_dtype": "float16"}
    return {**layer, "rope_theta": theta, "num_hidden_layers": head.config.num_layers, **config, **changes}


def write_public(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, directory / "model.safetensors")
    return directory


def public_tensors(head: EagleHead, target: Target) -> dict[str, Tensor]:
    embeddings = target.model.get_input_embeddings().weight
    return {**head.state_dict(), "embed_tokens.weight": embeddings.detach().clone()}


def drafted(drafter: EagleDrafter, target: Target) -> DraftTree:
    ids = torch.tensor([PROMPTS[1]])
    session = drafter.start(ids[:, 0], DraftRequest(1, 32))
    session.extend(ids[:, 1:], target.features(ids)[:, :-1], torch.tensor([ids.shape[1] - 1]))
    return session.draft(ids[:, -1])


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("llama", {"fc_bias": True, "num_layers": 2, "intermediate_size": 24}), ("qwen2", {})],
)
def test_an_export_in_the_public_layout_is_the_same_drafter(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(family, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    target = Target(model)
    head = make_head(target, "auto", **options)
    assert any(name.endswith("q_proj.bias") for name in head.state_dict()) == (family == "qwen2")
    ours = save_head(tmp_path / "ours", head, target.fingerprint(), dtype=torch.float32)
    exported = load_head(ours, target)
    public = write_public(tmp_path / "public", public_config(exported), public_tensors(exported, target))

    one, two = (load_drafter(directory, target, TREE) for directory in (ours, public))
    assert isinstance(one, EagleDrafter)
    assert isinstance(two, EagleDrafter)
    assert set(two.head.state_dict()) == set(exported.state_dict())  # no embeddings
    embeds, features = torch.randn(2, 1, 9, 32)
    positions = torch.arange(9)[None] + 100
    logits = [target.lm_logits(drafter.head(embeds, features, positions)) for drafter in (one, two)]
    assert torch.equal(*logits)
    trees = [drafted(drafter, target) for drafter in (one, two)]
    for name in ("tokens", "parents", "q_logits", "scores"):
        assert torch.equal(*(getattr(tree, name) for tree in trees)), name
    assert two.describe() == {**one.describe(), "public": True}

    first, second = (
        FuzzyDecoder(target, drafter).generate(PROMPTS, max_new_tokens=16, do_sample=False) for drafter in (one, two)
    )
    assert [row.target_forwards for row in first.stats.rows] == [row.target_forwards for row in second.stats.rows]
    assert second.stats.drafter["public"]
    assert second.sequences == first.sequences == reference(model, PROMPTS, max_new_tokens=16)


def eagle_by_hand(weights: dict[str, Tensor], embeds: Tensor, features: Tensor, theta: float, eps: float) -> Tensor:
    """The public head's outputs [M, H] for one sequence, four heads of attention on two of keys, from its tensors."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def turned(x: Tensor) -> Tensor:  # [heads, M, D], by position
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    x = linear("fc", torch.cat([embeds, features], -1))
    q, k, v = (linear(f"layers.0.self_attn.{n}_proj", x).unflatten(-1, (-1, 8)).transpose(0, 1) for n in "qkv")
    k, v = turned(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    seen = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True).transpose(0, 1).flatten(1)
    x = x + linear("layers.0.self_attn.o_proj", seen)
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weights["layers.0.post_attention_layernorm.weight"]
    gate = F.silu(linear("layers.0.mlp.gate_proj", y)) * linear("layers.0.mlp.up_proj", y)
    return x + linear("layers.0.mlp.down_proj", gate)


@pytest.mark.parametrize("theta", [None, 300.0])
def test_outputs_are_those_of_eagles_formulas(theta: float | None, tmp_path: Path) -> None:
    """No norm before the first layer nor at the end; positions turn by the head's base, 10000 where it names none."""
    target = Target(tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 50.0}))
    head = make_head(target, fc_bias=True)
    config = public_config(head, rms_norm_eps=1e-2, rope_theta=theta)
    if theta is None:
        del config["rope_theta"]
    tensors = public_tensors(head, target)
    loaded = load_head(write_public(tmp_path, config, tensors), target)
    embeds, features = torch.randn(2, 9, 32)
    ours = loaded(embeds[None], features[None], torch.arange(9)[None])[0]
    torch.testing.assert_close(ours, eagle_by_hand(tensors, embeds, features, theta or 1e4, 1e-2), atol=1e-4, rtol=1e-4)


def test_heads_of_other_sizes_and_tensors_are_refused(tmp_path: Path) -> None:
    target = toy_target()
    head = make_head(target)
    config, tensors = public_config(head), public_tensors(head, target)

    def refused(error: type[Exception], match: str, config: dict[str, Any] = config, **changes: Tensor | None) -> None:
        stored = {name: value for name, value in {**tensors, **changes}.items() if value is not None}
        directory = write_public(tmp_path / "head", config, stored)
        for load in (load_drafter, load_head):
            with pytest.raises(error, match=match):
                load(directory, target)

    embeddings = "embed_tokens.weight"
    refused(VocabularyMismatchError, r"vocab_size: 65 against 64", **{embeddings: torch.zeros(65, 32)})
    refused(CheckpointError, r"embed_size 16, but toy-llama has 32", **{embeddings: torch.zeros(64, 16)})
    refused(CheckpointError, r"hidden_size 48, but toy-llama has 32", {**config, "hidden_size": 48})
    refused(CheckpointError, "vocab_size must be a whole number from 1 to .*, got None", **{embeddings: None})
    refused(CheckpointError, r"missing \['layers.0.mlp.up_proj.weight'\]", **{"layers.0.mlp.up_proj.weight": None})
    refused(CheckpointError, r"unexpected \['lm_head.weight'\]", **{"lm_head.weight": torch.zeros(64, 32)})
    norm = "layers.0.input_layernorm.weight"
    refused(CheckpointError, rf"unexpected \['{norm}'\]", **{norm: torch.ones(32)})
    refused(CheckpointError, "wrong shape", {**config, "intermediate_size": 24})
    refused(CheckpointError, "does not describe a Llama layer.*hidden_size", {"model_type": "eagle"})
    refused(CheckpointError, "does not describe a Llama layer.*multiple", {**config, "num_attention_heads": 5})


def test_pickles_are_refused_and_converted_by_the_user(tmp_path: Path) -> None:
    target = toy_target()
    head = make_head(target)
    tensors = public_tensors(head, target)
    directory = write_public(tmp_path / "head", public_config(head), {})
    for legacy in (True, False):
        torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(CheckpointError, match="Nothing is unpickled here") as raised:
            load_drafter(directory, target)
    exec(str(raised.value).splitlines()[-1], {})
    assert torch.equal(load_head(directory, target).fc.weight, head.fc.weight)


def test_heads_of_other_programs_are_refused_by_name(tmp_path: Path) -> None:
    """By the config alone, since weights may be in a format that is not read, or by the tensors alone."""
    target = toy_target()

    def refused(config: dict[str, object], tensors: dict[str, Tensor], message: str) -> None:
        directory = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        write_public(directory, {"model_type": "llama", "hidden_size": 32, **config}, tensors)
        for load in (load_drafter, load_head):
            with pytest.raises(CheckpointError, match=f"{directory} is an? {message}"):
                load(directory, target)

    refused({"architectures": ["LlamaForCausalLMEagle3"]}, {}, "EAGLE-3 head of another program, without model.safe")
    refused({"speculators_model_type": "eagle3"}, {}, "EAGLE-3 head of another program, without model.safetensors")
    of_eagle_3 = {"fc.weight": torch.zeros(32, 96), "d2t": torch.zeros(40)}
    torch.save(of_eagle_3, write_public(tmp_path / "pickled", {"model_type": "llama"}, {}) / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled is an EAGLE-3 head .*Nothing is unpickled here"):
        load_drafter(tmp_path / "pickled", target)
    converted = {"fusion_fc.weight": torch.zeros(32, 64)}
    refused({"speculators_model_type": "eagle"}, converted, "head of speculators of type 'eagle'")
    refused({"architectures": ["EagleLlamaForCausalLM"]}, {}, "EAGLE-1/2 head of another program, without model.safete")
