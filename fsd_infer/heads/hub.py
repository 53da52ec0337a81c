"""Heads on the Hub: recognised by their config; only config and safetensors are fetched."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import _CACHED_NO_EXIST, HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from fsd_core.errors import CheckpointError
from fsd_core.files import read_weight_map
from fsd_core.hub import check_mistyped, hub_errors, is_hub_id, load_whole
from fsd_infer.heads.formats import kind_in, read_config, unpickle, weights_advice
from fsd_infer.heads.kinds import EAGLES, HYDRA, MEDUSA, kind_of
from fsd_infer.heads.stored_parts import CONFIG
from fsd_infer.heads.weights import AGAIN, INDEX, MEDUSA_FILE, PICKLE, SINGLE, Weights, has_weights

PICKLES = {MEDUSA: "medusa_lm_head.pt", HYDRA: "hydra_lm_head.pt"}  # as their authors name them
_FEW = 4  # most layers of an EAGLE head; the weights of larger models are not examined


class FoundHead(NamedTuple):
    """A draft head's kind, the directory of all its files, and its config."""

    kind: str
    directory: Path
    config: dict[str, Any]


def find_head(source: str | os.PathLike[str], **hub: Any) -> Path | None:
    """Return the directory of the EAGLE head that ``source`` names; arguments and errors as for :func:`find`."""
    head = find(source, EAGLES, **hub)
    return None if head is None else head.directory


def find(source: str | os.PathLike[str], kinds: Container[str], **hub: Any) -> FoundHead | None:
    """Return the draft head of one of these kinds that ``source`` names; None if it names another model.

    Args:
        source: a directory or hub id. Of a repository, the config is fetched first. If the config is ambiguous, the
            tensors' names decide. Safetensors are fetched only for heads of these kinds.
        kinds: see :mod:`.kinds`.
        hub: ``revision``, ``token``, ``subfolder``, ``cache_dir``, ``local_files_only`` as in transformers.

    Raises:
        HubError: no such repository or revision, no access, or no connection.
        CheckpointError: the files are malformed, or its weights are in a pickle.
    """
    name = os.fspath(source)
    if not is_hub_id(name):
        directory = Path(source) / hub.get("subfolder", "")
        return _in_directory(directory, kinds) if (directory / CONFIG).is_file() else None
    check_mistyped(name, **hub)
    return load_whole(source, lambda: _fetched(name, kinds, **hub), **hub)


def _in_directory(directory: Path, kinds: Container[str]) -> FoundHead | None:
    config = read_config(directory)
    kind = kind_in(directory, config)
    if kind is None or kind not in kinds:
        return None
    # what an EAGLE head lacks is reported where it is read
    if kind not in EAGLES and not has_weights(directory) and not (directory / _singles(kind)[0]).is_file():
        pickles = sorted(file.name for file in directory.glob("*") if file.suffix in (".bin", ".pt", ".pth"))
        advice = weights_advice(directory, pickles[0] if pickles else PICKLES.get(kind, PICKLE))
        raise CheckpointError(f"{directory} is a {kind} head without {SINGLE}. {advice}")
    return FoundHead(kind, directory, config)


def _fetched(source: str, kinds: Container[str], **hub: Any) -> FoundHead | None:
    repository = _Repository(source, **hub)
    if (path := repository.file(CONFIG)) is None:
        return None
    directory, config = path.parent, read_config(path.parent)
    kind, layers = kind_of(config), config.get("num_hidden_layers")
    if kind is None:
        if layers not in range(1, _FEW + 1):
            return None
        # a small causal LM, or a head of EAGLE-1/2
        names = set(Weights(directory).shapes) if has_weights(directory) else repository.tensors()
        if names is None:
            raise CheckpointError(
                f"{source} is a model of {layers} layers, as EAGLE heads are, without {SINGLE}. {unpickle()}"
            )
        kind = kind_of(config, names)
    if kind is None or kind not in kinds:
        return None
    if not repository.fetch_weights(_singles(kind)):
        advice = unpickle(file=PICKLES.get(kind, PICKLE))
        raise CheckpointError(f"{source} is a head of kind {kind}, without {SINGLE}. {advice}")
    return FoundHead(kind, directory, config)


def _singles(kind: str) -> Sequence[str]:
    """Return the names that a file with all tensors of a head may have."""
    return (MEDUSA_FILE, SINGLE) if kind == MEDUSA else (SINGLE,)


class _Repository:
    """A repository of the Hub, pinned to its commit at the first fetch."""

    def __init__(self, name: str, revision: str | None = None, subfolder: str = "", token: Any = None, **where: Any):
        self.name, self.revision, self.folder, self.token, self.where = name, revision, subfolder, token, where

    def file(self, name: str) -> Path | None:
        """Return the path of a file in the cache, fetched if needed; None if the repository does not have it."""
        path = f"{self.folder}/{name}".strip("/")
        with hub_errors(self.name, self.revision):
            try:
                cached = hf_hub_download(self.name, path, revision=self.revision, token=self.token, **self.where)
            except LocalEntryNotFoundError:
                cached_entry = try_to_load_from_cache(self.name, path, self.where.get("cache_dir"), self.revision)
                if cached_entry is _CACHED_NO_EXIST:  # the cache records that the repository lacks the file
                    return None
                raise
            except EntryNotFoundError:
                return None
        self.revision = Path(cached.removesuffix(path)).name
        return Path(cached)

    def fetch_weights(self, single: Sequence[str]) -> bool:
        """Fetch the first of these files that there is, else all shards of an index. Return whether there are any."""
        if any(map(self.file, single)):
            return True
        index = self.file(INDEX)
        for shard in sorted(set(read_weight_map(index, AGAIN).values())) if index is not None else ():
            self.file(shard)
        return index is not None

    def tensors(self) -> set[str] | None:
        """Return the tensors' names, from the header of the safetensors file or from the index; None if it has none."""
        with hub_errors(self.name, self.revision):
            try:
                path, api = f"{self.folder}/{SINGLE}".strip("/"), HfApi(token=self.token)
                return set(api.parse_safetensors_file_metadata(self.name, path, revision=self.revision).tensors)
            except EntryNotFoundError:
                pass
        index = self.file(INDEX)
        return None if index is None else set(read_weight_map(index, AGAIN))
