"""Load drafters by name, and let ``tree="auto"`` choose their trees."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsd_core.errors import CheckpointError, FsdError, ModelLoadError, UnknownNameError
from fsd_core.files import usable_name
from fsd_core.functional import is_host
from fsd_core.registry import did_you_mean
from fsd_infer.drafters.base import DRAFTERS, Drafter, NoDrafter
from fsd_infer.drafters.free import FreeDrafter, free_drafters
from fsd_infer.drafters.from_target import PREFIX, FromTarget
from fsd_infer.drafters.graft import GraftedDrafter
from fsd_infer.drafters.lm import load_lm
from fsd_infer.drafters.mtp import drafts_by_default
from fsd_infer.drafters.steps import load_published
from fsd_infer.drafters.text import lm_drafter
from fsd_infer.drafters.tree_drafter import TreeDrafter
from fsd_infer.heads.formats import head_kind
from fsd_infer.targets.builtin import shipped_drafter
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import AUTO, TreeShape, default_shape, of_device, parse_tree

# what --drafter takes, and what each stands for; registered free drafters are names, too
NAMES = {
    "shipped": "The head of a built-in target; its default.",
    "none": "Plain decoding.",
    "memory": "What followed the text's last tokens earlier, in it or in earlier texts; memory:FILE adds a corpus. "
    "Benchmarks clear it between answers, except memory:keep.",
    "lookup": "What followed the text's last tokens earlier in prompt and answer.",
    "recycle": "What the target found likely after the same one or two tokens.",
    "mtp": "The MTP layer of the target's own checkpoint; its default.",
    "self:layers=...": "The target with some of its layers, such as self:layers=0-9,20-29.",
    "self:bits=...": "The target with rounded weights, such as self:bits=3.",
    "text:X": "The small LM X of any vocabulary by its text alone, as chosen where hardly a token is shared.",
    "X+memory, X+lookup, X+recycle": "X, any other, with one of these merged into its trees. lookup+recycle is the "
    "default of targets without a head.",
    "a directory or owner/model": "A draft head in any known format, or a small causal LM.",
}


def load_drafter(drafter: str | Path | Drafter | None, target: Target, tree: TreeShape | str | None = None) -> Drafter:
    """Return the drafter that a name stands for.

    Args:
        drafter: a Drafter, which is returned unchanged; one of :data:`NAMES`, where X in "X+lookup" is any other, so
            also "shipped+memory+recycle"; or None: "shipped", or "mtp", or "lookup+recycle", the first that there is. A
            head may have any known format (:mod:`fsd_infer.heads.formats`). A small LM may have another vocabulary
            (:class:`.TranslatedDrafter`, :class:`.TextDrafter`), and may be the directory of a peft adapter for one.
        target: the model to draft for.
        tree: shape of the trees of a head or small LM, also as text such as "5,6,16"; or "auto", which chooses them
            round by round (:mod:`fsd_infer.trees.policy`). None: "auto" on a CPU, a shape elsewhere. "lookup" and
            merged trees have as many nodes as this shape (default: as a head's trees on this device).

    Raises:
        FsdError: a malformed name or tree.
        UnknownNameError: a name that stands for nothing.
        ModelLoadError: a model or head that cannot be loaded.
        CheckpointError: a damaged file, or a head for another target.
        VocabularyMismatchError: a small LM of another vocabulary, where a model has no tokenizer.
    """
    tree = parse_tree(tree)
    if isinstance(drafter, Drafter):
        result, auto = drafter, tree == AUTO
    elif not isinstance(drafter, str | os.PathLike | None):
        raise FsdError(
            f"a drafter is a name, a path or a Drafter, got {type(drafter).__name__}. A model object drafts by "
            "fsd_infer.drafters.LMDrafter(Target.of(model), target)."
        )
    else:
        name = _default(target) if drafter is None else usable_name(drafter, "drafter")
        result = _load(name, target, None if isinstance(tree, str) else tree)
        auto = tree == AUTO or tree is None and is_host(target.device)
    # choose_trees() refuses a model that grows no trees; where "auto" is the default, such a model keeps its shape
    must_grow = tree == AUTO and isinstance(_innermost(result), TreeDrafter)
    return choose_trees(result, target) if must_grow or auto and main_of(result) is not None else result


def check_name(drafter: object) -> None:
    """Raise FsdError for a malformed name that begins with "self:", before the target is loaded."""
    if isinstance(drafter, str | Path) and str(drafter).startswith(PREFIX):
        FromTarget.parse(str(drafter).partition("+")[0])


def _default(target: Target) -> str:
    if shipped_drafter(target.name) is not None:
        return "shipped"
    return "mtp" if drafts_by_default(target) else "lookup+recycle"


def main_of(drafter: Drafter) -> TreeDrafter | FreeDrafter | None:
    """Return the drafter whose trees ``tree="auto"`` can choose: the main part of a graft, or None."""
    main = _innermost(drafter)
    if isinstance(main, FreeDrafter):
        return main
    return main if isinstance(main, TreeDrafter) and main.grows else None


def _innermost(drafter: Drafter) -> Drafter:
    while isinstance(drafter, GraftedDrafter):
        drafter = drafter.main
    return drafter


def choose_trees(drafter: Drafter, target: Target) -> Drafter:
    """Choose a drafter's trees round by round from now on (:mod:`fsd_infer.trees.policy`). Return the drafter.

    Args:
        drafter: any but ``NoDrafter``. It is changed in place.
        target: the model to draft for.

    Raises:
        FsdError: the drafter grows no trees.
    """
    main = main_of(drafter)
    if main is None:
        raise FsdError(f"drafter {drafter.name!r} has no trees to choose. Leave --tree {AUTO} out, or name a drafter.")
    if isinstance(main, FreeDrafter) and not is_host(target.device):
        return drafter  # its trees end where its tables do
    largest = of_device(main.largest, target.device)
    if isinstance(main, FreeDrafter):
        main.nodes = max(main.nodes, largest.nodes)
    else:
        main.shape = largest = main.with_shape(largest).shape
        main.has_default_shape = False
    graft = drafter
    while isinstance(graft, GraftedDrafter):
        if isinstance(graft.grafted, FreeDrafter):
            graft.grafted.nodes = max(graft.grafted.nodes, min(graft.grafted.auto_nodes, largest.nodes))
        graft.nodes, graft = largest.nodes, graft.main
    drafter.bounds = replace(largest, nodes=drafter.max_nodes)
    if isinstance(main, TreeDrafter) and not is_host(target.device):
        drafter.menu = main.shapes
    return drafter


def with_tree(drafter: Drafter, tree: TreeShape | str | None) -> Drafter:
    """Return a drafter with the trees of one request; both share their weights. None: the drafter's own.

    Raises:
        FsdError: the drafter has no trees that a request can shape.
    """
    shape = parse_tree(tree)
    if shape is None or (shape == AUTO and drafter.bounds is not None):
        return drafter
    if not isinstance(shape, TreeShape):
        raise FsdError(f"drafter {drafter.name!r} chooses no trees: load it with tree={AUTO!r} or --tree {AUTO}.")
    return drafter.with_shape(shape)


def _load(name: str, target: Target, tree: TreeShape | None) -> Drafter:
    grafted = re.fullmatch(rf"(.*)\+(({'|'.join(free_drafters())})(:.*)?)", name, re.DOTALL)
    if grafted is not None:
        return _load_grafted(grafted[1], grafted[2], grafted[3], target, tree)
    source: str | Path = name
    if name == "shipped":
        shipped = shipped_drafter(target.name)
        if shipped is None:
            raise ModelLoadError(
                f"no drafter is shipped for {target.name}. Name a head trained with fsd-train, a small model of the "
                'same vocabulary, or "none" for plain decoding.'
            )
        source = shipped
    # a name wins over a directory of that name
    loaders = [DRAFTERS.get(drafter_name).load for drafter_name in sorted(DRAFTERS, key=lambda names: names != name)]
    for load in (*loaders, load_published):
        drafter = load(source, target, tree)
        if drafter is not None:
            return drafter
    try:
        model = FromTarget.parse(name).of(target, name) if name.startswith(PREFIX) else load_lm(source, target)
    except UnknownNameError:
        if os.path.isfile(name):
            raise ModelLoadError(
                f"drafter {name!r} is a file that is neither a head nor a model: give the directory that holds "
                f'config.json and the weights, a GGUF file, or, for a corpus of texts, "memory:{name}".'
            ) from None
        names = [one for one in {**NAMES, **free_drafters()} if " " not in one]
        raise UnknownNameError(
            f"unknown drafter {name!r}.{did_you_mean(name, names)} Give a directory, a hub id (owner/model), or one of "
            f"{', '.join(names)}, X+memory, X+lookup and X+recycle (X any other). For a drafter of your own, import "
            "its module: --import MODULE."
        ) from None
    result = lm_drafter(model, target, tree)
    result.directory = Path(source) if os.path.isdir(source) else None
    return result


def _load_grafted(main: str, grafted: str, kind: str, target: Target, tree: TreeShape | None) -> Drafter:
    """Load MAIN+GRAFTED. If MAIN is "none", load only GRAFTED."""
    if not main:
        raise ModelLoadError(f'"+{grafted}" names no drafter before the +. Write "shipped+{grafted}" or "{grafted}".')
    if kind in (part.partition(":")[0] for part in main.split("+")):
        raise ModelLoadError(f'"{main}+{grafted}" names {kind} twice. Name it once.')
    onto = _load(main, target, tree)
    if isinstance(onto, NoDrafter):
        return _load(grafted, target, tree)
    shape = tree or default_shape(target.device)
    nodes = max(shape.nodes, onto.max_nodes)
    free: Any = free_drafters()[kind].load(grafted, target, replace(shape, nodes=nodes))
    result = GraftedDrafter(onto, free, nodes)
    result.directory = onto.directory
    return result


def refuse_head(directory: Path) -> None:
    """Raise ModelLoadError for the directory of a draft head, which transformers would call an outdated model.

    A damaged directory passes: the target's own checks say what is damaged.
    """
    kind = None
    with suppress(CheckpointError):
        kind = head_kind(directory) if directory.is_dir() else None
    if kind is not None:
        raise ModelLoadError(
            f"{directory} is a draft head, not a target: give it as drafter of the model that it was trained for."
        )
