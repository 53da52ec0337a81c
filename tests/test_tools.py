"""Tool calls: each known format is read from answers, streamed or whole, and forced calls follow their schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoTokenizer

from fsd_core.errors import DataError
from fsd_core.text.encoding import encode_chat
from fsd_infer import FuzzyDecoder
from fsd_infer.serving.app import make_app
from fsd_infer.serving.fields import ChatCompletionRequest
from fsd_infer.serving.tools import HERMES, LLAMA, MISTRAL, CallReader, ToolFormat, tool_format
from tests import serve_toys
from tests.serve_toys import CHAT, streamed
from tests.text_toys import CHATML, save_tiny_chat_target, tiny_tokenizer

WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Ulm"]}}, "required": ["city"]}
WEATHER["additionalProperties"] = False
TIME = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
CALLED: list[dict[str, Any]] = [
    {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "time", "arguments": "{}"}}]}
]
# how the templates of each family begin: with the tools, and the format of a call
LISTED = (
    "{% if tools %}{{ '<|start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '%s<|end|>\n' }}{% endif %}"
)
ANSWERED = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls %}{{ 'calls ' + call.function.name + call.function.arguments['city'] }}{% endfor %}"
    "{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def _listed(text: str) -> str:
    return LISTED.replace("%s", text)


TEMPLATES = {
    HERMES: _listed('<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>') + ANSWERED,
    MISTRAL: _listed("[TOOL_CALLS]") + ANSWERED,
    LLAMA: _listed('{"name": function name, "parameters": dictionary of arguments}') + ANSWERED,
}


def test_the_template_tells_the_format() -> None:
    for format, template in TEMPLATES.items():
        tokenizer = SimpleNamespace(chat_template=template, get_chat_template=lambda tools, found=template: found)
        assert tool_format(tokenizer, TOOLS) == format
    for other in (CHATML, _listed("<tool_call><function=name>"), _listed("[TOOL_CALLS]name[ARGS]"), None):
        tokenizer = SimpleNamespace(chat_template=other, get_chat_template=lambda tools, found=other: found)
        assert tool_format(tokenizer, TOOLS) is None


@pytest.mark.parametrize(("format", "answer", "content", "calls"), [
    (HERMES, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>', "", [("time", "{}")]),
    (
        HERMES,
        'I look.\n<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>\n'
        '<tool_call>[{"name": "time", "arguments": {}}]</tool_call> Done <tool',
        "I look. Done <tool",
        [("weather", '{"city": "Ulm"}'), ("time", "{}")],
    ),
    (HERMES, '<tool_call>{"name": "time", "arguments": {}}', "", [("time", "{}")]),  # ended without its closing
    (HERMES, '<tool_call>{"name": "time", "argu', '<tool_call>{"name": "time", "argu', []),  # cut off
    (HERMES, "<tool_call>no JSON</tool_call> so", "<tool_call>no JSON</tool_call> so", []),
    (HERMES, '<tool_call>{"name": "x", "arguments": {}}</tool_call>', None, []),  # no such tool
    (HERMES, '<tool_call>{"name": "time", "arguments": 3}</tool_call>', None, []),
    (  # a closing in a string ends no call, and characters stay as they are
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "Z\u00fcrich </tool_call> \\" x"}}</tool_call> end',
        " end",
        [("weather", '{"city": "Z\u00fcrich </tool_call> \\" x"}')],
    ),
    (  # an escaped quote ends no string
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "a\\"</tool_call>"}}</tool_call>',
        "",
        [("weather", '{"city": "a\\"</tool_call>"}')],
    ),
    (  # mentions of the opening, the second with an unfinished call, before a call
        HERMES,
        '<think>A <tool_call> or <tool_call>{"x: </think><tool_call>{"name": "time", "arguments": {}}</tool_call>',
        '<think>A <tool_call> or <tool_call>{"x: </think>',
        [("time", "{}")],
    ),
    (HERMES, '<tool_call>{"name": "time</tool_call> so', '<tool_call>{"name": "time</tool_call> so', []),
    (HERMES, '<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "time", "arguments": {"a": 1e999}}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "time", "arguments": {"a": "\\ud800"}}</tool_call>', "",
     [("time", '{"a": "\\ud800"}')]),
    (LLAMA, '{"name": "time", "parameters": ' + "[" * 3000, None, []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "time", "arguments": {}}]', "", [("time", "{}")]),
    (MISTRAL, ' [{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]', "", [("time", "{}")] * 2),
    (MISTRAL, "[1, 2] are numbers", "[1, 2] are numbers", []),
    (MISTRAL, '[1] [TOOL_CALLS][{"name": "time", "arguments": {}}]', "[1]", [("time", "{}")]),
    (MISTRAL, "See: [TOOL_CALLS][]", "See: [TOOL_CALLS][]", []),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Bonn"}}', "", [("weather", '{"city": "Bonn"}')]),
    (LLAMA, '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "time", "parameters": {}}', "",
     [("time", "{}")] * 2),
    (LLAMA, ' {"name": "time"}', ' {"name": "time"}', []),
    (LLAMA, "", "", []),
])  # fmt: skip
def test_answers_are_split_however_they_arrive(
    format: ToolFormat, answer: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    content = answer if content is None else content
    for size in (1, 2, 3, 7, 1000):
        reader, text = CallReader(format, {"weather", "time"}), ""
        for start in range(0, len(answer), size):
            new, _ = reader.feed(answer[start : start + size], False)
            text += new
            assert content.startswith(text.rstrip())
        text += reader.feed("", True)[0]
        assert text == content and [(call.name, call.arguments) for call in reader.made] == calls


@pytest.fixture(scope="module", params=list(TEMPLATES), ids=["hermes", "mistral", "llama"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A client with the decoder that it asks, whose template is of one format."""
    directory = save_tiny_chat_target(tmp_path_factory.mktemp("toy"), max_positions=1024)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATES[request.param]
    tokenizer.save_pretrained(directory)
    decoder = FuzzyDecoder.from_pretrained(str(directory), "lookup", dtype=torch.float32)
    with TestClient(make_app(decoder)) as client:
        yield client, decoder


