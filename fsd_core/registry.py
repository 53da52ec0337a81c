"""Names and numbers in options, rules and files: registries of named objects, and strict parsers of numbers.

A new rule, divergence, drafter or loss registers itself in its own file. The parsers are stricter than ``int()`` and
``float()``, since options and rules end up in records. Python reads ``0_1`` as 1, ``1e400`` as infinity and ``1e-400``
as 0, accepts digits of any script, and skips blanks; these functions refuse such text.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from pathlib import Path
from typing import Any, Generic, TypeVar

from fsd_core.errors import FsdError, UnknownNameError

T = TypeVar("T")

MAX_SEED = 2**62  # torch, numpy and servers accept it, plus a few thousand

_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
_REAL = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?")
_INFINITE = {"inf": math.inf, "+inf": math.inf, "-inf": -math.inf}


class Registry(Generic[T]):
    """A table of named objects of one kind.

    Args:
        kind: the entries' kind in error messages ("rule", "divergence", ...).
        takes_yours: whether users add entries of their own, as docs/internals.md shows.
    """

    def __init__(self, kind: str, takes_yours: bool = False) -> None:
        self.kind, self.takes_yours = kind, takes_yours
        self._entries: dict[str, T] = {}
        self._retired: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under ``name``. Raises ValueError if the name is taken."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def retire(self, name: str, advice: str) -> None:
        """Make a former name an error with ``advice``."""
        self._retired[name] = advice

    def get(self, name: str) -> T:
        """Return the entry called ``name``. Raises UnknownNameError, which lists the known names, if there is none."""
        if name in self._entries:
            return self._entries[name]
        if name in self._retired:
            raise UnknownNameError(f"{self.kind} {name!r} was renamed: {self._retired[name]}")
        raise UnknownNameError(self.unknown(name))

    def unknown(self, name: str) -> str:
        """Return the error about a name that no entry has."""
        yours = f" For a {self.kind} of your own, import its module: --import MODULE." if self.takes_yours else ""
        return unknown_name(self.kind, name, sorted(self._entries)) + yours

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the error about a name that is none of the known ones of its kind, which it lists."""
    known = list(known)
    return f"unknown {kind} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}."


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a question that ends an error about an unknown name; "" if no known name is close."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def is_whole(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether a value is a whole number within these bounds; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether a value is a finite number within these bounds; True and False are none."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and least <= value <= most and abs(value) < math.inf


def check_listed(name: str, value: Any, of: str = "", error: type[FsdError] = FsdError) -> None:
    """Raise ``error`` for a text or a path in place of a list of them, whose letters would count as entries.

    ``of``: what the list holds, after "is a list", such as " of files".
    """
    if isinstance(value, (str, Path)):
        raise error(f"{name} is a list{of}: give [{str(value)!r}] in place of {str(value)!r}.")


def read_int(text: str) -> int | None:
    """Return the whole number in ``text``, in ASCII digits; None if it is none, or has more than 30 digits."""
    return int(text) if _WHOLE.fullmatch(text) else None


def read_float(text: str) -> float | None:
    """Return the number in ``text``, or ``inf``; None if it is none, or too large or too small for a float."""
    if text.lower() in _INFINITE:
        return _INFINITE[text.lower()]
    value = float(text) if _REAL.fullmatch(text) else math.inf
    if value == 0 and re.search("[1-9]", re.split("[eE]", text)[0]):
        return None
    return value if math.isfinite(value) else None
