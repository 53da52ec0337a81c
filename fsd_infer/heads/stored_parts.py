"""What layouts of head files share: a stored head, names of tensors, draft vocabularies, Llama layers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig

from fsd_core.errors import CheckpointError, foreign_errors
from fsd_infer.heads.config import MAX_INTEGER, EagleConfig, check_integer, check_layer
from fsd_infer.heads.layers import LATENT, LAYER_FIELDS, MROPE, layer_of
from fsd_infer.heads.weights import AGAIN, BOOLEANS, INTEGERS, Weights, is_unused, read_state
from fsd_infer.targets.weights import weight_rows

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

logger = logging.getLogger(__name__)

CONFIG = "config.json"
# Names of tensors; all others are the same in every format.
FIRST_LAYER, MIDLAYER = "layers.0.", "midlayer."
DRAFT_IDS, EMBEDDINGS, LM_HEAD, D2T, T2D = "draft_ids", "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
SLIDING = "sliding_attention"  # speculators' heads take its rotary options for all layers
PARTIAL = "partial_rotary_factor"  # copied from targets
LATENT_PART = ".kv_b_proj."  # of the names of layers with latent attention, which EAGLE-3 heads may have
# parts of layers that no head has here, by what their tensors' names contain
_UNREAD = {LATENT_PART: "latent attention", ".experts.": "experts", ".sinks": "attention sinks"}
# options that change what is computed, and the values that change nothing
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "conv_kernel_size": (None, 0), "selector_rank": (None, 0), "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1), "output_multiplier": (None, 1), "is_neox_style": (None, True),
    "input_embedding_scale": (None, 1), "logit_scale": (None, 1), "layernorms": (None, False),
}  # fmt: skip
_LAYER_CONFIG = "transformer_layer_config"
_OF_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight")  # ends of names of its tensors, which some repeat
_MODULES = ("model.", "draft_model.")  # around a head
# prefixes of tensors' names, and ours; the last two are from old versions of speculators
_RENAMED = {MIDLAYER: FIRST_LAYER, "transformer.": FIRST_LAYER, "fusion_fc.": "fc."}


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
        parameters = {name: value for name, value in wanted.items() if name != DRAFT_IDS}
        state = read_state(self.weights, self.names, parameters)
        if self.order is not None:
            state[LM_HEAD] = state[LM_HEAD][self.order]
        return state if self.draft_ids is None else {**state, DRAFT_IDS: self.draft_ids}


def our_name(stored: str, more: Mapping[str, str] | None = None) -> str:
    """Return our name of a head's tensor: without the names of modules around it, and renamed, also by ``more``."""
    while stored.startswith(_MODULES):
        stored = stored.partition(".")[2]
    for theirs, ours in {**_RENAMED, **(more or {})}.items():
        if stored.startswith(theirs):
            stored = ours + stored.removeprefix(theirs)
    return stored


def flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with its part text_config (heads for vision models) or model (vLLM's EAGLE-1) at the top."""
    parts = [config[name] for name in ("text_config", "model") if isinstance(config.get(name), Mapping)]
    return {**config, **parts[0]} if parts else config


def parameters_of(weights: Weights) -> set[str]:
    """Return our names of the head's own parameters: neither the target's tensors nor the draft vocabulary."""
    names = weights.shapes.keys() - {D2T, T2D}
    return {name for name in names if not name.endswith(_OF_TARGET) and not is_unused(name)}


class Options:
    """The options of a config, wherever they lie: at the top, in a part of that name, or in the layers' config.

    Args:
        config: the whole.
        part: the name.
        in_layer: whether the layers' config may hold the head's own options.

    Attributes:
        nested: the part.
        layer: the layers' config, which may be the whole one.
        classes: what the config calls the head.
        of_speculators: whether it is speculators'.
    """

    def __init__(self, config: Mapping[str, Any], part: str, in_layer: bool = True) -> None:
        self.nested, self.layer = config.get(part) or {}, config.get(_LAYER_CONFIG) or config
        if not isinstance(self.nested, Mapping) or not isinstance(self.layer, Mapping):
            raise CheckpointError(f"{part} or {_LAYER_CONFIG} in its config.json is not an object.")
        self._parts = (self.nested, config, *([self.layer] if in_layer else []))
        names = (config.get(name) for name in ("architectures", "speculators_model_type", "model_type"))
        self.classes = " ".join(map(str, names))
        self.of_speculators = "speculators_model_type" in config

    def get(self, name: str, default: Any = None) -> Any:
        value = agreed(name, (part.get(name) for part in self._parts))
        return default if value is None else value

    def flag(self, name: str, default: bool | None = None) -> Any:
        return flag(self.get, name, default)

    def whole(self, name: str, default: int | None = None, least: int = 0, most: int = MAX_INTEGER) -> int:
        value = self.get(name, default)
        check_integer(f"{name} in config.json", value, least, most)
        return int(value)


def flag(option: Callable[[str], Any], name: str, default: bool | None = False) -> Any:
    """Return an option that is true or false; ``option`` returns one by name.

    Raises CheckpointError for another value: text such as "false" would count as true.
    """
    if (value := option(name)) not in (None, True, False):
        raise CheckpointError(f"{name} in its config.json must be true or false, got {value!r:.60}.")
    return default if value is None else bool(value)


def agreed(name: str, stated: Iterable[Any]) -> Any:
    """Return the value of an option that a config may state in several places; None: in none.

    Raises CheckpointError if the places differ.
    """
    values = [value for value in stated if value is not None]
    for value in values:
        if value != values[0]:
            raise CheckpointError(
                f"its config.json says {name} twice, {values[0]!r:.60} and {value!r:.60}. Correct one of them."
            )
    return values[0] if values else None


def check_sizes_agree(option: Callable[[str], Any], **sizes: int) -> None:
    """Raise CheckpointError if a config states sizes other than these of the tensors; ``option`` reads a field."""
    for name, size in sizes.items():
        if (stated := option(name)) not in (None, size):
            raise CheckpointError(
                f"{name} is {stated!r:.60} in its config.json, and {size} by its tensors: use config and weights of "
                "one export."
            )


def check_uncomputed(option: Callable[[str], Any], *computed: str) -> None:
    """Raise CheckpointError for a config with options that no head computes here, except ``computed``.

    ``option`` returns one by name.
    """
    for name, harmless in _HARMLESS.items():
        if (stated := option(name)) not in harmless and name not in computed:
            raise CheckpointError(
                f"its config.json has {name} {stated!r:.60}, which is not known here. Use another head."
            )


def _ropes(config: Mapping[str, Any], rope_of: str | None) -> dict[str, Any]:
    """Return a config's rotary options, from ``rope_theta``, ``rope_scaling`` and ``rope_parameters``.

    Raises CheckpointError if they contradict each other, or differ between types of layers, ``rope_of`` not among them.
    """
    parts: list[dict[str, Any]] = []
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"{name} is {rope!r:.60}, not a mapping.")
        of_types = [options for options in rope.values() if isinstance(options, Mapping)]
        if isinstance(rope.get(rope_of), Mapping):
            of_types = [rope[rope_of]]
        if any(options != of_types[0] for options in of_types):
            raise CheckpointError(f"{name} differs between types of layers, and all turn alike here. Use another head.")
        outer = {key: value for key, value in rope.items() if value is not None and not isinstance(value, Mapping)}
        if of_types and any(of_types[0].get(key) != value for key, value in outer.items()):
            raise CheckpointError(f"{name} says other rotary options than those of its types of layers: {rope!r:.80}.")
        rope = dict(of_types[0] if of_types else rope)
        old = rope.pop("type", None)
        rope_type = rope.get("rope_type") or old
        parts.append({**rope, "rope_type": "default" if rope_type == "mrope" else rope_type})
    merged = {name: agreed(name, (part.get(name) for part in parts)) for part in parts for name in part}
    stated, used = config.get("rope_theta"), merged.get("rope_theta")
    if None not in (stated, used) and stated != used:
        logger.warning(
            "the head turns by rope_theta %s, as in its rope parameters; elsewhere its config says %s.", used, stated
        )
    merged["rope_theta"] = stated if used is None else used
    return {name: value for name, value in merged.items() if value is not None}


