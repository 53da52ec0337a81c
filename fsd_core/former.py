"""One warning for each former name that still works."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

_said: set[str] = set()


def rename_members(cls: type, names: Mapping[str, str]) -> None:
    """Give members that a subclass defines by their former names the new ones, with a warning."""
    for old, new in names.items():
        if old in vars(cls):
            say(f"{cls.__name__}.{old}", f"call it {new}")
            setattr(cls, new, vars(cls)[old])


def say(old: str, new: str) -> None:
    """Warn, once, that a name is a former one and what to write instead."""
    if old not in _said:
        _said.add(old)
        warnings.warn(f"{old} works until fsd-toolkit 0.2: {new}.", FutureWarning, stacklevel=4)
