"""Small LMs of another vocabulary: which tokens are the same, what they read, and that the target's distribution
stays.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import LMDrafter, TranslatedDrafter
from fsd_infer.drafters.translated import TranslatedSession
from fsd_infer.drafters.translation import Translation
from tests import families
from tests.covering import covering
from tests.families import noisy_model, reference, tiny_model
from tests.rules_enumeration import check_distribution
from tests.rules_toy import CHAIN, CONTEXTS, PARENTS, Toy, V
from tests.text_toys import relabelled, tiny_sentencepiece, tiny_tokenizer

TEXTS = ["the cat sat", "what is the answer to that café", "it", "the end\n\nthe cat is on the mat and there it sat"]


@cache
def model_of(tokenizer: str, noisy: bool = False, **sizes: int) -> Target:
    made = {"bytes": tiny_tokenizer, "pieces": tiny_sentencepiece, "letters": lambda: tiny_sentencepiece(False)}
    words = made[tokenizer]()
    make = noisy_model if noisy else tiny_model
    return Target(make("llama", vocab_size=len(words), **sizes), words, name=tokenizer)


def prompts_of(target: Target) -> list[list[int]]:
    return [target.tokenizer(text).input_ids for text in TEXTS]


def test_tokens_are_matched_by_their_bytes() -> None:
    ours, theirs = model_of("pieces"), model_of("bytes")
    made = Translation(ours, theirs)
    own, other = ours.tokenizer.get_vocab(), theirs.tokenizer.get_vocab()
    pairs = dict(zip(made.ids.tolist(), made.own.tolist(), strict=True))
    assert made.ids.tolist() == sorted(pairs) and len(set(pairs.values())) == len(pairs)
    same = {"Ġthe": "▁the", "the": "the", "a": "a", "Ġ": "▁", "Ã": "<0xC3>", "A": "<0x41>", "Ċ": "<0x0A>"}
    for theirs_name, name in (same | {"<|end|>": "</s>"}).items():
        assert pairs[other[theirs_name]] == own[name], name
    assert other["<|start|>"] not in pairs and own["é"] not in pairs.values(), "é is two tokens of the target's"
    # duplicates add up, whatever the temperature
    logits = torch.randn(2, 3, len(own), generator=torch.Generator().manual_seed(0))
    q = logits.double().softmax(-1)
    q_shared = q[..., made.own]
    twin = made.ids.tolist().index(other["a"])
    q_shared[..., twin] += q[..., own["<0x61>"]]
    space = made.ids.tolist().index(other["Ġ"])
    q_shared[..., space] += q[..., own["<0x20>"]]
    for letter in "bcdefghijklmnopqrstuvwxyz":
        q_shared[..., made.ids.tolist().index(other[letter])] += q[..., own[f"<0x{ord(letter):02X}>"]]
    q_shared /= q_shared.sum(-1, keepdim=True)
    torch.testing.assert_close(made.restrict(logits).double().softmax(-1), q_shared, atol=1e-6, rtol=1e-5)


ORDER = torch.randperm(len(tiny_tokenizer()), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize(("shape", "temperature"), covering([TreeShape.chain(4), TreeShape(4, 3, 12)], [0.0, 0.7, 1.0]))
def test_other_ids_for_the_same_tokens_change_nothing(shape: TreeShape, temperature: float) -> None:
    """A small LM whose ids are shuffled drafts, draw by draw, what it drafts with the target's: in ragged batches."""
    target, small = model_of("bytes"), model_of("bytes", noisy=True)
    shuffled = noisy_model("llama", vocab_size=len(ORDER))
    for part in (shuffled.get_input_embeddings(), shuffled.get_output_embeddings()):
        part.weight.data = part.weight.data[ORDER]
    other = Target(shuffled, relabelled(small.tokenizer, ORDER))
    options: dict[str, Any] = dict(max_new_tokens=14, temperature=temperature, seed=5 if temperature else None)
    for rule in ("exact", "tilted:1"):
        made = [
            FuzzyDecoder(target, drafter).generate(prompts_of(target), rule, **options)
            for drafter in (LMDrafter(small, target, shape), TranslatedDrafter(other, target, shape))
        ]
        assert (
            made[0].sequences == made[1].sequences
            and made[0].stats.acceptance_length == made[1].stats.acceptance_length > 1.0
        )


@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [
        ("letters", "bytes", TreeShape(4, 3, 12)),
        ("pieces", "bytes", TreeShape.chain(4)),
        ("bytes", "pieces", TreeShape(4, 3, 12)),
    ],
)
def test_answers_are_those_of_generate(
    ours: str, theirs: str, shape: TreeShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the small LM's texts outgrow its cache, whose contents are those of a fresh reading."""
    target, small = model_of(theirs), model_of(ours)
    drafter = TranslatedDrafter(small, target, shape)
    caches: list[int] = []
    make = small.new_cache

    def counted(batch: int, slots: int) -> Any:
        caches.append(slots)
        return make(batch, slots)

    monkeypatch.setattr(small, "new_cache", counted)
    seen = families.recorded_drafts(
        TranslatedSession, lambda at: [row[:count].tolist() for row, count in zip(at.text, at.lengths)], monkeypatch
    )
    prompts = prompts_of(target)
    out = FuzzyDecoder(target, drafter).generate(prompts, max_new_tokens=24, do_sample=False)
    assert out.sequences == reference(target.model, prompts)
    assert (len(caches) > 1) == (theirs == "bytes")
    for texts, tree in seen[::3]:
        for row, text in enumerate(texts):
            wanted = drafter.translation.restrict(small.model(torch.tensor([text])).logits[0, -1])
            found = tree.q_logits[row, tree.q_index[row, 0]]
            torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)


def four_tokens() -> Translation:
    """The target says a, b, " the" and the end. Letter by letter, the small LM never drafts " the"."""
    ours, theirs = tiny_sentencepiece(False), tiny_tokenizer()
    names = theirs.get_vocab()
    order = [names[name] for name in ("a", "b", "Ġthe", "<|end|>")]
    order += sorted(set(names.values()) - set(order))
    target = Target(tiny_model("llama", vocab_size=V), relabelled(theirs, order))
    return Translation(Target(tiny_model("llama", vocab_size=len(ours)), ours), target)


@pytest.mark.parametrize("parents", [PARENTS, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("rule", ["exact", "fuzzy:js:0.08", "tilted:1", "draft-only"])
def test_the_distribution_of_sequences(rule: str, parents: list[int]) -> None:
    """Of every rule, with q over the shared tokens, above temperature 0."""
    made, generator = four_tokens(), torch.Generator().manual_seed(8)
    assert made.ids.tolist() == [0, 1, 3] and made.spell(2) == made.ours.spell(b" the")
    p = torch.randn(CONTEXTS, V, generator=generator) * 1.2
    q = made.restrict(torch.randn(CONTEXTS, made.ours.size, generator=generator))
    check_distribution(
        rule,
        Toy(p, q, sampled=parents is CHAIN, draft_ids=made.ids, parents=tuple(parents)),
        follows=parents is PARENTS,
    )
