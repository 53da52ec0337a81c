"""Recorded batches that fold once enough rows have ended, and tokens that a guide forces: rows depend on no others."""

from __future__ import annotations

import pytest
import torch

from fsd_infer.drafters.forced import ForcedDrafter
from fsd_infer.engine import Outcome, Request, decode
from fsd_infer.engine.callback import Callback
from fsd_infer.engine.state import DecodeState
from fsd_infer.rules import parse_rule
from tests.simulated_device import SIM, SimulatedDevice, on
from tests.test_device_waits import CPU, VOCAB, drafter, target
from tests.test_device_waits import device as device  # a fixture
from tests.test_recorded_rounds import READS, recording

TEXTS = [[7, 8], [1, 2, 3, 1, 2, 3, 4], [9, 9, 2], [4, 5, 6], [5], [6, 1, 6, 1]]
LENGTHS = [2, 24, 5, 14, 2, 3]  # of the answers
GROWING = ["guided reduced"]  # whose vocabulary and chains have further shapes
KINDS = ["lm", "lookup", "memory", "recycle", "eagle+lookup", "own", "eagle, penalty"]
CASES = [
    *((kind, "exact") for kind in KINDS), ("eagle", "tilted:1"), ("lm", "tilted:1"), ("guided reduced", "tilted:1"),
]  # fmt: skip


class Ragged(Callback):
    """Ends each answer at a length of its own, and notes how many rows each round has."""

    reads_tensors = False

    def __init__(self) -> None:
        self.tokens = [0] * len(TEXTS)
        self.rows: list[int] = []

    def on_start(self, state: DecodeState) -> None:
        self.state = state

    def on_token(self, row: int, token: int) -> str | None:
        self.tokens[row] += 1
        return "length" if self.tokens[row] == LENGTHS[row] else None

    def on_phase(self, phase: str) -> None:
        if phase == "start":
            self.rows.append(len(self.state.rules))


def run(kind: str, rule: str, where: torch.device, seed: int | None, count: int = len(TEXTS)) -> tuple[Outcome, Ragged]:
    kind, _, option = kind.partition(", ")
    ragged = Ragged()
    generator = None if seed is None else torch.Generator(device=where).manual_seed(seed)
    request = Request(TEXTS[:count], 60, seed is None, READS.get(option), generator=generator, callbacks=[ragged])  # type: ignore[arg-type]
    with on(where):
        return decode(target(where), drafter(kind, where), parse_rule(rule), request), ragged


@pytest.mark.parametrize(("kind", "rule"), CASES)
def test_a_ragged_batch_moves_to_smaller_buckets_and_answers_as_a_cpu_does(
    kind: str, rule: str, device: SimulatedDevice
) -> None:
    wanted = run(kind, rule, CPU, None)[0]
    with recording(kind, device) as recorder:
        whole, ragged = run(kind, rule, SIM, None)
        assert whole.sequences == wanted.sequences and set(ragged.rows) == {8}, "no smaller bucket is recorded"
        for count in (1, 2, 3):
            run(kind, rule, SIM, None, count)
        made = len(recorder.graphs)
        folded, ragged = run(kind, rule, SIM, None)
        assert folded.sequences == wanted.sequences
        assert [row.finish_reason for row in folded.stats.rows] == [row.finish_reason for row in wanted.stats.rows]
        assert sorted(ragged.rows, reverse=True) == ragged.rows and set(ragged.rows) <= {8, 4, 2, 1}
        assert (ragged.rows[-1] < 8) is (kind != "own"), "a drafter that knows nothing of recordings stays"
        again, _ = run(kind, rule, SIM, None)
        assert again.sequences == wanted.sequences
        assert len(recorder.graphs) - made <= 2 or kind in GROWING


def test_sampled_texts_of_a_folded_batch_come_again(device: SimulatedDevice) -> None:
    with recording("eagle", device):
        for count in (1, 2, 3):
            run("eagle", "exact", SIM, 0, count)
        texts = [run("eagle", "exact", SIM, 5) for _ in range(2)]
    assert texts[0][0].sequences == texts[1][0].sequences and {1, 8} <= set(texts[0][1].rows)


# forced tokens --------------------------------------------------------------------------------------------------------


GUIDED = [[7, 8], [1, 2, 3, 1, 2, 3, 4], [9, 9, 2]]
NEW = 24


def forced(row: int, answer: list[int]) -> list[int]:
    """What hardly any text goes on with, so that a lossy rule's answer tells which drafts it saw."""
    return [(answer[-1] + place) % VOCAB for place in range((len(answer) + answer[0]) % 4)]


@pytest.mark.parametrize("kind", ["eagle", "reduced", "eagle+lookup"])
def test_an_answer_with_forced_tokens_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    guided = ForcedDrafter(drafter(kind, CPU), forced, VOCAB)
    whole = decode(target(CPU), guided, parse_rule("tilted:1"), Request(GUIDED, NEW, True)).sequences
    for text, answer in zip(GUIDED, whole, strict=True):
        assert decode(target(CPU), guided, parse_rule("tilted:1"), Request([text], NEW, True)).sequences == [answer]


def test_rows_that_only_fill_a_bucket_have_no_say_in_who_drafts(device: SimulatedDevice) -> None:
    """Three texts run in a bucket of four rows, whose last one has no answer."""
    asked: list[list[int]] = []

    def always(row: int, answer: list[int]) -> list[int]:
        asked.append(answer)
        return [3, 4]

    def answers(where: torch.device) -> list[list[int]]:
        guided = ForcedDrafter(drafter("eagle", where), always, VOCAB)
        return decode(target(where), guided, parse_rule("tilted:1"), Request(GUIDED, NEW, True)).sequences

    with recording("eagle", device) as recorder:
        assert answers(SIM) == answers(CPU) and recorder.replayed > 0
    assert all(asked)
