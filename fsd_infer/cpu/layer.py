"""A decoder layer of the Llama kind in one call of :mod:`fsd_infer.cpu.kernels`, for forwards of few tokens in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsd_infer.cache import SlotCache
from fsd_infer.cpu.kernels import MOST_ROWS, Forward, Kernels, Layer, kernels
from fsd_infer.cpu.packing import OncePerForward, Packed

# Slots attended to by many tokens, as of a prompt, by the kernels' panels (32: with AMX): above, torch is faster.
MOST_SLOTS = {64: 512, 32: 2048}
FEW_TOKENS = 64  # of a text, as in a tree: always by the kernels, so that all forwards of a round agree bit by bit
AHEAD_ROWS = 64  # up to so many, layers run ahead; of more, starting each costs nothing beside computing it


class _Ready(NamedTuple):
    """What a layer will put out if it is called with these very tensors, because an earlier one ran ahead."""

    x: Tensor
    visible: Tensor
    slots: Tensor
    cosine: Tensor
    out: Tensor


class KernelLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)), by the kernels.

    The first layer of a forward runs those that follow as well, in one call, and leaves each its result. A layer that
    is called with anything else (a hook changed what it reads, its mask is another) computes anew, and from then on
    no layer before it runs so far.

    Args:
        layer: what the kernels need to know of it, but for its weights.
        products: its weights: of queries, keys and values, of the output, of gate and up, of down.
        held: other tensors whose addresses ``layer`` holds.
        index: of the layer in the cache.
        once: shared by the layers of one model.
        compiled: the kernels.
        before: the layer whose output this one reads, as far as is known.
    """

    def __init__(
        self,
        layer: Layer,
        products: Sequence[Packed],
        held: list[Tensor],
        index: int,
        once: OncePerForward,
        compiled: Kernels,
        before: KernelLayer | None,
    ) -> None:
        self.layer, self.held, self.index, self.once, self.kernels = layer, held, index, once, compiled
        self.products = products
        self.find_weights()
        self.following: KernelLayer | None = None
        self.begins = before is None or before.sizes != self.sizes  # is it always the first of a call
        self.ready: _Ready | None = None
        if before is not None:
            before.following = self

    def find_weights(self) -> None:
        """Take note of where the products' weights are, anew if they were moved."""
        for name, product in zip(("qkv", "output", "gate_up", "down"), self.products, strict=True):
            setattr(self.layer, name, product.panels)

    @property
    def sizes(self) -> tuple[int, ...]:
        layer = self.layer
        return layer.hidden, layer.inner, layer.query_heads, layer.key_heads, layer.width

    @classmethod
    def over(
        cls,
        attention: Any,
        mlp: Any,
        norms: tuple[Any, Any],
        once: OncePerForward,
        before: KernelLayer | None = None,
    ) -> KernelLayer | None:
        """The layer of these parts, or None where the kernels are not to be had or do not know such a layer.

        Args:
            attention: a :class:`fsd_infer.cpu.fused_ops.FusedAttention`.
            mlp: a :class:`fsd_infer.cpu.fused_ops.FusedMLP`, else None is returned. Packed weights of both are used.
            norms: before attention and before the MLP.
            once: shared by the layers of one model.
            before: the layer before it.
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
        hidden, inner = down.columns, down.depth
        if inner % compiled.panel or hidden % compiled.panel or attention.width % 32:
            return None
        addresses = [_address(weight) for weight in weights]
        layer = Layer(
            input_norm=addresses[0],
            qkv_bias=_address(qkv.bias),
            query_norm=addresses[2],
            key_norm=addresses[3],
            output_bias=_address(output.bias),
            mlp_norm=addresses[1],
            gate_up_bias=_address(gate_up.bias),
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
        return cls(layer, products, held, int(attention.module.layer_idx), once, compiled, before)

    def takes(self, x: Tensor, visible: Tensor | None, embeddings: tuple[Tensor, Tensor] | None) -> bool:
        """Is this a forward for the kernels: bf16, a mask of what is visible, angles, and not too many rows?"""
        return (
            x.numel() <= MOST_ROWS * x.shape[-1]
            and x.dtype == torch.bfloat16
            and visible is not None
            and visible.dtype == torch.bool
            and (visible.shape[-2] <= FEW_TOKENS or visible.shape[-1] <= MOST_SLOTS[self.kernels.panel])
            and embeddings is not None
        )

    def __call__(self, x: Tensor, visible: Any, cache: SlotCache, embeddings: Any) -> Tensor:
        """x [B, M, H], visible [B, 1, M, S] bool, (cosine, sine) [B or 1, M, D] -> [B, M, H].

        The cache knows the slots to write to.
        """
        ready, self.ready = self.ready, None
        given = (x, visible, cache.slots, embeddings[0])
        if ready is not None:
            if all(one is other for one, other in zip(given, ready)):
                return ready.out
            self.begins = ready.slots is cache.slots  # else that forward ended early
        layers = self._together() if x.numel() <= AHEAD_ROWS * x.shape[-1] else [self]
        stored: list[Any] = [cache.layers[layer.index] for layer in layers]
        rooms = [part.room(self.layer.key_heads, self.layer.width, x.dtype) for part in stored]
        keys, values = zip(*rooms, strict=True)
        made = partial(self._forward, embeddings, visible, cache.slots, keys[0])
        forward, _ = self.once.get((embeddings[0], visible, cache.slots), (), made)
        structs: Array[Layer] = (Layer * len(layers))(*(layer.layer for layer in layers))
        out = self.kernels.layers(structs, forward, x.contiguous(), keys, values).unbind()
        for layer, read, result in zip(layers[1:], out, out[1:]):
            layer.ready = _Ready(read, *given[1:], result)
        return out[0]

    def _together(self) -> list[KernelLayer]:
        """This layer and those that may run with it."""
        layers = [self]
        while (following := layers[-1].following) is not None and not following.begins:
            layers.append(following)
        return layers

    def _forward(
        self, embeddings: tuple[Tensor, Tensor], visible: Tensor, slots: Tensor, keys: Tensor
    ) -> tuple[Forward, list[Tensor]]:
        """What all layers of a forward share, as the kernels take it, and the tensors whose addresses it holds."""
        batch, _, count, used = visible.shape
        if not 0 <= int(slots.min()) <= int(slots.max()) < keys.shape[2]:  # the kernels would write wherever that is
            raise IndexError(f"slots {int(slots.min())} to {int(slots.max())} of a cache with {keys.shape[2]}.")
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
