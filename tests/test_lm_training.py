"""Training of small LMs as drafters: losses reach all their weights, what is exported loads and decodes exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_core.divergence import divergence
from fsd_core.errors import FsdError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import LMDrafter
from fsd_infer.drafters.from_target import FromTarget
from fsd_infer.drafters.lm import load_lm
from fsd_infer.targets.adapters import is_adapter
from fsd_train.callbacks import DecodedTau, ExportHead
from fsd_train.cli import main as cli
from fsd_train.models import LMModule
from tests import train_toys
from tests.families import reference, tiny_head, tiny_model
from tests.train_toys import VOCAB, assert_same, fit_command, in_recipe, save_toy_target, toy_target
from tests.train_toys import options as module_options

STEPS = 4
LORA = {"r": 4, "lora_alpha": 8}
LAYER = "self:layers=1"


@pytest.fixture(scope="module")
def toys(toys: Path) -> Path:
    """With another model as drafter/."""
    save_toy_target(toys / "drafter", seed=1)
    return toys


def make(toys: Path, **options: Any) -> LMModule:
    values = {"lr": 3e-3, "warmup_steps": 1, "on_policy_tokens": 10, **options}
    drafter = values.pop("drafter", str(toys / "drafter"))
    return LMModule(str(toys / "target"), drafter, **module_options(**values))


def fit(toys: Path, out: Path, *callbacks: Any, ckpt: Path | None = None, **options: Any) -> LMModule:
    made = train_toys.trainer(out, STEPS, *callbacks, val_check_interval=STEPS)
    module = make(toys, **options)
    made.fit(module, train_toys.answers_of(toys, batch_tokens=160), ckpt_path=ckpt, weights_only=True)
    return module


def assert_decodes_exactly(toys: Path, drafter: Path) -> None:
    target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    prompts = [[5, 9, 11], [7, 3, 20, 33, 8]]
    decoder = FuzzyDecoder(target, LMDrafter(load_lm(drafter, target), target, TreeShape.chain(3)))
    made = decoder.generate(prompts, max_new_tokens=12, do_sample=False)
    assert made.sequences == reference(target.model, prompts, max_new_tokens=12)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 15)[None]).logits


def test_rows_are_the_contexts_that_decoding_drafts_in(toys: Path) -> None:
    module, batch = train_toys.ready(make(toys)), train_toys.batch_of(toys)
    drafts = module.draft(batch, 2)
    mask = batch["loss_mask"]
    theirs, target = (logits_apart(model, batch) for model in (module.head.model, module.target.model))
    for row, i in enumerate(drafts.rows.position.tolist()):
        assert mask[0, i + 1] and mask[0, i + 2]  # the root, which the target gave, and what is drafted after it
        torch.testing.assert_close(drafts.estimates[row], theirs[i + 1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(drafts.target_lm_head(drafts.features[row]), target[i + 1], atol=1e-4, rtol=1e-4)
    answers = answers_in(batch)
    assert len(drafts.weights) == int((answers - 1).sum())  # the first token comes with the prompt
    assert int((drafts.weights - 1).sum()) == int((answers - 2).sum())  # the weight of the second step


def gradients(module: LMModule, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in module.head.named_parameters()}


def logits_apart(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """A model's logits [M, V] of a batch, of each conversation apart."""
    return torch.cat([model(text).logits[0] for text in batch["input_ids"].split(batch["lengths"].tolist(), 1)])


def answers_in(batch: dict[str, Any]) -> torch.Tensor:
    """Answer tokens of each conversation."""
    return torch.stack([mask.sum() for mask in batch["loss_mask"][0].split(batch["lengths"].tolist())])


def logits_at(model: Any, batch: dict[str, Any], positions: torch.Tensor) -> torch.Tensor:
    return logits_apart(model, batch)[positions + 1]


