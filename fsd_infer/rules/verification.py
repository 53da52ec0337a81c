"""What the engine passes to rules in each round, and what rules return. Tensors only: rules know no models.

Shapes as in :mod:`fsd_infer.trees.tree`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fsd_core.errors import FsdError, NonFiniteLogitsError
from fsd_core.former import FormerName, Renamed
from fsd_core.sampling import FORKS
from fsd_core.tensors import on_host, to_device
from fsd_infer.rules.texts import TokenHistory
from fsd_infer.trees.tree import DraftTree


class TokenOrigin(IntEnum):
    """Where an emitted token came from."""

    TARGET = 0  # the target's own draw: outside the drafted children, or at a leaf
    EXACT = 1  # a draft that the exact rule accepts, too
    GATE = 2  # a token that only the lossy distribution emits


class Emission(NamedTuple):
    """An emitted token.

    Attributes:
        token: its id.
        source: where it came from.
        relaxed: whether a lossy distribution applied at its context.
        nats: spent at its context.
        proposer: index into the drafter's ``proposers``; -1 if the token was not drafted.
        depth: position among the tokens of its round, from 1.
        first_choice: proposer and logprob gap of the drafter's best child at the context; None if it had no children.
        log_likelihood: the target's raw log-probability of the token, if measured.
    """

    token: int
    source: TokenOrigin
    relaxed: bool
    nats: float
    proposer: int
    depth: int
    first_choice: tuple[int, float] | None
    log_likelihood: float | None


Emission.gate_open = FormerName(Emission, "gate_open", "relaxed")  # type: ignore[attr-defined]


@dataclass
class RoundInput(Renamed):
    """The input of rules in one round.

    Attributes:
        tree: the drafts.
        logits: [B, N, V] the target's raw logits at every node, in any floating-point type; rules compute in fp32.
        scores: [B, N, V] ``logits`` after the request's logits processors, temperature included; the same tensor if
            there are none.
        greedy: temperature 0: every draw is an argmax.
        uniforms: [B, N, 3] independent uniforms in [0, 1). Column 0 picks a child or none, column 1 draws the token
            after the path, column 2 is for gates that open at random. A greedy round uses only column 2; None is
            allowed there for rules without such gates.
        budget_left: [B] nats that each row may still spend; None: each rule's own budget.
        process_draft: maps the tree's raw ``q_logits`` to processed scores [B, I, V] over the target's vocabulary;
            None if there are no processors. Called at most once per round, by rules that need a processed q.
        texts: each row's prompt and answer so far, the root included; only rules that look at them need them.
        kl_excess: [B] nats that each row has spent beyond what its rule allowed so far, see :attr:`Verdict.allowed`;
            None: nothing is known.
        max_accepted: [B] most drafts that each row may accept; None: all. It depends only on lengths, so that no
            distribution changes.
        seen_ngrams: n -> [B, N] bool, the drafts that complete an n-gram of other texts that the drafter reads, for
            rules with ``exact_ngram_size``; None: it reads none. Not asked about sampled drafts.
    """

    former_members = {"copies": "seen_ngrams"}

    tree: DraftTree
    logits: Tensor
    scores: Tensor
    greedy: bool
    uniforms: Tensor | None = None
    budget_left: Tensor | None = None
    process_draft: Callable[[DraftTree], Tensor] | None = None
    texts: TokenHistory | None = None
    kl_excess: Tensor | None = None
    seen_ngrams: Callable[[int], Tensor | None] | None = None
    max_accepted: Tensor | None = None


LOG_R = "a rule's values of log_r"
_FAULT = "not finite: "  # begins the names of columns with faults
_COLUMNS = {
    "path": torch.long, "accepted": torch.long, "tokens": torch.long, "sources": torch.long, "relaxed": torch.bool,
    "spent": None, "first_choices": torch.long, "logprob_gap": None,
}  # fmt: skip


@lru_cache(maxsize=256)
def row_index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Return row numbers on a device. They are copied there once: a captured round copies nothing from the host."""
    return to_device(torch.tensor(rows), device)


