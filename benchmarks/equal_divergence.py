"""What heads are worth at equal divergence spent: curves, ratios with bootstrap intervals, tables.

A rule at a threshold is a point (divergence spent per token, accepted length); the thresholds of a head make a curve
that starts at the exact rule, which spends nothing. At one threshold two heads spend differently, so lengths are
compared where the curves spend the same, by linear interpolation and never beyond a curve's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 1000
GRID = 50  # points that a mean over a range is taken at
COUNTS = ("tokens", "forwards", "spent", "gate_open", "log_likelihood", "stopped", "copied", "repeated")


@dataclass(frozen=True)
class Counts:
    """What every head did with every prompt, [arm, seed, rule, prompt] each.

    Attributes:
        arms, seeds, rules: what the first three dimensions stand for.
        values: by name of :data:`COUNTS`: ``tokens`` of the answer, verifying target ``forwards``, nats ``spent``,
            tokens emitted where a gate was open, the answer's summed ``log_likelihood``, whether it ``stopped`` by
            itself.
    """

    arms: list[str]
    seeds: list[int]
    rules: list[str]
    values: Mapping[str, Floats]

    def totals(self, weights: Floats | None = None) -> dict[str, Floats]:
        """Sums over prompts; with weights [P, W] how often each counts. [arm, seed, rule] or [arm, seed, rule, W]."""
        if weights is None:
            return {name: value.sum(-1) for name, value in self.values.items()}
        return {name: self.values[name] @ weights for name in ("tokens", "forwards", "spent", "answers")}


def gather(results: Mapping[tuple[str, int, str], Mapping[str, Sequence[float]]], arms: Sequence[str]) -> Counts | None:
    """The counts of the seeds that every arm has all rules of; None if there is no such seed.

    Args:
        results: by (arm, seed, rule): a list per name of :data:`COUNTS`, one number for each prompt.
        arms: in the order of the tables.
    """
    rules = list(dict.fromkeys(rule for _, _, rule in results))
    seeds = sorted({seed for _, seed, _ in results})
    whole = [seed for seed in seeds if all((arm, seed, rule) in results for arm in arms for rule in rules)]
    if not whole or not arms:
        return None
    values = {
        name: np.array([[[results[arm, seed, rule][name] for rule in rules] for seed in whole] for arm in arms], float)
        for name in COUNTS
    }
    values["answers"] = np.ones_like(values["tokens"])
    return Counts(list(arms), whole, rules, values)


def points(totals: Mapping[str, Floats]) -> tuple[Floats, Floats]:
    """(nats spent per token, accepted length) of sums over prompts; the prefill's token counts for neither's forwards.

    Accepted length is (tokens - 1 per answer) / verifying forwards, as everywhere in this package.
    """
    return totals["spent"] / totals["tokens"], (totals["tokens"] - totals["answers"]) / totals["forwards"]


def curve(spent: Floats, tau: Floats) -> tuple[Floats, Floats]:
    """Points [R] in the order of divergence spent; of points that spend the same, the mean accepted length."""
    places, where = np.unique(spent, return_inverse=True)
    return places, np.bincount(where, weights=tau) / np.bincount(where)


def tau_at(spent: Floats, tau: Floats, at: Floats) -> Floats:
    """Accepted length [G] that the points [R] give at divergences ``at`` [G]; NaN outside of their range."""
    places, lengths = curve(spent, tau)
    return np.interp(at, places, lengths, left=np.nan, right=np.nan)


def compare_at_equal(counts: Counts, baseline: str, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Any]:
    """Accepted length of every arm divided by the baseline's where both spend the same.

    An arm's curve is that of the means over its seeds. Looked at are the divergences that the baseline itself spends at
    each rule, and the mean of the ratio over the range that both curves cover. Intervals are 95 % percentile bootstrap
    ones over prompts and seeds, drawn jointly for all arms because these share both.

    Args:
        counts: of all arms.
        baseline: one of them.
        seed: of the bootstrap.
        resamples: of the bootstrap.

    Returns:
        {"baseline", "at": [{"rule", "spent"}], "arms": {arm: {"at": [{"tau", "ratio", "low", "high"}], "mean": {"from",
        "to", "ratio", "low", "high"}}}}; None where an arm never spends that much.
    """
    base = counts.arms.index(baseline)
    spent, tau = points(counts.totals())  # [A, S, R]
    at = spent[base].mean(0)  # [R]

    rng = np.random.default_rng(seed)
    prompts, seeds = counts.values["tokens"].shape[-1], len(counts.seeds)
    drawn_prompts = rng.integers(prompts, size=(resamples, prompts))
    weights = np.stack([np.bincount(row, minlength=prompts) for row in drawn_prompts], axis=1).astype(float)  # [P, W]
    drawn_seeds = rng.integers(seeds, size=(resamples, seeds))
    many_spent, many_tau = points(counts.totals(weights))  # [A, S, R, W]

    arms: dict[str, Any] = {}
    for arm, name in enumerate(counts.arms):
        means = [values[who].mean(0) for who in (arm, base) for values in (spent, tau)]
        own, ratio, over_range = _ratios(*means)
        ratios, ranges = np.empty((resamples, len(at))), np.empty(resamples)
        for number, rows in enumerate(drawn_seeds):
            drawn = [values[who][rows, :, number].mean(0) for who in (arm, base) for values in (many_spent, many_tau)]
            _, ratios[number], ranges[number] = _ratios(*drawn)
        arms[name] = {
            "at": [
                {"tau": _number(own[i]), "ratio": _number(ratio[i]), **_interval(ratios[:, i], ratio[i])}
                for i in range(len(at))
            ],
            "mean": {
                "from": float(max(means[0].min(), means[2].min())),
                "to": float(min(means[0].max(), means[2].max())),
                "ratio": _number(over_range),
                **_interval(ranges, over_range),
            },
        }
    return {
        "baseline": baseline,
        "at": [{"rule": rule, "spent": float(value)} for rule, value in zip(counts.rules, at)],
        "arms": arms,
    }


def _ratios(spent: Floats, tau: Floats, base_spent: Floats, base_tau: Floats) -> tuple[Floats, Floats, float]:
    """Of an arm's points and a baseline's, all [R]: the arm's accepted length where the baseline has its points, that
    divided by the baseline's, and the mean of this ratio over the range that both curves cover."""
    own = tau_at(spent, tau, base_spent)
    low, high = max(spent.min(), base_spent.min()), min(spent.max(), base_spent.max())
    grid = np.linspace(low, high, GRID) if high > low else np.array([low])
    over_range = tau_at(spent, tau, grid) / tau_at(base_spent, base_tau, grid)
    return own, own / tau_at(base_spent, base_tau, base_spent), float(np.mean(over_range))


