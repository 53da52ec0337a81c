"""Trees and chains that a small LM drafts: answers stay, and its cache holds what a fresh session would read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsd_infer import FuzzyDecoder, LMDrafter, Target, TreeShape
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters import DraftRequest, GraftedDrafter
from fsd_infer.drafters.lm import LMSession, warn_context
from fsd_infer.tree import DraftTree
from tests.families import OracleDrafter, noisy_model, recorded_drafts, reference, tiny_model, tiny_prompts
from tests.text_toys import tiny_tokenizer
from tests.tree_rounds import take


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_the_cache_holds_what_a_fresh_session_reads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after branches that were not the first: in a graft with the right tokens, and in rows of several lengths."""
    torch.manual_seed(0)
    target = Target(tiny_model(family))
    small = LMDrafter(Target(noisy_model(family)), target, TreeShape(depth=4, width=3, nodes=12))
    moves: list[bool] = []
    move = SlotCache.move

    def counted(cache: SlotCache, *slots: torch.Tensor) -> None:
        moves.append(cache.config is small.model.config)
        move(cache, *slots)

    monkeypatch.setattr(SlotCache, "move", counted)
    drawn = recorded_drafts(
        LMSession, lambda at: [text[:length].tolist() for text, length in zip(at.text, at.lengths)], monkeypatch
    )
    drafter = GraftedDrafter(small, OracleDrafter(target), 24)
    FuzzyDecoder(target, drafter).generate(tiny_prompts(), max_new_tokens=24, do_sample=False)
    FuzzyDecoder(target, drafter).generate(tiny_prompts()[:1], max_new_tokens=24, do_sample=False)
    assert sum(moves) > 3, "keys and values of branches were moved"
    found = [(text, take(tree, torch.tensor([row]))) for texts, tree in drawn for row, text in enumerate(texts)]
    monkeypatch.undo()
    with torch.inference_mode():
        for text, tree in found[::3]:
            fresh = _fresh(small, text)
            assert tree.nodes == fresh.nodes and torch.equal(tree.q_index >= 0, fresh.q_index >= 0)
            ours, theirs = (each.q_logits[0, each.q_index[each.q_index >= 0]] for each in (tree, fresh))
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def _fresh(drafter: LMDrafter, text: list[int]) -> DraftTree:
    session = drafter.start(torch.tensor(text[:1]), DraftRequest(1, len(text) + drafter.max_depth + 1))
    session.extend(torch.tensor([text[1:]]), torch.empty(1, len(text) - 1, 0), torch.tensor([len(text) - 1]))
    return session.draft(torch.tensor(text[-1:]))


DEPTH = 5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("batch", [1, 4])
def test_drafting_ends_with_the_small_models_context(family: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 5, 13, 9 and 21 tokens and answers of 40, with a drafter that has a context of 24."""
    context = 24
    target, small = Target(tiny_model("llama")), Target(tiny_model(family, max_position_embeddings=context))
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
