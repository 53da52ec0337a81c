"""Requests beside busy processes: how many threads they use, and that nobody else's change."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsd_infer import FsdError, FuzzyDecoder, Target
from fsd_infer.device import cores
from fsd_infer.device.cores import Cores, CpuTimes, Team, team_size
from fsd_infer.drafters import NoDrafter
from tests.families import tiny_model

CPU = torch.device("cpu")


class Busy:
    """Looks at a machine of four cores, of which others keep ``taken`` busy; no time passes for anybody else."""

    def __init__(self, taken: float = 0.0) -> None:
        self.taken, self.at, self.used = taken, -1e9, 0.0

    def __call__(self) -> CpuTimes | None:
        self.at, self.used = self.at + 1.0, self.used + self.taken
        return CpuTimes(self.at, self.used, 0.0)


def test_threads_come_and_go_with_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSD_THREADS", "shared")
    busy = Busy()
    found = Cores(busy, lambda: 4)
    for taken, threads in ((0.0, 4), (0.3, 4), (0.5, 3), (1.0, 3), (1.2, 3), (2.0, 2), (9.0, 1), (0.0, 4)):
        busy.taken = taken
        assert found.threads(4) == threads, taken
    busy.taken = 1.0
    assert found.threads(2) == 2 and found.threads(1) == 1
    busy.taken = 0.0
    assert found.threads(4) == 4
    for _ in range(3):
        found.enter()
    assert found.threads(4) == 1, "three requests share four cores"
    for _ in range(2):
        found.leave()
    assert found.threads(4) == 4
    monkeypatch.setenv("FSD_THREADS", "fixed")
    busy.taken = 2.0
    assert found.threads(4) == 4
    assert Cores(lambda: None, lambda: 4).threads(4) == 4, "no counts"


def test_looks_of_this_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = cores.cpu_times()
    if sys.platform == "linux":
        assert found is not None and found.used > 0 and found.own > 0
    for text in ("", "cpu0 1 2 x", "cpu0 1"):
        (tmp_path / "stat").write_text(text)
        monkeypatch.setattr(cores, "_COUNTS", tmp_path / "stat")
        found = cores.cpu_times()
        assert found is None or found.used == 0


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch, several_threads: None) -> Iterator[Busy]:
    """Of four cores, others take as many as the test says."""
    monkeypatch.setenv("FSD_THREADS", "shared")
    busy = Busy(9.0)
    made = Cores(busy, lambda: 4)
    monkeypatch.setattr(cores, "of_process", lambda: made)
    yield busy


def test_a_team_changes_its_own_thread_and_gives_back(busy: Busy) -> None:
    before, seen = torch.get_num_threads(), []
    with pytest.raises(KeyError), Team(CPU, repeatable=False) as team:
        assert torch.get_num_threads() == team_size() == 1
        other = threading.Thread(target=lambda: seen.extend([torch.get_num_threads(), team_size()]))
        other.start()
        other.join()
        with Team(CPU, repeatable=False):
            assert team_size() == 1
        assert team_size() == 1, "a request within a request ends alone"
        busy.taken = 0.0
        team.fit_to_free_cores()
        assert torch.get_num_threads() == team_size() == before
        busy.taken = 9.0
        team.fit_to_free_cores()
        raise KeyError
    assert torch.get_num_threads() == team_size() == before and seen == [before] * 2
    with Team(CPU, repeatable=True):  # torch's products depend on the number of threads
        assert torch.get_num_threads() == before and team_size() == 1
    with Team(torch.device("meta"), repeatable=False):
        assert torch.get_num_threads() == team_size() == before


def test_a_number_set_meanwhile_stays(busy: Busy) -> None:
    with Team(CPU, repeatable=False) as team:
        torch.set_num_threads(3)
        team.fit_to_free_cores()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_an_unknown_mode_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, busy: Busy) -> None:
    monkeypatch.setenv("FSD_THREADS", "free")
    with pytest.raises(FsdError, match="FSD_THREADS='free'.*shared.*fixed"), Team(CPU, repeatable=False):
        pass
    monkeypatch.setenv("FSD_THREADS", "shared")
    busy.taken = 0.0
    assert cores.of_process().threads(4) == 4


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 3}], ids=str)
def test_answers_are_the_same_while_threads_change(options: dict[str, object], busy: Busy) -> None:
    target = Target(tiny_model("llama").bfloat16())
    decoder, sizes = FuzzyDecoder(target, NoDrafter(target.vocab_size)), []
    decoder.prepare()
    asked = dict(max_new_tokens=12, do_sample=False) | options

    def answer() -> list[list[int]]:
        return decoder.generate([5, 6, 7, 5, 6], **asked).sequences

    busy.taken = 0.0
    expected = answer()

    def turns() -> CpuTimes | None:
        busy.taken = 9.0 - busy.taken
        sizes.append(busy.taken)
        return look()

    look = busy.__call__
    cores.of_process()._read_times = turns
    assert answer() == expected and len(set(sizes)) == 2


CHILD = """
import os, signal, sys
import torch
torch.set_num_threads(2)
from fsd_core.functional import topk_logprobs
from fsd_infer.backends.choose import choose
choose("cpu")
x = torch.randn(64, 60000)
expected = topk_logprobs(x, 5)[1]
x.exp()  # OpenMP has threads now
child = os.fork()
if not child:
    signal.alarm(60)  # ends a process that waits for threads that it lacks
    found = topk_logprobs(x, 5)[1]
    x.exp()
    os._exit(0 if torch.equal(found, expected) and torch.get_num_threads() == 1 else 1)
assert torch.get_num_threads() == 2
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_process_computes_alone() -> None:
    assert subprocess.run([sys.executable, "-c", CHILD], check=False, timeout=120).returncode == 0
