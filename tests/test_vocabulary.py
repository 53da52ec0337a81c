"""A reduced draft vocabulary extended by the ids of each text: in decoding, in training, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer import EagleDrafter, FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import DraftRequest
from fsd_infer.drafters.eagle import EagleSession
from fsd_infer.drafters.vocabulary import ContextVocabulary
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_train.data import AnswersDataModule
from fsd_train.losses import LMHead
from fsd_train.models.eagle import EagleModule
from tests.families import reference, save_head, tiny_model, tiny_prompts
from tests.train_toys import options as module_options

OWN = 20  # ids 0, 2, 4 ...: half of the prompts' ids are none of the head's


def make_drafter(target: Target, **options: Any) -> EagleDrafter:
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(target, draft_vocab_size=OWN))
    head.set_draft_ids(2 * torch.arange(OWN))
    return EagleDrafter(head, target, TreeShape(depth=3, width=4, nodes=14), **options)


def vocabulary_of(target: Target, batch: int) -> ContextVocabulary:
    made = make_drafter(target).context_vocabulary(batch)
    assert made is not None
    return made


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_entries_are_the_lm_heads_rows(family: str) -> None:
    """gemma2 caps its logits: the rows that join must be capped as well."""
    target = Target(tiny_model(family))
    vocabulary = vocabulary_of(target, 1)
    features = torch.randn(1, 3, target.hidden_size)
    assert vocabulary.logits(features).shape[-1] == OWN
    for tokens, expected in (([3, 4, 51, 3], [3, 51]), ([51, 0], [3, 51]), ([7], [3, 51, 7])):
        vocabulary.extend(torch.tensor([tokens]), torch.tensor([len(tokens)]))
        assert vocabulary.ids.tolist() == [*range(0, 2 * OWN, 2), *expected]
        torch.testing.assert_close(vocabulary.logits(features), target.lm_logits(features)[..., vocabulary.ids])


def test_trees_hold_ids_of_the_text() -> None:
    """The head's estimate is replaced by the target's own feature: the tree must then hold what the target wants."""
    target = Target(tiny_model("llama"))
    with torch.no_grad():
        target.model.get_output_embeddings().weight.mul_(8)
    wanted = 33
    feature = target.model.get_output_embeddings().weight[wanted].detach()
    tokens, features = torch.tensor([[wanted, 2]]), torch.randn(1, 2, target.hidden_size)
    for joined in (True, False):
        session = make_drafter(target, context_ids=joined).start(torch.tensor([4]), DraftRequest(1, 32))
        assert isinstance(session, EagleSession)
        session.extend(tokens, features, torch.tensor([2]))
        session.last = feature[None]
        tree = session.draft(torch.tensor([2]))
        assert (wanted in tree.tokens[0].tolist()) == joined
        assert tree.draft_ids is not None and tree.q_logits.shape[-1] == len(tree.draft_ids) == OWN + joined


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_answers_stay_the_targets_and_do_not_depend_on_the_batch(family: str) -> None:
    model = tiny_model(family)
    target, prompts = Target(model), tiny_prompts()
    decoder = FuzzyDecoder(target, make_drafter(target))
    exact: dict[str, Any] = dict(max_new_tokens=24, do_sample=False)
    assert decoder.generate(prompts, **exact).sequences == reference(model, prompts)
    fuzzy = {**exact, "rule": "fuzzy:js:inf"}
    batch = decoder.generate(prompts, **fuzzy)
    assert batch.stats.gate_open_fraction > 0.3
    assert batch.sequences == [decoder.generate([prompt], **fuzzy).sequences[0] for prompt in prompts]
    whole = EagleDrafter(EagleHead(EagleConfig.for_target(target)), target)
    assert whole.context_vocabulary(1) is None  # there is nothing to join


# training ------------------------------------------------------------------------------------------------------------


def made(toys: Path, **options: Any) -> tuple[EagleModule, dict[str, Any]]:
    """A module with a draft vocabulary of the ids 0 to 9, and a batch."""
    data = AnswersDataModule([str(toys / "answers.jsonl")], validation_fraction=0.2, batch_tokens=256)
    chosen = module_options(draft_vocab_size=10, eval_steps=2, **options)
    module = EagleModule(str(toys / "target"), **chosen)
    module._frozen.target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    module.configure_model()
    data.setup()
    return module, next(iter(data.train_dataloader()))


def test_training_drafts_the_prompts_ids_too(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, batch = made(toys)
    module, _ = made(toys, context_ids=True)
    prompt = set(batch["input_ids"][~batch["loss_mask"].bool()].tolist())
    before, after = plain.draft(batch, 1), module.draft(batch, 1)
    assert before is not None and after is not None and before.head.ids is not None and after.head.ids is not None
    own, joined = before.head.ids.tolist(), after.head.ids[10:].tolist()
    new = sorted(prompt - set(own))
    assert new and joined[: len(new)] == new, "the prompts' ids come first"
    assert sorted(own + joined) == list(range(module.target.vocab_size)), "a toy's vocabulary is smaller than a block"
    monkeypatch.setattr("fsd_train.models.eagle._CONTEXT_BLOCK", len(new) + 1)
    blocked = made(toys, context_ids=True)[0].draft(batch, 1)
    assert blocked is not None and blocked.head.ids is not None
    assert blocked.head.ids.tolist() == [*own, *joined[: len(new) + 1]]
    expected = LMHead.of(module.target)(after.features)[..., after.head.ids]
    torch.testing.assert_close(after.head(after.features), expected)
    assert module.head.draft_ids is not None and len(module.head.draft_ids) == 10, "the exported vocabulary is the same"
    out = module.loss(after)
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in module.head.layers.parameters())


def test_an_initial_head_is_validated_over_its_own_ids(toys: Path, tmp_path: Path) -> None:
    target = Target.from_pretrained(str(toys / "target"))
    head = EagleHead(EagleConfig.for_target(target, draft_vocab_size=OWN))
    head.set_draft_ids(1 + 2 * torch.arange(OWN))
    save_head(tmp_path / "head", head, target.fingerprint())
    module = EagleModule(str(toys / "target"), draft_vocab_size=OWN, initial_head=str(tmp_path / "head"))
    module.configure_model()
    assert torch.equal(module.head.draft_ids, head.draft_ids)
