"""bf16 linear layers with weights in oneDNN's layout, in fp8 for draft heads, or in the blocks of a quantised file.

oneDNN reorders an unpacked bf16 weight in every call. Packed once, a linear layer over a few tokens takes half the
time, and our kernels read the packed weight too. A layer's forward is replaced on the instance, not in its class.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from fsd_infer.backends.cpu.blocks import Blocks, blocks_of
from fsd_infer.backends.cpu.kernels import MOST_ROWS, address_of, in_panels, kernels, panels_of
from fsd_infer.backends.cpu.losses import say
from fsd_infer.backends.cpu.structs import Linear
from fsd_infer.device.memory import trim

_COMPUTED = "_computed_weight"  # attribute of a quantised layer


def can_pack() -> bool:
    """Return whether this build and machine run bf16 matrix products through oneDNN."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Packed:
    """A linear layer's forward, x [..., in] -> x Wᵀ + b, through its packed weight.

    Attributes:
        layer: the layer that computes by this after :meth:`put_on`.
        weight: [out, in] packed by oneDNN; or panels of blocks, or of fp8 after :meth:`quantize`, for our kernels only.
        scales: [out] in fp32 after :meth:`quantize`, else None.
        native: the layer in the kernels' struct; None if they cannot read its weight.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding, blocks: Blocks | None = None) -> None:
        """Pack the layer's weight, or ``blocks`` of the same shape in its place.

        Raises ValueError for unsupported blocks, see :func:`hold_blocks`.
        """
        weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
        self.layer = layer
        self.columns, self.depth = weight.shape
        self.bias = None if bias is None else bias.detach().clone()
        self.scales: Tensor | None = None
        self.kind = 0 if blocks is None else blocks.kind
        self.kernels = kernels()
        self.native: Linear | None = None
        if blocks is None:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
            place = panels_of(weight, self.weight)
        else:
            taken = (blocks.kind, blocks.rows, self.depth, blocks.order)
            packed = None if self.kernels is None else self.kernels.pack_blocks(*taken)
            if packed is None or self.kernels is None:
                raise ValueError("blocks of a kind or size that the kernels do not take")
            self.weight, place = packed, (packed.data_ptr(), self.kernels.block_side)
        if place is not None:
            sizes = dict(columns=self.columns, depth=self.depth, side=place[1])
            self.native = Linear(panels=place[0], kind=self.kind, bias=address_of(self.bias), **sizes)
        self._table: nn.Embedding | None = None  # the tied embedding that it serves too

    def put_on(self) -> None:
        """Make the layer compute by this."""
        # an instance attribute precedes the class's method
        vars(self.layer)["forward"] = Rows(self) if isinstance(self.layer, nn.Embedding) else self

    def __call__(self, x: Tensor) -> Tensor:
        few = x.numel() <= MOST_ROWS * x.shape[-1] or self.scales is not None or self.kind
        if self.native and self.kernels and few and x.dtype == torch.bfloat16 and x.shape[-1] == self.depth:
            return self.kernels.linear(x.contiguous(), self.native)
        if self.kind:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return nn.functional.linear(x, self.dense().to(x.dtype), bias)
        # .default skips the search among overloads
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")

    def release(self) -> None:
        """Free the layer's plain weight. Its parameter stays on the device "meta" until :meth:`unpack`."""
        empty = torch.empty(self.columns, self.depth, dtype=torch.bfloat16, device="meta")
        self.layer.weight = nn.Parameter(empty, requires_grad=False)

    def quantize(self) -> None:
        """Convert the weight to fp8 with a scale per output. Does nothing if our kernels cannot read the weight.

        Numbers have a sign, three exponent bits and four mantissa bits. The error is at most 1/33 of a number, or for
        small ones 1/248 of the largest in its output. This is for drafters, whose drafts change no law of `exact`.
        """
        if self.native is None or self.kernels is None or self.scales is not None or self.kind:
            return
        self.weight, self.scales = fp8_panels(self.dense(), self.native.side)
        self.native.panels, self.native.scales = self.weight.data_ptr(), self.scales.data_ptr()

    def dense(self) -> Tensor:
        """Return the weight [out, in] of the products in bf16. Numbers of blocks are rounded once."""
        if self.kind:
            return self.rows(torch.arange(self.columns))
        if self.scales is None:
            return self.weight.to_dense()
        numbers = self.weight.transpose(1, 2).reshape(self.columns, self.depth)
        sizes = fp8_values()[numbers.int() & 127]
        return (torch.where(numbers < 0, -sizes, sizes) * self.scales[:, None]).to(torch.bfloat16)

    def unpack(self) -> None:
        """Give the layer its forward and weight back: bit by bit, or as :meth:`quantize` rounded it."""
        if self.layer.weight.is_meta or not len(self.layer.weight):
            self.layer.weight = nn.Parameter(self.dense().clone(), requires_grad=False)
        if self._table is not None:
            del vars(self._table)["forward"]
            self._table.weight, self._table = self.layer.weight, None
        del vars(self.layer)["forward"]

    def serve(self, table: nn.Embedding) -> None:
        """Serve the tied embedding too, and free the plain weight.

        The layer's parameter moves to the device "meta". The embedding's keeps its device without rows, because code
        that asks for a model's device looks at the first parameter.
        """
        self.release()
        table.weight, self._table = _no_rows_of(table.weight), table
        vars(table)["forward"] = Rows(self)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows ids [...] of the weight: [..., in]. Unpacks all of it if our kernels cannot read it."""
        if self.native and self.kernels and self.scales is None:
            read = self.kernels.block_rows if self.kind else self.kernels.rows
            return read(self.native, ids.contiguous())
        return self.dense()[ids]


class Rows:
    """An embedding's forward, ids [...] -> [..., in], through a packed weight."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def __call__(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids.long())


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
    forward = vars(layer).get("forward")
    forward = forward.packed if isinstance(forward, Rows) else forward
    return forward if isinstance(forward, Packed) else None