def plain_layer(
    config: Mapping[str, Any], model_type: str, mrope: bool = True, rope_of: str | None = None
) -> dict[str, Any]:
    """Convert a Llama-like config of another program to :attr:`EagleConfig.layer`.

    Args:
        config: config of the layers.
        model_type: of the layers.
        mrope: whether M-RoPE that the config names holds. Some heads are trained on tokens' positions in the text,
            whatever they copied of their target's config.
        rope_of: the type of layer whose rotary options hold for all where they differ by type.
    """
    rope = _ropes(config, rope_of)
    multi = {name: rope.pop(name) for name in MROPE if name in rope}
    if any(fraction not in (None, 1) for fraction in (config.get(PARTIAL), rope.pop(PARTIAL, None))):
        logger.warning("the head turns all of its dimensions, as programs train it: its %s is not used.", PARTIAL)
    fields = {name: config[name] for name in LAYER_FIELDS if name in config and name != "rope_parameters"}
    fields |= {"rope_parameters": {"rope_type": "default", **rope}} if rope else {}
    # transformers may fail in any way on another program's values
    fault = "it does not describe a Llama layer ({why})."
    with foreign_errors(CheckpointError, fault):
        if "hidden_size" not in fields:
            raise ValueError("it has no hidden_size")
        size, heads = fields["hidden_size"], fields.get("num_attention_heads", 32)
        check_layer({"hidden_size": size, "num_attention_heads": heads, "model_type": model_type}, size)
        derived = {"num_key_value_heads": heads, "head_dim": size // heads}
        if model_type == LATENT:  # its heads share keys, and head_dim is that of their rotary part
            fields = {name: fields[name] for name in fields if name not in derived}
            del derived["head_dim"]
        if model_type == config.get("model_type") == "qwen3" and "head_dim" not in config:
            del derived["head_dim"]  # Qwen3's own default
        fields |= {name: value for name, value in derived.items() if fields.get(name) is None}
        layer = layer_of(AutoConfig.for_model(model_type, **fields))
    layer["rope_parameters"] |= multi if mrope else {}
    check_layer(layer, size)
    return layer


def layer_count(stated: Any, names: Collection[str], *read: str) -> int:
    """Return the number of decoder layers, counted by the tensors' names.

    Raises CheckpointError if the config's number ``stated`` differs (None: not stated), or for layers unknown here.
    ``read``: parts of names that are read nevertheless.
    """
    for part, what in _UNREAD.items():
        if part not in read and (name := next((name for name in names if part in name), None)):
            raise CheckpointError(f"its layers have {what} ({name}), unknown here. Use a head with Llama's layers.")
    numbers = {int(match[1]) for name in names if (match := re.match(r"layers\.(\d{1,3})\.", name))}
    count = len(numbers)
    if numbers != set(range(count)) or not count or stated not in (None, count):
        raise CheckpointError(f"it names {stated!r:.60} layers, but the weights hold layers {sorted(numbers)}.")
    return count


def target_layers(where: str, entering: Any, leaving: Any) -> list[int] | None:
    """Return the target's layers that a head reads, counted from 0 and in the order of its file; None if not stated.

    Two numberings exist: ids of the states that *enter* layers, where 0 is the embedding, and of layers that output
    them. Raises CheckpointError if a list is malformed, or if both are there and differ.

    Args:
        where: what errors call the lists.
        entering: ids of the former kind, as the config has them.
        leaving: of the latter.
    """
    for ids in (entering, leaving):
        if ids is not None and (not isinstance(ids, list) or not all(type(number) is int for number in ids)):
            raise CheckpointError(f"{where} must be a list of whole numbers.")
    layers: list[int] | None = leaving if entering is None else [number - 1 for number in entering]
    if None not in (entering, leaving) and layers != leaving:
        raise CheckpointError(
            f"{where} are {entering} and {leaving}: the latter should be one less. Correct one of them."
        )
    return layers


def read_draft_ids(weights: Weights, vocabulary: Any) -> Tensor | None:
    """Return the target id of each row of the stored LM head [Vd], from ``d2t`` or ``t2d``; None: all ids in order."""
    shapes = weights.shapes
    rows = (*shapes.get(LM_HEAD, (vocabulary,)), 0)[0]
    if D2T not in shapes and rows == vocabulary:
        return None
    if shapes.get(T2D, (vocabulary,)) != (vocabulary,):
        raise CheckpointError(f"t2d is of shape {list(shapes[T2D])} for a vocabulary of {vocabulary!r:.60}. {AGAIN}")
    flags = weights.read(T2D, BOOLEANS) if T2D in shapes else torch.zeros(0)
    drafted = flags.nonzero()[:, 0]
    if not bool((flags[drafted] == 1).all()):
        raise CheckpointError(f"t2d holds other numbers than 0 and 1. {AGAIN}")
    if D2T not in shapes:
        if len(drafted) != rows:
            raise CheckpointError(f"it drafts over {rows} of {vocabulary!r:.60} ids and has no d2t to say which.")
        return drafted
    if LM_HEAD not in shapes or shapes[D2T] != (rows,) or type(vocabulary) is not int:
        raise CheckpointError(f"d2t is of shape {list(shapes[D2T])}, lm_head of {rows!r:.60} rows.")
    ids = torch.arange(rows) + weights.read(D2T, INTEGERS)
    check_draft_ids(ids.sort().values, vocabulary)
    if T2D in shapes and not torch.equal(ids.sort().values, drafted):
        raise CheckpointError("d2t and t2d name different ids. Export the head again.")
    return None if torch.equal(ids, torch.arange(vocabulary)) else ids


def check_draft_ids(ids: Tensor, vocabulary: int) -> None:
    """Raise CheckpointError unless ids [Vd] are distinct, ascending and in the target's vocabulary."""
    if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary or not bool((ids.diff() > 0).all()):
        raise CheckpointError(
            f"the draft vocabulary must be distinct ids from 0 to {vocabulary - 1}. Export the head again."
        )


def shares_table(weights: Weights, name: str, target: Target | None) -> bool:
    """Whether the file's embeddings or LM head, by their ``name``, are the target's up to rounding."""
    if name not in weights.shapes or target is None:
        return False
    model: Any = target.model
    table = weight_rows(model.get_input_embeddings() if name == EMBEDDINGS else model.get_output_embeddings(), None)
    if tuple(table.shape) != weights.shapes[name]:
        return False
    return torch.allclose(weights.read(name).float(), table.detach().float().cpu(), rtol=2**-7, atol=1e-6)
