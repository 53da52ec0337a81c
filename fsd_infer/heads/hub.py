"""Heads on the Hub: recognised by their config; only config and safetensors are fetched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import _CACHED_NO_EXIST, HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from fsd_core.errors import CheckpointError
from fsd_core.files import read_weight_map
from fsd_core.hub import check_mistyped, hub_errors, is_hub_id, load_whole
from fsd_infer.heads.formats import head_kind, kind_of, read_config, unpickle
from fsd_infer.heads.kinds import HYDRA, MEDUSA, MTP, kind_of_head
from fsd_infer.heads.stored_parts import CONFIG
from fsd_infer.heads.weights import AGAIN, INDEX, MEDUSA_FILE, PICKLE, SINGLE, Weights, has_weights
from fsd_infer.targets.checks import is_mtp_alone

PICKLES = {MEDUSA: "medusa_lm_head.pt", HYDRA: "hydra_lm_head.pt"}  # as their authors name them
_SOME = 8  # most layers of a P-EAGLE head that its config does not tell
_FEW = 4  # most layers of an EAGLE head; the weights of larger models are not examined


def find_head(source: str | os.PathLike[str], **hub: Any) -> Path | None:
    """Return the directory of the head that ``source`` names, with all its files; None if it is no head.

    Args:
        source: a directory or hub id. Of a repository, the config is fetched first. If the config is ambiguous, the
            tensors' names decide. Safetensors are fetched for heads alone.
        hub: ``revision``, ``token``, ``subfolder``, ``cache_dir``, ``local_files_only`` as in transformers.

    Raises:
        HubError: no such repository or revision, no access, or no connection.
        CheckpointError: the files are malformed, or its weights are in a pickle.
    """
    if not is_hub_id(os.fspath(source)):
        directory = Path(source) / hub.get("subfolder", "")
        return None if head_kind(directory) is None else directory
    check_mistyped(os.fspath(source), **hub)
    return load_whole(source, lambda: _fetched(os.fspath(source), **hub), **hub)


def find_published(source: str | os.PathLike[str], **hub: Any) -> tuple[str, Path, dict[str, Any]] | None:
    """Return kind, directory and config of a head that other programs publish and that is no EAGLE head; else None.

    Arguments and errors as of :func:`find_head`.
    """
    name = os.fspath(source)
    if not is_hub_id(name):
        directory = Path(source) / hub.get("subfolder", "")
        return _published(directory, None) if (directory / CONFIG).is_file() else None
    check_mistyped(name, **hub)

    def fetched() -> tuple[str, Path, dict[str, Any]] | None:
        repository = _Repository(name, **hub)
        config = repository.file(CONFIG)
        return None if config is None else _published(config.parent, repository)

    return load_whole(source, fetched, **hub)


def _published(directory: Path, repository: _Repository | None) -> tuple[str, Path, dict[str, Any]] | None:
    config = read_config(directory)
    shapes = Weights(directory).shapes if repository is None and has_weights(directory) else {}
    few = config.get("num_hidden_layers") in range(1, _SOME + 1)
    kind = kind_of_head(config, set(shapes) if few else ())
    if kind is None and shapes and is_mtp_alone(shapes, config):
        kind = MTP
    if kind is None:
        return None
    single = (MEDUSA_FILE, SINGLE) if kind == MEDUSA else (SINGLE,)
    if repository is not None:
        repository.fetch_weights(single)
    if not (has_weights(directory) or (directory / single[0]).is_file()):
        pickles = sorted(file.name for file in directory.glob("*") if file.suffix in (".bin", ".pt", ".pth"))
        file = pickles[0] if pickles else PICKLES.get(kind, PICKLE)
        raise CheckpointError(f"{directory} is a {kind} head without {SINGLE}. {unpickle(f'{directory}/', file)}")
    return kind, directory, config


def _fetched(source: str, **hub: Any) -> Path | None:
    repository = _Repository(source, **hub)
    if (config := repository.file(CONFIG)) is None:
        return None
    directory = config.parent
    values = read_config(directory)
    kind, few = kind_of(values), values.get("num_hidden_layers") in range(1, _FEW + 1)
    if kind is None and few:  # a small causal LM, or a head of EAGLE-1/2
        names = set(Weights(directory).shapes) if has_weights(directory) else repository.tensors()
        if names is not None and (kind := kind_of(values, names)) is None:
            return None
    if not (kind or few):
        return None
    if not repository.fetch_weights((SINGLE,)):
        what = f"an {kind} head" if kind else f"a model of {values['num_hidden_layers']} layers, as EAGLE heads are"
        raise CheckpointError(f"{source} is {what}, without {SINGLE}. {unpickle()}")
    return directory


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
                known = try_to_load_from_cache(self.name, path, self.where.get("cache_dir"), self.revision)
                if known is _CACHED_NO_EXIST:  # the cache records that the repository lacks the file
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
