"""`fsd-infer serve`: requests complete as they do alone, whatever other clients ask at the same time."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fsd_infer import FsdError, FuzzyDecoder, Target
from fsd_infer.serving.app import Limits, make_app
from fsd_infer.serving.batcher import AnswerJob, Batcher, UnavailableError
from tests.rules_toy import ALARM, p_value
from tests.serve_toys import CHAT, COMPLETIONS, LIMITS, asked, events, make_job
from tests.test_adapters import save_adapter
from tests.test_sampled_requests import SIZE, TOKENS, drafter_of, llama, target_distribution
from tests.text_toys import save_tiny_chat_target

TEXTS = ["the cat sat on the mat", "what is the answer to that", "the end", "it is there on the mat", "a cat"]
SCHEMA = {"type": "object", "properties": {"the": {"enum": ["cat", "mat"]}}, "required": ["the"]}
GUIDES: list[dict[str, Any]] = [
    {"guided_regex": "(the|cat| ){3,9}"}, {"guided_json": {**SCHEMA, "additionalProperties": False}},
    {"guided_grammar": 'start: "the " ("cat" | "mat")+'}, {"response_format": {"type": "json_object"}},
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {"stop": ["t"]}, {"stop": [" on", "a"]}, {"n": 2}, {"n": 3},
    {"logit_bias": {"40": 3.5}}, {"frequency_penalty": 1.5}, {"presence_penalty": -0.5}, {"logprobs": True},
    {"user": "me"}, {"user": "you"}, {"max_tokens": 3}, {}, {}, {},
]  # fmt: skip


def request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body. Without a seed the answer depends on the prompt alone only if it is greedy and exact."""
    body = asked(draw.choice(TEXTS), max_tokens=draw.randrange(4, 12), rule="exact")
    body |= draw.choice(OPTIONS) | draw.choice(OPTIONS) | draw.choice([*GUIDES, {}, {}, {}, {}])
    if draw.random() < 0.4:
        body |= {"seed": draw.randrange(99), "temperature": draw.choice([0, 0.5, 1.0])}
        body["rule"] = draw.choice(["exact", "tilted:0.5:exact_ngram_size=0", "typical", "fuzzy:js:0.3", "tilted:-1"])
    if draw.random() < 0.3:
        body["prompt"] = body.pop("messages")[0]["content"]
        formats = {"response_format", "logprobs"} & body.keys()
        return COMPLETIONS, {name: part for name, part in body.items() if name not in formats}
    return CHAT, body


def answer(client: TestClient, path: str, body: dict[str, Any], stream: bool) -> Any:
    """Per choice text, finish reason and tokens of log-probabilities, whose values depend on the batch; or a status."""
    if not stream or body["rule"] == "tilted:-1":
        reply = client.post(path, json=body)
        if reply.status_code != 200:
            return reply.status_code
        parts = reply.json()["choices"]
    else:
        parts = events(client, path, body)
    found: list[Any] = [["", "", []] for _ in range(body.get("n", 1))]
    for one in parts:
        place = found[one["index"]]
        place[0] += one.get("text") or (one.get("message") or one.get("delta") or {}).get("content") or ""
        place[1] = one["finish_reason"] or place[1]
        place[2] += [each["token"] for each in (one["logprobs"] or {}).get("content", [])]
    return found


