"""Texts, bytes and stop texts of answers as they grow, and what requests make of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from fsd_core.text.control import encode_with_offsets, escaped, set_control_tokens
from fsd_core.text.encoding import encode_chat, special_ids
from fsd_core.text.masks import encode_conversation
from fsd_core.text.pieces import Pieces, TokenBytes, token_pieces
from fsd_infer import FuzzyDecoder
from fsd_infer.serving.app import make_app
from fsd_infer.serving.text import AnswerText
from tests.bench_toys import Toy
from tests.serve_toys import CHAT, COMPLETIONS, LIMITS, asked, events
from tests.text_toys import CHATML, tiny_sentencepiece, tiny_tokenizer

EMOJI = "the \U0001f642\u6f22 d\u00e9j\u00e0 \U0001f642\U0001f642 end"


def sentencepiece() -> Any:
    made = tiny_sentencepiece()
    made.chat_template = CHATML.replace("<|start|>", "<s>").replace("<|end|>", "</s>")
    return made


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tiny_tokenizer() if request.param == "bytes" else sentencepiece()


def test_pieces_and_bytes_joined_are_the_text(tokenizer: Any) -> None:
    """Also in a text longer than what is decoded together, and with special tokens in it."""
    ids = tokenizer(" ".join([EMOJI] * 9), add_special_tokens=False)["input_ids"]
    ids = [*ids[:30], tokenizer.eos_token_id, *ids[30:]]
    text, pieces, seen = tokenizer.decode(ids, skip_special_tokens=True), Pieces(tokenizer), []
    for token in ids:
        seen.append(pieces.of(token))
        assert pieces.add(token) == seen[-1].text
        assert text.startswith(pieces.text) and "\ufffd" not in pieces.text
    assert pieces.text == text == "".join(token_pieces(tokenizer, ids))
    assert b"".join(piece.raw for piece in seen) == text.encode()
    assert [piece.name for piece in seen if piece.token == tokenizer.eos_token_id] == [tokenizer.eos_token]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"j\xd2\xbf\x99A", "j\u04bf\ufffdA"),  # a byte that is no text replaces nothing that was text
        (b"\xf0\x9fA\xf0\x9f\x99\x82", "\ufffdA\U0001f642"),
        (b"a\xe2\xf0\x9f", "a\ufffd\ufffd"),  # a token ends one and begins another, which the answer leaves incomplete
    ],
)
def test_bytes_that_are_no_text(tokenizer: Any, raw: bytes, text: str) -> None:
    named = TokenBytes(tokenizer)
    ids = [next(token for token in range(len(tokenizer)) if named(token) == bytes([byte])) for byte in raw]
    pieces, answer = Pieces(tokenizer), AnswerText(tokenizer)
    for count, token in enumerate(ids, start=1):
        assert pieces.of(token).raw == raw[count - 1 : count]
        pieces.add(token)
        answer.add(token)
        told = answer.tokens_within(len(answer.text))
        assert text.startswith(answer.text) and raw[:told].decode(errors="replace") == answer.text
    answer.end()
    assert answer.text == text and pieces.text + pieces.rest() == text


@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        (["\ufffd"], EMOJI),  # half a character is no text
        (["\u6f22"], "the \U0001f642"),
        (["x", "j\u00e0 \U0001f642", "d\u00e9j\u00e0 y"], "the \U0001f642\u6f22 d\u00e9"),
        ([" end of it"], EMOJI),  # held back until the answer is over
        (["he \U0001f642", "the"], ""),  # the first that is complete
    ],
)
def test_stop_texts_are_found_at_their_last_token(tokenizer: Any, stops: list[str], kept: str) -> None:
    ids = tokenizer(EMOJI, add_special_tokens=False)["input_ids"]
    answer, pieces, stopped = AnswerText(tokenizer, stops), Pieces(tokenizer), False
    for token in ids:
        pieces.add(token)
        stopped = answer.add(token)
        assert kept.startswith(answer.text)
        assert stopped == any(stop in pieces.text for stop in stops)
        if stopped:
            break
    answer.end()
    assert answer.text == kept and stopped == (kept != EMOJI)


def test_special_tokens_stop_by_their_names(tokenizer: Any) -> None:
    """As tokens, which are no text, and in the model's own words; a part of a name stops nothing."""
    eos = tokenizer.eos_token
    words = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    spelt = tokenizer("the" + eos, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.eos_token_id not in spelt
    for ids, stops, kept in (
        ([*words, tokenizer.eos_token_id, *words], [eos], "the cat"),
        ([*words, tokenizer.eos_token_id, *words], [f"at{eos}"], "the c"),
        (spelt, [eos], "the"),
        ([*words, tokenizer.bos_token_id, *words], [eos, eos[1:-1] + "x"], None),
    ):
        answer = AnswerText(tokenizer, stops)
        count = next((place + 1 for place, token in enumerate(ids) if answer.add(token)), None)
        answer.end()
        wanted = tokenizer.decode(ids, skip_special_tokens=True) if kept is None else kept
        assert answer.text == wanted and (count is None) == (kept is None)


# served -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["none", "lookup", "head"])
def served(request: pytest.FixtureRequest, toy: Toy) -> Iterator[Any]:
    """A client of a server with one of several drafters, whose rounds end at other tokens."""
    drafter = str(toy.drafter) if request.param == "head" else request.param
    decoder = FuzzyDecoder.from_pretrained(str(toy.target), drafter, device="cpu", dtype="fp32")
    with TestClient(make_app(decoder, "exact", LIMITS)) as client:
        client.decoder = decoder
        yield client


FORCED = "the cat sat on the mat the cat sat"  # with which lookup drafts


@pytest.mark.parametrize(
    ("stop", "kept"), [("cat", "the "), (["at o", "zzz"], "the cat s"), ("mat t", "the cat sat on the ")]
)
def test_an_answer_ends_with_the_token_that_completes_its_stop(served: Any, stop: Any, kept: str) -> None:
    """Usage and log-probabilities too, for each of several answers, streamed and whole."""
    stops = [stop] if isinstance(stop, str) else stop
    base = {"guided_regex": FORCED, "stop": stop, "n": 2, "max_tokens": 60, "temperature": 0}
    for path, fields in ((CHAT, asked(logprobs=True, **base)), (COMPLETIONS, {"prompt": "the", "logprobs": 1, **base})):
        reply = served.post(path, json=fields).json()
        streamed: list[list[Any]] = [["", []], ["", []]]
        for part in events(served, path, fields):
            text, found = _text_and_tokens(part)
            streamed[part["index"]][0] += text
            streamed[part["index"]][1] += found
        total = 0
        for choice in reply["choices"]:
            text, tokens = _text_and_tokens(choice)
            assert (text, choice["finish_reason"]) == (kept, "stop")
            said = "".join(tokens)
            assert any(stop in said for stop in stops) and not any(stop in "".join(tokens[:-1]) for stop in stops)
            assert streamed[choice["index"]] == [text, tokens]
            total += len(tokens)
        assert reply["usage"]["completion_tokens"] == total


def _text_and_tokens(choice: dict[str, Any]) -> tuple[str, list[str]]:
    said = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
    found = choice["logprobs"]
    return said, found["tokens"] if "tokens" in found else [each["token"] for each in found["content"]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bytes_and_reasons_of_an_answer_that_fills_its_limit(served: Any, path: str) -> None:
    """The last allowed token is the end token, one less than that is too few."""
    text = "\U0001f642\u6f22"
    fields: dict[str, Any] = {"guided_regex": text, "temperature": 0}
    fields |= {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1, "prompt": "the"}
    body = asked(**fields) if path == CHAT else fields
    count = len(served.decoder.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1
    for limit, reason in ((count, "stop"), (count - 1, "length"), (1, "length")):
        whole = served.post(path, json={**body, "max_tokens": limit}).json()
        parts = events(served, path, {**body, "max_tokens": limit})
        assert whole["choices"][0]["finish_reason"] == parts[-1]["finish_reason"] == reason
        assert whole["usage"]["completion_tokens"] == limit
        if path == CHAT:
            for choices in (whole["choices"], parts):
                raw = [each["bytes"] for part in choices for each in part["logprobs"]["content"]]
                assert len(raw) == limit and bytes(sum(raw, [])) == text.encode()[: limit if limit < count else None]
            continue
        choice = whole["choices"][0]
        found = choice["logprobs"]
        tokens = found["tokens"][: limit if reason == "length" else -1]
        assert "".join(tokens) == choice["text"] and len(found["top_logprobs"]) == limit
        ends = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
        assert found["text_offset"][: len(ends)] == ends
        assert all(token in best for token, best in zip(found["tokens"], found["top_logprobs"]))


def test_what_is_no_json_is_refused_and_white_space_is_a_prompt(served: Any) -> None:
    for text in ("\n", "  "):
        assert served.post(COMPLETIONS, json={"prompt": text, "max_tokens": 2}).status_code == 200
        assert served.post(CHAT, json=asked(text, max_tokens=2)).status_code == 200
    for fields in ({"temperature": float("nan")}, {"guided_json": {"const": float("inf")}}, {"stop": "\ud800"}):
        found = served.post(CHAT, content=json.dumps(asked(**fields)), headers={"Content-Type": "application/json"})
        assert found.status_code == 400, fields


# control tokens in messages -------------------------------------------------------------------------------------------


MARKED = (  # without any of them
    "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '\n' }}"
    "{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
)


def test_messages_hold_no_control_tokens_unless_allowed(tokenizer: Any) -> None:
    specials = special_ids(tokenizer)
    names = [tokenizer.eos_token, tokenizer.bos_token]
    content = f"a{names[0]} the {names[1]}{names[0]} \u00e9\uf8fe\U000f0000{names[1]}"

    def count(turns: list[dict[str, Any]], **options: Any) -> int:
        return sum(token in specials for token in encode_chat(tokenizer, turns, **options))

    def turns(text: str) -> list[dict[str, Any]]:
        return [{"role": role, "content": text} for role in ("system", "user", "assistant", "user")]

    assert count(turns(content)) == count(turns("the"))
    assert content in tokenizer.decode(encode_chat(tokenizer, turns(content)))
    template = tokenizer.chat_template
    for tokenizer.chat_template in (template, MARKED):
        ((ids, mask),) = encode_conversation(tokenizer, turns(content)[:3])
        assert sum(mask) and content in tokenizer.decode([token for token, kept in zip(ids, mask) if kept])
    assert not special_ids(tokenizer) & set(ids)
    tokenizer.chat_template = template
    assert names[0] not in str(escaped(tokenizer, {"properties": {names[0]: [names[0]]}})), "names of fields too"
    shown = escaped(tokenizer, content)
    ids, offsets = encode_with_offsets(tokenizer, shown)
    assert not specials & set(ids) and all(a <= b <= len(shown) for a, b in offsets)
    assert [a for a, _ in offsets] == sorted(a for a, _ in offsets) and offsets[-1][1] == len(shown)
    set_control_tokens(tokenizer, True)
    assert count(turns(content)) == count(turns("the")) + 16
    set_control_tokens(tokenizer, False)
    assert count(turns(content)) == count(turns("the"))
    tokenizer.chat_template = None
    assert not specials & set(encode_chat(tokenizer, turns(content)[1:2])[1:])
    tokenizer.chat_template = template
