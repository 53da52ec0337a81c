"""What is wrong with a body that is not a valid request, in the words of OpenAI's API."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from fsd_core.errors import FsdError

NESTED = "the body is nested too deeply."

UNSUPPORTED = "extra_forbidden"  # pydantic's name for a field that is not declared
TYPES = {  # pydantic's names for a value of another type than the field's
    "string_type": "a string", "int_type": "an integer", "int_from_float": "an integer", "float_type": "a number",
    "bool_type": "a boolean", "list_type": "an array", "dict_type": "an object", "model_type": "an object",
    "model_attributes_type": "an object", "int_parsing": "an integer",
}  # fmt: skip
WORDS = {  # of pydantic, and ours
    "Input should be": "expected", "List should": "the array should", "String should": "the string should",
    " after validation": "", "False": "false", "True": "true",
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
    if first["loc"][-1] == "[key]":  # names in JSON are texts
        field = _path(error.body, first["loc"][1:-2], is_missing=False)
        return f"Invalid value for '{field}': its names are token ids, but one is {first['loc'][-2]!r:.80}.", field
    if first["type"] in TYPES:
        expected = TYPES[first["type"]] if where != "stop" else "a string or an array of strings"
        got = KINDS.get(type(first["input"]), "null")
        return f"Invalid type for '{where}': expected {expected}, but got {got} instead.", where
    message = first["msg"]
    for pydantic, ours in WORDS.items():
        message = message.replace(pydantic, ours)
    return f"Invalid value for '{where}': {message}, but got {json.dumps(first['input'], default=repr):.80}.", where


def explain_refusal(request: Request, error: HTTPException) -> str:
    """Return the message of a refusal: FastAPI's own messages name neither the path nor the fault."""
    path, cause = f"{request.scope['path']:.80}", error.__cause__
    if error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase:
        return f"nothing is at {path}: /openapi.json lists the paths."
    if error.status_code == 405:
        return f"{request.method} is not a method of {path}: use {(error.headers or {}).get('Allow')}."
    if isinstance(cause, RecursionError):
        return NESTED
    if isinstance(cause, UnicodeDecodeError):
        return f"the body is not JSON: it is not {cause.encoding} ({cause.reason}, at byte {cause.start})."
    if isinstance(cause, ValueError) and not isinstance(cause, FsdError):
        return "the body holds a number of too many digits."
    return str(error.detail)


def _path(body: Any, location: tuple[int | str, ...], is_missing: bool) -> str:
    """Return the path of a field in the body, which may be missing.

    What is neither a name nor an index there is pydantic's, such as a union's member.
    """
    path, value = "", body
    for key in location[: len(location) - is_missing]:
        if isinstance(value, list) and isinstance(key, int) and key < len(value):
            path, value = f"{path}[{key}]", value[key]
        elif isinstance(value, dict) and key in value and key != "[key]":
            path, value = f"{path}.{key}", value[key]
    path += f".{location[-1]}" if is_missing and location else ""
    return path.removeprefix(".")
