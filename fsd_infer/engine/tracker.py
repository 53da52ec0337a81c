"""The host's side of a request: its rows, their records, and its callbacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsd_infer.engine.callback import Callback
from fsd_infer.engine.callbacks import PhaseTimer, Prefixes, RecordUpdate, Stopping, TreeUpdate
from fsd_infer.engine.plan import RequestPlan
from fsd_infer.engine.report import RoundReport
from fsd_infer.engine.state import DecodeState
from fsd_infer.engine.stats import GenerationStats, Outcome, RowRecord, describe_rules
from fsd_infer.trees.shape import AUTO


class RequestTracker:
    """The rows of a request and its callbacks.

    Args:
        plan: the plan of the request.
        state: state of its batch, before the prompts are read.
        timer: started when the request came.

    Attributes:
        records: records of all answers.
        prompts: [B] prompts of the request, and of rows that fill a bucket.
        prefixes: finds prompts in the prefix cache; None without one.
        overlaps: whether the host reads a round after it has launched the next one. Else something needs it earlier.
    """

    def __init__(self, plan: RequestPlan, state: DecodeState, timer: PhaseTimer) -> None:
        request, target = plan.request, plan.target
        self.plan, self.state, self.timer = plan, state, timer
        self.request, self.prompts, self.records = request, plan.prompts, [RowRecord() for _ in request.prompts]
        self.callbacks: list[Callback] = [
            Stopping(request, self.records, plan.limits), timer, RecordUpdate(self.records, timer)
        ]  # fmt: skip
        self.prefixes: Prefixes | None = None
        if target.prefixes is not None and request.generator is None:  # a seeded answer repeats, to its last bit
            longest = target.dynamic_rope.fixed_length
            self.prefixes = Prefixes(target.prefixes, target.captured_layers, request, longest)
            self.callbacks.append(self.prefixes)
        self.callbacks += request.callbacks  # before TreeUpdate: they may end rows, and it counts the others
        if state.policy is not None:
            self.callbacks.append(TreeUpdate(state.policy))
        state.history, state.on_phase = self.history, self.on_phase
        needs_report = any(callback.reads_tensors for callback in self.callbacks)
        needs_report = needs_report or state.asks_host or state.session.needs_report
        self.overlaps = state.live is not None and state.session.is_recordable and not needs_report
        for callback in self.callbacks:
            callback.on_start(state)
        methods = [callback.on_phase for callback in self.callbacks]  # after on_start, which may set it
        self._on_phase = [method for method in methods if getattr(method, "__func__", None) is not Callback.on_phase]

    def history(self) -> list[Tensor | None]:
        """Return the tokens before each row's root, on the CPU, as ``generate`` would pass them to processors.

        None: the row has finished, or only fills the bucket.
        """
        texts: list[Tensor | None] = [None] * len(self.state.rules)
        for row, prompt_index in enumerate(self.state.prompt_indices):
            if self.records[prompt_index].finish_reason is None:
                text = [*self.request.texts[prompt_index], *self.records[prompt_index].tokens]
                texts[row] = torch.tensor(text[:-1], dtype=torch.long)  # also of a text without tokens
        return texts

    def unfinished(self) -> list[int]:
        """Return the indices of rows whose answers go on."""
        indices = self.state.prompt_indices
        return [row for row, index in enumerate(indices) if self.records[index].finish_reason is None]

    def finished(self, prompt_indices: Sequence[int]) -> list[int]:
        """Return which of these rows have answers that have ended."""
        return [row for row, index in enumerate(prompt_indices) if self.records[index].finish_reason is not None]

    def on_phase(self, phase: str) -> None:
        """Tell the callbacks that watch phases that one has ended."""
        for method in self._on_phase:
            method(phase)

    def on_round(self, report: RoundReport) -> None:
        """Tell the callbacks of a round, and drop the rows that it finishes."""
        for callback in self.callbacks:
            callback.on_round(report)
        state, ended = self.state, report.ended
        for row in sorted(ended):
            prompt_index = state.prompt_indices[row]
            record = self.records[prompt_index]
            record.finish_reason = ended[row]
            for callback in self.callbacks:
                callback.on_row_end(row, record)
            state.session.on_end(row, self.request.prompts[prompt_index], record.tokens)
        if ended:
            state.keep_rows([row for row in report.rows if row not in ended])

    def outcome(self) -> Outcome:
        """Return the answers and their statistics."""
        timer, drafter, policy = self.timer, self.plan.drafter, self.state.policy
        seconds = timer.clock.seconds  # before the sync that reads the phases
        rows = zip(self.records, self.request.prompts, strict=True)
        stats = GenerationStats(
            rows=[record.to_stats(timer.prefill_seconds, prompt, drafter.proposers) for record, prompt in rows],
            rule=describe_rules(self.plan.rules[: self.plan.count]),
            drafter=drafter.describe() | ({} if policy is None else {"tree": AUTO}),
            seconds=seconds,
            prefill_seconds=timer.prefill_seconds,
            phases=timer.clock.phases(),
            cache_bytes=self.plan.cache_bytes,
            trees=None if policy is None else policy.stats,
        )
        outcome = Outcome([record.tokens for record in self.records], self.records, stats)
        for callback in self.callbacks:
            callback.on_end(outcome)
        return outcome
