"""The decoder layers of a Llama-like model over a text and a tree: cuBLAS's products, and Triton between them.

A layer is four products, the attention (:mod:`.attention`) and four small launches (:mod:`.layer`). Nothing is read on
the host, so a forward can be recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsd_infer.backends.cuda.attention import MAX_NEW, tree_attention
from fsd_infer.backends.cuda.fused import can_fuse, fused
from fsd_infer.backends.cuda.layer import add_norm, rotary_angles, rotate_and_store, silu_mul
from fsd_infer.backends.families import FIXED_ANGLES, hooks_of, is_hooked, is_of_family
from fsd_infer.device.cache import SlotCache
from fsd_infer.targets.masks import layer_windows
from fsd_infer.targets.stack import HeadStep, Outputs, Stack, StackInputs, StackOwner


class Visible(NamedTuple):
    """What the new tokens of a forward may attend to, as :func:`tree_attention` takes it.

    Attributes:
        lengths: [B] slots that all of them see, from slot 0.
        visible_after: [B, M, E] bool, of the slots after these.
        window: positions before a token that it sees of the former; 0: all.
    """

    lengths: Tensor
    visible_after: Tensor
    window: int = 0


class CudaStack(Stack):
    """Decoder layers of equal sizes whose computation :mod:`.layer` knows.

    Forwards over many tokens, such as prompts, run through :attr:`fallback`, on the same weights.

    Args:
        owner: the target or head, of a family that :func:`knows_layers` accepts.
    """

    def __init__(self, owner: StackOwner, fallback: Stack) -> None:
        decoder: Any = owner.decoder
        self.fallback, self.norm = fallback, owner.final_norm
        self._layers: list[Any] = list(decoder.layers)
        self._decoder, self._rotary = decoder, decoder.rotary_emb
        attention = self._layers[0].self_attn
        self._width, self._scale = int(attention.head_dim), float(attention.scaling)
        self._key_heads = attention.k_proj.out_features // self._width
        self._kinds: Sequence[str] | None = getattr(decoder.config, "layer_types", None)
        self._windows = layer_windows(decoder.config)
        self._hooks = hooks_of(self._layers)

    def __call__(self, call: StackInputs) -> Outputs:
        """Run one forward, as :class:`fsd_infer.targets.stack.Stack` says."""
        results = self.run(call, self.norm)
        if results is None:
            return self.fallback(call)
        output, normed, captured = results
        return Outputs(output if self.norm is None else normed, captured)

    def run(self, call: StackInputs, norm: nn.Module | None) -> tuple[Tensor, Tensor, list[Tensor]] | None:
        """Return the last layer's output [B, M, H], its ``norm``, and the captured layers' outputs.

        None for forwards that :attr:`fallback` runs.
        """
        visible, cache, many = call.visible, call.cache, call.inputs.shape[1] > MAX_NEW
        if visible is None or many or not isinstance(cache, SlotCache) or is_hooked(self._hooks):
            return None
        with torch.cuda.device_of(call.inputs):  # Triton launches on the current device
            x, attended = self._entering(call)
            return self._forward(x, call.positions, self._seen(visible, cache), cache, norm, call.capture, attended)

    def head_step(self, head: Any, embeddings: nn.Module, lm_head: nn.Module) -> HeadStep | None:
        """Return the step of an EAGLE-3 head whose LM head reads its outputs normed: the norm ends the last layer."""
        if type(lm_head) is not nn.Linear or lm_head.bias is not None or not (head.eagle3 and head.norms_readout):
            return None
        return CudaHeadStep(self, head, embeddings, lm_head)

    def _entering(self, call: StackInputs) -> tuple[Tensor, Tensor | None]:
        """Return what :meth:`.StackInputs.entering` does."""
        embeds, first = call.embeds, self._layers[0]
        if embeds is None:
            return call.entering(self._decoder)
        x, width = call.inputs, embeds.shape[-1]
        attended = x.new_empty(*x.shape[:2], width + x.shape[-1])
        rows = attended.flatten(0, 1)
        for norm, part, out in (
            (first.input_layernorm, embeds, rows[:, :width]),
            (first.hidden_norm, x, rows[:, width:]),
        ):
            add_norm(part.flatten(0, 1), None, norm.weight, norm.variance_epsilon, out)
        return attended[..., width:] if first.norm_before_residual else x, attended

    def _seen(self, visible: Mapping[str, Tensor], cache: SlotCache) -> list[Visible]:
        """Return what each layer sees, of masks [B, M, S] by layer type."""
        text = cache.text
        kinds: dict[str, Visible] = {}
        for kind, mask in visible.items():
            window = self._windows.get(kind) or 0
            if text is None or window and window < text[1].shape[-1]:  # a window may end within the tree
                kinds[kind] = Visible(mask.new_zeros(len(mask), dtype=torch.long), mask)
            else:
                kinds[kind] = Visible(text[0], text[1].contiguous(), window)
        if len(kinds) == 1:
            return list(kinds.values()) * len(self._layers)
        assert self._kinds is not None
        return [kinds[kind] for kind in self._kinds]

    def _forward(
        self,
        x: Tensor,
        positions: Tensor,
        visible: Sequence[Visible],
        cache: SlotCache,
        norm: nn.Module | None,
        capture: Sequence[int],
        attended: Tensor | None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run the layers on x [B, M, H], as :meth:`run`.

        ``attended`` [B, M, A] is the first attention's input in place of norm(x).
        """
        shape = x.shape
        keys, values = cache.keys_and_values(self._key_heads, self._width, x.dtype, x.device)
        angles = rotary_angles(positions, self._rotary.inv_freq.float(), self._rotary.attention_scaling, x.dtype)
        x, delta = x.flatten(0, 1), None
        outputs: dict[int, Tensor] = {}  # known when the next layer's norm has added them
        for index, layer in enumerate(self._layers):
            if index == 0 and attended is not None:
                normed = attended.flatten(0, 1)
            else:
                x, normed = _normed(layer.input_layernorm, x, delta)
                if index - 1 in capture:
                    outputs[index - 1] = x
            heads = self._attention(layer, normed.view(*shape[:2], -1), angles, positions, visible[index],
                                    keys[index], values[index], cache.slots)  # fmt: skip
            x, normed = _normed(layer.post_attention_layernorm, x, _linear(layer.self_attn.o_proj, heads))
            delta = _linear(layer.mlp.down_proj, silu_mul(F.linear(normed, *fused(_gate_up(layer)))))
        x, normed = _normed(norm, x, delta)
        outputs[len(self._layers) - 1] = x
        return x.view(shape), normed.view(shape), [outputs[index].view(shape) for index in capture]

    def _attention(
        self,
        layer: Any,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        positions: Tensor,
        visible: Visible,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Return the heads' outputs [T, heads · D] for the attention's input [B, M, A]; write keys and values."""
        attention, qkv = layer.self_attn, F.linear(normed, *fused(_qkv(layer)))
        norms, epsilon = None, 0.0
        if hasattr(attention, "q_norm"):
            norms, epsilon = (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.variance_epsilon
        slots = slots.expand(len(normed), -1)
        query = rotate_and_store(qkv, angles, norms, epsilon, keys, values, slots)
        lengths, visible_after, window = visible
        within = positions if window else None
        heads = tree_attention(query, keys, values, lengths, visible_after, self._scale, within, window)
        return heads.flatten(0, 1).flatten(1)


class CudaHeadStep:
    """The step of an EAGLE-3 head from ids and features to outputs and logits, see :class:`.HeadStep`."""

    def __init__(self, stack: CudaStack, head: Any, embeddings: nn.Module, lm_head: nn.Linear) -> None:
        self._stack, self._head, self._embeddings, self._lm_head = stack, head, embeddings, lm_head
        self._hooks = hooks_of([head, lm_head])

    def __call__(
        self,
        cache: SlotCache,
        visible: Tensor,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        extra_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        if features.shape[-1] != self._head.width or is_hooked(self._hooks):  # the head joins the target's
            return None
        embeds = self._embeddings(tokens).to(features.dtype)
        call = StackInputs(features, cache.rotary(positions), {"full_attention": visible}, cache, embeds=embeds)
        results = self._stack.run(call, self._head.norm)
        if results is None:
            return None
        outputs, read, _ = results
        logits = F.linear(read, self._lm_head.weight)
        return outputs, logits if extra_rows is None else torch.cat([logits, F.linear(read, extra_rows)], -1)


def _normed(norm: Any, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x + delta and its norm; without a norm, the sum is both."""
    if norm is None or isinstance(norm, nn.Identity):
        x = x if delta is None else x + delta
        return x, x
    return add_norm(x, delta, norm.weight, norm.variance_epsilon)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)  # without hooks, which there are none of