def packed_products(module: nn.Module) -> list[Packed]:
    """Return the packed layers in ``module``, each once, in the order of its parts."""
    found = (packed_of(part) for part in module.modules())
    return list(dict.fromkeys(packed for packed in found if packed is not None))


def hold_blocks(layer: nn.Linear | nn.Embedding, blocks: Blocks) -> None:
    """Make a bf16 layer compute by blocks of its shape, and free its own weight.

    Raises ValueError for blocks that :func:`holds_blocks` denies, and for a scale that is not finite.
    """
    Packed(layer, blocks).put_on()
    if isinstance(layer, nn.Embedding):
        layer.weight = _no_rows_of(layer.weight)
    elif not layer.weight.is_meta:  # an embedding may be tied to it
        layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)


def holds_blocks(kind: int, columns: int, depth: int) -> bool:
    """Return whether our kernels take a weight [columns, depth] in such blocks."""
    compiled = kernels()
    return compiled is not None and compiled.block_bytes(kind, columns, depth) > 0


def _no_rows_of(weight: Tensor) -> nn.Parameter:
    empty = weight.new_empty(0, weight.shape[1], device="cpu")
    return nn.Parameter(empty, requires_grad=False)


def pack_linears(module: nn.Module, release: bool = False) -> int:
    """Replace the forward of every bf16 CPU ``nn.Linear`` in ``module`` by a packed one, and return their number.

    Quantised layers compute by blocks if :func:`.blocks_of` and the kernels take them. Others keep the forward of their
    library. Results agree with the plain layer's within bf16 rounding. Does nothing if oneDNN has no bf16.

    Args:
        module: the model or head.
        release: free a layer's plain weight if no other part of ``module`` holds it. Otherwise plain weights, ties
            and ``state_dict`` stay, and the packed copies are extra memory.
    """
    holders = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    owner: Any = module
    head = owner.get_output_embeddings() if hasattr(owner, "get_output_embeddings") else None
    count = left = 0
    for layer in module.modules():
        if packed_of(layer) is not None:
            continue
        blocks = None if layer is head else _readable_blocks(layer)  # a head's rows are read as its library has them
        if blocks is not None or _is_packable(layer):
            made = Packed(layer, blocks)  # type: ignore[arg-type]
            made.put_on()
            if release and holders[id(layer.weight)] == 1:
                made.release()
            count += 1
        elif layer is not head:
            left += isinstance(layer, nn.Linear) and not is_plain(layer)
    if left and kernels() is not None:
        say(
            f"{left} quantised layers of a {type(module).__name__} compute by their library, slower: our kernels read "
            "8 or 4 bits with scales for rows, or for groups of 32 columns or a multiple, in models in bf16."
        )
    if release:
        _share_embedding(module)
    return count


