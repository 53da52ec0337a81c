"""How good a drafter's first choices are: how often they are the target's, and what the others cost.

A lossy rule wins where a mistake is nearly as good as the target's own token, so the regret of mistakes says more about
what such a rule can win with a drafter than its agreement does.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BOUNDS = (0.5, 1.0, 2.0)  # nats

Regrets = Mapping[str, Sequence[Sequence[float]]]  # by proposer, then by depth, the first at 1


class Drafts:
    """Regrets of a drafter's first choices at the contexts that rounds came to, in nats; 0: the target's likeliest.

    Args:
        regrets: as :meth:`regrets` returns them.
    """

    def __init__(self, regrets: Regrets | None = None) -> None:
        self._found: dict[str, list[list[float]]] = {}
        self.merge(regrets or {})

    @classmethod
    def pooled(cls, many: Iterable[Drafts]) -> Drafts:
        """All of them together."""
        made = cls()
        for one in many:
            made.merge(one._found)
        return made

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, proposer: str, depth: int, regret: float) -> None:
        """One first choice: who proposed it, its depth from 1 on, and its regret."""
        depths = self._found.setdefault(proposer, [])
        depths += [[] for _ in range(depth - len(depths))]
        depths[depth - 1].append(regret)

    def merge(self, regrets: Regrets) -> None:
        """Add all of them."""
        for proposer, depths in regrets.items():
            for depth, values in enumerate(depths, 1):
                for value in values:
                    self.add(proposer, depth, float(value))

    def regrets(self) -> dict[str, list[list[float]]]:
        """Every regret to three significant digits, by proposer and depth, for files."""
        return {
            name: [[float(f"{value:.3g}") for value in values] for values in depths]
            for name, depths in self._found.items()
        }

    def summary(self) -> dict[str, Any]:
        """``count`` of first choices; ``agreement``, the share with regret 0; of the others, the mistakes,
        ``regret_median`` and the shares ``below`` so many nats. The same ``by_proposer`` and ``by_depth``. None where
        there is nothing to count.
        """
        depths: dict[str, list[float]] = {}
        for found in self._found.values():
            for depth, values in enumerate(found, 1):
                depths.setdefault(str(depth), []).extend(values)
        return {
            **_summary([value for values in depths.values() for value in values]),
            "by_proposer": {name: _summary(sum(found, [])) for name, found in self._found.items()},
            "by_depth": {depth: _summary(depths[depth]) for depth in sorted(depths, key=int)},
        }


def _summary(regrets: Sequence[float]) -> dict[str, Any]:
    mistakes = [regret for regret in regrets if regret > 0]
    return {
        "count": len(regrets),
        "agreement": (len(regrets) - len(mistakes)) / len(regrets) if regrets else None,
        "regret_median": statistics.median(mistakes) if mistakes else None,
        "below": {
            f"{bound:g}": sum(regret < bound for regret in mistakes) / len(mistakes) if mistakes else None
            for bound in BOUNDS
        },
    }


def drafts_text(summary: Mapping[str, Any]) -> str:
    """A summary in a few words."""
    if not summary["count"]:
        return "no drafts"
    text = f"{summary['agreement']:.0%} of {summary['count']} first drafts are the target's likeliest token"
    if summary["regret_median"] is not None:
        shares = ", ".join(f"{share:.0%} below {bound}" for bound, share in summary["below"].items())
        text += f", the others cost {summary['regret_median']:.2f} nats in the median ({shares})"
    return text
