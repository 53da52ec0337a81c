"""bf16 linear layers with weights in oneDNN's layout, in fp8 for draft heads, or in the blocks of a quantised file.

oneDNN reorders an unpacked bf16 weight in every call. Packed once, a linear layer over a few tokens takes half the
time, and our kernels read the packed weight too. Where oneDNN has no bf16, they read a copy in its layout. A layer is
packed where it stands: it gets a subclass of its class, as by torch's parametrizations. So whoever holds the layer,
such as a drafter, computes by the packed weight.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fsd_core.errors import ModelLoadError
from fsd_infer.backends.cpu.blocks import blocks_of
from fsd_infer.backends.cpu.kernels import MAX_ROWS, address_of, in_panels, kernels, panels_of
from fsd_infer.backends.cpu.pages import zeroed
from fsd_infer.backends.cpu.structs import Linear
from fsd_infer.device.memory import trim
from fsd_infer.targets.weights import (
    PackedLayer,
    QuantizedWeight,
    drop_quantized,
    is_plain,
    quantized_of,
    stays_plain,
    warn_once,
)

OWN_SIDE = 32  # columns of the panels that we make


def onednn_packs() -> bool:
    """Return whether this build and machine run bf16 matrix products through oneDNN."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def can_pack(depth: int) -> bool:
    """Return whether oneDNN or our kernels take a bf16 weight whose rows have this many numbers."""
    return onednn_packs() or (kernels() is not None and depth % 32 == 0)


def _kept(panels: Tensor) -> Tensor:
    """Return a copy in the kernels' memory."""
    return zeroed(panels.nbytes).view(panels.dtype).view(panels.shape).copy_(panels)


class Packed:
    """A packed weight, which a layer and an embedding that is tied to it share.

    Attributes:
        weight: [out, in] packed by oneDNN; or for our kernels only: panels of bf16, of blocks, or of fp8 after
            :meth:`quantize`.
        scales: [out] in fp32 after :meth:`quantize`, else None.
        products: the layer as the kernels' struct, for products; None if they cannot read its weight. It may have
            padding columns, all zeros.
        native: the same struct, for all other uses; None if it has such padding.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding, blocks: QuantizedWeight | None = None) -> None:
        """Pack the layer's weight, or ``blocks`` of the same shape in its place.

        Raises ValueError for blocks that :func:`holds_blocks` denies, and for a scale that is not finite.
        """
        weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
        self.columns, self.depth = weight.shape
        self.bias = None if bias is None else bias.detach().clone()
        self.scales: Tensor | None = None
        self.ggml_type = 0 if blocks is None else blocks.ggml_type
        self.kernels = kernels()
        self.products: Linear | None = None
        padding = 0  # columns of zeros
        if blocks is None and not onednn_packs():
            padding = -self.columns % OWN_SIDE
            self.weight = _kept(in_panels(nn.functional.pad(weight, (0, 0, 0, padding)), OWN_SIDE))
            self.bias = None if self.bias is None else nn.functional.pad(self.bias, (0, padding))
            panels: tuple[int, int] | None = (self.weight.data_ptr(), OWN_SIDE)
        elif blocks is None:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
            panels = panels_of(weight, self.weight)
        else:
            source = (blocks.ggml_type, blocks.rows, self.depth, blocks.order)
            packed = None if self.kernels is None else self.kernels.pack_blocks(*source)
            if packed is None or self.kernels is None:
                raise ValueError("blocks of a kind or size that the kernels do not take")
            self.weight, panels = packed, (packed.data_ptr(), self.kernels.block_side)
        if panels is not None:
            sizes = dict(columns=self.columns + padding, depth=self.depth, side=panels[1])
            self.products = Linear(panels=panels[0], kind=self.ggml_type, bias=address_of(self.bias), **sizes)
        self.native = None if padding else self.products

    @property
    def format(self) -> str:
        """See :class:`.PackedLayer`."""
        return "blocks" if self.ggml_type else "bf16" if self.scales is None else "fp8"

    def __call__(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b [..., out] of x [..., in]."""
        few = x.numel() <= MAX_ROWS * x.shape[-1] or not self.weight.is_mkldnn
        if self.products and self.kernels and few and x.dtype == torch.bfloat16 and x.shape[-1] == self.depth:
            return self.kernels.linear(x.contiguous(), self.products)[..., : self.columns]
        if not self.weight.is_mkldnn:
            bias = None if self.bias is None else self.bias[: self.columns].to(x.dtype)
            return nn.functional.linear(x, self.dense().to(x.dtype), bias)
        # .default skips the search among overloads
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")

    def quantize(self) -> None:
        """Convert the weight to fp8 with a scale per output. Does nothing if our kernels cannot read the weight.

        Numbers have a sign, three exponent bits and four mantissa bits. The error is at most 1/33 of a number, or for
        small ones 1/248 of the largest in its output. This is for drafters, whose drafts change no distribution of
        `exact`.
        """
        if self.native is None or self.kernels is None or self.scales is not None or self.ggml_type:
            return
        panels, self.scales = fp8_panels(self.dense(), self.native.side)
        self.weight = _kept(panels)
        self.native.panels, self.native.scales = self.weight.data_ptr(), self.scales.data_ptr()

    def dense(self) -> Tensor:
        """Return the weight [out, in] of the products in bf16. Numbers of blocks are rounded once."""
        if self.ggml_type:
            return self.rows(torch.arange(self.columns))
        if self.scales is None:
            if self.weight.is_mkldnn:
                return self.weight.to_dense()
            return self.weight.transpose(1, 2).reshape(-1, self.depth)[: self.columns]
        numbers = self.weight.transpose(1, 2).reshape(self.columns, self.depth)
        sizes = fp8_values()[numbers.int() & 127]
        return (torch.where(numbers < 0, -sizes, sizes) * self.scales[:, None]).to(torch.bfloat16)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows ids [...] of the weight: [..., in]. Unpacks all of it if our kernels cannot read it."""
        if self.native and self.kernels and self.scales is None:
            return self.kernels.rows(self.native, ids.contiguous())
        return self.dense()[ids]


class _PackedLayer(PackedLayer):
    """What packed layers have in common.

    Attributes:
        packed: the weight.
        own_forward: what a library had put on the layer, if any.
    """

    packed: Packed
    own_forward: Any

    @property
    def format(self) -> str:  # type: ignore[override]
        return self.packed.format

    def weight_rows(self, ids: Tensor | None) -> Tensor:
        return self.packed.dense() if ids is None else self.packed.rows(ids)

    def become_plain(self, weight: Tensor) -> None:
        self.__class__ = type(self).__bases__[1]
        for name in ("packed", "own_forward"):
            value = vars(self).pop(name)
        if value is not None:
            vars(self)["forward"] = value
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)


class PackedLinear(_PackedLayer):
    """A linear layer that computes by a packed weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)


