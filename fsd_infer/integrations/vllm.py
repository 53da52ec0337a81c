"""Lossy rules inside vLLM, as a logits processor of its model runner V2.

    vllm serve MODEL --speculative-config '{…}' --logits-processors fsd_infer.integrations.vllm:FuzzyRules
    curl … -d '{…, "vllm_xargs": {"rule": "tilted:2"}}'

vLLM drafts greedily and accepts a draft with the chance that the logits give it, so a rule whose law is r ∝ p·e^bonus
on a chain is an edit of one logit per drafted position: + T·bonus at temperature T, + bonus at temperature 0.
Everything is done on the device, for all rows at once and by the same rule objects as everywhere else. See
docs/serving.md.

Environment of the server:
    FSD_VLLM_RULE: rule of requests that name none; default exact.
    FSD_VLLM_MOST: no request may name a looser rule: the same with other numbers, or exact. Default: any rule.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsd_infer.device.transfer import to_device
from fsd_infer.errors import FsdError
from fsd_infer.rules import Exact, Fly, Rule, Tilted, Verification, parse_rule
from fsd_infer.rules.contexts import Evidence
from fsd_infer.tree import DraftTree

TESTED = ("0.32",)  # of vLLM
NEED_Q = ("fuzzy", "fuzzy-strict", "cascade-token", "ensemble", "draft-only", "random")
CERTAIN = 1e4  # nats that stand for an infinite bonus: e^-10000 is 0

if TYPE_CHECKING:
    _Processor: Any = object
else:
    try:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as _Processor
    except ImportError:
        _Processor = object


@dataclass(frozen=True)
class Asked:
    """What a request asks for: its rule, temperature 0 or not, and only between <think> and </think> or everywhere."""

    rule: Rule
    greedy: bool
    thinking_only: bool

    @classmethod
    def of(cls, params: Any) -> Asked:
        """Of vLLM's ``SamplingParams``.

        Raises:
            ValueError: a rule that is malformed, needs the drafter's distribution, or is looser than the server allows;
                another ``only_in`` than "think"; top-k, top-p or min-p, which vLLM applies after the law was made.
        """
        extra = params.extra_args or {}
        try:
            rule = parse_rule(extra.get("rule", os.environ.get("FSD_VLLM_RULE", "exact")))
            most = os.environ.get("FSD_VLLM_MOST")
            allowed = most is None or no_looser(rule, parse_rule(most))
        except FsdError as error:
            raise ValueError(str(error)) from error
        if not allowed:
            raise ValueError(f"rule: this server allows {most}, stricter forms of it, and exact.")
        if rule.name in NEED_Q or getattr(rule, "gate", None) is not None:
            raise ValueError(f"rule: {rule.name!r} needs the drafter's distribution, which vLLM does not hand over.")
        if extra.get("only_in") not in (None, "think"):
            raise ValueError('only_in: must be "think", or left out.')
        found = cls(rule, params.temperature == 0, extra.get("only_in") == "think")
        if found.lossy and not found.greedy and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0):
            raise ValueError("rule: lossy rules need top_p = 1, top_k = 0 and min_p = 0 at temperature above 0.")
        if isinstance(rule, Fly) and not found.greedy:
            raise ValueError("rule: 'fly' needs temperature 0.")
        return found

    @property
    def lossy(self) -> bool:
        return not isinstance(self.rule, Exact)


def no_looser(rule: Rule, most: Rule) -> bool:
    """Is ``rule`` the same as ``most``, exact, or a tilted rule that favours no more?"""
    if isinstance(rule, Tilted) and isinstance(most, Tilted):
        within = math.inf if rule.budget is None else rule.budget
        novel = (0 < rule.novel <= most.novel) if most.novel else True
        limit = math.inf if most.budget is None else most.budget
        return rule.price >= most.price and rule.floor >= most.floor and novel and within <= limit
    return isinstance(rule, Exact) or rule == most


class FuzzyRules(_Processor):
    """See the module.

    Args:
        vllm_config: vLLM's.
        req_states: its slots of requests.

    Raises:
        ValueError: drafts are sampled, or verified in another way than by vLLM's standard test: the law of a
            deterministic draft is then not this one.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        _check_version()
        speculative = vllm_config.speculative_config
        for name, wanted in (("draft_sample_method", "greedy"), ("rejection_sample_method", "standard")):
            if speculative is not None and getattr(speculative, name, wanted) != wanted:
                raise ValueError(f"FuzzyRules needs speculative_config.{name} = {wanted!r}.")
        self.states, self.device = req_states, req_states.device
        slots = req_states.max_num_reqs
        drafts = 0 if speculative is None else speculative.num_speculative_tokens
        self.asked: list[Asked | None] = [None] * slots
        self.fresh: dict[int, float] = {}  # slot -> temperature of requests that the device does not know yet
        self.temperature = torch.ones(slots, device=self.device)
        self.left = torch.full((slots,), math.inf, device=self.device)  # nats
        self.cost = torch.zeros(slots, drafts + 1, device=self.device)  # of the last step's positions
        self.seen = torch.zeros(slots, dtype=torch.long, device=self.device)  # length of the text then
        model = getattr(vllm_config, "model_config", None)
        self._thinking = cache(lambda: _thinking_tokens(model))

    @classmethod
    def validate_params(cls, params: Any) -> None:
        """Raises ValueError as of :meth:`Asked.of`."""
        Asked.of(params)

    def add_request(self, slot: int, params: Any) -> bool:
        """A request takes a slot. Returns whether its logits may change."""
        asked = Asked.of(params)
        self.asked[slot] = asked if asked.lossy else None
        self.fresh[slot] = params.temperature or 1.0
        return asked.lossy

    def apply_staged_writes(self) -> None:
        """Bring new requests to the device. One that comes back after a preemption has no budget left: what it had
        spent is not known any more."""
        if not self.fresh:
            return
        rules = [None if (asked := self.asked[slot]) is None else asked.rule for slot in self.fresh]
        budgets = [math.inf if rule is None or rule.budget is None else rule.budget for rule in rules]
        index, temperature, budget = (
            to_device(torch.tensor(values), self.device)
            for values in (list(self.fresh), list(self.fresh.values()), budgets)
        )
        resumed = (self.states.prefill_len.gpu > self.states.prompt_len.gpu)[index] & budget.isfinite()
        self.temperature[index] = temperature
        self.left[index] = budget.masked_fill(resumed, 0.0)
        self.cost[index] = 0.0
        self.fresh = {}

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Edit ``logits`` [R, V] in place, a row per position to verify; rows without a lossy rule stay as they are."""
        asked = {one for slot in ctx.idx_mapping_np.tolist() if (one := self.asked[slot]) is not None}
        if not asked:
            return logits
        slot = ctx.expanded_idx_mapping.long()
        self._settle(slot)
        if logits.shape[0] < 2:
            return logits
        rows = Rows(slot, ctx.expanded_local_pos.long(), ctx.input_ids.long(), ctx.pos.long(), self.states)
        whose = self._whose(slot, asked)
        temperature = self.temperature[slot]
        evidence: dict[bool, Chains] = {}
        for number, one in enumerate(asked):
            if one.greedy not in evidence:
                scores = logits if one.greedy else logits / temperature[:, None]
                evidence[one.greedy] = Chains(rows, scores, one.greedy)  # edits are of other requests' rows
            mine = rows.drafted & (whose == number)
            if one.thinking_only:
                mine &= rows.thinking(*self._thinking())
            bonus, cost = evidence[one.greedy].tilted(one.rule, mine)
            allowed = (rows.path.to(cost.dtype) @ cost) <= self.left[slot]
            bonus, cost = bonus.masked_fill(~allowed, 0.0), cost.masked_fill(~allowed, 0.0)
            self.cost.index_put_((slot, rows.place), cost.float(), accumulate=True)
            edit = bonus.clamp_max(CERTAIN) * (1.0 if one.greedy else temperature)
            logits.scatter_add_(1, rows.draft[:, None], edit[:, None].to(logits.dtype))
        return logits

    def _whose(self, slot: Tensor, asked: set[Asked]) -> Tensor:
        """[R] the number, in the order of ``asked``, of what each row's request asks for; -1 for none."""
        numbers = {one: number for number, one in enumerate(asked)}
        table = [-1 if one is None else numbers.get(one, -1) for one in self.asked]
        return to_device(torch.tensor(table), self.device)[slot]

    def _settle(self, slot: Tensor) -> None:
        """Take what the last step spent, at the positions whose tokens were emitted, out of the budgets."""
        total = self.states.total_len.gpu.long()
        emitted = (total - self.seen)[:, None]
        places = torch.arange(self.cost.shape[1], device=self.device)
        here = torch.zeros_like(total, dtype=torch.bool).index_fill_(0, slot, True)
        spent = self.cost.masked_fill(places >= emitted, 0.0).sum(1)
        self.left = torch.where(here, (self.left - spent).clamp_min(0.0), self.left)
        self.cost = self.cost.masked_fill(here[:, None], 0.0)
        self.seen = torch.where(here, total, self.seen)


