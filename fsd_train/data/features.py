"""Cached target features, computed once and read in every epoch.

A cache is a directory:

    index.json               format, target (fingerprint and digest of its weights), layers whose outputs follow
                             the final features
    shard-00000.safetensors  features [M, F] bf16 of each sequence by its key; the metadata hold a checksum

A sequence's key is a digest of its token ids, so any file with the same sequences can use the cache. Shards are written
to a temporary file and renamed, so an interrupted run resumes with what is missing.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from fsd_core.errors import DataError
from fsd_core.files import open_safetensors, read_json, replacing, write_json
from fsd_core.locks import lock_for_run
from fsd_infer.targets.target import Target
from fsd_train.data.sampler import PackingSampler
from fsd_train.packed import Inputs, target_features, text_mask

log = logging.getLogger(__name__)

FORMAT = "fsd-features"
VERSION = 3
_NORMED_VERSION = 2  # the version in which the last layer's output was the final features again
_WEIGHTS = "weights_sha256"  # in the header's target
_CHECKSUM = "sha256"  # in a shard's metadata
_REBUILD = "Delete it, and run `fsd-train cache-features` again."
SHARD_TOKENS = 65536
_DISK_RESERVE = 256 * 2**20  # bytes to keep free
_Texts = Mapping[str, Sequence[int] | Tensor]  # token ids by key


def sequence_key(ids: Sequence[int] | Tensor, images: str = "") -> str:
    """Return 16 hexadecimal digits that identify a sequence of token ids and the digest of its images."""
    values = torch.as_tensor(ids, dtype=torch.int32).contiguous().numpy().astype("<i4", copy=False)
    return hashlib.sha256(values.tobytes() + images.encode()).hexdigest()[:16]


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
        self._shards: dict[str, Path] = {}  # by key
        self._lengths: dict[str, int] = {}
        self._verified: set[Path] = set()  # checked shards, which data workers inherit
        self._open: dict[Path, dict[str, Any]] = {}
        self._pid = os.getpid()
        self._lock: _Lock | None = None
        self.refresh()

    def refresh(self) -> None:
        """Find shards that were written since. Raises DataError for a damaged one."""
        known = set(self._shards.values())
        for path in _shard_files(self.directory):
            if path in known:
                continue
            with open_safetensors(path, _REBUILD, DataError) as file:
                for key in file.keys():
                    self._shards[key], self._lengths[key] = path, file.get_slice(key).get_shape()[0]

    def check_target(self, target: Target) -> None:
        """Raise DataError if the features belong to another target, or to other weights of the same shape."""
        facts = self.header["target"]
        if self.header["version"] == _NORMED_VERSION and int(target.config.num_hidden_layers) - 1 in self.layers:
            raise DataError(
                f"the features in {self.directory} are of version {_NORMED_VERSION}, which kept the last layer's "
                f"output after the final norm. {_REBUILD}"
            )
        for key, ours in _target_facts(target).items():
            stored = facts.get(key)
            if ours is not None and stored is not None and ours != stored:
                raise DataError(
                    f"the features in {self.directory} belong to another target ({key}: {stored!r}, {target.name} has "
                    f"{ours!r}). Choose another directory for this target, or delete this one."
                )

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._shards)

    def __contains__(self, key: object) -> bool:
        return key in self._shards

    @property
    def tokens(self) -> int:
        return sum(self._lengths.values())

    def get(self, key: str) -> Tensor:
        """Return the features [M, F] bf16 of a sequence.

        Raises DataError if the cache lacks it or its shard fails its checksum, which each process compares once.
        """
        path = self._shards.get(key)
        if path is None:
            raise DataError(f"{self.directory} lacks the features of sequence {key}. Run `fsd-train cache-features`.")
        if self._pid != os.getpid():  # a data worker must not share its parent's file handles
            self._open, self._pid = {}, os.getpid()
        if path not in self._open:
            with open_safetensors(path, _REBUILD, DataError) as file:
                rows = {name: file.get_slice(name) for name in file.keys()}
                if path not in self._verified and (file.metadata() or {}).get(_CHECKSUM) != _checksum(rows):
                    raise DataError(f"{path} does not match its checksum. {_REBUILD}")
            self._verified.add(path)
            self._open[path] = rows
        features: Tensor = self._open[path][key][:]
        return features

    def release(self) -> None:
        """Let other runs write to a cache of :func:`open_cache`; reading goes on."""
        self._lock = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_lock": None}


class _Lock:
    """The right to write to a directory, given up with the object. Raises DataError if another run has it."""

    def __init__(self, directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        lock_for_run(descriptor, directory, "Wait for it, or choose another directory.")


def cache_features(
    target: Target,
    sequences: Sequence[Sequence[int] | Tensor],
    directory: str | Path,
    *,
    images: Mapping[int, tuple[str, Callable[[], Inputs]]] | None = None,
    shard_tokens: int = SHARD_TOKENS,
    batch_tokens: int = 2048,
    max_tokens: int | None = None,
    progress: bool = True,
) -> FeatureStore:
    """Compute and store the features of sequences that the cache lacks.

    Args:
        target: the target; outputs of its watched layers are stored too. All features are stored in bf16.
        sequences: token ids.
        directory: directory of the cache, created if missing.
        images: by number of a sequence, the digest of its images, and what returns their inputs of the target.
        shard_tokens: tokens per shard, the most work that a kill can lose.
        batch_tokens: tokens per forward.
        max_tokens: most tokens in the cache.
        progress: show a progress bar.

    Raises:
        DataError: the cache has another target or other layers, another run is writing it, or the disk lacks space.
    """
    directory = Path(directory)
    store = open_cache(directory, target)
    try:
        texts: dict[str, Sequence[int] | Tensor] = {}
        readers: dict[str, Callable[[], Inputs]] = {}
        total = store.tokens
        for number, ids in enumerate(sequences):
            digest, inputs = (images or {}).get(number, ("", dict))
            key = sequence_key(ids, digest)
            if key in store or key in texts or not len(ids):
                continue
            if max_tokens is not None and total + len(ids) > max_tokens:
                break
            texts[key] = ids
            if digest:
                readers[key] = inputs
            total += len(ids)
        missing = total - store.tokens
        check_disk(directory, missing * token_bytes(target))
        bar = tqdm(
            total=total, initial=store.tokens, unit="tok", unit_scale=True, desc="caching features",
            disable=not progress,
        )  # fmt: skip
        with bar:
            for shard in _shards(texts, shard_tokens):
                _write_shard(target, shard, readers, directory, batch_tokens, bar)
    finally:  # an error's traceback would keep the lock
        store.release()
    return FeatureStore(directory)


def open_cache(directory: Path, target: Target) -> FeatureStore:
    """Open or create a cache to write to it, until the store is released or gone.

    Raises DataError if it has another target or other layers, or another run is writing it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = _Lock(directory)
    header, layers = directory / "index.json", list(target.captured_layers)
    if not header.exists():
        write_json(header, {"format": FORMAT, "version": VERSION, "target": _target_facts(target), "layers": layers})
    store = FeatureStore(directory)
    store._lock = lock
    store.check_target(target)
    if store.layers != layers:
        raise DataError(
            f"the cache {directory} holds inner layers {store.layers}, not {layers}. Give another --output, or the "
            "same --layers."
        )
    return store


