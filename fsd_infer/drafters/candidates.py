"""Candidates of a dynamic tree, as a head drafts them depth by depth, and the best of them as a tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_infer.device.transfer import lists, to_device
from fsd_infer.drafters.online import RoundChoice
from fsd_infer.drafters.shape import TreeShape
from fsd_infer.drafters.visits import likeliest, visit_scores_by_level
from fsd_infer.tree import DraftTree, TreeRow, ancestors_of, at_nodes


@dataclass
class Level:
    """Candidates of one depth: [B, E * width] tokens and cumulative log q, under the expanded nodes [B, E]."""

    tokens: Tensor
    scores: Tensor
    expanded: Tensor
    before: Tensor  # cumulative log q of the expanded nodes themselves
    logits: Tensor


def keep_best(
    roots: Tensor,
    levels: list[Level],
    shape: TreeShape,
    ids: Tensor | None,
    tilt: float,
    choice: RoundChoice | None = None,
) -> DraftTree:
    """The tree of the ``nodes - 1`` candidates that are visited most likely, or of what ``choice`` keeps; ids [Vd]:
    what q is about.
    """
    if choice is not None:
        return _best_in_lists(roots, levels, shape, ids, tilt, choice)
    # in lists NaN, which is refused later, has no order
    in_lists = roots.device.type == "cpu" and not any(level.scores.isnan().any() for level in levels)
    return (_best_in_lists if in_lists else _best_in_tensors)(roots, levels, shape, ids, tilt)


def _best_in_tensors(
    roots: Tensor, levels: list[Level], shape: TreeShape, ids: Tensor | None, tilt: float
) -> DraftTree:
    """Nothing waits for a device."""
    width, device = shape.width, roots.device
    batch = roots.shape[0]
    tokens = torch.cat([roots[:, None]] + [level.tokens for level in levels], dim=1)  # [B, 1 + C]
    scores = torch.cat([level.scores for level in levels], dim=1)  # [B, C]
    parents = torch.cat([level.expanded.repeat_interleave(width, dim=1) for level in levels], dim=1)  # [B, C]
    depths = torch.cat([torch.full_like(level.tokens[0], d + 1) for d, level in enumerate(levels)])  # [C]
    q_nodes = torch.cat([level.expanded for level in levels], dim=1)  # [B, R] node of each row of q
    q_logits = torch.cat([level.logits for level in levels], dim=1)  # [B, R, Vd]

    kept = min(shape.max_nodes - 1, scores.shape[1])  # fewer where drafting stopped early
    visits = visit_scores_by_level([(level.scores, level.expanded, level.before) for level in levels], tilt)
    # stable: at equal scores (log q = 0) the earlier node, hence the parent, goes first
    chosen = visits.sort(dim=-1, descending=True, stable=True).indices[:, :kept].sort(dim=-1).values
    number = torch.zeros_like(tokens)  # old node number -> number in the kept tree
    number.scatter_(1, chosen + 1, torch.arange(1, kept + 1, device=device).expand(batch, kept))
    kept_parents = number.gather(1, parents.gather(1, chosen))
    root = torch.zeros(batch, 1, dtype=torch.long, device=device)
    tree_parents = torch.cat([root, kept_parents], dim=1)

    row_of = torch.full_like(tokens, -1).scatter_(
        1, q_nodes, torch.arange(q_nodes.shape[1], device=device).expand_as(q_nodes)
    )
    row_of = torch.cat([row_of[:, :1], row_of.gather(1, chosen + 1)], dim=1)  # [B, N]
    inner = torch.zeros_like(row_of, dtype=torch.bool).scatter_(1, kept_parents, True)
    # Hand over the rows of inner nodes only. Counting them would wait for a device: there are at most so many.
    index = (inner.cumsum(1) - 1).masked_fill(~inner, -1)
    most = min(kept, q_nodes.shape[1])
    rows = torch.zeros(batch, most + 1, dtype=torch.long, device=device)  # the last column takes what is no inner node
    rows = rows.scatter_(1, torch.where(inner, index, most), row_of)[:, :most]
    return DraftTree(
        tokens=torch.cat([roots[:, None], tokens.gather(1, chosen + 1)], dim=1),
        parents=tree_parents,
        depths=torch.cat([root, depths[chosen]], dim=1),
        ancestors=ancestors_of(tree_parents),
        q_logits=at_nodes(q_logits, rows),
        q_index=index,
        draft_ids=ids,
        scores=torch.cat([torch.zeros_like(scores[:, :1]), scores.gather(1, chosen)], dim=1),
    )


def _best_in_lists(
    roots: Tensor,
    levels: list[Level],
    shape: TreeShape,
    ids: Tensor | None,
    tilt: float,
    choice: RoundChoice | None = None,
) -> DraftTree:
    """On a CPU some dozen candidates are sorted in Python sooner than as many operations are started. Elsewhere this
    waits for the device.
    """
    width, rows, q_rows = shape.width, [], []  # q_rows: of the inner nodes
    whole = [torch.cat([getattr(level, name) for level in levels], 1) for name in ("tokens", "scores", "expanded")]
    found = list(zip(*lists(roots[:, None], *whole)))
    parents_of = [[0] + [node for node in expanded for _ in range(width)] for _, _, _, expanded in found]
    scores_of = [[0.0, *scores] for _, _, scores, _ in found]
    candidates = list(zip(scores_of, parents_of))
    kept = likeliest(candidates, tilt, shape.max_nodes) if choice is None else choice.keep(candidates)
    for (root, drafts, _, expanded), (scores, parents), chosen in zip(found, candidates, kept):
        tokens = [*root, *drafts]
        q_row = {node: place for place, node in enumerate(expanded)}
        nodes = [0, *chosen]
        number = {node: place for place, node in enumerate(nodes)}
        tree_parents = [number[parents[node]] for node in nodes]
        inner = {parent: place for place, parent in enumerate(sorted(set(tree_parents[1:])))}
        q_rows.append([q_row[nodes[parent]] for parent in inner])
        q_index = [inner.get(place, -1) for place in range(len(nodes))]
        best = TreeRow([tokens[n] for n in nodes], tree_parents, [scores[n] for n in nodes], q_index)
        rows.append(best.best_first())
    most = max(map(len, q_rows))
    index = torch.tensor([row + [0] * (most - len(row)) for row in q_rows], dtype=torch.long)
    q_logits = torch.cat([level.logits for level in levels], dim=1)
    return DraftTree.from_rows(rows, at_nodes(q_logits, to_device(index, roots.device)), ids)
