"""A small LM's trees and chains: how far it drafts, and that this changes no answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer.decoder import FuzzyDecoder, load_drafter
from fsd_infer.drafters import LMDrafter, TreeShape
from fsd_infer.drafters.lm import LMSession, warn_context
from fsd_infer.drafters.shape import DEFAULT_SHAPES, LARGEST_OF_LM
from fsd_infer.targets.target import Target
from tests.families import noisy_model, recorded_drafts, reference, tiny_model, tiny_prompts
from tests.text_toys import tiny_tokenizer

DEPTH = 5


@pytest.fixture
def models() -> tuple[Target, Target]:
    """A target, and a small model that agrees with it here and there and is sure of itself here and there."""
    model, small = tiny_model("llama"), noisy_model("llama")
    with torch.no_grad():
        for scaled in (model, small):
            scaled.lm_head.weight.mul_(8.0)
    return Target(model), Target(small)


@pytest.mark.parametrize("greedy", [True, False])
def test_drafting_ends_where_the_chain_is_not_believed_in(
    models: tuple[Target, Target], greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, small = models
    drawn = recorded_drafts(LMSession, lambda session: None, monkeypatch)
    options: dict[str, Any] = dict(max_new_tokens=40, do_sample=not greedy, seed=0)
    FuzzyDecoder(target, LMDrafter(small, target, TreeShape.chain(DEPTH, 0.999))).generate(
        tiny_prompts()[:1], **options
    )
    assert all(tree.tokens.shape[1] >= 2 for _, tree in drawn), "one draft where no chance is enough"
    drawn.clear()
    FuzzyDecoder(target, LMDrafter(small, target, TreeShape.chain(DEPTH, 0.3))).generate(tiny_prompts()[:1], **options)
    trees = [tree for _, tree in drawn]
    lengths = {tree.tokens.shape[1] - 1 for tree in trees}
    assert min(lengths) < DEPTH and len(lengths) > 1
    for tree in trees:
        assert tree.scores is not None
        chances = tree.scores[0].exp().tolist()  # of the chain up to each node, the root's 1
        log_q = tree.q_logits[0].log_softmax(-1).gather(1, tree.tokens[0, 1:, None]).sum()
        assert chances[-1] == pytest.approx(float(log_q.exp()), rel=1e-4)
        assert all(chance >= 0.3 for chance in chances[:-1])
        assert len(chances) == DEPTH + 1 or chances[-1] < 0.3


@pytest.mark.parametrize("shape", [TreeShape(3, 3, 8), TreeShape.chain(4)])
@pytest.mark.parametrize(("own", "theirs"), [(0, 21), (21, 0)])
def test_either_model_may_have_more_ids(own: int, theirs: int, shape: TreeShape) -> None:
    """Rows for padding, or special tokens that the other model lacks, even in the prompt."""
    tokenizer = tiny_tokenizer()
    small = Target(tiny_model("gpt2", vocab_size=len(tokenizer) + own), tokenizer)
    target = Target(tiny_model("llama", vocab_size=len(tokenizer) + theirs), tokenizer)
    decoder, prompts = FuzzyDecoder(target, LMDrafter(small, target, shape)), [[5, target.vocab_size - 1, 7], [9, 8]]
    options: dict[str, Any] = dict(max_new_tokens=20, do_sample=False)
    assert decoder.generate(prompts, **options).sequences == reference(target.model, prompts, **options)
    beams = decoder.generate(prompts, num_beams=2, **options).sequences
    assert beams == reference(target.model, prompts, num_beams=2, **options)
    for rule in ("exact", "tilted", "ensemble:0.5", "draft-only"):
        made = decoder.generate(prompts, rule, max_new_tokens=20, do_sample=True, temperature=3.0, seed=0)
        assert [len(tokens) for tokens in made.sequences] == [20, 20]


@pytest.mark.parametrize("rule", ["exact", "fuzzy:js:0.3"])
def test_stopping_changes_rounds_and_not_greedy_answers(models: tuple[Target, Target], rule: str) -> None:
    target, small = models
    prompts = tiny_prompts()
    found = {}
    for stop in (0.0, 0.5):
        decoder = FuzzyDecoder(target, LMDrafter(small, target, TreeShape.chain(DEPTH, stop)))
        found[stop] = decoder.generate(prompts, rule, max_new_tokens=24, do_sample=False)
        if rule == "exact":
            alone = [decoder.generate([prompt], rule, max_new_tokens=24, do_sample=False) for prompt in prompts]
            assert [made.sequences[0] for made in alone] == found[stop].sequences
    if rule == "exact":
        assert found[0.0].sequences == found[0.5].sequences
    assert found[0.0].stats.target_forwards < found[0.5].stats.target_forwards


def test_of_a_prompt_only_the_end_has_logits(models: tuple[Target, Target], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all of it they would fill the memory: 152,000 float32 numbers per token."""
    target, seen = models[0], []
    small = Target(target.model)
    forward = small.forward

    def watched(tokens: torch.Tensor, *args: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = forward(tokens, *args, **more)
        seen.append((tokens.shape[1], out[0].shape[1]))
        return out

    monkeypatch.setattr(small, "forward", watched)
    prompts = tiny_prompts()  # of 5 to 21 tokens
    for asked in (prompts, prompts[-1:]):
        decoder = FuzzyDecoder(target, LMDrafter(small, target, TreeShape.chain(DEPTH)))
        made = decoder.generate(asked, max_new_tokens=12, do_sample=False)
        assert made.sequences == reference(target.model, asked, max_new_tokens=12)
        assert made.stats.target_forwards <= 2 * len(asked), "a target that drafts for itself is always right"
        longest = max(map(len, asked))
        assert max(seen) == (longest, longest - min(map(len, asked)) + 1)
        seen.clear()


def test_a_name_gets_the_trees_of_its_device_or_the_one_that_is_asked_for(
    tmp_path: Path, models: tuple[Target, Target]
) -> None:
    target, small = models
    small.model.save_pretrained(tmp_path / "small")
    by_name = load_drafter(str(tmp_path / "small"), target)
    assert isinstance(by_name, LMDrafter) and by_name.auto is not None, "the default on a CPU"
    assert by_name.shape == LARGEST_OF_LM["cpu"]
    shaped = load_drafter(str(tmp_path / "small"), target, shape := TreeShape(3, 2, 8, 0.1))
    assert isinstance(shaped, LMDrafter) and shaped.shape == shape and shaped.auto is None
    assert json.loads(json.dumps(shaped.describe())) == dict(
        name="lm", nodes=8, depth=3, width=2, stop_below=0.1, model=str(tmp_path / "small")
    )
    grafted = load_drafter(f"{tmp_path / 'small'}+lookup+recycle", target)
    assert grafted.auto is not None and grafted.max_nodes == LARGEST_OF_LM["cpu"].nodes
    assert LMDrafter(small, target).shape == DEFAULT_SHAPES["cpu"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("batch", [1, 4])
def test_drafting_ends_with_the_small_models_context(
    family: str, batch: int, models: tuple[Target, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 5, 13, 9 and 21 tokens and answers of 40, with a drafter that has a context of 24."""
    context = 24
    target, small = models[0], Target(tiny_model(family, max_position_embeddings=context))
    decoder = FuzzyDecoder(target, LMDrafter(small, target, TreeShape.chain(DEPTH)))
    trees = recorded_drafts(LMSession, lambda session: session.lengths.tolist(), monkeypatch)
    warn_context.cache_clear()
    prompts = tiny_prompts()[:batch]
    with pytest.warns(UserWarning, match="context of 24") as warned:
        exact = decoder.generate(prompts, max_new_tokens=40, do_sample=False)
        decoder.generate(prompts, "fuzzy:js:0.4", max_new_tokens=40, do_sample=True, seed=1)
        gated = decoder.generate(prompts, "draft-only", max_new_tokens=40, do_sample=False)
    assert len([warning for warning in warned if "context of 24" in str(warning.message)]) == 1
    assert exact.sequences == reference(target.model, prompts, max_new_tokens=40)
    for lengths, tree in trees:
        assert tree.tokens.shape[1] == 1 + max(0, min(DEPTH, context + 1 - min(lengths)))
        for length, known in zip(lengths, (tree.q_index >= 0).sum(1).tolist(), strict=True):
            assert known == max(0, min(DEPTH, context + 1 - length))
    for prompt, record in zip(prompts, gated.records, strict=True):
        assert any(record.gates), "the chain is taken as far as it goes"
        assert not any(record.gates[context + 1 - len(prompt) :])
