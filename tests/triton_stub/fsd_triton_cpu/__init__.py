"""A CPU "backend" for Triton: nothing is compiled, kernels run in Triton's interpreter. For tests of distributions
alone.
"""
