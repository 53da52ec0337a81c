"""One decoder, many threads: every answer is the one given alone."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer

import fsd_infer
from fsd_infer import Drafter, FuzzyDecoder, LMDrafter, NoDrafter, Target
from fsd_infer.drafters.graft import GraftedDrafter
from fsd_infer.drafters.memory import LookupDrafter
from fsd_infer.drafters.recycle import RecycleDrafter
from tests.families import tiny_head, tiny_model
from tests.text_toys import tiny_tokenizer

RULES = ["exact", "fuzzy:js:0.3", "fuzzy:js:0.3:budget=2", "fuzzy-strict:tv:0.2", "random:0.3", "draft-only"]


@pytest.fixture(scope="module")
def decoder() -> FuzzyDecoder:
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
    return FuzzyDecoder(target, NoDrafter(target.vocab_size))


@pytest.fixture(scope="module")
def drafters(decoder: FuzzyDecoder) -> dict[str, Drafter]:
    """One of each kind; heads that read different layers of the target, one of them over a part of the vocabulary."""
    target = decoder.target
    small = Target(tiny_model("llama", seed=1, vocab_size=target.vocab_size), target.tokenizer)
    lookup, whole = LookupDrafter(target.vocab_size), tiny_head(target)
    made: list[Drafter] = [
        *(NoDrafter(target.vocab_size), whole, lookup, RecycleDrafter(target.vocab_size, keep=False)),
        *(LMDrafter(small, target), GraftedDrafter(whole, lookup)),
    ]
    fused = tiny_head(target, draft_vocab_size=50, fused_layers=[0, 1])
    return {**{drafter.name: drafter for drafter in made}, "fused": fused}


def answer(decoder: FuzzyDecoder, drafter: Drafter, case: tuple[Any, ...], stream: bool = False) -> Any:
    """Tokens and text of (seed, (prompt, rule, temperature)); the text is the streamed one with ``stream``."""
    seed, (prompt, rule, temperature) = case
    streamer: Any = TextIteratorStreamer(decoder.tokenizer, skip_prompt=True, skip_special_tokens=True)
    made = decoder.generate(
        prompt, rule, drafter=drafter, seed=seed, streamer=streamer if stream else None, max_new_tokens=6,
        do_sample=temperature > 0, temperature=temperature,
    )  # fmt: skip
    return made.sequences[0], "".join(streamer) if stream else made.texts[0]


def test_answers_do_not_depend_on_who_else_asks(decoder: FuzzyDecoder, drafters: dict[str, Drafter]) -> None:
    prompts = ["the cat sat on the mat the cat sat", [5, 6, 7, 5, 6]]
    cases = list(enumerate(itertools.product(prompts, RULES, (0.0, 0.9))))
    drawn = [(drafter, case) for drafter in drafters.values() for case in random.Random(0).sample(cases, 5)]
    asked = [(*one, stream) for one in drawn for stream in (False, True)]
    alone = [answer(decoder, *one) for one in drawn]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda one: answer(decoder, *one), asked))
    assert found[::2] == found[1::2] == alone


def in_threads(count: int, ask: Callable[[], Any], meanwhile: Callable[[], Any] = lambda: None) -> list[Any]:
    """What so many threads get, as something else happens."""
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(ask())) for _ in range(count)]
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join()
    assert len(found) == count
    return found


def test_threads_share_a_model_through_the_hook() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 5, 6]])
    options: dict[str, Any] = dict(max_new_tokens=20, do_sample=False)
    hook: dict[str, Any] = dict(custom_generate=fsd_infer.generate, drafter="lookup", rule="exact")
    expected = model.generate(ids, **options)
    for found in in_threads(8, lambda: model.generate(ids, **hook, **options)):
        assert torch.equal(found, expected)
