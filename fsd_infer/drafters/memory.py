"""Drafting without a model: what followed the text's last tokens before, in this text or in remembered ones.

Related: prompt lookup (Saxena 2023), SAM Decoding (arXiv 2411.10666), SuffixDecoding (2411.04975), REST (2311.08252).
Here the continuations form a tree with a score per node, so they compete with a head's drafts for the same nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsd_infer.drafters.automaton import Automaton, Match
from fsd_infer.drafters.base import DRAFTERS, DraftRequest, DraftSession
from fsd_infer.drafters.corpus import open_corpus
from fsd_infer.drafters.free import Chance, FreeDrafter, Options
from fsd_infer.drafters.prefixes import SORTED, Occurrence, Prefixes, Store
from fsd_infer.errors import FsdError
from fsd_infer.targets.target import Target
from fsd_infer.tree import DraftTree

TEXT, STORE, CORPUS = range(3)  # sources
PRIOR_TRIALS = 12.0  # what a prior counts for
NEAR = 12  # occurrences that are looked at, of each store
TRIALS = 256.0  # of a kind of candidates; older ones fade
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of matches, as far as they are told apart

# Priors of a context's first candidate by agreement and length of the match, and of later ones by agreement.
FIRST = (
    (0.22, 0.28, 0.28, 0.30, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60),
    (0.40, 0.47, 0.47, 0.53, 0.68, 0.80, 0.83, 0.88, 0.92, 0.95),
    (0.65, 0.74, 0.76, 0.81, 0.92, 0.95, 0.97, 0.97, 0.98, 0.98),
    (0.40, 0.52, 0.57, 0.61, 0.76, 0.80, 0.89, 0.92, 0.93, 0.96),
)
LATER = ((0.12, 0.18, 0.30, 0.20), (0.07, 0.12, 0.20, 0.10))

Kind = tuple[int, int, int, int]  # source, rank, length, agreement


class Place(NamedTuple):
    """A context: where it stands in the automaton and in each store."""

    match: Match
    near: tuple[list[Occurrence], ...]


def prior(kind: Kind) -> float:
    """Chance of a kind of candidates before anything is known."""
    source, rank, length, agreement = kind
    chance = FIRST[agreement][length] if rank == 0 else LATER[rank - 1][agreement]
    return chance if source == TEXT else 0.85 * chance


class Recall:
    """What one text recalls: itself, the texts that share its automaton, and stores.

    Args:
        automaton: of the texts at hand.
        stores: remembered texts, and which source they are.
        chances: of kinds of candidates, learned while decoding.
        width: candidates of each source per context.
    """

    def __init__(
        self, automaton: Automaton, stores: Sequence[tuple[int, Prefixes]], chances: dict[Kind, Chance], width: int
    ) -> None:
        self.automaton, self.stores, self.chances, self.width = automaton, stores, chances, width
        self.last = 0  # state of the whole text
        self.text: list[int] = []
        self.here = Place((0, 0), tuple([] for _ in stores))

    def append(self, token: int, judge: bool = True) -> None:
        """The text grows by one token: judge what would have been proposed for it, then file it. Amortised O(1)."""
        if judge:
            for candidate, kind in self._candidates(self.here):
                self._chance(kind).learn(candidate == token)
            self._use(token)
        self.here = self.step(self.here, token)
        self.last = self.automaton.append(self.last, token)
        self.text.append(token)

    def look(self) -> Place:
        """Where the text's end stands now."""
        near = tuple(store.near(self.text[-SORTED:], NEAR) for _, store in self.stores)
        self.here = Place(self.here.match, near)
        return self.here

    def at(self, context: Sequence[int]) -> Place:
        """Where a text stands that ends so."""
        match: Match = 0, 0
        for token in context:
            match = self.automaton.step(match, token)
        return Place(match, tuple(store.near(context, NEAR) for _, store in self.stores))

    def step(self, place: Place, token: int) -> Place:
        """Where it stands with one token more."""
        near = tuple(
            [(size + 1, at + 1) for size, at in found if store.tokens[at] == token] if found else found
            for (_, store), found in zip(self.stores, place.near)
        )
        return Place(self.automaton.step(place.match, token), near)

    def options(self, place: Place) -> Options:
        """Different next tokens, and how likely each is the one."""
        missed: dict[int, float] = {}  # as if sources erred independently
        for token, kind in self._candidates(place):
            missed[token] = missed.get(token, 1.0) * (1.0 - self._chance(kind).value)
        total = max(1.0, sum(1.0 - miss for miss in missed.values()))
        return [(token, (1.0 - miss) / total) for token, miss in missed.items()]

    def has(self, tokens: Sequence[int]) -> bool:
        """Do these tokens, at most :data:`SORTED`, stand in anything that is recalled?"""
        place = self.at(tokens)
        sizes = [place.match[1], *(near[0][0] for near in place.near if near)]
        return max(sizes) >= len(tokens)

    def leave(self) -> None:
        """A store is about to change: places in it are not valid any more."""
        self.here = Place(self.here.match, tuple([] for _ in self.stores))

    def _use(self, token: int) -> None:
        """Note which remembered text was right about a token."""
        for (_, store), near in zip(self.stores, self.here.near):
            right = next((at for _, at in near if store.tokens[at] == token), None)
            if right is not None and isinstance(store, Store):
                store.use(right)

    def _chance(self, kind: Kind) -> Chance:
        found = self.chances.get(kind)
        if found is None:
            found = self.chances[kind] = Chance(prior(kind), TRIALS, PRIOR_TRIALS)
        return found

    def _candidates(self, place: Place) -> list[tuple[int, Kind]]:
        """Different next tokens of each source, the longest match first."""
        found: list[tuple[int, Kind]] = []
        seen: set[int] = set()
        for token, size, count, total in self.automaton.followers(place.match, self.width):
            if token not in seen:
                seen.add(token)
                found.append((token, _kind(TEXT, len(seen) - 1, size, count, total)))
                if len(seen) == self.width:
                    break
        for (source, store), near in zip(self.stores, place.near):
            groups: dict[int, list[int]] = {}
            for size, at in near:
                token = store.tokens[at]
                if token in groups:
                    groups[token][1] += 1
                elif token >= 0:
                    groups[token] = [size, 1]
            for rank, (token, (size, count)) in enumerate(groups.items()):
                if rank == self.width:
                    break
                found.append((token, _kind(source, rank, size, count, len(near))))
        return found