class PackedEmbedding(_PackedLayer):
    """An embedding that reads the rows of a packed weight."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids.long())


@cache
def _packed_class(layer_class: Any) -> type[nn.Module]:
    """Return the subclass of a layer's class that computes by a packed weight."""
    first = PackedEmbedding if issubclass(layer_class, nn.Embedding) else PackedLinear
    return type(f"Packed{layer_class.__name__}", (first, layer_class), {"__module__": __name__})


def attach(layer: nn.Module, packed: Packed) -> None:
    """Make a layer compute by a packed weight; its parameter stays."""
    vars(layer).update(packed=packed, own_forward=vars(layer).pop("forward", None))
    layer.__class__ = _packed_class(type(layer))  # type: ignore[arg-type]


def unpack(module: nn.Module) -> int:
    """Make all packed layers plain, with their weight bit by bit, or as :meth:`Packed.quantize` rounded it.

    Returns:
        The number of packed weights.
    """
    weights: dict[int, nn.Parameter] = {}  # of packed weights, some of which serve two layers
    packed = packed_products(module)
    for layer in module.modules():
        if isinstance(layer, _PackedLayer):
            weight: Any = layer.weight
            if layer.is_freed:
                if id(layer.packed) not in weights:
                    weights[id(layer.packed)] = nn.Parameter(layer.packed.dense().clone(), requires_grad=False)
                weight = weights[id(layer.packed)]
            layer.become_plain(weight)
    return len(packed)


def fp8_values() -> Tensor:
    """Return the [128] magnitudes of fp8 numbers, rising. The least, in place of 0, is 1/248 of the largest."""
    codes = torch.arange(128)
    return (1 + (codes & 15) / 16) * 2.0 ** ((codes >> 4) - 7)


