"""A draft head's step, from ids and features to features and logits, as one call of our kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsd_infer.backends.cpu.kernels import address_of
from fsd_infer.backends.cpu.packing import Packed, packed_of
from fsd_infer.backends.cpu.stack import CpuStack
from fsd_infer.backends.cpu.structs import Head, HeadStepArguments, Linear
from fsd_infer.backends.families import hooks_of, is_hooked
from fsd_infer.targets.stack import HeadParts

if TYPE_CHECKING:
    from fsd_infer.device.cache import SlotCache


class CpuHeadStep:
    """The step of a head whose layers, embeddings and LM head the kernels read; see :class:`.HeadStep`.

    A step reads some megabytes of weights. What Python and torch do between its parts then runs from a cold cache, and
    takes as long as the weights.

    Args:
        stack: the head's.
        head: of the layouts that join embedding and feature by ``fc``.
        embeddings: its own or the target's.
        parts: the packed ``fc``, LM head, and projection of inner layers, if any.
        hooks: of modules that the step does not call.
    """

    def __init__(
        self, stack: CpuStack, head: HeadParts, embeddings: nn.Module, parts: list[Packed], hooks: list[dict[int, Any]]
    ) -> None:
        self._stack, self._parts, self._hooks, self._width = stack, parts, hooks, head.width
        self._scale = None if head.feature_scale is None else head.feature_scale.to(torch.bfloat16)
        norms: Any = [] if head.fusion is None else head.fusion.norms
        self._norms = torch.cat([norm.weight.detach() for norm in norms]) if len(norms) else None
        table = packed_of(embeddings)
        self._embed = None if table is not None and table.native and table.scales is None else embeddings
        self._head = Head(
            embed=Linear() if table is None or self._embed is not None else table.native,
            fc=parts[0].native,
            lm_head=parts[1].native,
            fusion=parts[2].native if len(norms) else Linear(),
            fusion_norms=address_of(self._norms),
            feature_scale=address_of(self._scale),
            fused=len(norms),
            fusion_epsilon=norms[0].eps if len(norms) else 0.0,
        )
        self._table = table

    @classmethod
    def of(cls, stack: CpuStack, head: HeadParts, embeddings: nn.Module, lm_head: nn.Module) -> CpuHeadStep | None:
        """Return the step, or None if the kernels do not know a part of it."""
        layers = [head.fc, lm_head, *([] if head.fusion is None else [head.fusion.project])]
        parts = [part for layer in layers if (part := packed_of(layer)) is not None and part.native is not None]
        if head.eagle3 or not stack.norms or len(parts) < len(layers) or parts[1].depth != head.width:
            return None
        return cls(stack, head, embeddings, parts, hooks_of([head, embeddings, lm_head]))

    def __call__(
        self,
        cache: SlotCache,
        visible: Tensor,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        extra_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Run one step, as :class:`fsd_infer.targets.stack.HeadStep` says."""
        stack, (batch, count, size) = self._stack, features.shape
        if features.dtype != torch.bfloat16 or not stack.takes(visible) or is_hooked(self._hooks):
            return None
        fc, lm_head = self._parts[:2]
        tokens, features = tokens.contiguous(), features.contiguous()
        embeds = None if self._embed is None else self._embed(tokens).to(features.dtype).contiguous()
        x, joined = features.new_empty(batch, count, self._width), features.new_empty(batch * count, fc.depth)
        inner = features.new_empty(batch * count, size - self._width) if size > self._width else None
        extra = 0 if extra_rows is None else len(extra_rows)
        logits = features.new_empty(batch, count, lm_head.columns + extra)
        call = stack.call(x, positions, [visible] * stack.number, cache)
        step = HeadStepArguments(
            ids=tokens.data_ptr() if embeds is None else None,
            embeds=address_of(embeds),
            features=features.data_ptr(),
            joined=joined.data_ptr(),
            inner=address_of(inner),
            more=address_of(extra_rows),
            extra=extra,
            logits=logits.data_ptr(),
        )
        stack.kernels.head_step(stack.struct, call.forward, self._head, step)
        return call.out, logits
