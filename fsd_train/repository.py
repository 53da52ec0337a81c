"""Recipes and sample data of the checkout or of the installed package."""

from __future__ import annotations

import os
from pathlib import Path

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
