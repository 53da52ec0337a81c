"""Whole rounds recorded on the simulated device: they read nothing on the host and answer as a CPU does."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation import SuppressTokensLogitsProcessor

from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.decoder.recording import _StopAfterRounds, record_rounds
from fsd_infer.device.cuda_graphs import CachedModel
from fsd_infer.drafters import Drafter, DraftSession
from fsd_infer.drafters.tree_drafter import TreeDrafter
from fsd_infer.engine import Outcome, Request, decode, loop
from fsd_infer.engine.callback import Callback
from fsd_infer.engine.callbacks import Streaming
from fsd_infer.engine.recordable import outputs_of
from fsd_infer.engine.recording import RoundRecorder
from fsd_infer.engine.round import VerifiedTree
from fsd_infer.rules import parse_rule
from fsd_infer.targets.target import Target
from tests.families import tiny_head, tiny_model
from tests.sim_graphs import SimRecorder, address
from tests.simulated_device import SIM, SimTensor, SimulatedDevice, on
from tests.test_device_waits import CPU, NEW, PROMPTS, RULES, drafter, target

WHOLE = [["draft", "target", "rule", "cache", "advance"]]  # the recordings of a round, and what each holds
CUT = [["draft", "target"], ["rule", "cache", "advance"]]  # between the two the host computes something of the tree
LAGGING = ["none", "eagle", "eagle3", "eagle3-own", "fsd", "stop", "lm", "lm-stop", "eagle, suppress"]
OWN = [["target", "rule", "cache"]]  # a drafter that knows nothing of recordings drafts and reads by itself
COPIES = "tilted:1:gate=0.3:exact_ngram_size=2"  # charges for copies of remembered texts
# drafters, some with logits processors that read texts or hold tensors
KINDS = {
    "none": WHOLE, "eagle": WHOLE, "eagle3-own": WHOLE, "fsd": WHOLE, "stop": WHOLE, "lm": WHOLE, "lm-stop": WHOLE,
    "eagle3": WHOLE, "reduced": WHOLE, "lookup": WHOLE, "recycle": WHOLE, "memory": WHOLE, "eagle+lookup": WHOLE,
    "lm+recycle": WHOLE, "reduced+memory": WHOLE, "guided eagle": WHOLE, "guided reduced+lookup": WHOLE,
    "eagle, suppress": WHOLE, "own": OWN, "own, penalty": [["target"], ["rule", "cache"]],
    "none, penalty": CUT, "eagle, penalty": CUT, "lm+recycle, penalty": CUT, "guided reduced, penalty": CUT,
}  # fmt: skip
CASES = [(kind, RULES[number % len(RULES)], True) for number, kind in enumerate(KINDS)]  # every drafter, every rule
SAMPLED = ["none", "eagle3", "memory", "lm+recycle", "guided eagle", "own", "none, penalty", "guided reduced, penalty"]
# a rule that draws meets drafters whose distributions it reads, and each drafter a rule that draws
DRAWING = [rule for rule in RULES if not parse_rule(rule).greedy_only]
CASES += [(("eagle", "lm")[number % 2], rule, False) for number, rule in enumerate(DRAWING)]
CASES += [(kind, "tilted", False) for kind in SAMPLED]
CASES += [("eagle", "exact", True), ("eagle", "ensemble:0.5", True), ("lm", "exact", False)]
CASES += [(kind, "cascade-token:0.5", False) for kind in ("eagle", "lm")]
CASES += [("memory", COPIES, True), ("eagle+memory", COPIES, False), ("eagle, penalty", "fuzzy:js:0.3", False)]
CASES = list(dict.fromkeys(CASES))
READS = {"penalty": [RepetitionPenaltyLogitsProcessor(1.3)], "suppress": [SuppressTokensLogitsProcessor([5, 9])]}


def parts_of(kind: str, rule: str) -> list[list[str]]:
    charged = getattr(parse_rule(rule), "exact_ngram_size", 0)
    return CUT if "memory" in kind and charged else KINDS.get(kind, WHOLE)


def run(kind: str, rule: str, greedy: bool, where: torch.device = SIM, limit: int = NEW + 2) -> Outcome:
    generator = torch.Generator(device=where).manual_seed(0)
    draws = not greedy or rule.startswith("random")  # an eager batch draws fewer numbers once a row has left it
    kind, _, option = kind.partition(", ")
    processors = LogitsProcessorList(READS[option]) if option else None
    for processor in processors or []:
        for name, value in vars(processor).items():
            setattr(processor, name, value.to(where) if isinstance(value, Tensor) else value)
    prompts = [*PROMPTS, [5]] if option == "penalty" else PROMPTS  # one has no text before its root
    request = Request(prompts[:1] if draws else prompts, limit, greedy, processors, generator=generator)
    with on(where):
        return decode(target(where), drafter(kind, where), parse_rule(rule), request)


@contextmanager
def recording(kind: str, device: SimulatedDevice) -> Iterator[SimRecorder]:
    recorder = SimRecorder(device)
    models = [target(SIM), drafter(kind.partition(", ")[0], SIM)]
    for model in models:
        model.use_graphs(recorder)  # type: ignore[attr-defined]
    try:
        yield recorder
    finally:
        for model in models:
            model.use_graphs(None)  # type: ignore[attr-defined]


def stands_on_memory_that_stays(kind: str, parts: list[list[str]], recorder: SimRecorder) -> None:
    """The recordings hold these parts, and read what neither they nor the next request allocate."""
    whole, small = target(SIM), drafter(kind.partition(", ")[0], SIM)
    recorded = whole.recorded
    assert isinstance(recorded, RoundRecorder) and recorded.refused is None and recorded.current is not None
    state, made = recorded.current.state, [x.graphs for x in recorded.current.recordings.values() if x.graphs]
    assert made and all([part.phases for part in one] == parts for one in made)
    stays: list[Tensor] = [*state.tensors(), *state.session.tensors(), state.live]  # type: ignore[list-item]
    stays.append(whole.lm_head_rows(None)[0])
    stays += [x for each in READS.values() for one in each for x in vars(one).values() if isinstance(x, SimTensor)]
    for module in (whole.model, *small.modules()):
        stays += [*module.parameters(), *module.buffers()]
    for owner in (state, *sessions_of(state.session)):
        cache: Any = getattr(owner, "cache", None)
        stays += [] if cache is None else cache._layered()
    for part in (part for one in made for part in one):
        stays += [*part.inputs, *(outputs_of(part.outputs) if isinstance(part.outputs, VerifiedTree) else [])]
    known = {address(x.value) for x in stays}  # type: ignore[attr-defined]
    for graph in recorder.graphs:
        assert not {place: what for place, what in graph.reads.items() if place not in known}


def sessions_of(session: DraftSession) -> list[DraftSession]:
    return [session, *(one for part in session.parts for one in sessions_of(part))]


@pytest.mark.filterwarnings("ignore:lm samples its drafts")
@pytest.mark.parametrize(("kind", "rule", "greedy"), CASES)
def test_recorded_rounds_answer_as_a_cpu_does(
    kind: str, rule: str, greedy: bool, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the same key records nothing more. A round launches at most six operations besides its graphs, and
    the host reads once, after it; where nothing waits for that, after the next one is launched. Where the host computes
    something of the tree it reads once more.
    """
    spent: list[tuple[int, int]] = []
    launched: list[int] = []
    process = loop.handle_report

    def noted(*given: Any) -> Any:
        spent.append((device.launches, len(device.waits)))
        launched.append(recorder.replayed - replayed)
        return process(*given)

    wanted, parts = run(kind, rule, greedy, CPU).sequences, parts_of(kind, rule)
    with recording(kind, device) as recorder:
        first = run(kind, rule, greedy)
        made = len(recorder.graphs)
        assert first.sequences == wanted and made > 0 and recorder.replayed > 0
        monkeypatch.setattr(loop, "handle_report", noted)
        replayed = recorder.replayed
        assert run(kind, rule, greedy).sequences == wanted
        stands_on_memory_that_stays(kind, parts, recorder)
    rounds, looks = len(spent) - 1, len(parts) - 1
    assert [waits - spent[0][1] for _, waits in spent] == list(range(0, (1 + looks) * len(spent), 1 + looks))
    if parts == WHOLE:
        lags = kind in LAGGING
        assert len(recorder.graphs) == made and recorder.replayed - replayed == rounds + lags
        assert launched == ([0, *range(2, rounds + 2)] if lags else list(range(rounds + 1)))  # when each report is read
        assert max(after[0] - before[0] for before, after in zip(spent[1:], spent[2:])) <= 6


