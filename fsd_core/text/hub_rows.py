"""Stream rows of a dataset on the Hub by the `datasets` library. Datasets are named

hf:OWNER/NAME                              split train of the default configuration
hf:OWNER/NAME@REVISION?split=train_sft     another split, of a branch, tag or commit
hf:OWNER/NAME?config=en&limit=5000         the first rows of a configuration
hf:OWNER/NAME?prompt=instruction           FIELD=COLUMN, where docs/training.md lists the fields
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from fsd_core.errors import DataError, imported, shortened
from fsd_core.registry import read_int
from fsd_core.text.conversations import PROMPT_FIELDS

PREFIX = "hf:"
_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([^?@\s]+))?(?:\?(.*))?")
_FIELDS = {*PROMPT_FIELDS, "id", "source", "category", "answer", "prompt_ids", "response_ids", "tools"}


def is_hub_name(path: str | Path) -> bool:
    """Return whether a path names a dataset on the Hub."""
    return str(path).startswith(PREFIX)


@dataclass(frozen=True)
class HubRows:
    """A dataset on the Hub and the part of it to read.

    Attributes:
        repository: OWNER/NAME.
        revision: branch, tag or commit; None: the default.
        split: name of the split.
        config: name of the configuration; None: the default.
        limit: most rows; None: all.
        columns: the dataset's column for each renamed field.
    """

    repository: str
    revision: str | None = None
    split: str = "train"
    config: str | None = None
    limit: int | None = None
    columns: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> HubRows:
        """Parse a name. Raise DataError for a malformed one."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise DataError(f"{text!r:.80}: a dataset on the Hub is named hf:OWNER/NAME[@REVISION][?split=SPLIT&…].")
        options: dict[str, Any] = {}
        columns: dict[str, str] = {}
        for part in filter(None, (match[3] or "").split("&")):
            key, _, value = part.partition("=")
            if not value or key not in ("split", "config", "limit", *_FIELDS):
                raise DataError(
                    f"{text!r:.80}: cannot use {part!r:.40}; known are split, config, limit, and FIELD=COLUMN for the "
                    f"fields {', '.join(sorted(_FIELDS))}."
                )
            if key in _FIELDS:
                columns[key] = value
            else:
                options[key] = value
        if "limit" in options:
            options["limit"] = read_int(options["limit"])
            if options["limit"] is None or options["limit"] < 1:
                raise DataError(f"{text!r:.80}: limit must be a whole number from 1.")
        return cls(match[1], match[2], columns=columns, **options)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows.

        Raises:
            DataError: no such dataset, revision, split or column, no answer from the Hub, or no package `datasets`.
        """
        from fsd_core.hub import guarded

        datasets = imported("datasets", f"reading hf:{self.repository}", "train", DataError)
        number = 0
        try:
            with guarded():
                dataset = datasets.load_dataset(
                    self.repository, self.config, split=self.split, revision=self.revision, streaming=True
                )
                for row in dataset if self.limit is None else dataset.take(self.limit):
                    yield self._renamed(row)
                    number += 1
        except DataError:
            raise
        except Exception as error:  # the Hub, the network and the files raise errors of many types
            where = f"hf:{self.repository}" + (f"@{self.revision}" if self.revision else "")
            reason = self._fault(error) or (
                f"{type(error).__name__}: {shortened(error)}. Check its name, revision and split, and your access to "
                "it (`hf auth login`)."
            )
            raise DataError(f"{where}: unreadable after row {number}: {reason}") from error

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        missing = sorted(set(self.columns.values()) - set(row))
        if missing:
            raise DataError(f"hf:{self.repository}: has no column {missing[0]!r}; its columns are {', '.join(row)}.")
        others = {name: value for name, value in row.items() if name not in self.columns.values()}
        return {**others, **{ours: row[theirs] for ours, theirs in self.columns.items()}}

    def digest(self, text: str) -> str:
        """Return the SHA-256 of the name and its current commit, in hexadecimal.

        Args:
            text: the name.

        Raises:
            DataError: the Hub does not answer, or has no such dataset.
        """
        try:
            commit = self._commit()
        except Exception as error:
            raise DataError(f"{text}: {self._fault(error) or shortened(error)}") from error
        return hashlib.sha256(f"{text} {commit}".encode()).hexdigest()

    def _commit(self) -> str:
        from fsd_core.hub import guarded

        with guarded():
            return str(
                import_module("huggingface_hub").HfApi().dataset_info(self.repository, revision=self.revision).sha
            )

    def _fault(self, error: Exception) -> str | None:
        """Return what the Hub says about the dataset, whose cause `datasets` may hide; None if it has no part."""
        from fsd_core.hub import hub_fault

        fault = hub_fault(error, self.revision)
        if fault is None:
            try:
                self._commit()
            except Exception as refused:
                fault = hub_fault(refused, self.revision)
        return (
            None if fault is None else f"it {fault}".replace("no directory, and ", "").replace("no directory and ", "")
        )
