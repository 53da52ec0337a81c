"""A decoder layer of the Llama kind in one call of :mod:`fsd_infer.kernels`, for forwards of few tokens in bf16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsd_infer.cache import SlotCache
from fsd_infer.cpu import OncePerForward, Packed
from fsd_infer.kernels import MOST_ROWS, Forward, Kernels, Layer, kernels


class KernelLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)), by the kernels.

    Args:
        layer: what the kernels need to know of it.
        held: tensors whose addresses ``layer`` holds.
        index: of the layer in the cache.
        once: shared by the layers of one model.
        compiled: the kernels.
    """

    def __init__(self, layer: Layer, held: list[Tensor], index: int, once: OncePerForward, compiled: Kernels) -> None:
        self.layer, self.held, self.index, self.once, self.kernels = layer, held, index, once, compiled

    @classmethod
    def over(cls, attention: Any, mlp: Any, norms: tuple[Any, Any], once: OncePerForward) -> KernelLayer | None:
        """The layer of these parts, or None where the kernels are not to be had or do not know such a layer.

        Args:
            attention: a :class:`fsd_infer.fuse.FusedAttention`.
            mlp: a :class:`fsd_infer.fuse.FusedMLP`, else None is returned. Packed weights of both are used.
            norms: before attention and before the MLP.
            once: shared by the layers of one model.
        """
        compiled = kernels()
        products: list[Any] = [getattr(attention, "project", None), getattr(attention, "output", None)]
        products += [getattr(mlp, "project", None), getattr(mlp, "down", None)]
        four = (*norms, attention.query_norm, attention.key_norm)
        known = [None if isinstance(norm, nn.Identity) else norm for norm in four]
        weights = [getattr(norm, "weight", None) for norm in known]
        # copies: what the module holds may be moved, and its address with it
        weights = [None if weight is None else weight.detach().clone() for weight in weights]
        epsilons = {getattr(norm, "epsilon", getattr(norm, "variance_epsilon", None)) for norm in known if norm}
        if (
            compiled is None
            or not all(isinstance(product, Packed) and product.panels for product in products)
            or any(norm is not None and weight is None for norm, weight in zip(known, weights, strict=True))
            or any(weight is not None and weight.dtype != torch.bfloat16 for weight in weights)
            or known[1] is None
            or len(epsilons) != 1
            or type(mlp.act).__name__ not in ("SiLU", "SiLUActivation")
        ):
            return None
        qkv, output, gate_up, down = products
        hidden, inner = down.weight.shape
        if inner % compiled.panel or hidden % compiled.panel or attention.width % 32:
            return None
        addresses = [_address(weight) for weight in weights]
        layer = Layer(
            input_norm=addresses[0],
            qkv=qkv.panels,
            qkv_bias=_address(qkv.bias),
            query_norm=addresses[2],
            key_norm=addresses[3],
            output=output.panels,
            output_bias=_address(output.bias),
            mlp_norm=addresses[1],
            gate_up=gate_up.panels,
            gate_up_bias=_address(gate_up.bias),
            down=down.panels,
            down_bias=_address(down.bias),
            hidden=hidden,
            inner=inner,
            query_heads=attention.query_heads,
            key_heads=attention.key_heads,
            width=attention.width,
            epsilon=epsilons.pop(),
            scale=attention.module.scaling,
        )
        held = [weight for weight in weights if weight is not None]
        return cls(layer, held, int(attention.module.layer_idx), once, compiled)

    def takes(self, x: Tensor, visible: Tensor | None, embeddings: tuple[Tensor, Tensor] | None) -> bool:
        """Is this a forward for the kernels: bf16, a mask of what is visible, angles, and not too many rows?"""
        return (
            x.numel() <= MOST_ROWS * x.shape[-1]
            and x.dtype == torch.bfloat16
            and visible is not None
            and visible.dtype == torch.bool
            and embeddings is not None
        )

    def __call__(self, x: Tensor, visible: Any, cache: SlotCache, embeddings: Any) -> Tensor:
        """x [B, M, H], visible [B, 1, M, S] bool, (cosine, sine) [B or 1, M, D] -> [B, M, H].

        The cache is aimed at the slots that are written.
        """
        stored: Any = cache.layers[self.index]
        keys, values = stored.room(self.layer.key_heads, self.layer.width, x.dtype)
        made = partial(self._forward, embeddings, visible, cache.slots, keys)
        forward, _ = self.once.get((embeddings[0], visible, cache.slots), (), made)
        return self.kernels.layer(self.layer, forward, x.contiguous(), keys, values)

    def _forward(
        self, embeddings: tuple[Tensor, Tensor], visible: Tensor, slots: Tensor, keys: Tensor
    ) -> tuple[Forward, list[Tensor]]:
        """What all layers of a forward share, as the kernels take it, and the tensors whose addresses it holds."""
        batch, _, count, used = visible.shape
        cosine, sine = (angles.to(torch.bfloat16).expand(batch, -1, -1).contiguous() for angles in embeddings)
        held = [cosine, sine, visible.contiguous(), slots.expand(batch, -1).contiguous()]
        forward = Forward(
            batch=batch,
            count=count,
            cosine=_address(cosine),
            sine=_address(sine),
            visible=_address(held[2]),
            slots=_address(held[3]),
            used=used,
            batch_stride=keys.stride(0),
            head_stride=keys.stride(1),
            slot_stride=keys.stride(2),
            threads=torch.get_num_threads(),
        )
        held.append(self.kernels.scratch(self.layer, forward))
        forward.scratch = _address(held[-1])
        return forward, held


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
