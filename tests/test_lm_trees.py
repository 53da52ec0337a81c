"""Trees that a small LM drafts: answers stay, trees branch, and its cache holds what a fresh session would read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsd_infer import FuzzyDecoder, LMDrafter, Target, TreeShape
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters import Drafter, DraftRequest, GraftedDrafter, LookupDrafter, RecycleDrafter
from fsd_infer.drafters.lm import LMSession, _Expanded, warn_context
from fsd_infer.drafters.loading import choose_trees
from fsd_infer.tree import DraftTree
from tests.families import VOCAB, OracleDrafter, noisy_model, recorded_drafts, reference, tiny_model, tiny_prompts
from tests.tree_rounds import take

SHAPE = TreeShape(depth=4, width=3, nodes=12)


def make(family: str = "llama", grafted: bool = False, shape: TreeShape = SHAPE) -> tuple[Target, Drafter]:
    target, small = Target(tiny_model(family)), Target(noisy_model(family))
    made: Drafter = LMDrafter(small, target, shape)
    if grafted:
        made = GraftedDrafter(GraftedDrafter(made, LookupDrafter(VOCAB), 14), RecycleDrafter(VOCAB), 16)
    return target, made


@pytest.mark.parametrize("grafted", [False, True])
@pytest.mark.parametrize("auto", [False, True])
def test_answers_are_the_targets(auto: bool, grafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    target, drafter = make(grafted=grafted)
    if auto:
        choose_trees(drafter)
    trees = recorded_drafts(LMSession, lambda session: None, monkeypatch)
    prompts = tiny_prompts()
    expected = reference(target.model, prompts)
    for count in (1, 4):
        made = FuzzyDecoder(target, drafter).generate(prompts[:count], max_new_tokens=24, do_sample=False)
        assert made.sequences == expected[:count]
    parents = [row for _, tree in trees for row in tree.parents.tolist()]
    assert auto or any(len(set(row[1:])) < len(row) - 1 for row in parents), "a node has two children"


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_the_cache_holds_what_a_fresh_session_reads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after branches that were not the first: in a graft with the right tokens, and in rows of several lengths."""
    torch.manual_seed(0)
    target, small = make(family)
    assert isinstance(small, LMDrafter)
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


def test_expanded_nodes_are_found_by_the_text() -> None:
    known = _Expanded()
    known.add([5, 6], [0, 0])  # slots 0 and 1
    known.add([7, 7, 8], [1, 0, 1])  # 6-7, 5-7, 6-8
    assert known.along([6, 8, 1]) == [1, 4] and known.along([5, 7]) == [0, 3] and known.along([9]) == []
    known.clear()
    assert known.along([6]) == []


def test_trees_end_with_the_small_models_context() -> None:
    context = 24
    target, small = Target(tiny_model("llama")), Target(tiny_model("llama", max_position_embeddings=context))
    expected = reference(target.model, tiny_prompts(), max_new_tokens=40)
    warn_context.cache_clear()
    with pytest.warns(UserWarning, match="context of 24"):
        for drafter in (LMDrafter(small, target, SHAPE), choose_trees(LMDrafter(small, target))):
            for count in (4, 1):
                prompts, options = tiny_prompts()[:count], dict[str, Any](max_new_tokens=40, do_sample=False)
                decoder = FuzzyDecoder(target, GraftedDrafter(drafter, LookupDrafter(VOCAB)))
                decoder.drafter.auto = drafter.auto
                assert decoder.generate(prompts, **options).sequences == expected[:count]
                gated = decoder.generate(prompts, "draft-only", **options)
                for prompt, record in zip(prompts, gated.records, strict=True):
                    assert not any(record.gates[context + 1 - len(prompt) :])
