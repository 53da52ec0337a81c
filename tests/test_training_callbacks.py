"""What accompanies training: rates, decoding on the way, losses that are not numbers, features that are recorded."""

from __future__ import annotations

import copy
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from fsd_core.errors import DataError, NonFiniteLossError, UnknownNameError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import EagleDrafter
from fsd_train.callbacks import DecodedTau, LossCurve, TokenRate
from fsd_train.callbacks.progress import Announce
from fsd_train.data import AnswersDataModule, FeatureStore
from fsd_train.data.features import sequence_key
from fsd_train.data.recording import FeatureWriter
from fsd_train.losses import DraftBatch, Loss, LossOutput
from tests import train_toys
from tests.test_runs import Run
from tests.test_training import make, trainer
from tests.train_toys import answers_of, eagle_module, logged, toy_target


class Spoils(Callback):
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.head.fc.weight.data.fill_(float("nan"))


def test_what_validation_leaves_open_is_said(toys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that follows a metric which nothing measures is never written, and no NaN passes in silence."""
    for case, options in enumerate([{"limit_val_batches": 0}, {"val_check_interval": 3}, {"val_check_interval": 2}]):
        caplog.clear()
        best = ModelCheckpoint(tmp_path / "best", monitor="val_tau", mode="max")
        run = train_toys.trainer(tmp_path / str(case), 2, Announce(), Spoils(), best, **options)
        run.fit(eagle_module(toys), answers_of(toys))
        assert ("without it ModelCheckpoint of val_tau does nothing" in caplog.text) == (case < 2)
        assert ("val_loss is nan" in caplog.text) == (case == 2)
    caplog.clear()
    best = ModelCheckpoint(tmp_path / "best", monitor="val_tau", mode="max")
    options = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0, "max_epochs": 2}
    train_toys.trainer(tmp_path / "late", -1, Announce(), best, **options).fit(eagle_module(toys), answers_of(toys))
    assert best.best_model_path and "does nothing" not in caplog.text


def prompts_of(data: AnswersDataModule, count: int) -> list[list[int]]:
    rows = data.validation_set
    assert rows is not None and len(rows) >= count
    prompts = [rows[i]["input_ids"][: int(rows[i]["loss_mask"].argmax())].tolist() for i in range(len(rows))]
    return [prompts[i * len(prompts) // count] for i in range(count)]


def test_decoded_tau_is_that_of_a_direct_run(toys: Path, tmp_path: Path) -> None:
    module, data = make(toys)
    rules = ["exact", "fuzzy:js:0.4"]
    callback = DecodedTau(rules, every_n_train_steps=4, prompts=3, max_new_tokens=10, tree=TreeShape(3, 2, 6))
    trained = trainer(tmp_path, callback, TokenRate(window=2), LossCurve(every_n_train_steps=1))
    trained.fit(module, data)
    target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    decoder = FuzzyDecoder(target, EagleDrafter(copy.deepcopy(module.head), target, callback.tree))
    for rule in rules:
        made = decoder.generate(prompts_of(data, 3), rule=rule, max_new_tokens=10, do_sample=False, seed=0)
        values = {name: callback.points[f"decoded_{name}/{rule}"] for name in ("tau", "gate_open", "spent", "length")}
        assert all(list(points) == [4, 6] for points in values.values())
        assert values["tau"][6] == pytest.approx(made.stats.acceptance_length)
        assert values["gate_open"][6] == pytest.approx(made.stats.gate_open_fraction)
        assert values["spent"][6] == pytest.approx(made.stats.divergence_spent / made.stats.new_tokens)
        assert values["length"][6] == pytest.approx(made.stats.new_tokens / 3)
        assert logged(trained.log_dir, f"decoded_tau/{rule}") == pytest.approx(list(values["tau"].values()))
        assert "decoded_tau/" + rule in trained.callback_metrics  # a checkpoint may be chosen by it
    assert callback._full is not None  # training on cached features needs part of the target only
    assert (Path(trained.log_dir or "") / "curves.png").is_file()


def test_decoding_leaves_training_alone(toys: Path, tmp_path: Path) -> None:
    weights = []
    for name, callbacks in {
        "plain": [],
        "decoding": [DecodedTau(["draft-only"], 2, prompts=2, max_new_tokens=6, temperature=1.0)],
    }.items():
        module, data = make(toys, cached=False)
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


class Returning(Loss):
    """A loss that returns what a loss of one's own may return by mistake."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, batch: DraftBatch) -> LossOutput:
        return self.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", [None, 0.5, torch.ones(()), LossOutput(torch.ones(2))])
def test_a_loss_that_returns_anything_but_a_loss_is_named(value: Any, toys: Path, tmp_path: Path) -> None:
    module, data = make(toys)
    module.loss = Returning(value)
    with pytest.raises(DataError, match=r"loss 'Returning' returned .*: give LossOutput\(loss="):
        trainer(tmp_path).fit(module, data)


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


# recorded features ----------------------------------------------------------------------------------------------------


class Forwards(Callback):
    """Counts the target's forwards in training and in validation."""

    def __init__(self) -> None:
        self.training = self.validating = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        read = pl_module.target.features

        def counted(ids: torch.Tensor, **options: Any) -> torch.Tensor:
            whole = ids.shape[1] > 64  # not the trial of a short row
            self.training += pl_module.training and whole
            self.validating += whole and not pl_module.training
            return read(ids, **options)

        vars(pl_module.target)["features"] = counted


def losses(toys: Path, out: Path, steps: int, record: Path | None) -> tuple[list[float], Forwards]:
    forwards, given = Forwards(), {} if record is None else {"record_features": str(record)}
    head = {"layout": "eagle3", "fused_layers": [0, 1]}
    data = answers_of(toys, **given)
    trainer = train_toys.trainer(out, steps, forwards, limit_val_batches=1, val_check_interval=2)
    trainer.fit(eagle_module(toys, head=head, loss="kl_pq"), data)
    return train_toys.logged(out, "loss"), forwards


def test_the_first_epoch_runs_the_target_and_later_ones_read(toys: Path, tmp_path: Path) -> None:
    expected, forwards = losses(toys, tmp_path / "plain", 12, None)
    assert (forwards.training, forwards.validating) == (12, 6)
    found, forwards = losses(toys, tmp_path / "recorded", 12, tmp_path / "features")
    assert found == pytest.approx(expected, rel=1e-2) and found != expected, "what is read is rounded to bf16"
    data = answers_of(toys)
    data.setup()
    assert data.train_set is not None and 0 < forwards.training == len(data.train_dataloader()) < 12
    assert forwards.validating == 1, "later validations read"
    target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32)
    target.capture_layers([0, 1])
    ids, store = data.train_set.texts[3], FeatureStore(tmp_path / "features")
    wanted = target.features(ids[None].long())[0]
    torch.testing.assert_close(store.get(sequence_key(ids)).float(), wanted, atol=0.05, rtol=0.02)
    again = losses(toys, tmp_path / "again", 2, tmp_path / "features")[1]
    assert again.training == again.validating == 0, "another run goes on with the cache"


