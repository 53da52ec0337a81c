"""The commands of `fsd-train`, a module each."""
