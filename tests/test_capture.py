"""Whole rounds recorded on the simulated device: they read nothing on the host and answer as a CPU does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer import parse_rule
from fsd_infer.drafters import Drafter
from fsd_infer.drafters.growth import TreeDrafter
from fsd_infer.engine import Outcome, Request, decode, loop
from fsd_infer.engine.callbacks import Streaming
from fsd_infer.engine.capture import Recorded
from fsd_infer.targets.target import Target
from tests.families import tiny_model
from tests.sim_graphs import SimRecorder, address
from tests.simulated_device import SIM, SimulatedDevice
from tests.test_device_waits import CPU, NEW, PROMPTS, RULES, drafter, target

ROUND = ["draft", "target", "rule", "cache", "advance"]
SETTLING = ["target", "rule", "cache"]  # a drafter on the host, or one that grows its vocabulary, cuts the round
KINDS = {
    "none": ROUND, "eagle": ROUND, "eagle3-own": ROUND, "fsd": ROUND, "stop": ROUND, "lm": ROUND, "lm-stop": ROUND,
    "eagle3": ROUND, "lookup": SETTLING, "recycle": SETTLING, "eagle+lookup": SETTLING, "lm+recycle": SETTLING,
}  # fmt: skip
# greedily or not; the trees of a drafter on the host are padded, so other numbers are drawn
CASES = [("eagle", rule, greedy) for rule in RULES for greedy in (True, False)]
CASES += [(kind, *case) for kind in KINDS for case in (("exact", True), ("tilted", KINDS[kind] == SETTLING))]
CASES += [("lm", rule, False) for rule in list(RULES)[::4]]
CASES = [case for case in dict.fromkeys(CASES) if case[2] or not parse_rule(case[1]).greedy_only]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    with SimulatedDevice() as opened:
        yield opened


def run(kind: str, rule: str, greedy: bool, where: torch.device = SIM, limit: int = 2 * NEW) -> Outcome:
    generator = torch.Generator(device=where).manual_seed(0)
    draws = not greedy or rule.startswith("random")  # an eager batch draws fewer numbers once a row has left it
    request = Request(PROMPTS[:1] if draws else PROMPTS, limit, greedy, generator=generator)
    return decode(target(where), drafter(kind, where), parse_rule(rule), request)


@pytest.mark.filterwarnings("ignore:lm samples its drafts")
@pytest.mark.parametrize(("kind", "rule", "greedy"), CASES)
def test_recorded_rounds_answer_as_eager_ones(
    kind: str, rule: str, greedy: bool, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the same plan records nothing more. A round launches at most six operations besides its graph, and
    the host reads once, after it, and after the next one is launched.
    """
    whole, small = target(SIM), drafter(kind, SIM)
    spent: list[tuple[int, int]] = []
    launched: list[int] = []
    report = loop.report

    def noted(*given: Any) -> Any:
        spent.append((device.launches, len(device.waits)))
        launched.append(recorder.replayed - replayed)
        return report(*given)

    wanted = run(kind, rule, greedy).sequences
    if greedy and rule == "exact":
        assert wanted == run(kind, rule, greedy, CPU).sequences
    recorder = SimRecorder(device)
    for model in models_of(whole, small):
        model.use_graphs(recorder)
    try:
        first = run(kind, rule, greedy)
        made = len(recorder.graphs)
        assert first.sequences == wanted and made > 0 and recorder.replayed > 0
        monkeypatch.setattr(loop, "report", noted)
        replayed = recorder.replayed
        assert run(kind, rule, greedy).sequences == wanted
    finally:
        for model in models_of(whole, small):
            model.use_graphs(None)
    rounds = len(spent) - 1
    assert [waits - spent[0][1] for _, waits in spent] == list(range(len(spent)))
    if KINDS.get(kind, ROUND) != SETTLING:
        assert len(recorder.graphs) == made == 1 and recorder.replayed - replayed == rounds + 1  # the last one lags
        assert launched == [0, *range(2, rounds + 2)]  # rounds that were launched when each report was read
        assert all(after[0] - before[0] <= 6 for before, after in zip(spent[1:], spent[2:]))


