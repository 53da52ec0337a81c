"""Drafting dynamic trees with an EAGLE-style head (EAGLE-2, arXiv 2406.16858).

At each depth the ``width`` nodes with the highest cumulative log q are expanded, ``width`` children each; at the
end the ``nodes`` of all candidates are kept that are visited most likely: those with the highest cumulative log q, or,
under a law that favours drafts, as :mod:`fsd_infer.drafters.visits` computes. A child's score never exceeds its
parent's, so they always form a connected tree.

Drafting may stop before the last depth (``TreeShape.stop_below``). Whether it does is, like the tree itself, a function
of the context, so no rule's law changes.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fsd_infer.cpu import ops
from fsd_infer.device.cache import SlotCache
from fsd_infer.device.cuda_graphs import Graphs, Recorder, new_cache, slots_taken
from fsd_infer.device.transfer import to_device
from fsd_infer.drafters.base import DRAFTERS, Drafter, DraftRequest, DraftSession
from fsd_infer.drafters.candidates import Level, keep_best
from fsd_infer.drafters.online import RoundChoice
from fsd_infer.drafters.shape import (
    DEFAULT_SHAPES,
    LITTLE_TILT,
    LITTLE_TILT_SHAPES,
    TILTED_SHAPES,
    TreeShape,
    not_believed,
    of_device,
)
from fsd_infer.drafters.visits import tilted
from fsd_infer.drafters.vocabulary import ContextVocabulary
from fsd_infer.heads.checkpoint import drafts_blocks, is_head, is_public, load_head
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.target import Target
from fsd_infer.tree import DraftTree, at_nodes, visible_slots

READ_AT_ONCE = 256  # tokens of all prompts: more are not faster and take memory
MOST_UNREAD = 1024  # tokens of a text


@DRAFTERS.register("eagle")
class EagleDrafter(Drafter):
    """An :class:`EagleHead`, which shares the target's embeddings and LM head unless it has its own.

    Args:
        head: the trained head.
        target: whose features it reads.
        shape: tree options; defaults by device (:data:`DEFAULT_SHAPES`, for laws that favour drafts
            :data:`TILTED_SHAPES` or :data:`LITTLE_TILT_SHAPES`).
        context_ids: a reduced draft vocabulary is joined by the ids of each text, see :class:`ContextVocabulary`.
            A head with an LM head of its own has no rows for them and drafts its vocabulary alone.

    Attributes:
        by_default: no shape was given.
        public: the head was stored as EAGLE's authors do it, so nothing but its sizes ties it to the target; records
            of runs tell.
    """

    name = "eagle"
    target: Target
    public = False

    def __init__(
        self, head: EagleHead, target: Target, shape: TreeShape | None = None, context_ids: bool = True
    ) -> None:
        target.check_lm_head()
        target.watch(head.config.fused_layers)
        self.target = target
        self.context_ids = context_ids and head.draft_ids is not None and head.lm_head is None
        self._drafted = torch.zeros(target.vocab_size, dtype=torch.bool)  # on the CPU, where texts are
        if head.draft_ids is not None:
            self._drafted[head.draft_ids.cpu()] = True
        self.head = head.to(target.device).cast(target.dtype).eval()
        self.by_default = shape is None
        shape = shape or of_device(DEFAULT_SHAPES, target.device)
        self.vocabulary = head.config.draft_vocab_size or target.vocab_size
        self.shape = replace(shape, width=min(shape.width, self.vocabulary))
        self.draft_ids = head.draft_ids
        own = head.lm_head is not None
        self.lm_head = None if own or self.draft_ids is None else target.reduced_lm_head(self.draft_ids)
        self.graphs: Graphs | None = None

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        return cls.from_pretrained(name, target, tree) if is_head(name) and not drafts_blocks(name) else None

    @classmethod
    def from_pretrained(cls, directory: str | Path, target: Target, shape: TreeShape | None = None) -> EagleDrafter:
        """Load a head checkpoint; raises CheckpointError or VocabularyMismatchError if it does not fit the target."""
        made = cls(load_head(directory, target), target, shape)
        made.public, made.directory = is_public(directory), Path(directory)
        return made

    def reshaped(self, shape: TreeShape) -> EagleDrafter:
        """The same head with another tree; nothing is copied."""
        made = copy(self)
        made.shape = replace(shape, width=min(shape.width, self.vocabulary))
        made.by_default, made.choice = False, None
        return made

    def for_batch(self, batch: int, tilt: float = 0.0) -> Drafter:
        if self.by_default and tilt:
            shapes_by_device = TILTED_SHAPES if tilt > LITTLE_TILT else LITTLE_TILT_SHAPES
            return self.reshaped(of_device(shapes_by_device, self.target.device))
        return self

    @property
    def max_nodes(self) -> int:
        return self.shape.max_nodes

    @property
    def max_depth(self) -> int:
        return min(self.shape.depth, self.max_nodes - 1)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> EagleSession:
        return EagleSession(self, request)

    def new_cache(self, batch: int, slots: int) -> SlotCache:
        """The head's own empty key-value cache, with room for ``slots`` tokens per row."""
        return new_cache(self.graphs, self._cache_config, batch, slots)

    @property
    def _cache_config(self) -> Any:
        return SimpleNamespace(num_hidden_layers=self.head.config.num_layers)

    def run(self, cache: SlotCache, visible: Tensor, tokens: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """The head's outputs [B, M, H] over tokens [B, M], from features [B, M, F] (or outputs of its own [B, M, H]).

        Args:
            cache: after :meth:`SlotCache.set_write_slots`.
            visible: [B, M, S] bool, slot s may be attended by token i.
            tokens, features: token i+1 and feature of token i, for position i.
            positions: [B, M].
        """
        if self.graphs is not None:
            return self.graphs(cache, visible, tokens, features, positions)[0]
        return self._step(cache, visible, tokens, features, positions)[0]

    def _step(
        self, cache: SlotCache, visible: Tensor, tokens: Tensor, features: Tensor, positions: Tensor
    ) -> tuple[Tensor]:
        return (self.head(self.head.embed(tokens, self.target), features, positions, visible[:, None], cache),)

    def use_graphs(self, recorder: Recorder) -> None:
        self.graphs = Graphs(self._step, recorder)

    @property
    def held_bytes(self) -> int:
        return 0 if self.graphs is None else self.graphs.held

    def slots(self, longest: int) -> int:
        """Slots for texts of up to ``longest`` tokens and for what is expanded after them."""
        return longest + max(1, (self.shape.depth - 1) * self.shape.width)

    def cache_bytes(self, batch: int, slots: int) -> int:
        return batch * slots_taken(self.graphs, self.slots(slots)) * self._cache_bytes_per_token

    @cached_property
    @torch.no_grad()
    def _cache_bytes_per_token(self) -> int:
        """By reading one token, as :attr:`Target.cache_bytes_per_token`."""
        cache = SlotCache(self._cache_config, 1, 1)
        features = torch.zeros(1, 1, self.head.config.hidden_size, dtype=self.target.dtype, device=self.target.device)
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.target.device)
        cache.set_write_slots(zero, 0, 1)
        self._step(cache, torch.ones_like(zero, dtype=torch.bool)[None], zero, features, zero)
        return cache.nbytes

    def context_vocabulary(self, batch: int) -> ContextVocabulary | None:
        """A new batch's drafter vocabulary; None where it is always the head's own."""
        if not self.context_ids:
            return None
        assert self.draft_ids is not None and self.lm_head is not None
        return ContextVocabulary(self.target, self.draft_ids, self.lm_head, self._drafted, batch)

    def q_logits(self, outputs: Tensor, vocabulary: ContextVocabulary | None) -> Tensor:
        """Outputs of the head [B, E, H] -> [B, E, Vd] in the target's data type.

        ``vocabulary``: the batch's, from :meth:`context_vocabulary`.
        """
        read = self.head.readout(outputs)
        if self.head.lm_head is not None:
            logits: Tensor = self.head.lm_head(read)
            return logits
        if vocabulary is not None:
            return vocabulary.logits(read)
        return self.target.lm_logits(read, self.lm_head)

    def describe(self) -> dict[str, Any]:
        stop = {"stop_below": self.shape.stop_below} if self.shape.stop_below else {}
        public = {"public": True} if self.public else {}
        narrow = any(packed.scales is not None for module in self.modules() for packed in ops.packed_products(module))
        weights = {"weights": "fp8"} if narrow else {}
        return {
            **super().describe(),
            "width": self.shape.width,
            **stop,
            "draft_vocab_size": self.vocabulary,
            "context_ids": self.context_ids,
            **weights,
            **public,
        }

    def modules(self) -> list[nn.Module]:
        return [self.head] if self.lm_head is None else [self.head, self.lm_head]


