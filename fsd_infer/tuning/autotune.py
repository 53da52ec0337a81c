"""``--tree auto``: the draft tree with the most expected tokens per second on this device, from short measurements.

The cost of forwards and of drafting is measured, and a few texts are decoded with a large tree. From these
:mod:`fsd_infer.tuning.shapes` chooses. The choice is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsd_infer.cpu import ops
from fsd_infer.device.cpuinfo import processor
from fsd_infer.drafters.base import Drafter, DraftRequest, DraftSession, of_device
from fsd_infer.drafters.eagle import EagleDrafter, EagleSession, TreeShape
from fsd_infer.drafters.graft import GraftedDrafter
from fsd_infer.drafters.wrapped import WrappedDrafter, WrappedSession
from fsd_infer.engine import Request, decode
from fsd_infer.errors import FsdError
from fsd_infer.files import cache_dir, read_json, write_json
from fsd_infer.rules import Exact, Verification
from fsd_infer.rules.tilted import GREEDY_SHARPNESS, Tilted
from fsd_infer.target import Target
from fsd_infer.tree import DraftTree
from fsd_infer.tuning.probe import Probe
from fsd_infer.tuning.shapes import DEPTHS, STOPS, WIDE, Candidates, Costs, best_by_batch, between

log = logging.getLogger(__name__)

AUTO = "auto"
VERSION = 9  # raised whenever measurements or formulas change, so that older files are not read


def parse_tree(text: str | None) -> TreeShape | str | None:
    """A shape as :meth:`TreeShape.parse` reads it; "auto" and None stay."""
    return text if text in (None, AUTO) else TreeShape.parse(text)


@dataclass(frozen=True)
class Sizes:
    """The numbers of nodes and the widths that are measured; the texts are decoded with the largest of each."""

    nodes: tuple[int, ...]
    widths: tuple[int, ...]
    more: tuple[int, ...]  # forwards of so many nodes are measured too, for batches


SIZES = {
    "cpu": Sizes((1, 4, 8, 12, 16, 24, 32), (1, 2, 4, 6, 8), (48, 64, 96, 128)),
    "cuda": Sizes((1, 8, 16, 32, 48, 64, 96), (1, 4, 6, 8, 10), (128, 192, 256, 512)),
}
BATCH_NODES = (1, 2, 3)  # of each of these rows
TILTS = (0.5, 1.0, 2.0)  # besides 0
MOST_CONTEXTS = 24  # of a tilt's, by which shapes are compared
CONTEXT = 128  # tokens that measured forwards attend to
SECONDS = 1.5  # of repeated measurements, after one pass over all of them
PASSES = 3  # at least

TEXTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the sum of the squares of a list of numbers.",
    "Translate to French: The meeting has been moved to Thursday afternoon.",
)


def head_of(drafter: Drafter) -> EagleDrafter | None:
    """The drafter whose tree can be chosen: itself, or what all is grafted onto; None if that is no head."""
    while isinstance(drafter, GraftedDrafter):
        drafter = drafter.main
    return drafter if isinstance(drafter, EagleDrafter) else None


def tune(drafter: Drafter, target: Target, prompts: Sequence[Sequence[int]], *, refresh: bool = False) -> TreeShape:
    """Give a head, also one in a graft, the best tree for this device; from the cache where it was measured before.

    Load and pack target and drafter first: what is measured is what will run.

    Args:
        prompts: token ids of a few typical prompts.
        refresh: measure again.

    Raises:
        FsdError: the drafter has no tree of a head to choose.
    """
    head = head_of(drafter)
    if head is None:
        raise FsdError(
            f"drafter {drafter.name!r} has no tree to choose: leave --tree {AUTO} out, or draft with a head."
        )
    file = _file(head, target)
    known = None if refresh else _read(file)
    if known is None:
        log.warning("measuring which draft trees are the fastest here: some seconds, once (kept in %s)", file.parent)
        known = measure(head, target, prompts)
        made = [
            [tilt, {batch: shape and asdict(shape) for batch, shape in shapes.items()}]
            for tilt, shapes in known.items()
        ]
        _write(file, {"shapes": made})
    shapes = known[0.0]
    shape = shapes[1]
    assert shape is not None, "a single row always drafts"
    head.shape = head.reshaped(shape).shape
    head.by_default = False
    head.by_batch = {batch: shape for batch, shape in shapes.items() if batch > 1}
    head.by_tilt = {tilt: shapes for tilt, shapes in known.items() if tilt}
    while isinstance(drafter, GraftedDrafter):
        drafter.nodes, drafter = shape.nodes, drafter.main
    return head.shape


def calibration_prompts(encode: Callable[[str], list[int]] | None, vocab_size: int) -> list[list[int]]:
    """Token ids of :data:`TEXTS`; without a tokenizer, of arbitrary tokens."""
    if encode is None:
        return [[(17 * i + 31 * j) % vocab_size for i in range(12)] for j in range(len(TEXTS))]
    return [encode(text) for text in TEXTS]


@torch.inference_mode()
def measure(
    drafter: EagleDrafter, target: Target, prompts: Sequence[Sequence[int]], tilts: Sequence[float] = (0.0, *TILTS)
) -> dict[float, dict[int, TreeShape | None]]:
    """The best shapes by tilt and batch."""
    costs = _costs(drafter, target, of_device(SIZES, target.device))
    # elsewhere the check would cost more than it saves: the device would be waited for
    stops = STOPS if target.device.type == "cpu" else (0.0,)
    return {tilt: best_by_batch(costs, *met(drafter, target, prompts, tilt), stops) for tilt in tilts}


@torch.inference_mode()
def met(
    drafter: EagleDrafter, target: Target, prompts: Sequence[Sequence[int]], tilt: float = 0.0, new_tokens: int = 16
) -> tuple[list[Candidates], float]:
    """(large trees met while decoding the prompts, drafts accepted / drafts expected)."""
    sizes = of_device(SIZES, target.device)
    recorder = _Recorder(drafter.reshaped(TreeShape(max(DEPTHS), max(sizes.widths), max(sizes.nodes))), tilt)
    rule = Tilted(price=GREEDY_SHARPNESS / tilt) if tilt else Exact()
    accepted = 0
    for prompt in prompts:
        stats = decode(target, recorder, rule, Request([list(prompt)], new_tokens * (2 if tilt else 1))).stats
        accepted += sum(row.new_tokens - 1 - row.target_forwards for row in stats.rows)  # 1: the prefill's
    expected = sum(sum(context.visits().values()) - 1.0 for context in recorder.contexts)
    # no round at all, or none accepted: nothing speaks for any tree, but a division must stay possible
    correction = max(accepted / expected, 0.01) if expected else 1.0
    step = 1 + len(recorder.contexts) // MOST_CONTEXTS if tilt else 1
    return recorder.contexts[::step], correction


class _Recorder(WrappedDrafter):
    """Remembers a drafter's trees."""

    def __init__(self, drafter: Drafter, tilt: float = 0.0) -> None:
        super().__init__(drafter)
        self.tilt = tilt
        self.contexts: list[Candidates] = []

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        return _RecorderSession(self, self.drafter.start(first_tokens, request))


