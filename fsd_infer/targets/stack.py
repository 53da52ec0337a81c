"""The seam between a model and what runs its decoder layers: a stack, chosen once when the model is loaded.

A target and a draft head each own one. The default runs transformers' own layers. A backend
(:mod:`fsd_infer.backends`) may put another in its place, which falls back to the default for calls that it does not
take. Nothing else asks on which processor a forward runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn


class Outputs(NamedTuple):
    """What a forward over M new tokens of each row returns.

    Attributes:
        final: [B, M, H] the last layer's output after the final norm, if the owner has one.
        captured: [B, M, H] each, the outputs of the layers that were asked for, in that order. The last layer's is
            ``final``, as in transformers' ``hidden_states``.
        logits: [B, M or keep, V] if the stack ran the model's own LM head, else None.
    """

    final: Tensor
    captured: Sequence[Tensor] = ()
    logits: Tensor | None = None


class Stack(Protocol):
    """The decoder layers of a target or a draft head as one call. Forwards may run concurrently."""

    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor,
        visible: Mapping[str, Tensor] | None,
        cache: Any,
        *,
        capture: Sequence[int] = (),
        attended: Tensor | None = None,
        keep: int = 0,
    ) -> Outputs:
        """Run one forward.

        Args:
            inputs: of a target token ids [B, M]; of a head the first layer's input [B, M, H].
            positions: [B, M] int64.
            visible: by layer type, [B, M, S] bool: may token i attend to slot s. One entry serves all layers. None,
                for heads in training: causal attention without a cache.
            cache: a :class:`fsd_infer.device.cache.SlotCache` that has the new tokens' slots, or None.
            capture: numbers of the layers whose outputs to return, ascending.
            attended: [B, M, A] input of the first layer's attention in place of norm(x), of EAGLE-3 heads.
            keep: return the logits of the last ``keep`` tokens only (0: of all), if it computes logits.

        Raises:
            IndexError: a slot is out of range.
        """
        ...


class StackOwner(Protocol):
    """A target or a draft head.

    Attributes:
        decoder: the module with ``layers`` and ``rotary_emb``.
        stack: what runs them.
        final_norm: the norm after the last layer, if any.
        lm_head_is_plain: whether the logits are the LM head's linear map of ``final``, with a scale and a soft cap; else
            a stack has to return logits of its own. True for heads, which read their outputs out by themselves.
    """

    stack: Stack

    @property
    def decoder(self) -> nn.Module: ...

    @property
    def final_norm(self) -> nn.Module | None: ...

    @property
    def lm_head_is_plain(self) -> bool: ...
