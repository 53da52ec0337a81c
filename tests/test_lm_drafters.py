"""Small LMs and parts of the target as drafters: their trees, what they share, and that answers stay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsd_infer import FsdError, FuzzyDecoder, Target, TreeShape
from fsd_infer.backends.cpu.packing import packed_products
from fsd_infer.cli.main import main
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters import DraftRequest, GraftedDrafter, LMDrafter, NoDrafter, lm
from fsd_infer.drafters.from_target import FromTarget, round_weight, spelled, with_layers
from fsd_infer.drafters.lm import LMSession, warn_context
from fsd_infer.drafters.loading import choose_trees, load_drafter
from fsd_infer.drafters.text import TextDrafter
from fsd_infer.drafters.translated import TranslatedDrafter
from fsd_infer.targets.weights import weight_rows
from fsd_infer.trees.tree import DraftTree
from tests import families
from tests.bench_toys import save_toy
from tests.families import VOCAB, OracleDrafter, noisy_model, reference, tiny_model, tiny_prompts
from tests.kernel_toys import needs_kernels
from tests.text_toys import relabelled, tiny_tokenizer
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
    drawn = families.recorded_drafts(
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


@pytest.mark.parametrize("seed", range(4))
def test_siblings_with_one_token_keep_their_slots(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn nodes may repeat a sibling's token. Slots of later nodes were counted without it."""
    torch.manual_seed(0)
    target = Target(tiny_model("mistral"))
    small = LMDrafter(Target(noisy_model("mistral")), target, TreeShape(depth=4, width=3, nodes=12))
    options: dict[str, Any] = dict(rule="exact:block=false", temperature=0.9, seed=seed, max_new_tokens=40)
    answers = []
    for moves in (True, False):  # False: all are read again
        monkeypatch.setattr(lm, "is_host", lambda device, moves=moves: moves)
        answers.append(FuzzyDecoder(target, small).generate(tiny_prompts(), **options).sequences)
    assert answers[0] == answers[1]


def _fresh(drafter: LMDrafter, text: list[int]) -> DraftTree:
    session = drafter.start(torch.tensor(text[:1]), DraftRequest(1, len(text) + drafter.max_depth + 1))
    session.extend(torch.tensor([text[1:]]), torch.empty(1, len(text) - 1, 0), torch.tensor([len(text) - 1]))
    return session.draft(torch.tensor(text[-1:]))


DEPTH, CHAIN = 5, TreeShape.chain(3)


