"""Draft heads: the module and its checkpoint format."""

FORMATS = ("eagle", "vllm", "sglang", "speculators")  # of other programs, see :mod:`fsd_infer.heads.export`
