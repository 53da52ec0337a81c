"""What a drafter keeps of a request: a session drafts a tree every round, and reads what was accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from fsd_core.former import Renamed
from fsd_core.tensors import kept_rows
from fsd_infer.drafters.frontier import Frontier, Successors
from fsd_infer.rules.verification import Verdict
from fsd_infer.trees.priced_growth import PricedGrowth
from fsd_infer.trees.prices import Prices
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import DraftTree, Draws


@dataclass
class DraftRequest(Renamed):
    """The parts of a request that drafters use.

    Attributes:
        batch: number of rows B.
        cache_slots: most tokens of a row: prompt, answer, and padding where a row emits fewer tokens than others.
        greedy: whether the temperature is 0.
        process: the request's logits processors that depend neither on the text nor on ids, such as the temperature,
            [..., Vd] to [..., Vd]; None if there are none.
        max_length: tokens of the longest text at its end, as far as the request limits it.
        draws: which drafts of heads and small LMs are drawn from q.
        generator: random generator of drawn drafts; None: torch's global one.
        temperature: temperature of the request; 0 if it is greedy.
        seeded: whether the request has a generator of its own, so that its answer repeats.
        device: device of the target. Trees are returned there.
        draft_bonus: nats that the rule's distribution gives for an accepted draft, on average; 0 for distributions that
            favour no draft. :mod:`fsd_infer.trees.tree` chooses trees by it.
        shape: shape of the first trees, if shapes are chosen round by round; None: always the drafter's own.
        menu: the shapes among which they are chosen by forecasts, see :mod:`fsd_infer.trees.menu`.
        clock: returns the seconds that drafters time their work by; None: they time nothing.
        users: [B] owner of each text. Texts may draft from each other if they share a user that is not "". None: all
            texts have one owner.
    """

    former_members = {"slots": "cache_slots", "keys": "users", "longest": "max_length"}

    batch: int
    cache_slots: int
    greedy: bool = True
    process: Callable[[Tensor], Tensor] | None = None
    generator: torch.Generator | None = None
    device: torch.device = torch.device("cpu")
    draft_bonus: float = 0.0
    shape: TreeShape | None = None
    menu: Sequence[TreeShape] = ()
    clock: Callable[[], float] | None = None
    users: Sequence[str] | None = None
    draws: Draws = Draws.NONE
    max_length: int = 0
    seeded: bool = False
    temperature: float = 0.0


class DraftSession(Renamed, ABC):
    """A drafter's state for one batch of texts.

    The tensors of a round are on the target's device, and nothing in :meth:`extend`, :meth:`draft` and
    :meth:`feedback` reads them on the host, unless :attr:`needs_report`. What a drafter keeps on the host it learns
    after the round, from :meth:`extend_on_host` and :meth:`learn`.

    A round of a session that :attr:`is_recordable` may be recorded as a CUDA graph. :meth:`host_inputs` returns what
    its draft needs of the host before the round, and :meth:`set_host_inputs` hands over the same on the device.

    Attributes:
        parts: the sessions that this one combines. By default each gets every call of this one.
        per_row: names of attributes that hold a tensor [B, ...] or a list of B entries, for :meth:`keep_rows`.
        shape: shape of the next trees, if shapes are chosen round by round.
        growth: how the last trees were grown, if by prices.
    """

    former_members = {
        "facts": "feedback", "fact_count": "feedback_count", "is_fixed": "is_recordable",
        "is_capturable": "is_recordable", "on_host": "needs_report", "form": "shape_key", "prepared": "host_inputs",
        "give": "set_host_inputs", "append": "extend_on_host", "keep": "follow_beams", "select": "keep_rows",
        "finish": "on_end", "copies": "seen_ngrams", "remembers": "reads_other_texts",
    }  # fmt: skip

    parts: Sequence[DraftSession] = ()
    per_row: ClassVar[frozenset[str]] = frozenset()
    shape: TreeShape | None = None
    growth: PricedGrowth | None = None

    @property
    def prices(self) -> Prices | None:
        """Prices by which the next trees are grown; None: they have a fixed shape."""
        return None if self.shape is None else self.shape.prices

    @property
    def needs_report(self) -> bool:
        """Whether a draft needs the report of the round before, so that the host must read it first."""
        return any(part.needs_report for part in self.parts)

    @property
    def is_recordable(self) -> bool:
        """Whether a round may be recorded with the session: it changes nothing but :meth:`tensors`, in place."""
        return False

    @property
    def shape_key(self) -> Hashable:
        """What fixes the shapes of a recordable session's next round, besides those of :meth:`host_inputs`."""
        return tuple(part.shape_key for part in self.parts)

    def host_inputs(self) -> list[Tensor]:
        """Do the host's part of a recordable session's next draft, and return what :meth:`draft` needs of it.

        The tensors are on the CPU or on the device. Their number is fixed, and their shapes are few. A tensor that is
        the same object as before has the same values.
        """
        return [values for part in self.parts for values in part.host_inputs()]

    def set_host_inputs(self, inputs: Iterator[Tensor] | None) -> None:
        """Take what :meth:`host_inputs` returned, on the device, for all drafts until the next call; None: nothing.

        These drafts read the same tensors, whose values the caller replaces before each round.
        """
        for part in self.parts:
            part.set_host_inputs(inputs)

    def tensors(self) -> list[Tensor]:
        """Return what a round of a recordable session changes in place, except for keys and values beyond the texts."""
        return [values for part in self.parts for values in part.tensors()]

    def restart(self, fresh: Any) -> None:
        """Take over the texts of a new session of the same drafter. The caller resets :meth:`tensors`."""
        for part, new in zip(self.parts, fresh.parts, strict=True):
            part.restart(new)

    def set_rotary(self, prompts: Tensor, offsets: Tensor) -> None:
        """Take rotary positions for a target with M-RoPE, before :meth:`extend` is given prompts with images.

        Args:
            prompts: [3, B, P] the rotary position less the index of each token of the prompts.
            offsets: [B] the same difference for all later tokens.
        """
        for part in self.parts:
            part.set_rotary(prompts, offsets)

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        """Append new tokens to the texts, at the end of a round.

        Args:
            tokens: [B, K] right-padded. The last real token of a row is the root of its next tree.
            features: [B, K, F] the target's features (see :class:`Target`) at the position *before* each token.
            counts: [B] number of real tokens, 0 for a finished row.
        """
        for part in self.parts:
            part.extend(tokens, features, counts)

    def extend_on_host(self, rows: Sequence[Sequence[int]]) -> None:
        """Take the tokens of :meth:`extend`, without padding, on the host and after the round."""
        for part in self.parts:
            part.extend_on_host(rows)

    @abstractmethod
    def draft(self, roots: Tensor) -> DraftTree:
        """Return a tree for each row. ``roots`` [B] are the last tokens of the texts."""

    def successors(self, frontier: Frontier, nodes: Sequence[Sequence[int]], count: int) -> list[list[Successors]]:
        """Return the likely next tokens of nodes below the texts, for beams (:attr:`Drafter.drafts_beams`).

        Args:
            frontier: all nodes. The target has read each node's parent, or an earlier call asked for its successors.
            nodes: [B][M] some of each row, of one depth, which the target has not read.
            count: most tokens to return for each.

        Returns:
            [B][M] log-probabilities and tokens, the likeliest first.
        """
        raise NotImplementedError

    def follow_beams(self, frontier: Frontier, nodes: Sequence[Sequence[int]], grown: Sequence[int]) -> None:
        """Follow beams to the next round, before :meth:`extend_on_host` gets the tokens by which the texts have grown.

        Args:
            frontier: the nodes of this round. The target has since read those that have ``likely``.
            nodes: [B] the nodes that remain, without the root, in their new order.
            grown: [B] how many of these, the first ones, have become text. The last of them is the new root.
        """
        for part in self.parts:
            part.follow_beams(frontier, nodes, grown)

    def feedback(self, tree: DraftTree, logits: Tensor, verdict: Verdict) -> list[Tensor]:
        """Return what :meth:`learn` needs of a verification: :attr:`feedback_count` tensors [B, ·].

        Args:
            tree: the verified tree; after the prefill, only the root.
            logits: [B, N, V] the target's logits at every node.
            verdict: the verdict on them.
        """
        return [values for part in self.parts for values in part.feedback(tree, logits, verdict)]

    @property
    def feedback_count(self) -> int:
        """Number of tensors that :meth:`feedback` returns."""
        return sum(part.feedback_count for part in self.parts)

    def learn(self, feedback: Sequence[Tensor], verdict: Verdict) -> None:
        """Learn from a verification, on the host and before :meth:`extend_on_host`. Both arguments are on the CPU."""
        for part in self.parts:
            part.learn(feedback[: part.feedback_count], verdict)
            feedback = feedback[part.feedback_count :]

    def forecasts(self) -> list[list[float]]:
        """Return the last :attr:`.DraftTree.forecast` that :meth:`learn` got, [B][S + 1]; empty: none is requested."""
        return next((forecasts for part in self.parts if (forecasts := part.forecasts())), [])

    @property
    def reads_other_texts(self) -> bool:
        """Whether a row's drafts may come from other texts."""
        return any(part.reads_other_texts for part in self.parts)

    def seen_ngrams(self, tree: DraftTree, n: int) -> Tensor | None:
        """Return which nodes complete an n-gram of another text that the session reads. Syncs with the device.

        Args:
            tree: the tree of this round.
            n: length of the n-grams, in tokens.

        Returns:
            [B, N] bool; None if the session reads no other texts than the rows' own.
        """
        ngrams = [seen for part in self.parts if (seen := part.seen_ngrams(tree, n)) is not None]
        return torch.stack(ngrams).any(0) if ngrams else None

    def on_end(self, row: int, prompt: list[int], answer: list[int]) -> None:
        """Take a finished text, before :meth:`keep_rows` drops its row.

        Args:
            row: index of the row.
            prompt: token ids.
            answer: token ids.
        """
        for part in self.parts:
            part.on_end(row, prompt, answer)

    def folded(self, rows: Tensor) -> Self:
        """Return a session of these rows [B'], in memory for B' rows. Restart this one before its next use.

        ``rows`` is on the CPU and ascends.
        """
        result = self._detached()
        result.keep_rows(rows)
        result._reallocate()
        return result

    def _detached(self) -> Self:
        """Return a copy on which :meth:`keep_rows` acts separately, except for what :meth:`restart` resets."""
        result = copy(self)
        result.parts = [part._detached() for part in self.parts]
        return result

    def _reallocate(self) -> None:
        """Move keys and values to memory for as many rows as there are."""
        for part in self.parts:
            part._reallocate()

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows [B'] of the batch. ``rows`` is on the CPU."""
        for part in self.parts:
            part.keep_rows(rows)
        for name in self.per_row:
            setattr(self, name, kept_rows(getattr(self, name), rows))
