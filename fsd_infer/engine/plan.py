"""What is decided about a request before memory is allocated for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from fsd_core.errors import FsdError
from fsd_core.tensors import to_device
from fsd_infer.device.memory import check_caches, free_bytes
from fsd_infer.drafters.base import Drafter
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.engine.recording import RecordingKey, RoundRecorder, bucket
from fsd_infer.engine.request import Request
from fsd_infer.engine.state import DecodeState
from fsd_infer.request.processors import TreeProcessors, temperature_of
from fsd_infer.request.prompts import check_image_inputs, check_prompts
from fsd_infer.rules import Rule, TokenHistory
from fsd_infer.rules.base import budgets_of
from fsd_infer.rules.texts import markers_of, sentence_ends_of
from fsd_infer.targets.target import Target
from fsd_infer.trees.estimates import RuleProfile
from fsd_infer.trees.menu import MenuPolicy, menu_of
from fsd_infer.trees.policy import PricePolicy, TreePolicy, policy_store
from fsd_infer.trees.tree import Draws

MIN_DRAWING_TEMPERATURE = 0.5  # below, drawn nodes gain nothing over likely tokens, and take time


class RequestPlan:
    """A request with the rows, the drafter, the memory and the recordings that it takes; :meth:`new_state` allocates.

    Rows that no prompt fills come last in a bucket. They have a prompt of one token, and an answer of one.

    Args:
        target: the model that verifies.
        drafter: drafter of the request.
        rule: one, or one per prompt.
        request: as the caller gave it.

    Attributes:
        count: rows that prompts fill.
        limits: most tokens of each answer.
        rows: number of rows of the batch, with those of its bucket that no prompt fills.
        drafter: in its fastest form for the rules.
        draft_bonus: nats that the rules' distributions give for an accepted draft, on average.
        temperature: temperature of the request; 0: greedy.
        draws: which drafts are drawn from q.
        recorder: what records the rounds; None: they run eagerly.
        max_lengths: [rows] tokens of each prompt with its longest answer.
        capacity: slots of the target's cache, per row.
        drafter_slots: slots that the drafter's texts take, per row. It pads rows to the one that emitted most, so they
            exceed the longest text by up to the depth of a tree.
        rules: [rows] the rule of each row.
        prompts: [rows] token ids.
        processors: the request's logits processors.

    Raises:
        as :func:`fsd_infer.engine.decode`, except for memory and logits.
    """

    def __init__(self, target: Target, drafter: Drafter, rule: Rule | Sequence[Rule], request: Request) -> None:
        rules = [rule] * len(request.prompts) if isinstance(rule, Rule) else list(rule)
        if len(rules) != len(request.prompts):
            raise FsdError(f"{len(rules)} rules for {len(request.prompts)} prompts: give one rule, or one per prompt.")
        self.limits = check_prompts(target, request.prompts, request.max_new_tokens)
        check_image_inputs(target, request.image_inputs)
        self.target, self.request, self.count = target, request, len(rules)
        self.processors = TreeProcessors(request.processors, self.count)
        self.temperature = 0.0 if request.greedy else temperature_of(request.processors)
        # what drafts, how, and whether rounds are recorded
        self.draft_bonus = sum(rule.draft_bonus(request.greedy) for rule in rules) / self.count
        self.drafter = drafter = drafter.for_bonus(self.draft_bonus)
        self.draws = draws_of(drafter, rules, self.temperature)
        self.recorder = _recorder(target, drafter)
        # memory: of a recording, a bucket's rows and slots that requests share
        max_lengths = [len(prompt) + limit for prompt, limit in zip(request.prompts, self.limits)]
        self.max_length = max(max_lengths)
        self.rows, self.capacity = self.count, self.max_length + drafter.max_nodes
        self.drafter_slots = self.max_length + 1 + drafter.max_depth
        if self.recorder is not None:
            self.rows, self.capacity = bucket(self.count), target.slots(self.capacity)
            self.drafter_slots = self.capacity
        # the rows, with those that no prompt fills
        fillers = self.rows - self.count
        self.rules = rules + rules[:1] * fillers
        self.prompts = [*request.prompts, *[request.prompts[0][:1]] * fillers]
        self.max_lengths = max_lengths + [2] * fillers

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the caches of target and drafter."""
        of_drafter = self.drafter.cache_bytes(self.rows, self.drafter_slots)
        return self.target.cache_bytes(self.rows, self.capacity) + of_drafter

    def check_memory(self) -> None:
        """Raise CacheMemoryError if the caches do not fit; recordings make room for them."""
        target, free = self.target, free_bytes(self.target.device)
        if self.recorder is not None and free is not None and self.cache_bytes > free:  # these have other sizes
            self.recorder.forget()
        shared = target.shared_cache_bytes + self.drafter.shared_cache_bytes
        check_caches(self.cache_bytes, self.rows, self.capacity, target.device, self.request.max_cache_bytes, shared)

    def new_state(self) -> DecodeState:
        """Return the state before the prompts are read: that of the recordings, or a new one.

        Allocates the caches and opens the drafter's session.
        """
        state = self._allocated()
        if self.recorder is None:
            return state
        key = RecordingKey(
            self.drafter.recording_key, tuple(self.rules), self.capacity, self.processors.signature, self.draft_bonus,
            self.request.greedy, self.request.measure_log_likelihood,
        )  # fmt: skip
        return self.recorder.state_for(state, self.count, key)

    def _allocated(self) -> DecodeState:
        request, rules, device, tokenizer = self.request, self.rules, self.target.device, self.target.tokenizer
        generator = request.generator if self.recorder is None else self.recorder.generator_like(request.generator)
        policy, first_tokens = self._policy(), torch.tensor([prompt[0] for prompt in self.prompts])
        slots = self.capacity + self.drafter.max_nodes + 1
        markers, sentence_ends = markers_of(rules, tokenizer), sentence_ends_of(rules, tokenizer, device)
        return DecodeState(
            target=self.target,
            processors=self.processors,
            greedy=request.greedy,
            generator=generator,
            rules=rules,
            prompt_indices=list(range(self.count)),
            cache=self.target.new_cache(self.rows, self.capacity),
            session=self.drafter.start(first_tokens, self._draft_request(generator, policy)),
            texts=TokenHistory([()] * self.rows, self.prompts, device, markers, slots, sentence_ends),
            max_lengths=to_device(torch.tensor(self.max_lengths), device),
            budget=budgets_of(rules, device),
            kl_excess=torch.zeros(self.rows, device=device),
            measure_log_likelihood=request.measure_log_likelihood,
            max_nodes=self.drafter.max_nodes,
            policy=policy,
        )

    def _draft_request(self, generator: torch.Generator | None, policy: TreePolicy | None) -> DraftRequest:
        """Return the request as drafters get it."""
        request, users = self.request, self.request.users
        return DraftRequest(
            batch=self.rows,
            cache_slots=self.drafter_slots,
            greedy=request.greedy,
            process=self.processors.process_draft_logits if self.processors.is_needed else None,
            generator=generator,
            device=self.target.device,
            draft_bonus=self.draft_bonus,
            shape=None if policy is None else policy.choose(self.count),
            menu=() if policy is None else policy.menu,
            clock=None if policy is None else policy.clock,
            users=None if users is None else [*users, *[""] * (self.rows - self.count)],
            draws=self.draws,
            seeded=request.generator is not None,
            max_length=self.max_length,
            temperature=self.temperature,
        )

    def _policy(self) -> TreePolicy | None:
        """Return what chooses the shape of each round's trees; None for a drafter of fixed shape."""
        drafter, rows = self.drafter, self.rows
        if drafter.bounds is None:
            return None
        names = {rule.name for rule in self.rules}
        name = names.pop() if len(names) == 1 else "several"
        profile = RuleProfile(self.draft_bonus, name, sampled=drafter.samples and self.draws is Draws.CHAIN)
        learns = self.request.generator is None and not self.target.is_sharded  # else trees depend only on the text
        store = policy_store(drafter.learner, self.target, drafter.learner.relative_cost)
        if drafter.menu:
            return MenuPolicy(store, rows, profile, menu_of(drafter.menu, chains=profile.sampled), learns=learns)
        return PricePolicy(store, rows, profile, drafter.bounds, learns=learns)


def _recorder(target: Target, drafter: Drafter) -> RoundRecorder | None:
    """Return what records the request's rounds; None if they run eagerly."""
    models = (owner for owner in drafter.stack_owners() if isinstance(owner, Target))
    has_dynamic_rope = any(model.dynamic_rope.fixed_length is not None for model in models)
    if drafter.bounds is not None and not drafter.menu or has_dynamic_rope:
        return None
    return RoundRecorder.of(target)


def draws_of(drafter: Drafter, rules: Sequence[Rule], temperature: float) -> Draws:
    """Return which drafts of a request are drawn: of what all its rules take, what the drafter does best."""
    wanted = {rule.draws for rule in rules}
    # n-grams of other texts are looked up for likely drafts only
    looks_up_ngrams = drafter.keeps_texts and any(rule.exact_ngram_size for rule in rules)
    if not temperature or Draws.NONE in wanted or looks_up_ngrams:
        return Draws.NONE
    if Draws.CHAIN in wanted:
        return Draws.CHAIN
    if temperature < MIN_DRAWING_TEMPERATURE:
        return Draws.NONE
    return Draws.CHAIN if wanted == {Draws.ANY} and drafter.draws_chains else Draws.TREE
