"""Before the first round: allocate the caches, read the prompts, and emit each row's first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsd_core.errors import FsdError
from fsd_core.tensors import padded, to_device
from fsd_infer.device.memory import check_caches, free_bytes
from fsd_infer.drafters.base import Drafter
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.engine.recording import RecordingKey, RoundRecorder, bucket
from fsd_infer.engine.request import Request
from fsd_infer.engine.round import RoundTensors, VerifiedTree, accept, extend_texts
from fsd_infer.engine.state import DecodeState
from fsd_infer.engine.tracker import RequestTracker
from fsd_infer.request.processors import TreeProcessors, temperature_of
from fsd_infer.request.prompts import (
    check_image_inputs,
    check_prompts,
    image_prompts,
    place_drafts,
    read_prompts,
    read_text,
)
from fsd_infer.rules import Rule, TokenHistory
from fsd_infer.rules.base import budgets_of
from fsd_infer.rules.texts import markers_of, sentence_ends_of
from fsd_infer.targets.target import Target
from fsd_infer.trees.estimates import RuleProfile
from fsd_infer.trees.menu import MenuPolicy, menu_of
from fsd_infer.trees.policy import TreePolicy, policy_store
from fsd_infer.trees.tree import DraftTree, Draws

MIN_DRAWING_TEMPERATURE = 0.5  # below, drawn nodes gain nothing over likely tokens, and take time


class CacheSizes(NamedTuple):
    """What the caches of a request have room for.

    Attributes:
        rows: of the batch, with those of its bucket that no prompt fills.
        max_length: tokens of the longest text at its end.
        capacity: slots of the target's cache, per row.
        drafter_slots: slots that the drafter's texts take, per row. It pads rows to the one that emitted most, so they
            exceed the longest text by up to the depth of a tree.
    """

    rows: int
    max_length: int
    capacity: int
    drafter_slots: int


@dataclass(frozen=True)
class RequestPlan:
    """What is decided about a request before memory is allocated for it.

    Rows that no prompt fills come last in a bucket. They have a prompt of one token, and an answer of one.

    Attributes:
        request: as the caller gave it.
        drafter: in its fastest form for the rules.
        rules: [rows] the rule of each row.
        prompts: [rows] token ids.
        max_lengths: [rows] tokens of each prompt with its longest answer.
        sizes: of the caches.
        processors: the request's logits processors.
        draft_bonus: nats that the rules' distributions give for an accepted draft, on average.
        draws: which drafts are drawn from q.
        recorder: what records the rounds; None: they run eagerly.
    """

    request: Request
    drafter: Drafter
    rules: list[Rule]
    prompts: list[list[int]]
    max_lengths: list[int]
    sizes: CacheSizes
    processors: TreeProcessors
    draft_bonus: float
    draws: Draws
    recorder: RoundRecorder | None

    @property
    def recording_key(self) -> RecordingKey:
        """What fixes its rounds, besides their shapes."""
        signature = self.processors.signature
        return RecordingKey(
            self.drafter.recording_key, tuple(self.rules), self.sizes.capacity, signature, self.draft_bonus
        )


def start(target: Target, drafter: Drafter, rule: Rule | Sequence[Rule], request: Request) -> RequestTracker:
    """Allocate the state of a request; return its tracker. Raises as :func:`fsd_infer.engine.decode`."""
    rules = _rule_per_prompt(rule, len(request.prompts))
    limits = check_prompts(target, request.prompts, request.max_new_tokens)
    check_image_inputs(target, request.image_inputs)
    tracker = RequestTracker(target, request, limits)
    plan = _plan(target, drafter, rules, limits, request)
    cache_bytes = _check_memory(target, plan)
    tracker.prompts = plan.prompts
    state = _new_state(target, plan, tracker)
    if plan.recorder is not None:
        state = plan.recorder.state_for(state, len(request.prompts), plan.recording_key)
    tracker.begin(state, plan.drafter, cache_bytes)
    return tracker


def _plan(target: Target, drafter: Drafter, rules: list[Rule], limits: Sequence[int], request: Request) -> RequestPlan:
    """Plan a request. ``limits``: most tokens of each answer."""
    draft_bonus = sum(rule.draft_bonus(request.greedy) for rule in rules) / len(rules)
    drafter = drafter.for_bonus(draft_bonus)
    recorder = _recorder(target, drafter)
    max_lengths = [len(prompt) + limit for prompt, limit in zip(request.prompts, limits)]
    sizes = _sizes(target, drafter, max_lengths, recorder is not None)
    fillers = sizes.rows - len(rules)
    return RequestPlan(
        request=request,
        drafter=drafter,
        rules=rules + rules[:1] * fillers,
        prompts=[*request.prompts, *[request.prompts[0][:1]] * fillers],
        max_lengths=max_lengths + [2] * fillers,
        sizes=sizes,
        processors=TreeProcessors(request.processors, len(rules)),
        draft_bonus=draft_bonus,
        draws=draws_of(drafter, rules, _temperature(request)),
        recorder=recorder,
    )


def _new_state(target: Target, plan: RequestPlan, tracker: RequestTracker) -> DecodeState:
    """Allocate the caches, open the drafter's session, and return the state before the prompts are read."""
    request, rules, prompts, device = plan.request, plan.rules, plan.prompts, target.device
    rows, capacity = plan.sizes.rows, plan.sizes.capacity
    markers, sentence_ends = markers_of(rules, target.tokenizer), sentence_ends_of(rules, target.tokenizer, device)
    generator = request.generator if plan.recorder is None else plan.recorder.generator_like(request.generator)
    policy = _policy(target, plan)
    draft_request = _draft_request(plan, device, generator, policy)
    slots = capacity + plan.drafter.max_nodes + 1
    return DecodeState(
        target=target,
        processors=plan.processors,
        greedy=request.greedy,
        generator=generator,
        rules=rules,
        prompt_indices=list(range(len(request.prompts))),
        cache=target.new_cache(rows, capacity),
        session=plan.drafter.start(torch.tensor([prompt[0] for prompt in prompts]), draft_request),
        lengths=to_device(torch.tensor([len(prompt) for prompt in prompts]), device),
        roots=to_device(torch.tensor([prompt[-1] for prompt in prompts]), device),
        texts=TokenHistory([()] * rows, prompts, device, markers, slots, sentence_ends),
        max_lengths=to_device(torch.tensor(plan.max_lengths), device),
        budget=budgets_of(rules, device),
        kl_excess=torch.zeros(rows, device=device),
        measure_log_likelihood=request.measure_log_likelihood,
        history=tracker.history,
        max_nodes=plan.drafter.max_nodes,
        policy=policy,
    )


