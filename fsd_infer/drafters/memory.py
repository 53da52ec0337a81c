"""Drafting without a model: what followed the text's last tokens before, in this text or in remembered ones.

Related: prompt lookup (Saxena 2023), SAM Decoding (arXiv 2411.10666), SuffixDecoding (2411.04975), REST (2311.08252).
Here the continuations form a tree with a score per node, so they compete with a head's drafts for the same nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsd_infer.drafters.automaton import Automaton, Match
from fsd_infer.drafters.base import DRAFTERS, DraftRequest, DraftSession
from fsd_infer.drafters.corpus import open_corpus
from fsd_infer.drafters.free import Chance, FreeDrafter, Options
from fsd_infer.drafters.prefixes import END, SORTED, Occurrence, Prefixes, Store
from fsd_infer.errors import FsdError
from fsd_infer.targets.target import Target
from fsd_infer.tree import DraftTree

PRIOR_TRIALS = 12.0  # what a prior counts for
NEAR = 12  # occurrences that are looked at, of each store
TRIALS = 256.0  # of a kind of candidates; older ones fade
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of matches, as far as they are told apart

# Priors of a context's first candidate by agreement and length of the match, and of later ones by agreement. Counted on
# 1,500 answers of data/smollm2-135m-answers*.jsonl.gz, each with the earlier ones as its store.
FIRST = (
    (0.12, 0.21, 0.21, 0.22, 0.25, 0.25, 0.25, 0.25, 0.30, 0.30),
    (0.32, 0.46, 0.53, 0.62, 0.70, 0.77, 0.90, 0.93, 0.95, 0.98),
    (0.59, 0.76, 0.83, 0.88, 0.94, 0.95, 0.97, 0.98, 0.98, 0.98),
    (0.20, 0.51, 0.62, 0.70, 0.78, 0.84, 0.89, 0.93, 0.95, 0.98),
)
LATER = ((0.08, 0.13, 0.20, 0.10), (0.055, 0.095, 0.10, 0.10))
REMEMBERED = 0.65  # of these chances where the match lies in another text

Kind = tuple[int, int, int, int]  # source (0: the texts at hand), rank, length, agreement


class Place(NamedTuple):
    """A context: where it stands in the automaton and in each store."""

    match: Match
    near: tuple[list[Occurrence], ...]


def prior(kind: Kind) -> float:
    """Chance of a kind of candidates before anything is known."""
    source, rank, length, agreement = kind
    chance = FIRST[agreement][length] if rank == 0 else LATER[rank - 1][agreement]
    return REMEMBERED * chance if source else chance


class Recall:
    """What one text recalls: itself, the texts that share its automaton, and stores.

    Args:
        automaton: of the texts at hand.
        stores: of remembered texts.
        chances: of kinds of candidates, learned while decoding.
        width: candidates of each source per context.

    Attributes:
        judges: candidates for the next tokens are judged. Those for a prompt that another text has had are not.
    """

    def __init__(
        self, automaton: Automaton, stores: Sequence[Prefixes], chances: dict[Kind, Chance], width: int
    ) -> None:
        self.automaton, self.stores, self.chances, self.width = automaton, stores, chances, width
        self.last = 0  # state of the whole text
        self.text: list[int] = []
        self.judges = True
        self.here = Place((0, 0), ())

    def append(self, token: int) -> None:
        """The text grows by one token: judge what would have been proposed for it, then file it. Amortised O(1)."""
        if self.judges:
            for candidate, kind in self._candidates(self.here):
                self._chance(kind).learn(candidate == token)
            for store, near in zip(self.stores, self.here.near):
                if right := [at for _, at in near if store.tokens[at] == token]:
                    store.use(right[0])
        self.here = self.step(self.here, token)
        self.last = self.automaton.append(self.last, token)
        self.text.append(token)

    def look(self) -> Place:
        """Where the text's end stands now, in the stores too."""
        self.here = Place(self.here.match, self._near(self.text))
        return self.here

    def at(self, context: Sequence[int]) -> Place:
        match: Match = 0, 0
        for token in context:
            match = self.automaton.step(match, token)
        return Place(match, self._near(context))

    def step(self, place: Place, token: int) -> Place:
        near = tuple(
            [(size + 1, at + 1) for size, at in found if store.tokens[at] == token]
            for store, found in zip(self.stores, place.near)
        )
        return Place(self.automaton.step(place.match, token), near)

    def options(self, place: Place) -> Options:
        missed: dict[int, float] = {}  # as if sources erred independently
        for token, kind in self._candidates(place):
            missed[token] = missed.get(token, 1.0) * (1.0 - self._chance(kind).value)
        total = max(1.0, sum(1.0 - miss for miss in missed.values()))
        return [(token, (1.0 - miss) / total) for token, miss in missed.items()]

    def has(self, tokens: Sequence[int]) -> bool:
        """Do these tokens, at most :data:`SORTED`, stand in anything that is recalled?"""
        place = self.at(tokens)
        return max([place.match[1], *(near[0][0] for near in place.near if near)]) >= len(tokens)

    def _near(self, context: Sequence[int]) -> tuple[list[Occurrence], ...]:
        return tuple([store.near(context, NEAR) for store in self.stores])

    def _chance(self, kind: Kind) -> Chance:
        if kind not in self.chances:
            self.chances[kind] = Chance(prior(kind), TRIALS, PRIOR_TRIALS)
        return self.chances[kind]

    def _candidates(self, place: Place) -> list[tuple[int, Kind]]:
        """Different next tokens of each source, the longest match first."""
        found: dict[int, Kind] = {}
        for token, size, count, total in self.automaton.followers(place.match, self.width):
            if token not in found:
                found[token] = _kind(0, len(found), size, count, total)
                if len(found) == self.width:
                    break
        candidates = [*found.items()]
        for store, near in zip(self.stores, place.near):
            groups: dict[int, list[int]] = {}  # token -> [longest match, occurrences]
            for size, at in near:
                groups.setdefault(store.tokens[at], [size, 0])[1] += 1
            groups.pop(END, None)
            for rank, (token, (size, count)) in enumerate(islice(groups.items(), self.width)):
                candidates.append((token, _kind(store.source, rank, size, count, len(near))))
        return candidates


