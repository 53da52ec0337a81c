"""EAGLE heads as other programs store them: what they are, in terms of :class:`EagleConfig` and of our names.

EAGLE-1/2 (SafeAILab's code, vLLM, SGLang): the config of a Llama model of one layer, ``fc``, ``layers.0.*``, perhaps
the target's embeddings. EAGLE-3 (SafeAILab, SpecForge, SGLang, vLLM): the same with ``midlayer.*`` or ``layers.0.*``,
an LM head of its own and ``d2t``, which is what to *add* to a draft id to have the target's. speculators: the Llama
config under ``transformer_layer_config``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig

from fsd_infer.cpu.ops import weight_rows
from fsd_infer.errors import CheckpointError, shortened
from fsd_infer.heads.config import EagleConfig, check_layer, default_fused_layers
from fsd_infer.heads.layers import EAGLE3_LAYERS, LAYER_FIELDS, layer_of
from fsd_infer.heads.weights import PICKLE, SINGLE, Weights, names_in_pickle

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

EAGLE, EAGLE_3 = "EAGLE-1/2", "EAGLE-3"
EMBEDDINGS, LM_HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
# what speculators keeps of the target while it trains, and buffers of old attention modules
_IGNORED = re.compile(r"verifier_(lm_head|norm)\.weight|.*\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class PublicHead:
    """A public head seen from here.

    Attributes:
        config: its shape and options.
        target: what is known of the target that it is for, as :meth:`Target.fingerprint` names it.
        names: our name of each parameter -> its name in the file.
        draft_ids: [Vd] ascending, or None for the whole vocabulary.
        order: [Vd] row of the stored LM head for each of them, where that order is another; else None.
    """

    config: EagleConfig
    target: dict[str, Any]
    names: dict[str, str]
    draft_ids: Tensor | None = None
    order: Tensor | None = None


def kind_of(directory: Path, config: Mapping[str, Any], names: set[str] | None) -> str | None:
    """EAGLE, EAGLE_3, or None: no head. Configs seldom say, so the names of the tensors do (None: no safetensors)."""
    if names is None:
        names = names_in_pickle(directory / PICKLE, ("fc.weight", D2T))
    said = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    if "eagle3" in said or D2T in names or any(name.endswith("hidden_norm.weight") for name in names):
        return EAGLE_3
    return EAGLE if "eagle" in said or "fc.weight" in names else None


def read_public(directory: Path, config: Mapping[str, Any], kind: str, target: Target | None) -> PublicHead:
    """What a head of that kind is. Raises CheckpointError for one that is malformed or cannot be run here."""
    speculators = config.get("speculators_model_type")
    if speculators not in (None, "eagle3"):
        raise CheckpointError(
            f"{directory} is a head of speculators of type {speculators!r:.60}; of that program's, eagle3 is read here."
        )
    if not any((directory / name).exists() for name in (SINGLE, f"{SINGLE}.index.json")):
        pickled = directory / PICKLE
        files = f"torch.load({str(pickled)!r}, map_location='cpu', weights_only=True), {str(directory / SINGLE)!r}"
        raise CheckpointError(
            f"{directory} is an {kind} head of another program, without {SINGLE}. Nothing is unpickled here, "
            f"since that can run code: convert a {PICKLE} once, in Python, by\n"
            f"import torch; from safetensors.torch import save_file; save_file({files})"
        )
    weights = Weights(directory)
    try:
        return (_eagle3 if kind == EAGLE_3 else _eagle)(directory, config, weights, target)
    except CheckpointError as error:
        if str(directory) in str(error):
            raise
        raise CheckpointError(f"{directory}: {error}") from error


def _eagle(directory: Path, config: Mapping[str, Any], weights: Weights, target: Target | None) -> PublicHead:
    shapes = weights.shapes
    # EAGLE's layer is Llama's, with Qwen2's biases for Qwen2. What a config leaves out is at Llama's defaults there too
    # (a base of 10000 for positions, say, whatever the target's is).
    layer = _layer(config, "qwen2" if "layers.0.self_attn.q_proj.bias" in shapes else "llama")
    names = _names(shapes) - {EMBEDDINGS}
    bias = "fc.bias" in names and (config.get("bias") is not False or bool(weights.floats("fc.bias").any()))
    vocabulary, embed_size = _table(config, shapes, layer["hidden_size"])
    head = EagleConfig(
        hidden_size=layer["hidden_size"],
        vocab_size=vocabulary,
        layer=layer,
        layout="eagle",
        embed_size=embed_size,
        num_layers=layer_count(config.get("num_hidden_layers"), names),
        fc_bias=bias,
    )
    sizes = {"hidden_size": head.hidden_size, "embed_size": head.embed_size, "vocab_size": head.vocab_size}
    names -= set() if bias else {"fc.bias"}  # zeros, for programs that would make it up
    return PublicHead(head, sizes, {name: name for name in names})


def _eagle3(directory: Path, config: Mapping[str, Any], weights: Weights, target: Target | None) -> PublicHead:
    described = config.get("transformer_layer_config", config)
    if not isinstance(described, Mapping):
        raise CheckpointError(f"{directory / 'config.json'}: transformer_layer_config is no mapping.")
    nested = config.get("eagle_config")
    if config.get("norm_before_fc") or (isinstance(nested, Mapping) and nested.get("norm_before_fc")):
        raise CheckpointError(f"{directory} has one norm over all fused layers (norm_before_fc), unknown here.")
    before = config.get("norm_before_residual")
    if before is None and "speculators_model_type" in config:
        raise CheckpointError(
            f"{directory / 'config.json'} does not say norm_before_residual, which programs take for true or false: "
            "add the value it was trained with."
        )
    shapes = {name.replace("midlayer.", "layers.0."): shape for name, shape in weights.shapes.items()}
    kind = described.get("model_type", "llama")
    layer = _layer(described, kind if kind in EAGLE3_LAYERS else "llama")
    width = layer["hidden_size"]
    names = _names(shapes)
    width_read = config.get("target_hidden_size") or width
    _positive("target_hidden_size", width_read)
    if len(shapes.get("fc.weight", ())) != 2 or shapes["fc.weight"][1] % width_read:
        raise CheckpointError(
            f"{directory}: fc.weight is of shape {list(shapes.get('fc.weight', ()))}, which fuses no whole number of "
            f"layers of width {width_read}."
        )
    vocabulary, _ = _table(described, shapes, width)
    draft_ids, order = _draft_ids(directory, weights, vocabulary, shapes)
    own_lm_head = LM_HEAD in names
    head = EagleConfig(
        hidden_size=width,
        vocab_size=vocabulary,
        layer=layer,
        layout="eagle3",
        target_hidden_size=width_read,
        num_layers=layer_count(described.get("num_hidden_layers"), names),
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        fused_layers=_fused_layers(directory, config, shapes["fc.weight"][1] // width_read, target),
        fc_norm=_flag(config, "fc_norm"),
        norm_output=_flag(config, "norm_output"),
        norm_before_residual=bool(before),
        own_lm_head=own_lm_head,
        own_embeddings=EMBEDDINGS in names and not _shared(weights, target),
    )
    if not head.own_embeddings:
        names -= {EMBEDDINGS}
    stored = {name.replace("midlayer.", "layers.0."): name for name in weights.shapes}
    sizes = {"hidden_size": width_read, "vocab_size": vocabulary}
    return PublicHead(head, sizes, {name: stored[name] for name in names}, draft_ids, order)


def _names(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """The parameters among a file's tensors."""
    return {name for name in shapes if name not in (D2T, T2D) and not _IGNORED.fullmatch(name)}


