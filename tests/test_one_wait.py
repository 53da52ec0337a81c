"""A round waits for the device once, shown without one: on "meta" whatever needs a number from the device raises."""

from __future__ import annotations

from copy import copy
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import fsd_infer.device.transfer
from fsd_infer.drafters import (
    Drafter,
    EagleDrafter,
    GraftedDrafter,
    LMDrafter,
    LookupDrafter,
    NoDrafter,
    RecycleDrafter,
    TreeShape,
)
from fsd_infer.engine import Request, decode
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.rules import parse_rule
from fsd_infer.target import Target

DEVICE = torch.device("meta")
VOCABULARY, DEPTH, NEW = 50, 2, 7


class Transfers:
    """Answers in place of the device: zeros. So every node holds token 0 and hangs under the root (in a chain, under
    the one before), every token that a rule emits is 0, no gate opens and nothing is unfit.
    """

    def __init__(self, chain: bool) -> None:
        self.chain = chain
        self.count = 0

    def __call__(self, *tensors: Tensor) -> list[Any]:
        self.count += 1
        assert all(tensor.device == DEVICE for tensor in tensors)
        answers = [torch.zeros(tensor.shape) for tensor in tensors]
        if self.chain:
            answers[1][:] = (torch.arange(answers[1].shape[1]) - 1).clamp_min(0)  # parents
        return [answer.tolist() for answer in answers]


class NoBlockingCopies(TorchDispatchMode):
    """Refuses operations that take numbers from the CPU to the device and are not told not to wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        # a number in a tensor of no dimensions is an argument of a launch
        crosses = any(x.device.type == "cpu" and x.dim() for x in tensors) and any(x.device == DEVICE for x in tensors)
        if crosses and not self._waits_not(func, args, kwargs or {}):
            raise AssertionError(f"{func} copies from the CPU and waits for the device: use fsd_infer.device.transfer.")
        return out

    @staticmethod
    def _waits_not(func: Any, args: Any, kwargs: Any) -> bool:
        names = [argument.name for argument in func._schema.arguments]
        return bool({**dict(zip(names, args)), **kwargs}.get("non_blocking"))


_tensor = torch.tensor


def made_here(*args: Any, device: Any = None, **options: Any) -> Tensor:
    """torch.tensor, which waits for the device that it is to make a tensor on."""
    assert device is None, "make it on the CPU, then to_device"
    return _tensor(*args, **options)


def model() -> Target:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    made = Target(LlamaForCausalLM(config).to(DEVICE))
    vars(made)["_lm_head_is_plain"] = True  # checked when a drafter is made, not in a round
    return made


@cache
def target() -> Target:
    return model()


@cache
def drafter(kind: str) -> Drafter:
    if "+" in kind:
        main, _, side = kind.rpartition("+")
        return GraftedDrafter(drafter(main), drafter(side), 12)
    if kind == "none":
        return NoDrafter(VOCABULARY)
    if kind == "lm":
        return LMDrafter(model(), target(), depth=DEPTH)
    if kind == "lookup":
        return LookupDrafter(VOCABULARY)
    if kind == "recycle":
        return RecycleDrafter(VOCABULARY, keep=False)
    config = EagleConfig.for_target(target(), draft_vocab_size=20 if kind == "reduced" else None)
    head = EagleHead(config)
    if kind == "reduced":
        head.set_draft_ids(torch.arange(20))
    return EagleDrafter(head, target(), TreeShape(depth=DEPTH, width=4, nodes=12))


GRAFTS = ["eagle+lookup", "reduced+recycle", "lm+lookup", "lm+recycle", "lookup+recycle", "reduced+lookup+recycle"]


def waits_of(kind: str, greedy: bool) -> tuple[int, int]:
    """How often a round and the reading of the prompts wait, as the engine states it."""
    parts = kind.split("+")
    merges = len(parts) > 1 and parts[0] != "lookup" and (greedy or parts[0] != "lm")  # a sampled chain takes no graft
    return 1 + merges + ("recycle" in parts), 1 + ("recycle" in parts)


@pytest.mark.filterwarnings("ignore:lm samples its drafts")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        *product(
            ["exact", "fuzzy:js:0.3", "fuzzy-strict:tv:0.3", "draft-only", "random:0.5"],
            ["none", "eagle", "reduced", "lm", "lookup", "recycle", *GRAFTS],
        ),
        *product(["tilted:1:gate=0.3:novel=2"], ["eagle", "lm", "reduced+lookup+recycle"]),
    ],
)
def test_a_round_waits_for_the_device_as_often_as_is_stated(
    rule: str, kind: str, greedy: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, drafting = target(), drafter(kind)
    monkeypatch.setattr(fsd_infer.device.transfer, "to_host", transfers := Transfers(kind.startswith("lm")))
    monkeypatch.setattr(torch, "tensor", made_here)
    prompts = [[1, 2, 3, 1, 2], [1, 2, 3], [2, 1]][:batch]
    request = Request(prompts, max_new_tokens=NEW, greedy=greedy)
    with NoBlockingCopies():
        outcome = decode(reader, drafting, parse_rule(rule), request)
    assert [len(answer) for answer in outcome.sequences] == [NEW] * batch
    rounds = max(row.target_forwards for row in outcome.stats.rows)
    if kind in ("none", "eagle", "reduced", "lm"):  # the others draft what they find
        assert rounds == (NEW - 1) // {"none": 1, "lm": 1 + DEPTH}.get(kind, 2)
    assert all(gate is False for record in outcome.records for gate in record.gates)
    of_round, of_prompts = waits_of(kind, greedy)
    assert transfers.count == of_prompts + rounds * of_round


@pytest.mark.parametrize("kind", ["eagle", "reduced", "lm"])
def test_recorded_forwards_wait_no_more(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is recorded does not wait either, which a recording could not."""
    reader, drafting = target(), copy(drafter(kind))
    recorded = 0

    def record(run: Any) -> Any:
        nonlocal recorded
        recorded += 1
        return run(), lambda: None

    monkeypatch.setattr(reader, "graphs", None)  # others use this target too
    reader.use_graphs(record)
    if isinstance(drafting, LMDrafter):
        monkeypatch.setattr(drafting.model, "graphs", None)
    drafting.use_graphs(record)
    monkeypatch.setattr(fsd_infer.device.transfer, "to_host", transfers := Transfers(kind == "lm"))
    monkeypatch.setattr(torch, "tensor", made_here)
    with NoBlockingCopies():
        outcome = decode(reader, drafting, parse_rule("fuzzy:js:0.3"), Request([[1, 2, 3], [2, 1]], max_new_tokens=12))
    assert recorded >= 2
    assert transfers.count == 1 + max(row.target_forwards for row in outcome.stats.rows)


@pytest.mark.parametrize("moved", [lambda x: x.to(DEVICE), lambda x: torch.empty(3, device=DEVICE).copy_(x)])
def test_a_copy_that_waits_is_refused(moved: Any) -> None:
    with NoBlockingCopies():
        fsd_infer.device.transfer.to_device(torch.zeros(3), DEVICE)
        with pytest.raises(AssertionError, match="waits for the device"):
            moved(torch.zeros(3))
