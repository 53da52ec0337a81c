"""The built-in model with three of its layers, and its shipped head fused with those: real text in less time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fsd_infer.targets import builtin

NAME, KEPT = "smollm2-135m", (5, 14, 23)  # the layers that the shipped head reads


def cut_builtin(cache: Path) -> Path:
    """Write the built-in model with KEPT layers alone to a cache, as it is expanded there; return the cache."""
    whole, model = builtin.builtin_dir(NAME), cache / "targets" / NAME
    model.mkdir(parents=True)
    for name in (path.name for path in whole.iterdir() if path.suffix != ".safetensors"):
        shutil.copy(whole / name, model / name)
    kept = {f"model.layers.{layer}.": f"model.layers.{place}." for place, layer in enumerate(KEPT)}
    tensors = {}
    for name, value in load_file(whole / "model.safetensors").items():
        layer = ".".join(name.split(".")[:3]) + "."
        if layer in kept or not name.startswith("model.layers."):
            tensors[name.replace(layer, kept.get(layer, layer))] = value
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    _change(model / "config.json", num_hidden_layers=len(KEPT))
    manifest = json.loads((model / builtin.MANIFEST).read_text())
    files = {name: {**facts, "size": (model / name).stat().st_size} for name, facts in manifest["files"].items()}
    _change(model / builtin.MANIFEST, files=files)
    shutil.copytree(builtin.SHIPPED / NAME, cache / "shipped" / NAME, ignore=shutil.ignore_patterns("adapter"))
    _change(cache / "shipped" / NAME / "config.json", fused_layers=list(range(len(KEPT))))
    return cache


def use(cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this process find that model and that head by the built-in name. Processes that it starts find the whole."""
    patch.setattr(builtin, "cache_dir", lambda: cache)
    patch.setattr(builtin, "SHIPPED", cache / "shipped")
    patch.setattr("fsd_infer.targets.loading.gguf_of", lambda *given, **options: None)


def _change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
