"""Replay rules and shapes on the rounds of exact decoding.

A round of exact decoding with a deep tree has the target's distribution after every drafted prefix, whether exact
decoding goes there or not. So any rule's verdict on that tree, or on a part of it, needs no further forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsd_core.divergence import expand_draft
from fsd_infer.rules import Asd, Exact, Fly, RoundInput, Rule, Tilted, TokenHistory, TokenOrigin, Verdict, apply_rules
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import DraftTree, leaf_visit_scores, select_nodes

Cell = tuple[Rule, TreeShape]
Part = tuple[Rule, tuple[int, ...]]  # a rule, and the nodes of the whole tree that it walks on
# node that emits the token, token, nats, whether only a lossy distribution emits it, whether it is a draft
Emitted = tuple[int, int, float, bool, bool]


@dataclass
class ExactRound:
    """One round of exact decoding: the tree, the target's logits on it, and the text before it.

    Attributes:
        tree: [1, N].
        logits, scores: [1, N, V], raw and processed, on the target's device.
        greedy, temperature: options of the request.
        text: token ids of the prompt and the answer so far, the root included.
        answered: tokens of the answer so far, the root included.
        room: tokens that the answer may still have.
        generator: random generator of the replay's draws.
        sentence_ends: see :class:`fsd_infer.rules.texts.TokenHistory`.
        children: the children of each node.
        drawn: a draw from p at every node.
    """

    tree: DraftTree
    logits: Tensor
    scores: Tensor
    greedy: bool
    temperature: float
    text: list[int]
    answered: int
    room: int
    generator: torch.Generator
    sentence_ends: Tensor | None = None
    children: dict[int, list[int]] = field(init=False)
    drawn: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.parents = (x[0].tolist() for x in (self.tree.tokens, self.tree.parents))
        self.children, self._favoured = {}, dict[float, list[float]]()
        for node in range(1, len(self.parents)):
            self.children.setdefault(self.parents[node], []).append(node)
        self.depths = self.tree.depths[0].tolist()
        self.log_q = self.tree.scores[0].tolist()
        self.is_chain = self.parents[1:] == list(range(len(self.parents) - 1))
        if self.greedy:
            self.drawn = self.scores[0].argmax(-1).tolist()
        else:
            probs = self.scores[0].float().softmax(-1).cpu()
            self.drawn = torch.multinomial(probs, 1, generator=self.generator)[:, 0].tolist()

    def cut(self, shape: TreeShape, draft_bonus: float) -> list[int]:
        """Return the nodes, ascending, that a tree of this shape would have."""
        nodes = [node for node, depth in enumerate(self.depths) if depth <= shape.depth]
        if self.is_chain:
            return nodes[: self._believed(nodes, shape.stop_below, draft_bonus) + 1]
        if len(nodes) > shape.nodes:
            subtree = self.tree.keep(torch.tensor([nodes], device=self.scores.device))
            # drawn nodes stay, or the distribution would shift
            pinned = 0 if subtree.pinned is None else int(subtree.pinned[0].sum())
            count = max(shape.nodes, pinned + 1)
            selected = select_nodes(subtree.scores, subtree.parents, shape.depth, draft_bonus, count, subtree.pinned)
            nodes = sorted(nodes[index] for index in selected[0].tolist())
        return nodes

    def _believed(self, chain: Sequence[int], stop_below: float, draft_bonus: float) -> int:
        """Return the number of drafts after which a chain stops."""
        if stop_below:
            if draft_bonus not in self._favoured:
                steps = torch.tensor(self.log_q).diff()[:, None]
                self._favoured[draft_bonus] = leaf_visit_scores(steps, draft_bonus)[:, 0].cumsum(0).tolist()
            for drafted in range(1, len(chain)):
                if self._favoured[draft_bonus][drafted - 1] < math.log(stop_below):
                    return drafted
        return len(chain) - 1

    def walked(self, rule: Rule, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes to walk on for a verdict on ``nodes``."""
        settled = self.tree.drawn is None  # else a context's distribution depends on whether there are draws below it
        if self.is_chain and settled and not looks_ahead(rule, self.tree.sampled and not self.greedy):
            return tuple(range(len(self.parents)))  # drafts that were cut away change no verdict on those before them
        return tuple(nodes)

    def narrowed(self, parts: Sequence[Sequence[int]]) -> tuple[RoundInput, list[int]]:
        """Return the round on each of these parts, a row each, at temperature 0 over a reduced vocabulary.

        The vocabulary holds the drafts and the likeliest tokens. That is enough for rules that read only gaps and
        texts. The second value maps its ids to the target's.
        """
        kept = sorted({*self.tokens, *self.drawn})  # so that ties resolve as in the whole vocabulary
        number = {token: place for place, token in enumerate(kept)}
        index = torch.tensor(kept, device=self.scores.device)
        narrow = self.scores[0][:, index]
        text = [number.setdefault(token, len(number)) for token in self.text]
        rows = []
        for nodes in parts:
            place = {node: at for at, node in enumerate(nodes)}
            parents = [0, *(place[self.parents[node]] for node in nodes[1:])]
            rows.append(([number[self.tokens[node]] for node in nodes], parents, [self.log_q[node] for node in nodes]))
        tree = DraftTree.of_lists(rows, len(index), narrow.device)
        most = tree.tokens.shape[1]
        at = torch.tensor([[*nodes, *[0] * (most - len(nodes))] for nodes in parts], device=narrow.device)
        scores = narrow[at]
        answer, prompt = text[len(text) - self.answered :], text[: len(text) - self.answered]
        ends = self.sentence_ends
        if ends is not None:
            ends = ends[torch.tensor([*number, len(ends) - 1], device=ends.device).clamp_max(len(ends) - 1)]
        texts = TokenHistory([answer] * len(parts), [prompt] * len(parts), narrow.device, sentence_ends=ends)
        return RoundInput(tree, scores, scores, True, texts=texts), kept

    def part(self, nodes: Sequence[int]) -> RoundInput:
        """Return the same round on these nodes alone, ascending from the root."""
        index = torch.tensor(nodes, device=self.tree.tokens.device)
        whole = len(nodes) == len(self.parents)
        logits = self.logits if whole else self.logits[:, index]
        scores = logits if self.scores is self.logits else self.scores if whole else self.scores[:, index]
        uniforms = torch.rand(1, len(nodes), 3, generator=self.generator).to(index.device)
        return RoundInput(
            self.tree.keep(index[None]), logits, scores, self.greedy, uniforms,
            process_draft=None if self.greedy else self._process,
            texts=TokenHistory(*self._texts, device=index.device, sentence_ends=self.sentence_ends),
        )  # fmt: skip

    @property
    def _texts(self) -> tuple[list[list[int]], list[list[int]]]:
        begins = len(self.text) - self.answered
        return [self.text[begins:]], [self.text[:begins]]

    def _process(self, tree: DraftTree) -> Tensor:
        return expand_draft(tree.q_logits, tree.draft_ids, self.logits.shape[-1]) / self.temperature


