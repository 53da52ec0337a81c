"""Trees by name: a shape, ``auto`` or ``auto:fixed``; and giving a drafter the choice of its trees."""

from __future__ import annotations

from fsd_infer.drafters.base import Drafter
from fsd_infer.drafters.eagle import EagleDrafter
from fsd_infer.drafters.graft import GraftedDrafter
from fsd_infer.drafters.online import Choice
from fsd_infer.drafters.shape import TreeShape, of_device
from fsd_infer.errors import FsdError

AUTO, FIXED = "auto", "auto:fixed"

LARGEST = {"cpu": TreeShape(depth=12, width=6, nodes=48), "cuda": TreeShape(depth=6, width=8, nodes=64)}


def parse_tree(text: str | None) -> TreeShape | str | None:
    """A shape as :meth:`TreeShape.parse` reads it; "auto", "auto:fixed" and None stay."""
    return text if text in (None, AUTO, FIXED) else TreeShape.parse(text)


def head_of(drafter: Drafter) -> EagleDrafter | None:
    """The drafter whose tree can be chosen: itself, or what all is grafted onto; None if that is no head."""
    while isinstance(drafter, GraftedDrafter):
        drafter = drafter.main
    return drafter if isinstance(drafter, EagleDrafter) else None


def choose_trees(drafter: Drafter, tree: str = AUTO) -> Drafter:
    """Let each round's tree of a head, also of one in a graft, be chosen; see :mod:`fsd_infer.drafters.online`.

    Args:
        drafter: is changed.
        tree: "auto", or "auto:fixed" for trees that are a function of the text alone, whatever the clock says.

    Raises:
        FsdError: the drafter has no tree of a head to choose; "auto" for a target shared out over processes.
    """
    head = head_of(drafter)
    if head is None:
        raise FsdError(
            f"drafter {drafter.name!r} has no tree to choose: leave --tree {AUTO} out, or draft with a head."
        )
    if tree == AUTO and head.target.is_shared_out:
        raise FsdError(f"each process would choose trees by a clock of its own: name --tree {FIXED} or 6,10,60.")
    largest = of_device(LARGEST, head.target.device)
    head.shape, head.by_default = head.reshaped(largest).shape, False
    drafter.choice = Choice(head.target.device.type, learns=tree == AUTO)
    part = drafter
    while isinstance(part, GraftedDrafter):
        part.nodes, part = largest.nodes, part.main
    return drafter
