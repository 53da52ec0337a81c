"""Before the first round: allocate the caches, read the prompts, and emit each row's first token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fsd_core.errors import FsdError
from fsd_core.tensors import padded, to_device
from fsd_infer.device.memory import check_caches, free_bytes
from fsd_infer.drafters.base import Drafter
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.engine.capture import CaptureKey, RoundCapture, bucket
from fsd_infer.engine.request import Request
from fsd_infer.engine.round import RoundTensors, accept, advance
from fsd_infer.engine.state import DecodeState
from fsd_infer.engine.tracker import RequestTracker
from fsd_infer.engine.verified import VerifiedTree
from fsd_infer.request.processors import TreeProcessors, temperature_of
from fsd_infer.request.prompts import check_prompts, check_sights, read_prompts, read_text
from fsd_infer.rules import Rule, TokenHistory
from fsd_infer.rules.base import nats_of
from fsd_infer.rules.texts import ends_of, markers_of
from fsd_infer.targets.target import Target
from fsd_infer.trees.estimates import RuleProfile
from fsd_infer.trees.menu import MenuPolicy, menu_of
from fsd_infer.trees.policy import TreePolicy, memory_of
from fsd_infer.trees.tree import DraftTree, Draws

MIN_DRAWING_TEMPERATURE = 0.5  # below, drawn nodes gain nothing over likely tokens, and take time


class CacheSizes(NamedTuple):
    """What the caches of a request have room for.

    Attributes:
        rows: of the batch, with those that fill a bucket.
        longest: tokens of the longest text at its end.
        capacity: slots of the target's cache, per row.
        drafter_slots: most tokens that the drafter is told of, per row. It pads rows to the one that emitted most, so
            its texts exceed the longest one by up to the depth of a tree.
    """

    rows: int
    longest: int
    capacity: int
    drafter_slots: int


def start(target: Target, drafter: Drafter, rule: Rule | Sequence[Rule], request: Request) -> RequestTracker:
    """Allocate the state of a request; return its tracker. Raises as :func:`fsd_infer.engine.decode`."""
    prompts, count, device = request.prompts, len(request.prompts), target.device
    rules = _rule_per_prompt(rule, count)
    limits = check_prompts(target, prompts, request.max_new_tokens)
    check_sights(target, request.sights)
    processors, tracker = TreeProcessors(request.processors, count), RequestTracker(target, request, limits)
    markers, marks = markers_of(rules, target.tokenizer), ends_of(rules, target.tokenizer, device)
    draft_bonus = sum(rule.draft_bonus(request.greedy) for rule in rules) / count
    drafter = drafter.for_bonus(draft_bonus)
    recorded, ends = _recorded(target, drafter), [len(prompt) + limit for prompt, limit in zip(prompts, limits)]
    sizes = _sizes(target, drafter, ends, recorded is not None)
    cache_bytes = _check_memory(target, drafter, sizes, request, recorded)
    added = sizes.rows - count
    rules, ends = rules + rules[:1] * added, ends + [2] * added  # a prompt of one token, and an answer of one
    prompts = tracker.prompts = [*prompts, *[prompts[0][:1]] * added]
    generator = request.generator if recorded is None else recorded.generator_like(request.generator)
    draws = _draws(drafter, rules, _temperature(request))
    policy = _policy(target, drafter, rules, request, draft_bonus, draws)
    drafted = _draft_request(request, device, sizes, processors, generator, draft_bonus, draws, policy)
    state = DecodeState(
        target=target,
        processors=processors,
        greedy=request.greedy,
        generator=generator,
        rules=rules,
        numbers=list(range(count)),
        cache=target.new_cache(sizes.rows, sizes.capacity),
        session=drafter.start(torch.tensor([prompt[0] for prompt in prompts]), drafted),
        lengths=to_device(torch.tensor([len(prompt) for prompt in prompts]), device),
        roots=to_device(torch.tensor([prompt[-1] for prompt in prompts]), device),
        texts=TokenHistory([()] * sizes.rows, prompts, device, markers, sizes.capacity + drafter.max_nodes + 1, marks),
        max_lengths=to_device(torch.tensor(ends), device),
        budget=nats_of(rules, device),
        kl_excess=torch.zeros(sizes.rows, device=device),
        measure_log_likelihood=request.measure_log_likelihood,
        history=tracker.history,
        max_nodes=drafter.max_nodes,
        policy=policy,
    )
    if recorded is not None:
        key = CaptureKey(drafter.capture_key, tuple(rules), sizes.capacity, processors.signature, draft_bonus)
        state = recorded.state_for(state, count, key)
    tracker.begin(state, drafter, cache_bytes)
    return tracker


def _rule_per_prompt(rule: Rule | Sequence[Rule], count: int) -> list[Rule]:
    """Raises FsdError if there is neither one rule nor one per prompt."""
    rules = [rule] * count if isinstance(rule, Rule) else list(rule)
    if len(rules) != count:
        raise FsdError(f"{len(rules)} rules for {count} prompts: give one rule, or one per prompt.")
    return rules


def _sizes(target: Target, drafter: Drafter, ends: Sequence[int], is_recorded: bool) -> CacheSizes:
    """Return the sizes for texts that end with so many tokens; a recording has a bucket's rows and its own slots."""
    longest = max(ends)
    capacity = longest + drafter.max_nodes
    if not is_recorded:
        return CacheSizes(len(ends), longest, capacity, longest + 1 + drafter.max_depth)
    slots = target.slots(capacity)
    return CacheSizes(bucket(len(ends)), longest, slots, slots)


