"""Shape and options of a draft head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedConfig

from fsd_core.errors import CheckpointError, foreign_errors
from fsd_core.registry import did_you_mean, is_number, is_whole
from fsd_infer.heads.layers import EAGLE3_LAYERS, LAYER_FIELDS, llama_layer, own_layer
from fsd_infer.targets.checks import check_numbers

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

LAYOUTS = ("fsd", "eagle", "eagle3")
MAX_INTEGER = 2**31 - 1  # of any size, count or id
# The options of each layout, besides the fields that all layouts have.
_OPTIONS = {
    "fsd": {"input_norm", "final_norm", "feature_scale", "fc_bias", "fused_layers"},
    "eagle": {"fc_bias", "own_embeddings"},
    "eagle3": {
        "fused_layers", "fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "own_lm_head",
        "own_embeddings",
    },
}  # fmt: skip
_ALL_OPTIONS = set().union(*_OPTIONS.values())
_SIZES = {"hidden_size": 1, "vocab_size": 1, "num_layers": 1, "embed_size": 0, "target_hidden_size": 0}
# Arguments of PreTrainedConfig besides its fields.
_BASE = {"model_type", "name_or_path", "torch_dtype", "attn_implementation", "output_attentions"}


class EagleConfig(PreTrainedConfig):
    """Shape and options of a head.

    There are three layouts:

    - ``eagle``: EAGLE-1/2 as published. The head reads the target's final feature. Its output estimates the next
      feature, the input of the target's LM head.
    - ``eagle3``: EAGLE-3 as published. Inner layers of the target, fused by ``fc``, replace the feature. The attention
      reads embedding and feature side by side. ``norm`` and the head's own LM head follow.
    - ``fsd``: ``eagle`` with options that other programs do not support. Inner layers are *added* to the final feature.

    Attributes:
        hidden_size: H, width of the head; equal to the width of the target's features unless ``layout`` is "eagle3".
        vocab_size: V of the target.
        layer: transformers config of the decoder layer, with its ``model_type``.
        layout: "fsd", "eagle" or "eagle3".
        embed_size: width of the input embeddings (default: H; differs if the family projects them).
        target_hidden_size: width of the target's features (default: H; "eagle3" only).
        num_layers: number of decoder layers.
        input_norm: keep the first layer's input norm ("fsd").
        final_norm: apply a norm like the target's final norm to the output ("fsd").
        feature_scale: divide incoming features by the target's final-norm weight, to even out outlier dimensions
            ("fsd").
        fc_bias: bias of the 2H -> H projection ("fsd", "eagle").
        draft_vocab_size: Vd of a reduced draft vocabulary; None for all of V.
        fused_layers: k layers of the target, counted from 0, whose outputs the head reads: besides the final features
            ("fsd") or instead of them ("eagle3"; default there: see :func:`default_fused_layers`).
        fc_norm: normalise each fused layer separately before ``fc`` (EAGLE-3.1; "eagle3").
        norm_output: feed the normalised output back instead of the raw one (EAGLE-3.1; "eagle3").
        norm_before_residual: start the residual stream with the normalised feature (some heads of speculators;
            "eagle3", loaded heads only).
        norm_before_fc: normalise all fused layers together before ``fc`` (heads of speculators; "eagle3", loaded heads
            only).
        own_lm_head: train the head's own LM head ("eagle3"). Otherwise the target's rows serve, and the ids of each
            text can join the draft vocabulary.
        own_embeddings: use the head's own input embeddings ("eagle3" and "eagle", loaded heads only).
        target: the facts that the target must match, as :meth:`Target.fingerprint` returns them; None if unknown.
        training: free-form record of the training: recipe, data, steps, metrics.

    Raises:
        CheckpointError: a value of the wrong type or range, or an unknown option, or one that the layout lacks.
    """

    model_type = "fsd_eagle"
    has_no_defaults_at_init: ClassVar[bool] = True

    hidden_size: int
    vocab_size: int
    layer: dict[str, Any]
    layout: str = "fsd"
    embed_size: int = 0
    target_hidden_size: int = 0
    num_layers: int = 1
    input_norm: bool = False
    final_norm: bool = False
    feature_scale: bool = False
    fc_bias: bool = False
    draft_vocab_size: int | None = None
    fused_layers: list[int] = field(default_factory=list)
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    own_lm_head: bool = False
    own_embeddings: bool = False
    target: dict[str, Any] | None = None
    training: Any = None

    def __post_init__(self, **others: Any) -> None:
        check_known("head option", others.keys() - _BASE, own_fields())
        super().__post_init__(**others)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise CheckpointError(f"dtype must be one of floating-point numbers, got {self.dtype!r:.60}.")
        if self.layout not in LAYOUTS:
            raise CheckpointError(f"unknown head layout {self.layout!r:.60}; known: {', '.join(LAYOUTS)}.")
        for name, least in _SIZES.items():
            check_integer(name, getattr(self, name), least)
        self.embed_size = self.embed_size or self.hidden_size
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        for name in _ALL_OPTIONS - {"fused_layers"}:
            if not isinstance(getattr(self, name), bool):
                raise CheckpointError(f"head option {name} must be true or false, got {getattr(self, name)!r:.60}.")
        if self.draft_vocab_size is not None:
            check_integer("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)
        if not isinstance(self.fused_layers, list | tuple):
            raise CheckpointError(f"fused_layers must be a list of layer numbers, got {self.fused_layers!r:.60}.")
        for number in self.fused_layers:
            check_integer("a number in fused_layers", number, 0)
        self.fused_layers = sorted(set(self.fused_layers))
        check_layer(self.layer, self.hidden_size)
        self._check_layout()

    def _check_layout(self) -> None:
        surplus = sorted(name for name in _ALL_OPTIONS - _OPTIONS[self.layout] if getattr(self, name))
        if surplus:
            raise CheckpointError(
                f"a head of layout {self.layout} has no {', '.join(surplus)}: leave "
                f"{'it' if len(surplus) == 1 else 'them'} out, or use layout "
                f"{' or '.join(name for name in LAYOUTS if set(surplus) <= _OPTIONS[name]) or 'fsd'}."
            )
        if self.layout != "eagle3":
            if self.target_hidden_size != self.hidden_size:
                raise CheckpointError(f"a head of layout {self.layout} is as wide as its target's features.")
            return
        if not self.fused_layers:
            raise CheckpointError("a head of layout eagle3 reads inner layers of the target: give fused_layers.")
        if self.layer.get("model_type") not in EAGLE3_LAYERS:
            raise CheckpointError(
                f"a head of layout eagle3 has a layer of type {' or '.join(EAGLE3_LAYERS)}, not "
                f"{self.layer.get('model_type')!r:.60}."
            )
        if self.feature_width == self.hidden_size:  # the head distinguishes features from outputs by their width
            raise CheckpointError(f"hidden_size {self.hidden_size} equals the width of the features it is fed with.")
        if self.target_hidden_size != self.hidden_size and not (self.own_lm_head and self.own_embeddings):
            raise CheckpointError("a head of another width than its target's needs its own embeddings and LM head.")

    @property
    def feature_width(self) -> int:
        """Width of the features that the head reads: the final ones and those of the k fused layers."""
        return self.target_hidden_size * (1 + len(self.fused_layers))

    @classmethod
    def from_dict(cls, config_dict: Any, **kwargs: Any) -> Any:
        """Construct as in transformers. Raises CheckpointError unless given a mapping of fields with valid values."""
        if not isinstance(config_dict, Mapping):
            raise CheckpointError(f"the head's options must be a mapping, got {type(config_dict).__name__}.")
        with foreign_errors(CheckpointError, "the head's options cannot be used ({why})."):  # transformers' own fields
            return super().from_dict(dict(config_dict), **kwargs)

    @classmethod
    def for_target(
        cls, target: Target, layer: str = "auto", intermediate_size: int | None = None, **options: Any
    ) -> EagleConfig:
        """Return the config of a new head for a target.

        Args:
            target: whose features the head reads.
            layer: "auto" or "llama". "auto" is the target's own type of layer if it works outside its model, else a
                Llama layer; layout "eagle3" always has a Llama layer.
            intermediate_size: width of the layers' MLP; None: the target's. A narrower MLP trains and drafts faster,
                but cannot start from the target's layers.
            options: other fields of the config.

        Raises:
            CheckpointError: an option is unknown or out of its range.
        """
        if options.get("layout") == "eagle3":
            layer = "llama"
            options = {"own_lm_head": True, **options}
            options["fused_layers"] = options.get("fused_layers") or default_fused_layers(target)
        if layer not in ("auto", "llama"):
            raise CheckpointError(f"head option layer is auto or llama, got {layer!r:.60}.")
        config = target.config
        llama = llama_layer(config, target.hidden_size)
        own_layer_config = None if layer == "llama" else own_layer(config)
        chosen = own_layer_config or llama
        if intermediate_size is not None:
            check_integer("intermediate_size", intermediate_size, 1)
            if "intermediate_size" not in chosen:  # the family names its MLP's width differently
                chosen = llama
            chosen["intermediate_size"] = intermediate_size
        return cls(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            layer=chosen,
            embed_size=int(target.model.get_input_embeddings().weight.shape[1]),
            target=target.fingerprint(),
            **options,
        )


def own_fields() -> set[str]:
    """Return the fields that :class:`EagleConfig` adds to those of every transformers config."""
    return EagleConfig.__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys()


def usual_layers(count: int) -> list[int]:
    """Return EAGLE-3's low, middle and high layer of a target with ``count`` layers, counted from 0.

    Other programs call them 2, n/2 and n−3, the layers that their outputs *enter*. Fewer than six layers give fewer
    than three numbers.
    """
    return sorted({min(max(number - 1, 0), count - 1) for number in (2, count // 2, count - 3)})


def default_fused_layers(target: Target) -> list[int]:
    """Return :func:`usual_layers` of a target."""
    return usual_layers(int(target.config.num_hidden_layers))


def check_layer(layer: Any, hidden_size: int) -> None:
    """Raise CheckpointError unless ``layer`` describes a decoder layer, with fields of the right types."""
    if not isinstance(layer, Mapping) or not isinstance(layer.get("model_type"), str):
        raise CheckpointError(f"the head's layer must be a mapping with a model_type, got {layer!r:.80}.")
    check_known("layer option", layer, {*LAYER_FIELDS, "model_type"})
    check_numbers(layer, "the head's layer")
    for name, value in layer.items():
        if name.endswith("size") or name.startswith("num_") or name in ("head_dim", "max_position_embeddings"):
            check_integer(f"layer option {name}", value, 1)
        elif name in ("rms_norm_eps", "layer_norm_eps", "query_pre_attn_scalar", "attention_multiplier"):
            if not is_number(value, 0):
                raise CheckpointError(f"layer option {name} must be a number from 0, got {value!r:.60}.")
    if layer.get("hidden_size", hidden_size) != hidden_size:
        raise CheckpointError(f"the head's layer has hidden_size {layer['hidden_size']}, the head {hidden_size}.")


def check_known(kind: str, names: Iterable[Any], known: set[str]) -> None:
    """Raise CheckpointError, with the nearest known name, for an unknown name among ``names``."""
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise CheckpointError(f"unknown {kind} {name!r:.60}.{hint} Known: {', '.join(sorted(known))}.")


def check_integer(name: str, value: Any, least: int, most: int = MAX_INTEGER) -> None:
    """Raise CheckpointError, which begins with the name, unless a value is a whole number within these bounds."""
    if not is_whole(value, least, most):
        raise CheckpointError(f"{name} must be a whole number from {least} to {most}, got {value!r:.60}.")
