"""The type of a target's weights and the device that they are placed on, as users name them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from fsd_core.errors import ModelLoadError, UnknownNameError, foreign_errors

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # transformers' device_map; other texts name a device


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """Return the dtype named "bf16", "fp16", "fp32" or by torch's own name; None is bf16. Raises UnknownNameError."""
    if dtype is None:
        return torch.bfloat16
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return _DTYPES[str(dtype).removeprefix("torch.")]
    except KeyError:
        raise UnknownNameError(f"unknown dtype {dtype!r}. Known: {', '.join(sorted(_DTYPES))}.") from None


def parse_device(device: str | torch.device | None) -> torch.device:
    """Return the device of that name; None: the first CUDA device if there is one, else the CPU.

    Raises:
        ModelLoadError: no device has this name, or this machine lacks it.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    usable = f"use cpu{', cuda' if torch.cuda.is_available() else ''} or leave it out"
    with foreign_errors(ModelLoadError, f"device {str(device)!r} cannot be used here ({{why}}): {usable}.", most=120):
        place = torch.device(device)
        torch.empty(0, device=place)
        if place.type == "meta" or place.type == "cpu" and place.index:
            raise RuntimeError("there is one cpu, and tensors on meta have no values")
    return place


def take_device(device: str | torch.device | None, model_kwargs: dict[str, Any]) -> Any:
    """Return the device. A ``device_map`` that names one, as text or {"": device}, is removed from the keywords.

    Raises:
        ModelLoadError: a map of several devices without accelerate, or two devices that differ.
    """
    device_map = model_kwargs.get("device_map")
    device_map = device_map[""] if isinstance(device_map, Mapping) and list(device_map) == [""] else device_map
    if device_map is None or isinstance(device_map, Mapping) or device_map in _MAPS:
        if device_map is not None and importlib.util.find_spec("accelerate") is None:
            raise ModelLoadError(
                "device_map needs accelerate: pip install accelerate. For one device, give device instead."
            )
        return device
    if device is not None:
        raise ModelLoadError(f"device is {device} and device_map is {device_map}: give one of them.")
    del model_kwargs["device_map"]
    return device_map
