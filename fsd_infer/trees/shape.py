"""Shapes of draft trees: depth, width, number of nodes, and the threshold that stops drafting. Defaults by device, and
a forecast on the device of how many drafts a walk would accept in trees of several shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from fsd_core.errors import FsdError
from fsd_core.functional import is_host
from fsd_core.registry import is_whole, read_float, read_int
from fsd_core.tensors import to_device
from fsd_infer.trees.prices import Prices

T = TypeVar("T")

AUTO = "auto"  # names trees that are chosen round by round

MAX_DEPTH, MAX_NODES = 256, 1024  # of a tree; beyond, drafts are hopeless and forwards too slow
MAX_CANDIDATES = 2**16  # of a round


def check_tree(name: str, depth: int, nodes: int, width: int = 1) -> None:
    """Raise FsdError unless these are sizes of a draft tree.

    Args:
        name: what the error calls the tree.
        depth: depth of the deepest node.
        nodes: number of nodes, the root included.
        width: most children of a node.
    """
    for option, value, least, most in (
        ("depth", depth, 1, MAX_DEPTH), ("nodes", nodes, 2, MAX_NODES), ("width", width, 1, MAX_DEPTH)
    ):  # fmt: skip
        if not is_whole(value, least, most):
            raise FsdError(f"{name} needs {option} from {least} to {most}, got {value!r}.")


@dataclass(frozen=True)
class TreeShape:
    """Shape of a dynamic tree.

    Attributes:
        depth: depth of the deepest draft, in tokens after the root.
        width: nodes expanded per depth, and children per expanded node.
        nodes: nodes verified per round, the root included.
        stop_below: probability that the answer runs through any of the nodes to expand next, below which drafting
            stops. The drafter estimates it as the sum of their cumulative q, with the rule's draft bonus. 0: always
            draft ``depth`` deep.
        prices: by which the tree of one round is grown; its sizes are then upper bounds. None: it grows to them.

    Raises:
        FsdError: a size or threshold out of range, or too many candidates.
    """

    depth: int
    width: int
    nodes: int
    stop_below: float = 0.0
    prices: Prices | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_tree("a draft tree", self.depth, self.nodes, self.width)
        if self.candidates > MAX_CANDIDATES:
            raise FsdError(
                f"a draft tree of depth {self.depth} and width {self.width} has {self.candidates} candidates, over "
                f"{MAX_CANDIDATES}. Give a smaller width."
            )
        if not 0 <= self.stop_below < 1:
            raise FsdError(f"stop_below must be a probability of at least 0 and below 1, got {self.stop_below}.")

    @classmethod
    def chain(cls, depth: int, stop_below: float = 0.0) -> TreeShape:
        """Return the shape of a chain of ``depth`` drafts."""
        return cls(depth, 1, depth + 1, stop_below)

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Parse "depth,width,nodes" or "depth,width,nodes,stop_below"; items of a list are written "5x6x16".

        Raises:
            FsdError: a malformed text, or a shape out of range.
        """
        parts = text.split("x" if "x" in text else ",")
        sizes = [size for part in parts[:3] if (size := read_int(part)) is not None]
        stop_below = read_float(parts[3]) if len(parts) > 3 else 0.0
        if len(sizes) != 3 or len(parts) > 4 or stop_below is None:
            raise FsdError(
                "a tree is written depth,width,nodes or depth,width,nodes,stop_below, such as 5,6,16 or 5,6,16,0.3; "
                f"got {text!r}. --tree also takes auto."
            )
        depth, width, nodes = sizes
        return cls(depth, width, nodes, stop_below)

    @property
    def text(self) -> str:
        """The shape as an item of a list, which :meth:`parse` reads."""
        stop = [f"{self.stop_below:g}"] if self.stop_below else []
        return "x".join([str(self.depth), str(self.width), str(self.nodes), *stop])

    @property
    def candidates(self) -> int:
        """Nodes that a round proposes, the root excluded."""
        return self.width + (self.depth - 1) * self.width**2

    @property
    def max_nodes(self) -> int:
        """Most nodes of a tree, the root included."""
        return min(self.nodes, 1 + self.candidates)


