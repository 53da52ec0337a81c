"""The seam between a model and what runs its decoder layers: a stack, chosen once when the model is loaded.

A target and a draft head each own one. The default runs transformers' own layers. A backend
(:mod:`fsd_infer.backends`) may put another in its place, which falls back to the default for calls that it does not
take. Nothing else asks on which processor a forward runs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fsd_core.tensors import additive
from fsd_infer.device.cache import ATTENDS, SlotCache, cache_argument


class StackInputs(NamedTuple):
    """What a forward over M new tokens of each row takes.

    Attributes:
        inputs: token ids [B, M] for a target; for a head the first layer's input [B, M, H].
        positions: [B, M] int64, or [3, B, M] of a head with M-RoPE that reads a prompt with images.
        visible: by layer type, [B, M, S] bool: may token i attend to slot s. One entry serves all layers. None, for
            heads in training: causal attention without a cache.
        cache: a :class:`fsd_infer.device.cache.SlotCache` that has the new tokens' slots, or None.
        capture: numbers of the layers whose outputs to return, ascending.
        embeds: [B, M, E] of an EAGLE-3 head, whose first layer attends to [norm(embeds) ; norm(inputs)].
        keep: return the logits of the last ``keep`` tokens only (0: of all), if the stack computes logits.
    """

    inputs: Tensor
    positions: Tensor
    visible: Mapping[str, Tensor] | None
    cache: Any
    capture: Sequence[int] = ()
    embeds: Tensor | None = None
    keep: int = 0

    def entering(self, decoder: Any) -> tuple[Tensor, Tensor | None]:
        """Return the first layer's input [B, M, H] and, of an EAGLE-3 head, what its attention reads [B, M, 2H]."""
        if self.embeds is not None:
            residual, attended = decoder.layers[0].attended(self.embeds, self.inputs)
            return residual, attended
        return self.inputs if self.inputs.is_floating_point() else decoder.embed_tokens(self.inputs), None


class Outputs(NamedTuple):
    """What a forward over M new tokens of each row returns.

    Attributes:
        final: [B, M, H] the last layer's output after the final norm, if the owner has one.
        captured: [B, M, H] each, the outputs of the layers that were asked for, in that order. The last layer's is
            from before the final norm, unlike in transformers' ``hidden_states``.
        logits: [B, M or keep, V] if the stack ran the model's own LM head, else None.
    """

    final: Tensor
    captured: Sequence[Tensor] = ()
    logits: Tensor | None = None


class Stack(Protocol):
    """The decoder layers of a target or a draft head as one call. Forwards may run concurrently."""

    def __call__(self, call: StackInputs) -> Outputs:
        """Run one forward. Raises IndexError if a slot is out of range."""
        ...

    def head_step(self, head: HeadParts, embeddings: nn.Module, lm_head: nn.Module) -> HeadStep | None:
        """Return a faster step of the draft head that owns the stack, by default None.

        Args:
            head: the head.
            embeddings: its own or the target's.
            lm_head: what reads its outputs as they are. Neither scale nor soft cap follows.
        """
        return None


class HeadParts(Protocol):
    """What a draft head does before its layers, see :class:`fsd_infer.heads.head.EagleHead`.

    Attributes:
        eagle3: whether embeddings go to the first layer separately; else ``fc`` reads [embedding ; feature].
        width: H.
        fc: that layer.
        fusion: the projection of the target's inner layers, if any.
        feature_scale: [H], by which features are divided, or None.
    """

    eagle3: bool
    width: int
    fc: nn.Linear
    fusion: Any
    feature_scale: Tensor | None


