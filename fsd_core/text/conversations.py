"""Read conversations from rows of data files in the layouts of common data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import NotRequired, TypedDict

from fsd_core.errors import DataError, foreign_errors
from fsd_core.files import STRICT_JSON

ROLES = ("system", "user", "assistant", "tool")
# role of each speaker in ShareGPT's `conversations`
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
ANSWERS = ("response", "completion", "output")  # the last is Alpaca's, only with a text as prompt
TEXTS = ("prompt", "question", "turns", "instruction", "problem", "query", "input", "text")  # of one user turn
SYSTEMS = ("system", "system_prompt")  # of a system turn before a conversation without one
PROMPT_FIELDS = ("messages", "conversations", "conversation", "data", *SYSTEMS, *TEXTS, *ANSWERS)
THOUGHT = "reasoning_content"  # of an assistant turn
THOUGHTS = (THOUGHT, "reasoning", "thinking")  # how rows and chat templates call it
IMAGES = ("image", "images")  # columns of a row, next to the conversation
TOOLS = "tools"  # column that the chat template may read
WEIGHT = "weight"  # 0: training leaves an assistant turn out
_SHOWN = 8  # fields named of a row without a prompt


class Message(TypedDict):
    """One turn of a conversation.

    An assistant turn may call tools, have a thought before its content, and have weight 0, which keeps it out of
    training. A tool turn may name the call that it answers.
    """

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    weight: NotRequired[int]


def check_text(text: str, where: str) -> str:
    """Return ``text``. Raise DataError if it holds a lone surrogate, which tokenizers and files cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start + 1} is half of a surrogate pair (U+{ord(text[error.start]):04X}), so "
            "this is not Unicode text. Write it again in UTF-8."
        ) from None
    return text


def role_of(turn: Mapping[str, Any]) -> str:
    """Return the role that an unchecked turn names, also in ShareGPT's form."""
    named = turn.get("from") is not None
    return str(SPEAKERS.get(str(turn["from"])) if named else turn.get("role"))


def turn_fields(turn: Mapping[str, Any]) -> set[str]:
    """Return the fields of a turn that :func:`check_messages` reads: of ShareGPT's form if it has ``from``."""
    tool_fields = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}.get(role_of(turn), set())
    return tool_fields | ({"from", "value"} if turn.get("from") is not None else {"role", "content"})


