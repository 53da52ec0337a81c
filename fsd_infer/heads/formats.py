"""Readers of head files: our format, and by :mod:`.eagle_formats` those of other programs.

:mod:`fsd_infer.heads.export` writes both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsd_core.errors import CheckpointError, VocabularyMismatchError
from fsd_core.files import read_json
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.eagle_formats import eagle3_head, eagle_head
from fsd_infer.heads.kinds import EAGLE, EAGLE_3, EAGLES, MTP, OLD, OURS, kind_of
from fsd_infer.heads.stored_parts import (
    CONFIG,
    D2T,
    DRAFT_IDS,
    LATENT_PART,
    StoredHead,
    check_draft_ids,
    flat,
    layer_count,
    our_name,
)
from fsd_infer.heads.weights import (
    AGAIN,
    INDEX,
    INTEGERS,
    PICKLE,
    SINGLE,
    Weights,
    has_weights,
    names_in_pickle,
    naming,
)
from fsd_infer.targets.adapters import ADAPTER_CONFIG, is_adapter, lora_layers
from fsd_infer.targets.checks import is_mtp_alone

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 24  # of a config
NEWEST_OLD = 2  # last version of the format with the options under "head"


def read_head(directory: Path, target: Target | None) -> StoredHead:
    """Read the head in a directory. Sizes are checked against the weights' headers before anything is allocated.

    Raises:
        CheckpointError: missing, malformed or truncated files, an unknown format, or a head of another target.
        VocabularyMismatchError: same family but another vocabulary.
    """
    config = read_config(directory)
    kind = kind_in(directory, config)
    if kind is None:
        raise CheckpointError(f"{directory / CONFIG} is not a head's (format: {config.get('format')!r:.60}).")
    if kind not in EAGLES:
        raise CheckpointError(f"{directory} is a head of kind {kind}, not EAGLE. It can draft (--drafter) as it is.")
    if kind in (EAGLE, EAGLE_3):
        _check_program(directory, config, kind)
    return read_kind(directory, config, kind, target)


def read_kind(directory: Path, config: Mapping[str, Any], kind: str, target: Target | None) -> StoredHead:
    """Read the head of that kind in a directory, which may have more files. Errors as for :func:`read_head`."""
    weights = Weights(directory, str if kind in (OURS, OLD) else our_name)
    with naming(directory):
        if kind in (OURS, OLD):
            stored = _of_ours(config if kind == OURS else _of_old(config), weights)
        else:
            stored = (eagle3_head if kind == EAGLE_3 else eagle_head)(flat(config), weights, target)
    if target is not None:
        _check_target(directory, stored.config.target or {}, target)
        _check_adapter(directory, target)
    return stored


def head_kind(directory: Path) -> str | None:
    """Return OURS, OLD, EAGLE, EAGLE_3, or None for a directory without such a head, such as a causal LM's."""
    kind = kind_in(directory, read_config(directory)) if (directory / CONFIG).is_file() else None
    return kind if kind in EAGLES else None


def kind_in(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Return the kind of the head in a directory with that config, by :func:`kind_of` or only by the tensors."""
    if (kind := kind_of(config)) in (OURS, OLD):
        return kind
    if not has_weights(directory):
        return kind_of(config, names_in_pickle(directory / PICKLE, ("fc.weight", D2T)))
    names = set(Weights(directory).shapes)
    return kind_of(config, names) or (MTP if is_mtp_alone(names, config) else None)


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a head in any format. Raises CheckpointError if it is missing or malformed."""
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {CONFIG}: a drafter is a directory with {CONFIG} and weights.")
    if path.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size / 1e6:.0f} MB, which no drafter's config has. {AGAIN}")
    config = read_json(path, AGAIN, CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {type(config).__name__}, not an object with options. {AGAIN}")
    return config


def _of_old(config: Mapping[str, Any]) -> dict[str, Any]:
    version, head = config.get("version", 0), config.get("head")
    if type(version) is not int or version < 1 or not isinstance(head, Mapping):
        raise CheckpointError(f"it has no valid version and head. {AGAIN}")
    if version > NEWEST_OLD:
        raise CheckpointError(f"it is of version {version}, newer than this program reads: update it.")
    return {**head, "target": config.get("target"), "training": config.get("training")}


def _of_ours(values: Mapping[str, Any], weights: Weights) -> StoredHead:
    trained_for = values.get("target")
    stated = trained_for if isinstance(trained_for, Mapping) else {}
    lacking = [key for key in ("hidden_size", "vocab_size") if stated.get(key) is None]
    if lacking:  # without these the head would fit any target
        raise CheckpointError(f"target does not say its {', '.join(lacking)}. {AGAIN}")
    head = EagleConfig.from_dict(values)
    layer_count(head.num_layers, weights.shapes, LATENT_PART)  # before the layers are built
    names = {name: name for name in weights.shapes if name != DRAFT_IDS}
    if head.draft_vocab_size is None and DRAFT_IDS not in weights.shapes:
        return StoredHead(head, weights, names)
    if weights.shapes.get(DRAFT_IDS) != (head.draft_vocab_size,):
        raise CheckpointError(
            f"draft_ids is of shape {list(weights.shapes.get(DRAFT_IDS, ()))}, wanted are {head.draft_vocab_size} ids "
            "(draft_vocab_size)."
        )
    ids = weights.read(DRAFT_IDS, INTEGERS).long()
    check_draft_ids(ids, head.vocab_size)
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


def _check_adapter(directory: Path, target: Target) -> None:
    """Warn if a LoRA lies beside the head (Model-Optimizer trains both together) and the target has none."""
    if is_adapter(directory) and not (getattr(target.config, "merged_adapter", None) or lora_layers(target.model)):
        logger.warning(
            "%s has an adapter of the target beside the head, which was trained on the adapted target, and %s has no "
            "adapter: fewer drafts are accepted. Give that directory as the target, too, once its %s names the base "
            "model (base_model_name_or_path).", directory, target.name, ADAPTER_CONFIG,
        )  # fmt: skip


def _check_program(directory: Path, config: Mapping[str, Any], kind: str) -> None:
    speculators = config.get("speculators_model_type")
    if speculators not in (None, "eagle", "eagle3"):
        raise CheckpointError(
            f"{directory} is a head of speculators of type {speculators!r:.60}, which is not read here. Use a head of "
            "another type."
        )
    if not has_weights(directory):
        fault = f"{directory} is an {kind} head of another program, without {SINGLE}"
        raise CheckpointError(f"{fault}. {weights_advice(directory)}")


def weights_advice(directory: Path, pickle: str = PICKLE) -> str:
    """Return advice on how to give a directory the weights of a head that it lacks or has under another name."""
    names = sorted(file.name for file in directory.glob("*.safetensors"))
    if len(names) == 1:
        return f"Rename its {names[0]} to {SINGLE}."
    if names:
        return f"It has {len(names)} files, {names[0]} to {names[-1]}, and needs their {INDEX}: copy it, too."
    return unpickle(f"{directory}/", pickle)


def unpickle(directory: str = "", file: str = PICKLE) -> str:
    """Return advice on how to convert a head in a pickle."""
    files = f"torch.load({directory + file!r}, map_location='cpu', weights_only=True), {directory + SINGLE!r}"
    return (
        f"Nothing is unpickled here, since that can run code: convert a {file} once, in Python, by\n"
        f"import torch; from safetensors.torch import save_file; save_file({files})"
    )
