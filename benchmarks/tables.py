"""Markdown tables of records: settings of a sweep, or rules of `fsd-bench run`, compared with exact decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fsd_bench.sweep.settings import EXACT

RATIOS = {"× τ": "tau", "forwards ×": "target_forwards", "length ×": "answer_tokens", "speed ×": "speed"}
DIFFERENCES = {  # heading: quantity, scale, digits
    "score, points": ("score", 100, 0), "log-likelihood": ("log_likelihood_per_token", 1, 3),
    "copied 4-grams, points": ("copied_4grams", 100, 1), "repeated 4-grams, points": ("repeated_4grams", 100, 1),
}  # fmt: skip


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def sweep_tables(record: dict[str, Any]) -> str:
    """Return a Markdown table per temperature with each setting's ratios to exact and its differences from it."""
    header = ["rule", *RATIOS, *DIFFERENCES, "nats per answer"]
    parts = []
    for temperature, settings in record["temperatures"].items():
        exact = settings[EXACT]
        score = exact["means"].get("score")
        caption = f"Temperature {temperature}, `{EXACT}`: {exact['tau']:.2f} tokens per forward"
        if score is not None:
            mean, low, high = (f"{100 * score[key]:.0f}" for key in ("mean", "low", "high"))
            caption += f", score {mean} % ({low}–{high})"
        rows = []
        for name, facts in settings.items():
            if name != EXACT:
                cells = [ratio(facts["ratios"].get(key)) for key in RATIOS.values()]
                cells += [difference(facts["differences"].get(key), *form) for key, *form in DIFFERENCES.values()]
                rows.append([f"`{name}`", *cells, f"{facts['nats_per_answer']['mean']:.1f}"])
        parts.append(f"{caption}.\n\n{columns(header, rows)}\n")
    return "\n".join(parts)


def beside_exact(record: dict[str, Any]) -> list[list[str]]:
    """Return a row per rule of a record of `fsd-bench run`: τ, score, flips, ends and repeats compared with exact."""
    rows = []
    for name, differences in record["differences"][EXACT].items():
        ratios, facts, flips = record["ratios"][EXACT][name], record["methods"][name], record["flips"][EXACT][name]
        mean, low, high = (f"{100 * ratios['retention'][key]:.0f}" for key in ("ratio", "low", "high"))
        points = [difference(differences[key], 100, 1) for key in ("score", "finished_fraction", "repeated_4grams")]
        nats = facts["divergence_spent"] / facts["answer_tokens"]
        lost = f"{flips['lost']}, {flips['gained']}"
        cells = [ratio(ratios["tau"]), points[0], f"{mean} % ({low}–{high})", lost, *points[1:], f"{nats:.3f}"]
        rows.append([f"`{name}`", *cells])
    return rows


def ratio(values: dict[str, float] | None) -> str:
    """A ratio with its interval."""
    return "–" if values is None else "{ratio:.2f} ({low:.2f}–{high:.2f})".format(**values)


def difference(values: dict[str, float] | None, scale: float, digits: int) -> str:
    """A mean difference with its interval, times a scale."""
    if values is None:
        return "–"
    mean, low, high = (f"{scale * values[key]:+.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})".replace("-", "−")


def trainer_steps(record: dict[str, Any]) -> list[tuple[str, float, int]]:
    """Return each trainer's name, milliseconds of a step without the target, and trained parameters; ours first."""
    our_ms = sum(ms for part, ms in record["parts_ms"].items() if part != "target")
    others = [record[name] for name in ("speculators", "specforge") if record.get(name)]
    return [
        ("here", our_ms, record["trained_parameters"]),
        *((peer["version"], peer["ms"], peer["trained_parameters"]) for peer in others),
    ]
