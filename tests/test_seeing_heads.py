"""Heads after images: MTP layers and heads with M-RoPE stand where the target's tokens do, others count tokens.

MTP layers are held against transformers' parts, EAGLE-3 heads against the plain computation of tests/test_odd_heads.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsd_core.errors import CheckpointError
from fsd_infer import FuzzyDecoder, TreeShape
from fsd_infer.drafters.eagle import EagleDrafter, EagleSession
from fsd_infer.drafters.mtp import MtpSession
from fsd_infer.heads.export import ExportFacts, export_head
from fsd_infer.heads.head import EagleHead
from tests.families import recorded_drafts
from tests.seeing_toys import save_seeing, seeing_decoder
from tests.test_odd_heads import Odd
from tests.test_seeing import LIMITS, SHOWN, encoded, expected_of

PARTS = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def with_mtp(directory: Path) -> Path:
    """A tiny Qwen3.5 that sees, with an MTP layer in its files."""
    torch.manual_seed(5)
    save_seeing(directory, "qwen3_5", with_processor=True)
    state, layer = load_file(directory / "model.safetensors"), "model.language_model.layers.1."
    own = {name.replace(layer, "mtp.layers.0."): x.clone() for name, x in state.items() if name.startswith(layer)}
    for name in own:  # so that places matter
        own[name] *= 4 if name.endswith(("q_proj.weight", "o_proj.weight")) else 1
    own |= {f"mtp.{part}.weight": 0.1 * torch.randn(32) for part in PARTS[1:]}
    save_file({**state, **own, "mtp.fc.weight": torch.randn(32, 64) / 4}, directory / "model.safetensors")
    return directory


def whole(decoder: FuzzyDecoder, messages: Any, text: list[int]) -> tuple[Tensor, Tensor]:
    """The target's final states and its two layers' outputs [3, 1, M, H], and positions [3, 1, M].

    Over a prompt with images and more tokens.
    """
    model: Any = decoder.target.model
    ids, image_input = encoded(decoder, messages)
    given = {} if image_input is None else dict(image_input.inputs)
    if "mm_token_type_ids" in given:
        given["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(text) - len(ids)))
    tokens = torch.tensor([text])
    grid = {name: value for name, value in given.items() if name in ("image_grid_thw", "mm_token_type_ids")}
    places = torch.arange(len(text)).expand(3, 1, -1)
    if image_input is not None:
        places = model.model.get_rope_index(tokens, attention_mask=torch.ones_like(tokens), **grid)[0]
    with torch.no_grad(), decoder.target.plain_stack.captured(range(2)) as found:  # type: ignore[attr-defined]
        model.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=places, **given)
    return torch.stack(found), places


def next_logits(decoder: FuzzyDecoder, states: Tensor, places: Tensor, text: list[int]) -> Tensor:
    """What the layer estimates of the token after the text, without a cache."""
    target, layer = decoder.target, decoder.drafter.head.layers[0]  # type: ignore[attr-defined]
    embeds, count = target.embed(torch.tensor([text[1:]])), len(text) - 1
    causal = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    angles = target.decoder.rotary_emb(embeds, places[:, :, :count])  # type: ignore[operator, union-attr]
    with torch.no_grad():
        return target.lm_logits(layer(embeds, states[:, :count], causal, None, position_embeddings=angles)[:, -1])[0]


@pytest.mark.parametrize("shape", [TreeShape.chain(3), TreeShape(3, 2, 6)], ids=["chain", "tree"])
def test_layers_stand_where_the_target_does(shape: TreeShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ragged batch, beside a prompt without images, and in the rounds after it."""
    decoder = FuzzyDecoder.from_pretrained(
        str(with_mtp(tmp_path)), dtype="fp32", device="cpu", tree=f"{shape.depth},{shape.width},{shape.nodes}"
    )
    seen = recorded_drafts(MtpSession, lambda session: session.cache.offsets.tolist(), monkeypatch)
    made = decoder.generate(SHOWN, **LIMITS)
    assert made.sequences == [expected_of(decoder, messages) for messages in SHOWN]
    offsets, tree = seen[0]  # all rows have their prompt and one token
    assert offsets[0] < 0 == offsets[1], "images move nothing: the comparison would be hollow"
    for row, messages in enumerate(SHOWN):
        text = [*encoded(decoder, messages)[0], made.sequences[row][0]]
        states, places = whole(decoder, messages, text)
        wanted = next_logits(decoder, states[0], places, text)
        found = tree.q_logits[row, tree.q_index[row, 0]]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        if row != 1:
            plain = next_logits(decoder, states[0], torch.arange(len(text)).expand(3, 1, -1), text)
            assert float((found - plain).abs().max()) > 1e-2


