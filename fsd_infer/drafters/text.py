"""Draft text with a small LM whose vocabulary has hardly a token of the target's (SLEM, arXiv 2502.05202).

The small LM writes a chain or a tree of its own tokens. The target's tokenizer splits the text of each path after the
target's last tokens, and what they begin with in common is one path of the tree that is offered. It is a function of
the context and has no q, as what a table drafts. So every rule keeps its distribution at every temperature, whatever
the tokenizers make of the text.

What the small LM reads is tokenized again where new text changes the last tokens, as "He" and "llo".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import dropwhile, groupby, takewhile
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor

from fsd_core.errors import VocabularyMismatchError
from fsd_infer.drafters.base import DRAFTERS, DraftRequest
from fsd_infer.drafters.lm import LMDrafter, check_same_vocabulary, load_lm
from fsd_infer.drafters.translated import OwnTokensSession, TranslatedDrafter
from fsd_infer.drafters.translation import Translation, Vocabulary
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import DraftTree, Draws, Nodes, path_to

PREFIX = "text:"
WINDOW = 24  # the last tokens of a text, which are split together with new text


def lm_drafter(model: Target, target: Target, shape: TreeShape | None = None) -> LMDrafter:
    """Return a drafter for a small LM of any vocabulary; for another vocabulary, also print how it drafts.

    Raises:
        VocabularyMismatchError: the vocabularies differ, and a model has no tokenizer.
        ModelLoadError: see :class:`LMDrafter`.
    """
    try:
        check_same_vocabulary(model, target)
    except VocabularyMismatchError:
        if model.tokenizer is None or target.tokenizer is None:
            raise
        try:
            result = TranslatedDrafter(model, target, shape)
        except VocabularyMismatchError:
            result = TextDrafter(model, target, shape)
        print(f"[{model.name}] {result.overlap}", file=sys.stderr, flush=True)
        return result
    return LMDrafter(model, target, shape)


@DRAFTERS.register("text")
class TextDrafter(TranslatedDrafter):
    """A small LM whose text the target's tokenizer splits. Its trees have a fixed shape and no q.

    Args:
        model: see :class:`TranslatedDrafter`.
        target: see :class:`TranslatedDrafter`.
        shape: its depth and nodes are at most those of a tree, in tokens of either model (default: a chain).

    Raises:
        VocabularyMismatchError: a model without a tokenizer.
        ModelLoadError: the small LM has recurrent layers.
    """

    name = "text"
    samples = grows = False

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> LMDrafter | None:
        if not str(name).startswith(PREFIX):
            return None
        source = str(name).removeprefix(PREFIX)
        result = cls(load_lm(source, target), target, tree)
        result.directory = Path(source) if os.path.isdir(source) else None
        return result

    def _fit(self, model: Target, target: Target) -> int:
        self.translation = Translation(model, target)
        return model.vocab_size

    def _within(self, shape: TreeShape) -> TreeShape:
        if self.has_default_shape:
            return TreeShape.chain(min(shape.depth, shape.max_nodes - 1), shape.stop_below)
        return super()._within(shape)

    @property
    def overlap(self) -> str:
        shared, theirs = len(self.translation.ids), len(self.translation.theirs.raw)
        return f"another vocabulary: drafts text, as it has only {shared:,} of {self.target.name}'s {theirs:,} tokens"

    def to_draft_vocabulary(self, logits: Tensor) -> Tensor:
        return logits

    def start(self, first_tokens: Tensor, request: DraftRequest) -> TextSession:
        return TextSession(self, first_tokens, replace(request, draws=Draws.NONE))

    def describe(self) -> dict[str, Any]:
        return super(TranslatedDrafter, self).describe()


class TextSession(OwnTokensSession):
    """A session that keeps the last of the target's tokens of each text, to split new text after them."""

    drafter: TextDrafter
    per_row = OwnTokensSession.per_row | {"_tails"}

    def __init__(self, drafter: TextDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        super().__init__(drafter, first_tokens, request)
        self._tails: list[list[int]] = first_tokens[:, None].tolist()

    def extend_on_host(self, rows: Sequence[Sequence[int]]) -> None:
        for tail, row in zip(self._tails, rows, strict=True):
            tail[:] = [*tail, *row][-WINDOW:]
        super().extend_on_host(rows)

    def _read_more(self, row: int, tokens: Sequence[int]) -> list[int]:
        translation, new = self.drafter.translation, list[int]()
        for special, run in groupby(tokens, key=translation.special.get):
            if special is not None:
                new += [special for _ in run]
                continue
            raw = b"".join(translation.ours.bytes_of(translation.spell(token)) for token in run)
            window = _window([*self._texts[row][-WINDOW:], *new], translation.ours)
            unchanged, replacement = translation.ours.again(window, raw) if raw else (len(window), [])
            dropped = len(window) - unchanged
            in_text = max(0, dropped - len(new))
            self._drop(row, in_text)
            new = [*new[: len(new) - dropped + in_text], *replacement]
        return new

    def _drop(self, number: int, count: int) -> None:
        """Remove the last tokens of a row's text, which new ones replace."""
        if count:
            del self._texts[number][-count:]
            self.lengths[number] -= count
            self.cached[number].clamp_(max=self.lengths[number])
            for _, parents in self._expanded[:1]:
                parents[number] = []  # its nodes are not where the next tokens belong

    def draft(self, roots: Tensor) -> DraftTree:
        tree = super().draft(roots)
        trees = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist(), strict=True)
        rows = [
            self._tree(root, tail, *nodes) for nodes, tail, root in zip(trees, self._tails, roots.tolist(), strict=True)
        ]
        depth = self.drafter.max_depth
        return DraftTree.of_lists(rows, self.drafter.target.vocab_size, self.request.device, depth)

    def _tree(self, root: int, tail: list[int], tokens: list[int], parents: list[int], scores: list[float]) -> Nodes:
        """Return the tree of the target's tokens for the paths of the small LM's nodes, the likeliest path first."""
        drafted = [node for node, score in enumerate(scores) if node and score > -inf]
        above = {parents[node] for node in drafted}
        new_tokens, new_parents, new_scores = [root], [0], [0.0]
        node_of = dict[tuple[int, int], int]()  # node by its parent and its token
        for leaf in sorted(set(drafted) - above, key=lambda node: -scores[node]):
            path, parent = path_to(leaf, parents), 0
            for token, score in self._chain(tail, [tokens[x] for x in path], [scores[x] for x in path]):
                if (parent, token) not in node_of:
                    if len(new_tokens) == self.drafter.max_nodes:
                        break
                    node_of[parent, token] = len(new_tokens)
                    new_tokens.append(token)
                    new_parents.append(parent)
                    new_scores.append(score)
                parent = node_of[parent, token]
        return new_tokens, new_parents, new_scores

    def _chain(self, tail: list[int], drafted: list[int], scores: list[float]) -> list[tuple[int, float]]:
        """Return the target's tokens for the text of a path of the small LM's, each with its last byte's score."""
        translation, chain, raw = self.drafter.translation, list[tuple[int, float]](), b""
        ends = list[tuple[int, float]]()  # where each drafted token's bytes end, and its score
        final: int | None = None
        for token, score in zip(drafted, scores, strict=True):
            if token not in translation.ours.raw:
                final = next((theirs for theirs, ours in translation.special.items() if ours == token), None)
                break
            raw += translation.ours.raw[token]
            ends.append((len(raw), score))
        at = 0
        for token in translation.theirs.after(_window(tail, translation.theirs), raw):
            at += len(translation.theirs.raw[token])
            chain.append((token, next(score for end, score in ends if end >= at)))
        if final is not None:
            chain.append((final, scores[len(ends)]))
        return chain[: self.drafter.max_depth]


def _window(tokens: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Return the last tokens after the last special one, from the beginning of a character on."""
    window = [*takewhile(vocabulary.raw.__contains__, reversed(tokens[-WINDOW:]))]
    return [*dropwhile(lambda token: 0x80 <= vocabulary.raw[token][0] < 0xC0, reversed(window))]
