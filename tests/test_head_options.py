"""Options of a head: trained, exported, loaded, decoded with; inner layers and ids of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_core.errors import CheckpointError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import EagleDrafter
from fsd_infer.drafters.vocabulary import ContextVocabulary
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_train.callbacks import ExportHead
from fsd_train.commands.export import load_module
from fsd_train.losses import LMHead
from fsd_train.models.eagle import EagleModule
from tests import train_toys
from tests.families import load_head, options_of, reference, save_head, tiny_model
from tests.test_training import fit, make, whole  # noqa: F401  (fixtures)

PROMPTS = [[5, 9, 11], [7, 3, 20, 33, 8]]
REDUCED, LONG = {"draft_vocab_size": 30}, {"draft_vocab_size": 30, "context_ids": True, "unroll_steps": 7}
EAGLE3: dict[str, Any] = {"noise": 0.0, "loss_args": {"w_feature": 0.0}, "unroll_steps": 3}
NORMS = {"layout": "eagle3", "fc_norm": True, "norm_output": True, "num_layers": 2, "fused_layers": [0]}
FUSED = {"num_layers": 2, "fused_layers": [0, 1]}
CASES: dict[str, dict[str, Any]] = {
    "layout eagle": {"head": {"layout": "eagle", "fc_bias": True}, **REDUCED},
    "layout eagle3": {"head": {"layout": "eagle3"}, **REDUCED, **EAGLE3},
    "layout eagle3, whole vocabulary": {"head": {"layout": "eagle3"}, **EAGLE3},
    "layout eagle3 with the target's LM head": {
        "head": {"layout": "eagle3", "own_lm_head": False, "intermediate_size": 16}, **REDUCED, "context_ids": True,
        "noise": 0.0,
    },
    "layout eagle3 with all norms": {
        "head": NORMS, **REDUCED, **EAGLE3, "unroll_steps": 7, "loss": "lk", "loss_args": {},
    },
    "all of our own layout": {
        "head": {**FUSED, "intermediate_size": 16, "final_norm": True, "feature_scale": True}, **LONG,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
def test_option_trains_exports_and_decodes(toys: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"head": {}, "draft_vocab_size": None, "unroll_steps": 1}
    module, data = make(toys, cached=False, **{**plain, **options})
    trainer = train_toys.trainer(tmp_path, 3, ExportHead(str(tmp_path / "head")), limit_val_batches=0)
    trainer.fit(module, data)
    assert trainer.global_step == 3
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert options_of(load_module(tmp_path / "last.ckpt").head) == options_of(module.head)
    target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    head = load_head(tmp_path / "head", target)
    assert options_of(head) == options_of(module.head)
    for name, value in options.get("head", {}).items():
        held = head.config.layer if name == "intermediate_size" else options_of(head)
        assert held[name] == value
    for name, value in module.head.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value, atol=1e-2, rtol=2**-7)
    expected = reference(target.model, PROMPTS, max_new_tokens=16)
    found = FuzzyDecoder(target, EagleDrafter(head, target)).generate(PROMPTS, max_new_tokens=16, do_sample=False)
    assert found.sequences == expected


def test_training_goes_on_from_a_head_and_may_widen_it(
    whole: tuple[Any, Any, Path],  # noqa: F811
    toys: Path,
    tmp_path: Path,
) -> None:
    trained = whole[0]
    trained.export(tmp_path / "head")
    wide = {"final_norm": True, "feature_scale": True, "num_layers": 2, "fused_layers": [0]}
    module, data = make(toys, cached=False, noise=0.0, initial_head=str(tmp_path / "head"), head=wide)
    module._frozen.target = trained._frozen.target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    module.target.capture_layers([0])
    module.configure_model()
    data.setup()
    batch = next(iter(data.train_dataloader()))
    first, second = trained.eval().draft(batch, 2), module.eval().draft(batch, 2)
    torch.testing.assert_close(first.estimates, second.estimates, atol=0.06, rtol=0.05)  # exported as bf16


def test_an_initial_head_of_other_width_is_refused(toys: Path, tmp_path: Path) -> None:
    target = Target.from_pretrained(str(toys / "target"))
    save_head(tmp_path, EagleHead(EagleConfig.for_target(target, final_norm=True)), target.fingerprint())
    module, _ = make(toys, initial_head=str(tmp_path), head={})
    with pytest.raises(CheckpointError, match=r"does not fit this one \(norm.weight\)"):
        module.configure_model()


OWN = 20  # ids 0, 2, 4 ...: the head lacks half of the prompts' ids


def make_drafter(target: Target, **options: Any) -> EagleDrafter:
    torch.manual_seed(0)
    head = EagleHead(EagleConfig.for_target(target, draft_vocab_size=OWN))
    head.set_draft_ids(2 * torch.arange(OWN))
    return EagleDrafter(head, target, TreeShape(depth=3, width=4, nodes=14), **options)


def vocabulary_of(target: Target, batch: int) -> ContextVocabulary:
    return make_drafter(target).context_vocabulary(batch)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_entries_are_the_lm_heads_rows(family: str) -> None:
    """gemma2 caps its logits: the rows that join must be capped as well."""
    target = Target(tiny_model(family))
    vocabulary = vocabulary_of(target, 1)
    features = torch.randn(1, 3, target.hidden_size)
    assert vocabulary.logits(features).shape[-1] == OWN
    for tokens, expected in (([3, 4, 51, 3], [3, 51]), ([51, 0], [3, 51]), ([7], [3, 51, 7])):
        vocabulary.extend([tokens])
        assert vocabulary.ids.tolist() == [*range(0, 2 * OWN, 2), *expected]
        torch.testing.assert_close(vocabulary.logits(features), target.lm_logits(features)[..., vocabulary.ids])


# training ------------------------------------------------------------------------------------------------------------


def made(toys: Path, **options: Any) -> EagleModule:
    """A module with a draft vocabulary of the ids 0 to 9."""
    return train_toys.ready(train_toys.eagle_module(toys, draft_vocab_size=10, eval_steps=2, **options))


def test_training_drafts_the_prompts_ids_too(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, module, batch = made(toys), made(toys, context_ids=True), train_toys.batch_of(toys)
    prompt = set(batch["input_ids"][~batch["loss_mask"].bool()].tolist())
    before, after = plain.draft(batch, 1), module.draft(batch, 1)
    own, joined = before.target_lm_head.ids.tolist(), after.target_lm_head.ids[10:].tolist()
    new = sorted(prompt - set(own))
    assert new and joined[: len(new)] == new, "the prompts' ids come first"
    assert sorted(own + joined) == list(range(module.target.vocab_size)), "a toy's vocabulary is smaller than a block"
    monkeypatch.setattr("fsd_train.models.eagle._CONTEXT_BLOCK", len(new) + 1)
    blocked = made(toys, context_ids=True).draft(batch, 1)
    assert blocked.target_lm_head.ids.tolist() == [*own, *joined[: len(new) + 1]]
    expected = LMHead.of(module.target)(after.features)[..., after.target_lm_head.ids]
    torch.testing.assert_close(after.target_lm_head(after.features), expected)
    assert module.head.draft_ids is not None and len(module.head.draft_ids) == 10, "the exported vocabulary is the same"
    out = module.loss(after)
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in module.head.layers.parameters())
