"""Decoding on a CUDA device. `make test-gpu` runs these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fsd_infer.device.transfer
import fsd_infer.rules._walk
from fsd_infer import FuzzyDecoder, Target, parse_rule
from fsd_infer.drafters import Drafter, GraftedDrafter, LMDrafter, LookupDrafter, TreeShape
from fsd_infer.engine import Request, decode
from tests.families import VOCAB, OracleDrafter, reference, tiny_head, tiny_model, tiny_prompts
from tests.test_engine import SAMPLES, assert_one_law

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def cuda_target(family: str) -> Target:
    return Target(tiny_model(family).to(DEVICE))


def drafter_of(kind: str, target: Target) -> Drafter:
    if kind == "oracle":
        return OracleDrafter(target)
    if kind == "lm":
        return LMDrafter(cuda_target("llama"), target, TreeShape.chain(3))
    options = {"draft_vocab_size": VOCAB // 2} if kind == "reduced" else {}
    eagle = tiny_head(target, TreeShape(depth=4, width=4, nodes=20), **options)
    return GraftedDrafter(eagle, LookupDrafter(VOCAB)) if kind == "graft" else eagle


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "phi3", "gpt2", "cohere"])
@pytest.mark.parametrize("kind", ["oracle", "eagle", "reduced", "graft"])
def test_greedy_tokens_are_those_of_generate(family: str, kind: str) -> None:
    target = cuda_target(family)
    prompts = tiny_prompts()
    decoder = FuzzyDecoder(target, drafter_of(kind, target))
    out = decoder.generate(prompts, max_new_tokens=24, do_sample=False)
    assert out.sequences == reference(target.model, prompts)
    alone = [decoder.generate([prompt], max_new_tokens=24, do_sample=False).sequences[0] for prompt in prompts]
    assert alone == out.sequences


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt2", "cohere"])
@pytest.mark.parametrize("kind", ["oracle", "eagle", "graft", "lm"])
def test_replayed_forwards_give_the_tokens_of_generate(family: str, kind: str) -> None:
    target = cuda_target(family)
    decoder = FuzzyDecoder(target, drafter_of(kind, target))
    decoder.use_graphs()
    for length in (24, 180):  # other memory, hence other recordings
        expected = reference(target.model, tiny_prompts(), max_new_tokens=length)
        for _ in range(3):
            assert decoder.generate(tiny_prompts(), max_new_tokens=length, do_sample=False).sequences == expected
        assert decoder.generate(tiny_prompts()[:1], max_new_tokens=length, do_sample=False).sequences == expected[:1]
    assert target.graphs is not None and target.graphs.refused is None


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["oracle", "eagle", "reduced", "lm"])
@pytest.mark.parametrize("options", [{"temperature": 1.4}, {"temperature": 1.5, "top_p": 0.8}])
def test_sampled_law_is_that_of_generate(options: dict[str, Any], kind: str, graphs: bool) -> None:
    target, prompt = cuda_target("llama"), tiny_prompts((7,))[0]
    options = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, **options}
    torch.manual_seed(1)
    given = torch.tensor([prompt] * SAMPLES, device=DEVICE)
    theirs = target.model.generate(given, attention_mask=torch.ones_like(given), **options)[:, len(prompt) :].cpu()
    decoder = FuzzyDecoder(target, drafter_of(kind, target))
    if graphs:
        decoder.use_graphs()
    ours = decoder.generate([prompt] * SAMPLES, seed=2, **options).sequences
    assert_one_law(np.array(ours), theirs.numpy())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kind", ["eagle", "lm"])
@pytest.mark.parametrize("rule", ["exact", "fuzzy:js:0.4"])
def test_a_round_waits_for_the_device_once(
    rule: str, kind: str, greedy: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else waits raises, by torch's own account."""
    target = cuda_target("llama")
    drafter = drafter_of(kind, target)
    waits = 0
    transfer = fsd_infer.device.transfer.on_host

    def on_host(*tensors: Tensor) -> Any:
        nonlocal waits
        waits += 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            return transfer(*tensors)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    def run() -> int:
        request = Request(tiny_prompts()[:batch], max_new_tokens=12, greedy=greedy)
        outcome = decode(target, drafter, parse_rule(rule), request)
        return max(row.target_forwards for row in outcome.stats.rows)

    run()  # what happens once may wait
    for module in (fsd_infer.device.transfer, fsd_infer.rules._walk):
        monkeypatch.setattr(module, "on_host", on_host)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rounds = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == 1 + rounds
