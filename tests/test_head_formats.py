"""Heads go out to other programs' formats and come back bit by bit; what a format cannot express is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fsd_core.errors import CheckpointError
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import EagleDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine import Callback, RoundReport
from fsd_infer.heads.config import EagleConfig, usual_layers
from fsd_infer.heads.export import FORMATS, TOKEN_MAP, ExportFacts, export_head
from fsd_infer.heads.head import EagleHead
from fsd_train.cli import main as cli
from fsd_train.models.start import initialise_from, set_draft_vocabulary
from tests.families import (
    FAMILIES,
    VOCAB,
    OracleDrafter,
    altered,
    load_head,
    options_of,
    reference,
    save_head,
    tiny_model,
    tiny_prompts,
)
from tests.published_blocks import tiny_target
from tests.published_heads import layout

LAYERS = 8
REDUCED = torch.arange(1, VOCAB, 2)
PROMPTS = tiny_prompts((7, 12))
UP = "layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", num_hidden_layers=LAYERS))


def facts(target: Target) -> ExportFacts:
    return ExportFacts("owner/target", ["LlamaForCausalLM"], LAYERS, lambda ids: target.lm_head_rows(ids)[0])


def make_head(target: Target, ids: Tensor | None = None, **options: Any) -> EagleHead:
    """A head whose drafts are sometimes right, whose every weight matters, with weights that bf16 holds."""
    torch.manual_seed(1)
    size = None if ids is None else len(ids)
    head = EagleHead(EagleConfig.for_target(target, "llama", draft_vocab_size=size, **options))
    initialise_from(head, target)
    set_draft_vocabulary(head, ids, target)
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
    if to == "vllm":  # the head is the same in each format
        out = FuzzyDecoder(target, drafter).generate(PROMPTS, max_new_tokens=12, do_sample=False)
        assert out.sequences == reference(target.model, PROMPTS, max_new_tokens=12)


@pytest.mark.parametrize("name", ["eagle3, latent", "eagle3, whole latent queries"])
def test_latent_attention_goes_out_in_our_format_alone(name: str, tmp_path: Path) -> None:
    head = load_head(layout(name).write(tmp_path / "theirs"), Target(tiny_target()))
    for to in FORMATS:
        with pytest.raises(CheckpointError, match=f"cannot be written for {to}: latent attention"):
            export_head(head, tmp_path / to, to, ExportFacts("owner/target", [], 4, lambda ids: torch.zeros(0)))
    ours = load_head(save_head(tmp_path / "ours", head, head.config.target or {}, dtype=torch.float32))
    assert options_of(ours) == options_of(head)
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in head.state_dict().items())


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


def test_spellings_of_eagle3(target: Target, tmp_path: Path) -> None:
    """One head, as different programs write it, is one head."""
    head = make_head(target, REDUCED, **EAGLE3)
    export_head(head, tmp_path / "vllm", "vllm", facts(target))
    stored = load_file(tmp_path / "vllm" / "model.safetensors")
    top, nested = "eagle_aux_hidden_state_layer_ids", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    layer = {name: value for name, value in stored.items() if "midlayer." in name}
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in layer.items()}
    shuffled = torch.randperm(len(REDUCED))
    table = target.model.get_input_embeddings().weight.detach()
    variants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "layers.0": ({}, {**dict.fromkeys(layer), **renamed}),
        "ids at the top": ({"eagle_config": None}, {}),
        "ids of the layers": ({top: None, "eagle_config": nested}, {}),
        "no ids": ({top: None, "eagle_config": None, "norm_before_residual": None}, {}),
        "no t2d": ({}, {"t2d": None}),
        "the target's embeddings": ({}, {"embed_tokens.weight": table.bfloat16()}),
        "what speculators keeps": ({}, {"verifier_norm.weight": torch.ones(32)}),
        "another order": ({}, {"lm_head.weight": lambda rows: rows[shuffled],
         "d2t": REDUCED[shuffled] - torch.arange(len(REDUCED))}),
    }  # fmt: skip
    for name, (config, tensors) in variants.items():
        loaded = load_head(altered(tmp_path / "vllm", tmp_path / name, config, tensors), target)
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


def _disk_full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("to", ["speculators", None])
def test_an_export_replaces_a_head_whole_or_not_at_all(
    to: str | None, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk between weights and config, on a kill as directories change places, and when not asked to."""
    target.model.save_pretrained(tmp_path / "target")
    record = {"hyperparameters": {"target": str(tmp_path / "target")}}
    for name, ids in (("old", None), ("new", REDUCED)):
        save_head(tmp_path / name, make_head(target, ids, **EAGLE3), target.fingerprint(), record)
    out, command = tmp_path / "out", [] if to is None else ["--to", to]
    assert cli(["export", str(tmp_path / "old"), str(out), *command]) == 0

    def files() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in out.iterdir()}

    before, again = files(), ["export", str(tmp_path / "new"), str(out), *command]
    assert cli(again) == 2 and "out is there already: add --overwrite to replace it" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        if to is None:
            patch.setattr(EagleConfig, "save_pretrained", _disk_full)
        else:
            patch.setattr("fsd_infer.heads.export.write_json", _disk_full)
        assert cli([*again, "--overwrite"]) == 2
        said = capsys.readouterr().err
        assert "No space left on device" in said and str(out) in said and ".partial" not in said
    assert files() == before and {path.name for path in tmp_path.iterdir()} == {"target", "old", "new", "out"}
    out.rename(tmp_path / ".out.old")  # as a kill leaves it between the two renames
    (tmp_path / ".out.partial").mkdir()
    assert cli([*again, "--overwrite"]) == 0
    assert files().keys() == before.keys() and files() != before
    assert {path.name for path in tmp_path.iterdir()} == {"target", "old", "new", "out"}
    assert torch.equal(load_head(out, target).draft_ids, REDUCED)  # type: ignore[arg-type]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("kept")
    for place in ("notes", "target", "."):
        monkeypatch.chdir(tmp_path)
        assert cli(["export", "new", place, *command, "--overwrite"]) == 2
    assert (tmp_path / "notes" / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_features_are_the_layers_outputs_before_the_final_norm(family: str) -> None:
    """In a forward of its own, which training runs, and in prompts and trees, whatever calls the model."""
    model = tiny_model(family)
    target, found = Target(model), list[Tensor]()
    captured = [0, int(model.config.num_hidden_layers) - 1]
    target.capture_layers(captured)

    class Seen(Callback):
        def on_round(self, report: RoundReport) -> None:
            found.append(
                report.tensors.features[0, : 7 if report.phase == "prefill" else int(report.verdict.accepted) + 1]
            )

    ids = FuzzyDecoder(target, OracleDrafter(target)).generate(
        PROMPTS[:1], max_new_tokens=9, do_sample=False, callbacks=[Seen()]
    ).sequences[0]  # fmt: skip
    raw, text = list[Tensor](), torch.tensor([PROMPTS[0] + ids])
    for layer in target.layers(captured):
        layer.register_forward_hook(lambda *x: raw.append(x[2][0] if isinstance(x[2], tuple) else x[2]))
    features = target.features(text)[0]
    decoded = torch.cat(found)[: len(text[0]) - 1]
    for states in (features, decoded):
        inner = target.features_of(states, captured)[:, target.hidden_size :]
        torch.testing.assert_close(inner, torch.cat(raw[:2], -1)[0][: len(states)], rtol=1e-4, atol=1e-4)


def quantised(kind: str, stored: dict[str, Tensor]) -> None:
    """Make a weight [64, 32] one of fp8 or nvfp4, and keep what that stands for as its other spelling."""
    made, rows = torch.randint(0, 16, stored[UP].shape, generator=torch.Generator().manual_seed(0)), len(stored[UP])
    if kind == "nvfp4":  # two numbers a byte, the first in its low half; a scale for 16 of them, and one for all
        number = [[0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7] * (-1) ** (code >> 3) for code in made.flatten().tolist()]
        scales = torch.rand(rows, 2).to(torch.float8_e4m3fn)
        stored[f"{UP}_scale"], stored[f"{UP}_scale_2"] = scales, torch.tensor(0.5)
        value = torch.tensor(number).view(rows, 2, 16) * scales.float()[..., None] * 0.5
        stored[UP] = (made[:, ::2] + 16 * made[:, 1::2]).to(torch.uint8)
    else:
        scales = {"of all": torch.tensor(0.25), "of rows": torch.rand(rows), "of blocks": torch.rand(1, 1)}[kind]
        stored[UP], stored[f"{UP}_scale" + "_inv" * (kind == "of blocks")] = made.to(torch.float8_e4m3fn), scales
        value = made * (scales[:, None] if scales.dim() == 1 else scales)
    stored["wanted"] = value.reshape(made.shape)


@pytest.mark.parametrize("kind", ["of all", "of rows", "of blocks", "nvfp4"])
def test_quantised_weights_are_their_products_with_their_scales(kind: str, target: Target, tmp_path: Path) -> None:
    """As Model-Optimizer exports heads, in fp8 and nvfp4."""
    wanted: list[Tensor] = []
    export_head(make_head(target, layout="eagle"), tmp_path / "whole", "vllm", facts(target))

    def change(stored: dict[str, Tensor]) -> None:
        quantised(kind, stored)
        wanted.append(stored.pop("wanted"))

    directory = altered(tmp_path / "whole", tmp_path / "head", tensors=change)
    assert torch.equal(load_head(directory, target).get_parameter(UP), wanted[0])
    assert load_drafter(str(directory), target).name == "eagle"
    wrong = altered(directory, tmp_path / "wrong", tensors={f"{UP}_scale": torch.ones(3, 3)})
    with pytest.raises(CheckpointError, match="scales .* do not fit|is a quantised head"):
        load_head(wrong, target)
