"""Acceptance rules: which drafted tokens are emitted, and what follows them.

A rule is written as an object, ``Fuzzy("js", threshold=0.3)``, or as text for command lines and records:
the name, then the parameters in the order of the class, by position or as ``key=value``::

    exact    fuzzy:js:0.3    fuzzy:top_k_js:20:0.3    fuzzy:js:0.3:budget=2:gate=processed
    fuzzy-strict:tv:0.2      random:0.25              draft-only
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fsd_infer.errors import FsdError
from fsd_infer.rules.base import RULES, Rule, Source, Verdict, Verification
from fsd_infer.rules.draft_only import DraftOnly
from fsd_infer.rules.exact import Exact
from fsd_infer.rules.fuzzy import Fuzzy, FuzzyStrict
from fsd_infer.rules.random_gate import RandomGate

__all__ = [
    "RULES",
    "DraftOnly",
    "Exact",
    "Fuzzy",
    "FuzzyStrict",
    "RandomGate",
    "Rule",
    "Source",
    "Verdict",
    "Verification",
    "parse_rule",
]

_ALIASES = {"gate": "gate_on"}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _split(text: str) -> list[str]:
    """Parts at colons, with a top-k divergence's own parameter (``top_k_js:20``) left attached to it."""
    parts = text.split(":")
    for i, part in enumerate(parts[:-2]):
        if part.startswith("top_k_") and _is_number(parts[i + 1]) and _is_number(parts[i + 2]):
            return [*parts[:i], f"{part}:{parts[i + 1]}", *parts[i + 2 :]]
    return parts


def parse_rule(rule: str | Rule) -> Rule:
    """The rule that ``rule`` describes; a Rule passes through. A rule's class must be a dataclass to be parsed.

    Raises:
        UnknownNameError: no rule, or no divergence, of that name.
        FsdError: a parameter that is unknown, given twice, missing, no number where one is due, or out of range.
    """
    if isinstance(rule, Rule):
        return rule
    name, *parts = _split(rule)
    made: Any = RULES.get(name)
    fields = {field.name: str(field.type) for field in dataclasses.fields(made)}
    usage = f"{name} takes {', '.join(fields) or 'no parameters'}"
    order = iter(fields)
    values: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            key, value = next(order, ""), part
        key = _ALIASES.get(key, key)
        if key not in fields:
            raise FsdError(f"rule {rule!r}: cannot use {part!r}; {usage}.")
        if key in values:
            raise FsdError(f"rule {rule!r}: {key} is given twice; {usage}.")
        values[key] = value
    converted: dict[str, object] = {}
    for key, value in values.items():
        if "float" not in fields[key]:
            converted[key] = value
        elif "None" in fields[key] and value.lower() == "none":
            converted[key] = None
        elif _is_number(value):
            converted[key] = float(value)
        else:
            raise FsdError(f"rule {rule!r}: {key} must be a number, not {value!r}.")
    required = [f.name for f in dataclasses.fields(made) if f.default is dataclasses.MISSING]
    missing = [key for key in required if key not in converted]
    if missing:
        raise FsdError(f"rule {rule!r}: {', '.join(missing)} is missing; {usage}.")
    result: Rule = made(**converted)
    return result
