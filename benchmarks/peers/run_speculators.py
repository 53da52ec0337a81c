"""Time training steps of an EAGLE-3 head by speculators, for ``benchmarks.train_step``; see ``steps.py``.

A step is what its trainer does with hidden states read from disk: the head's steps, the loss, gradients, clipping and
AdamW. Dense masks take the place of FlexAttention on a CPU, where that has no gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from steps import Batch, Job, time_steps
from torch import Tensor, nn
from transformers import AutoConfig


def head_of(job: Job) -> Eagle3DraftModel:
    """Make a head with random weights."""
    config = AutoConfig.for_model(**job["config"])
    config.num_hidden_layers = 1
    config._attn_implementation = "simple_flex_attention" if job["device"] == "cuda" else "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    head = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=config, draft_vocab_size=job["drafted"] or config.vocab_size,
            norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[*range(job["inputs"])],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3", default_proposal_method="greedy", verifier=verifier,
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=job["unrolled"])],
            ),
        )
    )  # fmt: skip
    if job["drafted"]:
        drafted = torch.arange(config.vocab_size) < job["drafted"]
        head.load_vocab_mappings(drafted, torch.zeros(job["drafted"], dtype=torch.long))
    for weight in (head.verifier_lm_head.weight, head.lm_head.weight, head.embed_tokens.weight):
        torch.nn.init.normal_(weight, std=0.02)
    return head.to(job["device"])


def tensors_of(batch: Batch, job: Job, hidden: int) -> dict[str, Tensor]:
    """Return a packed sequence as the head takes it, [1, L] and [1, L, features], with random hidden states."""
    lengths = torch.tensor(batch["lengths"])
    positions = torch.cat([torch.arange(1, int(length) + 1) for length in lengths])
    tensors = {
        "hidden_states": torch.randn(1, len(positions), job["inputs"] * hidden),
        "verifier_last_hidden_states": torch.randn(1, len(positions), hidden),
        "input_ids": torch.tensor([batch["ids"]]), "loss_mask": torch.tensor([batch["mask"]]).bool(),
        "document_ids": torch.arange(len(lengths)).repeat_interleave(lengths)[None], "position_ids": positions[None],
    }  # fmt: skip
    return {name: tensor.to(job["device"]) for name, tensor in tensors.items()}


def prepare(job: Job) -> tuple[list[Batch], Callable[[Batch], Tensor], list[nn.Parameter]]:
    head, cuda = head_of(job), job["device"] == "cuda"
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    loss_config = resolve_loss_config("kl_div", "fused" if cuda else "eager")

    def step(batch: Batch) -> Tensor:
        with torch.autocast(job["device"], torch.bfloat16, enabled=cuda):
            _, loss, _ = head(
                **batch, ttt_steps=job["unrolled"], ttt_step_loss_decay=job["decay"], loss_config=loss_config
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    hidden = head.config.transformer_layer_config.hidden_size
    return [tensors_of(batch, job, hidden) for batch in job["batches"]], step, trained


if __name__ == "__main__":
    sys.exit(time_steps(prepare))
