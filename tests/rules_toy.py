"""Toy models for rule tests: tables of logits per context, and a simulation of decoding.

Contexts are numbered as in a heap, root 0 and ``child = V * context + 1 + token``, so one table row per context.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import softmax
from scipy.stats import chi2
from torch import Tensor

from fsd_infer.rules import RoundInput, Rule, TokenHistory, parse_rule
from fsd_infer.trees.tree import DraftTree
from tests.tree_rounds import masked

V = 4
LENGTH = 3  # emitted tokens that are compared
PARENTS = [0, 0, 0, 1, 1, 2]  # the toy tree: two children of the root, two and one below them
CHAIN = [0, 0, 1]
LONG_CHAIN = [0, 0, 1, 2]  # no leaf is met within LENGTH tokens
DEPTH = 3
CONTEXTS = sum(V**k for k in range(LENGTH + DEPTH + 1))


def child_of(context: Tensor, token: Tensor) -> Tensor:
    return context * V + 1 + token


@dataclass(frozen=True)
class Toy:
    """A target and a drafter, and how the drafter drafts.

    Attributes:
        p, q: [contexts, V] and [contexts, Vd] raw logits.
        sampled: chains with drafts sampled from q, else deterministic trees.
        processed: the request has a temperature of 0.8 and a top-3 mask.
        draft_ids: reduced drafter vocabulary.
        parents: the tree's shape.
    """

    p: Tensor
    q: Tensor
    sampled: bool = False
    processed: bool = False
    draft_ids: Tensor | None = None
    parents: tuple[int, ...] = tuple(PARENTS)

    @classmethod
    def make(cls, seed: int, sampled: bool = False, processed: bool = False, reduced: bool = False) -> Toy:
        generator = torch.Generator().manual_seed(seed)
        p = torch.randn(CONTEXTS, V, generator=generator) * 1.2
        # every third context's drafter is nearly right, so that gates differ
        scale = torch.where(torch.arange(CONTEXTS) % 3 == 0, 0.2, 1.0)[:, None]
        q = p + torch.randn(CONTEXTS, V, generator=generator) * scale
        draft_ids = torch.tensor([0, 1, 3]) if reduced else None
        q = q if draft_ids is None else q[:, draft_ids]
        return cls(p, q, sampled, processed, draft_ids, tuple(CHAIN if sampled else PARENTS))

    def full_q(self) -> Tensor:
        if self.draft_ids is None:
            return self.q
        whole = torch.full((self.q.shape[0], V), -math.inf)
        whole[:, self.draft_ids] = self.q
        return whole

    def reduced(self, scores: Tensor) -> Tensor:
        return scores if self.draft_ids is None else scores[..., self.draft_ids]

    def scores(self, logits: Tensor) -> Tensor:
        return masked(logits, 0.8, keep=3) if self.processed else logits

    def draft(self, contexts: Tensor, generator: torch.Generator) -> tuple[DraftTree, Tensor]:
        """Trees for roots at ``contexts`` [B], and the context of every node [B, N]."""
        batch, nodes = contexts.shape[0], len(self.parents)
        where, tokens = [contexts], [torch.zeros_like(contexts)]
        raw, processed = self.full_q(), self.scores(self.full_q())
        for node in range(1, nodes):
            parent = self.parents[node]
            sibling = sum(self.parents[j] == parent for j in range(1, node))
            at = where[parent]
            if self.sampled:
                token = torch.multinomial(processed[at].softmax(-1), 1, generator=generator).squeeze(-1)
            else:
                token = raw[at].argsort(dim=-1, descending=True, stable=True)[:, sibling]
            tokens.append(token)
            where.append(child_of(at, token))
        contexts_of = torch.stack(where, 1)
        parents = torch.tensor(self.parents).expand(batch, nodes).contiguous()
        inner = sorted({self.parents[j] for j in range(1, nodes)})
        q_index = torch.full((nodes,), -1)
        q_index[inner] = torch.arange(len(inner))
        log_q = self.full_q().log_softmax(-1)
        scores = [torch.zeros(batch)]
        for node in range(1, nodes):
            scores.append(scores[self.parents[node]] + log_q[where[self.parents[node]], tokens[node]])
        tree = DraftTree(
            tokens=torch.stack(tokens, 1), parents=parents, scores=torch.stack(scores, 1),
            q_logits=self.q[contexts_of[:, inner]], q_index=q_index.expand(batch, nodes), draft_ids=self.draft_ids,
            q_scores=self.reduced(processed[contexts_of[:, inner]]) if self.sampled else None,
        )  # fmt: skip
        return tree, contexts_of

    def round(
        self, contexts: Tensor, generator: torch.Generator, greedy: bool = False, answers: list[list[int]] | None = None
    ) -> RoundInput:
        tree, where = self.draft(contexts, generator)
        logits = self.p[where]
        return RoundInput(
            tree=tree,
            logits=logits,
            scores=self.scores(logits),
            greedy=greedy,
            uniforms=torch.rand(*where.shape, 3, generator=generator),
            process_draft=self.process_draft if self.processed else None,
            texts=TokenHistory(tree.tokens[:, :1].tolist() if answers is None else answers, markers={"1..2": (1, 2)}),
        )

    def process_draft(self, tree: DraftTree) -> Tensor:
        if self.draft_ids is None:
            return self.scores(tree.q_logits)
        whole = torch.full((*tree.q_logits.shape[:2], V), -math.inf)
        whole[..., self.draft_ids] = tree.q_logits
        return self.scores(whole)


TOYS = {
    "tree": Toy.make(1), "tree-processed": Toy.make(2, processed=True), "tree-reduced": Toy.make(3, reduced=True),
    "chain": Toy.make(5, sampled=True),
    "chain-processed": Toy.make(6, sampled=True, processed=True),
    "chain-reduced": Toy.make(7, sampled=True, reduced=True),
    "long-chain": replace(Toy.make(8, sampled=True), parents=tuple(LONG_CHAIN)),
}  # fmt: skip


def target_distribution(toy: Toy) -> np.ndarray:
    """[V**LENGTH] by code, what the target alone would emit."""
    p, distribution = softmax(toy.scores(toy.p.double()).numpy(), axis=-1), []
    for tokens in itertools.product(range(V), repeat=LENGTH):
        context, chance = 0, 1.0
        for token in tokens:
            chance *= p[context, token]
            context = V * context + 1 + token
        distribution.append(chance)
    return np.array(distribution)


def plain_rule(spec: str) -> Rule:
    """The rule; ``tilted`` without min_p and exact n-grams unless they are given."""
    more = [
        f":{option}=0"
        for option in ("min_p", "exact_ngram_size")
        if spec.startswith("tilted") and f"{option}=" not in spec
    ]
    return parse_rule(spec + "".join(more))


@dataclass
class Outcome:
    """Per simulated row: the sequence's code in base V, and over its LENGTH tokens the nats spent and open gates."""

    codes: np.ndarray
    spent: np.ndarray
    gates: np.ndarray


