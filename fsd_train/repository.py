"""Recipes and sample data: those of the checkout, or the ones that travel with an installed package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from fsd_infer.cli.run import one_line
from fsd_infer.errors import DataError

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


@contextmanager
def recipe_errors(problem: str) -> Iterator[None]:
    """Whatever reading a recipe and its sections raises within the block, as DataError: ``problem`` and the cause."""
    try:
        yield
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{problem} ({one_line(str(error))}).") from error
