"""Draft heads: models of transformers, with converters for what other programs read."""

import re

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
FORMATS = ("eagle", "vllm", "sglang", "speculators")  # of other programs, see :mod:`fsd_infer.heads.export`
