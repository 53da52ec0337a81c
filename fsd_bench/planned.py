"""Make targets without values, on torch's "meta" device, to answer what follows from a config alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from fsd_core.errors import FsdError, ModelLoadError, foreign_errors
from fsd_core.registry import read_int
from fsd_infer.heads.layers import llama_layer
from fsd_infer.targets.kinds import attention_for, auto_class
from fsd_infer.targets.loading import explained, load_config
from fsd_infer.targets.target import Target

_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
_LLAMA_3_1 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
              "num_key_value_heads": 8, "tie_word_embeddings": False}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {**_LLAMA_3_1, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32},
    "llama-3.1-70b": {**_LLAMA_3_1, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                      "num_attention_heads": 64},
}  # fmt: skip

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of a mixture's count in configs


def planned_target(name: str, changes: Mapping[str, int] | None = None) -> Target:
    """Make a target without values.

    Args:
        name: a name in :data:`SHAPES`, a directory with a config.json, or a target as decoding takes it.
        changes: sizes to change, by the config's names.

    Raises:
        ModelLoadError: no such config, or a model that cannot verify a draft tree.
    """
    directory = Path(name).expanduser()
    # a config can make any part of transformers fail
    with foreign_errors(ModelLoadError, f"no model can be planned from the config of {name}: {{why}}"):
        if name in SHAPES:
            config = AutoConfig.for_model(**SHAPES[name])
        elif (directory / "config.json").is_file():
            with explained(name):
                config = AutoConfig.from_pretrained(directory)
        else:
            config = load_config(name)
        text = config.get_text_config(decoder=True)
        unknown = [key for key in changes or {} if not hasattr(text, key)]
        if unknown:
            raise ModelLoadError(f"{unknown[0]} is not a size of {name}: see its config.json.")
        for key, value in (changes or {}).items():
            setattr(text, key, value)
        with torch.device("meta"):
            kind, attention = auto_class(config), attention_for(config)
            model = kind.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        target = Target(model, name=name)
        _ = target.layer_windows  # refuses other kinds of layers
    return target


@dataclass(frozen=True)
class ModelSizes:
    """The sizes that determine a target's memory and time.

    Attributes:
        name: name of the target.
        family: transformers' ``model_type``.
        parameters: number of weights, tied ones counted once.
        hidden_size, intermediate_size, layers, heads, kv_heads, head_dim: as in its config.
        vocab_size: width of the logits.
        positions: longest context in tokens, or None if the config does not say.
    """

    name: str
    family: str
    parameters: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    positions: int | None = None


def sizes_of(target: Target) -> ModelSizes:
    """Return the sizes of a target, with or without values."""
    config, hidden = target.config, target.hidden_size
    layer = llama_layer(config, hidden)  # of a head, where the target says nothing or its layers differ
    return ModelSizes(
        name=target.name,
        family=config.model_type,
        parameters=count_weights(target.model),
        hidden_size=hidden,
        intermediate_size=layer["intermediate_size"],
        layers=int(config.num_hidden_layers),
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        vocab_size=target.vocab_size,
        positions=target.max_positions,
    )


def count_weights(module: nn.Module) -> int:
    """Return the number of weights, tied ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def read_changes(changes: Sequence[str]) -> dict[str, int]:
    """Parse "KEY=NUMBER" texts, of whole numbers. Raises FsdError for another text."""
    plans = {}
    for text in changes:
        key, equals, number = text.partition("=")
        value = read_int(number)
        if not key or value is None or value < 1 and key in _SIZES:
            raise FsdError(f"--set takes KEY=NUMBER with a whole number, e.g. num_hidden_layers=8; got {text}.")
        plans[key] = value
    return plans
