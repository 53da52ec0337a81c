"""Grow dynamic trees (EAGLE-2, arXiv 2406.16858) with a model that has a KV cache: a draft head or a small LM.

Each depth expands the ``width`` nodes with the highest cumulative log q and gives each ``width`` children. At the end
the ``nodes`` candidates that a walk visits most likely are kept. Under the exact rule these have the highest cumulative
log q. :mod:`fsd_infer.trees.tree` computes them under a distribution that favours drafts. A child's score never
exceeds its parent's, so the kept nodes form a connected tree.

Drafting may stop before the last depth (``TreeShape.stop_below``). This decision and the tree are functions of the
context, so no rule's distribution changes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from fsd_core import functional
from fsd_core.functional import at_nodes, is_host
from fsd_core.tensors import to_device
from fsd_infer.drafters.drawing import AcceptanceRatios, ChainDrawing, Drawing, accepted_and_expected
from fsd_infer.drafters.frontier import NO_SUCCESSORS, Frontier, Successors, successor_lists
from fsd_infer.drafters.session import DraftRequest, DraftSession
from fsd_infer.drafters.tree_drafter import TreeDrafter
from fsd_infer.rules.verification import Verdict
from fsd_infer.trees.priced_growth import PricedGrowth
from fsd_infer.trees.shape import MenuMasks, TreeShape, forecast
from fsd_infer.trees.tree import DraftTree, Draws, leaf_visit_scores, visit_scores


class TreeSession(DraftSession):
    """A session with a KV cache. Text token i occupies slot i, and expanded nodes follow the text, depth by depth.

    Args:
        drafter: the drafter whose model grows the trees.
        request: as for :meth:`Drafter.start`.

    Attributes:
        device: device of the drafter's model.
        lengths: [B] slots of each row's text, the root's included.
        shape: shape of the next tree: the drafter's own, or one within it, which may have prices.
    """

    per_row = DraftSession.per_row | {"lengths"}
    shape: TreeShape
    _ratios: AcceptanceRatios | None = None  # what the draws of earlier rounds have taught

    def __init__(self, drafter: TreeDrafter, request: DraftRequest) -> None:
        self.drafter, self.shape, self.device = drafter, request.shape or drafter.shape, drafter.model.device
        self.cache = drafter.model.new_cache(request.batch, drafter.slots(request.cache_slots))
        self.draft_bonus, self.request = request.draft_bonus, request
        self.lengths = torch.zeros(request.batch, dtype=torch.long, device=self.device)
        self._forecasts: list[list[float]] = []
        self._masks: dict[tuple[int, int], MenuMasks] = {}  # by depth and width of the tree
        self._drawing: Drawing | ChainDrawing | None = None  # the draws of this round
        self._ratios = self._acceptance_ratios()
        self._node_positions: list[Tensor] = []  # [B, E] of each depth's expanded nodes, if a session asks for them
        self._stopped: Tensor | None = None  # [] bool, on devices: whether drafting has stopped

    def _acceptance_ratios(self) -> AcceptanceRatios | None:
        """Return the running ratios learned from earlier draws; None: no nodes are drawn, or rounds may be recorded."""
        request, prices = self.request, self.shape.prices
        if request.draws is not Draws.TREE or prices is None and not is_host(self.device):
            return None
        # a request with a seed learns only from its own rounds, so that its answer repeats
        if request.seeded or prices is not None and request.clock is None:
            return AcceptanceRatios()
        kind = round(10 * request.temperature), round(4 * min(request.draft_bonus, 4.0))
        return self.drafter.ratios.setdefault(kind, AcceptanceRatios())

    @property
    def width(self) -> int:
        """Children of an expanded node."""
        return 1 if self.request.draws is Draws.CHAIN else self.shape.width

    @property
    def needs_report(self) -> bool:
        return self.shape.prices is not None

    @property
    def shape_key(self) -> Hashable:
        return self.shape

    def keep_rows(self, rows: Tensor) -> None:
        super().keep_rows(rows)
        self.cache.keep_rows(rows)

    def _detached(self) -> Self:
        result = super()._detached()
        result.cache = self.cache.detached()
        return result

    def _reallocate(self) -> None:
        rows, slots = len(self.lengths), self.drafter.slots(self.request.cache_slots)
        self.cache = self.cache.reallocated(lambda: self.drafter.model.new_cache(rows, slots))

    def draft(self, roots: Tensor) -> DraftTree:
        depth = self._max_depth()
        self.growth = None if self.shape.prices is None else PricedGrowth(self.shape, len(self.lengths))
        if depth < 1 or self.growth is not None and not self.growth.starts():
            return DraftTree.root_only(roots, self.drafter.vocabulary)
        logits, ids = self._read_roots()
        self._drawing = None if self.request.draws is Draws.NONE else self._new_drawing()
        return self._select_nodes(self._grow(roots, logits, ids, depth))

    def _max_depth(self) -> int:
        """Return the depth to which candidates may be drafted in this round."""
        return self.shape.depth

    def _new_drawing(self) -> Drawing | ChainDrawing:
        """Return this round's draws."""
        if self.request.draws is Draws.CHAIN:
            return ChainDrawing(self.request.process, self.request.generator)
        nodes = self.shape.max_nodes
        min_accept_prob = 1.0 / (2 * nodes) if self.shape.prices is None else self.shape.prices.min_accept_prob
        return Drawing(self.request.process, self.request.generator, nodes - 1, min_accept_prob, self._ratios)

    @property
    def feedback_count(self) -> int:
        return (self._ratios is not None) + bool(self.request.menu)

    def feedback(self, tree: DraftTree, logits: Tensor, verdict: Verdict) -> list[Tensor]:
        feedback = [] if self._ratios is None else [accepted_and_expected(verdict.path, verdict.accepted, tree)]
        if self.request.menu:
            forecast = tree.forecast
            if forecast is None:  # the tree is only a root
                forecast = torch.full((len(logits), len(self.request.menu) + 1), math.nan, device=logits.device)
            feedback.append(forecast)
        return feedback

    def learn(self, feedback: Sequence[Tensor], verdict: Verdict) -> None:
        if self._ratios is not None:
            self._ratios.learn(feedback[0].sum(0).tolist())
        if self.request.menu:
            self._forecasts = feedback[-1].tolist()

    def forecasts(self) -> list[list[float]]:
        return self._forecasts

    @abstractmethod
    def _read_roots(self) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, 1, Vd] at the roots, and the target id of each entry of Vd; None if Vd = V."""

    def _read_nodes(self, tokens: Tensor, parents: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Run the model on the nodes to expand. The cache already has their slots.

        Args:
            tokens: [B, E].
            parents: [B, E] indices of their parents among the nodes of the previous call; 0, the root, at first.
            positions: [B, E].
            visible: [B, E, S] bool; whether node i attends to slot s.

        Returns:
            [B, E, Vd] logits of their children.
        """
        raise NotImplementedError(f"{type(self).__name__} needs _read_nodes(), or an _expand() of its own.")

    def _propose(self, logits: Tensor, scores: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Propose children from logits [B, E, Vd]: ln q [B, E, width], entries of the vocabulary, and which are drawn.

        Args:
            logits: logits at the nodes that were expanded last.
            scores: [B, E] their cumulative log q.
            ancestors: as for :meth:`Drawing.propose`.
        """
        if self._drawing is None:
            return *functional.topk_logprobs(logits, self.width), None
        log_probs = scores if self.growth is None else self.growth.accept_log_probs(scores)
        return self._drawing.propose(logits, log_probs, ancestors, self.width)

    def _grow(self, roots: Tensor, logits: Tensor, ids: Tensor | None, max_depth: int) -> DraftTree:
        """Return the tree of all candidates.

        Args:
            roots: [B] tokens.
            logits: [B, 1, Vd] at the roots.
            ids: [Vd] target id of each entry; None if Vd = V.
            max_depth: depth of the deepest candidates.
        """
        self._stopped, self._node_positions = None, []
        candidates = Candidates(roots, isinstance(self._drawing, Drawing))
        self._visits = candidates.expanded_scores  # [B, E] tilted scores of the nodes that were expanded last
        for depth in range(1, max_depth + 1):
            # each expanded node proposes w children
            log_q, entries, drawn = self._propose(logits, candidates.expanded_scores, candidates.ancestors)  # [B, E, w]
            if self._stopped is not None:
                log_q = log_q.masked_fill(self._stopped, -math.inf)
                drawn = None if drawn is None else drawn & ~self._stopped
            candidates.add(logits, entries if ids is None else ids[entries], log_q, drawn)
            # the model reads the best of these children
            chosen = None if depth == max_depth else self._next_frontier(log_q, candidates.scores[-1], drawn)  # [B, E']
            if chosen is None:
                break
            if isinstance(self._drawing, Drawing) and drawn is not None:
                self._drawing.expand(drawn.flatten(1).gather(1, chosen))
            parent = chosen // self.width  # [B, E'] index of each one's parent among the nodes expanded before
            candidates.expand(chosen, parent)
            logits = self._expand(candidates.tokens[-1].gather(1, chosen), parent, candidates.ancestors, depth)
        return candidates.tree(ids, self._drawing)

    def _next_frontier(self, log_q: Tensor, scores: Tensor, drawn: Tensor | None) -> Tensor | None:
        """Choose the candidates to expand next.

        Args:
            log_q: [B, E, w] ln q of the candidates, falling along w.
            scores: [B, E · w] their cumulative log q.
            drawn: [B, E, w] which were drawn; None: none.

        Returns:
            [B, E'] indices among a row's E · w candidates; None if drafting stops.
        """
        if self.growth is not None:
            return self.growth.expand(log_q, drawn)
        best = scores.topk(self.width, dim=-1).indices
        if self.shape.stop_below:
            steps = self._visits[..., None] + leaf_visit_scores(log_q, self.draft_bonus)
            self._visits = steps.flatten(1).gather(1, best)
            stops = ~(self._visits.exp().sum(-1).max() >= self.shape.stop_below)
            if functional.host_all(stops):
                return None
            # what the host does not know: the next candidates are padding where drafting stops
            self._stopped = stops if self._stopped is None else self._stopped | stops
        return best

    def _select_nodes(self, tree: DraftTree) -> DraftTree:
        """Return the tree of the candidates to verify: a drawn chain is kept whole, or the distribution would shift."""
        if self.request.menu:
            assert tree.depth_bound is not None
            key = tree.depth_bound, self.width
            if key not in self._masks:  # at first: a recording cannot copy them to the device
                self._masks[key] = MenuMasks(*key, self.request.menu, self.device)
            visits = visit_scores(tree.scores, tree.parents, tree.depth_bound, self.draft_bonus)
            tree.forecast = forecast(visits, self._masks[key])
        if self.request.draws is Draws.CHAIN:
            if self.growth is not None:
                self.growth.note(tree)
            return tree
        if self.growth is not None:
            return tree.keep(self.growth.choose(tree))
        return tree.likeliest(self.shape.depth, self.draft_bonus, self.shape.nodes)

    def _expand(self, tokens: Tensor, parents: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        """Run the model on nodes [B, E]. Their keys follow those of the text and of earlier depths."""
        _, visible = self.cache.after_text(self.lengths, ancestors)
        positions = (self.lengths + (depth - 1))[:, None].expand_as(tokens)
        return self._read_nodes(tokens, parents, positions, visible)

    def successors(self, frontier: Frontier, nodes: Sequence[Sequence[int]], count: int) -> list[list[Successors]]:
        within = [[node for node in of_row if self._can_grow(frontier, row, node)] for row, of_row in enumerate(nodes)]
        proposed: list[list[Successors]] = [[] for _ in nodes]
        if any(within):
            logits, ids = self._read_frontier(frontier, within)
            log_q, entries = functional.topk_logprobs(logits, min(count, logits.shape[-1]))
            proposed = successor_lists(log_q, entries if ids is None else ids[entries], within)
        rows = [dict(zip(read, successors)) for read, successors in zip(within, proposed, strict=True)]
        return [[table.get(node, NO_SUCCESSORS) for node in of_row] for of_row, table in zip(nodes, rows, strict=True)]

    def _can_grow(self, frontier: Frontier, row: int, node: int) -> bool:
        """Whether the model can draft below a node."""
        return True

    def _read_frontier(self, frontier: Frontier, nodes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Read nodes below several beams.

        Returns:
            Logits [B, M, Vd] of their successors, padded, and the target id of each entry of Vd; None if Vd = V.
        """
        raise NotImplementedError


class CachedSession(TreeSession):
    """A session that reads each node of a frontier once. Their slots follow the text's, as a round's do."""

    per_row = TreeSession.per_row | {"_cached"}

    def __init__(self, drafter: TreeDrafter, request: DraftRequest) -> None:
        super().__init__(drafter, request)
        self._cached: list[set[int]] = [{0} for _ in range(request.batch)]  # the nodes of a frontier in the cache

    def _add_node_positions(self, positions: Tensor, slots: int) -> None:
        """Set the positions [B, E] of the next depth's nodes in the cache. ``slots``: number of visible slots."""
        self._node_positions.append(positions)
        nodes = torch.cat(self._node_positions, 1)
        text = torch.arange(slots, device=self.device).repeat(len(nodes), 1)
        after = self.lengths[:, None] + torch.arange(nodes.shape[1], device=self.device)
        self.cache.positions = text.scatter(1, after, nodes)

    def _uncached(self, frontier: Frontier, nodes: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return these nodes and those above them that the cache lacks, parents first, and count them as cached."""
        unread = []
        for row, (of_row, cached) in enumerate(zip(nodes, self._cached, strict=True)):
            unread.append(sorted({above for node in of_row for above in frontier.path(row, node)} - cached))
            cached.update(unread[-1])
        return unread

    def _is_final(self, frontier: Frontier, row: int, node: int) -> bool:
        """Whether what the model has read of a node stays valid once the target has verified it."""
        return True

    def follow_beams(self, frontier: Frontier, nodes: Sequence[Sequence[int]], grown: Sequence[int]) -> None:
        ends = [row[count - 1 : count] if count else [] for row, count in zip(nodes, grown, strict=True)]
        unread = [[node for node in row if node not in cached] for row, cached in zip(ends, self._cached, strict=True)]
        if any(unread):
            self._read_frontier(frontier, unread)
        frontier.move(self.cache, self.lengths - 1, nodes)
        self.lengths += to_device(torch.tensor(grown), self.device)
        for row, (of_row, count) in enumerate(zip(nodes, grown, strict=True)):
            below = enumerate(of_row[count:], 1)
            cached = {new for new, node in below if node in self._cached[row] and self._is_final(frontier, row, node)}
            self._cached[row] = {0, *cached}


class Candidates:
    """The candidates of trees as they grow depth by depth, and those of them that the model has read.

    Args:
        roots: [B] tokens.
        draws: whether some nodes may be drawn.

    Attributes:
        tokens, parents, scores: [B, n] of each depth, the roots' first, as for :class:`.DraftTree`.
        drawn: [B, n] bool of each depth; empty: no nodes are drawn, or all are.
        expanded: [B, E] node numbers of those that the model has read, of each depth.
        expanded_scores: [B, E] cumulative log q of those that it read last.
        ancestors: [B, E, m] which of the m nodes that it has read below the root are each one's ancestors or itself.
        logits: [B, E, Vd] of the children of expanded nodes, of each depth.
    """

    def __init__(self, roots: Tensor, draws: bool) -> None:
        root = torch.zeros_like(roots)[:, None]
        self.expanded_scores = torch.zeros(root.shape, device=roots.device)
        self.tokens, self.parents, self.scores = [roots[:, None]], [root], [self.expanded_scores]
        self.drawn = [root.bool()] if draws else []
        self.expanded, self.logits = [root], list[Tensor]()
        self.ancestors = torch.zeros(len(roots), 1, 0, dtype=torch.bool, device=roots.device)
        self._first = 0  # number of the first node of the last depth

    def add(self, logits: Tensor, tokens: Tensor, log_q: Tensor, drawn: Tensor | None) -> None:
        """Add the children [B, E, w] of the nodes that were expanded last, which have these ``logits``."""
        self._first += self.tokens[-1].shape[1]
        self.logits.append(logits)
        self.tokens.append(tokens.flatten(1))
        self.parents.append(self.expanded[-1][..., None].expand_as(log_q).flatten(1))
        self.scores.append((self.expanded_scores[..., None] + log_q).flatten(1))
        if drawn is not None:
            self.drawn.append(drawn.flatten(1))

    def expand(self, chosen: Tensor, parent: Tensor) -> None:
        """Expand candidates ``chosen`` [B, E'] of the last depth, below the ``parent``-th of the nodes before."""
        itself = torch.eye(chosen.shape[1], dtype=torch.bool, device=chosen.device).expand(len(chosen), -1, -1)
        self.expanded.append(self._first + chosen)
        self.expanded_scores = self.scores[-1].gather(1, chosen)
        self.ancestors = torch.cat([at_nodes(self.ancestors, parent), itself], dim=-1)

    def tree(self, ids: Tensor | None, drawing: Drawing | ChainDrawing | None) -> DraftTree:
        """Return the trees of all candidates.

        Args:
            ids: as for :meth:`TreeSession._grow`.
            drawing: what has drawn nodes; None: nothing.
        """
        expanded, parents = torch.cat(self.expanded, 1), torch.cat(self.parents, 1)
        rows = torch.arange(expanded.shape[1], device=expanded.device).expand_as(expanded)
        return DraftTree(
            torch.cat(self.tokens, 1),
            parents,
            torch.cat(self.scores, 1),
            torch.cat(self.logits, 1),
            torch.full_like(parents, -1).scatter(1, expanded, rows),
            ids,
            q_scores=None if drawing is None else torch.cat(drawing.scores, 1),
            drawn=torch.cat(self.drawn, 1) if self.drawn else None,
            fixed=torch.cat(drawing.fixed, 1) if isinstance(drawing, Drawing) else None,
            depth_bound=len(self.tokens) - 1,
        )
