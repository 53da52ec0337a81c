"""A step of vLLM's model runner V2 as a rule's evidence: a chain of drafts per request.

Shapes: R logits rows, one per position to verify; B requests of the step; N one more than the most drafts of a request,
so that a request is a :class:`DraftTree` of N nodes, its last token the root.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsd_infer.rules import Rule, Texts, Verification
from fsd_infer.rules.contexts import Evidence
from fsd_infer.tree import DraftTree


class SlotTexts(Texts):
    """The texts, prompt and answer, that vLLM keeps in its slots.

    Args:
        states: vLLM's ``LogitsProcRequestState``.
        slot: [B] of the requests.
        longest: bound on the lengths of their texts, known without asking the device.
    """

    def __init__(self, states: Any, slot: Tensor, longest: int) -> None:
        self._states, self._slot, self._longest = states, slot, longest

    @cached_property
    def lengths(self) -> Tensor:
        """[B]"""
        return self._states.total_len.gpu[self._slot].long()

    @cached_property
    def tokens(self) -> Tensor:
        """[B, L] padded with -1."""
        found = self._states.all_token_ids.gpu[self._slot, : self._longest].long()
        places = torch.arange(found.shape[1], device=found.device)
        return found.masked_fill_(places >= self.lengths[:, None], -1)

    def last(self, count: int) -> Tensor:
        """[B, count] the last tokens of each text in order, -1 before its beginning."""
        places = self.lengths[:, None] + torch.arange(-count, 0, device=self.lengths.device)
        return self.tokens.gather(1, places.clamp_min(0)).masked_fill(places < 0, -1)


class Step:
    """Where the step's rows and drafts lie.

    Args:
        ctx: vLLM's ``LogitsContext``.
        states: vLLM's ``LogitsProcRequestState``.
        nodes: N.
        filled: where the drafter has no draft, vLLM puts the request's last token, which no rule should favour: drafts
            at the end of a chain that are that token count as none.

    Attributes:
        slot: [B] of the requests.
        tokens: [B, N] each request's last token, then its drafts, then -1. Placeholders of vLLM's are -1 as well.
        drafted: [B, N] bool; does a draft follow the node.
        texts: of the requests.
    """

    def __init__(self, ctx: Any, states: Any, nodes: int, filled: bool) -> None:
        self.slot = ctx.idx_mapping.long()
        place = ctx.expanded_local_pos.long()
        self._request = (place == 0).cumsum(0) - 1
        self._place, self.shape = place, (self.slot.shape[0], nodes)
        self.tokens = self.slot.new_full(self.shape, -1)
        self.tokens[self._request, place] = ctx.input_ids.long()
        if filled:
            other = (self.tokens != self.tokens[:, :1]) & (self.tokens >= 0)
            behind = other.flip(1).cumsum(1).flip(1) == 0  # no other token from here on
            self.tokens = self.tokens.masked_fill(torch.nn.functional.pad(behind[:, 1:], (1, 0)), -1)
        self.drafted = torch.nn.functional.pad(self.tokens[:, 1:] >= 0, (0, 1))
        self.texts = SlotTexts(states, self.slot, int(ctx.seq_lens_upper_bound_np.max()))

    def scores(self, logits: Tensor, temperature: Tensor | None) -> Tensor:
        """[B, N, V] the rows of ``logits`` [R, V], over ``temperature`` [B] if there is one; any row elsewhere."""
        whole = logits
        if logits.shape[0] != self.shape[0] * self.shape[1]:
            rows = self.slot.new_zeros(self.shape)
            rows[self._request, self._place] = torch.arange(logits.shape[0], device=rows.device)
            whole = logits[rows.flatten()]
        whole = whole.view(*self.shape, -1)
        return whole if temperature is None else whole / temperature[:, None, None]

    def add(self, logits: Tensor, edit: Tensor) -> None:
        """Add ``edit`` [B, N] to the logits [R, V] of the drafts that follow the nodes, in place."""
        draft = self.tokens.roll(-1, 1).clamp_min(0)
        rows = self._request, self._place
        logits.scatter_add_(1, draft[rows][:, None], edit[rows][:, None].to(logits.dtype))

    def thinking(self, opening: int, closing: int) -> Tensor:
        """[B, N] bool; is the token after the node between these two, the drafts up to the node included."""
        text = self.texts.tokens
        places = torch.arange(1, text.shape[1] + 1, device=text.device)
        opened, closed = ((places * (text == token)).amax(1, keepdim=True) for token in (opening, closing))
        ends = self.tokens == closing
        ends[:, 0] = False  # the root is the text's
        return (opened > closed) & (ends.cumsum(1) == 0)


class Chains(Evidence):
    """The step's drafts as evidence.

    Args:
        step: the drafts.
        scores: [B, N, V] ln p up to a constant; at temperature 0 raw logits.
        greedy: temperature 0.
    """

    def __init__(self, step: Step, scores: Tensor, greedy: bool) -> None:
        batch, nodes = step.shape
        tree = DraftTree.chain(step.tokens.clamp_min(0), scores.new_empty(batch, 0, scores.shape[-1]))
        tree.q_index = torch.full_like(step.tokens, -1)  # vLLM does not say what its drafter's distribution was
        uniforms = None if greedy else scores.new_empty(batch, nodes, 3)  # nothing is drawn here
        super().__init__(Verification(tree, scores, scores, greedy, uniforms, texts=step.texts), at_once=True)
        self.drafted = step.drafted

    @cached_property
    def is_child(self) -> Tensor:
        """[B, N, N] bool; see the base."""
        return torch.diag_embed(self.drafted[:, :-1], offset=1)

    def tilted(self, rule: Rule, mine: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N] the bonus of the draft that follows each node under the rule, and what the law there costs in nats;
        0 but in ``mine`` [B, N] bool."""
        law, shape = rule.charged_law(self.whole), mine.shape
        if law.bonus is None:
            nothing = self.regret.new_zeros(shape)
            return nothing, nothing
        of_nodes = law.bonus if isinstance(law.bonus, Tensor) else self.regret.new_full((1, 1), law.bonus)
        of_nodes = of_nodes.expand(mine.numel(), shape[1]).view(*shape, -1)
        bonus = torch.nn.functional.pad(of_nodes.diagonal(1, 1, 2), (0, 1)).clamp_min(0.0)
        regret = self.regret.roll(-1, 1)
        bonus = bonus.masked_fill(~(law.applies.view(shape) & mine) | regret.isinf(), 0.0)  # what is forbidden stays so
        if self.greedy:
            return bonus, torch.where(bonus > regret, regret, 0.0).to(bonus.dtype)
        log_p = self.whole.log_p_max.view(shape) - regret
        log_z = torch.logaddexp(log_p + bonus, torch.log1p(-log_p.exp().clamp_max(1.0)))
        cost = (log_p + bonus - log_z).exp() * bonus - log_z
        return bonus, torch.where(bonus.isinf(), -log_p, cost).clamp_min(0.0).masked_fill(bonus == 0, 0.0)


def affordable(cost: Tensor, left: Tensor) -> Tensor:
    """[B, N] bool; the contexts that ``left`` [B] nats pay for, each ``cost`` [B, N] after those before it."""
    found = torch.empty_like(cost, dtype=torch.bool)
    for node in range(cost.shape[1]):
        found[:, node] = cost[:, node] <= left
        left = left - cost[:, node].masked_fill(~found[:, node], 0.0)
    return found
