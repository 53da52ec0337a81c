"""Every gate open: what the drafter alone would say. The far end of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fsd_infer.rules._contexts import Contexts
from fsd_infer.rules._laws import GatedRule, OpenLaw, check_number, draft_law
from fsd_infer.rules.base import RULES


@dataclass(frozen=True)
class DraftOnly(GatedRule):
    """y ~ q at every context that has children of known distribution, y ~ p elsewhere: where the drafts end, and where
    they come from a drafter without distributions (n-gram lookup).

    Args:
        budget: nats that may be spent per request; None for no limit. Where it does not suffice the exact rule decides.

    Raises:
        FsdError: negative or NaN budget.
    """

    budget: float | None = None

    name = "draft-only"

    def __post_init__(self) -> None:
        if self.budget is not None:
            object.__setattr__(self, "budget", check_number(self.name, "budget", self.budget))

    def gate(self, at: Contexts) -> Tensor:
        return at.has_q

    def open_law(self, at: Contexts, closed: Tensor) -> OpenLaw:
        return draft_law(at, closed)

    def describe(self) -> dict[str, object]:
        return {"rule": self.name, "budget": self.budget, "budget_unit": "nats"}


RULES.register("draft-only")(DraftOnly)