class EagleSession(DraftSession):
    """Head position i holds the pair (token i+1, feature i); ``lengths`` [B], on the CPU, counts a row's pairs."""

    def __init__(self, drafter: EagleDrafter, request: DraftRequest) -> None:
        self.drafter = drafter
        self.vocabulary = drafter.context_vocabulary(request.batch)
        self.cache = drafter.new_cache(request.batch, drafter.slots(request.slots))
        self.device, self.tilt, self.choice = drafter.target.device, request.tilt, request.choice
        self.unread: list[tuple[Tensor, Tensor, Tensor]] = []  # arguments of extend()
        self.lengths = torch.zeros(request.batch, dtype=torch.long)
        self.last: Tensor | None = None  # [B, H] estimate of the feature at the root

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        self.unread.append((tokens, features, counts))
        # what no draft is likely to need soon is read later, all at once
        if self.choice is None or not self.choice.idle or sum(part[0].shape[1] for part in self.unread) > MOST_UNREAD:
            self._read_all()

    def _read_all(self) -> None:
        if self.unread:
            self._read_text(*_joined(self.unread))
            self.unread = []

    def _read_text(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        if self.vocabulary is not None:
            self.vocabulary.extend(tokens, counts)
        features = self.drafter.target.features_of(features, self.drafter.head.config.fused_layers)
        tokens, features = self._followed(tokens, features, counts)
        positions = self.lengths[:, None] + torch.arange(tokens.shape[1])
        count = max(READ_AT_ONCE // tokens.shape[0], 1)
        parts = zip(*(whole.split(count, 1) for whole in (tokens, features, positions)), strict=True)
        out = torch.cat([self._read(*part) for part in parts], 1)
        self._keep(out, counts)
        self.lengths = self.lengths + counts

    def _followed(self, tokens: Tensor, features: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The text's new pairs, and what the same pass of the head reads after them."""
        return tokens, features

    def _keep(self, outputs: Tensor, counts: Tensor) -> None:
        """Keep of the outputs what the next draft begins with."""
        ends = to_device((counts - 1).clamp_min(0), self.device)
        self.last = self._kept(at_nodes(outputs, ends[:, None])[:, 0], self.last, counts)

    def _kept(self, new: Tensor, old: Tensor | None, counts: Tensor) -> Tensor:
        """[B, ...], the new where a row's text grew by ``counts`` [B] tokens, and the old where it did not."""
        if old is None or int(counts.min()) > 0:
            return new
        return torch.where(to_device(counts > 0, self.device).view(-1, *[1] * (new.ndim - 1)), new, old)

    def _read(self, tokens: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """The head's outputs over tokens [B, K] of the text, from features [B, K, F], at positions [B, K]."""
        slots = torch.arange(int(positions.max()) + 1, device=self.device)
        places = to_device(positions, self.device)
        visible = slots <= places[..., None]
        return self._run(to_device(tokens, self.device), features, places, places, int(positions[0, 0]), visible)

    def draft(self, roots: Tensor) -> DraftTree:
        if self.choice is not None and not self.choice.expands():
            return DraftTree.root_only(to_device(roots, self.device), self.drafter.vocabulary)
        self._read_all()
        width, depth = self.drafter.shape.width, self.drafter.shape.depth
        batch, device = roots.shape[0], self.device
        ids = self.drafter.draft_ids if self.vocabulary is None else self.vocabulary.ids
        assert self.last is not None, "extend() comes first"
        features = self.last[:, None]  # [B, E, H] at the E nodes expanded at this depth: first the root alone
        expanded = torch.zeros(batch, 1, dtype=torch.long, device=device)  # their node numbers; the root is node 0
        path_scores = torch.zeros(batch, 1, device=device)  # their cumulative log q
        frontier = _Frontier(self.drafter.shape, self.tilt, self.choice)
        sees = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # expanded nodes each of them descends from
        levels: list[Level] = []
        first = 1  # number of the first node of this depth
        for level in range(1, depth + 1):
            logits = self.drafter.q_logits(features, self.vocabulary)  # [B, E, Vd]
            log_q, choice = ops.likeliest(logits, width)
            tokens = (choice if ids is None else ids[choice]).flatten(1)
            scores = (path_scores[..., None] + log_q).flatten(1)
            levels.append(Level(tokens, scores, expanded, path_scores, logits))
            if level == depth:
                break
            best = frontier.next(log_q, scores)  # [B, E] of the candidates, to be expanded
            if best is None:
                break
            path_scores = scores.gather(1, best)
            own = torch.eye(best.shape[1], dtype=torch.bool, device=device).expand(batch, -1, -1)
            parent = best // width  # which of the E expanded nodes each frontier node hangs under
            features = at_nodes(features, parent)
            sees = torch.cat([at_nodes(sees, parent), own], dim=-1)
            features = self._expand(tokens.gather(1, best), features, sees, level)
            expanded = first + best
            first += tokens.shape[1]
        return keep_best(to_device(roots, device), levels, self.drafter.shape, ids, self.tilt, self.choice)

    def select(self, rows: Tensor) -> None:
        if self.vocabulary is not None:
            self.vocabulary.select(rows)
        self.unread = [
            (tokens[rows], features[to_device(rows, self.device)], counts[rows])
            for tokens, features, counts in self.unread
        ]
        self.cache.select(rows)
        self.lengths = self.lengths[rows]
        self.last = None if self.last is None else self.last[to_device(rows, self.device)]

    def _expand(self, tokens: Tensor, parent_features: Tensor, sees: Tensor, depth: int) -> Tensor:
        """Run the head on one frontier [B, E]; its keys go after the text and after earlier frontiers."""
        slots = self.lengths[:, None] + torch.arange(sees.shape[2] - tokens.shape[1], sees.shape[2])
        positions = (self.lengths + depth - 1)[:, None].expand_as(slots)
        first, visible = int(slots[0, 0]), visible_slots(self.lengths, sees)
        positions, slots = to_device(positions, self.device), to_device(slots, self.device)
        return self._run(tokens, parent_features, positions, slots, first, visible)

    def _run(
        self, tokens: Tensor, features: Tensor, positions: Tensor, slots: Tensor, first: int, visible: Tensor
    ) -> Tensor:
        """first: the first row's first slot."""
        self.cache.set_write_slots(slots, first if slots.shape[0] == 1 else None, visible.shape[-1])
        return self.drafter.run(self.cache, visible, tokens, features, positions)


def _joined(parts: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of several calls of :meth:`EagleSession.extend` as those of one."""
    if len(parts) == 1:
        return parts[0]
    tokens, features = (torch.cat([part[place] for part in parts], 1) for place in (0, 1))
    real = torch.cat([torch.arange(part[0].shape[1]) < part[2][:, None] for part in parts], 1)
    counts = real.sum(1)
    order = real.sort(dim=1, descending=True, stable=True).indices[:, : int(counts.max())]  # the real ones to the left
    return tokens.gather(1, order), at_nodes(features, to_device(order, features.device)), counts


class _Frontier:
    """Which candidates are expanded next: the ``width`` likeliest until ``stop_below``, or what a choice says."""

    def __init__(self, shape: TreeShape, tilt: float, choice: RoundChoice | None) -> None:
        self.shape, self.tilt, self.choice = shape, tilt, choice
        self._visits: Tensor | None = None  # [B, E] tilted scores of the nodes that were expanded last

    def next(self, log_q: Tensor, scores: Tensor) -> Tensor | None:
        """Places [B, E'] among the candidates, None where drafting stops.

        Args:
            log_q: [B, E, w] ln q of the candidates, the likeliest of each node first.
            scores: [B, E * w] cumulative.
        """
        if self.choice is not None and self.choice.watches:
            chosen = self.choice.expand(log_q.tolist())
            return torch.tensor(chosen) if chosen else None
        best = scores.topk(self.shape.width, dim=-1).indices
        if self.shape.stop_below:
            steps = tilted(log_q, self.tilt)
            visits = steps if self._visits is None else self._visits[..., None] + steps
            self._visits = visits.flatten(1).gather(1, best)
            if not_believed(self._visits, self.shape.stop_below):
                return None
        if self.choice is not None:
            self.choice.count(best.shape[1])
        return best
