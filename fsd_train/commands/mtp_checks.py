"""Checks of MTP layers in a checkpoint, for `fsd-train doctor --head mtp`: their files, and how they are fed."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsd_core.errors import FsdError
from fsd_infer.drafters.eagle import EagleDrafter
from fsd_infer.drafters.mtp import MtpDrafter, MtpHead, read_layers
from fsd_infer.heads.hub import find
from fsd_infer.heads.kinds import MTP
from fsd_infer.heads.mtp import MTP_ADVICE, MtpFiles, find_mtp, stated_layers
from fsd_infer.heads.mtp_layouts import LAYOUTS
from fsd_infer.heads.stored_parts import LM_HEAD
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape
from fsd_train.commands.feeding import Feeding, Finding, Variant, other_positions, with_values
from fsd_train.commands.head_checks import Doctor

_SHOWN = 8  # most faulty tensors that a line names
_MIN_ACCEPTED = 0.1  # share of first drafts that any trained layer has accepted; published ones reach 0.5 to 0.9
_ANEW = "fetch or export the checkpoint again"


def mtp_place(head: str) -> tuple[bool, Path | None]:
    """Return whether ``--head`` names MTP layers, and their directory if it is not the target's."""
    if head == MTP:
        return True, None
    stored = find(head, (MTP,))
    return (False, None) if stored is None else (True, stored.directory)


def refuse_other_options(args: argparse.Namespace) -> None:
    """Raise FsdError for an option that says nothing of MTP layers."""
    if args.trained_on is not None:
        raise FsdError("--trained-on: MTP layers belong to the target that --target names. Leave it out.")


def check_files(target: Target, directory: Path | None) -> tuple[list[Finding], MtpHead | None]:
    """Check what the files hold, and read it: layout, tensors, types and values.

    Args:
        target: the model of the layers.
        directory: directory of the layers, if it is not the target's; None: the target's own.

    Returns:
        (findings, the layers in float32 or None if a line is wrong)
    """
    try:
        files = find_mtp(target, directory)
    except FsdError as error:
        return [Finding("layout", False, str(error).removesuffix(MTP_ADVICE), _ANEW)], None
    if files is None:
        stated = stated_layers(target)
        says = f"{target.name} has no MTP layer in its files" + (f", and its config says {stated}" if stated else "")
        fix = "give the checkpoint as published: some exports drop these tensors"
        return [Finding("layout", False, says, fix)], None
    findings = [_describe(files), _check_tensors(target, files), _check_types(files)]
    if any(finding.ok is False for finding in findings):
        return findings, None
    layers = read_layers(target, directory, finite=False).float()
    findings.append(_check_values(layers))
    return findings, None if findings[-1].ok is False else layers


def _describe(files: MtpFiles) -> Finding:
    name = next((name for name, layout in LAYOUTS.items() if layout == files.layout), "speculators")
    places = sorted({files.weights.files[tensor].name for tensor in files.names})
    first = "state" if files.layout.state_first else "embedding"
    says = (
        f"{name}: {files.count} layer{'s' * (files.count > 1)}, {len(files.names)} tensors in {', '.join(places)}; the "
        f"projection reads the {first} first, {'a' if files.layout.normed else 'no'} norm follows the layer"
    )
    return Finding("layout", True, says)


def _check_tensors(target: Target, files: MtpFiles) -> Finding:
    """Check that each parameter has a tensor of its shape, and each tensor a place."""
    try:
        with torch.device("meta"):
            head = MtpHead(target, files.layout, files.count)
    except FsdError as error:
        return Finding("tensors", False, str(error), "name another drafter")
    faults = [
        str(fault).removesuffix(MTP_ADVICE)
        for index, layer in enumerate(head.layers)
        for fault in files.faults(index, layer.state_dict())
    ]
    count = sum(len(layer.state_dict()) for layer in head.layers)
    if not faults:
        return Finding("tensors", True, f"all {count} parameters have one of their shape")
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return Finding("tensors", False, f"{len(faults)} faults: {'; '.join(faults[:_SHOWN])}{more}", _ANEW)


def _check_types(files: MtpFiles) -> Finding:
    kinds = Counter(files.weights.dtypes[name] for name in files.names)
    return Finding("types", True, ", ".join(f"{count} of {kind}" for kind, count in sorted(kinds.items())))


