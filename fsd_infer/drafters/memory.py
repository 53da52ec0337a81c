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
from fsd_core.tensors import to_device
from fsd_infer.drafters.base import DRAFTERS
from fsd_infer.drafters.corpus import open_corpus
from fsd_infer.drafters.free import FreeDrafter, FreeSession, HitRate, Options, Table
from fsd_infer.drafters.prefixes import (
    END,
    MAX_MATCH,
    STORE_BYTES,
    Occurrence,
    Store,
    SuffixStore,
    TextIndex,
    match_size,
)
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.targets.target import Target
from fsd_infer.trees.tree import DraftTree

FILED = 4  # length of the longest n-grams in the index of the texts at hand
NEAR = 12  # occurrences that a context takes from each source
# An occurrence with a match of n tokens has trust · n² votes, and DOUBT votes are for none of the candidates. The
# likelihood of training answers (data/smollm2-135m-answers-4.jsonl.gz and -5) chose these numbers.
DOUBT = 4.0
BINS = 16  # of a candidate's share of the votes
PRIOR_TRIALS, TRIALS = 12.0, 256.0  # trials that the share counts as, and trials after which older ones fade

Index = dict[tuple[int, ...], list[tuple["Recall", int]]]
Kind = tuple[int, int]  # the sources that propose a candidate, one bit each, and the bin of its votes
HitRates = dict[Kind, HitRate]


