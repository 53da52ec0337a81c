"""Where texts end: rotary kinds whose angles change with the length, and windows that only a cache applies."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList, MoshiConfig, MoshiForCausalLM

from fsd_bench.likelihood import mean_log_likelihoods
from fsd_core.errors import ModelLoadError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import LMDrafter, NoDrafter
from fsd_infer.rules import TokenOrigin
from fsd_infer.targets.prefixes import PrefixCache
from fsd_train.commands.regenerate import context_of
from tests.families import WINDOW, OracleDrafter, noisy_model, reference, tiny_head, tiny_model, tiny_prompts

ORIGINAL = 24
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": ORIGINAL, "rope_theta": 1e4,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
PHI: dict[str, Any] = {"sliding_window": None, "original_max_position_embeddings": ORIGINAL}
CHANGING: dict[str, tuple[str, dict[str, Any], int]] = {
    "phi3": ("phi3", LONG, 64), "phimoe": ("phimoe", {**LONG, "short_mscale": 1.2, "long_mscale": 1.4}, 64),
    "llama-longrope": ("llama", LONG, 64), "llama-dynamic": ("llama", DYNAMIC, ORIGINAL),
}  # fmt: skip


def changing(kind: str, build: Any = tiny_model) -> Any:
    """A model whose angles change after ORIGINAL tokens; a fresh one, since dynamic NTK keeps what it has seen."""
    family, rope, longest = CHANGING[kind]
    options: dict[str, Any] = {"rope_parameters": dict(rope), "max_position_embeddings": longest}
    return build(family, **options, **(PHI if family.startswith("phi") else {}))


@pytest.mark.parametrize("kind", CHANGING)
def test_answers_are_those_of_generate_across_the_length_at_which_angles_change(kind: str) -> None:
    prompts, target = tiny_prompts((5, 22, 23, 24, 25, 30)), Target(changing(kind))
    right = [reference(changing(kind), [prompt], max_new_tokens=26)[0] for prompt in prompts]
    assert any(len(set(answer)) > 4 for answer in right)
    small = LMDrafter(Target(changing(kind, noisy_model)), target, TreeShape(4, 2, 8))
    for drafter in (OracleDrafter(target), tiny_head(target), small):
        decoder = FuzzyDecoder(target, drafter)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = decoder.generate(prompts, max_new_tokens=26, do_sample=False)
            alone = decoder.generate([prompts[1]], max_new_tokens=26, do_sample=False)
        assert made.sequences == right and made.stats.acceptance_length > 1
        assert alone.sequences == [right[1]]
    target.prefixes = PrefixCache(10**7)
    ends = []
    for length in (18, 24, 30):  # a text that stays short, one that grows long, and one that begins like it
        prompt = [*prompts[1], *right[1]][:length]
        ends.append(FuzzyDecoder(target, NoDrafter(target.vocab_size)).generate([prompt], max_new_tokens=4))
        assert ends[-1].sequences == reference(changing(kind), [prompt], max_new_tokens=4)
    assert [end.stats.total_cached_tokens >= 16 for end in ends] == [False, True, False]


def distribution_of_generate(kind: str, prompt: list[int], answers: list[tuple[int, ...]], k: int) -> np.ndarray:
    """The chance that sampling with top-k gives each answer, by the logits of ``generate`` along it."""

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = torch.tensor(answers)[:, ids.shape[1] - len(prompt)]
        return torch.full_like(scores, -math.inf).scatter(1, wanted[:, None], 0.0)

    made = changing(kind).generate(
        torch.tensor([prompt] * len(answers)), max_new_tokens=len(answers[0]), do_sample=False, output_logits=True,
        return_dict_in_generate=True, logits_processor=LogitsProcessorList([force]),
    )  # fmt: skip
    distribution = np.ones(len(answers))
    for step, logits in enumerate(made.logits):
        best = logits.topk(k)
        kept = torch.zeros_like(logits).scatter(1, best.indices, best.values.double().softmax(-1).float())
        distribution *= kept[torch.arange(len(answers)), torch.tensor(answers)[:, step]].numpy()
    return distribution


@pytest.mark.usefixtures("read_together")
@pytest.mark.parametrize(("kind", "rule"), [("phi3", "exact:block=true"), ("llama-dynamic", "exact")])
def test_sampled_answers_follow_generate_across_the_length_at_which_angles_change(kind: str, rule: str) -> None:
    prompt, rows = tiny_prompts((22,))[0], 300
    target, draft = Target(changing(kind)), Target(changing(kind, noisy_model))
    decoder = FuzzyDecoder(target, LMDrafter(draft, target, TreeShape(3, 2, 6)))
    torch.manual_seed(1)
    made = decoder.generate([prompt] * rows, max_new_tokens=5, do_sample=True, top_k=2, rule=rule)
    found = Counter(map(tuple, made.sequences))
    counts = np.array(list(found.values()))
    distribution = distribution_of_generate(kind, prompt, list(found), 2)
    assert distribution.min() > 0 and made.stats.acceptance_length > 1.2
    often = rows * distribution >= 5
    seen, wanted = counts[often], rows * distribution[often]  # the others, with those that were not seen, are one cell
    wanted, seen = np.append(wanted, rows - wanted.sum()), np.append(seen, rows - seen.sum())
    assert len(seen) > 10 and chisquare(seen, wanted).pvalue > 1e-3
    if kind == "phi3":  # a round that ends at the boundary may emit a draft last: statistics say whose
        last = [e for record in made.records for e in record.emissions if e.source == TokenOrigin.EXACT]
        assert last and all(emission.proposer >= 0 for emission in last)


def test_a_long_row_changes_no_score_of_a_short_one() -> None:
    rows = [(prompt, prompt[:6]) for prompt in tiny_prompts((30, 12, 40))]
    for kind in CHANGING:
        target = Target(changing(kind))
        alone = [mean_log_likelihoods(Target(changing(kind)), [row])[0] for row in rows]
        assert mean_log_likelihoods(target, rows) == pytest.approx(alone, abs=1e-5)


def test_beams_end_where_a_text_would_be_read_again() -> None:
    prompt = tiny_prompts((13,))[0]
    for kind in ("llama-longrope", "llama-dynamic"):
        made = FuzzyDecoder(Target(changing(kind)), NoDrafter(97)).generate([prompt], max_new_tokens=20, num_beams=2)
        assert made.sequences == reference(changing(kind), [prompt], max_new_tokens=20, num_beams=2)
    decoder = FuzzyDecoder(Target(changing("phi3")), NoDrafter(97))
    with pytest.warns(UserWarning, match=f"beams of .* end where text and answer have {ORIGINAL} tokens"):
        made = decoder.generate([prompt], max_new_tokens=20, num_beams=2)
    assert made.sequences == reference(changing("phi3"), [prompt], max_new_tokens=ORIGINAL - 13, num_beams=2)


def test_rows_of_training_end_where_angles_change_and_prompts_do_not(tmp_path: Path) -> None:
    for kind in ("phi3", "llama-dynamic"):
        (_, rope, longest), target = CHANGING[kind], Target(changing(kind))
        assert target.fixed_positions == ORIGINAL
        target.model.save_pretrained(tmp_path / kind)
        right = None if rope is DYNAMIC else longest  # no length is too long for dynamic NTK
        assert target.max_positions == context_of(str(tmp_path / kind)) == right


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
