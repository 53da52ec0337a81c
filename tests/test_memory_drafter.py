"""The drafter `memory`: what a store and a corpus find and forget, whose texts are seen, and that distributions
stay.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsd_bench.engine import EngineMethod
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import DraftRequest, GraftedDrafter, LookupDrafter, MemoryDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.drafters.suffix_store import END, MAX_MATCH, MIN_MATCH, Store, SuffixStore, sorted_prefixes
from fsd_infer.rules import parse_rule
from fsd_infer.serving.batcher import Batcher
from fsd_infer.trees.tree import DraftTree
from tests.families import VOCAB, circling_model, tiny_head, tiny_model, tiny_prompts
from tests.serve_toys import make_job

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=50), min_size=1, max_size=6)
GREEDY: dict[str, Any] = dict(max_new_tokens=32, do_sample=False)


def matches(texts: list[list[int]], context: list[int]) -> list[tuple[int, int]]:
    """(length, token that followed) of every occurrence of the end of ``context``, END at a text's end."""
    found = []
    for text in texts:
        for place in range(len(text)):
            size = 0
            while size < min(MAX_MATCH, len(context), place + 1) and text[place - size] == context[-1 - size]:
                size += 1
            if size >= MIN_MATCH:
                found.append((size, [*text, END][place + 1]))
    return sorted(found)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(TEXTS, st.lists(st.integers(0, 2), min_size=2, max_size=50))
def test_sorted_prefixes_find_all_matches(texts: list[list[int]], context: list[int]) -> None:
    """Sorted at once, as a corpus is, or text by text, as a store is; the longest first."""
    whole = np.array([token for text in texts for token in (*text, END)], np.int32)
    store = Store(1 << 20)
    for text in texts:
        store.add([text])
    distinct = [list(text) for text in dict.fromkeys(map(tuple, texts))]  # a text that is known is not added again
    for prefixes, known in ((SuffixStore(whole, sorted_prefixes(whole)), texts), (store, distinct)):
        found = prefixes.matches(context, 10_000)
        sizes = [size for size, *_ in found]
        assert sizes == sorted(sizes, reverse=True)
        assert sorted((size, tokens[at]) for size, _, tokens, at in found) == matches(known, context)
        assert prefixes.matches(context, 3) == found[:3]


def test_a_store_keeps_its_bound_and_what_is_used() -> None:
    """800 requests: never more than the bound, the texts in use stay, and what stayed is found by what it says."""
    draws, bound = Random(0), 1 << 15
    store, used = Store(bound), [7, 7, 7, *range(100, 140)]
    store.add([used])
    most = 0
    for request in range(800):
        prompt, answer = ([draws.randrange(1000, 50_000) for _ in range(size)] for size in (5, 20))
        store.add([prompt, [*prompt, *answer]])
        if request % 25 == 0:
            ((size, _, tokens, at),) = store.matches(used[:20], 1)
            assert size == 20 and tokens[at] == used[20]
            store.mark_used(tokens, at)
        most = max(most, store.nbytes)
        assert store.array.nbytes + store.order.nbytes <= store.nbytes <= bound
    assert most > 0.9 * bound and len(store.texts) < bound / 8 / 26
    assert sorted(store.order.tolist()) == list(range(len(store)))
    ((size, _, tokens, at),) = store.matches([*prompt, *answer[:-1]], 1)
    assert size == len(prompt) + len(answer) - 1 and tokens[at] == answer[-1]
    assert len(store.by_hash) == len(store.texts)


def test_a_large_memory_loses_texts_and_not_all_at_once() -> None:
    """One key with as many texts as fit, beside requests of others; keys that say nothing do not pile up."""
    drafter = MemoryDrafter(VOCAB, store_bytes=1 << 16)
    for request in range(300):
        drafter.store_of("large", drafter.stores).add([[request, *range(1000, 1050)]])
        drafter.matchers([f"user {request}"])
        if request % 10 == 0:
            drafter.store_of(f"user {request}", drafter.stores).add([[request, *range(50, 250)]])
        drafter.trim()
        assert sum(store.nbytes for store in drafter.stores.values()) <= 1 << 16
        assert len(drafter.stores["large"].texts) >= min(request, 40)
        assert len(drafter.stores) <= 1 << 16 >> 11


@pytest.mark.parametrize(("beams", "saved"), [(1, 0.5), (3, 0.0)])
def test_a_replay_is_drafted_from_the_store_and_answers_stay(beams: int, saved: float) -> None:
    """saved: the least share of the first answers' forwards."""
    target, options = Target(tiny_model("llama")), {**GREEDY, "num_beams": beams}
    plain = FuzzyDecoder(target, LookupDrafter(VOCAB)).generate(tiny_prompts(), **options)
    drafter = MemoryDrafter(VOCAB)
    decoder = FuzzyDecoder(target, drafter)
    decoder.generate(tiny_prompts(), seed=1, **options)
    assert not drafter.stores, "a request with a seed leaves nothing"
    first, again = (decoder.generate(tiny_prompts(), **options) for _ in range(2))
    assert first.sequences == again.sequences == plain.sequences
    assert again.stats.target_forwards < (1 - saved) * first.stats.target_forwards
    drafter.forget()
    assert decoder.generate(tiny_prompts(), **options).stats.target_forwards == first.stats.target_forwards


