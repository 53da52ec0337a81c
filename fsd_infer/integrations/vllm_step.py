"""A step of vLLM's model runner V2 as a rule's inputs: a chain of drafts per request.

Shapes: R rows of logits, one per position to verify; B requests of the step; N, one more than the most drafts of a
request. A request is a :class:`DraftTree` of N nodes with its last token as root.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsd_infer.rules import RoundInput, Rule, RuleInputs, TokenHistory
from fsd_infer.rules.distributions import biased
from fsd_infer.rules.texts import Markers
from fsd_infer.rules.walk import affordable
from fsd_infer.trees.tree import DraftTree


class SlotTexts(TokenHistory):
    """The texts, prompt and answer, in vLLM's slots.

    Args:
        states: vLLM's ``LogitsProcRequestState``.
        slot: [B] of the requests.
        longest: bound on the lengths of their texts, known without a sync.
        markers, sentence_ends: see :class:`TokenHistory`.
    """

    def __init__(self, states: Any, slot: Tensor, longest: int, markers: Markers, sentence_ends: Tensor | None) -> None:
        self.markers, self.sentence_ends = markers, sentence_ends
        self._states, self._slot, self._longest = states, slot, longest
        self.lengths = states.total_len.gpu[slot].long()

    @property
    def answer_lengths(self) -> Tensor:
        """[B]"""
        return self.lengths - self._states.prompt_len.gpu[self._slot].long()

    @cached_property
    def tokens(self) -> Tensor:
        """[B, L] padded with -1."""
        ids = self._states.all_token_ids.gpu[self._slot, : self._longest].long()
        positions = torch.arange(ids.shape[1], device=ids.device)
        return ids.masked_fill_(positions >= self.lengths[:, None], -1)


class SchedulerStep:
    """The rows and drafts of a step.

    Args:
        ctx: vLLM's ``LogitsContext``.
        states: vLLM's ``LogitsProcRequestState``.
        nodes: N.
        filled: vLLM fills up missing drafts with the request's last token. Then trailing drafts equal to that token
            count as missing, so that no rule favours them.
        markers: markers of phases, see :class:`TokenHistory`.
        sentence_ends: see there.

    Attributes:
        slot: [B] of the requests.
        tokens: [B, N] each request's last token, then its drafts, then -1; vLLM's placeholders are -1, too.
        drafted: [B, N] bool; whether a draft follows the node.
        texts: texts of the requests.
    """

    def __init__(
        self, ctx: Any, states: Any, nodes: int, filled: bool, markers: Markers, sentence_ends: Tensor | None
    ) -> None:
        self.slot = ctx.idx_mapping.long()
        position = ctx.expanded_local_pos.long()
        self._request = (position == 0).cumsum(0) - 1
        self._position, self.shape = position, (self.slot.shape[0], nodes)
        self.tokens = self.slot.new_full(self.shape, -1)
        self.tokens[self._request, position] = ctx.input_ids.long()
        if filled:
            other = (self.tokens != self.tokens[:, :1]) & (self.tokens >= 0)
            repeats = other.flip(1).cumsum(1).flip(1) == 0  # only repetitions of the last token from here on
            self.tokens = self.tokens.masked_fill(torch.nn.functional.pad(repeats[:, 1:], (1, 0)), -1)
        self.drafted = torch.nn.functional.pad(self.tokens[:, 1:] >= 0, (0, 1))
        self.texts = SlotTexts(states, self.slot, int(ctx.seq_lens_upper_bound_np.max()), markers, sentence_ends)

    def scores(self, logits: Tensor, temperature: Tensor | None) -> Tensor:
        """Arrange the rows of ``logits`` [R, V] as [B, N, V], divided by ``temperature`` [B]; arbitrary at padding."""
        scores = logits
        if logits.shape[0] != self.shape[0] * self.shape[1]:
            rows = self.slot.new_zeros(self.shape)
            rows[self._request, self._position] = torch.arange(logits.shape[0], device=rows.device)
            scores = logits[rows.flatten()]
        scores = scores.view(*self.shape, -1)
        return scores if temperature is None else scores / temperature[:, None, None]

    def add(self, logits: Tensor, edit: Tensor) -> None:
        """Add ``edit`` [B, N] to the logits [R, V] of the drafts that follow the nodes, in place."""
        draft = self.tokens.roll(-1, 1).clamp_min(0)
        rows = self._request, self._position
        logits.scatter_add_(1, draft[rows][:, None], edit[rows][:, None].to(logits.dtype))


class Chains(RuleInputs):
    """The step's drafts as inputs.

    Args:
        step: the drafts.
        scores: [B, N, V] ln p up to a constant; at temperature 0 raw logits.
        greedy: temperature 0.
        kl_excess: [B], see :class:`RoundInput`.
    """

    def __init__(self, step: SchedulerStep, scores: Tensor, greedy: bool, kl_excess: Tensor | None = None) -> None:
        batch, nodes = step.shape
        # vLLM does not pass the drafter's distribution; positions without a draft are padding
        no_draft = torch.nn.functional.pad(~step.drafted[:, :-1], (1, 0))
        tree = DraftTree.chain(
            step.tokens.clamp_min(0),
            scores.new_empty(batch, 0, scores.shape[-1]),
            scores=torch.zeros(step.shape, device=scores.device).masked_fill(no_draft, -math.inf),
        )
        uniforms = None if greedy else scores.new_empty(batch, nodes, 3)  # nothing is drawn here
        round = RoundInput(tree, scores, scores, greedy, uniforms, texts=step.texts, kl_excess=kl_excess)
        super().__init__(round)

    def biased(self, rule: Rule, drafts: Tensor, left: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the bias of the draft after each node and the distribution's cost there, in nats, [B, N] each.

        Both are 0 outside ``drafts`` [B, N] bool, and where the remaining ``left`` [B] nats do not pay.
        """
        output = rule.restricted_output(self)
        if output.logit_bias is None:
            nothing = torch.zeros_like(self.logprob_gap)
            return nothing, nothing
        odds = biased(self, output.logit_bias, output.applies & drafts)
        cost = odds.cost.masked_fill(~odds.applies, 0.0)
        pays = odds.applies if left is None else odds.applies & affordable(self, cost, left)
        allowed = torch.where(self.logprob_gap < math.inf, output.logit_bias, 0.0)  # never favour forbidden tokens
        return allowed.clamp_min(0.0).roll(-1, 1).masked_fill(~pays, 0.0), cost.masked_fill(~pays, 0.0)
