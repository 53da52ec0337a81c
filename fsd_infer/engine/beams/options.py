"""Options of speculative beams, and checks of requests with beams."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch

from fsd_core.errors import FsdError
from fsd_core.registry import did_you_mean, read_float, read_int
from fsd_infer.drafters.base import Drafter, NoDrafter
from fsd_infer.engine import Request
from fsd_infer.rules import Exact, Rule
from fsd_infer.trees.shape import of_device

_MAX = 2**16
# for each option, the reader of its text and its range
_OPTIONS: dict[str, tuple[Callable[[str], float | None], float, float]] = {
    "depth": (read_int, 0, _MAX),
    "spread": (read_float, 1, _MAX),
    "nodes": (read_int, 0, _MAX),
    "confidence": (read_float, 1e-6, 1),
    "min_width": (read_int, 1, _MAX),
    "join_every": (read_int, 2, _MAX),
}


@dataclass(frozen=True)
class BeamOptions:
    """Options of speculative beams.

    The first three change only the number of target forwards. The others belong to beam sampling and change its
    distribution, see docs/decoding.md.

    Attributes:
        depth: search steps drafted per round; 0: none (default: by device).
        spread: nodes drafted per step, as a multiple of the number of beams (default: by device).
        nodes: most nodes verified per round, besides the beams' own. Default: no limit; by device if depth and spread
            are not set.
        confidence: dynamic width, in (0, 1]. A step keeps the most beams that are all drafted with at least this
            probability (default: always ``num_beams``).
        min_width: the least dynamic width (default: 1).
        join_every: keep only one beam after every this many steps, at least 2, to bound the cache (default: never).
    """

    depth: int | None = None
    spread: float | None = None
    nodes: int | None = None
    confidence: float | None = None
    min_width: int | None = None
    join_every: int | None = None

    def __post_init__(self) -> None:
        for name, (read, least, most) in _OPTIONS.items():
            value, whole = getattr(self, name), read is read_int
            is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
            if value is not None and not (is_number and least <= value <= most):
                must = f"must be a number from {least:g} to {most:g}" + (", and whole" if whole else "")
                raise FsdError(f"beam option {name} {must}, got {value!r:.60}.")
        if self.min_width is not None and self.confidence is None:
            raise FsdError("min_width bounds a dynamic width: set confidence as well, or leave it out.")

    @classmethod
    def of(cls, value: BeamOptions | Mapping[str, Any] | str | None) -> BeamOptions | None:
        """Return options, None unchanged, given in any form that ``beams`` takes. Raises FsdError for others."""
        if value is None or isinstance(value, BeamOptions):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if not isinstance(value, Mapping):
            raise FsdError(f'beams are written "depth=4,spread=2" or as a mapping, got {type(value).__name__}.')
        for name in value:
            if name not in _OPTIONS:
                hint = did_you_mean(name, _OPTIONS)
                raise FsdError(f"unknown beam option {name!r:.60}.{hint} Known: {', '.join(_OPTIONS)}.")
        return cls(**value)

    @classmethod
    def parse(cls, text: str) -> BeamOptions:
        """Parse "depth=4,spread=2", or "depth=4:spread=2" within a list. Raises FsdError for other text."""
        values: dict[str, Any] = {}
        for part in re.split("[:,]", text):
            name, _, written = part.partition("=")
            if name not in _OPTIONS or name in values:
                raise FsdError(f"beam option {part!r}: write NAME=NUMBER, each name once, of {', '.join(_OPTIONS)}.")
            values[name] = _OPTIONS[name][0](written)
            if values[name] is None:
                raise FsdError(f"beam option {part!r}: {written!r} is not a number that {name} can be.")
        return cls(**values)

    def breadth(self, width: int) -> int:
        """Return the number of nodes drafted for a step that keeps ``width`` beams. Needs ``spread``."""
        assert self.spread is not None
        return math.ceil(self.spread * width)

    def most_nodes(self, beams: int) -> int:
        """Return the most nodes of a round, besides the beams' own. Needs ``depth`` and ``spread``."""
        assert self.depth is not None
        return self.depth * self.breadth(beams) if self.nodes is None else self.nodes

    def given(self) -> dict[str, Any]:
        """Return the options that are set."""
        return {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}


# A node costs time on a CPU, little on a GPU. Measured on training prompts with 2 and 4 beams of smollm2-135m.
DEFAULTS = {"cpu": BeamOptions(depth=4, spread=1.0, nodes=8), "cuda": BeamOptions(depth=6, spread=3.0)}


def complete_options(
    options: BeamOptions, request: Request, beams: int, drafter: Drafter, device: torch.device
) -> BeamOptions:
    """Fill in the device's defaults. Raises FsdError for options that do not fit the request or the drafter."""
    default = of_device(DEFAULTS, device)
    depth = default.depth if options.depth is None else options.depth
    depth = 0 if isinstance(drafter, NoDrafter) else depth
    if request.greedy and (options.confidence is not None or options.join_every is not None):
        raise FsdError(
            "confidence and join_every change which beams a step keeps, but beam search keeps transformers' beams: "
            "sample (do_sample=True, or a temperature above 0), or leave them out."
        )
    if options.confidence is not None and not depth:
        raise FsdError("confidence compares the target with a drafter, and nothing is drafted: leave it out.")
    if (options.min_width or 1) > beams:
        raise FsdError(f"min_width {options.min_width} is more than the {beams} beams: lower it.")
    nodes = default.nodes if options.given().keys().isdisjoint(("depth", "spread", "nodes")) else options.nodes
    spread = default.spread if options.spread is None else options.spread
    return replace(options, depth=depth, spread=spread, nodes=nodes)


def can_draft(drafter: Drafter) -> bool:
    """Return whether a drafter, or a part of it, drafts for beams. Warns about what does not, by name."""
    for part in drafter.parts or [drafter]:
        if not part.drafts_beams and not isinstance(part, NoDrafter):
            warnings.warn(
                f"drafter {part.name or type(part).__name__!r} drafts below one text only, not below the beams of a "
                "search: it drafts nothing with num_beams > 1. Lookup, recycling, draft heads and small models of the "
                "target's vocabulary do.",
                stacklevel=2,
            )
    return drafter.drafts_beams


def check_beam_request(rules: Sequence[Rule], request: Request) -> None:
    """Raise FsdError for a rule other than `exact`, callbacks, or log-likelihoods of processed logits."""
    if lossy := [rule for rule in rules if not isinstance(rule, Exact)]:
        raise FsdError(
            f"rule {lossy[0].describe()['rule']!r} has no meaning with num_beams > 1: a rule decides which tokens of "
            "one text are accepted, but beams compete. Use rule exact, or num_beams=1."
        )
    if request.callbacks:
        raise FsdError("callbacks do not work with beams, which change places: leave num_beams out, or these.")
    if request.measure_log_likelihood and request.processors:
        raise FsdError(
            "with num_beams > 1 and logits processors the answers' scores are no log-likelihoods: leave "
            "measure_log_likelihood out."
        )
