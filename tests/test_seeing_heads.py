"""MTP layers draft after images by the target's own positions (M-RoPE), held against transformers' parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsd_infer import FuzzyDecoder, TreeShape
from fsd_infer.drafters.mtp import MtpSession
from tests.families import recorded_drafts
from tests.seeing_toys import save_seeing
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
    """The target's final states [1, M, H] and positions [3, 1, M] over a prompt with images and more tokens."""
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
    with torch.no_grad():
        out = model.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=places, **given)
    return out.last_hidden_state, places


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
        wanted = next_logits(decoder, states, places, text)
        found = tree.q_logits[row, tree.q_index[row, 0]]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        if row != 1:
            plain = next_logits(decoder, states, torch.arange(len(text)).expand(3, 1, -1), text)
            assert float((found - plain).abs().max()) > 1e-2
