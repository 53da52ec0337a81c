"""Read block heads of every home: z-lab, SpecForge, DeepSpec, speculators and transformers.

They differ in where the options lie, in how layers are counted, and in what a slot of the block estimates:

- **Layers.** ``target_layer_ids`` name the layer whose output is read; ``aux_hidden_state_layer_ids`` of speculators
  name the layer that the state enters, which is one more.
- **Slots.** A ``DFlashDraftModel`` fills its own position in. Heads of DeepSpec and DSpark heads of SpecForge estimate
  the next token, and Domino does by ``shift_label``. speculators say ``sample_from_anchor``.

What the config leaves open is refused, since a wrong guess costs nearly all acceptance without an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsd_core.errors import CheckpointError, foreign_errors
from fsd_core.registry import is_number
from fsd_infer.heads.block_config import BlockConfig
from fsd_infer.heads.blocks import BlockHead
from fsd_infer.heads.stored_parts import (
    D2T,
    EMBEDDINGS,
    LM_HEAD,
    SLIDING,
    T2D,
    Options,
    agreed,
    check_sizes_agree,
    check_uncomputed,
    layer_count,
    our_name,
    parameters_of,
    plain_layer,
    read_draft_ids,
    shares_table,
    target_layers,
)
from fsd_infer.heads.weights import Weights, check_sizes, fill
from fsd_infer.targets.target import Target

_LONGEST = 1024  # block; published ones have 32 slots at most, and a cache has room for one
_SINKS = "attention_sink_bias"  # of heads, and the option
_TAPS, _SELECTOR, _REFINER = "conv_kernel_size", "selector_rank", "xpress_rank"  # options of DFlash2 and XPress
_GRU, _EMBED = "prefix_gru.weight_hh_l0", "embed_proj.0.weight"
_MARKOV, _CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
_RENAMED = {
    "logit_head.": "",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    **{f"{name}.": f"markov_head.{name}." for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")},
    "confidence_proj.": "confidence_head.proj.",  # this and the last four: Model-Optimizer
}


def read_block_head(directory: Path, config: Mapping[str, Any], target: Target) -> tuple[BlockHead, Tensor | None]:
    """Read a block head for a target.

    Args:
        directory: directory of its files.
        config: its config.json.
        target: the model to draft for.

    Returns:
        The head in the target's dtype and on its device, and the target ids [Vd] of its vocabulary, None for all.

    Raises:
        CheckpointError: malformed or ambiguous files, an unknown option, or a head for another target.
        VocabularyMismatchError: a head for another vocabulary.
    """
    weights = Weights(directory, partial(our_name, more=_RENAMED))
    names = parameters_of(weights)
    block_config, order, ids = _described(Options(config, "dflash_config"), weights, names, target)
    check_sizes(f"the block head in {directory}", block_config.target_size, block_config.vocab_size, target)
    # transformers may fail in any way on another program's values
    with foreign_errors(CheckpointError, "its config.json does not describe a decoder layer ({why})."):
        with torch.device("meta"):
            head = BlockHead(block_config)
        head.rotary_emb = type(head.rotary_emb)(head.rotary_emb.config)
    dropped = {name for name in (EMBEDDINGS, LM_HEAD) if name not in head.state_dict()}  # the target's are used
    fill(head, weights, {name: name for name in names - dropped}, target.dtype)
    parts = dict(zip(order, head.fc.weight.chunk(len(order), 1), strict=True))  # those of layers, as stored
    head.fc.weight = nn.Parameter(torch.cat([parts[number] for number in sorted(parts)], 1), requires_grad=False)
    return head.to(target.device), None if ids is None else ids.to(target.device)


def _described(
    options: Options, weights: Weights, names: Collection[str], target: Target
) -> tuple[BlockConfig, list[int], Tensor | None]:
    """Return the head's config, the order of the layers as stored, and its draft ids."""
    check_uncomputed(options.get, _SINKS, _TAPS, _SELECTOR)
    if not options.flag("use_aux_hidden_state", True):
        raise CheckpointError(
            "its config.json has use_aux_hidden_state False, which is not known here. Use another head."
        )
    if "gemma" in options.classes.lower():
        raise CheckpointError("its layers are Gemma's; block heads of Qwen3 layers alone are read here.")
    if "lilicorr" in options.classes.lower():
        raise CheckpointError("it corrects its blocks as LiLiCorr does, which is unknown here. Use another head.")
    layer = plain_layer(options.layer, "qwen3", mrope=False, rope_of=SLIDING if options.of_speculators else None)
    count = layer_count(options.get("num_hidden_layers"), names)
    stored = _target_layers(options, count, target)
    shape = weights.shapes.get("fc.weight", ())
    size = options.whole("target_hidden_size", layer["hidden_size"], 1)
    if len(shape) != 2 or shape[1] != len(stored) * size:
        raise CheckpointError(
            f"fc.weight is of shape {list(shape)}, which does not read {len(stored)} layers of {size}."
        )
    vocabulary = options.whole("vocab_size", target.vocab_size, 1)
    ids = read_draft_ids(weights, vocabulary)
    check_sizes_agree(options.get, draft_vocab_size=vocabulary if ids is None else len(ids))
    own_embeds = EMBEDDINGS in names and not shares_table(weights, EMBEDDINGS, target)
    own_head = LM_HEAD in names and (ids is not None or not shares_table(weights, LM_HEAD, target))
    _check_width(layer["hidden_size"], own_embeds, own_head, target)
    windows, causal = _attention(options, count)
    sinks = any(name.endswith(_SINKS) for name in names)
    check_sizes_agree(options.flag, attention_sink_bias=sinks)
    config = BlockConfig(
        layer, count, tuple(sorted(stored)), size, vocabulary, options.whole("block_size", least=2, most=_LONGEST),
        _mask_token(options, vocabulary), _fills_in(options, names), windows, causal, options.of_speculators, sinks,
        *_convolutions(options, layer["hidden_size"]),
        weights.shapes[LM_HEAD][0] if own_head else None, own_embeds, _softcap(options),
        **_correction(options, layer["hidden_size"], vocabulary, weights.shapes),
    )  # fmt: skip
    return config, stored, ids


