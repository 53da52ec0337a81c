"""Our logits of public heads are those of their authors' own modelling code, step by step, to 1e-5.

``golden/head-parity.json`` holds synthetic heads as other programs write them. A tensor is there by key and shape of
its numbers, or as it is. The logits were made at commit 603da78 by tests/parity_toys.py, with checkouts of
SafeAILab/EAGLE and sgl-project/SpecForge and with speculators 0.9.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fsd_infer import Target
from fsd_train.models.unroll import unroll
from fsd_train.packed import TextMask
from tests.families import load_head

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "head-parity.json").read_text())
HEADS = {name: head for name, head in GOLDEN.items() if name != "target"}
LENGTH, STEPS = 11, 3  # of the text; of the chains, of which each runs on the head's own outputs
SHOWN = slice(0, 3)  # logits per position in the golden file


def values(key: str, *shape: int) -> Tensor:
    """Numbers from -1 to 1 that depend on key and place alone, on every machine."""
    count = torch.Size(shape).numel()
    phase = sum(ord(letter) * (place + 1) for place, letter in enumerate(key))
    wave = torch.sin(torch.arange(1, count + 1, dtype=torch.float64) * 12.9898 + phase) * 43758.5453
    return ((wave - wave.floor()) * 2 - 1).float().view(shape)


def weight(key: str, *shape: int) -> Tensor:
    """A matrix, or the weight of a norm."""
    found = values(key, *shape)
    return found * (3 / shape[1]) ** 0.5 if len(shape) == 2 else 1 + 0.3 * found


def target_model() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**GOLDEN["target"]))
    for name, parameter in model.named_parameters():
        parameter.data = weight(name, *parameter.shape)
    return model.eval()


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_logits_are_those_that_the_authors_code_gave(name: str, tmp_path: Path) -> None:
    target, golden = Target(target_model()), HEADS[name]
    (tmp_path / "config.json").write_text(json.dumps(golden["config"]))
    tensors = {
        key: weight(*of) if isinstance(of[0], str) else torch.tensor(of) for key, of in golden["tensors"].items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    head = load_head(tmp_path, target)
    tokens = (torch.arange(1, LENGTH + 1) * 7 % target.vocab_size)[None]
    features = values("features", 1, LENGTH, target.hidden_size)
    if head.config.layout == "eagle3":
        assert head.config.fused_layers == [1, 3, 4]
        features = torch.cat([features, 2 * values("fused", 1, LENGTH, 3 * target.hidden_size)], -1)
    text = TextMask((LENGTH,), tokens.device)
    outputs = unroll(head, head.embed(tokens, target), features, text, STEPS, torch.arange(LENGTH))
    read = head.readout(torch.cat(outputs))
    ours = target.lm_logits(read) if head.lm_head is None else head.lm_head(read)
    theirs = torch.tensor(golden["logits"])
    for step in range(STEPS):  # a chain's step s reads token r + s + 1, which the last ones lack
        end = LENGTH - step
        torch.testing.assert_close(ours[step, :end, SHOWN], theirs[step, :end], atol=1e-5, rtol=1e-5)
        assert float(ours[step, :end].std()) > 0.1
