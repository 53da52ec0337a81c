"""Draft the tokens that followed the text's last tokens earlier, in this text or in remembered ones, without a model.

Related: prompt lookup (Saxena 2023), SAM Decoding (arXiv 2411.10666), SuffixDecoding (2411.04975), REST (2311.08252).
Here the continuations form a tree with a score per node, so they compete with a head's drafts for the same nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsd_core.errors import FsdError
from fsd_core.former import former_keywords
from fsd_core.tensors import to_device
from fsd_infer.drafters.base import DRAFTERS
from fsd_infer.drafters.corpus import open_corpus
from fsd_infer.drafters.free import FreeDrafter, FreeSession, HitRate, Options, Table, scaled
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.suffix_store import (
    END,
    MAX_MATCH,
    STORE_BYTES,
    Occurrence,
    Store,
    SuffixStore,
    TextIndex,
    match_size,
)
from fsd_infer.targets.target import Target
from fsd_infer.trees.tree import DraftTree

INDEX_NGRAM = 4  # length of the longest n-grams in the index of the batch's own texts
MAX_OCCURRENCES = 12  # of a context, in each source
# An occurrence with a match of n tokens has trust · n² votes, and OTHER_VOTES are for none of the candidates. The
# likelihood of training answers (data/smollm2-135m-answers-4.jsonl.gz and -5) chose these numbers.
OTHER_VOTES = 4.0
BINS = 16  # of a candidate's fraction of the votes
PRIOR_TRIALS, TRIALS = 12.0, 256.0  # trials that this fraction counts as, and trials after which older ones fade

Index = dict[tuple[int, ...], list[tuple["TextMatcher", int]]]
VoteKind = tuple[int, int]  # the sources that propose a candidate, one bit each, and the bin of its votes
HitRates = dict[VoteKind, HitRate]


class TextMatcher(TextIndex):
    """A text, and where its end occurs in its sources: the text itself, texts that share its index, and stores.

    Args:
        stores: remembered texts.
        hit_rates: estimated acceptance of each kind of candidate, learned while decoding; None: no estimates yet.
        index: by n-gram of up to :data:`INDEX_NGRAM` tokens, the texts and indices of the tokens that followed it;
            None: an empty index. Texts that share an index draft from each other.

    Attributes:
        tokens: the text.
        occurrences: occurrences of the text's end at the last look-up, continued by the tokens appended since.
    """

    def __init__(
        self, stores: Sequence[SuffixStore] = (), hit_rates: HitRates | None = None, index: Index | None = None
    ) -> None:
        self.stores = stores
        self.tokens: list[int] = []
        self.hit_rates: HitRates = {} if hit_rates is None else hit_rates
        self.index: Index = {} if index is None else index
        self.occurrences: list[Occurrence] = []

    def append(self, token: int) -> None:
        """Append a token: score the candidates against it, then add it to the index. Takes O(1) time."""
        for candidate, kind in self._candidates(self.occurrences):
            self._hit_rate(kind).learn(candidate == token)
        for _, source, tokens, at in self.occurrences:
            if source is not self and tokens[at] == token:
                source.mark_used(tokens, at)
                break
        at = len(self.tokens)
        for size in range(1, min(INDEX_NGRAM, at) + 1):
            self.index.setdefault(tuple(self.tokens[-size:]), []).append((self, at))
        self.tokens.append(token)
        self.occurrences = self.step(self.occurrences, token)

    def look_up(self) -> list[Occurrence]:
        """Find the occurrences of the text's end."""
        self.occurrences = self.at(self.tokens)
        return self.occurrences

    def at(self, context: Sequence[int]) -> list[Occurrence]:
        """Return the occurrences of a context's end, those of each source with the longest matches first."""
        occurrences = self._in_index(context)
        for store in self.stores:
            occurrences += store.matches(context, MAX_OCCURRENCES)
        return occurrences

    def step(self, state: list[Occurrence], token: int) -> list[Occurrence]:
        """Return the occurrences that continue with a token."""
        return [
            (size + 1, source, tokens, at + 1)
            for size, source, tokens, at in state
            if tokens[at] == token and at + 1 < len(tokens)
        ]

    def options(self, state: list[Occurrence]) -> Options:
        """Return distinct next tokens with their probabilities, which add up to at most 1."""
        return scaled([(token, self._hit_rate(kind).value) for token, kind in self._candidates(state)])

    def has(self, context: Sequence[int]) -> bool:
        """Return whether these tokens, at most :data:`MAX_MATCH`, occur in any of the texts."""
        indexed = self.index.get(tuple(context[-INDEX_NGRAM:]), ())
        if any(match_size(text.tokens, at, context) >= len(context) for text, at in indexed):
            return True
        return any(size >= len(context) for store in self.stores for size, *_ in store.matches(context, 1))

    def _in_index(self, context: Sequence[int]) -> list[Occurrence]:
        """Return occurrences in the batch's own texts: those of longer n-grams first, and the latest first for each."""
        occurrences: dict[tuple[TextMatcher, int], Occurrence] = {}
        for length in range(min(INDEX_NGRAM, len(context)), 0, -1):
            for text, at in self.index.get(tuple(context[-length:]), ())[: -MAX_OCCURRENCES - 1 : -1]:
                if (text, at) not in occurrences:
                    size = match_size(text.tokens, at, context) if length == INDEX_NGRAM else length
                    gap = len(text.tokens) - at
                    if text is self and gap < MAX_MATCH:  # a period, which continues past the end of the text
                        occurrences[text, at] = size, text, text.tokens[at:] * (MAX_MATCH // gap + 1), 0
                    else:
                        occurrences[text, at] = size, text, text.tokens, at
            if len(occurrences) >= MAX_OCCURRENCES:
                break
        return list(occurrences.values())[:MAX_OCCURRENCES]

    def _candidates(self, state: list[Occurrence]) -> list[tuple[int, VoteKind]]:
        """Return distinct next tokens and their kinds."""
        votes: dict[int, tuple[int, float]] = {}
        total = OTHER_VOTES
        for size, source, tokens, at in state:
            sources, count = votes.get(tokens[at], (0, 0.0))
            votes[tokens[at]] = sources | source.bit, count + source.trust * size * size
            total += source.trust * size * size
        votes.pop(END, None)
        return [(token, (sources, int(BINS * count / total))) for token, (sources, count) in votes.items()]

    def _hit_rate(self, kind: VoteKind) -> HitRate:
        if kind not in self.hit_rates:
            self.hit_rates[kind] = HitRate((kind[1] + 0.5) / BINS, TRIALS, PRIOR_TRIALS)
        return self.hit_rates[kind]


@DRAFTERS.register("memory")
class MemoryDrafter(FreeDrafter):
    """A drafter of tokens that followed the text's end earlier: in the text, the batch's other texts, or a store.

    The occurrences with the longest matches vote for the next token and for those after it. Other continuations become
    branches. A tree depends only on earlier texts, so the exact rule's distribution is the target's. Its nodes have no
    q: gates stay closed there, and rules that emit from q emit from p. The drafter needs no model and no training.

    A request with a seed neither reads nor fills the store of earlier requests, so its answer is reproducible. A text
    drafts from texts of its own user only, and without a user from itself only.

    Args:
        vocab_size: V of the target.
        depth: depth of the deepest draft, in tokens after the root.
        nodes: most nodes verified per round, the root included. A round without a match verifies only the root.
        min_accept_prob: a node that is accepted with a smaller estimated probability is not drafted; in (0, 1).
        store_bytes: bytes of remembered prompts and answers, over all users; 0: each text drafts from itself only.
        keep: make :meth:`forget` do nothing, so that benchmarks measure the effect of earlier prompts.

    Attributes:
        corpus: texts that every request may draft from; see :func:`fsd_infer.drafters.corpus.open_corpus`.

    Raises:
        FsdError: an option out of range.
    """

    name = "memory"
    keeps_texts = True
    context_length = MAX_MATCH
    auto_nodes = 24

    @former_keywords(least="min_accept_prob")
    def __init__(
        self,
        vocab_size: int,
        depth: int = 24,
        nodes: int = 16,
        min_accept_prob: float = 0.02,
        store_bytes: int = 16 << 20,
        keep: bool = False,
        corpus: SuffixStore | None = None,
    ) -> None:
        super().__init__(vocab_size, depth, nodes, min_accept_prob)
        if store_bytes < 0:
            raise FsdError(f"{self.name} needs store_bytes >= 0; got {store_bytes}.")
        self.store_bytes, self.keep, self.corpus = store_bytes, keep, corpus
        self.stores: dict[str, Store] = {}  # by user, the most recently active last

    @classmethod
    def option(cls, text: str, target: Target) -> dict[str, Any]:
        return {"keep": True} if text == "keep" else {"corpus": open_corpus(text, target)}

    def store_of(self, user: str, stores: dict[str, Store]) -> Store:
        """Return the store of a user, and mark it as the most recently used. A missing store is created."""
        stores[user] = stores.pop(user) if user in stores else Store(self.store_bytes)
        return stores[user]

    def trim(self) -> None:
        """Evict texts of the least recently active users until the stores fit the bound, and users without texts."""
        while (over := sum(store.nbytes + STORE_BYTES for store in self.stores.values()) - self.store_bytes) > 0:
            user, store = next(iter(self.stores.items()))
            if store.nbytes > over:
                store.shrink(store.nbytes - over)
            else:
                del self.stores[user]

    def forget(self) -> None:
        if not self.keep:
            self.stores = {}

    def matchers(self, users: Sequence[str | None], seeded: bool = False) -> list[TextMatcher]:
        """Return an empty text for each user. Texts of the same user share what they match.

        Args:
            users: their owners; None: the caller, "": no owner.
            seeded: whether the request has a seed. Its stores begin empty and are not kept.
        """
        stores: dict[str, Store] = {} if seeded else self.stores
        indexes: dict[str | None, Index] = {}
        corpus = [] if self.corpus is None else [self.corpus]
        matchers = []
        for user in users:
            if self.store_bytes and user != "":
                store = self.store_of(user or "", stores)
                matchers.append(TextMatcher([store, *corpus], store.hit_rates, indexes.setdefault(user, {})))
                self.trim()
            else:
                matchers.append(TextMatcher(corpus))
        return matchers

    def remember(self, matcher: TextMatcher, prompt: list[int], answer: list[int]) -> None:
        """Add a finished text to the store that it drafted from, if any."""
        for store in matcher.stores:
            if isinstance(store, Store):
                store.add([prompt, [*prompt[-MAX_MATCH:], *answer]])
                self.trim()

    def start(self, first_tokens: Tensor, request: DraftRequest) -> MemorySession:
        return MemorySession(self, first_tokens, request)

    def describe(self) -> dict[str, Any]:
        corpus = {} if self.corpus is None else {"corpus": len(self.corpus)}
        # records keep the key "least"
        options = {"least": self.min_accept_prob, "store_bytes": self.store_bytes, "keep": self.keep}
        return {**super().describe(), **options, **corpus}


@DRAFTERS.register("lookup")
class LookupDrafter(MemoryDrafter):
    """`memory` restricted to the row's own text. Arguments as for :class:`MemoryDrafter`."""

    name = "lookup"

    @former_keywords(least="min_accept_prob")
    def __init__(self, vocab_size: int, depth: int = 24, nodes: int = 16, min_accept_prob: float = 0.02) -> None:
        super().__init__(vocab_size, depth, nodes, min_accept_prob, store_bytes=0)

    @classmethod
    def option(cls, text: str, target: Target) -> dict[str, Any]:
        return super(MemoryDrafter, cls).option(text, target)  # it takes none


class MemorySession(FreeSession):
    """A session with the :class:`TextMatcher` of each row."""

    drafter: MemoryDrafter
    per_row = FreeSession.per_row | {"matchers"}

    def __init__(self, drafter: MemoryDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        super().__init__(drafter, first_tokens, request)
        users = [None] * len(first_tokens) if request.users is None else request.users
        self.matchers = drafter.matchers(users, request.seeded)
        indexes = {id(matcher.index) for matcher in self.matchers}
        self._reads_other_texts = len(indexes) < len(self.matchers) or any(matcher.stores for matcher in self.matchers)
        for matcher, token in zip(self.matchers, first_tokens.tolist(), strict=True):
            matcher.append(token)

    @property
    def reads_other_texts(self) -> bool:
        return self._reads_other_texts

    def extend_on_host(self, rows: Sequence[Sequence[int]]) -> None:
        super().extend_on_host(rows)
        for matcher, row in zip(self.matchers, rows, strict=True):
            for token in row:
                matcher.append(token)

    def states(self) -> list[tuple[Table, Any]]:
        return [(matcher, matcher.look_up()) for matcher in self.matchers]

    def seen_ngrams(self, tree: DraftTree, n: int) -> Tensor | None:
        if not self.reads_other_texts:
            return None
        rows = []
        for matcher, tokens, parents in zip(self.matchers, *tree.nodes, strict=True):
            ends = [matcher.tokens[-n:]]
            for parent, token in zip(parents[1:], tokens[1:]):
                ends.append([*ends[parent], token][-n:])
            rows.append([False, *(len(end) == n and matcher.has(end) for end in ends[1:])])
        return to_device(torch.tensor(rows), tree.tokens.device) & tree.is_draft

    def on_end(self, row: int, prompt: list[int], answer: list[int]) -> None:
        self.drafter.remember(self.matchers[row], prompt, answer)
