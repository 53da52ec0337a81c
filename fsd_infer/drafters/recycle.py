"""Draft from the target's own earlier predictions: token recycling (Luo et al. 2024, arXiv:2408.08696).

A verifying forward gives the target's likeliest next tokens at every node of a tree, and decoding uses one path of
them. Recycling stores these candidates by the one or two tokens before them, and drafts them when these tokens occur
again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_core.errors import FsdError
from fsd_core.former import former_keywords
from fsd_infer.drafters.base import DRAFTERS
from fsd_infer.drafters.free import FreeDrafter, FreeSession, HitRate, Options, Table, scaled
from fsd_infer.drafters.frontier import Frontier
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.rules.verification import Verdict
from fsd_infer.trees.tree import DraftTree

BUCKETS = 12  # of a candidate's log-probability
BUCKET_NATS = 0.4  # width of a bucket
WINDOW = 256.0  # trials
# Prior acceptance, relative to the target's probability then, by kind of candidate: stored after the same two tokens;
# after the same token, nothing being stored after two; after the same token, in addition to those after two.
PRIORS = (0.9, 0.5, 0.15)

Candidate = tuple[int, int, int]  # token, kind, bucket


class RecycleTable:
    """A table of the target's likeliest tokens by context, a context being one or two tokens.

    Args:
        width: candidates per context.
        max_contexts: most contexts of the table; the one not updated for longest is dropped first.

    Attributes:
        after: candidates by context, each with its token and bucket, the likeliest first.
        hit_rates: estimated acceptance by kind and bucket.
    """

    def __init__(self, width: int, max_contexts: int) -> None:
        self.width, self.max_contexts = width, max_contexts
        self.after: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        middles = [math.exp(-BUCKET_NATS * (bucket + 0.5)) for bucket in range(BUCKETS)]
        self.hit_rates = [[HitRate(prior * middle, WINDOW) for middle in middles] for prior in PRIORS]

    def __len__(self) -> int:
        return len(self.after)

    def remember(self, context: Sequence[int], tokens: Sequence[int], log_p: Sequence[float]) -> None:
        """Store the target's likeliest tokens after a context.

        Args:
            context: one or two token ids. Two are stored as contexts of both lengths.
            tokens: ids, the likeliest first.
            log_p: their log-probabilities.
        """
        candidates = [
            (token, min(int(-value / BUCKET_NATS), BUCKETS - 1))
            for token, value in zip(tokens, log_p)
            if value > -BUCKET_NATS * BUCKETS
        ]
        for length in range(1, len(context) + 1):
            key = tuple(context[-length:])
            self.after.pop(key, None)  # move the key to the end
            self.after[key] = candidates
        while len(self.after) > self.max_contexts:
            del self.after[next(iter(self.after))]

    def candidates(self, context: Sequence[int]) -> list[Candidate]:
        """Return distinct candidates after ``context``: those after its two tokens, then those after its last."""
        longer = self.after.get(tuple(context[-2:]), []) if len(context) > 1 else []
        candidates = {token: (token, 0, bucket) for token, bucket in longer}
        for token, bucket in self.after.get(tuple(context[-1:]), []):
            candidates.setdefault(token, (token, 2 if longer else 1, bucket))
        return list(candidates.values())

    def learn(self, context: Sequence[int], token: int) -> None:
        """Update the estimated acceptance of the candidates after ``context``, which ``token`` followed."""
        for candidate, kind, bucket in self.candidates(context):
            self.hit_rates[kind][bucket].learn(candidate == token)

    def at(self, context: Sequence[int]) -> tuple[int, ...]:
        """Return the state after a text: its last two tokens."""
        return tuple(context[-2:])

    def step(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        """Return the state after one more token."""
        return *state[-1:], token

    def options(self, state: Sequence[int]) -> Options:
        """Return distinct next tokens after a state with their probabilities, which add up to at most 1."""
        candidates = self.candidates(state)
        return scaled([(token, self.hit_rates[kind][bucket].value) for token, kind, bucket in candidates])


@DRAFTERS.register("recycle")
class RecycleDrafter(FreeDrafter):
    """Token recycling: trees of the target's likeliest tokens after the same one or two tokens.

    As in the paper, candidates come from all verified nodes, accepted or not, and serve later requests too. So a new
    drafter has few drafts in its first request. Unlike the paper, contexts of two tokens come before contexts of one.
    And the tree is no fixed template: it holds the likeliest nodes, learned from how often candidates of
    similar probability were accepted.

    A tree depends on earlier text only, so under the exact rule the distribution is p. Its nodes have no q, so gates
    stay closed, as in lookup. The host reads the candidates, so a round syncs with the device once more.

    Args:
        vocab_size: V of the target.
        depth: depth of the deepest draft, in tokens after the root.
        nodes: most nodes verified per round, the root included.
        width: candidates per context.
        min_accept_prob: a node that is accepted with a smaller estimated probability is not drafted; in (0, 1).
        max_contexts: most contexts of the table, about 0.5 kB each.
        keep: whether later requests draft from earlier ones. If not, a tree depends on its request only, and answers
            of lossy rules repeat.

    Raises:
        FsdError: an option out of range.
    """

    former_members = {"most": "max_contexts"}
    name = "recycle"
    context_length = 2

    @former_keywords(least="min_accept_prob", most="max_contexts")
    def __init__(
        self,
        vocab_size: int,
        depth: int = 6,
        nodes: int = 16,
        width: int = 8,
        min_accept_prob: float = 0.02,
        max_contexts: int = 100_000,
        keep: bool = True,
    ) -> None:
        super().__init__(vocab_size, depth, nodes, min_accept_prob, width)
        if max_contexts < 1:
            raise FsdError(f"recycle needs max_contexts of at least 1, got {max_contexts}.")
        self.width, self.max_contexts, self.keep = width, max_contexts, keep
        self.table = RecycleTable(width, max_contexts)

    def forget(self) -> None:
        self.table = RecycleTable(self.width, self.max_contexts)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> RecycleSession:
        return RecycleSession(self, first_tokens, request)

    def describe(self) -> dict[str, Any]:
        # records keep the keys "least" and "most"
        options = {"width": self.width, "least": self.min_accept_prob, "most": self.max_contexts, "keep": self.keep}
        return {**super().describe(), **options}


class RecycleSession(FreeSession):
    """A session with the table of each row.

    Attributes:
        tables: the drafter's own for every row, or one per row.
    """

    drafter: RecycleDrafter
    per_row = FreeSession.per_row | {"tables"}
    feedback_count = 5

    def __init__(self, drafter: RecycleDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        super().__init__(drafter, first_tokens, request)
        shared = drafter.keep and request.users is None and not request.seeded
        self.tables = [
            drafter.table if shared else RecycleTable(drafter.width, drafter.max_contexts) for _ in range(request.batch)
        ]

    def feedback(self, tree: DraftTree, logits: Tensor, verdict: Verdict) -> list[Tensor]:
        """Return nodes [B, N], -1: padding; the w likeliest tokens there, and their ln p, [B, N·w]; tokens; parents."""
        nodes = torch.arange(logits.shape[1], device=logits.device)
        nodes = nodes.where(tree.is_draft | (nodes == 0), -1)
        log_p, choice = functional.topk_logprobs(logits, min(self.drafter.width, logits.shape[-1]))
        return [nodes, choice.flatten(1), log_p.flatten(1), tree.tokens, tree.parents]

    def learn(self, feedback: Sequence[Tensor], verdict: Verdict) -> None:
        nodes, choice, log_p, tokens, parents = feedback
        numbers = (x.long().tolist() for x in (nodes, choice, tokens, parents))
        others = (x.tolist() for x in (log_p, verdict.path, verdict.tokens, verdict.accepted))
        width = choice.shape[1] // nodes.shape[1]
        rows = zip(self.tables, self.tails, *numbers, *others, strict=True)
        for table, tail, verified, candidates, drafted, parents_of, log_probs, path, emitted, count in rows:
            if count < 0:  # a finished row of a recorded batch
                continue
            contexts = [[*tail[-2:-1], drafted[0]]]  # of each node, its last two tokens
            contexts += [[drafted[parent], token] for parent, token in zip(parents_of[1:], drafted[1:])]
            on_path = path[: count + 1]
            for node, token in zip(on_path, emitted):  # learn before remember() stores the answer
                table.learn(contexts[node], token)
            indices = (index for index, node in enumerate(verified) if node >= 0)
            for index in sorted(indices, key=lambda index: verified[index] in on_path):  # accepted nodes last
                span = slice(index * width, (index + 1) * width)
                table.remember(contexts[verified[index]], candidates[span], log_probs[span])

    def follow_beams(self, frontier: Frontier, nodes: Sequence[Sequence[int]], grown: Sequence[int]) -> None:
        for row, (table, of_row, count) in enumerate(zip(self.tables, nodes, grown, strict=True)):
            tokens, parents = frontier.tokens[row], frontier.parents[row]
            for node in of_row[:count]:
                table.learn(self.context(frontier, row, parents[node]), tokens[node])
            for node, likely in enumerate(frontier.likely[row][frontier.read[row] :], frontier.read[row]):
                if likely is not None:
                    log_p = [min(value, 0.0) for value in likely[0]]
                    table.remember(self.context(frontier, row, node), likely[1][: table.width], log_p)

    def states(self) -> list[tuple[Table, Any]]:
        return [(table, tuple(tail)) for table, tail in zip(self.tables, self.tails, strict=True)]
