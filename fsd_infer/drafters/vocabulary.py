"""Extend a head's reduced draft vocabulary by the ids of the texts of a batch.

A reduced draft vocabulary holds the ids that are frequent in general. The other ids of an answer, such as names and
numbers, mostly occur in its prompt. A head that shares the target's LM head can draft them too, for a few more rows of
that LM head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsd_core.tensors import to_device
from fsd_infer.targets.target import Target

NEVER = -1e4  # a logit whose q underflows to 0 in every dtype; -inf would make 0 · ln 0 NaN


class ContextVocabulary:
    """The drafter's vocabulary for one batch: the draft vocabulary, followed by X further ids of the texts.

    A row drafts further ids of its own text only, so that no answer depends on other rows.

    Args:
        target: the model that owns the LM head.
        draft_ids: [Vd] the head's draft vocabulary, on the target's device.
        lm_head: the rows ``draft_ids`` of the LM head.
        drafted: [V] whether an id is in the draft vocabulary.
        batch: number of rows B.

    Attributes:
        ids: [Vd + X] target id of each entry, on the target's device.
    """

    def __init__(self, target: Target, draft_ids: Tensor, lm_head: nn.Module, drafted: bytearray, batch: int) -> None:
        self.ids = draft_ids
        self._target, self._draft_ids, self._lm_head, self._drafted = target, draft_ids, lm_head, drafted
        self._extra: dict[int, int] = {}  # further ids and their places
        self._own = torch.zeros(batch, 0, dtype=torch.bool)  # [B, X] on the CPU; whether an id is in the row's text
        self._foreign: Tensor | None = None  # [B, 1, X] ~_own, on the target's device; None if no id is foreign
        self._tail: nn.Linear | None = None  # the rows of the further ids of the LM head, in fp32

    def extend(self, texts: Sequence[Sequence[int]]) -> None:
        """Add the ids of the tokens that extend each row's text."""
        drafted = self._drafted
        found = [(row, token) for row, text in enumerate(texts) for token in text if not drafted[token]]
        if not found:
            return
        rows = torch.tensor([row for row, _ in found])
        places = torch.tensor([self._extra.setdefault(token, len(self._extra)) for _, token in found])
        grown = len(self._extra) - self._own.shape[1]
        if grown:
            self._own = torch.nn.functional.pad(self._own, (0, grown))
            extra = to_device(torch.tensor(list(self._extra)), self._draft_ids.device)
            self.ids = torch.cat([self._draft_ids, extra])
            self._tail = self._target.reduced_lm_head(extra).float()  # bf16 takes longer on a CPU, for so few rows
        if not self._own[rows, places].all():
            self._own[rows, places] = True
            self._mark_foreign()

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [B, E, Vd + X], in the target's dtype, of features [B, E, H]."""
        logits = self._target.lm_logits(features, self._lm_head)
        if self._tail is None:
            return logits
        extra = self._target.lm_logits(features.float(), self._tail).to(logits.dtype)
        return self.masked(torch.cat([logits, extra], -1))

    def masked(self, logits: Tensor) -> Tensor:
        """Rule out the further ids of other rows' texts in logits [B, E, Vd + X], in place."""
        if self._foreign is not None:
            logits[..., len(self._draft_ids) :].masked_fill_(self._foreign, NEVER)
        return logits

    @property
    def more(self) -> Tensor | None:
        """[X, H] in fp32, the rows of the further ids of the LM head."""
        return None if self._tail is None else self._tail.weight

    def select(self, rows: Tensor) -> None:
        """Keep only these rows [B'] of the batch. ``rows`` is on the CPU."""
        self._own = self._own[rows]
        self._mark_foreign()

    def _mark_foreign(self) -> None:
        foreign = ~self._own[:, None]
        self._foreign = to_device(foreign, self._draft_ids.device) if foreign.any() else None
