"""The texts so far, prompt and answer, as rules see them: repeated n-grams, phases, and sentences.

A phase is the span between two marker tokens. A rule with ``only_in`` is lossy only inside a phase. ``think`` names
the spans between ``<think>`` and ``</think>``, ``OPENING..CLOSING`` any other pair. A token is in a phase if the last
marker before it, in prompt, answer and draft, is the opening one. So the closing marker is inside, the opening one is
not.

A sentence ends with a token that has one of ``. ! ? : ;``, their forms in Chinese and Japanese, or a line's end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_core.errors import FsdError
from fsd_core.former import Renamed, former_keywords
from fsd_core.tensors import kept_rows, to_device
from fsd_infer.trees.tree import DraftTree

_PADDING = -1
Markers = Mapping[str, tuple[int, int]]  # phase -> opening and closing token
NOWHERE = (-1, -1)  # markers of a phase that no text has
# as byte-level vocabularies write them, and as others do: a line's end, then 。！？：；
_ENDS = (*".!?:;", "\n", "\u010a", "<0x0A>", *"。！？：；", "ãĢĤ", "ï¼ģ", "ï¼Ł", "ï¼ļ", "ï¼Ľ")


class TokenHistory(Renamed):
    """Each row's prompt and answer so far, on a device; the last token is the next tree's root.

    Args:
        answers: per row its tokens.
        prompts: per row; None for empty ones.
        device: of :attr:`tokens`.
        markers: opening and closing token of the phases that rules name.
        sentence_ends: which tokens end one, see :func:`sentence_ends`; None if no rule asks.
        width: tokens of a text for which there is room; :meth:`append` also writes padding there.

    Attributes:
        lengths: [B] tokens of each text.
    """

    former_members = {"ends": "sentence_ends", "answered": "answer_lengths"}

    @former_keywords(ends="sentence_ends")
    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
        markers: Markers | None = None,
        width: int = 0,
        sentence_ends: Tensor | None = None,
    ) -> None:
        self.markers, self.sentence_ends = markers or {}, sentence_ends
        prompts = [()] * len(answers) if prompts is None else prompts
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        width = max(max(map(len, texts), default=0), width, 1)
        rows = [[*text, *[_PADDING] * (width - len(text))] for text in texts]
        device = torch.device(device)
        self._buffer = to_device(torch.tensor(rows, dtype=torch.long).view(len(texts), width), device)
        self.lengths = to_device(torch.tensor([len(text) for text in texts], dtype=torch.long), device)
        self._prompted = to_device(torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long), device)

    @property
    def tokens(self) -> Tensor:
        """[B, L] on the device, padded at the end with -1. On a CPU L is the longest text, elsewhere it is fixed."""
        return self._buffer[:, : functional.host_max(self.lengths, self._buffer.shape[1]) or 1]

    @property
    def roots(self) -> Tensor:
        """[B] the last token of each text, on the device."""
        return self._buffer.gather(1, self.lengths[:, None] - 1)[:, 0]

    @property
    def answer_lengths(self) -> Tensor:
        """[B] tokens of each answer so far, on the device."""
        return self.lengths - self._prompted

    def last(self, count: int) -> Tensor:
        """Return the last tokens of each text in order, [B, count] on the device, -1 before its beginning."""
        positions = self.lengths[:, None] + torch.arange(-count, 0, device=self.lengths.device)
        return self.tokens.gather(1, positions.clamp_min(0)).masked_fill_(positions < 0, _PADDING)

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Append tokens [B, K] of which the first ``counts`` [B] are real."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = self.lengths[:, None] + steps
        self._buffer.scatter_(1, positions, tokens.masked_fill(steps >= counts[:, None], _PADDING))
        self.lengths += counts

    @property
    def tensors(self) -> list[Tensor]:
        """What tells texts apart; :meth:`append` changes it in place."""
        return [self._buffer, self.lengths, self._prompted]

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows [B'] of the batch. ``rows`` is on the CPU."""
        self._buffer, self.lengths, self._prompted = (kept_rows(x, rows) for x in self.tensors)


