"""Parse tool calls in answers.

The format is recognised by the words with which a chat template explains it to the model. Three formats are known:

    Hermes, Qwen    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    Mistral         [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    Llama 3         {"name": ..., "parameters": {...}}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsd_core.errors import DataError
from fsd_core.files import STRICT_JSON, json_text

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: the function's name.
        parameters: JSON schema of the arguments.
    """

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer.

    Attributes:
        name: the function's name.
        arguments: JSON text.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        opening: text before a call. Decoding drops it if it is a special token, so a call without it counts too.
        closing: text after a call; empty if a call ends with the answer.
        arguments: name of the arguments' field.
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
    """Return the format that the tokenizer's chat template explains; None if it is unknown.

    Args:
        tokenizer: a transformers tokenizer.
        tools: as the template takes them. Some tokenizers have a separate template for requests with tools.

    Raises:
        DataError: several templates, but neither one for tools nor a default.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        template = str(tokenizer.get_chat_template(tools=list(tools))).replace('\\"', '"')
    except ValueError as error:  # several templates, none of which is the default
        raise DataError(f"this tokenizer has no chat template for tools ({error}). Name one `default`.") from error
    if "tools" not in template:
        return None
    if "<tool_call>" in template and '"name"' in template and '"arguments"' in template:
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    return LLAMA if '{"name": function name, "parameters": ' in template else None


class CallReader:
    """Splits a growing answer into content and tool calls.

    A malformed call, or a call of an unknown function, is content.

    Args:
        format: format of the calls.
        names: names of the functions that may be called.
        is_forced: whether the answer is one call by its grammar, so that nothing may follow it.

    Attributes:
        made: the calls so far.
    """

    def __init__(self, format: ToolFormat, names: Collection[str], is_forced: bool = False) -> None:
        self.format, self.names, self.is_forced = format, names, is_forced
        self.made: list[ToolCall] = []
        self._held = ""  # text that may belong to a call
        self._opening: str | None = None  # text that opened the call in progress
        self._begun = False

    def feed(self, text: str, is_over: bool) -> tuple[str, list[ToolCall]]:
        """Take more text, and return the new content and the completed calls.

        Args:
            text: the next part of the answer.
            is_over: whether the answer ends here.
        """
        self._held += text
        content, calls = "", list[ToolCall]()
        while self._held:
            if self._opening is None:
                content += self._to_opening(is_over)
                if self._opening is None:
                    break
            body, closed, rest = self._parted(is_over)
            if not closed and not is_over and self._held.lstrip()[:1] in ("", "{", "["):
                break
            new_calls = self._calls(body)
            calls += new_calls
            if not new_calls:  # a mention of the opening: a call may follow
                content, rest = content + self._opening, body + closed + rest
            self._held, self._opening = rest, None
        self.made += calls
        return content, calls

    def _to_opening(self, is_over: bool) -> str:
        """Take and return the content before the next call. Hold back text that may open a call."""
        held, opening = self._held, self.format.opening
        start = len(held) - len(held.lstrip())
        if not self._begun and held[start : start + 1] in ("{", "["):
            bare = not self.format.closing and not held.startswith(opening, start)
            if bare and not (opening.startswith(held[start:]) and not is_over):
                self._begun, self._opening, self._held = True, held[:start], held[start:]
                return ""
        index = held.find(opening)
        certain = index if index >= 0 else len(held) if is_over else len(held) - overlap(held, opening)
        content = held[:certain] if is_over and index < 0 else held[:certain].rstrip()
        if index >= 0:  # white space before a call is dropped if the call is valid
            self._opening, self._held = held[len(content) : index] + opening, held[index + len(opening) :]
        else:
            self._held = held[len(content) :]
        self._begun = self._begun or bool(content) or self._opening is not None
        return content if content.strip() or not self.made else ""

    def _parted(self, is_over: bool) -> tuple[str, str, str]:
        """Split the text at the end of a call: body, closing, rest. A closing inside a JSON string does not count."""
        closing = self.format.closing
        if not closing:
            return self._held, "", ""
        index = self._held.find(closing)
        is_json = self._held.lstrip().startswith(("{", "["))
        while index >= 0 and is_json and '"' in _STRINGS.sub("", self._held[:index]):  # inside a string
            index = self._held.find(closing, index + 1)
        if index < 0 and is_over:  # no JSON, or cut off
            return self._held.partition(closing)
        return (self._held, "", "") if index < 0 else (self._held[:index], closing, self._held[index + len(closing) :])

    def _calls(self, body: str) -> list[ToolCall]:
        """Return every call in a text; no calls if it holds anything else."""
        try:
            objects = list(_values(body))
        except (ValueError, RecursionError):
            return []
        calls = [value for item in objects for value in (item if isinstance(item, list) else [item])]
        read = [self._call(call) for call in calls]
        return [] if None in read else [call for call in read if call is not None]

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or value.get("name") not in self.names:
            return None
        arguments = value.get(self.format.arguments)
        return ToolCall(value["name"], json_text(arguments)) if isinstance(arguments, dict) else None


def _values(text: str) -> Iterator[Any]:
    """Yield JSON values that white space, commas or semicolons separate. Raises ValueError for other text."""
    index = 0
    while rest := text[index:].lstrip(" \n\t\r;,"):
        value, length = STRICT_JSON.raw_decode(rest)
        yield value
        index = len(text) - len(rest) + length


def overlap(text: str, other: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``other``."""
    return next((size for size in range(min(len(other), len(text)), 0, -1) if text.endswith(other[:size])), 0)