def _check_values(head: MtpHead) -> Finding:
    """Check the values: finite, no matrix empty; and whether embeddings and LM head are the target's."""
    state = {
        f"layer {index} {name}": value
        for index, layer in enumerate(head.layers)
        for name, value in layer.state_dict().items()
        if value.is_floating_point()
    }
    broken = [name for name, value in state.items() if not bool(value.isfinite().all())]
    empty = [name for name, value in state.items() if value.dim() > 1 and not bool(value.any())]
    problems = [("not finite", broken), ("zeros alone", empty)]
    if broken or empty:
        says = "; ".join(f"{what}: {', '.join(names[:_SHOWN])}" for what, names in problems if names)
        return Finding("values", False, says, _ANEW)
    own_tables = sorted({name.partition(".")[0] for tables in head.tables for name in tables})
    says = f"own tables: {', '.join(own_tables)}" if own_tables else "embeddings and LM head are the target's"
    return Finding("values", None if own_tables else True, f"finite; {says}")


class MtpFeeding(Feeding):
    """As :class:`Feeding` for the first MTP layer."""

    head: Any

    def _logits(self, hidden: Tensor) -> Tensor:
        lm_head = self.head.tables[0].get(LM_HEAD)
        return super()._logits(hidden) if lm_head is None else hidden @ lm_head.to(hidden.dtype).T

    def variants(self) -> list[Variant]:
        other = "embedding" if self.head.layers[0].state_first else "state"
        variants = [
            *other_positions(),
            Variant("norms", "states from before the target's final norm", "train on the inputs of the LM head",
                    final=self.layers - 1),
            Variant("norms", "the two input norms in each other's place", "exchange enorm and hnorm in the file",
                    change=_exchanged_norms),
            Variant("norms", "norm weights larger by 1", "the file holds weight - 1: add 1 to the norms",
                    change=_shifted_norms(1.0)),
            Variant("norms", "norm weights smaller by 1", "the file holds 1 + weight: subtract 1 from the norms",
                    change=_shifted_norms(-1.0)),
            Variant("projection", f"the {other} first", "exchange the halves of the projection's columns",
                    change=_exchanged_halves),
        ]  # fmt: skip
        norm = self.head.layers[0].norm
        if isinstance(norm, nn.Identity):
            return variants
        read = Variant("norms", "no norm after the layer", "set the norm after the layer to ones",
                       readout=lambda head, x: x, change=_without_norm)  # fmt: skip
        recycled = Variant("norms", "its own outputs from before its norm in the next step", "train it on normed ones",
                           readout=lambda head, x: norm(x), change=_without_norm, step=1)  # fmt: skip
        return [*variants, read, recycled]


def _exchanged_halves(head: Any) -> AbstractContextManager[None]:
    layer = head.layers[0]
    return with_values(layer, state_first=not layer.state_first)


def _exchanged_norms(head: Any) -> AbstractContextManager[None]:
    layer = head.layers[0]
    return with_values(layer, enorm=layer.hnorm, hnorm=layer.enorm)


def _without_norm(head: Any) -> AbstractContextManager[None]:
    return with_values(head.layers[0], norm=nn.Identity())


def _shifted_norms(by: float) -> Any:
    """Return a change of a layer that adds a number to the weights of all its norms."""

    @contextmanager
    def shifted(head: Any) -> Iterator[None]:
        norms = [value for name, value in head.layers[0].named_parameters() if name.endswith("norm.weight")]
        before = [norm.detach().clone() for norm in norms]
        try:
            for norm in norms:
                norm.data += by
            yield
        finally:
            for norm, value in zip(norms, before, strict=True):
                norm.data.copy_(value)

    return shifted


class MtpDoctor(Doctor):
    """Checks of MTP layers with their target on rows of answers. Of several layers, the first is fed otherwise.

    Arguments are those of :class:`Doctor`, with :attr:`whole` for the head.
    """

    checks = ("positions", "norms", "projection")
    feeding_kind = MtpFeeding

    def __init__(self, target: Target, head: Any, *others: Any) -> None:
        self.whole = head
        super().__init__(target, _first_layer(target, head), *others)

    def check_positions(self) -> Finding:
        return Finding("rope", True, "the target's own")

    def _remapped(self) -> None:
        return None

    def drafter(self, shape: TreeShape) -> EagleDrafter:
        return MtpDrafter(self.whole, self.target, shape)

    def decoded(self, prompts: int, tokens: int) -> tuple[list[Finding], list[float], list[list[int]]]:
        (decoding, *others), accepted, answers = super().decoded(prompts, tokens)
        if accepted[0] < _MIN_ACCEPTED:
            fix = "if no line above says why, the layers are another model's, or were hardly trained"
            decoding = Finding(decoding.check, False, decoding.says, fix)
        return [decoding, *others], accepted, answers


def _first_layer(target: Target, head: MtpHead) -> MtpHead:
    if len(head.layers) == 1:
        return head
    with torch.device("meta"):
        single = MtpHead(target, head.layout)
    single.layers[0].load_state_dict(head.layers[0].state_dict(), assign=True)
    single.tables = head.tables[:1]
    return single.requires_grad_(False)
