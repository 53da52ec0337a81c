"""The decoding loop: run a round, read its report, hand it to the callbacks, drop finished rows.

:mod:`fsd_infer.engine.round` is the algorithm. The target encapsulates the model family, the drafter proposes, and the
rule accepts. Each batch row has its own text length and accepted length; nothing is padded on the left.

Where rounds are recorded the host lags one behind: it launches a round before it reads the one before, and does its
bookkeeping meanwhile. A row that a stop has ended runs along once more, and what it emits there is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsd_infer.device.cores import Team
from fsd_infer.drafters.base import Drafter
from fsd_infer.engine.prefill import prefill, recompute_cache, start
from fsd_infer.engine.report import PendingReport
from fsd_infer.engine.request import Request
from fsd_infer.engine.round import decode_round
from fsd_infer.engine.stats import Outcome
from fsd_infer.engine.tracker import RequestTracker
from fsd_infer.rules import Rule
from fsd_infer.targets.target import Target


def decode(target: Target, drafter: Drafter, rule: Rule | Sequence[Rule], request: Request) -> Outcome:
    """Decode a batch with one rule, or with one per prompt. Threads with one target take turns, request by request.

    Raises:
        FsdError: an empty prompt, an unknown token id, or a processor that does not support trees.
        ContextLengthError: a prompt that leaves no room in the target's context.
        CacheMemoryError: KV caches that exceed the free or allowed memory; nothing is allocated then.
        NonFiniteLogitsError: NaN, +inf or all -inf logits.
    """
    with target.lock, target.without_gradients(), Team(target.device, request.generator is not None) as team:
        tracker = start(target, drafter, rule, request)
        state, recorder = tracker.state, tracker.plan.recorder
        run = decode_round if recorder is None else recorder.run
        try:
            handle_report(tracker, PendingReport("prefill", state.prompt_indices, prefill(state, tracker)))
            unread: PendingReport | None = None  # which the host reads when the device runs the next round
            while state.prompt_indices:
                team.fit_to_free_cores()
                recompute_cache(state, tracker)
                tracker.on_phase("start")
                launched = PendingReport("round", state.prompt_indices, run(state))
                arrived, unread = (unread, launched) if tracker.overlaps else (launched, None)
                if arrived is not None:
                    handle_report(tracker, arrived)
                if recorder is not None and recorder.can_fold(state, len(tracker.unfinished())):
                    if unread is not None:  # nothing may be on its way when rows move
                        handle_report(tracker, unread)
                        unread = None
                    if live := tracker.unfinished():
                        recorder.fold(state, live)
            return tracker.outcome()
        finally:
            state.release_request()  # recordings keep the state, but need not keep the request


def handle_report(tracker: RequestTracker, pending: PendingReport) -> None:
    """Read a round on the host, teach the drafters that learn there, and tell the callbacks."""
    state, phase = tracker.state, pending.phase
    report, feedback = pending.report(tracker.finished(pending.prompt_indices))
    extensions = report.emitted
    if phase == "prefill":  # a session begins with the first tokens of the prompts
        extensions = [[*prompt[1:], *new] for prompt, new in zip(tracker.prompts, extensions, strict=True)]
    state.session.learn(feedback, report.verdict)
    state.session.extend_on_host(extensions)
    tracker.on_phase("prefill" if phase == "prefill" else "report")
    tracker.on_round(report)
    tracker.on_phase("report")
