"""Small LMs of another vocabulary: equal tokens are translated, others drafted as text, and the distribution stays."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from fsd_core.errors import FsdError, VocabularyMismatchError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import LMDrafter, TextDrafter, TranslatedDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.drafters.text import TextSession
from fsd_infer.drafters.translated import TranslatedSession
from fsd_infer.drafters.translation import Translation
from tests import families
from tests.covering import covering
from tests.families import noisy_model, reference, tiny_model
from tests.rules_toy import p_value
from tests.text_toys import relabelled, tiny_sentencepiece, tiny_tokenizer


@pytest.mark.parametrize(
    ("ours", "theirs", "depth"), [("letters", "bytes", 4), ("pieces", "letters", 7), ("bytes", "pieces", 5)]
)
def test_answers_are_those_of_generate(ours: str, theirs: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged batches; and what is drafted is the small LM's own text after all of its tokens, read anew."""
    target, small = model_of(theirs), model_of(ours)
    drafter = TextDrafter(small, target, TreeShape.chain(depth))
    seen = families.recorded_drafts(
        TextSession, lambda at: [row[:count].tolist() for row, count in zip(at.text, at.lengths)], monkeypatch
    )
    prompts = prompts_of(target)
    out = FuzzyDecoder(target, drafter).generate(prompts, max_new_tokens=24, do_sample=False)
    assert out.sequences == reference(target.model, prompts)
    translation, checked = drafter.translation, 0
    for texts, tree in seen[::4]:
        for row, text in enumerate(texts):
            raw = b""
            for _ in range(depth):
                token = int(small.model(torch.tensor([text])).logits[0, -1].argmax())
                if token not in translation.ours.raw:
                    break
                text, raw = [*text, token], raw + translation.ours.raw[token]
            drafted = [
                int(tree.tokens[row, node]) for node in range(1, tree.tokens.shape[1]) if tree.is_draft[row, node]
            ]
            found = b"".join(translation.theirs.raw.get(token, b"") for token in drafted)
            assert found == raw[: len(found)] and (len(drafted) == depth or len(found) == len(raw))
            checked += bool(drafted)
    assert checked > 4


