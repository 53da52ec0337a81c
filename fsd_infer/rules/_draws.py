"""Drawing tokens over the whole vocabulary: what is emitted where a law is the target's, and from dense laws."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_infer.device.transfer import wide
from fsd_infer.divergence import divergence
from fsd_infer.rules.contexts import Contexts
from fsd_infer.rules.laws import Acceptance, Law


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row by inverse CDF: weights [R, M] >= 0 (any positive total), uniforms [R] in [0, 1) -> [R].

    The index is the first whose cumulative weight exceeds the uniform's share of the total, so an index of weight 0 is
    never returned. fp64, where the device has it, keeps the sum over a large vocabulary exact enough.
    """
    cdf = weights.cumsum(-1, dtype=wide(weights.device))
    total = cdf[:, -1]
    share = torch.minimum(uniforms.to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, share[:, None], right=True).squeeze(-1)


@dataclass
class Drawn:
    """Tokens of R contexts, drawn before it is known which of them are visited and what a budget allows.

    Attributes:
        closed: [R] the token if the law is the target's.
        opened: [R] the token of a dense law.
        cost: [R] nats that the dense law costs.
        exact: [R] bool; would the exact rule accept the sampled draft. None where nothing was sampled.
    """

    closed: Tensor
    opened: Tensor | None = None
    cost: Tensor | None = None
    exact: Tensor | None = None


def drawn(at: Contexts, law: Law) -> Drawn:
    """The tokens of ``law``; children with a bonus are left to the walk."""
    if at.greedy:
        made = Drawn(at.likeliest)
        if law.log_r is not None:
            made.opened = law.log_r.argmax(-1)
            pair = torch.stack([made.closed, made.opened], 1)
            score = at.scores.gather(1, pair)
            made.cost = (score[:, 0] - score[:, 1]).clamp_min(0.0)
        return made
    if at.sampled:
        exact = _accepts(at, at.p)
        if law.closed_acceptance is None:
            made = Drawn(_tested(at, exact, _excess(at, at.p)), exact=exact)
        else:
            made = Drawn(_tested_by(at, law.closed_acceptance), exact=exact)
    else:
        made = Drawn(draw(at.p, at.uniform(0)))
    if law.log_r is not None:
        r = law.log_r.softmax(-1)
        if not at.sampled:
            made.opened = draw(r, at.uniform(0))
        elif law.acceptance is None:
            made.opened = _tested(at, _accepts(at, r), _excess(at, r))
        else:
            made.opened = _tested_by(at, law.acceptance)
        made.cost = divergence("kl_qp")(at.scores, law.log_r)
    return made


def _accepts(at: Contexts, r: Tensor) -> Tensor:
    """Does the draft x pass the speculative test u < r(x)/q(x): [R] bool, False without children."""
    draft = at.draft[:, None]
    r_x, q_x = (values.gather(1, draft).squeeze(-1) for values in (r, at.q))
    return ((at.uniform(0) * q_x < r_x) | (r_x >= q_x)) & at.has_q


def _excess(at: Contexts, r: Tensor) -> Tensor:
    """[R, V] weights of (r - q)+, or r where rounding left nothing."""
    weights = (r - at.q).clamp_min(0.0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, r)


def _tested_by(at: Contexts, acceptance: Acceptance) -> Tensor:
    return _tested(at, (at.uniform(0) < acceptance.chance) & at.has_q, acceptance.rest)


def _tested(at: Contexts, accepted: Tensor, rest: Tensor) -> Tensor:
    """[R] the draft where it is accepted, else a token drawn from ``rest`` [R, V]; y ~ p where there is no draft."""
    weights = torch.where(at.has_q[:, None], rest, at.p)
    found = draw(weights, torch.where(at.has_q, at.uniform(1), at.uniform(0)))
    return torch.where(accepted, at.draft, found)
