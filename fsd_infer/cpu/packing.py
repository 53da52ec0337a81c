"""bf16 linear layers with weights in oneDNN's own layout, and, for draft heads, in fp8.

An unpacked bf16 weight is reordered in every call; packed once, a linear layer over a few tokens takes half the time,
and our kernels read it where it lies. A layer's forward is replaced on the instance; modelling code is not touched.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from fsd_infer.cpu.blocks import Blocks, blocks_of
from fsd_infer.cpu.kernels import MOST_ROWS, Linear, kernels, panels_of
from fsd_infer.device.memory import trim

_COMPUTED = "_computed_weight"  # of a quantised layer, among its own attributes


def can_pack() -> bool:
    """Does this build and machine run bf16 matrix products through oneDNN?"""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Packed:
    """A linear layer's forward, x [..., in] -> x Wᵀ + b, through its packed weight.

    Attributes:
        layer: whose forward this is, once :meth:`put_on` was called.
        weight: packed by oneDNN, [out, in]; after :meth:`quantize` fp8 panels, which our kernels alone read, as they
            do blocks.
        scales: [out] after :meth:`quantize`, in fp32; else None.
        native: the layer as the kernels take it; None if they cannot read its weight.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding, blocks: Blocks | None = None) -> None:
        """Pack the layer's weight, or, in its place, ``blocks`` of the same shape.

        Raises ValueError for blocks that cannot be held, see :func:`hold_blocks`.
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
            panels = panels_of(weight, self.weight)
        else:
            self.weight = self._panels(blocks)
            panels = self.weight.data_ptr()
        if panels is not None:
            address = None if self.bias is None else self.bias.data_ptr()
            sizes = dict(columns=self.columns, depth=self.depth)
            self.native = Linear(panels=panels, kind=self.kind, bias=address, **sizes)
        self._table: nn.Embedding | None = None  # that its weight is tied to, if it serves both alone

    def _panels(self, blocks: Blocks) -> Tensor:
        taken = (blocks.kind, blocks.rows, self.depth, blocks.order)
        made = None if self.kernels is None else self.kernels.pack_blocks(*taken)
        if made is None:
            raise ValueError("blocks of a kind or size that the kernels do not take")
        return made

    def put_on(self) -> None:
        """Compute by this from now on."""
        # seen before the class's method
        vars(self.layer)["forward"] = Rows(self) if isinstance(self.layer, nn.Embedding) else self

    def __call__(self, x: Tensor) -> Tensor:
        few = x.numel() <= MOST_ROWS * x.shape[-1] or self.scales is not None or self.kind
        if self.native and self.kernels and few and x.dtype == torch.bfloat16 and x.shape[-1] == self.depth:
            return self.kernels.linear(x.contiguous(), self.native)
        if self.kind:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return nn.functional.linear(x, self.dense().to(x.dtype), bias)
        # .default: the overload itself, which Python reaches faster than the operator that chooses among overloads
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")

    def release(self) -> None:
        """Free the layer's plain weight. Its parameter stays, without memory (device "meta"), until :meth:`unpack`."""
        empty = torch.empty(self.columns, self.depth, dtype=torch.bfloat16, device="meta")
        self.layer.weight = nn.Parameter(empty, requires_grad=False)

    def quantize(self) -> None:
        """Hold the weight as fp8 numbers and a scale per output from now on: half as much to read.

        A sign, three bits of exponent, four of the mantissa: a number is off by 1/33 of itself at most, or, where it is
        small, by 1/248 of the largest of its output's. For drafters: what they draft changes no law of `exact`. Where
        our kernels cannot read the weight it stays as it is.
        """
        if self.native is None or self.kernels is None or self.scales is not None or self.kind:
            return
        self.weight, self.scales = fp8_panels(self.dense(), self.kernels.panel)
        self.native.panels, self.native.scales = self.weight.data_ptr(), self.scales.data_ptr()

    @property
    def saved_bytes(self) -> int:
        """By :meth:`quantize`, of the weight in bf16."""
        return 0 if self.scales is None else self.columns * self.depth - self.scales.nbytes

    def dense(self) -> Tensor:
        """The weight [out, in] in bf16, as the products have it; of blocks, each number rounded once."""
        if self.kind:
            return self.rows(torch.arange(self.columns))
        if self.scales is None:
            return self.weight.to_dense()
        numbers = self.weight.transpose(1, 2).reshape(self.columns, self.depth)
        sizes = fp8_values()[numbers.int() & 127]
        return (torch.where(numbers < 0, -sizes, sizes) * self.scales[:, None]).to(torch.bfloat16)

    def unpack(self) -> None:
        """Give the layer its own forward back, and its weight: bit by bit the same, or what :meth:`quantize` left."""
        if self.layer.weight.is_meta or not len(self.layer.weight):
            self.layer.weight = nn.Parameter(self.dense().clone(), requires_grad=False)
        if self._table is not None:
            del vars(self._table)["forward"]
            self._table.weight, self._table = self.layer.weight, None
        del vars(self.layer)["forward"]

    def serve(self, table: nn.Embedding) -> None:
        """Be the table of an embedding too that the layer is tied to, so that the plain weight is freed.

        The layer's parameter is then without memory (device "meta"), the embedding's without rows: it comes first in a
        model, and whoever asks where the model is asks the first one.
        """
        self.release()
        table.weight, self._table = _no_rows_of(table.weight), table
        vars(table)["forward"] = Rows(self)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids [...] of the weight: [..., in]. Where our kernels cannot read it, all of it is unpacked for them."""
        if self.native and self.kernels and self.scales is None:
            read = self.kernels.block_rows if self.kind else self.kernels.rows
            return read(self.native, ids.contiguous())
        return self.dense()[ids]


class Rows:
    """An embedding whose table is the packed weight of the layer that it is tied to: ids [...] -> [..., in]."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    def __call__(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids.long())


