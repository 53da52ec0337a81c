"""Types of command-line options, for argparse: numbers as they are written, within what makes sense."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

from fsd_infer.errors import DataError
from fsd_infer.files import parse_json
from fsd_infer.registry import read_float, read_int

MOST_COUNT = 2**31 - 1  # of tokens, prompts, repeats ...
MOST_GIB = 2**20
SCORES = ("auto", "number", "choice", "ifeval", "chrf", "rouge", "none")  # of bench.score, too heavy for --help


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A whole number from ``low`` to ``high``."""

    def number(text: str) -> int:
        value = read_int(text)
        if value is None:
            raise ArgumentTypeError(f"{text[:60]!r} is not a whole number")
        if value < low:
            raise ArgumentTypeError(f"must be at least {low}, got {value}")
        if value > high:
            raise ArgumentTypeError(f"must be at most {high}, got {value}")
        return value

    return number


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = parse_json(text.encode("utf-8", "surrogatepass"), f"{text!r:.60}", "Give a JSON object.")
    except DataError as error:
        raise ArgumentTypeError(str(error)) from error
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text!r:.60}: needs a JSON object")
    return value


def named_directory(text: str) -> tuple[str, str]:
    """NAME=DIR."""
    name, equals, directory = text.partition("=")
    if not (name and equals and directory):
        raise ArgumentTypeError(f"{text!r:.60}: needs NAME=DIR")
    return name, directory


TARGET_KWARGS: dict[str, Any] = {  # of an option of this name
    "type": json_object,
    "metavar": "JSON",
    "help": """what transformers is to load the target with, such as '{"revision": "v2"}' or a quantization_config""",
}
positive = whole_number(1, MOST_COUNT)


def thread_count(text: str) -> int:
    """A number of threads; more than there are cores would only wait for each other."""
    return whole_number(1, os.cpu_count() or 1)(text)


def real_number(text: str) -> float:
    """A number, perhaps ``inf``."""
    value = read_float(text)
    if value is None:
        raise ArgumentTypeError(f"{text[:60]!r} is not a number that fits a float")
    return value


def gibibytes(text: str) -> int:
    """A positive number of GiB as bytes."""
    value = real_number(text)
    if not 0 < value <= MOST_GIB:
        raise ArgumentTypeError(f"must be a number above 0 and at most {MOST_GIB}, got {text}")
    return int(value * 2**30)
