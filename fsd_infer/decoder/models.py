"""The models that a command line names."""

from __future__ import annotations

import argparse
from typing import Any

from fsd_core.options import picked
from fsd_infer.decoder.config import RuntimeConfig
from fsd_infer.targets.builtin import shipped_drafter
from fsd_infer.trees.shape import parse_tree


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`fsd_core.options.add_models` as keywords of a benchmark."""
    drafter = args.drafter
    if args.memory is not None:
        main = drafter or ("recycle" if shipped_drafter(args.target) is None else "shipped")
        drafter = f"{main.removesuffix('+memory')}+memory:{args.memory}"
    runtime = RuntimeConfig(**picked(args, "weights draft_weights recording"))
    options = picked(args, "target dtype device target_kwargs")
    return {**options, "drafter": drafter, "tree": parse_tree(args.tree), "runtime": runtime}
