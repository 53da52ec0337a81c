"""The distribution from which a rule emits the next token, over the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from fsd_infer.rules import OutputDistribution, RuleInputs, VocabRows
from fsd_infer.rules.distributions import biased


def output_probs(output: OutputDistribution, inputs: RuleInputs) -> Tensor:
    """r [B, N, V] at every context, without regard to budgets; above temperature 0."""
    at, applies, tree = VocabRows.every(inputs), output.applies, inputs.tree
    r = p = at.log_p.double().exp().unflatten(0, applies.shape)
    where = output.dense_at
    if output.logit_bias is not None:
        at_bias, of_drafts, _ = biased(inputs, output.logit_bias, applies)
        applies = at_bias if where is None else torch.where(where, applies, at_bias)
        rows, drafts = tree.is_draft.nonzero(as_tuple=True)
        index = rows, tree.parents[rows, drafts], tree.tokens[rows, drafts]
        others = p.index_put(index, p.new_zeros(()))  # the other tokens share what the drafts leave, in proportion to p
        left = (1.0 - inputs.sum_children(of_drafts.double())).clamp_min(0.0)
        r = others * (left / others.sum(-1).clamp_min(1e-300))[..., None]
        r = r.index_put(index, of_drafts[rows, drafts].double())
    if output.log_r is not None:
        dense = output.log_r(at).softmax(-1).view_as(p).double()
        r = dense if where is None else torch.where(where[..., None], dense, r)
    return torch.where(applies[..., None], r, p)