class Rows:
    """The step's logits rows: a chain of drafts per request, below its last token.

    Args:
        slot: [R] of each row's request.
        place: [R] 0 at the last token of the text, then one per draft.
        tokens: [R] the token that the row's position holds.
        pos: [R] its position in the text.
        states: vLLM's slots.

    Attributes:
        drafted: [R] bool; is there a draft after the row, the next row's token.
        draft: [R] that token.
        path: [R, R] bool; is the second on the way from the first's text to it, the row itself included.
    """

    def __init__(self, slot: Tensor, place: Tensor, tokens: Tensor, pos: Tensor, states: Any) -> None:
        self.slot, self.place, self.tokens, self.pos, self.states = slot, place, tokens, pos, states
        follows = (slot[1:] == slot[:-1]) & (place[1:] == place[:-1] + 1)
        self.drafted = torch.nn.functional.pad(follows, (0, 1))
        self.draft = tokens.roll(-1)
        self.path = (slot[:, None] == slot) & (place[:, None] >= place)

    def known(self, n: int) -> Tensor:
        """[1, R] bool; does the row's draft complete an n-gram that its text and path had before it."""
        back = torch.arange(n - 1, -1, -1, device=self.slot.device)
        of_text = self.states.all_token_ids.gpu
        rows = torch.arange(len(self.slot), device=self.slot.device)[:, None] - back
        drafted = back <= self.place[:, None]
        places = (self.pos[:, None] - back).clamp_min(0)
        ends = torch.where(
            drafted, self.tokens[rows.clamp_min(0)], of_text[self.slot[:, None], places].long()
        )  # [R, n]
        ends = torch.where(self.pos[:, None] >= back, ends, -1)
        above = self.path & (self.place[:, None] > self.place) & (self.place > 0)
        found = (above & (ends[:, None] == ends).all(-1)).any(-1)
        if of_text.shape[1] >= n:
            count = of_text.shape[1] - n + 1
            same = (
                torch.arange(count, device=self.slot.device) + n <= self.states.total_len.gpu[self.slot].long()[:, None]
            )
            for k in range(n):
                same &= of_text[self.slot, k : k + count] == ends[:, k, None]
            found |= same.any(-1)
        return (found & (self.place > 0))[None]

    def thinking(self, opening: int, closing: int) -> Tensor:
        """[R] bool; is the row's next token between these two, the drafts before it included."""
        text = self.states.all_token_ids.gpu[self.slot]
        at = torch.arange(1, text.shape[1] + 1, device=text.device)
        at = at.masked_fill(at > self.states.total_len.gpu[self.slot].long()[:, None], 0)
        opened, closed = ((at * (text == token)).amax(-1) for token in (opening, closing))
        ended = (self.path & (self.place > 0) & (self.tokens == closing)).any(-1)
        return (opened > closed) & ~ended


