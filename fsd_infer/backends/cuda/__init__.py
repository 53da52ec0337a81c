"""The CUDA backend: compiled layers, and attention and row operations in Triton."""
