"""The sets of CPU kernels: what each needs, and which ones this process may use."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from fsd_core.errors import KernelsError
from fsd_infer.device.cpuinfo import cpu_flags

VARIABLE = "FSD_KERNELS"
# every processor with AVX512-BF16 has VNNI too
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma"})
TILES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
AVX2 = frozenset({"avx2", "fma", "f16c", "popcnt"})
# best first: name and the flags that the processor needs
SETS = {"amx": AVX512 | TILES, "avx512": AVX512, "avx2": AVX2}


@dataclass(frozen=True)
class AllowedSets:
    """The sets that may be used.

    Attributes:
        names: of :data:`SETS`, best first.
        why: why these, or why none.
        forced: whether FSD_KERNELS names them, also if it names none.
    """

    names: tuple[str, ...]
    why: str
    forced: bool


def allowed_sets() -> AllowedSets:
    """Return the sets that the processor can run and FSD_KERNELS allows.

    Raises:
        KernelsError: an unknown value of FSD_KERNELS, or a set that this processor cannot run.
    """
    setting = os.environ.get(VARIABLE, "").strip().lower()
    lacking = {name: sorted(needed - cpu_flags()) for name, needed in SETS.items()}
    if setting == "0":
        return AllowedSets((), f"{VARIABLE}=0 turns them off", forced=True)
    if setting in SETS:
        if lacking[setting]:
            raise KernelsError(
                f"{VARIABLE}={setting}, but {_lacks(lacking[setting])}. Unset {VARIABLE} for the best that it can run."
            )
        return AllowedSets((setting,), f"{VARIABLE}={setting} asks for them", forced=True)
    if setting not in ("", "1"):
        raise KernelsError(
            f"{VARIABLE}={setting!r} names no kernels: use {', '.join(SETS)}, 0 for none, or 1 (or nothing) for the "
            "best that the processor can run."
        )
    names = tuple(name for name in SETS if not lacking[name])
    if not names:
        return AllowedSets((), _lacks(lacking["avx2"]), forced=False)
    better = list(SETS)[: list(SETS).index(names[0])]
    return AllowedSets(names, _lacks(lacking[better[-1]]) if better else "the best there are", forced=False)


def _lacks(flags: list[str]) -> str:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"they are written for x86-64 processors, and this is {platform.machine()}"
    return f"the processor lacks {', '.join(flags)}"
