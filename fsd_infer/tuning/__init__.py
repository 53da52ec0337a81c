"""Choosing options by measurement."""

from fsd_infer.tuning.autotune import choose_trees

__all__ = ["choose_trees"]
