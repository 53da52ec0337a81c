"""Phases are timed where the work is done."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fsd_infer import FuzzyDecoder, NoDrafter, Target
from fsd_infer.device.clock import Clock, DeviceClock, clock_of
from tests.families import VOCAB, tiny_model, tiny_prompts


class Event:
    """As torch.cuda.Event, on a device that works a second before each record, long after the host has gone on."""

    made: list[Event] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.complete = False
        self.made.append(self)

    def record(self, stream: str) -> None:
        self.stream, self.at = stream, 1000.0 * len(self.made)

    def synchronize(self) -> None:
        for event in self.made[: self.made.index(self) + 1]:
            event.complete = True

    def elapsed_time(self, other: Event) -> float:
        assert self.complete and other.complete, "torch raises for events that have not come"
        return other.at - self.at


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")


def test_the_hosts_clock_adds_up_laps() -> None:
    clock = clock_of(torch.device("cpu"))
    assert type(clock) is Clock
    for phase in ("draft", "target", "draft"):
        time.sleep(0.002)
        clock.lap(phase)
    phases = clock.phases()
    assert list(phases) == ["draft", "target"] and phases["draft"] >= 0.004 and phases["target"] >= 0.002
    assert sum(phases.values()) <= clock.seconds


def test_a_decoding_reports_the_devices_phases_and_the_hosts_seconds(
    cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(tiny_model("llama"))
    assert type(clock_of(torch.device("cuda", 1))) is DeviceClock
    monkeypatch.setattr("fsd_infer.engine.loop.clock_of", DeviceClock)
    prompts: Any = tiny_prompts()[:2]
    stats = FuzzyDecoder(target, NoDrafter(VOCAB)).generate(prompts, max_new_tokens=4, do_sample=False).stats
    rounds = stats.rows[0].target_forwards
    assert stats.phases == {"prefill": 1.0, "draft": 3.0 * rounds, "target": rounds, "rule": rounds, "cache": rounds}
    assert {event.stream for event in Event.made[1:]} == {"stream of cpu"}
    assert 0 < stats.prefill_seconds < stats.seconds < rounds
    assert all(row.seconds <= stats.seconds for row in stats.rows)
