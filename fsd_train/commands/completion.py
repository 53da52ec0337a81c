"""`fsd-train completion`: a script for a shell, with the keys of recipes as options of `fit` and `validate`."""

from __future__ import annotations

import argparse

from fsd_core.completion import script, words_of
from fsd_train.commands.command_lines import PARSERS
from fsd_train.commands.recipe_keys import SHORT, keys_of


def main(args: argparse.Namespace) -> int:
    """Run `fsd-train completion`."""
    words = {name: words_of(make()) for name, make in PARSERS.items()}
    sections = {"trainer": "trainer", "model": "model.EagleModule", "model.head": "model.head", "data": "data"}
    keys = [f"--{name}.{key}" for name, section in sections.items() for key in keys_of(section) or ()]
    fit = ["--config", "--ckpt_path", "--overwrite", "--strict", "--help", *(f"--{key}" for key in SHORT), *keys]
    for name in ("fit", "validate"):
        words[name] = dict.fromkeys(fit, ())
    print(script("fsd-train", args.shell, words), end="")
    return 0
