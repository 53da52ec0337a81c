"""The state of a batch between two rounds: everything that a round reads and changes, on the target's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsd_core.former import Renamed, warn_renamed
from fsd_core.tensors import kept_rows, to_device
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters.session import DraftSession
from fsd_infer.request.processors import TreeProcessors
from fsd_infer.rules import Rule, TokenHistory
from fsd_infer.targets.target import Target
from fsd_infer.trees.policy import TreePolicy


@dataclass
class DecodeState(Renamed):
    """The unfinished rows of a batch, B of them. Recorded rounds have buckets of rows: those without a text come last.

    Attributes:
        target: the model that verifies.
        processors: the request's logits processors.
        greedy: temperature 0.
        generator: random generator of all draws; None: torch's global one.
        rules: [B] the rule of each row.
        prompt_indices: [≤ B] index of each row among the request's prompts.
        cache: the target's keys and values.
        session: the drafter's state.
        texts: prompts and answers. Between two rounds the target has read all but the last token of each, the root.
        max_lengths: [B] tokens of prompt and longest allowed answer.
        budget: [B] nats that each row may still spend; None: no rule has a budget.
        kl_excess: [B] nats beyond the targets of adaptive KL coefficients, see :class:`~fsd_infer.rules.RoundInput`.
        measure_log_likelihood: whether to measure the log-likelihood of emitted tokens.
        max_nodes: nodes of the largest tree.
        live: [B] bool; rows that are not finished. None: finished rows leave the batch at once.
        policy: chooses the shape of every round's trees; None: the drafter's own shape.
        history: returns the tokens before each row's root, as processors take them; None for finished rows.
        on_phase: called with the name of every phase as it ends.
    """

    former_members = {"roots": "texts.roots"}

    target: Target
    processors: TreeProcessors
    greedy: bool
    generator: torch.Generator | None
    rules: list[Rule]
    prompt_indices: list[int]
    cache: SlotCache
    session: DraftSession
    texts: TokenHistory
    max_lengths: Tensor
    budget: Tensor | None
    kl_excess: Tensor
    measure_log_likelihood: bool
    max_nodes: int
    live: Tensor | None = None
    policy: TreePolicy | None = None
    history: Callable[[], list[Tensor | None]] = list
    on_phase: Callable[[str], None] = field(default=lambda phase: None)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def lengths(self) -> Tensor:
        """[B] tokens that the target has read: ``texts.lengths - 1``, which had this name."""
        warn_renamed("DecodeState.lengths", "it is now texts.lengths - 1", 3)
        return self.texts.lengths - 1

    @property
    def asks_host(self) -> bool:
        """Whether the host computes something of a tree between its verification and its acceptance."""
        looks_up_ngrams = self.session.reads_other_texts and any(rule.exact_ngram_size for rule in self.rules)
        return self.processors.contextual or looks_up_ngrams

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, which ascend; drop or mask all others. Without any, the request has ended."""
        index = torch.tensor(rows, dtype=torch.long)
        if not rows:
            self.prompt_indices = []
        elif self.live is not None:
            live = torch.zeros(len(self.rules), dtype=torch.bool).index_fill_(0, index, True)
            self.live.copy_(to_device(live, self.device))
        else:
            self._take_rows(index)
            self.cache.keep_rows(index)
            self.session.keep_rows(index)

    def release_request(self) -> None:
        """Drop the references to the request: its history and its callbacks."""
        self.history, self.on_phase = list, lambda phase: None

    def tensors(self) -> list[Tensor]:
        """Return what a round changes in place, without the drafter's, and without keys and values."""
        budget = [] if self.budget is None else [self.budget]
        return [self.kl_excess, self.max_lengths, *budget, *self.texts.tensors]

    def restart(self, fresh: DecodeState) -> DecodeState:
        """Take over the texts of a new request of the same key, in the same tensors; return this state."""
        assert self.live is not None and fresh.live is not None
        self.live.copy_(fresh.live)
        old, new = self.tensors(), fresh.tensors()
        if self.session.is_recordable:
            self.session.restart(fresh.session)
            old, new = old + self.session.tensors(), new + fresh.session.tensors()
        else:
            self.session = fresh.session
        for x, value in zip(old, new, strict=True):
            x.copy_(value)
        self.prompt_indices, self.history, self.processors = fresh.prompt_indices, fresh.history, fresh.processors
        self.policy, self.session.shape = fresh.policy, fresh.session.shape
        if self.cache.offsets is not None and fresh.cache.offsets is not None:
            self.cache.offsets.copy_(fresh.cache.offsets)
        return self

    def folded(self, rows: Sequence[int]) -> DecodeState:
        """Return the state of these rows, in memory of their own. Restart this one before its next use."""
        result, index = copy(self), torch.tensor(rows)
        result.texts, result.cache, result.session = copy(self.texts), self.cache.detached(), self.session.folded(index)
        result._take_rows(index)
        result.cache.keep_rows(index)
        result.cache = result.cache.reallocated(lambda: self.target.new_cache(len(rows), self.cache.capacity))
        return result

    def _take_rows(self, rows: Tensor) -> None:
        for name in ("rules", "prompt_indices", "kl_excess", "max_lengths", "budget"):
            setattr(self, name, kept_rows(getattr(self, name), rows))
        self.texts.keep_rows(rows)