def check_messages(
    messages: Any, where: str = "messages", field: str = "messages", blank: bool = False
) -> list[Message]:
    """Return ``messages`` as plain turns with role, content and the fields of tool calls.

    Args:
        messages: a list of turns, unchecked.
        where: names the row in errors, "file:line".
        field: names the row's field in errors.
        blank: whether a user turn may be only white space, as in a request; in a row that is a fault.

    Raises:
        DataError: not a list of chat turns.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise DataError(f"{where}: {field} must be a list of at least one turn.")
    return [_turn(turn, f"{where}: turn {number}", blank) for number, turn in enumerate(messages)]


def _turn(turn: Any, where: str, blank: bool) -> Message:
    """Return one turn as a plain dict. ``where`` names the turn in errors."""
    if not isinstance(turn, Mapping):
        raise DataError(f"{where} must be an object with `role` and `content`.")
    role, content = turn.get("role"), _joined(turn.get("content"))
    role = "system" if role == "developer" else role  # OpenAI's later name
    if role not in ROLES:
        raise DataError(f"{where} has role {role!r}; known roles are {', '.join(ROLES)}.")
    where = f"{where} ({role})"
    tool_calls = (turn.get("tool_calls") or []) if role == "assistant" else []
    calls = [_tool_call(call, where) for call in (tool_calls if isinstance(tool_calls, list) else [None])]
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        if any(isinstance(part, Mapping) and "image" in str(part.get("type")) for part in _listed(content)):
            raise DataError(f"{where} has an image, and rows are read as text: leave such rows out.")
        raise DataError(f"{where} must have `content` of type text.")
    check_text(content, where)
    if role == "user" and not (content if blank else content.strip()):
        raise DataError(f"{where} is empty. Give it some text or remove the row.")
    result: Message = {"role": role, "content": content}
    if calls:
        result["tool_calls"] = calls
    if role == "assistant":
        thought = next((name for name in THOUGHTS if turn.get(name)), None)
        if thought is not None:
            result["reasoning_content"] = check_text(_text(turn[thought], where, thought), where)
        if turn.get(WEIGHT) is not None and _weight(turn[WEIGHT], where) == 0:
            result["weight"] = 0
    if role == "tool":
        for name in ("tool_call_id", "name"):
            if turn.get(name) is not None:
                result[name] = check_text(_text(turn[name], where, name), where)
    return result


def _weight(value: Any, where: str) -> int:
    if not isinstance(value, int | float) or value not in (0, 1):
        raise DataError(f"{where} has weight {value!r:.40}. Give 1, or 0 for an answer that is not trained on.")
    return int(value)


def _listed(content: Any) -> list[Any]:
    return content if isinstance(content, list) else []


def _joined(content: Any) -> Any:
    """Return the text of a content of text parts, as OpenAI's API sends them. Others stay, for the caller to check."""
    parts = content if isinstance(content, list) else [None]
    texts: Any = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return "".join(texts) if len(texts) == len(parts) and all(isinstance(text, str) for text in texts) else content


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call as chat templates read it: with arguments as an object, which OpenAI's API sends as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (0, 0)
    if isinstance(arguments, str):
        try:
            arguments = STRICT_JSON.decode(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise DataError(
            f"{where} has malformed `tool_calls`. Give a list of objects with `function`: "
            "its `name` and its `arguments`, a JSON object."
        )
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def row_messages(row: Mapping[str, Any], where: str = "row") -> list[Message]:
    """Return the conversation that a row wants answered.

    The first field of these counts, unless it is null:

    - ``messages``;
    - ``data``, UltraChat's alternating texts, the user's first;
    - ``conversations`` or ``conversation``, ShareGPT's turns with ``from`` and ``value``, or with ``role`` and
      ``content``;
    - ``prompt``, a text or a list of turns;
    - ``question``;
    - ``turns``, a list of user texts, the first of which is the prompt;
    - ``instruction``, followed by ``input`` and ``context``;
    - ``problem``, ``query``, ``input`` or ``text``.

    ``system`` or ``system_prompt`` goes before a conversation that has no system turn.

    A final assistant turn is a reference answer and is dropped. Earlier answers stay. Assistant turns before the first
    user turn answer nothing and are dropped.

    Args:
        row: one row of a prompt file.
        where: names the row in errors, "file:line".

    Raises:
        DataError: none of these fields, or a field that is empty or of the wrong type.
    """
    turns = _asked(row, where)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns or turns[-1]["role"] == "system":
        raise DataError(f"{where}: the conversation holds no turn to answer. End it with a user turn.")
    return turns


def row_exchanges(row: Mapping[str, Any], where: str = "row") -> list[tuple[list[Message], list[Message]]]:
    """Return the exchanges of a row: pairs of asking turns and answering turns, which may be missing.

    A conversation is cut after each run of assistant turns. Each text of ``turns`` is an exchange.

    Args:
        row: one row of a prompt file.
        where: names the row in errors, "file:line".

    Raises:
        DataError: as for :func:`row_messages`.
    """
    exchanges: list[tuple[list[Message], list[Message]]]
    first = row_messages(row, where)  # checks the fields
    before = [name for name in PROMPT_FIELDS[: PROMPT_FIELDS.index("turns")] if name not in SYSTEMS]
    if all(row.get(name) is None for name in before) and row.get("turns"):
        exchanges = [(first, [])]
        for text in row["turns"][1:]:
            if _text(text, where, "turns").strip():
                exchanges.append(([{"role": "user", "content": text}], []))
        return exchanges
    exchanges = []
    for turn in _asked(row, where):
        if turn["role"] == "assistant":
            exchanges[-1][1].append(turn)
        elif exchanges and not exchanges[-1][1]:
            exchanges[-1][0].append(turn)
        else:
            exchanges.append(([turn], []))
    if not any(turn["role"] != "system" for turn in exchanges[-1][0]):
        exchanges.pop()
    return exchanges


def row_conversation(row: Mapping[str, Any], where: str = "row") -> list[Message]:
    """Return the conversation of a row with its answers, up to its last assistant turn.

    The answer is in ``response`` or ``completion``, a text or a list of turns, with a prompt as
    :func:`row_messages` reads it, or with a text also in ``output``. Otherwise the conversation itself holds the
    answers.

    Args:
        row: one row of a training file.
        where: names the row in errors, "file:line".

    Raises:
        DataError: no answer, a malformed field, or a fault as for :func:`row_messages`.
    """
    names = ANSWERS if _turns(row, where) is None else ANSWERS[:-1]
    field = next((name for name in names if row.get(name) is not None), None)
    if field is not None:
        turns = [*row_messages(row, where), *_answer(row[field], where, field)]
    else:
        turns = _asked(row, where)
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    if not turns:
        raise DataError(f"{where}: no answer. Give `response` or `output`, or end `messages` with an assistant turn.")
    return turns


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's arguments of the chat template. Raises DataError for a wrong type."""
    options: dict[str, Any] = _parsed(row, "chat_template_kwargs", dict)
    tools = _parsed(row, "tools", list)
    return {**options, "tools": tools} if tools else options


def _parsed(row: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field's list or object, also from JSON text; an empty one if the field is missing."""
    value = row.get(name)
    if isinstance(value, str):
        with foreign_errors(DataError, f"`{name}` is not JSON ({{why}})."):
            value = json.loads(value)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise DataError(f"`{name}` must be {'a list' if kind is list else 'an object'}, found {type(value).__name__}.")
    return value


def row_questions(row: Mapping[str, Any], where: str = "row") -> list[Message]:
    """Return all turns of ``messages``, ``data`` or ``conversations`` except answers; no turns for other rows."""
    return [turn for turn in _turns(row, where) or [] if turn["role"] != "assistant"]


def _turns(row: Mapping[str, Any], where: str) -> list[Message] | None:
    if row.get("messages") is not None:
        return check_messages(row["messages"], where)
    if isinstance(row.get("data"), list) and all(isinstance(text, str) for text in row["data"]):  # UltraChat's
        roles = ("user", "assistant")
        return check_messages(
            [{"role": roles[number % 2], "content": text} for number, text in enumerate(row["data"])], where, "data"
        )
    for field in ("conversations", "conversation"):
        if row.get(field) is not None:
            return check_messages(_named(row[field], where), where, field)
    return None


def _named(turns: Any, where: str) -> Any:
    """Rename the fields of ShareGPT's turns. Other turns stay as they are, for the caller to check."""
    if not isinstance(turns, Sequence) or isinstance(turns, (str, bytes)):
        return turns
    named: list[Any] = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or turn.get("from") is None:
            named.append(turn)
            continue
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise DataError(f"{where}: turn {number} is from {speaker!r}; known are {', '.join(SPEAKERS)}.")
        if not isinstance(turn.get("value"), str):
            raise DataError(f"{where}: turn {number} (from {speaker}) must have `value` of type text.")
        others = {name: value for name, value in turn.items() if name not in ("from", "value", "role", "content")}
        named.append({**others, "role": SPEAKERS[speaker], "content": turn["value"]})
    return named


def _asked(row: Mapping[str, Any], where: str) -> list[Message]:
    """Return the system prompt and the turns of the row's prompt field, without answers before the first question."""
    if any(row.get(name) for name in IMAGES):
        raise DataError(f"{where}: the row has an image, and rows are read as text: leave such rows out.")
    turns = _turns(row, where)
    if turns is None:
        turns = _prompt(row, where)
    if turns[0]["role"] != "system":
        field = next((name for name in SYSTEMS if row.get(name)), None)
        if field is not None:
            turns = [{"role": "system", "content": _text(row[field], where, field)}, *turns]
    first = next((number for number, turn in enumerate(turns) if turn["role"] == "user"), len(turns))
    return [turn for number, turn in enumerate(turns) if turn["role"] != "assistant" or number > first]


def _prompt(row: Mapping[str, Any], where: str) -> list[Message]:
    for field in TEXTS:
        if row.get(field) is None:
            continue
        text = row[field]
        if field == "prompt" and isinstance(text, list):
            return check_messages(text, where, "prompt")
        if field == "turns":
            if not isinstance(text, list) or not text or not all(isinstance(turn, str) for turn in text):
                raise DataError(f"{where}: `turns` must hold text in a list, the user's turns in their order.")
            text = text[0]
        text = _text(text, where, field)
        if not text.strip():
            raise DataError(f"{where}: `{field}` is empty. Give the prompt some text or remove the line.")
        for name in ("input", "context") if field == "instruction" else ():
            added = "" if row.get(name) is None else _text(row[name], where, name)
            text = f"{text.rstrip()}\n\n{added}" if added else text
        return [{"role": "user", "content": text}]
    names = ", ".join(f"{str(name)!r:.42}" for name in list(row)[:_SHOWN]) or "none"
    raise DataError(
        f"{where}: no prompt. Give one of the fields messages, conversations, {', '.join(TEXTS)}. It has {names}."
    )


def _answer(value: Any, where: str, field: str) -> list[Message]:
    if isinstance(value, list):
        return check_messages(value, where, field)
    return [{"role": "assistant", "content": _text(value, where, field)}]


def _text(value: Any, where: str, field: str) -> str:
    """Return ``value`` if it is text, else raise DataError."""
    if not isinstance(value, str):
        raise DataError(f"{where}: `{field}` must hold text, found {type(value).__name__}.")
    return check_text(value, f"{where}: `{field}`")
