"""Time training steps of an EAGLE-3 head by SpecForge, for ``benchmarks.train_step``; see ``steps.py``.

A step is what its trainer does with hidden states read from disk, whose conversations its loader pads to rows of one
length: the target's LM head, the head's steps, the loss, gradients, and its optimizer with fp32 master weights. On a
CPU its dense attention takes the place of FlexAttention, and its reference loss that of the Triton kernel. Its heads
read three layers, whatever the job says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
from specforge.algorithms.eagle3 import model as eagle3
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.core.loss import _compute_loss
from specforge.data.utils import DataCollatorWithPadding
from specforge.modeling.draft import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from steps import Batch, Job, time_steps
from torch import Tensor, nn
from transformers import AutoConfig

INPUTS = 3  # layers that its heads read


def strategy_of(job: Job) -> Eagle3TrainStrategy:
    """Make a head and a target's LM head with random weights."""
    cuda = job["device"] == "cuda"
    config = AutoConfig.for_model(**job["config"])
    config.draft_vocab_size = job["drafted"] or config.vocab_size
    attention = "flex_attention" if cuda else "sdpa"
    head = LlamaForCausalLMEagle3(config, attention_backend=attention)
    head.t2d.copy_(torch.arange(config.vocab_size) < config.draft_vocab_size)
    head.freeze_embedding()
    target_head = TargetHead.__new__(TargetHead)  # its constructor reads files
    nn.Module.__init__(target_head)
    target_head.fc = nn.Linear(config.hidden_size, config.vocab_size, bias=False).requires_grad_(False)
    model = eagle3.OnlineEagle3Model(head, job["unrolled"], attention)
    for module in (model, target_head):
        module.to(job["device"], torch.bfloat16 if cuda else torch.float32)
    return Eagle3TrainStrategy(model, target_head=target_head, ploss_decay=job["decay"])


def tensors_of(batch: Batch, hidden: int) -> dict[str, Tensor]:
    """Return a packed sequence's conversations as its loader reads them from disk, with random hidden states."""
    ids, masks = (torch.tensor(batch[name]).split(batch["lengths"]) for name in ("ids", "mask"))
    stored = [
        {
            "input_ids": tokens, "loss_mask": mask, "hidden_state": torch.randn(1, len(tokens), hidden),
            "aux_hidden_state": torch.randn(1, len(tokens), INPUTS * hidden),
        }
        for tokens, mask in zip(ids, masks, strict=True)
    ]  # fmt: skip
    return DataCollatorWithPadding()([normalize_offline_sample(raw, len(batch["ids"])) for raw in stored])


def prepare(job: Job) -> tuple[list[Batch], Callable[[Batch], Tensor], list[nn.Parameter]]:
    if job["device"] == "cpu":
        eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    strategy = strategy_of(job)
    optimizer = BF16Optimizer(strategy.trainable_module(), lr=1e-4, max_grad_norm=1.0)
    hidden = strategy.eagle3_model.draft_model.config.hidden_size

    def step(batch: Batch) -> Tensor:
        loss = strategy.forward_loss(TrainBatch([], "eagle3", batch, {"target_repr": "hidden_state"})).loss
        loss.backward()
        optimizer.step()
        return loss

    return [tensors_of(batch, hidden) for batch in job["batches"]], step, optimizer.model_params


if __name__ == "__main__":
    sys.exit(time_steps(prepare))