@pytest.mark.parametrize(("ours", "theirs"), [("letters", "bytes"), ("bytes", "pieces")])
def test_paths_of_a_tree_are_split_and_joined_again(ours: str, theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ragged batches: no token twice below a node, paths that part, and no fewer accepted than by a chain."""
    target, small, shape = model_of(theirs), model_of(ours), TreeShape(4, 3, 12)
    prompts, accepted = prompts_of(target), []
    seen = families.recorded_drafts(TextSession, lambda at: None, monkeypatch)
    for given in (TreeShape.chain(4), shape):
        out = FuzzyDecoder(target, TextDrafter(small, target, given)).generate(
            prompts, max_new_tokens=24, do_sample=False
        )
        assert out.sequences == reference(target.model, prompts)
        accepted.append(out.stats.acceptance_length)
    wide = 0
    for _, tree in seen:
        for row in range(len(tree.tokens)):
            drafts = tree.is_draft[row].nonzero()[:, 0].tolist()
            edges = [(int(tree.parents[row, node]), int(tree.tokens[row, node])) for node in drafts]
            assert len(set(edges)) == len(edges) < shape.max_nodes and all(
                above < x for x, (above, _) in zip(drafts, edges)
            )
            wide += len({above for above, _ in edges}) < len(edges)
    assert wide > 4 and accepted[1] >= accepted[0]


def test_what_the_small_lm_reads_is_split_as_its_tokenizer_would() -> None:
    """Also when the target emits letter by letter, so that its last tokens change again and again."""
    target, small = model_of("letters"), model_of("pieces")
    drafter = TextDrafter(small, target, TreeShape.chain(3))
    words, written = target.tokenizer, "the cat is at the cat"
    tokens = words(written, add_special_tokens=False).input_ids
    request = families.DraftRequest(batch=1, cache_slots=4, max_length=64)
    session = drafter.start(torch.tensor([tokens[0]]), request)
    session.extend_on_host([tokens[1:4]])
    for token in tokens[4:]:
        session.extend_on_host([[token]])
        session.draft(torch.tensor([token]))  # reads the text
    own = small.tokenizer(written).input_ids
    assert session.text[0, : session.lengths[0]].tolist() == own
    fresh = small.model(torch.tensor([own])).logits[0, -1]
    session.cached -= 1  # the last token is read again
    again, _ = session._read_roots()
    torch.testing.assert_close(again[0, 0], fresh, atol=2e-3, rtol=1e-3)


def three_words() -> Target:
    """A target that says a, b, " the" and a special token, which does not end its texts."""
    theirs = tiny_tokenizer()
    names = theirs.get_vocab()
    order = [names[name] for name in ("a", "b", "Ġthe", "<|end|>")]
    order += sorted(set(names.values()) - set(order))
    return Target(tiny_model("llama", vocab_size=4, scale=2.0), relabelled(theirs, order))


@pytest.mark.usefixtures("read_together")
def test_the_sampled_distribution() -> None:
    """Of whole answers, by enumeration."""
    target, small = three_words(), model_of("letters")
    drafter = TextDrafter(small, target, TreeShape.chain(3))
    allowed = torch.full((small.vocab_size,), -torch.inf)
    allowed[small.tokenizer.convert_tokens_to_ids(["a", "b", "▁", "t", "h", "e"])] = 0.0
    drafter.to_draft_vocabulary = lambda logits: logits + allowed  # type: ignore[method-assign]
    prompt, temperature = [0, 1, 2, 0], 0.7
    texts = torch.cartesian_prod(*[torch.arange(4)] * 3)
    asked = torch.cat([torch.tensor([prompt]).expand(len(texts), -1), texts[:, :2]], 1)
    with torch.no_grad():
        p = (target.model(asked).logits[:, len(prompt) - 1 :].double() / temperature).softmax(-1)
    distribution = p.gather(2, texts[..., None]).prod(1)[:, 0].numpy()
    out = FuzzyDecoder(target, drafter).generate([prompt] * 1500, max_new_tokens=3, temperature=temperature, seed=4)
    assert out.stats.acceptance_length > 1.1, "drafts are accepted"
    assert p_value(np.array(out.sequences) @ [16, 4, 1], distribution) > 1e-4


def few_letters() -> Any:
    """A tokenizer of ten letters and the end of a text."""
    names = ["<unk>", "</s>", "▁", *"abcdehist"]
    tokenizer = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def test_a_small_lm_that_cannot_spell_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of which it reads nothing at all."""
    monkeypatch.setattr("fsd_infer.drafters.translation.MIN_SHARED", 0.01)
    target, words = model_of("pieces"), few_letters()
    drafter = TranslatedDrafter(Target(noisy_model("llama", vocab_size=len(words)), words), target, TreeShape(3, 2, 6))
    silent = [token for token in range(target.vocab_size) if not drafter.translation.spell(token)]
    assert len(silent) > target.vocab_size // 2
    prompts = prompts_of(target)
    made = FuzzyDecoder(target, drafter).generate(prompts, max_new_tokens=16, do_sample=False).sequences
    assert made == reference(target.model, prompts, max_new_tokens=16)
    assert set(silent) & {token for row in made for token in row}


LOADED = {  # which is chosen, the target, its small LM, the line that says so, and what cannot draft in its place
    TextDrafter: ("pieces", few_letters, "drafts text, as it has only 12 of pieces's", 0),
    TranslatedDrafter: ("bytes", tiny_sentencepiece, "tokens", 4),
}


@pytest.mark.parametrize("kind", LOADED)
def test_a_small_lm_of_another_vocabulary_is_loaded_with_a_line(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text where hardly a token is shared; by its name, with other drafters, beams and requests' trees."""
    name, make, said, few = LOADED[kind]
    target, words = model_of(name), make()
    noisy_model("llama", vocab_size=len(words)).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    drafter = load_drafter(str(tmp_path), target)
    assert type(drafter) is kind
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "another vocabulary" in line]
    assert said in line and str(tmp_path) in line
    prompts, shape = prompts_of(target), TreeShape(4, 3, 9)
    for spelt in (str(tmp_path), f"text:{tmp_path}", f"{tmp_path}+lookup"):
        decoder = FuzzyDecoder(target, load_drafter(spelt, target, shape))
        made = decoder.generate(prompts, max_new_tokens=12, do_sample=False, tree=None if "+" in spelt else "3,2,6")
        assert made.sequences == reference(target.model, prompts, max_new_tokens=12)
    with pytest.warns(UserWarning, match="drafts below one text only"):
        made = FuzzyDecoder(target, drafter).generate(prompts[:1], max_new_tokens=4, num_beams=2, do_sample=False)
    assert made.sequences == reference(target.model, prompts[:1], max_new_tokens=4, num_beams=2)
    with pytest.raises(VocabularyMismatchError, match="tokenizers of both"):
        kind(Target(model_of("letters").model), target)
    if kind is TextDrafter:
        assert drafter.bounds is None
        with pytest.raises(FsdError, match="no trees to choose"):
            load_drafter(str(tmp_path), target, "auto")
    else:
        with pytest.raises(VocabularyMismatchError, match="share only 2 of [0-9]+ tokens"):
            kind(Target(tiny_model("llama", vocab_size=few), words), target)


# tokens that are the same ---------------------------------------------------------------------------------------------


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
    ("ours", "theirs", "shape"), [("letters", "bytes", TreeShape(4, 3, 12)), ("bytes", "pieces", TreeShape.chain(4))]
)
def test_answers_with_other_ids_are_those_of_generate(
    ours: str, theirs: str, shape: TreeShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the small LM's texts outgrow its cache, whose contents are those of a fresh reading."""
    target, small = model_of(theirs), model_of(ours)
    drafter = TranslatedDrafter(small, target, shape)
    monkeypatch.setattr(small, "new_cache", Mock(wraps=small.new_cache))
    seen = families.recorded_drafts(
        TranslatedSession, lambda at: [row[:count].tolist() for row, count in zip(at.text, at.lengths)], monkeypatch
    )
    prompts = prompts_of(target)
    out = FuzzyDecoder(target, drafter).generate(prompts, max_new_tokens=24, do_sample=False)
    assert out.sequences == reference(target.model, prompts)
    assert (small.new_cache.call_count > 1) == (theirs == "bytes")  # type: ignore[attr-defined]
    for texts, tree in seen[::3]:
        for row, text in enumerate(texts):
            wanted = drafter.translation.restrict(small.model(torch.tensor([text])).logits[0, -1])
            found = tree.q_logits[row, tree.q_index[row, 0]]
            torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)
