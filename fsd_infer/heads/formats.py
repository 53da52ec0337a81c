"""Readers of head files: our format, and the formats of other programs. :mod:`fsd_infer.heads.export` writes those.

- Ours: the ``config.json`` of :class:`EagleConfig`, and safetensors named as the module's parameters.
- EAGLE-1/2 (SafeAILab, vLLM, SGLang): the config of a Llama model of one layer; ``fc``, ``layers.0.*`` and, optionally,
  the target's embeddings.
- EAGLE-3 (SafeAILab, SpecForge, SGLang, vLLM): the same with ``midlayer.*`` or ``layers.0.*``, the head's own LM head,
  and ``d2t``, the offset from a draft id to its target id.
- speculators: EAGLE-3 with the Llama config under ``transformer_layer_config``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fsd_core.errors import CheckpointError, VocabularyMismatchError
from fsd_core.files import read_json
from fsd_infer.heads.config import EagleConfig, default_fused_layers
from fsd_infer.heads.kinds import MTP, kind_of_head
from fsd_infer.heads.layers import EAGLE3_LAYERS
from fsd_infer.heads.stored_parts import (
    D2T,
    DRAFT_IDS,
    EMBEDDINGS,
    FIRST_LAYER,
    LM_HEAD,
    T2D,
    _check_draft_ids,
    flat,
    layer_count,
    our_name,
    plain_layer,
    read_draft_ids,
    said_option,
    shares_table,
)
from fsd_infer.heads.weights import AGAIN, INTEGERS, PICKLE, SINGLE, Weights, has_weights, names_in_pickle
from fsd_infer.targets.checks import is_mtp_alone

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

CONFIG = "config.json"
MOST_BYTES = 1 << 24  # of a config
OURS, OLD, EAGLE, EAGLE_3 = "fsd", "fsd-eagle-head", "EAGLE-1/2", "EAGLE-3"
NEWEST_OLD = 2  # last version of the format with the options under "head"
# the target's tensors in speculators' training checkpoints, what P-EAGLE adds, and buffers of old attention modules
_IGNORED = re.compile(r"d2t|t2d|draft_ids|mask_hidden|verifier_(lm_head|norm)\.weight|.*\.rotary_emb\.inv_freq")
# Names of config fields; all others are the same, except those of the layer.
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_FIELDS = ("target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class StoredHead:
    """A head on disk, in terms of our format.

    Attributes:
        config: its shape and options.
        weights: its files.
        names: our name of each parameter -> the stored name.
        draft_ids: [Vd] ascending, or None for the whole vocabulary.
        order: [Vd] the stored LM head's row for each draft id; None if the order is the same.
    """

    config: EagleConfig
    weights: Weights
    names: dict[str, str]
    draft_ids: Tensor | None = None
    order: Tensor | None = None

    def state(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict. Raises CheckpointError unless names and shapes are those of ``wanted``."""
        shapes = {name: tuple(value.shape) for name, value in wanted.items() if name != DRAFT_IDS}
        missing, surplus = shapes.keys() - self.names.keys(), self.names.keys() - shapes.keys()
        wrong = [name for name in shapes.keys() - missing if self.weights.shapes[self.names[name]] != shapes[name]]
        if missing or surplus or wrong:
            raise CheckpointError(
                f"the weights in {self.weights.directory} do not fit its {CONFIG}: missing {sorted(missing)}, "
                f"unexpected {sorted(surplus)}, wrong shape {sorted(wrong)}."
            )
        state = {name: self.weights.read(stored) for name, stored in self.names.items()}
        if self.order is not None:
            state[LM_HEAD] = state[LM_HEAD][self.order]
        return state if self.draft_ids is None else {**state, DRAFT_IDS: self.draft_ids}