def _write_shard(
    target: Target, texts: _Texts, images: Mapping[str, Callable[[], Inputs]], directory: Path, batch_tokens: int,
    bar: Any,
) -> None:  # fmt: skip
    rows: dict[str, Tensor] = {}
    try:
        for key, features in _features_of(target, texts, images, batch_tokens):
            rows[key] = features
            bar.update(len(features))
    finally:  # what was computed before an error or a signal is kept, too
        save_shard(directory, rows)


def _features_of(
    target: Target, texts: _Texts, images: Mapping[str, Callable[[], Inputs]], batch_tokens: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield keys and features [M, F] of texts, batch by batch; ``images``: what reads the images' inputs, by key."""
    keys = list(texts)
    for batch in PackingSampler([len(ids) for ids in texts.values()], batch_tokens, shuffle=False):
        ids = [torch.as_tensor(texts[keys[row]], dtype=torch.long) for row in batch]
        packed = torch.cat(ids)[None].to(target.device)
        inputs = {number: images[keys[row]]() for number, row in enumerate(batch) if keys[row] in images}
        mask = text_mask(target, packed, list(map(len, ids)), inputs)
        with torch.inference_mode():
            features = target_features(target, packed, mask)[0]
        parts = features.to(torch.bfloat16).cpu().split(mask.lengths)
        yield from ((keys[row], part.clone()) for row, part in zip(batch, parts, strict=True))


def save_shard(directory: Path, rows: Mapping[str, Tensor]) -> None:
    """Write the features [M, F] of whole sequences by key.

    NaN and infinite ones, with which no run could train, are left out with a warning.
    """
    finite = {key: row for key, row in rows.items() if row.isfinite().all()}
    if len(finite) < len(rows):
        log.warning(
            "%s: %d of %d sequences are left out: the target computes NaN or infinite features of them, first of %s. "
            "Check its weights and dtype (fp16 overflows; bf16 or fp32 do not).", directory, len(rows) - len(finite),
            len(rows), next(key for key in rows if key not in finite),
        )  # fmt: skip
    if not finite:
        return
    names = {path.name for path in _shard_files(directory)}
    path = directory / next(
        name for n in itertools.count(len(names)) if (name := f"shard-{n:05d}.safetensors") not in names
    )
    with replacing(path) as draft:
        save_file(finite, draft, metadata={_CHECKSUM: _checksum(finite)})


def _checksum(rows: Mapping[str, Any]) -> str:
    """Return a digest of keys and features; ``rows`` are tensors or slices of a file."""
    digest = hashlib.sha256()
    for key in sorted(rows):
        digest.update(key.encode())
        digest.update(rows[key][:].view(torch.uint8).numpy())
    return digest.hexdigest()


def _shards(texts: _Texts, shard_tokens: int) -> Iterator[_Texts]:
    shard: dict[str, Sequence[int] | Tensor] = {}
    size = 0
    for key, ids in texts.items():
        if shard and size + len(ids) > shard_tokens:
            yield shard
            shard, size = {}, 0
        shard[key] = ids
        size += len(ids)
    if shard:
        yield shard


def _shard_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("shard-*.safetensors"))


