"""What the engine hands to rules every round, and what comes back. Tensors only: rules know no models.

Shapes as in :mod:`fsd_infer.tree`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from fsd_infer.rules.texts import Texts
from fsd_infer.tree import DraftTree


class Source(IntEnum):
    """Where an emitted token came from."""

    TARGET = 0  # the target's own draw: outside the drafted children, or at a leaf
    EXACT = 1  # a drafted token that the exact rule accepts too
    GATE = 2  # a token that only a law other than the target's let through


class Emission(NamedTuple):
    """A token that was emitted.

    Attributes:
        token: its id.
        source: where it came from.
        gate_open: was the law there another than the target's.
        nats: spent there.
        proposer: which of the drafter's ``proposers`` proposed it; -1 if none did.
        depth: its place among the tokens of its round, from 1.
        first_choice: what the drafter liked best there: who proposed it, and its regret; None: nothing was drafted.
        log_likelihood: the target's raw log-probability of it, if measured.
    """

    token: int
    source: Source
    gate_open: bool
    nats: float
    proposer: int
    depth: int
    first_choice: tuple[int, float] | None
    log_likelihood: float | None


@dataclass
class Verification:
    """One round's evidence.

    Attributes:
        tree: the drafts.
        logits: [B, N, V] the target's raw logits at every node, in any floating-point type; rules compute in fp32.
        scores: [B, N, V] the same after the request's logits processors, temperature included
            (the same tensor as ``logits`` where there are none).
        greedy: temperature 0: every draw is an argmax.
        uniforms: [B, N, 3] independent uniforms in [0, 1); column 0 for the exact test or first draw at each node,
            column 1 for a second draw, column 2 for a gate that opens at random. If greedy only column 2 is used,
            and None will do for rules without such a gate.
        budget_left: [B] nats that each row may still spend, on the CPU; None means the rule's own budget,
            if it has one, for this round alone.
        process_draft: maps the tree's raw ``q_logits`` to processed scores [B, I, V] over the target's vocabulary;
            None if there are no processors. Called at most once per round, and only by rules that compare processed
            distributions or draw from a tree's q at temperature above 0.
        texts: each row's prompt and answer so far, the root included; only rules that look at them need them.
        overspent: [B] nats that each row has spent beyond what its rule allowed so far, see :attr:`Verdict.allowed`;
            None: nothing is known.
        copies: n -> [B, N] bool, the drafts that complete an n-gram of remembered texts (None: nothing is remembered);
            for rules that charge for copies. Not asked about sampled drafts.
    """

    tree: DraftTree
    logits: Tensor
    scores: Tensor
    greedy: bool
    uniforms: Tensor | None = None
    budget_left: Tensor | None = None
    process_draft: Callable[[DraftTree], Tensor] | None = None
    texts: Texts | None = None
    overspent: Tensor | None = None
    copies: Callable[[int], Tensor | None] | None = None


@dataclass
class Verdict:
    """A rule's answer, on the CPU. ``D`` = depth of the tree; emitted position j of a row is its j-th new token of this
    round.

    Attributes:
        path: [B, D+1] node indices of the accepted path, root first, padded with its last node.
        accepted: [B] number of accepted drafts (0..D); the row emits ``accepted + 1`` tokens.
        tokens: [B, D+1] the emitted tokens: the accepted drafts, then the token that follows them, then padding 0.
        sources: [B, D+1] :class:`Source` of each emitted token.
        gate_open: [B, D+1] bool; was the token emitted from another law than the target's.
        spent: [B, D+1] nats spent at that context (0 where the law was the target's).
        first: [B, D+1] node of the drafter's first choice below each node of the path: of its children the one with the
            highest score, the lowest of equals and of trees without scores. -1 where there is none, and in the padding.
        regret: [B, D+1] ln p of the processed target's likeliest token less ln p of that choice, at least 0; NaN where
            there is none.
        proposers: [B, N] of the tree's nodes, see :class:`DraftTree`; None if one drafter proposed all.
        allowed: [B] nats that each row's rule allows for the tokens that it emitted, on the device of the logits; None
            where no rule's price is learned.
    """

    path: Tensor
    accepted: Tensor
    tokens: Tensor
    sources: Tensor
    gate_open: Tensor
    spent: Tensor
    first: Tensor
    regret: Tensor
    proposers: Tensor | None = None
    allowed: Tensor | None = None

    def emissions(self, log_p: Sequence[Sequence[float]] | None = None) -> list[list[Emission]]:
        """Each row's tokens in order. log_p: [B][D+1] their log-likelihoods, if measured."""
        columns = (self.tokens, self.sources, self.gate_open, self.spent, self.path, self.first, self.regret)
        whose = None if self.proposers is None else self.proposers.tolist()
        found: list[list[Emission]] = []
        for row, (count, *facts) in enumerate(zip(self.accepted.tolist(), *(column.tolist() for column in columns))):
            tokens, sources, gates, spent, path, first, regret = facts
            by = [0] * (1 + max(*path, *first)) if whose is None else whose[row]
            found.append([
                Emission(
                    tokens[step], sources[step], gates[step], spent[step],
                    by[path[step + 1]] if step < count else -1,
                    step + 1,
                    (by[first[step]], regret[step]) if first[step] >= 0 else None,
                    None if log_p is None else log_p[row][step],
                )
                for step in range(count + 1)
            ])  # fmt: skip
        return found