def _kind(source: int, rank: int, size: int, count: int, total: int) -> Kind:
    length = 0
    while length + 1 < len(LENGTHS) and LENGTHS[length + 1] <= size:
        length += 1
    agreement = 3 if total == 1 else 2 if count >= 0.8 * total else 1 if count >= 0.4 * total else 0
    return source, min(rank, 2), length, agreement


class _Known(NamedTuple):
    """What earlier requests of one key have left."""

    store: Store
    chances: dict[Kind, Chance]


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

    def __init__(
        self,
        vocab_size: int,
        depth: int = 10,
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
        self.known: dict[str, _Known] = {}  # by key, the one used last at the end

    @classmethod
    def option(cls, text: str, target: Target) -> dict[str, Any]:
        if cls is LookupDrafter:
            return super().option(text, target)
        return {"keep": True} if text == "keep" else {"corpus": open_corpus(text, target)}

    def known_of(self, key: str) -> _Known:
        """What is remembered of a key."""
        known = self.known.pop(key) if key in self.known else _Known(Store(self.store_bytes), {})
        self.known[key] = known
        return known

    def trim(self) -> None:
        """Drop what was used longest ago, key by key, until the others have room."""
        while sum(known.store.held_bytes for known in self.known.values()) > self.store_bytes:
            del self.known[next(iter(self.known))]

    def forget(self) -> None:
        if not self.keep:
            self.known = {}

    def recall(self, automaton: Automaton | None = None, known: _Known | None = None) -> Recall:
        """An empty text that shares an automaton, or has its own."""
        stores: list[tuple[int, Prefixes]] = [] if known is None else [(STORE, known.store)]
        stores += [] if self.corpus is None else [(CORPUS, self.corpus)]
        return Recall(automaton or Automaton(), stores, {} if known is None else known.chances, self.width)

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

    def __init__(self, vocab_size: int, depth: int = 10, nodes: int = 16, width: int = 3, least: float = 0.02) -> None:
        super().__init__(vocab_size, depth, nodes, width, least, store_bytes=0)


class MemorySession(DraftSession):
    """What each row recalls."""

    def __init__(self, drafter: MemoryDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        self.drafter, self.device = drafter, request.device
        self.recalls: list[Recall] = []
        self.stores: list[Store | None] = []
        self.judged: list[bool] = []  # whose prompt is judged: of texts that share an automaton, the first one's
        shared: dict[str, Recall] = {}
        self.shares = False  # do rows see each other's texts
        for row, token in enumerate(first_tokens.tolist()):
            key = "" if request.keys is None else request.keys[row]
            alone = not drafter.store_bytes or not key and request.keys is not None
            known = None if alone or request.generator is not None else drafter.known_of(key)
            first = None if alone else shared.get(key)
            recall = drafter.recall(None if first is None else first.automaton, known)
            if first is not None:
                recall.chances, self.shares = first.chances, True
            shared.setdefault(key, recall)
            recall.append(token, judge=False)
            self.recalls.append(recall)
            self.stores.append(known and known.store)
            self.judged.append(first is None)

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        for recall, row, count, judged in zip(self.recalls, tokens.tolist(), counts.tolist(), self.judged, strict=True):
            for token in row[:count]:
                recall.append(token, judged)
        self.judged = [True] * len(self.recalls)

    def draft(self, roots: Tensor) -> DraftTree:
        places = [recall.look() for recall in self.recalls]
        return self.drafter.trees(self.recalls, places, roots, self.device)

    def copies(self, tree: DraftTree, n: int) -> Tensor | None:
        if not any(recall.stores for recall in self.recalls) and not self.shares:
            return None
        rows = []
        for recall, tokens, parents in zip(self.recalls, *tree.nodes, strict=True):
            ends = [recall.text[-n:]]
            for parent, token in zip(parents[1:], tokens[1:]):
                ends.append([*ends[parent], token][-n:])
            rows.append([False, *(recall.has(end) for end in ends[1:])])
        return torch.tensor(rows, device=tree.tokens.device) & tree.is_draft

    def finish(self, row: int, prompt: list[int], answer: list[int]) -> None:
        store = self.stores[row]
        if store is not None:
            store.add([prompt, [*prompt[-SORTED:], *answer]])
            self.drafter.trim()
            for recall in self.recalls:
                recall.leave()

    def select(self, rows: Tensor) -> None:
        kept = rows.tolist()
        self.recalls = [self.recalls[row] for row in kept]
        self.stores = [self.stores[row] for row in kept]
        self.judged = [self.judged[row] for row in kept]
