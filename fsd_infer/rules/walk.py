"""The walk: which path of each tree is accepted, which token follows it, and the cost.

The walk is one computation over all nodes of all rows. Every draft has a probability of following its parent, under the
target's distribution and under the rule's. One uniform number per context picks one of its children or none. The nodes
whose ancestors were all picked form the path. So only one token per row, the last, is drawn from the vocabulary.

Dense distributions need work over the vocabulary. They are evaluated at all contexts at once: to learn first which ones
the walk reaches would take a transfer. Nothing is read on the host: the verdict is tensors of fixed shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsd_core import functional, sampling
from fsd_core.divergence import divergence, divergence_rows
from fsd_core.errors import FsdError
from fsd_core.functional import wide
from fsd_infer.rules.checks import IS_NAN, NO_NUMBERS, NO_PROBABILITIES, described, no_probabilities
from fsd_infer.rules.distributions import OutputDistribution, VocabFunction, biased
from fsd_infer.rules.inputs import CHILD, TOKEN, RuleInputs
from fsd_infer.rules.verification import TokenOrigin, Verdict, row_index
from fsd_infer.rules.vocab_rows import VocabRows


def walk(inputs: RuleInputs, outputs: Sequence[tuple[OutputDistribution, list[int]]], budget: Tensor | None) -> Verdict:
    """Walk one round, without a sync. :attr:`Verdict.faults` tells what is wrong with it.

    Args:
        inputs: of the round.
        outputs: the rules' distributions of all rows, each with its rows.
        budget: [B] nats that each row may spend, on the device of the tree; None: any number.
    """
    if not inputs.greedy and all(output.is_exact for output, _ in outputs):
        return Verdict(**exact_walk(inputs.round.scores, inputs))
    return _Walk(inputs, outputs, budget).verdict()


@functional.replaceable
def exact_walk(scores: Tensor, inputs: RuleInputs) -> dict[str, Any]:
    """Walk a round above temperature 0 with the target's distribution in all rows: the fields of its verdict.

    Args:
        scores: [B, N, V] those of the round.
        inputs: of the round; sampled drafts are tested in blocks (:func:`.block_test`).
    """
    output = OutputDistribution(inputs, torch.zeros_like(inputs.tree.is_draft), in_blocks=True)
    return vars(_Walk(inputs, [(output, list(range(len(scores))))], None).verdict())


@functional.replaceable
def accepted_path(
    p_draft: Tensor, r_draft: Tensor, lossy: Tensor, cost: Tensor | None, final_is_dense: Tensor, inputs: RuleInputs
) -> tuple[dict[str, Tensor], Tensor]:
    """Accept the nodes whose ancestors were all picked, and gather what is emitted there.

    At every context at once it is decided which child follows, as if the walk came there.

    Args:
        p_draft, r_draft: [B, N] probability of each draft under p and under the rule's distribution; at temperature 0
            bool.
        lossy: [B, N] bool; contexts that have the rule's distribution, others have p.
        cost: [B, N] nats of the rule's distribution; None: no context is lossy.
        final_is_dense: [B, 1] bool; whether a lossy token after the path counts as one that p would not emit.
        inputs: of a round with drafts.

    Returns:
        Fields of a :class:`Verdict`, in whose ``tokens`` the one after the path is 0; [B, 1] the path's last node.
    """
    tree, width = inputs.tree, inputs.tree.max_depth + 1
    follows = p_draft.clone() if r_draft is p_draft else torch.where(inputs.at_parents(lossy), r_draft, p_draft)
    follows_under_p = p_draft
    if not inputs.greedy:  # the uniform number falls on one of the children or on none
        offset = sampling.child_offsets(follows, inputs.uniforms(CHILD), tree.parents)
        follows, follows_under_p = (offset >= 0) & (offset < follows), offset < p_draft
    follows[:, 0] = True  # the root
    reached = (tree.ancestors & ~follows[:, None]).any(-1).logical_not_()
    accepted = reached.sum(1, keepdim=True) - 1
    end = (reached * inputs.nodes).amax(1, keepdim=True)
    # scatter by depth; unreached nodes write the end to the end's column
    columns, nodes = torch.where(reached, tree.depths, accepted), torch.where(reached, inputs.nodes, end)
    path = end.expand(-1, width).scatter(1, columns, nodes)
    steps = inputs.nodes[:width]  # [D+1] 0, 1, … along the path
    is_last, is_padding = steps == accepted, steps > accepted
    first = tree.first_choices.gather(1, path).masked_fill_(is_padding, -1)
    following = torch.cat([path[:, 1:], end], 1)  # [B, D+1] the node that follows each of the path
    is_lossy = lossy.gather(1, path) & ~is_padding
    not_under_p = torch.where(is_last, final_is_dense, ~follows_under_p.gather(1, following))
    sources = (steps < accepted) * int(TokenOrigin.EXACT)  # 0 is TARGET
    spent = torch.zeros(path.shape, dtype=wide(path.device), device=path.device)
    return {
        "path": path,
        "accepted": accepted[:, 0],
        "tokens": tree.tokens.gather(1, following).masked_fill_(is_last | is_padding, 0),
        "sources": sources.masked_fill(not_under_p & is_lossy, int(TokenOrigin.GATE)),
        "relaxed": is_lossy,
        "spent": spent if cost is None else cost.gather(1, path).masked_fill_(~is_lossy, 0.0),
        "first_choices": first,
        "logprob_gap": inputs.logprob_gap.gather(1, first.clamp_min(0)).masked_fill_(first < 0, math.nan),
    }, end


@functional.replaceable
def emitted(log_r: Tensor, at: VocabRows) -> tuple[Tensor, Tensor, Tensor | None]:
    """Normalise a dense distribution above temperature 0.

    Args:
        log_r: [R, V] ln r up to a constant, or over a reduced vocabulary.
        at: its contexts.

    Returns:
        r [R, V]; KL(r || p) [R]; Σ (r - q)+ [R] with q of the draw, None where no drafts are drawn.
    """
    r = log_r.softmax(-1)
    residual = (r - at.proposal).clamp_min(0.0).sum(-1) if at.inputs.sampled else None
    return r, divergence_rows(at.scores, log_r, divergence("kl_qp")), residual


def affordable(inputs: RuleInputs, cost: Tensor, budget: Tensor) -> Tensor:
    """[B, N] bool; contexts whose ``cost`` [B, N] the ``budget`` [B] pays after the costs of their ancestors."""
    depths = inputs.tree.depths
    left = root_left = budget.to(cost.dtype)[:, None].expand_as(cost)
    for _ in range(inputs.tree.max_depth):  # each pass makes it right one depth further
        spent = cost.masked_fill((cost > left) | cost.isinf(), 0.0)  # inf - inf is NaN
        left = torch.where(depths > 0, inputs.at_parents(left - spent), root_left)
    return cost <= left


class _RuleOutput(NamedTuple):
    """A rule's output distribution, and the rows that have this rule.

    Attributes:
        output: the distribution, at the contexts of all rows.
        rows: [R] their numbers.
        mask: [B, 1] bool; None: all rows.
    """

    output: OutputDistribution
    rows: Tensor
    mask: Tensor | None

    def put(self, new: Tensor, old: Tensor) -> Tensor:
        """Return ``new`` [B, ·] in the rule's rows, ``old`` in others."""
        return new if self.mask is None else torch.where(self.mask, new, old)


