"""Random rounds on deterministic trees and on sampled chains for the tests of rules, and comparisons of verdicts."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import torch
from torch import Tensor

from fsd_core.functional import path_sums
from fsd_infer.rules import OutputDistribution, RoundInput, Rule, RuleInputs, TokenHistory, Verdict
from fsd_infer.rules.walk import walk
from fsd_infer.trees.tree import DraftTree, Nodes

INF = math.inf
# Every kind of rule, most with and without their options.
SPECS = [
    *("exact", "fuzzy:js:0.1", "fuzzy:top_k_js:3:0.1", "fuzzy:tv:inf", "fuzzy:js:inf:min_p=0.3"),
    *("fuzzy:kl_qp:0.2:gate=processed", "fuzzy:js:0.3:budget=0.4", "fuzzy-strict:js:0.1", "random:0.5", "draft-only"),
    *("draft-only:budget=0.5", "tilted:1", "tilted:0.3:budget=0.4", "tilted:0.5:min_p=0.2:gate=0.1", "lenient:0.5"),
    *("threshold:0.4:0.8", "typical", "relaxed:2:0.2", "cactus:0.1", "cascade-token", "ensemble:0.7", "mars:0.7"),
]


class OneByOne(Rule):
    """`exact`, but each drawn draft is tested alone, as lossy rules test it where they decode exactly."""

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        return OutputDistribution.target(inputs)


def tree_round(
    seed: int,
    batch: int = 6,
    nodes: int = 9,
    vocab: int = 12,
    greedy: bool = False,
    reduced: bool = False,
    mask: bool = False,
    **changes: object,
) -> RoundInput:
    """Random trees of random shapes; children are the drafter's most likely tokens, as far as there are any."""
    generator = torch.Generator().manual_seed(seed)
    draft_ids = torch.arange(0, vocab, 2) if reduced else None
    parents = torch.zeros(batch, nodes, dtype=torch.long)
    logits = torch.randn(batch, nodes, vocab, generator=generator) * 2
    full = logits + torch.randn(batch, nodes, vocab, generator=generator) * 0.8
    if draft_ids is not None:
        outside = torch.ones(vocab, dtype=torch.bool)
        outside[draft_ids] = False
        full[..., outside] = -INF
    tokens = torch.zeros(batch, nodes, dtype=torch.long)
    taken = torch.zeros(batch, nodes, dtype=torch.long)
    for row in range(batch):
        for node in range(1, nodes):
            parent = int(torch.randint(0, node, (1,), generator=generator))
            while taken[row, parent] == 4:
                parent = int(torch.randint(0, node, (1,), generator=generator))
            parents[row, node] = parent
            tokens[row, node] = full[row, parent].argsort(descending=True)[taken[row, parent]]
            taken[row, parent] += 1
    inner = taken > 0
    q_index = torch.where(inner, inner.cumsum(-1) - 1, -1)
    q = full if draft_ids is None else full[..., draft_ids]
    q_logits = torch.full((batch, int(inner.sum(-1).max()), q.shape[-1]), math.nan)  # unused rows are never read
    row_index, node_index = inner.nonzero(as_tuple=True)
    q_logits[row_index, q_index[row_index, node_index]] = q[row_index, node_index]
    steps = full.log_softmax(-1).flatten(1).gather(1, parents * vocab + tokens).index_fill(1, torch.tensor([0]), 0.0)
    scores = path_sums(steps, parents, nodes)
    tree = DraftTree(tokens, parents, scores, q_logits, q_index, draft_ids)
    scores = masked(logits, 0.7) if mask else logits
    uniforms = torch.rand(batch, nodes, 3, generator=generator)
    texts = TokenHistory(tokens[:, :1].tolist())
    return replace(RoundInput(tree, logits, scores, greedy, uniforms, texts=texts), **changes)  # type: ignore[arg-type]


def chain_round(seed: int, length: int = 4, vocab: int = 10, greedy: bool = False, mask: bool = False) -> RoundInput:
    """Eight chains of drafts that are sampled from q."""
    generator, batch = torch.Generator().manual_seed(seed), 8
    logits = torch.randn(batch, length + 1, vocab, generator=generator) * 1.5
    q_logits = logits[:, :-1] + torch.randn(batch, length, vocab, generator=generator) * 0.8
    scores, q_scores = (masked(x, 0.8) if mask else x for x in (logits, q_logits))
    drafts = torch.multinomial(q_scores.softmax(-1).flatten(0, 1), 1, generator=generator).view(batch, length)
    tree = DraftTree.chain(torch.cat([torch.zeros_like(drafts[:, :1]), drafts], 1), q_logits, q_scores=q_scores)
    texts = TokenHistory(tree.tokens[:, :1].tolist())
    uniforms = torch.rand(batch, length + 1, 3, generator=generator)
    return RoundInput(tree, logits, scores, greedy, uniforms, texts=texts)


def text_round(text: list[int], drafts: list[int], scores: Tensor, greedy: bool, **changes: object) -> RoundInput:
    """A chain of drafts without q after a text, with the scores [n + 1, V] there."""
    tree = DraftTree.chain(torch.tensor([[text[-1], *drafts]]), torch.empty(1, 0, scores.shape[-1]))
    tree.q_index = torch.full((1, len(drafts) + 1), -1)
    uniforms = torch.rand(1, len(drafts) + 1, 3)
    round = RoundInput(tree, scores[None], scores[None], greedy, uniforms, texts=TokenHistory([text]))
    return replace(round, **changes)  # type: ignore[arg-type]


