"""The output of the decoding loop, and its statistics: speed, acceptance and answer length, open gates, nats spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from fsd_core.former import Renamed
from fsd_infer.engine.first_choices import FirstChoiceStats
from fsd_infer.engine.ngrams import copied_ngrams, kinds, repeated_ngrams
from fsd_infer.rules import Emission, Rule, TokenOrigin
from fsd_infer.trees.policy import TreeStats


class Share(TypedDict):
    """Part of an answer: its tokens, how many of them only a lossy distribution emits, and the nats spent."""

    tokens: int
    lossy: int
    nats: float


@dataclass
class RowStats(Renamed):
    """One answer.

    Attributes:
        new_tokens: answer length in tokens, an emitted EOS token included.
        target_forwards: verifying forwards of the target, without the prefill.
        acceptance_length: tokens emitted per verifying forward, the target's own token included, the prefill's token
            excluded. With beams, search steps instead of tokens. NaN without a verifying forward.
        gate_open_fraction: share of tokens emitted at a context with an open gate.
        gate_accepted_fraction: share of tokens that only an open gate accepts.
        divergence_spent: sum of nats (temperature > 0: KL of the distribution to the target; 0: greedy gap).
        finish_reason: "stop" (EOS or a stopping criterion) or "length".
        copied_4grams: share of the answer's 4-grams that occur in its prompt; None for fewer than 4 tokens.
        repeated_4grams: share of the answer's 4-grams that occurred earlier in it; None for fewer than 4 tokens.
        by_proposer: shares by proposer, a drafter's name or "target".
        by_kind: shares by "copied", "repeated" or "new", see :func:`fsd_infer.engine.ngrams.kinds`.
        drafts: the drafter's first choices at the contexts of the emitted tokens.
        mean_log_likelihood: mean raw log-probability of the emitted tokens under the target, in nats, if measured.
    """

    new_tokens: int
    target_forwards: int
    acceptance_length: float
    gate_open_fraction: float
    gate_accepted_fraction: float
    divergence_spent: float
    finish_reason: str
    prefill_seconds: float
    decode_seconds: float
    copied_4grams: float | None = None
    repeated_4grams: float | None = None
    by_proposer: dict[str, Share] = field(default_factory=dict)
    by_kind: dict[str, Share] = field(default_factory=dict)
    drafts: FirstChoiceStats = field(default_factory=FirstChoiceStats)
    mean_log_likelihood: float | None = None

    former_members = {"tau": "acceptance_length"}

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, prefill included."""
        return self.new_tokens / self.seconds if self.seconds else math.nan


