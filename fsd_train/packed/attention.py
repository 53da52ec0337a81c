"""Attention within a packed sequence, as an attention function of transformers.

With CUDA it runs FlexAttention, elsewhere torch's scaled_dot_product_attention span by span.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from fsd_train.packed.masks import PackedMask
from fsd_train.shapes import many_shapes

NAME = "fsd_packed"  # of the attention function, in transformers' configs
SMALL = 2**18  # queries times keys, up to which a span counts as small
ROUND = 32  # queries and keys are padded to multiples of this where products are compiled for each size
FLEX_HEAD = 16  # least width of an attention head that its kernels take


@torch.compiler.disable  # FlexAttention is compiled by itself; the rest depends on the conversations
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: PackedMask | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within a :class:`PackedMask`; an attention function of transformers under the name :data:`NAME`.

    Args:
        module: the attention module.
        query, key, value: [1, heads, Q or K, D]; keys and values may have fewer heads. With a ``cache`` in the mask,
            those of earlier steps come before these.
        attention_mask: the mask; a model that makes masks itself gets it as ``packing``.
        dropout: dropout of attention probabilities.
        scaling: scaling of the scores; None: 1/√D.
        sliding_window: positions that a query sees; None: all.
        packing: see ``attention_mask``.
        softcap: soft cap of the scores.
        s_aux: [heads] scores of attention sinks.
        others: transformers' other options.

    Returns:
        (outputs [1, Q, heads, D], None)
    """
    mask = attention_mask if packing is None else packing
    assert isinstance(mask, PackedMask), "the model did not pass the mask on"
    keys, values = ([key], [value]) if mask.cache is None else mask.cache.append(module, key, value)  # by step
    if query.is_cuda and query.shape[-1] >= FLEX_HEAD:
        key, value, blocks = _joined(keys), _joined(values), mask.block_mask(sliding_window)
        return _in_blocks(module, query, key, value, blocks, scaling, softcap, s_aux, dropout), None
    return _by_span(mask, query, keys, values, sliding_window, dropout, scaling, softcap, s_aux), None


def _in_blocks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attend by FlexAttention. Text, every unrolled step, every window and both models have kernels of their own."""
    with many_shapes():  # without a kernel it would hold the scores of all queries and keys
        return flex_attention_forward(module, query, key, value, mask, scaling, softcap, sinks, dropout=dropout)[0]


def _by_span(
    mask: PackedMask, query: Tensor, keys: list[Tensor], values: list[Tensor], window: int | None, dropout: float,
    scaling: float | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend conversation by conversation; keys and values by step: [1, Q, heads, D]."""
    multiple, spans, outputs = _size_multiple(query, keys[0], values[0]), mask.spans(window), []
    queries = query.split([span.queries.stop - span.queries.start for span in spans], dim=2)
    key_pieces, value_pieces = mask.split_keys(keys), mask.split_keys(values)
    for q, span in zip(queries, spans, strict=True):
        count, q = q.shape[2], _padded(q, multiple)  # [1, heads, q, D]
        k = _padded(_joined([key_pieces[number] for number in span.pieces]), multiple)
        v = _padded(_joined([value_pieces[number] for number in span.pieces]), multiple)
        visible = span.visible  # [q, k]
        if visible is not None:  # added queries see all, which no output reads
            visible = pad(visible, (0, k.shape[2] - visible.shape[1]))
            visible = pad(visible, (0, 0, 0, q.shape[2] - count), value=True)
        if softcap is None and sinks is None and not _is_small(q, k):
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
            causal = visible is None
            out = scaled_dot_product_attention(q, k, v, visible, dropout, is_causal=causal, scale=scaling)
        else:
            out = _plain_attention(q, k, v, visible, dropout, scaling, softcap, sinks)
        outputs.append(out[:, :, :count])  # [1, heads, q, D]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _size_multiple(*tensors: Tensor) -> int:
    """Return the number to whose multiples queries and keys are padded: :data:`ROUND` in half precision on a CPU.

    There, torch compiles a product for each new size, which takes longer than the product itself. Under autocast some
    of the tensors are in fp32, and the products in half precision.
    """
    half = tensors[0].device.type == "cpu" and any(tensor.dtype != torch.float32 for tensor in tensors)
    return ROUND if half else 1


def _padded(values: Tensor, multiple: int) -> Tensor:
    """Pad [1, heads, Q or K, D] to a multiple of so many queries or keys."""
    return values if multiple == 1 else pad(values, (0, 0, 0, -values.shape[2] % multiple))


def _is_small(query: Tensor, key: Tensor) -> bool:
    """Whether plain products are faster: on a CPU torch's function takes twice as long backwards for such spans."""
    return query.device.type == "cpu" and query.requires_grad and query.shape[2] * key.shape[2] <= SMALL


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, dropout: float, scaling: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of a few products, which also has a soft cap and sinks: [1, heads, Q, D]."""
    if visible is None:
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill(~visible, -torch.inf)
    shared = query.shape[1] // key.shape[1]  # query heads of a key's head, one below the other in the products
    bias = bias.repeat(shared, 1).expand(key.shape[1], -1, -1)
    rows = (query * (query.shape[-1] ** -0.5 if scaling is None else scaling)).reshape(*bias.shape[:2], -1)
    if softcap is None:
        scores = torch.baddbmm(bias, rows, key[0].mT)  # [key's heads, shared * Q, K]
    else:
        scores = softcap * torch.tanh(rows @ key[0].mT / softcap) + bias
    if sinks is not None:
        each = sinks.to(scores.dtype).reshape(len(scores), shared, 1, 1).expand(-1, -1, query.shape[2], -1)
        scores = torch.cat([scores, each.reshape(*scores.shape[:2], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=scores.dtype)[..., : key.shape[2]]
    output = torch.dropout(weights, dropout, train=dropout > 0) @ value[0]  # MLA's values are narrower than its keys
    return output.reshape(*query.shape[:-1], value.shape[-1])


AttentionInterface.register(NAME, packed_attention)