def read_head(directory: Path, target: Target | None) -> StoredHead:
    """Read the head in a directory. Sizes are checked against the weights' headers before anything is allocated.

    Raises:
        CheckpointError: missing, malformed or truncated files, an unknown format, or a head of another target.
        VocabularyMismatchError: same family but another vocabulary.
    """
    config = read_config(directory)
    kind = head_kind(directory)
    if kind is None:
        shapes = Weights(directory).shapes if has_weights(directory) else {}
        other = kind_of_head(config) or (MTP if is_mtp_alone(shapes, config) else None)
        if other is not None:
            raise CheckpointError(
                f"{directory} is a head of kind {other}, not EAGLE. It can draft (--drafter) as it is."
            )
        raise CheckpointError(f"{directory / CONFIG} is not a head's (format: {config.get('format')!r:.60}).")
    if kind in (EAGLE, EAGLE_3):
        _check_program(directory, config, kind)
    weights = Weights(directory, str if kind in (OURS, OLD) else our_name)
    try:
        if kind in (OURS, OLD):
            stored = _own(config if kind == OURS else _of_old(config), weights)
        else:
            stored = (_eagle3 if kind == EAGLE_3 else _eagle)(flat(config), weights, target)
    except CheckpointError as error:
        if str(directory) in str(error):
            raise
        raise CheckpointError(f"{directory / CONFIG}: {error}") from error
    if target is not None:
        _check_target(directory, stored.config.target or {}, target)
    return stored


def read_eagle3(directory: Path, config: Mapping[str, Any], target: Target) -> StoredHead:
    """Read the EAGLE-3 part of a head that has more. Errors as of :func:`read_head`."""
    try:
        stored = _eagle3(config, Weights(directory, our_name), target)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / CONFIG}: {error}") from error
    _check_target(directory, stored.config.target or {}, target)
    return stored


def head_kind(directory: Path) -> str | None:
    """Return OURS, OLD, EAGLE, EAGLE_3, or None for a directory without a head, such as a causal LM's."""
    if not (directory / CONFIG).is_file():
        return None
    config = read_config(directory)
    if (kind := kind_of(config)) in (OURS, OLD):
        return kind
    stored = set(Weights(directory).shapes) if has_weights(directory) else None
    return kind_of(config, names_in_pickle(directory / PICKLE, ("fc.weight", D2T)) if stored is None else stored)


def kind_of(config: Mapping[str, Any], names: Collection[str] = ()) -> str | None:
    """Return the kind as :func:`head_kind`, from the config and, as EAGLE configs seldom tell, the tensors' names."""
    if config.get("model_type") == EagleConfig.model_type:
        return OURS
    if config.get("format") == OLD:
        return OLD
    if kind_of_head(config, names):
        return None
    names = set(map(our_name, names))
    described = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    if "eagle3" in described or D2T in names or any(name.endswith("hidden_norm.weight") for name in names):
        return EAGLE_3
    return EAGLE if "eagle" in described or "fc.weight" in names else None


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a head in any format. Raises CheckpointError if it is missing or malformed."""
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {CONFIG}: a drafter is a directory with {CONFIG} and weights.")
    if path.stat().st_size > MOST_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size / 1e6:.0f} MB: this is no config of a drafter. {AGAIN}")
    config = read_json(path, AGAIN, CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {type(config).__name__}, not an object with options. {AGAIN}")
    return config


# our own -----------------------------------------------------------------------------------------------------------


def _of_old(config: Mapping[str, Any]) -> dict[str, Any]:
    version, head = config.get("version", 0), config.get("head")
    if type(version) is not int or version < 1 or not isinstance(head, Mapping):
        raise CheckpointError(f"it has no valid version and head. {AGAIN}")
    if version > NEWEST_OLD:
        raise CheckpointError(f"it is of version {version}, newer than this program reads: update it.")
    return {**head, "target": config.get("target"), "training": config.get("training")}


def _own(values: Mapping[str, Any], weights: Weights) -> StoredHead:
    trained_for = values.get("target")
    known = trained_for if isinstance(trained_for, Mapping) else {}
    lacking = [key for key in ("hidden_size", "vocab_size") if known.get(key) is None]
    if lacking:  # without these the head would fit any target
        raise CheckpointError(f"target does not say its {', '.join(lacking)}. {AGAIN}")
    head = EagleConfig.from_dict(values)
    layer_count(head.num_layers, weights.shapes)  # before the layers are built
    names = {name: name for name in weights.shapes if name != DRAFT_IDS}
    if head.draft_vocab_size is None and DRAFT_IDS not in weights.shapes:
        return StoredHead(head, weights, names)
    if weights.shapes.get(DRAFT_IDS) != (head.draft_vocab_size,):
        raise CheckpointError(
            f"draft_ids is of shape {list(weights.shapes.get(DRAFT_IDS, ()))}, wanted are {head.draft_vocab_size} ids "
            "(draft_vocab_size)."
        )
    ids = weights.read(DRAFT_IDS, INTEGERS).long()
    _check_draft_ids(ids, head.vocab_size)
    return StoredHead(head, weights, names, ids)


def _check_target(directory: Path, trained_for: Mapping[str, Any], target: Target) -> None:
    """Raise if the head records another family, size or vocabulary than the target's."""
    width = int(target.model.get_input_embeddings().weight.shape[1])
    actual = {**target.fingerprint(), "embed_size": width}
    for key in ("model_type", "hidden_size", "embed_size"):
        if trained_for.get(key, actual[key]) != actual[key]:
            raise CheckpointError(
                f"the head in {directory} was trained for a target with {key} {trained_for.get(key)!r:.60}, but "
                f"{target.name} has {actual[key]!r}: use this target's own head, or train one with fsd-train."
            )
    for key in ("vocab_size", "vocabulary_sha256"):
        ours, theirs = actual[key], trained_for.get(key)
        if ours is not None and theirs is not None and ours != theirs:
            raise VocabularyMismatchError(
                f"the head in {directory} was trained with another vocabulary than {target.name}'s "
                f"({key}: {theirs!r:.60} against {ours!r}): token ids would mean different words. Train a head for it."
            )


