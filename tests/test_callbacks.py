"""Callbacks and validation metrics: really decoded accepted length, the stop at a NaN, refused checkpoints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from fsd_infer import EagleDrafter, FuzzyDecoder, Target, TreeShape
from fsd_infer.divergence import divergence, expand_draft
from fsd_infer.errors import CheckpointError, DataError, NonFiniteLossError, UnknownNameError
from fsd_train.callbacks import DecodedTau, LossCurve, TokenRate
from fsd_train.data import AnswersDataModule
from fsd_train.losses import DraftBatch, LMHead, Loss, LossOutput
from fsd_train.losses.metrics import ValidationMetrics, compare
from fsd_train.models import EagleModule, LMModule
from tests import train_toys
from tests.loss_toys import Grid
from tests.train_toys import answers_of, eagle_module, logged, make_toys

RULES = ["exact", "fuzzy:js:0.4"]
STEPS = 6


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with target/, answers.jsonl and features/."""
    return make_toys(tmp_path_factory.mktemp("toys"), rows=20, dtype=torch.float32)


def make(toys: Path, cached: bool = False, **options: Any) -> tuple[EagleModule, AnswersDataModule]:
    values = {"draft_vocab_size": 40, "unroll_steps": 2, "noise": 0.1, "warmup_steps": 1, "eval_steps": 3, **options}
    features = str(toys / "features") if cached else None
    return eagle_module(toys, **values), answers_of(toys, validation_fraction=0.3, batch_tokens=128, features=features)


def trainer(out: Path, *callbacks: Any, steps: int = STEPS, **options: Any) -> Trainer:
    return train_toys.trainer(out, steps, *callbacks, val_check_interval=3, **options)


