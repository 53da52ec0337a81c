"""Rotary angles that change with the length of the text: LongRoPE and dynamic NTK, as in ``generate``.

transformers computes the angles of a forward by its largest position, and caches keys with the angles of their own
forward. So, when a prompt of P tokens is read at once and then token by token, the token at position p has the angles
for a text of max(p + 1, P) tokens. A forward over a draft tree, or over a batch, has tokens of several such lengths,
and calls the rotary module once per length. Some families recompute the whole text when it first exceeds the original
length (:func:`recompute_length_of`); P is then the length at that time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsd_infer.targets.stack import hooked

_CHANGING = ("longrope", "dynamic")
_RECOMPUTING = ("phi3", "phimoe", "phi4_multimodal")  # their prepare_inputs_for_generation drops the cache


def rope_lengths(config: Any) -> dict[str, int]:
    """Return the longest text, in tokens, before the angles change, by RoPE type; empty if they never do."""
    scaling = getattr(config, "rope_parameters", None) or {}
    lengths: dict[str, int] = {}
    by_type = [options for options in scaling.values() if isinstance(options, Mapping)]  # of each type of layers
    for options in (scaling, *by_type):
        rope_type = options.get("rope_type")
        length = getattr(config, "max_position_embeddings", None)
        if rope_type == "longrope":
            length = options.get("original_max_position_embeddings") or length
        if rope_type in _CHANGING and length is not None:
            lengths[rope_type] = min(int(length), lengths.get(rope_type, int(length)))
    return lengths


def recompute_length_of(config: Any) -> int | None:
    """Return the length beyond which ``generate`` recomputes a text, with the new angles; None: never."""
    recomputes = config.model_type in _RECOMPUTING and "longrope" in rope_lengths(config)
    return int(config.original_max_position_embeddings) if recomputes else None


class DynamicRope:
    """The rotary modules of a decoder whose angles change with the length of the text (transformers' dynamic RoPE).

    Args:
        decoder: holds the modules.
        config: its text config.

    Attributes:
        fixed_length: longest text whose angles are those of shorter texts; None: angles never change.
    """

    def __init__(self, decoder: nn.Module, config: Any) -> None:
        lengths = rope_lengths(config)
        self.fixed_length = min(lengths.values(), default=None)
        self._every = "dynamic" in lengths  # each length beyond has angles of its own
        self.modules = [part for part in decoder.modules() if _kinds(part) & set(_CHANGING)]

    @contextmanager
    def of_texts(self, prefilled: Tensor | None) -> Iterator[None]:
        """Within this context forwards of this thread compute angles by text.

        Args:
            prefilled: [B] length of each row's text when it was last read at once; None: 0.
        """

        def by_text(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            named = dict(zip(("x", "position_ids", "layer_type"), args)) | kwargs
            return self._angles(module, named.pop("x"), named.pop("position_ids"), named, prefilled, output)

        try:
            with hooked(self.modules, by_text):
                yield
        finally:
            self.reset()

    def reset(self) -> None:
        """Reset the angles: dynamic NTK keeps those of the longest earlier text."""
        for module in self.modules if self._every else ():
            for name in list(vars(module)):
                if name.endswith("max_seq_len_cached"):
                    setattr(module, name, module.original_max_seq_len)
            for name, buffer in list(module.named_buffers()):
                if name.endswith("original_inv_freq"):
                    frequencies = module.get_buffer(name.replace("original_", ""))
                    module.register_buffer(name.replace("original_", ""), buffer.to(frequencies), persistent=False)

    def _angles(
        self, module: Any, x: Tensor, positions: Tensor, kwargs: dict[str, Any], prefilled: Tensor | None, like: Any
    ) -> Any:
        """Return the module's output at positions [B, M], each with the angles of its own length of text."""
        assert self.fixed_length is not None
        lengths = positions + 1 if prefilled is None else (positions + 1).maximum(prefilled[:, None])
        lengths = lengths.where(lengths > self.fixed_length, self.fixed_length)
        if not self._every:
            lengths = lengths.clamp_max(self.fixed_length + 1)
        outputs = [part.clone() for part in _parts(like)]
        for length in lengths.unique().tolist():
            self.reset()
            here = lengths == length
            extended = torch.cat([positions[here], positions.new_tensor([length - 1])])  # the last sets the length
            for output, part in zip(outputs, _parts(module.forward(x, extended[None], **kwargs)), strict=True):
                output[here] = part[0, :-1]
        return outputs[0] if isinstance(like, Tensor) else type(like)(outputs)


def _kinds(module: nn.Module) -> set[str]:
    rope_types = getattr(module, "rope_type", "")
    return set(rope_types.values()) if isinstance(rope_types, Mapping) else {str(rope_types)}


def _parts(output: Any) -> Sequence[Tensor]:
    return [output] if isinstance(output, Tensor) else output
