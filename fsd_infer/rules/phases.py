"""Phases of a text: the spans between two marker tokens. A rule with ``only_in`` is lossy inside a phase alone.

``think`` names the spans between ``<think>`` and ``</think>``, ``OPENING..CLOSING`` any other pair. A token is in a
phase if the last marker before it, in prompt, answer and draft, is the opening one. So the closing marker is inside,
the opening one is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsd_infer.errors import FsdError
from fsd_infer.tree import DraftTree

if TYPE_CHECKING:
    from fsd_infer.rules.texts import Texts

Markers = Mapping[str, tuple[int, int]]  # phase -> opening and closing token
NOWHERE = (-1, -1)  # markers of a phase that no text has


def markers(phase: str) -> tuple[str, str]:
    """Return a phase's opening and closing token, as text. Raises FsdError for any other notation."""
    if re.fullmatch(r"[\w-]+", phase):
        return f"<{phase}>", f"</{phase}>"
    opening, dots, closing = phase.partition("..")
    if not (opening and dots and closing) or opening == closing:
        raise FsdError(
            f"only_in={phase!r:.60}: give a name, such as think for <think> and </think>, or two different tokens "
            "with two dots between them, such as [THINK]..[/THINK]."
        )
    return opening, closing


def markers_of(rules: Sequence[Any], tokenizer: Any) -> dict[str, tuple[int, int]]:
    """Return the marker tokens of all phases that rules name.

    Raises FsdError if there is no tokenizer, or if a marker is not a single token: its rule would never be lossy.
    """
    by_phase: dict[str, tuple[int, int]] = {}
    for phase in {rule.only_in for rule in rules if rule.only_in is not None}:
        if tokenizer is None:
            raise FsdError(f"only_in={phase}: the target has no tokenizer to look the markers up. Add its files.")
        vocabulary = tokenizer.get_vocab()
        ids = [vocabulary.get(marker, -1) for marker in markers(phase)]
        if min(ids) < 0:
            unknown = markers(phase)[ids.index(-1)]
            raise FsdError(
                f"only_in={phase}: {unknown!r} is not a token of the target, so its texts have no such phase. Name "
                "another pair, OPENING..CLOSING, or leave only_in out."
            )
        by_phase[phase] = ids[0], ids[1]
    return by_phase


def inside(texts: Texts, tree: DraftTree, opening: int, closing: int) -> Tensor:
    """[B, N] bool; whether the token after each node is in the phase."""
    text, depths = texts.tokens, tree.depths
    places = torch.arange(1, text.shape[1] + 1, device=text.device)
    opened, closed = (pad(places * (text == token), (1, 0)).amax(1, keepdim=True) for token in (opening, closing))
    of_text = opened > closed
    marks = (tree.tokens == token for token in (opening, closing))
    opened, closed = ((tree.ancestors * (depths * mark)[:, None]).amax(-1) for mark in marks)
    return torch.where(torch.maximum(opened, closed) > 0, opened > closed, of_text)
