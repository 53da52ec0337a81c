"""Put an MTP layer into the files of its target, in the family's own layout, whether these are one file or many."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsd_core.errors import ModelLoadError
from fsd_core.files import read_json, read_weight_map, replacing, write_json
from fsd_infer.drafters.mtp import MtpHead
from fsd_infer.heads.mtp import find_mtp, in_own_layout
from fsd_infer.heads.stored_parts import CONFIG
from fsd_infer.heads.weights import AGAIN, INDEX, SINGLE, Weights
from fsd_infer.targets.checks import mtp_names
from fsd_infer.targets.kinds import class_of
from fsd_infer.targets.loading import load_config
from fsd_infer.targets.target import Target

SHARD = "model-mtp.safetensors"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def stitch_mtp(source: Path, target: Path, output: Path) -> None:
    """Write a target's checkpoint with another MTP layer, instead of any that it has.

    Files without MTP tensors are copied as they are. In a checkpoint of several files the layer gets one of its own.
    In a quantised checkpoint it keeps its precision, and the config lists it among the modules that are not converted.

    Args:
        source: directory of the layer, in speculators' layout.
        target: directory of the target's safetensors.
        output: created if missing.

    Raises:
        ModelLoadError: a family without a layout for MTP layers, or a layer that does not fit.
        CheckpointError: damaged files.
    """
    model = _without_weights(target)
    layer, weights = _layer_tensors(source, model), Weights(target, expands=False)
    old_layer = set(mtp_names(weights.shapes, len(model.decoder.layers)))  # type: ignore[arg-type]
    output.mkdir(parents=True, exist_ok=True)
    for file in sorted(target.iterdir()):
        if file.is_file() and file.suffix not in _WEIGHTS and file.name not in (CONFIG, INDEX):
            _copy(file, output / file.name)
    files: dict[Path, set[str]] = {}
    for name, file in weights.files.items():
        files.setdefault(file, set()).add(name)
    file_names = {name: file.name for name, file in weights.files.items() if name not in old_layer}
    for file, names in files.items():
        if file.name == SINGLE:
            file_names |= dict.fromkeys(layer, SINGLE)
            _save({**_tensors_except(file, old_layer), **layer}, output / SINGLE)
        elif names & old_layer:
            if names - old_layer:
                _save(_tensors_except(file, old_layer), output / file.name)
        else:
            _copy(file, output / file.name)
    if SINGLE not in file_names.values():
        _save(layer, output / SHARD)
        _write_index(target / INDEX, output / INDEX, {**file_names, **dict.fromkeys(layer, SHARD)})
    config = _with_mtp_layer(read_json(target / CONFIG, AGAIN), layer, str(model.config.model_type))
    write_json(output / CONFIG, config, indent=2)


def _without_weights(directory: Path) -> Target:
    """The target, for its shapes."""
    config = load_config(directory)
    kind: Any = class_of(config)
    if kind is None:
        raise ModelLoadError(f"{directory}: an MTP layer can be put into models of transformers' own classes only.")
    with torch.device("meta"):
        model = kind._from_config(config)
    model.name_or_path = str(directory)
    return Target(model, name=str(directory))


def _layer_tensors(source: Path, target: Target) -> dict[str, Tensor]:
    """Return the layer's tensors by their names in the target's checkpoint."""
    files = find_mtp(target, source)
    assert files is not None, "a directory was given"
    with torch.device("meta"):
        head = MtpHead(target, files.layout)
    tensors = in_own_layout(target, files.read(0, head.layers[0].state_dict()))
    if tensors is None:
        raise ModelLoadError(
            f"checkpoints of {target.config.model_type} have no layout for MTP layers, so {source} stays next to its "
            "target: --drafter names its directory."
        )
    return {name: value.contiguous() for name, value in tensors.items()}


def _tensors_except(file: Path, without: set[str]) -> dict[str, Tensor]:
    return {name: value for name, value in load_file(file).items() if name not in without}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    with replacing(path) as draft:
        save_file(tensors, draft, metadata={"format": "pt"})


def _copy(source: Path, place: Path) -> None:
    with replacing(place) as draft:
        shutil.copyfile(source, draft)


def _write_index(source: Path, place: Path, files: dict[str, str]) -> None:
    read_weight_map(source, AGAIN)  # checks it
    index = read_json(source, AGAIN)
    size = sum((place.parent / name).stat().st_size for name in set(files.values()))  # headers included
    index["metadata"] = {**(index.get("metadata") or {}), "total_size": size}
    write_json(place, {**index, "weight_map": dict(sorted(files.items()))}, indent=2)


def _with_mtp_layer(config: dict[str, Any], layer: dict[str, Tensor], family: str) -> dict[str, Any]:
    """Return the config with one MTP layer, whose modules are not quantised."""
    count = "mtp_num_hidden_layers" if family.startswith("qwen3_5") else "num_nextn_predict_layers"
    nested = "num_hidden_layers" not in config and "text_config" in config
    config = {**config, "text_config": {**config["text_config"], count: 1}} if nested else {**config, count: 1}
    if quantised := config.get("quantization_config"):
        modules = {name.removesuffix(".weight") for name in layer}
        unconverted = {*(quantised.get("modules_to_not_convert") or ()), *modules}
        config["quantization_config"] = {**quantised, "modules_to_not_convert": sorted(unconverted)}
    return config
