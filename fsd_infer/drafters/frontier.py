"""Where drafting goes on below several unfinished continuations of a text, as beam search keeps them.

A drafter that draws up a tree under a text's last token chooses its nodes by itself. A search chooses them: it asks for
the likely successors of the nodes of one depth (:meth:`.DraftSession.successors`), keeps the best under its own rules,
and asks again below these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsd_core.functional import at_nodes, is_host
from fsd_core.tensors import lists, to_device
from fsd_infer.device.cache import SlotCache, visible_slots
from fsd_infer.trees.tree import DraftTree, path_to

Successors = tuple[list[float], list[int]]  # log-probabilities of likely tokens, falling, and the tokens
NO_SUCCESSORS: Successors = ([], [])


@dataclass
class Frontier:
    """The trees of a batch below its texts. Node i of a row lies i slots after its root in the cache.

    Rows are lists, to which a search appends its drafts. Each has its root first, the text's last token, then the other
    nodes that the target has read, then new ones; parents come before their children.

    Attributes:
        tokens: [B][N] token ids.
        parents: [B][N] index of each node's parent; the root's is 0.
        lengths: [B] tokens of each text, the root included.
        read: [B] number of leading nodes that the target had read when the round began.
        features: [B, R, F] the target's features at these nodes.
        likely: [B][N] the target's likely successors of each node, as far as they are listed.
    """

    tokens: Sequence[list[int]]
    parents: Sequence[list[int]]
    lengths: Sequence[int]
    read: Sequence[int]
    features: Tensor
    likely: Sequence[Sequence[Successors | None]] = field(default_factory=list)

    @property
    def tree(self) -> DraftTree:
        """The nodes as a tree, padded by at least one node."""
        rows = [(tokens, parents, [0.0] * len(tokens)) for tokens, parents in zip(self.tokens, self.parents)]
        return DraftTree.of_lists(rows, 1, self.features.device).padded_to(1 + max(map(len, self.tokens)))

    def path(self, row: int, node: int) -> list[int]:
        """Return the nodes from below the root to this one."""
        return path_to(node, self.parents[row])

    def padded_nodes(self, nodes: Sequence[Sequence[int]]) -> Tensor:
        """Return ragged lists of nodes as [B, M]. Rows are padded by the number after their last node."""
        most = max(map(len, nodes))
        rows = [[*row, *[len(tokens)] * (most - len(row))] for row, tokens in zip(nodes, self.tokens, strict=True)]
        return to_device(torch.tensor(rows, dtype=torch.long), self.features.device)

    def forward_inputs(self, cache: SlotCache, roots: Tensor, nodes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Set the cache's write slots for a forward over these nodes, and return its arguments.

        Args:
            cache: cache of the model.
            roots: [B] slot of each row's root.
            nodes: [B][M] some of every row, whose parents the cache has, or has after this forward.

        Returns:
            The nodes, padded, their tokens and positions, [B, M] each, and which slots are visible, [B, M, S] bool.
        """
        tree, numbers = self.tree, self.padded_nodes(nodes)
        ancestors, depths = at_nodes(tree.ancestors, numbers), tree.depths
        slots, start, used = roots[:, None] + numbers, None, cache.window
        if is_host(roots.device):
            counts = torch.tensor([len(tokens) for tokens in self.tokens])
            used = int((roots + counts).max()) + 1
            is_run = len(roots) == 1 and len(nodes[0]) == nodes[0][-1] + 1 - nodes[0][0]  # slots without a gap
            start = int(slots[0, 0]) if is_run else None
        every_slot = torch.arange(used, device=roots.device)
        node = (every_slot - roots[:, None]).clamp(0, depths.shape[1] - 1)  # of each slot from the root's on
        slot_positions = torch.minimum(every_slot, roots[:, None] + depths.gather(1, node))
        cache.set_write_slots(slots, start, used, slot_positions)
        positions = roots[:, None] + depths.gather(1, numbers)
        return numbers, tree.tokens.gather(1, numbers), positions, visible_slots(roots, ancestors, used)

    def move(self, cache: SlotCache, roots: Tensor, nodes: Sequence[Sequence[int]]) -> None:
        """Move the keys and values of these nodes to the slots after the roots' slots [B], in this order."""
        moved = [[(old, new) for new, old in enumerate(row, 1) if old != new] for row in nodes]
        if any(moved):
            old, new = (self.padded_nodes([[pair[side] for pair in row] for row in moved]) for side in (0, 1))
            cache.move(roots[:, None] + old, roots[:, None] + new)


def successor_lists(log_q: Tensor, tokens: Tensor, nodes: Sequence[Sequence[int]]) -> list[list[Successors]]:
    """Return successors [B, M, c] of ragged lists of nodes as lists."""
    width = log_q.shape[-1]
    rows = zip(nodes, *lists(log_q.flatten(1), tokens.flatten(1)), strict=True)
    return [
        [(values[at : at + width], ids[at : at + width]) for at in range(0, width * len(row), width)]
        for row, values, ids in rows
    ]
