"""Numbers as people write them in options, rules and files: stricter than ``int()`` and ``float()``.

Python reads ``0_1`` as 1, ``1e400`` as infinity, ``1e-400`` as 0, digits of any script, and skips blanks. In an option
or a rule, which ends up in records, each of these is a slip of the pen, and is refused.
"""

from __future__ import annotations

import math
import re

MOST_SEED = 2**62  # torch, numpy and servers take it, and so they do a few thousand more

_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
_REAL = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?")
_INFINITE = {"inf": math.inf, "+inf": math.inf, "-inf": -math.inf}


def read_int(text: str) -> int | None:
    """The whole number that ``text`` is, in ASCII digits; None if it is none (or has more than 30 digits)."""
    return int(text) if _WHOLE.fullmatch(text) else None


def read_float(text: str) -> float | None:
    """The number that ``text`` is; None if it is none, or so large or small that a float would be infinite or 0.

    Infinity is written ``inf``.
    """
    if text.lower() in _INFINITE:
        return _INFINITE[text.lower()]
    value = float(text) if _REAL.fullmatch(text) else math.inf
    if value == 0 and re.search("[1-9]", re.split("[eE]", text)[0]):
        return None
    return value if math.isfinite(value) else None