@pytest.mark.parametrize(("clients", "requests"), [(12, 4), pytest.param(64, 12, marks=pytest.mark.slow)])
def test_mixed_requests_are_answered_as_alone(toy_decoder: FuzzyDecoder, clients: int, requests: int) -> None:
    """Clients at once, requests of all kinds, some streamed, some malformed; plain ones as the decoder answers."""
    draws = [random.Random(seed) for seed in range(clients)]
    asked_for = [[(*request(draw), draw.random() < 0.4) for _ in range(requests)] for draw in draws]

    with TestClient(make_app(toy_decoder, "exact", LIMITS)) as client:

        def all_of(mine: list[tuple[str, dict[str, Any], bool]]) -> list[Any]:
            return [answer(client, *one) for one in mine]

        alone = [[answer(client, path, body, False) for path, body, _ in mine] for mine in asked_for]
        with ThreadPoolExecutor(clients) as pool:
            together = list(pool.map(all_of, asked_for))
        metrics = client.get("/metrics").text
    outcomes, compared = {"done": 0, "malformed": 0}, 0
    plain = {*asked(), "rule", "prompt", "user", "seed", "logprobs"}
    for mine, wanted, found in zip(asked_for, alone, together, strict=True):
        for (path, body, _), a, b in zip(mine, wanted, found, strict=True):
            assert a == b, body
            malformed = body["rule"] == "tilted:-1"
            assert (a == 400) == malformed
            outcomes["malformed" if malformed else "done"] += 2 * (1 if malformed else body.get("n", 1))
            if body.keys() <= plain and body["rule"] == "exact" and body["temperature"] == 0:
                prompt, limits = body.get("messages") or body["prompt"], {"max_new_tokens": body["max_tokens"]}
                made = toy_decoder.generate(
                    prompt, rule="exact", temperature=0, apply_chat_template=path == CHAT, **limits
                )
                assert a[0][:2] == [made.texts[0], made.stats.rows[0].finish_reason]
                compared += 1
    assert compared > clients // 4 and outcomes["malformed"]
    for outcome, count in outcomes.items():
        assert f'fsd_requests_total{{outcome="{outcome}"}} {float(count)}' in metrics
    assert "fsd_waiting_requests 0.0" in metrics


def test_seeds_parts_usage_and_nulls(client: TestClient, toy_decoder: FuzzyDecoder) -> None:
    body = {"prompt": "the cat sat", "max_tokens": 8, "temperature": 1.0, "rule": "exact"}
    made = [client.post(COMPLETIONS, json={**body, "seed": seed}).json() for seed in (5, 6, 5)]
    five, six, again = (reply["choices"][0] for reply in made)
    assert five == again and made[0]["usage"]["completion_tokens"] <= 8
    both = client.post(COMPLETIONS, json={**body, "seed": 5, "n": 2}).json()["choices"]
    assert [(each["index"], each["text"]) for each in both] == [(0, five["text"]), (1, six["text"])]
    whole = client.post(CHAT, json=asked(rule="exact")).json()["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": "the cat sat "}, {"type": "text", "text": "on the mat"}]
    body = asked(rule="exact", messages=[{"role": "user", "content": parts}])
    assert client.post(CHAT, json=body).json()["choices"][0]["message"]["content"] == whole
    body = asked(rule="exact", stream=True, stream_options={"include_usage": True})
    last = json.loads(client.post(CHAT, json=body).text.split("data: ")[-2])
    assert last["choices"] == [] and last["usage"] == client.post(CHAT, json=asked(rule="exact")).json()["usage"]
    nulls = dict.fromkeys(("n", "top_p", "seed", "stop", "stream", "stream_options", "rule"))
    assert client.post(CHAT, json=asked(**{"rule": "exact", **nulls})).status_code == 200
    assert client.get("/health").json() == {"status": "ok"}


def test_models_are_described_and_other_paths_named(client: TestClient, toy_decoder: FuzzyDecoder) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == toy_decoder.target.name and isinstance(model["created"], int)
    assert client.get(f"/v1/models/{model['id']}").json() == model
    for path, status, said in (
        ("/v1/models/x", 404, "model 'x' is not here"),
        ("/v1/embeddings", 404, "nothing is at /v1/embeddings: /openapi.json lists the paths."),
        (CHAT, 405, f"GET is not a method of {CHAT}: use POST."),
    ):
        found = client.get(path)
        assert found.status_code == status and said in found.json()["error"]["message"]


