"""Toy models for rule tests: tables of logits per context, an exact enumeration of what a rule emits, a simulation.

Contexts are numbered as in a heap, root 0 and ``child = V * context + 1 + token``, so one table row per context. The
enumeration is written from the rules' definitions in float64 probabilities and shares no code with the package.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import rel_entr, softmax
from torch import Tensor

from fsd_infer.rules import Rule, Texts, Verification, parse_rule
from fsd_infer.tree import DraftTree, ancestors_of

V = 4
LENGTH = 3  # emitted tokens that are compared
PARENTS = [0, 0, 0, 1, 1, 2]  # the toy tree: two children of the root, two and one below them
CHAIN = [0, 0, 1]
LONG_CHAIN = [0, 0, 1, 2]  # no leaf is met within LENGTH tokens
DEPTH = 3
CONTEXTS = sum(V**k for k in range(LENGTH + DEPTH + 1))


def child_of(context: Tensor, token: Tensor) -> Tensor:
    return context * V + 1 + token


def keep_top(logits: Tensor, keep: int, temperature: float) -> Tensor:
    """Temperature, then a top-k mask, as a request's processors would."""
    kth = logits.topk(keep, dim=-1).values[..., -1:]
    return (logits / temperature).masked_fill(logits < kth, -math.inf)


@dataclass(frozen=True)
class Toy:
    """A target and a drafter, and how the drafter drafts.

    Attributes:
        p, q: [contexts, V] and [contexts, Vd] raw logits.
        sampled: chains with drafts sampled from q, else deterministic trees.
        processed: the request has a temperature of 0.8 and a top-3 mask.
        temperature: of a request without processors.
        draft_ids: reduced drafter vocabulary.
        parents: the tree's shape.
    """

    p: Tensor
    q: Tensor
    sampled: bool = False
    processed: bool = False
    draft_ids: Tensor | None = None
    parents: tuple[int, ...] = tuple(PARENTS)
    temperature: float = 1.0

    @classmethod
    def make(
        cls,
        seed: int,
        sampled: bool = False,
        processed: bool = False,
        reduced: bool = False,
        noise: float = 1.0,
        temperature: float = 1.0,
    ) -> Toy:
        generator = torch.Generator().manual_seed(seed)
        p = torch.randn(CONTEXTS, V, generator=generator) * 1.2
        # every third context's drafter is nearly right, so that gates differ
        scale = torch.where(torch.arange(CONTEXTS) % 3 == 0, 0.2, noise)[:, None]
        q = p + torch.randn(CONTEXTS, V, generator=generator) * scale
        draft_ids = torch.tensor([0, 1, 3]) if reduced else None
        q = q if draft_ids is None else q[:, draft_ids]
        return cls(p, q, sampled, processed, draft_ids, tuple(CHAIN if sampled else PARENTS), temperature)

    def full_q(self) -> Tensor:
        if self.draft_ids is None:
            return self.q
        whole = torch.full((self.q.shape[0], V), -math.inf)
        whole[:, self.draft_ids] = self.q
        return whole

    def scores(self, logits: Tensor) -> Tensor:
        if self.processed:
            return keep_top(logits, 3, 0.8)
        return logits if self.temperature == 1.0 else logits / self.temperature

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
        ancestors = ancestors_of(parents[:1]).expand(batch, nodes, nodes)
        tree = DraftTree(
            tokens=torch.stack(tokens, 1),
            parents=parents,
            depths=ancestors.sum(-1) - 1,
            ancestors=ancestors,
            q_logits=self.q[contexts_of[:, inner]],
            q_index=q_index.expand(batch, nodes),
            draft_ids=self.draft_ids,
            q_scores=processed[contexts_of[:, inner]] if self.sampled else None,
        )
        return tree, contexts_of

    def round(
        self,
        contexts: Tensor,
        generator: torch.Generator,
        greedy: bool = False,
        answers: list[list[int]] | None = None,
    ) -> Verification:
        tree, where = self.draft(contexts, generator)
        logits = self.p[where]
        changed = self.processed or self.temperature != 1.0
        return Verification(
            tree=tree,
            logits=logits,
            scores=self.scores(logits),
            greedy=greedy,
            uniforms=torch.rand(*where.shape, 3, generator=generator),
            process_draft=self.process_draft if changed else None,
            texts=Texts(tree.tokens[:, :1].tolist() if answers is None else answers),
        )

    def process_draft(self, tree: DraftTree) -> Tensor:
        if self.draft_ids is None:
            return self.scores(tree.q_logits)
        whole = torch.full((*tree.q_logits.shape[:2], V), -math.inf)
        whole[..., self.draft_ids] = tree.q_logits
        return self.scores(whole)


