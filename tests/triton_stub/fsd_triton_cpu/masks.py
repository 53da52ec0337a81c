"""A plugin that vLLM calls in each of its processes (`vllm.general_plugins`)."""

from functools import cache
from typing import Any


@cache
def allow_scalar_masks() -> None:
    """Scalar masks that are made by & are integers in Triton's interpreter, which then refuses them."""
    from triton.runtime.interpreter import InterpreterBuilder

    def wrap(name: str, place: int) -> None:
        plain = getattr(InterpreterBuilder, name)

        def call(self: Any, *arguments: Any) -> Any:
            arguments[place].data = arguments[place].data.astype(bool)
            return plain(self, *arguments)

        setattr(InterpreterBuilder, name, call)

    wrap("create_masked_load", 1)
    wrap("create_masked_store", 2)
