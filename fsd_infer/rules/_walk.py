"""How laws at single contexts become a round's verdict.

The walk goes down from the root as long as the emitted token is one of the node's children. What takes work over the
whole vocabulary is done in tensors, for many contexts at once; the rest is done here, in Python, at the contexts that a
row visits: which child a tilted law picks, what it costs, and whether the budget pays for it.

On a CPU contexts are asked for step by step, so that only visited ones cost vocabulary-sized work, and at temperature 0
those that are expected to be visited are asked for together. Elsewhere, where launches cost more than arithmetic and
waiting more than both, all nodes are asked for at once, and what was found, the trees and the checks come to the host
in one transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsd_infer.device.transfer import lists, to_device
from fsd_infer.errors import FsdError
from fsd_infer.rules._draws import drawn
from fsd_infer.rules.contexts import Contexts, Evidence, refuse
from fsd_infer.rules.laws import Law, Tilt, log_excess, log_sum, tilt
from fsd_infer.rules.verification import Source, Verdict, Verification
from fsd_infer.tree import DraftTree

Groups = Sequence[tuple[Callable[[Contexts], Law], list[int]]]  # each rule's law and the rows that it holds for

# At temperature 0 a child this much less likely than the target's choice, exp(-3), is not expected to be emitted.
_EXPECTED_WITHIN = 3.0


def walk(round: Verification, laws: Groups, budgets: Sequence[float], step_by_step: bool | None = None) -> Verdict:
    """Runs one round.

    Args:
        round: the evidence.
        laws: of every row.
        budgets: [B] nats for this round where the round itself brings no ``budget_left``.
        step_by_step: ask for the contexts that are reached (True) or for all at once (False); None picks by the device.

    Raises:
        NonFiniteLogitsError: target or drafter logits that are no distribution.
        FsdError: uniforms are missing, or sampled drafts do not form a chain.
    """
    if step_by_step is None:
        step_by_step = round.tree.tokens.device.type == "cpu"
    evidence = Evidence(round, at_once=not step_by_step)
    if step_by_step:
        evidence.check()
    walker = _StepByStep(evidence, laws) if step_by_step else _AtOnce(evidence, laws)
    return walker.verdict(list(budgets) if round.budget_left is None else round.budget_left.tolist())


@dataclass(slots=True)
class _Choice:
    """What may be emitted at a context.

    Attributes:
        closed: the token if the law is the target's.
        applies: there is another law.
        bonus: of that law's children, by node; or one for all; None: it is dense.
        opened, cost: of a dense law.
        exact: would the exact rule accept the sampled draft.
        log_p_max: ln p of the likeliest token, above temperature 0.
    """

    closed: int
    applies: bool = False
    bonus: Sequence[float] | float | None = None
    opened: int = 0
    cost: float = 0.0
    exact: bool = False
    log_p_max: float = 0.0


@dataclass
class _Steps:
    """What a row has emitted so far this round; the last node of the path is not decided yet."""

    left: float
    path: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)


class _Walk:
    """The walk in Python.

    Args:
        evidence: of the round.
        tokens, parents: the trees, [B][N].

    Attributes:
        regret: [B][N], see :attr:`Evidence.regret`; not read in trees without drafts.
        scores: [B][N] of the trees, None if they have none.
        second: [B][N] uniforms by which a tilted law redraws; not at temperature 0.
    """

    regret: list[list[float]]
    scores: list[list[float]] | None
    second: list[list[float]]

    def __init__(self, evidence: Evidence, tokens: list[list[int]], parents: list[list[int]]) -> None:
        self.greedy, self.sampled, self.tokens = evidence.greedy, evidence.sampled, tokens
        self.children: list[dict[int, dict[int, int]]] = []  # per row: node -> token -> child
        self.depth = 0
        for row_parents, row_tokens, left_out in zip(parents, tokens, evidence.tree.padding, strict=True):
            children: dict[int, dict[int, int]] = {}
            depths = [0]
            for node in range(1, len(row_parents)):
                if node not in left_out:
                    children.setdefault(row_parents[node], {})[row_tokens[node]] = node
                depths.append(depths[row_parents[node]] + 1)
            self.children.append(children)
            self.depth = max(self.depth, max(depths))
            if self.sampled and len(set(row_parents[1:])) < len(row_parents) - 1:
                raise FsdError(
                    "sampled drafts (q_scores) must form a chain; give deterministic trees without q_scores."
                )

    def choice(self, row: int, node: int) -> _Choice | None:
        """What may be emitted there; None if that is not known yet."""
        raise NotImplementedError

    def go(self, rows: list[_Steps]) -> None:
        """Take every row to the end of its round."""
        for row, steps in enumerate(rows):
            self.advance(row, steps)

    def verdict(self, left: list[float]) -> Verdict:
        """left: [B] nats that rows may spend."""
        rows = [_Steps(nats) for nats in left]
        self.go(rows)

        def table(values: Callable[[_Steps], list[Any]], padding: Any = None) -> list[list[Any]]:
            found = [values(steps) for steps in rows]
            return [row + [row[-1] if padding is None else padding] * (self.depth + 1 - len(row)) for row in found]

        drafts = [[self._first(row, node) for node in steps.path] for row, steps in enumerate(rows)]
        first = torch.tensor([nodes + [-1] * (self.depth + 1 - len(nodes)) for nodes in drafts])
        regret = torch.tensor(self.regret).gather(1, first.clamp_min(0)).masked_fill(first < 0, math.nan)
        return Verdict(
            path=torch.tensor(table(lambda steps: steps.path)),
            accepted=torch.tensor([len(steps.path) - 1 for steps in rows]),
            tokens=torch.tensor(table(lambda steps: steps.tokens, 0)),
            sources=torch.tensor(table(lambda steps: steps.sources, int(Source.TARGET))),
            gate_open=torch.tensor(table(lambda steps: steps.open, False)),
            spent=torch.tensor(table(lambda steps: steps.spent, 0.0)),
            first=first,
            regret=regret,
        )

    def _first(self, row: int, node: int) -> int:
        """See :attr:`Verdict.first`."""
        children = self.children[row].get(node, {}).values()
        if self.scores is None:
            return min(children, default=-1)
        scores = self.scores[row]
        return max(children, key=lambda child: (scores[child], -child), default=-1)

    def advance(self, row: int, steps: _Steps) -> bool:
        """Go down as far as contexts are known; is this the end of the row's round."""
        children = self.children[row]
        while True:
            node = steps.path[-1]
            choice = self.choice(row, node)
            if choice is None:
                return False
            by_token = children.get(node, {})
            token, cost, forced, is_open = self._emitted(choice, row, node, by_token)
            if is_open and cost > steps.left:
                token, cost, forced, is_open = choice.closed, 0.0, False, False
            child = by_token.get(token)
            steps.tokens.append(token)
            steps.open.append(is_open)
            steps.spent.append(cost)
            if steps.left < math.inf:  # an infinite budget pays infinite costs
                steps.left -= cost
            source = Source.TARGET if child is None else Source.EXACT
            steps.sources.append(int(Source.GATE if forced else source))
            if child is None:
                return True
            steps.path.append(child)

    def _emitted(self, choice: _Choice, row: int, node: int, by_token: dict[int, int]) -> tuple[int, float, bool, bool]:
        """(token, nats, would the exact rule not have let it through, is the law another than the target's)."""
        closed, bonus = choice.closed, choice.bonus
        if not choice.applies:
            return closed, 0.0, False, False
        if bonus is None:
            token = choice.opened
            if self.sampled and token in by_token:
                forced = not choice.exact
            else:
                forced = token != closed or (not self.sampled and token not in by_token)
            return token, choice.cost, forced, True
        regret = self.regret[row]
        bonuses = [bonus if isinstance(bonus, float) else bonus[child] for child in by_token.values()]
        if self.greedy:
            return _likeliest(closed, by_token, [regret[child] for child in by_token.values()], bonuses)
        log_p = [choice.log_p_max - regret[child] for child in by_token.values()]
        law = tilt(log_p, bonuses)
        if law is None:
            return closed, 0.0, False, False
        token = _redrawn(closed, list(by_token), log_p, law, self.second[row][node])
        return token, law.cost, token != closed, True


