"""Whole rounds recorded as CUDA graphs: draft, verify, rule, commit and the drafter's reading become one launch.

A recording fixes shapes and addresses. So the state of a request outlives it, and a later request of the same plan
takes its place in the same tensors. A batch fills a bucket of 1, 2, 4, 8 or 16 rows, of which those that it lacks, and
those that have finished, are masked until the whole batch is finished. A drafter that works on
the host cuts the round: it drafts and reads before and after the launch, which settles the copy of its tree.

Some rounds run eagerly: with logits processors that look at the text or hold tensors, and where a rule asks a drafter
for copies of other texts. A model whose forward reads values on the host cannot be recorded; a warning tells so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from fsd_core.tensors import packed, to_device
from fsd_infer.device.cuda_graphs import Recorder
from fsd_infer.engine.report import columns_of
from fsd_infer.engine.round import RoundTensors, advance, decode_round, settle
from fsd_infer.engine.state import DecodeState
from fsd_infer.request.processors import TreeProcessors
from fsd_infer.targets.target import Target
from fsd_infer.tree import DraftTree

log = logging.getLogger(__name__)
MOST = 64  # states that are kept, and recordings of each
BUCKETS = (1, 2, 4, 8, 16)  # rows of recordings


def bucket(count: int) -> int:
    """Return the rows of the recording that a batch of ``count`` texts uses; beyond the largest bucket, as many."""
    return next((rows for rows in BUCKETS if rows >= count), count)


@dataclass
class Recording:
    """A round, or its settling. ``tree``: where the recording reads the drafts; None: it drafts.

    ``tensors`` are those of the round, which every ``replay`` updates; ``phases`` are the parts that it holds.
    """

    tensors: RoundTensors
    replay: Callable[[], Any]
    phases: list[str]
    tree: DraftTree | None = None


@dataclass
class Slot:
    """The state of one plan and its recordings, by the shapes of the tree. None: the shapes occurred once."""

    state: DecodeState
    recordings: dict[Hashable, Recording | None] = field(default_factory=dict)


class Recorded:
    """The recordings of a target.

    Attributes:
        generator: of all draws. A recording draws from it, so a request's own only sets its state.
        refused: why recording failed; None while it works.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self.recorder, self.device = recorder, device
        self.generator = torch.Generator(device=device)
        self.refused: str | None = None
        self.slots: dict[Hashable, Slot] = {}
        self.current: Slot | None = None  # of the last request

    @classmethod
    def of(cls, target: Target) -> Recorded | None:
        """Return the recordings of a target; None if it does not record."""
        if target.recorder is None:
            return None
        if target.recorded is None:
            target.recorded = cls(target.recorder, target.device)
        return target.recorded if target.recorded.refused is None else None

    def drawing(self, generator: torch.Generator | None) -> torch.Generator:
        """Return the generator of recordings, in the state of a request's, or of torch's global one."""
        if generator is None:
            self.generator.manual_seed(int(torch.randint(2**62, ())))
        else:
            self.generator.set_state(generator.get_state())
        return self.generator

    def placed(self, state: DecodeState, count: int, plan: Hashable) -> DecodeState:
        """Return the state that takes a new request's place: that of an earlier request of the same plan, if any.

        Args:
            state: of the new request, whose rows fill a bucket.
            count: rows of the request; the others emit nothing.
            plan: what fixes its rounds, besides its own shapes.
        """
        rows = len(state.rules)
        state.live = to_device(torch.arange(rows) < count, self.device)
        key = plan, rows, state.greedy, state.measures, state.budget is None
        self.current = self.slots.pop(key, None) or Slot(state)
        self.slots[key] = self.current  # the last one used
        while len(self.slots) > MOST:
            del self.slots[next(iter(self.slots))]
        return state if self.current.state is state else self.current.state.restart(state)

    def run(self, state: DecodeState) -> RoundTensors:
        """Run a round: replay its recording, or record it first."""
        slot = self.current
        if slot is None or slot.state is not state or self.refused or state.session.remembers:
            return decode_round(state)
        if state.session.is_fixed:
            recording = slot.recordings.get(None) or self._record(state, None)
            if recording is None:
                return decode_round(state)
            slot.recordings[None] = recording
            recording.replay()
            state.lap("target")
            return recording.tensors
        tree = state.session.draft(state.roots)
        state.lap("draft")
        made = self._settled(slot, state, tree)
        advance(state, made, made.verdict.tokens, made.verdict.accepted + 1)
        state.lap("advance")
        return made

    def _settled(self, slot: Slot, state: DecodeState, tree: DraftTree) -> RoundTensors:
        """Settle a tree of the host's."""
        tree = tree.padded_to(state.most_nodes)
        key = tree.levels, *((name, x.shape, x.dtype) for name, x in tensors_of(tree))
        if key not in slot.recordings:  # record shapes when they recur
            slot.recordings[key] = None
            while len(slot.recordings) > MOST:
                del slot.recordings[next(iter(slot.recordings))]
            return settle(state, tree)
        recording = slot.recordings[key] or self._record(state, tree)
        if recording is None or recording.tree is None:
            return settle(state, tree)
        slot.recordings[key] = recording
        for (_, buffer), (_, value) in zip(tensors_of(recording.tree), tensors_of(tree), strict=True):
            buffer.copy_(value)
        recording.replay()
        state.lap("rule")
        return recording.tensors

    def _record(self, state: DecodeState, tree: DraftTree | None) -> Recording | None:
        """Record a round, or the settling of a tree; None if that is not possible. The state stays as it is."""
        if tree is not None:
            own: dict[str, Any] = {name: value.clone() for name, value in tensors_of(tree)}
            tree = replace(tree, **own)
        made: list[RoundTensors] = []

        def run() -> tuple[Tensor, ...]:
            tensors = decode_round(state) if tree is None else settle(state, replace(tree))
            tensors.packed = packed(*columns_of(tensors).values())
            made.append(tensors)
            return (tensors.packed,)

        changed = [*state.tensors(), *state.cache.recurrent.tensors, *state.session.tensors()]
        before, drawn, lap = [x.clone() for x in changed], self.generator.get_state(), state.lap
        phases: list[str] = []
        state.lap = phases.append
        try:
            _, replay = self.recorder(run, self.generator)
            return Recording(made[-1], replay, phases[len(phases) // 2 :], tree)
        except Exception as error:  # torch raises many types for operations that cannot be recorded
            self.refused = str(error).strip().partition("\n")[0]
            self.slots.clear()
            log.warning("a round cannot be recorded as a CUDA graph, so none is: %s", self.refused)
            return None
        finally:
            state.lap = lap
            for x, value in zip(changed, before, strict=True):
                x.copy_(value)
            self.generator.set_state(drawn)


def tensors_of(tree: DraftTree) -> list[tuple[str, Tensor]]:
    """Return a tree's tensors by name. The ids of a draft vocabulary are among them: they grow by a text's own."""
    named = [(each.name, getattr(tree, each.name)) for each in fields(tree)]
    return [(name, value) for name, value in named if isinstance(value, Tensor)]


def signature(processors: TreeProcessors) -> Hashable | None:
    """Return what tells requests' processors apart; None if that is more than numbers."""
    found = []
    for processor in processors.processors:
        values = tuple(sorted(vars(processor).items()))
        if not all(isinstance(value, (int, float, str, bool, type(None))) for _, value in values):
            return None
        found.append((type(processor), values))
    return tuple(found)
