"""Cached features of the target: interrupted, repeated, damaged, foreign, not finite."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_core.errors import DataError
from fsd_infer import Target
from fsd_train.data import features as module
from fsd_train.data.answers import AnswersDataset
from fsd_train.data.features import FeatureStore, cache_features, open_cache, sequence_key
from fsd_train.data.recording import FeatureWriter
from tests.train_toys import VOCAB, toy_target


def sequences() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(3, 30))] for _ in range(20)]


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def check(store: FeatureStore, target: Target, rows: list[list[int]]) -> None:
    for ids in rows:
        online = target.features(torch.tensor([ids]))[0]
        torch.testing.assert_close(store.get(sequence_key(ids)).float(), online, atol=1e-4, rtol=2**-8)


def test_interrupted_caching_goes_on(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sequences()
    forward, done = module.target_features, list[int]()

    def fail_later(*args: Any) -> Any:
        if sum(done) > 80:
            raise KeyboardInterrupt
        done.extend(args[2].lengths)
        return forward(*args)

    monkeypatch.setattr(module, "target_features", fail_later)
    with pytest.raises(KeyboardInterrupt):
        cache_features(target, rows, tmp_path, shard_tokens=60, batch_tokens=20, progress=False)
    first = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    assert FeatureStore(tmp_path).tokens == sum(done) < sum(map(len, rows))  # of an unfinished shard, too
    monkeypatch.setattr(module, "target_features", forward)
    check(cache_features(target, rows, tmp_path, shard_tokens=60, progress=False), target, rows)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == first


def test_a_second_call_adds_new_rows_only(target: Target, tmp_path: Path) -> None:
    rows = sequences()

    def cached(given: list[list[int]]) -> tuple[int, int]:
        store = cache_features(target, given, tmp_path, progress=False)
        return len(store), len(list(tmp_path.glob("*.safetensors")))

    assert cached(rows[:8]) == (8, 1)
    for _ in range(2):
        assert cached(rows + rows[:3]) == (len(rows), 2)
    (tmp_path / "shard-00000.safetensors").unlink()  # damaged, and deleted as the errors advise
    shutil.copy(tmp_path / "shard-00001.safetensors", tmp_path / "shard-00001-copy.safetensors")
    assert cached(rows) == (len(rows), 3)
    store = FeatureStore(tmp_path)
    check(store, target, rows)
    assert store.tokens == sum(map(len, rows))
    assert AnswersDataset([("", ids, ids) for ids in rows], (0, ""), store)[3]["features"].shape == (len(rows[3]), 32)


def test_what_is_not_finite_is_left_out_and_what_ends_early_is_kept(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A token whose embedding is damaged spoils the sequences that have it; an interrupted run closes its recorder."""
    rows, spoilt = sequences(), 7
    whole = [ids for ids in rows if spoilt not in ids]
    table = target.model.get_input_embeddings().weight.data
    kept = table[spoilt].clone()
    table[spoilt] = float("nan")
    try:
        check(cache_features(target, rows, tmp_path / "made", progress=False), target, whole)
    finally:
        table[spoilt] = kept
    assert f"{len(rows) - len(whole)} of {len(rows)} sequences are left out" in caplog.text
    assert len(FeatureStore(tmp_path / "made")) == len(whole) > 0
    writer = FeatureWriter(target, tmp_path / "recorded", {})
    writer.add([torch.tensor(rows[0])], target.features(torch.tensor([rows[0]])))
    writer.close()
    check(FeatureStore(tmp_path / "recorded"), target, rows[:1])


def test_a_cache_has_one_writer_at_a_time(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would choose the same number for a shard, and the second would replace the first's."""
    rows, write, refused = sequences(), module._write_shard, []

    def meanwhile(*args: Any) -> None:
        for begin in (cache_features, FeatureWriter):
            with pytest.raises(DataError, match=f"another run is writing {tmp_path}"):
                begin(target, tmp_path, rows) if begin is FeatureWriter else begin(target, rows, tmp_path)
            refused.append(begin)
        assert not len(FeatureStore(tmp_path)), "readers are not kept out"
        write(*args)

    monkeypatch.setattr(module, "_write_shard", meanwhile)
    check(cache_features(target, rows, tmp_path, progress=False), target, rows)
    assert len(refused) == 2
    writer = FeatureWriter(target, tmp_path, {})
    with pytest.raises(DataError, match="another run"):
        open_cache(tmp_path, target)
    writer.close()
    assert len(open_cache(tmp_path, target)) == len(rows)


def test_damage_and_foreign_caches_are_named(target: Target, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a feature cache"):
        FeatureStore(tmp_path)
    rows = sequences()
    cache_features(target, rows, tmp_path, progress=False)
    for other in (toy_target("qwen2"), toy_target(seed=1)):
        with pytest.raises(DataError, match="another target"):
            cache_features(other, rows, tmp_path, progress=False)
    with pytest.raises(DataError, match="lacks the features"):
        FeatureStore(tmp_path).get("0" * 16)
    shard = tmp_path / "shard-00000.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=f"{shard} does not match its checksum.*cache-features"):
        FeatureStore(tmp_path).get(sequence_key(rows[0]))
    shard.write_bytes(content[:-40])
    with pytest.raises(DataError, match="truncated"):
        FeatureStore(tmp_path)
