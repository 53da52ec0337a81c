"""Record rounds when a decoder is loaded, before the first request waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fsd_core.errors import FsdError
from fsd_infer.drafters.base import Drafter
from fsd_infer.engine.callback import Callback
from fsd_infer.engine.report import RoundReport
from fsd_infer.targets.target import Target

ROUNDS = 3  # of a request, after which its rounds are recorded: those that ask the host at the second one
_OPTIONS: dict[str, Any] = {"rule": "exact", "do_sample": False, "seed": 0, "eos_token_id": None}  # none ends early
ANGLES = "the host chooses the target's rotary angles, token by token"
Size = tuple[int, int]  # rows, and tokens of the longest text with its answer


class CanGenerate(Protocol):
    """What recording needs of :class:`.FuzzyDecoder`."""

    target: Target
    drafter: Drafter

    @property
    def generate(self) -> Callable[..., Any]: ...


class _StopAfterRounds(Callback):
    """Ends all answers after a few rounds."""

    reads_tensors = False
    _rounds = 0

    def on_round(self, report: RoundReport) -> None:
        self._rounds += 1
        if self._rounds > ROUNDS:
            report.ended |= {row: "stop" for row in report.rows if row not in report.ended}


def record_rounds(decoder: CanGenerate, sizes: Sequence[Size], **options: Any) -> str:
    """Record the rounds of requests of these sizes, and of all that share their recordings.

    Args:
        decoder: a decoder that records rounds.
        sizes: sizes of the requests.
        options: their options, as :meth:`.FuzzyDecoder.generate` takes them (default: `exact` at temperature 0).

    Returns:
        one line that says what was recorded and how long it took.

    Raises:
        FsdError: the decoder does not record rounds, or a size is too long for the target.
    """
    target, start, options = decoder.target, time.perf_counter(), {**_OPTIONS, **options}
    if target.recorder is None:
        raise FsdError(f"record needs CUDA graphs, which the target on {target.device} does not use: leave it out.")
    context = target.max_positions
    for rows, tokens in sizes:
        if context is not None and tokens > context:
            raise FsdError(f"record={rows}x{tokens}: {target.name} has a context of {context} tokens: give fewer.")
        prompts = [[0]] * rows
        decoder.generate(prompts, max_new_tokens=tokens - 1, callbacks=[_StopAfterRounds()], **options)
    named = ", ".join(f"{rows}x{tokens}" for rows, tokens in sizes)
    seconds, recorded = time.perf_counter() - start, target.recorded
    if recorded is None or recorded.refused is not None:
        return f"nothing was recorded: {ANGLES if recorded is None else recorded.refused}"
    shared = target.shared_cache_bytes + decoder.drafter.shared_cache_bytes
    memory = f"{shared / 2**20:.0f} MiB of keys and values"
    return f"recorded {recorded.graphs} graphs for {named} tokens in {seconds:.1f} s, with {memory}"
