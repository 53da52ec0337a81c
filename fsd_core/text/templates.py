"""What a chat template reads of a turn: its content as text or as a list of parts, and the name of its thought."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsd_core.errors import DataError, foreign_errors
from fsd_core.text.conversations import THOUGHT, THOUGHTS, TOOLS, WEIGHT, Message

WORD = "Rhubarb"  # no template contains it
_KEPT = "_fsd_template_forms"  # attribute of tokenizers
_MAX_KEPT = 64  # rows may bring templates of their own
_CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
_CALLED = {"type": "function", "function": {"name": WORD, "arguments": {}}, "id": "call00000"}
_TOOL = {"type": "function", "function": {"name": WORD, "description": "", "parameters": {}}}
# a conversation per role, whose last turn of that role says WORD
_PROBES: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": WORD}],
    "assistant": [{"role": "user", "content": "?"}, {"role": "assistant", "content": WORD}],
    "system": [{"role": "system", "content": WORD}, {"role": "user", "content": "?"}],
    "tool": [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{**_CALL, "id": "call00000"}]},
        {"role": "tool", "content": WORD, "name": "look", "tool_call_id": "call00000"},
    ],
}


@dataclass(frozen=True)
class TemplateForm:
    """How a template reads turns.

    Attributes:
        parted: the roles whose content it reads only as a list of parts.
        dropped: the roles whose content it writes in neither form.
        thought: its name for an assistant's thought; None: it writes none.
        drops_calls: whether it writes no tool calls of an assistant.
        drops_tools: whether it writes no tools.
    """

    parted: frozenset[str]
    dropped: frozenset[str]
    thought: str | None
    drops_calls: bool
    drops_tools: bool


def template_of(tokenizer: Any, options: Mapping[str, Any] | None = None) -> str:
    """Return the chat template that transformers uses with these options. Raises DataError if none can be chosen."""
    arguments = options or {}
    # several templates without a default, or options of another type
    with foreign_errors(DataError, "this tokenizer has no chat template for such rows ({why}). Name one `default`."):
        return str(tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools")))


def form_of(tokenizer: Any, options: Mapping[str, Any] | None = None) -> TemplateForm:
    """Return how the template reads turns, by what it writes of small ones. Raises as :func:`template_of`."""
    template = template_of(tokenizer, options)
    forms: dict[str, TemplateForm] = vars(tokenizer).setdefault(_KEPT, {})
    form = forms.get(template)  # other threads may clear what is kept
    if form is None:
        if len(forms) >= _MAX_KEPT:
            forms.clear()
        form = forms[template] = _probed(tokenizer, template)
    return form


def fields_of(tokenizer: Any) -> tuple[str, ...]:
    """Return what the template reads besides contents and calls: fields of an assistant turn, and a row's `tools`."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    thoughts = () if form_of(tokenizer).thought is None else THOUGHTS
    return thoughts if form_of(tokenizer, {TOOLS: [_TOOL]}).drops_tools else (*thoughts, TOOLS)


def _probed(tokenizer: Any, template: str) -> TemplateForm:
    parted, dropped = set(), set()
    for role, probe in _PROBES.items():
        turns = [_in_parts(turn) if turn["role"] in parted else turn for turn in probe]
        last = len(turns) - 1 if role != "system" else 0
        as_parts = [_in_parts(turn) if index == last else turn for index, turn in enumerate(turns)]
        writes = [_writes(tokenizer, template, conversation) for conversation in (turns, as_parts)]
        if writes[1] and not writes[0]:
            parted.add(role)
        elif writes == [False, False]:
            dropped.add(role)
    thought = next((name for name in THOUGHTS if re.search(rf"""[.'"]{name}\b""", template)), None)
    calls: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [_CALLED]},
    ]
    calls = [_in_parts(turn) if turn["role"] in parted else turn for turn in calls]
    written = _writes(tokenizer, template, calls), _writes(tokenizer, template, calls[:1], tools=[_TOOL])
    drops = [text is False for text in written]
    return TemplateForm(frozenset(parted), frozenset(dropped), thought, drops_calls=drops[0], drops_tools=drops[1])


def _writes(tokenizer: Any, template: str, turns: Sequence[Mapping[str, Any]], **options: Any) -> bool | None:
    """Return whether the template writes WORD; None if it refuses these turns."""
    try:
        return WORD in tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, **options)
    except Exception:  # a template is a program of the model's author
        return None


def _in_parts(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def turns_for(
    tokenizer: Any, turns: Sequence[Message], options: Mapping[str, Any] | None = None
) -> list[Mapping[str, Any]]:
    """Return turns as the template reads them: contents in its form, thoughts under its name, no weights.

    Raises:
        DataError: the template would drop a turn's text or calls, or as :func:`template_of`.
    """
    form = form_of(tokenizer, options)
    result: list[Mapping[str, Any]] = []
    for turn in turns:
        as_read: Mapping[str, Any] = turn
        if turn["role"] in form.dropped and turn["content"]:
            raise DataError(
                f"the chat template writes no text of a {turn['role']} turn, as text or in parts. Leave such turns "
                "out, or fix the template."
            )
        if turn.get("tool_calls") and form.drops_calls:
            raise DataError("the chat template writes no tool calls. Leave such turns out, or fix the template.")
        if THOUGHT in turn or WEIGHT in turn:
            as_read = {name: value for name, value in turn.items() if name not in (THOUGHT, WEIGHT)}
            if form.thought is not None and THOUGHT in turn:
                as_read[form.thought] = turn["reasoning_content"]
        result.append(_in_parts(as_read) if turn["role"] in form.parted else as_read)
    return result
