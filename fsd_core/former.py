"""Former names still work until the next release, with one warning each."""

from __future__ import annotations

import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable, Mapping
from functools import wraps
from operator import attrgetter
from typing import Any, ClassVar, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_warned: set[str] = set()


class FormerName:
    """A former name of an attribute: instances read what has the present name, which may be dotted."""

    def __init__(self, owner: type, old: str, new: str, what: str = "") -> None:
        self.owner, self.old, self.new, self.what = owner, old, new, what or f"{owner.__name__}.{old}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            raise AttributeError(f"{owner.__name__} has no {self.old!r}")
        defining = [base for base in owner.__mro__ if self.old in vars(base) and base is not self.owner]
        # a class that still defines the former name is here because of super().old: go on above it
        source: Any = super(defining[-1], instance) if defining else instance
        value = attrgetter(self.new)(source)
        warn_renamed(self.what, f"it is now {self.new}", 3)
        return value


class Renamed:
    """A class with renamed members.

    A former name reads the member that has the present one. A subclass that defines a member by its former name defines
    the present one.

    Attributes:
        former_members: present names by former ones.
    """

    former_members: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__mro__[1:]:
            for old, new in vars(base).get("former_members", {}).items():
                if old in vars(cls):
                    # abstract classes are made by a function of abc
                    warn_renamed(f"{cls.__name__}.{old}", f"call it {new}", 3 + isinstance(cls, ABCMeta))
                    setattr(cls, new, vars(cls)[old])
        for old, new in vars(cls).get("former_members", {}).items():
            setattr(cls, old, FormerName(cls, old, new))


def former_keywords(of: str = "", /, **names: str) -> Callable[[F], F]:
    """Return a decorator of functions that lets them take renamed keywords by their former names.

    Args:
        of: whose keywords they are, for the warning, such as "a rule"; "": the function's.
        names: present names by former ones.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def renamed(*args: Any, **options: Any) -> Any:
            for old in names.keys() & options.keys():
                taker = function.__qualname__.removesuffix(".__init__")
                warn_renamed(f"{old} of {of}" if of else f"{taker}({old}=...)", f"it is now {names[old]}", 3)
                if names[old] in options:
                    raise TypeError(f"{old} is the former name of {names[old]}: give one of the two.")
                options[names[old]] = options.pop(old)
            return function(*args, **options)

        return cast(F, renamed)

    return decorate


def former_names(module: str, **names: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that reads its members by their former names.

    Args:
        module: its name.
        names: present names by former ones.
    """

    def read(name: str) -> Any:  # only called for names that the module does not have
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"it is now {names[name]}", 3)
        return getattr(sys.modules[module], names[name])

    return read


def warn_renamed(old: str, new: str, stacklevel: int = 4) -> None:
    """Warn, once, that a name is a former one and what to write instead."""
    if old not in _warned:
        _warned.add(old)
        warnings.warn(f"{old} works until fsd-toolkit 0.2: {new}.", FutureWarning, stacklevel=stacklevel)
