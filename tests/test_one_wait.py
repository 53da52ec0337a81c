"""A round waits for the device once, shown without one: on "meta" whatever needs a number from the device raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fsd_infer.transfer
from fsd_infer.drafters import Drafter, EagleDrafter, GraftedDrafter, LMDrafter, LookupDrafter, NoDrafter, TreeShape
from fsd_infer.engine import Request, decode
from fsd_infer.head import EagleConfig, EagleHead
from fsd_infer.rules import parse_rule
from fsd_infer.target import Target

DEVICE = torch.device("meta")
VOCABULARY, DEPTH, NEW = 50, 3, 9


class Transfers:
    """Answers in place of the device: zeros. So every node holds token 0 and hangs under the root (in a chain, under
    the one before), every token that a rule emits is 0, no gate opens and nothing is unfit.
    """

    def __init__(self, chain: bool) -> None:
        self.chain = chain
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, values: Tensor) -> Any:
        assert values.device == DEVICE
        self.shapes.append(tuple(values.shape))
        answer = torch.zeros(values.shape)
        if self.chain:
            answer[1] = (torch.arange(values.shape[-1]) - 1).clamp_min(0)  # parents
        return answer.tolist()


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
    return Target(LlamaForCausalLM(config).to(DEVICE))


def drafter(kind: str, target: Target) -> Drafter:
    if kind == "none":
        return NoDrafter(VOCABULARY)
    if kind == "lm":
        return LMDrafter(model(), target, depth=DEPTH)
    if kind == "lookup":
        return LookupDrafter(VOCABULARY)
    config = EagleConfig.for_target(target, draft_vocab_size=20 if kind == "reduced" else None)
    head = EagleHead(config)
    if kind == "reduced":
        head.set_draft_ids(torch.arange(20))
    eagle = EagleDrafter(head, target, TreeShape(depth=DEPTH, width=4, nodes=12))
    return GraftedDrafter(eagle, LookupDrafter(VOCABULARY)) if kind == "graft" else eagle


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kind", ["none", "eagle", "reduced", "lm", "lookup", "graft"])
@pytest.mark.parametrize("rule", ["exact", "fuzzy:js:0.3", "fuzzy-strict:tv:0.3", "draft-only"])
def test_a_round_waits_for_the_device_once(
    rule: str, kind: str, greedy: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = model()
    target._lm_head_checked = True  # when the drafter is made, not in a round
    drafting = drafter(kind, target)
    monkeypatch.setattr(fsd_infer.transfer, "to_host", transfers := Transfers(kind == "lm"))
    monkeypatch.setattr(torch, "tensor", made_here)
    prompts = [[1, 2, 3, 1, 2], [1, 2, 3], [2, 1]][:batch]
    outcome = decode(target, drafting, parse_rule(rule), Request(prompts, max_new_tokens=NEW, greedy=greedy))
    assert [len(answer) for answer in outcome.sequences] == [NEW] * batch
    rounds = max(row.target_forwards for row in outcome.stats.rows)
    if kind != "lookup":  # which drafts what it finds
        assert rounds == (NEW - 1) // {"none": 1, "lm": 1 + DEPTH}.get(kind, 2)
    assert all(gate is False for record in outcome.records for gate in record.gates)
    merges = rounds if kind == "graft" else 0
    assert len(transfers.shapes) == 1 + rounds + merges  # the prompt's, and each round's