# EAGLE-3 heads -------------------------------------------------------------------------------------------------------

H, HEADS, GROUPS, WIDTH, THETA, EPS = 32, 4, 2, 8, 10_000.0, 1e-6
DRAFTED = list(range(0, 320, 2))
SECTIONS = {"qwen2_5_vl": ("mrope", False, [0, 0, 1, 2]), "qwen3_vl": ("default", True, [0, 1, 2, 0])}


def eagle3_tensors() -> dict[str, Tensor]:
    torch.manual_seed(7)
    shapes = {
        "fc": (H, 2 * H), "lm_head": (len(DRAFTED), H), "layers.0.self_attn.q_proj": (HEADS * WIDTH, 2 * H),
        "layers.0.self_attn.k_proj": (GROUPS * WIDTH, 2 * H), "layers.0.self_attn.v_proj": (GROUPS * WIDTH, 2 * H),
        "layers.0.self_attn.o_proj": (H, HEADS * WIDTH), "layers.0.mlp.gate_proj": (24, H),
        "layers.0.mlp.up_proj": (24, H), "layers.0.mlp.down_proj": (H, 24),
    }  # fmt: skip
    norms = ("norm", "layers.0.hidden_norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    made = {name: torch.randn(shape) * (0.2 if name == "fc" else 0.5) for name, shape in shapes.items()}
    made |= {name: 1 + 0.2 * torch.randn(H) for name in norms}
    made = {f"{name}.weight": value for name, value in made.items()}
    return {**made, "d2t": torch.tensor(DRAFTED) - torch.arange(len(DRAFTED))}


def eagle3_config(family: str, kind: str) -> dict[str, Any]:
    """As SpecForge writes it for this target, with M-RoPE or without, or as speculators does."""
    name, interleaved, _ = SECTIONS[family]
    rope = {"rope_type" if name == "default" else "type": name, "mrope_section": [2, 1, 1]}
    rope |= {"mrope_interleaved": True} if interleaved else {}
    layer = dict(
        model_type="llama", hidden_size=H, intermediate_size=24, num_attention_heads=HEADS, head_dim=WIDTH,
        num_key_value_heads=GROUPS, num_hidden_layers=1, rms_norm_eps=EPS, vocab_size=320, rope_theta=THETA,
        max_position_embeddings=512, rope_scaling=None if kind == "plain" else rope,
    )  # fmt: skip
    own = dict(draft_vocab_size=len(DRAFTED), eagle_aux_hidden_state_layer_ids=[1, 2], norm_before_residual=False)
    if kind == "speculators":
        return {**own, "speculators_model_type": "eagle3", "transformer_layer_config": layer}
    return {**own, **layer, "architectures": ["LlamaForCausalLMEagle3"]}


@pytest.mark.parametrize(("family", "kind"), [
    ("qwen2_5_vl", "mrope"), ("qwen3_vl", "mrope"), ("qwen2_5_vl", "plain"), ("qwen3_vl", "speculators"),
])  # fmt: skip
def test_eagle_heads_stand_where_they_were_trained_to(family: str, kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """In a ragged batch, beside a prompt without images: at the root and at every node below."""
    tensors, decoder = eagle3_tensors(), seeing_decoder(family)
    (tmp_path / "config.json").write_text(json.dumps(eagle3_config(family, kind)))
    save_file(tensors, tmp_path / "model.safetensors")
    drafter = EagleDrafter.from_pretrained(tmp_path, decoder.target, TreeShape(3, 2, 10))
    seen = recorded_drafts(EagleSession, lambda session: session.cache.offsets, monkeypatch)
    made = decoder.generate(SHOWN, drafter=drafter, **LIMITS)
    assert made.sequences == [expected_of(decoder, messages) for messages in SHOWN]
    offsets, tree = seen[0]
    assert (offsets is not None) == (kind == "mrope")
    target, plain = decoder.target, Odd(eagle3_config(family, "plain"), tensors, is_eagle3=True)
    for row, messages in enumerate(SHOWN):
        text = [*encoded(decoder, messages)[0], made.sequences[row][0]]
        states, places = whole(decoder, messages, text)
        layers = torch.cat([*states[1:, 0, :-1]], -1)
        nodes = (tree.q_index[row] >= 0).nonzero()[:, 0].tolist()
        depths = set()
        for node in nodes:
            path = [int(tree.tokens[row, i]) for i in tree.ancestors[row, node].nonzero()[1:, 0].tolist()]
            embeds = target.embed(torch.tensor([*text[1:], *path]))
            ahead = torch.arange(1, len(path) + 1).expand(3, -1)
            mrope = torch.cat([places[:, 0, :-1], places[:, 0, -2:-1] + ahead], 1)
            index = torch.arange(len(embeds)).expand(3, -1)
            wanted, other = (
                plain.eagle3_logits(plain.output(embeds, layers, at[SECTIONS[family][2]].T))
                for at in ((mrope, index) if kind == "mrope" else (index, mrope))
            )
            found = tree.q_logits[row, tree.q_index[row, node]]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            assert row == 1 or float((found - other).detach().abs().max()) > 1e-2
            depths.add(len(path))
        assert depths == {0, 1, 2}


def test_positions_are_made_once_for_target_and_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each prompt with images, with and without beams, whose heads stand where the target does, too."""
    decoder, placed, told = seeing_decoder("qwen2_5_vl"), list[int](), list[list[int]]()
    save_file(eagle3_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(eagle3_config("qwen2_5_vl", "mrope")))
    drafter = EagleDrafter.from_pretrained(tmp_path, decoder.target)
    kind, set_rotary = type(decoder.target.model), EagleSession.set_rotary
    place = kind._prepare_position_ids_for_generation

    def counted(model: Any, ids: Tensor, given: Any) -> Tensor:
        placed.append(ids.shape[1])
        return place(model, ids, given)

    def tell(session: EagleSession, prompts: Tensor, offsets: Tensor) -> None:
        told.append(offsets.tolist())
        set_rotary(session, prompts, offsets)

    expected = {beams: [expected_of(decoder, each, num_beams=beams) for each in SHOWN] for beams in (1, 2)}
    monkeypatch.setattr(kind, "_prepare_position_ids_for_generation", counted)
    monkeypatch.setattr(EagleSession, "set_rotary", tell)
    lengths = [len(encoded(decoder, SHOWN[row])[0]) for row in (0, 2)]
    for beams, answers in expected.items():
        made = decoder.generate(SHOWN, drafter=drafter, num_beams=beams, **LIMITS)
        assert made.sequences == answers and placed == lengths
        assert told[-1][0] < 0 == told[-1][1] and len(told) == beams
        placed.clear()


def test_mrope_survives_an_export_and_unknown_sections_are_refused(tmp_path: Path) -> None:
    target = seeing_decoder("qwen3_vl").target
    save_file(eagle3_tensors(), tmp_path / "model.safetensors")
    config = eagle3_config("qwen3_vl", "mrope")
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = EagleHead.from_pretrained(tmp_path, target)
    facts = ExportFacts("x", ["Qwen3VLForConditionalGeneration"], 2, lambda ids: torch.zeros(1))
    export_head(head, tmp_path / "out", "vllm", facts, torch.float32)
    again = EagleHead.from_pretrained(tmp_path / "out", target)
    head.save_pretrained(tmp_path / "ours")
    for other in (again, EagleHead.from_pretrained(tmp_path / "ours", target)):
        assert other.config.layer == head.config.layer and other.turns_as_target
        places = torch.randint(9, (3, 1, 4))
        x = torch.zeros(1)
        assert all(map(torch.equal, other.rotary_emb(x, places), head.rotary_emb(x, places)))
    with pytest.raises(CheckpointError, match="M-RoPE is unknown there"):
        export_head(head, tmp_path / "other", "speculators", facts)
    config["rope_scaling"]["mrope_section"] = [2, 2, 1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="adds up to 5, not to half of head_dim, 4"):
        EagleHead.from_pretrained(tmp_path, target)
