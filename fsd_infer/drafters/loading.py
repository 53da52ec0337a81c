"""What the name of a drafter stands for."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsd_infer.drafters.auto import AutoMemory
from fsd_infer.drafters.base import DRAFTERS, Drafter, NoDrafter
from fsd_infer.drafters.free import FreeDrafter, free_drafters
from fsd_infer.drafters.graft import GraftedDrafter
from fsd_infer.drafters.growth import TreeDrafter
from fsd_infer.drafters.itself import PREFIX, Itself
from fsd_infer.drafters.lm import LMDrafter, load_lm
from fsd_infer.drafters.shape import AUTO, DEFAULT_SHAPES, TreeShape, of_device
from fsd_infer.errors import FsdError, ModelLoadError, UnknownNameError
from fsd_infer.files import usable_name
from fsd_infer.targets.loading import shipped_drafter
from fsd_infer.targets.target import Target


def load_drafter(drafter: str | Path | Drafter | None, target: Target, tree: TreeShape | str | None = None) -> Drafter:
    """The drafter that a name stands for.

    Args:
        drafter: a Drafter (returned as it is), the name of a registered one, or one of

            ================  ===================================================================================
            "shipped"         the head shipped with a built-in target
            None              "shipped", or "lookup+recycle" where no head is shipped
            "none"            no drafts: plain decoding
            "memory"          what followed the text's end before, in it or in earlier texts (:class:`MemoryDrafter`);
                              "memory:FILE" with a corpus, "memory:keep": benchmarks do not make it forget
            "lookup"          the same with nothing but prompt and answer (:class:`LookupDrafter`)
            "recycle"         what the target found likely before after the same tokens (:class:`RecycleDrafter`)
            "X+memory",       one of these grafted onto the tree of X, any other of these names
            "X+lookup",       (:class:`GraftedDrafter`); "shipped+memory+recycle" has two
            "X+recycle"
            a directory,      a head, ours or another program's (:mod:`fsd_infer.heads.formats`), or a causal LM of the
            a hub id          target's vocabulary, or (a directory) a peft adapter for one
            "self:layers=..." the target with some of its layers, "self:bits=..." with rounded weights
                              (:mod:`fsd_infer.drafters.itself`)
            ================  ===================================================================================
        target: what it is to draft for.
        tree: shape of the tree of a head or small LM, or "auto": chosen round by round, see
            :mod:`fsd_infer.drafters.auto`. None: "auto" on a CPU, elsewhere a shape. Its nodes are those of "lookup"
            and of a grafted tree too (by default as many as a head's tree has on this device).

    Raises:
        FsdError, UnknownNameError, ModelLoadError, CheckpointError, VocabularyMismatchError: each names the fault and
            the fix.
    """
    if isinstance(tree, str) and tree != AUTO:
        raise FsdError(f'tree is a TreeShape or "{AUTO}", got {tree!r}.')
    if isinstance(drafter, Drafter):
        made, chosen = drafter, tree == AUTO
    else:
        default = "lookup+recycle" if shipped_drafter(target.name) is None else "shipped"
        name = default if drafter is None else usable_name(drafter, "drafter")
        made = _load(name, target, None if isinstance(tree, str) else tree)
        chosen = tree == AUTO or tree is None and target.device.type == "cpu"
    return choose_trees(made) if chosen and main_of(made) is not None else made


def main_of(drafter: Drafter) -> TreeDrafter | None:
    """The drafter whose tree can be chosen: itself, or what all is grafted onto; None if that grows none."""
    while isinstance(drafter, GraftedDrafter):
        drafter = drafter.main
    return drafter if isinstance(drafter, TreeDrafter) else None


def choose_trees(drafter: Drafter) -> Drafter:
    """Let each round's tree of a head or small LM, also of one in a graft, be chosen; see
    :mod:`fsd_infer.drafters.auto`.

    Args:
        drafter: is changed.

    Raises:
        FsdError: the drafter has no tree to choose.
    """
    main = main_of(drafter)
    if main is None:
        raise FsdError(
            f"drafter {drafter.name!r} has no tree to choose: leave --tree {AUTO} out, or draft with a head or a "
            "small LM."
        )
    largest = of_device(main.largest, main.target.device)
    main.shape, main.by_default = main.reshaped(largest).shape, False
    drafter.auto = AutoMemory(main.target.device.type, prior=main.prior)
    part = drafter
    while isinstance(part, GraftedDrafter):
        if isinstance(part.side, FreeDrafter):
            part.side.nodes = max(part.side.nodes, min(part.side.most_chosen, largest.nodes))
        part.nodes, part = largest.nodes, part.main
    return drafter


def _load(name: str, target: Target, tree: TreeShape | None) -> Drafter:
    grafted = re.fullmatch(rf"(.*)\+(({'|'.join(free_drafters())})(:.*)?)", name, re.DOTALL)
    if grafted is not None:
        return _load_grafted(grafted[1], grafted[2], grafted[3], target, tree)
    source: str | Path = name
    if name == "shipped":
        shipped = shipped_drafter(target.name)
        if shipped is None:
            raise ModelLoadError(
                f"no drafter is shipped for {target.name}: name a head trained with fsd-train, a small model of the "
                'same vocabulary, or "none" for plain decoding.'
            )
        source = shipped
    for kind in sorted(DRAFTERS, key=lambda known: known != name):  # what is called so first: a directory may be, too
        found = DRAFTERS.get(kind).load(source, target, tree)
        if found is not None:
            return found
    try:
        model = Itself.parse(name).of(target, name) if name.startswith(PREFIX) else load_lm(source, target)
    except UnknownNameError:
        raise UnknownNameError(
            f"unknown drafter {name!r}: it is no directory and no hub id (owner/model), and none of shipped, none, "
            f"{', '.join(free_drafters())}, self:layers=..., self:bits=..., X+memory, X+lookup and X+recycle (X any "
            "other)."
        ) from None
    made = LMDrafter(model, target, tree)
    made.directory = Path(source) if os.path.isdir(source) else None
    return made


def _load_grafted(main: str, side: str, kind: str, target: Target, tree: TreeShape | None) -> Drafter:
    """ "X+memory" for X = main. Grafted onto nothing, memory is the tree."""
    if not main:
        raise ModelLoadError(f'"+{side}" names no drafter to graft onto: write "shipped+{side}" or "{side}".')
    if kind in (part.partition(":")[0] for part in main.split("+")):
        raise ModelLoadError(f'"{main}+{side}" names {kind} twice: what it knows it proposes at once. Name it once.')
    onto = _load(main, target, tree)
    if isinstance(onto, NoDrafter):
        return _load(side, target, tree)
    shape = tree or of_device(DEFAULT_SHAPES, target.device)
    nodes = max(shape.nodes, onto.max_nodes)
    free: Any = free_drafters()[kind].load(side, target, replace(shape, nodes=nodes))
    made = GraftedDrafter(onto, free, nodes)
    made.directory = onto.directory
    return made
