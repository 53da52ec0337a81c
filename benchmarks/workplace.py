"""Links and command lines that name models and files without this machine's paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fsd_core.errors import FsdError


class Workplace:
    """A directory of links in which a benchmark runs, so that its record names models by the last part of their path.

    Args:
        directory: made if it does not exist. Links of an earlier run are removed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.iterdir():
            if old.is_symlink():
                old.unlink()

    def link(self, path: str | Path) -> str:
        """Link to a path and return the link's name. A name that is not an existing path is returned unchanged.

        Raises:
            FsdError: another path has the same last part.
        """
        if not Path(path).exists():
            return str(path)
        resolved = Path(path).resolve()
        link = self.directory / Path(os.path.abspath(path)).name
        if resolved == link.resolve() and not link.is_symlink():  # a file of this directory
            return link.name
        if link.is_symlink() and link.resolve() != resolved:
            raise FsdError(f"{resolved} and {link.resolve()} have the same name: rename one of the directories.")
        if not link.is_symlink():
            link.symlink_to(resolved)
        return link.name


def shown_command(module: str, argv: Sequence[str]) -> list[str]:
    """Return the command line of a module for a record: paths, those in ``NAME=PATH`` too, by their last part."""
    return ["python", "-m", module, *map(_shown, argv)]


def _shown(word: str) -> str:
    name, equals, path = word.rpartition("=")
    is_path = os.sep in path and (Path(path).is_absolute() or Path(path).exists())
    return f"{name}{equals}{Path(path).name}" if is_path else word
