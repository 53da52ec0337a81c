"""Numbers and aligned tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table: the first column left, the others right."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]

    def row(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))]).rstrip()

    return "\n".join([row(lines[0]), "  ".join("-" * width for width in widths), *map(row, lines[1:])])


def number(value: Any, digits: int = 2) -> str:
    """Format a number for a table, None as "-"."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.{digits}f}"


def percent(share: float | None, digits: int) -> str:
    """Format a share as a percentage for a table, None as "-"."""
    return number(None if share is None else 100 * share, digits)
