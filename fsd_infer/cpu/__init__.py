"""Everything that only makes a CPU faster: packed weights, fused operations, kernels of our own.

The rest of the package reaches it through this page alone.
"""

from fsd_infer.cpu.fused_ops import fuse_layers, speed_up
from fsd_infer.cpu.packing import Packed, pack_linears, packed_in, restore, rows_of

__all__ = ["Packed", "fuse_layers", "pack_linears", "packed_in", "restore", "rows_of", "speed_up"]
