"""Parameters of rules: their types and ranges, from Python or from text, checked in one place."""

from __future__ import annotations

import dataclasses
import math
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fsd_infer.errors import FsdError
from fsd_infer.numerals import read_float, read_int


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
    """A rule's field that is a number with a range.

    Args:
        default: as of a dataclass field.
        low, high: the range, both included.
        above: a lower end that is not included.
        infinite: ``inf`` means something.
        alias: another key for it in rules as text.
        keyword: not taken by position, in Python.
    """
    metadata = {"low": low, "high": high, "above": above, "infinite": infinite, "alias": alias}
    return dataclasses.field(default=default, metadata=metadata, kw_only=keyword)


class Parameter:
    """A field of a rule's class. Types: int, float, bool, str, a Literal, an Enum, and each of them or None."""

    def __init__(self, rule: type, field: dataclasses.Field[Any], type_: Any) -> None:
        self.rule: str = rule.name  # type: ignore[attr-defined]
        self.name, self.default = field.name, field.default
        self.alias: str = field.metadata.get("alias", "")
        self.low: float = field.metadata.get("low", -math.inf)
        self.high: float = field.metadata.get("high", math.inf)
        self.above: float = field.metadata.get("above", -math.inf)
        self.infinite: bool = field.metadata.get("infinite", False)
        types = get_args(type_) if get_origin(type_) in (Union, UnionType) else [type_]
        self.optional = NoneType in types
        self.type = next(one for one in types if one is not NoneType)

    def parsed(self, text: str) -> Any:
        """The value that a rule as text gives; ranges are checked when the rule is made."""
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
        """The value as the rule holds it. Raises FsdError for a wrong type, or a number out of range."""
        if value is None and self.optional:
            return None
        if get_origin(self.type) is Literal:
            if value not in get_args(self.type):
                raise self._error(" or ".join(map(repr, get_args(self.type))), value)
        elif isinstance(self.type, type) and issubclass(self.type, Enum):
            known = [member.value for member in self.type]
            if value not in known:
                raise self._error(" or ".join(map(repr, known)), value)
            return self.type(value)
        elif self.type is float:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self._error("a number", value)
            try:
                return self._in_range(float(value) + 0.0, value)  # -0.0 becomes 0.0
            except OverflowError:
                raise self._error("a number that fits a float", value) from None
        elif self.type is int:
            if isinstance(value, bool) or not isinstance(value, int):
                raise self._error("a whole number", value)
            return self._in_range(value, value)
        elif self.type in (bool, str) and not isinstance(value, self.type):
            raise self._error("true or false" if self.type is bool else "text", value)
        return value

    def _in_range(self, number: Any, value: Any) -> Any:
        if not (self.low <= number <= self.high and number > self.above):  # so NaN is refused too
            bounded = self.low > -math.inf and self.high < math.inf
            least = f"above {self.above:g}" if self.above > -math.inf else f"at least {self.low:g}"
            most = f"at most {self.high:g}"
            if self.above > -math.inf and self.high < math.inf:
                least += f" and {most}"
            open_end = self.high == math.inf or self.above > -math.inf
            span = f"between {self.low:g} and {self.high:g}" if bounded else least if open_end else most
            raise self._error("a number" if math.isnan(number) and span == "at least -inf" else span, value)
        if math.isinf(number) and not self.infinite:
            raise self._error("finite", value)
        return number

    def _error(self, wanted: str, value: Any) -> FsdError:
        return FsdError(f"rule {self.rule!r}: {self.name} must be {wanted}, not {repr(value)[:60]}.")


def parameters_of(rule: type) -> dict[str, Parameter]:
    """The parameters of a rule's class in order, those that are not taken by position last."""
    types = get_type_hints(rule)
    fields = sorted(dataclasses.fields(rule), key=lambda field: bool(field.kw_only))
    return {field.name: Parameter(rule, field, types[field.name]) for field in fields}
