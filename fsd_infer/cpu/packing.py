"""CPU speed without touching modelling code: bf16 linear layers with weights in oneDNN's own layout.

An unpacked bf16 weight is reordered in every call; packed once, a linear layer over a few tokens takes half the time.
:func:`speed_up` does this and :mod:`fsd_infer.cpu.fused_ops`'s replacements; :func:`restore` undoes both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsd_infer.cpu.kernels import MOST_ROWS, Weight, kernels, panels_of
from fsd_infer.device.memory import trim

_Made = TypeVar("_Made")


def can_pack() -> bool:
    """Does this build and machine run bf16 matrix products through oneDNN?"""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Replacement:
    """A module's forward by other means, put on the instance. Its class, its weights and its hooks stay.

    Attributes:
        packed: the products it makes by packed weights. Nobody else needs to pack their layers.
    """

    packed: tuple[Packed, ...] = ()

    def put_on(self, module: nn.Module) -> None:
        setattr(module, "forward", self)  # noqa: B010 - an instance attribute, seen before the method


def is_replaced(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), Replacement)


def restore(module: nn.Module) -> int:
    """Give every module in ``module`` its own forward and weights back; returns how many had another forward."""
    for packed in packed_in(module):
        packed.unpack()
    replaced = [part for part in module.modules() if is_replaced(part)]
    for part in replaced:
        delattr(part, "forward")
    return len(replaced)


class Packed(Replacement):
    """x [..., in] -> x Wᵀ + b through the packed weight of one linear layer, or of several side by side.

    Attributes:
        weight: packed by oneDNN, [out, in]; after :meth:`quantize` fp8 panels, which our kernels alone read.
        scales: [out] after :meth:`quantize`, in fp32; else None.
        panels: where the kernels find the weight; None if they cannot read it.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.linears, self.packed = linears, (self,)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        self.bias = torch.cat(biases) if biases else None
        self.columns, self.depth = weight.shape
        address = panels_of(weight, self.weight)
        self.panels = None if address is None else Weight(address, None)
        self.scales: Tensor | None = None
        self.kernels = kernels()
        self.latest: tuple[Tensor, Tensor] | None = None  # of :class:`Share`
        self.table: nn.Embedding | None = None  # that its weight is tied to, if it serves both alone

    def __call__(self, x: Tensor) -> Tensor:
        few = x.numel() <= MOST_ROWS * x.shape[-1] or self.scales is not None
        if self.panels and self.kernels and few and x.dtype == torch.bfloat16:
            return self.kernels.linear(x.contiguous(), self.panels, self.bias, self.columns)
        # .default: the overload itself, which Python reaches faster than the operator that chooses among overloads
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")

    def release(self, layers: Collection[nn.Module]) -> None:
        """Let go of the plain weights of its layers that are in ``layers``; they answer by the packed one from now on.

        A weight's parameter stays, without memory (device "meta"), until :meth:`unpack`.
        """
        stop = 0
        for linear in self.linears:
            start, stop = stop, stop + linear.out_features
            if linear in layers:
                (self if len(self.linears) == 1 else Share(self, start, stop)).put_on(linear)
                linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)

    def quantize(self) -> None:
        """Hold the weight as fp8 numbers and a scale per output from now on: half as much to read.

        A sign, three bits of exponent, four of the mantissa: a number is off by 1/33 of itself at most, or, where it is
        small, by 1/248 of the largest of its output's. For drafters: what they draft changes no law of `exact`. Where
        our kernels cannot read the weight it stays as it is. Call :func:`.fused_ops.quantize_packed`, which informs
        layers that hold the address.
        """
        if self.panels is None or self.kernels is None or self.scales is not None:
            return
        self.weight, self.scales = fp8_panels(self.dense(), self.kernels.panel)
        self.panels = Weight(self.weight.data_ptr(), self.scales.data_ptr())

    @property
    def saved_bytes(self) -> int:
        """By :meth:`quantize`, of the weight in bf16."""
        return 0 if self.scales is None else self.columns * self.depth - self.scales.nbytes

    def dense(self) -> Tensor:
        """The weight [out, in] in bf16, as the products have it."""
        if self.scales is None:
            return self.weight.to_dense()
        numbers = self.weight.transpose(1, 2).reshape(self.columns, self.depth)
        sizes = fp8_values()[numbers.int() & 127]
        return (torch.where(numbers < 0, -sizes, sizes) * self.scales[:, None]).to(torch.bfloat16)

    def unpack(self) -> None:
        """Give its layers the weights back that were let go: bit by bit the same, or what :meth:`quantize` left."""
        if any(linear.weight.is_meta for linear in self.linears):
            sizes = [linear.out_features for linear in self.linears]
            for linear, weight in zip(self.linears, self.dense().split(sizes)):
                if linear.weight.is_meta:
                    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
        if self.table is not None:
            self.table.weight, self.table = self.linears[0].weight, None

    def serve(self, table: nn.Embedding) -> None:
        """Be the table of an embedding too that its layer is tied to, so that the plain weight goes.

        The layer's parameter is then without memory (device "meta"), the embedding's without rows: it comes first in a
        model, and whoever asks where the model is asks the first one.
        """
        empty = table.weight.new_empty(0, table.weight.shape[1])
        self.release(self.linears)
        table.weight, self.table = nn.Parameter(empty, requires_grad=False), table
        Rows(self).put_on(table)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ids [...] of the weight: [..., in]. Where our kernels cannot read it, all of it is unpacked for them."""
        if self.panels and self.kernels and self.scales is None:
            return self.kernels.rows(self.panels.panels, self.columns, self.depth, ids.contiguous())
        return self.dense()[ids]


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


class Share(Replacement):
    """One of the layers that a :class:`Packed` stands for, on its own: columns ``start`` to ``stop`` of the product.

    Where the layers of one product are called one after the other on the same x, it is computed once.
    """

    def __init__(self, whole: Packed, start: int, stop: int) -> None:
        self.whole, self.columns = whole, slice(start, stop)
        self.last = stop == whole.columns

    def __call__(self, x: Tensor) -> Tensor:
        known = self.whole.latest
        product = known[1] if known is not None and known[0] is x else self.whole(x)
        self.whole.latest = None if self.last else (x, product)
        return product[..., self.columns]


class Rows(Replacement):
    """An embedding whose table is the packed weight of the layer that it is tied to: ids [...] -> [..., in]."""

    def __init__(self, whole: Packed) -> None:
        self.packed = (whole,)

    def __call__(self, ids: Tensor) -> Tensor:
        return self.packed[0].rows(ids.long())


class OncePerForward:
    """What all layers of a forward share, recognised by the tensors it is made from and made when first asked for."""

    def __init__(self) -> None:
        # two entries: families with two types of layers have two masks and two sets of angles per forward
        self.made: list[tuple[tuple[Tensor, ...], tuple[object, ...], Any]] = []

    def get(self, tensors: tuple[Tensor, ...], values: tuple[object, ...], make: Callable[[], _Made]) -> _Made:
        """What ``make`` made of these very tensors and equal values, now or for an earlier layer."""
        for known, equal, result in self.made:
            if equal == values and all(one is other for one, other in zip(known, tensors)):
                return result
        result = make()
        self.made = [*self.made[-1:], (tensors, values, result)]
        return result


def packed_in(module: nn.Module) -> list[Packed]:
    """The packed products that ``module`` computes by, each once, in the order of its parts."""
    replacements = [vars(part)["forward"] for part in module.modules() if is_replaced(part)]
    return list(dict.fromkeys(packed for replacement in replacements for packed in replacement.packed))


def releasable(module: nn.Module) -> set[nn.Module]:
    """The linear layers in ``module`` whose weight nobody but their forward reads, as far as can be known.

    What is tied stays, but see :func:`share_embedding`. A language-model head's rows are to be had by :func:`rows_of`.
    """
    holders = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    return {part for part in module.modules() if type(part) is nn.Linear and holders[id(part.weight)] == 1}


def rows_of(layer: nn.Module, ids: Tensor | None) -> Tensor:
    """Rows ids [K] of a linear layer's or embedding's weight, or all of it; from the packed one where it was let go."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if (weight.is_meta or not len(weight)) and is_replaced(layer):
        packed = vars(layer)["forward"].packed[0]
        return packed.dense() if ids is None else packed.rows(ids)
    return weight if ids is None else weight[ids].contiguous()


