"""Plain text for the terminal: a line of statistics, and tokens marked by who wrote them, at the end or live."""

from __future__ import annotations

import os
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from fsd_core.tables import percent
from fsd_core.text.pieces import Pieces
from fsd_infer.engine.callback import Callback
from fsd_infer.engine.first_choices import drafts_text
from fsd_infer.engine.report import RoundReport
from fsd_infer.engine.stats import GenerationStats
from fsd_infer.rules import TokenOrigin

# How a token of each source looks: an ANSI colour, or a pair of marks around it. Blue and orange differ for all eyes,
# on dark and on light grounds; the underline shows the difference without colours.
COLOURS = {TokenOrigin.TARGET: "", TokenOrigin.EXACT: "\x1b[38;5;33m", TokenOrigin.GATE: "\x1b[1;4;38;5;208m"}
MARKS = {TokenOrigin.TARGET: ("", ""), TokenOrigin.EXACT: ("[", "]"), TokenOrigin.GATE: ("{", "}")}
MEANINGS = {
    TokenOrigin.TARGET: "target",
    TokenOrigin.EXACT: "drafter, as exact accepts",
    TokenOrigin.GATE: "lossy rule only",
}
DIM, RESET = "\x1b[2m", "\x1b[0m"
BACK, CLEAR = "\x1b[{}D", "\x1b[K"  # the cursor left by so many columns; erase to the end of the line


def summary_lines(stats: GenerationStats) -> str:
    """Return two lines on an answer: how fast it came, and what it was made with."""
    reasons = ", ".join(sorted({row.finish_reason for row in stats.rows}))
    tau = f", {stats.acceptance_length:.2f} tokens per forward of the target" if stats.target_forwards else ""
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
    tau = f"{stats.acceptance_length:.2f}" if stats.target_forwards else "-"
    return (
        f"{stats.new_tokens} tokens in {stats.seconds:.2f} s (prefill {stats.prefill_seconds:.2f} s), "
        f"{stats.tokens_per_second:.1f} tok/s; tau {tau} over {stats.target_forwards} target forwards; "
        f"lossy at {100 * stats.gate_open_fraction:.1f} % of tokens, {stats.divergence_spent:.3f} nats spent; "
        f"{drafts_text(stats.drafts.summary())}; "
        f"4-grams copied from the prompt {percent(stats.copied_4grams, 0)} %, repeated "
        f"{percent(stats.repeated_4grams, 0)} %; "
        f"ended by {reasons}; rule {rule}, drafter {stats.drafter['name']}"
    )


def use_colour(choice: str, stream: TextIO) -> bool:
    """Return whether to write colours: "always", "never", or "auto" for terminals, unless dumb or NO_COLOR."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return choice == "always" or (choice == "auto" and stream.isatty() and not plain)


def show_accepted(pieces: Sequence[str], sources: Sequence[int], colour: bool) -> str:
    """Return the text with each token coloured, or set in marks, by its :class:`TokenOrigin`."""
    shown = []
    for piece, source in zip(pieces, sources, strict=True):
        code, (opening, closing) = COLOURS[TokenOrigin(source)], MARKS[TokenOrigin(source)]
        if colour:
            shown.append(f"{code}{piece}{RESET}" if code and piece else piece)
        else:
            shown.append(f"{opening}{piece}{closing}")
    return "".join(shown)


class LiveTokens(Callback):
    """Writes one answer's tokens by source as they come, with tokens per second and τ after the last one.

    Args:
        tokenizer: tokenizer of the target.
        stream: a terminal.
        colour: whether it shows colours.
        width: its columns. Figures that do not fit on the text's line are left out.
        clock: returns seconds.
    """

    def __init__(
        self, tokenizer: Any, stream: TextIO, colour: bool, width: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.pieces, self.stream, self.colour, self.width, self.clock = Pieces(tokenizer), stream, colour, width, clock
        self.begun, self.tokens, self.forwards, self.column = clock(), 0, 0, 0

    def on_round(self, report: RoundReport) -> None:
        emissions = report.emissions[0]
        pieces = [self.pieces.add(emission.token) for emission in emissions]
        sources = [emission.source for emission in emissions]
        self.tokens += len(emissions)
        self.forwards += report.phase == "round"
        marks = 0 if self.colour else 2 * sum(source != TokenOrigin.TARGET for source in sources)
        *lines, last = "".join(pieces).split("\n")
        self.column = (marks + columns(last) + (0 if lines else self.column)) % self.width
        self.stream.write(CLEAR + show_accepted(pieces, sources, self.colour) + self._figures())
        self.stream.flush()

    def _figures(self) -> str:
        seconds = max(self.clock() - self.begun, 1e-9)
        tau = f", tau {(self.tokens - 1) / self.forwards:.2f}" if self.forwards else ""
        text = f"  {self.tokens / seconds:.1f} tok/s{tau}"
        return f"{DIM}{text}{RESET}{BACK.format(len(text))}" if self.column + len(text) < self.width else ""

    def end(self) -> None:
        """Erase the figures, and end the line."""
        self.stream.write(f"{CLEAR}{self.pieces.rest()}\n")


def columns(text: str) -> int:
    """Return how many columns a terminal needs for a text."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def legend(colour: bool) -> str:
    """Return the meaning of the colours or marks of :func:`show_accepted`."""
    return "tokens by source: " + ", ".join(
        show_accepted([MEANINGS[source]], [source], colour)
        for source in (TokenOrigin.TARGET, TokenOrigin.EXACT, TokenOrigin.GATE)
    )