@pytest.mark.parametrize("kind", ["none", "eagle3-own", "lm"])
def test_what_a_stopped_answer_emits_in_its_extra_round_is_left_out(kind: str, device: SimulatedDevice) -> None:
    """The rows stop in different rounds, by a token, a streamer, or their limit, and others go on beside them."""
    full = run(kind, "exact", True, CPU).sequences
    heard: list[list[int]] = []

    def answers(where: torch.device) -> Outcome:
        heard[:] = [[] for _ in PROMPTS]

        def on_tokens(row: int, tokens: list[int]) -> bool:
            heard[row] += tokens
            return row == 1 and len(heard[1]) >= 5

        ends = frozenset(full[0][4:5])
        request = Request(PROMPTS, 3 * NEW, True, eos_token_ids=ends, callbacks=[Streaming(on_tokens)])
        with on(where):
            return decode(target(where), drafter(kind, where), parse_rule("exact"), request)

    wanted = answers(CPU)
    with recording(kind, device):
        made = answers(SIM)
    assert made.sequences == wanted.sequences == heard and len(made.sequences[0]) < 3 * NEW
    assert [row.finish_reason for row in made.stats.rows] == [row.finish_reason for row in wanted.stats.rows]
    assert [row.target_forwards for row in made.stats.rows] == [row.target_forwards for row in wanted.stats.rows]


