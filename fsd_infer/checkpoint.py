"""Drafter checkpoints: a directory with ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from fsd_infer.errors import CheckpointError, VocabularyMismatchError
from fsd_infer.files import read_json
from fsd_infer.head import EagleConfig, EagleHead

if TYPE_CHECKING:
    from fsd_infer.target import Target

FORMAT = "fsd-eagle-head"
VERSION = 1


def save_head(
    directory: str | Path,
    head: EagleHead,
    fingerprint: dict[str, Any],
    extra: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a head. The LM head and the embeddings are the target's and are not stored.

    Args:
        directory: created if missing.
        head: the head.
        fingerprint: :meth:`Target.fingerprint` of the target it was trained for.
        extra: free-form record (recipe, data, steps), stored under "training".
        dtype: of the stored weights.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (value.to(dtype) if value.is_floating_point() else value.to(torch.int32)).contiguous().cpu()
        for name, value in head.state_dict().items()
    }
    config = {
        "format": FORMAT,
        "version": VERSION,
        "head": head.config.to_dict(),
        "target": fingerprint,
        "training": extra or {},
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory


def load_head(directory: str | Path, target: Target | None = None) -> EagleHead:
    """Read a head and, given a target, check that it was trained for it.

    Raises:
        CheckpointError: missing or truncated files, unknown format, wrong tensors, or a head of another target.
        VocabularyMismatchError: same family but another vocabulary.
    """
    directory = Path(directory)
    config = read_config(directory)
    weights = directory / "model.safetensors"
    if not weights.is_file():
        raise CheckpointError(f"{directory} has no model.safetensors: it is not a complete head checkpoint.")
    if target is not None:
        check_fingerprint(directory, config["target"], target)
    head = EagleHead(EagleConfig.from_dict(config["head"]))
    try:
        tensors = load_file(weights)
    except SafetensorError as error:
        raise CheckpointError(f"{weights} is truncated or damaged ({error}): copy or export it again.") from error
    expected = head.state_dict()
    missing, surplus = set(expected) - set(tensors), set(tensors) - set(expected)
    wrong = [k for k in set(expected) & set(tensors) if expected[k].shape != tensors[k].shape]
    if missing or surplus or wrong:
        raise CheckpointError(
            f"{weights} does not fit its config.json: missing {sorted(missing)}, unexpected {sorted(surplus)}, "
            f"wrong shape {sorted(wrong)}."
        )
    head.load_state_dict({k: v.to(expected[k].dtype) for k, v in tensors.items()})
    return head.eval().requires_grad_(False)


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json. Raises CheckpointError if it is missing, malformed or of another format."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: a drafter is a directory with config.json and weights.")
    config: dict[str, Any] = read_json(path, "Copy or export the drafter again.", CheckpointError)
    if config.get("format") != FORMAT:
        refuse_public_head(directory)
        raise CheckpointError(f"{path} is not an {FORMAT} checkpoint (format: {config.get('format')!r}).")
    if config.get("version", 0) > VERSION:
        raise CheckpointError(f"{path} is of version {config['version']}, newer than this program reads: update it.")
    return config


def is_head(directory: str | Path) -> bool:
    """Is this a head checkpoint (rather than, say, a causal LM)?"""
    path = Path(directory) / "config.json"
    return path.is_file() and f'"{FORMAT}"' in path.read_text(errors="replace")


def refuse_public_head(directory: str | Path) -> None:
    """Raise CheckpointError if this is an EAGLE head as other programs store it, which its config or tensors tell."""
    path, weights = Path(directory) / "config.json", Path(directory) / "model.safetensors"
    if not path.is_file():
        return
    config: dict[str, Any] = read_json(path, "Copy the drafter again.", CheckpointError)
    kind = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    tensors: set[str] = set()
    if weights.is_file():
        try:
            with safe_open(weights, framework="pt") as file:
                tensors = set(file.keys())
        except SafetensorError as error:
            raise CheckpointError(f"{weights} is truncated or damaged ({error}): copy it again.") from error
    if "eagle3" in kind or "d2t" in tensors or any(name.endswith("hidden_norm.weight") for name in tensors):
        raise CheckpointError(
            f"{directory} is an EAGLE-3 head of another program. There a projection of inner layers stands in place of "
            "the target's feature, here it is added to the feature, so its weights mean nothing here: train a head "
            "with fsd-train and head.fused_layers."
        )
    if "eagle" in kind or "fc.weight" in tensors:
        raise CheckpointError(
            f"{directory} is an EAGLE head of another program, without the {FORMAT} config.json that says which target "
            "it belongs to: use a head that fsd-train exported."
        )


def check_fingerprint(directory: Path, trained_for: dict[str, Any], target: Target) -> None:
    """Raise if the head was trained for another family, size or vocabulary than the target's."""
    actual = target.fingerprint()
    for key in ("model_type", "hidden_size"):
        if trained_for.get(key) != actual[key]:
            raise CheckpointError(
                f"the head in {directory} was trained for a target with {key} {trained_for.get(key)!r}, but "
                f"{target.name} has {actual[key]!r}: use this target's own head, or train one with fsd-train."
            )
    for key in ("vocab_size", "vocabulary_sha256"):
        ours, theirs = actual[key], trained_for.get(key)
        if ours is not None and theirs is not None and ours != theirs:
            raise VocabularyMismatchError(
                f"the head in {directory} was trained with another vocabulary than {target.name}'s "
                f"({key}: {theirs!r} against {ours!r}): token ids would mean different words. Train a head for it."
            )
