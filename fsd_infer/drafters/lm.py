"""Drafting chains with an independent small causal LM of the same vocabulary (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsd_infer.drafters.base import DRAFTERS, Drafter, DraftRequest, DraftSession
from fsd_infer.errors import FsdError, VocabularyMismatchError
from fsd_infer.target import Target
from fsd_infer.tree import DraftTree, visible_slots


@DRAFTERS.register("lm")
class LMDrafter(Drafter):
    """A chain of ``depth`` tokens per round: sampled from q at temperature > 0, argmax (one-hot q) at 0.

    Args:
        model: the small model.
        target: the model it drafts for.
        depth: drafts per round.

    Raises:
        VocabularyMismatchError: the tokenizers differ (or, without tokenizers, the widths of the logits).
    """

    name = "lm"

    def __init__(self, model: Target, target: Target, depth: int = 5) -> None:
        if depth < 1:
            raise FsdError(f"the chain needs depth >= 1, got {depth}.")
        check_same_vocabulary(model, target)
        self.model = model
        self.depth = depth
        self.vocab_size = target.vocab_size

    @property
    def max_nodes(self) -> int:
        return self.depth + 1

    @property
    def max_depth(self) -> int:
        return self.depth

    def start(self, first_tokens: Tensor, request: DraftRequest) -> LMSession:
        return LMSession(self, first_tokens, request)

    def modules(self) -> list[nn.Module]:
        return [self.model.model]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "model": self.model.name}


class LMSession(DraftSession):
    """``lengths`` counts the text, its last token included; ``cached`` what the small model has read of it."""

    def __init__(self, drafter: LMDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        self.drafter, self.request = drafter, request
        batch, device = request.batch, first_tokens.device
        self.cache = drafter.model.new_cache(batch, request.slots + drafter.depth + 1)
        self.text = torch.zeros(batch, request.slots + 1, dtype=torch.long, device=device)
        self.text[:, 0] = first_tokens
        self.lengths = torch.ones(batch, dtype=torch.long, device=device)
        self.cached = torch.zeros_like(self.lengths)
        self.drafted = 0

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        rows, columns = torch.nonzero(offsets < counts[:, None], as_tuple=True)
        self.text[rows, self.lengths[rows] + columns] = tokens[rows, columns]
        # Of the drafts, the model has read all but the last, and accepted ones lie in their final slots already.
        self.cached = self.cached + (counts - 1).clamp(0, max(self.drafted - 1, 0))
        self.lengths = self.lengths + counts
        self.cached = torch.minimum(self.cached, self.lengths - 1)  # the root is always read anew
        self.drafted = 0

    def draft(self, roots: Tensor) -> DraftTree:
        drafter, request = self.drafter, self.request
        new = int((self.lengths - self.cached).max())
        offsets = torch.arange(new, device=roots.device)
        slots = self.cached[:, None] + offsets  # rows with less to read write padding behind their text
        logits = self._run(self.text.gather(1, slots.clamp_max(self.text.shape[1] - 1)), slots)
        last = (self.lengths - self.cached - 1)[:, None, None].expand(-1, 1, logits.shape[-1])
        logits = logits.gather(1, last)[:, 0]
        tokens, q_logits, q_scores = [roots], [], []
        for step in range(drafter.depth):
            scores = logits if request.process is None else request.process(logits)
            if request.greedy:
                token = logits.argmax(-1)
            else:
                token = torch.multinomial(scores.softmax(-1), 1, generator=request.generator)[:, 0]
            tokens.append(token)
            q_logits.append(logits)
            q_scores.append(scores)
            if step + 1 < drafter.depth:
                logits = self._run(token[:, None], (self.lengths + step)[:, None])[:, 0]
        self.cached, self.drafted = self.lengths.clone(), drafter.depth
        return DraftTree.chain(
            torch.stack(tokens, 1), torch.stack(q_logits, 1), None, None if request.greedy else torch.stack(q_scores, 1)
        )

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.text, self.lengths, self.cached = self.text[rows], self.lengths[rows], self.cached[rows]

    def _run(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Causal forward over tokens [B, M] written to consecutive slots [B, M]; logits [B, M, V] fp32."""
        count = tokens.shape[1]
        self.cache.aim(slots, int(slots[0, 0]) if slots.shape[0] == 1 else None, int(slots.max()) + 1)
        causal = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
        visible = visible_slots(slots[:, 0], causal.expand(slots.shape[0], -1, -1))
        model = self.drafter.model
        limit = model.max_positions
        positions = slots if limit is None else slots.clamp_max(limit - 1)
        everything = torch.arange(visible.shape[-1], device=tokens.device).expand(slots.shape[0], -1)
        logits, _ = model.forward(tokens, positions, visible, everything, self.cache)
        return self._fit(logits.float())

    def _fit(self, logits: Tensor) -> Tensor:
        """Cut or pad (with -inf) the rows that padding added to one model's vocabulary but not to the other's."""
        width = self.drafter.vocab_size
        if logits.shape[-1] >= width:
            return logits[..., :width]
        return torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))


def check_same_vocabulary(drafter: Target, target: Target) -> None:
    """Raise VocabularyMismatchError unless both models mean the same by every token id."""
    if drafter.tokenizer is not None and target.tokenizer is not None:
        ours, theirs = drafter.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        # added special tokens on one side only are harmless: such ids are never drafted, or never accepted
        shared = ours.keys() & theirs.keys()
        if all(ours[t] == theirs[t] for t in shared) and len(shared) >= 0.99 * max(len(ours), len(theirs)):
            return
        reason = f"only {sum(ours[t] == theirs[t] for t in shared)} of {len(theirs)} tokens have the same id in both"
    elif drafter.vocab_size == target.vocab_size:
        return
    else:
        reason = f"their logits have {drafter.vocab_size} and {target.vocab_size} entries"
    raise VocabularyMismatchError(
        f"drafter {drafter.name} and target {target.name} do not share a vocabulary ({reason}): use a drafter of the "
        "same family, or train a head for this target with fsd-train."
    )
