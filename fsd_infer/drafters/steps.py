"""Grow trees with published heads that need no attention to the drafts: a node's state follows from its parent's.

Such a head starts from the text and makes, for a node, the logits of its children from the node's token and its
parent's state. Heads whose estimates do not depend on the drafts ignore both. :class:`StepSession` turns that into the
trees of :mod:`fsd_infer.drafters.growth`: chains, trees, drawn nodes. A new kind of head is a :class:`StepDrafter` with
``begin`` and ``step`` in a file of its own, entered in :data:`HEADS`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fsd_core.functional import at_nodes
from fsd_core.registry import Registry
from fsd_core.tensors import padded, to_device
from fsd_infer.device.cache import SlotCache
from fsd_infer.device.cuda_graphs import CachedModel
from fsd_infer.drafters.base import Drafter
from fsd_infer.drafters.frontier import Frontier
from fsd_infer.drafters.growth import TreeSession
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.tree_drafter import TreeDrafter
from fsd_infer.heads.hub import find
from fsd_infer.heads.weights import Weights, fill, naming
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import DraftTree


class StepDrafter(TreeDrafter):
    """A published head.

    Args:
        head: its weights.
        target: the model to draft for.
        depth: most tokens that it drafts.
        shape: see :class:`TreeDrafter`.
        draft_ids: [Vd] target id of each entry of its distributions; None if Vd = V.
        model: what keeps keys and values for it; None: nothing.
    """

    drafts_beams = reads_features = True

    def __init__(
        self,
        head: nn.Module,
        target: Target,
        depth: int,
        shape: TreeShape | None = None,
        draft_ids: Tensor | None = None,
        model: CachedModel | None = None,
    ) -> None:
        target.check_lm_head()
        self.head, self.depth, self.draft_ids = head, depth, draft_ids
        vocabulary = target.vocab_size if draft_ids is None else len(draft_ids)
        super().__init__(target, model or Cacheless(target.device), vocabulary, shape)

    @classmethod
    @abstractmethod
    def read(cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None) -> StepDrafter:
        """Read the head in a directory.

        Args:
            directory: directory with safetensors.
            config: its config.json.
            target: the model to draft for.
            shape: see :class:`TreeDrafter`.

        Raises:
            CheckpointError: malformed files, or a head for another target.
            VocabularyMismatchError: a head for another vocabulary.
        """

    def begin(self, features: Tensor) -> Tensor:
        """Return the state [B, 1, S] before the roots, from the target's final features before them [B, H]."""
        raise NotImplementedError  # for heads whose sessions override StepSession._begin() and _step()

    def step(self, depth: int, tokens: Tensor, state: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Read nodes of one depth, 0 at the roots.

        Args:
            depth: depth of the nodes.
            tokens: [B, E].
            state: [B, E, S] of their parents.
            features: [B, H] as for :meth:`begin`.

        Returns:
            Logits [B, E, Vd] of their children, and the nodes' states [B, E, S].
        """
        raise NotImplementedError

    def start(self, first_tokens: Tensor, request: DraftRequest) -> StepSession:
        return StepSession(self, request)

    def modules(self) -> list[nn.Module]:
        return [self.head]


def filled(head: nn.Module, weights: Weights, names: Mapping[str, str], target: Target) -> Any:
    """Fill a head on the device "meta" from files, and return it on the target's device. Raises as :func:`fill`."""
    fill(head, weights, names, target.dtype)
    return head.to(target.device)


# Drafters with a class method read() as StepDrafter's, by the names in fsd_infer.heads.kinds.
HEADS: Registry[Any] = Registry("kind of published head")


def load_published(name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
    """Load a head of any kind of :data:`HEADS`; arguments and result as for :meth:`Drafter.load`."""
    head = find(name, HEADS)
    if head is None:
        return None
    with naming(head.directory):
        result: Drafter = HEADS.get(head.kind).read(head.directory, head.config, target, tree)
    result.directory = head.directory
    return result


class Cacheless(CachedModel):
    """Placeholder for the model of a head that keeps no keys and values."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cache_config = device, SimpleNamespace(num_hidden_layers=1)

    def _read_one(self, cache: SlotCache, visible: Tensor, zero: Tensor) -> None:
        pass


class FeatureReader(CachedModel):
    """A model whose reading takes the target's features of a text, [B, M, F]."""

    target: Target

    @abstractmethod
    def read(self, cache: SlotCache, features: Tensor) -> None:
        """Write keys and values of features to the cache's slots, after :meth:`SlotCache.set_write_slots`."""

    def _read_one(self, cache: SlotCache, visible: Tensor, zero: Tensor) -> None:
        width = self.target.hidden_size * (1 + len(self.target.captured_layers))
        self.read(cache, torch.zeros(1, 1, width, dtype=self.target.dtype, device=self.device))


class StepSession(TreeSession):
    """A session that keeps the state of the nodes that were expanded last, [B, E, S].

    Attributes:
        last_features: [B, H] the target's final feature before each root.
    """

    former_members = {"last": "last_features"}
    per_row = TreeSession.per_row | {"last_features"}
    drafter: Any

    def __init__(self, drafter: StepDrafter, request: DraftRequest) -> None:
        super().__init__(drafter, request)
        target = drafter.target
        self.last_features = torch.zeros(request.batch, target.hidden_size, dtype=target.dtype, device=self.device)
        self._state: Tensor  # [B, E, S] of the nodes that were expanded last
        self._roots: Tensor  # [B] of this round
        self._survival: Tensor | None = None  # [B, E] log-probability that each and its child are accepted, if known
        self._min_survival = 0.0  # a node below it gets no children

    def _begin(self, roots: Tensor) -> Tensor:
        """Return the state [B, 1, S] before the roots [B]."""
        return self.drafter.begin(self.last_features)

    def _step(self, depth: int, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Read nodes of one depth; arguments and results as for :meth:`StepDrafter.step`."""
        return self.drafter.step(depth, tokens, state, self.last_features)

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        final = features[..., : self.drafter.target.hidden_size]
        last = at_nodes(final, (counts - 1).clamp_min(0)[:, None])[:, 0]
        updated = torch.where(counts[:, None] > 0, last, self.last_features)  # finished rows keep theirs
        self.last_features.copy_(updated)
        self.lengths += counts

    @property
    def is_recordable(self) -> bool:
        return self.shape.prices is None

    def tensors(self) -> list[Tensor]:
        return [self.lengths, self.last_features]

    def draft(self, roots: Tensor) -> DraftTree:
        self._roots = roots
        return super().draft(roots)

    def _read_roots(self) -> tuple[Tensor, Tensor | None]:
        roots = self._roots[:, None]
        self._survival = None
        logits, self._state = self._step(0, roots, self._begin(self._roots))
        return logits, self.drafter.draft_ids

    def _expand(self, tokens: Tensor, parents: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        state = at_nodes(self._state, parents)
        if self._survival is not None:
            self._survival = self._survival.gather(1, parents)
        logits, self._state = self._step(depth, tokens, state)
        return logits

    def _propose(self, logits: Tensor, scores: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self._survival is None or not self._min_survival:
            return super()._propose(logits, scores, ancestors)
        ends = self._survival < math.log(self._min_survival)  # decided before anything is drawn
        log_q, entries, drawn = super()._propose(logits, scores.masked_fill(ends, -math.inf), ancestors)
        return log_q.masked_fill(ends[..., None], -math.inf), entries, drawn

    def _read_frontier(self, frontier: Frontier, nodes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Step to each node from its nearest ancestor that the target has read. Each node takes a row of the batch."""
        width, device = max(map(len, nodes)), self.device
        paths, starts = [], []  # tokens of the nodes that are not read, and the index of the feature before them
        for row, of_row in enumerate(nodes):
            for node in [*of_row, *[0] * (width - len(of_row))]:
                path = frontier.path(row, node)
                read = sum(above < frontier.read[row] for above in path)
                starts.append(row * frontier.features.shape[1] + ([0, *path][read]))
                paths.append([frontier.tokens[row][above] for above in path[read:]] or [0])
        last_features, tokens = self.last_features, to_device(padded(paths), device)
        final = frontier.features[..., : self.drafter.target.hidden_size].flatten(0, 1)
        self.last_features = final[to_device(torch.tensor(starts), device)]
        state, logits = self._begin(tokens[:, 0]), []
        for depth in range(tokens.shape[1]):
            of_depth, state = self._step(depth, tokens[:, depth : depth + 1], state)
            logits.append(of_depth)
        self.last_features = last_features
        ends = to_device(torch.tensor([len(path) - 1 for path in paths]), device)
        found = at_nodes(torch.cat(logits, 1), ends[:, None])
        return found.view(len(nodes), width, -1), self.drafter.draft_ids

    def _can_grow(self, frontier: Frontier, row: int, node: int) -> bool:
        new = [above for above in frontier.path(row, node) if above >= frontier.read[row]]
        return len(new) <= self.drafter.depth


class FeatureSession(StepSession):
    """A session whose drafter's model is a :class:`FeatureReader`. ``lengths`` counts a row's features."""

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        slots = self.lengths[:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.cache.set_write_slots(slots, None, 0)  # nothing attends
        self.drafter.model.read(self.cache, features)
        super().extend(tokens, features, counts)