def _layer(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A Llama-like config of another program as :attr:`EagleConfig.layer`."""
    if "hidden_size" not in config:
        raise CheckpointError("config.json does not describe a Llama layer (it has no hidden_size).")
    known = {name: config[name] for name in (*LAYER_FIELDS, "rope_theta", "rope_scaling") if name in config}
    _positive("hidden_size", known["hidden_size"])
    try:
        layer = layer_of(AutoConfig.for_model(kind, **known))
    except Exception as error:  # made by transformers from another program's values: anything can be wrong
        raise CheckpointError(f"config.json does not describe a Llama layer ({shortened(error)}).") from error
    check_layer(layer, known["hidden_size"])
    return layer


def layer_count(said: Any, names: Collection[str]) -> int:
    """How many decoder layers the tensors make up. Raises CheckpointError unless the config says so too (or None)."""
    numbers = {int(found[1]) for name in names if (found := re.match(r"layers\.(\d{1,3})\.", name))}
    count = len(numbers)
    said = count if said is None else said
    if numbers != set(range(count)) or not count or said != count:
        raise CheckpointError(
            f"config.json speaks of {said!r:.60} layers, the weights hold those of number {sorted(numbers)}."
        )
    return count


def _table(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], width: int) -> tuple[int, int]:
    """(V, width of the embeddings) by what of tensors and config says so."""
    table = shapes.get(EMBEDDINGS)
    if table is None:
        size: Any = shapes[T2D][0] if len(shapes.get(T2D, ())) == 1 else config.get("vocab_size")
        _positive("vocab_size", size)
        return int(size), width
    if len(table) != 2:
        raise CheckpointError(f"{EMBEDDINGS} is of shape {list(table)}, which is no table.")
    return table[0], table[1]


def _draft_ids(
    directory: Path, weights: Weights, vocabulary: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Tensor | None, Tensor | None]:
    """(ascending target ids [Vd], order of the stored rows) from ``d2t``; (None, None) for the whole vocabulary."""
    rows = shapes.get(LM_HEAD, (vocabulary,))[0]
    if D2T not in shapes:
        if rows != vocabulary:
            raise CheckpointError(f"{directory} drafts over {rows} of {vocabulary} ids and has no d2t to say which.")
        return None, None
    if LM_HEAD not in shapes or shapes[D2T] != (rows,):
        raise CheckpointError(f"{directory}: d2t is of shape {list(shapes[D2T])}, lm_head of {rows} rows.")
    ids = torch.arange(rows) + weights.integers(D2T)
    check_draft_ids(directory, ids.sort().values, vocabulary)
    if T2D in shapes:
        drafted = weights.booleans(T2D)
        if drafted.shape != (vocabulary,) or int(drafted.sum()) != rows or not bool(drafted[ids].all()):
            raise CheckpointError(f"{directory}: d2t and t2d name different ids. Export the head again.")
    if rows == vocabulary:
        return None, None if bool((ids.diff() > 0).all()) else ids.argsort()
    return (ids, None) if bool((ids.diff() > 0).all()) else (ids.sort().values, ids.argsort())


def check_draft_ids(directory: Path, ids: Tensor, vocabulary: int) -> None:
    """Raise CheckpointError unless ids [Vd] are distinct, ascending and the target's."""
    if (
        ids.ndim != 1
        or not len(ids)
        or int(ids[0]) < 0
        or int(ids[-1]) >= vocabulary
        or not bool((ids.diff() > 0).all())
    ):
        raise CheckpointError(
            f"{directory}: the draft vocabulary must be distinct ids from 0 to {vocabulary - 1}. Export the head again."
        )


def _fused_layers(directory: Path, config: Mapping[str, Any], count: int, target: Target | None) -> list[int]:
    """Which layers are fused, as numbers from 0.

    Two numberings are in use: at the top level ids count the states that *enter* layers (vLLM, speculators; 0 is the
    embedding), in ``eagle_config`` the layers that put them out (SGLang, SpecForge).
    """
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{directory / 'config.json'}: eagle_config is no mapping.")
    entering, leaving = config.get(AUX_IDS), nested.get(AUX_IDS)
    for ids in (entering, leaving):
        if ids is not None and (not isinstance(ids, list) or not all(type(number) is int for number in ids)):
            raise CheckpointError(f"{directory / 'config.json'}: {AUX_IDS} must be a list of whole numbers.")
    found = leaving if entering is None else [number - 1 for number in entering]
    if entering is not None and leaving is not None and found != leaving:
        raise CheckpointError(
            f"{directory / 'config.json'}: {AUX_IDS} is {entering} at the top and {leaving} in eagle_config, where the "
            "same layers are one less: it is not clear which are meant."
        )
    if not found:
        if target is None:
            raise CheckpointError(f"{directory} does not say which layers it fuses: that depends on the target.")
        found = default_fused_layers(target)
    if len(found) != count or found != sorted(set(found)) or min(found) < 0:
        raise CheckpointError(f"{directory}: fc fuses {count} layers, and config.json names {found} (numbers from 0).")
    return found


def _shared(weights: Weights, target: Target | None) -> bool:
    """Are the embeddings in the file the target's, but for rounding?"""
    if target is None or EMBEDDINGS not in weights.shapes:
        return False
    table = weight_rows(target.model.get_input_embeddings(), None)
    if tuple(table.shape) != weights.shapes[EMBEDDINGS]:
        return False
    stored = weights.floats(EMBEDDINGS)
    return torch.allclose(stored.float(), table.detach().float().cpu(), rtol=2**-7, atol=1e-6)


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name) or False
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be true or false, got {value!r:.60}.")
    return value


def _positive(name: str, value: Any) -> None:
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"config.json: {name} must be a positive whole number, got {value!r:.60}.")
