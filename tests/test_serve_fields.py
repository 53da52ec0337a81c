"""Requests of `fsd-infer serve`: each field is honoured or refused, and no body or header makes the server fail."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import ValidationError

from fsd_infer import FuzzyDecoder
from fsd_infer.serving.app import make_app
from fsd_infer.serving.fields import ChatCompletionRequest, TextCompletionRequest, ViewRequest
from tests.fuzzing import JUNK, NUMERALS, WORDS
from tests.serve_toys import CHAT, COMPLETIONS, LIMITS, ask, asked

NO_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}


def with_part(**part: Any) -> dict[str, Any]:
    """A request whose only message has one part."""
    return asked(messages=[{"role": "user", "content": [part]}])


@pytest.mark.parametrize(("content", "status", "message"), [
    (asked(rule="nonsense"), 400, "nonsense"),
    (asked(vllm_xargs={"rule": "nonsense"}), 400, "nonsense"),
    (asked(temperature=-1), 400, "temperature"),
    (asked(n=0), 400, "Invalid value for 'n': expected greater than or equal to 1, but got 0."),
    (asked(temperature=True), 400, "'temperature': expected a number, but got a boolean instead."),
    (asked(logit_bias={"5": True}), 400, "'logit_bias.5': expected a number, but got a boolean"),
    (asked(messages=[{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]), 400,
     "messages[1]: a message of the role tool answers a call"),
    (asked(tools=[], tool_choice="required"), 400, "tool_choice needs tools"),
    (asked(tool_choice="sometimes"), 400, "'tool_choice': expected 'none', 'auto' or 'required'"),
    (asked(tool_choice={"type": "function"}), 400, "Missing required parameter: 'tool_choice.function'."),
    (asked(functions=[]), 400, "functions: this server does not support it"),
    (asked(response_format={"type": "json_schema"}), 400, "response_format"),
    (asked(response_format=NO_SCHEMA), 400, "schema cannot"),
    (asked(guided_regex="("), 400, "regular expression cannot be followed"),
    (asked(guided_regex="a", response_format={"type": "json_object"}), 400, "name one"),
    (asked(top_logprobs=3), 400, "top_logprobs needs logprobs"),
    (asked(stream_options={"include_usage": True}), 400, "stream_options needs stream = true"),
    (asked(max_completion_tokens=5), 400, "max_tokens and max_completion_tokens name one limit"),
    (asked(store=True), 400, "'store': expected false, but got true."),
    (asked(stop=3), 400, "'stop': expected a string or an array of strings, but got an integer"),
    (asked(logit_bias={"a.b": 1}), 400, "'logit_bias': its names are token ids, but one is 'a.b'."),
    (asked(guided_regex="\ud83d"), 400, "the regular expression: character 1 is half of a surrogate pair"),
    (asked(chat_template_kwargs={"enable_thinking": True}), 400, "does not read 'enable_thinking'"),
    (with_part(type="text", text="a", cache_control={}), 400, "messages[0].content[0].cache_control: this server"),
    (with_part(type="input_audio"), 400, "'messages[0].content[0]': expected a part of the type 'text' or 'im"),
    (b"[" * 4000, 400, "the body is nested too deeply" if sys.version_info < (3, 13) else "the body is not JSON"),
    (asked(logit_bias={"99999999": 1}), 400, "logit_bias: there is no token 99999999"),
    (asked(quality=1.5), 400, "quality"),
    (asked(max_completion_tokens=4, min_tokens=5), 400, "min_tokens: at most max_tokens, 4, got 5"),
    (asked(guided_regex="a+", ignore_eos=True), 400, "min_tokens, ignore_eos: what follows one of"),
    (asked(quality=0.9, rule="tilted"), 400, "leave out quality, or the rule"),
    (asked(quality=0.9), 400, "nothing was calibrated yet"),
    (asked(rule="quality:x"), 400, "quality is above 0 and at most 1"),
    (asked(chat_template_kwargs={"chat_template": "{{ 7 }}"}), 400, "'chat_template' is not the template's"),
    (asked(model="another"), 404, "model 'another' is not here"),
    ({"max_tokens": 4}, 400, "messages"),
    (asked("the cat " * 400), 400, "tokens, but the model has a context of"),
    (b'{"messages": [', 400, "the body is not JSON"),
    (b'{"messages": "\xff"}', 400, "the body is not JSON: it is not utf-8 (invalid start byte, at byte 14)"),
    (b"[1]", 400, "must be a JSON object"),
    (asked("x" * 5000), 413, "more than 4096 bytes"),
    (iter([b" " * 3000, b" " * 3000]), 413, "more than 4096 bytes"),  # sent without its length
])  # fmt: skip
def test_bad_requests_say_what_is_wrong(client: TestClient, content: Any, status: int, message: str) -> None:
    body = json.dumps(content) if isinstance(content, dict) else content
    found = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == status and message in found.json()["error"]["message"]


def test_a_request_may_have_several_prompts(client: TestClient) -> None:
    """Answers come by prompt, as each alone: `n` of the first, then `n` of the next."""
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 0.7, "seed": 3, "n": 2}

    def answers(prompt: Any) -> tuple[list[str], dict[str, int]]:
        reply = client.post(COMPLETIONS, json={"prompt": prompt, **options}).json()
        assert [choice["index"] for choice in reply["choices"]] == list(range(len(reply["choices"])))
        return [choice["text"] for choice in reply["choices"]], reply["usage"]

    (cat, of_cat), (ids, of_ids), (both, of_both) = map(answers, ("the cat", [5, 6], ["the cat", [5, 6]]))
    assert both == cat + ids and len(both) == 4 and answers(["the cat"])[0] == cat and answers([[5, 6]])[0] == ids
    for name in ("prompt_tokens", "completion_tokens"):
        assert of_both[name] == of_cat[name] + of_ids[name]
    streamed = ["", "", "", ""]
    body = {"prompt": ["the cat", [5, 6]], **options, "stream": True}
    for line in client.post(COMPLETIONS, json=body).text.split("\n\n"):
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            streamed[choice["index"]] += choice["text"]
    assert streamed == both
    for prompt, place, got in (({"a": 1}, "prompt", "an object"), (["a", 5], "prompt[1]", "an integer")):
        found = client.post(COMPLETIONS, json={"prompt": prompt}).json()["error"]
        assert found["param"] == place and f"expected a string, but got {got}" in found["message"]


def test_tokens_that_end_answers_may_be_ignored(client: TestClient, toy_decoder: FuzzyDecoder) -> None:
    """With `ignore_eos` no token ends the answer, with `min_tokens` none does before."""
    body = {"prompt": "the cat", "max_tokens": 24, "logit_bias": {str(toy_decoder.tokenizer.eos_token_id): 100}}
    counts = []
    for more in ({}, {"min_tokens": 5}, {"ignore_eos": True}):
        counts.append(client.post(COMPLETIONS, json={**body, **more}).json()["usage"]["completion_tokens"])
    assert counts == [1, 6, 24]


def test_a_request_may_offer_no_tools(client: TestClient) -> None:
    assert client.post(CHAT, json=asked(chat_template_kwargs={"enable_thinking": False})).status_code == 200
    plain, empty = (client.post(CHAT, json=asked(**more)).json()["choices"] for more in ({}, {"tools": []}))
    assert plain == empty


def test_variables_of_the_template(client: TestClient, toy_decoder: FuzzyDecoder, monkeypatch: Any) -> None:
    """Rows whose `chat_template_kwargs` trained a head are served with the same."""
    template = "{{ 'the cat ' if thinks else '' }}{{ messages[0].content }}"
    monkeypatch.setattr(toy_decoder.tokenizer, "chat_template", template)
    lengths = [
        client.post(CHAT, json=asked(**more)).json()["usage"]["prompt_tokens"]
        for more in ({}, {"chat_template_kwargs": {"thinks": True}}, {"chat_template_kwargs": {"thinks": False}})
    ]
    assert lengths[1] > lengths[0] == lengths[2]


@pytest.mark.parametrize(("kind", "wrong"), [
    (ChatCompletionRequest, {"messages": [1] * 9000}),
    (ChatCompletionRequest, {"messages": [{}] * 8000}),
    (ChatCompletionRequest, asked(tools=[{}] * 99)),
    (ChatCompletionRequest, asked(**{f"field{number}": 1 for number in range(9000)})),
    (ChatCompletionRequest, asked(logit_bias={f"a{number}": 1 for number in range(20_000)})),
    (TextCompletionRequest, {"prompt": [{}] * 9000}),
])  # fmt: skip
def test_a_wrong_item_ends_the_check(kind: Any, wrong: dict[str, Any]) -> None:
    """The event loop waits for the list of errors: 12 s for one MiB of them."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate(wrong)
    assert found.value.error_count() <= 2  # of a union


