"""Training of draft heads and small draft models for fsd_infer."""

MAX_LENGTH = 1024  # tokens kept per sequence by default, in training and in its cache
LONGEST = 2048  # tokens of prompt and answer that `regenerate` makes, where no recipe says otherwise

__all__ = ["LONGEST", "MAX_LENGTH"]
