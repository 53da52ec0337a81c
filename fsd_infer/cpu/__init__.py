"""Everything that only makes a CPU faster: packed weights, fused operations, kernels of our own.

The rest of the package imports :mod:`fsd_infer.cpu.ops` and nothing else of this folder.
"""
