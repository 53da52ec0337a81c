"""Heads in the layout of vLLM's speculators library: safetensors, and a config.json that names the algorithm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fsd_core.files import replacing, write_text


def write_speculator(
    directory: str | Path,
    algorithm: str,
    config: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Tensor]],
    target: str,
    depth: int,
) -> Path:
    """Write a head for speculators and return its directory, created if missing.

    Args:
        directory: where to write.
        algorithm: speculators' name of the kind of head.
        config: fields of config.json that depend on the algorithm, and our record of the training.
        files: tensors by file name.
        target: name of the target.
        depth: drafts per round that the head proposes.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        with replacing(directory / name) as draft:
            save_file({key: value.contiguous() for key, value in tensors.items()}, draft)
    speculators = {
        "algorithm": algorithm, "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
        "verifier": {"name_or_path": target, "architectures": []},
    }  # fmt: skip
    described = {"speculators_model_type": algorithm, **config, "speculators_config": speculators}
    write_text(directory / "config.json", json.dumps(described, indent=2, default=str) + "\n")
    return directory
