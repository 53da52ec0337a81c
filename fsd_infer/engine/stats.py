"""What a run reports, always together: speed, accepted length, answer length, open gates, divergence spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from fsd_infer.drafters.estimates import Trees
from fsd_infer.engine.drafts import Drafts
from fsd_infer.engine.ngrams import copied_ngrams, kinds, repeated_ngrams
from fsd_infer.rules import Emission, Source


class Share(TypedDict):
    """Part of an answer: its tokens, how many of them only another law than the target's let through, nats spent."""

    tokens: int
    lossy: int
    nats: float


@dataclass
class RowStats:
    """One answer.

    Attributes:
        new_tokens: answer length in tokens (an emitted end-of-sequence token counted).
        target_forwards: verifying forwards of the target, prefill not counted.
        tau: accepted length: tokens emitted per target forward, the target's own token counted, the prefill and its
            one token left out. With beams, steps of the search instead of tokens: all beams grow by one in each. NaN if
            there was no verifying forward.
        gate_open_fraction: share of tokens emitted at a context whose gate was open.
        gate_accepted_fraction: share of tokens that only an open gate let through.
        divergence_spent: nats (temperature > 0: KL of the law to the target; 0: greedy regret), summed.
        finish_reason: "stop" (end of sequence or a stopping criterion) or "length".
        copied_4grams: share of the answer's 4-grams that stand in its prompt; None if it is shorter.
        repeated_4grams: share of them that occurred earlier in the answer; None if it is shorter.
        by_proposer: by what proposed the tokens, a drafter's name or "target" for its own, see :func:`_shares`.
        by_kind: by "copied", "repeated" or "new", see :func:`fsd_infer.engine.ngrams.kinds`.
        drafts: the drafter's first choice at every context that a token was emitted from.
        mean_log_likelihood: mean of the target's raw log-probability of the emitted tokens, nats, if measured.
    """

    new_tokens: int
    target_forwards: int
    tau: float
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
    drafts: Drafts = field(default_factory=Drafts)
    mean_log_likelihood: float | None = None

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, prefill included."""
        return self.new_tokens / self.seconds if self.seconds else float("nan")


@dataclass
class GenerationStats:
    """A batch of answers: the rows, and what they add up to.

    Attributes:
        seconds, prefill_seconds: by the host's clock, until the answers were complete, and until they had begun.
        phases: seconds of prefill, draft, target, rule and cache where the work was done: on CUDA by the device's own
            clock, so they may add up to a little more or less than ``seconds``.
        cache_bytes: memory of the key-value caches, the target's and the drafter's.
        known_tokens: of the prompts, that the target had read in an earlier request (:mod:`.targets.prefixes`).
        trees: what was chosen under ``tree="auto"``, and what was expected of it; else None.
    """

    rows: list[RowStats]
    rule: dict[str, Any]
    drafter: dict[str, Any]
    seconds: float
    prefill_seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    cache_bytes: int = 0
    known_tokens: int = 0
    trees: Trees | None = None

    @property
    def new_tokens(self) -> int:
        return sum(row.new_tokens for row in self.rows)

    @property
    def target_forwards(self) -> int:
        return sum(row.target_forwards for row in self.rows)

    @property
    def tau(self) -> float:
        """Over all rows: tokens emitted by verifying forwards / verifying forwards."""
        forwards = self.target_forwards
        emitted = sum(row.tau * row.target_forwards for row in self.rows if row.target_forwards)
        return emitted / forwards if forwards else float("nan")

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else float("nan")

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
        """Mean over the answers, as :attr:`repeated_4grams`; None if all are shorter."""
        return _mean([row.copied_4grams for row in self.rows])

    @property
    def repeated_4grams(self) -> float | None:
        return _mean([row.repeated_4grams for row in self.rows])

    @property
    def drafts(self) -> Drafts:
        """The drafter's first choices, over all rows."""
        return Drafts.pooled(row.drafts for row in self.rows)

    def _weighted(self, name: str) -> float:
        return sum(getattr(row, name) * row.new_tokens for row in self.rows) / max(self.new_tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        totals = ("new_tokens", "target_forwards", "tau", "tokens_per_second", "divergence_spent")
        fractions = ("gate_open_fraction", "gate_accepted_fraction", "copied_4grams", "repeated_4grams")
        record = {name: getattr(self, name) for name in (*totals, *fractions)}
        record.update(seconds=self.seconds, prefill_seconds=self.prefill_seconds, phases=self.phases)
        record.update(rule=self.rule, drafter=self.drafter, cache_bytes=self.cache_bytes)
        record["drafts"] = self.drafts.summary()
        if self.trees is not None:
            record["trees"] = self.trees.to_dict()
        record["rows"] = [
            {
                **asdict(row),
                "drafts": row.drafts.summary(),
                "seconds": row.seconds,
                "tokens_per_second": row.tokens_per_second,
            }
            for row in self.rows
        ]
        return record


@dataclass
class RowRecord:
    """One answer while it grows.

    Attributes:
        tokens: token ids.
        emissions: one by one what is known of them; none with beams.
        steps: of a search with beams; None elsewhere, where each token is a step.
    """

    tokens: list[int] = field(default_factory=list)
    emissions: list[Emission] = field(default_factory=list)
    target_forwards: int = 0
    steps: int | None = None
    finish_reason: str | None = None
    decode_seconds: float = 0.0

    @property
    def sources(self) -> list[Source]:
        return [emission.source for emission in self.emissions]

    @property
    def gates(self) -> list[bool]:
        return [emission.gate_open for emission in self.emissions]

    @property
    def spent(self) -> list[float]:
        return [emission.nats for emission in self.emissions]

    def finish(self, prefill_seconds: float, prompt: Sequence[int], proposers: Sequence[str]) -> RowStats:
        """Args: the prompt's tokens, and the names of the drafter's proposers."""
        drafts = Drafts()
        for emission in self.emissions:
            if emission.first_choice is not None:
                drafts.add(proposers[emission.first_choice[0]], emission.depth, emission.first_choice[1])
        whose = [(*proposers, "target")[emission.proposer] for emission in self.emissions]
        count, forwards = len(self.tokens), self.target_forwards
        log_p = [emission.log_likelihood for emission in self.emissions if emission.log_likelihood is not None]
        return RowStats(
            new_tokens=count,
            target_forwards=forwards,
            tau=((count if self.steps is None else self.steps) - 1) / forwards if forwards else float("nan"),
            gate_open_fraction=_share(self.gates),
            gate_accepted_fraction=_share([source == Source.GATE for source in self.sources]),
            divergence_spent=float(sum(self.spent)),
            finish_reason=self.finish_reason or "length",
            prefill_seconds=prefill_seconds,
            decode_seconds=self.decode_seconds,
            copied_4grams=copied_ngrams(prompt, self.tokens),
            repeated_4grams=repeated_ngrams(self.tokens),
            by_proposer=_shares(whose, self.emissions),
            by_kind=_shares(kinds(prompt, self.tokens), self.emissions),
            drafts=drafts,
            mean_log_likelihood=sum(log_p) / count if log_p else None,
        )


def _shares(labels: Sequence[str], emissions: Sequence[Emission]) -> dict[str, Share]:
    shares: dict[str, Share] = {}
    for label, emission in zip(labels, emissions):
        share = shares.setdefault(label, Share(tokens=0, lossy=0, nats=0.0))
        share["tokens"] += 1
        share["lossy"] += emission.source == Source.GATE
        share["nats"] += emission.nats
    return shares


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
