"""A forecast of what rules are worth with a drafter."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fsd_infer.drafters import TreeShape

COSTS = (0.05, 0.1, 0.2, 0.4, 1.0)  # of a drafted token, in target forwards


@dataclass(frozen=True)
class RuleOnShape:
    """A rule with a shape.

    Attributes:
        tau: tokens per target forward.
        nats: nats per token, as rules count them.
        lossy: share of tokens that only the lossy distribution emits.
        depth, nodes: mean depth and size of the trees, the root counted.
        seconds: seconds per round, by this run's clock.
    """

    shape: TreeShape
    tau: float
    nats: float
    lossy: float
    depth: float
    nodes: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tau / self.seconds

    def per_cost(self, cost: float) -> float:
        """Return tokens per target forward's worth of work. A drafted token costs ``cost`` forwards, nodes nothing."""
        return self.tau / (1 + cost * self.depth)


@dataclass(frozen=True)
class ForecastRow:
    """A rule on all shapes.

    Attributes:
        best: the fastest shape.
        tokens, speed: tokens per forward and speed there, as multiples of exact's on its fastest shape.
    """

    rule: str
    shapes: list[RuleOnShape]
    best: RuleOnShape
    tokens: float
    speed: float

    def per_cost(self, cost: float) -> float:
        return max(shape.per_cost(cost) for shape in self.shapes)


@dataclass
class Forecast:
    """What rules are worth with a drafter.

    Attributes:
        rows: exact first, then by nats per token, the lowest first.
        drafts: statistics of the drafter's first choices, see :meth:`.FirstChoiceStats.summary`.
        yardsticks: by temperature, nats per token that the target's own samples spend, counted as at temperature 0.
        decoded: shape of the run with exact.
        tau, rounds: measured τ of that run, and its number of rounds.
        temperature: temperature of the request.
        forwards: seconds of a target forward by number of nodes.
        draft_step, rest: seconds of a drafted depth, and of everything else in a round.
    """

    rows: list[ForecastRow]
    drafts: dict[str, Any]
    yardsticks: dict[str, float]
    decoded: TreeShape
    tau: float
    rounds: int
    temperature: float
    forwards: dict[str, float]
    draft_step: float
    rest: float

    @property
    def exact(self) -> ForecastRow:
        return self.rows[0]

    def row(self, rule: str) -> ForecastRow:
        """Return the row of a rule. Raises KeyError for a rule that was not replayed."""
        return {row.rule: row for row in self.rows}[rule]

    def frontier(self, most_nats: float = float("inf")) -> list[ForecastRow]:
        """Return the rules faster than exact and than every cheaper rule, from cheap to dear."""
        frontier, fastest = [], 1.0
        for row in self.rows[1:]:
            if row.speed > fastest and row.best.nats <= most_nats:
                frontier.append(row)
                fastest = row.speed
        return frontier

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        result = asdict(self)
        for row, facts in zip(self.rows, result["rows"], strict=True):
            facts["per_cost"] = {f"{cost:g}": row.per_cost(cost) for cost in COSTS}
        return result