def looks_ahead(rule: Rule, sampled: bool) -> bool:
    """Return whether the rule's verdict on a draft may depend on later drafts. Rules from outside count as such."""
    if isinstance(rule, Tilted):
        return not sampled
    ours = type(rule).__module__.startswith("fsd_infer.rules.")
    return not ours or isinstance(rule, (Asd, Fly)) or isinstance(rule, Exact) and sampled


@dataclass
class Tally:
    """Sums over the replayed rounds of one rule on one shape. ``lossy``: tokens that only its distribution emits."""

    rounds: int = 0
    tokens: int = 0
    nats: float = 0.0
    lossy: int = 0
    depths: int = 0
    nodes: int = 0


class Replay:
    """All rules on all shapes.

    Args:
        rules: rules to replay.
        shapes: shapes to replay each of them on.
        eos: tokens that end an answer.

    Attributes:
        tallies: by rule and shape.
    """

    def __init__(self, rules: Sequence[Rule], shapes: Sequence[TreeShape], eos: frozenset[int]) -> None:
        self.eos = eos
        self.tallies = {(rule, shape): Tally() for rule in rules for shape in shapes}

    def add(self, seen: ExactRound) -> None:
        """Replay one round of exact decoding."""
        cuts = {cell: seen.cut(cell[1], cell[0].draft_bonus(seen.greedy)) for cell in self.tallies}
        parts = {cell: (cell[0], seen.walked(cell[0], nodes)) for cell, nodes in cuts.items()}
        walks = walk(seen, dict.fromkeys(parts.values()))
        for cell, tally in self.tallies.items():
            steps = self.steps(seen, cuts[cell], walks[parts[cell]])
            tally.rounds += 1
            tally.tokens += len(steps)
            tally.nats += sum(nats for nats, _ in steps)
            tally.lossy += sum(lossy for _, lossy in steps)
            tally.depths += max(seen.depths[node] for node in cuts[cell])
            tally.nodes += len(cuts[cell])

    def steps(self, seen: ExactRound, nodes: Sequence[int], emitted: Sequence[Emitted]) -> list[tuple[float, bool]]:
        """Return (nats, whether only a lossy distribution emits it) of each token that the round emits on ``nodes``."""
        kept, steps = set(nodes), list[tuple[float, bool]]()
        for node, token, nats, lossy, drafted in emitted:
            leaf = kept.isdisjoint(seen.children.get(node, ()))
            if leaf:  # the tree may have been cut here, and then the distribution is p
                token, nats, lossy = seen.drawn[node], 0.0, False
            steps.append((nats, lossy))
            if leaf or not drafted or token in self.eos or len(steps) == seen.room:
                return steps
        raise AssertionError("a round ends with a token that is not a draft")


def walk(seen: ExactRound, parts: Iterable[Part]) -> dict[Part, list[Emitted]]:
    """Return what each rule emits on its part of the tree."""
    walks, parts = {}, list(parts)
    narrow = [part for part in parts if seen.greedy and isinstance(part[0], Tilted) and part[0].gate is None]
    if narrow:
        round, vocabulary = seen.narrowed([nodes for _, nodes in narrow])
        verdict = apply_rules([rule for rule, _ in narrow], round)
        for row, part in enumerate(narrow):
            walks[part] = _emitted(part[1], verdict, row, vocabulary)
    for part in parts:
        if part not in walks:
            walks[part] = _emitted(part[1], part[0](seen.part(part[1])), 0)
    return walks


def _emitted(
    nodes: Sequence[int], verdict: Verdict, row: int, vocabulary: Sequence[int] | None = None
) -> list[Emitted]:
    """``vocabulary``: the target's ids of the verdict's, None where they are the same."""
    accepted = int(verdict.accepted[row])
    facts = (x[row].tolist() for x in (verdict.path, verdict.tokens, verdict.spent, verdict.sources))
    return [
        (nodes[node], vocabulary[token] if vocabulary else token, spent, source == TokenOrigin.GATE, step < accepted)
        for step, (node, token, spent, source) in enumerate(zip(*facts))
        if step <= accepted
    ]
