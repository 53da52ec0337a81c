"""Whole rounds recorded as CUDA graphs: draft, verify, rule, commit and the drafter's reading become one launch.

A recording fixes shapes and addresses. So the state of a request outlives it, and a later request of the same key
takes its place in the same tensors. A batch fills a bucket of 1, 2, 4, 8 or 16 rows; empty and finished rows are
masked. When the rest fits a smaller bucket that is recorded, it moves there.

What a drafter finds on the host goes to the recording before the launch (:meth:`.DraftSession.host_inputs`). Where the
host computes something of the tree, for logits processors that read texts or rules that compare with other ones, the
round is cut there into two recordings (:class:`.VerifiedTree`). Other drafters draft and read eagerly,
before and after. A model whose forward reads values on the host cannot be recorded; a warning says so once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsd_core.tensors import to_device
from fsd_infer.device.cuda_graphs import GraphRecorder
from fsd_infer.engine.recordable import RecordableRound, RecordedGraph, Recording, outputs_of
from fsd_infer.engine.round import RoundTensors, VerifiedTree, decode_round
from fsd_infer.engine.state import DecodeState
from fsd_infer.rules import Rule
from fsd_infer.targets.target import Target
from fsd_infer.trees.policy import TreePolicy

log = logging.getLogger(__name__)
MAX_KEPT = 64  # states that are kept, and recordings of each
BUCKETS = (1, 2, 4, 8, 16)  # rows of recordings
TIMED_ROUNDS = 3  # rounds by which a shape is timed
RunPart = Callable[[Sequence[Tensor]], RoundTensors | VerifiedTree]


def bucket(count: int) -> int:
    """Return the rows of the recording that a batch of ``count`` texts uses; beyond the largest bucket, as many."""
    return next((rows for rows in BUCKETS if rows >= count), count)


class RecordingKey(NamedTuple):
    """What fixes the rounds of a request, besides their shapes: requests of equal keys share recordings."""

    drafter: Hashable
    rules: tuple[Rule, ...]
    capacity: int
    processors: Hashable
    draft_bonus: float
    greedy: bool
    measure_log_likelihood: bool

    def for_rows(self, count: int) -> RecordingKey:
        """Return the key of a batch of ``count`` rows."""
        return self._replace(rules=self.rules[:count])


@dataclass
class RecordedState:
    """The state that all requests of one key use, one after the other, and its recordings by what fixes their shapes.

    Attributes:
        seconds: time of a round by shape of the menu; empty: not timed yet.
    """

    state: DecodeState
    key: RecordingKey
    recordings: dict[Hashable, Recording] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def recording(self, key: Hashable) -> Recording:
        """Return the recording of rounds of this key. A new one may take the place of the oldest."""
        if key not in self.recordings:
            self.recordings[key] = Recording()
            while len(self.recordings) > MAX_KEPT:
                del self.recordings[next(iter(self.recordings))]
        return self.recordings[key]


class RoundRecorder:
    """Records rounds of a target and replays them.

    Attributes:
        generator: generates all draws. A recording draws from it, so a request's own only sets its state.
        refused: why recording failed; None if it works.
    """

    def __init__(self, recorder: GraphRecorder, device: torch.device) -> None:
        self.recorder, self.device = recorder, device
        self.generator = torch.Generator(device=device)
        self.refused: str | None = None
        self.states: dict[RecordingKey, RecordedState] = {}
        self.current: RecordedState | None = None  # the last request's

    @property
    def graphs(self) -> int:
        """Number of recorded graphs."""
        return sum(len(one.graphs) for recorded in self.states.values() for one in recorded.recordings.values())

    @classmethod
    def of(cls, target: Target) -> RoundRecorder | None:
        """Return the recordings of a target; None if it does not record."""
        if target.recorder is None or target.dynamic_rope.fixed_length is not None:  # angles that the host chooses
            return None
        if target.recorded is None:
            target.recorded = cls(target.recorder, target.device)
        return target.recorded if target.recorded.refused is None else None

    def forget(self) -> None:
        """Drop all recordings, and with them the memory that they hold."""
        self.states.clear()
        self.current = None

    def generator_like(self, generator: torch.Generator | None) -> torch.Generator:
        """Return the generator that recordings draw from, set to the state of a request's, or of torch's global one."""
        if generator is None:
            self.generator.manual_seed(int(torch.randint(2**62, ())))
        else:
            self.generator.set_state(generator.get_state())
        return self.generator

    def state_for(self, state: DecodeState, count: int, key: RecordingKey) -> DecodeState:
        """Return the state for a new request: that of an earlier request of the same key, if any, with the new texts.

        Args:
            state: state of the new request, whose rows fill a bucket.
            count: rows of the request; the others emit nothing.
            key: what fixes its rounds, besides its own shapes.
        """
        rows = len(state.rules)
        state.live = to_device(torch.arange(rows) < count, self.device)
        self.current = self.states.pop(key, None) or RecordedState(state, key)
        self.states[key] = self.current  # the last one used
        while len(self.states) > MAX_KEPT:
            del self.states[next(iter(self.states))]
        return state if self.current.state is state else self.current.state.restart(state)

    def can_fold(self, state: DecodeState, live: int) -> bool:
        """Whether the rest of a batch, ``live`` rows, fits a smaller bucket whose rounds are recorded."""
        recorded, rows = self.current, bucket(live)
        if recorded is None or recorded.state is not state or not state.session.is_recordable:
            return False
        if not live or rows >= len(state.rules):
            return False
        return len(set(state.rules)) == 1 and recorded.key.for_rows(rows) in self.states

    def fold(self, state: DecodeState, live: Sequence[int]) -> None:
        """Move the rows that go on to the smaller bucket, in place. Nothing may be on its way to the host."""
        larger, rows = self.current, bucket(len(live))
        assert larger is not None
        finished = [row for row in range(len(state.prompt_indices)) if row not in live]
        kept = sorted([*live, *finished[: rows - len(live)]])  # the bucket is full, in part of rows that are masked
        on_phase, larger.state = state.on_phase, copy(state)
        larger.state.release_request()
        smaller = self.state_for(state.folded(kept), rows, larger.key.for_rows(rows))
        assert self.current is not None and smaller.live is not None
        smaller.live.copy_(to_device(torch.tensor([row in live for row in kept]), self.device))
        # the request goes on with the same object
        vars(state).update({**vars(smaller), "on_phase": on_phase})
        self.current.state = state
        if state.policy is not None:
            state.policy.is_timed = False  # not yet for so few rows

    def run(self, state: DecodeState) -> RoundTensors:
        """Run a round: replay its recording, or record it first."""
        recorded = self.current
        if recorded is None or recorded.state is not state:
            return decode_round(state)
        if state.policy is not None and not state.policy.is_timed:
            self._time(state.policy, recorded)
        return decode_round(state) if self.refused else self._run(recorded)

    def _run(self, recorded: RecordedState) -> RoundTensors:
        round = RecordableRound(recorded.state)
        recording, asks_host = recorded.recording(round.key), recorded.state.asks_host
        # the first one eagerly, if its shapes may not recur or it is not known what rules ask
        if recording.questions is None and (round.tree is not None or asks_host):
            result = self._eagerly(round, recording)
        else:
            result = self._replayed(round, recording, asks_host)
        round.end(result)
        return result

    def _eagerly(self, round: RecordableRound, recording: Recording) -> RoundTensors:
        """Run a round without its recording, and note what its rules ask the host."""
        verified = round.draft_and_verify([to_device(x, self.device) for x in round.inputs])
        result = round.finish(verified)
        recording.questions = tuple(verified.answers())
        return result

    def _replayed(self, round: RecordableRound, recording: Recording, asks_host: bool) -> RoundTensors:
        """Run a round by its graph, or by two, between which the host answers the rules; record each when reached."""
        graphs, state, first = recording.graphs, round.state, round.draft_and_verify if asks_host else round.whole
        if not graphs and not self._record(graphs, state, first, round.inputs):
            return self._eagerly(round, recording)
        random_state = self.generator.get_state() if asks_host and len(graphs) == 1 else None
        replayed = graphs[0].replay(round.inputs, keeps_values=round.tree is None)
        state.on_phase("target")
        if not asks_host:
            whole: RoundTensors = replayed
            return whole
        verified: VerifiedTree = replayed
        asked = verified.with_answers(state)
        for question in recording.questions or ():
            asked.answer(question)
        answers = asked.answers()

        def rest(inputs: Sequence[Tensor]) -> RoundTensors:
            return round.finish(verified, dict(zip(answers, inputs)))

        if random_state is not None:
            is_recorded = self._record(graphs, state, rest, list(answers.values()))
            self.generator.set_state(random_state)
            graphs[0].replay(round.inputs)  # again, since recording has moved keys and values
            if not is_recorded:
                return round.finish(verified, answers)
        result: RoundTensors = graphs[1].replay(list(answers.values()))
        state.on_phase("rule")
        return result

    def _record(self, graphs: list[RecordedGraph], state: DecodeState, run: RunPart, inputs: Sequence[Tensor]) -> bool:
        """Add the graph of the next part of a round; return False if that is not possible. The state stays as it is."""
        fixed, outputs, phases = [to_device(x, self.device).clone() for x in inputs], list[Any](), list[str]()

        def noted() -> tuple[Tensor, ...]:
            outputs.append(run(fixed))
            return outputs_of(outputs[-1])

        with self._unchanged(state, phases.append):
            try:
                _, replay = self.recorder(noted, self.generator)
            except Exception as error:  # torch raises many types for operations that cannot be recorded
                self.refused = str(error).strip().partition("\n")[0]
                self.forget()
                log.warning("a round cannot be recorded as a CUDA graph, so none is: %s", self.refused)
                return False
        # a recorder runs it twice
        graphs.append(RecordedGraph(fixed, outputs[-1], replay, phases[len(phases) // 2 :]))
        return True

    @contextmanager
    def _unchanged(self, state: DecodeState, on_phase: Callable[[str], None]) -> Iterator[None]:
        """Undo what rounds within do to the state. ``on_phase`` gets their phases."""
        changed = [*state.tensors(), *state.cache.recurrent.tensors, *state.session.tensors()]
        before, random_state, own = [x.clone() for x in changed], self.generator.get_state(), state.on_phase
        state.on_phase = on_phase
        try:
            yield
        finally:
            state.on_phase = own
            for x, value in zip(changed, before, strict=True):
                x.copy_(value)
            self.generator.set_state(random_state)

    def _time(self, policy: TreePolicy, recorded: RecordedState) -> None:
        """Record and time a round of every shape of the policy's menu, at the first round of its state."""
        state = recorded.state
        for shape in policy.menu[len(recorded.seconds) :]:
            state.session.shape = shape
            with self._unchanged(state, lambda phase: None):
                for _ in range(2):  # what the host looks at is recorded at the second round
                    self._run(recorded)
                    if self.refused:
                        return
                state.texts.lengths.tolist()  # waits
                began = time.perf_counter()
                for _ in range(TIMED_ROUNDS):
                    self._run(recorded)
                state.texts.lengths.tolist()
                recorded.seconds.append((time.perf_counter() - began) / TIMED_ROUNDS)
        policy.time(recorded.seconds)
        state.session.shape = policy.choose(len(state.prompt_indices))
