"""The command `fsd-infer env`: what a bug report should say about a machine, and what runs where on it."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from fsd_infer.backends.cpu.sets import SETS

FLAGS = sorted(frozenset[str]().union(*SETS.values()))
UNITS = {"amx": "tiles (AMX)", "avx512": "vectors (AVX512-BF16)", "avx2": "vectors (AVX2)"}  # by set of kernels
VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "FSD_", "CUDA_VISIBLE_DEVICES", "CXX")  # beginnings of names
SECRET = "KEY"  # a variable whose name has this is not shown


def env(args: argparse.Namespace) -> int:
    """Run `fsd-infer env`."""
    values = facts()
    print(json.dumps(values, indent=1) if args.json else text(values))
    return 0


def facts() -> dict[str, Any]:
    """Return versions, processor, kernels, devices, settings, and what runs where, ready for JSON."""
    import torch

    from fsd_infer.backends.choose import choose
    from fsd_infer.backends.cpu.build import compiler_line
    from fsd_infer.device.cpuinfo import cpu_flags
    from fsd_infer.device.memory import free_bytes
    from fsd_infer.environment import environment

    flags = cpu_flags()
    (name, why), free = choose("cpu").report(), free_bytes(torch.device("cpu"))
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        **{name: value for name, value in environment([]).items() if name not in ("command", "gpu", "cpu_kernels")},
        "memory_free_gib": None if free is None else round(free / 2**30, 1),
        "flags": {flag: flag in flags for flag in FLAGS},
        "kernels": {"set": name, "why": why, "compiler": compiler_line()},
        "devices": ["cpu", *gpus],
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and SECRET not in name
        },
        "runs": _runs(name, why, bool(gpus)),
    }


def text(facts: dict[str, Any]) -> str:
    """Return :func:`facts` as lines."""
    flags, kernels = facts["flags"], facts["kernels"]
    commit = f" ({facts['commit']})" if facts["commit"] else ""
    free = "" if facts["memory_free_gib"] is None else f", {facts['memory_free_gib']} GiB of memory free"
    lines = {
        "versions": f"fsd_infer {facts['fsd_infer']}{commit}, torch {facts['torch']}, transformers "
        f"{facts['transformers']}, Python {facts['python']}, {facts['system']}",
        "processor": f"{facts['cpu']}, {facts['cores']} cores{free}, load {facts['load_average']}",
        "flags": " ".join(flag for flag in FLAGS if flags[flag]) or "none of those that the kernels use",
        "missing": " ".join(flag for flag in FLAGS if not flags[flag]) or "none",
        "kernels": f"{kernels['set'] or 'none'}: {kernels['why']}",
        "compiler": kernels["compiler"],
        "devices": ", ".join(facts["devices"]),
        "threads": f"{facts['threads']} of torch",
        "variables": " ".join(f"{name}={value}" for name, value in facts["variables"].items()) or "none set",
    }
    runs = [f"  {what}: {where}" for what, where in facts["runs"].items()]
    return "\n".join([*(f"{name:<10} {line}" for name, line in lines.items()), "what runs where", *runs])


def _runs(name: str | None, why: str, gpu: bool) -> dict[str, str]:
    """Return where each kind of work runs."""
    quantised = "quantised weights (GGUF, GPTQ, AWQ, torchao, quanto, compressed-tensors)"
    if name is None:
        runs = {
            "bf16 weights": f"torch, because {why}",
            quantised: "expanded to bf16, or by their library, for the same reason",
        }
    else:
        products = f"our kernels on {UNITS.get(name, name)}"
        runs = {
            "bf16 weights, and heads in fp8": products,
            quantised: f"{products}, from their own blocks; types that they do not read are expanded",
            "layers of Llama, Mistral, Qwen2 and Qwen3": "our kernels, up to 512 tokens a forward; above by torch",
            "layers of other families": "torch, with our products",
            "fp32 and fp16": "torch",
        }
    return runs | ({"on a GPU": "torch; the CPU's kernels are not used"} if gpu else {})
