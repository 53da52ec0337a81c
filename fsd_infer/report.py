"""Plain-text reports for the terminal: tables, one line of statistics, and tokens marked by where they came from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TextIO

from fsd_infer.errors import FsdError
from fsd_infer.rules.base import Source
from fsd_infer.stats import GenerationStats

# How a token of each source looks: ANSI colour, or a pair of marks around it.
COLOURS = {Source.TARGET: "", Source.EXACT: "\x1b[32m", Source.GATE: "\x1b[1;35m"}
MARKS = {Source.TARGET: ("", ""), Source.EXACT: ("[", "]"), Source.GATE: ("{", "}")}
MEANINGS = {Source.TARGET: "target", Source.EXACT: "exact acceptance", Source.GATE: "open gate"}
RESET = "\x1b[0m"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned table: the first column to the left, numbers to the right."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]

    def row(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))]).rstrip()

    return "\n".join([row(lines[0]), "  ".join("-" * width for width in widths), *map(row, lines[1:])])


def number(value: Any, digits: int = 2) -> str:
    """A number for a table; "-" where there is none."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.{digits}f}"


def bench_table(record: dict[str, Any]) -> str:
    """The tables of a benchmark's record: all methods; tau by category where there are several; time by phase."""
    methods = record["methods"]
    parts = [_methods_table(record)]
    categories = list(next(iter(methods.values()))["categories"])
    if len(categories) > 1:
        rows = [
            [name, *(number(methods[method]["categories"][name]["tau"]) for method in methods)] for name in categories
        ]
        rows.append(["mean", *(number(facts["tau_category_mean"]) for facts in methods.values())])
        parts.append("tau by category\n" + table(["category", *methods], rows))
    phased = {name: facts["phases"] for name, facts in methods.items() if facts["phases"]}
    if phased:
        phases = list(dict.fromkeys(phase for spent in phased.values() for phase in spent))
        rows = []
        for name, spent in phased.items():
            total = sum(spent.values()) or 1.0
            rows.append([name, *(f"{100 * spent.get(phase, 0.0) / total:.1f}" for phase in phases)])
        parts.append("share of time by phase, %\n" + table(["method", *phases], rows))
    return "\n\n".join(parts)


def _methods_table(record: dict[str, Any]) -> str:
    methods, ratios = record["methods"], record["ratios"]
    scored = any(facts["log_likelihood_per_token"] is not None for facts in methods.values())
    headers = ["method", "tok/s", "decode tok/s", *(f"x {baseline} [95 %]" for baseline in ratios)]
    headers += ["tau", "forwards", "tokens", "s/answer", "prefill s", "gate open %", "nats spent"]
    headers += ["log-lik/token"] if scored else []
    rows = []
    for name, facts in methods.items():
        row = [name, number(facts["tokens_per_second"], 1), number(facts["decode_tokens_per_second"], 1)]
        row += [_ratio(against.get(name)) for against in ratios.values()]
        row += [number(facts["tau"]), number(facts["target_forwards"], 1), number(facts["answer_tokens"], 1)]
        row += [number(facts["seconds_per_answer"]), number(facts["prefill_seconds"], 3)]
        share = facts["gate_open_fraction"]
        row += [number(None if share is None else 100 * share, 1), number(facts["divergence_spent"])]
        row += [number(facts["log_likelihood_per_token"], 3)] if scored else []
        rows.append(row)
    answers = next(iter(methods.values()))["answers"]
    note = (
        f"{answers} prompts; medians over prompts (tok/s, ratios, seconds), means per answer (forwards, tokens, nats); "
        "tok/s counts prefill"
    )
    return table(headers, rows) + "\n" + note


def _ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return "1"
    ratio = found["tokens_per_second"]
    if ratio["median"] is None:
        return "-"
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def stats_line(stats: GenerationStats) -> str:
    """One line on one answer: length, speed, accepted length, gates, divergence."""
    reasons = ", ".join(sorted({row.finish_reason for row in stats.rows}))
    rule = " ".join(f"{stats.rule[key]}" for key in ("rule", "divergence") if stats.rule.get(key))
    if stats.rule.get("threshold") is not None:
        rule += f" <= {stats.rule['threshold']} ({stats.rule['gate_on']})"
    tau = f"{stats.tau:.2f}" if stats.target_forwards else "-"
    return (
        f"{stats.new_tokens} tokens in {stats.seconds:.2f} s (prefill {stats.prefill_seconds:.2f} s), "
        f"{stats.tokens_per_second:.1f} tok/s; tau {tau} over {stats.target_forwards} target forwards; "
        f"gate open at {100 * stats.gate_open_fraction:.1f} % of tokens, {stats.divergence_spent:.3f} nats spent; "
        f"ended by {reasons}; rule {rule}, drafter {stats.drafter['name']}"
    )


def use_colour(choice: str, stream: TextIO) -> bool:
    """Whether to write colours: "always", "never", or "auto": on a terminal, unless NO_COLOR is set."""
    if choice not in ("auto", "always", "never"):
        raise FsdError(f"colour is auto, always or never, not {choice!r}.")
    return choice == "always" or (choice == "auto" and stream.isatty() and not os.environ.get("NO_COLOR"))


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; together they are the decoded text without special tokens.

    A token that ends inside a character adds nothing, the one that completes it adds the character.
    """
    pieces: list[str] = []
    shown = ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        whole = end == len(tokens) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        pieces.append(text[len(shown) :] if whole else "")
        shown = text if whole else shown
    return pieces


def show_accepted(pieces: Sequence[str], sources: Sequence[int], colour: bool) -> str:
    """The text with every token coloured, or set in marks, by its :class:`Source`."""
    shown = []
    for piece, source in zip(pieces, sources, strict=True):
        code, (opening, closing) = COLOURS[Source(source)], MARKS[Source(source)]
        if colour:
            shown.append(f"{code}{piece}{RESET}" if code and piece else piece)
        else:
            shown.append(f"{opening}{piece}{closing}")
    return "".join(shown)


def legend(colour: bool) -> str:
    """What the colours or marks of :func:`show_accepted` mean."""
    return "tokens by source: " + ", ".join(
        show_accepted([MEANINGS[source]], [source], colour) for source in (Source.TARGET, Source.EXACT, Source.GATE)
    )
