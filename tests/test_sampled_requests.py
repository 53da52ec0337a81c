"""Whole requests above temperature 0: whatever drafts, shapes and is asked, three tokens have the target's own
distribution.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fsd_infer import Drafter, FuzzyDecoder, Target, TreeShape
from fsd_infer.decoder.requests import prepare
from fsd_infer.drafters import EagleDrafter, GraftedDrafter, LMDrafter
from fsd_infer.drafters.loading import choose_trees, load_drafter
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.head import EagleHead
from tests.families import CUDA
from tests.rules_toy import ALARM, p_value

SIZE, TOKENS, ANSWERS = 5, 3, 450
PROMPTS = [[1, 2, 3], [4, 4, 0]]


def llama(seed: int, context: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=context, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.5 if "lm_head" in name else 0.3)
    return model


def drafter_of(kind: str, target: Target, shape: str) -> Drafter:
    """A drafter by "head", "reduced" (a head of three tokens), "lm" or "short lm" (with a context of five tokens), with
    "+recycle" for grafts.
    """
    main, _, side = kind.partition("+")
    made: Drafter
    if main.endswith("lm"):
        small = llama(7, context=5 if main == "short lm" else 64).to(target.device)
        made = LMDrafter(Target.of(small, None), target, TreeShape.parse(shape) if shape else None)
    else:
        torch.manual_seed(8)
        head = EagleHead(EagleConfig.for_target(target, draft_vocab_size=3 if main == "reduced" else None)).float()
        for parameter in head.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.4)
        if head.draft_ids is not None:
            head.draft_ids.copy_(torch.tensor([0, 1, 4]))
        made = EagleDrafter(head.to(target.device), target, TreeShape.parse(shape))
    return GraftedDrafter(made, load_drafter(side, target)) if side else made


def target_distribution(target: Target, prompt: list[int], options: dict[str, Any]) -> np.ndarray:
    """[SIZE**TOKENS] by transformers' own processors, text by text."""
    processors = prepare(target, [prompt], None, options)[0].processors
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, chance in distribution.items():
            ids = torch.tensor([[*prompt, *text]], device=target.device)
            with torch.no_grad():
                scores = target.model(ids).logits[:, -1]
            scores = processors(ids, scores) if processors else scores
            for token, p in enumerate(scores[0].double().softmax(-1).tolist()):
                further = (*text, token)
                longer[further] = chance * p
        distribution = longer
    return np.array([distribution[text] for text in itertools.product(range(SIZE), repeat=TOKENS)])


CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "head": ("head", "3x3x8", "exact", {}),
    "few places": ("head", "4x2x4", "exact", {"temperature": 0.6}),
    "stops early": ("head", "4x3x9x0.7", "exact", {"top_k": 3}),
    "chosen": ("lm", "auto", "exact", {"temperature": 1.4, "min_p": 0.05}),
    "reduced": ("reduced", "3x3x7", "exact", {"top_p": 0.8}),
    "grafts": ("lm+recycle", "2x4x12", "exact", {"top_k": 4, "repetition_penalty": 1.3}),
    "a chain that stops": ("lm", "3x1x4x0.3", "exact:block=true", {"repetition_penalty": 1.5}),
    "penalties": ("head", "3x2x6", "exact", {"repetition_penalty": 0.7, "suppress_tokens": [2]}),
    "block": ("head", "auto", "exact:block=true", {"no_repeat_ngram_size": 2}),
    "a small LM": ("lm", "", "exact", {"top_k": 4, "no_repeat_ngram_size": 2}),
    "a small LM's tree": ("lm", "auto", "exact:block=false", {}),
    "a context that ends": ("short lm", "", "exact", {"temperature": 0.8}),
    "its wide tree": ("short lm", "3x3x8", "exact", {"top_p": 0.9}),
    "no budget": ("head", "3x3x8", "tilted:1:budget=0:draw=true", {"typical_p": 0.9}),
}


@pytest.mark.usefixtures("read_together")
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", CASES)
def test_a_request_has_the_targets_distribution(name: str, device: str) -> None:
    kind, shape, rule, options = CASES[name]
    target = Target.of(llama(3).to(device), None)
    drafter = drafter_of(kind, target, "4x3x9" if shape == "auto" else shape)
    decoder = FuzzyDecoder(target, choose_trees(drafter, target) if shape == "auto" else drafter)
    if device == "cuda":
        decoder.use_graphs()
    options = {"do_sample": True, "temperature": 1.0, "max_new_tokens": TOKENS, **options}
    torch.manual_seed(5)
    found = decoder.generate([prompt for prompt in PROMPTS for _ in range(ANSWERS)], rule=rule, **options).sequences
    places = np.array(found) @ SIZE ** np.arange(TOKENS)[::-1]
    for number, prompt in enumerate(PROMPTS):
        own = places[number * ANSWERS : (number + 1) * ANSWERS]
        assert p_value(own, target_distribution(target, prompt, options)) > ALARM
