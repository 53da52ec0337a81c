"""The public API on the real built-in model, and what loading a drafter may run into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsd_infer
from fsd_infer import EagleDrafter, FuzzyDecoder, NoDrafter, Target, TreeShape, load_drafter
from fsd_infer.chat.encoding import encode_chat, read_prompts
from fsd_infer.cpu.packing import can_pack, pack_linears
from fsd_infer.drafters import DraftRequest
from fsd_infer.errors import CheckpointError, FsdError, ModelLoadError, VocabularyMismatchError
from fsd_infer.heads.checkpoint import VERSION, save_head
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.targets.loading import load_target
from tests.families import VOCAB, tiny_model, tiny_prompts

FAST_PROMPTS, SLOW_PROMPTS, NEW_TOKENS = 4, 60, 40


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


OPTIONS: dict[str, Any] = dict(max_new_tokens=NEW_TOKENS, do_sample=False)


@pytest.fixture(scope="module")
def untouched() -> Any:
    """The same model as transformers loads it, without this package's replacements."""
    return load_target("smollm2-135m", dtype=torch.float32)[0]


def _generated(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [model.generate(torch.tensor([p]), **OPTIONS)[0, len(p) :].tolist() for p in prompts]


def _check(decoder: FuzzyDecoder, prompts: list[list[int]], expected: list[list[int]], batch: int) -> None:
    taus = []
    for start in range(0, len(prompts), batch):
        out = decoder.generate(prompts[start : start + batch], rule="exact", **OPTIONS)
        assert out.sequences == expected[start : start + batch]
        taus.append(out.stats.tau)
    assert sum(taus) / len(taus) > 1.5, "the shipped head was hardly ever accepted"


def test_greedy_equals_generate(decoder: FuzzyDecoder, untouched: Any, prompts: list[list[int]]) -> None:
    short = sorted(prompts, key=len)[:FAST_PROMPTS]
    expected = _generated(untouched, short)
    _check(decoder, short[:1], expected[:1], batch=1)
    _check(decoder, short[1:], expected[1:], batch=3)


@pytest.mark.slow
def test_greedy_equals_generate_on_sixty_prompts(
    decoder: FuzzyDecoder, untouched: Any, prompts: list[list[int]]
) -> None:
    assert len(prompts) == SLOW_PROMPTS
    expected = _generated(untouched, prompts)
    _check(decoder, prompts, expected, batch=1)
    _check(decoder, prompts, expected, batch=4)


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


def test_hook_of_transformers_uses_the_shipped_head(decoder: FuzzyDecoder) -> None:
    ids = torch.tensor([decoder.encode("Name three colours.")])
    model = decoder.target.model
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)
    ours = model.generate(
        ids,
        max_new_tokens=16,
        do_sample=False,
        custom_generate=fsd_infer.generate,
        drafter=decoder.drafter,
        rule="exact",
    )
    assert torch.equal(ours, expected)


def test_fuzzy_accepts_more_on_the_real_model(decoder: FuzzyDecoder, prompts: list[list[int]]) -> None:
    options = dict(max_new_tokens=24, do_sample=False)
    short = sorted(prompts, key=len)[:3]
    exact = decoder.generate(short, rule="exact", **options).stats
    fuzzy = decoder.generate(short, rule="fuzzy:js:0.5", **options).stats
    assert fuzzy.tau > exact.tau
    assert exact.divergence_spent == 0 < fuzzy.divergence_spent
    assert fuzzy.gate_accepted_fraction > 0 == exact.gate_accepted_fraction


@pytest.mark.skipif(not can_pack(), reason="needs oneDNN with bf16")
def test_packed_linears_agree_with_plain_ones() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    ids = torch.tensor(tiny_prompts((17,)))
    plain = model(ids).logits
    keys = list(model.state_dict())
    count = pack_linears(model)
    assert count == sum(isinstance(m, torch.nn.Linear) for m in model.modules()) > 10
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(ids).logits, plain, atol=2e-2 * float(plain.abs().max()), rtol=2e-2)
    assert pack_linears(tiny_model("llama")) == 0, "fp32 layers stay as they are"


# loading a drafter ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), name="tiny")


def _save(target: Target, directory: Path, **fingerprint: object) -> Path:
    head = EagleHead(EagleConfig.for_target(target, draft_vocab_size=32))
    return save_head(directory, head, {**target.fingerprint(), **fingerprint})


