"""The decoder layers of a Llama-like model as one call of our kernels over a KV cache's slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsd_infer.backends.cpu.kernels import FEW_TOKENS, MAX_ROWS, Kernels, address_of, kernels
from fsd_infer.backends.cpu.packing import packed_of
from fsd_infer.backends.cpu.structs import Forward, Layer, StackStruct
from fsd_infer.backends.families import FIXED_ANGLES, hooks_of, is_hooked, is_of_family
from fsd_infer.device.cache import SlotCache
from fsd_infer.device.cores import team_size
from fsd_infer.targets.stack import HeadParts, HeadStep, Outputs, Stack, StackInputs, StackOwner

MAX_SLOTS = {"amx": 2048}  # most slots that many tokens may attend to: above, torch is faster with these kernels


HeadSteps = Callable[["CpuStack", HeadParts, nn.Module, nn.Module], HeadStep | None]


class StackCall(NamedTuple):
    """A forward for the kernels.

    Attributes:
        forward: the struct.
        out: [B, M, H] of the last layer, and normed if the kernels know the norm.
        outputs: by layer, [B, M, H] of those to capture, none of them normed.
        held: tensors whose addresses the struct holds.
    """

    forward: Forward
    out: Tensor
    outputs: dict[int, Tensor]
    held: tuple[Tensor | None, ...]


class CpuStack(Stack):
    """Decoder layers of equal sizes with packed weights, whose computation the kernels know.

    Calls that the kernels do not take, or where torch is faster, run through :attr:`fallback`.

    A row's result does not depend on the rows beside it (see :mod:`fsd_infer.backends.cpu.kernels`). Forwards may run
    concurrently.

    Args:
        owner: the target or head.
        compiled: the kernels.
        layers: the layers as the kernels' structs.
        held: tensors whose addresses ``layers`` holds.
        head_steps: makes the step of a draft head over these layers.
    """

    def __init__(
        self, owner: StackOwner, compiled: Kernels, layers: Sequence[Layer], held: list[Any], head_steps: HeadSteps
    ) -> None:
        decoder: Any = owner.decoder
        self.fallback, self.norm = owner.plain_stack, owner.final_norm
        self._decoder, first = decoder, decoder.layers[0]
        self._kinds: Any = getattr(decoder.config, "layer_types", None)
        attention = first.self_attn
        self.number, self.width, self.rotary = len(layers), int(attention.head_dim), decoder.rotary_emb
        self.key_heads = layers[0].key.columns // self.width
        self.epsilon: float = first.post_attention_layernorm.variance_epsilon
        self.kernels, self._held, self._head_steps = compiled, held, head_steps
        self.struct = StackStruct(
            layers=(Layer * self.number)(*layers),
            number=self.number,
            hidden=layers[0].down.columns,
            inner=layers[0].down.depth,
            query_heads=layers[0].query.columns // self.width,
            key_heads=self.key_heads,
            width=self.width,
            epsilon=self.epsilon,
            scale=attention.scaling,
        )
        norm: Any = self.norm
        within = norm is not None and norm.variance_epsilon == self.epsilon and norm.weight.dtype == torch.bfloat16
        self._norm_weight = norm.weight.detach().clone() if within else None  # else computed by the module
        self._angles: tuple[Tensor, Tensor] | None = None  # cosines and sines by position, [P, D] each
        self._hooks = hooks_of(decoder.layers)

    @classmethod
    def of(cls, owner: StackOwner, head_steps: HeadSteps) -> CpuStack | None:
        """Return the stack of a target or head, or None if the kernels do not know its layers. Arguments as above."""
        decoder, compiled = owner.decoder, kernels()
        layers: Any = getattr(decoder, "layers", None)
        rotary: Any = getattr(decoder, "rotary_emb", None)
        if compiled is None or not isinstance(layers, nn.ModuleList) or not len(layers):
            return None
        if not is_of_family(rotary, "RotaryEmbedding") or rotary.rope_type not in FIXED_ANGLES:
            return None
        held: list[Any] = []
        structs = [_native(layer, held, first=index == 0) for index, layer in enumerate(layers)]
        supported = [layer for layer in structs if layer is not None]
        sizes = {(layer.down.columns, layer.down.depth, layer.query.columns, layer.key.columns) for layer in supported}
        if len(supported) < len(layers) or len(sizes) > 1 or not owner.lm_head_is_plain:
            return None
        return cls(owner, compiled, supported, held, head_steps)

    @property
    def norms(self) -> bool:
        """Whether the kernels compute the final norm, if there is one."""
        return self.norm is None or self._norm_weight is not None

    def head_step(self, head: HeadParts, embeddings: nn.Module, lm_head: nn.Module) -> HeadStep | None:
        """See :meth:`fsd_infer.targets.stack.Stack.head_step`."""
        return self._head_steps(self, head, embeddings, lm_head)

    def takes(self, visible: Tensor) -> bool:
        """Return whether the kernels are fastest for a mask [B, M, S]; above their limits torch is."""
        batch, count, used = visible.shape
        return batch * count <= MAX_ROWS and (count <= FEW_TOKENS or used <= MAX_SLOTS.get(self.kernels.name, used))

    def __call__(self, call: StackInputs) -> Outputs:
        """Run one forward, as :class:`fsd_infer.targets.stack.Stack` says."""
        visible, cache = call.visible, call.cache
        mask = None if visible is None else next(iter(visible.values()))
        if mask is None or not isinstance(cache, SlotCache) or not self.takes(mask) or is_hooked(self._hooks):
            return self.fallback(call)
        assert visible is not None
        masks = [mask] * self.number if len(visible) == 1 else [visible[layer_type] for layer_type in self._kinds]
        x, attended = call.entering(self._decoder)
        native = self.call(x.contiguous(), call.positions, masks, cache, call.capture, attended)
        self.kernels.stack(self.struct, native.forward)
        return self.outputs(native, call.capture)

    def call(
        self,
        x: Tensor,
        positions: Tensor,
        masks: Sequence[Tensor],
        cache: SlotCache,
        capture: Sequence[int] = (),
        attended: Tensor | None = None,
    ) -> StackCall:
        """Describe a forward over contiguous x [B, M, H] in bf16, with a mask [B, M, S] for each layer."""
        batch, count, _ = x.shape
        keys, values = cache.keys_and_values(self.key_heads, self.width, x.dtype)
        cosine, sine = self._tables(int(positions.max()) + 1)
        masks = [mask.contiguous() for mask in masks]
        positions, slots = positions.contiguous(), cache.slots.expand(batch, -1).contiguous()
        out, outputs = torch.empty_like(x), {index: torch.empty_like(x) for index in capture}
        if self._norm_weight is None:
            outputs[self.number - 1] = out  # the kernels end before the norm, if any
        addresses = (c_void_p * self.number)()
        for index, output in outputs.items():
            addresses[index] = output.data_ptr()
        forward = Forward(
            batch=batch,
            count=count,
            x=x.data_ptr(),
            attended=address_of(attended),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            angles=len(cosine),
            visible=(c_void_p * self.number)(*(mask.data_ptr() for mask in masks)),
            used=masks[0].shape[-1],
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            capacity=keys.shape[3],
            layer_stride=keys.stride(0),
            batch_stride=keys.stride(1),
            head_stride=keys.stride(2),
            slot_stride=keys.stride(3),
            outputs=addresses,
            final_norm=address_of(self._norm_weight),
            out=out.data_ptr(),
            many=count > FEW_TOKENS,
            threads=team_size(),
        )
        return StackCall(forward, out, outputs, (x, attended, positions, slots, cosine, sine, keys, values, *masks))

    def outputs(self, call: StackCall, capture: Sequence[int] = ()) -> Outputs:
        """Return the outputs of a finished forward."""
        out, norm = call.out, self.norm
        if norm is not None and self._norm_weight is None:
            out = norm(out)
        return Outputs(out, [call.outputs[index] for index in capture])

    def _tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return the rotary module's cosines and sines [P, D] of at least P positions."""
        angles = self._angles
        if angles is None or len(angles[0]) < positions:
            indices = torch.arange(max(512, 2 * positions))
            cosine, sine = self.rotary(torch.empty(1, dtype=torch.bfloat16), indices[None])
            angles = self._angles = cosine[0].contiguous(), sine[0].contiguous()
        return angles


def _native(layer: Any, held: list[Any], first: bool) -> Layer | None:
    """Return a layer's struct, or None if the kernels do not know it. ``held`` gets the tensors that it points to."""
    eagle3 = first and hasattr(layer, "hidden_norm")  # the caller norms its attention's input
    attention = getattr(layer, "self_attn", None)
    if not (eagle3 or is_of_family(layer, "DecoderLayer")) or not is_of_family(attention, "Attention"):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)]
    norms = [
        None if eagle3 or isinstance(norms[0], nn.Identity) else norms[0],
        *norms[1:],
        layer.post_attention_layernorm,
    ]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    packed = [packed_of(linear) for linear in (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    products = [product.native for product in packed if product is not None and product.native is not None]
    # copies, because a module's weights may move
    weights = [None if norm is None else norm.weight.detach().clone() for norm in norms]
    if (
        len(products) < len(packed)
        or attention.config._attn_implementation != "sdpa"
        or attention.head_dim % 32
        or type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation")
        or any(weight is not None and weight.dtype != torch.bfloat16 for weight in weights)
        or len({norm.variance_epsilon for norm in norms if norm is not None}) > 1
    ):
        return None
    held += [packed, weights]
    return Layer(*products, *map(address_of, weights))