def test_a_full_disk_stops_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = FeatureWriter(toy_target(), tmp_path, {})

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("fsd_train.data.recording.save_shard", full)
    writer.add([torch.arange(5)], torch.randn(1, 9, 32))
    with pytest.raises(OSError, match="no space"):
        writer.flush()
    with pytest.raises(OSError, match="no space"):
        writer.add([torch.arange(5)], torch.randn(1, 9, 32))


def test_recording_is_for_one_device_and_makes_a_cache(toys: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Unset one"):
        answers_of(toys, features="a", record_features="b")
    data = answers_of(toys, record_features=str(tmp_path))
    data.setup()
    data.trainer = SimpleNamespace(world_size=2, training=True)  # type: ignore[assignment]
    with pytest.raises(DataError, match="record_features is for one device"):
        data.begin_recording(toy_target())


@pytest.mark.parametrize("step", [2, 4])
def test_a_signal_ends_the_decoding_of_answers_which_comes_again(
    step: int, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last step the run ends as usual without it."""
    whole, run = (Run(toys, tmp_path / name, every=step // 2 + 1) for name in ("whole", "run"))
    numbered, begun = DecodedTau._numbered, list[int]()
    assert whole.fit(4)[0] == 0

    def interrupted(self: Any, trainer: Any, target: Any) -> Any:
        begun.append(trainer.global_step)
        if begun[-1] == step and begun.count(step) == 1:
            signal.raise_signal(signal.SIGTERM)
        return numbered(self, trainer, target)

    monkeypatch.setattr(DecodedTau, "_numbered", interrupted)
    status, err = run.fit(4)
    assert status == (130 if step == 2 else 0) and f"the decoding after step {step} ended" in err
    status, err = run.fit(4)
    assert status == 0 and run.step() == 4
    if step == 2:
        assert begun == [0, 2, 0, 2, 4] and run.curves() == whole.curves()


def test_the_rate_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight batches of a second each, one waits for an export of a minute, and a validation comes between."""
    now = [0.0]
    monkeypatch.setattr("fsd_train.callbacks.progress.time.perf_counter", lambda: now[0])
    rate, logs = TokenRate(window=8), dict[str, float]()
    module: Any = SimpleNamespace(log=lambda name, value, **_: logs.update({name: value}), device=torch.device("cpu"))
    of: Any = SimpleNamespace(world_size=2)
    mask = torch.zeros(1, 100)
    mask[0, 10:40] = 1
    batch = {"loss_mask": mask, "lengths": np.array([60, 30, 10]), "ids": ["a", "b"]}
    for number in range(8):
        rate.on_train_batch_start(of, module, batch, number)
        now[0] += 61.0 if number == 3 else 1.0
        rate.on_train_batch_end(of, module, None, batch, number)
        if number == 5:
            rate.on_validation_start(of, module)
            now[0] += 30.0
    assert logs == {"tokens_per_s": pytest.approx(60.0), "padding": pytest.approx(0.1)}
