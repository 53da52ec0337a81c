"""Features that are kept while a run makes them: later epochs and validations read them, and the target rests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from fsd_core.errors import DataError
from fsd_infer import Target
from fsd_train.data import FeatureStore
from fsd_train.data.features import sequence_key
from fsd_train.data.recording import FeatureWriter
from tests import train_toys
from tests.train_toys import answers_of, eagle_module, toy_target


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
