"""What a drafter is: it proposes token trees and knows nothing of rules.

A :class:`Drafter` holds weights and options; :meth:`Drafter.start` opens a :class:`DraftSession`, which holds the
state of one batch. The engine informs the session of each new token and asks it for trees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsd_infer.device.cuda_graphs import Recorder
from fsd_infer.device.transfer import to_device
from fsd_infer.drafters.auto import AutoMemory, AutoTree
from fsd_infer.drafters.shape import TreeShape
from fsd_infer.registry import Registry
from fsd_infer.tree import DraftTree

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target


@dataclass
class DraftRequest:
    """What of a request a drafter may need.

    Attributes:
        batch: B.
        slots: what the batch's texts can reach, in tokens: prompt, answer, and the padding of rows that emitted less.
        greedy: temperature 0: chains are drafted by argmax instead of sampled.
        process: the request's context-free logits processors, [..., V] -> [..., V], or None.
        generator: source of randomness for sampled chains, or None for torch's global one.
        device: the target's, where trees are wanted.
        tilt: nats that the law under which drafts will be verified gives for an accepted draft, on average; 0: none.
            Trees may be chosen by it (see :mod:`fsd_infer.drafters.visits`).
        auto: what chooses each round's tree; None: the drafter's shape.
        keys: [B] whose each text is: only texts of one key, not empty, may draft from each other. None: all are the
            caller's.
    """

    batch: int
    slots: int
    greedy: bool = True
    process: Callable[[Tensor], Tensor] | None = None
    generator: torch.Generator | None = None
    device: torch.device = torch.device("cpu")
    tilt: float = 0.0
    auto: AutoTree | None = None
    keys: Sequence[str] | None = None


class DraftSession(ABC):
    """The drafter's state for one batch of texts."""

    @abstractmethod
    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        """The text of each row grew.

        Args:
            tokens: [B, K] new tokens of the text, on the CPU, right-padded; the last of each row is the next tree's
                root.
            features: [B, K, F] the target's features (see :class:`Target`) at the position *before* each token.
            counts: [B] how many of the K are real (0 for a row that is finished), on the CPU.
        """

    @abstractmethod
    def draft(self, roots: Tensor) -> DraftTree:
        """A tree under each root [B] (the last token of each text, on the CPU)."""

    def observe(self, tree: DraftTree, logits: Tensor, path: Tensor, tokens: Tensor, accepted: Tensor) -> None:  # noqa: B027
        """What the target said of the last tree, before :meth:`extend` appends to the text. Ignored by default.

        Args:
            tree: the tree that was verified; after the prompt, its last token alone.
            logits: [B, N, V] the target's at every node.
            path: [B, D+1] nodes of the accepted path, root first, padded with its last node.
            tokens: [B, D+1] the token that was emitted after each of them.
            accepted: [B] number of drafts in the path; the first ``accepted`` + 1 entries of the others are real.
                Path, tokens and accepted are on the CPU, the others on the target's device.
        """

    def copies(self, tree: DraftTree, n: int) -> Tensor | None:
        """[B, N] bool; nodes that complete an n-gram of texts which the session remembers beside each row's own; None
        if it remembers none, as by default. Waits for the device."""
        return None

    def finish(self, row: int, prompt: list[int], answer: list[int]) -> None:  # noqa: B027
        """The answer of a row has ended; :meth:`select` drops the row next. Ignored by default."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep only these rows [B'], on the CPU, of the batch."""


class Drafter(ABC):
    """Weights and options of one way to draft.

    Attributes:
        name: of the kind; what records call it.
        target: the target it was made for, whose features or weights it reads; None: any of its vocabulary will do.
        directory: where its files lie, None if it has none.
        auto: what is known of rounds, by which each round's tree is chosen (see :mod:`fsd_infer.drafters.auto`); None:
            its shape is fixed.
    """

    name: str = ""
    target: Target | None = None
    directory: Path | None = None
    auto: AutoMemory | None = None

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        """The drafter of this kind that ``name`` stands for (see :func:`fsd_infer.drafters.loading.load_drafter`), or
        None if it stands for none of this kind, as every name does by default.

        Args:
            name: a name, a directory or a hub id.
            target: what it is to draft for.
            tree: the shape that was asked for.
        """
        return None

    @property
    def parts(self) -> Sequence[Drafter]:
        """The drafters that it is made of."""
        return ()

    @property
    def proposers(self) -> tuple[str, ...]:
        """Names of the drafters that propose nodes of its trees, in the order of :attr:`DraftTree.proposers`."""
        return (self.name,)

    @property
    def samples(self) -> bool:
        """Does it draft chains that are sampled from q at temperature > 0?"""
        return any(part.samples for part in self.parts)

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """Largest tree, root included."""

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """Deepest node of any tree."""

    @abstractmethod
    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        """Open a session for a batch whose texts begin with first_tokens [B], on the CPU; ``extend`` brings more."""

    def for_batch(self, batch: int, tilt: float = 0.0) -> Drafter:
        """The drafter to use for so many rows and a law of this tilt (see :class:`DraftRequest`): itself, unless it
        knows that another tree, or none, is faster there.

        Asked once per request, also where rows end before others: a session that begins in mid-answer would have to
        read the whole text first, and a head the target's features of it, which nobody keeps.
        """
        return self

    def cache_bytes(self, batch: int, slots: int) -> int:
        """Bytes of the key-value caches of a session, batch and slots as in :class:`DraftRequest`: by default those of
        the drafters that it is made of.
        """
        return sum(part.cache_bytes(batch, slots) for part in self.parts)

    @property
    def held_bytes(self) -> int:
        """As :attr:`Target.held_bytes`: by default of the drafters that it is made of."""
        return sum(part.held_bytes for part in self.parts)

    def use_graphs(self, recorder: Recorder) -> None:
        """As :meth:`Target.use_graphs`, for its models: by default for the drafters that it is made of."""
        for part in self.parts:
            part.use_graphs(recorder)

    def forget(self) -> None:
        """Drop what requests have taught it, if it keeps such things: by default what its parts keep. Benchmarks do so
        before every answer.
        """
        for part in self.parts:
            part.forget()

    def modules(self) -> list[nn.Module]:
        """Modules of the drafter's own, for whoever wants to pack, compile or move them: by default its parts'."""
        return [module for part in self.parts for module in part.modules()]

    def describe(self) -> dict[str, Any]:
        """Name and options, for records of runs."""
        return {"name": self.name, "nodes": self.max_nodes, "depth": self.max_depth}


DRAFTERS: Registry[type[Drafter]] = Registry("drafter")


@DRAFTERS.register("none")
class NoDrafter(Drafter):
    """Plain decoding: a tree of the root alone."""

    name = "none"
    max_nodes = 1
    max_depth = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        return cls(target.vocab_size) if name == cls.name else None

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        return _NoSession(self.vocab_size, request.device)


class _NoSession(DraftSession):
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        pass

    def draft(self, roots: Tensor) -> DraftTree:
        return DraftTree.root_only(to_device(roots, self.device), self.vocab_size)

    def select(self, rows: Tensor) -> None:
        pass