@dataclass
class GenerationStats(Renamed):
    """Statistics of a batch.

    Attributes:
        rows: statistics of each answer.
        rule: its description.
        drafter: its description.
        seconds: until all answers were complete, by the host's clock.
        prefill_seconds: until all answers had their first token, by the host's clock.
        phases: seconds of prefill, draft, target, rule, cache and report, the host's reading of rounds with all
            callbacks. On CUDA the device's clock measures them, so their sum may differ a little from ``seconds``.
        cache_bytes: bytes of the KV caches, the target's and the drafter's.
        cached_tokens: tokens of each prompt found in the prefix cache (:mod:`.targets.prefixes`); empty without one.
        trees: the trees chosen under ``tree="auto"`` and their expected acceptance; else None.
    """

    rows: list[RowStats]
    rule: dict[str, Any]
    drafter: dict[str, Any]
    seconds: float
    prefill_seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    cache_bytes: int = 0
    cached_tokens: list[int] = field(default_factory=list)
    trees: TreeStats | None = None

    former_members = {"tau": "acceptance_length", "known": "cached_tokens", "known_tokens": "total_cached_tokens"}

    @property
    def new_tokens(self) -> int:
        return sum(row.new_tokens for row in self.rows)

    @property
    def total_cached_tokens(self) -> int:
        """Tokens of all prompts found in the prefix cache."""
        return sum(self.cached_tokens)

    @property
    def target_forwards(self) -> int:
        return sum(row.target_forwards for row in self.rows)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted by verifying forwards per verifying forward, over all rows."""
        forwards = self.target_forwards
        emitted = sum(row.acceptance_length * row.target_forwards for row in self.rows if row.target_forwards)
        return emitted / forwards if forwards else math.nan

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else math.nan

    @property
    def divergence_spent(self) -> float:
        return sum(row.divergence_spent for row in self.rows)

    @property
    def gate_open_fraction(self) -> float:
        return self._weighted("gate_open_fraction")

    @property
    def gate_accepted_fraction(self) -> float:
        return self._weighted("gate_accepted_fraction")

    @property
    def copied_4grams(self) -> float | None:
        """Mean over the answers of at least 4 tokens; None without one."""
        return _mean([row.copied_4grams for row in self.rows])

    @property
    def repeated_4grams(self) -> float | None:
        return _mean([row.repeated_4grams for row in self.rows])

    @property
    def drafts(self) -> FirstChoiceStats:
        """The drafter's first choices in all rows."""
        return FirstChoiceStats.pooled(row.drafts for row in self.rows)

    def _weighted(self, name: str) -> float:
        return sum(getattr(row, name) * row.new_tokens for row in self.rows) / max(self.new_tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        totals = ("new_tokens", "target_forwards", "acceptance_length", "tokens_per_second", "divergence_spent")
        fractions = ("gate_open_fraction", "gate_accepted_fraction", "copied_4grams", "repeated_4grams")
        record = {name: getattr(self, name) for name in (*totals, *fractions)}
        record["tau"] = self.acceptance_length  # the key of records
        record.update(seconds=self.seconds, prefill_seconds=self.prefill_seconds, phases=self.phases)
        record.update(rule=self.rule, drafter=self.drafter, cache_bytes=self.cache_bytes)
        record["drafts"] = self.drafts.summary()
        if self.trees is not None:
            record["trees"] = self.trees.to_dict()
        record["rows"] = [
            {
                **asdict(row),
                "tau": row.acceptance_length,
                "drafts": row.drafts.summary(),
                "seconds": row.seconds,
                "tokens_per_second": row.tokens_per_second,
            }
            for row in self.rows
        ]
        return record


@dataclass
class RowRecord(Renamed):
    """One answer while it grows.

    Attributes:
        tokens: token ids.
        emissions: one per token; empty with beams.
        steps: search steps with beams; else None, and each token is a step.
    """

    former_members = {"gates": "relaxed", "finish": "to_stats"}

    tokens: list[int] = field(default_factory=list)
    emissions: list[Emission] = field(default_factory=list)
    target_forwards: int = 0
    steps: int | None = None
    finish_reason: str | None = None
    decode_seconds: float = 0.0

    @property
    def sources(self) -> list[TokenOrigin]:
        return [emission.source for emission in self.emissions]

    @property
    def relaxed(self) -> list[bool]:
        """Of each token, whether a lossy distribution applied at its context."""
        return [emission.relaxed for emission in self.emissions]

    @property
    def spent(self) -> list[float]:
        return [emission.nats for emission in self.emissions]

    def to_stats(self, prefill_seconds: float, prompt: Sequence[int], proposers: Sequence[str]) -> RowStats:
        """Return the statistics of the finished answer.

        Args:
            prefill_seconds: prefill time of the request.
            prompt: token ids.
            proposers: names, see :attr:`.Drafter.proposers`.
        """
        drafts = FirstChoiceStats()
        for emission in self.emissions:
            if emission.first_choice is not None:
                drafts.add(proposers[emission.first_choice[0]], emission.depth, emission.first_choice[1])
        sources = [(*proposers, "target")[emission.proposer] for emission in self.emissions]
        count, forwards = len(self.tokens), self.target_forwards
        log_p = [emission.log_likelihood for emission in self.emissions if emission.log_likelihood is not None]
        return RowStats(
            new_tokens=count,
            target_forwards=forwards,
            acceptance_length=((count if self.steps is None else self.steps) - 1) / forwards if forwards else math.nan,
            gate_open_fraction=_mean(self.relaxed) or 0.0,
            gate_accepted_fraction=_mean([source == TokenOrigin.GATE for source in self.sources]) or 0.0,
            divergence_spent=float(sum(self.spent)),
            finish_reason=self.finish_reason or "length",
            prefill_seconds=prefill_seconds,
            decode_seconds=self.decode_seconds,
            copied_4grams=copied_ngrams(prompt, self.tokens),
            repeated_4grams=repeated_ngrams(self.tokens),
            by_proposer=_shares(sources, self.emissions),
            by_kind=_shares(kinds(prompt, self.tokens), self.emissions),
            drafts=drafts,
            mean_log_likelihood=sum(log_p) / count if log_p else None,
        )


@dataclass
class Outcome:
    """Answers (new tokens only), per-token records, statistics and, with beams, each answer's score."""

    sequences: list[list[int]]
    records: list[RowRecord]
    stats: GenerationStats
    scores: list[float] | None = None


def _shares(labels: Sequence[str], emissions: Sequence[Emission]) -> dict[str, Share]:
    shares: dict[str, Share] = {}
    for label, emission in zip(labels, emissions):
        share = shares.setdefault(label, Share(tokens=0, lossy=0, nats=0.0))
        share["tokens"] += 1
        share["lossy"] += emission.source == TokenOrigin.GATE
        share["nats"] += emission.nats
    return shares


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def describe_rules(rules: Sequence[Rule]) -> dict[str, Any]:
    """Describe the rule of all rows, or each row's."""
    if all(rule == rules[0] for rule in rules):
        return rules[0].describe()
    return {"rule": "per row", "rows": [rule.describe() for rule in rules]}
