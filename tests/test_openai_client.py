"""Servers with the OpenAI API: requests, retries and errors of their client, and their benchmark."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsd_bench.cli import main
from fsd_bench.server import ServerMethod
from fsd_core.openai_client import Server, ServerError
from fsd_infer import FsdError
from tests.bench_toys import Toy
from tests.openai_server import Behaviour, made_up, replying, serving
from tests.test_bench import NEW, toy_run

BODY = {"model": "toy", "prompt": [1, 2], "max_tokens": 3}
DONE = {"choices": []}


def good(body: dict[str, Any], number: int) -> tuple[int, Any]:
    return 200, DONE


@pytest.mark.parametrize(
    ("given", "asked"), [("", "/v1"), ("/", "/v1"), ("/v1", "/v1"), ("/v1/", "/v1"), ("/a/v2", "/a/v2")]
)
def test_v1_is_added_to_an_address_without_a_path(given: str, asked: str) -> None:
    with replying(good) as (url, seen):
        assert Server(url + given).complete(BODY) == DONE
    assert [request["path"] for request in seen] == [asked + "/completions"]


@pytest.mark.parametrize("passing", [(503, b"busy"), (429, b"slow down"), (200, b"<html>"), None])
def test_what_may_pass_is_asked_again_with_its_extensions(passing: tuple[int, bytes] | None) -> None:
    with replying(lambda body, number: good(body, number) if number > 2 else passing) as (url, seen):
        server = Server(url, attempts=3, pause=0.001)
        assert [server.complete(BODY, {"top_k": -1}) for _ in range(2)] == [DONE] * 2
    assert [body["top_k"] for body in seen] == [-1] * 4


REFUSED = [
    (500, 2, "status 500: out of memory .* after 2 tries"),
    *((status, 1, f"status {status}: out of memory") for status in (307, 400, 404)),
]


@pytest.mark.parametrize(("status", "tries", "said"), REFUSED)
def test_the_last_try_tells_address_and_reason(status: int, tries: int, said: str) -> None:
    with replying(lambda body, number: (status, b"out of\n memory")) as (url, seen):
        with pytest.raises(ServerError, match=f"server {url} refused .*{said}") as raised:
            Server(url, attempts=2, pause=0.001).complete(BODY)
    assert raised.value.status == status and len(seen) == tries
    with pytest.raises(ServerError, match=f"server {url} cannot be reached .Connection refused.: is it running.$"):
        Server(url).complete(BODY)


def strict(status: int) -> Any:
    """A server that accepts only OpenAI's fields, and streams."""

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if "top_k" in body or body["max_tokens"] > 9:
            return status, b"unknown field or too long"
        return 200, b'data: {"choices": [1]}\n\ndata: [DONE]\n\n' if body.get("stream") else DONE

    return reply


@pytest.mark.parametrize(("status", "streamed"), [(400, True), (422, False)])
def test_refused_extensions_are_left_out(status: int, streamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    def ask(server: Server, **more: Any) -> Any:
        body = {**BODY, **more}
        return list(server.stream(body, {"top_k": -1})) if streamed else server.complete(body, {"top_k": -1})

    with replying(strict(status)) as (url, seen), caplog.at_level(logging.WARNING):
        server = Server(url)
        for _ in range(3):  # refused with and without: the extension is not to blame
            with pytest.raises(ServerError, match=f"status {status}: .*too long"):
                ask(server, max_tokens=99)
        assert ["top_k" in body for body in seen] == [True, False] * 3 and not caplog.records
        assert [ask(server) for _ in range(3)] == [[{"choices": [1]}] if streamed else DONE] * 3
        assert ["top_k" in body for body in seen[6:]] == [True, False, False, False]
        ask(Server(url))  # another server is asked for itself
        assert "top_k" in seen[-2]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and url in messages[0] and "top_k" in messages[0]


STREAMS = [
    (b'data: {"choices": []}\n\n', "broke off an answer: is it still running"),
    (b'data: {"choi\n\n', "broke off an answer"),
    (b'data: {"error": {"message": "out of memory"}}\n\n', "failed: .*out of memory"),
    (b'data: {"choices": [1]}\r\n\r\ndata: [DONE]\r\n\r\n', ""),
]


@pytest.mark.parametrize(("sent", "message"), STREAMS)
def test_streams_without_chunks_and_their_ends(sent: bytes, message: str) -> None:
    with replying(lambda body, number: (200, sent)) as (url, _):
        if message:
            with pytest.raises(ServerError, match=message):
                list(Server(url).stream(BODY))
        else:
            assert list(Server(url).stream(BODY)) == [{"choices": [1]}]


# the benchmark --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def greedy(toy: Toy) -> Behaviour:
    """A server that decodes the toy target greedily, two tokens per event."""
    model = AutoModelForCausalLM.from_pretrained(toy.target, dtype=torch.float32)

    def answer(prompt: list[int], limit: int) -> list[int]:
        found: list[int] = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=limit)[0].tolist()
        return found[len(prompt) :]

    return Behaviour(answer, burst=2)


