"""The loop's own callbacks, in the order in which they are called.

:class:`Stopping` ends answers, :class:`PhaseTimer` times the phases, :class:`RecordUpdate` keeps the answers' records,
:class:`Prefixes` keeps texts, a caller's callbacks follow, :class:`Streaming` among them, and then :class:`TreeUpdate`
teaches the choice of trees.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsd_core.tensors import to_device
from fsd_infer.device.clock import clock_of
from fsd_infer.engine.callback import Callback
from fsd_infer.engine.report import RoundReport
from fsd_infer.engine.request import Request, Round
from fsd_infer.engine.state import DecodeState
from fsd_infer.engine.stats import Outcome, RowRecord
from fsd_infer.targets.prefixes import Prefix, PrefixCache
from fsd_infer.trees.policy import RoundSeconds, TreePolicy, TreeReport
from fsd_infer.trees.shape import TreeShape

_PHASES = {"advance": "draft"}  # phases that are counted as another one


class Stopping(Callback):
    """Ends answers at EOS tokens, by the request's criteria and callbacks, and at their limits of length.

    Args:
        request: the request.
        records: records of all answers, without the tokens of the round.
        limits: most tokens of each answer.
    """

    reads_tensors = False

    def __init__(self, request: Request, records: Sequence[RowRecord], limits: Sequence[int]) -> None:
        self.request, self.records, self.limits = request, records, limits

    def on_start(self, state: DecodeState) -> None:
        self.device = state.device

    def on_round(self, report: RoundReport) -> None:
        for row in report.rows:
            prompt_index, emissions = report.prompt_indices[row], report.emissions[row]
            answer = [*self.records[prompt_index].tokens]
            for count, emission in enumerate(emissions, start=1):
                answer.append(emission.token)
                if reason := self._reason(prompt_index, answer):
                    report.ended[row] = reason
                    del emissions[count:]
                    break

    def _reason(self, prompt_index: int, answer: Sequence[int]) -> str | None:
        """Return why the answer ends with its last token, or None."""
        request, token = self.request, answer[-1]
        reasons = [callback.on_token(prompt_index, token) for callback in request.callbacks]
        reason = next((one for one in reasons if one is not None), None)
        if token in request.eos_token_ids:
            return "stop"
        if reason is None and request.criteria:
            text = torch.tensor([[*request.texts[prompt_index], *answer]])
            reason = "stop" if bool(request.criteria(to_device(text, self.device), None)[0]) else None
        return reason or ("length" if len(answer) >= self.limits[prompt_index] else None)


class PhaseTimer(Callback):
    """Measures the seconds of each phase, on CUDA by the device's own clock.

    Args:
        reports: whether to put the seconds of every round into its report, which syncs with a CUDA device.

    Attributes:
        prefill_seconds: until all rows had their first token, by the host's clock.
    """

    reads_tensors = False
    prefill_seconds = 0.0

    def __init__(self, device: torch.device, reports: bool) -> None:
        self.clock, self.reports = clock_of(device), reports
        self._reported: dict[str, float] = {}

    def on_phase(self, phase: str) -> None:
        if phase != "start":
            self.clock.lap(_PHASES.get(phase, phase))

    def on_round(self, report: RoundReport) -> None:
        if self.reports:
            before, self._reported = self._reported, self.clock.phases()
            report.seconds |= {phase: total - before.get(phase, 0.0) for phase, total in self._reported.items()}
        if report.phase == "prefill":
            self.prefill_seconds = self.clock.seconds

    @property
    def decode_seconds(self) -> float:
        """Seconds since all rows had their first token; 0 before."""
        return self.clock.seconds - self.prefill_seconds if self.prefill_seconds else 0.0


class RecordUpdate(Callback):
    """Adds what a round emitted to the records of the answers.

    Args:
        records: records of all answers.
        timer: the request's timer.
    """

    reads_tensors = False

    def __init__(self, records: Sequence[RowRecord], timer: PhaseTimer) -> None:
        self.records, self.timer = records, timer

    def on_round(self, report: RoundReport) -> None:
        seconds = 0.0 if report.phase == "prefill" else self.timer.decode_seconds
        for row in report.rows:
            record, emissions = self.records[report.prompt_indices[row]], report.emissions[row]
            record.tokens += [emission.token for emission in emissions]
            record.emissions += emissions
            record.target_forwards += report.phase == "round"
            record.decode_seconds = seconds


class Streaming(Callback):
    """Calls functions with what each answer has grown by.

    Args:
        on_tokens: called with (index of the prompt in the request, new tokens) when tokens are final. If it returns a
            true value, that answer stops.
        on_round: called with (index of the prompt, a :class:`.Round`) before ``on_tokens``.
    """

    def __init__(
        self,
        on_tokens: Callable[[int, list[int]], object] | None = None,
        on_round: Callable[[int, Round], object] | None = None,
    ) -> None:
        self._on_tokens, self._on_round = on_tokens, on_round
        self.reads_tensors = on_round is not None

    def on_round(self, report: RoundReport) -> None:
        for row in report.rows:
            prompt_index = report.prompt_indices[row]
            if self._on_round is not None:
                self._on_round(prompt_index, Round.of(report, row))
            if self._on_tokens is not None and self._on_tokens(prompt_index, report.tokens[row]):
                report.ended.setdefault(row, "stop")


class TreeUpdate(Callback):
    """Tells a policy what a round took and accepted, and asks it for the shape of the next trees.

    Where the host is one round late, those are the trees of the round after the next one.
    """

    reads_tensors = False

    def __init__(self, policy: TreePolicy) -> None:
        self.policy = policy
        self._shapes: deque[TreeShape] = deque()  # shapes of launched rounds that are not read yet
        self._timestamps: list[float] = []  # when the round began, and had drafted and verified its trees

    def on_start(self, state: DecodeState) -> None:
        self.state = state

    def on_phase(self, phase: str) -> None:
        if phase == "start" and (shape := self.state.session.shape) is not None:
            self._shapes.append(shape)
        if phase in ("start", "draft", "target") and self.policy.clock is not None:
            self._timestamps.append(self.policy.clock())

    def on_round(self, report: RoundReport) -> None:
        unfinished = [row for row in report.rows if row not in report.ended]
        if report.phase == "round":
            self.policy.update(self._tree_report(report, unfinished))
        self._timestamps = []
        if unfinished:
            self.state.session.shape = self.policy.choose(len(unfinished))

    def _tree_report(self, report: RoundReport, unfinished: Sequence[int]) -> TreeReport:
        session, verdict = self.state.session, report.verdict
        return TreeReport(
            shape=self._shapes.popleft(),
            accepted=verdict.accepted.tolist(),
            unfinished=unfinished,
            forecasts=session.forecasts(),
            growth=session.growth,
            paths=verdict.path.tolist(),
            # a draft comes last where :meth:`.Verdict.cut` has shortened a path
            is_cut=any(report.emissions[row][-1].proposer >= 0 for row in unfinished),
            seconds=self._seconds(whole=not report.ended),
        )

    def _seconds(self, whole: bool) -> RoundSeconds | None:
        if self.policy.clock is None:
            return None
        start, drafted, verified = self._timestamps
        rest = self.policy.clock() - verified
        return RoundSeconds(drafted - start, verified - drafted, rest if whole else None)


class Prefixes(Callback):
    """Finds the kept texts that prompts start with, and keeps those that later prompts may start with.

    See :mod:`fsd_infer.targets.prefixes`.

    Args:
        cache: the target's prefix cache.
        layers: captured layers of the features, see :meth:`Target.capture_layers`.
        request: the request.
        max_length: most tokens of a text that keeps its keys however it goes on (see :mod:`.rotary`); None: any.
    """

    def __init__(self, cache: PrefixCache, layers: tuple[int, ...], request: Request, max_length: int | None) -> None:
        self.cache, self.prompts = cache, request.prefix_keys
        self.keys = [(layers, user) for user in request.users or [""] * len(self.prompts)]
        self.max_length = math.inf if max_length is None else max_length
        self._cached_tokens: list[int] = []
        self._features: list[list[Tensor]] = [[] for _ in self.prompts]  # the features of each text so far

    def on_start(self, state: DecodeState) -> None:
        self.state = state

    def find(self) -> list[Prefix | None]:
        """Return each prompt's kept prefix."""
        prefixes = [
            self.cache.find(prompt, key) if len(prompt) <= self.max_length else None
            for prompt, key in zip(self.prompts, self.keys, strict=True)
        ]
        self._cached_tokens = [0 if prefix is None else len(prefix.tokens) for prefix in prefixes]
        return prefixes

    def on_round(self, report: RoundReport) -> None:
        for prompt_index, features, accepted in zip(
            report.prompt_indices, report.tensors.features, report.verdict.accepted.tolist()
        ):
            count = len(self.prompts[prompt_index]) if report.phase == "prefill" else accepted + 1
            self._features[prompt_index].append(features[:count].clone())

    def on_row_end(self, row: int, record: RowRecord) -> None:
        prompt_index, read = self.state.prompt_indices[row], int(self.state.texts.lengths[row]) - 1
        parts, self._features[prompt_index] = self._features[prompt_index], []  # they take memory of the device
        if read > self.max_length:
            return
        text = [*self.prompts[prompt_index], *record.tokens]
        count = min(read, len(text))  # the last round may have read beyond the answer's end
        states, features = self.state.cache.saved(row, count), torch.cat(parts)[:count]
        prefix = Prefix(torch.tensor(text[:count]), states, features, self.keys[prompt_index])
        if read == count or not prefix.is_whole:
            self.cache.store(prefix)

    def on_end(self, outcome: Outcome) -> None:
        outcome.stats.cached_tokens = self._cached_tokens
