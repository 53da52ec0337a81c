"""Semi-greedy search on draft trees: which drafts may stand in the place of the target's choice without harm.

After AutoJudge (Garipov et al., 2025, arXiv:2504.20039), which searches along chains: a drafted token is put in the
place of the target's choice and the target goes on by itself. If the outcome suffers, the change is important and is
taken back; else it stays, and later changes are tried on top of it. Here the drafts form a tree, and a round takes the
way that is accepted furthest: V(n) = max(0, max over children c of 1 + V(c) - cost(c)), with cost 0 for the target's
choice and for harmless changes and infinity for important ones. So the rule is the oracle of learned costs: none that
keeps the outcome of every answer gets further in a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsd_infer.errors import FsdError
from fsd_infer.rules import Contexts, Law, Rule


@dataclass(frozen=True)
class Change:
    """A drafted token in the place of the target's choice.

    Attributes:
        text: prompt, answer and the path of the tree, the drafted token last.
        choice: what the target would have said in its place.
        regret: ln p of the choice less ln p of the drafted token, nats.
    """

    text: list[int]
    choice: int
    regret: float


class SemiGreedy(Rule):
    """Accept the drafts that get furthest without an important change. At temperature 0 alone.

    Args:
        harmless: says of each change whether the outcome stands; asked only about changes that would lengthen a round,
            of all rows of the batch together.
        ends: tokens that end an answer.
        most_regret: changes that cost more are important without being asked about.
    """

    name = "semi-greedy"

    def __init__(
        self,
        harmless: Callable[[Sequence[Change]], Sequence[bool]],
        ends: Collection[int] = (),
        most_regret: float = math.inf,
    ) -> None:
        self.harmless, self.ends, self.most_regret = harmless, frozenset(ends), most_regret

    def law(self, at: Contexts) -> Law:
        if not at.greedy:
            raise FsdError("semi-greedy search decodes at temperature 0.")
        return Law.tilted(at, at.of_children(at.once_per_round(self, lambda: self._bonus(at))))

    def describe(self) -> dict[str, object]:
        return {"rule": self.name, "most_regret": self.most_regret}

    def _bonus(self, at: Contexts) -> Tensor:
        """[B, N] infinite at the drafts that are to be accepted, 0 elsewhere."""
        tree = at.tree
        texts = [[token for token in row if token >= 0] for row in at.texts.tokens.tolist()]
        choices = at.whole.likeliest.view(tree.tokens.shape).tolist()
        facts = (tree.tokens.tolist(), tree.parents.tolist(), at.is_draft.tolist(), choices, at.node_regret.tolist())
        rows = [_Row(self.ends, *row) for row in zip(texts, *facts, strict=True)]
        while open := [(row, node) for row in rows for node in row.open()]:
            changes = [row.change(node) for row, node in open]
            near = [number for number, change in enumerate(changes) if change.regret <= self.most_regret]
            found = self.harmless([changes[number] for number in near]) if near else []
            verdicts = dict(zip(near, found, strict=True))
            for number, (row, node) in enumerate(open):
                row.harmless[node] = verdicts.get(number, False)
        bonus = torch.zeros(tree.tokens.shape)
        for number, row in enumerate(rows):
            bonus[number, row.best_path()] = math.inf
        return bonus.to(at.node_regret)


@dataclass
class _Row:
    """One row's tree while it is searched. Lists have an entry per node.

    Attributes:
        text: prompt and answer, the root last.
        choices: the target's likeliest token after each node.
        harmless: of nodes: do all changes on the way to it leave the outcome as it is; absent: not known yet.
    """

    ends: frozenset[int]
    text: list[int]
    tokens: list[int]
    parents: list[int]
    drafted: list[bool]
    choices: list[int]
    regret: list[float]
    harmless: dict[int, bool] = field(default_factory=lambda: {0: True})

    def __post_init__(self) -> None:
        self.depth = [0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            self.depth[node] = self.depth[self.parents[node]] + 1
        self.deepest: list[float] = [  # that can be reached through each node; a way that ends the answer is the best
            math.inf if self._ended(node) else self.depth[node] for node in range(len(self.tokens))
        ]
        for node in range(len(self.tokens) - 1, 0, -1):
            above = self.parents[node]
            if self.drafted[node]:
                self.deepest[above] = max(self.deepest[above], self.deepest[node])

    def open(self) -> list[int]:
        """Changes that are to be looked at next: all on the way to them is harmless, and they may lead further."""
        for node, above in enumerate(self.parents):
            followed = self.drafted[node] and self.harmless.get(above, False) and self.tokens[above] not in self.ends
            if followed and self.tokens[node] == self.choices[above]:
                self.harmless[node] = True
        done, reached, _ = self._worth(self._best())
        return [
            node
            for node, above in enumerate(self.parents)
            if node not in self.harmless
            and self.drafted[node]
            and self.harmless.get(above, False)
            and self.tokens[above] not in self.ends
            and self.deepest[node] > reached
            and not done
        ]

    def change(self, node: int) -> Change:
        path = self._path(node)
        text = [*self.text, *(self.tokens[step] for step in path)]
        return Change(text, self.choices[self.parents[node]], self.regret[node])

    def best_path(self) -> list[int]:
        return self._path(self._best())

    def _best(self) -> int:
        return max((node for node, fine in self.harmless.items() if fine), key=self._worth)

    def _worth(self, node: int) -> tuple[bool, int, float]:
        """Does the answer end here, else how far it is; of equals the way with the least regret."""
        return self._ended(node), self.depth[node], -sum(self.regret[step] for step in self._path(node))

    def _ended(self, node: int) -> bool:
        return (node > 0 and self.tokens[node] in self.ends) or self.choices[node] in self.ends

    def _path(self, node: int) -> list[int]:
        """Nodes from below the root down to ``node``."""
        path = []
        while node:
            path.append(node)
            node = self.parents[node]
        return path[::-1]