def is_sharded(weight: Any) -> bool:
    """Return whether a weight is a DTensor, without importing its module, which takes a second."""
    return hasattr(weight, "full_tensor")


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer computes by its class with a plain weight, packed or not.

    A quantisation library has its own tensor types, its own layers, or replaced forwards. An adapter is a module
    around the layer, without a weight.
    """
    weight = layer._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.is_floating_point()
        and ("forward" not in vars(layer) or packed_of(layer) is not None)
    )


def _readable_blocks(layer: nn.Module) -> Blocks | None:
    """A quantised layer's weight in a form that the kernels read."""
    weight = layer._parameters.get("weight")
    if weight is None or weight.dim() != 2 or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return None
    blocks = blocks_of(layer)
    return blocks if blocks is not None and holds_blocks(blocks.kind, *weight.shape) else None


def _is_packable(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and is_plain(layer)
        and layer.weight.dtype == torch.bfloat16
        and layer.weight.device.type == "cpu"
        and can_pack()
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
        packed.serve(table)


def weight_rows(layer: nn.Module, ids: Tensor | None) -> Tensor:
    """Return rows ids [K] of a linear layer's or embedding's weight, or all of it for None.

    A sharded weight (tensor parallelism) is gathered, so all processes must ask. For a layer that is quantised or has
    an adapter, this is the weight that the layer computes with.
    """
    weight: Tensor | None = getattr(layer, "weight", None)
    packed = packed_of(layer)
    if weight is not None and is_sharded(weight):
        weight = weight.full_tensor()  # type: ignore[attr-defined]
    elif packed is not None and weight is not None and (weight.is_meta or not len(weight)):
        return packed.dense() if ids is None else packed.rows(ids)
    elif weight is None or not is_plain(layer):
        if isinstance(layer, nn.Embedding):
            every = torch.arange(table_size(layer)[0], device=next(layer.parameters()).device)
            return layer(every if ids is None else ids.to(every.device))
        weight = _computed(layer)
    return weight if ids is None else weight[ids].contiguous()


def table_size(layer: Any) -> tuple[int, int]:
    """Return (rows, columns) of the weight that a linear layer or embedding computes with."""
    weight = getattr(layer, "weight", None)
    if weight is not None and (is_plain(layer) or is_sharded(weight)):
        return int(weight.shape[0]), int(weight.shape[1])
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    return int(layer.out_features), int(layer.in_features)


@torch.no_grad()
def _computed(layer: Any) -> Tensor:
    """Return the weight [out, in] that a layer computes with: its products with one-hot inputs, less its bias.

    A quantised layer keeps the result, because a drafter asks for other rows at every text.
    """
    kept: Tensor | None = vars(layer).get(_COMPUTED)
    if kept is not None:
        return kept
    own = next(iter(layer.parameters()))
    dtype = next((one.dtype for one in layer.parameters() if one.is_floating_point()), torch.float32)
    products = layer(torch.eye(table_size(layer)[1], dtype=dtype, device=own.device))
    if layer.bias is not None:
        products = products - layer.bias
    weight = products.t().contiguous()
    if isinstance(layer, nn.Linear):  # others hold adapters, which change
        vars(layer)[_COMPUTED] = weight
    return weight


def own_memory(module: nn.Module) -> None:
    """Copy the remaining weights of ``module``, since one in a mapped file keeps the whole file in memory.

    Then return free memory to the system.
    """
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()
    trim()
