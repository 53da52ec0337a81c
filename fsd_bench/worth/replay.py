"""Other rules and shapes, replayed on the rounds of exact decoding.

A round of exact decoding with a deep tree knows the target's distribution after every drafted prefix, whether exact
decoding goes there or not. So any rule's verdict on that tree, or on a part of it, is known without another forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsd_bench.worth.steps import BEGINNING, HIT, UNKNOWN, Rounds, Step, bin_of
from fsd_infer.device.rows import at_nodes
from fsd_infer.divergence import expand_draft
from fsd_infer.drafters.shape import TreeShape
from fsd_infer.drafters.visits import likeliest, tilted
from fsd_infer.rules import Exact, Fly, Rule, Source, Texts, Tilted, Verdict, Verification, apply_rules
from fsd_infer.tree import DraftTree

Cell = tuple[Rule, TreeShape]
_Part = tuple[Rule, tuple[int, ...]]  # a rule, and the nodes of the whole tree that it walks on
# node at which the token was emitted, token, nats, did only another law let it through, is it a draft
_Emitted = tuple[int, int, float, bool, bool]


@dataclass
class Evidence:
    """One round of one answer: the tree, what the target said of it, and where the answer stands.

    Attributes:
        tree: [1, N]
        logits, scores: [1, N, V] raw and processed, on the CPU or the target's device.
        text: prompt and answer so far, the root included.
        room: tokens until the answer's limit.
        state: in which the round began, see :mod:`.steps`.
    """

    tree: DraftTree
    logits: Tensor
    scores: Tensor
    greedy: bool
    temperature: float
    text: list[int]
    room: int
    state: int
    generator: torch.Generator
    children: dict[int, list[int]] = field(init=False)
    regret: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.parents = (x[0].tolist() for x in (self.tree.tokens, self.tree.parents))
        self.children, self._tilted = {}, dict[float, list[float]]()
        for node in range(1, len(self.parents)):
            self.children.setdefault(self.parents[node], []).append(node)
        self.depths = self.tree.depths[0].tolist()
        own = at_nodes(self.scores, self.tree.parents).float()
        self.regret = (own.amax(-1) - own.gather(2, self.tree.tokens[..., None])[..., 0]).clamp_min(0.0)[0].tolist()
        self.log_q = self.tree.scores[0].tolist()
        self.is_chain = self.parents[1:] == list(range(len(self.parents) - 1))
        self.drawn = self._draws()

    def _draws(self) -> list[int]:
        """A draw from p at every node."""
        if self.greedy:
            return self.scores[0].argmax(-1).tolist()
        chances = self.scores[0].float().softmax(-1).cpu()
        return torch.multinomial(chances, 1, generator=self.generator)[:, 0].tolist()

    def end(self, node: int, token: int) -> int:
        """The state in which a round ends that emits ``token`` at ``node`` of the whole tree, and goes no further."""
        children = self.children.get(node)
        if not children:
            return UNKNOWN
        if any(self.tokens[child] == token for child in children):
            return HIT
        return bin_of(self.regret[self.first(children)])

    def first(self, children: Sequence[int]) -> int:
        """The drafter's first choice."""
        return max(children, key=lambda child: (self.log_q[child], -child))

    def cut(self, root: int, shape: TreeShape, tilt: float) -> list[int]:
        """Nodes of the part that a tree of this shape under ``root`` would have, ascending."""
        below = [root]
        for node in range(root + 1, len(self.parents)):
            if self.parents[node] in below and self.depths[node] - self.depths[root] <= shape.depth:
                below.append(node)
        if self.is_chain:
            return below[: self._believed(below, shape.stop_below, tilt) + 1]
        if len(below) > shape.nodes:
            part = self.tree.keep(torch.tensor([below], device=self.scores.device))
            kept = likeliest(part.scores, part.parents, shape.depth, tilt, shape.nodes)
            below = sorted(below[place] for place in kept[0].tolist())
        return below

    def _believed(self, chain: Sequence[int], stop_below: float, tilt: float) -> int:
        """Drafts of a chain until the drafter no longer believes in it."""
        if stop_below:
            if tilt not in self._tilted:
                steps = torch.tensor(self.log_q).diff()[:, None]
                self._tilted[tilt] = [0.0, *tilted(steps, tilt)[:, 0].tolist()]
            total = 0.0
            for drafted, node in enumerate(chain[1:], 1):
                total += self._tilted[tilt][node]
                if total < math.log(stop_below):
                    return drafted
        return len(chain) - 1

    def walked(self, rule: Rule, nodes: Sequence[int]) -> tuple[int, ...]:
        """The part to walk on for a verdict on ``nodes``."""
        if self.is_chain and not looks_ahead(rule, self.tree.sampled and not self.greedy):
            return tuple(range(nodes[0], len(self.parents)))  # what is cut away changes no verdict on what is left
        return tuple(nodes)

    def narrowed(self, parts: Sequence[Sequence[int]]) -> tuple[Verification, list[int]]:
        """The round on each of these parts, a row each, at temperature 0, and the vocabulary that it is about: the
        drafts and the likeliest tokens, numbered anew. For rules that look at nothing but regrets and texts.
        """
        kept = dict.fromkeys([*self.tokens, *self.drawn])
        number = {token: place for place, token in enumerate(kept)}
        index = torch.tensor(list(kept), device=self.scores.device)
        narrow = self.scores[0][:, index]
        text = [number.setdefault(token, len(number)) for token in self.text]
        rows, texts = [], []
        for nodes in parts:
            place = {node: at for at, node in enumerate(nodes)}
            parents = [0, *(place[self.parents[node]] for node in nodes[1:])]
            tokens = [number[self.tokens[node]] for node in nodes]
            rows.append((tokens, parents, [self.log_q[node] - self.log_q[nodes[0]] for node in nodes]))
            texts.append(text + [number[token] for token in self._path(nodes[0])])
        tree = DraftTree.of_lists(rows, len(index), narrow.device)
        most = tree.tokens.shape[1]
        at = torch.tensor([[*nodes, *[0] * (most - len(nodes))] for nodes in parts], device=narrow.device)
        scores = narrow[at]
        return Verification(tree, scores, scores, True, texts=Texts(texts, device=narrow.device)), list(kept)

    def _path(self, node: int) -> list[int]:
        """Tokens after the whole tree's root down to the node."""
        path = []
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def part(self, nodes: Sequence[int]) -> Verification:
        """The same round on these nodes alone, ascending; the first is the root."""
        index = torch.tensor(nodes, device=self.tree.tokens.device)
        whole = len(nodes) == len(self.parents)
        taken = self.tree.keep(index[None])
        logits = self.logits if whole else self.logits[:, index]
        scores = logits if self.scores is self.logits else self.scores if whole else self.scores[:, index]
        uniforms = torch.rand(1, len(nodes), 3, generator=self.generator).to(index.device)
        return Verification(
            taken, logits, scores, self.greedy, uniforms, process_draft=None if self.greedy else self._process,
            texts=Texts([self.text + self._path(nodes[0])], device=index.device),
        )  # fmt: skip

    def _process(self, tree: DraftTree) -> Tensor:
        return expand_draft(tree.q_logits, tree.draft_ids, self.logits.shape[-1]) / self.temperature


