"""Batches of answers with the target's features, as training gets them from a feature cache."""

from __future__ import annotations

from typing import Any

import torch

from fsd_infer.errors import FsdError
from fsd_infer.target import Target
from fsd_train.data import AnswersDataset, collate
from fsd_train.sampler import TokenBudgetSampler
from fsd_train.unroll import supervised


def choose_rows(rows: AnswersDataset, min_answer_share: float) -> AnswersDataset:
    """Rows with at least this share of answer tokens, as `fsd-train cache-features --min-answer-share` keeps them."""
    keep = [
        i
        for i in range(len(rows))
        if int(rows[i]["loss_mask"].sum()) >= max(3, min_answer_share * len(rows[i]["input_ids"]))
    ]
    if not keep:
        raise FsdError("no row has enough answer tokens: lower --min-answer-share, or give other --data.")
    return rows.subset(keep)


def make_batches(
    rows: AnswersDataset, target: Target, count: int, batch_tokens: int, seed: int = 0
) -> list[dict[str, Any]]:
    """The first ``count`` training batches of an epoch, with features in bf16 as a cache holds them, 0 on padding."""
    batches = []
    for chosen in TokenBudgetSampler(rows.lengths, batch_tokens, seed).batches()[:count]:
        batch: dict[str, Any] = dict(collate([rows[i] for i in chosen]))
        features = target.features(batch["input_ids"]).to(torch.bfloat16)
        batches.append({**batch, "features": features * batch["attention_mask"][..., None]})
    return batches


def describe(batch: dict[str, Any]) -> dict[str, int]:
    """Its size: rows, padded tokens, tokens, predictions that are supervised."""
    return {
        "rows": len(batch["input_ids"]),
        "padded_tokens": batch["input_ids"].numel(),
        "tokens": int(batch["attention_mask"].sum()),
        "supervised": int(supervised(batch["loss_mask"], 1).sum()),
    }
