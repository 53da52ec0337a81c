"""Former names of options. They work until release 0.2, with one warning each, and then this file goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fsd_core.errors import FsdError
from fsd_core.former import warn_renamed
from fsd_infer.decoder.prompts import listed
from fsd_infer.engine.callback import Callback
from fsd_infer.engine.callbacks import Streaming
from fsd_infer.rules import Rule
from fsd_infer.targets.image_inputs import ImageInput

_RENAMED = {"chat": "apply_chat_template", "cache_keys": "users", "beam_options": "beams"}
_FUNCTIONS = ("on_tokens", "on_round", "ends")


def request_options(
    config: Any, callbacks: Sequence[Callback], options: dict[str, Any]
) -> tuple[Any, Sequence[Callback], dict[str, Any]]:
    """Return the arguments of ``generate`` with former names translated."""
    result = dict(options)
    if isinstance(config, (str, Rule, list, tuple)):
        warn_renamed("a rule as second argument", "give it by name, rule=...")
        config, result["rule"] = None, config
    for old, new in _RENAMED.items():
        if old in result:
            warn_renamed(old, f"it is now {new}")
            result[new] = result.pop(old)
    if "schema" in result:
        warn_renamed("schema", 'it is now guide={"json": schema}')
        schema = result.pop("schema")
        if schema is not None and result.get("guide") is not None:
            raise FsdError("schema is short for a guide: give one of the two.")
        result |= {} if schema is None else {"guide": {"json": schema}}
    functions = {name: result.pop(name) for name in _FUNCTIONS if name in result}
    for name in functions:
        warn_renamed(name, "watch the request with a Callback, see fsd_infer.engine.callbacks.Streaming")
    if any(function is not None for function in functions.values()):
        callbacks = [_Functions(**functions), *callbacks]
    return config, callbacks, result


def former_images(options: dict[str, Any]) -> Any:
    """Pop the former keyword ``images`` of ``generate``. None: none are given."""
    images = options.pop("images", None)
    if images is not None:
        warn_renamed("images=", 'a prompt carries its images, {"prompt": ..., "images": [...]}')
    return images


def with_images(prompts: Any, images: Any, padding: int | None) -> Any:
    """Return prompts of any form with these images of theirs. Raises FsdError unless there is one list per prompt."""
    given = listed(prompts, padding)
    each = _per_prompt(images, len(given))
    if not any(each):
        return prompts if isinstance(prompts, (Mapping, Tensor)) else given
    return [{"prompt": prompt, "images": own} for prompt, own in zip(given, each)]


def _per_prompt(images: Any, count: int) -> list[Any]:
    """Return each prompt's images, given one image, or a list of them for one prompt, or a list of lists.

    Raises FsdError unless there is one list per prompt.
    """
    if count == 1:
        given = list(images) if isinstance(images, (list, tuple)) else [images]
        nested = len(given) == 1 and isinstance(given[0], (list, tuple, ImageInput, type(None)))
        return [(given[0] or ()) if nested else given]
    if not isinstance(images, (list, tuple)) or len(images) != count:
        raise FsdError(f"{count} prompts: images is a list with each prompt's images, a list or None.")
    return [() if one is None else one if isinstance(one, (list, tuple, ImageInput)) else [one] for one in images]


def runtime_options(options: Mapping[str, Any], warn: bool = True) -> dict[str, Any]:
    """Return the keywords of ``from_pretrained``, or options of a record, with former names translated."""
    result = dict(options)
    notify = warn_renamed if warn else lambda old, new: None
    if "pack" in result or "expand" in result:
        pack, expand = result.pop("pack", None), result.pop("expand", False)
        weights = "expanded" if expand and pack is not False else {None: "auto", True: "packed", False: "plain"}[pack]
        notify("pack and expand", f'write weights="{weights}"')
        result["weights"] = weights
    if "quantize" in result:
        result["draft_weights"] = "fp8" if result.pop("quantize") else "plain"
        notify("quantize", f'write draft_weights="{result["draft_weights"]}"')
    for old in {"cuda_graphs", "capture"} & result.keys():
        notify(old, "it is now recording")
        result["recording"] = result.pop(old)
    return result


class _Functions(Streaming):
    """The functions that ``generate`` took before it took callbacks."""

    def __init__(self, ends: Callable[[int, int], str | None] | None = None, **functions: Any) -> None:
        super().__init__(**functions)
        self._ends = ends

    def on_token(self, prompt_index: int, token: int) -> str | None:
        return None if self._ends is None else self._ends(prompt_index, token)
