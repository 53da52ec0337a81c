"""Drafter checkpoints: a directory with ``config.json`` and ``model.safetensors``.

Besides our own, EAGLE heads are read as other programs store them (:mod:`fsd_infer.heads.public`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from fsd_infer.errors import CheckpointError, VocabularyMismatchError, shortened
from fsd_infer.files import read_json, replacing, write_json
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.layers import build_rotary
from fsd_infer.heads.public import PublicHead, check_draft_ids, kind_of, layer_count, read_public
from fsd_infer.heads.weights import INDEX, SINGLE, Weights

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

FORMAT = "fsd-eagle-head"
VERSION = 2  # 2: layouts
CONFIG = "config.json"
MOST_BYTES = 1 << 24  # of a config
_AGAIN = "Copy or export the drafter again."


def save_head(
    directory: str | Path,
    head: EagleHead,
    fingerprint: dict[str, Any],
    extra: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a head. What is the target's, its embeddings and in general its LM head, is not stored.

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
    with replacing(directory / SINGLE) as draft:
        save_file(tensors, draft)
    write_json(directory / CONFIG, config, indent=2)
    return directory


def load_head(directory: str | Path, target: Target | None = None) -> EagleHead:
    """Read a head, ours or one of another program, and, given a target, check that it was trained for it.

    A public head does not name its target: its sizes are checked. Nothing is allocated before the sizes that the config
    asks for were found in the headers of the weights.

    Raises:
        CheckpointError: missing, malformed or truncated files, unknown format, wrong tensors, or a head of another
            target.
        VocabularyMismatchError: same family but another vocabulary.
    """
    directory = Path(directory)
    config = read_config(directory)
    kind = _kind(directory, config)
    if kind is None:
        named = config.get("format")
        raise CheckpointError(f"{directory / CONFIG} is not an {FORMAT} checkpoint (format: {named!r:.60}).")
    if kind == FORMAT:
        found = _read_own(directory, config)
    else:
        found = read_public(directory, config, kind, target)
    if target is not None:
        check_fingerprint(directory, found.target, target)
    return _assembled(directory, found)


def _assembled(directory: Path, found: PublicHead) -> EagleHead:
    """The head with its weights."""
    weights = Weights(directory)
    try:
        with torch.device("meta"):
            head = EagleHead(found.config)
    except CheckpointError:
        raise
    except Exception as error:  # made by transformers from another program's numbers: anything can be wrong
        raise CheckpointError(
            f"{directory / CONFIG} does not describe a decoder layer ({shortened(error)})."
        ) from error
    parameters = {name: tuple(value.shape) for name, value in head.named_parameters()}
    if found.config.feature_scale:
        parameters["feature_scale"] = (found.config.hidden_size,)
    missing, surplus = set(parameters) - set(found.names), set(found.names) - set(parameters)
    wrong = [name for name in set(parameters) - missing if weights.shapes[found.names[name]] != parameters[name]]
    if missing or surplus or wrong:
        raise CheckpointError(
            f"the weights in {directory} do not fit its config.json: missing {sorted(missing)}, unexpected "
            f"{sorted(surplus)}, wrong shape {sorted(wrong)}."
        )
    weights.check_floats(list(found.names.values()))
    kept = torch.get_default_dtype()
    state = {name: weights.floats(stored).to(kept) for name, stored in found.names.items()}
    if found.order is not None:
        state["lm_head.weight"] = state["lm_head.weight"][found.order]
    if found.draft_ids is not None:
        state["draft_ids"] = found.draft_ids
    head.load_state_dict(state, assign=True)
    head.rotary_emb = build_rotary(found.config.layer)
    return head.eval().requires_grad_(False)


def _read_own(directory: Path, config: dict[str, Any]) -> PublicHead:
    """Our own format as the same kind of description that other programs' heads have."""
    path = directory / CONFIG
    version, trained_for = config.get("version", 0), config.get("target")
    if type(version) is not int or version < 1 or not isinstance(trained_for, dict):
        raise CheckpointError(f"{path} has no valid version and target. {_AGAIN}")
    lacking = [key for key in ("hidden_size", "vocab_size") if trained_for.get(key) is None]
    if lacking:  # or a head would be taken for any target's
        raise CheckpointError(f"{path}: target does not say its {', '.join(lacking)}. {_AGAIN}")
    if version > VERSION:
        raise CheckpointError(f"{path} is of version {version}, newer than this program reads: update it.")
    try:
        head = EagleConfig.from_dict(config.get("head"))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    weights = Weights(directory)
    layer_count(head.num_layers, weights.shapes)  # before that many are made
    names = {name: name for name in weights.shapes if name != "draft_ids"}
    if head.draft_vocab_size is None and "draft_ids" not in weights.shapes:
        return PublicHead(head, trained_for, names)
    if weights.shapes.get("draft_ids") != (head.draft_vocab_size,):
        raise CheckpointError(
            f"{directory}: draft_ids is of shape {list(weights.shapes.get('draft_ids', ()))}, wanted are "
            f"{head.draft_vocab_size} ids (draft_vocab_size in config.json)."
        )
    ids = weights.integers("draft_ids")
    check_draft_ids(directory, ids, head.vocab_size)
    return PublicHead(head, trained_for, names, ids)


def is_head(directory: str | Path) -> bool:
    """Is this a head, ours or another program's (rather than, say, a causal LM)?"""
    directory = Path(directory)
    return (directory / CONFIG).is_file() and _kind(directory, read_config(directory)) is not None


def drafts_blocks(directory: str | Path) -> bool:
    """Is this a head of our own that drafts a block in one pass (:mod:`fsd_infer.heads.block`)?"""
    if not is_head(directory):
        return False
    options = read_config(Path(directory)).get("head")
    return isinstance(options, dict) and bool(options.get("block_size"))


def is_public(directory: str | Path) -> bool:
    """Is this head stored as another program does it?"""
    return read_config(Path(directory)).get("format") != FORMAT


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a head in any format. Raises CheckpointError if it is missing or malformed."""
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: a drafter is a directory with config.json and weights.")
    if path.stat().st_size > MOST_BYTES:
        raise CheckpointError(
            f"{path} has {path.stat().st_size / 1e6:.0f} MB: this is no config of a drafter. {_AGAIN}"
        )
    config = read_json(path, _AGAIN, CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds {type(config).__name__}, not an object with options. {_AGAIN}")
    return config


def _kind(directory: Path, config: dict[str, Any]) -> str | None:
    """FORMAT, EAGLE, EAGLE_3, or None: no head."""
    if config.get("format") == FORMAT:
        return FORMAT
    stored = any((directory / name).exists() for name in (SINGLE, INDEX))
    return kind_of(directory, config, set(Weights(directory).shapes) if stored else None)


def check_fingerprint(directory: Path, trained_for: dict[str, Any], target: Target) -> None:
    """Raise if the head was trained for another family, size or vocabulary than the target's, as far as it tells."""
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