def fp8_panels(weight: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Convert a weight [out, in] to fp8 panels, int8 [out / side, in / 2, side, 2], and scales [out] in fp32."""
    sizes, values = weight.float().abs(), fp8_values()
    scales = (sizes.amax(1) / values[-1]).clamp_min(torch.finfo(torch.float32).tiny)
    nearest = torch.bucketize(sizes / scales[:, None], (values[1:] + values[:-1]) / 2)
    numbers = torch.where(weight.signbit(), nearest - 128, nearest).to(torch.int8)  # the sign is the highest bit
    return in_panels(numbers, side), scales


def packed_of(layer: nn.Module) -> Packed | None:
    """Return the packed weight that a layer or embedding computes by, or None."""
    return layer.packed if isinstance(layer, _PackedLayer) else None


def packed_products(module: nn.Module) -> list[Packed]:
    """Return the packed weights in ``module``, each once, in the order of its parts."""
    packed_weights = (packed_of(part) for part in module.modules())
    return list(dict.fromkeys(packed for packed in packed_weights if packed is not None))


def holds_blocks(ggml_type: int, columns: int, depth: int) -> bool:
    """Return whether our kernels take a weight [columns, depth] in such blocks."""
    compiled = kernels()
    return compiled is not None and compiled.block_bytes(ggml_type, columns, depth) > 0


def free_weight(layer: Any) -> None:
    """Free a layer's plain weight.

    A linear layer's parameter moves to the device "meta". An embedding's keeps its device without rows, because code
    that asks for a model's device looks at the first parameter.
    """
    rows, device = (0, "cpu") if isinstance(layer, nn.Embedding) else (layer.packed.columns, "meta")
    empty = torch.empty(rows, layer.packed.depth, dtype=torch.bfloat16, device=device)
    layer.weight = nn.Parameter(empty, requires_grad=False)


def pack_stored(module: nn.Module) -> int:
    """Pack the weights that loaders left on layers in the blocks of a file, and return their number.

    Raises:
        ModelLoadError: a scale is not finite.
    """
    stored = {layer: quantized_of(layer) for layer in module.modules()}
    blocks = {layer: weight for layer, weight in stored.items() if isinstance(weight, QuantizedWeight)}
    for layer, weight in blocks.items():
        try:
            attach(layer, Packed(layer, weight))  # type: ignore[arg-type]
        except ValueError as error:
            raise ModelLoadError(f"{weight.name} has {error}. Fetch it again.") from error
        drop_quantized(layer)
    if blocks:
        _share_embedding(module)
    for layer in blocks:
        free_weight(layer)
    return len(blocks)


def pack_linears(module: nn.Module, release: bool = False) -> int:
    """Pack the weight of every bf16 CPU ``nn.Linear`` in ``module``, and return their number.

    Quantised layers compute by blocks if :func:`.blocks_of` and the kernels take them. Others keep the forward of their
    library. Results agree with the plain layer's within bf16 rounding. Skips what neither oneDNN nor our kernels take.

    Args:
        module: the model or head.
        release: free a layer's plain weight if no other part of ``module`` holds it. Otherwise plain weights, ties
            and ``state_dict`` stay, and the packed copies are extra memory.
    """
    holders = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    owner: Any = module
    head = owner.get_output_embeddings() if hasattr(owner, "get_output_embeddings") else None
    count = unread = 0
    for layer in module.modules():
        if packed_of(layer) is not None:
            continue
        blocks = None if layer is head else _readable_blocks(layer)  # a head's rows are read as its library has them
        if blocks is not None or _is_packable(layer):
            is_shared = holders[id(layer.weight)] > 1
            attach(layer, Packed(layer, blocks))  # type: ignore[arg-type]
            if release and not is_shared:
                free_weight(layer)
            count += 1
        elif layer is not head:
            unread += isinstance(layer, nn.Linear) and not is_plain(layer)
    if unread and kernels() is not None:
        warn_once(
            f"{unread} quantised layers of a {type(module).__name__} compute by their library, slower: our kernels "
            "read 8 or 4 bits with scales for rows, or for groups of 32 columns or a multiple, in models in bf16."
        )
    if release:
        _share_embedding(module)
    return count


def _readable_blocks(layer: nn.Module) -> QuantizedWeight | None:
    """A quantised layer's weight in a form that the kernels read."""
    weight = layer._parameters.get("weight")
    if weight is None or weight.dim() != 2 or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return None
    blocks = blocks_of(layer)
    return blocks if blocks is not None and holds_blocks(blocks.ggml_type, *weight.shape) else None


def _is_packable(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and is_plain(layer)
        and not stays_plain(layer)
        and layer.weight.dtype == torch.bfloat16
        and layer.weight.device.type == "cpu"
        and can_pack(layer.weight.shape[1])
    )


def _share_embedding(model: Any) -> None:
    """Make a packed LM head serve its tied embedding, if our kernels read its weight and no other module holds it."""
    if not hasattr(model, "get_output_embeddings"):
        return
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if type(table) is not nn.Embedding or table.max_norm is not None:
        return
    packed = None if head is None else packed_of(head)
    if packed is None or not packed.native or packed_of(table) is not None:
        return
    holders = {part for part in model.modules() if any(w is table.weight for w in part.parameters(recurse=False))}
    if holders == {head, table}:
        attach(table, packed)
        free_weight(head)
        free_weight(table)


def copy_from_files(module: nn.Module) -> None:
    """Copy the remaining weights of ``module``, since one in a mapped file keeps the whole file in memory.

    Then return free memory to the system.
    """
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()
    trim()
