"""What a rule sees of a round: draws, the evidence of both models, and the contexts where it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fsd_infer.cpu import ops
from fsd_infer.device.transfer import wide
from fsd_infer.divergence import expand_draft
from fsd_infer.errors import FsdError, NonFiniteLogitsError
from fsd_infer.rules.base import Verification


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row by inverse CDF: weights [R, M] >= 0 (any positive total), uniforms [R] in [0, 1) -> [R].

    The index is the first whose cumulative weight exceeds the uniform's share of the total, so an index of weight 0 is
    never returned. fp64, where the device has it, keeps the sum over a large vocabulary exact enough.
    """
    cdf = weights.cumsum(-1, dtype=wide(weights.device))
    total = cdf[:, -1]
    share = torch.minimum(uniforms.to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, share[:, None], right=True).squeeze(-1)


def _top(scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """The largest number of each row [..., V], NaN if there is one, and, where one pass finds both, its index."""
    if scores.device.type != "cpu" or ops.kernel_kind() is None:
        return scores.amax(-1), None
    return ops.row_maxima(scores)


class Evidence:
    """A round's evidence, checked, with what several contexts share."""

    def __init__(self, round: Verification) -> None:
        self.round = round
        self.tree = round.tree
        self.greedy = round.greedy
        self.sampled = round.tree.sampled and not round.greedy  # at temperature 0 drafts are what they are
        if round.uniforms is None and not round.greedy:
            raise FsdError("a round at temperature above 0 needs uniforms [B, N, 3]; pass them in Verification.")
        self.highest, self.best = _top(round.scores)

    @cached_property
    def is_child(self) -> Tensor:
        """[B, N, N] bool; is node j a child of node i."""
        parents = self.tree.parents
        index = torch.arange(parents.shape[1], device=parents.device)
        return (parents[:, None, :] == index[:, None]) & (index > 0)

    @cached_property
    def draft_scores(self) -> Tensor:
        """[B, I, V] processed drafter logits."""
        if self.tree.q_scores is not None:
            return self.tree.q_scores
        if self.round.process_draft is not None:
            return self.round.process_draft(self.tree)
        return expand_draft(self.tree.q_logits, self.tree.draft_ids, self.round.logits.shape[-1])

    @cached_property
    def child_scores(self) -> Tensor:
        """[B, N] the target's processed score of each node's token at its parent."""
        scores = self.round.scores
        return scores.flatten(1).gather(1, self.tree.parents * scores.shape[-1] + self.tree.tokens)

    def _largest(self) -> dict[str, Tensor]:
        """The largest logits, by whose they are: [B, N] at every node, of the drafter [B, I]."""
        round = self.round
        found = {_TARGETS: self.highest}
        if round.scores is not round.logits:
            found = {_TARGETS: _top(round.logits)[0], _PROCESSED: self.highest}
        if self.tree.q_logits.shape[1]:
            found[_DRAFTERS] = _top(self.tree.q_logits)[0]
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


_TARGETS, _PROCESSED, _DRAFTERS = "the target's logits", "the target's processed logits", "the drafter's logits"


def refuse(who: str, unfit: Sequence[Sequence[float]]) -> None:
    """Raise NonFiniteLogitsError if any of ``unfit`` [B][N], a part of :meth:`Evidence.unfit`, is true."""
    row = next((row for row, nodes in enumerate(unfit) if any(nodes)), None)
    if row is not None:
        mend = (
            "Check the request's logits processors."
            if who == _PROCESSED
            else "Check its weights and dtype (fp16 overflows; bf16 or fp32 do not)."
        )
        raise NonFiniteLogitsError(f"{who} in row {row} are NaN, +inf or all -inf. {mend}")


class Contexts:
    """R contexts at which a rule decides: row ``rows[r]`` of the batch at node ``nodes[r]`` of its tree.

    Attributes:
        whole: these are all nodes of all rows in order. Choosing among them would wait for the device: a rule then
            decides at every one, whatever it holds, and says where that counts.
    """

    def __init__(self, evidence: Evidence, rows: Tensor, nodes: Tensor, whole: bool = False) -> None:
        self.evidence = evidence
        self.greedy = evidence.greedy
        self.sampled = evidence.sampled
        self.rows, self.nodes = rows, nodes
        self.whole = whole

    def select(self, index: Tensor) -> Contexts:
        """The contexts ``index`` [S] of these."""
        count = index.shape[0]
        if count == self.rows.shape[0]:
            return self
        made = Contexts(self.evidence, self.rows[index], self.nodes[index])
        if index.device.type == "cpu" and int(index[-1]) == count - 1:  # the first ones: no copy
            if "logits" in vars(self):
                made.logits = self.logits[:count]
        return made

    def _at(self, values: Tensor) -> Tensor:
        """[B, N, ...] -> [R, ...]"""
        return values.flatten(0, 1) if self.whole else values[self.rows, self.nodes]

    def _draft_at(self, values: Tensor) -> Tensor:
        """[B, I, ...] -> [R, ...], only to be read where ``has_q``."""
        return values[self.rows, self._q_index.clamp_min(0)]

    @cached_property
    def _q_index(self) -> Tensor:
        return self._at(self.evidence.tree.q_index)

    @cached_property
    def logits(self) -> Tensor:
        """[R, V] the target's raw logits."""
        return self._at(self.evidence.round.logits).float()

    @property
    def compared(self) -> tuple[Tensor, Tensor]:
        """Raw logits of which :attr:`compared_rows` are these contexts': the target's [M, V], the drafter's [I, Vd]."""
        if self.whole:  # what else asks for them has them in fp32 already
            return self.logits, self.q_logits
        return self.evidence.round.logits.flatten(0, 1), self.evidence.tree.q_logits.flatten(0, 1)

    @property
    def compared_rows(self) -> tuple[Tensor | None, Tensor | None]:
        """[R] each, None for all in order; the drafter's only to be read where ``has_q``."""
        if self.whole:
            return None, None
        nodes, inner = self.evidence.tree.tokens.shape[1], self.evidence.tree.q_logits.shape[1]
        q_index = self._q_index.clamp_min(0)
        if self.evidence.tree.tokens.shape[0] == 1:
            return self.nodes, q_index
        return self.rows * nodes + self.nodes, self.rows * inner + q_index

    @cached_property
    def best(self) -> Tensor:
        """[R] token of the largest processed score, the first of equals."""
        best = self.evidence.best
        return self.scores.argmax(-1) if best is None else self._at(best)

    @cached_property
    def scores(self) -> Tensor:
        """[R, V] the target's processed scores."""
        round = self.evidence.round
        return self.logits if round.scores is round.logits else self._at(round.scores).float()

    @cached_property
    def p(self) -> Tensor:
        """[R, V] the processed target distribution."""
        return self.scores.softmax(-1)

    @cached_property
    def q_logits(self) -> Tensor:
        """[R, Vd] the drafter's raw logits."""
        return self._draft_at(self.evidence.tree.q_logits).float()

    @cached_property
    def q_scores(self) -> Tensor:
        """[R, V] the drafter's processed scores."""
        scores = self.evidence.draft_scores
        return self.q_logits if scores is self.evidence.tree.q_logits else self._draft_at(scores).float()

    @cached_property
    def q(self) -> Tensor:
        """[R, V] the processed drafter distribution."""
        return self.q_scores.softmax(-1)

    @cached_property
    def children(self) -> Tensor:
        """[R, N] bool."""
        return self._at(self.evidence.is_child)

    @cached_property
    def has_children(self) -> Tensor:
        """[R] bool."""
        return self.children.any(-1)

    @cached_property
    def has_q(self) -> Tensor:
        """[R] bool; are there children and is the distribution that proposed them known."""
        return self.has_children & (self._q_index >= 0)

    @cached_property
    def draft_tokens(self) -> Tensor:
        """[R, N] the tokens of all nodes of each context's row."""
        return self.evidence.tree.tokens[self.rows]

    @cached_property
    def only_child(self) -> Tensor:
        """[R] token of the (first) child, only to be read where ``has_children``."""
        first = self.children.int().argmax(-1, keepdim=True)
        return self.draft_tokens.gather(1, first).squeeze(-1)

    def among_children(self, tokens: Tensor) -> Tensor:
        """[R] tokens -> [R, N] bool; the child that carries the token."""
        return self.children & (self.draft_tokens == tokens[:, None])

    def at_tokens(self, values: Tensor, tokens: Tensor) -> Tensor:
        """[R, V], [R] -> [R]"""
        return values.gather(1, tokens[:, None]).squeeze(-1)

    def scores_of(self, tokens: Tensor) -> Tensor:
        """[R, S] the target's processed scores of the tokens [R, S], without a copy of all the others."""
        return self.evidence.round.scores[self.rows[:, None], self.nodes[:, None], tokens].float()

    def uniform(self, column: int) -> Tensor:
        """[R] one column of the uniforms."""
        uniforms = self.evidence.round.uniforms
        if uniforms is None:
            raise FsdError("this rule draws at random at every temperature; pass uniforms [B, N, 3] in Verification.")
        return self._at(uniforms[..., column])


@dataclass
class Decision:
    """What a rule would do at R contexts; whether a gate may open, the walk decides by the budget.

    Attributes:
        closed: [R] the emitted tokens if the gates stay closed.
        opened: [R] the emitted tokens if they open.
        opens: [R] bool; the gate wants to open, and there is a law to emit from.
        forced: [R] bool; the exact rule would not have let ``opened`` through.
        cost: [R] nats that opening costs: KL of the law of ``opened`` from the processed target.
    """

    closed: Tensor
    opened: Tensor
    opens: Tensor
    forced: Tensor
    cost: Tensor

    @classmethod
    def without_gate(cls, tokens: Tensor) -> Decision:
        """Tokens whose law is the target's."""
        no = torch.zeros_like(tokens, dtype=torch.bool)
        return cls(tokens, tokens, no, no, torch.zeros(tokens.shape, device=tokens.device))