class Chains(Evidence):
    """The chains of all requests as a rule's evidence: one tree without a common root, so its first rows are nobody's
    children.

    Args:
        rows: of the step.
        scores: [R, V] ln p up to a constant; at temperature 0 raw logits.
        greedy: temperature 0.
    """

    def __init__(self, rows: Rows, scores: Tensor, greedy: bool) -> None:
        count, vocab = scores.shape
        places = torch.arange(count, device=scores.device)
        tree = DraftTree(
            tokens=rows.tokens[None],
            parents=torch.where(rows.place > 0, places - 1, 0)[None],
            depths=rows.place[None],
            ancestors=rows.path[None],
            q_logits=scores.new_empty(1, 0, vocab),
            q_index=torch.full_like(rows.tokens, -1)[None],
        )
        uniforms = None if greedy else scores.new_empty(1, count, 3)  # nothing is drawn here
        super().__init__(Verification(tree, scores[None], scores[None], greedy, uniforms), at_once=True)
        self.rows = rows

    @cached_property
    def is_child(self) -> Tensor:
        """[1, R, R] bool; see the base."""
        return torch.diag_embed(self.rows.drafted[:-1], offset=1)[None]

    def tilted(self, rule: Rule, mine: Tensor) -> tuple[Tensor, Tensor]:
        """[R] the bonus of each row's draft under the rule, and the nats that it costs; 0 but in ``mine`` [R] bool."""
        novel = getattr(rule, "novel", 0)
        if novel:
            self.once(("known", novel), lambda: self.rows.known(novel))
        law = rule.charged_law(self.whole)
        zero = self.regret.new_zeros(len(mine))
        if law.bonus is None:
            return zero, zero
        whole = torch.as_tensor(law.bonus, device=zero.device).expand(len(mine), len(mine))
        bonus = torch.nn.functional.pad(whole.diagonal(1), (0, 1)).clamp_min(0.0)
        regret = self.regret[0].roll(-1)
        bonus = bonus.masked_fill(~(law.applies & mine) | regret.isinf(), 0.0)  # what is forbidden stays so
        if self.greedy:
            return bonus, torch.where(bonus > regret, regret, 0.0).to(bonus.dtype)
        log_p = self.whole.log_p_max - regret
        log_z = torch.logaddexp(log_p + bonus, torch.log1p(-log_p.exp().clamp_max(1.0)))
        cost = (log_p + bonus - log_z).exp() * bonus - log_z
        return bonus, torch.where(bonus.isinf(), -log_p, cost).clamp_min(0.0).masked_fill(bonus == 0, 0.0)


@cache
def _check_version() -> None:
    from vllm import __version__

    if not __version__.startswith(TESTED):
        warnings.warn(f"FuzzyRules was tested with vLLM {', '.join(TESTED)}, not with {__version__}.", stacklevel=2)


def _thinking_tokens(model: Any) -> tuple[int, int]:
    from transformers import AutoTokenizer

    trust = bool(model.trust_remote_code)
    vocabulary = AutoTokenizer.from_pretrained(model.tokenizer, trust_remote_code=trust).get_vocab()
    if "<think>" not in vocabulary or "</think>" not in vocabulary:
        raise ValueError('only_in: this model has no tokens <think> and </think>, so "think" means nothing.')
    return vocabulary["<think>"], vocabulary["</think>"]
