"""Choosing options by measurement."""

from fsd_infer.tuning.autotune import tune

__all__ = ["tune"]