def test_answers_without_a_seed_have_the_target_s_distribution() -> None:
    """Jointly over their tokens, in batches of any size, and independently of each other."""
    letters, prompt = "abcde", [1, 2, 3]
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.Fuse()
    target = Target.of(llama(0), PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    decoder = FuzzyDecoder(target, drafter_of("head", target, "3x3x8"))
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.7}
    with TestClient(make_app(decoder, limits=Limits(max_batch=64, max_queue=400))) as client:

        def answers(count: int) -> list[str]:
            choices = client.post(COMPLETIONS, json={**body, "n": count}).json()["choices"]
            return [choice["text"] for choice in choices]

        with ThreadPoolExecutor(3) as clients:
            found = [text for texts in clients.map(answers, [1, 60, 4, 75] * 4) for text in texts]
    codes = np.array([int(text.translate(str.maketrans(letters, "01234")), SIZE) for text in found])
    whole = target_distribution(target, prompt, {"do_sample": True, "temperature": 0.7})
    first = whole.reshape(SIZE, -1).sum(1)
    assert p_value(codes, whole) > ALARM and p_value(codes // SIZE, whole.reshape(-1, SIZE).sum(1)) > ALARM
    one, other = (codes // SIZE ** (TOKENS - 1)).reshape(-1, 2).T
    assert p_value(SIZE * one + other, np.outer(first, first).ravel()) > ALARM


def test_the_queue_is_bounded_and_aborted_requests_stop(toy_decoder: FuzzyDecoder) -> None:
    started, go, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(text: str, done: AnswerJob | None) -> None:
        started.set()
        assert go.wait(30)
        if done is late:
            ended.set()

    batcher = Batcher(toy_decoder, max_batch=1, max_queue=2)
    aborted, waiting, late, more = (make_job(toy_decoder, new, slow) for new in (24, 24, 3, 24))
    batcher.submit([aborted])
    assert started.wait(30)
    batcher.submit([waiting])
    batcher.submit([late])
    with pytest.raises(UnavailableError, match="2 answers are waiting"):
        batcher.submit([more])
    batcher.cancel([waiting])
    batcher.submit([more])  # has its place
    batcher.cancel([aborted, more])
    assert list(batcher.waiting) == [late]
    go.set()
    assert ended.wait(30)
    batcher.close()
    assert len(aborted.ids) < 24 and not waiting.ids and not more.ids and len(late.ids) == 3 and late.stats is not None


def test_a_server_that_stops_ends_answers_at_once(toy_decoder: FuzzyDecoder) -> None:
    told: list[AnswerJob] = []
    begun, queued = threading.Event(), threading.Event()

    def tell(text: str, done: AnswerJob | None) -> None:
        if done is not None:
            told.append(done)
        elif queued.wait(60):
            batcher.stop()
            begun.set()

    running, waiting = (make_job(toy_decoder, 40, tell) for _ in range(2))
    batcher = Batcher(toy_decoder, max_batch=1, max_queue=2)
    batcher.submit([running])
    batcher.submit([waiting])
    queued.set()
    assert begun.wait(60)
    batcher.close()
    assert told == [running, waiting] and running.reason == "abort" and len(running.ids) < 40
    assert isinstance(waiting.reason, UnavailableError)
    with pytest.raises(UnavailableError, match="stopping"):
        batcher.submit([waiting])


def test_log_probabilities_are_the_target_s(client: TestClient, toy_decoder: FuzzyDecoder) -> None:
    """By a forward of the target's own over prompt and answer; the same in a stream."""
    body = asked(
        rule="tilted:0.5:exact_ngram_size=0", logprobs=True, top_logprobs=3, seed=0
    )  # with which no clock is read
    choice = client.post(CHAT, json=body).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    tokenizer, model = toy_decoder.tokenizer, toy_decoder.target.model
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "seed": 0}
    out = toy_decoder.generate("the cat sat on the mat", rule="tilted:0.5:exact_ngram_size=0", **options)
    prompt, answer = toy_decoder.encode("the cat sat on the mat"), out.sequences[0]
    with torch.inference_mode():
        log_p = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    assert [entry["token"] for entry in entries] == [tokenizer.decode([token]) for token in answer]
    wanted = log_p[torch.arange(len(answer)), torch.tensor(answer)].tolist()
    assert [entry["logprob"] for entry in entries] == pytest.approx(wanted, abs=1e-4)
    for entry, row in zip(entries, log_p, strict=True):
        best = row.topk(3).values.tolist()
        assert [each["logprob"] for each in entry["top_logprobs"]] == pytest.approx(best, abs=1e-4)
    plain = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2})
    found = plain.json()["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"])
    assert found["text_offset"][0] == 0