# other programs' ---------------------------------------------------------------------------------------------------


def _check_program(directory: Path, config: Mapping[str, Any], kind: str) -> None:
    speculators = config.get("speculators_model_type")
    if speculators not in (None, "eagle", "eagle3"):
        raise CheckpointError(
            f"{directory} is a head of speculators of type {speculators!r:.60}, which is not read here. Use a head of "
            "another type."
        )
    if not has_weights(directory):
        fault = f"{directory} is an {kind} head of another program, without {SINGLE}"
        raise CheckpointError(f"{fault}. {unpickle(f'{directory}/')}")


def unpickle(directory: str = "", file: str = PICKLE) -> str:
    """Return advice on how to convert a head in a pickle."""
    files = f"torch.load({directory + file!r}, map_location='cpu', weights_only=True), {directory + SINGLE!r}"
    return (
        f"Nothing is unpickled here, since that can run code: convert a {file} once, in Python, by\n"
        f"import torch; from safetensors.torch import save_file; save_file({files})"
    )


def _eagle(config: Mapping[str, Any], weights: Weights, target: Target | None) -> StoredHead:
    shapes = weights.shapes
    # EAGLE's layer is Llama's, with Qwen2's biases for Qwen2. Missing fields have Llama's defaults, not the target's
    # values (a rotary base of 10000, for example).
    described = _described(config)
    biased = {name for name in ("q", "o") if f"{FIRST_LAYER}self_attn.{name}_proj.bias" in shapes}
    layer = plain_layer(described, "qwen2" if biased == {"q"} else "llama")
    own = EMBEDDINGS in shapes and target is not None and not _shared(weights, target)
    names = {name for name in shapes if not _IGNORED.fullmatch(name)} - (set() if own else {EMBEDDINGS})
    if target is not None and shares_table(weights, LM_HEAD, target.model.get_output_embeddings()):
        names.remove(LM_HEAD)
    bias = "fc.bias" in names and (config.get("bias") is not False or bool(weights.read("fc.bias").any()))
    vocabulary, embed_size = _table(described, shapes, layer["hidden_size"])
    sizes = {"hidden_size": layer["hidden_size"], "vocab_size": vocabulary, "embed_size": embed_size}
    count = layer_count(described.get("num_hidden_layers"), names)
    options: dict[str, Any] = {"layout": "eagle", "num_layers": count, "fc_bias": bias, "own_embeddings": own}
    head = EagleConfig(**sizes, layer=layer, target=sizes, **options)
    names -= set() if bias else {"fc.bias"}  # zeros, which some programs need in the file
    return StoredHead(head, weights, {name: name for name in names})


