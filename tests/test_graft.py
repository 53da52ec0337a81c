"""Trees of two drafters merged: what is kept, what the rules make of it, and that answers stay exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_core import functional
from fsd_infer import FsdError, FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import GraftedDrafter, LMDrafter, LookupDrafter, NoDrafter
from fsd_infer.drafters.graft import _warn_sampled, keep_nodes, union_of
from fsd_infer.trees.tree import DraftTree, select_nodes
from tests.families import VOCAB, tiny_model, tiny_prompts
from tests.kernel_toys import needs_kernels
from tests.rules_enumeration import check_distribution
from tests.rules_toy import ROWS, Toy, V, child_of
from tests.tree_rounds import check_tree, take, tree_of, tree_round

Path_ = tuple[int, ...]


def one_tree(nodes: list[tuple[int, int, float]], q: bool = True) -> DraftTree:
    """A tree for one row from (parent, token, chance given the parent); the root is added."""
    tokens, parents, scores = [0], [0], [0.0]
    for parent, token, chance in nodes:
        tokens.append(token)
        parents.append(parent)
        scores.append(scores[parent] + math.log(chance))
    inner = sorted(set(parents[1:])) if q else []
    q_index = [inner.index(node) if node in inner else -1 for node in range(len(tokens))]
    q_logits = torch.randn(1, len(inner), VOCAB)
    return tree_of((tokens, parents, scores), vocab=VOCAB, q_logits=q_logits, q_index=[q_index])


def merge_trees(main: DraftTree, grafted: DraftTree, nodes: int) -> DraftTree:
    union = union_of(main, grafted, depth=8)
    return keep_nodes(union, main, select_nodes(union.scores, union.parents, 8, 0.0, nodes))


def paths(tree: DraftTree, row: int) -> dict[Path_, int]:
    """Node by path of tokens, padding left out."""
    found: dict[Path_, int] = {}
    for node in range(tree.tokens.shape[1]):
        if tree.scores[row, node] > -math.inf:
            line = tree.ancestors[row, node].nonzero()[:, 0]
            found[tuple(tree.tokens[row, line].tolist())] = node
    return found


@pytest.mark.parametrize("kernel", [pytest.param(True, marks=needs_kernels), False])
def test_padding_below_padding_stays_padding(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees with drawn nodes expand candidates of chance 0 where they have no others. A NaN would rank first."""
    if not kernel and "cpu" in functional.KERNELS.get("tree_union", {}):
        monkeypatch.delitem(functional.KERNELS["tree_union"], "cpu")
    shared = [(0, 1, 0.6), (0, 2, 0.3), (1, 3, 0.5)]
    main, padded = one_tree(shared), one_tree([*shared, (0, 5, 0.1), (4, 6, 0.1), (5, 7, 0.1)])
    padded.scores[:, 4:] = -math.inf
    grafted = one_tree([(0, 1, 0.5), (1, 4, 0.9)], q=False)
    union = union_of(padded, grafted, depth=8)
    assert not union.scores.isnan().any()
    assert paths(union, 0).keys() == paths(union_of(main, grafted, depth=8), 0).keys()
    torch.testing.assert_close(merge_trees(padded, grafted, 6).scores[:, :5], merge_trees(main, grafted, 5).scores)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("nodes", [2, 5, 9, 14, 25])
def test_merged_trees_are_trees(nodes: int, reduced: bool) -> None:
    for seed in range(6):
        main = tree_round(seed, reduced=reduced).tree
        grafted = tree_round(seed + 100, nodes=7).tree
        main.q_logits.nan_to_num_(0.0)
        grafted.q_logits.nan_to_num_(0.0)
        tree = merge_trees(main, grafted, nodes)
        check_tree(tree)
        unions = [paths(main, row).keys() | paths(grafted, row).keys() for row in range(6)]
        for row in range(6):
            kept, ours = paths(tree, row), paths(main, row)
            assert kept.keys() <= unions[row]
            assert len(kept) == min(nodes, len(unions[row]))
            favourite = {}
            for path, node in ours.items():
                if path != (0,):
                    favourite.setdefault(path[:-1], []).append((favour(main, row, path, ours), path))
                assert path not in kept or tree.tokens[row, kept[path]] == main.tokens[row, node]
            for path, node in kept.items():
                has_q = int(tree.q_index[row, node]) >= 0
                assert has_q == (path in favourite and max(favourite[path])[1] in kept)
                if has_q:
                    before = main.q_logits[row, main.q_index[row, ours[path]]]
                    assert torch.equal(tree.q_logits[row, tree.q_index[row, node]], before)


