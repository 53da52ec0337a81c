"""Structured output: exact under the masked target, forced tokens drafted, answers valid for public schemas."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from fsd_infer import FsdError, FuzzyDecoder, TreeShape
from fsd_infer.request import grammars
from fsd_infer.request.guide import Guide, GuideProcessor
from fsd_infer.serving.app import make_app

CHAINS: list[tuple[Callable[[Any], Guide], Callable[[int], Any]]] = [  # rules or references that follow each other
    (Guide.lark, lambda n: "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(n)) + f'r{n}: "a"'),
    (Guide.lark, lambda n: "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} "b"\n' for i in range(n)) + f'r{n}: "c"'),
    (Guide.json_schema, lambda n: references(n, lambda to: {"$ref": to})),
    (Guide.json_schema, lambda n: references(n, lambda to: {"anyOf": [{"$ref": to}, {"type": "null"}]})),
    (Guide.json_schema, lambda n: references(n, lambda to: {"type": "array", "items": {"$ref": to}})),
    (Guide.json_schema, lambda n: references(n, lambda to: {"allOf": [{"$ref": to}, {"minItems": 1}]})),
]


def references(count: int, link: Callable[[str], Any]) -> dict[str, Any]:
    """A schema of ``count`` definitions, each of which refers to the next one."""
    made = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**made, f"d{count}": {"type": "array", "items": {"type": "boolean"}}}}


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "n"], "additionalProperties": False,
}  # fmt: skip
FORCED = "(a|b) cat sat (d|e)on the mat"
TEXTS = ["the cat", "the cat sat on the mat", "it is there"]


@pytest.fixture(scope="module")
def decoder(toy: Any, toy_decoder: FuzzyDecoder) -> FuzzyDecoder:
    """With a tree of its own: `auto` may draft nothing for models as small as these."""
    return FuzzyDecoder(toy_decoder.target, toy_decoder.load_drafter(str(toy.drafter), TreeShape(4, 3, 9)))


class Masks:
    """The tokens that a grammar allows after a text, by a matcher that reads the whole text."""

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


def slow_answer(decoder: FuzzyDecoder, guide: Guide, text: str, most: int) -> list[int]:
    """The masked target's greedy answer, token by token."""
    masks, model = Masks(decoder, guide), decoder.target.model
    prompt, answer = decoder.encode(text), list[int]()
    while len(answer) < most and (not answer or answer[-1] != masks.eos):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, -1]
        allowed = masks.allowed(answer)
        answer.append(allowed[int(logits[allowed].argmax())])
    return answer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "rule", ["tilted:0.2:exact_ngram_size=0:min_p=0", "typical", "fuzzy:js:0.5", "random:0.5", "relaxed"]
)
def test_no_rule_leaves_the_grammar(decoder: FuzzyDecoder, rule: str, temperature: float) -> None:
    masks = Masks(decoder, Guide.json_schema(SCHEMA))
    sampling = {"temperature": 0.0} if temperature == 0 else {"do_sample": True, "temperature": 1.0, "top_k": None}
    found = decoder.generate(TEXTS, rule, schema=SCHEMA, max_new_tokens=40, seed=1, **sampling)
    for answer, text, stats in zip(found.sequences, found.texts, found.stats.rows, strict=True):
        masks.check(answer)
        if stats.finish_reason == "stop":
            assert set(json.loads(text)) == {"a", "n"}