def plain_rule(spec: str) -> Rule:
    """The rule; ``tilted`` without floor and novelty unless they are given."""
    more = [f":{option}=0" for option in ("floor", "novel") if spec.startswith("tilted") and f"{option}=" not in spec]
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
    looks = bool(getattr(rule, "novel", 0))
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
            gates[who] += verdict.gate_open[emits, step]
            for row, emitted in zip(who.tolist(), token.tolist()):
                answers[row].append(emitted)
        left[active] -= verdict.spent.double().sum(-1)
    return Outcome(code.numpy(), spent.numpy(), gates.numpy())


REFERENCE_DIVERGENCES = {
    "kl": lambda p, q: rel_entr(q, p).sum(),
    "js": lambda p, q: (rel_entr(p, (p + q) / 2).sum() + rel_entr(q, (p + q) / 2).sum()) / 2,
    "tv": lambda p, q: np.abs(p - q).sum() / 2,
}

Kernel = list[tuple[float, int, bool, float]]  # probability, token, does it go down, nats spent


class Enumeration:
    """The exact law of the first LENGTH emitted tokens.

    Args:
        toy: the models.
        kind: exact, fuzzy, fuzzy-strict, random, draft-only or tilted; or a law as a function of p, q and the drafted
            children, None in place of these where a draft is sampled and tested against the law.
        divergence, threshold, gate_on, rate, budget, price, floor, novel: the rule's parameters.
    """

    def __init__(
        self,
        toy: Toy,
        kind: str | Callable[[np.ndarray, np.ndarray, list[int] | None], np.ndarray],
        divergence: str = "js",
        threshold: float = 0.0,
        gate_on: str = "raw",
        rate: float = 0.0,
        budget: float = math.inf,
        price: float = 1.0,
        floor: float = 0.0,
        novel: int = 0,
    ) -> None:
        self.toy, self.kind, self.rate, self.budget = toy, kind, rate, budget
        self.price, self.floor, self.novel = price, floor, novel
        raw_p, raw_q = toy.p.double(), toy.full_q().double()
        self.p = softmax(toy.scores(raw_p).numpy(), axis=-1)
        self.q = softmax(toy.scores(raw_q).numpy(), axis=-1)
        gate_p, gate_q = softmax(raw_p.numpy(), axis=-1), softmax(raw_q.numpy(), axis=-1)
        if gate_on == "processed":
            gate_p, gate_q = self.p, self.q
        measure = REFERENCE_DIVERGENCES[divergence]
        self.wants = np.array([measure(a, b) <= threshold for a, b in zip(gate_p, gate_q, strict=True)])
        self.children = [
            [j for j in range(1, len(toy.parents)) if toy.parents[j] == i] for i in range(len(toy.parents))
        ]
        self.ranking = raw_q.argsort(dim=-1, descending=True, stable=True).numpy()
        self.law: dict[tuple[int, ...], float] = defaultdict(float)
        self.expected_spent = 0.0
        self.largest_spent = 0.0
        self._expand((), 0, 0, 1.0, 0.0)

    def sequence_law(self) -> np.ndarray:
        """[V ** LENGTH] by code."""
        return np.array([self.law[self._tokens(code)] for code in range(V**LENGTH)])

    def target_law(self) -> np.ndarray:
        """[V ** LENGTH] what the target alone would emit."""
        law = np.ones(V**LENGTH)
        for code in range(V**LENGTH):
            context = 0
            for token in self._tokens(code):
                law[code] *= self.p[context, token]
                context = V * context + 1 + token
        return law

    @staticmethod
    def _tokens(code: int) -> tuple[int, ...]:
        return tuple(code // V**k % V for k in reversed(range(LENGTH)))

    def _expand(self, tokens: tuple[int, ...], context: int, node: int, weight: float, spent: float) -> None:
        if len(tokens) == LENGTH:
            self.law[tokens] += weight
            self.expected_spent += weight * spent
            self.largest_spent = max(self.largest_spent, spent)
            return
        below = {}
        if not self.toy.sampled:
            below = dict(zip(self.ranking[context], self.children[node]))
        left = self.budget - spent if math.isfinite(self.budget) else math.inf
        for chance, token, down, cost in self.kernel(tokens, context, node, left):
            if chance > 0.0:
                after = (self.children[node][0] if self.toy.sampled else below[token]) if down else 0
                self._expand((*tokens, token), V * context + 1 + token, after, weight * chance, spent + cost)

    def kernel(self, text: tuple[int, ...], context: int, node: int, left: float) -> Kernel:
        p, q = self.p[context], self.q[context]
        if not self.children[node]:
            return [(p[y], y, False, 0.0) for y in range(V)]
        opens = {
            "exact": [(1.0, False)],
            "random": [(self.rate, True), (1 - self.rate, False)],
            "draft-only": [(1.0, True)],
        }.get(str(self.kind), [(1.0, callable(self.kind) or bool(self.wants[context]))])
        found: Kernel = []
        for weight, gate in opens:
            if self.toy.sampled:
                drawn = self._chain(text, p, q, gate, left)
            else:
                drawn = self._tree(text, context, node, gate, left)
            found += [(weight * c, y, d, s) for c, y, d, s in drawn]
        return found

    def _repeats(self, text: tuple[int, ...], token: int) -> bool:
        """Would the token complete an n-gram of the text."""
        n, after = self.novel, (*text, token)
        return n > 0 and after[-n:] in [after[i : i + n] for i in range(len(after) - n)]

    def _held(self, text: tuple[int, ...], p: np.ndarray, law: np.ndarray, drafted: Sequence[int]) -> np.ndarray:
        """The law with p for the drafts that complete a known n-gram, and the rest scaled to what they leave."""
        known = np.array([token in drafted and self._repeats(text, token) for token in range(V)])
        rest = law[~known].sum()
        return np.where(known, p, law * (1 - p[known].sum()) / rest) if rest > 0 else p

    def _clamped(self, text: tuple[int, ...], p: np.ndarray, law: np.ndarray) -> np.ndarray:
        """A law from q: no token that completes a known n-gram gets more than p, what is cut off is drawn from p."""
        known = np.array([self._repeats(text, token) for token in range(V)])
        kept = np.where(known, np.minimum(law, p), law)
        return kept + (law - kept).sum() * p

    def _favoured(self, text: tuple[int, ...], context: int, node: int) -> dict[int, int]:
        """Token -> child, of the drafted tokens that a tilted law may favour."""
        p = self.p[context]
        drafted = dict(zip(self.ranking[context].tolist(), self.children[node]))
        likely = {token: child for token, child in drafted.items() if p[token] > 0 and p[token] >= self.floor * p.max()}
        return {token: child for token, child in likely.items() if not self._repeats(text, token)}

    def _worth(self, text: tuple[int, ...], context: int, token: int, child: int) -> float:
        """v of a drafted token."""
        return 1 + self.value((*text, token), V * context + 1 + token, child)

    def value(self, text: tuple[int, ...], context: int, node: int) -> float:
        """V, by the recursion that defines it."""
        p, favoured = self.p[context], self._favoured(text, context, node)
        terms = [1 - sum(p[token] for token in favoured)]
        terms += [
            p[token] * math.exp(self._worth(text, context, token, child) / self.price)
            for token, child in favoured.items()
        ]
        return self.price * math.log(sum(terms))

    def _tree(self, text: tuple[int, ...], context: int, node: int, gate: bool, left: float) -> Iterator:
        p, q = self.p[context], self.q[context]
        drafted = self.ranking[context][: len(self.children[node])]
        law, cost = p, 0.0
        if callable(self.kind):
            law = self.kind(p, q, drafted.tolist())
            cost = rel_entr(law, p).sum()
        elif self.kind == "tilted":
            tilted = p.copy()
            for token, child in self._favoured(text, context, node).items():
                tilted[token] *= math.exp(self._worth(text, context, token, child) / self.price)
            tilted = self._held(text, p, tilted / tilted.sum(), drafted.tolist())
            if gate and rel_entr(tilted, p).sum() <= left:
                law, cost = tilted, rel_entr(tilted, p).sum()
        elif gate and self.kind in ("fuzzy", "random"):
            inside = np.zeros(V)
            inside[drafted] = p[drafted]
            novel = [token for token in drafted if not self._repeats(text, token)]
            if inside[novel].sum() > 0:
                held = self._held(text, p, inside / inside.sum(), drafted.tolist())
                if rel_entr(held, p).sum() <= left:
                    law, cost = held, rel_entr(held, p).sum()
        else:
            clamped = self._clamped(text, p, q)
            if gate and rel_entr(clamped, p).sum() <= left:
                law, cost = clamped, rel_entr(clamped, p).sum()
        for y in range(V):
            yield law[y], y, y in drafted, cost

    def _clipped(self, text: tuple[int, ...], p: np.ndarray, q: np.ndarray) -> np.ndarray:
        """The tilted law of a sampled chain."""
        wins = np.array([not self._repeats(text, token) and p[token] >= self.floor * p.max() for token in range(V)])
        limit = np.exp(wins / self.price)

        def law(z: float) -> np.ndarray:
            return np.clip(q, p / z, p * limit / z)

        return law(brentq(lambda z: law(z).sum() - 1, 0.5, 2 * limit.max(), xtol=1e-14))

    def _chain(self, text: tuple[int, ...], p: np.ndarray, q: np.ndarray, gate: bool, left: float) -> Iterator:
        if self.novel or self.kind == "tilted" or callable(self.kind):  # the exact test against the law
            if self.kind == "tilted":
                law = self._clipped(text, p, q)
            else:
                kept = np.where(p > 0, q, 0.0) if self.kind == "fuzzy" else q
                law = self.kind(p, q, None) if callable(self.kind) else kept
                law = law + (1 - law.sum()) * np.clip(p - q, 0, None) / np.clip(p - q, 0, None).sum()
            law = self._clamped(text, p, law)
            cost = rel_entr(law, p).sum()
            law, cost = (law, cost) if gate and cost <= left else (p, 0.0)
            yield from ((min(law[x], q[x]), x, True, cost) for x in range(V))
            yield from ((max(law[y] - q[y], 0.0), y, False, cost) for y in range(V))
            return
        residual = np.clip(p - q, 0, None)
        residual = residual / residual.sum()
        if self.kind in ("fuzzy", "random"):
            law = np.where(p > 0, q, 0.0) + q[p <= 0].sum() * residual
        else:
            law = q
        cost = rel_entr(law, p).sum()
        is_open = gate and cost <= left
        for x in range(V):
            if is_open:
                keep = 1.0 if self.kind not in ("fuzzy", "random") or p[x] > 0 else 0.0
            elif self.kind == "fuzzy-strict":
                yield from ((q[x] * p[y], y, y == x, 0.0) for y in range(V))
                continue
            else:
                keep = min(1.0, p[x] / q[x]) if q[x] > 0 else 0.0
            spent = cost if is_open else 0.0
            yield q[x] * keep, x, True, spent
            yield from ((q[x] * (1 - keep) * residual[y], y, False, spent) for y in range(V))
