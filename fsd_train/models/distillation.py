"""Distillation of any drafter towards a frozen target: steps, metrics, checkpoints."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import AdamW

from fsd_core.errors import DataError
from fsd_infer.drafters import Drafter, TreeShape
from fsd_infer.targets.target import Target
from fsd_train.checkpoints import check_target, check_weights, source_of, target_record
from fsd_train.data.features import FeatureStore
from fsd_train.data.packs import on_host
from fsd_train.data.recording import FeatureWriter
from fsd_train.data.serving import warn_of_differences
from fsd_train.losses import DraftBatch, LMHead, Loss, LossOutput, as_loss, reference_of
from fsd_train.losses.base import LossIndex
from fsd_train.losses.confidence import with_confidence
from fsd_train.losses.metrics import DEFAULT_RULES, ValidationMetrics, compare
from fsd_train.models.compiled import LayerCompiler
from fsd_train.models.head_options import HeadOptions
from fsd_train.models.optim import WarmupCosine
from fsd_train.models.run import RunModule
from fsd_train.models.slim import load_slim, move
from fsd_train.models.work import Operations
from fsd_train.packed import TextMask, supports_packing, target_features, text_mask
from fsd_train.strategies import ShardedStrategy
from fsd_train.types import ChainSteps, EvalSteps, Seed, Share

log = logging.getLogger(__name__)

PRECISIONS = ("bf16-mixed", "16-mixed", "32-true")


class _Frozen:
    """Holder of the target outside the module tree, so that no state_dict, optimizer or deep copy (EMA) contains it."""

    def __init__(self) -> None:
        self.target: Target | None = None
        self.lm_head: LMHead | None = None  # the target's over the draft vocabulary
        self.full_lm_head: LMHead | None = None  # the same over its own vocabulary
        self.reference: Any = None  # the reference drafter of DraftBatch

    def __deepcopy__(self, memo: dict[int, Any]) -> _Frozen:
        return self


class DistillationModule(RunModule, ABC):
    """LightningModule that trains the drafter ``head`` on the features of a frozen target.

    Batches are packed sequences of conversations (:class:`fsd_train.data.packs.Batch`). Without cached ``features`` the
    target runs in the step.

    Args:
        target: built-in name, directory or hub id.
        loss: a loss, or a loss's name for its defaults. Validation uses the end of schedules and all tokens, so that
            ``val_loss`` keeps its meaning.
        unroll_steps: drafts per chain in the loss, 1 to 7.
        step_decay: base of the weight step_decay^s of step s.
        optimizer: optimizer of the weights; vectors (norms, biases) get no weight decay.
        lr_scheduler: schedule of the learning rate, advanced with every step.
        eval_steps: chain steps in validation, at least ``unroll_steps``.
        eval_rules: acceptance rules whose gates and expected acceptance length are logged in validation (see
            :class:`fsd_train.losses.metrics.ValidationMetrics`); default "exact" and "fuzzy:js:0.3".
        seed: seed of initial weights and all draws.
        compile: compile decoder layers and losses with torch.compile, for rows padded to static shapes
            (:mod:`fsd_train.models.compiled`). None: with CUDA on one device or with ddp, where nothing speaks against.
        target_kwargs: keywords of :func:`fsd_infer.targets.loading.load_target`: ``quantization_config`` with its
            ``quant_method``, ``revision``, ``subfolder`` ...

    Attributes:
        head: the drafter in training, with ``draft_ids``: the target's ids [Vd] that it drafts over, or None for all.

    Raises:
        UnknownNameError: a loss or rule is unknown.
        DataError: the loss needs arguments.
    """

    head_options_class: type[Any] = HeadOptions  # of the option ``head``
    of_weights: tuple[str, ...] = ()  # options, besides the target, that say which weights there are
    steps_differ = True  # whether a draft depends on its chain step
    reads_images = True  # whether rows may have images

    def __init__(
        self,
        target: str,
        loss: Loss | str = "eagle",
        unroll_steps: ChainSteps = 1,
        step_decay: Share = 1.0,
        optimizer: OptimizerCallable = AdamW,
        lr_scheduler: LRSchedulerCallable = WarmupCosine,
        eval_steps: EvalSteps = 4,
        eval_rules: list[str] | None = None,
        seed: Seed = 0,
        compile: bool | None = None,
        target_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        if not target:
            raise DataError("target is empty: give a built-in name, a directory or a hub id.")
        if target_kwargs and "tp_plan" in target_kwargs:  # each rank has batches of its own
            raise DataError(
                "target_kwargs.tp_plan: training has no tensor parallelism. trainer.strategy fsdp shards the target "
                "(docs/training.md)."
            )
        self.target_name, self.target_kwargs, self.seed = target, dict(target_kwargs or {}), seed
        self.unroll_steps, self.step_decay, self.compile_option = unroll_steps, step_decay, compile
        self._layer_compiler = LayerCompiler()
        self.loss = as_loss(loss)
        self.reference = reference_of(self.loss)  # directory of a drafter that adaspec compares with
        self.validation_steps = max(unroll_steps, eval_steps)
        self.validation = ValidationMetrics(
            DEFAULT_RULES if eval_rules is None else eval_rules, self.validation_steps if self.steps_differ else 1
        )
        self._frozen = _Frozen()

    # to implement per drafter --------------------------------------------------------------------------------------

    @abstractmethod
    def configure_model(self) -> None:
        """Load the target and build ``head`` (idempotent)."""

    @abstractmethod
    def new_head(self) -> nn.Module:
        """Build another head of the same shape with arbitrary weights."""

    @abstractmethod
    def draft(self, batch: dict[str, Any], steps: int) -> DraftBatch:
        """Run the drafter over a batch, with augmentations in training mode, and return the supervised rows.

        A batch without any runs as well, with zero gradients, because other ranks may wait for this one's weights.
        """

    def operations(self, batch: dict[str, Any]) -> Operations:
        """Return the floating-point operations of a training batch (:mod:`fsd_train.models.work`); {}: not counted."""
        return {}

    def _answer_counts(self, option: str) -> Tensor:
        """Count each id in the training answers: [V]. Raises DataError, which names the option, if it is impossible."""
        data = self._datamodule
        if not hasattr(data, "answer_counts"):
            raise DataError(f"{option} needs a data module with answer_counts(). Unset it, or use one.")
        counts: Tensor = data.answer_counts(self.target.vocab_size)
        return counts

    def _new_lm_head(self) -> LMHead:
        return LMHead.of(self.target, self.head.draft_ids)

    @abstractmethod
    def make_drafter(self, target: Target, tree: TreeShape | None = None) -> Drafter:
        """Copy the current drafter, to decode with it; a small LM's copy has the target's dtype and merged adapters."""

    @abstractmethod
    def export(self, directory: str | Path, extra: dict[str, Any] | None = None) -> Path:
        """Write a drafter for ``fsd_infer`` with a record of the training and ``extra``."""

    # setting up ----------------------------------------------------------------------------------------------------

    @property
    def target(self) -> Target:
        """The frozen target, loaded on first use, without its layers if features come from a cache.

        Raises DataError if the cached features belong to another target.
        """
        if self._frozen.target is None:
            target = self._load_target()
            if self._feature_store is not None:
                self._feature_store.check_target(target)
            self._frozen.target = target
        return self._frozen.target

    def _load_target(self) -> Target:
        trainer = self._trainer_or_none
        dtype = torch.bfloat16 if trainer is not None and "bf16" in str(trainer.precision) else torch.float32
        slim = None if self._runs_target or self.target_kwargs else load_slim(self.target_name, dtype)
        if slim is not None:
            return slim
        # weights that are quantised as they are loaded cannot be moved afterwards
        quantised = trainer is not None and self.target_kwargs.get("quantization_config")
        target = self.whole_target(dtype, self.trainer.strategy.root_device if quantised else "cpu")
        target.check_lm_head()
        return target

    def _capture_layers(self, target: Target, layers: list[int]) -> None:
        """Let the target's features hold inner layers. Raises DataError if the cached features lack one."""
        store = self._feature_store
        if store is None:
            if not any(parameter.is_meta for parameter in target.model.parameters()):
                target.capture_layers(layers)
        elif missing := sorted(set(layers) - set(store.layers)):
            raise DataError(
                f"the head reads inner layers {layers}, but the cached features lack {missing}. Cache them again with "
                f"`--layers {' '.join(map(str, layers))}`."
            )
        else:
            target.captured_layers = tuple(store.layers)

    def whole_target(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Target:
        """Load another copy of the target, with its layers."""
        return Target.from_pretrained(self.target_name, dtype=dtype, device=device, **self.target_kwargs)

    @property
    def _runs_target(self) -> bool:
        """Whether training needs the target's layers."""
        return self._trainer_or_none is not None and getattr(self._datamodule, "features", None) is None

    @property
    def _feature_store(self) -> FeatureStore | None:
        """The data module's cached features, or None."""
        return getattr(self._datamodule, "feature_store", None)

    def _move_target(self) -> None:
        move(self.target, self.device)

    on_fit_start = _move_target
    on_validation_start = _move_target

    def setup(self, stage: str) -> None:
        """Build the model. Raises DataError for rows or settings that do not fit."""
        if self._trainer_or_none is not None and self.trainer.precision not in PRECISIONS:
            raise DataError(
                f"trainer.precision is {self.trainer.precision}, but weights are trained in fp32. Choose "
                f"{', '.join(PRECISIONS)}."
            )
        if self.compile_option and (reason := self._uncompilable()) is not None:
            raise DataError(f"model.compile is true, but {reason}. Set model.compile to false.")
        self.configure_model()
        if hasattr(self._datamodule, "check"):
            self._datamodule.check(self.target.vocab_size, self.target.fixed_positions)
            self._check_images()
            if stage == "fit" and self.trainer.is_global_zero:
                warn_of_differences(self._datamodule.train_files, self.target.tokenizer)
        if hasattr(self._datamodule, "begin_recording"):
            self._datamodule.begin_recording(self.target)

    def _check_images(self) -> None:
        """Raise DataError for rows with images where the drafter or the strategy reads none."""
        if not getattr(self._datamodule, "has_images", False):
            return
        if not self.reads_images:
            raise DataError("rows have images, which a small LM does not read. Leave them out, or train a head.")
        if self._runs_target and isinstance(self.trainer.strategy, ShardedStrategy):
            raise DataError("rows with images need whole layers of the target. Set trainer.strategy to auto or ddp.")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["target"] = target_record(self.target)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = self._trainer_or_none
        check_target(self.target, checkpoint.get("target", {}), source_of(trainer))
        # strategies that read checkpoints themselves have compared them
        if trainer is None or not trainer.strategy.restore_checkpoint_after_setup:
            check_weights(self, checkpoint, source_of(trainer))
        super().on_load_checkpoint(checkpoint)

    # compiling -----------------------------------------------------------------------------------------------------

    @property
    def is_compiled(self) -> bool:
        """Whether rows are padded to static shapes, and layers and losses run compiled: in training, if chosen."""
        if not self.training or self.compile_option is False:
            return False
        return bool(self.compile_option) or (self.device.type == "cuda" and self._uncompilable() is None)

    def _uncompilable(self) -> str | None:
        """Return the setting that excludes compiled steps, or None."""
        strategy = "" if self._trainer_or_none is None else type(self.trainer.strategy).__name__
        if strategy and "SingleDevice" not in strategy and "DDP" not in strategy:
            return f"trainer.strategy is {strategy}, which gathers weights within layers: use one device or ddp"
        return None

    def _running_compiled(self, layers: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Let these layers run compiled within the context if the step does."""
        return self._layer_compiler.running(layers) if self.is_compiled else nullcontext()

    # steps ---------------------------------------------------------------------------------------------------------

    def lm_head(self) -> LMHead:
        """The target's LM head over the draft vocabulary, on the module's device."""
        if self._frozen.lm_head is None or self._frozen.lm_head.weight.device != self.device:
            self._frozen.lm_head = self._new_lm_head()
        return self._frozen.lm_head

    def full_lm_head(self) -> LMHead:
        """The target's LM head over its own vocabulary, on the module's device."""
        if self._frozen.full_lm_head is None or self._frozen.full_lm_head.weight.device != self.device:
            self._frozen.full_lm_head = LMHead.of(self.target)
        return self._frozen.full_lm_head

    def _target_features(self, batch: dict[str, Any]) -> tuple[Tensor, TextMask]:
        """Return the target's features [1, M, F], and the batch's mask with the prompts that show images."""
        ids, lengths = batch["input_ids"], batch["lengths"].tolist()
        mask = text_mask(self.target, ids, lengths, batch.get("images"))
        cached: Tensor | None = batch.get("features")
        if cached is not None:
            return cached, mask
        target = self.target
        if any(parameter.is_meta for parameter in target.model.parameters()):
            raise DataError(
                "a batch has no cached features, and the target was loaded without its layers. Set data.features to "
                "null, or cache the features of all rows."
            )
        layers: Sequence[nn.Module] = ()
        eager = bool(mask.image_prompts or self.target_kwargs)
        if self.is_compiled and not eager and supports_packing(target.features, target.model):
            layers = target.layers(range(int(target.config.num_hidden_layers)))
        with self._running_compiled(layers):
            features = target_features(target, ids, mask)
        writer: FeatureWriter | None = getattr(self._datamodule, "writer", None)
        if writer is not None:
            texts = on_host(batch, "input_ids")[0].split(lengths)
            writer.add(texts[: len(batch["ids"])], features, batch.get("digests", ()))
        return features, mask

    def _loss_output(self, drafts: DraftBatch) -> LossOutput:
        out: Any = self.loss(drafts)
        if not isinstance(out, LossOutput) or not isinstance(out.loss, Tensor) or out.loss.dim():
            raise DataError(
                f"loss {type(self.loss).__name__!r} returned {out!r:.80}: give LossOutput(loss=a scalar tensor)."
            )
        return out

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        drafts = replace(self.draft(batch, self.unroll_steps), progress=self.progress, step=self.global_step)
        out = self._loss_output(drafts)
        if drafts.confidence is not None:
            out = with_confidence(drafts.confidence, drafts, out)
        self._log_step(out, drafts.rows)
        return out.loss

    def _log_step(self, out: LossOutput, rows: LossIndex) -> None:
        """Log a batch's loss, its parts and agreements; loss and agreements cover all ranks at log steps."""
        steps = self.unroll_steps if self.steps_differ else 1
        agreeing = counts = torch.zeros(steps, device=self.device)  # rows of each step
        if out.agreement is not None:
            counted = rows.weight > 0  # padding has weight 0
            agreeing, counts = rows.sum_by_step(torch.stack([out.agreement & counted, counted]).float())[:, :steps]
        loss = out.loss.detach().float()[None]
        sums = torch.cat([loss, torch.ones_like(loss), agreeing, counts])  # the ones count ranks
        log_every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if self.trainer.world_size > 1 and (self.global_step + 1) % log_every == 0:
            sums = self.trainer.strategy.reduce(sums, reduce_op="sum")  # one reduction for all
        loss, ranks, agreeing, counts = sums.split([1, 1, steps, steps])
        self.log("loss", (loss / ranks)[0], prog_bar=True)
        for name, value in out.parts.items():
            self.log(name, value)
        if out.agreement is not None:
            for step, agreement in enumerate(agreeing / counts.clamp_min(1)):
                self.log(f"agreement_{step}", agreement, prog_bar=step == 0)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        drafts = self.draft(batch, self.validation_steps)
        out = self._loss_output(drafts)
        agreement = compare(drafts, self.full_lm_head(), drafts.target_lm_head.ids, self.validation.divergences)
        positions = TextMask(tuple(batch["lengths"].tolist()), self.device).positions[0]  # [M]
        self.validation.update(agreement, drafts.rows, out.loss, positions)

    def on_validation_epoch_end(self) -> None:
        values = self.validation.compute()  # exchanges counts, so every rank computes
        if not values["loss"].isfinite():
            log.warning(
                "warning: val_loss is %s: target or drafter compute NaN on rows held out.", float(values["loss"])
            )
        for name, value in values.items():
            self.log(f"val_{name}", value, prog_bar=name in ("loss", "agreement_0", "tau"))