@pytest.mark.usefixtures("read_together")
@pytest.mark.parametrize(("pattern", "name"), [("(a|b|c)(d|e)", "head"), (FORCED, "small LM")])
def test_samples_have_the_distribution_of_the_masked_target(
    decoder: FuzzyDecoder, toy: Any, pattern: str, name: str
) -> None:
    """Exact decoding against enumeration over all answers of a small grammar, token by token, forced ones too."""
    guide = Guide.regex(pattern)
    masks, model = Masks(decoder, guide), decoder.target.model
    prompt, distribution, open_ = decoder.encode("the cat"), defaultdict[str, float](float), {(): 1.0}
    while open_:
        answer, chance = open_.popitem()
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + list(answer)])).logits[0, -1].float()
        allowed = masks.allowed(list(answer))
        for token, p in zip(allowed, logits[allowed].softmax(-1).tolist(), strict=True):
            if token == masks.eos:
                distribution[decoder.tokenizer.decode(list(answer))] += chance * p
            else:
                open_[(*answer, token)] = chance * p
    assert sum(distribution.values()) == pytest.approx(1.0) and len(distribution) == (6 if "c)" in pattern else 4)
    count, counts = 0, Counter[str]()
    drafter = decoder.drafter if name == "head" else decoder.load_drafter(str(toy.target))
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": None, "top_p": None, "drafter": drafter}
    for seed in range(5):
        made = decoder.generate(["the cat"] * 200, "exact", guide=guide, max_new_tokens=40, seed=seed, **options)
        counts.update(made.texts)
        count += len(made.texts)
    distance = sum(abs(counts[text] / count - chance) for text, chance in distribution.items()) / 2
    assert set(counts) <= set(distribution) and distance < 0.05  # of 1,000 samples of six answers 0.03 on average


@pytest.fixture(scope="module")
def forced(decoder: FuzzyDecoder) -> tuple[Guide, list[list[int]]]:
    """A schema whose two texts are free, and all between them is forced; the masked target's answers."""
    free = {"the cat sat": {"enum": ["x", "yy"]}, "what is the answer": {"enum": [True, None]}}
    guide = Guide.json_schema({**SCHEMA, "properties": free, "required": list(free)})
    return guide, [slow_answer(decoder, guide, text, 60) for text in TEXTS]


@pytest.mark.parametrize("name", ["head", "lookup", "none", "lookup+recycle", "small LM", "auto"])
def test_forced_tokens_are_drafted(
    decoder: FuzzyDecoder, toy: Any, forced: tuple[Guide, list[list[int]]], name: str
) -> None:
    """Few forwards, and the tokens of a decoder without drafts."""
    guide, plain = forced
    own = {"head": decoder.drafter, "auto": decoder.load_drafter(str(toy.drafter), "auto")}
    own["small LM"] = decoder.load_drafter(str(toy.target))
    drafter = own.get(name) or decoder.load_drafter(name)
    options: dict[str, Any] = {"guide": guide, "max_new_tokens": 60, "temperature": 0, "drafter": drafter}
    for prompts in (TEXTS, TEXTS[:1]):
        found = decoder.generate(prompts, "exact", **options)
        assert found.sequences == plain[: len(prompts)]
        for answer, record, stats in zip(found.sequences, found.records, found.stats.rows, strict=True):
            guides = len(drafter.proposers)
            drafted = sum(emission.proposer == guides for emission in record.emissions)
            assert drafted > len(answer) // 2 and stats.target_forwards < len(answer) // 2


LOOP = {"type": "array", "items": {"$ref": "#/$defs/loop"}, "minItems": 1}


def nested(start: str, end: str, levels: int) -> str:
    return start * levels + "{}" + end * levels


