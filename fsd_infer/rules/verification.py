"""What the engine passes to rules in each round, and what rules return. Tensors only: rules know no models.

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
    EXACT = 1  # a draft that the exact rule accepts, too
    GATE = 2  # a token that only the lossy law emits


class Emission(NamedTuple):
    """An emitted token.

    Attributes:
        token: its id.
        source: where it came from.
        gate_open: whether a lossy law applied at its context.
        nats: spent at its context.
        proposer: index into the drafter's ``proposers``; -1 if the token was not drafted.
        depth: position among the tokens of its round, from 1.
        first_choice: proposer and regret of the drafter's best child at the context; None if it had no children.
        log_likelihood: the target's raw log-probability of the token, if measured.
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
    """The input of rules in one round.

    Attributes:
        tree: the drafts.
        logits: [B, N, V] the target's raw logits at every node, in any floating-point type; rules compute in fp32.
        scores: [B, N, V] ``logits`` after the request's logits processors, temperature included; the same tensor if
            there are none.
        greedy: temperature 0: every draw is an argmax.
        uniforms: [B, N, 3] independent uniforms in [0, 1). Column 0 picks a child or none, column 1 draws the token
            after the path, column 2 is for gates that open at random. A greedy round uses column 2 alone; None is
            allowed there for rules without such gates.
        budget_left: [B] nats that each row may still spend, on the CPU; None: each rule's own budget.
        process_draft: maps the tree's raw ``q_logits`` to processed scores [B, I, V] over the target's vocabulary;
            None if there are no processors. Called at most once per round, by rules that need a processed q.
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
    """The result of a round, on the CPU. D is the tree's depth; column j is about a row's j-th new token.

    Attributes:
        path: [B, D+1] node indices of the accepted path, root first, padded with its last node.
        accepted: [B] number of accepted drafts (0..D); the row emits ``accepted + 1`` tokens.
        tokens: [B, D+1] the emitted tokens: the accepted drafts, the token that follows them, padding 0.
        sources: [B, D+1] :class:`Source` of each emitted token.
        gate_open: [B, D+1] bool; whether a lossy law emitted the token.
        spent: [B, D+1] nats spent at each context, 0 where the law is the target's.
        first: [B, D+1] the drafter's first choice below each node of the path, the child with the highest score. The
            first of equals; -1 without children, and in the padding.
        regret: [B, D+1] ln p of the target's likeliest token minus ln p of that choice (processed p), at least 0. NaN
            if there is none.
        proposers: [B, N] of the tree's nodes, see :class:`DraftTree`; None if one drafter proposed all.
        allowed: [B] nats that each row's rule allows for the emitted tokens, on the device of the logits; None if no
            rule learns its price.
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
        """Return each row's tokens in order. log_p: [B][D+1] their log-likelihoods, if measured."""
        columns = (self.tokens, self.sources, self.gate_open, self.spent, self.path, self.first, self.regret)
        proposers = None if self.proposers is None else self.proposers.tolist()
        rows: list[list[Emission]] = []
        for row, (count, *facts) in enumerate(zip(self.accepted.tolist(), *(column.tolist() for column in columns))):
            tokens, sources, gates, spent, path, first, regret = facts
            by = [0] * (1 + max(*path, *first)) if proposers is None else proposers[row]
            rows.append([
                Emission(
                    tokens[step], sources[step], gates[step], spent[step],
                    by[path[step + 1]] if step < count else -1,
                    step + 1,
                    (by[first[step]], regret[step]) if first[step] >= 0 else None,
                    None if log_p is None else log_p[row][step],
                )
                for step in range(count + 1)
            ])  # fmt: skip
        return rows
