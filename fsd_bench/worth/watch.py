"""Watch exact decoding: hand every round to a replay, and time drafting and forwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fsd_bench.probe import Probe
from fsd_bench.worth.replay import ExactRound
from fsd_core.tensors import to_device
from fsd_infer.engine import Callback, RoundReport
from fsd_infer.engine.state import DecodeState
from fsd_infer.rules.texts import sentence_ends
from fsd_infer.targets.target import Target

YARDSTICKS = (0.2, 0.3, 0.5, 0.8)  # temperatures
REPEATS = 5  # of each forward
PROBED = (1, 2, 4, 8, 12, 16, 24, 32, 48)  # nodes


@dataclass
class Watch(Callback):
    """A callback of requests with one prompt each, and what it gathers over all answers.

    Attributes:
        replay: called with each round.
        temperature, limit: temperature and new tokens of the request.
        generator: random generator of the replay's draws.
        spent: by temperature, Σ E[ln p(y*) - ln p(y)] in nats over the contexts of emitted tokens, with y drawn at
            that temperature.
        steps, draft_seconds: drafted depths, and the seconds they took.
        contexts: number of contexts of emitted tokens.
    """

    replay: Callable[[ExactRound], None]
    temperature: float
    limit: int
    generator: torch.Generator
    spent: dict[float, float]
    steps: int = 0
    draft_seconds: float = 0.0
    contexts: int = 0
    started: float = 0.0

    def on_start(self, state: DecodeState) -> None:
        self.device, self.emitted = state.device, 0
        self.text = state.texts.tokens[0].tolist()[: int(state.texts.lengths[0])]
        tokenizer = state.target.tokenizer
        ends = None if tokenizer is None else sentence_ends(tokenizer.get_vocab())
        self.sentence_ends = None if ends is None else to_device(ends, state.device)

    def on_phase(self, phase: str) -> None:
        if phase in ("start", "draft"):
            _wait(self.device)
            now = time.perf_counter()
            self.draft_seconds += now - self.started if phase == "draft" else 0.0
            self.started = now

    def on_round(self, report: RoundReport) -> None:
        tree, logits, verdict = report.tensors.tree, report.tensors.logits, report.verdict
        new = report.emitted[0]
        log_p = logits[0, verdict.path[0, : len(new)].to(logits.device)].float().log_softmax(-1)
        self.contexts += len(new)
        for temperature in self.spent:
            sampled = (log_p / temperature).softmax(-1)
            mean = (sampled * log_p.nan_to_num(neginf=0.0)).sum(-1)
            self.spent[temperature] += float((log_p.amax(-1) - mean).sum())
        if report.phase == "round":
            greedy, room = self.temperature == 0, self.limit - self.emitted
            scores = logits if greedy else logits.float() / self.temperature
            self.replay(ExactRound(
                tree, logits, scores, greedy, self.temperature, [*self.text], self.emitted, room, self.generator,
                self.sentence_ends,
            ))  # fmt: skip
            self.steps += tree.max_depth
        self.text += new
        self.emitted += len(new)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Forwards:
    """Seconds of a target's forward by number of nodes, the least of a few runs each.

    Args:
        target: as it decodes.
        context: tokens before the nodes.
        max_nodes: largest number of nodes.

    Attributes:
        counts, seconds: the numbers of nodes that were timed, and their seconds.
    """

    def __init__(self, target: Target, context: int, max_nodes: int) -> None:
        self.counts = [count for count in PROBED if count < max_nodes] + [max_nodes]
        room = target.max_positions
        context = context if room is None else max(1, min(context, room - max_nodes))
        with target.lock, torch.inference_mode():
            probe = Probe(target, context, max_nodes)
            self.seconds = [min(self._timed(probe, count) for _ in range(REPEATS)) for count in self.counts]

    @staticmethod
    def _timed(probe: Probe, count: int) -> float:
        device = probe.target.device
        _wait(device)
        start = time.perf_counter()
        probe(count)
        _wait(device)
        return time.perf_counter() - start

    def at(self, nodes: float) -> float:
        """Return the seconds for a mean number of nodes, interpolated."""
        return float(np.interp(nodes, self.counts, self.seconds))
