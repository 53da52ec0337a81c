"""Records that name models and files by the last part of their path, and so reveal nothing of the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fsd_infer.errors import FsdError


class Workplace:
    """A directory of links to everything that is named on the command line, in which the run takes place.

    So commands and records name models and files by their last part, and mean nothing of this machine.

    Args:
        directory: made if it is not there; its old links are removed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.iterdir():
            if old.is_symlink():
                old.unlink()

    def link(self, path: str | Path) -> str:
        """The path's name here; what is no existing path (a built-in name, a hub id) stays as it is.

        Raises:
            FsdError: another path has the same last part.
        """
        if not Path(path).exists():
            return str(path)
        whole = Path(path).resolve()
        link = self.directory / Path(os.path.abspath(path)).name
        if whole == link.resolve() and not link.is_symlink():  # made here
            return link.name
        if link.is_symlink() and link.resolve() != whole:
            raise FsdError(f"{whole} and {link.resolve()} have the same name: rename one of the directories.")
        if not link.is_symlink():
            link.symlink_to(whole)
        return link.name


def shown_command(module: str, argv: Sequence[str]) -> list[str]:
    """The command line of a module as a record stores it: paths, those of ``NAME=PATH`` too, by their last part."""
    return ["python", "-m", module, *map(_shown, argv)]


def _shown(word: str) -> str:
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{Path(path).name}" if os.sep in path and Path(path).exists() else word
