"""Random block heads in all layouts, see tests/published_blocks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests import published_blocks as blocks
from tests.published_blocks import BLOCK, CHANNELS, RANK, TAPS, WINDOW, H, Layout, V, backbone, of_blocks, rand, z_lab


def z_lab_head() -> Layout:
    tensors = backbone()
    return Layout(z_lab(), tensors, of_blocks(tensors, [0, 2], 1), BLOCK - 1)


SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


def sliding_head() -> Layout:
    """With attention sinks, as in Model-Optimizer's."""
    tensors = backbone()
    tensors |= {f"layers.{j}.self_attn.attention_sink_bias": rand(blocks.HEADS, scale=2) for j in range(2)}
    config = {**z_lab(attention_sink_bias=True), **SLIDING}
    estimate = of_blocks(tensors, [0, 2], 1, windows=[WINDOW, None], causal=[True, False])
    return Layout(config, tensors, estimate, BLOCK - 1)


def early_head() -> Layout:
    """SpecForge's DSpark, as its first versions nested the heads; layers are not named in order."""
    tensors = {
        **backbone(),
        **{f"logit_head.{name}": x for name, x in (blocks.markov_tensors("") | blocks.confidence_tensors()).items()},
    }
    config = z_lab(
        projector_type="dspark", markov_rank=RANK, markov_head_type="vanilla", confidence_head_with_markov=True,
        attention_mode="gqa", target_layer_ids=[2, 0], enable_confidence_head=True,
    )  # fmt: skip
    config |= {"architectures": ["DSparkDraftModel"]}
    return Layout(config, tensors, of_blocks(tensors, [2, 0], 0, blocks.vanilla, prefix="logit_head."), BLOCK)


def deep_spec(kind: str, copies: bool = True) -> Layout:
    """Keys at the top of a copied config, and copies of the target's tables."""
    tensors = {**backbone(), **({} if kind == "none" else blocks.markov_tensors(kind))}
    model = blocks.tiny_target()
    if copies:
        tensors |= {"embed_tokens.weight": model.get_input_embeddings().weight.data.clone()}
        tensors |= {"lm_head.weight": model.get_output_embeddings().weight.data.clone()}
    config = {
        **blocks.QWEN3, "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": blocks.MASK,
        "num_anchors": 8, "target_layer_ids": [0, 2], "num_target_layers": blocks.LAYERS,
        "markov_rank": 0 if kind == "none" else RANK, "enable_confidence_head": False,
    }  # fmt: skip
    config |= {} if kind == "none" else {"markov_head_type": kind}
    correct = {"none": None, "gated": blocks.gated, "rnn": blocks.rnn}[kind]
    return Layout(config, tensors, of_blocks(tensors, [0, 2], 0, correct), BLOCK)


def reduced_tables(ids: list[int]) -> dict[str, Tensor]:
    known = torch.zeros(V, dtype=torch.bool)
    known[ids] = True
    return {
        "embed_tokens.weight": rand(V, H, scale=2), "lm_head.weight": rand(len(ids), H), "t2d": known,
        "d2t": torch.tensor(ids) - torch.arange(len(ids)), "verifier_norm.weight": blocks.norm(H),
        "verifier_lm_head.weight": rand(len(ids), H),
    }  # fmt: skip


def speculators_head(kind: str, markov: str = "", anchor: bool = False) -> Layout:
    ids = [3, 0, 1] if kind == "dflash" else [0, 1, 3]
    markovs, refiners = blocks.markov_tensors(markov, len(ids)), blocks.refiner_tensors(len(ids))
    own = {"dflash": {}, "dspark": markovs, "xpress": refiners}[kind]
    tensors = {**backbone(), **reduced_tables(ids), **own}
    options = {"markov_rank": RANK, "markov_head_type": markov} if markov else {}
    options |= {"xpress_rank": RANK, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6} if kind == "xpress" else {}
    config = blocks.of_speculators(kind, len(ids), anchor, **options)
    correct = blocks.refiner if kind == "xpress" else {"": None, "vanilla": blocks.vanilla, "rnn": blocks.rnn}[markov]
    slides: dict[str, Any] = {}
    if kind == "dflash":
        config["transformer_layer_config"] = {**blocks.QWEN3, **SLIDING}
        slides = {"windows": [WINDOW, None], "causal": [True, False], "of_root": True}
    estimate = of_blocks(tensors, [0, blocks.LAYERS - 1], 1 - anchor, correct, **slides)
    return Layout(config, tensors, estimate, BLOCK - 1 + anchor, ids)


def domino_head(shifted: bool) -> Layout:
    tensors = {**backbone(), **blocks.domino_tensors()}
    config = z_lab(
        projector_type="domino",
        emb_dim=blocks.NARROW,
        gru_hidden_dim=blocks.STATE,
        pure_draft_prefix_len=1,
        shift_label=shifted,
    ) | {"architectures": ["DominoDraftModel"]}
    return Layout(config, tensors, of_blocks(tensors, [0, 2], 1 - shifted, blocks.domino), BLOCK - 1 + shifted)


def dflash2_head() -> Layout:
    tensors = backbone() | {
        f"candidate_selector.{name}_codebook": rand(V, RANK) for name in ("predecessor", "successor")
    }
    tensors["candidate_selector.hidden_projection.weight"] = rand(RANK, H)
    for name in (f"layers.{j}.{part}_conv." for j in range(2) for part in ("attention", "mlp")):
        tensors[f"{name}base_kernel"] = rand(2, TAPS, H)
        tensors[f"{name}kernel_projection.weight"] = rand(2 * TAPS * H // CHANNELS, H, scale=0.2)
    config = z_lab(
        conv_kernel_size=TAPS, conv_group_size=CHANNELS, selector_rank=RANK, selector_top_k=blocks.CANDIDATES
    ) | {"architectures": ["DFlash2DraftModel"]}  # fmt: skip
    return Layout(config, tensors, of_blocks(tensors, [0, 2], 1, blocks.selector), BLOCK - 1)