def test_saved_head_drafts(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(_save(target, tmp_path / "head"), target, TreeShape(2, 2, 5))
    assert isinstance(drafter, EagleDrafter)
    assert drafter.describe()["draft_vocab_size"] == 32
    out = FuzzyDecoder(target, drafter).generate(tiny_prompts(), max_new_tokens=8, do_sample=False)
    assert out.stats.drafter["name"] == "eagle"


def test_half_precision_keeps_rotary_frequencies(tmp_path: Path) -> None:
    half = Target(tiny_model("llama").to(torch.bfloat16), name="tiny")
    drafter = load_drafter(_save(half, tmp_path / "head"), half)
    assert isinstance(drafter, EagleDrafter)
    fresh = EagleHead(drafter.head.config)
    assert drafter.head.fc.weight.dtype == torch.bfloat16
    assert torch.equal(drafter.head.rotary_emb.inv_freq, fresh.rotary_emb.inv_freq)


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


@pytest.mark.parametrize("keep", [0, 7, 200, -10])
def test_truncated_head_is_named(target: Target, tmp_path: Path, keep: int) -> None:
    weights = _save(target, tmp_path / "head") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        load_drafter(tmp_path / "head", target)


def test_foreign_and_damaged_configs_are_named(target: Target, tmp_path: Path) -> None:
    config = _save(target, tmp_path / "head") / "config.json"
    text = config.read_text()
    config.write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="config.json"):
        load_drafter(tmp_path / "head", target)
    config.write_text(text.replace(f'"version": {VERSION}', '"version": 99'))
    with pytest.raises(CheckpointError, match="99"):
        load_drafter(tmp_path / "head", target)
    config.write_text(text.replace('"draft_vocab_size": 32', '"draft_vocab_size": 31'))
    with pytest.raises(CheckpointError, match="draft_ids"):
        load_drafter(tmp_path / "head", target)


def test_a_drafter_of_another_model_object_is_refused(target: Target) -> None:
    other = tiny_model("llama")
    drafter = EagleDrafter(EagleHead(EagleConfig.for_target(target)), target, TreeShape(2, 2, 4))
    with pytest.raises(ModelLoadError, match="another model"):
        other.generate(torch.tensor([[1, 2]]), max_new_tokens=2, custom_generate=fsd_infer.generate, drafter=drafter)


def test_tree_shapes_are_checked_and_small_vocabularies_work(target: Target) -> None:
    with pytest.raises(FsdError, match="depth"):
        TreeShape(0, 2, 4)
    head = EagleHead(EagleConfig.for_target(target, draft_vocab_size=3))
    for shape in (TreeShape(1, 10, 60), TreeShape(4, 1, 5), TreeShape(3, 10, 200), TreeShape(2, 2, 2)):
        drafter = EagleDrafter(head, target, shape)
        out = FuzzyDecoder(target, drafter).generate(tiny_prompts(), max_new_tokens=10, do_sample=False)
        plain = FuzzyDecoder(target, NoDrafter(VOCAB)).generate(tiny_prompts(), max_new_tokens=10, do_sample=False)
        assert out.sequences == plain.sequences


def test_wide_trees_of_a_real_head_are_connected(target: Target) -> None:
    drafter = EagleDrafter(EagleHead(EagleConfig.for_target(target)), target, TreeShape(4, 5, 20))
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    session = drafter.start(tokens[:, 0], DraftRequest(batch=2, slots=16))
    session.extend(tokens[:, 1:], torch.randn(2, 3, target.hidden_size), torch.tensor([3, 2]))
    tree = session.draft(torch.tensor([4, 7]))
    index = torch.arange(20)
    assert tree.tokens.shape == (2, 20) and tree.tokens[:, 0].tolist() == [4, 7]
    assert bool((tree.parents[:, 1:] < index[1:]).all())
    assert bool((tree.depths.gather(1, tree.parents)[:, 1:] + 1 == tree.depths[:, 1:]).all())
    assert bool((tree.ancestors.sum(-1) == tree.depths + 1).all())
    has_children = torch.zeros(2, 20, dtype=torch.bool).scatter_(1, tree.parents[:, 1:], True)
    assert torch.equal(tree.q_index >= 0, has_children)
    for row in range(2):
        pairs = list(zip(tree.parents[row, 1:].tolist(), tree.tokens[row, 1:].tolist(), strict=True))
        assert len(set(pairs)) == len(pairs), "siblings must differ"
        log_q = tree.q_logits[row].log_softmax(-1)
        scores = [0.0]
        for node in range(1, 20):
            parent = int(tree.parents[row, node])
            scores.append(scores[parent] + float(log_q[tree.q_index[row, parent], tree.tokens[row, node]]))
        root_children = log_q[tree.q_index[row, 0]].topk(5).values
        assert min(scores[1:]) <= float(root_children[0])
        best = [s for n, s in enumerate(scores) if n and int(tree.parents[row, n]) == 0]
        assert max(best) == pytest.approx(float(root_children[0]), abs=1e-4)
