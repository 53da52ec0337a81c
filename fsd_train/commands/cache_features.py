"""`fsd-train cache-features`: store the target's features of answers."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from fsd_infer.heads.config import default_fused_layers
from fsd_infer.targets.target import Target
from fsd_train import MAX_LENGTH
from fsd_train.commands import command_lines
from fsd_train.data.answers import read_answers
from fsd_train.data.features import cache_features, is_layers, token_bytes
from fsd_train.repository import recipe_errors


def recipe_options(path: Path) -> dict[str, Any]:
    """What a recipe says about its cache: ``target`` and its ``target_kwargs``, ``data``, ``output``, ``layers`` and
    ``max_length``.

    ``eagle3`` is whether the layers not named are EAGLE-3's.

    Raises:
        DataError: the file is missing or not a recipe.
    """
    with recipe_errors(f"{path} is not a recipe with model.target and data.train_files"):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        model, data = (recipe[part].get("init_args", recipe[part]) for part in ("model", "data"))
        head = model.get("head") or {}
        found = {
            "target": model["target"],
            "data": data["train_files"] + (data.get("validation_files") or []),
            "output": data.get("features"),
            "layers": head.get("fused_layers"),
            "eagle3": head.get("layout") == "eagle3",
            "max_length": data.get("max_length"),
            "target_kwargs": dict(model.get("target_kwargs") or {}),
        }
        texts = [found["target"], *found["data"], found["output"] or ""]
        if not all(isinstance(text, str) for text in texts) or type(found["max_length"] or 1) is not int:
            raise TypeError("names must be texts, and max_length a whole number")
        if not is_layers(found["layers"] or []):
            raise TypeError("fused_layers must be a list of whole numbers")
        return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_lines.cache_features()
    args = parser.parse_args(argv)
    defaults = recipe_options(args.config) if args.config else {}
    args.eagle3 = args.layers is None and defaults.pop("eagle3", False)
    preset = {"layers": [], "max_length": MAX_LENGTH, "target_kwargs": {}}
    for name, value in {**preset, **{k: v for k, v in defaults.items() if v}}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    missing = [f"--{name}" for name in ("target", "data", "output") if not getattr(args, name)]
    if missing:
        hint = " (and set the recipe's data.features to it)" if args.config and "--output" in missing else ""
        parser.error(f"{' and '.join(missing)} must be given{hint}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """`fsd-train cache-features`."""
    args = _arguments(argv)
    target = Target.from_pretrained(args.target, dtype=getattr(torch, args.dtype), **args.target_kwargs)
    target.watch(args.layers or (default_fused_layers(target) if args.eagle3 else []))
    target.check_lm_head()  # training with cached features has no layers to check it with
    with tempfile.TemporaryDirectory() as scratch:
        paths = [_complete_lines(Path(path), Path(scratch)) for path in args.data]
        rows, _ = read_answers(paths, target.tokenizer, max_length=args.max_length, vocab_size=target.vocab_size)
    items = [rows[number] for number in range(len(rows))]
    sequences = [
        item["input_ids"]
        for item in items
        if int(item["loss_mask"].sum()) >= args.min_answer_share * len(item["input_ids"])
    ]
    tokens = sum(map(len, sequences))
    size = tokens * token_bytes(target)
    print(f"{len(sequences)} of {len(rows)} sequences, {tokens} tokens, {size / 1e9:.2f} GB", file=sys.stderr)
    store = cache_features(target, sequences, args.output, batch_tokens=args.batch_tokens, max_tokens=args.max_tokens)
    print(f"{args.output}: {len(store)} sequences, {store.tokens} tokens", file=sys.stderr)
    return 0


def _complete_lines(path: Path, scratch: Path) -> Path:
    """The file itself, or a copy without its last line if that is still being written."""
    if not path.is_file() or path.suffix in (".gz", ".json", ".parquet"):
        return path
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END) or (file.seek(-1, os.SEEK_END), file.read())[1] == b"\n":
            return path
        file.seek(0)
        content = file.read()
    last = content.rfind(b"\n") + 1
    with suppress(ValueError, RecursionError):
        json.loads(content[last:])
        return path
    copy = Path(tempfile.mkdtemp(dir=scratch)) / path.name  # files of several directories may have one name
    copy.write_bytes(content[:last])
    return copy


if __name__ == "__main__":
    sys.exit(main())