def _eagle3(config: Mapping[str, Any], weights: Weights, target: Target | None) -> StoredHead:
    described = _described(config)
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError("eagle_config is no mapping.")
    if nested.get("use_aux_hidden_state") is False:
        raise CheckpointError(
            "it reads the target's final features alone (use_aux_hidden_state), by no layout known here. Use another."
        )
    if config.get("norm_before_residual") is None and "speculators_model_type" in config:
        raise CheckpointError(
            "it does not say norm_before_residual, whose default differs between programs: add the value it was "
            "trained with."
        )
    shapes = weights.shapes
    names = {name for name in shapes if not _IGNORED.fullmatch(name)}
    kind = described.get("model_type")
    layer = plain_layer(described, kind if kind in EAGLE3_LAYERS else "llama")
    options: dict[str, Any] = {name: said_option(name, config, nested) or False for name in EAGLE3_FIELDS}
    fused = shapes.get("fc.weight", ())
    ids = config.get(AUX_IDS) or nested.get(AUX_IDS)
    read = len(ids) if isinstance(ids, list) else 0
    wide = fused[1] // read if read and len(fused) == 2 and not fused[1] % read else layer["hidden_size"]
    width = options["target_hidden_size"] = options["target_hidden_size"] or wide
    if type(width) is not int or len(fused) != 2 or fused[1] % width:
        raise CheckpointError(f"fc.weight is of shape {list(fused)}, which fuses no whole number of layers of {width}.")
    vocabulary, _ = _table(described, shapes, layer["hidden_size"])
    draft_ids, order = read_draft_ids(weights, vocabulary, shapes)
    head = EagleConfig(
        hidden_size=layer["hidden_size"],
        vocab_size=vocabulary,
        layer=layer,
        layout="eagle3",
        num_layers=layer_count(described.get("num_hidden_layers"), names),
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        fused_layers=_fused_layers(config.get(AUX_IDS), nested.get(AUX_IDS) or None, fused[1] // width, target),
        own_lm_head=LM_HEAD in names,
        own_embeddings=EMBEDDINGS in names and not _shared(weights, target),
        target={"hidden_size": width, "vocab_size": vocabulary},
        **options,
    )
    names -= set() if head.own_embeddings else {EMBEDDINGS}
    return StoredHead(head, weights, {name: name for name in names}, draft_ids, order)


def _described(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the layers. Raises CheckpointError if they compute what no head's layers do here."""
    described = config.get("transformer_layer_config", config)
    if not isinstance(described, Mapping):
        raise CheckpointError("transformer_layer_config is no mapping.")
    if config.get("layernorms"):
        raise CheckpointError("it has norms around its layer (layernorms), unknown here. Use a head without.")
    if config.get("logit_scale") not in (None, 1):
        raise CheckpointError(
            f"it has a logit_scale of {config['logit_scale']!r:.60}, unknown here. Use a head without."
        )
    window, types = described.get("sliding_window"), described.get("layer_types")
    slides = "sliding_attention" in types if isinstance(types, list) else described.get("use_sliding_window")
    if slides and window and window < (described.get("max_position_embeddings") or window + 1):
        raise CheckpointError(
            f"its layers attend to {window!r:.60} tokens alone (sliding_window), and EAGLE heads attend to all here: "
            "use a head with full attention."
        )
    return described


def _table(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], width: int) -> tuple[Any, int]:
    """Return (V, width of the embeddings) from the tensors or the config."""
    table = shapes.get(EMBEDDINGS)
    if table is None:
        return shapes[T2D][0] if len(shapes.get(T2D, ())) == 1 else config.get("vocab_size"), width
    if len(table) != 2:
        raise CheckpointError(f"{EMBEDDINGS} is of shape {list(table)}, which is no table.")
    return table[0], table[1]


def _fused_layers(entering: Any, leaving: Any, count: int, target: Target | None) -> list[int]:
    """Return the fused layers, counted from 0.

    Two numberings exist. Top-level ids count the states that *enter* layers (vLLM, speculators; 0 is the embedding).
    Ids in ``eagle_config`` count the layers that output them (SGLang, SpecForge).
    """
    for ids in (entering, leaving):
        if ids is not None and (not isinstance(ids, list) or not all(type(number) is int for number in ids)):
            raise CheckpointError(f"{AUX_IDS} must be a list of whole numbers.")
    layers = leaving if entering is None else [number - 1 for number in entering]
    if entering is not None and leaving is not None and layers != leaving:
        raise CheckpointError(
            f"{AUX_IDS} is {entering} at the top and {leaving} in eagle_config, where ids should be one less. Correct "
            "one of them."
        )
    if not layers:
        if target is None:
            raise CheckpointError("it does not say which layers it fuses: that depends on the target.")
        layers = default_fused_layers(target)
    if len(layers) != count or layers != sorted(set(layers)) or min(layers) < 0:
        raise CheckpointError(
            f"fc fuses {count} layers, but {CONFIG} names {layers}: {count} ascending numbers from 0 are read."
        )
    return layers


def _shared(weights: Weights, target: Target | None) -> bool:
    """Whether the file's embeddings equal the target's up to rounding."""
    return target is not None and shares_table(weights, EMBEDDINGS, target.model.get_input_embeddings())
