"""What a rule sees: the contexts of a round at which it is asked for a law."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsd_infer.cpu import ops
from fsd_infer.device.transfer import wide
from fsd_infer.divergence import Divergence, divergence, expand_draft
from fsd_infer.errors import FsdError, NonFiniteLogitsError
from fsd_infer.rules.texts import Texts, known, known_tokens
from fsd_infer.rules.verification import Verification

T = TypeVar("T")

_TARGETS, _PROCESSED, _DRAFTERS = "the target's logits", "the target's processed logits", "the drafter's logits"


class Evidence:
    """A round's evidence, checked, with what several contexts share.

    Args:
        round: the evidence.
        at_once: all nodes are asked for, and nothing may wait for the device.
    """

    def __init__(self, round: Verification, at_once: bool) -> None:
        self.round = round
        self.tree = round.tree
        self.greedy = round.greedy
        self.sampled = round.tree.sampled and not round.greedy  # at temperature 0 drafts are what they are
        self.at_once = at_once
        self._made: dict[Hashable, Any] = {}
        if round.uniforms is None and not round.greedy:
            raise FsdError("a round at temperature above 0 needs uniforms [B, N, 3]; pass them in Verification.")

    @cached_property
    def whole(self) -> Contexts:
        """All nodes of all rows, in order."""
        return self.all_nodes_of(torch.arange(self.tree.tokens.shape[0], device=self.tree.tokens.device), whole=True)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """See :meth:`Contexts.once_per_round`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def all_nodes_of(self, rows: Tensor, whole: bool = False) -> Contexts:
        """All nodes of these rows, in order."""
        count = self.tree.tokens.shape[1]
        nodes = torch.arange(count, device=rows.device).repeat(rows.shape[0])
        return Contexts(self, rows[:, None].expand(-1, count).flatten(), nodes, whole)

    @cached_property
    def _maxima(self) -> tuple[Tensor, Tensor]:
        return ops.row_maxima(self.round.scores)

    @property
    def highest(self) -> Tensor:
        """[B, N] the target's largest processed score, NaN if there is one."""
        return self._maxima[0]

    @property
    def best(self) -> Tensor:
        """[B, N] its token, the first of equals."""
        return self._maxima[1]

    @cached_property
    def is_child(self) -> Tensor:
        """[B, N, N] bool; is node j a child of node i, and no padding."""
        tree = self.tree
        nodes = torch.arange(tree.parents.shape[1], device=tree.parents.device)
        found = (tree.parents[:, None, :] == nodes[:, None]) & (nodes > 0)
        if tree.rows is not None and tree.scores is not None:  # only trees made of rows have padding
            found = found & (tree.scores > -math.inf)[:, None]
        return found

    @cached_property
    def draft_scores(self) -> Tensor:
        """[B, I, V] processed drafter logits; at temperature 0 raw ones."""
        tree = self.tree
        if not self.greedy:
            if tree.q_scores is not None:
                return tree.q_scores
            if self.round.process_draft is not None:
                return self.round.process_draft(tree)
        return expand_draft(tree.q_logits, tree.draft_ids, self.round.logits.shape[-1])

    @cached_property
    def regret(self) -> Tensor:
        """[B, N] how far the processed score of each node's token is below the largest at its parent, at least 0."""
        tree, scores = self.tree, self.round.scores
        own = scores.flatten(1).gather(1, tree.parents * scores.shape[-1] + tree.tokens).float()
        return (self.highest.gather(1, tree.parents) - own).clamp_min(0.0)

    @cached_property
    def log_p(self) -> Tensor:
        """[B, N] ln p of each node's token at its parent; of no meaning at the root."""
        tree = self.tree
        if self.at_once:
            largest = self.whole.log_p_max.view(tree.tokens.shape)
        else:  # inner nodes only: a pass over V each
            scores = self.round.scores.flatten(0, 1)
            inner = self.is_child.any(-1).flatten().nonzero().squeeze(-1)
            highest, _, total = ops.row_statistics(scores, inner)
            largest = scores.new_zeros(scores.shape[0], dtype=torch.float32).index_copy_(0, inner, highest - total)
            largest = largest.view(tree.tokens.shape)
        return largest.gather(1, tree.parents) - self.regret

    def _largest(self) -> dict[str, Tensor]:
        """The largest logits, by whose they are: [B, N] at every node, of the drafter [B, I]."""
        round = self.round
        found = {_TARGETS: self.highest}
        if round.scores is not round.logits:
            found = {_TARGETS: ops.row_maxima(round.logits)[0], _PROCESSED: self.highest}
        if self.tree.q_logits.shape[1]:
            found[_DRAFTERS] = ops.row_maxima(self.tree.q_logits)[0]
        return found

    def unfit(self) -> dict[str, Tensor]:
        """Where logits are no distribution, [B, N] bool, by whose they are."""
        wrong = {who: ~largest.isfinite() for who, largest in self._largest().items()}
        if _DRAFTERS in wrong:  # rows that no node points to may hold anything
            index = self.tree.q_index
            wrong[_DRAFTERS] = wrong[_DRAFTERS].gather(1, index.clamp_min(0)) & (index >= 0)
        return wrong

    def check(self) -> None:
        """Raise NonFiniteLogitsError for logits that are no distribution. Waits for the device."""
        numbers = (number for largest in self._largest().values() for number in largest.flatten().tolist())
        if not all(map(math.isfinite, numbers)):  # few numbers: sooner done here than by tensors
            for who, wrong in self.unfit().items():
                refuse(who, wrong.tolist())


