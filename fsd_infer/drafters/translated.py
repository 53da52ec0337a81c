"""Draft with a small LM of another vocabulary, by token-level intersection (TLI, arXiv 2502.05202) on bytes.

The drafter's distribution is restricted to the tokens whose bytes are a token of the target's, and renormalised
(:mod:`fsd_infer.drafters.translation`). That is a distribution over some of the target's tokens, as of a head with a
reduced draft vocabulary, so every rule keeps its distribution, on chains and trees.

The small LM reads its own tokens. The prompt's text is tokenised by its tokenizer. After that every token of the target
adds the token with its bytes, or several tokens that spell them. Accepted drafts are therefore read as they were
drafted. How it reads them changes only q, so it needs no exact round trip of texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsd_core.tensors import padded, to_device
from fsd_infer.drafters.lm import LMDrafter, LMSession
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.translation import Translation
from fsd_infer.targets.target import Target

STRETCH = 1.25  # the drafter's tokens per token of the target, for which room is made at first


class TranslatedDrafter(LMDrafter):
    """A small LM of another vocabulary. Its distributions are over the shared tokens.

    Args:
        model: see :class:`LMDrafter`; with a tokenizer.
        target: see :class:`LMDrafter`; with a tokenizer.
        shape: see :class:`LMDrafter`.

    Raises:
        VocabularyMismatchError: hardly any token is shared.
        ModelLoadError: the small LM has recurrent layers.
    """

    drafts_beams = False  # a node of the target's tokens may be several of the small LM's

    def _fit(self, model: Target, target: Target) -> int:
        self.translation = Translation(model, target)
        self.translation.check_overlap()
        return len(self.translation.ids)

    @property
    def overlap(self) -> str:
        shared, ours, theirs = len(self.translation.ids), self.translation.ours, self.translation.theirs
        return (
            f"another vocabulary: drafts the {shared:,} tokens that it shares by their bytes, of {len(ours.raw):,} of "
            f"its own and {len(theirs.raw):,} of {self.target.name}'s"
        )

    def to_draft_vocabulary(self, logits: Tensor) -> Tensor:
        return self.translation.restrict(logits)

    def slots(self, max_length: int) -> int:
        return super().slots(math.ceil(STRETCH * max_length))

    def start(self, first_tokens: Tensor, request: DraftRequest) -> LMSession:
        return TranslatedSession(self, first_tokens, request)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "draft_vocab_size": self.vocabulary}


class OwnTokensSession(LMSession):
    """A session whose texts are in the small LM's tokens. They follow the target's after each round, on the host.

    ``lengths``, ``cached`` and ``text`` count the small LM's tokens. Only the host knows how many a round adds, and it
    may have to make a larger cache for them, so rounds are not recorded.
    """

    drafter: TranslatedDrafter
    per_row = LMSession.per_row | {"_texts"}
    is_recordable = False
    needs_report = True

    def __init__(self, drafter: TranslatedDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        super().__init__(drafter, first_tokens, replace(request, max_length=math.ceil(STRETCH * request.max_length)))
        self.lengths.zero_()
        self._firsts: list[int] | None = first_tokens.tolist()  # until the prompts are read
        self._texts: list[list[int]] = [[] for _ in range(request.batch)]  # the texts, on the host
        self._room = math.ceil(STRETCH * request.cache_slots)  # longest text that the cache holds
        self.text = torch.nn.functional.pad(self.text, (0, self._room + 1 - self.text.shape[1]))

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        """Do nothing: :meth:`extend_on_host` takes the tokens."""

    def extend_on_host(self, rows: Sequence[Sequence[int]]) -> None:
        translation = self.drafter.translation
        if self._firsts is None:
            new = [self._read_more(row, tokens) for row, tokens in enumerate(rows)]
        else:
            # the prompts and the first token of each answer
            texts = [[first, *row] for first, row in zip(self._firsts, rows, strict=True)]
            new, self._firsts = [translation.read(text[:-1]) + translation.spell(text[-1]) for text in texts], None
        self._take(new)

    def _read_more(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Return the small LM's tokens that tokens of the target's add to a row's text."""
        return [new for token in tokens for new in self.drafter.translation.spell(token)]

    def _take(self, rows: list[list[int]]) -> None:
        """Append the small LM's tokens to the texts; there may be none, if it cannot spell the target's."""
        self._grow_to(max(map(len, self._texts)) + max(map(len, rows)))
        for text, row in zip(self._texts, rows, strict=True):
            text += row
        counts = to_device(torch.tensor([len(row) for row in rows]), self.device)
        tokens = to_device(padded(rows).long(), self.device)
        super().extend(tokens, tokens, counts)  # small LMs read no features

    def _grow_to(self, longest: int) -> None:
        """Make room for texts of up to ``longest`` tokens. The new cache is filled again."""
        if longest <= self._room:
            return
        self._room = math.ceil(STRETCH * longest)
        self.text = torch.nn.functional.pad(self.text, (0, self._room + 1 - self.text.shape[1]))
        self.cache = self.drafter.model.new_cache(len(self._texts), self.drafter.slots(self._room))
        self.cached.zero_()
        self._max_unread = max(map(len, self._texts))
        self._expanded = []


class TranslatedSession(OwnTokensSession):
    """A session whose distributions are over the shared tokens, and whose trees are of the target's."""

    def _read_roots(self) -> tuple[Tensor, Tensor | None]:
        logits, _ = super()._read_roots()
        return logits, self.drafter.translation.ids

    def _read_nodes(self, tokens: Tensor, parents: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        return super()._read_nodes(self.drafter.translation.own_of[tokens], parents, positions, visible)