def _likeliest(
    closed: int, children: Iterable[int], regret: Sequence[float], bonus: Sequence[float]
) -> tuple[int, float, bool, bool]:
    """The token with the largest score + bonus at temperature 0, as ``_Walk._emitted`` returns it.

    Of equals the one of the largest score, then the smallest, as an argmax over the vocabulary would have it.
    """
    best = (0.0, -0.0, -closed)
    allowed = False
    drafted = list(zip(children, regret, bonus))
    if any(token == closed and gain == -math.inf for token, _, gain in drafted):
        return closed, 0.0, False, False
    for token, loss, gain in drafted:
        if loss < math.inf:  # what the processed target forbids is never emitted
            allowed = allowed or gain > 0
            best = max(best, (gain - loss, -loss, -token))
    token = -best[2]
    return token, -best[1] if token != closed else 0.0, token != closed, allowed


def _redrawn(closed: int, children: Sequence[int], log_p: Sequence[float], law: Tilt, uniform: float) -> int:
    """y ~ p is kept with probability min(1, r(y)/p(y)), else drawn from (r - p)+, which children alone have: y ~ r."""
    ratio = law.children[children.index(closed)] if closed in children else law.others
    redraw = -math.expm1(min(0.0, ratio))
    if uniform >= redraw:
        return closed
    weights = [log_excess(a, x) for a, x in zip(log_p, law.children)]
    total, top = log_sum(weights), 0.0
    if total == -math.inf:  # rounding left nothing
        return closed
    share = uniform / redraw
    chosen = closed
    for token, weight in zip(children, weights):
        if weight > -math.inf:
            chosen = token
            top += math.exp(weight - total)
            if share < top:
                break
    return chosen


