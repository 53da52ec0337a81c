"""Recipes and sample data of the checkout or of the installed package."""

from __future__ import annotations

import os
from pathlib import Path

from fsd_core.errors import DataError
from fsd_core.registry import did_you_mean

SHIPPED = Path(__file__).resolve().parent / "shipped"  # of an installed package; setup.py lists its files


def find(path: str | Path) -> Path:
    """Return an existing path unchanged, or else the repository's file or recipe of that name.

    Returns:
        ``path`` itself if no such file exists anywhere.
    """
    if os.path.exists(path):  # unlike Path.exists, False for names that are too long
        return Path(path)
    for root in (SHIPPED.parent.parent, SHIPPED):
        for name in (Path(path), Path("recipes") / f"{path}.yaml"):
            if os.path.isfile(root / name):
                return root / name
    return Path(path)


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given its path or the name of one that ships.

    Raises:
        DataError: there is none; the error names what is close.
    """
    path = find(name)
    if os.path.isfile(path):
        return path
    shipped = sorted(
        file.stem for root in (SHIPPED.parent.parent, SHIPPED) for file in (root / "recipes").glob("*.yaml")
    )
    try:
        nearby = [str(Path(name).with_name(file)) for file in os.listdir(Path(name).parent) if file.endswith(".yaml")]
    except (OSError, ValueError):
        nearby = []
    hint = did_you_mean(name, [*shipped, *nearby])
    raise DataError(
        f"the recipe {name:.200} does not exist.{hint} Give a file, which `fsd-train new-recipe` writes, or one of "
        f"{', '.join(shipped)}."
    )
