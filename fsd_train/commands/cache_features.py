"""`fsd-train cache-features`: store the target's features of answers."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from fsd_core.errors import DataError
from fsd_core.files import writable
from fsd_core.text.row_check import LISTING, RowCheck
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import NoDrafter
from fsd_infer.targets.target import Target
from fsd_train import MAX_LENGTH
from fsd_train.commands.fit import read_recipe, target_kwargs_of
from fsd_train.data.answers import conclude, read_answers
from fsd_train.data.features import cache_features, token_bytes
from fsd_train.data.images import ImageReader
from fsd_train.models.head_options import HeadOptions


def complete(args: argparse.Namespace) -> None:
    """Complete options from the recipe; ``head``: options of its head. Raises DataError for one that is missing."""
    args.head = HeadOptions()
    if args.config is not None:
        recipe = read_recipe(args.config)
        data = recipe.data
        args.head = recipe.kind.head_options_class(**recipe.model.get("head") or {})
        args.target = args.target or recipe.model["target"]
        args.data = args.data or [*data["train_files"], *(data["validation_files"] or [])]
        args.target_kwargs = target_kwargs_of(recipe, args.target_kwargs)
        args.output, args.max_length = args.output or data["features"], args.max_length or data["max_length"]
    args.max_length, args.target_kwargs = args.max_length or MAX_LENGTH, args.target_kwargs or {}
    missing = [f"--{name}" for name in ("target", "data", "output") if not getattr(args, name)]
    if missing:
        hint = " (and set the recipe's data.features to it)" if args.config and "--output" in missing else ""
        raise DataError(f"{' and '.join(missing)} must be given{hint}.")


def main(args: argparse.Namespace) -> int:
    """Run `fsd-train cache-features`."""
    complete(args)
    writable(Path(args.output) / LISTING, "the list of skipped rows")
    target = Target.from_pretrained(args.target, dtype=getattr(torch, args.dtype), **args.target_kwargs)
    target.capture_layers(args.layers or args.head.capture_layers(target))
    target.check_lm_head()  # training on cached features has no layers for this check
    # with a backend's layers: torch's own bf16 products are slow on a CPU without AVX-512
    FuzzyDecoder(target, NoDrafter(target.vocab_size)).prepare()
    check = RowCheck(args.strict)
    rows, _ = read_answers(
        args.data, target.tokenizer, max_length=args.max_length, vocab_size=target.vocab_size, check=check,
        reader=ImageReader.of(target),
    )  # fmt: skip
    conclude(check, target.tokenizer, Path(args.output) / LISTING)
    rows.check_lengths(target.fixed_positions)
    kept = [number for number in range(len(rows)) if rows.answer_share(number) >= args.min_answer_share]
    sequences = [rows.texts[number] for number in kept]
    image_inputs = {
        index: (images.digest, partial(rows.image_inputs, number))
        for index, number in enumerate(kept)
        if (images := rows.images[number]) is not None
    }
    tokens = sum(map(len, sequences))
    size = tokens * token_bytes(target)
    print(f"{len(sequences)} of {len(rows)} sequences, {tokens} tokens, {size / 1e9:.2f} GB", file=sys.stderr)
    store = cache_features(
        target, sequences, args.output, images=image_inputs, batch_tokens=args.batch_tokens, max_tokens=args.max_tokens
    )
    print(f"{args.output}: {len(store)} sequences, {store.tokens} tokens", file=sys.stderr)
    return 0
