"""From files of answers to batches, and from prompts to files of answers."""

from __future__ import annotations

from fsd_train.data.answers import AnswersDataset, Item, read_answers
from fsd_train.data.features import FeatureStore, cache_features
from fsd_train.data.module import AnswersDataModule
from fsd_train.data.packs import Batch, collate, keep_on_host, on_host
from fsd_train.data.sampler import PackingSampler

__all__ = [
    "AnswersDataModule",
    "AnswersDataset",
    "Batch",
    "FeatureStore",
    "Item",
    "PackingSampler",
    "cache_features",
    "collate",
    "keep_on_host",
    "on_host",
    "read_answers",
]
