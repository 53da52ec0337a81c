"""The public API on the real built-in model, and what loading a drafter may run into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_core.errors import FsdError
from fsd_core.text.encoding import encode_chat, read_prompts
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.targets.loading import load_target
from tests.families import tiny_model

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


@pytest.mark.parametrize("count", [2, pytest.param(SLOW_PROMPTS, marks=pytest.mark.slow)])
def test_greedy_equals_generate(decoder: FuzzyDecoder, prompts: list[list[int]], count: int) -> None:
    """Against the model as transformers loads it, without this package's replacements."""
    options: dict[str, Any] = dict(max_new_tokens=40 if count > 4 else 8, do_sample=False)
    model = load_target("smollm2-135m", dtype=torch.float32)[0]
    asked, taus = sorted(prompts, key=len)[:count], []
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in asked]
    for batch in (1, 4) if count > 4 else (2,):
        for start in range(0, count, batch):
            out = decoder.generate(asked[start : start + batch], rule="exact", seed=0, **options)  # no clock
            assert out.sequences == expected[start : start + batch]
            taus.append(out.stats.acceptance_length)
    assert sum(taus) / len(taus) > 1.5, "the shipped head was hardly ever accepted"


def test_text_prompts_stop_strings_and_defaults(decoder: FuzzyDecoder) -> None:
    question = "What is the capital of France? Answer in one word."
    out = decoder.generate(question, max_new_tokens=24, do_sample=False)
    assert "Paris" in out.texts[0]
    assert out.stats.rows[0].finish_reason == "stop"
    assert decoder.encode(question) == encode_chat(decoder.tokenizer, [{"role": "user", "content": question}])
    assert decoder.encode(question, chat=False) == decoder.tokenizer(question).input_ids
    counting = "Count from one to ten in words."
    whole = decoder.generate(counting, max_new_tokens=24, do_sample=False)
    stop = whole.texts[0].split()[3]
    cut = decoder.generate(counting, max_new_tokens=24, do_sample=False, stop_strings=[stop])
    assert stop in cut.texts[0]
    assert whole.sequences[0][: len(cut.sequences[0])] == cut.sequences[0]
    assert stop not in decoder.tokenizer.decode(cut.sequences[0][:-1])
    with pytest.raises(FsdError, match="empty"):
        decoder.generate("", max_new_tokens=4)


def test_quality_works_at_once(decoder: FuzzyDecoder) -> None:
    """The shipped head's own calibration names the rules; of other temperatures it says that it has none."""
    options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, seed=0)
    question = "What is the capital of France?"
    lossy, kept, exact = (decoder.generate(question, quality=quality, **options) for quality in (0.8, 0.9, 1.0))
    assert [made.stats.rule["rule"] for made in (lossy, kept, exact)] == ["fly", "exact", "exact"]
    assert lossy.stats.rule["exact_sentence_start"] == 5 and kept.sequences == exact.sequences
    with pytest.raises(FsdError, match=r"nothing was calibrated for temperature 1 \(there is: 0\)"):
        decoder.generate(question, quality=0.8, max_new_tokens=2, do_sample=True, temperature=1.0)


# loading a drafter ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), name="tiny")


def test_names_that_load(target: Target, tmp_path: Path) -> None:
    (tmp_path / "a+b.jsonl").write_text('{"prompt_ids": [1, 2], "response_ids": [3, 4, 5, 6]}\n')
    both = load_drafter(f"recycle+memory:{tmp_path / 'a+b.jsonl'}", target)
    assert both.name == "recycle+memory" and both.describe()["side"]["corpus"] > 5
    assert load_drafter(None, target).name == "lookup+recycle"
    assert load_drafter("self:layers=0+lookup", target).bounds is not None
    for name in ("self:layers=0-1", "self:bits=4:layers=1"):
        drafter = load_drafter(name, target, TreeShape.chain(3))
        assert drafter.describe()["model"] == name


NAMES: dict[str, str] = {
    "shipped": "no drafter is shipped for tiny", "shipped+lookup": "no drafter is shipped for tiny",
    "nowhere": "unknown drafter 'nowhere'", "nowhere+lookup": "unknown drafter 'nowhere'",
    "+lookup": "names no drafter", "lookup:keep": "lookup takes no option", "recycle:x": "recycle takes no option",
    "memory:": "is not a name", "memory:nowhere.jsonl": "nowhere.jsonl: No such file",
    "recycle+memory+memory:keep": "memory twice", "self:": "cannot use", "self:bits": "cannot use",
    "self:bits=1": "2 to 8", "self:bits=9": "2 to 8", "self:bits=x": "2 to 8", "self:bits=3:bits=3": "cannot use",
    "self:a=3": "a=3", "self:layers=": "cannot use", "self:layers=2-1": "nor a range",
    "self:layers=a": "'a' is neither a layer", "self:layers=1-2-3": "nor a range", "self:layers=1,1": "once",
    "self:layers=1,0": "ascending", "self:layers=0-3": "has no layer 2", "self:layers=0-99999": "nor a range",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_that_mean_nothing(name: str, target: Target) -> None:
    with pytest.raises(FsdError, match=NAMES[name]) as refused:
        load_drafter(name, target)
    assert "\n" not in str(refused.value)
    if name.startswith("self:") and "has no layer" not in NAMES[name]:  # told before a target is loaded
        for given in (f"{name}+lookup", Path(name)):
            with pytest.raises(FsdError, match=NAMES[name]):
                FuzzyDecoder.from_pretrained("no/target", given)


def test_end_tokens_that_the_vocabulary_lacks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """No answer ends with them: it would run to its limit, and nobody would know why."""
    model = tiny_model("llama")
    Target(model)
    assert not caplog.text
    model.generation_config.eos_token_id = [2, 10**6]
    Target(model)
    assert "ends answers with token 1000000, which its vocabulary of" in caplog.text
