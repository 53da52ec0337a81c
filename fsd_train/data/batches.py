"""Sequences as right-padded batches, and what of a batch stays in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import NotRequired


class Batch(TypedDict):
    """Right-padded sequences: tensors [B, M]; ``index`` [B]; ``ids`` the rows' ids."""

    input_ids: Tensor
    loss_mask: Tensor
    index: Tensor
    ids: list[str]
    features: NotRequired[Tensor]  # [B, M, F], where they are cached


def collate(items: Sequence[Mapping[str, Any]]) -> Batch:
    """Items of a dataset as one right-padded batch."""
    batch: Batch = {
        "input_ids": pad_sequence([item["input_ids"] for item in items], batch_first=True),
        "loss_mask": pad_sequence([item["loss_mask"] for item in items], batch_first=True),
        "index": torch.tensor([item["index"] for item in items]),
        "ids": [item["id"] for item in items],
    }
    if "features" in items[0]:
        batch["features"] = pad_sequence([item["features"] for item in items], batch_first=True)
    return batch


_HOST = "host_"  # before the names of arrays that stay in host memory when a batch goes to its device


def keep_on_host(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with views of its ids and mask that stay in host memory: a step is planned by them.

    Asking the device for them would wait for all that it still has to do.
    """
    views = {_HOST + name: batch[name].numpy() for name in ("input_ids", "loss_mask")}  # tensors would be moved
    return {**batch, **views}


def on_host(batch: Mapping[str, Any], name: str) -> Tensor:
    """A batch's ``input_ids`` or ``loss_mask`` in host memory. Waits for the device where no view was kept."""
    kept = batch.get(_HOST + name)
    return batch[name].cpu() if kept is None else torch.from_numpy(kept)
