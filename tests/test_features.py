"""The feature cache: right numbers, interruptions, damage, growth."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fsd_infer.errors import DataError, FsdError
from fsd_infer.targets.target import Target
from fsd_train.commands.cache_features import main
from fsd_train.data import features as module
from fsd_train.data.features import FeatureStore, WithFeatures, cache_features, sequence_key
from tests.train_toys import VOCAB, save_toy_target, toy_target, write_answers


def sequences(count: int = 20, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(3, 30))] for _ in range(count)]


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def check(store: FeatureStore, target: Target, rows: list[list[int]]) -> None:
    for ids in rows:
        online = target.features(torch.tensor([ids]))[0]
        torch.testing.assert_close(store.get(sequence_key(ids)).float(), online, atol=1e-4, rtol=2**-8)


def test_cached_features_are_the_online_ones(target: Target, tmp_path: Path) -> None:
    rows = sequences()
    store = cache_features(target, rows, tmp_path, shard_tokens=100, batch_tokens=64, progress=False)
    assert len(store) == len(rows) and store.tokens == sum(map(len, rows))
    check(FeatureStore(tmp_path), target, rows)
    items = WithFeatures([{"input_ids": torch.tensor(ids)} for ids in rows], store)
    assert items[3]["features"].shape == (len(rows[3]), 32)


def test_interrupted_caching_goes_on(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sequences()
    write, done = module._write_shard, []

    def fail_later(*args: Any) -> None:
        if len(done) == 2:
            (tmp_path / "shard-00002.safetensors").write_bytes(b"half a shard")
            raise KeyboardInterrupt
        done.append(write(*args))

    monkeypatch.setattr(module, "_write_shard", fail_later)
    with pytest.raises(KeyboardInterrupt):
        cache_features(target, rows, tmp_path, shard_tokens=60, progress=False)
    first = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    assert 0 < len(FeatureStore(tmp_path)) < len(rows)
    monkeypatch.setattr(module, "_write_shard", write)
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
    for suffix in (".json", ".safetensors"):  # damaged, and deleted as the errors advise
        (tmp_path / "shard-00000").with_suffix(suffix).unlink()
    assert cached(rows) == (len(rows), 2)
    check(FeatureStore(tmp_path), target, rows)


def test_max_tokens_bounds_the_cache(target: Target, tmp_path: Path) -> None:
    store = cache_features(target, sequences(), tmp_path, max_tokens=100, progress=False)
    assert 70 < store.tokens <= 100


def test_full_disk_is_refused_before_it_starts(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DataError, match="the disk has"):
        cache_features(target, sequences(), tmp_path, progress=False)
    assert not list(tmp_path.glob("*.safetensors"))


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


def test_a_process_compares_each_checksum_once(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sequences()
    cache_features(target, rows, tmp_path, shard_tokens=100, progress=False)
    compared: list[Path] = []
    digest_of = module.sha256_of
    monkeypatch.setattr(module, "sha256_of", lambda path: compared.append(path) or digest_of(path))
    store = FeatureStore(tmp_path)
    for _ in range(2):
        for ids in rows:
            store.get(sequence_key(ids))
        assert sorted(compared) == sorted(tmp_path.glob("*.safetensors"))
        store = pickle.loads(pickle.dumps(store))  # as data workers get it


def test_command_adds_the_rows_that_the_cache_lacks(target: Target, tmp_path: Path) -> None:
    model = save_toy_target(tmp_path / "target")
    paths = [write_answers(tmp_path / f"{name}.jsonl", target, rows=3, seed=seed) for seed, name in enumerate("ab")]
    for count in (1, 2):
        argv = ["--target", str(model), "--data", *map(str, paths[:count]), "--dtype", "float32"]
        assert main([*argv, "--output", str(tmp_path / "cache")]) == 0
        assert len(FeatureStore(tmp_path / "cache")) == 3 * count
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    check(FeatureStore(tmp_path / "cache"), target, [row["prompt_ids"] + row["response_ids"] for row in rows])


def test_command_reads_a_last_line_without_end(target: Target, tmp_path: Path) -> None:
    model = save_toy_target(tmp_path / "target")
    text = write_answers(tmp_path / "answers.jsonl", target, rows=3).read_text()
    array = json.dumps([json.loads(line) for line in text.splitlines()])
    for name, written in (("rows.jsonl", text.rstrip()), ("array.json", array)):
        (tmp_path / name).write_text(written)
        argv = ["--target", str(model), "--data", str(tmp_path / name), "--dtype", "float32"]
        assert main([*argv, "--output", str(tmp_path / f"cache-{name}")]) == 0
        assert len(FeatureStore(tmp_path / f"cache-{name}")) == 3


def test_command_reads_a_recipe(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = save_toy_target(tmp_path / "target"), tmp_path / "recipe.yaml"
    answers = write_answers(tmp_path / "answers.jsonl", target, rows=6)
    sections: dict[str, Any] = {"model": {"target": str(model), "head": {"fused_layers": [1]}}}

    def run(data: dict[str, Any], *more: str) -> int:
        files = {"train_files": [str(answers)], **data}
        path.write_text(yaml.safe_dump({**sections, "data": files}))
        return main(["--config", str(path), *more])

    cache = {"features": str(tmp_path / "cache")}
    assert run({**cache, "max_length": 12}) == 0
    store = FeatureStore(tmp_path / "cache")
    assert store.layers == [1] and len(store) == 6 and store.tokens <= 6 * 12
    assert run({**cache, "max_length": 12}, "--output", str(tmp_path / "long"), "--max-length", "64") == 0
    assert FeatureStore(tmp_path / "long").tokens > store.tokens
    with pytest.raises(SystemExit):
        run({})
    assert "--output must be given (and set the recipe's data.features to it)" in capsys.readouterr().err
    del sections["model"]["target"]
    with pytest.raises(FsdError, match="target"):
        run(cache)