def last_tokens(texts: TokenHistory, tree: DraftTree, count: int) -> Tensor:
    """[B, N, count] the last tokens of text and path at each node, the node's own last; -1 before the beginning."""
    batch, nodes = tree.tokens.shape
    # [B, count + N]: the tokens that precede the root, then the tree's
    tokens = torch.cat([texts.last(count + 1)[:, :-1], tree.tokens], 1)
    at = torch.arange(count + nodes, device=tokens.device).expand(batch, -1)
    before = torch.cat([(at[:, : count + 1] - 1).clamp_min(0), tree.parents[:, 1:] + count], 1)  # index of predecessor
    columns, at = [], at[:, count:]
    for _ in range(count):
        columns.append(tokens.gather(1, at))
        at = before.gather(1, at)
    return torch.stack(columns[::-1], -1)


def repeats_ngram(texts: TokenHistory, tree: DraftTree, n: int) -> Tensor:
    """[B, N] bool; whether the node's token completes an n-gram that text and path had before it."""
    return completes_ngram(tree.tokens, texts, tree, n)


@functional.replaceable
def completes_ngram(tokens: Tensor, texts: TokenHistory, tree: DraftTree, n: int) -> Tensor:
    """Return :func:`repeats_ngram` of a tree with these tokens [B, N]."""
    last = last_tokens(texts, tree, n)
    above = tree.ancestors & (tree.depths[:, :, None] > tree.depths[:, None]) & (tree.depths > 0)[:, None]
    completes = (above & (last[:, :, None] == last[:, None]).all(-1)).any(-1)
    tokens = texts.tokens
    if tokens.shape[1] >= n:
        windows = tokens.unfold(1, n, 1)[:, None]  # [B, 1, L - n + 1, n]
        same = last[:, :, None, 0] == windows[..., 0]
        for i in range(1, n):
            same &= last[:, :, None, i] == windows[..., i]
        completes = completes | same.any(-1)
    return completes & (tree.depths > 0)


@functional.replaceable
def repeating_tokens(
    rows: Tensor, nodes: Tensor, texts: TokenHistory, tree: DraftTree, n: int, width: int, columns: Tensor | None = None
) -> Tensor:
    """[R, width] bool; which tokens would repeat an n-gram of text and path after these R nodes.

    columns: [V] column of each token, -1 for none; None: its id.
    """
    repeats = torch.zeros(rows.shape[0], width + 1, dtype=torch.bool, device=rows.device)  # last column: misses

    def put(same: Tensor, tokens: Tensor) -> None:
        if columns is not None:
            tokens = columns[tokens.clamp_min(0)]
        repeats.scatter_(1, torch.where(same & (tokens >= 0), tokens, width), True)

    last_of_nodes = last_tokens(texts, tree, n)
    begun, last = last_of_nodes[rows, nodes, 1:], last_of_nodes[rows]  # [R, n - 1], [R, N, n]
    on_path = tree.ancestors[rows, nodes] & (tree.depths[rows] > 0)  # [R, N]
    same = on_path & (last[..., :-1] == begun[:, None]).all(-1)
    put(same, last[..., -1])
    tokens = texts.tokens[rows]
    if tokens.shape[1] >= n:
        windows = tokens.unfold(1, n, 1)  # [R, L - n + 1, n]
        same = (windows[..., :-1] == begun[:, None]).all(-1) & (windows[..., -1] >= 0)
        put(same, windows[..., -1])
    return repeats[:, :-1]


def markers(phase: str) -> tuple[str, str]:
    """Return a phase's opening and closing token, as text. Raises FsdError for any other notation."""
    if re.fullmatch(r"[\w-]+", phase):
        return f"<{phase}>", f"</{phase}>"
    opening, dots, closing = phase.partition("..")
    if not (opening and dots and closing) or opening == closing:
        raise FsdError(
            f"only_in={phase!r:.60}: give a name, such as think for <think> and </think>, or two different tokens "
            "with two dots between them, such as [THINK]..[/THINK]."
        )
    return opening, closing