def prompts_of(data: AnswersDataModule, count: int) -> list[list[int]]:
    rows = data.validation_set
    assert rows is not None and len(rows) >= count
    prompts = [rows[i]["input_ids"][: int(rows[i]["loss_mask"].argmax())].tolist() for i in range(len(rows))]
    return [prompts[i * len(prompts) // count] for i in range(count)]


@pytest.mark.parametrize("cached", [False, True])
def test_decoded_tau_is_that_of_a_direct_run(toys: Path, tmp_path: Path, cached: bool) -> None:
    module, data = make(toys, cached)
    callback = DecodedTau(RULES, every_n_train_steps=4, prompts=3, max_new_tokens=10, tree=TreeShape(3, 2, 6))
    trained = trainer(tmp_path, callback, TokenRate(window=2), LossCurve(every_n_train_steps=1))
    trained.fit(module, data)
    target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    decoder = FuzzyDecoder(target, EagleDrafter(copy.deepcopy(module.head), target, callback.tree))
    for rule in RULES:
        made = decoder.generate(prompts_of(data, 3), rule, max_new_tokens=10, do_sample=False, seed=0)
        values = {name: callback.points[f"decoded_{name}/{rule}"] for name in ("tau", "gate_open", "spent", "length")}
        assert all(list(points) == [4, STEPS] for points in values.values())
        assert values["tau"][STEPS] == pytest.approx(made.stats.tau)
        assert values["gate_open"][STEPS] == pytest.approx(made.stats.gate_open_fraction)
        assert values["spent"][STEPS] == pytest.approx(made.stats.divergence_spent / made.stats.new_tokens)
        assert values["length"][STEPS] == pytest.approx(made.stats.new_tokens / 3)
        assert logged(trained.log_dir, f"decoded_tau/{rule}") == pytest.approx(list(values["tau"].values()))
        assert "decoded_tau/" + rule in trained.callback_metrics  # a checkpoint may be chosen by it
    assert (callback._full is not None) == cached
    assert (Path(trained.log_dir or "") / "curves.png").is_file()


def test_decoding_leaves_training_alone(toys: Path, tmp_path: Path) -> None:
    weights = []
    for name, callbacks in {
        "plain": [],
        "decoding": [DecodedTau(["draft-only"], 2, prompts=2, max_new_tokens=6, temperature=1.0)],
    }.items():
        module, data = make(toys)
        trainer(tmp_path / name, *callbacks).fit(module, data)
        weights.append(module.head.fc.weight.detach())
    assert torch.equal(*weights)


def test_decoded_tau_refuses_what_it_cannot_do(toys: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no-such-rule"):
        DecodedTau(["no-such-rule"])
    module, data = make(toys)
    with pytest.raises(DataError, match="room for 127 tokens"):  # of 128 positions; said before the first step
        trainer(tmp_path, DecodedTau(max_new_tokens=127)).fit(module, data)
    assert module.global_step == 0
    module, data = make(toys)
    data.validation_fraction = 0.0
    with pytest.raises(DataError, match="validation"):
        trainer(tmp_path, DecodedTau()).fit(module, data)


class Failing(Loss):
    """A loss that is NaN from its n-th call on."""

    def __init__(self, loss: Loss, good: int) -> None:
        self.parts, self.left = [loss], good

    def __call__(self, batch: DraftBatch) -> LossOutput:
        out = self.parts[0](batch)
        self.left -= 1
        return out if self.left >= 0 else LossOutput(out.loss * torch.nan, out.parts)


def test_nan_loss_stops_and_names_the_rows(toys: Path, tmp_path: Path) -> None:
    module, data = make(toys)
    module.loss = Failing(module.loss, good=2)
    with pytest.raises(NonFiniteLossError) as caught:
        trainer(tmp_path, limit_val_batches=0).fit(module, data)
    last = tmp_path / "ckpt" / "step=2.ckpt"
    assert str(last) in str(caught.value)
    assert sorted(file.name for file in last.parent.iterdir()) == ["step=1.ckpt", "step=2.ckpt"]
    state = torch.load(last, weights_only=True)["state_dict"]
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert torch.equal(state["head.fc.weight"], module.head.fc.weight)  # the bad step was not taken
    (file,) = tmp_path.rglob("non-finite-step-2-rank-0.json")
    assert str(file) in str(caught.value)
    report = json.loads(file.read_text())
    assert report["step"] == 2 and report["batches"][0]["loss"] == "nan"
    batches = [batch["ids"] for batch in data.train_dataloader()]
    assert report["batches"][0]["ids"] == batches[2]


@pytest.mark.parametrize("options", [{"draft_vocab_size": None}, None], ids=["head", "lm"])
def test_rows_of_another_vocabulary_are_refused_before_training(toys: Path, tmp_path: Path, options: Any) -> None:
    """In training and validation files."""
    good = (toys / "answers.jsonl").read_text().splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    other.write_text(good[0] + json.dumps({"prompt_ids": [5], "response_ids": [6, 64, 7]}) + "\n" + good[2])
    target = str(toys / "target")
    module = LMModule(target, target) if options is None else make(toys, **options)[0]
    for train, held in [(other, []), (toys / "answers.jsonl", [str(other)])]:
        run = trainer(tmp_path / "run")
        with pytest.raises(DataError, match=f"^{other}:2: token id 64 .* vocabulary of 64. Regenerate"):
            run.fit(module, AnswersDataModule([str(train)], held, batch_tokens=128))
        assert run.global_step == 0


def resumed(toys: Path, out: Path, ckpt: Path, data: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A run that goes on from a checkpoint, with these attributes of the data module and options of the module."""
    module, rows = make(toys, **options)
    for name, value in (data or {}).items():
        setattr(rows, name, value)
    run = trainer(out, limit_val_batches=0)
    run.fit(module, rows, ckpt_path=ckpt, weights_only=True)
    return run


@pytest.fixture(scope="module")
def checkpoint(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the first step."""
    out = tmp_path_factory.mktemp("run")
    trainer(out, steps=1, limit_val_batches=0).fit(*make(toys))
    return out / "ckpt" / "step=1.ckpt"


def test_bad_checkpoints_are_refused_before_training(toys: Path, checkpoint: Path, tmp_path: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)
    names = ("cut", "text", "foreign", "weights", "none", "directory")
    cut, text, foreign, weights, none, directory = (tmp_path / name for name in names)
    cut.write_bytes(checkpoint.read_bytes()[:3000])
    text.write_text("no checkpoint at all")
    torch.save({"model": {}}, foreign)
    torch.save({name: value for name, value in state.items() if name != "optimizer_states"}, weights)
    directory.mkdir()
    for path, words, options in [
        (cut, "truncated", {}),
        (text, "truncated or no Lightning checkpoint", {}),
        (foreign, "did not write it", {}),
        (weights, "only weights", {}),
        (none, "no such checkpoint", {}),
        (directory, "directory, but no sharded", {}),
        (checkpoint, "other settings.*draft_ids", {"draft_vocab_size": 50}),
    ]:
        with pytest.raises(CheckpointError, match=f"{path}.*{words}"):
            resumed(toys, tmp_path / "again", path, **options)


def test_a_checkpoint_is_not_continued_in_another_order(toys: Path, checkpoint: Path, tmp_path: Path) -> None:
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join((toys / "answers.jsonl").read_text().splitlines(keepends=True)[1:]))
    for words, change in {
        "rows": {"train_files": [str(fewer)]},
        r"batch_tokens \(128, now 96\)": {"batch_tokens": 96},
        r"seed \(0, now 1\)": {"seed": 1},
    }.items():
        with pytest.raises(CheckpointError, match=f"{checkpoint} belongs to another order.*by {words}.*initial_head"):
            resumed(toys, tmp_path / "run", checkpoint, change)
    other = make(toys)[1]
    other.batch_tokens = 96
    trainer(tmp_path / "run").validate(make(toys)[0], other, ckpt_path=checkpoint, weights_only=True)


def test_rule_metrics_against_the_plain_formulas() -> None:
    torch.manual_seed(0)
    steps, rows, width, vocab = 2, 5, 6, 9
    draft_ids = torch.tensor([0, 2, 3, 7, 8])
    full = LMHead(torch.randn(vocab, width))
    grid = Grid(
        estimates=torch.randn(steps, rows, width),
        features=torch.randn(rows, width),
        weights=torch.tensor([[1.0, 1, 1, 1, 1], [0, 1, 1, 0, 0]]),
        positions=torch.tensor([3, 4, 5, 6, 9]),
        head=LMHead(full.weight[draft_ids]),
    )
    batch = grid.batch()
    seen = compare(batch, full, draft_ids, ["js", "top_k_tv:2"], chunk_size=2)
    p = full(grid.features).log_softmax(-1).expand(steps, -1, -1)
    q = expand_draft(grid.head(grid.estimates), draft_ids, vocab).log_softmax(-1)
    counted = grid.weights > 0
    overlap = torch.minimum(p.exp(), q.exp()).sum(-1) * counted
    torch.testing.assert_close(grid.dense(seen.overlap), overlap)
    assert torch.equal(grid.dense(seen.agree), (p.argmax(-1) == q.argmax(-1)) & counted)
    for name, values in seen.distances.items():
        torch.testing.assert_close(grid.dense(values), divergence(name)(p, q, log_probs=True) * counted)

    threshold = float(grid.dense(seen.distances["js"])[0].sort().values[2])  # opens at some rows and not at others
    rule = f"fuzzy:js:{threshold!r}"
    metrics = ValidationMetrics(["exact", rule, "fuzzy:js:0"], steps)
    seen = compare(batch, full, draft_ids, metrics.divergences)
    metrics.update(seen, batch.rows, torch.zeros(()))
    values = metrics.compute()
    js = grid.dense(seen.distances["js"])
    gate = (js <= threshold).float()
    for step in range(steps):
        assert float(values[f"divergence_js_{step}"]) == pytest.approx(float(js[step][counted[step]].mean()), rel=1e-5)
        assert float(values[f"gate_open_{step}/{rule}"]) == pytest.approx(float(gate[step][counted[step]].mean()))
    assert 0 < float(values[f"gate_open_0/{rule}"]) < 1
    for name, a in {"exact": overlap, rule: overlap + (1 - overlap) * gate, "fuzzy:js:0": overlap}.items():
        # two whole chains: roots at positions 3 and 4, their second steps at 4 and 5
        lengths = [1 + a[0, 0] + a[0, 0] * a[1, 1], 1 + a[0, 1] + a[0, 1] * a[1, 2]]
        assert float(values[f"expected_tau/{name}"]) == pytest.approx(float(sum(lengths) / 2), rel=1e-5)
    assert bool(metrics.compute()["expected_tau/exact"].isnan())  # a clean slate
    with pytest.raises(DataError, match="random"):
        ValidationMetrics(["random:0.5"], steps)
