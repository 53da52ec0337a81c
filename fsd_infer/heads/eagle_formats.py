"""Heads as other programs store them, in terms of our format.

- EAGLE-1/2 (SafeAILab, vLLM, SGLang): the config of a Llama model of one layer; ``fc``, ``layers.0.*`` and, optionally,
  the target's embeddings.
- EAGLE-3 (SafeAILab, SpecForge, SGLang, vLLM): the same with ``midlayer.*`` or ``layers.0.*``, the head's own LM head,
  and ``d2t``, the offset from a draft id to its target id.
- speculators: EAGLE-3 with the Llama config under ``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from fsd_core.errors import CheckpointError
from fsd_infer.heads.config import EagleConfig, default_fused_layers
from fsd_infer.heads.layers import LATENT
from fsd_infer.heads.stored_parts import (
    CONFIG,
    DRAFT_IDS,
    EMBEDDINGS,
    FIRST_LAYER,
    LATENT_PART,
    LM_HEAD,
    SLIDING,
    T2D,
    Options,
    StoredHead,
    agreed,
    check_sizes_agree,
    check_uncomputed,
    flag,
    layer_count,
    parameters_of,
    plain_layer,
    read_draft_ids,
    shares_table,
    target_layers,
)
from fsd_infer.heads.weights import AGAIN, Weights

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

# Names of config fields; all others are the same, except those of the layer.
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# families whose layers or scales vLLM's EAGLE-1 heads have, in the names of their classes
_UNREAD = ("cohere", "deepseek", "llama4", "minicpm", "mistrallarge3")
_OF_P_EAGLE = {DRAFT_IDS, "mask_hidden"}  # no parameters of an EAGLE head


def eagle_head(config: Mapping[str, Any], weights: Weights, target: Target | None) -> StoredHead:
    """Return an EAGLE-1 or EAGLE-2 head.

    Args:
        config: config of its file, without nesting, see :func:`.flat`.
        weights: its files.
        target: whose embeddings and LM head the file may repeat; None: they count as the head's own.

    Raises:
        CheckpointError: a config or a tensor that no head has here.
    """
    shapes = weights.shapes
    options = Options(config, "eagle_config")
    classes = str(config.get("architectures")).lower()
    if family := next((kind for kind in _UNREAD if kind in classes), None):
        raise CheckpointError(f"its layers are those of {family}, unknown here. Use a head with Llama's layers.")
    described, layer = options.layer, _layer(options.layer, shapes, "qwen2")
    _check_computed(config, described)
    own_embeddings = EMBEDDINGS in shapes and target is not None and not shares_table(weights, EMBEDDINGS, target)
    names = parameters_of(weights) - _OF_P_EAGLE - (set() if own_embeddings else {EMBEDDINGS})
    if shares_table(weights, LM_HEAD, target):
        names.remove(LM_HEAD)
    bias = agreed("bias", (flag(config.get, name, None) for name in ("bias", "fusion_bias")))
    if bias is None:  # the tensors tell
        bias = "fc.bias" in names
    elif not bias and "fc.bias" in names:
        bias = bool(weights.read("fc.bias").any())
    vocabulary, embed_size = _table(described, shapes, layer["hidden_size"])
    check_sizes_agree(config.get, draft_vocab_size=vocabulary)
    sizes = {"hidden_size": layer["hidden_size"], "vocab_size": vocabulary, "embed_size": embed_size}
    count = layer_count(described.get("num_hidden_layers"), names)
    fields: dict[str, Any] = {"layout": "eagle", "num_layers": count, "fc_bias": bias, "own_embeddings": own_embeddings}
    head = EagleConfig(**sizes, layer=layer, target=sizes, **fields)
    names -= set() if bias else {"fc.bias"}  # zeros, which some programs need in the file
    return StoredHead(head, weights, {name: name for name in names})


def eagle3_head(config: Mapping[str, Any], weights: Weights, target: Target | None) -> StoredHead:
    """Return an EAGLE-3 head. Arguments and errors as for :func:`eagle_head`."""
    options = Options(config, "eagle_config", in_layer=False)
    if not options.flag("use_aux_hidden_state", True):
        raise CheckpointError(
            "it reads the target's final features alone (use_aux_hidden_state), by no layout known here. Use another."
        )
    if options.of_speculators and options.flag("norm_before_residual") is None:
        raise CheckpointError(
            "it does not say norm_before_residual, whose default differs between programs: add the value it was "
            "trained with."
        )
    shapes = weights.shapes
    names = parameters_of(weights) - _OF_P_EAGLE
    # speculators copies the target's M-RoPE into the config and still trains on tokens' positions in the text
    described, tied = options.layer, flag(options.layer.get, "tie_word_embeddings")
    layer = _layer(described, shapes, "llama", not options.of_speculators, SLIDING if options.of_speculators else None)
    _check_computed(config, described)
    fields: dict[str, Any] = {name: options.flag(name, False) for name in EAGLE3_FLAGS}
    leaving = options.nested.get(AUX_IDS) or None
    fused, stated = config.get(AUX_IDS) or leaving, options.get("target_hidden_size")
    fields["target_hidden_size"], count = _fused_width(shapes, fused, stated, layer["hidden_size"])
    vocabulary, _ = _table(described, shapes, layer["hidden_size"])
    ids = read_draft_ids(weights, vocabulary)
    check_sizes_agree(config.get, draft_vocab_size=vocabulary if ids is None else len(ids))
    draft_ids = None if ids is None or len(ids) == vocabulary else ids.sort().values
    order = None if ids is None or bool((ids.diff() > 0).all()) else ids.argsort()
    head = EagleConfig(
        hidden_size=layer["hidden_size"],
        vocab_size=vocabulary,
        layer=layer,
        layout="eagle3",
        num_layers=layer_count(described.get("num_hidden_layers"), names, LATENT_PART),
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        fused_layers=_fused_layers(config.get(AUX_IDS), leaving, count, target),
        own_lm_head=LM_HEAD in names,
        own_embeddings=EMBEDDINGS in names and not shares_table(weights, EMBEDDINGS, target),
        target={"hidden_size": fields["target_hidden_size"], "vocab_size": vocabulary},
        **fields,
    )
    if target and head.own_embeddings and not head.own_lm_head and tied:
        raise CheckpointError(
            f"it has {EMBEDDINGS} of its own, tie_word_embeddings and no {LM_HEAD}, which some programs take for a "
            "copy of the former and others for the target's: add it to the weights."
        )
    names -= set() if head.own_embeddings else {EMBEDDINGS}
    return StoredHead(head, weights, {name: name for name in names}, draft_ids, order)


def _layer(
    described: Mapping[str, Any], names: Collection[str], biased_kind: str, mrope: bool = True,
    rope_of: str | None = None,
) -> Any:  # fmt: skip
    """Return :func:`plain_layer` of Llama-like layers with the norms and biases for which there are tensors.

    Configs copy their target's model type, and may not say what is biased. Other missing fields have Llama's defaults,
    not the target's values (a rotary base of 10000, for example). ``biased_kind`` is the type of layers of which
    only queries, keys and values are biased: Qwen2's in EAGLE-1/2; EAGLE-3 has none.
    """
    parts = ("self_attn.q_norm.weight", "self_attn.q_proj.bias", "self_attn.o_proj.bias", "mlp.up_proj.bias")
    normed, biased, biased_output, biased_mlp = (f"{FIRST_LAYER}{part}" in names for part in parts)
    model_type = "qwen3" if normed else biased_kind if biased and not biased_output else "llama"
    if any(LATENT_PART in name for name in names):
        model_type = LATENT
        if f"{FIRST_LAYER}self_attn.q_a_proj.weight" not in names:
            described = {**described, "q_lora_rank": None}
    biases = {"attention_bias": biased_output, "mlp_bias": biased_mlp}
    unstated = {name: value for name, value in biases.items() if described.get(name) is None}
    return plain_layer({**described, **unstated}, model_type, mrope, rope_of)


def _fused_width(shapes: Mapping[str, tuple[int, ...]], ids: Any, width: Any, hidden_size: int) -> tuple[int, int]:
    """Return the width of the features that fc [H, layers · width] fuses, and of how many layers they are.

    Args:
        shapes: shapes of the tensors.
        ids: ids of the fused layers, as the config lists them, if it does.
        width: as the config says, if it does.
        hidden_size: H, of the head; also the target's where no width is stated.
    """
    fused = shapes.get("fc.weight", ())
    count = len(ids) if isinstance(ids, list) else 0
    width = width or (fused[1] // count if count and len(fused) == 2 and not fused[1] % count else hidden_size)
    if type(width) is not int or len(fused) != 2 or fused[1] % width:
        raise CheckpointError(f"fc.weight is of shape {list(fused)}, which fuses no whole number of layers of {width}.")
    return width, fused[1] // width


def _check_computed(config: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a head, or layers ``described``, that need a computation that no head here has.

    Scales of a target that the layers' config copied are not the head's.
    """
    check_uncomputed(config.get)
    types = described.get("layer_types")
    slides = SLIDING in types if isinstance(types, list) else flag(described.get, "use_sliding_window")
    window = (described.get("sliding_window") or 0) if slides else 0
    if not isinstance(window, int | float):
        raise CheckpointError(f"sliding_window in config.json must be a number, got {window!r:.60}.")
    if window and window < (described.get("max_position_embeddings") or window + 1):
        raise CheckpointError(
            f"its layers attend to {window!r:.60} tokens alone (sliding_window), and EAGLE heads attend to all here: "
            "use a head with full attention."
        )


