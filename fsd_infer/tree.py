"""The draft tree: what a drafter proposes and a rule walks.

Shapes: ``B`` rows of the batch, ``N`` nodes per tree (the root included), ``I`` inner nodes (nodes with
children) that carry a drafter distribution, ``D`` the deepest node's depth, ``V`` the target's vocabulary,
``Vd`` the drafter's (a subset of the target's, or all of it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fsd_infer.device.transfer import lists, to_device


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True: visible) as eager attention adds it to its scores: 0, or the least number of ``dtype``."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


@dataclass
class DraftTree:
    """Candidate continuations of each row, as a tree of tokens. A chain is a tree of width 1.

    Node 0 is the root: the last token that was emitted, which the target has not read yet. A parent always has
    a smaller index than its children, and siblings carry different tokens.

    Attributes:
        tokens: [B, N] token ids in the target's vocabulary.
        parents: [B, N] index of each node's parent; the root's is 0.
        depths: [B, N] distance from the root (0 for the root).
        ancestors: [B, N, N] bool; ``ancestors[b, i, j]`` iff j is on the path root..i, both ends included.
        q_logits: [B, I, Vd] the drafter's raw next-token logits at the inner nodes (I may be 0).
        q_index: [B, N] row of ``q_logits`` that belongs to node i, or -1 where no distribution is known: at nodes
            without children, and where children come from a drafter without distributions (n-gram lookup). There
            every gate stays closed and the law is the target's.
        draft_ids: [Vd] target id of each drafter vocabulary entry, in any order; None if Vd = V.
        q_scores: [B, I, V] processed drafter logits from which the children were *sampled*, or None where
            the children are a deterministic function of the context (top-k or argmax). Only chains are sampled.
        scores: [B, N] estimated log-probability that node i is accepted: 0 at the root, a node's never above its
            parent's, -inf at padding. None where the drafter estimates nothing.
        rows: see :meth:`to_rows`.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    q_logits: Tensor
    q_index: Tensor
    draft_ids: Tensor | None = None
    q_scores: Tensor | None = None
    scores: Tensor | None = None
    rows: list[TreeRow] | None = None

    @property
    def sampled(self) -> bool:
        return self.q_scores is not None

    @property
    def max_depth(self) -> int:
        return int(self.depths.max())

    def to_rows(self) -> list[TreeRow]:
        """The tree in lists, with scores in any case. Unless it was made from lists, this waits for the device.

        A tree without scores gets cumulative log q; children of a node without q share it evenly.
        """
        if self.rows is None:
            scores = _estimated_scores(self) if self.scores is None else self.scores
            self.rows = [TreeRow(*row) for row in zip(*lists(self.tokens, self.parents, scores, self.q_index))]
        return self.rows

    @cached_property
    def nodes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and parents, [B][N] each. Unless the tree was made from lists, this waits for the device."""
        if self.rows is not None:
            return [row.tokens for row in self.rows], [row.parents for row in self.rows]
        tokens, parents = lists(self.tokens, self.parents)
        return tokens, parents

    @property
    def padding(self) -> list[set[int]]:
        """Each row's nodes that only fill it up to the longest row; only trees made of rows have any."""
        if self.rows is None:
            return [set() for _ in range(self.tokens.shape[0])]
        return [{node for node, score in enumerate(row.scores) if score == -math.inf} for row in self.rows]

    @classmethod
    def root_only(cls, tokens: Tensor, vocab_size: int) -> DraftTree:
        """A tree without drafts (plain decoding). tokens: [B]."""
        batch = tokens.shape[0]
        column = torch.zeros(batch, 1, dtype=torch.long, device=tokens.device)
        return cls(
            tokens=tokens[:, None],
            parents=column,
            depths=column,
            ancestors=torch.ones(batch, 1, 1, dtype=torch.bool, device=tokens.device),
            q_logits=torch.empty(batch, 0, vocab_size, device=tokens.device),
            q_index=column - 1,
        )

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        q_logits: Tensor,
        draft_ids: Tensor | None = None,
        q_scores: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> DraftTree:
        """A chain: tokens [B, N] with the root first, q_logits [B, N-1, Vd] where row i proposed tokens[:, i+1]."""
        batch, nodes = tokens.shape
        index = torch.arange(nodes, device=tokens.device)
        q_index = torch.where(index < nodes - 1, index, -1)
        return cls(
            tokens=tokens,
            parents=(index - 1).clamp_min(0).expand(batch, nodes),
            depths=index.expand(batch, nodes),
            ancestors=(index[:, None] >= index[None, :]).expand(batch, nodes, nodes),
            q_logits=q_logits,
            q_index=q_index.expand(batch, nodes),
            draft_ids=draft_ids,
            q_scores=q_scores,
            scores=scores,
        )

    @classmethod
    def from_rows(cls, rows: list[TreeRow], q_logits: Tensor, draft_ids: Tensor | None = None) -> DraftTree:
        """A tree per row, on the device of q_logits [B, I, Vd].

        Rows with fewer nodes are padded with leaves under their shallowest nodes without q. Those nodes' law is the
        target's whatever their children are, and no row comes to its padding, so no answer depends on it.
        """
        count = max(len(row.tokens) for row in rows)
        for row in rows:
            row.pad(count, q_logits.shape[-1])
        device = q_logits.device
        return cls(
            tokens=to_device(torch.tensor([row.tokens for row in rows]), device),
            parents=to_device(torch.tensor([row.parents for row in rows]), device),
            depths=to_device(torch.tensor([row.depths() for row in rows]), device),
            ancestors=to_device(_matrices([row.ancestors() for row in rows]), device),
            q_logits=q_logits,
            q_index=to_device(torch.tensor([row.q_index for row in rows]), device),
            draft_ids=draft_ids,
            scores=to_device(torch.tensor([row.scores for row in rows]), device),
            rows=rows,
        )


