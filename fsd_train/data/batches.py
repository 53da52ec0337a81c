"""Right-padded batches of sequences, with parts that stay in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import NotRequired


class Batch(TypedDict):
    """Right-padded sequences: tensors [B, M], ``index`` [B], and the rows' ``ids``."""

    input_ids: Tensor
    loss_mask: Tensor
    index: Tensor
    ids: list[str]
    features: NotRequired[Tensor]  # [B, M, F], if cached


def collate(items: Sequence[Mapping[str, Any]]) -> Batch:
    """Collate items of a dataset into one right-padded batch."""
    batch: Batch = {
        "input_ids": pad_sequence([item["input_ids"] for item in items], batch_first=True),
        "loss_mask": pad_sequence([item["loss_mask"] for item in items], batch_first=True),
        "index": torch.tensor([item["index"] for item in items]),
        "ids": [item["id"] for item in items],
    }
    if "features" in items[0]:
        batch["features"] = pad_sequence([item["features"] for item in items], batch_first=True)
    return batch


_HOST = "host_"  # prefix of arrays that stay in host memory when a batch moves to its device


def keep_on_host(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Add views of ids and mask that stay in host memory, so that planning a step does not sync with the device."""
    views = {_HOST + name: batch[name].numpy() for name in ("input_ids", "loss_mask")}  # tensors would be moved
    return {**batch, **views}


def on_host(batch: Mapping[str, Any], name: str) -> Tensor:
    """Return a batch's ``input_ids`` or ``loss_mask`` in host memory; syncs with the device without a kept view."""
    kept = batch.get(_HOST + name)
    return batch[name].cpu() if kept is None else torch.from_numpy(kept)
