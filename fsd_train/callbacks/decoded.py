"""Acceptance length in decoding, during a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fsd_bench.trials import decoding
from fsd_core.errors import DataError
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import NoDrafter, TreeShape
from fsd_infer.engine.callback import Callback as RequestCallback
from fsd_infer.rules import parse_rule
from fsd_infer.targets.target import Target
from fsd_train.callbacks.export import ExportHead, averaged
from fsd_train.callbacks.progress import TokenRate
from fsd_train.callbacks.safety import check_finite
from fsd_train.checkpoints import callbacks_of
from fsd_train.losses.metrics import DEFAULT_RULES
from fsd_train.strategies import is_sharded, whole_head
from fsd_train.types import Length, NonNegativeFloat, PositiveInt

log = logging.getLogger(__name__)


class _EndedError(Exception):
    """The run was asked to end while its answers were decoded."""


class _Ending(RequestCallback):
    """Ends a request, and what decodes it, when the run is asked to end."""

    reads_tensors = False

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self.is_asked = is_asked

    def on_phase(self, phase: str) -> None:
        if self.is_asked():
            raise _EndedError


class Curves(Callback):
    """Callback that keeps points of curves, which checkpoints hold: by name, values by step."""

    def __init__(self) -> None:
        self.points: dict[str, dict[int, float]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = {name: dict(points) for name, points in state_dict["points"].items()}


class DecodedTau(Curves):
    """Decodes validation prompts with the current drafter through fsd_infer's engine and logs per rule:

    - ``decoded_tau/RULE``: acceptance length, tokens per target forward;
    - ``decoded_gate_open/RULE``: share of tokens emitted at an open gate;
    - ``decoded_spent/RULE``: divergence per token, in nats;
    - ``decoded_length/RULE``: mean answer length in tokens.

    ModelCheckpoint can monitor these (``monitor: decoded_tau/exact``), and :class:`LossCurve` plots them. With weight
    averaging, the averaged weights decode. Draws repeat in every call and do not affect training.

    Memory: a copy of the drafter in the target's dtype. With cached features it also loads the whole target on first
    use (2 bytes per parameter in bf16). Rank 0 decodes while the others wait. If fsdp shards the target, all ranks
    decode the same prompts, because each layer is gathered from all.

    A signal that ends the run (:class:`.RunDirectory`) ends the decoding, unless fsdp shards the target. It is repeated
    when the run goes on, unless a signal ends that too; after the last step it is left out.

    Args:
        rules: rules as in `fsd-infer`: "exact", "fuzzy:js:0.3" ...
        every_n_train_steps: steps between calls in training (default: only at the end).
        prompts: number of validation prompts, taken at equal distances.
        max_new_tokens: tokens of each answer.
        temperature: temperature; 0 is greedy.
        tree: depth, width and nodes of the draft tree (default: as in decoding on this device).
        seed: seed of the draws.
        best: directory for the head with the highest acceptance length under the first rule, written by
            :class:`ExportHead`. Its training checkpoint is ``<best>.ckpt``.
    """

    def __init__(
        self,
        rules: list[str] | None = None,
        every_n_train_steps: PositiveInt | None = None,
        prompts: PositiveInt = 16,
        max_new_tokens: Length = 128,
        temperature: NonNegativeFloat = 0.0,
        tree: TreeShape | None = None,
        seed: int = 0,
        best: str | None = None,
    ) -> None:
        super().__init__()
        self.rules = list(rules or DEFAULT_RULES)
        for rule in self.rules:
            parse_rule(rule)
        self.every_n_train_steps = every_n_train_steps
        self.prompts, self.max_new_tokens, self.temperature, self.seed = prompts, max_new_tokens, temperature, seed
        self.tree = tree
        self.best = best
        self._full: Target | None = None
        self._last = 0
        self._due: int | None = None  # step whose decoding a signal ended
        # RunDirectory sets both: whether a signal asks to end, and what ends the run
        self.is_asked: Callable[[], bool] = lambda: False
        self.end_run: Callable[[Trainer], None] = lambda trainer: None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "due": self._due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._due = state_dict.get("due")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        data = getattr(trainer, "datamodule", None)
        if getattr(data, "validation_set", None):
            return
        if share := getattr(data, "validation_fraction", 0):
            raise DataError(
                f"DecodedTau needs validation prompts, but validation_fraction {share} holds out none of one prompt. "
                "Add rows, set data.validation_files, or omit the callback."
            )
        raise DataError("DecodedTau needs validation rows. Set data.validation_fraction or data.validation_files.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._numbered(trainer, pl_module.target)  # type: ignore[arg-type]  # fails now if no prompt fits

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = trainer.global_step  # the first of accumulated batches ends with the same step
        if self._due == self._last:
            self.run(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if self.every_n_train_steps and step % self.every_n_train_steps == 0 and step != self._last:
            for name, value in self.run(trainer, pl_module).items():
                pl_module.log(name, value, logger=False)  # for monitors; run() logs to loggers
            if self._due == step:
                self.end_run(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._last:
            self.run(trainer, pl_module)

    def run(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Decode, log, and return the logged values; none if a signal ended it."""
        check_finite(trainer)
        self._last = trainer.global_step
        values: dict[str, float] | None = None
        together = is_sharded(pl_module.target.model)  # type: ignore[union-attr,arg-type]
        with whole_head(pl_module):
            if together or trainer.is_global_zero:
                with averaged(trainer, pl_module), suppress(_EndedError):
                    values = self.measure(trainer, pl_module)
        values = trainer.strategy.broadcast(values)  # the others wait here
        self._due = self._last if values is None else None
        if values is None:
            log.info("the decoding after step %d ended before its last answer", self._last)
            return {}
        for name, value in values.items():
            self.points.setdefault(name, {})[self._last] = value
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self._last)
        if self.best is not None:
            self._keep_best(trainer, pl_module)
        for callback in callbacks_of(trainer, TokenRate):
            callback.pause()
        return values

    def _keep_best(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export and save the weights if their acceptance length is the highest so far."""
        taus = list(self.points[f"decoded_tau/{self.rules[0]}"].values())
        if taus[-1] <= max(taus[:-1], default=0.0):
            return
        with averaged(trainer, pl_module):
            ExportHead(self.best).write(trainer, pl_module)
        trainer.save_checkpoint(f"{self.best}.ckpt")

    def measure(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Return the values by name for the current weights."""
        target = self._target(pl_module)
        decoder = FuzzyDecoder(target, pl_module.make_drafter(target, self.tree))  # type: ignore[operator]
        numbered = self._numbered(trainer, target)
        rows = trainer.datamodule.validation_set  # type: ignore[attr-defined]
        prompts = [{"prompt": ids, "images": rows.prompt_images(number, len(ids))} for number, ids in numbered]
        options = decoding(self.temperature, self.max_new_tokens)
        ending = () if is_sharded(pl_module.target.model) else (_Ending(self.is_asked),)  # type: ignore[union-attr,arg-type]
        values = {}
        for rule in self.rules:
            with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
                answers = decoder.generate(prompts, rule=rule, seed=self.seed, callbacks=ending, **options)
            stats = answers.stats
            values[f"decoded_tau/{rule}"] = stats.acceptance_length
            values[f"decoded_gate_open/{rule}"] = stats.gate_open_fraction
            values[f"decoded_spent/{rule}"] = stats.divergence_spent / max(stats.new_tokens, 1)
            values[f"decoded_length/{rule}"] = stats.new_tokens / len(prompts)
        return values

    def _target(self, pl_module: Any) -> Target:
        """Return the module's target if it has its layers, else the whole one, loaded once."""
        target: Target = pl_module.target
        if not any(parameter.is_meta for parameter in target.model.parameters()):
            return target
        if self._full is None:
            self._full = pl_module.whole_target(target.dtype, pl_module.device)
            FuzzyDecoder(self._full, NoDrafter(self._full.vocab_size)).prepare()
        return self._full

    def _numbered(self, trainer: Any, target: Target) -> list[tuple[int, list[int]]]:
        """Return the prompts with the numbers of their rows. Raises DataError if none fits the context."""
        rows = trainer.datamodule.validation_set
        room = math.inf if target.max_positions is None else target.max_positions - self.max_new_tokens
        lengths = ((number, rows.prompt_length(number)) for number in range(len(rows)))
        fitting = [(number, rows.texts[number][:length].tolist()) for number, length in lengths if 0 < length <= room]
        if not fitting:
            raise DataError(
                f"no validation prompt leaves room for {self.max_new_tokens} tokens in the context of {target.name}. "
                "Lower DecodedTau's max_new_tokens."
            )
        count = min(self.prompts, len(fitting))
        return [fitting[number * len(fitting) // count] for number in range(count)]
