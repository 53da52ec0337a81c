"""Draft heads: models of transformers, with converters for what other programs read."""

FORMATS = ("eagle", "vllm", "sglang", "speculators")  # of other programs, see :mod:`fsd_infer.heads.export`