def _kind(source: int, rank: int, size: int, count: int, total: int) -> Kind:
    agreement = 3 if total == 1 else 2 if count >= 0.8 * total else 1 if count >= 0.4 * total else 0
    return source, min(rank, 2), bisect_right(LENGTHS, size) - 1, agreement


@DRAFTERS.register("memory")
class MemoryDrafter(FreeDrafter):
    """Continuations of what the text's last tokens followed before: in the text, a batch's other texts, earlier ones.

    The longest match of any length is continued as it was, on the same terms at every drafted node. Other
    continuations, of the same or of shorter matches, become branches. A tree is a function of what was said before, so
    the exact rule's law is the target's. No distribution q is known at its nodes: gates stay closed there, and rules
    that emit from q emit from p. The drafter needs no model and no training.

    A request with a seed neither reads nor fills the store of earlier requests, so its answer comes again. Requests
    with keys draft from texts of their own key alone. With an empty key a text drafts from itself alone.

    Args:
        vocab_size: V of the target.
        depth: deepest draft (number of tokens ahead of the root).
        nodes: most nodes verified per round, the root included; a round without a match has the root alone.
        width: most children of a node by one source.
        least: a node whose estimated chance of acceptance is lower is not drafted, in (0, 1).
        store_bytes: of earlier prompts and answers that are remembered, of all keys together; 0: texts see nothing but
            themselves.
        keep: :meth:`forget` forgets nothing, so that benchmarks measure what earlier prompts have taught.

    Attributes:
        corpus: texts that every request may draft from; see :func:`fsd_infer.drafters.corpus.open_corpus`.

    Raises:
        FsdError: options out of range.
    """

    name = "memory"
    reach = SORTED
    most_chosen = 24

    def __init__(
        self,
        vocab_size: int,
        depth: int = 24,
        nodes: int = 16,
        width: int = 3,
        least: float = 0.02,
        store_bytes: int = 16 << 20,
        keep: bool = False,
        corpus: Prefixes | None = None,
    ) -> None:
        super().__init__(vocab_size, depth, nodes, width, least)
        if store_bytes < 0:
            raise FsdError(f"{self.name} needs store_bytes >= 0; got {store_bytes}.")
        self.store_bytes, self.keep, self.corpus = store_bytes, keep, corpus
        self.stores: dict[str, Store] = {}  # by key, the one used last at the end

    @classmethod
    def option(cls, text: str, target: Target) -> dict[str, Any]:
        if cls is LookupDrafter:
            return super().option(text, target)
        return {"keep": True} if text == "keep" else {"corpus": open_corpus(text, target)}

    def store_of(self, key: str) -> Store:
        """What is remembered of a key."""
        self.stores[key] = self.stores.pop(key) if key in self.stores else Store(self.store_bytes)
        return self.stores[key]

    def trim(self) -> None:
        """Drop whole keys, the one that was used longest ago first, until the others have room."""
        while sum(store.held_bytes for store in self.stores.values()) > self.store_bytes:
            del self.stores[next(iter(self.stores))]

    def forget(self) -> None:
        if not self.keep:
            self.stores = {}

    def recall(self, first: Recall | None = None, store: Store | None = None) -> Recall:
        """An empty text, which shares the automaton of the first of its key."""
        stores = [known for known in (store, self.corpus) if known is not None]
        if first is None:
            return Recall(Automaton(), stores, {} if store is None else store.chances, self.width)
        return Recall(first.automaton, stores, first.chances, self.width)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> MemorySession:
        return MemorySession(self, first_tokens, request)

    def describe(self) -> dict[str, Any]:
        corpus = {} if self.corpus is None else {"corpus": len(self.corpus)}
        options = {"width": self.width, "least": self.least, "store_bytes": self.store_bytes, "keep": self.keep}
        return {**super().describe(), **options, **corpus}