def test_server_gets_the_same_tokens_and_is_measured_alike(toy: Toy, greedy: Behaviour, capsys: Any) -> None:
    """It may have another tokenizer, which its protocol does not tell: another name is said aloud."""
    with serving(greedy) as url:
        methods = ["plain", f"theirs=server:{url}#toy"]
        record = toy_run(toy, methods, repeat=2, warmup=True, log_likelihood=True, baselines=["theirs"])
    assert f"serves 'toy' and gets token ids of '{toy.target}'" in capsys.readouterr().err
    plain, theirs = record["methods"]["plain"], record["methods"]["theirs"]
    assert plain["identical_to_baseline"] == 1.0 and record["baseline"] == "theirs"
    for key in ("answer_tokens", "finished_fraction"):
        assert theirs[key] == plain[key]
    assert theirs["log_likelihood_per_token"] == pytest.approx(plain["log_likelihood_per_token"], abs=1e-4)
    assert 0 < theirs["prefill_seconds"] < theirs["seconds_per_answer"]
    assert theirs["tau"] is None and theirs["target_forwards"] is None and theirs["phases"] == {}
    assert theirs["url"] == url and theirs["model"] == "toy"
    assert record["ratios"]["theirs"]["plain"]["tokens_per_second"]["pairs"] == 4
    assert len(greedy.requests) == 1 + 4 * 2  # warm-up, then every prompt twice
    assert all(body["temperature"] == 0 and body["max_tokens"] == NEW for body in greedy.requests[1:])
    # nothing of the model's generation config may shape what is compared with the target's own greedy answers
    neutral = dict(top_p=1, presence_penalty=0, frequency_penalty=0, top_k=-1, min_p=0, repetition_penalty=1)
    assert all({**body, **neutral} == body for body in greedy.requests)


def test_server_takes_batches_and_sampling(toy: Toy) -> None:
    behaviour = Behaviour(made_up)
    with serving(behaviour) as url:
        record = toy_run(toy, [f"s=server:{url}"], batch_size=2, temperature=0.7, seed=3)
    rows = record["prompts"]
    assert len({row["methods"]["s"][0]["tokens_sha256"] for row in rows}) == len(rows)
    assert all(len(body["prompt"]) == 2 and body["temperature"] == 0.7 for body in behaviour.requests)
    assert behaviour.requests[0]["seed"] == 3


NO_EVENT = "sent no event of the OpenAI API"
# a server that is stopped cuts answers short, which would count as answers of full length
ABORTED = {"choices": [{"text": "x", "token_ids": [1], "finish_reason": "abort"}], "usage": {"completion_tokens": 1}}


@pytest.mark.parametrize(("odd", "said"), [
    ({"choices": [{"index": 3, "text": "x"}]}, NO_EVENT), ({"choices": [{"index": -1, "text": "x"}]}, NO_EVENT),
    ({"choices": [{"text": "x", "token_ids": ["x"]}]}, NO_EVENT), ({"choices": ["x"]}, NO_EVENT),
    ({"choices": 3}, NO_EVENT), ({"choices": [{"text": 3}]}, NO_EVENT), ({"usage": "many"}, NO_EVENT),
    (ABORTED, "aborted an answer: is it stopping"),
])  # fmt: skip
def test_an_event_that_cannot_be_measured_is_named(odd: dict[str, Any], said: str, monkeypatch: Any) -> None:
    with serving(Behaviour(made_up)) as url:
        method = ServerMethod("s", Server(url))
        monkeypatch.setattr(method.server, "stream", lambda *arguments: iter([odd]))
        with pytest.raises(ServerError, match=said):
            method.answer([[1, 2]], {"max_new_tokens": 4, "do_sample": False}, 0)


def test_tokens_of_another_vocabulary_end_the_run(toy: Toy, tmp_path: Path) -> None:
    """They would fail when answers are scored, after everything is measured."""
    with serving(Behaviour(lambda prompt, limit: [10**6] * limit)) as url:
        with pytest.raises(
            FsdError, match=r"method 's' answered token 1000000, but .* has ids from 0 to \d+: it decodes"
        ):
            toy_run(toy, ["plain", f"s=server:{url}"], json_path=tmp_path / "r.json", log_likelihood=True)


def test_an_absent_server_is_named_and_leaves_nothing(toy: Toy, tmp_path: Path, capsys: Any) -> None:
    with serving(Behaviour(made_up)) as url:
        with pytest.raises(ServerError, match="does not serve 'x'. It serves: toy"):
            toy_run(toy, [f"server:{url}#x"])
        with pytest.raises(ServerError, match="refused /v1/completions with status 404: .*no such model"):
            list(Server(url).stream({"model": "other", "prompt": [1], "max_tokens": 1}))
    path = tmp_path / "r.json"
    argv = ["bench", "--prompts", str(toy.prompts), "--json", str(path), "--target", str(toy.target)]
    assert main([*argv, "--methods", f"plain,server:{url}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fsd-bench: server {url} cannot be reached") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "nothing to clear away"
