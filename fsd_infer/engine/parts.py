"""The CUDA graphs of a recorded round: what each runs, its inputs and outputs, and its replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from fsd_core.tensors import packed, put
from fsd_infer.engine.report import columns_of
from fsd_infer.engine.round import RoundTensors, VerifiedTree, accept, advance, commit, verify
from fsd_infer.engine.state import DecodeState
from fsd_infer.trees.tree import DraftTree


@dataclass
class RecordedGraph:
    """One graph of a recorded round.

    Attributes:
        inputs: from the host, or from what runs eagerly before it; at fixed addresses.
        outputs: of the recorded function; every :meth:`replay` updates their tensors.
        launch: replays the recorded launches.
        phases: of the round that it holds.
    """

    inputs: list[Tensor]
    outputs: Any
    launch: Callable[[], Any]
    phases: list[str]
    _last_inputs: list[Tensor] = field(default_factory=list)

    def replay(self, inputs: Sequence[Tensor], skip_same: bool = False) -> Any:
        """Launch it with these inputs. ``skip_same``: do not copy what is the same object as in the last call."""
        before = self._last_inputs if skip_same and self._last_inputs else [None] * len(inputs)
        for buffer, values, earlier in zip(self.inputs, inputs, before, strict=True):
            if values is not earlier:
                put(values, buffer)
        self._last_inputs = list(inputs) if skip_same else []
        self.launch()
        return self.outputs


@dataclass
class Recording:
    """The graphs of a round, one, or two with what the host computes for the rules between them."""

    graphs: list[RecordedGraph] = field(default_factory=list)
    computed_on_host: tuple[Hashable, ...] = ()


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
    state: DecodeState, verified: VerifiedTree, advances: bool, computed: Mapping[Hashable, Tensor] | None = None
) -> RoundTensors:
    """Accept and commit a path of a verified tree; advance a recorded session.

    ``computed``: what the host computed of the tree in another graph than this one; None: it has no other.
    """
    if computed is not None:
        verified = verified.with_computed(state, computed)
        state.cache.recurrent.kept.update(verified.recurrent)
    result = accept(state, verified)
    state.on_phase("rule")
    commit(state, result.verdict)
    state.on_phase("cache")
    if advances:
        advance(state, result)
        state.on_phase("advance")
    result.packed = packed(*columns_of(result).values())
    return result


def outputs_of(result: RoundTensors | VerifiedTree) -> tuple[Tensor, ...]:
    """Return the tensors that a recorded part leaves to what follows it."""
    if isinstance(result, RoundTensors):
        return () if result.packed is None else (result.packed,)
    return result.logits, result.features, *(values for _, values in tensors_of(result.tree))


def tensors_of(tree: DraftTree) -> list[tuple[str, Tensor]]:
    """Return a tree's tensors by name. The ids of a draft vocabulary are among them: they grow by a text's own."""
    named = [(each.name, getattr(tree, each.name)) for each in fields(tree)]
    return [(name, value) for name, value in named if isinstance(value, Tensor)]