def looks_ahead(rule: Rule, sampled: bool) -> bool:
    """May the rule's verdict on a draft depend on those below it? Of rules that are not known it may."""
    if isinstance(rule, Tilted):
        return not sampled
    ours = type(rule).__module__.startswith("fsd_infer.rules.")
    return not ours or isinstance(rule, Fly) or isinstance(rule, Exact) and rule.block


@dataclass(frozen=True, slots=True)
class _Start:
    """A round to be replayed: a node of the whole tree as its root, the state in which it begins, the tokens left."""

    rule: Rule
    shape: TreeShape
    root: int
    state: int
    room: int


class Replay:
    """All rules with all shapes.

    Args:
        rules: to replay.
        shapes: to replay each with.
        eos: tokens that end an answer.

    Attributes:
        rounds: by rule and shape.
        drafted: by rule and shape, of the decoded rounds: how many, and the sums of their trees' depths and nodes.
    """

    def __init__(self, rules: Sequence[Rule], shapes: Sequence[TreeShape], eos: frozenset[int]) -> None:
        self.eos = eos
        self.rounds: dict[Cell, Rounds] = {(rule, shape): Rounds() for rule in rules for shape in shapes}
        self.drafted: dict[Cell, tuple[int, int, int]] = dict.fromkeys(self.rounds, (0, 0, 0))

    def add(self, seen: Evidence) -> None:
        """One round of exact decoding, and of a chain the rounds that follow it within what was drafted."""
        walks: dict[_Part, list[_Emitted]] = {}
        starts = [_Start(rule, shape, 0, seen.state, seen.room) for rule, shape in self.rounds]
        while starts:
            cuts = [seen.cut(start.root, start.shape, start.rule.tilt(seen.greedy)) for start in starts]
            parts = [(start.rule, seen.walked(start.rule, nodes)) for start, nodes in zip(starts, cuts, strict=True)]
            _walk(seen, [part for part in dict.fromkeys(parts) if part not in walks], walks)
            found = zip(starts, cuts, parts, strict=True)
            after = [self._add(seen, start, nodes, walks[part]) for start, nodes, part in found]
            starts = [start for start in after if start is not None]

    def _add(self, seen: Evidence, start: _Start, nodes: Sequence[int], walk: Sequence[_Emitted]) -> _Start | None:
        """Count one round; the one that follows it, if what it drafts is known."""
        rule, shape, root = start.rule, start.shape, start.root
        steps, end = self._steps(seen, nodes, walk, start.room)
        deepest = max(seen.depths)
        if root == 0:
            depth = max(seen.depths[node] for node in nodes)
            count, depths, total = self.drafted[rule, shape]
            self.drafted[rule, shape] = (count + 1, depths + depth, total + len(nodes))
        elif seen.depths[end] == deepest < seen.depths[root] + shape.depth:
            steps = steps[:-1]  # a chain of this shape would have gone on there, how is not known
        if steps:
            self.rounds[rule, shape].add(start.state, steps, real=root == 0)
        if not (seen.is_chain and steps and steps[-1].ends == HIT):
            return None
        return _Start(rule, shape, seen.children[end][0], HIT, start.room - len(steps))

    def _steps(
        self, seen: Evidence, nodes: Sequence[int], walk: Sequence[_Emitted], room: int
    ) -> tuple[list[Step], int]:
        """The round on these nodes: its steps, and the node of the whole tree at which the last token was emitted."""
        kept, steps = set(nodes), list[Step]()
        for node, token, nats, lossy, drafted in walk:
            leaf = kept.isdisjoint(seen.children.get(node, ()))
            if leaf:  # perhaps only of the tree that was cut: the law is p
                token, nats, lossy = seen.drawn[node], 0.0, False
            if token in self.eos or len(steps) + 1 == room:
                return [*steps, Step(nats, lossy, BEGINNING)], node
            if leaf or not drafted:
                return [*steps, Step(nats, lossy, seen.end(node, token))], node
            steps.append(Step(nats, lossy))
        raise AssertionError("a round ends with a token that is no draft")


