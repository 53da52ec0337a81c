"""Forecast on the device how many drafts a walk would accept in trees of several shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsd_core.tensors import to_device
from fsd_infer.trees.shape import TreeShape


class MenuMasks:
    """Which candidates of a tree each shape of a menu has, on the device.

    Args:
        depth: of the tree.
        width: of the tree.
        menu: shapes within a drafter's largest.
        device: of the trees.
    """

    def __init__(self, depth: int, width: int, menu: Sequence[TreeShape], device: torch.device) -> None:
        candidates = torch.arange(width + (depth - 1) * width**2)
        below = (candidates - width).clamp_min(0)
        depths = torch.where(candidates < width, 1, 2 + below // width**2)
        ranks = torch.maximum(candidates % width, below % width**2 // width)  # among siblings; of the expanded parent
        sizes = torch.tensor([[one.depth, one.width, one.max_nodes - 1] for one in menu])
        within = (depths <= sizes[:, :1]) & (ranks < sizes[:, 1:2])
        most = min(int(sizes[:, 2].max()), len(candidates))
        self.within = to_device(within.float(), device)  # [S, C]
        self.counted = to_device((torch.arange(most) < sizes[:, 2:]).float(), device)  # [S, K]
        self.last = to_device((depths == depth).float(), device)  # [C]


def forecast(visits: Tensor, masks: MenuMasks) -> Tensor:
    """Return how many drafts a walk is expected to accept in a tree of each shape, and how likely it reaches the end.

    Deeper shapes than that of the tree count to its depth; :meth:`MenuPolicy.update` adds what lies below.

    Args:
        visits: [B, C + 1] log-probabilities of a visit to the root and to all candidates, in the order of their
            drafting.
        masks: of their shape.

    Returns:
        [B, S + 1], the last column for the deepest candidates.
    """
    probs = visits[:, 1:].exp()
    best = (probs[:, None] * masks.within).topk(masks.counted.shape[1], -1).values
    return torch.cat([(best * masks.counted).sum(-1), (probs * masks.last).sum(-1, keepdim=True)], 1)
