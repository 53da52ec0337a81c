"""One decoder, many threads: every answer is the one given alone."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsd_infer
from fsd_infer import Drafter, FuzzyDecoder, LMDrafter, NoDrafter, Target
from fsd_infer.drafters.graft import GraftedDrafter
from fsd_infer.drafters.lookup import LookupDrafter
from fsd_infer.drafters.recycle import RecycleDrafter
from scripts.check_threads import RULES, all_cases, compare
from tests.families import tiny_head, tiny_model
from tests.text_toys import tiny_tokenizer


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


def test_answers_do_not_depend_on_who_else_asks(decoder: FuzzyDecoder, drafters: dict[str, Drafter]) -> None:
    prompts = ["the cat sat on the mat the cat sat", [5, 6, 7, 5, 6]]
    cases = all_cases(prompts, RULES, list(drafters), max_new_tokens=6)
    found = compare(decoder, drafters, cases, threads=8, seconds=0)
    assert found["errors"] == [] and found["different"] == 0
    assert found["answers"] == 32 and 0 < found["streamed"] < 32


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


def test_a_drafter_is_loaded_while_others_decode(decoder: FuzzyDecoder) -> None:
    """A head with layers of its own widens what the target hands to every drafter: not within a request."""
    target = Target(decoder.target.model, decoder.tokenizer)
    fresh = FuzzyDecoder(target, LookupDrafter(target.vocab_size))
    options: dict[str, Any] = dict(max_new_tokens=40, do_sample=False)
    expected = fresh.generate([5, 6, 7], **options).sequences

    def watch() -> None:
        with target.lock:
            target.watch([0])

    assert in_threads(3, lambda: fresh.generate([5, 6, 7], **options).sequences, watch) == [expected] * 3


def test_threads_share_a_model_through_the_hook() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 5, 6]])
    options: dict[str, Any] = dict(max_new_tokens=20, do_sample=False)
    hook: dict[str, Any] = dict(custom_generate=fsd_infer.generate, drafter="lookup", rule="exact")
    expected = model.generate(ids, **options)
    for found in in_threads(8, lambda: model.generate(ids, **hook, **options)):
        assert torch.equal(found, expected)


def test_a_copied_model_has_a_lock_of_its_own() -> None:
    """Also where its lock is held, and by pickling, as other processes get it."""
    target = Target(tiny_model("llama"))
    with target.lock:
        copies = copy.deepcopy(target.model), pickle.loads(pickle.dumps(target.model))
        for model in copies:
            other = Target(model)
            assert other.lock is not target.lock
            other_thread = threading.Thread(target=other.lock.__enter__)
            other_thread.start()
            other_thread.join(10)
            assert not other_thread.is_alive()
    assert Target(target.model).lock is target.lock