class _RecorderSession(WrappedSession):
    def __init__(self, recorder: _Recorder, session: DraftSession) -> None:
        super().__init__(session)
        self.recorder = recorder

    def draft(self, roots: Tensor) -> DraftTree:
        tree = super().draft(roots)
        assert tree.scores is not None
        for scores, parents in zip(tree.scores.tolist(), tree.parents.tolist()):
            self.recorder.contexts.append(Candidates(scores, parents, self.recorder.tilt))
        return tree


def _costs(drafter: EagleDrafter, target: Target, sizes: Sizes) -> Costs:
    """Minima of interleaved repetitions, so that what else the machine does counts little."""
    limit = (target.max_positions or 2 * CONTEXT) - 1
    counts = [n for n in (*sizes.nodes, *sizes.more) if 2 * n < limit]
    probe = Probe(target, min(CONTEXT, limit - max(counts)), max(counts))
    features = probe.features
    tasks: dict[tuple[str, int, int], Callable[[], Any]] = {
        ("verify", n, 0): partial(_verify, probe, n) for n in counts
    }
    wide = Probe(target, probe.context, max(BATCH_NODES), WIDE)
    chains = [n for n in BATCH_NODES if n * WIDE <= max(counts)]
    tasks |= {("verify wide", n, 0): partial(_verify, wide, n) for n in chains}
    widths = sorted({min(width, drafter.vocabulary) for width in sizes.widths})
    for batch in (1, WIDE):
        rows = features.expand(batch, -1, -1)
        for width in widths:
            for depth in (2, 5):
                shaped = drafter.reshaped(TreeShape(depth, width, 2))
                tasks[f"draft {batch}", width, depth] = _draft(shaped, rows)
        tasks[f"extend {batch}", 0, 0] = _extend(drafter, rows)
    for task in tasks.values():  # first calls allocate
        task()
    best = dict.fromkeys(tasks, math.inf)
    start, passes = time.perf_counter(), 0
    while passes < PASSES or time.perf_counter() - start < SECONDS:
        passes += 1
        for key, task in tasks.items():
            if not key[0].startswith("verify"):
                probe(1)  # as in a round: the target's weights have driven the drafter's out of the processor's caches
            best[key] = min(best[key], _seconds(task, target.device))

    def drafting(batch: int) -> tuple[dict[int, float], float]:
        draft = {(w, depth): best[f"draft {batch}", w, depth] for w in widths for depth in (2, 5)}
        level = {w: max(draft[w, 5] - draft[w, 2], 0.0) / 3 for w in widths}
        return level, best[f"extend {batch}", 0, 0] + max(min(draft[w, 2] - 2 * level[w] for w in widths), 0.0)

    # a larger forward is not really faster: noise must not make it look so
    forward: dict[int, float] = {}
    for n in counts:
        forward[n] = max(best["verify", n, 0], *forward.values(), 0.0)
    above = [best["verify wide", n, 0] - between(forward, n * WIDE) for n in chains]
    row = max(statistics.fmean(above or [0.0]), 0.0) / (WIDE - 1)
    return Costs(forward, *drafting(1), *drafting(WIDE), row)


