"""Cached target features, computed once and read in every epoch.

A cache is a directory:

    index.json               format, target (fingerprint and digest of its weights), layers whose outputs follow
                             the final features
    shard-00000.safetensors  features [tokens, F] bf16 of the concatenated sequences
    shard-00000.json         keys and offsets of the sequences, checksum of the file above

A sequence's key is a digest of its token ids, so any file with the same sequences can use the cache. The .json of a
shard is written last, by renaming, so an interrupted run resumes with the first shard without one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm import tqdm

from fsd_infer.errors import DataError
from fsd_infer.files import open_safetensors, read_json, replacing, sha256_of, write_json
from fsd_infer.targets.prefixes import Prefix
from fsd_infer.targets.target import Target
from fsd_train.data.sampler import TokenBudgetSampler

FORMAT = "fsd-features"
VERSION = 1
_WEIGHTS = "weights_sha256"  # in the header's target
_AGAIN = "Delete it and its .json, and run `fsd-train cache-features` again."
_DISK_RESERVE = 256 * 2**20  # bytes to keep free
_Row = tuple[str, Sequence[int] | Tensor]  # key, token ids


def sequence_key(ids: Sequence[int] | Tensor) -> str:
    """Return 16 hexadecimal digits that identify a sequence of token ids."""
    values = torch.as_tensor(ids, dtype=torch.int32).contiguous().numpy().astype("<i4", copy=False)
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


class FeatureStore:
    """Read access to a cache.

    Args:
        directory: the cache.

    Raises:
        DataError: the directory is no cache or has another format, or a shard is missing or truncated.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.header = _read_header(self.directory)
        self.layers: list[int] = self.header.get("layers", [])
        self._shards: list[Path] = []
        self._checksums: list[str | None] = []  # None after a check, which data workers inherit
        self._where: dict[str, tuple[int, int, int]] = {}
        self._open: dict[int, Any] = {}
        self._pid = os.getpid()
        for record in _records(self.directory):
            path = self.directory / record["file"]
            if not path.is_file() or path.stat().st_size != record["bytes"]:
                raise DataError(f"{path} is missing or truncated. {_AGAIN}")
            offsets = record["offsets"]
            for key, start, stop in zip(record["keys"], offsets[:-1], offsets[1:], strict=True):
                self._where[key] = (len(self._shards), start, stop)
            self._shards.append(path)
            self._checksums.append(record["sha256"])

    def check_target(self, target: Target) -> None:
        """Raise DataError if the features belong to another target, or to other weights of the same shape."""
        held = self.header["target"]
        for key, ours in _facts(target).items():
            theirs = held.get(key)
            if ours is not None and theirs is not None and ours != theirs:
                raise DataError(
                    f"the features in {self.directory} belong to another target ({key}: {theirs!r}, {target.name} has "
                    f"{ours!r}). Choose another directory for this target, or delete this one."
                )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    @property
    def tokens(self) -> int:
        return sum(stop - start for _, start, stop in self._where.values())

    def get(self, key: str) -> Tensor:
        """Return the features [M, F] bf16 of a sequence.

        Raises DataError if the cache lacks it or its shard fails its checksum, which each process compares once.
        """
        if key not in self._where:
            raise DataError(f"{self.directory} lacks the features of sequence {key}. Run `fsd-train cache-features`.")
        shard, start, stop = self._where[key]
        if self._pid != os.getpid():  # a data worker must not share its parent's file handles
            self._open, self._pid = {}, os.getpid()
        if shard not in self._open:
            self._verify(shard)
            with open_safetensors(self._shards[shard], _AGAIN, DataError) as file:
                self._open[shard] = file.get_slice("features")
        return self._open[shard][start:stop]

    def _verify(self, shard: int) -> None:
        """Raise DataError unless a shard matches its checksum; each process checks once."""
        path, expected = self._shards[shard], self._checksums[shard]
        if expected is not None and sha256_of(path) != expected:
            raise DataError(f"{path} does not match its checksum. {_AGAIN}")
        self._checksums[shard] = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


class WithFeatures(Dataset[dict[str, Any]]):
    """A dataset whose items also have ``features`` [M, F] from a cache.

    Args:
        dataset: dataset of dicts with ``input_ids``.
        store: the cache.
    """

    def __init__(self, dataset: Any, store: FeatureStore) -> None:
        self.dataset = dataset
        self.store = store

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = dict(self.dataset[index])
        item["features"] = self.store.get(sequence_key(item["input_ids"]))
        return item