def test_what_cannot_be_followed_is_said(decoder: FuzzyDecoder) -> None:
    """Grammars that would end the process by a stack overflow, or that no text ends, are among them."""
    for make, text, message in (
        (Guide.json_schema, "{", "the schema is not JSON"),
        (Guide.json_schema, '{"type": "x"}', "the schema cannot be followed"),
        (Guide.regex, "(", "the regular expression cannot be followed"),
        (Guide.regex, "a(?=b)", "look-ahead and look-behind, is not supported"),
        (Guide.regex, re.compile("a"), "a regular expression is text, got Pattern"),
        (Guide.regex, "a" * (1 << 21), "give a shorter one"),
        *((make, chain(12_000), "Up to 1,000 rules or references") for make, chain in CHAINS[:4]),
        (Guide.json_schema, nested('{"items": ', "}", 50_000), "more than 127 levels deep"),
        (Guide.json_schema, nested('{"allOf": [', "]}", 200), "more than 127 levels deep"),
        (Guide.lark, "start: %json " + nested('{"anyOf": [', "]}", 200), "more than 127 levels deep"),
        (Guide.lark, f"start: {'(' * 9000}'a'{')' * 9000}", "the grammar cannot be followed"),
        (Guide.regex, f"{'(' * 9000}a{')' * 9000}", "the regular expression cannot be followed"),
        (Guide.lark, "start: start", "no text can end start"),
        (Guide.lark, 'start: "a" loop | "b"\nloop: "c" loop', "no text can end loop"),
        (Guide.lark, 'start: a\na: b "x"\nb: a "y"', "which always needs itself again"),
        (Guide.lark, "start: /a/ A\nA: /b/ & /c/", "no answer can begin: no token may follow"),
        (Guide.json_schema, {"$defs": {"loop": LOOP}, "$ref": "#/$defs/loop"}, "no text can end #/$defs/loop"),
        (Guide.json_schema, {"$defs": {"loop": LOOP}, "anyOf": [LOOP, {"type": "null"}]}, "#/$defs/loop"),
        (Guide.json_schema, {"properties": {"a": object()}}, "the schema is not JSON"),
        (Guide.json_schema, {"const": "\ud800"}, "the schema cannot be followed"),
        (Guide.lark, 'start: "\ud800"', "the grammar: character 9 is half of a surrogate pair"),
        (Guide.json_schema, {"minimum": 10**400}, "number out of range"),
    ):
        with pytest.raises(FsdError, match=re.escape(message)):
            make(text)
    with pytest.raises(FsdError, match="give one of the two"):
        decoder.generate("the cat", schema=SCHEMA, guide=Guide.regex("a"), max_new_tokens=4)
    with pytest.raises(FsdError, match="num_beams|eos_token_id|fast tokenizer"):
        decoder.generate("the cat", schema=SCHEMA, eos_token_id=[], max_new_tokens=4)


@pytest.mark.parametrize(("make", "chain"), CHAINS)
def test_a_thousand_references_are_followed(decoder: FuzzyDecoder, make: Any, chain: Callable[[int], Any]) -> None:
    guide = make(chain(1000))
    found = decoder.generate("the cat", guide=guide, max_new_tokens=3, temperature=0)
    Masks(decoder, guide).check(found.sequences[0])


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "SECONDS", 0.2)
    with pytest.raises(FsdError, match="takes more than 0.2 seconds: give a simpler one"):
        Guide.json_schema({"type": "integer", "multipleOf": 100_000_007})
    monkeypatch.undo()
    assert Guide.regex("after that").grammar


def test_answers_stay_within_large_guides(decoder: FuzzyDecoder) -> None:
    """llguidance's own bounds make its matcher fail on the first two; its masks then allow every token."""
    properties = {f"p{i}": {"type": "boolean"} for i in range(600)}
    words = [f"{i:04}" for i in range(2000)]
    options = {"do_sample": True, "temperature": 1.0, "top_k": None, "max_new_tokens": 24, "seed": 1}
    closing = [Closing(decoder.tokenizer)]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    text = decoder.generate("the cat", schema=schema, logits_processor=closing, **options).texts[0]
    assert re.fullmatch(r'\{("p\d+": (true|false)(, )?)*\}?|\{.*', text) and json.loads(text) is not None
    guide = Guide.lark("start: " + " | ".join(f"r{word}" for word in words) + "".join(f'\nr{w}: "{w}"' for w in words))
    assert decoder.generate("the cat", guide=guide, **options).texts[0] in words
    text = decoder.generate("the cat", guide=Guide.lark('start: ("a"){50000}'), **options).texts[0]
    assert set(text) == {"a"}