def markers_of(rules: Sequence[Any], tokenizer: Any) -> dict[str, tuple[int, int]]:
    """Return the marker tokens of all phases that rules name.

    Raises FsdError if there is no tokenizer, or if a marker is not a single token: its rule would never be lossy.
    """
    by_phase: dict[str, tuple[int, int]] = {}
    for phase in {rule.only_in for rule in rules if rule.only_in is not None}:
        if tokenizer is None:
            raise FsdError(f"only_in={phase}: the target has no tokenizer to look the markers up. Add its files.")
        vocabulary = tokenizer.get_vocab()
        ids = [vocabulary.get(marker, -1) for marker in markers(phase)]
        if min(ids) < 0:
            unknown = markers(phase)[ids.index(-1)]
            raise FsdError(
                f"only_in={phase}: {unknown!r} is not a token of the target, so its texts have no such phase. Name "
                "another pair, OPENING..CLOSING, or leave only_in out."
            )
        by_phase[phase] = ids[0], ids[1]
    return by_phase


def _last_marks(texts: TokenHistory, tree: DraftTree, is_mark: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return [B, 1] the position of each text's last mark, from 1, and [B, N] the depth of each path's; 0: none.

    ``is_mark``: which of some tokens are marks.
    """
    tokens, depths = texts.tokens, tree.depths
    positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    of_text = (positions * is_mark(tokens)).amax(1, keepdim=True)
    return of_text, (tree.ancestors * (depths * is_mark(tree.tokens))[:, None]).amax(-1)


def in_phase(texts: TokenHistory, tree: DraftTree, opening: int, closing: int) -> Tensor:
    """[B, N] bool; whether the token after each node is in the phase."""
    text_opened, opened = _last_marks(texts, tree, lambda tokens: tokens == opening)
    text_closed, closed = _last_marks(texts, tree, lambda tokens: tokens == closing)
    return torch.where(torch.maximum(opened, closed) > 0, opened > closed, text_opened > text_closed)


def sentence_ends(vocabulary: Mapping[str, int]) -> Tensor:
    """[V + 1] bool; which tokens of a tokenizer's ``get_vocab()`` end a sentence. The last entry is for other ids.

    Of an empty vocabulary every token does, so that a rule with ``exact_sentence_start`` decodes exactly.
    """
    ends = torch.full((max(vocabulary.values(), default=-1) + 2,), not vocabulary)
    ends[[number for piece, number in vocabulary.items() if any(mark in piece for mark in _ENDS)]] = True
    return ends


def sentence_ends_of(rules: Sequence[Any], tokenizer: Any, device: torch.device | str) -> Tensor | None:
    """Return :func:`sentence_ends` on a device if a rule leads sentences exactly, otherwise None.

    Raises FsdError if there is no tokenizer.
    """
    if not any(rule.exact_sentence_tokens for rule in rules):
        return None
    if tokenizer is None:
        raise FsdError(
            "exact_sentence_start: the target has no tokenizer to find sentences' ends with. Add its files, or give 0."
        )
    return to_device(sentence_ends(tokenizer.get_vocab()), torch.device(device))


def sentence_position(texts: TokenHistory, tree: DraftTree) -> Tensor:
    """[B, N] tokens of the sentence before the one after each node. Raises FsdError if the texts have no ends."""
    if texts.sentence_ends is None:
        raise FsdError("exact_sentence_start: the texts know no ends of sentences; pass them to TokenHistory.")
    ends, last = texts.sentence_ends, len(texts.sentence_ends) - 1
    ended, on_path = _last_marks(texts, tree, lambda tokens: ends[tokens.clamp(0, last)] & (tokens >= 0))
    return torch.where(on_path > 0, tree.depths - on_path, texts.lengths[:, None] + tree.depths - ended)
