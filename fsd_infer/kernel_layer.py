"""A decoder layer of the Llama kind in one call of :mod:`fsd_infer.kernels`, for forwards of few tokens in bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsd_infer.cache import SlotCache
from fsd_infer.cpu import Packed, Replacement
from fsd_infer.kernels import MOST_ROWS, PANEL, Forward, Kernels, Layer, kernels

if TYPE_CHECKING:
    from fsd_infer.fuse import FusedLayer


class KernelLayer(Replacement):
    """x + attention(norm(x)), then x + mlp(norm(x)), by the kernels where they can; else by ``fused``.

    Args:
        fused: the layer's other replacement. Its packed weights are the ones that are used.
        layer: what the kernels need to know of it.
        held: tensors whose addresses ``layer`` holds.
        shared: by the layers of one model.
        compiled: the kernels.
    """

    def __init__(
        self, fused: FusedLayer, layer: Layer, held: list[Tensor], shared: SharedByLayers, compiled: Kernels
    ) -> None:
        self.fused, self.layer, self.held, self.shared, self.kernels = fused, layer, held, shared, compiled
        self.index = int(fused.attention_module.layer_idx)

    @classmethod
    def over(cls, fused: FusedLayer, shared: SharedByLayers) -> KernelLayer | None:
        """The layer by the kernels, or None where they are not to be had or do not know such a layer."""
        compiled = kernels()
        parts: Any = fused
        attention, mlp = parts.attention, parts.mlp
        products: list[Any] = [getattr(attention, "project", None), getattr(attention, "output", None)]
        products += [getattr(mlp, "project", None), getattr(mlp, "down", None)]
        norms = [parts.first_norm, parts.second_norm, attention.query_norm, attention.key_norm]
        norms = [None if isinstance(norm, nn.Identity) else norm for norm in norms]
        weights = [getattr(norm, "weight", None) for norm in norms]
        # copies: what the module holds may be moved, and its address with it
        weights = [None if weight is None else weight.detach().clone() for weight in weights]
        epsilons = {getattr(norm, "epsilon", getattr(norm, "variance_epsilon", None)) for norm in norms if norm}
        if (
            compiled is None
            or not all(isinstance(product, Packed) and product.panels for product in products)
            or any(norm is not None and weight is None for norm, weight in zip(norms, weights, strict=True))
            or any(weight is not None and weight.dtype != torch.bfloat16 for weight in weights)
            or norms[1] is None
            or len(epsilons) != 1
            or type(mlp.act).__name__ not in ("SiLU", "SiLUActivation")
        ):
            return None
        qkv, output, gate_up, down = products
        hidden, inner = down.weight.shape
        if inner % PANEL or hidden % PANEL or attention.width % 32:
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
        return cls(fused, layer, [weight for weight in weights if weight is not None], shared, compiled)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        x = hidden_states
        if (
            x.numel() > MOST_ROWS * x.shape[-1]
            or not isinstance(past_key_values, SlotCache)
            or attention_mask is None
            or attention_mask.dtype != torch.bool
            or position_embeddings is None
            or x.dtype != torch.bfloat16
            or others
            or self.fused.attention_module._forward_hooks
        ):
            return self.fused(
                x, attention_mask, position_ids, past_key_values, use_cache, position_embeddings, **others
            )
        layer = self.layer
        stored: Any = past_key_values.layers[self.index]
        keys, values = stored.room(layer.key_heads, layer.width, x.dtype)
        forward = self.shared.forward(position_embeddings, attention_mask, past_key_values, keys, layer, self.kernels)
        return self.kernels.layer(layer, forward, x.contiguous(), keys, values)


class SharedByLayers:
    """What all layers of a forward share, recognised by the tensors it is made from and made when first asked for."""

    def __init__(self) -> None:
        # two entries: families with two types of layers have two masks and two sets of angles per forward
        self.made: list[tuple[tuple[Tensor, Tensor, Tensor], Forward, list[Tensor]]] = []

    def forward(
        self,
        embeddings: tuple[Tensor, Tensor],
        visible: Tensor,
        cache: SlotCache,
        keys: Tensor,
        layer: Layer,
        compiled: Kernels,
    ) -> Forward:
        """The forward as the kernels take it.

        Args:
            embeddings: cosine and sine, [B or 1, M, D] each.
            visible: [B, 1, M, S] bool.
            cache: aimed at the slots that are written.
            keys: one layer's storage; all are alike.
            layer: one of the layers; all are alike.
            compiled: the kernels.
        """
        source = (embeddings[0], visible, cache.slots)
        for known, forward, _ in self.made:
            if all(one is other for one, other in zip(known, source)):
                return forward
        batch, _, count, used = visible.shape
        cosine, sine = (angles.to(torch.bfloat16).expand(batch, -1, -1).contiguous() for angles in embeddings)
        held = [cosine, sine, visible.contiguous(), cache.slots.expand(batch, -1).contiguous()]
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
        held.append(compiled.scratch(layer, forward))
        forward.scratch = _address(held[-1])
        self.made = [*self.made[-1:], (source, forward, held)]
        return forward


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