@pytest.mark.parametrize("name", ["none", "lookup", "head"])
def test_an_answer_that_cannot_go_on_ends_in_an_error(decoder: FuzzyDecoder, name: str) -> None:
    """After "the" the grammar allows nothing more, which shows only there. Drafts that go there change nothing."""
    guide = Guide.lark('start: "the" NONE | "cat sat on the mat"\nNONE: /a/ & /b/')
    drafter = decoder.drafter if name == "head" else decoder.load_drafter(name)
    texts = []
    for word in ("the", "cat"):
        with suppress(FsdError):
            liking = [Liking(decoder.tokenizer, word)]
            options = {"max_new_tokens": 20, "temperature": 0, "drafter": drafter, "logits_processor": liking}
            texts += decoder.generate("the the the cat", guide=guide, **options).texts
    assert texts == ["cat sat on the mat"]
    follower = GuideProcessor(guide, decoder.tokenizer, decoder.target.vocab_size, frozenset([1]), 0).follower(0)
    the, cat = (decoder.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("the", "cat"))
    before = follower.masks([], [0, the, cat], [0, 0, 0])
    assert (follower.masks([], [0, cat], [0, 0]) == before[[0, 2]]).all()
    with pytest.raises(FsdError, match="the guide cannot go on after this text: no token may follow"):
        follower.masks([the], [0], [0])
    with pytest.raises(FsdError, match="the answer leaves the guide"):
        follower.check([cat, cat])
    with pytest.raises(FsdError, match="the answer ends where the guide does not"):
        follower.check([cat, 1])


class Liking:
    """A logits processor that favours tokens which begin a word."""

    def __init__(self, tokenizer: Any, word: str) -> None:
        starts = {word[:length] for length in (1, 2, 3)}
        self.liked = torch.tensor([i for i in range(len(tokenizer)) if tokenizer.decode([i]) in starts])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_add(1, self.liked, torch.full((len(scores), len(self.liked)), 50.0))


@pytest.fixture(scope="module")
def suite() -> tuple[list[Any], list[Any]]:
    """Schemas that the guide supports, and others."""
    lines = (Path(__file__).parent / "data" / "json_schemas.jsonl").read_text(encoding="utf-8").splitlines()
    found: tuple[list[Any], list[Any]] = ([], [])
    for line in lines:
        schema = json.loads(line)["schema"]
        try:
            Guide.json_schema(json.dumps(schema))
        except FsdError as error:
            assert str(error).startswith("the schema cannot be followed: ") and "\n" not in str(error)
            found[1].append(schema)
        else:
            found[0].append(schema)
    return found


class Closing:
    """A logits processor that favours tokens by which JSON values and texts end. Toys write without end."""

    def __init__(self, tokenizer: Any) -> None:
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        ends = [place for place, piece in enumerate(pieces) if piece and piece[0] in '"}]']
        self.liked = torch.tensor([*ends, tokenizer.eos_token_id])  # a number ends with the text only

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_add(1, self.liked, torch.full((len(scores), len(self.liked)), 6.0))


def valid(answer: str, schema: Any) -> bool:
    """Parse an answer and, where jsonschema is installed, validate it. Python lacks some schemas' patterns."""
    value = json.loads(answer)
    with suppress(ImportError, re.error):
        from jsonschema import Draft202012Validator, validators

        return validators.validator_for(schema, Draft202012Validator)(schema).is_valid(value)
    return True


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_of_public_schemas_parse(
    toy_decoder: FuzzyDecoder, suite: tuple[list[Any], list[Any]], count: int
) -> None:
    """The slow one takes 200."""
    supported = suite[0]
    assert len(supported) >= 200
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": None, "max_new_tokens": 160}
    closing, ended = [Closing(toy_decoder.tokenizer)], 0
    for place in range(count):
        schema = supported[place * 200 // count]
        guide = Guide.json_schema(json.dumps(schema))
        made = toy_decoder.generate("the cat", guide=guide, seed=place, logits_processor=list(closing), **options)
        if made.stats.rows[0].finish_reason == "stop":
            ended += 1
            assert valid(made.texts[0], schema), schema
    assert ended >= 0.95 * count


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
