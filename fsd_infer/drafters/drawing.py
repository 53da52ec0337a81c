"""Draw nodes of a tree from q: at temperature 1, trees of likely tokens alone miss what the target is likely to say.

**The mixed scheme** (arXiv:2502.18779). A context has the likeliest tokens C as fixed children, and one child y drawn
from q_r, the rest of q: q outside C, normalised. The exact rule accepts a child with probability p(C) + Σ min(p, q_r),
the sum outside C, which is the most that any test of such a draft reaches. Without a drawn child it is p(C).

**Why the output keeps the target's distribution.** The test of y assumes y ~ q_r, whatever the rest of the tree looks
like. So a context's draw is decided before it is made: C, and that the context, its ancestors and y will be verified.
All of that is a function of the text and of draws further up. What is decided after the draw is free: which nodes to
expand, when to stop, and which of the other nodes to verify. None of it changes y, and a token of C that is not
verified is emitted by the same draw from (p - q_r)+ as one that is.

**Which contexts draw.** A node is worth verifying if it is accepted with probability ``min_accept_prob`` or more. Let
ρ be the probability that the target accepts a draw from q_r. Measured with the shipped head, ρ hardly depends on C and
is about 0.2 + 0.75·max q. A likely token c is accepted with probability p(c), about κ·q(c); left to the draw, it would
add ρ·q(c). So c is fixed if (κ - ρ)·q(c), times the probability that the context is accepted, is enough, and the
context draws if ρ times the rest of q is. Where the drafter is sure, one drawn child is enough.
:class:`AcceptanceRatios` begins with κ = 1 and this ρ, and learns both by temperature and depth from what earlier
rounds accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsd_core import functional, sampling
from fsd_infer.trees.tree import DraftTree

MIN_RATIO = 0.1  # whatever was learned: without drafts of a kind nothing more would be learned
WINDOW = 60.0  # of the running averages, in expected acceptances, and the weight of the prior ratio, 1


class AcceptanceRatios:
    """Running ratios of accepted to expected drafts, for likely and for drawn ones, each at roots and below.

    All are 1 at first. Only the past decides, so draws are independent of it.
    """

    def __init__(self) -> None:
        self._accepted, self._expected = [WINDOW] * 4, [WINDOW] * 4

    def ratio(self, drawn: bool, depth: int) -> float:
        """Return the ratio for children of contexts at a depth, 0 at roots."""
        kind = 2 * drawn + (depth > 0)
        return max(self._accepted[kind] / self._expected[kind], MIN_RATIO)

    def learn(self, sums: Sequence[float]) -> None:
        """Learn from sums over the contexts that a round reached, as :func:`accepted_and_expected` gives them."""
        for kind in range(4):
            accepted, expected = sums[2 * kind : 2 * kind + 2]
            expected /= self.ratio(True, kind % 2) if kind > 1 else 1.0  # drawn ones: drafted with the ratio applied
            decay = 1.0 - expected / WINDOW if expected < WINDOW else 0.0
            self._accepted[kind] = self._accepted[kind] * decay + accepted
            self._expected[kind] = self._expected[kind] * decay + expected


@functional.replaceable
def accepted_and_expected(path: Tensor, accepted: Tensor, tree: DraftTree) -> Tensor:
    """Count the first drafter's accepted and expected drafts below the contexts that a round reached: [B, 8].

    The columns are likely ones at roots, likely ones below, then drawn ones; of each the accepted, then the expected.

    Args:
        path: [B, D+1] the accepted path, padded with its last node.
        accepted: [B] its drafts, -1 in rows that are finished.
        tree: the verified tree.
    """
    reached = torch.zeros_like(tree.is_draft).scatter(1, path, True) & (accepted >= 0)[:, None]
    accept_prob = (tree.scores - tree.scores.gather(1, tree.parents)).exp()  # each draft's, given its parent
    tested = tree.is_draft & reached.gather(1, tree.parents)
    if tree.proposers is not None:
        tested = tested & (tree.proposers == 0)
    kinds = (tree.depths > 1).long() if tree.drawn is None else 2 * tree.drawn + (tree.depths > 1)  # [B, N]
    of_nodes = torch.stack([reached.float(), accept_prob], -1).masked_fill(~tested[..., None], 0.0)  # [B, N, 2]
    sums = of_nodes.new_zeros(len(kinds), 4, 2)
    return sums.scatter_add(1, kinds[..., None].expand_as(of_nodes), of_nodes).flatten(1)


class Drawing:
    """The draws of one round.

    Args:
        process: the request's processors that do not depend on ids, [..., Vd] to [..., Vd]; None if there are none.
        generator: random generator of the draws; None: torch's global one.
        nodes: drafts that each tree may have.
        min_accept_prob: a node that is accepted with a smaller probability is not worth verifying.
        ratios: learned ratios; None: 1.

    Attributes:
        scores: [B, E, Vd] of each depth, the distributions from which children are drawn.
        fixed: [B, E, w] of each depth, the entries of the fixed children; -1: none.
    """

    def __init__(
        self,
        process: Callable[[Tensor], Tensor] | None,
        generator: torch.Generator | None,
        nodes: int,
        min_accept_prob: float,
        ratios: AcceptanceRatios | None = None,
    ) -> None:
        self.ratios = ratios or AcceptanceRatios()
        self.process, self.generator, self.nodes = process, generator, nodes
        self.min_log_prob = math.log(min_accept_prob)
        self.scores: list[Tensor] = []
        self.fixed: list[Tensor] = []
        self._reserved: Tensor | None = None  # [B, n] expanded nodes that will be verified in any case
        self._free_nodes: Tensor | None = None  # [B] how many of ``nodes`` are not reserved

    def expand(self, drawn: Tensor) -> None:
        """Note which of the nodes that are expanded next were drawn, [B, E]: these are reserved already."""
        assert self._reserved is not None, "roots were expanded first"
        self._reserved = torch.cat([self._reserved, drawn], 1)

    def propose(
        self, logits: Tensor, accept_log_probs: Tensor, ancestors: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Propose children of the nodes that were expanded last.

        Args:
            logits: [B, E, Vd] of the drafter at these nodes.
            accept_log_probs: [B, E] estimated log-probability that each is accepted.
            ancestors: [B, E, n] which expanded nodes are each one's ancestors or itself, the root excluded.
            width: w, most children of a node.

        Returns:
            [B, E, w] each: ln q of the candidates, -inf for none, the drawn one last; their entries of the drafter's
            vocabulary; whether they were drawn.
        """
        scores = logits if self.process is None else self.process(logits.float())
        reserved, free_nodes = self._reserved, self._free_nodes
        if reserved is None or free_nodes is None:
            reserved = ancestors[:, 0]
            free_nodes = torch.full(ancestors.shape[:1], self.nodes, device=ancestors.device)
        depth = len(self.scores)
        ratios = self.ratios.ratio(False, depth), self.ratios.ratio(True, depth)
        children = sampling.mixed_children(
            scores, width, accept_log_probs, ancestors, reserved, free_nodes, ratios, self.min_log_prob
        )
        self._reserved, self._free_nodes = children.reserved, children.free_nodes
        self.scores.append(children.outside)
        self.fixed.append(children.fixed)
        draws = children.drawn[..., -1]
        last = torch.where(draws, drawn_entries(children.outside, draws, self.generator), children.entries[..., -1])
        children.entries[..., -1] = last
        return children.log_q, children.entries, children.drawn


class ChainDrawing:
    """The draws of one round in which every draft is drawn from q. Arguments and attributes are those of Drawing."""

    def __init__(self, process: Callable[[Tensor], Tensor] | None, generator: torch.Generator | None) -> None:
        self.process, self.generator = process, generator
        self.scores: list[Tensor] = []

    def propose(
        self, logits: Tensor, accept_log_probs: Tensor, ancestors: Tensor, width: int
    ) -> tuple[Tensor, Tensor, None]:
        """Draw a child of each node that was expanded last: ln q before the processors, its entry, [B, E, 1] each."""
        logits = logits.float()
        scores = logits if self.process is None else self.process(logits)
        self.scores.append(scores)
        entries = drawn_entries(scores, torch.ones_like(accept_log_probs, dtype=torch.bool), self.generator)[..., None]
        return logits.gather(-1, entries) - functional.row_stats(logits)[2][..., None], entries, None


def drawn_entries(scores: Tensor, draws: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw an entry of the rows ``draws`` [B, E] of scores [B, E, Vd]: [B, E], arbitrary in other rows."""
    uniforms = torch.rand(draws.shape, generator=generator, device=scores.device)
    return sampling.sample_rows(scores, uniforms, draws)
