"""Give a model's MLPs rows of zeros until it weighs as much as a larger one: the same tokens at the larger one's cost.

    python -m benchmarks.padded --target TinyLlama/TinyLlama-1.1B-Chat-v1.0 --output runs/padded --weights 8.03e9

So acceptance, rules and tokens per second of a trained head can be measured together where no larger model is at hand.
A gate and an up projection of zero give silu(0) · 0 = 0, so the added columns of the down projection never count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.recorded import parser_of
from fsd_bench.planned import count_weights
from fsd_core.errors import FsdError
from fsd_infer.targets.loading import load_target

MULTIPLE = 256  # of the MLP's width, so that products have whole tiles
SHARD = "2GB"


def pad(model: Any, weights: float) -> int:
    """Widen the MLPs of a Llama-like model in place until it has about ``weights`` weights. Return their new width.

    Raises:
        FsdError: the model has no such MLPs, or as many weights already.
    """
    layers = getattr(model.get_decoder(), "layers", [])
    names = ("gate_proj", "up_proj", "down_proj")
    if not len(layers) or any(not hasattr(getattr(layer, "mlp", None), name) for layer in layers for name in names):
        raise FsdError(f"{model.config.model_type} has no MLPs of gate, up and down projections.")
    hidden, inner = model.config.hidden_size, model.config.intermediate_size
    more = (weights - count_weights(model)) / (3 * hidden * len(layers))
    width = round((inner + more) / MULTIPLE) * MULTIPLE
    if width <= inner:
        raise FsdError(f"the model has {count_weights(model):,} weights already: ask for more.")
    for layer in layers:
        for name in names:
            linear, rows = getattr(layer.mlp, name), (0, 0, 0, width - inner)
            wide = F.pad(linear.weight.data, (0, width - inner) if name == "down_proj" else rows)
            linear.weight = nn.Parameter(wide, requires_grad=False)
            linear.out_features, linear.in_features = wide.shape
            if linear.bias is not None and name != "down_proj":
                linear.bias = nn.Parameter(F.pad(linear.bias.data, (0, width - inner)), requires_grad=False)
    model.config.intermediate_size = width
    return width


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(
        "benchmarks.padded", __doc__, target=..., output=(..., "directory of the padded model"),
        weights=(8.03e9, "about how many it shall have"),
    )  # fmt: skip
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        model, tokenizer = load_target(args.target, dtype=torch.bfloat16, device="cpu")
        width = pad(model, args.weights)
    except FsdError as error:
        print(f"padded: {error}", file=sys.stderr)
        return 2
    model.save_pretrained(args.output, max_shard_size=SHARD)
    if tokenizer is not None:
        tokenizer.save_pretrained(Path(args.output))
    print(f"{args.output}: {count_weights(model):,} weights, MLPs {width} wide")
    return 0


if __name__ == "__main__":
    sys.exit(main())