def _verify(probe: Probe, nodes: int) -> None:
    """Target and exact rule over a chain."""
    tokens = probe.tokens(nodes)
    chain = DraftTree.chain(tokens, torch.zeros(len(tokens), nodes - 1, 1, device=probe.target.device))
    logits = probe(nodes)
    Exact()(Verification(chain, logits, logits, greedy=True))


def _session(drafter: EagleDrafter, features: Tensor) -> EagleSession:
    """A session that has read a context with these features [B, C, F]."""
    batch, count, _ = features.shape
    tokens = (torch.arange(count) % drafter.target.vocab_size).expand(batch, -1)
    session = EagleSession(drafter, DraftRequest(batch, count + 8))
    session.extend(tokens, features, torch.full((batch,), count))
    return session


def _draft(drafter: EagleDrafter, features: Tensor) -> Callable[[], Any]:
    session = _session(drafter, features)
    roots = torch.zeros(features.shape[0], dtype=torch.long)
    return lambda: session.draft(roots)


def _extend(drafter: EagleDrafter, features: Tensor, tokens: int = 3) -> Callable[[], Any]:
    session = _session(drafter, features)
    lengths, batch = session.lengths, features.shape[0]
    counts = torch.full((batch,), tokens)
    new = torch.zeros(batch, tokens, dtype=torch.long)

    def extend() -> None:
        session.extend(new, features[:, :tokens], counts)
        session.lengths = lengths

    return extend


def _seconds(task: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call; on a CPU those that this thread was running, whatever else the machine does meanwhile."""
    if device.type == "cpu" and os.name != "nt":  # where the clock ticks in 16 ms
        start = time.thread_time()
        task()
        return time.thread_time() - start
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    task()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


# what was measured before ---------------------------------------------------------------------------------------------


def _file(drafter: EagleDrafter, target: Target) -> Path:
    """One file per target, head, data type, device, processor, threads, version of torch and kind of kernels."""
    device = target.device
    name = f"{os.cpu_count()} {processor('model name')}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    weights = [weight.detach() for weight in drafter.head.parameters() if not weight.is_meta]
    what = {
        "version": VERSION,
        "target": [target.name, target.fingerprint(), str(target.dtype), target.config.num_hidden_layers],
        "head": [drafter.head.config.to_dict(), *(float(weight.sum(dtype=torch.float64)) for weight in weights)],
        "device": [device.type, name, torch.get_num_threads() if device.type == "cpu" else 0],
        "torch": torch.__version__,
        "packed": len(ops.packed_products(target.model)),
        "kernels": ops.kernel_kind() if device.type == "cpu" else None,
        "weights": drafter.describe().get("weights"),
        **({} if target.graphs is None else {"cuda_graphs": True}),
    }
    digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
    return cache_dir() / "trees" / f"{digest[:24]}.json"


def _read(file: Path) -> dict[float, dict[int, TreeShape | None]] | None:
    """The shapes in a file by tilt and batch, or None where there is none or the file is damaged."""
    try:
        known = {
            float(tilt): {int(batch): None if shape is None else TreeShape(**shape) for batch, shape in shapes.items()}
            for tilt, shapes in read_json(file, "")["shapes"]
        }
        return known if all(known[tilt][1] for tilt in (0.0, *TILTS)) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(file: Path, record: dict[str, Any]) -> None:
    """A cache that cannot be written costs time, nothing else."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, record, indent=1)
    except OSError:
        return