def masked(logits: Tensor, temperature: float, keep: int | None = None) -> Tensor:
    """Processed as by a request with a temperature and a top-k mask that leaves ``keep`` tokens, by default half."""
    kth = logits.topk(keep or logits.shape[-1] // 2, dim=-1).values[..., -1:]
    return (logits / temperature).masked_fill(logits < kth, -INF)


def any_round(shape: str, seed: int, greedy: bool = False) -> RoundInput:
    """A tree or a chain, every other one with masked scores, and every other pair of trees with a reduced drafter."""
    if shape == "chain":
        return chain_round(seed, greedy=greedy, mask=seed % 2 == 1)
    return tree_round(seed, greedy=greedy, mask=seed % 2 == 1, reduced=seed % 4 > 1)


def tree_of(
    *rows: Nodes, vocab: int, q_logits: Tensor | None = None, q_index: list[list[int]] | None = None
) -> DraftTree:
    """Trees by hand: tokens, parents and scores of each row; without q, unless ``q_index`` [B, N] says whose it is."""
    tree = DraftTree.of_lists(rows, vocab, torch.device("cpu"))
    return tree if q_logits is None else replace(tree, q_logits=q_logits, q_index=torch.tensor(q_index))


def drawn_tree(
    kind: str, drafted: int | None, q_type: torch.dtype, rows: int, nodes: int = 8, columns: int = 23
) -> DraftTree:
    """Random trees with padding and contexts without q, of drawn nodes among others.

    Args:
        kind: "tree", "chain" or "likely tokens".
        drafted: ids of the drafter's vocabulary; None: all.
        q_type: of the logits that nodes are drawn from; the raw ones are in bf16.
        rows, nodes, columns: B, N and V.
    """
    parents = (torch.rand(rows, nodes) * torch.arange(nodes)).long()
    parents = (torch.arange(nodes) - 1).clamp_min(0).expand(rows, -1) if kind == "chain" else parents
    drawn, scores = torch.rand(rows, nodes) < 0.6, -torch.rand(rows, nodes).mul(4).cumsum(1)
    drawn &= ~((parents[:, :, None] == parents[:, None]) & drawn[:, None]).tril(-1).any(-1)  # one of siblings
    scores[:, 0], drawn[:, 0] = 0.0, False
    scores[::3, -2:], drawn[::3, -2:] = -torch.inf, False
    ids = None if drafted is None else torch.randperm(columns)[:drafted].int()
    entries = torch.stack([torch.randperm(drafted or columns)[:nodes] for _ in range(rows)])
    q, index = torch.randn(rows, 4, drafted or columns).mul(2), torch.randint(-1, 4, (rows, nodes))
    tree = DraftTree(entries if ids is None else ids[entries].long(), parents, scores, q.bfloat16(), index, ids)
    tree = tree if kind == "likely tokens" else replace(tree, q_scores=q.masked_fill(q > 4, -torch.inf).to(q_type))
    return replace(tree, drawn=drawn) if kind == "tree" else tree


def take(tree: DraftTree, rows: Tensor) -> DraftTree:
    """The trees of some rows, in any number."""
    values = {field.name: getattr(tree, field.name) for field in fields(tree) if field.name != "draft_ids"}
    return DraftTree(
        **{name: x[rows] if isinstance(x, Tensor) else x for name, x in values.items()}, draft_ids=tree.draft_ids
    )


def verdict_of(rule: Rule, round: RoundInput) -> Verdict:
    """What the rule says."""
    rows = list(range(round.tree.tokens.shape[0]))
    budget = INF if rule.budget is None else rule.budget
    inputs, left = RuleInputs(round), round.budget_left
    left = torch.full([len(rows)], budget, dtype=torch.float64) if left is None else left
    return walk(inputs, [(rule.restricted_output(inputs), rows)], left)


def assert_same(a: Verdict, b: Verdict) -> None:
    for field in ("accepted", "tokens", "sources", "relaxed", "path"):
        assert torch.equal(getattr(a, field), getattr(b, field)), field
    assert torch.equal(a.first_choices, b.first_choices)
    torch.testing.assert_close(a.spent, b.spent, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.logprob_gap, b.logprob_gap, rtol=1e-5, atol=1e-6, equal_nan=True)


def check_tree(tree: DraftTree) -> None:
    """Parents come before children, siblings differ, depths, ancestors and scores are what they say."""
    batch, nodes = tree.tokens.shape
    for row in range(batch):
        parents, tokens, scores = tree.parents[row].tolist(), tree.tokens[row].tolist(), tree.scores[row].tolist()
        assert parents[0] == 0
        assert scores[0] == 0.0
        assert all(parents[node] < node for node in range(1, nodes))
        drafts = [node for node in range(1, nodes) if scores[node] > -INF]
        assert len({(parents[node], tokens[node]) for node in drafts}) == len(drafts)
        assert all(scores[node] <= scores[parents[node]] for node in range(nodes))
        assert all(tree.depths[row, node] == tree.depths[row, parents[node]] + 1 for node in range(1, nodes))
    assert bool((tree.q_index[~tree.is_child.any(-1)] == -1).all())