def cache_features(
    target: Target,
    sequences: Sequence[Sequence[int] | Tensor],
    directory: str | Path,
    *,
    shard_tokens: int = 65536,
    batch_tokens: int = 2048,
    max_tokens: int | None = None,
    progress: bool = True,
) -> FeatureStore:
    """Compute and store the features of sequences that the cache lacks.

    Args:
        target: the target; outputs of its watched layers are stored too. All features are stored in bf16.
        sequences: token ids.
        directory: directory of the cache, created if missing.
        shard_tokens: tokens per shard, the most work that an interruption can lose.
        batch_tokens: padded tokens per forward; a batch has sequences of similar length.
        max_tokens: most tokens in the cache.
        progress: show a progress bar.

    Raises:
        DataError: the cache has another target or other layers, or the disk lacks space.
    """
    directory = Path(directory)
    held = _opened(directory, target)
    todo: dict[str, Sequence[int] | Tensor] = {}
    total = held.tokens
    for ids in sequences:
        key = sequence_key(ids)
        if key in held or key in todo or not len(ids):
            continue
        if max_tokens is not None and total + len(ids) > max_tokens:
            break
        todo[key] = ids
        total += len(ids)
    wanted = total - held.tokens
    check_disk(directory, wanted * token_bytes(target))
    number = _next_number(directory)
    bar = tqdm(
        total=total, initial=held.tokens, unit="tok", unit_scale=True, desc="caching features", disable=not progress
    )
    with bar:
        for shard in _shards(todo, shard_tokens):
            _write_shard(target, shard, directory, number, batch_tokens, bar)
            number += 1
    return FeatureStore(directory)


def _opened(directory: Path, target: Target) -> FeatureStore:
    """Open or create a cache. Raises DataError if it has another target or other layers."""
    directory.mkdir(parents=True, exist_ok=True)
    header = directory / "index.json"
    if not header.exists():
        write_json(
            header,
            {"format": FORMAT, "version": VERSION, "target": _facts(target), "layers": list(target.captured_layers)},
        )
    held = FeatureStore(directory)
    held.check_target(target)
    _check_layers(held, target.captured_layers)
    return held


def _next_number(directory: Path) -> int:
    """Return the number of the next shard; deleted damaged shards leave gaps."""
    return 1 + max((int(path.stem.removeprefix("shard-")) for path in _record_files(directory)), default=-1)


class FeatureRecorder:
    """Recorder of features while the target answers, which saves a second pass over the answers.

    It takes the place of a prefix cache (:mod:`fsd_infer.targets.prefixes`) that finds nothing and receives every
    finished text. The target never reads a text's last token, whose features no loss needs; they repeat the previous
    token's.

    Args:
        target: the target whose ``prefixes`` it replaces.
        directory: directory of the cache; :func:`cache_features` can complete it after a killed run.

    Raises:
        DataError: the cache has another target or other layers.
    """

    def __init__(self, target: Target, directory: str | Path) -> None:
        self.target, self.directory = target, Path(directory)
        self._held = _opened(self.directory, target)
        self._read: list[Prefix] = []
        target.prefixes = self  # type: ignore[assignment]

    def find(self, prompt: Sequence[int], watched: tuple[int, ...], key: str = "") -> None:
        return None

    def store(self, text: Prefix) -> None:
        self._read.append(replace(text, states={}))

    def save(self, texts: Sequence[Sequence[int]]) -> None:
        """Write one shard with those whole texts whose features were stored since the last call."""
        found = {tuple(text.tokens.tolist()): text.features for text in self._read}
        self._read = []
        rows: dict[str, Tensor] = {}
        for ids in texts:
            features = found.get(tuple(ids[:-1]), found.get(tuple(ids)))
            if features is not None and sequence_key(ids) not in self._held:
                last = features[-1:].expand(len(ids) - len(features), -1)
                rows[sequence_key(ids)] = torch.cat([features, last]).to(torch.bfloat16).cpu()
        if not rows:
            return
        check_disk(self.directory, sum(row.nbytes for row in rows.values()))
        lengths = {key: len(row) for key, row in rows.items()}
        _save_shard(self.directory, _next_number(self.directory), lengths, torch.cat(list(rows.values())))


