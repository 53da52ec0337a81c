"""Draft below several beams with a model that keeps keys and values: each node is read once, while its beam lives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsd_core.tensors import to_device
from fsd_infer.drafters.frontier import Frontier
from fsd_infer.drafters.growth import TreeSession
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.tree_drafter import TreeDrafter


class CachedSession(TreeSession):
    """A session that reads nodes of a frontier after the text. The text's last token is the root, as in a round."""

    per_row = TreeSession.per_row | {"_cached"}

    def __init__(self, drafter: TreeDrafter, request: DraftRequest) -> None:
        super().__init__(drafter, request)
        self._cached: list[set[int]] = [{0} for _ in range(request.batch)]  # the nodes of a frontier in the cache

    def _add_node_positions(self, positions: Tensor, slots: int) -> None:
        """Tell the cache the positions [B, E] of the next depth's nodes. ``slots``: how many slots are seen."""
        self._node_positions.append(positions)
        nodes = torch.cat(self._node_positions, 1)
        text = torch.arange(slots, device=self.device).repeat(len(nodes), 1)
        after = self.lengths[:, None] + torch.arange(nodes.shape[1], device=self.device)
        self.cache.positions = text.scatter(1, after, nodes)

    def _uncached(self, frontier: Frontier, nodes: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return these nodes and those above them that the cache lacks, parents first, and count them as cached."""
        unread = []
        for row, (wanted, cached) in enumerate(zip(nodes, self._cached, strict=True)):
            unread.append(sorted({above for node in wanted for above in frontier.path(row, node)} - cached))
            cached.update(unread[-1])
        return unread

    def _is_final(self, frontier: Frontier, row: int, node: int) -> bool:
        """Whether the target's verification leaves what the model has read of a node as it is."""
        return True

    def follow_beams(self, frontier: Frontier, nodes: Sequence[Sequence[int]], grown: Sequence[int]) -> None:
        ends = [row[count - 1 : count] if count else [] for row, count in zip(nodes, grown, strict=True)]
        unread = [[node for node in row if node not in cached] for row, cached in zip(ends, self._cached, strict=True)]
        if any(unread):
            self._read_frontier(frontier, unread)
        frontier.move(self.cache, self.lengths - 1, nodes)
        self.lengths += to_device(torch.tensor(grown), self.device)
        for row, (left, count) in enumerate(zip(nodes, grown, strict=True)):
            below = enumerate(left[count:], 1)
            cached = {new for new, node in below if node in self._cached[row] and self._is_final(frontier, row, node)}
            self._cached[row] = {0, *cached}
