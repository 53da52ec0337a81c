"""Callbacks of training: exported heads, throughput, curves, accepted length in real decoding."""

from __future__ import annotations

import copy
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging

from fsd_infer.cpu.ops import speed_up
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import Drafter, EagleDrafter, TreeShape
from fsd_infer.errors import DataError
from fsd_infer.rules import parse_rule
from fsd_infer.targets.target import Target
from fsd_train.data import on_host
from fsd_train.metrics import DEFAULT_RULES
from fsd_train.safety import settle
from fsd_train.strategies import is_sharded, whole_head

log = logging.getLogger(__name__)


class ExportHead(Callback):
    """Writes the head in the form `fsd-infer` reads, at the end of training and, if asked, every n steps.

    With ``ema_decay`` it is the averaged weights that are written, each time.

    Args:
        directory: where to; default ``head`` in the trainer's log directory.
        every_n_train_steps: also during training. The directory is replaced as a whole, so it always holds a usable
            head.
    """

    def __init__(self, directory: str | None = None, every_n_train_steps: int | None = None) -> None:
        self.directory = directory
        self.every_n_train_steps = every_n_train_steps
        self._last = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if self.every_n_train_steps and step % self.every_n_train_steps == 0 and step != self._last:
            self._last = step
            with _averaged(trainer, pl_module):
                self.write(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.write(trainer, pl_module)

    def write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        settle(trainer)
        with whole_head(pl_module):  # every rank takes part where the head is sharded
            if trainer.is_global_zero:
                self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        self._tokens += int(on_host(batch, "loss_mask").sum()) * trainer.world_size
        self._seconds += now - (self._start or now)
        self._start = now  # the wait for the next batch counts too
        self._batches += 1
        if self._batches >= self.window:
            pl_module.log("tokens_per_s", self._tokens / max(self._seconds, 1e-9), prog_bar=True)
            self._tokens, self._seconds, self._batches = 0, 0.0, 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pause()

    def pause(self) -> None:
        """Leave out the time until the next batch begins."""
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
        self.points = _points(state_dict["points"])

    def _note(self, trainer: Trainer, validation: bool) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val_") == validation and not name.startswith("decoded_"):
                points = self.points.setdefault(name, [])
                if not points or points[-1][0] < trainer.global_step:
                    points.append((trainer.global_step, float(value)))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step % self.every_n_train_steps == 0:
            self._note(trainer, validation=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, validation=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        curves = dict(self.points)
        for callback in _callbacks(trainer):
            if isinstance(callback, DecodedTau):
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
                axes.plot(*zip(*curves[name], strict=True), label=name, marker=marker)
            axes.set(title=title, xlabel="step")
            axes.legend(fontsize=7)
        figure.tight_layout()
        path = Path(self.path or Path(_log_dir(trainer)) / "curves.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)


def _points(saved: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[tuple[int, float]]]:
    """Points of curves as they were before they went through a checkpoint."""
    return {name: [(int(x), float(y)) for x, y in points] for name, points in saved.items()}


def _callbacks(trainer: Any) -> list[Callback]:
    return list(trainer.callbacks)  # set by a connector, so that type checkers do not see it


def _log_dir(trainer: Trainer) -> str:
    return trainer.log_dir or trainer.default_root_dir


class DecodedTau(Callback):
    """Decodes validation prompts with the head or drafter as it is, through fsd_infer's engine, and logs per rule

    - ``decoded_tau/RULE``: accepted length, the target's own token counted;
    - ``decoded_gate_open/RULE``: share of tokens emitted where a gate was open;
    - ``decoded_spent/RULE``: divergence spent per token, in nats;
    - ``decoded_length/RULE``: mean answer length in tokens.

    They can be monitored by ModelCheckpoint (``monitor: decoded_tau/exact``) and are drawn by :class:`LossCurve`. With
    ``ema_decay`` it is the averaged weights that decode. Draws are the same each time and leave training's alone.

    Memory: a copy of the head or drafter in the target's dtype while decoding; and, where features are cached and the
    target was therefore loaded without its layers, the whole target (2 bytes per parameter in bf16) from the first
    time on. Rank 0 decodes and the others wait; where fsdp shards the target all ranks decode the same, since each of
    its layers is gathered from all.

    Args:
        rules: as for `fsd-infer`: "exact", "fuzzy:js:0.3" ...
        every_n_train_steps: also during training; at the end in any case.
        prompts: how many validation prompts, taken at equal distances.
        max_new_tokens: of each answer.
        temperature: of the decoding; 0 is greedy.
        tree: depth, width and nodes of the draft tree; default as in decoding on this device.
        seed: of the draws.
        best: directory for the head of the step with the highest accepted length under the first rule, as
            :class:`ExportHead` writes it; its training checkpoint lies beside it as ``<best>.ckpt``.
    """

    def __init__(
        self,
        rules: list[str] | None = None,
        every_n_train_steps: int | None = None,
        prompts: int = 16,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        tree: dict[str, int] | None = None,
        seed: int = 0,
        best: str | None = None,
    ) -> None:
        if prompts < 1 or max_new_tokens < 2 or temperature < 0:
            raise DataError(
                "DecodedTau needs prompts >= 1, max_new_tokens >= 2 and temperature >= 0; got "
                f"{prompts}, {max_new_tokens} and {temperature}."
            )
        self.rules = list(rules or DEFAULT_RULES)
        for rule in self.rules:
            parse_rule(rule)
        self.every_n_train_steps = every_n_train_steps
        self.prompts, self.max_new_tokens, self.temperature, self.seed = prompts, max_new_tokens, temperature, seed
        self.tree = None if tree is None else TreeShape(**tree)
        self.best = best
        self.points: dict[str, list[tuple[int, float]]] = {}
        self._full: Target | None = None
        self._last = 0

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = _points(state_dict["points"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not getattr(getattr(trainer, "datamodule", None), "validation_set", None):
            share = getattr(getattr(trainer, "datamodule", None), "validation_fraction", 0)
            raise DataError(
                f"DecodedTau decodes validation prompts, and there are none (validation_fraction {share} of one prompt "
                "holds out none): add rows, set data.validation_files, or leave the callback out."
                if share
                else "DecodedTau needs validation rows: set data.validation_fraction or data.validation_files."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._prompts(trainer, pl_module.target)  # type: ignore[arg-type]  # none fits: better said now than in hours

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step  # which the first of accumulated batches still ends with

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if self.every_n_train_steps and step % self.every_n_train_steps == 0 and step != self._last:
            for name, value in self.run(trainer, pl_module).items():
                pl_module.log(name, value, logger=False)  # for monitors; loggers have it from run()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._last:
            self.run(trainer, pl_module)

    def run(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Decode now, log, and return what was logged."""
        settle(trainer)
        self._last = trainer.global_step
        values: dict[str, float] = {}
        together = is_sharded(pl_module.target.model)  # type: ignore[union-attr,arg-type]
        with whole_head(pl_module):
            if together or trainer.is_global_zero:
                with _averaged(trainer, pl_module):
                    values = self.measure(trainer, pl_module)
        values = trainer.strategy.broadcast(values)  # the others wait here
        for name, value in values.items():
            self.points.setdefault(name, []).append((self._last, value))
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self._last)
        if self.best is not None:
            self._keep_best(trainer, pl_module)
        for callback in _callbacks(trainer):
            if isinstance(callback, TokenRate):
                callback.pause()
        return values

    def _keep_best(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export and save the weights if no earlier ones decoded as well."""
        taus = [value for _, value in self.points[f"decoded_tau/{self.rules[0]}"]]
        if taus[-1] <= max(taus[:-1], default=0.0):
            return
        with _averaged(trainer, pl_module):
            ExportHead(self.best).write(trainer, pl_module)
        trainer.save_checkpoint(f"{self.best}.ckpt")

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """The values by name, for the weights as they are."""
        target = self._target(pl_module)
        decoder = FuzzyDecoder(target, drafter_of(pl_module, target, self.tree))
        prompts = self._prompts(trainer, target)
        sampled = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        options: dict[str, Any] = sampled if self.temperature > 0 else {"do_sample": False}
        values = {}
        for rule in self.rules:
            with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
                made = decoder.generate(
                    prompts, rule, max_new_tokens=self.max_new_tokens, seed=self.seed, chat=False, **options
                )
            stats = made.stats
            values[f"decoded_tau/{rule}"] = stats.tau
            values[f"decoded_gate_open/{rule}"] = stats.gate_open_fraction
            values[f"decoded_spent/{rule}"] = stats.divergence_spent / max(stats.new_tokens, 1)
            values[f"decoded_length/{rule}"] = stats.new_tokens / len(prompts)
        return values

    def _target(self, pl_module: Any) -> Target:
        """The module's own target where it can run, else the whole one, loaded once."""
        own: Target = pl_module.target
        if not any(parameter.is_meta for parameter in own.model.parameters()):
            return own
        if self._full is None:
            name = pl_module.options.target
            self._full = Target.from_pretrained(name, dtype=own.dtype, device=pl_module.device)
            speed_up(self._full.model)
        return self._full

    def _prompts(self, trainer: Any, target: Target) -> list[list[int]]:
        rows = trainer.datamodule.validation_set
        room = math.inf if target.max_positions is None else target.max_positions - self.max_new_tokens
        found = []
        for number in range(len(rows)):
            item = rows[number]
            first = int(item["loss_mask"].argmax())
            if 0 < first <= room:
                found.append(item["input_ids"][:first].tolist())
        if not found:
            raise DataError(f"no validation prompt leaves room for {self.max_new_tokens} tokens in {target.name}.")
        count = min(self.prompts, len(found))
        return [found[number * len(found) // count] for number in range(count)]


def drafter_of(pl_module: Any, target: Target, tree: TreeShape | None = None) -> Drafter:
    """A drafter made of a copy of what is being trained."""
    if hasattr(pl_module, "make_drafter"):
        made: Drafter = pl_module.make_drafter(target, tree)
        return made
    head = copy.deepcopy(pl_module.head).requires_grad_(False)
    return EagleDrafter(head, target, tree)


@contextmanager
def _averaged(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Inside, the module has the weights that would be validated: the averaged ones, where a callback averages."""
    averaging = [callback for callback in _callbacks(trainer) if isinstance(callback, WeightAveraging)]
    for callback in averaging:
        callback.on_validation_epoch_start(trainer, pl_module)
    try:
        yield
    finally:
        for callback in averaging:
            callback.on_validation_epoch_end(trainer, pl_module)
