"""What watches decoding: the loop hands the report of every round to each callback, its own and a caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsd_infer.engine.report import RoundReport
from fsd_infer.engine.stats import Outcome, RowRecord

if TYPE_CHECKING:
    from fsd_infer.engine.state import DecodeState


class Callback:
    """Watches a request. Methods are called in the decoding thread, and their exceptions end the request.

    Attributes:
        reads_tensors: whether it looks at the tensors of a round or of the state, or at its seconds. If no callback
            does, a GPU runs the next round meanwhile, which writes over the tensors, and nobody times the rounds.
    """

    reads_tensors = True

    def on_start(self, state: DecodeState) -> None:
        """Take the state of the batch, before the prompts are read."""

    def on_token(self, prompt_index: int, token: int) -> str | None:
        """Take a token of the answer to a prompt of the request, before :meth:`on_round`.

        Returns:
            why the answer ends with this token, "stop" or "length"; None: it goes on.
        """
        return None

    def on_phase(self, phase: str) -> None:
        """Take the end of a phase: "prefill", also after every chunk of a prompt, "start" of a round, and those that
        :func:`.decode_round` names."""

    def on_round(self, report: RoundReport) -> None:
        """Take a round, at first the one that reads the prompts. Adding to ``report.ended`` ends an answer."""

    def on_row_end(self, row: int, record: RowRecord) -> None:
        """Take a finished answer. ``row`` is its index in the batch, which drops it next."""

    def on_end(self, outcome: Outcome) -> None:
        """Take the outcome of the request."""
