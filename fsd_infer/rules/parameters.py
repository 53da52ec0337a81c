"""Parameters of rules, from Python or from text: their types and ranges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fsd_core.errors import FsdError
from fsd_core.former import former_keywords, warn_renamed
from fsd_core.registry import read_float, read_int

FORMER = {
    "floor": "min_p", "heat": "match_temperature", "novel": "exact_ngram_size", "price": "kl_coef",
    "toll": "deviation_cost", "settle": "exact_start", "lead": "exact_sentence_start",
}  # fmt: skip
_TYPES: dict[Any, tuple[str, Any]] = {
    float: ("a number", (int, float)),
    int: ("a whole number", int),
    bool: ("true or false", bool),
    str: ("text", str),
}


@dataclasses.dataclass(frozen=True)
class _Range:
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    infinite: bool = False
    alias: str = ""

    def __str__(self) -> str:
        most = f"at most {self.high:g}"
        if self.above > -math.inf:
            return f"above {self.above:g}" + (f" and {most}" if self.high < math.inf else "")
        if self.high < math.inf:
            return most if self.low == -math.inf else f"between {self.low:g} and {self.high:g}"
        return "a number" if self.low == -math.inf else f"at least {self.low:g}"


def parameter(
    default: Any = dataclasses.MISSING,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    infinite: bool = False,
    alias: str = "",
    keyword: bool = False,
) -> Any:
    """Return a dataclass field for a rule's parameter.

    Args:
        default: as for :func:`dataclasses.field`.
        low: the smallest allowed number.
        high: the largest allowed number.
        above: an exclusive lower bound.
        infinite: allow ``inf``.
        alias: another key for it in rules as text.
        keyword: keyword-only in Python.
    """
    metadata = {"range": _Range(low, high, above, infinite, alias)}
    return dataclasses.field(default=default, metadata=metadata, kw_only=keyword)


class Parameter:
    """A field of a rule's class. Types: int, float, bool, str, a Literal, an Enum, and each of them or None."""

    def __init__(self, rule: type, field: dataclasses.Field[Any], type_: Any) -> None:
        self.rule: str = rule.name  # type: ignore[attr-defined]
        self.name, self.default = field.name, field.default
        self.range: _Range = field.metadata.get("range", _Range())
        types = get_args(type_) if get_origin(type_) in (Union, UnionType) else [type_]
        self.optional = NoneType in types
        self.type = next(one for one in types if one is not NoneType)

    def parsed(self, text: str) -> Any:
        """Return the value that text stands for; :meth:`checked` checks its range later."""
        if self.optional and text.lower() == "none":
            return None
        if self.type in (float, int):
            value = read_float(text) if self.type is float else read_int(text)
            if value is None:
                raise self._error("a number that fits a float" if self.type is float else "a whole number", text)
            return value
        if self.type is bool:
            if text.lower() not in ("true", "false"):
                raise self._error("true or false", text)
            return text.lower() == "true"
        return text

    def checked(self, value: Any) -> Any:
        """Return the value as the rule stores it. Raises FsdError for a wrong type, or a number out of range."""
        if value is None and self.optional:
            return None
        is_enum = isinstance(self.type, type) and issubclass(self.type, Enum)
        if is_enum or get_origin(self.type) is Literal:
            known = [member.value for member in self.type] if is_enum else get_args(self.type)
            if value not in known:
                raise self._error(" or ".join(map(repr, known)), value)
            return self.type(value) if is_enum else value
        wanted, types = _TYPES.get(self.type, ("", object))
        if not isinstance(value, types) or (isinstance(value, bool) and self.type in (float, int)):
            raise self._error(wanted, value)
        if self.type not in (float, int):
            return value
        try:
            number = self.type(value) + self.type(0)  # -0.0 becomes 0.0
        except OverflowError:
            raise self._error("a number that fits a float", value) from None
        if not (self.range.low <= number <= self.range.high and number > self.range.above):  # refuses NaN, too
            raise self._error(str(self.range), value)
        if math.isinf(number) and not self.range.infinite:
            raise self._error("finite", value)
        return number

    def _error(self, wanted: str, value: Any) -> FsdError:
        return FsdError(f"rule {self.rule!r}: {self.name} must be {wanted}, not {repr(value)[:60]}.")


def parameters_of(rule: type) -> dict[str, Parameter]:
    """Return the parameters of a rule's class in order, keyword-only ones last."""
    types = get_type_hints(rule)
    fields = sorted(dataclasses.fields(rule), key=lambda field: bool(field.kw_only))
    return {field.name: Parameter(rule, field, types[field.name]) for field in fields}


def present_name(name: str, parameters: Container[str]) -> str:
    """Return the parameter that a name stands for: itself, or the present name of a former one, with one warning."""
    new = FORMER.get(name, name)
    if name == new or name in parameters or new not in parameters:
        return name
    warn_renamed(f"{name} of a rule", f"it is now {new}")
    return new


def reads_former_names(rule: type) -> None:
    """Let a rule's class be made with the former names of its parameters."""
    own = {field.name for field in dataclasses.fields(rule)}
    renamed = {old: new for old, new in FORMER.items() if new in own and old not in own}
    rule.__init__ = former_keywords("a rule", **renamed)(rule.__init__)  # type: ignore[misc]