def _check_memory(
    target: Target, drafter: Drafter, sizes: CacheSizes, request: Request, recorded: RoundCapture | None
) -> int:
    """Return the bytes of the caches. Raises CacheMemoryError if they do not fit; recordings make room."""
    cache_bytes = target.cache_bytes(sizes.rows, sizes.capacity) + drafter.cache_bytes(sizes.rows, sizes.drafter_slots)
    free = free_bytes(target.device)
    if recorded is not None and free is not None and cache_bytes > free:  # recordings hold memory of other sizes
        recorded.forget()
    held = target.held_bytes + drafter.held_bytes
    check_caches(cache_bytes, sizes.rows, sizes.capacity, target.device, request.max_cache_bytes, held)
    return cache_bytes


def _draft_request(
    request: Request,
    device: torch.device,
    sizes: CacheSizes,
    processors: TreeProcessors,
    generator: torch.Generator | None,
    draft_bonus: float,
    draws: Draws,
    policy: TreePolicy | MenuPolicy | None,
) -> DraftRequest:
    """Return what the drafter is told of a request."""
    keys, count = request.cache_keys, len(request.prompts)
    return DraftRequest(
        sizes.rows,
        sizes.drafter_slots,
        request.greedy,
        processors.of_drafts if processors else None,
        generator,
        device,
        draft_bonus,
        None if policy is None else policy.choose(count),
        menu=policy.menu if isinstance(policy, MenuPolicy) else (),
        clock=policy.clock if isinstance(policy, TreePolicy) else None,
        keys=None if keys is None else [*keys, *[""] * (sizes.rows - count)],
        draws=draws,
        seeded=request.generator is not None,
        longest=sizes.longest,
        temperature=_temperature(request),
    )


def _temperature(request: Request) -> float:
    return 0.0 if request.greedy else temperature_of(request.processors)


def _recorded(target: Target, drafter: Drafter) -> RoundCapture | None:
    """Return what records the request's rounds; None if they run eagerly."""
    if drafter.bounds is not None and not drafter.menu:
        return None
    return None if _has_dynamic_rope(drafter) else RoundCapture.of(target)


def _has_dynamic_rope(drafter: Drafter) -> bool:
    """Whether the drafter, or a part of it, is a model whose angles the host chooses token by token."""
    model = getattr(drafter, "model", None)
    own = isinstance(model, Target) and model.dynamic_rope.fixed_length is not None
    return own or any(map(_has_dynamic_rope, drafter.parts))


def _draws(drafter: Drafter, rules: Sequence[Rule], temperature: float) -> Draws:
    """Return which drafts of a request are drawn: what all its rules take."""
    wanted = {rule.draws for rule in rules}
    charged = drafter.keeps_texts and any(getattr(rule, "exact_ngram_size", 0) for rule in rules)
    # copies of remembered texts are looked up for likely drafts only
    if not temperature or Draws.NONE in wanted or charged:
        return Draws.NONE
    if Draws.CHAIN in wanted:
        return Draws.CHAIN
    return Draws.TREE if temperature >= MIN_DRAWING_TEMPERATURE else Draws.NONE


def _policy(
    target: Target, drafter: Drafter, rules: Sequence[Rule], request: Request, draft_bonus: float, draws: Draws
) -> TreePolicy | MenuPolicy | None:
    """Return what chooses the shape of each round's trees; None for a drafter of fixed shape."""
    if drafter.bounds is None:
        return None
    names = {rule.name for rule in rules}
    profile = RuleProfile(
        draft_bonus, names.pop() if len(names) == 1 else "several", drafter.samples and draws is Draws.CHAIN
    )
    learns = request.generator is None and not target.is_sharded  # otherwise trees depend on the text alone
    memory = memory_of(drafter.learner, target, drafter.learner.relative_cost)
    if drafter.menu:
        return MenuPolicy(memory, len(rules), profile, menu_of(drafter.menu, chains=profile.sampled), learns=learns)
    return TreePolicy(memory, len(rules), profile, drafter.bounds, learns=learns)


def recompute_cache(state: DecodeState, tracker: RequestTracker) -> None:
    """Recompute keys and values of texts that have just outgrown :attr:`.Target.recompute_length` (LongRoPE).

    A round accepts no node beyond that length (:func:`.round.max_accepted`), so each text stops there.
    """
    longest, prefilled = state.target.recompute_length, state.cache.prefilled
    if longest is None or prefilled is None:
        return
    for row, number in enumerate(state.numbers):
        text = [*tracker.request.prompts[number], *tracker.records[number].tokens]
        if len(text) == longest + 1 and int(prefilled[row]) <= longest:
            prefilled[row] = len(text)
            read_text(state.target, state.cache.row(row), to_device(torch.tensor([text[:-1]]), state.device))
            tracker.on_phase("prefill")


def prefill(state: DecodeState, tracker: RequestTracker) -> RoundTensors:
    """Read the prompts, emit each row's first token, and pass the prompts' features [B, M, F] to the drafter."""
    prompts, request = tracker.prompts, tracker.request
    tokens, lengths = padded(prompts), torch.tensor([len(prompt) for prompt in prompts])
    known = tracker.prefixes.known(tracker.named_prompts)
    features, logits = read_prompts(state.target, state.cache, tokens, lengths, known, request.sights)
    root = DraftTree.root_only(state.roots, logits.shape[-1])
    made = accept(state, VerifiedTree(state, root, logits, features[:, :1]))
    # the drafter reads pairs (feature of token i, token i+1): the prompt shifted by one, then the first new token
    tokens = to_device(tokens, state.device)
    following = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    following.scatter_(1, (state.lengths - 1)[:, None], made.verdict.tokens[:, :1])
    made.features = features
    state.extend(made.verdict.tokens, made.verdict.accepted)
    advance(state, made, following, state.lengths.clone())  # which the next round changes in place
    return made
