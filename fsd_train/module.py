"""The training of an EAGLE-style head as a LightningModule."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from fsd_infer.checkpoint import load_head, save_head
from fsd_infer.errors import DataError
from fsd_infer.head import EagleConfig, EagleHead
from fsd_infer.prompts import special_ids
from fsd_infer.target import Target
from fsd_train.losses import DraftBatch, LMHead, build_loss, reference_of
from fsd_train.metrics import DEFAULT_RULES, ExpectedTau, RuleMetrics, StepMean, compare
from fsd_train.optim import OPTIMIZERS, build_optimizer, cosine_factor
from fsd_train.safety import CheckResume, StopOnNonFinite, check_state
from fsd_train.slim import load_slim, move
from fsd_train.unroll import at_positions, chain_roots, supervised, unroll
from fsd_train.vocabulary import choose_draft_ids

MAX_UNROLL = 7


class _Frozen:
    """Holds the target outside the module tree: never in a state_dict, an optimiser, or a deep copy (EMA makes one)."""

    def __init__(self) -> None:
        self.target: Target | None = None
        self.draft_head: LMHead | None = None
        self.full_head: LMHead | None = None
        self.reference: EagleHead | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Frozen:
        return self


@dataclass(frozen=True)
class _Supervised:
    """What a batch supervises: wanted [S, B, M-1] bool, features [B, M, F], the rest as in :class:`DraftBatch`."""

    wanted: Tensor
    positions: Tensor
    features: Tensor
    weights: Tensor
    tokens: Tensor


class EagleModule(LightningModule):
    """Trains a draft head on a frozen target's features.

    Batches are dicts with ``input_ids`` [B, M] (right-padded), ``loss_mask`` [B, M] (1 on answer tokens) and, where
    they are cached, ``features`` [B, M, F]; without the last the target runs in the step.

    Args:
        target: built-in name, directory or hub id.
        head: options of :class:`fsd_infer.head.EagleConfig` (final_norm, feature_scale, num_layers, fused_layers ...),
            and ``layer``.
        initial_layers: layers of the target (numbers from 0) whose weights the head's layers start with.
        initial_head: directory of an exported head whose weights this one starts with; what that one lacks starts by
            adding nothing. The draft vocabulary is chosen anew.
        draft_vocab_size: size Vd of the draft vocabulary; its ids are the most frequent ones of the training answers
            and always the target's end-of-sequence tokens. None: the whole vocabulary.
        unroll_steps: how often the head runs in a training step, 1 to 7; from the second time on its own outputs.
        step_decay: weight of step s is step_decay^s.
        chain_share: share of the batch's chains that run beyond step 0, drawn anew for every batch, in (0, 1]. The
            expected gradient stays the same (of ``fsd``, that of the chains drawn), and later steps cost that much
            less.
        loss: name of a loss, or a list of ``{name, weight, args}`` (see :class:`fsd_train.losses.MixLoss`). In
            validation schedules are at their end and no tokens are left out, so that ``val_loss`` means one thing.
        loss_args: arguments of a single loss.
        noise: half-width of the uniform noise added to input features (in the scaled space if the head has a
            feature_scale).
        optimizer: "adamw", or "muon" (matrices by Muon, vectors by AdamW).
        lr: peak learning rate.
        weight_decay: of matrices; norms and biases have none.
        betas: of AdamW.
        warmup_steps: linear warm-up.
        final_lr: learning rate at the end, as a share of ``lr``.
        time_limit: minutes after which training ends, with the schedule finished: the cosine then follows whichever is
            further, steps or time. None: steps only (reproducible to the bit).
        ema_decay: decay of an exponential moving average of the weights, which is then what is validated and
            exported; None for none.
        eval_steps: chain steps looked at in validation (at least ``unroll_steps``).
        eval_rules: acceptance rules whose expected accepted length and gates are logged in validation (see
            :class:`fsd_train.metrics.RuleMetrics`); "exact" and "fuzzy:js:0.3" by default.
        seed: of initial weights and noise.
    """

    head: EagleHead

    def __init__(
        self,
        target: str,
        head: dict[str, Any] | None = None,
        initial_layers: list[int] | None = None,
        initial_head: str | None = None,
        draft_vocab_size: int | None = None,
        unroll_steps: int = 1,
        step_decay: float = 1.0,
        chain_share: float = 1.0,
        loss: str | list[dict[str, Any]] = "eagle",
        loss_args: dict[str, Any] | None = None,
        noise: float = 0.0,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 100,
        final_lr: float = 0.0,
        time_limit: float | None = None,
        ema_decay: float | None = None,
        eval_steps: int = 4,
        eval_rules: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= unroll_steps <= MAX_UNROLL:
            raise DataError(f"unroll_steps must be between 1 and {MAX_UNROLL}, got {unroll_steps}.")
        if noise < 0 or lr <= 0 or not 0 < step_decay <= 1 or not 0 < chain_share <= 1:
            raise DataError(
                "noise must not be negative, lr must be positive, and step_decay and chain_share in (0, 1], got "
                f"noise={noise}, lr={lr}, step_decay={step_decay}, chain_share={chain_share}."
            )
        if optimizer not in OPTIMIZERS:
            raise DataError(f"unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}.")
        self.save_hyperparameters()
        self.loss = build_loss(loss, loss_args)
        steps = max(unroll_steps, eval_steps)
        self.val_agreement = StepMean(steps)
        self.val_chain = ExpectedTau()
        self.val_rules = RuleMetrics(DEFAULT_RULES if eval_rules is None else eval_rules, steps)
        self._frozen = _Frozen()
        self._seconds_before = 0.0  # training time of the runs that this one resumes
        self._started: float | None = None

    # setting up ----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the target and build the head (idempotent)."""
        if hasattr(self, "head"):
            return
        options = dict(self.hparams["head"] or {})
        target = self.target
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.hparams["seed"])
            config = EagleConfig.for_target(target, draft_vocab_size=self.hparams["draft_vocab_size"], **options)
            self.head = EagleHead(config).float()
            self.head.initialise_from(target)
            self._start_from()
        # here rather than in setup(): an averaging callback copies the module before that runs
        if self._trainer is not None and self.trainer.training and self.head.draft_ids is not None:
            self.head.draft_ids.copy_(self._choose_draft_ids(len(self.head.draft_ids)))

    def _start_from(self) -> None:
        """Initial weights: the target's layers, or an earlier head."""
        layers, head = self.hparams["initial_layers"], self.hparams["initial_head"]
        if layers:
            target = self.target
            if any(parameter.is_meta for parameter in target.model.parameters()):
                target = Target.from_pretrained(self.hparams["target"], dtype=target.dtype, device="cpu")
            self.head.take_layers(target.layers(layers))
        if head:
            self.head.continue_from(load_head(head, self.target))

    def _choose_draft_ids(self, size: int) -> Tensor:
        data: Any = getattr(self.trainer, "datamodule", None)
        if not hasattr(data, "answer_counts"):
            raise DataError("draft_vocab_size needs a data module with answer_counts() to choose the ids by; unset it.")
        return choose_draft_ids(data.answer_counts(self.target.vocab_size), size, self.always_drafted())

    def always_drafted(self) -> list[int]:
        """Ids that end an answer or a turn: end-of-sequence, and the tokenizer's special tokens."""
        target = self.target
        special = set() if target.tokenizer is None else special_ids(target.tokenizer)
        return sorted(i for i in {*target.eos_token_ids, *special} if i < target.vocab_size)

    @property
    def target(self) -> Target:
        """The frozen target, loaded when first asked for; without its layers if features come from a cache."""
        if self._frozen.target is None:
            dtype = torch.bfloat16 if self._half else torch.float32
            data = getattr(self._trainer, "datamodule", None)
            if self._trainer is None or getattr(data, "features", None) is not None:
                self._frozen.target = load_slim(self.hparams["target"], dtype)
            if self._frozen.target is None:
                self._frozen.target = Target.from_pretrained(self.hparams["target"], dtype=dtype, device="cpu")
                self._frozen.target.check_lm_head()
            self._agree_on_layers(self._frozen.target, getattr(data, "feature_layers", None))
        return self._frozen.target

    def _agree_on_layers(self, target: Target, cached: list[int] | None) -> None:
        """Make the target speak of the inner layers that the batches will have."""
        wanted = sorted(set((self.hparams["head"] or {}).get("fused_layers") or []))
        if cached is None:
            if not any(parameter.is_meta for parameter in target.model.parameters()):
                target.watch(wanted)
        elif missing := sorted(set(wanted) - set(cached)):
            raise DataError(
                f"the head reads inner layers {wanted}, and the cached features lack {missing}: cache them again with "
                f"`--layers {' '.join(map(str, wanted))}`."
            )
        else:
            target.watched = tuple(cached)

    def _move_target(self) -> None:
        move(self.target, self.device)

    on_fit_start = _move_target
    on_validation_start = _move_target

    @property
    def _half(self) -> bool:
        trainer = self._trainer
        return trainer is not None and "bf16" in str(trainer.precision)

    def setup(self, stage: str) -> None:
        self.configure_model()

    def configure_callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = [CheckResume(), StopOnNonFinite()]
        if self.hparams["ema_decay"] is not None:
            from lightning.pytorch.callbacks import EMAWeightAveraging

            callbacks.append(EMAWeightAveraging(decay=self.hparams["ema_decay"], use_buffers=False))
        return callbacks

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        optimizer = build_optimizer(
            self.hparams["optimizer"], parameters, self.hparams["lr"], self.hparams["weight_decay"],
            tuple(self.hparams["betas"]),
        )  # fmt: skip
        total = float(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            share = max(self._time_share, step / total if total < math.inf else 0.0)
            return cosine_factor(step, self.hparams["warmup_steps"], share, self.hparams["final_lr"])

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def _seconds(self) -> float:
        """Training time so far, that of resumed runs included."""
        return self._seconds_before + (0.0 if self._started is None else time.monotonic() - self._started)

    @property
    def _time_share(self) -> float:
        limit = self.hparams["time_limit"]
        return 0.0 if limit is None else min(self._seconds / (60 * limit), 1.0)

    @property
    def progress(self) -> float:
        """How much of the run has passed, 0 to 1: the further of steps and time."""
        total = float(self.trainer.estimated_stepping_batches)
        return min(max(self._time_share, self.global_step / total if 0 < total < math.inf else 0.0), 1.0)

    def on_train_start(self) -> None:
        self._started = time.monotonic()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._time_share >= 1.0:
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["training_seconds"] = self._seconds

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_state(self, checkpoint)
        self._seconds_before = float(checkpoint.get("training_seconds", 0.0))

    # steps ---------------------------------------------------------------------------------------------------------

    def lm_head(self) -> LMHead:
        """The target's LM head over the draft vocabulary, on the module's device."""
        if self._frozen.draft_head is None or self._frozen.draft_head.weight.device != self.device:
            self._frozen.draft_head = LMHead.of(self.target, self.head.draft_ids)
        return self._frozen.draft_head

    def _supervised(self, batch: dict[str, Any], steps: int) -> _Supervised | None:
        """Where a batch supervises what, and the target's features there; None if nothing is supervised.

        Of several ranks each runs the target, even over a batch without supervised tokens: where it is sharded, the
        others wait for this one's part.
        """
        ids = batch["input_ids"]
        wanted = supervised(batch["loss_mask"], steps)
        positions = wanted[0].flatten().nonzero().squeeze(1)
        if not len(positions) and self._alone:
            return None
        features = batch.get("features")
        if features is None:
            if any(parameter.is_meta for parameter in self.target.model.parameters()):
                raise DataError("the target was loaded without its layers, but a batch has no cached features.")
            features = self.target.features(ids)
        if not len(positions):
            return None
        decay = torch.tensor([self.hparams["step_decay"] ** step for step in range(steps)], device=ids.device)
        following = torch.nn.functional.pad(ids[:, 2:], (0, 1))
        return _Supervised(
            wanted=wanted,
            positions=positions,
            features=features,
            weights=wanted.flatten(1)[:, positions].float() * decay[:, None],
            tokens=following.flatten()[positions],
        )

    def draft(self, batch: dict[str, Tensor], steps: int, noise: float = 0.0) -> DraftBatch | None:
        """Run the head over a batch and gather what is supervised; None if nothing is."""
        found = self._supervised(batch, steps)
        if found is None:
            return None
        ids, positions, raw = batch["input_ids"], found.positions, found.features
        features = self.target.features_of(raw, self.head.config.fused_layers).to(self.head.fc.weight.dtype)
        inputs = features[:, :-1]
        features = features[..., : self.head.config.hidden_size]
        if noise:  # on the final features alone: the head's own outputs replace these, never the inner layers'
            extra = inputs.shape[-1] - features.shape[-1]
            inputs = inputs + torch.nn.functional.pad(self._noise(features[:, 1:].shape, noise), (0, extra))
        with torch.no_grad():
            embeds = self.target.embed(ids[:, 1:]).to(inputs.dtype)
        share = self.hparams["chain_share"] if self.training else 1.0
        roots, chosen = self._chains(found.wanted, share)
        outputs = at_positions(unroll(self.head, embeds, inputs, steps, roots), roots)
        weights = found.weights
        if share < 1.0:
            counts = [torch.ones_like(outputs[0, ..., :1], dtype=torch.float32)]
            counts += [chosen[..., None]] * (steps - 1)
            weights = weights * at_positions(counts, roots).flatten(1)[:, positions]
        reference = self._reference_estimates(embeds, raw[:, :-1], steps, roots)
        return DraftBatch(
            estimates=outputs.flatten(1, 2)[:, positions],
            features=features[:, 1:].flatten(0, 1)[positions],
            weights=weights,
            tokens=found.tokens,
            positions=positions,
            head=self.lm_head(),
            feature_scale=self.head.feature_scale,
            reference=None if reference is None else reference.flatten(1, 2)[:, positions],
        )

    def _chains(self, wanted: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Roots and weights of the chains that this batch runs, see :func:`fsd_train.unroll.chain_roots`."""
        if len(wanted) == 1:
            return wanted.new_zeros(wanted.shape[1], 0, dtype=torch.long), wanted.new_zeros(wanted.shape[1], 0)
        return chain_roots(wanted, share, self._generator())

    @torch.no_grad()
    def _reference_estimates(self, embeds: Tensor, features: Tensor, steps: int, roots: Tensor) -> Tensor | None:
        """[S, B, M-1, H], what the loss's reference head makes of the target's features; None where it is not wanted.

        It reads them without noise. Not wanted in validation.
        """
        directory = reference_of(self.loss)
        if directory is None or not self.training:
            return None
        if self._frozen.reference is None:
            self._frozen.reference = load_head(directory, self.target)
            if lacking := sorted(set(self._frozen.reference.config.fused_layers) - set(self.target.watched)):
                raise DataError(
                    f"the reference head {directory} reads inner layers {lacking}, which the trained head does not: "
                    "add them to head.fused_layers, or use another reference."
                )
        head = self._frozen.reference.to(self.device)
        inputs = self.target.features_of(features, head.config.fused_layers).to(embeds.dtype)
        return at_positions(unroll(head, embeds, inputs, steps, roots), roots)

    def _noise(self, shape: Sequence[int], width: float) -> Tensor:
        noise = (torch.rand(tuple(shape), generator=self._generator()) * (2 * width) - width).to(self.device)
        return noise if self.head.feature_scale is None else noise * self.head.feature_scale

    def _generator(self) -> torch.Generator:
        """Depends on seed, rank and batch number only, so that a resumed run draws the same."""
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx if self._trainer is not None else 0
        return torch.Generator().manual_seed((self.hparams["seed"] * 1_000_003 + number) * 4096 + self.global_rank)

    @property
    def _alone(self) -> bool:
        return self._trainer is None or self.trainer.world_size == 1

    def _idle(self, steps: int) -> Tensor:
        """Zero, by way of every weight: other ranks wait for this one's part in gathering weights and gradients."""
        config = self.head.config
        embeds = torch.zeros(1, 2, config.embed_size, device=self.device)
        features = torch.zeros(1, 2, config.hidden_size * (1 + len(config.fused_layers)), device=self.device)
        roots = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        outputs = unroll(self.head, embeds, features, steps, roots)
        return torch.stack([out.sum() for out in outputs]).sum() * 0.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        drafts = self.draft(batch, self.hparams["unroll_steps"], self.hparams["noise"])
        if drafts is None:
            return None if self._alone else self._idle(self.hparams["unroll_steps"])
        out = self.loss(replace(drafts, progress=self.progress, step=self.global_step))
        self.log("loss", out.loss, prog_bar=True)
        for name, value in out.parts.items():
            self.log(name, value)
        if out.agreement is not None:
            counted = drafts.weights > 0
            share = (out.agreement & counted).sum(1) / counted.sum(1).clamp_min(1)
            for step, value in enumerate(share):
                self.log(f"agreement_{step}", value, prog_bar=step == 0)
        self.log("supervised", float(len(drafts.positions)), reduce_fx="sum")
        return out.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        steps = max(self.hparams["unroll_steps"], self.hparams["eval_steps"])
        drafts = self.draft(batch, steps)
        if drafts is None:
            if not self._alone:
                self._idle(steps)
            return
        out = self.loss(drafts)
        if self._frozen.full_head is None or self._frozen.full_head.weight.device != self.device:
            self._frozen.full_head = LMHead.of(self.target)
        seen = compare(drafts, self._frozen.full_head, self.head.draft_ids, self.val_rules.divergences)
        self.val_agreement.update(seen.agree, drafts.weights)
        self.val_chain.update(seen.agree, drafts.weights, drafts.positions)
        self.val_rules.update(seen, drafts.weights, drafts.positions)
        self.log("val_loss", out.loss, prog_bar=True, batch_size=len(drafts.positions), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        for step, value in enumerate(self.val_agreement.compute()):
            self.log(f"val_agreement_{step}", value.float(), prog_bar=step == 0)
        self.log("val_tau", self.val_chain.compute().float(), prog_bar=True)
        for name, metric in self.val_rules.compute().items():
            self.log(f"val_{name}", metric)
        self.val_agreement.reset()
        self.val_chain.reset()

    # checkpoints ---------------------------------------------------------------------------------------------------

    def export(self, directory: str | Path, extra: dict[str, Any] | None = None) -> Path:
        """Write the head where :func:`fsd_infer.checkpoint.load_head` finds it."""
        record = {
            "steps": int(self.global_step) if self._trainer is not None else None,
            "hyperparameters": {k: v for k, v in self.hparams.items() if _is_plain(v)},
            **(extra or {}),
        }
        return save_head(directory, self.head, self.target.fingerprint(), extra=record)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)
