"""Heads go out to other programs' formats and come back bit by bit; what a format cannot express is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsd_infer import EagleDrafter, FuzzyDecoder, Target, load_drafter
from fsd_infer.errors import CheckpointError, VocabularyMismatchError
from fsd_infer.heads.config import EagleConfig, usual_layers
from fsd_infer.heads.export import FORMATS, TOKEN_MAP, TargetFacts, export_head
from fsd_infer.heads.head import EagleHead
from fsd_train.cli import main as cli
from fsd_train.models.start import choose, initialise_from
from tests.families import VOCAB, load_head, options_of, reference, save_head, tiny_model, tiny_prompts

LAYERS = 8
REDUCED = torch.arange(1, VOCAB, 2)
PROMPTS = tiny_prompts((7, 12))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", num_hidden_layers=LAYERS))


def facts(target: Target) -> TargetFacts:
    return TargetFacts("owner/target", ["LlamaForCausalLM"], LAYERS, lambda ids: target.lm_head_rows(ids)[0])


def make_head(target: Target, ids: Tensor | None = None, **options: Any) -> EagleHead:
    """A head whose drafts are sometimes right, whose every weight matters, with weights that bf16 holds."""
    torch.manual_seed(1)
    size = None if ids is None else len(ids)
    head = EagleHead(EagleConfig.for_target(target, "llama", draft_vocab_size=size, **options))
    initialise_from(head, target)
    choose(head, ids, target)
    for parameter in head.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
        parameter.data = parameter.data.bfloat16().float()
    return head.eval().requires_grad_(False)


EAGLE3 = {"layout": "eagle3"}
CASES: dict[str, tuple[dict[str, Any], Tensor | None, set[str]]] = {
    "eagle": ({"layout": "eagle"}, None, {"eagle", "vllm", "sglang"}),
    "eagle with a bias": ({"layout": "eagle", "fc_bias": True}, None, {"eagle", "sglang"}),
    "fsd without its options": ({"layout": "fsd"}, REDUCED, {"eagle", "vllm", "sglang"}),
    "fsd": ({"layout": "fsd", "final_norm": True, "fused_layers": [1, 3]}, None, set()),
    "eagle3": (EAGLE3, REDUCED, set(FORMATS)),
    "eagle3, whole vocabulary": (EAGLE3, None, set(FORMATS)),
    "eagle3, narrow MLP, other layers": ({**EAGLE3, "fused_layers": [0, 4, 6], "intermediate_size": 24}, REDUCED,
     {"vllm", "sglang", "speculators"}),
    "eagle3.1": ({**EAGLE3, "fc_norm": True, "norm_output": True}, REDUCED, {"vllm", "sglang", "speculators"}),
    "eagle3, two layers, four fused": ({**EAGLE3, "num_layers": 2, "fused_layers": [0, 1, 4, 6]}, REDUCED, {"vllm",
     "speculators"}),
    "eagle3 with the target's LM head": ({**EAGLE3, "own_lm_head": False}, REDUCED, set(FORMATS)),
}  # fmt: skip


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_import_of_an_export_is_bit_exact(case: str, to: str, target: Target, tmp_path: Path) -> None:
    options, ids, formats = CASES[case]
    head = make_head(target, ids, **options)
    if to not in formats:
        with pytest.raises(CheckpointError, match=rf"cannot be written for {to}: .*(Use|[Tt]rain)"):
            export_head(head, tmp_path, to, facts(target))
        assert not list(tmp_path.iterdir())
        return
    remarks = export_head(head, tmp_path, to, facts(target))
    loaded = load_head(tmp_path, target)
    eagle3 = head.config.layout == "eagle3"
    state, expected = loaded.state_dict(), dict(head.state_dict())
    if not eagle3:
        assert expected.pop("draft_ids", None) is None or len(remarks) == 1
        if ids is not None and to == "sglang":
            assert torch.equal(torch.load(tmp_path / TOKEN_MAP, weights_only=True), ids)
    elif head.lm_head is None:
        expected["lm_head.weight"] = target.lm_head_rows(ids)[0].bfloat16().float()
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert loaded.config.fused_layers == head.config.fused_layers

    embeds, features = torch.randn(1, 9, 32), torch.randn(1, 9, head.config.feature_width)
    outputs = [one(embeds, features, torch.arange(9)[None] + 100) for one in (head, loaded)]
    assert torch.equal(*outputs)
    assert torch.equal(*(one.readout(out) for one, out in zip((head, loaded), outputs, strict=True)))

    drafter = load_drafter(tmp_path, target)
    assert isinstance(drafter, EagleDrafter) and drafter.public
    out = FuzzyDecoder(target, drafter).generate(PROMPTS, max_new_tokens=12, do_sample=False)
    assert out.sequences == reference(target.model, PROMPTS, max_new_tokens=12)


def test_both_numberings_of_layers_and_what_is_always_written(target: Target, tmp_path: Path) -> None:
    export_head(make_head(target, REDUCED, **EAGLE3), tmp_path / "vllm", "vllm", facts(target))
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # 2, n/2, n-3
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    assert config["norm_before_residual"] is False and config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == len(REDUCED) and config["target_model"] == "owner/target"
    stored = load_file(tmp_path / "vllm" / "model.safetensors")
    assert torch.equal(stored["d2t"] + torch.arange(len(REDUCED)), REDUCED)
    assert stored["t2d"].nonzero().squeeze(1).tolist() == REDUCED.tolist()
    export_head(make_head(target, layout="eagle"), tmp_path / "sglang", "sglang", facts(target))
    assert not load_file(tmp_path / "sglang" / "model.safetensors")["fc.bias"].any()


def rewrite(directory: Path, out: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """The exported head with some options (None: gone) and tensors replaced."""
    out.mkdir()
    old = json.loads((directory / "config.json").read_text())
    merged = {name: value for name, value in {**old, **config}.items() if value is not None}
    (out / "config.json").write_text(json.dumps(merged))
    save_file({name: value for name, value in tensors.items() if value is not None}, out / "model.safetensors")
    return out


def test_spellings_of_eagle3(target: Target, tmp_path: Path) -> None:
    """One head, as different programs write it, is one head."""
    head = make_head(target, REDUCED, **EAGLE3)
    export_head(head, tmp_path / "vllm", "vllm", facts(target))
    stored = load_file(tmp_path / "vllm" / "model.safetensors")
    top, nested = "eagle_aux_hidden_state_layer_ids", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in stored.items()}
    shuffled = torch.randperm(len(REDUCED))
    table = target.model.get_input_embeddings().weight.detach()
    variants: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
        "layers.0": ({}, renamed),
        "ids at the top": ({"eagle_config": None}, stored),
        "ids of the layers": ({top: None, "eagle_config": nested}, stored),
        "no ids": ({top: None, "eagle_config": None, "norm_before_residual": None}, stored),
        "no t2d": ({}, {name: value for name, value in stored.items() if name != "t2d"}),
        "the target's embeddings": ({}, {**stored, "embed_tokens.weight": table.bfloat16()}),
        "what speculators keeps": ({}, {**stored, "verifier_norm.weight": torch.ones(32)}),
        "another order": ({}, {**stored, "lm_head.weight": stored["lm_head.weight"][shuffled],
         "d2t": REDUCED[shuffled] - torch.arange(len(REDUCED))}),
    }  # fmt: skip
    for name, (config, tensors) in variants.items():
        loaded = load_head(rewrite(tmp_path / "vllm", tmp_path / name, config, tensors), target)
        assert options_of(loaded) == options_of(head), name
        assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in head.state_dict().items()), name


def test_embeddings_of_its_own_and_another_width(target: Target, tmp_path: Path) -> None:
    """As published for targets whose embeddings the head does not share: ``target_hidden_size`` differs."""
    config = EagleConfig(
        hidden_size=24, vocab_size=VOCAB, layer={**make_head(target).config.layer, "hidden_size": 24},
        layout="eagle3", target_hidden_size=32, draft_vocab_size=len(REDUCED), fused_layers=usual_layers(LAYERS),
        own_lm_head=True, own_embeddings=True,
    )  # fmt: skip
    head = EagleHead(config).requires_grad_(False)
    assert head.draft_ids is not None
    head.draft_ids.copy_(REDUCED)
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()
    for to in ("vllm", "sglang", "speculators"):
        export_head(head, tmp_path / to, to, facts(target))
        loaded = load_head(tmp_path / to, target)
        assert options_of(loaded) == options_of(head)
        assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in head.state_dict().items())
        decoder = FuzzyDecoder(target, load_drafter(tmp_path / to, target))
        out = decoder.generate(PROMPTS[:1], max_new_tokens=12, do_sample=False)
        assert out.sequences == reference(target.model, PROMPTS[:1], max_new_tokens=12)
    save_head(tmp_path / "ours", head, {"hidden_size": 32, "vocab_size": VOCAB})
    assert options_of(load_head(tmp_path / "ours", target)) == options_of(head)


def test_contradictions_are_refused(target: Target, tmp_path: Path) -> None:
    head = make_head(target, REDUCED, **EAGLE3)
    export_head(head, tmp_path / "vllm", "vllm", facts(target))
    stored = load_file(tmp_path / "vllm" / "model.safetensors")
    count, ids = len(REDUCED), "eagle_aux_hidden_state_layer_ids"
    refused: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"eagle_config": {ids: [2, 4, 5]}}, {}, "where ids should be one less"),
        ({ids: [2, 4], "eagle_config": None}, {}, r"fc fuses 3 layers, but config.json names \[1, 3\]"),
        ({ids: [0, 4, 5], "eagle_config": None}, {}, r"names \[-1, 3, 4\]"),
        ({"norm_before_fc": True}, {}, "one norm over all fused layers"),
        ({}, {"d2t": torch.zeros(count)}, "d2t is of type F32, not whole numbers"),
        ({}, {"d2t": torch.zeros(count, dtype=torch.long) + 5000}, "distinct ids from 0 to 96"),
        ({}, {"t2d": ~stored["t2d"]}, "d2t and t2d name different ids"),
        ({}, {"d2t": None, "t2d": None}, "has no d2t to say which"),
        ({}, {"fc.weight": torch.zeros(32, 97)}, "fuses no whole number of layers"),
        ({"num_hidden_layers": 10**9}, {}, "names 1000000000 layers"),
        ({}, {"midlayer.extra.weight": torch.zeros(3)}, r"unexpected \['layers.0.extra.weight'\]"),
        ({"speculators_model_type": "dflash"}, {}, "type 'dflash'; of that program's, eagle3 is read here"),
        ({"speculators_model_type": "eagle3", "norm_before_residual": None}, {}, "does not say norm_before_residual"),
    ]
    for number, (config, tensors, message) in enumerate(refused):
        directory = rewrite(tmp_path / "vllm", tmp_path / str(number), config, {**stored, **tensors})
        for load in (load_head, load_drafter):
            with pytest.raises(CheckpointError, match=message):
                load(directory, target)
    with pytest.raises(CheckpointError, match="does not say which layers it fuses"):
        load_head(rewrite(tmp_path / "vllm", tmp_path / "bare", {ids: None, "eagle_config": None}, stored))
    other = Target(tiny_model("llama", num_hidden_layers=LAYERS, vocab_size=VOCAB + 1))
    with pytest.raises(VocabularyMismatchError, match="vocab_size: 97 against 98"):
        load_head(tmp_path / "vllm", other)


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_command_converts_there_and_back(layout: str, target: Target, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path / "target")
    head = make_head(target, layout=layout, **({"own_lm_head": False} if layout == "eagle3" else {}))
    record = {"hyperparameters": {"target": str(tmp_path / "target")}}
    save_head(tmp_path / "head", head, target.fingerprint(), record)
    assert cli(["export", str(tmp_path / "head"), str(tmp_path / "out"), "--to", "vllm"]) == 0
    assert cli(["export", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    back = load_head(tmp_path / "back", target)
    assert not load_drafter(tmp_path / "back", target).describe().get("public")
    for name, value in head.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    assert cli(["export", str(tmp_path / "head"), str(tmp_path / "no"), "--to", "speculators"]) == (
        2 if layout == "eagle" else 0
    )
    assert cli(["export", str(tmp_path / "head"), str(tmp_path / "head"), "--to", "vllm"]) == 2  # it is kept
    for odd in (3, {"hyperparameters": 3}, {"hyperparameters": {"target": 3}}):  # a record is free-form
        save_head(tmp_path / "head", head, target.fingerprint(), odd)  # type: ignore[arg-type]
        assert cli(["export", str(tmp_path / "head"), str(tmp_path / "odd"), "--to", "vllm"]) == 2
    assert cli(["export", str(tmp_path / "target"), str(tmp_path / "no")]) == 2
    assert all(
        torch.equal(load_head(tmp_path / "head").state_dict()[name], value) for name, value in head.state_dict().items()
    )
