"""One warning for each former name that still works."""

from __future__ import annotations

import warnings

_said: set[str] = set()


def say(old: str, new: str) -> None:
    """Warn, once, that a name is a former one and what to write instead."""
    if old not in _said:
        _said.add(old)
        warnings.warn(f"{old} works until fsd-toolkit 0.2: {new}.", FutureWarning, stacklevel=4)