def _fills_in(options: Options, names: Collection[str]) -> bool:
    """Whether slots estimate the tokens at their own positions."""
    stated, shifted, classes = options.flag("sample_from_anchor"), options.flag("shift_label"), options.classes
    if stated is not None:
        return not stated
    if options.of_speculators and "dspark" in classes.lower():
        raise CheckpointError(
            "a DSpark head of speculators must say sample_from_anchor, whose default differs between programs: add "
            "the value it was trained with to its config.json (speculators' own default is true)."
        )
    if shifted is not None:
        return not shifted
    if _GRU in names:
        return True
    if "DSpark" in classes or options.get("projector_type") == "dspark" or _MARKOV in names:
        return False
    if "DFlash" in classes or "dflash" in classes or "MuseGlimmerAssistant" in classes:
        return True
    raise CheckpointError(
        "its config.json does not say what a slot of the block estimates. If slot k stands for the token at its own "
        'position, as z-lab\'s heads do, add "sample_from_anchor": false; if for the next one, true.'
    )


def _target_layers(options: Options, count: int, target: Target) -> list[int]:
    """Return the target's layers whose outputs are read, in the order in which they are stored."""
    leaving, entering = options.get("target_layer_ids"), options.get("aux_hidden_state_layer_ids")
    layers = target_layers("aux_hidden_state_layer_ids and target_layer_ids", entering, leaving)
    depth = int(target.config.num_hidden_layers)
    if options.get("num_target_layers", depth) != depth:
        theirs = options.get("num_target_layers")
        raise CheckpointError(f"it is for a target of {theirs!r:.60} layers, and {target.name} has {depth}.")
    if layers is None:
        if options.of_speculators:
            raise CheckpointError(f"it does not name the layers of {target.name} that it reads.")
        layers = [depth // 2] if count == 1 else [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]
    if not layers or not all(0 <= number < depth for number in layers) or len(set(layers)) < len(layers):
        what = "The embeddings (-1) are not read here." if -1 in (layers or []) else "It is another target's head."
        raise CheckpointError(
            f"it reads the outputs of layers {layers}; {target.name} has 0 to {depth - 1}, each once. {what}"
        )
    return layers


def _mask_token(options: Options, vocabulary: int) -> int:
    if options.get("mask_token_id") is None:
        raise CheckpointError('its config.json has no mask_token_id: add the id, under "dflash_config".')
    token = options.whole("mask_token_id")
    if token >= vocabulary:
        raise CheckpointError(f"mask_token_id is {token}, beyond the vocabulary of {vocabulary}.")
    return token


def _softcap(options: Options) -> float | None:
    """Return the soft cap of the logits; None if there is none, which files also write as 0."""
    cap = options.get("final_logit_softcapping", 0)
    if not is_number(cap, 0):
        raise CheckpointError(f"final_logit_softcapping in config.json must be a number from 0, got {cap!r:.60}.")
    return cap or None


def _attention(options: Options, count: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return each layer's window, and whether it is causal: by default only those with a sliding window are.

    If no type does, ``use_swa`` makes all slide, as in Model-Optimizer's heads and MiMo's.
    """
    # the first with a window, as in Qwen3's configs
    first = options.whole("max_window_layers", 28) if options.flag("use_sliding_window") else count
    usual = [f"{'sliding' if i >= first and options.get('sliding_window') else 'full'}_attention" for i in range(count)]
    types = options.get("layer_types", usual)
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != count or not all(layer_type in known for layer_type in types):
        raise CheckpointError(f"layer_types in config.json are not those of {count} full or sliding layers.")
    named = [layer_type == "sliding_attention" for layer_type in types]
    slides = named if any(named) or not options.flag("use_swa") else [True] * count
    key = "sliding_window" if options.get("swa_window_size") is None else "swa_window_size"
    window = options.whole(key, least=1) if any(slides) else None
    forced = agreed("causal", (options.flag(name) for name in ("causal", "is_causal")))
    both = options.flag("sliding_window_non_causal") or "MuseGlimmerAssistant" in options.classes
    causal = tuple(slide and not both if forced is None else forced for slide in named)
    return tuple(window if slide else None for slide in slides), causal


def _convolutions(options: Options, width: int) -> tuple[int, int]:
    """Return how many slots DFlash2's convolutions reach, 0: there are none, and how many channels share a kernel."""
    taps = options.whole(_TAPS, 0, most=_LONGEST)
    group = options.whole("conv_group_size", least=1, most=width) if taps else 1
    if width % group:
        raise CheckpointError(f"conv_group_size in config.json is {group}, which does not divide {width} channels.")
    return taps, group


def _correction(options: Options, width: int, vocabulary: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of :class:`BlockConfig` that describe a correction and a confidence head, by the tensors."""
    if any(len(shapes.get(name, (1, 1))) != 2 for name in (_GRU, _EMBED, _MARKOV, _CONFIDENCE)):
        raise CheckpointError("a matrix of its correction has another shape.")
    result: dict[str, Any] = {}
    if _GRU in shapes:
        rank, plain = shapes.get(_EMBED, (0, 0))[0], options.whole("pure_draft_prefix_len", 0)
        result = {"correction": "domino", "rank": rank, "state_size": shapes[_GRU][1], "plain_slots": plain}
    elif _MARKOV in shapes:
        gated, recurrent = ("markov_head.gate_proj.weight" in shapes), ("markov_head.joint_proj.weight" in shapes)
        kind = "rnn" if recurrent else "gated" if gated else "vanilla"
        stated = str(options.get("markov_head_type", kind)).lower()
        if stated != kind:
            raise CheckpointError(f"markov_head_type is {stated!r:.60}, and its tensors are those of a {kind} head.")
        result = {"correction": kind, "rank": shapes[_MARKOV][1]}
        check_sizes_agree(options.get, markov_rank=result["rank"])
    elif options.get(_SELECTOR):
        if D2T in shapes or T2D in shapes:
            raise CheckpointError("it selects among candidates of a reduced vocabulary, which no program trains.")
        candidates = options.whole("selector_top_k", 16, 1, vocabulary)
        result = {"correction": "selector", "rank": options.whole(_SELECTOR, least=1), "candidates": candidates}
    elif options.get(_REFINER):
        rank = options.whole(_REFINER, least=1)
        result = {"correction": "refiner", "rank": rank, "inner": rank * options.whole("xpress_mlp_ratio", 2, 1)}
    elif options.get("markov_rank") or options.get("projector_type") == "domino":
        raise CheckpointError("its config.json names a correction whose tensors are missing.")
    if _CONFIDENCE in shapes:
        reads_state_only = shapes[_CONFIDENCE][1] == width
        result["confidence"] = "state" if reads_state_only else "state+token"
        if not reads_state_only and _MARKOV not in shapes:
            raise CheckpointError("its confidence head reads a Markov head, and there is none.")
    return result


def _check_width(width: int, own_embeds: bool, own_head: bool, target: Target) -> None:
    embedded = int(target.model.get_input_embeddings().weight.shape[1])
    if not own_embeds and width != embedded or not own_head and width != target.hidden_size:
        raise CheckpointError(
            f"it is {width} wide and uses the tables of {target.name}, which are {embedded} and {target.hidden_size} "
            "wide: it is another target's head."
        )