def fp8_values() -> Tensor:
    """[128] sizes of the numbers of :meth:`Packed.quantize`, rising. The least, in place of 0, is 1/248 of the last."""
    codes = torch.arange(128)
    return (1 + (codes & 15) / 16) * 2.0 ** ((codes >> 4) - 7)


def fp8_panels(weight: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as panels of ``side`` outputs, int8 [out / side, in / 2, side, 2], and scales [out], fp32."""
    sizes, values = weight.float().abs(), fp8_values()
    scales = (sizes.amax(1) / values[-1]).clamp_min(torch.finfo(torch.float32).tiny)
    nearest = torch.bucketize(sizes / scales[:, None], (values[1:] + values[:-1]) / 2)
    numbers = torch.where(weight.signbit(), nearest - 128, nearest).to(torch.int8)  # the sign is the highest bit
    return numbers.view(-1, side, weight.shape[1] // 2, 2).transpose(1, 2).contiguous(), scales


def packed_of(layer: nn.Module) -> Packed | None:
    """What a layer computes by, or an embedding reads, if that is a packed weight."""
    forward = vars(layer).get("forward")
    forward = forward.packed if isinstance(forward, Rows) else forward
    return forward if isinstance(forward, Packed) else None


def packed_in(module: nn.Module) -> list[Packed]:
    """The packed layers in ``module``, each once, in the order of its parts."""
    found = (packed_of(part) for part in module.modules())
    return list(dict.fromkeys(packed for packed in found if packed is not None))


def hold_blocks(layer: nn.Linear | nn.Embedding, blocks: Blocks) -> None:
    """Let a layer of bf16 compute by blocks of its shape; its own weight, if it had memory, is freed.

    Raises ValueError for what :func:`holds_blocks` denies, and for a scale that is no finite number.
    """
    Packed(layer, blocks).put_on()
    if isinstance(layer, nn.Embedding):
        layer.weight = _no_rows_of(layer.weight)
    elif not layer.weight.is_meta:  # which an embedding may be tied to
        layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)


def holds_blocks(kind: int, columns: int, depth: int) -> bool:
    """Do our kernels compute by a weight [columns, depth] in such blocks? Where they have AMX, weights are expanded."""
    compiled = kernels()
    return compiled is not None and compiled.panel == 64 and compiled.block_bytes(kind, columns, depth) > 0


def _no_rows_of(weight: Tensor) -> nn.Parameter:
    empty = weight.new_empty(0, weight.shape[1], device="cpu")
    return nn.Parameter(empty, requires_grad=False)


def pack_linears(module: nn.Module, release: bool = False) -> int:
    """Replace the forward of every bf16 CPU ``nn.Linear`` in ``module`` by a packed one; returns how many.

    Quantised layers compute by blocks from then on where :func:`fsd_infer.cpu.blocks.blocks_of` and the kernels take
    them. Others keep the forward of their library.

    Weights stay where they are (tied weights and ``state_dict`` are untouched), and the packed copy is extra memory,
    unless ``release``: then the plain weight is freed, layer by layer, wherever nobody but the layer's forward reads
    it, as far as can be known. Results agree with the plain layer's within bf16 rounding. Does nothing where oneDNN has
    no bf16.
    """
    holders = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    owner: Any = module
    head = owner.get_output_embeddings() if hasattr(owner, "get_output_embeddings") else None
    count = 0
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
    if release:
        _share_embedding(module)
    return count


def is_shared_out(weight: Any) -> bool:
    """Does this process hold a part of a weight only, as a DTensor? (Their module takes a second to import.)"""
    return hasattr(weight, "full_tensor")


def is_plain(layer: nn.Module) -> bool:
    """Does this layer compute by its class with a plain weight, packed or not?

    Weights of quantisation libraries are tensors of other types, in layers of torch's or their own, or layers whose
    forward was replaced; an adapter is a module around the layer, without a weight.
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
    """Let a packed language-model head serve the embedding that it is tied to.

    Only where our kernels read the packed weight and nobody else holds it.
    """
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


def rows_of(layer: nn.Module, ids: Tensor | None) -> Tensor:
    """Rows ids [K] of a linear layer's or embedding's weight, or all of it; from the packed one where it was freed.

    Of a weight that is shared out over processes (tensor parallelism), gathered: all of them must ask. Of one that is
    quantised or has an adapter: what the layer computes with.
    """
    weight: Tensor | None = getattr(layer, "weight", None)
    packed = packed_of(layer)
    if weight is not None and is_shared_out(weight):
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
    """(rows, columns) of a linear layer's or embedding's weight, as it computes."""
    weight = getattr(layer, "weight", None)
    if weight is not None and (is_plain(layer) or is_shared_out(weight)):
        return int(weight.shape[0]), int(weight.shape[1])
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    return int(layer.out_features), int(layer.in_features)


@torch.no_grad()
def _computed(layer: Any) -> Tensor:
    """The weight [out, in] that a linear layer computes with: its products with one-hot inputs, less its bias.

    Computed once for a quantised layer, which keeps it: a drafter asks for other rows at every text.
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
    if isinstance(layer, nn.Linear):  # around other layers are adapters, which change
        vars(layer)[_COMPUTED] = weight
    return weight


def own_memory(module: nn.Module) -> None:
    """Copy what is left of ``module``'s weights: one that lies in a mapped file keeps the whole file in memory.

    Then return what allocations between them have left free.
    """
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()
    trim()