class HeadStep(Protocol):
    """A draft head's step from ids and features to features and logits."""

    def __call__(
        self,
        cache: SlotCache,
        visible: Tensor,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        extra_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Run one step. Arguments as for :meth:`fsd_infer.heads.head.HeadModel.forward`, and

        Args:
            extra_rows: [X, H] in fp32, further rows of the LM head.

        Returns:
            The head's outputs [B, M, H] and their logits [B, M, V + X]; None for arguments that it does not take.
        """
        ...


class StackOwner(Protocol):
    """A target or a draft head.

    Attributes:
        stack: what runs its layers.
        plain_stack: the stack that runs transformers' layers.
        decoder: the module with ``layers`` and ``rotary_emb``, and ``embed_tokens`` if inputs are token ids.
        final_norm: the norm after the last layer, if any.
        lm_head_is_plain: whether the logits are the LM head's linear map of ``final``, with a scale and a soft cap. If
            not, a stack has to return logits of its own. True for heads, which read their outputs out by themselves.
    """

    stack: Stack

    @property
    def plain_stack(self) -> Stack: ...

    @property
    def decoder(self) -> nn.Module: ...

    @property
    def final_norm(self) -> nn.Module | None: ...

    @property
    def lm_head_is_plain(self) -> bool: ...


class TransformersStack(Stack):
    """A causal LM's own modules: its layers under a 4-D mask, and its LM head.

    Args:
        model: the causal LM.
        decoder: its decoder.
        layers: the decoder's layers; empty for a decoder without a list of them, whose layers cannot be captured.
    """

    def __init__(self, model: Any, decoder: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.model, self.decoder, self.layers = model, decoder, layers
        config = model.config.get_text_config(decoder=True)
        self._is_eager, self._types = config._attn_implementation == "eager", getattr(config, "layer_types", None) or []
        self.takes_keep, self._cache_argument = _takes_keep(type(model)), cache_argument(type(model))
        self._drops = any(map(_takes_keep, {type(part) for part in decoder.modules()}))

    def __call__(self, call: StackInputs) -> Outputs:
        assert call.visible is not None and call.embeds is None, "for targets"
        masks: Any = {layer_type: mask[:, None] for layer_type, mask in call.visible.items()}
        if self._is_eager:
            masks = {layer_type: additive(mask, self.model.dtype) for layer_type, mask in masks.items()}
        if len(masks) > 1:  # layers that keep only a state have none
            masks = {layer_type: masks.get(ATTENDS.get(layer_type, layer_type)) for layer_type in self._types}
        options: dict[str, Any] = {self._cache_argument: call.cache}
        if call.keep and self.takes_keep:
            options["logits_to_keep"] = self.kept(call.keep, call.inputs.device)
        with self.captured(call.capture) as outputs:
            out = self.model(
                input_ids=call.inputs,
                position_ids=call.positions,
                attention_mask=next(iter(masks.values())) if len(masks) == 1 else masks,
                use_cache=True,
                **options,
            )
        final, *captured = outputs
        return Outputs(final, captured, out.logits[:, -call.keep :])  # [-0:] is all

    def kept(self, count: int, device: torch.device) -> int | Tensor:
        """Return the ``logits_to_keep`` of the last ``count`` tokens.

        Given a number, the decoders of Gemma 4 with shared keys read the other tokens only by their first layers.
        """
        return torch.arange(-count, 0, device=device) if self._drops else count

    @contextmanager
    def captured(self, capture: Sequence[int]) -> Iterator[list[Tensor]]:
        """Yield a list that gets the final features and the outputs of these layers once the decoder has run.

        transformers' ``output_hidden_states`` keeps every layer's output instead.
        """
        modules, by_module = [self.decoder, *(self.layers[number] for number in capture)], dict[nn.Module, Tensor]()
        outputs: list[Tensor] = []

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            by_module[module] = output if isinstance(output, Tensor) else output[0]

        with hooked(modules, keep):
            yield outputs
            outputs += [by_module[module] for module in modules]


class HeadStack(Stack):
    """A head's layers as transformers runs them, and the norm after them, if any.

    Args:
        layers: the decoder layers.
        rotary: their rotary embedding.
        norm: the norm after the last layer.
    """

    def __init__(self, layers: nn.ModuleList, rotary: nn.Module, norm: nn.Module | None) -> None:
        self.layers, self.rotary, self.norm = layers, rotary, norm

    def __call__(self, call: StackInputs) -> Outputs:
        """Run one forward, which captures no layers."""
        x, positions, visible, cache = call[:4]
        count = x.shape[1]
        mask = None if visible is None else next(iter(visible.values()))
        mask = mask[:, None] if isinstance(mask, Tensor) else mask  # packed rows have masks of their own
        if mask is None and is_eager(self.layers) and count > 1:  # eager attention is not causal by itself
            mask = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()[None, None]
        mask, angles, layers = mask_for(self.layers, mask, x.dtype), self.rotary(x, positions), list(self.layers)
        if call.embeds is not None:
            options: dict[str, Any] = dict(attention_mask=mask, position_ids=positions, position_embeddings=angles)
            x = layers.pop(0)(call.embeds, x, cache, **options)
        x = run_layers(layers, x, angles, positions, mask, cache)
        return Outputs(x if self.norm is None else self.norm(x))


def run_layers(
    layers: Iterable[nn.Module], x: Tensor, angles: Any, positions: Tensor, mask: Tensor | None, cache: Any
) -> Tensor:
    """Run x [B, M, H] through decoder layers, with the rotary ``angles`` of ``positions`` [B, M]."""
    for layer in layers:
        cache_option = {} if cache is None else {cache_argument(type(layer)): cache}
        x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles, **cache_option)
        x = x[0] if isinstance(x, tuple) else x
    return x


def is_eager(layers: nn.ModuleList) -> bool:
    """Whether the layers' attention is eager: it needs additive masks and is not causal by itself."""
    config = getattr(getattr(layers[0], "self_attn", None), "config", None)
    return getattr(config, "_attn_implementation", "sdpa") == "eager"


def mask_for(layers: nn.ModuleList, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a boolean mask for the layers' attention: additive if eager, else boolean."""
    return mask if mask is None or not is_eager(layers) else additive(mask, dtype)


def _takes_keep(module_class: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(module_class.forward).parameters


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[..., Any], before: bool = False) -> Iterator[None]:
    """Call a hook at every forward of these modules by this thread within the block. Other threads may run them, too.

    Args:
        modules: those whose forwards call it.
        hook: called with (module, positional arguments, keywords, output); an output that it returns takes its place.
        before: call it before the forward instead, without the output.
    """
    thread = threading.get_ident()

    def in_thread(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    register = nn.Module.register_forward_pre_hook if before else nn.Module.register_forward_hook
    handles = [register(module, in_thread, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layer_list(decoder: nn.Module, count: int) -> nn.ModuleList | None:
    """Return the list of a decoder's ``count`` layers, or None. A decoder may also hold a vision tower."""
    direct: Any = getattr(decoder, "layers", None)
    towers = (part for part in decoder.modules() if getattr(part, "main_input_name", "") == "pixel_values")
    in_towers = {inner for tower in towers if tower is not decoder for inner in tower.modules()}  # GIT has equal lists
    lists = (x for x in (direct, *decoder.modules()) if isinstance(x, nn.ModuleList) and x not in in_towers)
    return next((layers for layers in lists if len(layers) == count), None)