class _NoTree(TreeShape):
    """Only the root, which no user asks for by its sizes."""

    def __post_init__(self) -> None:
        pass


NO_TREE = _NoTree(depth=0, width=1, nodes=1)  # a round without drafts

# Every verified node costs time on a CPU, and hardly any on a GPU.
DEFAULT_SHAPES = {"cpu": TreeShape(depth=5, width=6, nodes=16), "cuda": TreeShape(depth=6, width=10, nodes=60)}
# A distribution that favours drafts gains from depth, not from width.
BONUS_SHAPES = {
    "cpu": TreeShape(depth=10, width=2, nodes=11, stop_below=0.2),
    "cuda": TreeShape(depth=8, width=8, nodes=60),
}
# A distribution with a small draft bonus, such as tilted:2 at temperature 1, gains from both.
SMALL_BONUS = 0.75  # nats
SMALL_BONUS_SHAPES = {**BONUS_SHAPES, "cpu": TreeShape(depth=6, width=4, nodes=9, stop_below=0.5)}

# Trees chosen round by round stay within these. A small LM stays accurate at larger depths than a head, and each of its
# depths costs more.
LARGEST = {"cpu": TreeShape(depth=12, width=6, nodes=48), "cuda": TreeShape(depth=8, width=8, nodes=60)}
LARGEST_OF_LM = {**LARGEST, "cpu": TreeShape(depth=16, width=4, nodes=24)}

# Where rounds are recorded they are chosen among these. A depth costs more than its width or its nodes.
MENU = (
    NO_TREE, TreeShape(1, 6, 7), TreeShape(2, 6, 16), TreeShape(3, 2, 7), TreeShape(3, 8, 32), TreeShape(5, 2, 12),
    TreeShape(5, 8, 48), TreeShape(8, 8, 60),
)  # fmt: skip


def parse_tree(tree: TreeShape | str | None) -> TreeShape | str | None:
    """Return a shape, None and "auto" unchanged, and any other text as a shape. Raises FsdError for what is none."""
    if tree is None or tree == AUTO or isinstance(tree, TreeShape):
        return tree
    if not isinstance(tree, str):
        raise FsdError(f"a tree is a TreeShape or text such as 5,6,16, got {type(tree).__name__}.")
    return TreeShape.parse(tree)


def of_device(defaults: Mapping[str, T], device: torch.device) -> T:
    """Return the entry of "cpu", or for all accelerators that of "cuda"."""
    return defaults["cpu" if is_host(device) else "cuda"]


def default_shape(device: torch.device, draft_bonus: float = 0.0) -> TreeShape:
    """Return the shape of trees on this device for a distribution with this draft bonus in nats, as in
    ``DraftRequest``.
    """
    with_bonus = BONUS_SHAPES if draft_bonus > SMALL_BONUS else SMALL_BONUS_SHAPES
    return of_device(with_bonus if draft_bonus else DEFAULT_SHAPES, device)


class MenuMasks:
    """Which candidates of a tree each shape of a menu has, on the device.

    Args:
        depth: depth of the tree.
        width: width of the tree.
        menu: shapes within a drafter's largest.
        device: device of the trees.
    """

    def __init__(self, depth: int, width: int, menu: Sequence[TreeShape], device: torch.device) -> None:
        # in the order of drafting: the root's children, then depth by depth those of each expanded node
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
        masks: masks of their shape.

    Returns:
        [B, S + 1], the last column for the deepest candidates.
    """
    probs = visits[:, 1:].exp()
    best = (probs[:, None] * masks.within).topk(masks.counted.shape[1], -1).values
    return torch.cat([(best * masks.counted).sum(-1), (probs * masks.last).sum(-1, keepdim=True)], 1)
