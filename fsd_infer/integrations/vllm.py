"""Lossy rules inside vLLM, as a logits processor of its model runner V2.

    vllm serve MODEL --speculative-config '{…}' --logits-processors fsd_infer.integrations.vllm:FuzzyRules
    curl … -d '{…, "vllm_xargs": {"rule": "tilted:2"}}'

vLLM drafts greedily and accepts a draft with its probability under the logits. So a rule with the distribution r ∝
p·e^bias on a chain edits one logit per drafted position: + T·bias at temperature T, + bias at temperature 0. The edits
run on the device, for all rows at once, with the rule objects of :mod:`fsd_infer.rules`. See docs/serving.md.

Environment of the server:
    FSD_VLLM_RULE: rule of requests without one (default: exact).
    FSD_VLLM_MOST: the loosest rule that requests may name: it, stricter parameters of it, or exact (default: any rule).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fsd_core.errors import FsdError
from fsd_core.registry import did_you_mean
from fsd_core.tensors import to_device
from fsd_infer.integrations.vllm_step import Chains, SchedulerStep
from fsd_infer.rules import Exact, LossyRule, Rule, Tilted, parse_rule
from fsd_infer.rules.texts import NOWHERE, markers, sentence_ends
from fsd_infer.rules.tilted import INITIAL_KL_COEF

TESTED = ("0.32",)  # of vLLM
NEED_Q = ("fuzzy", "fuzzy-strict", "cascade-token", "ensemble", "draft-only", "random")
CERTAIN = 1e4  # nats in place of an infinite bias: e^-10000 is 0
FILLED = ("ngram", "ngram_gpu")  # methods that may have no draft; see :class:`Step`
READ = {  # the fields of vLLM's interface that this module reads
    "LogitsProcRequestState": ("device", "max_num_reqs", "all_token_ids", "prompt_len", "prefill_len", "total_len"),
    "LogitsContext": ("idx_mapping", "idx_mapping_np", "expanded_local_pos", "input_ids", "seq_lens_upper_bound_np"),
}
REPORT_EVERY = 10.0  # seconds

log = logging.getLogger("vllm.fsd_infer")  # a child of vLLM's logger inherits its settings

if TYPE_CHECKING:
    _Processor: Any = object
else:
    try:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as _Processor
    except ImportError:
        _Processor = object


@dataclass(frozen=True)
class RuleRequest:
    """A request's rule, and whether its temperature is 0."""

    rule: Rule
    greedy: bool

    @classmethod
    def of(cls, params: Any) -> RuleRequest:
        """Read vLLM's ``SamplingParams``.

        Raises:
            ValueError: a rule that is malformed, needs the drafter's distribution, or is looser than the server allows;
                top-k, top-p or min-p, which vLLM applies after the edit.
        """
        extra = params.extra_args or {}
        try:
            rule = parse_rule(extra.get("rule", os.environ.get("FSD_VLLM_RULE", "exact")))
            most = os.environ.get("FSD_VLLM_MOST")
            allowed = most is None or no_looser(rule, parse_rule(most))
        except FsdError as error:
            raise ValueError(f"rule: {error}") from error
        if not allowed:
            raise ValueError(f"rule: this server allows {most}, stricter forms of it, and exact.")
        if rule.name in NEED_Q or getattr(rule, "gate", None) is not None:
            raise ValueError(f"rule: {rule.name!r} needs the drafter's distribution, which vLLM does not hand over.")
        if extra.get("only_in") is not None:
            raise ValueError('only_in: a parameter of rules now: {"rule": "tilted:only_in=think"}.')
        for name in extra.keys() - {"rule"}:  # others may be of other processors
            if name == "quality" or did_you_mean(name, ["rule"]):
                raise ValueError(f'{name}: no field of these rules, which take "rule" alone: {{"rule": "tilted:1"}}.')
        request = cls(rule, params.temperature == 0)
        if request.lossy and not request.greedy and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0):
            raise ValueError(
                "rule: at temperature above 0 a lossy rule needs top_p = 1, top_k = 0 and min_p = 0, since vLLM "
                "applies them after the rule. Send these, or start the server with --generation-config vllm if the "
                "model's own defaults set others."
            )
        if rule.greedy_only and not request.greedy:
            raise ValueError(f"rule: {rule.name!r} needs temperature 0.")
        return request

    @property
    def lossy(self) -> bool:
        return not isinstance(self.rule, Exact)