def _rule_per_prompt(rule: Rule | Sequence[Rule], count: int) -> list[Rule]:
    """Raises FsdError if there is neither one rule nor one per prompt."""
    rules = [rule] * count if isinstance(rule, Rule) else list(rule)
    if len(rules) != count:
        raise FsdError(f"{len(rules)} rules for {count} prompts: give one rule, or one per prompt.")
    return rules


def _sizes(target: Target, drafter: Drafter, max_lengths: Sequence[int], is_recorded: bool) -> CacheSizes:
    """Return the sizes for texts that end with so many tokens; a recording has a bucket's rows and its own slots."""
    max_length = max(max_lengths)
    capacity = max_length + drafter.max_nodes
    if not is_recorded:
        return CacheSizes(len(max_lengths), max_length, capacity, max_length + 1 + drafter.max_depth)
    slots = target.slots(capacity)
    return CacheSizes(bucket(len(max_lengths)), max_length, slots, slots)


def _check_memory(target: Target, plan: RequestPlan) -> int:
    """Return the bytes of the caches. Raises CacheMemoryError if they do not fit; recordings make room."""
    drafter, sizes, recorder = plan.drafter, plan.sizes, plan.recorder
    cache_bytes = target.cache_bytes(sizes.rows, sizes.capacity) + drafter.cache_bytes(sizes.rows, sizes.drafter_slots)
    free = free_bytes(target.device)
    if recorder is not None and free is not None and cache_bytes > free:  # recordings hold memory of other sizes
        recorder.forget()
    shared = target.shared_cache_bytes + drafter.shared_cache_bytes
    check_caches(cache_bytes, sizes.rows, sizes.capacity, target.device, plan.request.max_cache_bytes, shared)
    return cache_bytes


