"""A plot of a run's curves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from fsd_train.callbacks.decoded import Curves, DecodedTau
from fsd_train.callbacks.export import log_dir
from fsd_train.checkpoints import callbacks_of
from fsd_train.types import PositiveInt

log = logging.getLogger(__name__)


class LossCurve(Curves):
    """Plots the logged curves to ``curves.png`` at the end of training, if matplotlib is installed.

    Checkpoints hold the points, so a resumed run gets whole curves.

    Args:
        path: file of the plot (default: ``curves.png`` in the trainer's log directory).
        every_n_train_steps: steps between training points.
    """

    def __init__(self, path: str | None = None, every_n_train_steps: PositiveInt = 10) -> None:
        super().__init__()
        self.path = path
        self.every_n_train_steps = every_n_train_steps

    def _note(self, trainer: Trainer, validation: bool) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val_") == validation and not name.startswith("decoded_"):
                self.points.setdefault(name, {}).setdefault(trainer.global_step, float(value))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step % self.every_n_train_steps == 0:
            self._note(trainer, validation=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, validation=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        curves = dict(self.points)
        for callback in callbacks_of(trainer, DecodedTau):
            curves.update(callback.points)
        if not trainer.is_global_zero or not curves:
            return
        try:
            from matplotlib.figure import Figure
        except ImportError:
            log.warning("no curves.png: matplotlib is not installed")
            return
        panels = {
            "loss": [name for name in curves if name.endswith("loss")],
            "agreement": [name for name in curves if "agreement" in name],
            "tau": [name for name in curves if "tau" in name],
            "gate open": [name for name in curves if "gate_open" in name],
            "divergence": [name for name in curves if "divergence" in name or "spent" in name],
        }
        shown = {title: names for title, names in panels.items() if names}
        figure = Figure(figsize=(5 * len(shown), 4))
        for number, (title, names) in enumerate(shown.items(), start=1):
            axes = figure.add_subplot(1, len(shown), number)
            for name in sorted(names):
                marker = "." if name.startswith(("val_", "decoded_")) else ""
                axes.plot(list(curves[name]), list(curves[name].values()), label=name, marker=marker)
            axes.set(title=title, xlabel="step")
            axes.legend(fontsize=7)
        figure.tight_layout()
        path = Path(self.path or Path(log_dir(trainer)) / "curves.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
