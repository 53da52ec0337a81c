"""Extend a head's reduced draft vocabulary by the ids of the texts of a batch.

A reduced draft vocabulary holds the ids that are frequent in general. The other ids of an answer, such as names and
numbers, mostly occur in its prompt. A head that shares the target's LM head can draft them too, for a few more rows of
that LM head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsd_core.functional import NEVER
from fsd_core.tensors import is_host, to_device
from fsd_infer.targets.target import Target

MIN_ROOM = 16  # extra ids for which recorded rounds have room


class _Extended(NamedTuple):
    """A draft vocabulary with extra ids, on the device.

    Attributes:
        ids: [Vd + X] target ids, the extra ones last.
        lm_head: the extra ids' rows of the LM head, H to X.
        foreign: [B, 1, X] whether a row may not draft an id, because its text lacks it; None: all rows may draft all.
    """

    ids: Tensor
    lm_head: nn.Linear
    foreign: Tensor | None


class ContextVocabulary:
    """The drafter's vocabulary for one batch: the draft vocabulary, followed by X extra ids of the texts.

    A row drafts extra ids of its own text only, so that no answer depends on other rows.

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
        self._target, self._draft_ids, self._lm_head, self._drafted = target, draft_ids, lm_head, drafted
        self._extra: dict[int, int] = {}  # extra ids and their columns
        self._in_text = torch.zeros(batch, 0, dtype=torch.bool)  # [B, X] on the CPU; whether an id is in the row's text
        self._extended: _Extended | None = None  # None: there are no extra ids, or they have changed
        self._host_inputs: _Extended | None = None  # in recorded rounds
        self._prepared: Tensor | None = None

    def extend(self, texts: Sequence[Sequence[int]]) -> None:
        """Add the ids of the tokens that extend each row's text."""
        drafted = self._drafted
        missing = [(row, token) for row, text in enumerate(texts) for token in text if not drafted[token]]
        if not missing:
            return
        rows = torch.tensor([row for row, _ in missing])
        columns = torch.tensor([self._extra.setdefault(token, len(self._extra)) for _, token in missing])
        grown = len(self._extra) - self._in_text.shape[1]
        if grown:
            self._in_text = torch.nn.functional.pad(self._in_text, (0, grown))
        if not self._in_text[rows, columns].all():
            self._in_text[rows, columns] = True
            self._prepared = None
            self._extended = None if grown else self._updated()

    @property
    def ids(self) -> Tensor:
        extended = self._read()
        return self._draft_ids if extended is None else extended.ids

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [B, E, Vd + X], in the target's dtype, of features [B, E, H]."""
        logits, extended = self._target.lm_logits(features, self._lm_head), self._read()
        if extended is None:
            return logits
        lm_head = extended.lm_head
        extra = self._target.lm_logits(features.to(lm_head.weight.dtype), lm_head).to(logits.dtype)
        return self.masked(torch.cat([logits, extra], -1))

    def masked(self, logits: Tensor) -> Tensor:
        """Rule out the extra ids of other rows' texts in logits [B, E, Vd + X], in place."""
        extended = self._read()
        if extended is not None and extended.foreign is not None:
            logits[..., len(self._draft_ids) :].masked_fill_(extended.foreign, NEVER)
        return logits

    @property
    def extra_rows(self) -> Tensor | None:
        """[X, H] the extra ids' rows of the LM head, on a CPU in fp32; None: there are none."""
        extended = self._read()
        return None if extended is None else extended.lm_head.weight

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows [B'] of the batch. ``rows`` is on the CPU."""
        self._in_text, self._prepared = self._in_text[rows], None
        self._extended = self._updated()

    @property
    def is_recordable(self) -> bool:
        """Whether a recorded round can take rows of the LM head; of others they would be computed every time."""
        return isinstance(self._target.model.get_output_embeddings(), nn.Linear)

    def host_inputs(self) -> Tensor:
        """Return the extra ids for :meth:`DraftSession.host_inputs`, padded to a power of two by ids of no draft.

        Returns:
            [1 + B, X] the ids and, for each row, whether they are foreign to it.
        """
        if self._prepared is None:
            most = min(max(MIN_ROOM, 1 << (len(self._extra) - 1).bit_length()), self._drafted.count(0))
            every = (token for token, drafted in enumerate(self._drafted) if not drafted and token not in self._extra)
            ids = torch.tensor([*self._extra, *islice(every, most - len(self._extra))])
            in_text = torch.nn.functional.pad(self._in_text, (0, most - len(self._extra)))
            self._prepared = torch.cat([ids[None], (~in_text).long()])
        return self._prepared

    def set_host_inputs(self, marked: Tensor | None) -> None:
        """Take what :meth:`host_inputs` returned; see :meth:`DraftSession.set_host_inputs`."""
        self._host_inputs = None
        if marked is not None:
            self._host_inputs = self._of(marked[0], marked[1:, None].bool())

    def _read(self) -> _Extended | None:
        """Return the extended vocabulary; None if there are no extra ids."""
        if self._host_inputs is not None or not self._extra:
            return self._host_inputs
        if self._extended is None:
            ids = to_device(torch.tensor(list(self._extra)), self._draft_ids.device)
            self._extended = self._of(ids, self._foreign())
        return self._extended

    def _updated(self) -> _Extended | None:
        """Return the vocabulary with the same ids, for the rows as they are now."""
        return None if self._extended is None else self._extended._replace(foreign=self._foreign())

    def _of(self, ids: Tensor, foreign: Tensor | None) -> _Extended:
        """Return the vocabulary extended by ids [X] that are on the device."""
        head = self._target.reduced_lm_head(ids)
        if is_host(ids.device):  # where bf16 takes longer, for so few rows
            head = head.float()
        return _Extended(torch.cat([self._draft_ids, ids]), head, foreign)

    def _foreign(self) -> Tensor | None:
        foreign = ~self._in_text[:, None]
        return to_device(foreign, self._draft_ids.device) if foreign.any() else None
