"""Distributions of sampled trees that the engine does not have, beside the mixed scheme, on contexts of a draft head.

    python -m benchmarks.sampled_trees --temperature 1.0 --json benchmarks/results/sampled-trees-1.0.json

**A node.** At each context of the accepted paths: the probability that one of k children is accepted. ``likeliest``
is p(C) of the k likeliest, ``chain`` one draft drawn from q, ``mixed`` k - 1 likeliest and one from the rest of q
(arXiv:2502.18779), ``rsd`` k drafts without replacement (2402.14160), averaged over draws, ``two`` k - 2 likeliest and
two such drafts.

**A tree.** At each round, trees of one shape are drafted and verified without being emitted: accepted drafts of the
mixed scheme, of drafts without replacement tested from the root (``rsd``), and of the same drafts by traversal
verification from the leaves (``traversal``, 2505.12398).
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.recorded import BUILT_IN, PROMPTS, parser_of, record_main
from fsd_bench.intervals import ratio_interval, ratio_text
from fsd_core.divergence import expand_draft
from fsd_core.tables import number, table
from fsd_core.text.rows import read_jsonl
from fsd_infer import FuzzyDecoder
from fsd_infer.engine.loop import decode_round
from fsd_infer.engine.round import verify
from fsd_infer.engine.state import DecodeState
from fsd_infer.trees.tree import DraftTree

CHILDREN = (1, 2, 4, 10)
TREE_SCHEMES = ("mixed", "rsd", "traversal")


def likeliest(p: Tensor, q: Tensor, k: int) -> Tensor:
    """p(C) of the k likeliest tokens of q; p and q are [V]."""
    return p[q.topk(k).indices].sum()


def mixed(p: Tensor, q: Tensor, k: int) -> Tensor:
    """p(C) + Σ min(p, q_r) outside C, with C the k - 1 likeliest tokens of q."""
    fixed = q.topk(k - 1).indices
    rest = q.index_fill(0, fixed, 0.0)
    return p[fixed].sum() + torch.minimum(p, rest / rest.sum().clamp_min(1e-30)).sum()


def several(p: Tensor, q: Tensor, k: int, drawn: int, generator: torch.Generator, repeat: int = 8) -> Tensor:
    """The chance that one of k - ``drawn`` likeliest tokens or of drafts without replacement is accepted, over draws.

    The drafts are tested in turn, each against what the ones before left of p. The last residual may be a fixed token.
    """
    fixed = q.topk(k - drawn).indices
    rest = normalised(q.index_fill(0, fixed, 0.0))
    found = torch.zeros((), dtype=p.dtype)
    for _ in range(repeat):
        r, left, fails = p, rest, torch.ones((), dtype=p.dtype)
        for _ in range(drawn):
            fails = fails * (1.0 - torch.minimum(r, left).sum())  # over this draft, given those before
            refused = (left - r).clamp_min(0.0)  # the distribution of a draft that is rejected
            if float(fails) <= 1e-12 or float(refused.sum()) <= 0.0:
                break
            r = normalised((r - left).clamp_min(0.0))
            left = normalised(left.index_fill(0, without_replacement(refused, 1, generator), 0.0))
        found = found + (1.0 - fails * (1.0 - r[fixed].sum())) / repeat
    return found


def without_replacement(q: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """[k] tokens in the order in which they are drawn (the Gumbel-top-k trick); fewer if q has fewer."""
    races = q / torch.empty_like(q).exponential_(generator=generator)
    return races.topk(min(k, int((q > 0).sum()))).indices


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum().clamp_min(1e-30)


class Sampled:
    """A tree whose children are in draw order, with p and q at each node.

    Args:
        tokens, parents: [N] of the nodes, parents first.
        p, q: [N, V]; q at nodes with children.
        fixed: [N] bool; nodes that were not drawn, for the mixed scheme; None: all were drawn without replacement.
    """

    def __init__(self, tokens: list[int], parents: list[int], p: Tensor, q: Tensor, fixed: list[bool]) -> None:
        self.tokens, self.p, self.q, self.fixed = tokens, p, q, fixed
        self.children: dict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(parents[1:], 1):
            self.children[parent].append(node)


def walk_mixed(tree: Sampled, uniform: Callable[[], float]) -> tuple[int, Tensor, int]:
    """Return the accepted drafts, the distribution of the token after them, and the last node, by the mixed scheme."""
    node = count = 0
    while children := tree.children[node]:
        p, q = tree.p[node], tree.q[node]
        fixed = [child for child in children if tree.fixed[child]]
        rest = normalised(q.index_fill(0, torch.tensor([tree.tokens[child] for child in fixed]).long(), 0.0))
        drawn = next((child for child in children if not tree.fixed[child]), None)
        if drawn is not None and uniform() * rest[tree.tokens[drawn]] < p[tree.tokens[drawn]]:
            node, count = drawn, count + 1
            continue
        left = p if drawn is None else normalised((p - rest).clamp_min(0.0))
        place, chosen = uniform(), None
        for child in fixed:
            place -= float(left[tree.tokens[child]])
            if place < 0:
                chosen = child
                break
        if chosen is None:
            taken = torch.tensor([tree.tokens[child] for child in fixed]).long()
            return count, normalised(left.index_fill(0, taken, 0.0)), node
        node, count = chosen, count + 1
    return count, tree.p[node], node


def walk_rsd(tree: Sampled, uniform: Callable[[], float]) -> tuple[int, Tensor, int]:
    """The same by recursive rejection sampling of drafts without replacement."""
    node = count = 0
    while children := tree.children[node]:
        r, left, went = tree.p[node], tree.q[node], None
        for child in children:
            x = tree.tokens[child]
            if uniform() * left[x] < r[x]:
                went = child
                break
            r = normalised((r - left).clamp_min(0.0))
            left = normalised(left.index_fill(0, torch.tensor([x]), 0.0))
        if went is None:
            return count, r, node
        node, count = went, count + 1
    return count, tree.p[node], node


def walk_traversal(tree: Sampled, uniform: Callable[[], float]) -> tuple[int, Tensor, int]:
    """The same by traversal verification: leaves first, each with the chance of its whole path."""
    p, q = dict(enumerate(tree.p)), dict(enumerate(tree.q))
    chance, path = {0: 1.0}, [0]
    queue = {node: list(children) for node, children in tree.children.items()}
    while True:
        node = path[-1]
        if queue.get(node):  # down to the next child that was not rejected
            child = queue[node][0]
            x = tree.tokens[child]
            chance[child] = min(1.0, chance[node] * float(p[node][x]) / max(float(q[node][x]), 1e-30))
            path.append(child)
            continue
        if uniform() < chance[node] or node == 0:
            return len(path) - 1, p[node], node
        path.pop()  # rejected: its parent keeps the residual
        above = path[-1]
        queue[above].pop(0)
        residual = (chance[above] * p[above] - q[above]).clamp_min(0.0)
        mass = float(residual.sum())
        chance[above] = mass / max(mass + 1.0 - chance[above], 1e-30)
        p[above] = residual / max(mass, 1e-30)
        q[above] = normalised(q[above].index_fill(0, torch.tensor([tree.tokens[node]]), 0.0))


WALKS = {"mixed": walk_mixed, "rsd": walk_rsd, "traversal": walk_traversal}


class SchemeProbe:
    """Measures the distributions at the root of each round, and lets the round go on.

    Args:
        temperature: of both models.
        branches: children of each node by depth.
        generator: of all draws.
        walks: walks per tree.
    """

    def __init__(self, temperature: float, branches: Sequence[int], generator: torch.Generator, walks: int = 4) -> None:
        self.temperature, self.branches, self.generator, self.walks = temperature, branches, generator, walks
        self.nodes: dict[str, list[float]] = defaultdict(list)
        self.trees: dict[str, list[float]] = defaultdict(list)

    def uniform(self) -> float:
        return float(torch.rand((), generator=self.generator))

    def __call__(self, state: DecodeState) -> Any:
        for drawn in (True, False):
            tree = self._grown(state, all_drawn=drawn)
            for scheme in TREE_SCHEMES[1:] if drawn else TREE_SCHEMES[:1]:
                counts = [WALKS[scheme](tree, self.uniform)[0] for _ in range(self.walks)]
                self.trees[scheme].append(sum(counts) / self.walks)
        made = decode_round(state)
        self._nodes_of(made.tree, made.logits, made.verdict.path[0, : 1 + int(made.verdict.accepted[0])].tolist())
        return made

    def _distribution(self, logits: Tensor) -> Tensor:
        return (logits.double() / self.temperature).softmax(-1)

    def _nodes_of(self, tree: DraftTree, logits: Tensor, path: list[int]) -> None:
        for node in path:
            row = int(tree.q_index[0, node])
            if row < 0:
                continue
            p = self._distribution(logits[0, node])
            q = self._distribution(expand_draft(tree.q_logits[0, row].float(), tree.draft_ids, len(p)))
            for k in CHILDREN:
                self.nodes[f"likeliest {k}"].append(float(likeliest(p, q, k)))
                self.nodes[f"mixed {k}"].append(float(mixed(p, q, k)))
                for scheme, drawn in (("rsd", k), ("two", 2)):
                    if drawn < k or scheme == "rsd":
                        self.nodes[f"{scheme} {k}"].append(
                            float(several(p, q, k, drawn, self.generator, min(8, 7 * k - 6)))
                        )

    def _grown(self, state: DecodeState, all_drawn: bool) -> Sampled:
        """A tree of the shape at the roots, with the target's p. Drafts and their cache slots are void afterwards."""
        session: Any = state.session
        logits, ids = session._read_roots()
        vocabulary = state.target.vocab_size
        tokens, parents, fixed, qs = [int(state.roots[0])], [0], [True], {}
        level_nodes, ancestors = [0], torch.zeros(1, 1, 0, dtype=torch.bool)
        for level, width in enumerate(self.branches, 1):
            new, above = [], []
            for place, node in enumerate(level_nodes):
                q = qs[node] = self._distribution(expand_draft(logits[0, place].float(), ids, vocabulary))
                if all_drawn:
                    children = without_replacement(q, width, self.generator).tolist()
                    are_fixed = [False] * len(children)
                else:
                    children = q.topk(width - 1).indices.tolist()
                    rest = q.index_fill(0, torch.tensor(children).long(), 0.0)
                    children += without_replacement(normalised(rest), 1, self.generator).tolist()
                    are_fixed = [index < width - 1 for index in range(len(children))]
                for token, is_fixed in zip(children, are_fixed):
                    new.append(len(tokens))
                    above.append(place)
                    tokens.append(token)
                    parents.append(node)
                    fixed.append(is_fixed)
            if level == len(self.branches):
                break
            own, places = torch.eye(len(new), dtype=torch.bool)[None], torch.tensor(above)
            ancestors = torch.cat([ancestors[:, places], own], -1)
            logits = session._expand(torch.tensor([tokens[node] for node in new])[None], places[None], ancestors, level)
            level_nodes = new
        shape = torch.zeros(1, len(tokens))
        tree = DraftTree(
            torch.tensor([tokens]), torch.tensor([parents]), shape, torch.empty(1, 0, vocabulary), shape.long() - 1
        )
        p = self._distribution(verify(state, tree).logits[0])
        q = torch.stack([qs.get(node, torch.zeros(vocabulary, dtype=p.dtype)) for node in range(len(tokens))])
        return Sampled(tokens, parents, p, q, fixed)


