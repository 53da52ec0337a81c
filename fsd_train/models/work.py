"""Floating-point operations of a training batch, by part: for the rate of a run as a share of its device's peak.

A multiplication by a weight counts 2 in a forward and 4 in a backward, and 2 in a backward that needs no gradient of
the weight. Attention is left out, as is padding, which is no useful work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from fsd_bench.estimate import weights_used
from fsd_infer.targets.target import Target
from fsd_train.data.packs import on_host
from fsd_train.models.unroll import supervised

Operations = dict[str, float]  # of "target", "drafter" and "logits"


def real_tokens(batch: Mapping[str, Any]) -> int:
    """Return the number of a packed sequence's tokens without its padding."""
    return int(sum(batch["lengths"].tolist()[: len(batch["ids"])]))


def supervised_rows(batch: Mapping[str, Any], steps: int) -> list[int]:
    """Return the number of supervised rows by chain step."""
    counts: list[int] = supervised(on_host(batch, "loss_mask")[0], steps).sum(1).tolist()
    return counts


def target_operations(target: Target, batch: Mapping[str, Any]) -> float:
    """Return the operations of the target's forward, without its LM head; 0 with cached features."""
    return 0.0 if "features" in batch else 2.0 * inner_weights(target) * real_tokens(batch)


def inner_weights(model: Any) -> int:
    """Return the weights of a causal LM that a token is multiplied with, without the LM head.

    Args:
        model: has ``model`` and ``config``, as :class:`fsd_infer.targets.target.Target`.
    """
    return weights_used(model) - int(model.model.get_output_embeddings().weight.numel())


def head_operations(module: Any, batch: Mapping[str, Any], steps: int) -> Operations:
    """Return the operations of a batch of :class:`fsd_train.models.eagle.EagleModule`, unrolled ``steps`` times."""
    head, target, rows = module.head, module.target, supervised_rows(batch, steps)
    later_rows = [math.ceil(module.chain_share * count) for count in rows[1:]]
    chains = later_rows[0] if later_rows else 0
    lm_head_weights = 0 if head.lm_head is None else head.lm_head.weight.numel()
    embedding_weights = 0 if head.embed_tokens is None else head.embed_tokens.weight.numel()
    fusion_weights = head.fc.weight.numel() if head.eagle3 else 0  # only step 0 projects the target's features
    all_weights = sum(parameter.numel() for parameter in head.parameters())
    weights, tokens = all_weights - lm_head_weights - embedding_weights - fusion_weights, real_tokens(batch)
    logits = (head.config.draft_vocab_size or target.vocab_size) * target.hidden_size
    return {
        "target": target_operations(target, batch),
        "drafter": 6.0 * weights * (tokens + (steps - 1) * chains) + 4.0 * fusion_weights * tokens,
        "logits": logits * (2.0 * rows[0] + (6.0 if lm_head_weights else 4.0) * (rows[0] + sum(later_rows))),
    }


def lm_operations(module: Any, batch: Mapping[str, Any]) -> Operations:
    """Return the operations of a batch of :class:`fsd_train.models.lm.LMModule`."""
    target, tokens = module.target, real_tokens(batch)
    drafter = SimpleNamespace(model=module.head.causal_lm, config=module.head.config)
    factor = 6.0 if module.lora is None else 4.0  # an adapter's own weights are few
    positions = supervised_rows(batch, 1)[0]
    lm_head_weights = drafter.model.get_output_embeddings().weight.numel()
    return {
        "target": target_operations(target, batch),
        "drafter": factor * inner_weights(drafter) * tokens,
        "logits": positions * (2.0 * target.hidden_size * target.vocab_size + factor * lm_head_weights),
    }
