"""What a head with a reduced draft vocabulary can draft in one batch: its own ids, and those of the batch's texts.

A reduced draft vocabulary holds what is frequent everywhere. What an answer says beyond it (names, numbers, words of
the text to be summed up) mostly stands in the prompt, and a head that shares the target's LM head can draft it at the
cost of a few more rows of that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsd_infer.device.transfer import to_device
from fsd_infer.targets.target import Target

NEVER = -1e4  # a logit that underflows to q = 0 in every float type; -inf would make NaN of 0·log 0


class ContextVocabulary:
    """The drafter vocabulary of one batch: the draft vocabulary, then the ids of the texts that it lacks.

    A row drafts the ids of its own text only, so that no answer depends on its neighbours in the batch.

    Args:
        target: whose LM head is shared.
        draft_ids: [Vd] the head's draft vocabulary, on the target's device.
        lm_head: the rows ``draft_ids`` of the LM head.
        drafted: [V] bool on the CPU, whether an id is in the draft vocabulary.
        batch: B.

    Attributes:
        ids: [Vd + X] target id of each entry, on the target's device; the first Vd are ``draft_ids``.
    """

    def __init__(self, target: Target, draft_ids: Tensor, lm_head: nn.Module, drafted: Tensor, batch: int) -> None:
        self.ids = draft_ids
        self._target, self._draft_ids, self._lm_head, self._drafted = target, draft_ids, lm_head, drafted
        self._extra: dict[int, int] = {}  # id -> its place after the draft vocabulary
        self._own = torch.zeros(batch, 0, dtype=torch.bool)  # [B, X], on the CPU: is an entry in the row's text
        self._foreign: Tensor | None = None  # [B, 1, X], its opposite on the target's device; None where all are own
        self._tail: nn.Module | None = None

    def extend(self, tokens: Tensor, counts: Tensor) -> None:
        """The texts grew by tokens [B, K], of which the first ``counts`` [B] are real; both on the CPU."""
        real = torch.arange(tokens.shape[1]) < counts[:, None]
        rows, columns = (real & ~self._drafted[tokens]).nonzero(as_tuple=True)
        if not len(rows):
            return
        found = tokens[rows, columns].tolist()
        places = torch.tensor([self._extra.setdefault(token, len(self._extra)) for token in found])
        grown = len(self._extra) - self._own.shape[1]
        if grown:
            self._own = torch.nn.functional.pad(self._own, (0, grown))
            extra = to_device(torch.tensor(list(self._extra)), self._draft_ids.device)
            self.ids = torch.cat([self._draft_ids, extra])
            self._tail = self._target.reduced_lm_head(extra)
        if not self._own[rows, places].all():
            self._own[rows, places] = True
            self._mark_foreign()

    def logits(self, features: Tensor) -> Tensor:
        """[B, E, H] -> [B, E, Vd + X] in the target's data type."""
        logits = self._target.lm_logits(features, self._lm_head)
        if self._tail is None:
            return logits
        extra = self._target.lm_logits(features, self._tail)
        if self._foreign is not None:
            extra = extra.masked_fill(self._foreign, NEVER)
        return torch.cat([logits, extra], -1)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows [B'], on the CPU, of the batch."""
        self._own = self._own[rows]
        self._mark_foreign()

    def _mark_foreign(self) -> None:
        foreign = ~self._own[:, None]
        self._foreign = to_device(foreign, self._draft_ids.device) if foreign.any() else None
