"""Decoding on the simulated device: how often it waits, and that its answers are the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fsd_core.tensors
from fsd_infer import Target, drafters
from fsd_infer.drafters import Drafter, DraftRequest, DraftSession, GraftedDrafter, LookupDrafter, TreeShape
from fsd_infer.drafters.forced import ForcedDrafter
from fsd_infer.drafters.memory import MemorySession
from fsd_infer.engine import Request, decode, loop
from fsd_infer.rules import parse_rule
from tests.families import VOCAB, drafter_of, tiny_head, tiny_model
from tests.simulated_device import SIM, SimulatedDevice, on

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3, 1, 2, 3, 4], [4, 5, 6], [7, 8]]
NEW = 5
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"layout": "eagle"}, "eagle3": {"layout": "eagle3", "draft_vocab_size": 40},
    "eagle3-own": {"layout": "eagle3", "own_lm_head": True}, "fsd": {"fused_layers": [0]},
    "reduced": {"draft_vocab_size": 40}, "stop": {},
}  # fmt: skip
RULES = [
    *("exact", "fuzzy:js:0.3", "fuzzy-strict:tv:0.3", "tilted:1", "tilted:1:gate=0.3:exact_ngram_size=2", "draft-only"),
    *("random:0.5", "cactus:0.3", "cascade-token:0.5", "ensemble:0.5", "lenient:0.5", "relaxed", "threshold:0.3"),
    *("typical", "fly", "asd", "mars"),
]
DRAFTERS = ["eagle", "lm", "lookup", "none", "reduced", "recycle", "lm+lookup", "reduced+lookup+recycle"]
# tests/test_recorded_rounds.py has the other drafters and rules, whose every read on the host would be an error
CASES = [(kind, "exact") for kind in DRAFTERS] + [("eagle", rule) for rule in RULES[3::4]] + [("lm", "tilted:1")]


@cache
def target(device: torch.device) -> Target:
    made = Target(tiny_model("llama", num_hidden_layers=1).to(device))
    made.check_lm_head()  # once per target
    return made


class OwnDrafter(LookupDrafter):
    """As a caller may write one, who knows nothing of recordings."""

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        return OwnSession(self, first_tokens, request)


class OwnSession(MemorySession):
    is_recordable = False  # type: ignore[assignment]


def forced(row: int, answer: list[int]) -> list[int]:
    """In place of a grammar: it forces nothing, a token, or more than a round's drafts."""
    return [(row + token) % VOCAB for token in range(len(answer) % 4)]


@cache
def drafter(kind: str, device: torch.device) -> Drafter:
    if "+" in kind:
        main, _, side = kind.rpartition("+")
        return GraftedDrafter(drafter(main, device), drafter(side, device), 12)
    if kind in ("none", "lookup"):
        return (drafters.NoDrafter if kind == "none" else LookupDrafter)(VOCAB)
    if kind == "recycle":
        return drafters.RecycleDrafter(VOCAB, keep=False)
    if kind == "memory":
        return drafters.MemoryDrafter(VOCAB)
    if kind == "own":
        return OwnDrafter(VOCAB)
    if kind.startswith("guided "):
        return ForcedDrafter(drafter(kind.removeprefix("guided "), device), forced, VOCAB)
    stop = 1e-9 if "stop" in kind else 0.0
    if kind.startswith("lm"):
        small = Target(tiny_model("llama", seed=1, num_hidden_layers=1).to(device))
        small.check_lm_head()
        return drafters.LMDrafter(small, target(device), TreeShape.chain(2, stop))
    made = tiny_head(target(device), TreeShape(depth=2, width=3, nodes=7, stop_below=stop), **HEADS[kind])
    if made.head.lm_head is not None:
        drawn = torch.Generator().manual_seed(1)  # the same head on every device
        with torch.no_grad():
            weight = made.head.lm_head.weight
            weight.copy_(torch.randn(weight.shape, generator=drawn))
    return made


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    monkeypatch.setattr("fsd_infer.request.prompts.PREFILL_CHUNK", 4)
    monkeypatch.setattr("fsd_infer.drafters.eagle.PREFILL_CHUNK", 3)
    with SimulatedDevice() as opened:
        yield opened


def run(kind: str, rule: str, greedy: bool, where: torch.device = SIM) -> loop.Outcome:
    torch.manual_seed(0)
    with on(where):
        return decode(target(where), drafter(kind, where), parse_rule(rule), Request(PROMPTS, NEW, greedy))


def of_rounds(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Will hold how many waits there were when each round began, and when its launches ended."""
    begun: list[int] = []
    ended: list[int] = []
    decode_round = loop.decode_round

    def noted(state: Any) -> Any:
        begun.append(len(device.waits))
        made = decode_round(state)
        ended.append(len(device.waits))
        return made

    monkeypatch.setattr(loop, "decode_round", noted)
    return begun, ended


@pytest.mark.filterwarnings("ignore:lm samples its drafts")
@pytest.mark.parametrize(("kind", "rule"), CASES)
def test_a_round_reads_nothing_and_its_report_is_one_transfer(
    kind: str, rule: str, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    target(SIM), drafter(kind, SIM)
    begun, ended = of_rounds(device, monkeypatch)
    modes = [True] if parse_rule(rule).greedy_only else [False] if kind == "lm" and rule != "exact" else [True, False]
    for greedy in modes:
        for waits in (device.waits, begun, ended):
            waits.clear()
        outcome = run(kind, rule, greedy)
        assert begun == ended, device.waits
        assert begun == list(range(1, len(begun) + 1)) and len(device.waits) == len(begun) + 1
        assert [len(answer) for answer in outcome.sequences] == [NEW] * len(PROMPTS)
        if greedy:
            assert outcome.sequences == run(kind, rule, greedy, CPU).sequences


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kind", ["eagle", "lm"])
@pytest.mark.parametrize("rule", ["exact", "fuzzy:js:0.4"])
def test_a_round_waits_for_a_gpu_once(
    rule: str, kind: str, greedy: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else waits raises, by torch's own account."""
    target = Target(tiny_model("llama").to("cuda"))
    drafter = drafter_of(kind, target, TreeShape.chain(3))
    waits = 0
    wait = fsd_core.tensors.Transfer.wait

    def counted(transfer: fsd_core.tensors.Transfer) -> Tensor:
        nonlocal waits
        waits += 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            return wait(transfer)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    def run() -> int:
        outcome = decode(target, drafter, parse_rule(rule), Request(PROMPTS[:batch], max_new_tokens=12, greedy=greedy))
        return max(row.target_forwards for row in outcome.stats.rows)

    run()  # what happens once may wait
    monkeypatch.setattr(fsd_core.tensors.Transfer, "wait", counted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rounds = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == 1 + rounds