@DRAFTERS.register("lookup")
class LookupDrafter(MemoryDrafter):
    """`memory` with nothing but the text at hand. Arguments as of :class:`MemoryDrafter`."""

    name = "lookup"

    def __init__(self, vocab_size: int, depth: int = 24, nodes: int = 16, width: int = 3, least: float = 0.02) -> None:
        super().__init__(vocab_size, depth, nodes, width, least, store_bytes=0)


class MemorySession(DraftSession):
    """What each row recalls."""

    def __init__(self, drafter: MemoryDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        self.drafter, self.device = drafter, request.device
        self.recalls: list[Recall] = []
        firsts: dict[str, Recall] = {}  # by key
        for row, token in enumerate(first_tokens.tolist()):
            key = "" if request.keys is None else request.keys[row]
            if not drafter.store_bytes or request.keys is not None and not key:
                recall = drafter.recall()
            else:
                store = drafter.store_of(key) if request.generator is None else None
                recall = drafter.recall(firsts.get(key), store)
                recall.judges = firsts.setdefault(key, recall) is recall
            recall.append(token)
            self.recalls.append(recall)
        self.remembers = len(firsts) > 0 or drafter.corpus is not None

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        for recall, row, count in zip(self.recalls, tokens.tolist(), counts.tolist(), strict=True):
            for token in row[:count]:
                recall.append(token)
            recall.judges = True

    def draft(self, roots: Tensor) -> DraftTree:
        places = [recall.look() for recall in self.recalls]
        return self.drafter.trees(self.recalls, places, roots, self.device)

    def copies(self, tree: DraftTree, n: int) -> Tensor | None:
        if not self.remembers:
            return None
        rows = []
        for recall, tokens, parents in zip(self.recalls, *tree.nodes, strict=True):
            ends = [recall.text[-n:]]
            for parent, token in zip(parents[1:], tokens[1:]):
                ends.append([*ends[parent], token][-n:])
            rows.append([False, *(len(end) == n and recall.has(end) for end in ends[1:])])
        return torch.tensor(rows, device=tree.tokens.device) & tree.is_draft

    def finish(self, row: int, prompt: list[int], answer: list[int]) -> None:
        for store in self.recalls[row].stores:
            if isinstance(store, Store):
                store.add([prompt, [*prompt[-SORTED:], *answer]])
                self.drafter.trim()
        for recall in self.recalls:  # places in a store are not valid any more
            recall.here = Place(recall.here.match, ())

    def select(self, rows: Tensor) -> None:
        self.recalls = [self.recalls[row] for row in rows.tolist()]
