"""The public API on the real built-in model, and what loading a drafter may run into."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer import FuzzyDecoder, NoDrafter, Target, load_drafter
from fsd_infer.chat.encoding import encode_chat, read_prompts
from fsd_infer.errors import CheckpointError, FsdError, ModelLoadError, VocabularyMismatchError
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.targets.loading import load_target
from tests.families import save_head, tiny_model, tiny_prompts

SLOW_PROMPTS = 60


@pytest.fixture(scope="module")
def decoder() -> FuzzyDecoder:
    """The built-in model with its shipped head, in fp32."""
    return FuzzyDecoder.from_pretrained("smollm2-135m", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(repo_root: Path, decoder: FuzzyDecoder) -> list[list[int]]:
    """Ids of prompts spread over the categories of Spec-Bench."""
    rows = list(read_prompts(repo_root / "data" / "spec_bench_dev.jsonl"))
    ids = [encode_chat(decoder.tokenizer, row.messages) for row in rows[:: len(rows) // SLOW_PROMPTS]]
    return [row[-400:] for row in ids][:SLOW_PROMPTS]


@pytest.mark.parametrize("count", [3, pytest.param(SLOW_PROMPTS, marks=pytest.mark.slow)])
def test_greedy_equals_generate(decoder: FuzzyDecoder, prompts: list[list[int]], count: int) -> None:
    """Against the model as transformers loads it, without this package's replacements."""
    options: dict[str, Any] = dict(max_new_tokens=40 if count > 4 else 24, do_sample=False)
    model = load_target("smollm2-135m", dtype=torch.float32)[0]
    asked, taus = sorted(prompts, key=len)[:count], []
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in asked]
    for batch in (1, 4) if count > 4 else (3,):
        for start in range(0, count, batch):
            out = decoder.generate(asked[start : start + batch], rule="exact", seed=0, **options)  # no clock
            assert out.sequences == expected[start : start + batch]
            taus.append(out.stats.tau)
    assert sum(taus) / len(taus) > 1.5, "the shipped head was hardly ever accepted"


def test_text_prompts_stop_strings_and_defaults(decoder: FuzzyDecoder) -> None:
    question = "What is the capital of France? Answer in one word."
    out = decoder.generate(question, max_new_tokens=24, do_sample=False)
    assert "Paris" in out.texts[0]
    assert out.stats.rows[0].finish_reason == "stop"
    assert decoder.encode(question) == encode_chat(decoder.tokenizer, [{"role": "user", "content": question}])
    assert decoder.encode(question, chat=False) == decoder.tokenizer(question).input_ids
    counting = "Count from one to ten in words."
    whole = decoder.generate(counting, max_new_tokens=40, do_sample=False)
    stop = whole.texts[0].split()[3]
    cut = decoder.generate(counting, max_new_tokens=40, do_sample=False, stop_strings=[stop])
    assert stop in cut.texts[0]
    assert whole.sequences[0][: len(cut.sequences[0])] == cut.sequences[0]
    assert stop not in decoder.tokenizer.decode(cut.sequences[0][:-1])
    with pytest.raises(FsdError, match="empty"):
        decoder.generate("  ", max_new_tokens=4)


@pytest.mark.parametrize("count", [1, 3])
def test_the_path_of_a_prompt(count: int) -> None:
    """Calls from ``generate`` to the model's forward, as docs/house.md has them: for prompts, then for rounds."""
    found: list[list[str]] = []

    def note(*_: Any) -> None:
        stack = [step for step in traceback.extract_stack() if "/fsd_infer/" in step.filename]
        found.append([step.name for step in stack if not step.name.startswith("<")])

    target = Target(tiny_model("llama"))
    decoder = FuzzyDecoder(target, NoDrafter(target.vocab_size))
    assert target.cache_bytes_per_token  # a forward of its own
    target.model.register_forward_pre_hook(note)
    decoder.generate(tiny_prompts()[:count], max_new_tokens=2, do_sample=False)
    request, model = ["generate", "decode_request", "decode"], ["forward", "_step"]
    rounds = [[*request, "verify", *model]]
    assert found == [[*request, "prefill", "read_prompts", "_read", *model]] * count + rounds


# loading a drafter ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), name="tiny")


def _save(target: Target, directory: Path, **fingerprint: object) -> Path:
    head = EagleHead(EagleConfig.for_target(target, draft_vocab_size=32))
    return save_head(directory, head, {**target.fingerprint(), **fingerprint})


def test_drafters_that_do_not_fit_are_named(target: Target, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model_type.*qwen2"):
        load_drafter(_save(target, tmp_path / "family", model_type="qwen2"), target)
    with pytest.raises(CheckpointError, match="hidden_size 64"):
        load_drafter(_save(target, tmp_path / "size", hidden_size=64), target)
    with pytest.raises(VocabularyMismatchError, match="vocabulary"):
        load_drafter(_save(target, tmp_path / "vocabulary", vocab_size=98), target)
    with pytest.raises(ModelLoadError, match="no drafter is shipped for tiny"):
        load_drafter("shipped", target)
    assert load_drafter(None, target).name == "lookup+recycle"
    with pytest.raises(FsdError):
        load_drafter(tmp_path / "nowhere", target)
