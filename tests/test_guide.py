"""Structured output: exact under the masked target, and no rule leaves the grammar."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from fsd_infer import FsdError, FuzzyDecoder, TreeShape
from fsd_infer.request.guide import Guide
from fsd_infer.serving.app import make_app

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
TEXTS = ["the cat", "the cat sat on the mat", "it is there"]


@pytest.fixture(scope="module")
def decoder(toy: Any, toy_decoder: FuzzyDecoder) -> FuzzyDecoder:
    return FuzzyDecoder(toy_decoder.target, toy_decoder.load_drafter(str(toy.drafter), TreeShape(4, 3, 9)))


class Masks:
    """What a grammar allows after a text, by a matcher that reads all of it again."""

    def __init__(self, decoder: FuzzyDecoder, guide: Guide) -> None:
        self.eos = decoder.target.model.generation_config.eos_token_id
        self.guide, self.size = guide, decoder.target.vocab_size
        self.vocabulary = from_tokenizer(decoder.tokenizer, n_vocab=self.size, eos_token=self.eos)

    def allowed(self, answer: list[int]) -> list[int]:
        matcher = LLMatcher(self.vocabulary, self.guide.grammar)
        assert matcher.consume_tokens(answer), matcher.get_error()
        if matcher.is_stopped():
            return [self.eos]
        mask = matcher.compute_bitmask()
        return [token for token in range(self.size) if mask[token // 8] >> token % 8 & 1]

    def check(self, answer: list[int]) -> None:
        for place, token in enumerate(answer):
            assert token in self.allowed(answer[:place]), f"token {place} leaves the grammar"


def test_greedy_answers_are_those_of_the_masked_target(decoder: FuzzyDecoder) -> None:
    """Rows of different lengths in one batch; head, lookup and no drafter."""
    guide = Guide.json_schema(SCHEMA)
    masks, model = Masks(decoder, guide), decoder.target.model
    wanted = []
    for text in TEXTS:
        prompt, answer = decoder.encode(text), []
        while len(answer) < 24 and (not answer or answer[-1] != masks.eos):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + answer])).logits[0, -1]
            allowed = masks.allowed(answer)
            answer.append(allowed[int(logits[allowed].argmax())])
        wanted.append(answer)
    for drafter in (decoder.drafter, decoder.load_drafter("lookup"), decoder.load_drafter("none")):
        found = decoder.generate(TEXTS, "exact", drafter=drafter, schema=SCHEMA, max_new_tokens=24, temperature=0)
        assert found.sequences == wanted
    assert decoder.generate(TEXTS, "exact", guide=guide, max_new_tokens=24, temperature=0).sequences == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["tilted:0.2:novel=0:floor=0", "typical", "fuzzy:js:0.5", "random:0.5", "relaxed"])
def test_no_rule_leaves_the_grammar(decoder: FuzzyDecoder, rule: str, temperature: float) -> None:
    masks = Masks(decoder, Guide.json_schema(SCHEMA))
    sampling = {"temperature": 0.0} if temperature == 0 else {"do_sample": True, "temperature": 1.0, "top_k": None}
    found = decoder.generate(TEXTS, rule, schema=SCHEMA, max_new_tokens=40, seed=1, **sampling)
    for answer, text, stats in zip(found.sequences, found.texts, found.stats.rows, strict=True):
        masks.check(answer)
        if stats.finish_reason == "stop":
            assert set(json.loads(text)) == {"a", "n"}


def test_samples_have_the_law_of_the_masked_target(decoder: FuzzyDecoder) -> None:
    """Exact decoding against enumeration over all answers of a small grammar, token by token."""
    guide = Guide.regex("(a|b|c)(d|e)")
    masks, model = Masks(decoder, guide), decoder.target.model
    prompt, law, open_ = decoder.encode("the cat"), {}, {(): 1.0}
    while open_:
        answer, chance = open_.popitem()
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + list(answer)])).logits[0, -1].float()
        allowed = masks.allowed(list(answer))
        for token, p in zip(allowed, logits[allowed].softmax(-1).tolist(), strict=True):
            if token == masks.eos:
                law[decoder.tokenizer.decode(list(answer))] = (
                    law.get(decoder.tokenizer.decode(list(answer)), 0.0) + chance * p
                )
            else:
                open_[(*answer, token)] = chance * p
    assert set(law) == {"".join(pair) for pair in product("abc", "de")} and sum(law.values()) == pytest.approx(1.0)
    count, counts = 0, Counter[str]()
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": None, "top_p": None}
    for seed in range(25):
        made = decoder.generate(["the cat"] * 40, "exact", guide=guide, max_new_tokens=6, seed=seed, **options)
        counts.update(made.texts)
        count += len(made.texts)
    distance = sum(abs(counts[text] / count - chance) for text, chance in law.items()) / 2
    assert set(counts) <= set(law) and distance < 0.05  # of 1,000 samples of six answers 0.03 on average


def test_what_cannot_be_followed_is_said(decoder: FuzzyDecoder) -> None:
    for make, text, message in (
        (Guide.json_schema, "{", "the schema is no JSON"),
        (Guide.json_schema, '{"type": "x"}', "the schema cannot be followed"),
        (Guide.regex, "(", "the regular expression cannot be followed"),
        (Guide.lark, "start: nothing", "the grammar cannot be followed"),
        (Guide.regex, "a" * (1 << 21), "give a shorter one"),
    ):
        with pytest.raises(FsdError, match=re.escape(message)):
            make(text)
    with pytest.raises(FsdError, match="give one of the two"):
        decoder.generate("the cat", schema=SCHEMA, guide=Guide.regex("a"), max_new_tokens=4)
    with pytest.raises(FsdError, match="num_beams|eos_token_id|fast tokenizer"):
        decoder.generate("the cat", schema=SCHEMA, eos_token_id=[], max_new_tokens=4)


def test_the_server_follows_schemas(decoder: FuzzyDecoder) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    body = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 40, "temperature": 0}
    with TestClient(make_app(decoder)) as client:
        for fields in ({"response_format": format}, {"guided_json": SCHEMA}):
            reply = client.post("/v1/chat/completions", json={**body, **fields}).json()
            text = reply["choices"][0]["message"]["content"]
            assert text == decoder.generate("the cat", schema=SCHEMA, max_new_tokens=40, temperature=0).texts[0]
        found = client.post("/v1/chat/completions", json={**body, "guided_regex": "(ab)+c"}).json()["choices"][0]
        assert re.fullmatch("(ab)+c?|(ab)*a", found["message"]["content"])