def _qkv(layer: Any) -> list[nn.Linear]:
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _gate_up(layer: Any) -> list[nn.Linear]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


def fusible(model: nn.Module) -> list[list[nn.Linear]]:
    """Return the groups of linear layers, of all decoder layers within a model or head, that become one product."""
    layers = [part for part in model.modules() if _is_known_layer(part)]
    return [group for layer in layers for group in (_qkv(layer), _gate_up(layer)) if can_fuse(group)]


def knows_layers(owner: StackOwner) -> bool:
    """Whether a :class:`CudaStack` computes what this target's or head's layers do."""
    decoder: Any = owner.decoder
    layers: Any = getattr(decoder, "layers", None)
    rotary: Any = getattr(decoder, "rotary_emb", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers) or not owner.lm_head_is_plain:
        return False
    if not is_of_family(rotary, "RotaryEmbedding") or rotary.rope_type not in FIXED_ANGLES:
        return False
    if not all(_is_known_layer(layer) and can_fuse(_qkv(layer)) and can_fuse(_gate_up(layer)) for layer in layers):
        return False
    sizes = {tuple(part.weight.shape for part in layer.modules() if isinstance(part, nn.Linear))
             for layer in list(layers)[1:]}  # fmt: skip
    dtypes = {parameter.dtype for layer in layers for parameter in layer.parameters()}
    return (
        len(sizes) <= 1
        and len(dtypes) == 1
        and dtypes <= {torch.bfloat16, torch.float16, torch.float32}
        and 2 * rotary.inv_freq.numel() == decoder.layers[0].self_attn.head_dim
    )


def _is_known_layer(layer: Any) -> bool:
    eagle3 = hasattr(layer, "hidden_norm")  # its owner norms its attention's input
    attention: Any = getattr(layer, "self_attn", None)
    return (
        (eagle3 or is_of_family(layer, "DecoderLayer"))
        and is_of_family(attention, "Attention")
        and type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and type(attention.o_proj) is type(layer.mlp.down_proj) is nn.Linear
    )
