"""One round of one answer, for observers: a server's log-probabilities, the page that shows decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fsd_infer.rules.verification import Emission, Verdict
from fsd_infer.tree import DraftTree


@dataclass(frozen=True)
class Round:
    """A round's tree, logits and emitted tokens. N nodes, the root first; D the depth of the tree.

    Attributes:
        nodes: [N] tokens.
        parents: [N] index of each node's parent; the root's is 0.
        proposers: [N] index of the proposer that drafted the node.
        q_index: [N] each node's row of ``q_logits``; -1 if the drafter gave no distribution.
        q_logits: [I, Vd] the drafter's raw logits.
        draft_ids: [Vd] target id of each drafter vocabulary entry; None if Vd = V.
        logits: [N, V] the target's raw logits after each node.
        path: [D+1] the accepted nodes, the root first, padded with the last.
        emissions: the emitted tokens; token j follows ``path[j]``.
        seconds: of the round by phase; the first round has ``prefill``.
    """

    nodes: list[int]
    parents: list[int]
    proposers: list[int]
    q_index: list[int]
    q_logits: Tensor
    draft_ids: Tensor | None
    logits: Tensor
    path: list[int]
    emissions: Sequence[Emission]
    seconds: dict[str, float]

    @classmethod
    def of(
        cls,
        tree: DraftTree,
        row: int,
        logits: Tensor,
        verdict: Verdict,
        emissions: Sequence[Emission],
        seconds: dict[str, float],
    ) -> Round:
        """Return the round of one batch row. Syncs with the device."""
        real = tree.is_draft[row].clone()
        real[0] = True  # the root
        whose = tree.parents.new_zeros(tree.parents.shape) if tree.proposers is None else tree.proposers
        columns = (tree.tokens, tree.parents, whose, tree.q_index)
        nodes, parents, proposers, q_index = (column[row][real].tolist() for column in columns)
        path, q_logits, draft_ids = verdict.path[row].tolist(), tree.q_logits[row], tree.draft_ids
        return cls(nodes, parents, proposers, q_index, q_logits, draft_ids, logits[row], path, emissions, seconds)

    @property
    def tokens(self) -> list[int]:
        """The emitted tokens."""
        return [emission.token for emission in self.emissions]
