"""Tokens that a guide forces: a row's tree, and so a lossy rule's answer, is a function of its own text."""

from __future__ import annotations

import pytest
import torch

from fsd_infer.drafters.forced import ForcedDrafter
from fsd_infer.engine import Request, decode
from fsd_infer.rules import parse_rule
from tests.simulated_device import SIM, SimulatedDevice
from tests.test_device_waits import CPU, VOCAB, drafter, target
from tests.test_device_waits import device as device  # a fixture
from tests.test_recorded_rounds import recording

TEXTS = [[7, 8], [1, 2, 3, 1, 2, 3, 4], [9, 9, 2]]
NEW = 24


def forced(row: int, answer: list[int]) -> list[int]:
    """What hardly any text goes on with, so that a lossy rule's answer tells which drafts it saw."""
    return [(answer[-1] + place) % VOCAB for place in range((len(answer) + answer[0]) % 4)]


@pytest.mark.parametrize("kind", ["eagle", "reduced", "eagle+lookup"])
def test_an_answer_with_forced_tokens_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    guided = ForcedDrafter(drafter(kind, CPU), forced, VOCAB)
    whole = decode(target(CPU), guided, parse_rule("tilted:1"), Request(TEXTS, NEW, True)).sequences
    for text, answer in zip(TEXTS, whole, strict=True):
        assert decode(target(CPU), guided, parse_rule("tilted:1"), Request([text], NEW, True)).sequences == [answer]


def test_rows_that_only_fill_a_bucket_have_no_say_in_who_drafts(device: SimulatedDevice) -> None:
    """Three texts run in a bucket of four rows, whose last one has no answer."""
    asked: list[list[int]] = []

    def always(row: int, answer: list[int]) -> list[int]:
        asked.append(answer)
        return [3, 4]

    def answers(where: torch.device) -> list[list[int]]:
        guided = ForcedDrafter(drafter("eagle", where), always, VOCAB)
        return decode(target(where), guided, parse_rule("tilted:1"), Request(TEXTS, NEW, True)).sequences

    with recording("eagle", device) as recorder:
        assert answers(SIM) == answers(CPU) and recorder.replayed > 0
    assert all(asked)
