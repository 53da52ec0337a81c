"""The interface of drafters.

A drafter proposes draft trees and knows no acceptance rules. :class:`Drafter` holds weights and options.
:meth:`Drafter.start` opens a :class:`.DraftSession` with the state of one batch. The engine passes every new token to
the session and asks it for trees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fsd_core.errors import FsdError
from fsd_core.former import Renamed
from fsd_core.registry import Registry
from fsd_infer.device.cuda_graphs import GraphRecorder
from fsd_infer.drafters.session import DraftRequest, DraftSession
from fsd_infer.targets.stack import StackOwner
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import DraftTree


class Drafter(Renamed, ABC):
    """Weights and options of one way to draft.

    Attributes:
        name: name of the kind, as in records.
        target: the model whose features or weights the drafter uses; None if any target of its vocabulary will do.
        directory: directory of its files; None if it has none.
        bounds: the largest shape within which a :mod:`policy <fsd_infer.trees.policy>` chooses the shape of its trees
            round by round; None: the shape is its own and fixed.
        menu: the shapes within it among which a policy chooses where rounds are recorded.
        relative_cost: cost of its model's forward over the target's; None: a head's, 0: it has no model.
        draws_chains: whether drafts that are drawn do best as a chain; else as nodes of a tree.
    """

    former_members = {"held_bytes": "shared_cache_bytes", "capture_key": "recording_key"}
    name: str = ""
    target: Target | None = None
    directory: Path | None = None
    bounds: TreeShape | None = None
    menu: Sequence[TreeShape] = ()
    relative_cost: float | None = None
    draws_chains: bool = False

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        """Load the drafter of this kind that a name stands for; see :func:`fsd_infer.drafters.loading.load_drafter`.

        Args:
            name: a name, a directory or a Hub id.
            target: the model to draft for.
            tree: shape of its trees; None: the default.

        Returns:
            The drafter, or None if the name stands for another kind, as by default.
        """
        return None

    @property
    def parts(self) -> Sequence[Drafter]:
        """The drafters that this one combines."""
        return ()

    @property
    def proposers(self) -> tuple[str, ...]:
        """Names of the drafters that propose nodes, in the order of :attr:`DraftTree.proposers`."""
        return (self.name,)

    @property
    def learner(self) -> Drafter:
        """The drafter with which a policy's estimates are kept."""
        return self

    @property
    def recording_key(self) -> Hashable:
        """Key of the shapes and weights of its rounds; drafters with equal keys share recordings."""
        return self

    @property
    def samples(self) -> bool:
        """Whether drafts at temperature > 0 can be drawn from q."""
        return any(part.samples for part in self.parts)

    @property
    def drafts_beams(self) -> bool:
        """Whether sessions have :meth:`DraftSession.successors`. If not, beams are plain."""
        return any(part.drafts_beams for part in self.parts)

    @property
    def reads_features(self) -> bool:
        """Whether :meth:`DraftSession.successors` reads the target's features."""
        return any(part.reads_features for part in self.parts)

    @property
    def keeps_texts(self) -> bool:
        """Whether drafts may come from texts outside the request."""
        return any(part.keeps_texts for part in self.parts)

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """Nodes of the largest tree, the root included."""

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """Depth of the deepest node of any tree."""

    @abstractmethod
    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        """Open a session for a batch.

        Args:
            first_tokens: [B] first token of each text, on the CPU. The session takes the others by
                :meth:`DraftSession.extend` and :meth:`DraftSession.extend_on_host`.
            request: see :class:`DraftRequest`.
        """

    def for_bonus(self, draft_bonus: float) -> Drafter:
        """Return the drafter that is fastest for a request: this one, or a copy with other trees.

        Args:
            draft_bonus: see :class:`DraftRequest`.
        """
        return self

    def with_shape(self, shape: TreeShape) -> Drafter:
        """Return this drafter with the trees of one request; both share what they have loaded and learned.

        Raises:
            FsdError: by default: the drafter has no trees that a request can shape.
        """
        raise FsdError(
            f"a request cannot give drafter {self.name!r} the tree {shape.depth},{shape.width},{shape.nodes}: load it "
            "with this tree, from_pretrained(..., tree=...) or --tree."
        )

    def cache_bytes(self, batch: int, slots: int) -> int:
        """Return the bytes of a session's KV caches, by default those of the parts.

        Args:
            batch: see :class:`DraftRequest`.
            slots: its ``cache_slots``.
        """
        return sum(part.cache_bytes(batch, slots) for part in self.parts)

    @property
    def shared_cache_bytes(self) -> int:
        """Bytes of earlier requests' caches, as :attr:`Target.shared_cache_bytes`; by default those of the parts."""
        return sum(part.shared_cache_bytes for part in self.parts)

    def use_graphs(self, recorder: GraphRecorder | None) -> None:
        """Run its models by recorded CUDA graphs, as :meth:`Target.use_graphs`; by default those of the parts."""
        for part in self.parts:
            part.use_graphs(recorder)

    def forget(self) -> None:
        """Drop what earlier requests have taught, by default in the parts. Benchmarks do so before every answer."""
        for part in self.parts:
            part.forget()

    def modules(self) -> list[nn.Module]:
        """Return its own modules, to pack, compile or move; by default those of the parts."""
        return [module for part in self.parts for module in part.modules()]

    def stack_owners(self) -> list[StackOwner]:
        """Return its models and heads, for which a backend may have stacks; by default those of the parts."""
        return [owner for part in self.parts for owner in part.stack_owners()]

    def describe(self) -> dict[str, Any]:
        """Return name and options, for records of runs."""
        return {"name": self.name, "nodes": self.max_nodes, "depth": self.max_depth}


DRAFTERS: Registry[type[Drafter]] = Registry("drafter")


@DRAFTERS.register("none")
class NoDrafter(Drafter):
    """A drafter without drafts, for plain decoding: every tree is only a root."""

    name = "none"
    max_nodes = 1
    max_depth = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        return cls(target.vocab_size) if name == cls.name else None

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        return _NoSession(self.vocab_size)


class _NoSession(DraftSession):
    is_recordable = True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def draft(self, roots: Tensor) -> DraftTree:
        return DraftTree.root_only(roots, self.vocab_size)
