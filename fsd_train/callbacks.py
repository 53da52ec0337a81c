"""Callbacks of training: exported heads, throughput, curves."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)


class ExportHead(Callback):
    """Writes the head in the form `fsd-infer` reads, at the end of training and, if asked, every n steps.

    Args:
        directory: where to; default ``head`` in the trainer's log directory.
        every_n_train_steps: also during training. The directory is replaced as a whole, so it always holds a usable
            head.
    """

    def __init__(self, directory: str | None = None, every_n_train_steps: int | None = None) -> None:
        self.directory = directory
        self.every_n_train_steps = every_n_train_steps
        self._last = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.every_n_train_steps and step % self.every_n_train_steps == 0 and step != self._last:
            self._last = step
            self.write(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.write(trainer, pl_module)

    def write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        directory = Path(self.directory or Path(_log_dir(trainer)) / "head")
        draft, old = directory.with_name(directory.name + ".partial"), directory.with_name(directory.name + ".old")
        shutil.rmtree(draft, ignore_errors=True)
        metrics = {k: round(float(v), 4) for k, v in trainer.callback_metrics.items() if k.startswith("val_")}
        pl_module.export(draft, {"metrics": metrics})  # type: ignore[operator]
        shutil.rmtree(old, ignore_errors=True)
        if directory.exists():
            os.replace(directory, old)
        os.replace(draft, directory)
        shutil.rmtree(old, ignore_errors=True)


class TokenRate(Callback):
    """Logs ``tokens_per_s``: supervised tokens (answer tokens of the batch) per second of training, without validation.

    Args:
        window: batches that are averaged over.
    """

    def __init__(self, window: int = 20) -> None:
        self.window = window
        self._tokens = 0
        self._seconds = 0.0
        self._start: float | None = None
        self._batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._start is None:
            self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._tokens += int(batch["loss_mask"].sum()) * trainer.world_size
        self._seconds += now - (self._start or now)
        self._start = now  # the wait for the next batch counts too
        self._batches += 1
        if self._batches >= self.window:
            pl_module.log("tokens_per_s", self._tokens / max(self._seconds, 1e-9), prog_bar=True)
            self._tokens, self._seconds, self._batches = 0, 0.0, 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = None


class LossCurve(Callback):
    """Draws the logged curves to ``curves.png`` at the end of training (where matplotlib is installed).

    Its points travel in the checkpoint, so the curve of a resumed run is whole.

    Args:
        path: of the picture; default ``curves.png`` in the trainer's log directory.
        every_n_train_steps: distance of the training points.
    """

    def __init__(self, path: str | None = None, every_n_train_steps: int = 10) -> None:
        self.path = path
        self.every_n_train_steps = every_n_train_steps
        self.points: dict[str, list[tuple[int, float]]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = {name: [(int(x), float(y)) for x, y in points] for name, points in state_dict["points"].items()}

    def _note(self, trainer: Trainer, validation: bool) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val_") == validation:
                points = self.points.setdefault(name, [])
                if not points or points[-1][0] < trainer.global_step:
                    points.append((trainer.global_step, float(value)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every_n_train_steps == 0:
            self._note(trainer, validation=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, validation=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or not self.points:
            return
        try:
            from matplotlib.figure import Figure
        except ImportError:
            log.warning("no curves.png: matplotlib is not installed")
            return
        panels = {
            "loss": [name for name in self.points if name.endswith("loss")],
            "agreement": [name for name in self.points if "agreement" in name],
            "tau": [name for name in self.points if name.endswith("tau")],
        }
        shown = {title: names for title, names in panels.items() if names}
        figure = Figure(figsize=(5 * len(shown), 4))
        for number, (title, names) in enumerate(shown.items(), start=1):
            axes = figure.add_subplot(1, len(shown), number)
            for name in sorted(names):
                marker = "." if name.startswith("val_") else ""
                axes.plot(*zip(*self.points[name], strict=True), label=name, marker=marker)
            axes.set(title=title, xlabel="step")
            axes.legend(fontsize=7)
        figure.tight_layout()
        path = Path(self.path or Path(_log_dir(trainer)) / "curves.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def _log_dir(trainer: Trainer) -> str:
    return trainer.log_dir or trainer.default_root_dir
