"""The beginning of a request: allocate its state, read the prompts, and emit each row's first token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsd_core.tensors import padded, to_device
from fsd_infer.drafters.base import Drafter
from fsd_infer.engine.callbacks import PhaseTimer
from fsd_infer.engine.plan import RequestPlan
from fsd_infer.engine.request import Request
from fsd_infer.engine.round import RoundTensors, VerifiedTree, accept
from fsd_infer.engine.state import DecodeState
from fsd_infer.engine.tracker import RequestTracker
from fsd_infer.request.prompts import image_prompts, place_drafts, read_prompts, read_text
from fsd_infer.rules import Rule
from fsd_infer.targets.target import Target
from fsd_infer.trees.tree import DraftTree


def start(target: Target, drafter: Drafter, rule: Rule | Sequence[Rule], request: Request) -> RequestTracker:
    """Allocate the state of a request; return its tracker. Raises as :func:`fsd_infer.engine.decode`."""
    timer = PhaseTimer(target.device, reports=any(one.reads_tensors for one in request.callbacks))
    plan = RequestPlan(target, drafter, rule, request)
    plan.check_memory()
    return RequestTracker(plan, plan.new_state(), timer)


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
            read_text(state.target, state.cache.row(row), to_device(torch.tensor([text[:-1]]), state.device))
            tracker.on_phase("prefill")


def prefill(state: DecodeState, tracker: RequestTracker) -> RoundTensors:
    """Read the prompts, emit each row's first token, and pass the prompts' features [B, M, F] to the drafter."""
    tokens, lengths = padded(tracker.prompts), torch.tensor([len(prompt) for prompt in tracker.prompts])  # [B, M], [B]
    prefixes = None if tracker.prefixes is None else tracker.prefixes.find()
    shown = image_prompts(state.target, tokens, lengths, tracker.request.image_inputs)
    features, logits = read_prompts(
        state.target, state.cache, tokens, lengths, prefixes, shown, lambda: tracker.on_phase("prefill")
    )
    place_drafts(state.session, state.cache, tokens, shown)
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
