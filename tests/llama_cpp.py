"""What llama.cpp computes for a GGUF file: ``python -m tests.llama_cpp FILE IDS`` prints log-probabilities by token.

A process of its own: the library holds one server per process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

COUNT = 10  # likeliest tokens


def main(file: str, ids: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = file, 256, 1, -1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to 16 bits
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    events: list[dict[str, Any]] = []
    body = {"prompt": json.loads(ids), "n_predict": 1, "n_probs": COUNT, "logprobs": COUNT, "samplers": ["temperature"]}
    body |= {"temperature": 1.0, "seed": 1, "stream": False}
    xllamacpp.Server(params).handle_completions(body, events.append)
    best = events[-1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    print(json.dumps([[entry["id"], entry["logprob"]] for entry in best]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