@pytest.mark.parametrize(("rule", "temperature"), [("exact", 0.0), ("tilted:0.5:exact_ngram_size=0", 0.8)])
def test_a_request_with_a_seed_comes_again(rule: str, temperature: float) -> None:
    """Whatever was answered before: the store is neither read nor filled. A lossy answer depends on the trees."""
    target = Target(tiny_model("llama"))
    head = tiny_head(target)
    sampling = dict(do_sample=True, temperature=temperature) if temperature else dict(do_sample=False)

    def seeded(drafter: MemoryDrafter) -> tuple[list[list[int]], int]:
        decoder = FuzzyDecoder(target, GraftedDrafter(head, drafter))
        out = decoder.generate(tiny_prompts() * 2, rule, max_new_tokens=14, seed=3, **sampling)
        return out.sequences, out.stats.target_forwards

    fresh, taught = MemoryDrafter(VOCAB), MemoryDrafter(VOCAB)
    wanted = seeded(fresh)
    assert not fresh.stores, "nothing is kept"
    FuzzyDecoder(target, taught).generate(tiny_prompts(), max_new_tokens=14, **sampling)
    assert taught.stores and seeded(taught) == wanted == seeded(fresh)


def trees_of(drafter: MemoryDrafter, texts: list[list[int]], keys: list[str] | None) -> list[list[int]]:
    """The drafts of each row of a batch that has read these texts."""
    request = DraftRequest(len(texts), 99, users=keys)
    session = drafter.start(torch.tensor([text[0] for text in texts]), request)
    session.extend_on_host([text[1:] for text in texts])
    tree = session.draft(torch.tensor([text[-1] for text in texts]))
    return [tokens[drafts].tolist() for tokens, drafts in zip(tree.tokens, tree.is_draft)]


def test_rows_of_a_batch_see_each_other_if_they_may() -> None:
    """The second text goes on where the first has been; it does so under no key, or the same one."""
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [20, 21, 22, 23, 24, 25, 4, 5, 6]]
    for keys in (None, ["me", "me"]):
        assert trees_of(MemoryDrafter(VOCAB), texts, keys)[1][:3] == [7, 8, 9]
    for keys in (["", ""], ["me", "you"]):
        assert trees_of(MemoryDrafter(VOCAB), texts, keys) == [[], []]
    assert trees_of(LookupDrafter(VOCAB), texts, None) == [[], []]


def test_a_server_remembers_for_users_that_name_themselves(toy_decoder: FuzzyDecoder) -> None:
    """`serve` passes every request's ``user``, by default none: then a request drafts from its own text."""
    drafter = MemoryDrafter(toy_decoder.target.vocab_size)
    batcher = Batcher(FuzzyDecoder(toy_decoder.target, drafter), 4, 16)

    def forwards(*users: str) -> list[int]:
        """Of requests in one batch."""
        jobs = [make_job(toy_decoder, 24, lambda *_: None, **({"user": user} if user else {})) for user in users]
        batcher.submit(jobs)
        while any(job.reason is None or job.stats is None for job in jobs):
            time.sleep(0.01)
        assert all(isinstance(job.reason, str) for job in jobs)
        return [job.stats.target_forwards for job in jobs if job.stats is not None]

    alone = [*forwards(""), *forwards("")]
    assert alone[0] == alone[1] and not drafter.stores
    first, again = forwards("me"), forwards("me")
    assert first == alone[:1] and again < first and forwards("you") == first and forwards("") == first
    assert forwards("she", "he") == first * 2 and forwards("she") == forwards("he") == again
    batcher.close()


def test_copies_from_memory_are_copies() -> None:
    """Under ``exact_ngram_size`` a draft that completes an n-gram of a remembered text wins nothing."""
    target = Target(tiny_model("llama"))
    drafter = MemoryDrafter(VOCAB)
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [20, 21, 22, 23, 24, 25, 4, 5, 6]]
    session = drafter.start(torch.tensor([1, 20]), DraftRequest(2, 99))
    session.extend_on_host([text[1:] for text in texts])
    tokens = torch.tensor([[9, 1, 2], [6, 7, 11]])  # in no text; continued as the first text was, then not
    tree = DraftTree.chain(tokens, torch.empty(2, 0, VOCAB))
    copies = session.seen_ngrams(tree, 3)
    assert copies is not None and copies.tolist() == [[False, False, False], [False, True, False]]
    assert drafter.start(torch.tensor([1]), DraftRequest(1, 99, users=[""])).seen_ngrams(tree, 3) is None
    # the same request, with and without a memory of its exact answer: charged, the lossy rule cannot copy it
    prompts, options = tiny_prompts((9,)), dict(max_new_tokens=32, do_sample=False)
    for rule, copied in (("tilted:0.2:exact_ngram_size=2", False), ("tilted:0.2:exact_ngram_size=0", True)):
        taught = MemoryDrafter(VOCAB)
        draws = Random(1)
        said = [draws.randrange(1, VOCAB) for _ in range(4000)]
        taught.store_of("", taught.stores).add([said])
        out = FuzzyDecoder(target, taught).generate(prompts, rule, **options)
        assert (out.stats.divergence_spent > 0) == copied, rule


def test_benchmarks_forget_unless_the_name_says_keep() -> None:
    target = Target(circling_model(), name="tiny")
    for name, learns in (("memory", False), ("memory:keep", True), ("lookup+recycle", False)):
        drafter = load_drafter(name, target)
        method = EngineMethod(name, FuzzyDecoder(target, drafter), parse_rule("exact"), drafter)
        first, again = (method.answer(tiny_prompts((9,)), GREEDY, seed=1).answers[0].target_forwards for _ in range(2))
        assert (again < first) == learns
