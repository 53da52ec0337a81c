"""Many clients at once, each with requests of other kinds: every answer is the one that the request gets alone."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient

from fsd_infer import FuzzyDecoder
from fsd_infer.serving.app import make_app
from tests.serve_toys import CHAT, COMPLETIONS, LIMITS, asked

TEXTS = ["the cat sat on the mat", "what is the answer to that", "the end", "it is there on the mat", "a cat"]
SCHEMA = {"type": "object", "properties": {"the": {"enum": ["cat", "mat"]}}, "required": ["the"]}
GUIDES: list[dict[str, Any]] = [
    {"guided_regex": "(the|cat| ){3,9}"}, {"guided_json": {**SCHEMA, "additionalProperties": False}},
    {"guided_grammar": 'start: "the " ("cat" | "mat")+'}, {"response_format": {"type": "json_object"}},
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {"stop": ["t"]}, {"stop": [" on", "a"]}, {"n": 2}, {"n": 3},
    {"logit_bias": {"40": 3.5}}, {"frequency_penalty": 1.5}, {"presence_penalty": -0.5}, {"logprobs": True},
    {"user": "me"}, {"user": "you"}, {"max_tokens": 3}, {},
]  # fmt: skip


def request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body. Without a seed the answer depends on the prompt alone only if it is greedy and exact."""
    body = asked(draw.choice(TEXTS), max_tokens=draw.randrange(4, 12), rule="exact")
    body |= draw.choice(OPTIONS) | draw.choice(OPTIONS) | draw.choice([*GUIDES, {}, {}, {}, {}])
    if draw.random() < 0.4:
        body |= {"seed": draw.randrange(99), "temperature": draw.choice([0, 0.5, 1.0])}
        body["rule"] = draw.choice(["exact", "tilted:0.5:novel=0", "typical", "fuzzy:js:0.3"])
    if draw.random() < 0.3:
        body["prompt"] = body.pop("messages")[0]["content"]
        formats = {"response_format", "logprobs"} & body.keys()
        return COMPLETIONS, {name: part for name, part in body.items() if name not in formats}
    return CHAT, body


def answer(client: TestClient, path: str, body: dict[str, Any], stream: bool) -> list[tuple[str, str, Any]]:
    """Per choice text, finish reason and log-probabilities."""
    if not stream:
        reply = client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return [(text_of(one), one["finish_reason"], entries(one)) for one in reply.json()["choices"]]
    found = [["", "", []] for _ in range(body.get("n", 1))]
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line and "[DONE]" not in line:
                one = json.loads(line[6:])["choices"][0]
                place = found[one["index"]]
                place[0] += text_of(one)
                place[1] = one["finish_reason"] or place[1]
                place[2] += entries(one)
    return [(text, reason, logprobs) for text, reason, logprobs in found]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or "")


def entries(choice: dict[str, Any]) -> list[Any]:
    """Tokens of the log-probabilities; their values depend on the batch in their last digits."""
    return [each["token"] for each in (choice["logprobs"] or {}).get("content", [])]


@pytest.mark.parametrize(("clients", "requests"), [(12, 4), pytest.param(64, 12, marks=pytest.mark.slow)])
def test_mixed_requests_are_answered_as_alone(toy_decoder: FuzzyDecoder, clients: int, requests: int) -> None:
    draws = [random.Random(seed) for seed in range(clients)]
    asked_for = [[(*request(draw), draw.random() < 0.4) for _ in range(requests)] for draw in draws]

    with TestClient(make_app(toy_decoder, "exact", LIMITS)) as client:

        def all_of(mine: list[tuple[str, dict[str, Any], bool]]) -> list[Any]:
            return [answer(client, *one) for one in mine]

        alone = [[answer(client, path, body, False) for path, body, _ in mine] for mine in asked_for]
        with ThreadPoolExecutor(clients) as pool:
            together = list(pool.map(all_of, asked_for))
        done = client.get("/metrics").text
    for mine, wanted, found in zip(asked_for, alone, together, strict=True):
        for one, a, b in zip(mine, wanted, found, strict=True):
            assert a == b, one
    answers = 2 * sum(body.get("n", 1) for mine in asked_for for _, body, _ in mine)
    assert f'fsd_requests_total{{outcome="done"}} {float(answers)}' in done