def _interval(values: Floats, estimate: float) -> dict[str, float | None]:
    """The 95 % percentile interval of resampled values; None where a tenth of the resamples do not reach the place, for
    those that do are the ones that spend much."""
    there = values[~np.isnan(values)]
    if np.isnan(estimate) or len(there) < 0.9 * len(values):
        return {"low": None, "high": None}
    low, high = np.quantile(there, (0.025, 0.975))
    return {"low": float(low), "high": float(high)}


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def summarise(counts: Counts, baselines: Sequence[str], seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Any]:
    """Means and standard deviations over seeds for each arm and rule, and the comparison with each baseline."""
    totals = counts.totals()
    spent, tau = points(totals)
    tokens = totals["tokens"]
    facts = {
        "tau": tau,
        "spent_per_token": spent,
        "gate_open_fraction": totals["gate_open"] / tokens,
        "copied_4grams": totals["copied"] / tokens,
        "repeated_4grams": totals["repeated"] / tokens,
        "answer_tokens": tokens / totals["answers"],
        "target_forwards": totals["forwards"] / totals["answers"],
        "log_likelihood_per_token": totals["log_likelihood"] / tokens,
        "finished_fraction": totals["stopped"] / totals["answers"],
    }
    arms: dict[str, Any] = {}
    for a, name in enumerate(counts.arms):
        arms[name] = {
            rule: {fact: _spread(values[a, :, r]) for fact, values in facts.items()}
            for r, rule in enumerate(counts.rules)
        }
    return {
        "seeds": counts.seeds,
        "rules": counts.rules,
        "prompts": counts.values["tokens"].shape[-1],
        "arms": arms,
        "equal_divergence": [
            compare_at_equal(counts, name, seed, resamples) for name in baselines if name in counts.arms
        ],
    }


