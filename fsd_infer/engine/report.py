"""What the host reads of a round: one transfer, after everything of the round is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsd_core.former import Renamed
from fsd_core.functional import is_host
from fsd_core.tensors import Transfer, packed
from fsd_infer.engine.round import RoundTensors
from fsd_infer.rules.verification import Emission, Verdict

_FEEDBACK = "feedback "  # begins the names of columns for drafters


@dataclass
class RoundReport(Renamed):
    """A round on the host. B rows, in the order of the batch.

    Attributes:
        phase: "prefill" for the round that reads the prompts, else "round".
        prompt_indices: [B] index of each row among the request's prompts.
        emissions: [B] the emitted tokens, each with its source, proposer, nats, and the gap of log-likelihood between
            the target's choice and the drafter's. The first callback cuts them where an answer ends.
        ended: why rows end with this round, "stop" or "length", by index.
        verdict: on the CPU, with paths and counts as the device has them.
        seconds: time of the round by phase, if a callback reads it.
        tensors: tensors of the round. On a device the next round may write over them.
    """

    former_members = {"numbers": "prompt_indices"}

    phase: str
    prompt_indices: Sequence[int]
    emissions: list[list[Emission]]
    verdict: Verdict
    tensors: RoundTensors
    ended: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """The rows that emitted tokens; the others finished in earlier rounds."""
        return [row for row, emissions in enumerate(self.emissions) if emissions]

    @property
    def tokens(self) -> list[list[int]]:
        """The emitted tokens of each row."""
        return [[emission.token for emission in row] for row in self.emissions]

    @property
    def emitted(self) -> list[list[int]]:
        """The tokens by which the device extended each text, also those after the end of an answer."""
        rows = zip(self.verdict.tokens.tolist(), self.verdict.accepted.tolist())
        return [row[: count + 1] for row, count in rows]


def columns_of(tensors: RoundTensors) -> dict[str, Tensor]:
    """Return what the host reads of a round, [B, ·] each."""
    log_p = {} if tensors.log_p is None else {"log_p": tensors.log_p}
    feedback = {f"{_FEEDBACK}{number}": values for number, values in enumerate(tensors.feedback)}
    return {**tensors.verdict.columns(), **log_p, **feedback}


class PendingReport:
    """A round on its way to the host, in one transfer that begins after the launches of the round.

    Args:
        phase: see :class:`RoundReport`.
        prompt_indices: [B] index of each row among the request's prompts, as the round had them.
        tensors: tensors of the round.
    """

    def __init__(self, phase: str, prompt_indices: Sequence[int], tensors: RoundTensors) -> None:
        self.phase, self.prompt_indices, self.tensors = phase, list(prompt_indices), tensors
        self._columns, self._transfer = columns_of(tensors), None
        if not is_host(tensors.tree.tokens.device):
            self._transfer = Transfer(packed(*self._columns.values()) if tensors.packed is None else tensors.packed)

    def report(self, finished: Sequence[int] = ()) -> tuple[RoundReport, list[Tensor]]:
        """Return the report, and the feedback for drafters on the CPU. Syncs with the device.

        Args:
            finished: rows that had finished when the round began, and which it is to leave out.

        Raises:
            NonFiniteLogitsError, FsdError: as :meth:`.Verdict.check`.
        """
        columns, tensors = self._columns, self.tensors
        if self._transfer is not None:
            received = self._transfer.wait().split([column.shape[1] for column in columns.values()], 1)
            columns = dict(zip(columns, received, strict=True))
        verdict = Verdict.of_columns(columns, tensors.verdict.allowed)
        if finished:
            verdict.accepted[torch.tensor(finished)] = -1
        log_p = columns["log_p"].tolist() if "log_p" in columns else None
        report = RoundReport(self.phase, self.prompt_indices, verdict.emissions(log_p), verdict, tensors)
        return report, [column for name, column in columns.items() if name.startswith(_FEEDBACK)]