def test_bias_and_penalties_are_openai_s(client: TestClient, toy_decoder: FuzzyDecoder) -> None:
    """Greedy answers beside a loop of the target's own; what the prompt says is not penalised."""
    prompt = toy_decoder.encode("the cat sat on the mat", chat=False)
    model = toy_decoder.target.model
    with torch.inference_mode():
        first = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    fields = {"logit_bias": {str(first): -3.5}, "presence_penalty": 0.7, "frequency_penalty": 1.1}
    answer: list[int] = []
    for _ in range(10):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, -1].float()
        logits = logits.clone()
        for token in set(answer):
            logits[token] -= 0.7 + 1.1 * answer.count(token)
        logits[first] -= 3.5
        answer.append(int(logits.argmax()))
    others = [toy_decoder.encode("the end of it is there", chat=False), prompt]
    bodies = [
        {"prompt": ids, "max_tokens": 10, "temperature": 0, "rule": "exact", **fields} for ids in [*others, prompt]
    ]
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(lambda body: client.post(COMPLETIONS, json=body).json()["choices"][0]["text"], bodies))
    eos = toy_decoder.target.model.generation_config.eos_token_id
    ends = [place + 1 for place, token in enumerate(answer) if token == eos]
    wanted = toy_decoder.tokenizer.decode(answer[: min(ends, default=10)], skip_special_tokens=True)
    assert texts[1] == texts[2] == wanted


def test_phases_are_part_of_the_rule(client: TestClient, toy_decoder: FuzzyDecoder) -> None:
    """A pair that the target lacks fails its own request alone."""
    opening, closing = toy_decoder.tokenizer.convert_ids_to_tokens([5, 6])
    rule = f"tilted:0.5:exact_ngram_size=0:only_in={opening}..{closing}"
    wanted = toy_decoder.generate("the cat sat on the mat", rule=rule, max_new_tokens=8, temperature=0, seed=0).texts[0]
    found = client.post(CHAT, json=asked(rule=rule, seed=0))
    assert found.json()["choices"][0]["message"]["content"] == wanted
    refused = client.post(CHAT, json=asked(rule="tilted:only_in=think"))
    assert refused.status_code == 400 and "not a token of the target" in refused.json()["error"]["message"]
    with pytest.raises(FsdError, match="not a token of the target"):
        make_app(toy_decoder, "tilted:only_in=think")


def test_adapters_are_models_of_their_own(tmp_path: Path) -> None:
    base = save_tiny_chat_target(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(base), str(base))
    decoder = FuzzyDecoder.from_pretrained(str(base), "lookup", dtype=torch.float32, adapters={"mine": adapter})
    with TestClient(make_app(decoder, "exact", Limits(max_new_tokens=16))) as client:
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert names == [str(base), "mine"]
        bodies = [asked(max_tokens=12, model=name) for name in (*names, names[0])]
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda body: client.post(CHAT, json=body).json(), bodies))
    for name, reply in zip((*names, names[0]), found):
        adapter_of = {"adapter": "mine"} if name == "mine" else {}
        wanted = decoder.generate(asked()["messages"], max_new_tokens=12, temperature=0, **adapter_of).texts[0]
        assert reply["choices"][0]["message"]["content"] == wanted and reply["model"] == name
    assert found[0]["choices"] != found[1]["choices"]