def simulate(toy: Toy, rule: Rule, rows: int, seed: int) -> Outcome:
    """Decodes ``rows`` sequences of LENGTH tokens over as many rounds as they need, all rows at once."""
    generator = torch.Generator().manual_seed(seed)
    context, length, code = (torch.zeros(rows, dtype=torch.long) for _ in range(3))
    spent, gates = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.long)
    # tokens beyond LENGTH, cut off here, must not use up a budget that a row is charged for
    left = torch.full((rows,), math.inf if rule.budget is None else rule.budget, dtype=torch.float64)
    answers: list[list[int]] = [[] for _ in range(rows)]
    looks = bool(getattr(rule, "exact_ngram_size", 0) or rule.only_in)
    while bool((length < LENGTH).any()):
        active = (length < LENGTH).nonzero().squeeze(-1)
        so_far = [answers[row] for row in active.tolist()] if looks else None
        round = toy.round(context[active], generator, answers=so_far)
        if rule.budget is not None:
            round = replace(round, budget_left=left[active])
        verdict = rule(round)
        for step in range(verdict.tokens.shape[1]):
            emits = (step <= verdict.accepted) & (length[active] < LENGTH)
            who = active[emits]
            token = verdict.tokens[emits, step]
            context[who] = child_of(context[who], token)
            code[who] = code[who] * V + token
            length[who] += 1
            spent[who] += verdict.spent[emits, step]
            gates[who] += verdict.relaxed[emits, step]
            for row, emitted in zip(who.tolist(), token.tolist()):
                answers[row].append(emitted)
        left[active] -= verdict.spent.double().sum(-1)
    return Outcome(code.numpy(), spent.numpy(), gates.numpy())


ALARM = 1e-6  # the most that a statistical check raises a false alarm with, over the choice of its seed
ROWS = 2_000


def p_value(codes: np.ndarray, distribution: np.ndarray) -> float:
    """Chi-square test of sequence codes against their distribution; 0 if something impossible was seen."""
    seen = np.bincount(codes, minlength=len(distribution)).astype(float)
    if seen[distribution <= 0].any():
        return 0.0
    expected = distribution * len(codes)
    rare = expected < 10
    observed = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if expected[-1] < 10 and len(expected) > 1:  # the pooled cell itself is rare: into its neighbour
        observed[-2] += observed[-1]
        expected[-2] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) == 1:
        return 1.0
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))