def prompts_of(args: argparse.Namespace) -> Iterator[str]:
    rows = [row["turns"][0] for _, row in read_jsonl(args.prompts)]
    yield from rows[:: args.every][: args.limit]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return means of each distribution over contexts and rounds, and ratios to the mixed scheme over prompts."""
    decoder = FuzzyDecoder.from_pretrained(args.target)
    generator = torch.Generator().manual_seed(args.seed)
    nodes: dict[str, list[list[float]]] = defaultdict(list)
    trees: dict[str, list[list[float]]] = defaultdict(list)
    for number_, prompt in enumerate(prompts_of(args)):
        probe = SchemeProbe(args.temperature, [int(width) for width in args.branches.split(",")], generator)
        with patch("fsd_infer.engine.loop.decode_round", probe):
            decoder.generate(
                prompt, temperature=args.temperature, seed=args.seed + number_, do_sample=True,
                max_new_tokens=args.max_new_tokens,
            )  # fmt: skip
        for into, found in ((nodes, probe.nodes), (trees, probe.trees)):
            for scheme, values in found.items():
                into[scheme].append(values)

    def summary(found: dict[str, list[list[float]]], base: Callable[[str], str]) -> dict[str, Any]:
        sums = {scheme: [(sum(values), float(len(values))) for values in of] for scheme, of in found.items()}
        means = {scheme: sum(one for one, _ in of) / sum(count for _, count in of) for scheme, of in sums.items()}
        ratios = {
            scheme: ratio_interval(of, sums[base(scheme)]) for scheme, of in sums.items() if base(scheme) != scheme
        }
        return {"mean": means, "to_mixed": ratios, "count": sum(count for _, count in next(iter(sums.values())))}

    return {
        "nodes": summary(nodes, lambda scheme: f"mixed {scheme.split()[1]}"),
        "trees": summary(trees, lambda scheme: "mixed"),
    }


def report(record: dict[str, Any]) -> str:
    """Return a table of each part."""
    parts = []
    for name, unit in (("nodes", "accepted"), ("trees", "accepted drafts per round")):
        part = record[name]
        rows = [
            [scheme, number(mean, 3), ratio_text(part["to_mixed"][scheme]) if scheme in part["to_mixed"] else ""]
            for scheme, mean in part["mean"].items()
        ]
        parts.append(table([f"{name}, {part['count']:.0f}", unit, "times mixed"], rows))
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.sampled_trees", __doc__, target=BUILT_IN, prompts=PROMPTS, every=1, limit=16, max_new_tokens=48,
        temperature=1.0, branches=("3,2,1", "children of each node by depth"), seed=1, json=None,
    )  # fmt: skip
    return record_main("benchmarks.sampled_trees", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
