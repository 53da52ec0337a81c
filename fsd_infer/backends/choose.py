"""Choose the backend of a device. Imported by what loads models and by what reports on a machine, by nothing else."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch

from fsd_infer.backends.base import Backend

# module and class by device type; a new backend is a folder and a line here
BACKENDS = {
    "cpu": ("fsd_infer.backends.cpu.backend", "CpuBackend"),
    "cuda": ("fsd_infer.backends.cuda.backend", "CudaBackend"),
}


def choose(device: torch.device | str) -> Backend:
    """Return the backend of a device, the same object at each call. The first call registers its kernels."""
    return _of_type(torch.device(device).type)


@cache
def _of_type(device_type: str) -> Backend:
    if device_type not in BACKENDS:
        return Backend()
    module, name = BACKENDS[device_type]
    backend: Backend = getattr(import_module(module), name)()
    return backend
