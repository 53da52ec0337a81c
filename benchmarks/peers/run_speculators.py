"""Time training steps of an EAGLE-3 head by speculators, for ``benchmarks.train_step``: one JSON job in, one line out.

A step is what its trainer does with hidden states read from disk: the head's steps, the loss, gradients, clipping and
AdamW. Dense masks take the place of FlexAttention on a CPU, where that has no gradients. The job has ``config`` (of the
target's decoder), ``drafted`` tokens, ``inputs`` (number of fused layers), ``unrolled`` steps, their ``decay``,
``device``, ``threads``, and ``batches``: for each its ``ids``, ``mask`` and ``lengths`` of conversations.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig


def head_of(job: dict[str, Any]) -> Eagle3DraftModel:
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


def tensors_of(batch: dict[str, Any], job: dict[str, Any], hidden: int) -> dict[str, torch.Tensor]:
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


def main() -> None:
    """Time every batch of the job, after a first pass over all of them."""
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    head = head_of(job)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    loss_config = resolve_loss_config("kl_div", "fused" if job["device"] == "cuda" else "eager")
    batches = [tensors_of(batch, job, head.config.transformer_layer_config.hidden_size) for batch in job["batches"]]
    seconds = []
    for batch in [*batches, *batches]:
        start = time.perf_counter()
        with torch.autocast(job["device"], torch.bfloat16, enabled=job["device"] == "cuda"):
            _, loss, _ = head(
                **batch, ttt_steps=job["unrolled"], ttt_step_loss_decay=job["decay"], loss_config=loss_config
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if job["device"] == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    count = sum(parameter.numel() for parameter in trained)
    print(json.dumps({"seconds": seconds[len(batches) :], "trained_parameters": count, "loss": float(loss.detach())}))


if __name__ == "__main__":
    main()
