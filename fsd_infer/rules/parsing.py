"""Rules as text, for command lines and records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fsd_core.errors import FsdError
from fsd_infer.rules.base import RULES, Rule
from fsd_infer.rules.parameters import parameters_of, present_name

RuleLike = str | Rule | Sequence[str | Rule]


def parse_rule(rule: str | Rule) -> Rule:
    """Return the rule that ``rule`` describes; a Rule passes through.

    Text is the rule's name, then its parameters in the order of the class, by position or as ``key=value``, separated
    by colons. Digits after a top-k divergence are the divergence's own parameter (``top_k_js:20``).

    Raises:
        UnknownNameError: unknown rule or divergence.
        FsdError: a parameter that is unknown, given twice, missing, of the wrong type, or out of range.
    """
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str):
        raise FsdError(f"a rule is a Rule or text like 'fuzzy:js:0.3', not {type(rule).__name__}.")
    name, *parts = _split(rule)
    rule_class = RULES.get(name)
    parameters = parameters_of(rule_class)
    keys = {parameter.range.alias or key: key for key, parameter in parameters.items()}
    keys |= {key: key for key in parameters}
    usage = f"{name} takes {', '.join(parameters) or 'no parameters'}"
    order = iter(parameters)
    values: dict[str, Any] = {}
    for part in parts:
        key, equals, text = part.partition("=")
        if not equals:
            key, text = next(order, ""), part
        key = present_name(key, keys)
        if key not in keys:
            renamed = "no_repeat is now exact_ngram_size; " if key == "no_repeat" else ""
            raise FsdError(f"rule {rule!r}: cannot use {part!r}; {renamed}{usage}.")
        key = keys[key]
        if key in values:
            raise FsdError(f"rule {rule!r}: {key} is given twice; {usage}.")
        values[key] = parameters[key].parsed(text)
    required = [key for key, parameter in parameters.items() if parameter.default is dataclasses.MISSING]
    missing = [key for key in required if key not in values]
    if missing:
        raise FsdError(f"rule {rule!r}: {', '.join(missing)} is missing; {usage}.")
    return rule_class(**values)


def rule_text(rule: Rule) -> str:
    """Return the text that :func:`parse_rule` reads as this rule; parameters with default values are left out."""
    parts = [rule.name]
    for name, parameter in parameters_of(type(rule)).items():
        value = getattr(rule, name)
        if value != parameter.default:
            parts.append(f"{name}={getattr(value, 'value', value)}")  # an enum's value
    return ":".join(parts)


def parse_rules(rules: RuleLike) -> list[Rule]:
    """Return one rule, or one per prompt. Raises as :func:`parse_rule`."""
    if isinstance(rules, (str, Rule)) or not isinstance(rules, Sequence):
        rules = [rules]
    parsed = [parse_rule(rule) for rule in rules]
    if not parsed:
        raise FsdError("no rules: give one, or one per prompt.")
    return parsed


def _split(text: str) -> list[str]:
    """Split at colons, but keep a top-k divergence and its parameter together."""
    parts: list[str] = []
    for part in text.split(":"):
        if parts and part.isascii() and part.isdigit() and parts[-1].rpartition("=")[2].startswith("top_k_"):
            parts[-1] += f":{part}"
        else:
            parts.append(part)
    return parts
