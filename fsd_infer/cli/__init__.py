"""The command line `fsd-infer`."""
