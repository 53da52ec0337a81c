"""Types of numbers with a range, which jsonargparse checks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import extend_base_type


def _number(name: str, base: type, expected: str, fits: Callable[[Any], bool]) -> Any:
    """Return a type of numbers that fit; of any other value it says what was ``expected``."""

    def check(_: type, value: Any) -> None:
        try:
            number = base(value)
            valid = not isinstance(value, bool) and (isinstance(value, str) or number == value) and fits(number)
        except (TypeError, ValueError, OverflowError):
            valid = False
        if not valid:
            raise ValueError(f"expected {expected}, got {'null' if value is None else value}")

    return extend_base_type(name, base, check, register_key=(name, base))


if TYPE_CHECKING:
    from typing import TypeAlias

    PositiveInt: TypeAlias = int
    NonNegativeInt: TypeAlias = int
    ChainSteps: TypeAlias = int
    EvalSteps: TypeAlias = int
    Seed: TypeAlias = int
    Length: TypeAlias = int
    PositiveFloat: TypeAlias = float
    NonNegativeFloat: TypeAlias = float
    Share: TypeAlias = float
    ShareOrNone: TypeAlias = float
    HeldOut: TypeAlias = float
else:
    PositiveInt = _number("IntAbove0", int, "a whole number > 0", lambda n: n > 0)
    NonNegativeInt = _number("IntFrom0", int, "a whole number >= 0", lambda n: n >= 0)
    ChainSteps = _number("IntFrom1To7", int, "a whole number >= 1 and <= 7", lambda n: 1 <= n <= 7)
    EvalSteps = _number("IntFrom1To64", int, "a whole number >= 1 and <= 64", lambda n: 1 <= n <= 64)
    Seed = _number("Seed", int, "a whole number >= 0 and < 2147483648", lambda n: 0 <= n < 2**31)
    Length = _number("IntFrom2", int, "a whole number >= 2", lambda n: n >= 2)
    PositiveFloat = _number("FloatAbove0", float, "a number > 0", lambda x: 0 < x < math.inf)
    NonNegativeFloat = _number("FloatFrom0", float, "a number >= 0", lambda x: 0 <= x < math.inf)
    Share = _number("ShareAbove0", float, "a number <= 1 and > 0", lambda x: 0 < x <= 1)
    ShareOrNone = _number("ShareFrom0", float, "a number >= 0 and <= 1", lambda x: 0 <= x <= 1)
    HeldOut = _number("ShareBelow1", float, "a number >= 0 and < 1", lambda x: 0 <= x < 1)

_KEYED = re.compile(r"""Parser key "([\w.]+)": (?:Does not validate .*? Errors: - )?(.*)""", re.S)
_KIND = re.compile(
    r"Expected a (?:<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[(.*?)\]|dot import path)|Not a valid subclass"
)
_VALUE = re.compile(r"(?:Got|Given) value: (.*?)(?: - | Given value type: | Subclass types |$)", re.S)
_KINDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list", "str": "text",
    "dict": "options", "NoneType": "null",
}  # fmt: skip
_CLASS = "a class_path with init_args"
# of what jsonargparse lists, by its beginning, what says no more than the type of a parameter
_OF_TYPE = ("Expected a ", "Not a valid subclass", "a class path", "a dict ", "Does not validate")


def in_words(message: str) -> str:
    """Return what jsonargparse says of a value that its parameter cannot have, shorter; any other text as it is.

    For a parameter of several types it lists why the value is of none. A reason of its own, such as an option that a
    class lacks, says more than those that only name the type.
    """
    keyed = _KEYED.match(message.strip())
    if keyed is None:
        return message
    key, message = keyed.groups()
    if _KEYED.match(message):
        return f"{key}.{in_words(message)}"
    reasons = re.split(r"(?:^| )- ", message.partition(" Given value type: ")[0])
    specific = [reason for reason in reasons if reason and not reason.startswith(_OF_TYPE)]
    if specific:
        reason = re.sub(r"^Not of type \w+: ", "", specific[0]).rstrip(".")
        return f"{key}{'.' if re.match(r'[a-z_.]+: ', reason) else ': '}{reason}."
    expected = [f"one of {words}" if words else _KINDS.get(kind, _CLASS) for kind, words in _KIND.findall(message)]
    value = _VALUE.search(message)
    if not expected or value is None:
        return message
    return f"{key}: expected {' or '.join(dict.fromkeys(expected))}, got {value[1]}."