def _spread(values: Floats) -> dict[str, Any]:
    """Over seeds: mean, standard deviation (None for one seed), and each seed's value."""
    deviation = float(values.std(ddof=1)) if len(values) > 1 else None
    return {"mean": float(values.mean()), "sd": deviation, "seeds": [float(value) for value in values]}


def markdown(summary: Mapping[str, Any]) -> str:
    """The summary as Markdown tables."""
    seeds = len(summary["seeds"])
    lines = [
        f"{seeds} seed{'s' if seeds > 1 else ''}, {summary['prompts']} held-out prompts. ± is the standard deviation "
        "over seeds; spent: nats per token; copies, repeats: of the answers' 4-grams; forwards, tokens: per answer; "
        "log-lik: the target's, per token.",
        "",
        "| arm | rule | τ | spent | copies | repeats | forwards | tokens | log-lik |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, rules in summary["arms"].items():
        for rule, facts in rules.items():
            mean = {name: fact["mean"] for name, fact in facts.items()}
            lines.append(
                f"| {arm} | {rule} | {mean['tau']:.3f}{_plus_minus(facts['tau'], 3)} "
                f"| {mean['spent_per_token']:.4f}{_plus_minus(facts['spent_per_token'], 4)} "
                f"| {mean['copied_4grams']:.1%} | {mean['repeated_4grams']:.1%} "
                f"| {mean['target_forwards']:.1f} | {mean['answer_tokens']:.1f} "
                f"| {mean['log_likelihood_per_token']:.3f} |"
            )
    for table in summary["equal_divergence"]:
        places = [f"{place['spent']:.3f} ({place['rule']})" for place in table["at"]]
        lines += [
            "",
            f"τ divided by that of `{table['baseline']}` where both spend the same, with 95 % intervals. Columns: what "
            f"`{table['baseline']}` spends per token at each rule; mean: over the range both curves cover; –: the arm "
            "never spends that much.",
            "",
            "| arm | " + " | ".join(places) + " | mean |",
            "|---" * (len(places) + 2) + "|",
        ]
        for arm, facts in table["arms"].items():
            if arm != table["baseline"]:
                cells = [_ratio(cell) for cell in facts["at"]]
                whole = f"{_ratio(facts['mean'])} to {facts['mean']['to']:.3f}"
                lines.append(f"| {arm} | " + " | ".join([*cells, whole]) + " |")
    return "\n".join(lines) + "\n"


def markdown_runs(runs: Sequence[Mapping[str, Any]]) -> str:
    """What training cost and what it validated, as a Markdown table."""
    lines = ["| arm | seed | steps | seconds per step | greedy agreement by step |", "|---|---|---|---|---|"]
    for facts in runs:
        found = [facts["validation"].get(f"val_agreement_{step}") for step in range(9)]
        agreement = " / ".join(f"{value:.3f}" for value in found if value is not None)
        pace = facts["seconds"] / facts["steps"]
        lines.append(f"| {facts['arm']} | {facts['seed']} | {facts['steps']} | {pace:.2f} | {agreement} |")
    return "\n".join(lines) + "\n"


def _plus_minus(fact: Mapping[str, Any], digits: int) -> str:
    return "" if fact["sd"] is None else f" ± {fact['sd']:.{digits}f}"


def _ratio(cell: Mapping[str, float | None]) -> str:
    if cell["ratio"] is None:
        return "–"
    interval = "" if cell["low"] is None else f" [{cell['low']:.3f}, {cell['high']:.3f}]"
    return f"{cell['ratio']:.3f}{interval}"
