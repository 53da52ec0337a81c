"""Drafting without a model: what followed the text's last n-gram before (prompt lookup).

As in prompt lookup decoding (Saxena 2023; ``prompt_lookup_num_tokens`` in transformers), but the continuations form a
tree, and every node has a score: how likely it is to be accepted, learned from the text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsd_infer.drafters.base import DRAFTERS, DraftRequest, DraftSession
from fsd_infer.drafters.free import Chance, FreeDrafter, Options
from fsd_infer.errors import FsdError
from fsd_infer.tree import DraftTree

LONGEST_MATCH = 8  # matches are compared up to this many tokens; longer ones count as this long
PRIOR_CHANCES = (0.25, 0.45, 0.6, 0.75)  # of the first candidate after a match of 1, 2, 3, >= 4 tokens
LATER_CANDIDATE = 0.4  # of those, for a candidate after the first
MEMORY = 64.0  # trials

Candidate = tuple[int, int]  # length of the match, position in the text of the token that followed it


class TextIndex:
    """One text and where its n-grams were followed by what. Depends on the text alone, not on how it arrived.

    Args:
        max_ngram, min_ngram: lengths of the n-grams that are filed.
        width: different continuations remembered per n-gram, the most recent ones, and candidates per context.
    """

    def __init__(self, max_ngram: int, min_ngram: int, width: int) -> None:
        self.width = width
        self.text: list[int] = []
        self.lengths = range(max_ngram, min_ngram - 1, -1)
        # per length: n-gram -> positions of the tokens that followed it, each a different token, the latest last
        self.followers: dict[int, dict[tuple[int, ...], list[int]]] = {length: {} for length in self.lengths}
        first = [*PRIOR_CHANCES, *[PRIOR_CHANCES[-1]] * (LONGEST_MATCH - len(PRIOR_CHANCES))]
        # of the first candidate, and of a later one given that the earlier ones are wrong, by length of the match
        self._chances = [[Chance(share * chance, MEMORY) for chance in first] for share in (1.0, LATER_CANDIDATE)]

    def chance(self, rank: int, length: int) -> Chance:
        """That candidate number ``rank`` (0 the first) is right after a match of ``length`` tokens, if no earlier one
        is."""
        return self._chances[min(rank, 1)][length - 1]

    def append(self, token: int) -> None:
        """The text grows by one token: judge what would have been proposed for it, then file it. Amortised O(1)."""
        text = self.text
        tail = text[-LONGEST_MATCH:]
        for rank, (length, position) in enumerate(self.candidates(tail)):
            hit = text[position] == token
            self.chance(rank, length).learn(hit)
            if hit:
                break
        here = len(text)
        text.append(token)
        for length in self.lengths:
            if length > here:
                continue
            positions = self.followers[length].setdefault(tuple(tail[-length:]), [])
            for place, position in enumerate(positions):
                if text[position] == token:
                    del positions[place]
                    break
            positions.append(here)
            if len(positions) > self.width:
                del positions[0]

    def candidates(self, context: Sequence[int]) -> list[Candidate]:
        """Different next tokens after ``context``: longest match first, then the most recent.

        Args:
            context: the last tokens, at most :data:`LONGEST_MATCH`: of the text, or of text and drafts.
        """
        text = self.text
        found: list[Candidate] = []
        seen: list[int] = []
        for length in self.lengths:
            if length > len(context):
                continue
            positions = self.followers[length].get(tuple(context[-length:]), ())
            level = []
            for position in reversed(positions):
                token = text[position]
                if token not in seen:
                    seen.append(token)
                    level.append((self._match(context, position, length), position))
            if len(level) > 1:
                level.sort(key=lambda candidate: -candidate[0])  # stable: equal lengths stay in order of recency
            found += level
            if len(found) >= self.width:
                return found[: self.width]
        return found

    def options(self, context: Sequence[int]) -> Options:
        """Different next tokens after ``context``, and how likely each is the one."""
        missed, options = 1.0, []  # chance that all earlier candidates are wrong
        for rank, (length, position) in enumerate(self.candidates(context)):
            chance = self.chance(rank, length).value
            options.append((self.text[position], missed * chance))
            missed *= 1.0 - chance
        return options

    def _match(self, context: Sequence[int], position: int, length: int) -> int:
        """Length of the match that ends before ``position``, known to be at least ``length``."""
        longest = min(len(context), position, LONGEST_MATCH)
        while length < longest and self.text[position - 1 - length] == context[-1 - length]:
            length += 1
        return length


@DRAFTERS.register("lookup")
class LookupDrafter(FreeDrafter):
    """What followed the text's last tokens earlier in prompt and answer, as a tree. Needs no model and no training.

    The longest of the last ``max_ngram`` ... ``min_ngram`` tokens that occurred before is continued as it was, on the
    same terms at every drafted node; other continuations of the same or shorter n-grams become branches. The tree is a
    function of the text alone, so the exact rule's law is the target's. No distribution q is known at its nodes: gates
    stay closed there, and rules that emit from q emit from p.

    Args:
        vocab_size: V of the target.
        depth: deepest draft (number of tokens ahead of the root).
        nodes: most nodes verified per round, the root included; a round without a match has the root alone.
        width: most children of a node.
        max_ngram, min_ngram: lengths of the n-grams that are looked up.
        least: a node whose estimated chance of acceptance is lower is not drafted, in (0, 1).

    Raises:
        FsdError: options out of range.
    """

    name = "lookup"
    reach = LONGEST_MATCH

    def __init__(
        self,
        vocab_size: int,
        depth: int = 10,
        nodes: int = 16,
        width: int = 3,
        max_ngram: int = 4,
        min_ngram: int = 1,
        least: float = 0.02,
    ) -> None:
        super().__init__(vocab_size, depth, nodes, width, least)
        if not 1 <= min_ngram <= max_ngram <= LONGEST_MATCH:
            raise FsdError(
                f"lookup needs 1 <= min_ngram <= max_ngram <= {LONGEST_MATCH}; got {min_ngram} and {max_ngram}."
            )
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def index(self) -> TextIndex:
        """An empty one."""
        return TextIndex(self.max_ngram, self.min_ngram, self.width)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> LookupSession:
        return LookupSession(self, first_tokens, request.device)

    def describe(self) -> dict[str, Any]:
        options = {"width": self.width, "max_ngram": self.max_ngram, "min_ngram": self.min_ngram, "least": self.least}
        return {**super().describe(), **options}


class LookupSession(DraftSession):
    """An index per row."""

    def __init__(self, drafter: LookupDrafter, first_tokens: Tensor, device: torch.device) -> None:
        self.drafter, self.device = drafter, device
        self.indexes = [drafter.index() for _ in first_tokens]
        self._append([[token] for token in first_tokens.tolist()])

    def _append(self, texts: Sequence[Sequence[int]]) -> None:
        for index, tokens in zip(self.indexes, texts, strict=True):
            for token in tokens:
                index.append(token)

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        self._append([row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)])

    def draft(self, roots: Tensor) -> DraftTree:
        return self.drafter.trees(self.indexes, [index.text[-LONGEST_MATCH:] for index in self.indexes], self.device)

    def select(self, rows: Tensor) -> None:
        self.indexes = [self.indexes[row] for row in rows.tolist()]