@dataclass
class TreeRow:
    """One row's tree in plain lists of N entries, for drafters that think in Python. Fields as in DraftTree.

    ``proposers``: see :meth:`proposer`; None if one drafter proposed all of it.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    q_index: list[int]
    proposers: list[int] | None = None

    def proposer(self, node: int) -> int:
        """Which of the drafters that the tree's drafter is made of proposed the node, the first of several."""
        return self.proposers[node] if self.proposers is not None and node < len(self.proposers) else 0

    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def ancestors(self) -> list[bytearray]:
        """[N][N] 1 where the second is an ancestor of the first, or is it."""
        count = len(self.parents)
        found = [bytearray(count)]
        found[0][0] = 1
        for node in range(1, count):
            line = found[self.parents[node]].copy()
            line[node] = 1
            found.append(line)
        return found

    def best_first(self) -> TreeRow:
        """The same tree, numbered down its likeliest path first, then down the others: if the answer takes that path,
        its keys and values lie in place already.
        """
        children: dict[int, list[int]] = {}
        for node in range(len(self.parents) - 1, 0, -1):
            children.setdefault(self.parents[node], []).append(node)
        order, waiting = [], [0]
        while waiting:
            order.append(node := waiting.pop())
            waiting += sorted(
                children.get(node, ()), key=self.scores.__getitem__
            )  # of equals the first is popped first
        number = {node: place for place, node in enumerate(order)}
        return TreeRow(
            [self.tokens[node] for node in order],
            [number[self.parents[node]] for node in order],
            [self.scores[node] for node in order],
            [self.q_index[node] for node in order],
            None if self.proposers is None else [self.proposers[node] for node in order],
        )

    def pad(self, count: int, ids: int) -> None:
        """Append leaves with tokens below ``ids`` until there are ``count`` nodes. Leaves are without q, so one is."""
        if len(self.tokens) == count:
            return
        depths = self.depths()
        hosts = sorted((node for node, row in enumerate(self.q_index) if row < 0), key=lambda node: depths[node])
        for host in hosts:  # a small vocabulary may run out of siblings; padding then hosts padding
            taken = {token for token, parent in zip(self.tokens[1:], self.parents[1:]) if parent == host}
            for token in range(ids):
                if len(self.tokens) == count:
                    return
                if token not in taken:
                    hosts.append(len(self.tokens))
                    self.tokens.append(token)
                    self.parents.append(host)
                    self.scores.append(-math.inf)
                    self.q_index.append(-1)