@dataclass
class Verdict(Renamed):
    """The result of a round. D is at least the tree's depth; column j is about a row's j-th new token.

    The tensors are on the device of the tree, or after :meth:`on_host` on the CPU.

    Attributes:
        path: [B, D+1] node indices of the accepted path, root first, padded with its last node. After :meth:`cut` the
            padding is the draft that is emitted last.
        accepted: [B] number of accepted drafts (0..D); the row emits ``accepted + 1`` tokens. -1: the row has finished.
        tokens: [B, D+1] the emitted tokens: the accepted drafts, the token that follows them, padding 0.
        sources: [B, D+1] :class:`TokenOrigin` of each emitted token.
        relaxed: [B, D+1] bool; whether a lossy distribution emitted the token.
        spent: [B, D+1] nats spent at each context, 0 where the distribution is the target's.
        first_choices: [B, D+1] the drafter's first choice below each node of the path: the child with the highest
            score, the first of equals; -1 without children, and in the padding.
        logprob_gap: [B, D+1] ln p of the target's likeliest token minus ln p of that choice (processed p), at least 0.
            NaN if there is none.
        proposers: [B, N] of the tree's nodes, see :class:`DraftTree`; None if one drafter proposed all.
        allowed: [B] nats that each row's rule allows for the emitted tokens, on the device of the logits; None if no
            rule adapts its KL coefficient.
        faults: [B, ·] bool by what is wrong: logits that are not finite, by their source, or ``FORKS``. A verdict with
            any of them is void, see :meth:`check`.
    """

    former_members = {"gate_open": "relaxed", "first": "first_choices"}

    path: Tensor
    accepted: Tensor
    tokens: Tensor
    sources: Tensor
    relaxed: Tensor
    spent: Tensor
    first_choices: Tensor
    logprob_gap: Tensor
    proposers: Tensor | None = None
    allowed: Tensor | None = None
    faults: dict[str, Tensor] = field(default_factory=dict)

    def cut(self, most: Tensor) -> None:
        """Accept at most ``most`` [B] drafts; each row emits one token more, which then is a draft, too."""
        self.accepted = self.accepted.minimum(most)
        steps = torch.arange(self.path.shape[1], device=self.path.device)
        self.path = self.path.gather(1, steps.minimum(self.accepted[:, None] + 1))
        beyond = steps > self.accepted[:, None]
        self.spent = self.spent.masked_fill(beyond, 0.0)
        self.first_choices = self.first_choices.masked_fill(beyond, -1)
        self.logprob_gap = self.logprob_gap.masked_fill(beyond, math.nan)

    def columns(self) -> dict[str, Tensor]:
        """Return what the host reads, [B, ·] each, for one transfer and :meth:`of_columns`."""
        fixed = {name: getattr(self, name) for name in _COLUMNS}
        fixed["accepted"] = self.accepted[:, None]
        proposers = {} if self.proposers is None else {"proposers": self.proposers}
        return {**fixed, **proposers, **{_FAULT + name: wrong for name, wrong in self.faults.items()}}

    @classmethod
    def of_columns(cls, columns: Mapping[str, Tensor], allowed: Tensor | None = None) -> Verdict:
        """Return the verdict of columns of any type, checked. Raises as :meth:`check`."""
        faults = {name.removeprefix(_FAULT): x > 0 for name, x in columns.items() if name.startswith(_FAULT)}
        given = {name: columns[name].to(kind or columns[name].dtype) for name, kind in _COLUMNS.items()}
        given["accepted"] = given["accepted"][:, 0]
        proposers = columns["proposers"].long() if "proposers" in columns else None
        verdict = cls(**given, proposers=proposers, allowed=allowed, faults=faults)
        verdict.check()
        return verdict

    def on_host(self) -> Verdict:
        """Return the verdict on the CPU, checked: one transfer, which syncs. Raises as :meth:`check`."""
        columns = self.columns()
        return self.of_columns(dict(zip(columns, on_host(*columns.values()), strict=True)), self.allowed)

    def check(self) -> None:
        """Raise if any of :attr:`faults` is true. Syncs with the device.

        Raises:
            NonFiniteLogitsError: target or drafter logits are NaN, +inf or all -inf.
            FsdError: sampled drafts do not form a chain.
        """
        for source, wrong in self.faults.items():
            if not wrong.any():
                continue
            if source == FORKS:
                raise FsdError(
                    "drafts drawn from q (q_scores) must form a chain: mark those of a tree in DraftTree.drawn."
                )
            row = int(wrong.any(1).nonzero()[0])
            fix = "Check its weights and dtype (fp16 overflows; bf16 or fp32 do not)."
            fix = "Let the rule give -inf to tokens that it never emits." if source == LOG_R else fix
            fix = "Check the request's logits processors." if "processed" in source else fix
            raise NonFiniteLogitsError(f"{source} in row {row} are NaN, +inf or all -inf. {fix}")

    def emissions(self, log_p: Sequence[Sequence[float]] | None = None) -> list[list[Emission]]:
        """Return each row's tokens in order, of a verdict on the CPU. ``log_p``: log-likelihoods, [B, D+1]."""
        columns = (self.tokens, self.sources, self.relaxed, self.spent, self.path, self.first_choices, self.logprob_gap)
        proposers = None if self.proposers is None else self.proposers.tolist()
        rows: list[list[Emission]] = []
        for row, (count, *facts) in enumerate(zip(self.accepted.tolist(), *(column.tolist() for column in columns))):
            tokens, sources, relaxed, spent, path, first, logprob_gap = facts
            by = [0] * (1 + max(*path, *first)) if proposers is None else proposers[row]
            # below: the node that follows each of the path; the path's last node again where no draft does
            rows.append([
                Emission(
                    tokens[step], sources[step], relaxed[step], spent[step],
                    by[below] if below != path[step] else -1,
                    step + 1,
                    (by[first[step]], logprob_gap[step]) if first[step] >= 0 else None,
                    None if log_p is None else log_p[row][step],
                )
                for step, below in enumerate([*path[1 : count + 2], path[-1]][: count + 1])
            ])  # fmt: skip
        return rows