def favour(tree: DraftTree, row: int, path: Path_, nodes: dict[Path_, int]) -> float:
    """The drafter's logit of a path's last token."""
    token = path[-1] if tree.draft_ids is None else tree.draft_ids.tolist().index(path[-1])
    return float(tree.q_logits[row, tree.q_index[row, nodes[path[:-1]]], token])


@dataclass(frozen=True)
class GraftedToy(Toy):
    """The toy's tree with a grafted tree of random tokens and chances: two children of the root and one grandchild.

    Attributes:
        wish: [contexts, V] the grafted drafter's order of preference by context.
        chance: [contexts] of its first wish.
        nodes: of the merged tree.
    """

    wish: Tensor = torch.empty(0)
    chance: Tensor = torch.empty(0)
    nodes: int = 6

    @classmethod
    def grafted(cls, seed: int, nodes: int, processed: bool = False, reduced: bool = False) -> GraftedToy:
        toy = Toy.make(seed, processed=processed, reduced=reduced)
        generator = torch.Generator().manual_seed(seed)
        wish = torch.rand(toy.p.shape, generator=generator).argsort(-1)
        chance = torch.rand(toy.p.shape[0], generator=generator) * 0.9 + 0.05
        return cls(toy.p, toy.q, processed=processed, draft_ids=toy.draft_ids, wish=wish, chance=chance, nodes=nodes)

    def draft(self, contexts: Tensor, generator: torch.Generator) -> tuple[DraftTree, Tensor]:
        """A tree follows from the text. It is made once for all rows with that text."""
        different, row = contexts.unique(return_inverse=True)
        tree, where = self.trees(different), [different]
        for node in range(1, tree.tokens.shape[1]):
            above = torch.stack(where, 1).gather(1, tree.parents[:, node : node + 1])[:, 0]
            where.append(child_of(above, tree.tokens[:, node]))
        return take(tree, row), torch.stack(where, 1)[row]

    def trees(self, contexts: Tensor) -> DraftTree:
        main, _ = super().draft(contexts, torch.Generator())
        rows = []
        for context in contexts.tolist():
            first, second = self.wish[context, :2].tolist()
            chance, after = float(self.chance[context]), V * context + 1 + first
            steps = [0.0, math.log(chance), math.log((1 - chance) / 2)]
            steps.append(steps[1] + math.log(float(self.chance[after])))
            rows.append(([0, first, second, int(self.wish[after, 0])], [0, 0, 0, 1], steps))
        return merge_trees(main, tree_of(*rows, vocab=V), self.nodes)


@pytest.mark.parametrize("toy", [
    GraftedToy.grafted(31, nodes=6),
    GraftedToy.grafted(33, nodes=10),  # more than some rows have: padded in batches, not in the enumeration
    GraftedToy.grafted(32, nodes=6, processed=True), GraftedToy.grafted(36, nodes=10, reduced=True),
], ids=["budget", "padded", "processed", "reduced"])  # fmt: skip
@pytest.mark.parametrize("spec", [
    *("exact", "fuzzy:js:0.08", "fuzzy:js:inf", "fuzzy:js:0.3:budget=0.5", "fuzzy-strict:js:0.08", "draft-only"),
    *("tilted:1", "tilted:0.5:exact_ngram_size=2"),
])  # fmt: skip
def test_sequence_distribution_and_spent_divergence(spec: str, toy: GraftedToy) -> None:
    check_distribution(spec, toy, ROWS // 4, seed=3)


def test_sampled_chains_are_left_alone() -> None:
    target = Target(tiny_model("llama"))
    small = LMDrafter(target, target, TreeShape.chain(3))
    options: dict[str, Any] = dict(rule="exact:block=true", max_new_tokens=12, do_sample=True, temperature=1.5, seed=4)
    _warn_sampled.cache_clear()
    alone = FuzzyDecoder(target, small).generate(tiny_prompts(), **options)
    with pytest.warns(UserWarning, match="lm samples its drafts"):
        grafted = FuzzyDecoder(target, GraftedDrafter(small, LookupDrafter(VOCAB))).generate(tiny_prompts(), **options)
    assert grafted.sequences == alone.sequences
    with pytest.raises(FsdError, match="at least 2 nodes, got 1"):
        GraftedDrafter(NoDrafter(VOCAB), LookupDrafter(VOCAB))
