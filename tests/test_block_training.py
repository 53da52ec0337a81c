"""Training of block heads: blocks in a batch are those of decoding, and what is exported loads and decodes exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fsd_core.errors import DataError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import BlockDrafter, DraftRequest
from fsd_infer.drafters.loading import load_drafter
from fsd_train.cli import main as cli
from fsd_train.data.features import FeatureStore, open_cache
from fsd_train.losses.base import LossOutput
from fsd_train.losses.confidence import with_confidence
from fsd_train.models import BlockModule, BlockOptions
from fsd_train.models.block import plan_blocks
from tests import train_toys
from tests.families import reference
from tests.test_recipes import DSPARK
from tests.train_toys import VOCAB, answers_of, batch_of, in_bf16, logged, ready
from tests.train_toys import options as module_options

BLOCK = 4
KINDS = [("vanilla", False), ("gated", True), ("rnn", True), ("none", True)]  # of a Markov head; whether one is sure


def make(toys: Path, markov: Any = "vanilla", confidence: bool = False, **given: Any) -> BlockModule:
    chosen = module_options(**{"lr": 5e-3, "warmup_steps": 2, "loss": "kl_pq", **given})
    options = BlockOptions(rank=8, layers=[0, 1], mask_token_id=3, markov=markov, confidence=confidence)
    return BlockModule(str(toys / "target"), options, block_size=BLOCK, blocks=24, **chosen)


def whole(toys: Path, *kind: Any) -> BlockModule:
    module = ready(make(toys, *kind))
    module.target.capture_layers([0, 1])
    return module


@pytest.mark.parametrize(("markov", "confidence"), KINDS)
def test_blocks_of_a_batch_are_those_of_decoding(toys: Path, markov: str, confidence: bool) -> None:
    module = whole(toys, markov, confidence).eval()
    for table in module.tables[2:]:
        torch.nn.init.normal_(table)
    batch, target = batch_of(toys), module.target
    drafts = module.draft(batch, BLOCK)
    plan = plan_blocks(batch["loss_mask"][0], BLOCK, 24, 0.8, torch.Generator().manual_seed(module._draw_seed(0)))
    logits = drafts.draft_lm_head(drafts.estimates)
    drafter = module.make_drafter(target, TreeShape.chain(BLOCK))
    ends = batch["lengths"].cumsum()
    compared = 0
    for source, row in zip(plan.output.tolist(), range(len(plan.output))):
        root, slot = int(plan.roots[source // BLOCK]), source % BLOCK
        begin = int(max([0, *ends[ends <= root].tolist()]))
        text = batch["input_ids"][0, begin : root + slot + 1]
        session = drafter.start(text[:1], DraftRequest(1, 64))
        known = text[: root - begin + 1]
        with torch.no_grad():
            session.extend(known[None, 1:], target.features(known[None])[:, :-1], torch.tensor([len(known) - 1]))
            state = session._begin(known[-1:])
            for at in range(slot + 1):
                session._survival = torch.zeros(1, 1) if confidence else None
                wanted, state = session._step(at, text[None, root - begin + at :][:, :1], state)
        torch.testing.assert_close(logits[row], wanted[0, 0], rtol=1e-4, atol=1e-4)
        if drafts.confidence is not None:
            sure = torch.nn.functional.logsigmoid(drafts.confidence[row])
            torch.testing.assert_close(session._survival[0, 0], sure, rtol=1e-4, atol=1e-4)
        compared += 1
    assert compared > 24 and (drafts.rows.step == plan.output % BLOCK).all()
    assert (drafts.rows.chains >= 0).all() and drafts.rows.chains.shape[0] == BLOCK
    # a row of slot k and one of slot 0 at the same position share the target's feature
    assert drafts.features.shape[0] == len(drafts.rows.position) == int(drafts.rows.position_index.max()) + 1


def test_confidence_learns_the_chance_of_acceptance(toys: Path) -> None:
    """Σ min(p, q) of each row; and it teaches the rest of the head, but the chances have no gradient of their own."""
    module = whole(toys, "gated", True)
    drafts = module.draft(batch_of(toys), BLOCK)
    p = drafts.target_lm_head(drafts.features).softmax(-1)[drafts.rows.position_index]
    chances = torch.minimum(p, drafts.draft_lm_head(drafts.estimates).softmax(-1)).sum(-1).detach()
    sure = drafts.confidence.sigmoid()
    each = -(chances * sure.log() + (1 - chances) * (1 - sure).log())
    wanted = (each * drafts.weights).sum() / drafts.rows.total
    out = with_confidence(drafts.confidence, drafts, LossOutput(torch.zeros(())))
    torch.testing.assert_close(out.loss, wanted, rtol=1e-4, atol=1e-5)
    out.loss.backward()
    assert module.head.confidence_head["proj"].weight.grad.abs().sum() > 0
    assert module.head.lm_head is not None and module.head.lm_head.weight.grad is None


def exported_as(kind: tuple[str, bool]) -> str:
    """The layout of what is exported."""
    return f"{'dflash' if kind[0] == 'none' else 'dspark'} of speculators"


@pytest.mark.parametrize(
    ("layout", "vocabulary", "kind"),
    [(exported_as(kind), size, kind) for size, kind in [(None, KINDS[0]), *((40, kind) for kind in KINDS[1:])]],
)
def test_a_fit_learns_and_its_export_decodes_exactly(
    toys: Path, tmp_path: Path, layout: str, vocabulary: int | None, kind: tuple[str, bool]
) -> None:
    module = make(toys, *kind, draft_vocab_size=vocabulary)
    run = train_toys.trainer(tmp_path, 30, every=30, limit_val_batches=0)
    run.fit(module, answers_of(toys, batch_tokens=400))
    losses = logged(tmp_path, "loss")
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    if kind[1]:
        gaps = logged(tmp_path, "confidence_gap")
        assert sum(gaps[-5:]) < 0.8 * sum(gaps[:5])
    place = module.export(tmp_path / "head")
    target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    drafter = load_drafter(str(place), target, TreeShape(3, 2, 6, 0.3))
    assert isinstance(drafter, BlockDrafter)
    found, wanted = drafter.head.config, module.head.config
    assert (found.depth, found.correction, found.confidence) == (BLOCK, wanted.correction, wanted.confidence)
    for name, value in module.head.state_dict().items():
        if name != "draft_ids":
            torch.testing.assert_close(drafter.head.state_dict()[name], in_bf16(value))
    ids = module.head.draft_ids
    assert (drafter.draft_ids is None) == (ids is None) and (ids is None or torch.equal(drafter.draft_ids, ids))
    prompts = [[5, 9, 11], [7, 3, 20, 33, 8]]
    made = FuzzyDecoder(target, drafter).generate(prompts, max_new_tokens=12, do_sample=False)
    assert made.sequences == reference(target.model, prompts, max_new_tokens=12)
    config = json.loads((place / "config.json").read_text())
    assert config["training"]["steps"] == 30 and layout == f"{config['speculators_model_type']} of speculators"


def test_the_recipe_trains_and_exports(toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load(DSPARK.read_text(encoding="utf-8"))
    recipe["trainer"] |= {"max_steps": 4, "val_check_interval": 4, "precision": "32-true", "accelerator": "cpu"}
    recipe["trainer"]["logger"]["init_args"]["save_dir"] = str(tmp_path / "logs")
    checkpoints, export = (callback["init_args"] for callback in recipe["trainer"]["callbacks"])
    checkpoints["dirpath"] = str(tmp_path)
    export |= {"directory": str(tmp_path / "head"), "every_n_train_steps": 2}
    recipe["model"]["init_args"] |= {"target": str(toys / "target"), "draft_vocab_size": 40}
    recipe["model"]["init_args"]["head"]["layers"] = [0, 1]
    features = {"features": str(tmp_path / "features"), "batch_tokens": 256}
    recipe["data"] |= {"train_files": [str(toys / "answers.jsonl")], "validation_fraction": 0.2, **features}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for command in ("estimate", "cache-features", "fit"):
        assert cli([command, "--config", str(tmp_path / "recipe.yaml")]) == 0
    assert FeatureStore(tmp_path / "features").layers == [0, 1]
    assert cli(["estimate", "--on-paper", "--config", str(tmp_path / "recipe.yaml")]) == 2
    assert cli(["export", str(tmp_path / "head"), str(tmp_path / "other"), "--to", "vllm"]) == 2
    said = capsys.readouterr().err
    assert "trains no EAGLE head, and only those are estimated" in said and "that is one of kind block" in said
    target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    assert load_drafter(str(tmp_path / "head"), target, None).describe()["block_size"] == 6
    assert logged(tmp_path / "logs", "val_loss")


def test_losses_of_features_are_refused(toys: Path) -> None:
    assert type(BlockModule(str(toys / "target")).loss).__name__ == "DivergenceLoss"
    with pytest.raises(DataError, match="a block head's states are no features. Set w_feature to 0"):
        make(toys, loss="eagle")


def test_features_that_lack_a_layer_are_refused(toys: Path) -> None:
    module = make(toys)
    run = train_toys.trainer(toys / "lacking", 1)
    with pytest.raises(DataError, match=r"lack \[0, 1\]. Cache them again with `--layers 0 1`"):
        run.fit(module, answers_of(toys, features=str(toys / "features")))


def test_features_of_the_last_layer_from_after_the_norm_are_refused(toys: Path, tmp_path: Path) -> None:
    target = whole(toys).target
    header = open_cache(tmp_path, target).directory / "index.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), "version": 2}))
    with pytest.raises(DataError, match="the last layer's output after the final norm"):
        open_cache(tmp_path, target)
    header.write_text(json.dumps({**json.loads(header.read_text()), "layers": [0]}))
    target.captured_layers = (0,)
    assert open_cache(tmp_path, target).layers == [0], "other layers are the same in both versions"


def test_a_batch_without_answers_runs(toys: Path) -> None:
    module = whole(toys)
    batch = batch_of(toys, 2)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    drafts = module.draft(batch, BLOCK)
    assert len(drafts.estimates) == 0 and VOCAB == drafts.target_lm_head.weight.shape[0]
    assert module.loss(drafts).loss == 0
