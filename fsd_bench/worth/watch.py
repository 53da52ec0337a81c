"""Watch exact decoding: hand every round to a replay, and time drafting and forwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fsd_bench.probe import Probe
from fsd_bench.worth.replay import Evidence
from fsd_infer.drafters.base import Drafter, DraftRequest, DraftSession
from fsd_infer.targets.target import Target
from fsd_infer.tree import DraftTree

YARDSTICKS = (0.2, 0.3, 0.5, 0.8)  # temperatures
PROBED = (1, 2, 4, 8, 12, 16, 24, 32, 48)  # nodes


@dataclass
class Watch:
    """What is gathered over all answers.

    Attributes:
        on_round: called with each round's evidence.
        temperature, limit: temperature and new tokens of the request.
        generator: of the replay's draws.
        spent: by temperature, Σ E[ln p(y*) - ln p(y)] in nats over the contexts of emitted tokens, with y drawn at
            that temperature.
        steps, draft_seconds: drafted depths, and the seconds they took.
        contexts: number of contexts of emitted tokens.
    """

    on_round: Callable[[Evidence], None]
    temperature: float
    limit: int
    generator: torch.Generator
    spent: dict[float, float]
    steps: int = 0
    draft_seconds: float = 0.0
    contexts: int = 0


class Watching(Drafter):
    """A drafter of a fixed shape that is watched, for one prompt at a time. It drafts as ``drafter`` does."""

    parts: tuple[Drafter, ...] = ()
    proposers: tuple[str, ...] = ()
    max_nodes = max_depth = 0

    def __init__(self, drafter: Drafter, watch: Watch) -> None:
        self.drafter, self.watch, self.parts = drafter, watch, (drafter,)
        for name in ("name", "auto", "proposers", "max_nodes", "max_depth"):
            setattr(self, name, getattr(drafter, name))

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        request = replace(request, draws=False)  # rules are replayed on trees that are functions of the text
        return _Session(self.drafter.start(first_tokens, request), self.watch, first_tokens)


class _Session(DraftSession):
    def __init__(self, session: DraftSession, watch: Watch, first_tokens: Tensor) -> None:
        self.session, self.watch, self.text, self.emitted = session, watch, first_tokens.tolist(), 0
        self.parts = [session]

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        self.text += tokens[0, : int(counts[0])].tolist()
        super().extend(tokens, features, counts)

    def draft(self, roots: Tensor) -> DraftTree:
        _wait(roots.device)
        start = time.perf_counter()
        tree = self.session.draft(roots)
        depth = tree.max_depth  # waits for the device
        self.watch.draft_seconds += time.perf_counter() - start
        self.watch.steps += depth
        return tree

    def observe(self, tree: DraftTree, logits: Tensor, path: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        watch, count = self.watch, int(accepted[0]) + 1
        log_p = logits[0, path[0, :count]].float().log_softmax(-1)
        watch.contexts += count
        for temperature in watch.spent:
            sampled = (log_p / temperature).softmax(-1)
            mean = (sampled * log_p.nan_to_num(neginf=0.0)).sum(-1)
            watch.spent[temperature] += float((log_p.amax(-1) - mean).sum())
        if self.emitted:  # the first call is about the prompt's end
            greedy = watch.temperature == 0
            scores = logits if greedy else logits.float() / watch.temperature
            room = watch.limit - self.emitted
            watch.on_round(
                Evidence(
                    tree, logits, scores, greedy, watch.temperature, [*self.text], self.emitted, room, watch.generator
                )
            )
        self.emitted += count
        super().observe(tree, logits, path, tokens, accepted)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Forwards:
    """Seconds of a target's forward by number of nodes, the least of a few runs each.

    Args:
        target: as it decodes.
        context: tokens before the nodes.
        most: largest number of nodes.
        repeats: runs of each.

    Attributes:
        counts, seconds: the numbers of nodes that were timed, and their seconds.
    """

    def __init__(self, target: Target, context: int, most: int, repeats: int = 5) -> None:
        self.counts = [count for count in PROBED if count < most] + [most]
        room = target.max_positions
        context = context if room is None else max(1, min(context, room - most))
        with target.lock, torch.inference_mode():
            probe = Probe(target, context, most)
            self.seconds = [min(self._timed(probe, count) for _ in range(repeats)) for count in self.counts]

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