def _read_header(directory: Path) -> dict[str, Any]:
    path = directory / "index.json"
    if not path.is_file():
        raise DataError(f"{directory} is not a feature cache (no index.json). Run `fsd-train cache-features`.")
    header = read_json(path, "Delete the cache and make it again.")
    versions = ((FORMAT, _NORMED_VERSION), (FORMAT, VERSION))
    known = isinstance(header, dict) and (header.get("format"), header.get("version")) in versions
    facts, layers = (header.get("target"), header.get("layers", [])) if known else (None, [])
    numbered = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not isinstance(facts, dict) or _WEIGHTS not in facts or not numbered:
        raise DataError(f"{path} is not a feature cache of version {VERSION}. Make it again with this program.")
    return dict(header)


def _target_facts(target: Target) -> dict[str, Any]:
    """Return the header's facts about a target."""
    return {**target.fingerprint(), _WEIGHTS: target.weights_digest()}


def token_bytes(target: Target) -> int:
    return 2 * target.hidden_size * (1 + len(target.captured_layers))


def check_disk(directory: Path, needed: int) -> None:
    """Raise DataError if the disk of a directory has no room for ``needed`` bytes of features."""
    free = shutil.disk_usage(directory).free
    if needed and needed + _DISK_RESERVE > free:
        raise DataError(
            f"{directory}: the features need {needed / 1e9:.2f} GB, and {_DISK_RESERVE / 1e9:.2f} GB are to stay free, "
            f"but the disk has {free / 1e9:.2f} GB. Give another directory, fewer or shorter rows (--max-tokens, "
            "--max-length), or train without a cache."
        )