def _walk(seen: Evidence, parts: Sequence[_Part], walks: dict[_Part, list[_Emitted]]) -> None:
    """What each rule emits on its part of the tree."""
    narrow = [part for part in parts if seen.greedy and isinstance(part[0], Tilted) and part[0].gate is None]
    if narrow:
        round, vocabulary = seen.narrowed([nodes for _, nodes in narrow])
        verdict = apply_rules([rule for rule, _ in narrow], round)
        for row, part in enumerate(narrow):
            walks[part] = _emitted(part[1], verdict, row, vocabulary)
    for part in parts:
        if part not in walks:
            walks[part] = _emitted(part[1], part[0](seen.part(part[1])), 0)


def _emitted(
    nodes: Sequence[int], verdict: Verdict, row: int, vocabulary: Sequence[int] | None = None
) -> list[_Emitted]:
    """``vocabulary``: tokens by the numbers that the verdict has, None: they are the same."""
    accepted = int(verdict.accepted[row])
    path, tokens, spent, sources = (
        x[row].tolist() for x in (verdict.path, verdict.tokens, verdict.spent, verdict.sources)
    )
    return [
        (
            nodes[path[step]],
            tokens[step] if vocabulary is None else vocabulary[tokens[step]],
            spent[step],
            sources[step] == Source.GATE,
            step < accepted,
        )
        for step in range(accepted + 1)
    ]
