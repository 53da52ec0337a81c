"""Keep the sums of a forecast after each answer, so that the same command continues one that was killed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import astuple
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsd_bench.worth.replay import Replay, Tally
from fsd_bench.worth.watch import Watch
from fsd_core.errors import FsdError
from fsd_core.files import jsonable, misshapen, read_json, write_json
from fsd_infer.engine.first_choices import FirstChoiceStats

_SAMPLED = 4096  # numbers of a tensor that tell its weights from others
_ADVICE = "Delete it, and the forecast begins again."
_WATCHED = ("steps", "draft_seconds", "contexts")
_DECODED = ("emitted", "rounds", "rest", "length")


def modules_digest(modules: Iterable[nn.Module]) -> str:
    """Return hexadecimal digits of some numbers of every tensor of these models."""
    digest = hashlib.sha256()
    for name, tensor in chain.from_iterable(module.state_dict().items() for module in modules):
        digest.update(name.encode())
        if type(tensor) is torch.Tensor and not tensor.is_meta:  # not those of quantisation libraries
            flat = tensor.reshape(-1)
            some = flat[:: max(1, len(flat) // _SAMPLED)].to("cpu", torch.float64)
            digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]


class KeptSums:
    """The sums of a forecast, and their file.

    Args:
        path: the file; None keeps nothing.
        settings: JSON values that must be equal for a forecast to continue.
        replays, watch, decoded: what adds up the answers.
    """

    def __init__(
        self, path: Path | None, settings: dict[str, Any], replays: Iterable[Replay], watch: Watch, decoded: Any
    ) -> None:
        self.path, self.settings = path, jsonable(settings)
        self.tallies = [tally for replay in replays for tally in replay.tallies.values()]
        self.watch, self.decoded = watch, decoded

    def restore(self) -> int:
        """Take over the file's sums and return how many answers are in them.

        Raises FsdError if it is damaged or has other settings.
        """
        if self.path is None or not self.path.is_file():
            return 0
        stored = read_json(self.path, _ADVICE)
        with misshapen(self.path, _ADVICE):
            if stored["settings"] != self.settings:
                raise FsdError(
                    f"{self.path} was made with other settings or weights: use the same, or add --overwrite."
                )
            for tally, values in zip(self.tallies, stored["tallies"], strict=True):
                vars(tally).update(vars(Tally(*values)))
            for owner, names in ((self.watch, _WATCHED), (self.decoded, _DECODED)):
                vars(owner).update({name: stored[name] for name in names})
            self.watch.spent.update(zip(self.watch.spent, stored["spent"], strict=True))
            try:
                self.watch.generator.set_state(torch.tensor(stored["generator"], dtype=torch.uint8))
            except RuntimeError as error:
                raise ValueError(f"generator: {error}") from error
            self.decoded.drafts = FirstChoiceStats(stored["drafts"])
            return int(stored["answers"])

    def save(self, answers: int) -> None:
        """Write the sums of so many answers, atomically."""
        if self.path is None:
            return
        numbers = {name: getattr(self.watch, name) for name in _WATCHED}
        numbers |= {name: getattr(self.decoded, name) for name in _DECODED}
        drafts, state = self.decoded.drafts.gaps(), self.watch.generator.get_state().tolist()
        kept = {"answers": answers, "settings": self.settings, "tallies": [astuple(tally) for tally in self.tallies]}
        spent = list(self.watch.spent.values())
        write_json(self.path, {**kept, **numbers, "spent": spent, "drafts": drafts, "generator": state})
