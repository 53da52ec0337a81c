"""Where texts end: rotary kinds whose angles change with the length, and windows that only a cache applies."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import MoshiConfig, MoshiForCausalLM

from fsd_core.errors import ContextLengthError, ModelLoadError
from fsd_infer import FuzzyDecoder, LMDrafter, NoDrafter, Target, TreeShape
from fsd_infer.drafters import LookupDrafter
from tests.families import WINDOW, noisy_model, reference, tiny_model, tiny_prompts

ORIGINAL = 24
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": ORIGINAL, "rope_theta": 1e4,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
CHANGING: list[tuple[str, Any, int]] = [("phi3", LONG, 64), ("llama", LONG, 64), ("llama", DYNAMIC, ORIGINAL)]


@pytest.mark.parametrize(("family", "rope", "longest"), CHANGING)
def test_answers_are_those_of_generate_up_to_the_length_at_which_angles_change(
    family: str, rope: dict[str, Any], longest: int
) -> None:
    kind = rope["rope_type"]

    def made(build: Any) -> Any:
        options: dict[str, Any] = {"rope_parameters": dict(rope), "max_position_embeddings": longest}
        if family == "phi3":
            options |= {"sliding_window": None, "original_max_position_embeddings": ORIGINAL}
        return build(family, **options)

    model = made(tiny_model)
    target = Target(model)
    assert target.max_positions == ORIGINAL
    prompts = tiny_prompts((5, 13, 22))
    draft = Target(made(noisy_model))
    for drafter in (
        NoDrafter(target.vocab_size),
        LookupDrafter(target.vocab_size),
        LMDrafter(draft, target, TreeShape(4, 2, 8)),
    ):
        for prompt in prompts:
            with pytest.warns(UserWarning, match=f"end where .* {ORIGINAL} tokens, because its {kind}"):
                answer = FuzzyDecoder(target, drafter).generate([prompt], max_new_tokens=60, do_sample=False)
            right = reference(made(tiny_model), [prompt], max_new_tokens=ORIGINAL - len(prompt))[0]
            assert answer.sequences[0] == right and answer.stats.rows[0].finish_reason == "length"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FuzzyDecoder(target, NoDrafter(target.vocab_size)).generate([prompts[0]], max_new_tokens=9, do_sample=False)
    with pytest.raises(ContextLengthError, match=f"{ORIGINAL} because its {kind} positions change beyond that"):
        FuzzyDecoder(target, NoDrafter(target.vocab_size)).generate([tiny_prompts((30,))[0]], max_new_tokens=9)


def test_a_window_that_only_the_cache_applies_is_refused() -> None:
    sizes: dict[str, Any] = dict(ffn_dim=64, audio_vocab_size=97, num_codebooks=2, head_dim=8)
    with pytest.raises(ModelLoadError, match=f"MoshiModel has a sliding window of {WINDOW} tokens"):
        Target(moshi(sliding_window=WINDOW, **sizes))
    model = moshi(sliding_window=256, **sizes)
    made = FuzzyDecoder(Target(model), NoDrafter(97)).generate(tiny_prompts((9,)), max_new_tokens=12, do_sample=False)
    assert made.sequences == reference(model, tiny_prompts((9,)), max_new_tokens=12)
    assert Target(tiny_model("mistral")).layer_windows == {"all": WINDOW}


def moshi(**options: Any) -> Any:
    torch.manual_seed(0)
    config = MoshiConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, pad_token_id=0, eos_token_id=None, bos_token_id=None, **options,
    )  # fmt: skip
    model = MoshiForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model
