"""The decoding loop: read the prompts, run a round, read its report, hand it to the callbacks, drop finished rows.

:mod:`fsd_infer.engine.round` is the algorithm. The target encapsulates the model family, the drafter proposes, and the
rule accepts. Each batch row has its own text length and accepted length; nothing is padded on the left.

Where rounds are recorded the host is one round late: it launches a round before it reads the one before, and does its
bookkeeping meanwhile. A row that a stop has ended runs once more, and what it emits then is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsd_core.tensors import padded, to_device
from fsd_infer.device.cores import Team
from fsd_infer.drafters.base import Drafter
from fsd_infer.engine.callbacks import PhaseTimer
from fsd_infer.engine.plan import RequestPlan
from fsd_infer.engine.report import PendingReport
from fsd_infer.engine.request import Request
from fsd_infer.engine.round import RoundTensors, VerifiedTree, accept, decode_round
from fsd_infer.engine.state import DecodeState
from fsd_infer.engine.stats import Outcome
from fsd_infer.engine.tracker import RequestTracker
from fsd_infer.request.prompts import image_prompts, place_images, prefill_prompts, prefill_text
from fsd_infer.rules import Rule
from fsd_infer.targets.target import Target
from fsd_infer.trees.tree import DraftTree


def decode(target: Target, drafter: Drafter, rule: Rule | Sequence[Rule], request: Request) -> Outcome:
    """Decode a batch with one rule, or with one per prompt. Threads with one target take turns, request by request.

    Raises:
        FsdError: an empty prompt, an unknown token id, or a processor that does not support trees.
        ContextLengthError: a prompt that leaves no room in the target's context.
        CacheMemoryError: KV caches that exceed the free or allowed memory; nothing is allocated then.
        NonFiniteLogitsError: NaN, +inf or all -inf logits.
    """
    with target.lock, target.without_gradients(), Team(target.device, request.generator is not None) as team:
        timer = PhaseTimer(target.device, reports=any(one.reads_tensors for one in request.callbacks))
        plan = RequestPlan(target, drafter, rule, request)
        plan.check_memory()
        tracker = RequestTracker(plan, plan.new_state(), timer)
        state, recorder = tracker.state, plan.recorder
        run = decode_round if recorder is None else recorder.run
        try:
            handle_report(tracker, PendingReport("prefill", state.prompt_indices, prefill(state, tracker)))
            unread: PendingReport | None = None  # the host reads it while the device runs the next round
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
    """Read a round on the host, teach the drafters that learn there, and call the callbacks."""
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


def recompute_cache(state: DecodeState, tracker: RequestTracker) -> None:
    """Recompute keys and values of texts that have just outgrown :attr:`.Target.recompute_length` (LongRoPE).

    A round accepts no node beyond that length (:func:`.round.max_accepted`), so each text stops there.
    """
    longest, prefilled = state.target.recompute_length, state.cache.prefilled
    if longest is None or prefilled is None:
        return
    for row, prompt_index in enumerate(state.prompt_indices):
        text = [*tracker.request.prompts[prompt_index], *tracker.records[prompt_index].tokens]
        if len(text) == longest + 1 and int(prefilled[row]) <= longest:
            prefilled[row] = len(text)
            prefill_text(state.target, state.cache.row(row), to_device(torch.tensor([text[:-1]]), state.device))
            tracker.on_phase("prefill")


def prefill(state: DecodeState, tracker: RequestTracker) -> RoundTensors:
    """Read the prompts, emit each row's first token, and pass the prompts' features [B, M, F] to the drafter."""
    tokens, lengths = padded(tracker.prompts), torch.tensor([len(prompt) for prompt in tracker.prompts])  # [B, M], [B]
    prefixes = None if tracker.prefixes is None else tracker.prefixes.find()
    prompt_images = image_prompts(state.target, tokens, lengths, tracker.request.image_inputs)
    features, logits = prefill_prompts(
        state.target, state.cache, tokens, lengths, prefixes, prompt_images, lambda: tracker.on_phase("prefill")
    )
    place_images(state.session, state.cache, tokens, prompt_images)
    root = DraftTree.root_only(state.texts.roots, logits.shape[-1])
    result = accept(state, VerifiedTree(state, root, logits, features[:, :1]))
    # the drafter reads pairs (feature of token i, token i+1): the prompt shifted by one, then the first new token
    tokens = to_device(tokens, state.device)
    next_tokens = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    next_tokens.scatter_(1, state.texts.lengths[:, None] - 1, result.verdict.tokens[:, :1])
    result.features = features
    state.texts.append(result.verdict.tokens, result.verdict.accepted + 1)
    state.session.extend(next_tokens, features, state.texts.lengths - 1)
    return result