def share_embedding(model: nn.Module) -> None:
    """Let a packed language-model head serve the embedding that it is tied to.

    Only where our kernels read the packed weight and nobody else holds it.
    """
    if not isinstance(model, PreTrainedModel):
        return
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    packed = vars(head).get("forward") if head is not None else None
    if not isinstance(packed, Packed) or not packed.panels:
        return
    if type(table) is not nn.Embedding or table.max_norm is not None or is_replaced(table):
        return
    holders = {part for part in model.modules() if any(w is table.weight for w in part.parameters(recurse=False))}
    if holders == {head, table}:
        packed.serve(table)


def through(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer packed, or the layer itself where that cannot be."""
    return Packed(layer) if is_packable([layer]) else layer  # type: ignore[arg-type]


def is_packable(linears: Sequence[nn.Module]) -> bool:
    """Can :class:`Packed` stand for these layers: plain bf16 linear layers on a CPU, with a bias all or none?"""
    return (
        can_pack()
        and all(
            type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu"
            for layer in linears
        )
        and len({layer.bias is None for layer in linears}) == 1
    )


def own_memory(module: nn.Module) -> None:
    """Copy what is left of ``module``'s weights: one that lies in a mapped file keeps the whole file in memory.

    Then hand back what allocations between them have left free.
    """
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()
    trim()


def pack_linears(module: nn.Module, release: Collection[nn.Module] = ()) -> int:
    """Replace the forward of every bf16 CPU ``nn.Linear`` in ``module`` by a packed one; returns how many.

    The packed copy is extra memory but for layers in ``release`` (see :func:`releasable`), whose plain weight goes.
    All others' weights stay where they are (tied weights and ``state_dict`` are untouched). Results agree with the
    plain layer's within bf16 rounding. Does nothing where oneDNN has no bf16.
    """
    count = 0
    covered = {layer for packed in packed_in(module) for layer in packed.linears}
    for layer in module.modules():
        if is_packable([layer]) and not is_replaced(layer) and layer not in covered:
            made = Packed(layer)  # type: ignore[arg-type]
            made.put_on(layer)
            made.release(release)
            count += 1
    return count
