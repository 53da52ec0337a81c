"""The `fsd-infer` command."""
