"""Tool calls: the format that a chat template teaches, and the calls that an answer holds.

Three formats are known, each by the words with which its templates explain it. Models write them as

    Hermes, Qwen    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    Mistral         [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    Llama 3         {"name": ..., "parameters": {...}}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsd_infer.chat.pieces import overlap


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: of the function.
        parameters: JSON schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call that an answer holds: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        opening: text before a call. Decoding drops it where it is a special token, so a bare call counts too.
        closing: text after a call; empty if a call ends with the answer.
        arguments: name of the field that holds the arguments.
        is_list: whether one list holds all calls.
    """

    opening: str
    closing: str
    arguments: str
    is_list: bool = False


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")
MISTRAL = ToolFormat("[TOOL_CALLS]", "", "arguments", is_list=True)
LLAMA = ToolFormat("<|python_tag|>", "", "parameters")


def tool_format(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> ToolFormat | None:
    """Return the format that the tokenizer's chat template teaches; None if the format is unknown.

    Args:
        tokenizer: a transformers tokenizer.
        tools: as the template takes them. A tokenizer may have a template of its own for requests with tools.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    template = str(tokenizer.get_chat_template(tools=list(tools))).replace('\\"', '"')
    if "tools" not in template:
        return None
    if "<tool_call>" in template and '"name"' in template and '"arguments"' in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    return LLAMA if '{"name": function name, "parameters": ' in template else None


class CallReader:
    """Reads one answer as it grows: splits it into content and tool calls.

    What looks like a call but is none, by its form or by its name, is content.

    Args:
        format: of the calls.
        names: functions that may be called.

    Attributes:
        made: the calls so far.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        self.format, self.names = format, names
        self.made: list[ToolCall] = []
        self._held = ""  # text that may belong to a call
        self._opening: str | None = None  # how the call began that is being read
        self._begun = False

    def feed(self, text: str, is_over: bool) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls that are complete now.

        Args:
            text: what the answer grew by.
            is_over: whether the answer ends here.
        """
        self._held += text
        content, calls = "", list[ToolCall]()
        while self._held:
            if self._opening is None:
                content += self._to_opening(is_over)
                if self._opening is None:
                    break
            body, closed, rest = (
                self._held.partition(self.format.closing) if self.format.closing else (self._held, "", "")
            )
            if not closed and not is_over:
                break
            made = self._calls(body)
            calls += made
            content += "" if made else self._opening + body + closed
            self._held, self._opening = rest, None
        self.made += calls
        return content, calls

    def _to_opening(self, is_over: bool) -> str:
        """Take the content before the next call, as far as it is certain."""
        held, opening = self._held, self.format.opening
        start = len(held) - len(held.lstrip())
        if not self._begun and held[start : start + 1] in ("{", "["):
            bare = not self.format.closing and not held.startswith(opening, start)
            if bare and not (opening.startswith(held[start:]) and not is_over):
                self._begun, self._opening, self._held = True, held[:start], held[start:]
                return ""
        place = held.find(opening)
        certain = place if place >= 0 else len(held) if is_over else len(held) - overlap(held, opening)
        content = held[:certain] if is_over and place < 0 else held[:certain].rstrip()
        if place >= 0:  # white space before a call is no content, unless the call is none
            self._opening, self._held = held[len(content) : place] + opening, held[place + len(opening) :]
        else:
            self._held = held[len(content) :]
        self._begun = self._begun or bool(content) or self._opening is not None
        return content if content.strip() or not self.made else ""

    def _calls(self, body: str) -> list[ToolCall]:
        """Every call in a text; none if anything else is in it."""
        try:
            found = list(_values(body))
        except ValueError:
            return []
        calls = [value for each in found for value in (each if isinstance(each, list) else [each])]
        made = [self._call(call) for call in calls]
        return [] if None in made else [call for call in made if call is not None]

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or value.get("name") not in self.names:
            return None
        arguments = value.get(self.format.arguments)
        return ToolCall(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _values(text: str) -> Iterator[Any]:
    """JSON values one after another, with white space, commas or semicolons between them."""
    decoder, place = json.JSONDecoder(), 0
    while rest := text[place:].lstrip(" \n\t\r;,"):
        value, length = decoder.raw_decode(rest)
        yield value
        place = len(text) - len(rest) + length