def refuse(who: str, unfit: list[list[float]]) -> None:
    """Raise NonFiniteLogitsError if any of ``unfit`` [B][N], a part of :meth:`Evidence.unfit`, is true."""
    row = next((row for row, nodes in enumerate(unfit) if any(nodes)), None)
    if row is not None:
        fix = (
            "Check the request's logits processors."
            if who == _PROCESSED
            else "Check its weights and dtype (fp16 overflows; bf16 or fp32 do not)."
        )
        raise NonFiniteLogitsError(f"{who} in row {row} are NaN, +inf or all -inf. {fix}")


class Contexts:
    """R contexts at which a rule is asked for its law: node ``nodes[r]`` of the tree of row ``rows[r]``.

    Every quantity is defined at each of them. ``p`` is the processed target, ``q`` the distribution that proposed the
    children; both are what the next token would be drawn from, so at temperature 0, where draws are argmaxes, ``p`` has
    the request's processors but no temperature, and ``q`` is raw. Nothing is computed before it is asked for.

    Attributes:
        tree: all trees of the batch, [B, N].
        rows, nodes: [R] int64.
        greedy: temperature 0.
        sampled: the children were sampled from q (a chain). A law may then not depend on which they are.
    """

    def __init__(self, evidence: Evidence, rows: Tensor, nodes: Tensor, whole: bool = False) -> None:
        self._evidence, self._round = evidence, evidence.round
        self._whole = whole  # all nodes of all rows in order: views instead of copies
        self.tree, self.greedy, self.sampled = evidence.tree, evidence.greedy, evidence.sampled
        self.rows, self.nodes = rows, nodes

    def _at(self, values: Tensor) -> Tensor:
        """[B, N, ...] -> [R, ...]"""
        return values.flatten(0, 1) if self._whole else values[self.rows, self.nodes]

    # the target ----------------------------------------------------------------------------------------------------

    @cached_property
    def logits(self) -> Tensor:
        """[R, V] the target's raw logits, fp32."""
        return self._at(self._round.logits).float()

    @cached_property
    def scores(self) -> Tensor:
        """[R, V] the same after the request's processors: ln p up to a constant."""
        return self.logits if self._round.scores is self._round.logits else self._at(self._round.scores).float()

    @cached_property
    def log_p(self) -> Tensor:
        """[R, V]"""
        return self.scores.log_softmax(-1)

    @cached_property
    def p(self) -> Tensor:
        """[R, V]"""
        return self.scores.softmax(-1)

    @cached_property
    def likeliest(self) -> Tensor:
        """[R] the target's likeliest token, the first of equals."""
        return self._at(self._evidence.best)

    @cached_property
    def log_p_max(self) -> Tensor:
        """[R] ln p of it."""
        if self.greedy and not self._evidence.at_once:  # no token is drawn from p: one pass of our kernels, and no copy
            which = self.rows * self.tree.tokens.shape[1] + self.nodes
            highest, _, total = ops.row_statistics(self._round.scores.flatten(0, 1), which)
            return highest - total
        return self.p.amax(-1).log()

    # the drafter ---------------------------------------------------------------------------------------------------

    @cached_property
    def has_q(self) -> Tensor:
        """[R] bool; are there children and is the distribution that proposed them known (n-gram lookup has none)."""
        return self._at(self.tree.q_index) >= 0

    @cached_property
    def q_logits(self) -> Tensor:
        """[R, Vd] the drafter's raw logits over its own vocabulary, to be read only where ``has_q``."""
        return self._draft_at(self.tree.q_logits)

    @cached_property
    def q_scores(self) -> Tensor:
        """[R, V] ln q up to a constant, over the target's vocabulary; that of p where no q is known."""
        if not self.tree.q_logits.shape[1]:
            return self.scores
        scores = self._evidence.draft_scores
        whole = self.q_logits if scores is self.tree.q_logits else self._draft_at(scores)
        return torch.where(self.has_q[:, None], whole, self.scores)

    @cached_property
    def q(self) -> Tensor:
        """[R, V]"""
        return self.q_scores.softmax(-1)

    def _draft_at(self, values: Tensor) -> Tensor:
        """[B, I, ...] -> [R, ...] in fp32."""
        return values[self.rows, self._at(self.tree.q_index).clamp_min(0)].float()

    def divergence(self, measure: str | Divergence, processed: bool = False) -> Tensor:
        """[R] D(p, q), infinite where no q is known.

        Args:
            measure: see :mod:`fsd_infer.divergence`.
            processed: of the distributions after the request's processors instead of the raw ones. At temperature 0
                processed ones are one-hot, and raw ones are compared in any case.
        """
        measure, tree = divergence(measure), self.tree
        if not tree.q_logits.shape[1]:
            return torch.full(self.rows.shape, math.inf, device=self.rows.device)
        if not self._evidence.at_once and not bool(self.has_q.all()):
            index = self.has_q.nonzero().squeeze(-1)
            found = torch.full(self.rows.shape, math.inf)
            if index.shape[0]:
                some = Contexts(self._evidence, self.rows[index], self.nodes[index])
                found.index_copy_(0, index, some.divergence(measure, processed))
            return found
        if processed and not self.greedy:
            found = measure(self.scores, self.q_scores)
        elif self._whole:  # what else asks for these has them in fp32 already
            found = measure.with_reduced_drafter(self.logits, self.q_logits, tree.draft_ids)
        else:
            q_index = self._at(tree.q_index).clamp_min(0)
            which = self.rows * tree.tokens.shape[1] + self.nodes, self.rows * tree.q_logits.shape[1] + q_index
            pair = self._round.logits.flatten(0, 1), tree.q_logits.flatten(0, 1)
            found = measure.with_reduced_drafter(*pair, tree.draft_ids, which)
        return found.masked_fill(~self.has_q, math.inf)

    # the drafts ----------------------------------------------------------------------------------------------------

    @cached_property
    def children(self) -> Tensor:
        """[R, N] bool; which nodes of the row's tree are children of the context."""
        return self._at(self._evidence.is_child)

    @cached_property
    def has_children(self) -> Tensor:
        """[R] bool"""
        return self.children.any(-1)

    @cached_property
    def draft(self) -> Tensor:
        """[R] token of the first child, of a sampled chain the only one; of no meaning without children."""
        first = self.children.int().argmax(-1, keepdim=True)
        return self.tree.tokens[self.rows].gather(1, first).squeeze(-1)

    @cached_property
    def regret(self) -> Tensor:
        """[R, N] ln p of the likeliest token less ln p of each child's, at least 0; infinite at other nodes."""
        return self.of_children(self.node_regret, math.inf)

    @cached_property
    def child_log_p(self) -> Tensor:
        """[R, N] ln p of each child's token, -inf at other nodes."""
        return self.log_p_max[:, None] - self.regret

    @cached_property
    def child_mass(self) -> Tensor:
        """[R] p(C), the probability of the children together, in the device's widest type."""
        return self.child_log_p.to(wide(self.rows.device)).exp().sum(-1).clamp_max(1.0)

    @property
    def whole(self) -> Contexts:
        """All nodes of all rows of the batch, in order: R = B·N. For work that :meth:`once_per_round` does."""
        return self._evidence.whole

    @property
    def node_regret(self) -> Tensor:
        """[B, N] of every node of the trees: ln p of the likeliest token at its parent less ln p of its own there."""
        return self._evidence.regret

    @property
    def node_log_p(self) -> Tensor:
        """[B, N] of every node of the trees: ln p of its token at its parent."""
        return self._evidence.log_p

    @property
    def is_draft(self) -> Tensor:
        """[B, N] bool; every node of the trees but roots and padding."""
        return self._evidence.is_child.any(1)

    @property
    def overspent(self) -> Tensor | None:
        """[B] nats that each row has spent beyond what its rule allowed so far; None where that is not known."""
        return self._round.overspent

    def once_per_round(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` made when this was first called with ``key`` in this round: for work on whole trees."""
        return self._evidence.once(key, make)

    def of_children(self, values: Tensor, other: float = 0.0) -> Tensor:
        """Values of nodes [B, N] -> [R, N], those of each context's children, ``other`` elsewhere."""
        return values[self.rows].masked_fill(~self.children, other)

    # chance, and the text ------------------------------------------------------------------------------------------

    @property
    def coin(self) -> Tensor:
        """[R] a uniform number in [0, 1) of each context's own, for rules that act at random."""
        return self.uniform(2)

    def uniform(self, column: int) -> Tensor:
        """[R] a column of the uniforms; 0 and 1 are what tokens are drawn by."""
        if self._round.uniforms is None:
            raise FsdError("this rule draws at random at every temperature; pass uniforms [B, N, 3] in Verification.")
        return self._at(self._round.uniforms[..., column])

    def node_known(self, n: int) -> Tensor:
        """[B, N] bool; would the node's token complete an n-gram that prompt, answer and its path already have."""
        return self.once_per_round(("known", n), lambda: known(self.texts, self.tree, n))

    def known_tokens(self, n: int) -> Tensor:
        """[R, V] bool; the same of every token, drafted or not, as the next of each context."""
        return known_tokens(self.texts, self.tree, self.rows, self.nodes, n, self._round.scores.shape[-1])

    @property
    def texts(self) -> Texts:
        """Prompt and answer so far of each row of the batch. Raises FsdError if the round came without them."""
        if self._round.texts is None:
            raise FsdError("this rule looks at prompt and answer; pass texts in Verification.")
        return self._round.texts
