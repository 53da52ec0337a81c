"""Recipes and sample data: those of the checkout, or the ones that travel with an installed package."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).resolve().parent / "shipped"  # of an installed package; setup.py says what lies there


def find(path: str | Path) -> Path:
    """``path``, or where it does not exist the file of that name in the repository; recipes go by their names too.

    Returns:
        ``path`` itself if there is no such file anywhere.
    """
    if Path(path).exists():
        return Path(path)
    for root in (SHIPPED.parent.parent, SHIPPED):
        for name in (Path(path), Path("recipes") / f"{path}.yaml"):
            if (root / name).is_file():
                return root / name
    return Path(path)
