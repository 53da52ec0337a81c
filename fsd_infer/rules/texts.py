"""The texts so far, prompt and answer, as rules see them, and the drafts that complete a known n-gram."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsd_infer.device.transfer import to_device
from fsd_infer.rules.phases import Markers
from fsd_infer.tree import DraftTree

_PADDING = -1


class Texts:
    """Each row's prompt and answer so far; the last token is the next tree's root.

    Args:
        answers: per row the list of its tokens. The caller may append to the lists between rounds. They are read when a
            rule asks, and then only the new tokens.
        prompts: per row; None for empty ones.
        device: of :attr:`tokens`.
        markers: opening and closing token of the phases that rules name.
    """

    def __init__(
        self,
        answers: Sequence[list[int]],
        prompts: Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
        markers: Markers | None = None,
    ) -> None:
        self.markers = markers or {}
        self._answers = list(answers)
        self._prompts = [()] * len(self._answers) if prompts is None else [tuple(prompt) for prompt in prompts]
        self._device = torch.device(device)
        self._counts = [0] * len(self._answers)  # tokens of each row that are in the buffer
        self._buffer = torch.full((len(self._answers), 64), _PADDING)

    @property
    def tokens(self) -> Tensor:
        """[B, L] on the device, padded at the end with -1."""
        longest = max((len(prompt) + len(tail) for prompt, tail in zip(self._prompts, self._answers)), default=0)
        if longest > self._buffer.shape[1]:
            room = torch.full((len(self._answers), 2 * longest - self._buffer.shape[1]), _PADDING)
            self._buffer = torch.cat([self._buffer, room], 1)
        for row, (prompt, answer, count) in enumerate(zip(self._prompts, self._answers, self._counts)):
            length = len(prompt) + len(answer)
            if length > count:
                new = answer[count - len(prompt) :] if count >= len(prompt) else [*prompt[count:], *answer]
                self._buffer[row, count:length] = torch.tensor(new)
                self._counts[row] = length
        return to_device(self._buffer[:, :longest], self._device)

    def last(self, count: int) -> Tensor:
        """Return the last tokens of each text in order, [B, count] on the device, -1 before its beginning."""
        tails = [[*prompt[-count:], *answer[-count:]][-count:] for prompt, answer in zip(self._prompts, self._answers)]
        padded = [[_PADDING] * (count - len(tail)) + tail for tail in tails]
        return to_device(torch.tensor(padded, dtype=torch.long).view(len(padded), count), self._device)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        self._answers = [self._answers[row] for row in rows]
        self._prompts = [self._prompts[row] for row in rows]
        self._counts = [self._counts[row] for row in rows]
        self._buffer = self._buffer[list(rows)]


def last_tokens(texts: Texts, tree: DraftTree, count: int) -> Tensor:
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


def known(texts: Texts, tree: DraftTree, n: int) -> Tensor:
    """[B, N] bool; whether the node's token completes an n-gram that text and path had before it."""
    ends = last_tokens(texts, tree, n)
    above = tree.ancestors & (tree.depths[:, :, None] > tree.depths[:, None]) & (tree.depths > 0)[:, None]
    completes = (above & (ends[:, :, None] == ends[:, None]).all(-1)).any(-1)
    tokens = texts.tokens
    if tokens.shape[1] >= n:
        windows = tokens.unfold(1, n, 1)[:, None]  # [B, 1, L - n + 1, n]
        same = ends[:, :, None, 0] == windows[..., 0]
        for i in range(1, n):
            same &= ends[:, :, None, i] == windows[..., i]
        completes = completes | same.any(-1)
    return completes & (tree.depths > 0)


def known_tokens(texts: Texts, tree: DraftTree, rows: Tensor, nodes: Tensor, n: int, vocab_size: int) -> Tensor:
    """[R, V] bool; which tokens would complete a known n-gram of text and path after these R nodes."""
    count = rows.shape[0]
    known = torch.zeros(count, vocab_size + 1, dtype=torch.bool, device=rows.device)  # last column: misses
    last = last_tokens(texts, tree, n)
    begun, ends = last[rows, nodes, 1:], last[rows]  # [R, n - 1], [R, N, n]
    on_path = tree.ancestors[rows, nodes] & (tree.depths[rows] > 0)  # [R, N]
    same = on_path & (ends[..., :-1] == begun[:, None]).all(-1)
    known.scatter_(1, torch.where(same, ends[..., -1], vocab_size), True)
    tokens = texts.tokens[rows]
    if tokens.shape[1] >= n:
        windows = tokens.unfold(1, n, 1)  # [R, L - n + 1, n]
        same = (windows[..., :-1] == begun[:, None]).all(-1) & (windows[..., -1] >= 0)
        known.scatter_(1, torch.where(same, windows[..., -1], vocab_size), True)
    return known[:, :-1]