SAID = {  # a value for every field that is honoured
    "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "max_tokens": 4, "model": "", "n": 2,
    "presence_penalty": 0.5, "seed": 3, "stop": ["x"], "stream": False,
    "temperature": 0.5, "top_p": 0.9, "user": "me", "messages": [{"role": "user", "content": "the cat"}],
    "prompt": "the cat",
}  # fmt: skip
NEUTRAL = {  # accepted where it changes nothing, and another value
    "best_of": (1, 2), "echo": (False, True), "suffix": ("", "x"), "modalities": (["text"], ["audio"]),
    "response_format": ({"type": "text"}, {"type": "xml"}), "service_tier": ("auto", "flex"),
    "store": (False, True), "tool_choice": ("none", "auto"),
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_field_of_the_api_is_honoured_or_refused(client: TestClient, path: str, repo_root: Path) -> None:
    """Of the fields that the openai client knows none is ignored, and the page on serving names each."""
    from openai.types import completion_create_params as completion_params  # takes seconds to import
    from openai.types.chat import completion_create_params as chat_params

    kind = chat_params if path == CHAT else completion_params
    base = asked() if path == CHAT else {"prompt": "the cat", "max_tokens": 4, "temperature": 0}
    page = (repo_root / "docs" / "serving.md").read_text(encoding="utf-8")
    for name in get_type_hints(kind.CompletionCreateParamsNonStreaming):
        assert f"`{name}`" in page, f"docs/serving.md does not name {name}"
        if name in ("logprobs", "top_logprobs"):
            tried = [({"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}, 200)]
        elif name == "stream_options":
            tried = [({"stream": True, name: {"include_usage": True}}, 200)]
        elif name == "max_completion_tokens" and path == CHAT:
            tried = [({name: 4, "max_tokens": None}, 200)]
        elif name == "parallel_tool_calls":  # without tools there are no calls
            tools = [{"type": "function", "function": {"name": "f"}}]
            tried = [({name: False}, 200), ({name: False, "tools": tools}, 400)]
        elif name in SAID:
            tried = [({name: SAID[name]}, 200)]
        elif name in NEUTRAL:
            tried = [({name: value}, status) for value, status in zip(NEUTRAL[name], (200, 400))]
        else:
            tried = [({name: "x"}, 400)]
        for fields, status in tried:
            found = client.post(path, json={**base, **fields})
            assert found.status_code == status, (name, found.text)
            assert status == 200 or name in found.json()["error"]["message"]


def test_a_quality_is_shown_in_usage_and_metrics(client: TestClient) -> None:
    """Without it the server's rule, ``tilted:2``, decodes, and the usage is OpenAI's."""
    exact = client.post(CHAT, json=asked(rule="exact")).json()
    found = client.post(CHAT, json=asked(quality=1)).json()
    assert found["choices"][0]["message"] == exact["choices"][0]["message"]
    assert found["usage"].items() >= {"quality": 1.0, "rule": {"rule": "exact", "block": None, "draw": True}}.items()
    assert "quality" not in exact["usage"]
    metrics = client.get("/metrics").text
    assert 'fsd_quality_bucket{le="0.99"} 0.0' in metrics and 'fsd_quality_bucket{le="1.0"} 1.0' in metrics


NAMES = [
    *(TextCompletionRequest.model_fields | ChatCompletionRequest.model_fields),
    *ViewRequest.model_fields, "functions", "schema", "",
]  # fmt: skip
POSTS = [*[CHAT] * 4, *[COMPLETIONS] * 3, "/view/decode", "/v1/nothing"]
GETS = ["/v1/models", "/metrics", "/health", "/", "/docs", CHAT]
NASTY = [  # values that are well-formed for their field
    {"guided_regex": "(a{1,999}){1,999}"}, {"guided_grammar": "start: start"}, {"guided_json": {"$ref": "#"}},
    {"guided_json": {"type": "object", "minProperties": 10**9}}, {"stop": ["\ud800"]}, {"user": "\0"}, {"n": 128},
    {"logit_bias": {"-1": 1}}, {"logit_bias": {"5": 101}}, {"seed": 2**63 - 1}, {"stream": True, "n": 3},
    {"prompt": "\ud800"}, {"prompt": []}, {"prompt": [10**30]}, {"messages": [{"role": "tool", "content": ""}]},
    {"rule": "tilted:" + "9" * 400}, {"rule": "fuzzy:js:nan"}, {"rule": "tilted:only_in=a..b"}, {"max_tokens": 10**30},
    {"tools": [{"type": "function", "function": {"name": "a"}}]}, {"guided_regex": ""}, {"temperature": 1e-300},
]  # fmt: skip


def value(draw: random.Random) -> Any:
    """Any JSON."""
    one = draw.choice([*JUNK, *WORDS, *NUMERALS, draw.random(), draw.randrange(9)])
    return draw.choice([one, one, [one], {draw.choice(NAMES): one}, {draw.choice(WORDS): [one, one]}])


def body(draw: random.Random, path: str) -> bytes:
    """A request that is valid but for some fields, or for some bytes."""
    made = asked(max_tokens=2) if path == CHAT else {"prompt": "the cat", "max_tokens": 2, "temperature": 0}
    made |= {draw.choice(NAMES): value(draw) for _ in range(draw.choice([0, 0, 1, 2]))}
    made |= draw.choice(NASTY) if draw.random() < 0.3 else {}
    text = json.dumps(made).encode()
    cut = draw.randrange(len(text))
    return draw.choice(
        [text, text, text, text[:cut], text[:cut] + draw.randbytes(3) + text[cut:], b"[" * 3000, draw.randbytes(cut)]
    )


def headers(draw: random.Random) -> list[tuple[bytes, bytes]]:
    """Headers as a server hands them on: any bytes."""
    kinds = [b"application/json", b"application/json", b"application/json; charset=utf-16", b"text/plain", b"\xff", b""]
    names = b"authorization content-length transfer-encoding accept-encoding x-\xfe cookie host".split()
    more = [(draw.choice(names), draw.choice([b"Bearer \xff", b"-1", b"9" * 99, b"gzip", draw.randbytes(30)]))]
    return [(b"content-type", draw.choice(kinds)), *more * draw.randrange(2)]


async def answered(app: FastAPI, draw: random.Random) -> tuple[int, bytes]:
    """Status and body that one random request is answered with."""
    method = draw.choice(["POST"] * 9 + ["GET"])
    path = draw.choice(POSTS if method == "POST" else GETS)
    leaves = draw.random() < 0.02  # a client that disconnects before its answer
    more = {"method": method, "query_string": draw.randbytes(2).hex().encode(), "headers": headers(draw)}
    status, said = await ask(app, path, [body(draw, path)], leaves=leaves, **more)
    return status, b"" if leaves else said


@pytest.mark.parametrize("count", [320, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_body_and_no_header_makes_the_server_fail(toy_decoder: FuzzyDecoder, count: int) -> None:
    """By statuses and messages; and memory stops growing after the first requests."""
    app, seen, sizes = make_app(toy_decoder, "tilted:2", LIMITS), Counter[int](), list[int]()

    async def several(seed: int, requests: int) -> None:
        draw = random.Random(seed)
        for _ in range(requests):
            status, said = await answered(app, draw)
            seen[status] += 1
            assert status in (200, 400, 404, 405, 413), said
            assert b"the server failed" not in said and (status == 200 or not said or b"message" in said), said

    async def all_of_them() -> None:
        for tenth in range(10):
            await asyncio.gather(*(several(4 * tenth + seed, count // 40) for seed in range(4)))
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20)

    asyncio.run(all_of_them())
    app.state.batcher.close()
    print(dict(seen), "MiB:", sizes)
    assert sum(seen.values()) == count and seen[200] > count / 10 and seen[400] > count / 4
    assert sizes[-1] - sizes[4] < 60, f"memory grows: {sizes} MiB"
