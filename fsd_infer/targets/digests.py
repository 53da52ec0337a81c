"""Digests that identify a target: of the vocabulary, and of the weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from fsd_infer.targets.weights import weight_rows

_DIGITS = 16
_ROWS = 1024  # of a table of embeddings


def vocabulary_digest(tokenizer: Any) -> str:
    """Return hexadecimal digits that distinguish this tokenizer's tokens and ids from others."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:_DIGITS]


def weights_digest(model: Any, vocab_size: int, norm: Tensor | None, text: str) -> str:
    """Return hexadecimal digits of some rows of the embeddings and the LM head, of the final norm, and of a text."""
    rows = torch.arange(0, vocab_size, max(1, vocab_size // _ROWS))
    parts = [weight_rows(table, rows) for table in (model.get_input_embeddings(), model.get_output_embeddings())]
    digest = hashlib.sha256()
    for part in parts if norm is None else [*parts, norm]:
        values = part.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        digest.update(values.numpy().astype("<i2", copy=False).tobytes())
    digest.update(text.encode())
    return digest.hexdigest()[:_DIGITS]