def _draft_request(
    plan: RequestPlan,
    device: torch.device,
    generator: torch.Generator | None,
    policy: TreePolicy | MenuPolicy | None,
) -> DraftRequest:
    """Return the parts of a request that the drafter reads."""
    request, sizes, count = plan.request, plan.sizes, len(plan.request.prompts)
    users = request.users
    return DraftRequest(
        batch=sizes.rows,
        cache_slots=sizes.drafter_slots,
        greedy=request.greedy,
        process=plan.processors.of_drafts if plan.processors.is_needed else None,
        generator=generator,
        device=device,
        draft_bonus=plan.draft_bonus,
        shape=None if policy is None else policy.choose(count),
        menu=policy.menu if isinstance(policy, MenuPolicy) else (),
        clock=policy.clock if isinstance(policy, TreePolicy) else None,
        users=None if users is None else [*users, *[""] * (sizes.rows - count)],
        draws=plan.draws,
        seeded=request.generator is not None,
        max_length=sizes.max_length,
        temperature=_temperature(request),
    )


def _temperature(request: Request) -> float:
    return 0.0 if request.greedy else temperature_of(request.processors)


def _recorder(target: Target, drafter: Drafter) -> RoundRecorder | None:
    """Return what records the request's rounds; None if they run eagerly."""
    if drafter.bounds is not None and not drafter.menu:
        return None
    return None if _has_dynamic_rope(drafter) else RoundRecorder.of(target)


def _has_dynamic_rope(drafter: Drafter) -> bool:
    """Whether the drafter, or a part of it, is a model whose angles the host chooses token by token."""
    model = getattr(drafter, "model", None)
    own = isinstance(model, Target) and model.dynamic_rope.fixed_length is not None
    return own or any(map(_has_dynamic_rope, drafter.parts))


def draws_of(drafter: Drafter, rules: Sequence[Rule], temperature: float) -> Draws:
    """Return which drafts of a request are drawn: of what all its rules take, what the drafter does best."""
    wanted = {rule.draws for rule in rules}
    charged = drafter.keeps_texts and any(getattr(rule, "exact_ngram_size", 0) for rule in rules)
    # n-grams of other texts are looked up for likely drafts only
    if not temperature or Draws.NONE in wanted or charged:
        return Draws.NONE
    if Draws.CHAIN in wanted:
        return Draws.CHAIN
    if temperature < MIN_DRAWING_TEMPERATURE:
        return Draws.NONE
    return Draws.CHAIN if wanted == {Draws.ANY} and drafter.draws_chains else Draws.TREE


def _policy(target: Target, plan: RequestPlan) -> TreePolicy | MenuPolicy | None:
    """Return what chooses the shape of each round's trees; None for a drafter of fixed shape."""
    drafter, rules = plan.drafter, plan.rules
    if drafter.bounds is None:
        return None
    names = {rule.name for rule in rules}
    name = names.pop() if len(names) == 1 else "several"
    profile = RuleProfile(plan.draft_bonus, name, sampled=drafter.samples and plan.draws is Draws.CHAIN)
    learns = plan.request.generator is None and not target.is_sharded  # otherwise trees depend on the text alone
    store = policy_store(drafter.learner, target, drafter.learner.relative_cost)
    if drafter.menu:
        return MenuPolicy(store, len(rules), profile, menu_of(drafter.menu, chains=profile.sampled), learns=learns)
    return TreePolicy(store, len(rules), profile, drafter.bounds, learns=learns)


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
    prefixes = tracker.prefixes.find(tracker.prefix_keys)
    shown = image_prompts(state.target, tokens, lengths, tracker.request.image_inputs)
    features, logits = read_prompts(
        state.target, state.cache, tokens, lengths, prefixes, shown, lambda: tracker.on_phase("prefill")
    )
    place_drafts(state.session, state.cache, tokens, shown)
    root = DraftTree.root_only(state.roots, logits.shape[-1])
    result = accept(state, VerifiedTree(state, root, logits, features[:, :1]))
    # the drafter reads pairs (feature of token i, token i+1): the prompt shifted by one, then the first new token
    tokens = to_device(tokens, state.device)
    next_tokens = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    next_tokens.scatter_(1, (state.lengths - 1)[:, None], result.verdict.tokens[:, :1])
    result.features = features
    extend_texts(state, result.verdict)
    state.session.extend(next_tokens, features, state.lengths.clone())  # lengths that the next round changes in place
    return result