@pytest.mark.parametrize(("family", "batch"), [("gpt2", 1), ("llama", 4)])
def test_drafting_ends_with_the_small_models_context(family: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 5, 13, 9 and 21 tokens and answers of 40, with a drafter that has a context of 24."""
    context = 24
    target, small = Target(tiny_model("llama")), Target(tiny_model(family, max_position_embeddings=context))
    decoder = FuzzyDecoder(target, LMDrafter(small, target, TreeShape.chain(DEPTH)))
    trees = families.recorded_drafts(LMSession, lambda session: session.lengths.tolist(), monkeypatch)
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
        assert any(record.relaxed), "the chain is taken as far as it goes"
        assert not any(record.relaxed[context + 1 - len(prompt) :])


@pytest.mark.parametrize(("own", "theirs", "shape"), [(0, 21, TreeShape(3, 3, 8)), (21, 0, TreeShape.chain(4))])
def test_either_model_may_have_more_ids(own: int, theirs: int, shape: TreeShape) -> None:
    """Rows for padding, or special tokens that the other model lacks, even in the prompt."""
    tokenizer = tiny_tokenizer()
    small = Target(tiny_model("gpt2", vocab_size=len(tokenizer) + own), tokenizer)
    target = Target(tiny_model("llama", vocab_size=len(tokenizer) + theirs), tokenizer)
    decoder, prompts = FuzzyDecoder(target, LMDrafter(small, target, shape)), [[5, target.vocab_size - 1, 7], [9, 8]]
    options: dict[str, Any] = dict(max_new_tokens=10, do_sample=False)
    assert decoder.generate(prompts, **options).sequences == reference(target.model, prompts, **options)
    beams = decoder.generate(prompts, num_beams=2, **options).sequences
    assert beams == reference(target.model, prompts, num_beams=2, **options)
    for rule in ("exact", "tilted", "ensemble:0.5", "draft-only"):
        made = decoder.generate(prompts, rule, max_new_tokens=10, do_sample=True, temperature=3.0, seed=0)
        assert [len(tokens) for tokens in made.sequences] == [10, 10]


def test_a_tokenizer_may_have_more_tokens_than_its_model() -> None:
    """As one with added tokens, of a small LM that was not resized; what it reads is left out."""
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
    other = relabelled(tokenizer, list(range(len(tokenizer)))[::-1])
    prompt, options = tokenizer("the cat <|start|> is there 日本")["input_ids"], dict(max_new_tokens=8, do_sample=False)
    for kind in (TranslatedDrafter, TextDrafter):
        small = kind(Target(tiny_model("gpt2", vocab_size=len(tokenizer) - 60), other), target, CHAIN)
        made = FuzzyDecoder(target, small).generate([prompt], **options)
        assert made.sequences == reference(target.model, [prompt], **options)


@pytest.mark.parametrize("tree", [CHAIN, TreeShape(3, 3, 8), "auto"])
def test_a_small_lm_of_nan_is_named(tree: TreeShape | str) -> None:
    target, broken = Target(tiny_model("llama")), tiny_model("llama")
    broken.model.layers[0].mlp.up_proj.weight.data.fill_(math.nan)
    drafter = LMDrafter(Target(broken), target, None if tree == "auto" else tree)
    drafter = choose_trees(drafter, target) if tree == "auto" else drafter
    for sampled in (False, True):
        with pytest.raises(FsdError, match="the drafter's logits in row 0 are NaN"):
            FuzzyDecoder(target, drafter).generate([[1, 2, 3]], "tilted", max_new_tokens=8, do_sample=sampled, seed=0)


LAYERS = 3


def toy(family: str, **options: Any) -> Target:
    return Target(tiny_model(family, **{"num_hidden_layers": 7 if family == "gemma3_text" else LAYERS, **options}))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_parts_of_any_target_draft_for_it(family: str) -> None:
    """All layers draft what the target says, and what is left out or rounded changes drafts alone."""
    target = toy(family)
    count = int(target.config.num_hidden_layers)
    prompts = tiny_prompts((5, 13))
    expected = reference(target.model, prompts, max_new_tokens=8)
    for name in (f"self:layers=0-{count - 1}", "self:layers=0,2:bits=2"):
        drafter = load_drafter(name, target, CHAIN)
        out = FuzzyDecoder(target, drafter).generate(prompts, max_new_tokens=8, do_sample=False)
        assert out.sequences == expected, name
        if "bits" not in name:
            assert out.stats.acceptance_length == pytest.approx(7 / 2), "two rounds after the prompt's: always right"
        own = {id(parameter) for parameter in drafter.model.model.parameters()}
        shared = {id(parameter) for parameter in target.model.parameters()}
        assert own <= shared or "bits" in name, "nothing is copied"
    assert reference(target.model, prompts[:1], max_new_tokens=8) == expected[:1], "the target is as it was"


@needs_kernels
def test_a_packed_target_drafts_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made before the target is packed or after, with freed weights: the same drafts."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    target = Target(tiny_model("llama", num_hidden_layers=LAYERS, **sizes).to(torch.bfloat16))
    expected = {
        name: layer.weight.clone() for name, layer in target.model.named_modules() if isinstance(layer, nn.Linear)
    }
    decoder = FuzzyDecoder(target, NoDrafter(VOCAB))
    decoder.prepare(release=True)
    prompts = tiny_prompts()
    plain = decoder.generate(prompts, max_new_tokens=12, do_sample=False).sequences
    whole = decoder.load_drafter("self:layers=0-2", CHAIN)
    assert {id(p) for p in packed_products(whole.modules()[0])} == {id(p) for p in packed_products(target.model)}
    out = decoder.generate(prompts, drafter=whole, max_new_tokens=12, do_sample=False)
    assert out.sequences == plain and out.stats.acceptance_length >= 2.5
    rounded = decoder.load_drafter("self:layers=0,2:bits=3", CHAIN)
    assert decoder.generate(prompts, drafter=rounded, max_new_tokens=12, do_sample=False).sequences == plain
    for place, number in enumerate((0, 2)):
        layer = rounded.model.decoder.layers[place].mlp.up_proj  # type: ignore[index, union-attr]
        wanted = round_weight(expected[f"model.layers.{number}.mlp.up_proj"], 3)
        torch.testing.assert_close(weight_rows(layer, None), wanted)
    head = target.model.get_output_embeddings()
    torch.testing.assert_close(weight_rows(head, None), expected["lm_head"], msg="the target keeps its weights")


def test_names() -> None:
    assert FromTarget.parse("self:layers=0-2,7,9-9") == FromTarget((0, 1, 2, 7, 9))
    assert spelled((0, 1, 2, 7, 9, 10)) == "self:layers=0-2,7,9-10"
    target = toy("llama")
    for numbers in ([1, 0], [1, 1], []):
        with pytest.raises(FsdError, match="each once and in ascending order"):
            with_layers(target, numbers, "some")
    target.config.num_kv_shared_layers = 1
    with pytest.raises(FsdError, match="depend on their numbers"):
        load_drafter("self:layers=0", target)


def test_rounded_weights_have_few_values_and_small_errors() -> None:
    torch.manual_seed(0)
    weight, errors = torch.randn(24, 192) * torch.rand(24, 1), []
    for bits in range(2, 9):
        made = round_weight(weight, bits)
        assert max(len(group.unique()) for group in made.view(-1, 64)) <= 2**bits
        errors.append(float((made - weight).square().mean()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-3 * errors[0]


def test_which_layers_to_skip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer that adds nothing goes first, and nothing is lost by it."""
    toys = save_toy(tmp_path)
    model = Target.from_pretrained(str(toys.target), dtype=torch.float32).model
    idle = model.model.layers[1]
    for product in (idle.self_attn.o_proj, idle.mlp.down_proj):
        product.weight.data.zero_()
    model.save_pretrained(toys.target)
    words = ["skip-layers", "--target", str(toys.target), "--prompts", str(toys.prompts), "--dtype", "fp32"]
    words += ["--device", "cpu", "--max-new-tokens", "8", "--layers"]
    count = len(model.model.layers)
    assert main([*words, str(count - 1)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{count} layers, agreement 1.000: self:layers=0-{count - 1}")
    left = tuple(number for number in range(count) if number != 1)
    assert second == f"{count - 1} layers, agreement 1.000: {spelled(left)}"
    assert main([*words, str(count)]) == 2 and "--layers goes from 1" in capsys.readouterr().err


def test_rounding() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 192) * torch.rand(24, 1)
    errors = []
    for bits in range(2, 9):
        made = round_weight(weight, bits)
        groups = weight.view(-1, 64)
        assert max(len(group.unique()) for group in made.view(-1, 64)) <= 2**bits
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = (high - low) / (2**bits - 1)
        nearest = ((groups - low) / scale).round() * scale + low
        errors.append(float((made - weight).square().mean()))
        assert errors[-1] < (0.8 if bits < 4 else 1.0) * float((nearest - groups).square().mean()), bits
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-3 * errors[0]
    constant = torch.full((3, 40), 0.5)
    assert torch.equal(round_weight(constant, 2), constant)