class Recall(TextIndex):
    """One text, with every text that it drafts from: itself, the texts that share its index, and stores.

    Args:
        stores: remembered texts.
        hit_rates: estimated acceptance of each kind of candidate, learned while decoding; None: no estimates yet.
        index: by n-gram of up to :data:`FILED` tokens, the texts and places of the tokens that followed it; None: an
            empty index. Texts that share an index draft from each other.

    Attributes:
        tokens: the text.
        here: occurrences of the text's end at the last look-up, continued by the tokens appended since.
    """

    def __init__(
        self, stores: Sequence[SuffixStore] = (), hit_rates: HitRates | None = None, index: Index | None = None
    ) -> None:
        self.stores = stores
        self.tokens: list[int] = []
        self.hit_rates: HitRates = {} if hit_rates is None else hit_rates
        self.index: Index = {} if index is None else index
        self.here: list[Occurrence] = []

    def append(self, token: int) -> None:
        """Append a token: judge the candidates for it, then add it to the index. Takes O(1) steps."""
        for candidate, kind in self._candidates(self.here):
            self._hit_rate(kind).learn(candidate == token)
        for _, source, tokens, at in self.here:
            if source is not self and tokens[at] == token:
                source.use(tokens, at)
                break
        at = len(self.tokens)
        for size in range(1, min(FILED, at) + 1):
            self.index.setdefault(tuple(self.tokens[-size:]), []).append((self, at))
        self.tokens.append(token)
        self.here = self.step(self.here, token)

    def look(self) -> list[Occurrence]:
        """Find the occurrences of the text's end."""
        self.here = self.at(self.tokens)
        return self.here

    def at(self, context: Sequence[int]) -> list[Occurrence]:
        """Return the occurrences of a context's end, those of each source with the longest matches first."""
        found = self._said(context)
        for store in self.stores:
            found += store.matches(context, NEAR)
        return found

    def step(self, place: list[Occurrence], token: int) -> list[Occurrence]:
        """Return the occurrences that continue with a token."""
        return [
            (size + 1, source, tokens, at + 1)
            for size, source, tokens, at in place
            if tokens[at] == token and at + 1 < len(tokens)
        ]

    def options(self, place: list[Occurrence]) -> Options:
        """Return distinct next tokens with their probabilities, which add up to at most 1."""
        options = [(token, self._hit_rate(kind).value) for token, kind in self._candidates(place)]
        total = max(1.0, sum(prob for _, prob in options))
        return [(token, prob / total) for token, prob in options]

    def has(self, context: Sequence[int]) -> bool:
        """Return whether these tokens, at most :data:`MAX_MATCH`, occur in any of the texts."""
        said = self.index.get(tuple(context[-FILED:]), ())
        if any(match_size(text.tokens, at, context) >= len(context) for text, at in said):
            return True
        return any(size >= len(context) for store in self.stores for size, *_ in store.matches(context, 1))

    def _said(self, context: Sequence[int]) -> list[Occurrence]:
        """Return occurrences in the texts at hand: those of longer n-grams first, and the latest first for each."""
        found: dict[tuple[Recall, int], Occurrence] = {}
        for filed in range(min(FILED, len(context)), 0, -1):
            for text, at in self.index.get(tuple(context[-filed:]), ())[: -NEAR - 1 : -1]:
                if (text, at) not in found:
                    size = match_size(text.tokens, at, context) if filed == FILED else filed
                    gap = len(text.tokens) - at
                    if text is self and gap < MAX_MATCH:  # a period, which continues past the end of the text
                        found[text, at] = size, text, text.tokens[at:] * (MAX_MATCH // gap + 1), 0
                    else:
                        found[text, at] = size, text, text.tokens, at
            if len(found) >= NEAR:
                break
        return list(found.values())[:NEAR]

    def _candidates(self, place: list[Occurrence]) -> list[tuple[int, Kind]]:
        """Return distinct next tokens and their kinds."""
        votes: dict[int, tuple[int, float]] = {}
        total = DOUBT
        for size, source, tokens, at in place:
            sources, count = votes.get(tokens[at], (0, 0.0))
            votes[tokens[at]] = sources | source.bit, count + source.trust * size * size
            total += source.trust * size * size
        votes.pop(END, None)
        return [(token, (sources, int(BINS * count / total))) for token, (sources, count) in votes.items()]

    def _hit_rate(self, kind: Kind) -> HitRate:
        if kind not in self.hit_rates:
            self.hit_rates[kind] = HitRate((kind[1] + 0.5) / BINS, TRIALS, PRIOR_TRIALS)
        return self.hit_rates[kind]


@DRAFTERS.register("memory")
class MemoryDrafter(FreeDrafter):
    """A drafter of tokens that followed the text's end earlier: in the text, the batch's other texts, or a store.

    The occurrences with the longest matches vote for the next token and for those after it. Other continuations become
    branches. A tree depends on earlier texts alone, so the exact rule's distribution is the target's. Its nodes have no
    q: gates stay closed there, and rules that emit from q emit from p. The drafter needs no model and no training.

    A request with a seed neither reads nor fills the store of earlier requests, so its answer is reproducible. A text
    drafts from texts with its own key only, and with an empty key from itself only.

    Args:
        vocab_size: V of the target.
        depth: of the deepest draft, in tokens after the root.
        nodes: most nodes verified per round, the root included. A round without a match has the root alone.
        least: estimated probability of acceptance below which a node is not drafted, in (0, 1).
        store_bytes: bytes of remembered prompts and answers, over all keys; 0: each text drafts from itself only.
        keep: make :meth:`forget` do nothing, so that benchmarks measure the effect of earlier prompts.

    Attributes:
        corpus: texts that every request may draft from; see :func:`fsd_infer.drafters.corpus.open_corpus`.

    Raises:
        FsdError: an option out of range.
    """

    name = "memory"
    keeps_texts = True
    context_length = MAX_MATCH
    most_chosen = 24

    def __init__(
        self,
        vocab_size: int,
        depth: int = 24,
        nodes: int = 16,
        least: float = 0.02,
        store_bytes: int = 16 << 20,
        keep: bool = False,
        corpus: SuffixStore | None = None,
    ) -> None:
        super().__init__(vocab_size, depth, nodes, least)
        if store_bytes < 0:
            raise FsdError(f"{self.name} needs store_bytes >= 0; got {store_bytes}.")
        self.store_bytes, self.keep, self.corpus = store_bytes, keep, corpus
        self.stores: dict[str, Store] = {}  # by key, the most recently used last

    @classmethod
    def option(cls, text: str, target: Target) -> dict[str, Any]:
        if issubclass(cls, LookupDrafter):
            return super().option(text, target)
        return {"keep": True} if text == "keep" else {"corpus": open_corpus(text, target)}

    def store_of(self, key: str, stores: dict[str, Store]) -> Store:
        """Return the store of a key, and mark it as the most recently used. A missing store is created."""
        stores[key] = stores.pop(key) if key in stores else Store(self.store_bytes)
        return stores[key]

    def trim(self) -> None:
        """Evict texts of the least recently used keys until the stores fit the bound, and keys without texts."""
        while (over := sum(store.nbytes + STORE_BYTES for store in self.stores.values()) - self.store_bytes) > 0:
            key, store = next(iter(self.stores.items()))
            if store.nbytes > over:
                store.shrink(store.nbytes - over)
            else:
                del self.stores[key]

    def forget(self) -> None:
        if not self.keep:
            self.stores = {}

    def recalls(self, keys: Sequence[str | None], seeded: bool = False) -> list[Recall]:
        """Return an empty text for each key. Texts with the same key share what they recall.

        Args:
            keys: of their owners; None: the caller, "": nobody.
            seeded: whether the request has a seed. Its stores begin empty and are not kept.
        """
        stores: dict[str, Store] = {} if seeded else self.stores
        indexes: dict[str | None, Index] = {}
        corpus = [] if self.corpus is None else [self.corpus]
        recalls = []
        for key in keys:
            if self.store_bytes and key != "":
                store = self.store_of(key or "", stores)
                recalls.append(Recall([store, *corpus], store.hit_rates, indexes.setdefault(key, {})))
                self.trim()
            else:
                recalls.append(Recall(corpus))
        return recalls

    def remember(self, recall: Recall, prompt: list[int], answer: list[int]) -> None:
        """Add a finished text to the store that it drafted from, if any."""
        for store in recall.stores:
            if isinstance(store, Store):
                store.add([prompt, [*prompt[-MAX_MATCH:], *answer]])
                self.trim()

    def start(self, first_tokens: Tensor, request: DraftRequest) -> MemorySession:
        return MemorySession(self, first_tokens, request)

    def describe(self) -> dict[str, Any]:
        corpus = {} if self.corpus is None else {"corpus": len(self.corpus)}
        options = {"least": self.least, "store_bytes": self.store_bytes, "keep": self.keep}
        return {**super().describe(), **options, **corpus}


@DRAFTERS.register("lookup")
class LookupDrafter(MemoryDrafter):
    """`memory` restricted to the row's own text. Arguments as of :class:`MemoryDrafter`."""

    name = "lookup"

    def __init__(self, vocab_size: int, depth: int = 24, nodes: int = 16, least: float = 0.02) -> None:
        super().__init__(vocab_size, depth, nodes, least, store_bytes=0)


class MemorySession(FreeSession):
    """A session with the :class:`Recall` of each row."""

    def __init__(self, drafter: MemoryDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        super().__init__(first_tokens, request)
        self.drafter: MemoryDrafter = drafter
        keys = [None] * len(first_tokens) if request.users is None else request.users
        self.recalls = drafter.recalls(keys, request.seeded)
        indexes = {id(recall.index) for recall in self.recalls}
        self._reads_other_texts = len(indexes) < len(self.recalls) or any(recall.stores for recall in self.recalls)
        for recall, token in zip(self.recalls, first_tokens.tolist(), strict=True):
            recall.append(token)

    @property
    def reads_other_texts(self) -> bool:
        return self._reads_other_texts

    def extend_on_host(self, rows: Sequence[Sequence[int]]) -> None:
        super().extend_on_host(rows)
        for recall, row in zip(self.recalls, rows, strict=True):
            for token in row:
                recall.append(token)

    def places(self) -> list[tuple[Table, Any]]:
        return [(recall, recall.look()) for recall in self.recalls]

    def seen_ngrams(self, tree: DraftTree, n: int) -> Tensor | None:
        if not self.reads_other_texts:
            return None
        rows = []
        for recall, tokens, parents in zip(self.recalls, *tree.nodes, strict=True):
            ends = [recall.tokens[-n:]]
            for parent, token in zip(parents[1:], tokens[1:]):
                ends.append([*ends[parent], token][-n:])
            rows.append([False, *(len(end) == n and recall.has(end) for end in ends[1:])])
        return to_device(torch.tensor(rows), tree.tokens.device) & tree.is_draft

    def on_end(self, row: int, prompt: list[int], answer: list[int]) -> None:
        self.drafter.remember(self.recalls[row], prompt, answer)

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        self.recalls = [self.recalls[row] for row in rows.tolist()]
