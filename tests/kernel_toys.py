"""Which tests of our CPU kernels run on this machine."""

from __future__ import annotations

import os
import shutil

import pytest

from fsd_infer.cpu.kernels import NEEDED, cpu_flags
from fsd_infer.cpu.packing import can_pack

CAN = can_pack() and NEEDED <= cpu_flags() and any(map(shutil.which, ("c++", "g++", "clang++")))
TURNED_OFF = os.environ.get("FSD_KERNELS") == "0"
needs_kernels = pytest.mark.skipif(not CAN or TURNED_OFF, reason="needs AVX512-BF16 and a C++ compiler")