@pytest.mark.parametrize("size", [VOCAB, 40])
def test_gradients_are_those_of_the_plain_formula(toys: Path, size: int) -> None:
    """Also where the loss looks at some of the tokens only, within which p and q are renormalised."""
    module, batch = train_toys.ready(make(toys, loss="js")), train_toys.batch_of(toys)
    kept = torch.arange(VOCAB - size, VOCAB)
    module.head.draft_ids = None if size == VOCAB else kept
    drafts = module.draft(batch, 1)
    p = logits_at(module.target.model, batch, drafts.rows.position).detach()
    q = logits_at(module.head.model, batch, drafts.rows.position)
    loss, plain = module.loss(drafts).loss, divergence("js")(p[:, kept], q[:, kept]).mean()
    assert float(loss) == pytest.approx(float(plain), rel=1e-4)
    torch.testing.assert_close(gradients(module, loss), gradients(module, plain), atol=1e-5, rtol=1e-3)
    assert all(parameter.grad.any() for parameter in module.head.parameters())


def test_on_policy_answers_are_the_drafters_own(toys: Path) -> None:
    module, batch = train_toys.ready(make(toys, on_policy=1.0, on_policy_temperature=1e-4)), train_toys.batch_of(toys)
    torch.manual_seed(0)
    fresh = module.on_policy_batch(batch)
    assert "features" not in fresh and fresh["ids"] == batch["ids"]
    texts, masks, drawn, drawn_masks = (
        given[name][0].split(given["lengths"].tolist())
        for given in (batch, fresh)
        for name in ("input_ids", "loss_mask")
    )
    for row in range(len(batch["ids"])):
        first = int(masks[row].argmax())
        prompt, answer = texts[row][:first].tolist(), drawn[row][first:].tolist()
        assert drawn[row][:first].tolist() == prompt
        assert drawn_masks[row].tolist() == [0] * first + [1] * len(answer)
        (own,) = reference(module.head.model, [prompt], max_new_tokens=10)
        assert answer == own[: len(answer)]  # so cold a draw is an argmax
        assert len(answer) == 10 or answer[-1] == 2
    assert module.head.model.training
    module.on_policy = 0.0
    drafts = module.draft(fresh, 1)
    assert len(drafts.weights) == int((answers_in(fresh)[: len(fresh["ids"])] - 1).sum())


def test_on_policy_share_is_that_of_batches(toys: Path) -> None:
    module, batch = train_toys.ready(make(toys, on_policy=0.4, on_policy_tokens=1)), train_toys.batch_of(toys, 1)
    sampled = 0
    for number in range(40):
        module.seed = number
        state = torch.get_rng_state()
        fresh = module.maybe_on_policy(batch)
        assert torch.equal(torch.get_rng_state(), state)
        sampled += fresh is not batch
        torch.rand(1)  # draws depend on nothing that ran before
        again = module.maybe_on_policy(batch)
        assert (again is batch) == (fresh is batch) and torch.equal(again["input_ids"], fresh["input_ids"])
    assert 8 <= sampled <= 26