def no_looser(rule: Rule, most: Rule) -> bool:
    """Whether ``rule`` is exact, or ``most``, or a tilted rule with stricter parameters, possibly in one phase."""
    if most.only_in is None and isinstance(rule, LossyRule):
        rule = dataclasses.replace(rule, only_in=None)
    if isinstance(rule, Tilted) and isinstance(most, Tilted):
        if (rule.match_temperature is None) != (most.match_temperature is None):
            return False  # a fixed KL coefficient and an adaptive one are not comparable
        return (
            rule.only_in == most.only_in
            and (rule.match_temperature or 0.0) <= (most.match_temperature or 0.0)
            and rule.initial_kl_coef >= most.initial_kl_coef
            and rule.effective_deviation_cost >= most.effective_deviation_cost
            and rule.exact_answer_tokens >= most.exact_answer_tokens
            and rule.exact_sentence_tokens >= most.exact_sentence_tokens
            and rule.effective_min_p >= most.effective_min_p
            and (0 < rule.exact_ngram_size <= most.exact_ngram_size or not most.exact_ngram_size)
            and rule.max_nats <= most.max_nats
        )
    return isinstance(rule, Exact) or rule == most


class FuzzyRules(_Processor):
    """The logits processor, see the module.

    Args:
        vllm_config: vLLM's config.
        req_states: vLLM's slots of requests.

    Raises:
        ValueError: vLLM samples drafts, or does not verify them by its standard test, so the distribution would be
            another. Or vLLM's interface has changed. Or FSD_VLLM_RULE or FSD_VLLM_MOST is no rule.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        _check_version()
        for name in ("FSD_VLLM_RULE", "FSD_VLLM_MOST"):  # before requests meet it
            try:
                parse_rule(os.environ.get(name, "exact"))
            except FsdError as error:
                raise ValueError(f"{name}: {error}") from error
        speculative = vllm_config.speculative_config
        for name, wanted in (("draft_sample_method", "greedy"), ("rejection_sample_method", "standard")):
            if speculative is not None and getattr(speculative, name, wanted) != wanted:
                raise ValueError(f"FuzzyRules needs speculative_config.{name} = {wanted!r}.")
        self.states, self.device = req_states, req_states.device
        self.nodes = 1 + (0 if speculative is None else speculative.num_speculative_tokens)
        self.filled = getattr(speculative, "method", None) in FILLED
        self.vocabulary = _vocabulary(getattr(vllm_config, "model_config", None))
        self.markers: dict[str, tuple[int, int]] = {}  # of the phases that requests name
        self.sentence_ends = to_device(sentence_ends(self.vocabulary), self.device)
        slots = req_states.max_num_reqs
        # kinds are renumbered only when a request is admitted
        self.requests: list[RuleRequest | None] = [None] * slots
        self.fresh: dict[int, float] = {}  # slot -> temperature of requests that are not on the device yet
        self.kinds: list[RuleRequest] = []
        self.kind_of = np.full(slots, -1)  # kind of each slot; -1: exact
        self.kind = torch.full((slots,), -1, device=self.device)  # the same on the device
        self.temperature = torch.ones(slots, device=self.device)
        self.left = torch.full((slots,), math.inf, device=self.device)  # remaining nats
        self.cost = torch.zeros(slots, self.nodes, device=self.device)  # nats at the last step's positions
        self.allowed = torch.zeros_like(self.cost)  # nats that adaptive KL coefficients allow here
        self.kl_excess = torch.zeros(slots, device=self.device)  # nats beyond the targets
        self.seen = torch.zeros(slots, dtype=torch.long, device=self.device)  # length of the text at the last step
        self.ledger = Ledger(self.device)

    @classmethod
    def validate_params(cls, params: Any) -> None:
        """Validate a request. Raises ValueError as :meth:`RuleRequest.of`."""
        RuleRequest.of(params)

    def add_request(self, slot: int, params: Any) -> bool:
        """Admit a request to a slot; return whether its logits may change."""
        request = RuleRequest.of(params)
        self.requests[slot] = request if request.lossy else None
        self.fresh[slot] = params.temperature or 1.0
        return request.lossy

    def apply_staged_writes(self) -> None:
        """Copy new requests to the device.

        A preemption loses a request's spending, so its budget is then 0 and its adaptive KL coefficient restarts.
        """
        if not self.fresh:
            return
        self.kinds = list(dict.fromkeys(filter(None, self.requests)))
        for phase in {request.rule.only_in for request in self.kinds if request.rule.only_in}.difference(self.markers):
            self.markers[phase] = self._markers(phase)
        number: dict[RuleRequest | None, int] = {request: number for number, request in enumerate(self.kinds)}
        self.kind_of = np.array([number.get(request, -1) for request in self.requests])
        self.kind = to_device(torch.from_numpy(self.kind_of), self.device)
        budgets = [math.inf if (kind := self.requests[slot]) is None else kind.rule.max_nats for slot in self.fresh]
        index, temperature, budget = (
            to_device(torch.tensor(values), self.device)
            for values in (list(self.fresh), list(self.fresh.values()), budgets)
        )
        resumed = (self.states.prefill_len.gpu > self.states.prompt_len.gpu)[index] & budget.isfinite()
        self.temperature[index] = temperature
        self.left[index] = budget.masked_fill(resumed, 0.0)
        for nats in (self.cost, self.allowed, self.kl_excess):
            nats.index_fill_(0, index, 0.0)
        self.seen[index] = self.states.total_len.gpu[index].long()
        self.fresh = {}

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Edit ``logits`` [R, V], a row per position to verify, in place; rows without a lossy rule do not change."""
        numbers = np.unique(self.kind_of[ctx.idx_mapping_np]).tolist()
        if numbers in ([], [-1]):
            return logits
        step = SchedulerStep(ctx, self.states, self.nodes, self.filled, self.markers, self.sentence_ends)
        self._account(step)
        if logits.shape[0] == len(ctx.idx_mapping_np):  # no drafts
            return logits
        kind, temperature = self.kind[step.slot], self.temperature[step.slot]
        chains: dict[bool, Chains] = {}
        for number in numbers:
            if number < 0:
                continue
            request = self.kinds[number]
            if request.greedy not in chains:  # rows edited so far belong to other requests
                scores = step.scores(logits, None if request.greedy else temperature)
                chains[request.greedy] = Chains(step, scores, request.greedy, self.kl_excess[step.slot])
            inputs, here = chains[request.greedy], (kind == number)[:, None].expand(step.shape)
            drafts = step.drafted & here
            target = request.rule.kl_target(inputs.round.scores, request.greedy)
            if target is not None:
                where = request.rule.lossy_at(inputs)
                here = here if where is None else here & where
                self.allowed[step.slot] += target.float().masked_fill(~here, 0.0)
            left = None if request.rule.budget is None else self.left[step.slot]
            logit_bias, cost = inputs.biased(request.rule, drafts, left)
            self.cost[step.slot] += cost.float()
            edit = logit_bias.clamp_max(CERTAIN)
            step.add(logits, edit if request.greedy else edit * temperature[:, None])
        return logits

    def _markers(self, phase: str) -> tuple[int, int]:
        """Return a phase's marker ids. If the model has no such tokens, log a warning: requests decode exactly."""
        opening, closing = (self.vocabulary.get(marker, -1) for marker in markers(phase))
        if min(opening, closing) >= 0:
            return opening, closing
        log.warning("only_in=%s: the model has no such tokens, so requests that name it decode exactly", phase)
        return NOWHERE

    def _account(self, step: SchedulerStep) -> None:
        """Charge the last step's costs and allowances at positions whose tokens were emitted."""
        slot, total = step.slot, step.texts.lengths
        emitted = (total - self.seen[slot])[:, None]
        unused = torch.arange(self.nodes, device=self.device) >= emitted
        spent, allowed = (nats[slot].masked_fill(unused, 0.0).sum(1) for nats in (self.cost, self.allowed))
        self.left[slot] = (self.left[slot] - spent).clamp_min(0.0)
        self.kl_excess[slot] = (self.kl_excess[slot] + spent - allowed).clamp_min(-INITIAL_KL_COEF)
        self.cost.index_fill_(0, slot, 0.0)
        self.allowed.index_fill_(0, slot, 0.0)
        self.seen[slot] = total
        self.ledger.add(spent, emitted[:, 0].clamp_max(self.nodes) * (self.kind[slot] >= 0))