class _StepByStep(_Walk):
    """Asks at the nodes that the rows have reached, and at temperature 0 at those that they are expected to reach."""

    def __init__(self, evidence: Evidence, laws: Groups) -> None:
        tree, uniforms = evidence.tree, evidence.round.uniforms
        super().__init__(evidence, tree.tokens.tolist(), tree.parents.tolist())
        self.evidence = evidence
        self.laws = [(law, set(rows)) for law, rows in laws]
        self.known: dict[tuple[int, int], _Choice] = {}
        self.best = evidence.best.tolist() if self.greedy else []
        self.regret = evidence.regret.tolist()
        self.scores = _scores(tree)
        self.second = [] if self.greedy or uniforms is None else uniforms[..., 1].tolist()

    def choice(self, row: int, node: int) -> _Choice | None:
        if self.greedy and node not in self.children[row]:
            return _Choice(self.best[row][node])
        return self.known.get((row, node))

    def go(self, rows: list[_Steps]) -> None:
        waiting = list(range(len(rows)))
        while waiting := [row for row in waiting if not self.advance(row, rows[row])]:
            for law, of_rule in self.laws:
                reached = [(row, rows[row].path[-1]) for row in waiting if row in of_rule]
                if reached:
                    self._ask(law, self._with_expected(reached) if self.greedy else reached)

    def _ask(self, law_of: Callable[[Contexts], Law], contexts: list[tuple[int, int]]) -> None:
        rows, nodes = torch.tensor(contexts).unbind(1)
        at = Contexts(self.evidence, rows, nodes)
        inner = any(node in self.children[row] for row, node in contexts)
        law = law_of(at) if inner else Law.target(at)
        columns = {name: column.tolist() for name, column in _columns(at, law).items()}
        if law.bonus is not None:
            many = isinstance(law.bonus, Tensor)
            columns["bonus"] = law.bonus.tolist() if many else [law.bonus] * len(contexts)  # type: ignore[union-attr]
        for context, *values in zip(contexts, *columns.values()):
            self.known[context] = _Choice(**dict(zip(columns, values)))

    def _with_expected(self, contexts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """These contexts, and those that are expected to follow them. Only a guess."""
        ahead = []
        for row, node in contexts:
            regret, children = self.regret[row], self.children[row]
            while node in children:
                ahead.append((row, node))
                node = min(children[node].values(), key=regret.__getitem__)
                if regret[node] >= _EXPECTED_WITHIN:
                    break
        return ahead


class _AtOnce(_Walk):
    """Asks at all nodes, and brings everything that the walk may need to the host in one transfer."""

    def __init__(self, evidence: Evidence, laws: Groups) -> None:
        tree, uniforms = evidence.tree, evidence.round.uniforms
        batch, count = tree.tokens.shape
        self.bonus: list[Sequence[float] | float | None] = [None] * batch
        by_node: Tensor | None = None  # [B, N] bonuses that are tensors
        columns: dict[str, Tensor] = {}  # [B, N] each
        for law_of, rows in laws:
            index = to_device(torch.tensor(rows), tree.tokens.device)
            at = evidence.whole if len(rows) == batch else evidence.all_nodes_of(index)
            law = law_of(at)
            for name, column in _columns(at, law).items():
                filled = columns.get(name, column.new_zeros(batch, count))
                columns[name] = filled.index_copy(0, index, column.view(-1, count))
            if isinstance(law.bonus, Tensor):
                parents = tree.parents[index]
                own = law.bonus.view(-1, count, count).gather(1, parents[:, None]).squeeze(1)
                by_node = torch.zeros_like(tree.parents, dtype=own.dtype) if by_node is None else by_node
                by_node = by_node.index_copy(0, index, own.to(by_node.dtype))
            for row in rows:
                self.bonus[row] = [] if isinstance(law.bonus, Tensor) else law.bonus
        unfit = evidence.unfit()
        numbers = list(columns.values())
        tilted = any(bonus is not None for bonus in self.bonus)
        if tilted:
            numbers += [] if evidence.greedy or uniforms is None else [uniforms[..., 1]]
        numbers += [] if by_node is None else [by_node]
        numbers += [evidence.regret] if count > 1 else []
        scores = tree.scores if tree.rows is None else None
        numbers += [] if scores is None else [scores]
        tokens, parents_, *found = lists(tree.tokens, tree.parents, *unfit.values(), *numbers)
        for who in unfit:
            refuse(who, found.pop(0))
        super().__init__(evidence, tokens, parents_)
        self.columns = {name: found.pop(0) for name in columns}
        if tilted:
            self.second = [] if evidence.greedy else found.pop(0)
        if by_node is not None:
            of_nodes = found.pop(0)
            self.bonus = [of_nodes[row] if bonus == [] else bonus for row, bonus in enumerate(self.bonus)]
        self.regret = found.pop(0) if count > 1 else [[0.0]] * batch
        self.scores = _scores(tree) if scores is None else found.pop(0)

    def choice(self, row: int, node: int) -> _Choice | None:
        values = {name: column[row][node] for name, column in self.columns.items()}
        return _Choice(**values, bonus=self.bonus[row])


def _scores(tree: DraftTree) -> list[list[float]] | None:
    """[B][N], None if it has none. Waits for the device unless the tree was made of rows."""
    if tree.rows is not None:
        return [row.scores for row in tree.rows]
    return None if tree.scores is None else tree.scores.tolist()


def _columns(at: Contexts, law: Law) -> dict[str, Tensor]:
    """[R] each, by their names in :class:`_Choice`."""
    found = drawn(at, law)
    columns = {"closed": found.closed, "applies": law.applies}
    if found.opened is not None and found.cost is not None:
        columns.update(opened=found.opened, cost=found.cost)
    if found.exact is not None:
        columns["exact"] = found.exact
    if law.bonus is not None and not at.greedy:
        columns["log_p_max"] = at.log_p_max
    return columns
