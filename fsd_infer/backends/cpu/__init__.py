"""Code that only makes a CPU faster: packed weights, fused operations, compiled kernels.

The rest of the package imports only :mod:`fsd_infer.backends.cpu.ops` from here.
"""
