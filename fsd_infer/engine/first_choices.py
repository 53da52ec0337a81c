"""The quality of a drafter's first choices: how often they are the target's, and the gap of the others.

A lossy rule gains from mistakes that are nearly as good as the target's own token. So the gap of a drafter's
mistakes predicts the gain of such a rule better than the drafter's agreement does.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsd_core.former import Renamed

BOUNDS = (0.5, 1.0, 2.0)  # nats

Gaps = Mapping[str, Sequence[Sequence[float]]]  # log-probability gaps by proposer, then by depth from 1


class FirstChoiceStats(Renamed):
    """Gaps of a drafter's first choices at the contexts that rounds reached, in nats; 0: the target's likeliest.

    Args:
        gaps: as :meth:`gaps` returns them.
    """

    former_members = {"regrets": "gaps"}

    def __init__(self, gaps: Gaps | None = None) -> None:
        self._gaps: dict[str, list[list[float]]] = {}
        self.merge(gaps or {})

    @classmethod
    def pooled(cls, many: Iterable[FirstChoiceStats]) -> FirstChoiceStats:
        """Return the union."""
        union = cls()
        for one in many:
            union.merge(one._gaps)
        return union

    def __bool__(self) -> bool:
        return bool(self._gaps)

    def add(self, proposer: str, depth: int, gap: float) -> None:
        """Add a first choice: its proposer, its depth from 1, and its gap."""
        depths = self._gaps.setdefault(proposer, [])
        depths += [[] for _ in range(depth - len(depths))]
        depths[depth - 1].append(gap)

    def merge(self, gaps: Gaps) -> None:
        """Add many first choices."""
        for proposer, depths in gaps.items():
            for depth, values in enumerate(depths, 1):
                for value in values:
                    self.add(proposer, depth, float(value))

    def gaps(self) -> dict[str, list[list[float]]]:
        """Return every gap to three significant digits, by proposer and depth, for files."""
        return {
            name: [[float(f"{value:.3g}") for value in values] for values in depths]
            for name, depths in self._gaps.items()
        }

    def summary(self) -> dict[str, Any]:
        """Return statistics of all first choices, and the same ``by_proposer`` and ``by_depth``.

        ``count`` and ``agreement``, the share with gap 0; of the others, ``regret_median`` and the shares ``below``
        each of ``BOUNDS`` nats. A statistic of nothing is None.
        """
        depths: dict[str, list[float]] = {}
        for by_depth in self._gaps.values():
            for depth, values in enumerate(by_depth, 1):
                depths.setdefault(str(depth), []).extend(values)
        return {
            **_summary([value for values in depths.values() for value in values]),
            "by_proposer": {name: _summary(sum(by_depth, [])) for name, by_depth in self._gaps.items()},
            "by_depth": {depth: _summary(depths[depth]) for depth in sorted(depths, key=int)},
        }


def _summary(gaps: Sequence[float]) -> dict[str, Any]:
    mistakes = [gap for gap in gaps if gap > 0]
    return {
        "count": len(gaps),
        "agreement": (len(gaps) - len(mistakes)) / len(gaps) if gaps else None,
        "regret_median": statistics.median(mistakes) if mistakes else None,
        "below": {
            f"{bound:g}": sum(gap < bound for gap in mistakes) / len(mistakes) if mistakes else None for bound in BOUNDS
        },
    }


def drafts_text(summary: Mapping[str, Any]) -> str:
    """Return a summary as one sentence."""
    if not summary["count"]:
        return "no drafts"
    text = f"{summary['agreement']:.0%} of {summary['count']} first drafts are the target's likeliest token"
    if summary["regret_median"] is not None:
        shares = ", ".join(f"{share:.0%} below {bound}" for bound, share in summary["below"].items())
        text += f", the others cost {summary['regret_median']:.2f} nats in the median ({shares})"
    return text
