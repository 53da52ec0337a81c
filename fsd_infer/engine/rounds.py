"""One round of one answer, for those who look on: log-probabilities of a server, the page that shows decoding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Round:
    """What was drafted, verified and emitted. N nodes, the root first; D the depth of the tree.

    Attributes:
        nodes, parents: [N] tokens, and nodes that they follow; the root's parent is itself.
        proposers: [N] which of the drafter's proposers drafted the node.
        q_index: [N] row of ``q_logits`` for what follows the node; -1 where the drafter gave no distribution.
        q_logits: [I, Vd] the drafter's raw logits.
        draft_ids: [Vd] target id of each drafter vocabulary entry; None if they are the same.
        logits: [N, V] the target's raw logits after each node.
        path: [D+1] the accepted nodes, the root first, padded with the last.
        tokens, sources, spent: of the emitted tokens: ids, :class:`.Source`, nats. Token j follows ``path[j]``.
        seconds: of the round by phase; of the first round ``prefill``.
    """

    nodes: list[int]
    parents: list[int]
    proposers: list[int]
    q_index: list[int]
    q_logits: Tensor
    draft_ids: Tensor | None
    logits: Tensor
    path: list[int]
    tokens: list[int]
    sources: list[int]
    spent: list[float]
    seconds: dict[str, float]
