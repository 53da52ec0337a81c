"""The CPU backend: packed weights, decoder layers and functions of rows in compiled kernels."""