class _Dense(NamedTuple):
    """A dense distribution at R contexts.

    Attributes:
        at: the contexts.
        log_r: [R, V] the distribution there, or over a reduced vocabulary.
        number: [B, N] which of them each node is; -1: none, or one where another distribution holds.
        parent_number: [B, N] which of them its parent is.
    """

    at: VocabRows
    log_r: Tensor
    number: Tensor
    parent_number: Tensor

    @classmethod
    def of(cls, at: VocabRows, log_r: Tensor, holds: Tensor | None) -> _Dense:
        """Number the contexts. ``holds`` [B, N] bool: where the distribution does; None: at all of them."""
        number = at.spread(torch.arange(len(log_r), device=log_r.device), -1)
        number = number if holds is None else number.masked_fill(~holds, -1)
        return cls(at, log_r, number, at.inputs.at_parents(number))


def _checked_rows(log_r: Tensor, at: VocabRows) -> Tensor:
    if not isinstance(log_r, Tensor) or log_r.shape != at.scores.shape or not log_r.is_floating_point():
        shape = tuple(at.scores.shape)
        raise FsdError(
            f"a rule's log_r(contexts) returns {described(log_r)}: return ln r, {shape} like contexts.log_p."
        )
    return log_r


class _Walk:
    """The state of a walk, [B, N] each.

    Attributes:
        outputs: of all rules; empty if nothing was drafted.
        p_draft: probability of each draft under the target's distribution.
        r_draft: probability of each draft under the rule's distribution.
        cost: nats of the rule's distribution at each context; None if all rules have the target's distribution.
        applies: contexts with a distribution other than the target's.
        r_token: at temperature 0, the token of a dense distribution.
        dense: above temperature 0, contexts with their distributions r, [·, V] or over a reduced vocabulary.
        r_row: the context's row among those of all ``dense`` together; -1 if it has none.
    """

    def __init__(
        self, inputs: RuleInputs, outputs: Sequence[tuple[OutputDistribution, list[int]]], budget: Tensor | None
    ) -> None:
        self.inputs, self.tree, self.device = inputs, inputs.tree, inputs.nodes.device
        reads_q = inputs.sampled or inputs.compares or any(output.log_r for output, _ in outputs)
        self.non_finite = inputs.non_finite(reads_q)
        self.budget = budget
        self.outputs: list[_RuleOutput] = []
        self.dense: list[tuple[VocabRows, Tensor]] = []
        self.cost: Tensor | None = None
        if self.tree.parents.shape[1] == 1:
            return  # nothing was drafted
        if inputs.sampled:
            outputs = [(output.tested(), rows) for output, rows in outputs]
        # one test for all rows takes the place of accept_prob, which would read the vocabulary once more
        test = outputs[0][0].test if len(outputs) == 1 else None
        self.p_draft = self.r_draft = inputs.accept_prob if test is None else test.accept_prob.to(wide(self.device))
        self.applies = torch.zeros_like(inputs.tree.is_draft)
        self.r_token, self.r_row = inputs.likeliest, torch.full_like(self.tree.parents, -1)
        for output, rows in outputs:
            of_rule, mask = row_index(tuple(rows), self.device), None
            if len(rows) < len(self.tree.parents):
                mask = torch.zeros_like(inputs.tree.is_draft[:, :1]).index_fill_(0, of_rule, True)
            self._add(_RuleOutput(output, of_rule, mask))

    def _add(self, rule: _RuleOutput) -> None:
        """Add a distribution to those of other rows."""
        self.outputs.append(rule)
        output, applies = rule.output, rule.output.applies
        if output.test is not None:
            accept_prob = output.test.accept_prob
            if self.inputs.checks and not output.in_blocks:
                self._note(rule, NO_PROBABILITIES, no_probabilities(accept_prob, self.tree))
            self.p_draft = rule.put(accept_prob.to(self.p_draft.dtype), self.p_draft)
        if output.logit_bias is None and output.log_r is None:  # p
            return
        if self.cost is None:
            self.cost = torch.zeros(self.tree.tokens.shape, dtype=wide(self.device), device=self.device)
        if output.logit_bias is not None:
            if self.inputs.checks:
                self._note(rule, IS_NAN.format("logit_bias"), output.logit_bias.isnan() & self.tree.is_draft)
            applies, r, cost = biased(self.inputs, output.logit_bias, output.applies)
            if output.log_r is not None:  # which holds where nodes are drawn below, and the bias elsewhere
                applies = torch.where(self.inputs.has_drawn_below, output.applies, applies)
            self.r_draft, self.cost = rule.put(r, self.r_draft), rule.put(cost, self.cost)
        self.applies = rule.put(applies, self.applies)
        if output.log_r is not None:
            self._add_dense(output.log_r, rule)

    def _note(self, rule: _RuleOutput, what: str, wrong: Tensor) -> None:
        self.inputs.noted.append((what, rule.put(wrong, torch.zeros_like(wrong))))

    def _add_dense(self, log_r: VocabFunction, rule: _RuleOutput) -> None:
        """Evaluate a dense distribution, and take over its probabilities of drafts and its costs where it holds."""
        holds = rule.output.dense_at
        at = VocabRows.every(self.inputs, None if rule.mask is None else rule.rows)
        at = at.subset(functional.host_nonzero(at.of(self.applies if holds is None else self.applies & holds)))
        if not len(at.rows):
            return
        at = at.reduced() if rule.output.is_reducible else at
        dense = _Dense.of(at, _checked_rows(log_r(at), at), holds)
        r_draft, cost = (self._dense_greedy if self.inputs.greedy else self._dense_sampled)(dense)
        self.r_draft = torch.where((dense.parent_number >= 0) & self.tree.is_draft, r_draft, self.r_draft)
        assert self.cost is not None
        if self.inputs.checks:
            self._note(rule, NO_NUMBERS, dense.at.spread(cost.isnan(), 0) & (dense.number >= 0))
        self.cost = torch.where(dense.number >= 0, dense.at.spread(cost.to(self.cost.dtype), 0), self.cost)

    def _dense_greedy(self, dense: _Dense) -> tuple[Tensor, Tensor]:
        """Note the tokens of a dense distribution at temperature 0. Results as from _dense_sampled()."""
        at, (best, token) = dense.at, dense.log_r.max(-1)  # NaN counts as the largest
        pair = at.scores.gather(1, torch.stack([at.of(self.inputs.likeliest), token], 1))
        self.r_token = self.r_token.index_put((at.rows, at.nodes), token)
        cost = torch.where(best.isnan(), math.nan, (pair[:, 0] - pair[:, 1]).clamp_min(0.0))
        return self.tree.tokens == self.inputs.at_parents(self.r_token), cost

    def _dense_sampled(self, dense: _Dense) -> tuple[Tensor, Tensor]:
        """Keep a dense distribution above temperature 0 for the token after the path.

        Returns:
            [B, N] probability of each draft below its contexts; [R] the costs of these.
        """
        inputs, at, number = self.inputs, dense.at, dense.number
        r, cost, residual = emitted(dense.log_r, at)
        r_draft = at.of_drafts(r, dense.parent_number.clamp_min(0)).to(self.r_draft.dtype)
        if inputs.sampled:
            assert residual is not None
            r_draft = inputs.accept_prob_under(r_draft, r_draft.log(), at.spread(residual.to(r_draft.dtype), 0))
        self.r_row = torch.where(number >= 0, number + sum(len(each) for _, each in self.dense), self.r_row)
        self.dense.append((at, r))
        return r_draft, cost

    def verdict(self) -> Verdict:
        """Walk all trees."""
        if self.tree.parents.shape[1] == 1:
            return self._undrafted()
        lossy = self.lossy()
        fields, end = accepted_path(self.p_draft, self.r_draft, lossy, self.cost, self._final_is_dense(), self.inputs)
        fields["tokens"] = fields["tokens"].scatter(1, fields["accepted"][:, None], self._final(end, lossy))
        return Verdict(**fields, proposers=self.tree.proposers, faults=self._faults())

    def lossy(self) -> Tensor:
        """Return which contexts have the rule's distribution, [B, N] bool; others have p."""
        if self.budget is None or self.cost is None:
            return self.applies
        return self.applies & affordable(self.inputs, self.cost.masked_fill(~self.applies, 0.0), self.budget)

    def _final(self, end: Tensor, lossy: Tensor) -> Tensor:
        """Draw the token after the path, [B, 1]: none of the drafts at the path's end ``end`` [B, 1]."""
        inputs = self.inputs
        if inputs.greedy and self.cost is None:
            return inputs.likeliest.gather(1, end)
        if inputs.greedy:
            return torch.where(lossy.gather(1, end), self.r_token.gather(1, end), inputs.likeliest.gather(1, end))
        uniforms = inputs.uniforms(TOKEN).gather(1, end)[:, 0]
        token = sampling.draw_rest(self._rest(end, lossy.gather(1, end)), uniforms)[:, None]
        is_left = token < inputs.round.scores.shape[-1]  # all may round to 0
        return torch.where(is_left, token, inputs.likeliest.gather(1, end))

    def _rest(self, end: Tensor, is_lossy: Tensor) -> sampling.Rest:
        """Return the distribution of the token after a path that ends at ``end`` [B, 1], above temperature 0.

        ``is_lossy``: [B, 1] bool; whether the distribution there is a rule's own.
        """
        inputs, tree = self.inputs, self.tree
        scores, nodes = (self._dense_scores(end, is_lossy), end * 0) if self.dense else (inputs.round.scores, end)
        weight, q_index = torch.ones_like(end, dtype=torch.float), None
        if inputs.sampled:  # a drawn draft may have been refused
            q_index = tree.q_index.masked_fill(~inputs.has_drawn_child, -1).gather(1, end)
        for rule in self.outputs:
            test = rule.output.test
            if test is not None and test.weight is not None:
                weight = rule.put(test.weight.gather(1, end).masked_fill(is_lossy, 1.0), weight)
            elif test is not None and q_index is not None:
                q_index = rule.put(q_index.masked_fill(~is_lossy, -1), q_index)
        # the path ends here, so these children were not picked
        refused = tree.tokens.masked_fill(~tree.is_draft | (tree.parents != end), -1)
        index = None if q_index is None else q_index[:, 0]
        ids = tree.draft_ids, inputs.draft_index if inputs.sampled else None
        return sampling.Rest(scores, nodes[:, 0], weight[:, 0], refused, tree.q_scores, index, *ids)

    def _dense_scores(self, end: Tensor, is_lossy: Tensor) -> Tensor:
        """Return ln of the distributions [B, 1, V] at contexts ``end`` [B, 1]. ``is_lossy``: as for :meth:`_rest`."""
        at = VocabRows(self.inputs, torch.arange(len(end), device=self.device), end[:, 0])
        r, r_row = at.p, self.r_row.gather(1, end)
        for contexts, dense in self.dense:  # whose rows are numbered on from one to the next
            is_here = is_lossy & (r_row >= 0) & (r_row < len(dense))
            r = torch.where(is_here, contexts.over_all(dense, r_row[:, 0].clamp(0, len(dense) - 1), at.p), r)
            r_row = r_row - len(dense)
        return r.log()[:, None]

    def _final_is_dense(self) -> Tensor:
        """Return whether a lossy token after the path counts as one that p would not emit, [B, 1] bool."""
        is_dense = torch.zeros_like(self.tree.is_draft[:, :1])
        for rule in self.outputs:
            if rule.output.log_r is not None and not self.inputs.sampled:
                is_dense = rule.put(torch.ones_like(is_dense), is_dense)
        return is_dense

    def _faults(self) -> dict[str, Tensor]:
        """Return what may be wrong with the round, see :attr:`Verdict.faults`."""
        inputs, tree, faults = self.inputs, self.tree, dict(self.non_finite)
        for what, wrong in inputs.noted:
            faults[what] = wrong | faults.get(what, False)
        if inputs.is_chain and self.outputs:
            faults[sampling.FORKS] = (tree.is_child.sum(-1) > 1).any(1, keepdim=True)
        return faults

    def _undrafted(self) -> Verdict:
        """Return the verdict on trees of only a root: a token from p each."""
        zeros = torch.zeros_like(self.tree.parents)  # [B, 1]
        never, nats = zeros > 0, torch.zeros(zeros.shape, dtype=wide(self.device), device=self.device)
        return Verdict(
            path=zeros,
            accepted=zeros[:, 0],
            tokens=self._final(zeros, never),
            sources=zeros,
            relaxed=never,
            spent=nats,
            first_choices=zeros - 1,
            logprob_gap=torch.full_like(nats, math.nan),
            faults=self._faults(),
        )