def _matrices(rows: list[list[bytearray]]) -> Tensor:
    """[B][N][N] bytes -> bool, at once: number by number takes longer than the rest of a tree."""
    whole = bytearray(b"".join(line for matrix in rows for line in matrix))
    return torch.frombuffer(whole, dtype=torch.bool).view(len(rows), len(rows[0]), -1)


def _estimated_scores(tree: DraftTree) -> Tensor:
    """[B, N], see :meth:`DraftTree.to_rows`."""
    parents = tree.parents
    siblings = torch.zeros_like(parents).scatter_add_(1, parents[:, 1:], torch.ones_like(parents[:, 1:]))
    steps = -siblings.clamp_min(1).float().log().gather(1, parents)
    if tree.q_logits.shape[1]:
        row = tree.q_index.gather(1, parents)
        column = tree.tokens
        if tree.draft_ids is not None:
            ids, places = tree.draft_ids.sort()
            column = places[torch.searchsorted(ids, column).clamp_max(len(ids) - 1)]
        log_q = tree.q_logits.float().log_softmax(-1)
        drafted = log_q[torch.arange(row.shape[0], device=row.device)[:, None], row.clamp_min(0), column]
        steps = torch.where(row >= 0, drafted, steps)
    steps[:, 0] = 0.0
    return torch.where(tree.ancestors, steps[:, None], 0.0).sum(-1)


def at_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """values [B, N, ...], nodes [B, K] -> [B, K, ...]. Copies whole entries, where gather goes number by number."""
    count = values.shape[1]
    index = nodes + count * torch.arange(nodes.shape[0], device=nodes.device)[:, None]
    return values.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, nodes.shape)


def ancestors_of(parents: Tensor) -> Tensor:
    """[B, N] parents (index order: parent before child) -> [B, N, N] ancestor-or-self matrix."""
    batch, nodes = parents.shape
    step = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=parents.device)
    step.scatter_(2, parents[..., None], True)
    reach = step | torch.eye(nodes, dtype=torch.bool, device=parents.device)
    hops = 1
    while hops < nodes:  # doubling: after k squarings all ancestors within 2**k hops are marked
        reach = (reach.float() @ reach.float()) > 0
        hops *= 2
    return reach


def visible_slots(lengths: Tensor, sees: Tensor) -> Tensor:
    """Which cache slots new tokens may attend to: the whole text, and chosen tokens after it.

    Args:
        lengths: [B] text length of each row, on the CPU; its tokens occupy the slots before it.
        sees: [B, M, E] bool; may token i attend to the e-th slot after the text.

    Returns:
        [B, M, S] bool on the device of ``sees``, with S = longest text + E.
    """
    if lengths.shape[0] == 1:  # no row has a longer text than its own
        return torch.nn.functional.pad(sees, (int(lengths), 0), value=True)
    extra = sees.shape[-1]
    offset = to_device(torch.arange(int(lengths.max()) + extra) - lengths[:, None], sees.device)  # [B, S]
    index = offset.clamp(0, max(extra - 1, 0))[:, None].expand(-1, sees.shape[1], -1)
    inside = (offset >= 0) & (offset < extra)
    return torch.where(inside[:, None], sees.gather(2, index) if extra else inside[:, None], (offset < 0)[:, None])
