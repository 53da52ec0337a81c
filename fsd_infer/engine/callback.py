"""What watches decoding: the loop hands the report of every round to each callback, its own and a caller's."""

from __future__ import annotations

from fsd_infer.engine.report import RoundReport
from fsd_infer.engine.state import DecodeState
from fsd_infer.engine.stats import Outcome, RowRecord


class Callback:
    """Watches a request. Methods are called in the decoding thread, and their exceptions end the request.

    Attributes:
        reads_tensors: whether it reads the tensors of a round or of the state, or a report's seconds. If no callback
            does, a GPU runs the next round meanwhile, which overwrites the tensors, and rounds are not timed.
    """

    reads_tensors = True

    def on_start(self, state: DecodeState) -> None:
        """Called before the prompts are read, with the state of the batch."""

    def on_token(self, prompt_index: int, token: int) -> str | None:
        """Called for each token of an answer, before :meth:`on_round`.

        Args:
            prompt_index: index of the answer's prompt in the request.
            token: its id.

        Returns:
            why the answer ends with this token, "stop" or "length"; None: it goes on.
        """
        return None

    def on_phase(self, phase: str) -> None:
        """Called when a phase ends: "prefill", also after every chunk of a prompt, those that :func:`.decode_round`
        names, and "report"; and with "start" when a round begins.
        """

    def on_round(self, report: RoundReport) -> None:
        """Called after each round, the first of which reads the prompts. Adding to ``report.ended`` ends an answer."""

    def on_row_end(self, row: int, record: RowRecord) -> None:
        """Called when an answer is finished; ``row`` is its index in the batch, which it then leaves."""

    def on_end(self, outcome: Outcome) -> None:
        """Called at the end, with the outcome of the request."""
