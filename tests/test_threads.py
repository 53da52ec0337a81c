"""Requests side by side: threads that share a decoder, and prompts that begin like earlier texts; answers as alone."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer

import fsd_infer
from fsd_infer import Drafter, FsdError, FuzzyDecoder, Target
from fsd_infer.device.lock import RequestLock
from fsd_infer.drafters import NoDrafter
from fsd_infer.targets.prefixes import MIN_TOKENS, Prefix, PrefixCache
from tests.families import drafter_of, tiny_head, tiny_model, tiny_prompts
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
    names = ["none", "head", "lookup", "forgetful", "lm", "head+lookup"]
    made = {name: drafter_of(name, decoder.target) for name in names}
    return {**made, "fused": drafter_of("fused", decoder.target, draft_vocab_size=50)}


def answer(decoder: FuzzyDecoder, drafter: Drafter, case: tuple[Any, ...], stream: bool = False) -> Any:
    """Tokens and text of (seed, (prompt, rule, temperature)); the text is the streamed one with ``stream``."""
    seed, (prompt, rule, temperature) = case
    streamer: Any = TextIteratorStreamer(decoder.tokenizer, skip_prompt=True, skip_special_tokens=True)
    made = decoder.generate(
        prompt, rule=rule, drafter=drafter, seed=seed, streamer=streamer if stream else None, max_new_tokens=6,
        do_sample=temperature > 0, temperature=temperature,
    )  # fmt: skip
    return made.sequences[0], "".join(streamer) if stream else made.texts[0]


def test_answers_do_not_depend_on_who_else_asks(decoder: FuzzyDecoder, drafters: dict[str, Drafter]) -> None:
    prompts = ["the cat sat on the mat the cat sat", [5, 6, 7, 5, 6]]
    cases = list(enumerate(itertools.product(prompts, RULES, (0.0, 0.9))))
    drawn = [(drafter, case) for drafter in drafters.values() for case in random.Random(0).sample(cases, 3)]
    asked = [(*one, stream) for one in drawn for stream in (False, True)]
    alone = [answer(decoder, *one) for one in drawn]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda one: answer(decoder, *one), asked))
    assert found[::2] == found[1::2] == alone


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks() -> None:
    lock = RequestLock()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lock.__enter__).result()
    process = multiprocessing.get_context("fork").Process(target=lock.__enter__, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_threads_share_a_model_through_the_hook() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 5, 6]])
    options: dict[str, Any] = dict(max_new_tokens=20, do_sample=False)
    hook: dict[str, Any] = dict(custom_generate=fsd_infer.generate, drafter="lookup", rule="exact")
    expected = model.generate(ids, **options)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: model.generate(ids, **hook, **options), range(8)):
            assert torch.equal(found, expected)


FAMILIES = ["gemma3_text", "gpt2"]  # layers with sliding windows beside whole ones, and learned positions


def decoder_of(family: str, prefixes: PrefixCache | None) -> FuzzyDecoder:
    target = Target(tiny_model(family))
    target.prefixes = prefixes
    return FuzzyDecoder(target, tiny_head(target, draft_vocab_size=64))


def turns(decoder: FuzzyDecoder, **options: Any) -> tuple[list[list[list[int]]], list[int], list[float]]:
    """Three turns of two chats, batched, and a fourth of one alone: (answers, known tokens, accepted lengths)."""
    texts, answers, known, taus = tiny_prompts((24, 19)), [], [], []
    for turn in range(4):
        asked = texts if turn < 3 else texts[:1]
        out = decoder.generate(asked, max_new_tokens=10 + turn, **options)
        answers.append(out.sequences)
        known.append(out.stats.total_cached_tokens)
        taus.append(out.stats.acceptance_length)
        texts = [text + answer + [5 + turn, 7, 11] for text, answer in zip(texts, out.sequences)]
    return answers, known, taus


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_a_chat_are_answered_as_without(family: str) -> None:
    plain, none, taus = turns(decoder_of(family, None), do_sample=False)
    kept, known, others = turns(decoder_of(family, PrefixCache(1 << 30)), do_sample=False)
    assert kept == plain and others == taus, "drafts, too, are the same"
    # the last texts but for what was added, and perhaps the answers' last tokens, which the target need not have read
    least = [0, 24 + 19 + 2 * 9, 24 + 19 + 2 * (10 + 3 + 10), 24 + 10 + 3 + 11 + 3 + 11]
    assert none == [0] * 4 and all(0 <= new - old <= 2 for new, old in zip(known, least))


def text_of(tokens: list[int], width: int = 4) -> Prefix:
    return Prefix(
        torch.tensor(tokens), {"keys": torch.zeros(1, 1, len(tokens), width)}, torch.zeros(len(tokens), 1), ()
    )


def test_memory_is_bounded_and_what_was_used_last_stays() -> None:
    first, second, third = (text_of([start] * MIN_TOKENS) for start in (1, 2, 3))
    cache = PrefixCache(2 * first.nbytes)
    for text in (first, second):
        cache.store(text)
    assert cache.find([1] * 50, ()) is not None
    cache.store(third)
    assert cache.texts == [first, third] and cache.nbytes <= cache.max_bytes
    cache.store(text_of([1] * 30))  # in place of what it begins with, and the other no longer fits
    assert [len(text.tokens) for text in cache.texts] == [30]
    cache.store(text_of([4] * 100))
    assert [len(text.tokens) for text in cache.texts] == [30], "what does not fit is not kept"
    assert cache.find([1] * 20, ()).tokens.tolist() == [1] * 19, "the last token's logits are wanted"
    assert cache.find([1] * MIN_TOKENS, ()) is None and cache.find([7], ()) is None


@pytest.mark.parametrize("bound", [0, -1, True, 2.5, "1 GB"])
def test_bounds_that_are_none(bound: object) -> None:
    with pytest.raises(FsdError, match="prefix cache needs a whole number of bytes"):
        FuzzyDecoder.from_pretrained("smollm2-135m", prefix_cache_bytes=bound)  # type: ignore[arg-type]


def test_keys_share_nothing() -> None:
    """A text is read from the cache by requests of its own key alone; answers are the same with and without."""
    decoder = decoder_of("llama", PrefixCache(1 << 24))
    prompt = list(range(3, 40))

    def known(keys: list[str] | None) -> int:
        made = decoder.generate([prompt], max_new_tokens=4, temperature=0, users=keys)
        answers.append(made.sequences)
        return made.stats.total_cached_tokens

    answers: list[list[list[int]]] = []
    assert [known(keys) for keys in (["me"], ["you"], None)] == [0, 0, 0]
    assert min(known(keys) for keys in (["me"], ["you"], None)) == len(prompt) - 1
    assert all(answer == answers[0] for answer in answers)
    seeded = decoder.generate([prompt], max_new_tokens=4, temperature=1.0, seed=1)
    assert seeded.stats.total_cached_tokens == 0, "it comes again to the last bit"
    with pytest.raises(FsdError, match="users is a list of texts"):
        known(["me", "you"])