class Ledger:
    """A log of the nats that all requests spent.

    vLLM does not report the end of a request, so it logs sums. They are some seconds old, since nothing may sync.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # nats, tokens
        self._copy = torch.zeros(2, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._due, self._reported = time.monotonic() + REPORT_EVERY, 0.0

    def add(self, nats: Tensor, tokens: Tensor) -> None:
        """Add a step's spent nats and emitted tokens, [B] each."""
        self._sums += torch.stack([nats.sum(), tokens.sum()])
        if time.monotonic() < self._due:
            return
        spent, emitted = self._copy.tolist()  # this copy began at the last report and is complete
        if emitted > self._reported:
            log.info("lossy rules: %.4f nats a token over %d tokens", spent / emitted, emitted)
            self._reported = emitted
        self._copy.copy_(self._sums, non_blocking=True)
        self._due = time.monotonic() + REPORT_EVERY


def _check_version() -> None:
    from vllm import __version__
    from vllm.v1.worker.gpu.sample import logits_processor

    for name, fields in READ.items():
        existing = {field.name for field in dataclasses.fields(getattr(logits_processor, name))}
        if missing := ", ".join(field for field in fields if field not in existing):
            raise ValueError(f"FuzzyRules cannot work with vLLM {__version__}: its {name} has no {missing}.")
    if not __version__.startswith(TESTED):
        warnings.warn(f"FuzzyRules was tested with vLLM {', '.join(TESTED)}, not with {__version__}.", stacklevel=2)


def _vocabulary(model: Any) -> dict[str, int]:
    """Return the tokenizer's vocabulary, token -> id; empty without a tokenizer."""
    if model is None or model.skip_tokenizer_init:
        return {}
    from vllm.tokenizers import cached_tokenizer_from_config

    return dict(cached_tokenizer_from_config(model).get_vocab())