def _table(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], width: int) -> tuple[Any, int]:
    """Return (V, width of the embeddings) from the tensors or the config."""
    table, stated, drafted = shapes.get(EMBEDDINGS), config.get("vocab_size"), shapes.get(T2D, ())
    if table is None:
        return drafted[0] if stated is None and len(drafted) == 1 else stated, width
    if len(table) != 2 or stated not in (None, table[0]):
        rows = "a table" if stated is None else f"a table of {stated!r:.60} rows (vocab_size)"
        raise CheckpointError(f"{EMBEDDINGS} is of shape {list(table)}, not {rows}. {AGAIN}")
    return table[0], table[1]


def _fused_layers(entering: Any, leaving: Any, count: int, target: Target | None) -> list[int]:
    """Return the fused layers, counted from 0.

    Ids at the top of the config are of states that enter layers (vLLM, speculators), those in ``eagle_config`` of
    layers that output them (SGLang, SpecForge).
    """
    layers = target_layers(f"{AUX_IDS} at the top and in eagle_config", entering, leaving)
    says = f"{CONFIG} names"
    if not layers:
        if target is None:
            raise CheckpointError("it does not say which layers it fuses: that depends on the target.")
        layers = default_fused_layers(target)
        says = f"{CONFIG} has no {AUX_IDS}, and the usual ones of {target.name} are"
    if len(layers) != count or layers != sorted(set(layers)) or min(layers) < 0:
        raise CheckpointError(
            f"fc fuses {count} layers, but {says} {layers}: {count} ascending numbers from 0 are read."
        )
    return layers
