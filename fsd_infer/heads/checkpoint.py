"""Drafter checkpoints: a directory with ``config.json`` and ``model.safetensors``.

Besides our own, EAGLE-1/2 heads are read as their authors store them (SafeAILab/EAGLE): the config of a model with one
Llama layer, the tensors of our default variant, and the target's input embeddings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from fsd_infer.errors import CheckpointError, VocabularyMismatchError
from fsd_infer.files import read_json
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.layers import layer_of

if TYPE_CHECKING:
    from fsd_infer.target import Target

FORMAT = "fsd-eagle-head"
VERSION = 1
PUBLIC, EAGLE_3 = "EAGLE-1/2", "EAGLE-3"  # kinds of head that other programs store
_EMBEDDINGS = "embed_tokens.weight"


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
    """Read a head, ours or a public EAGLE-1/2 one, and, given a target, check that it was trained for it.

    A public head does not name its target: its sizes are checked. The embeddings in it are not read.

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
    shapes = _shapes(weights)
    with safe_open(weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in shapes if name != _EMBEDDINGS}
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
    """The config.json, in our form if the head is a public one.

    Raises CheckpointError if it is missing, malformed or of another format.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: a drafter is a directory with config.json and weights.")
    config = _parse(path)
    kind = _kind(directory, config)
    if kind is None:
        raise CheckpointError(f"{path} is not an {FORMAT} checkpoint (format: {config.get('format')!r}).")
    if kind != FORMAT:
        return _read_public(directory, config, kind)
    if config.get("version", 0) > VERSION:
        raise CheckpointError(f"{path} is of version {config['version']}, newer than this program reads: update it.")
    return config


def is_head(directory: str | Path) -> bool:
    """Is this a head, ours or another program's (rather than, say, a causal LM)?"""
    path = Path(directory) / "config.json"
    return path.is_file() and _kind(path.parent, _parse(path)) is not None


def is_public(directory: str | Path) -> bool:
    """Is this head stored as another program does it?"""
    return _parse(Path(directory) / "config.json").get("format") != FORMAT


def _parse(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(path, "Copy or export the drafter again.", CheckpointError)
    return config


def _kind(directory: Path, config: dict[str, Any]) -> str | None:
    """FORMAT, PUBLIC, EAGLE_3, or None: no head. Configs seldom tell, so the names of the tensors do."""
    if config.get("format") == FORMAT:
        return FORMAT
    weights, pickled = directory / "model.safetensors", directory / "pytorch_model.bin"
    names = set(_shapes(weights)) if weights.is_file() else _telling_names(pickled)
    told = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    if "eagle3" in told or "d2t" in names or any(name.endswith("hidden_norm.weight") for name in names):
        return EAGLE_3
    return PUBLIC if "eagle" in told or "fc.weight" in names else None


def _telling_names(pickled: Path) -> set[str]:
    """Which of a head's names a file of torch.save holds. It is not unpickled: names stand as they are at its start."""
    if not pickled.is_file():
        return set()
    with pickled.open("rb") as file:
        start = file.read(1 << 20)
    strings = {name: b"X" + len(name).to_bytes(4, "little") + name.encode() for name in ("fc.weight", "d2t")}
    return {name for name, string in strings.items() if string in start}


def _shapes(weights: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a safetensors file, by name. Raises CheckpointError if it is damaged."""
    try:
        with safe_open(weights, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}
    except SafetensorError as error:
        raise CheckpointError(f"{weights} is truncated or damaged ({error}): copy or export it again.") from error


def _read_public(directory: Path, config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Our form of a public EAGLE-1/2 head's config. Raises CheckpointError for heads that mean nothing here."""
    if kind == EAGLE_3:
        raise CheckpointError(
            f"{directory} is an EAGLE-3 head of another program. There a projection of inner layers stands in place of "
            "the target's feature, here it is added to the feature, so its weights mean nothing here: train a head "
            "with fsd-train and head.fused_layers."
        )
    if config.get("speculators_model_type"):
        raise CheckpointError(
            f"{directory} is an EAGLE head of another program, speculators, which gives tensors and options names of "
            "its own: use the head it was converted from, as the authors of EAGLE store it."
        )
    weights, pickled = directory / "model.safetensors", directory / "pytorch_model.bin"
    if not weights.is_file():
        files = f"torch.load({str(pickled)!r}, map_location='cpu', weights_only=True), {str(weights)!r}"
        raise CheckpointError(
            f"{directory} is an EAGLE head of another program, without model.safetensors. Nothing is unpickled here, "
            "since that can run code: convert a pytorch_model.bin once, in Python, by\n"
            f"import torch; from safetensors.torch import save_file; save_file({files})"
        )
    shapes = _shapes(weights)
    if len(shapes.get(_EMBEDDINGS, ())) != 2:
        raise CheckpointError(
            f"{weights} has no {_EMBEDDINGS}, as public EAGLE heads have: which target it is for cannot be checked."
        )
    # EAGLE's layer is Llama's, with Qwen2's biases for Qwen2. What a config leaves out is at Llama's defaults there too
    # (a base of 10000 for positions, say, whatever the target's is).
    layer = "qwen2" if "layers.0.self_attn.q_proj.bias" in shapes else "llama"
    known = {name: value for name, value in config.items() if name != "model_type"}
    try:
        head = EagleConfig(
            hidden_size=config["hidden_size"],
            vocab_size=shapes[_EMBEDDINGS][0],
            layer=layer_of(AutoConfig.for_model(layer, **known)),
            embed_size=shapes[_EMBEDDINGS][1],
            num_layers=config.get("num_hidden_layers", 1),
            fc_bias="fc.bias" in shapes,
        )
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise CheckpointError(f"{directory / 'config.json'} does not describe a Llama layer ({error!r}).") from error
    sizes = {"hidden_size": head.hidden_size, "embed_size": head.embed_size, "vocab_size": head.vocab_size}
    return {"head": head.to_dict(), "target": sizes}


def check_fingerprint(directory: Path, trained_for: dict[str, Any], target: Target) -> None:
    """Raise if the head was trained for another family, size or vocabulary than the target's, as far as it tells."""
    width = int(target.model.get_input_embeddings().weight.shape[1])
    actual = {**target.fingerprint(), "embed_size": width}
    for key in ("model_type", "hidden_size", "embed_size"):
        if trained_for.get(key, actual[key]) != actual[key]:
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