def asked(**more: Any) -> dict[str, Any]:
    return serve_toys.asked("the cat", **{"max_tokens": 100, "tools": TOOLS, **more})


def test_calls_can_be_required_or_named(served: tuple[Any, Any]) -> None:
    """The toy's weights are random, so only the grammar makes its answers calls."""
    client, _ = served
    named = {"type": "function", "function": {"name": "weather"}}
    single = asked(tool_choice=named, parallel_tool_calls=False)  # as LangChain asks for structured output
    assert len(client.post(CHAT, json=single).json()["choices"][0]["message"]["tool_calls"]) == 1
    for choice, names in (("required", {"weather", "time"}), (named, {"weather"})):
        for body in (asked(tool_choice=choice), asked(tool_choice=choice, temperature=1, seed=3, rule="tilted:0.5")):
            found = client.post(CHAT, json=body).json()["choices"][0]
            (call,) = found["message"]["tool_calls"]
            assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
            arguments = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] in names and len(call["id"]) == 9 and call["type"] == "function"
            assert arguments == {} if call["function"]["name"] == "time" else arguments["city"] in ("Bonn", "Ulm")
            text, reason, calls = streamed(client, body)
            assert not text and reason == "tool_calls" and calls[0]["index"] == 0
            assert calls[0]["function"] == call["function"]
            # the limit may fall on the end token, or on the last token of the call
            count = client.post(CHAT, json=body).json()["usage"]["completion_tokens"]
            whole = client.post(CHAT, json={**body, "max_tokens": count}).json()["choices"][0]
            assert whole["finish_reason"] == streamed(client, {**body, "max_tokens": count - 1})[1] == "tool_calls"


@pytest.mark.parametrize(("fields", "message"), [
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tools has no function 'x'"),
    ({"tools": None, "tool_choice": "auto"}, "tool_choice needs tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "tools: strict needs"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"response_format": {"type": "json_object"}}, "tools: an answer that calls tools cannot"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls: false needs a tool_choice"),
    ({"messages": [*CALLED, {"role": "tool", "tool_call_id": "c2", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}],
     "tool_choice": "required"}, "tools: the grammar cannot be followed"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages: name and tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio: this server does not"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "malformed `tool_calls`"),
])  # fmt: skip
def test_malformed_tools_are_refused(served: tuple[Any, Any], fields: dict[str, Any], message: str) -> None:
    found = served[0].post(CHAT, json=asked(**fields))
    assert found.status_code == 400 and message in found.json()["error"]["message"], found.text


def test_results_may_follow_one_message_per_call() -> None:
    """As some clients write parallel calls; and a server may give calls no ids."""
    other = [{**CALLED[0], "tool_calls": [{**CALLED[0]["tool_calls"][0], "id": "c2"}]}]
    results = [{"role": "tool", "tool_call_id": id, "content": "x"} for id in ("c1", "c2")]
    nameless = [{**CALLED[0], "tool_calls": [{**CALLED[0]["tool_calls"][0], "id": ""}]}]
    for messages in ([*CALLED, *other, *results], [*nameless, results[0]]):
        assert len(ChatCompletionRequest(messages=messages).messages) == len(messages)


def test_the_built_in_model_has_no_format(builtin_target_dir: Path, toy_decoder: FuzzyDecoder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin_target_dir)
    assert tool_format(tokenizer, TOOLS) is None
    turns = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "wet", "tool_call_id": "1"}]
    assert "<|im_start|>tool\nwet<|im_end|>" in tokenizer.decode(encode_chat(tokenizer, turns))
    with pytest.raises(DataError, match="malformed `tool_calls`"):
        encode_chat(tokenizer, [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "a"}}]}])
    with TestClient(make_app(toy_decoder)) as client:  # its template has no tools either
        found = client.post(CHAT, json=asked())
    assert found.status_code == 400 and "tools: the chat template of" in found.json()["error"]["message"]


def test_several_templates_without_one_for_tools_are_named() -> None:
    tokenizer = tiny_tokenizer({"rag": CHATML})
    with pytest.raises(DataError, match="no chat template for tools .*Name one `default`"):
        tool_format(tokenizer, TOOLS)
    tokenizer.chat_template = {"default": CHATML, "tool_use": LISTED + '{{ \'<tool_call> "name" "arguments"\' }}'}
    assert tool_format(tokenizer, TOOLS) == HERMES