@pytest.mark.parametrize("kind", ["eagle3-own", "lookup"])
def test_batches_of_one_bucket_share_a_recording(kind: str, device: SimulatedDevice) -> None:
    """And so does a copy of the drafter with the same tree, as `rule="calibrated"` makes one for every request."""
    texts = [[7, 8], [1, 2, 3, 1, 2, 3, 4], [9, 9, 2], [4, 5, 6], [5]]
    whole, small = target(SIM), drafter(kind, SIM)
    with on(CPU):
        wanted = decode(target(CPU), drafter(kind, CPU), parse_rule("tilted"), Request(texts, 3 * NEW)).sequences
    with recording(kind, device) as recorder:
        for count in (5, 6, 5, 8, 7):
            used = small.with_shape(small.shape) if isinstance(small, TreeDrafter) else small
            made = decode(whole, used, parse_rule("tilted"), Request((texts * 2)[:count], 3 * NEW))
            assert made.sequences == (wanted * 2)[:count] and len(made.records) == len(made.stats.rows) == count
        assert len(recorder.graphs) == 1 and whole.recorded is not None and len(whole.recorded.states) == 1


def test_memory_is_bounded_over_requests_of_many_sizes(device: SimulatedDevice) -> None:
    """When memory grows, recordings of other sizes stay valid; memory that they no longer use is given back."""
    whole = Target(tiny_model("llama", num_hidden_layers=1).to(SIM))
    small = tiny_head(whole)
    models: list[CachedModel] = [whole, small.model]
    recorder = SimRecorder(device)
    for model in models:
        model.use_graphs(recorder)
    largest = [0, 0]

    def ask(rows: int, tokens: int, small: Drafter) -> None:
        request = Request([[7, 8, 9]] * rows, tokens - 3, callbacks=[_StopAfterRounds()])
        assert decode(whole, small, parse_rule("exact"), request).sequences
        caches: Any = [whole.recorded.current.state.cache, whole.recorded.current.state.session.cache]  # type: ignore[union-attr]
        for place, cache in enumerate(caches):
            largest[place] = max(largest[place], cache.nbytes)
        assert all(model.shared_cache_bytes <= 2 * most for model, most in zip(models, largest))

    traffic = [(1, 20), (2, 20), (1, 250), (3, 100), (5, 250), (1, 20), (8, 250), (2, 250)]
    for rows, tokens in traffic:
        ask(rows, tokens, small)
    made = len(recorder.graphs)
    for rows, tokens in traffic:
        ask(rows, tokens, small)
    assert len(recorder.graphs) == made and whole.recorded is not None
    whole.recorded.forget()
    ask(1, 20, small)
    gc.collect()
    assert [model.shared_cache_bytes for model in models] == largest


def test_rounds_are_recorded_at_loading(device: SimulatedDevice) -> None:
    """Requests of these sizes record nothing more; and a callback may have the host read before the next launch."""

    class AtOnce(Callback):
        reads_tensors, waits = False, True

    whole = Target(tiny_model("llama", num_hidden_layers=1).to(SIM))
    decoder = FuzzyDecoder(whole, tiny_head(whole))
    decoder.use_graphs(recorder := SimRecorder(device))
    said = record_rounds(decoder, [(1, 100), (3, 200)])
    assert re.fullmatch(r"recorded 2 graphs for 1x100, 3x200 tokens in [\d.]+ s, with \d+ MiB of keys and values", said)
    for prompts, length in ((PROMPTS[:1], 20), (PROMPTS, 12), (PROMPTS * 2, 20)):
        made = decoder.generate(prompts, max_new_tokens=length, do_sample=False, callbacks=[AtOnce()])
        assert len(recorder.graphs) == 2 + (len(prompts) > 4) and len(made.sequences[0]) == length
    with pytest.raises(FsdError, match="record=1x257: .* has a context of 256 tokens"):
        record_rounds(decoder, [(1, 257)])
    with pytest.raises(FsdError, match="record needs CUDA graphs, which the target on cpu does not use"):
        record_rounds(FuzzyDecoder(target(CPU), drafter("none", CPU)), [(1, 20)])


def test_what_cannot_be_recorded_runs_eagerly_and_says_so(device: SimulatedDevice, caplog: Any) -> None:
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
