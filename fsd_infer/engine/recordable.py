"""A round as CUDA graphs hold it: what each of them runs, its inputs and outputs, and its replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from fsd_core.tensors import packed, put
from fsd_infer.engine.report import columns_of
from fsd_infer.engine.round import Question, RoundTensors, VerifiedTree, accept, advance, commit, verify
from fsd_infer.engine.state import DecodeState
from fsd_infer.trees.tree import DraftTree


@dataclass
class RecordedGraph:
    """One graph of a recorded round.

    Attributes:
        inputs: from the host, or from what runs eagerly before it; at fixed addresses.
        outputs: what the recorded function returned; every :meth:`replay` updates their tensors.
        launch: replays the recorded launches.
        phases: the phases of a round that it holds.
    """

    inputs: list[Tensor]
    outputs: Any
    launch: Callable[[], Any]
    phases: list[str]
    _last_inputs: Sequence[Tensor] = ()

    def replay(self, inputs: Sequence[Tensor], keeps_values: bool = False) -> Any:
        """Launch it with these inputs. ``keeps_values``: what is the same object as in the last call is not copied."""
        before = self._last_inputs if keeps_values and self._last_inputs else [None] * len(inputs)
        for buffer, values, earlier in zip(self.inputs, inputs, before, strict=True):
            if values is not earlier:
                put(values, buffer)
        self._last_inputs = list(inputs) if keeps_values else ()
        self.launch()
        return self.outputs


@dataclass
class Recording:
    """The graphs of a round: one, or two where rules ask the host about the tree between them.

    Attributes:
        graphs: those that are recorded so far.
        questions: what rules ask; None: not known before a round has run eagerly.
    """

    graphs: list[RecordedGraph] = field(default_factory=list)
    questions: Sequence[Question] | None = None


class RecordableRound:
    """The next round of a batch as functions of tensors: :meth:`whole`, or in two parts.

    A recordable session drafts and advances in them. Any other does so eagerly: it has drafted when the round is made,
    and advances in :meth:`end`.

    Attributes:
        state: state of the batch.
        tree: what the session has drafted; None: it drafts in the recorded round.
        inputs: inputs of the first part: what a recordable session computed on the host, or the tree's tensors.
        key: rounds of one key have tensors of the same shapes.
    """

    def __init__(self, state: DecodeState) -> None:
        self.state, session = state, state.session
        self.tree: DraftTree | None = None
        self.inputs: Sequence[Tensor]
        shape_key: Hashable
        if session.is_recordable:
            self.inputs, shape_key = session.host_inputs(), session.shape_key
        else:
            self.tree = session.draft(state.texts.roots).padded_to(state.max_nodes)
            names, self.inputs = zip(*tensors_of(self.tree))
            shape_key = self.tree.depth_bound, names
            state.on_phase("draft")
        self.key = shape_key, state.asks_host, *((x.shape, x.dtype) for x in self.inputs)

    def whole(self, inputs: Sequence[Tensor]) -> RoundTensors:
        """Run both parts."""
        return self.finish(self.draft_and_verify(inputs))

    def draft_and_verify(self, inputs: Sequence[Tensor]) -> VerifiedTree:
        """Verify the tree, drafted here or of these tensors."""
        state = self.state
        if self.tree is not None:
            own: dict[str, Any] = dict(zip([name for name, _ in tensors_of(self.tree)], inputs, strict=True))
            tree = replace(self.tree, **own)
        else:
            state.session.set_host_inputs(iter(inputs))
            try:
                tree = state.session.draft(state.texts.roots)
            finally:
                state.session.set_host_inputs(None)
            state.on_phase("draft")
        verified = verify(state, tree)
        state.on_phase("target")
        return verified

    def finish(self, verified: VerifiedTree, answers: Mapping[Question, Tensor] | None = None) -> RoundTensors:
        """Accept and commit a path of a verified tree; advance a recordable session.

        ``answers``: of the host, where the tree was verified in another graph than this one.
        """
        state = self.state
        if answers is not None:
            verified = verified.with_answers(state, answers)
            state.cache.recurrent.kept.update(verified.recurrent)
        result = accept(state, verified)
        state.on_phase("rule")
        commit(state, result.verdict)
        state.on_phase("cache")
        if self.tree is None:
            self._advance(result)
        result.packed = packed(*columns_of(result).values())
        return result

    def end(self, result: RoundTensors) -> None:
        """Advance a session that is not recordable."""
        if self.tree is not None:
            self._advance(result)

    def _advance(self, result: RoundTensors) -> None:
        advance(self.state, result)
        self.state.on_phase("advance")


def outputs_of(result: RoundTensors | VerifiedTree) -> tuple[Tensor, ...]:
    """Return the tensors that a recorded part leaves to what follows it."""
    if isinstance(result, RoundTensors):
        return () if result.packed is None else (result.packed,)
    return result.logits, result.features, *(values for _, values in tensors_of(result.tree))


def tensors_of(tree: DraftTree) -> list[tuple[str, Tensor]]:
    """Return a tree's tensors by name. The ids of a draft vocabulary are among them: they grow by a text's own."""
    named = [(entry.name, getattr(tree, entry.name)) for entry in fields(tree)]
    return [(name, value) for name, value in named if isinstance(value, Tensor)]