def _write_shard(target: Target, rows: list[_Row], directory: Path, number: int, batch_tokens: int, bar: Any) -> None:
    lengths = {key: len(ids) for key, ids in rows}
    features = torch.empty(sum(lengths.values()), token_bytes(target) // 2, dtype=torch.bfloat16)
    places = features.split(list(lengths.values()))
    for batch in TokenBudgetSampler(list(lengths.values()), batch_tokens, shuffle=False):
        texts = [torch.as_tensor(rows[row][1], dtype=torch.long) for row in batch]
        # right padding needs no mask under causal attention
        with torch.inference_mode():
            out = target.features(pad_sequence(texts, batch_first=True).to(target.device)).to(torch.bfloat16).cpu()
        for row, made in zip(batch, out, strict=True):
            places[row].copy_(made[: len(places[row])])
        bar.update(sum(map(len, texts)))
    _save_shard(directory, number, lengths, features)


def _save_shard(directory: Path, number: int, lengths: Mapping[str, int], features: Tensor) -> None:
    """Write features [tokens, F] of whole sequences, with lengths by key in the same order."""
    path = directory / f"shard-{number:05d}.safetensors"
    with replacing(path) as draft:
        save_file({"features": features}, draft)
        record = {
            "file": path.name,
            "bytes": draft.stat().st_size,
            "sha256": sha256_of(draft),
            "offsets": [0, *accumulate(lengths.values())],
            "keys": list(lengths),
        }
    write_json(path.with_suffix(".json"), record)


def _shards(todo: Mapping[str, Sequence[int] | Tensor], shard_tokens: int) -> Iterator[list[_Row]]:
    shard: list[_Row] = []
    size = 0
    for key, ids in todo.items():
        if shard and size + len(ids) > shard_tokens:
            yield shard
            shard, size = [], 0
        shard.append((key, ids))
        size += len(ids)
    if shard:
        yield shard


def _record_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("shard-*.json"))


def _records(directory: Path) -> Iterator[dict[str, Any]]:
    for path in _record_files(directory):
        record = read_json(path, "Delete it and cache again.")
        if not _is_record(record):
            raise DataError(f"{path} is no record of a shard. Delete it and cache again.")
        yield record


def _is_record(record: Any) -> bool:
    kinds = {"file": str, "bytes": int, "sha256": str, "offsets": list, "keys": list}
    if not isinstance(record, dict) or not all(isinstance(record.get(key), kind) for key, kind in kinds.items()):
        return False
    offsets, keys = record["offsets"], record["keys"]
    whole = all(isinstance(key, str) for key in keys) and all(type(offset) is int for offset in offsets)
    return whole and len(offsets) == len(keys) + 1 and offsets == sorted(offsets) and offsets[0] == 0


def _read_header(directory: Path) -> dict[str, Any]:
    path = directory / "index.json"
    if not path.is_file():
        raise DataError(f"{directory} is not a feature cache (no index.json). Run `fsd-train cache-features`.")
    header = read_json(path, "Delete the cache and make it again.")
    known = isinstance(header, dict) and header.get("format") == FORMAT and header.get("version") == VERSION
    facts = header.get("target") if known else None
    if not isinstance(facts, dict) or _WEIGHTS not in facts or not is_layers(header.get("layers", [])):
        raise DataError(f"{path} is not a feature cache of version {VERSION}. Make it again with this program.")
    return dict(header)


def is_layers(value: Any) -> bool:
    """Return whether the value is a list of whole numbers."""
    return isinstance(value, list) and all(type(layer) is int for layer in value)


def _facts(target: Target) -> dict[str, Any]:
    """Return the header's facts about a target."""
    return {**target.fingerprint(), _WEIGHTS: target.weights_digest()}


def _check_layers(store: FeatureStore, layers: Sequence[int]) -> None:
    if store.layers != list(layers):
        raise DataError(
            f"the cache {store.directory} holds inner layers {store.layers}, not {list(layers)}. Give another "
            "--output, or the same --layers."
        )


def token_bytes(target: Target) -> int:
    return 2 * target.hidden_size * (1 + len(target.captured_layers))


def check_disk(directory: Path, needed: int) -> None:
    """Raise DataError if the disk of a directory has no room for ``needed`` bytes of features."""
    free = shutil.disk_usage(directory).free
    if needed and needed + _DISK_RESERVE > free:
        raise DataError(
            f"{directory}: the features need {needed / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB free. "
            "Give another --output, lower --max-tokens or --max-length, or train without a cache."
        )
