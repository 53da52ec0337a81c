"""Families of models whose layers backends compute themselves: x + attention(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
FIXED_ANGLES = ("default", "linear", "llama3", "yarn")  # kinds of rotary angles that depend only on the position
WATCHERS = ("transformers.utils.output_capturing", "fsd_infer.targets.stack")  # whose hooks stacks need not call


def is_of_family(module: Any, kind: str) -> bool:
    """Whether a module is transformers' own, of a family known here: LlamaAttention for the kind "Attention"."""
    made_by_transformers = type(module).__module__.startswith("transformers.models.")
    return made_by_transformers and type(module).__name__ in {family + kind for family in FAMILIES}


def hooks_of(layers: Iterable[Any]) -> list[dict[int, Any]]:
    """Return the dictionaries of forward hooks of all modules within layers; they are filled and emptied later."""
    parts = [part for layer in layers for part in layer.modules()]
    return [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]


def is_hooked(hooks: Iterable[dict[int, Any]]) -> bool:
    """Whether one of these hooks is somebody else's, who expects to be called. Stacks call no hooks."""
    return any(getattr(hook, "__module__", "") not in WATCHERS for each in hooks if each for hook in each.values())