@pytest.mark.parametrize("kind", ["none", "eagle3-own", "lm"])
def test_what_a_stopped_answer_emits_in_its_extra_round_is_left_out(kind: str, device: SimulatedDevice) -> None:
    """The rows stop in different rounds, by a token, a streamer, or their limit, and others go on beside them."""
    whole, small = target(SIM), drafter(kind, SIM)
    full = run(kind, "exact", True, CPU).sequences
    heard: list[list[int]] = []

    def answers(where: torch.device) -> Outcome:
        heard[:] = [[] for _ in PROMPTS]

        def on_tokens(row: int, tokens: list[int]) -> bool:
            heard[row] += tokens
            return row == 1 and len(heard[1]) >= 5

        ends = frozenset(full[0][4:5])
        request = Request(PROMPTS, 3 * NEW, True, eos_token_ids=ends, callbacks=[Streaming(on_tokens)])
        return decode(target(where), drafter(kind, where), parse_rule("exact"), request)

    wanted = answers(CPU)
    for model in models_of(whole, small):
        model.use_graphs(SimRecorder(device))
    try:
        made = answers(SIM)
    finally:
        for model in models_of(whole, small):
            model.use_graphs(None)
    assert made.sequences == wanted.sequences == heard and len(made.sequences[0]) < 3 * NEW
    assert [row.finish_reason for row in made.stats.rows] == [row.finish_reason for row in wanted.stats.rows]
    assert [row.target_forwards for row in made.stats.rows] == [row.target_forwards for row in wanted.stats.rows]


@pytest.mark.parametrize("kind", ["eagle3-own", "lookup"])
def test_batches_of_one_bucket_share_a_recording(kind: str, device: SimulatedDevice) -> None:
    """And so does a reshaped drafter of the same tree, as `rule="calibrated"` makes one for every request."""
    texts = [[7, 8], [1, 2, 3, 1, 2, 3, 4], [9, 9, 2], [4, 5, 6], [5]]
    whole, small = target(SIM), drafter(kind, SIM)
    wanted = decode(target(CPU), drafter(kind, CPU), parse_rule("tilted"), Request(texts, 3 * NEW)).sequences
    recorder = SimRecorder(device)
    for model in models_of(whole, small):
        model.use_graphs(recorder)
    try:
        for count in (5, 6, 5, 8, 7):
            used = small.reshaped(small.shape) if isinstance(small, TreeDrafter) else small
            made = decode(whole, used, parse_rule("tilted"), Request((texts * 2)[:count], 3 * NEW))
            assert made.sequences == (wanted * 2)[:count] and len(made.records) == len(made.stats.rows) == count
        assert len(recorder.graphs) == 1 and whole.recorded is not None and len(whole.recorded.slots) == 1
    finally:
        for model in models_of(whole, small):
            model.use_graphs(None)


def models_of(whole: Target, small: Drafter) -> list[Any]:
    return [whole, small]


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_holds_these_parts_and_stands_on_memory_that_stays(kind: str, device: SimulatedDevice) -> None:
    whole, small = target(SIM), drafter(kind, SIM)
    for model in models_of(whole, small):
        model.use_graphs(recorder := SimRecorder(device))
    try:
        run(kind, "exact", True, limit=6 * NEW)
        recorded = whole.recorded
        assert isinstance(recorded, Recorded) and recorded.refused is None and recorded.current is not None
        state, recordings = recorded.current.state, [x for x in recorded.current.recordings.values() if x]
        assert recordings and all(recording.phases == KINDS[kind] for recording in recordings)
        stays: list[Tensor] = [*state.tensors(), *state.session.tensors(), state.live]  # type: ignore[list-item]
        for module in (whole.model, *small.modules()):
            stays += [*module.parameters(), *module.buffers()]
        session: Any = state.session
        for cache in (state.cache, getattr(session, "cache", None)):
            stays += [] if cache is None else cache._pools.values()
        for recording in recordings:
            stays += (
                [] if recording.tree is None else [x for x in vars(recording.tree).values() if isinstance(x, Tensor)]
            )
        known = {address(x.value) for x in stays}  # type: ignore[attr-defined]
        for graph in recorder.graphs:
            assert not {place: what for place, what in graph.reads.items() if place not in known}
    finally:
        for model in models_of(whole, small):
            model.use_graphs(None)


def test_what_cannot_be_recorded_runs_eagerly_and_says_so(
    device: SimulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = 0

    def refuses(run: Any, generator: Any) -> Any:
        nonlocal attempts
        attempts += 1
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    made = Target(tiny_model("llama", num_hidden_layers=1).to(SIM))
    made.use_graphs(refuses)
    for _ in range(2):
        outcome = decode(made, drafter("none", SIM), parse_rule("exact"), Request(PROMPTS, NEW, True))
        assert outcome.sequences == run("none", "exact", True, CPU, NEW).sequences
    assert attempts == len(caplog.records) == 1
    assert "operation not permitted when stream is capturing" in caplog.text and "more" not in caplog.text
