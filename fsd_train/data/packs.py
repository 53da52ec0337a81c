"""Packed batches: conversations side by side in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import NotRequired

_HOST = "host_"  # prefix of arrays that stay in host memory when a batch moves to its device


class Batch(TypedDict):
    """One row of M tokens: conversations side by side, then padding, if any, as further ones.

    Attributes:
        input_ids: [1, M].
        loss_mask: [1, M], 1 on answer tokens, but 0 on the first token of each conversation, which nothing predicts.
        lengths: tokens of each conversation, which together fill the row. In host memory.
        ids: the conversations' ids.
        features: [1, M, F], if cached.
        images: by number of the conversation, inputs of the target other than ids; only where some have images.
        digests: digests of each conversation's images, "" without any; by number of the conversation.
        supervised: in training, see :class:`fsd_train.data.sampler.ResumableLoader`. In host memory.
    """

    input_ids: Tensor
    loss_mask: Tensor
    lengths: np.ndarray
    ids: list[str]
    features: NotRequired[Tensor]
    images: NotRequired[dict[int, dict[str, Tensor]]]
    digests: NotRequired[list[str]]
    supervised: NotRequired[np.ndarray]


def collate(items: Sequence[Mapping[str, Any]], size: int = 0) -> Batch:
    """Pack items of a dataset into one row of ``size`` tokens, or of as many as they have if these are more."""
    lengths = [len(item["input_ids"]) for item in items]
    padding, longest = max(size - sum(lengths), 0), max(lengths)
    # in pieces no longer than a conversation: a model has no positions beyond its context
    pieces = [longest] * (padding // longest) + [padding % longest] * (padding % longest > 0)
    masks = [pad(item["loss_mask"][1:], (1, 0)) for item in items]
    batch: Batch = {
        "input_ids": pad(torch.cat([item["input_ids"] for item in items]), (0, padding))[None],
        "loss_mask": pad(torch.cat(masks), (0, padding))[None],
        "lengths": np.array([*lengths, *pieces]),
        "ids": [item.get("id", "") for item in items],
    }
    if all("features" in item for item in items):
        batch["features"] = pad(torch.cat([item["features"] for item in items]), (0, 0, 0, padding))[None]
    if any("images" in item for item in items):
        batch["images"] = {number: item["images"] for number, item in enumerate(items) if "images" in item}
        batch["digests"] = [item.get("digest", "") for item in items]
    return batch


def keep_on_host(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Add views of ids and mask that stay in host memory, so that planning a step does not sync with the device."""
    views = {_HOST + name: batch[name].numpy() for name in ("input_ids", "loss_mask")}  # tensors would be moved
    return {**batch, **views}


def on_host(batch: Mapping[str, Any], name: str) -> Tensor:
    """Return a batch's ``input_ids`` or ``loss_mask`` in host memory; syncs with the device without a kept view."""
    kept = batch.get(_HOST + name)
    return batch[name].cpu() if kept is None else torch.from_numpy(kept)
