"""Drafting from what the target found likely before: token recycling (Luo et al. 2024, arXiv:2408.08696).

Every verifying forward says, at each node of a tree, which tokens the target would go on with. All but one of them are
thrown away. Kept by the tokens they followed, they are drafts for the next time that these tokens appear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsd_infer.cpu import ops
from fsd_infer.device.rows import at_nodes
from fsd_infer.device.transfer import lists
from fsd_infer.drafters.base import DRAFTERS, DraftRequest, DraftSession
from fsd_infer.drafters.free import Chance, FreeDrafter, Options
from fsd_infer.errors import FsdError
from fsd_infer.tree import DraftTree

BUCKETS = 12  # of a candidate's log-probability, the last for all that are less likely
BUCKET_NATS = 0.4
MEMORY = 256.0  # trials
# Kinds of candidates, and what their probability is multiplied by as a prior: after the same two tokens, after the same
# token where nothing is known of two, after the same token, following those of the first kind.
PRIORS = (0.9, 0.5, 0.15)

Candidate = tuple[int, int, int]  # token, kind, bucket


class Recycled:
    """What the target found likely after one and after two tokens, and how often that was right.

    Args:
        width: candidates kept per context.
        most: contexts remembered; the ones not seen for longest are forgotten.
    """

    def __init__(self, width: int, most: int) -> None:
        self.width, self.most = width, most
        self.after: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # last tokens -> (token, bucket), likeliest first
        middles = [math.exp(-BUCKET_NATS * (bucket + 0.5)) for bucket in range(BUCKETS)]
        self.chances = [[Chance(prior * middle, MEMORY) for middle in middles] for prior in PRIORS]  # by kind, bucket

    def __len__(self) -> int:
        return len(self.after)

    def remember(self, context: Sequence[int], tokens: Sequence[int], log_p: Sequence[float]) -> None:
        """The target's likeliest tokens after a text that ends with ``context`` (one or two tokens)."""
        found = [
            (token, min(int(-value / BUCKET_NATS), BUCKETS - 1))
            for token, value in zip(tokens, log_p)
            if value > -BUCKET_NATS * BUCKETS
        ]
        for length in range(1, len(context) + 1):
            key = tuple(context[-length:])
            self.after.pop(key, None)  # so that it becomes the latest
            self.after[key] = found
        while len(self.after) > self.most:
            del self.after[next(iter(self.after))]

    def candidates(self, context: Sequence[int]) -> list[Candidate]:
        """Different next tokens after ``context``: ``width`` by two tokens, and as many by one."""
        found: list[Candidate] = []
        longer = self.after.get(tuple(context[-2:]), []) if len(context) > 1 else []
        seen = set()
        for token, bucket in longer:
            seen.add(token)
            found.append((token, 0, bucket))
        kind = 2 if longer else 1
        for token, bucket in self.after.get(tuple(context[-1:]), []):
            if token not in seen:
                found.append((token, kind, bucket))
        return found

    def learn(self, context: Sequence[int], token: int) -> None:
        """``token`` followed the text that ends with ``context``: judge what would have been proposed."""
        for candidate, kind, bucket in self.candidates(context):
            self.chances[kind][bucket].learn(candidate == token)

    def at(self, context: Sequence[int]) -> tuple[int, ...]:
        """The last two tokens."""
        return tuple(context[-2:])

    def step(self, place: tuple[int, ...], token: int) -> tuple[int, ...]:
        """The last two tokens with one more."""
        return *place[-1:], token

    def options(self, context: Sequence[int]) -> Options:
        """Different next tokens after ``context``, and how likely each is the one."""
        options = [(token, self.chances[kind][bucket].value) for token, kind, bucket in self.candidates(context)]
        total = max(1.0, sum(chance for _, chance in options))
        return [(token, chance / total) for token, chance in options]


