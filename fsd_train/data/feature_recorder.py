"""Features that the target makes while it answers, kept for training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fsd_infer.engine import Callback, RoundReport
from fsd_infer.targets.target import Target
from fsd_train.data.features import check_disk, open_cache, save_shard, sequence_key


class FeatureRecorder(Callback):
    """Keeps the features that the target makes while it answers, which saves a second pass over the answers.

    It is a callback of each request, see :meth:`of`. The target never reads a text's last token, whose features no loss
    needs; they repeat the previous token's.

    Args:
        target: the target that answers.
        directory: directory of the cache; :func:`.cache_features` can complete it after a killed run.

    Raises:
        DataError: as :func:`.open_cache`.
    """

    def __init__(self, target: Target, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._store = open_cache(self.directory, target)
        self._prompts: Sequence[Sequence[int]] = ()
        self._read: dict[int, list[Tensor]] = {}

    def of(self, prompts: Sequence[Sequence[int]]) -> FeatureRecorder:
        """Begin a request with these prompts, and return the callback for it."""
        self._prompts, self._read = prompts, {}
        return self

    def on_round(self, report: RoundReport) -> None:
        counts = (report.verdict.accepted + 1).tolist()
        if report.phase == "prefill":
            counts = [len(self._prompts[number]) for number in report.prompt_indices]
        for number, features, count in zip(report.prompt_indices, report.tensors.features, counts, strict=True):
            self._read.setdefault(number, []).append(features[:count].clone())

    def save(self, answers: Sequence[Sequence[int]], digests: Sequence[str] = ()) -> None:
        """Write one shard with the texts of the request, given answers and digests of images in the prompts' order."""
        rows: dict[str, Tensor] = {}
        for number, (prompt, answer) in enumerate(zip(self._prompts, answers, strict=True)):
            ids = [*prompt, *answer]
            key = sequence_key(ids, digests[number] if digests else "")
            if key not in self._store:
                features = torch.cat(self._read[number])[: len(ids)]  # the last round may read beyond the answer's end
                last = features[-1:].expand(len(ids) - len(features), -1)
                rows[key] = torch.cat([features, last]).to(torch.bfloat16).cpu()
        self._read = {}
        if rows:
            check_disk(self.directory, sum(row.nbytes for row in rows.values()))
            save_shard(self.directory, rows)
