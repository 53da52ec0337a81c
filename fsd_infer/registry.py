"""Name -> object tables. A new rule, divergence, drafter or loss is one file that registers itself."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from fsd_infer.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named objects of one kind.

    Args:
        kind: what the entries are, used in error messages ("rule", "divergence", ...).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._retired: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files an object under ``name``. Raises ValueError if the name is taken."""

        def file(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return file

    def retire(self, name: str, advice: str) -> None:
        """Make a name of earlier versions an error that says ``advice``."""
        self._retired[name] = advice

    def get(self, name: str) -> T:
        """The entry called ``name``. Raises UnknownNameError, with the known names, if there is none."""
        try:
            return self._entries[name]
        except KeyError:
            if name in self._retired:
                raise UnknownNameError(f"{self.kind} {name!r} was renamed: {self._retired[name]}") from None
            close = difflib.get_close_matches(str(name), self._entries, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}.{hint} Known: {', '.join(sorted(self._entries))}."
            ) from None

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
