"""What is wrong with a body that is no valid request, in the words of OpenAI's API."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError

UNSUPPORTED = "extra_forbidden"  # pydantic's name for a field that is not declared
TYPES = {  # pydantic's names for a value of another type than the field's
    "string_type": "a string", "int_type": "an integer", "int_from_float": "an integer", "float_type": "a number",
    "bool_type": "a boolean", "list_type": "an array", "dict_type": "an object", "model_type": "an object",
    "model_attributes_type": "an object", "int_parsing": "an integer",
}  # fmt: skip
KINDS = {bool: "a boolean", int: "an integer", float: "a decimal", str: "a string", list: "an array", dict: "an object"}


def explain(error: RequestValidationError) -> tuple[str, str | None]:
    """Return a message and the field that it is about, as ``messages[0].role``; None: the body as a whole."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']} (at character {first['loc'][-1]}).", None
    where = _path(error.body, first["loc"][1:], first["type"] == "missing")
    if first["type"] == "value_error":
        return str(first["ctx"]["error"]), where or None
    if not where:
        return "the body must be a JSON object, with the header Content-Type: application/json.", None
    if first["type"] == UNSUPPORTED:
        return f"{where}: this server does not support it. Leave it out; docs/serving.md lists what it supports.", where
    if first["type"] == "missing":
        return f"Missing required parameter: '{where}'.", where
    if first["type"] in TYPES:
        got = KINDS.get(type(first["input"]), "null")
        return f"Invalid type for '{where}': expected {TYPES[first['type']]}, but got {got} instead.", where
    said = first["msg"].replace("Input should be", "expected").replace("List should", "the array should")
    return f"Invalid value for '{where}': {said}, but got {first['input']!r:.80}.", where


def _path(body: Any, places: tuple[int | str, ...], is_missing: bool) -> str:
    """Write a place in the body, which may be that of a missing field.

    What is neither a name nor an index there is pydantic's, such as a union's member.
    """
    path, value = "", body
    for place in places[: len(places) - is_missing]:
        if isinstance(value, list) and isinstance(place, int) and place < len(value):
            path, value = f"{path}[{place}]", value[place]
        elif isinstance(value, dict) and place in value and place != "[key]":
            path, value = f"{path}.{place}", value[place]
    path += f".{places[-1]}" if is_missing and places else ""
    return path.removeprefix(".")
