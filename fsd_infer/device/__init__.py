"""Devices: CUDA graphs, clocks, memory and transfers."""