@pytest.mark.parametrize("options", [{}, {"lora": LORA}, {"drafter": LAYER}], ids=["full", "lora", "a layer"])
def test_what_is_trained_is_exported_and_decodes(toys: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    lora = options.get("lora")
    callback = DecodedTau(["exact", "fuzzy:js:0.4"], prompts=2, max_new_tokens=8)
    made, export = tmp_path / "model", ExportHead(str(tmp_path / "model"))
    module = fit(toys, tmp_path, export, callback, on_policy=0.5, lr=0.05 if lora else 3e-3, **options)
    checkpoint = tmp_path / "ckpt" / f"step={STEPS}.ckpt"
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert state and all("lora_" in name for name in state) == is_adapter(made) == bool(lora)
    target, base = (Target.from_pretrained(str(toys / name), dtype=torch.float32) for name in ("target", "drafter"))
    base = FromTarget.parse(LAYER).of(target, LAYER) if "drafter" in options else base
    loaded, trained = load_lm(made, target), logits_of(module.head.model.eval())
    assert not any("lora" in name for name, _ in loaded.model.named_parameters())  # merged
    exact = {"atol": 0.02, "rtol": 1e-3} if lora else {"atol": 0.2, "rtol": 0.05}  # stored in bf16
    torch.testing.assert_close(logits_of(loaded.model), trained, **exact)
    assert loaded.config.num_hidden_layers == base.config.num_hidden_layers
    assert float((logits_of(base.model) - trained).abs().max()) > 0.01
    torch.testing.assert_close(
        logits_of(train_toys.ready(make(toys, **options)).head.model.eval()), logits_of(base.model)
    )
    assert_decodes_exactly(toys, made)
    record = json.loads((made / "training.json").read_text())
    assert record["steps"] == STEPS and record["hyperparameters"]["on_policy"] == 0.5
    # the callback's drafter is the one that was trained
    decoder = FuzzyDecoder(target, module.make_drafter(target))
    prompts = [ids for _, ids in callback._numbered(module.trainer, target)]
    tau = decoder.generate(prompts, rule="exact", max_new_tokens=8, do_sample=False).stats.acceptance_length
    assert callback.points["decoded_tau/exact"][STEPS] == pytest.approx(tau)
    # the command writes the same from a checkpoint
    assert cli(["export", str(checkpoint), str(tmp_path / "again")]) == 0
    assert torch.equal(logits_of(load_lm(tmp_path / "again", target).model), logits_of(loaded.model))


FSD_MIX = [{"name": "fsd", "args": {"threshold": [0.1, 0.3]}}, {"name": "eagle", "args": {"w_feature": 0.0}}]


@pytest.mark.parametrize("options", [
    {"lora": {**LORA, "lora_dropout": 0.1}, "optimizer": "muon"},
    {"loss": FSD_MIX, "unroll_steps": 3},
], ids=["lora", "mix"])  # fmt: skip
def test_resumed_run_ends_with_the_same_weights(toys: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    whole = fit(toys, tmp_path / "whole", on_policy=0.5, **options)
    again = fit(toys, tmp_path / "again", on_policy=0.5, ckpt=tmp_path / "whole" / "ckpt" / "step=2.ckpt", **options)
    assert_same(again.state_dict(), whole.state_dict())


WRONG = [
    ({"loss": [{"name": "tv"}, {"name": "eagle"}]}, "kl_pq"),
    ({"loss": "adaspec", "loss_args": {"reference": "x", "loss": "kl_qp", "loss_args": {"w_feature": 1.0}}},
     "w_feature"),
    ({"loss": FSD_MIX, "unroll_steps": 1}, "Set model.unroll_steps to 2 to 7"),
    ({"lora": {"rank": 4}}, "no option rank"),
    ({"lora": LORA, "drafter": LAYER}, "Leave model.lora out"),
    ({"drafter": f"{LAYER}:bits=3"}, "Leave bits out"),
    ({"loss_vocab_size": 40}, "answer_counts"),
    ({"lora": {"r": 0}}, "model.lora: `r` should be a positive integer"),
    ({"drafter": "recurrent"}, "recurrent has recurrent layers, with which a small LM does not draft"),
    ({"drafter": "head"}, "head is a draft head. Start from it with fsd_train.models.EagleModule"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "problem"), WRONG)
def test_bad_options_are_named(options: dict[str, Any], problem: str, toys: Path, here: Path) -> None:
    tiny_model("mamba2", vocab_size=VOCAB).save_pretrained("recurrent")
    tiny_head(toy_target()).head.save_pretrained(Path("head"), torch.bfloat16)
    with pytest.raises(FsdError, match=problem):
        make(toys, **options).configure_model()


def test_recipe_selects_it_by_class_path(toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [in_recipe("ExportHead", directory=tmp_path / "model")]
    trainer = {"max_steps": 2, "limit_val_batches": 0, "callbacks": callbacks}
    model = {"target": toys / "target", "drafter": toys / "drafter", "lora": LORA}
    data = {"train_files": [toys / "answers.jsonl"], "batch_tokens": 128}
    named = {"class_path": "LMModule", "init_args": model}
    argv = [*fit_command(tmp_path, trainer, named, data), "--model.optimizer.lr", "0.01"]

    assert cli([*argv, "--model.on_policy", "2"]) == 2
    assert "on_policy" in capsys.readouterr().err.splitlines()[-1]
    averaging = ["--trainer.callbacks+", "lightning.pytorch.callbacks.EMAWeightAveraging"]
    assert cli([*argv, *averaging]) == 2 and "Omit the callback or model.lora" in capsys.readouterr().err
    assert cli(argv) == 0
    made = json.loads((tmp_path / "model" / "training.json").read_text())
    options = made["hyperparameters"]
    assert (made["steps"], options["optimizer"]["init_args"]["lr"], options["lora"]) == (2, 0.01, LORA)
