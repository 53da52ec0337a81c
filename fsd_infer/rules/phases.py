"""Phases of a text: what stands between two marker tokens, where alone a rule with ``only_in`` is lossy.

A phase is written ``think`` for what stands between ``<think>`` and ``</think>``, or ``OPENING..CLOSING``. A token is
in it if the last marker before it, in prompt, answer and draft, is the opening one: the closing marker itself is, the
opening one is not.
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

Markers = Mapping[str, tuple[int, int]]  # of phases: opening and closing token
NOWHERE = (-1, -1)  # a phase that no text has


def markers(phase: str) -> tuple[str, str]:
    """The opening and closing token of a phase, as texts. Raises FsdError unless it is written as above."""
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
    """The marker tokens of all phases that rules name.

    Raises FsdError: no tokenizer, or one to which a marker is not one token: its rule would never be lossy.
    """
    found: dict[str, tuple[int, int]] = {}
    for phase in {rule.only_in for rule in rules if rule.only_in is not None}:
        if tokenizer is None:
            raise FsdError(f"only_in={phase}: the target has no tokenizer that knows the markers: add its files.")
        vocabulary = tokenizer.get_vocab()
        ids = [vocabulary.get(marker, -1) for marker in markers(phase)]
        if min(ids) < 0:
            unknown = markers(phase)[ids.index(-1)]
            raise FsdError(
                f"only_in={phase}: {unknown!r} is no token of the target's, so its texts have no such phase. Name "
                "another pair, OPENING..CLOSING, or leave only_in out."
            )
        found[phase] = ids[0], ids[1]
    return found


def inside(texts: Texts, tree: DraftTree, opening: int, closing: int) -> Tensor:
    """[B, N] bool; is the token after each node in the phase."""
    text, depths = texts.tokens, tree.depths
    places = torch.arange(1, text.shape[1] + 1, device=text.device)
    opened, closed = (pad(places * (text == token), (1, 0)).amax(1, keepdim=True) for token in (opening, closing))
    of_text = opened > closed
    marks = (tree.tokens == token for token in (opening, closing))
    opened, closed = ((tree.ancestors * (depths * mark)[:, None]).amax(-1) for mark in marks)
    return torch.where(torch.maximum(opened, closed) > 0, opened > closed, of_text)
