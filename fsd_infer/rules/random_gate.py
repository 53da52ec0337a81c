"""A gate that opens at random: the control that every claim about a better gate is held against."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fsd_infer.rules._contexts import Contexts
from fsd_infer.rules._laws import GatedRule, OpenLaw, check_number, children_law
from fsd_infer.rules.base import RULES


@dataclass(frozen=True)
class RandomGate(GatedRule):
    """`fuzzy`, but each gate opens with probability ``rate``, independently of the models.

    Args:
        rate: in [0, 1].
        budget: nats that open gates may spend per request; None for no limit.

    Raises:
        FsdError: ``rate`` outside [0, 1], negative or NaN budget.
    """

    rate: float
    budget: float | None = None

    name = "random"
    over_children = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check_number(self.name, "rate", self.rate, high=1.0))
        if self.budget is not None:
            object.__setattr__(self, "budget", check_number(self.name, "budget", self.budget))

    def gate(self, at: Contexts) -> Tensor:
        return (at.uniform(2) < self.rate) & at.has_q

    def open_law(self, at: Contexts, closed: Tensor) -> OpenLaw:
        return children_law(at, closed)

    def describe(self) -> dict[str, object]:
        return {"rule": self.name, "rate": self.rate, "budget": self.budget, "budget_unit": "nats"}


RULES.register("random")(RandomGate)