@DRAFTERS.register("recycle")
class RecycleDrafter(FreeDrafter):
    """Token recycling: the target's own likeliest tokens, by the one or two tokens before them, as a tree.

    As in the paper, what verifying forwards say at all nodes is kept, also where nothing was accepted, and serves later
    requests too: the first request of a fresh drafter has little to draft from. Unlike there, two tokens count before
    one does, and the tree is not a fixed template: its nodes are the ones with the best chances, which are learned from
    how often candidates of that probability were right. A tree is a function of what came before it alone, so the exact
    rule's law is the target's. No distribution q is known at its nodes: gates stay closed there, as in lookup. What the
    target found likely has to come to the CPU: a round waits for the device once more.

    Args:
        vocab_size: V of the target.
        depth: deepest draft (number of tokens ahead of the root).
        nodes: most nodes verified per round, the root included.
        width: candidates kept per context.
        least: a node whose estimated chance of acceptance is lower is not drafted, in (0, 1).
        most: contexts remembered (about 0.5 kB each).
        keep: later requests draft from what earlier ones showed. Off, a request's tree depends on that request alone,
            and fuzzy answers can be had again.

    Raises:
        FsdError: options out of range.
    """

    name = "recycle"
    reach = 2

    def __init__(
        self,
        vocab_size: int,
        depth: int = 6,
        nodes: int = 16,
        width: int = 8,
        least: float = 0.02,
        most: int = 100_000,
        keep: bool = True,
    ) -> None:
        super().__init__(vocab_size, depth, nodes, width, least)
        if most < 1:
            raise FsdError(f"recycle needs most >= 1, got {most}.")
        self.most, self.keep = most, keep
        self.recycled = Recycled(width, most)

    def tables(self, count: int, shared: bool = True) -> list[Recycled]:
        """The tables of ``count`` texts: remembered ones, or empty ones where nothing is kept or shared."""
        return [self.recycled if self.keep and shared else Recycled(self.width, self.most) for _ in range(count)]

    def forget(self) -> None:
        self.recycled = Recycled(self.width, self.most)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> RecycleSession:
        return RecycleSession(self, request)

    def describe(self) -> dict[str, Any]:
        options = {"width": self.width, "least": self.least, "most": self.most, "keep": self.keep}
        return {**super().describe(), **options}


class RecycleSession(DraftSession):
    """The rows' last tokens, and what is remembered: of the drafter, or of each row."""

    def __init__(self, drafter: RecycleDrafter, request: DraftRequest) -> None:
        self.drafter, self.device = drafter, request.device
        self.last: list[list[int]] = [[] for _ in range(request.batch)]  # the last two tokens of each text
        self.recycled = drafter.tables(request.batch, request.keys is None)

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        for last, row, count in zip(self.last, tokens.tolist(), counts.tolist(), strict=True):
            last[:] = (last + row[max(0, count - 2) : count])[-2:]

    def observe(self, tree: DraftTree, logits: Tensor, path: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        nodes = torch.arange(logits.shape[1]).expand(logits.shape[:2])
        if logits.device.type == "cpu" and ops.kernel_kind() is None:  # torch takes milliseconds for each dozen nodes
            nodes = path
            logits = at_nodes(logits, path)
        width = min(self.drafter.width, logits.shape[-1])
        log_p, choice = ops.likeliest(logits, width)
        known = lists(tree.tokens, tree.parents, choice.flatten(1), log_p.flatten(1))
        verdict = (path.tolist(), tokens.tolist(), accepted.tolist())
        rows = zip(self.recycled, self.last, nodes.tolist(), *known, *verdict)
        for recycled, last, seen, drafted, parents, ids, chances, way, emitted, count in rows:
            contexts = [[*last[-2:-1], drafted[0]]]
            contexts += [[drafted[parent], token] for parent, token in zip(parents[1:], drafted[1:])]
            for node, token in zip(way[: count + 1], emitted):  # judged before the answer is known
                recycled.learn(contexts[node], token)
            on_path = set(way[: count + 1])
            for place in sorted(range(len(seen)), key=lambda place: seen[place] in on_path):  # what became text stays
                these = slice(place * width, (place + 1) * width)
                recycled.remember(contexts[seen[place]], ids[these], chances[these])

    def draft(self, roots: Tensor) -> DraftTree:
        contexts = [(*last[-2:-1], root) for last, root in zip(self.last, roots.tolist(), strict=True)]
        return self.drafter.trees(self.recycled, contexts, roots, self.device)

    def select(self, rows: Tensor) -> None:
        kept = rows.tolist()
        self.last = [self.last[row] for row in kept]
        self.recycled = [self.recycled[row] for row in kept]
