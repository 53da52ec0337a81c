"""Plain text for the terminal: a line of statistics, and tokens marked by their source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from fsd_core.tables import percent
from fsd_infer.engine.drafts import drafts_text
from fsd_infer.engine.stats import GenerationStats
from fsd_infer.rules import Source

# how a token of each source looks: an ANSI colour, or a pair of marks around it
COLOURS = {Source.TARGET: "", Source.EXACT: "\x1b[32m", Source.GATE: "\x1b[1;35m"}
MARKS = {Source.TARGET: ("", ""), Source.EXACT: ("[", "]"), Source.GATE: ("{", "}")}
MEANINGS = {Source.TARGET: "target", Source.EXACT: "exact acceptance", Source.GATE: "open gate"}
RESET = "\x1b[0m"


def summary_lines(stats: GenerationStats) -> str:
    """Return two lines on an answer: how fast it came, and what it was made with."""
    reasons = ", ".join(sorted({row.finish_reason for row in stats.rows}))
    tau = f", {stats.tau:.2f} tokens per forward of the target" if stats.target_forwards else ""
    lossy = f", {stats.divergence_spent:.2f} nats spent" if stats.divergence_spent else ""
    return (
        f"{stats.new_tokens} tokens in {stats.seconds:.2f} s, {stats.tokens_per_second:.1f} tok/s{tau}\n"
        f"rule {stats.rule['rule']}{lossy}, drafter {stats.drafter['name']}, ended by {reasons} (--stats says more)"
    )


def stats_line(stats: GenerationStats) -> str:
    """Return one line on an answer: length, speed, acceptance length, gates, nats spent."""
    reasons = ", ".join(sorted({row.finish_reason for row in stats.rows}))
    rule = " ".join(f"{stats.rule[key]}" for key in ("rule", "divergence") if stats.rule.get(key))
    if stats.rule.get("threshold") is not None:
        rule += f" <= {stats.rule['threshold']} ({stats.rule['gate_on']})"
    tau = f"{stats.tau:.2f}" if stats.target_forwards else "-"
    return (
        f"{stats.new_tokens} tokens in {stats.seconds:.2f} s (prefill {stats.prefill_seconds:.2f} s), "
        f"{stats.tokens_per_second:.1f} tok/s; tau {tau} over {stats.target_forwards} target forwards; "
        f"gate open at {100 * stats.gate_open_fraction:.1f} % of tokens, {stats.divergence_spent:.3f} nats spent; "
        f"{drafts_text(stats.drafts.summary())}; "
        f"4-grams copied from the prompt {percent(stats.copied_4grams, 0)} %, repeated "
        f"{percent(stats.repeated_4grams, 0)} %; "
        f"ended by {reasons}; rule {rule}, drafter {stats.drafter['name']}"
    )


def use_colour(choice: str, stream: TextIO) -> bool:
    """Return whether to write colours: "always", "never", or "auto" for terminals without NO_COLOR."""
    return choice == "always" or (choice == "auto" and stream.isatty() and not os.environ.get("NO_COLOR"))


def show_accepted(pieces: Sequence[str], sources: Sequence[int], colour: bool) -> str:
    """Return the text with each token coloured, or set in marks, by its :class:`Source`."""
    shown = []
    for piece, source in zip(pieces, sources, strict=True):
        code, (opening, closing) = COLOURS[Source(source)], MARKS[Source(source)]
        if colour:
            shown.append(f"{code}{piece}{RESET}" if code and piece else piece)
        else:
            shown.append(f"{opening}{piece}{closing}")
    return "".join(shown)


def legend(colour: bool) -> str:
    """Return the meaning of the colours or marks of :func:`show_accepted`."""
    return "tokens by source: " + ", ".join(
        show_accepted([MEANINGS[source]], [source], colour) for source in (Source.TARGET, Source.EXACT, Source.GATE)
    )
