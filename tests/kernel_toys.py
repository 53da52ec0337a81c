"""Which tests of our CPU kernels run on this machine, and a forward whose logits they compare."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer import Target
from fsd_infer.backends.choose import choose
from fsd_infer.backends.cpu.sets import AVX2, SETS, VARIABLE
from fsd_infer.device.cpuinfo import cpu_flags
from fsd_infer.targets.stack import Stack
from tests.families import tiny_prompts

CAN = AVX2 <= cpu_flags() and any(map(shutil.which, ("c++", "g++", "clang++")))
TURNED_OFF = os.environ.get(VARIABLE) == "0"
needs_kernels = pytest.mark.skipif(not CAN or TURNED_OFF, reason="needs AVX2 and a C++ compiler")
in_each_set = pytest.mark.usefixtures("each_set")  # once with every set of kernels that the machine can run


CPU = choose("cpu")


def prepare(owner: Any, release: bool = False) -> Stack:
    """Let the CPU backend take a target or a head, as a decoder does at loading. Return the owner's stack."""
    CPU.prepare(getattr(owner, "model", owner), release)
    owner.stack = CPU.stack_for(owner)
    stack: Stack = owner.stack
    return stack


def restore(owner: Any) -> int:
    """Undo :func:`prepare`, and return the number of packed weights."""
    owner.stack = owner.plain_stack
    return CPU.restore(getattr(owner, "model", owner))


def need_set(name: str) -> None:
    """Skip a test of a set of kernels that this processor cannot run."""
    if not SETS[name] <= cpu_flags():
        pytest.skip(f"needs a processor with {name.upper()}")


def logits_through_cache(target: Target, nodes: int = 6, length: int = 20) -> Tensor:
    """Logits [1, nodes, V] of a tree of siblings and chains after a text longer than the tested window."""
    tokens = torch.tensor(tiny_prompts((length + nodes,)))
    text, cache = torch.arange(length)[None], target.new_cache(1, length + nodes)
    cache.set_write_slots(text, 0, length)
    target.forward(tokens[:, :length], text, text[:, None] <= text[..., None], cache)
    slots = torch.arange(length, length + nodes)[None]
    positions = length + torch.tensor([[0, 1, 1, 2, 2, 3]])
    parents = [0, 0, 0, 1, 2, 3]
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[parents[node]]
    visible = torch.cat([torch.ones(nodes, length, dtype=torch.bool), ancestors], dim=1)[None]
    cache.set_write_slots(slots, length, length + nodes)
    return target.forward(tokens[:, length:], positions, visible, cache)[0].float()
