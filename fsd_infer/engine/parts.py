"""The parts of a recorded round: functions of a state that a recording holds, what they make, and their replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from fsd_core.tensors import packed, put
from fsd_infer.engine.report import columns_of
from fsd_infer.engine.round import RoundTensors, accept_and_commit, advance, verify
from fsd_infer.engine.state import DecodeState
from fsd_infer.engine.verified import VerifiedTree
from fsd_infer.trees.tree import DraftTree


@dataclass
class Part:
    """A recorded part of a round.

    Attributes:
        inputs: what it reads of the host, or of what runs eagerly before it.
        made: what it makes; every :meth:`replay` updates these tensors.
        launch: launches it.
        phases: of the round that it holds.
    """

    inputs: list[Tensor]
    made: Any
    launch: Callable[[], Any]
    phases: list[str]
    _taken: list[Tensor] = field(default_factory=list)

    def replay(self, given: Sequence[Tensor], constant: bool = False) -> Any:
        """Launch it with these inputs. ``constant``: the same object as before has the same values."""
        before = self._taken if constant and self._taken else [None] * len(given)
        for buffer, values, earlier in zip(self.inputs, given, before, strict=True):
            if values is not earlier:
                put(values, buffer)
        self._taken = list(given) if constant else []
        self.launch()
        return self.made


@dataclass
class Recording:
    """The parts of a round, and what its rules ask the host between two of them."""

    parts: list[Part] = field(default_factory=list)
    asked: tuple[Hashable, ...] = ()


def draft_and_verify(state: DecodeState, tree: DraftTree | None, inputs: Sequence[Tensor]) -> VerifiedTree:
    """Verify a tree of these tensors; None: the session drafts one, to which it takes them."""
    if tree is not None:
        own: dict[str, Any] = dict(zip([name for name, _ in tensors_of(tree)], inputs, strict=True))
        tree = replace(tree, **own)
    else:
        state.session.set_host_inputs(iter(inputs))
        try:
            tree = state.session.draft(state.roots)
        finally:
            state.session.set_host_inputs(None)
        state.on_phase("draft")
    verified = verify(state, tree)
    state.on_phase("target")
    return verified


def finish_round(
    state: DecodeState, verified: VerifiedTree, advances: bool, found: Mapping[Hashable, Tensor] | None = None
) -> RoundTensors:
    """Settle a verified tree, of which the host has computed something; and advance a captured session."""
    state.cache.recurrent.kept.update(verified.recurrent)
    made = accept_and_commit(state, verified.with_computed(state, found))
    if advances:
        advance_session(state, made)
    made.packed = packed(*columns_of(made).values())
    return made


def advance_session(state: DecodeState, made: RoundTensors) -> RoundTensors:
    advance(state, made, made.verdict.tokens, made.verdict.accepted + 1)
    state.on_phase("advance")
    return made


def outputs_of(made: RoundTensors | VerifiedTree) -> tuple[Tensor, ...]:
    """Return the tensors that a recorded part leaves to what follows it."""
    if isinstance(made, RoundTensors):
        return () if made.packed is None else (made.packed,)
    return made.logits, made.features, *(values for _, values in tensors_of(made.tree))


def tensors_of(tree: DraftTree) -> list[tuple[str, Tensor]]:
    """Return a tree's tensors by name. The ids of a draft vocabulary are among them: they grow by a text's own."""
    named = [(each.name, getattr(tree, each.name)) for each in fields(tree)]
    return [(name, value) for name, value in named if isinstance(value, Tensor)]
