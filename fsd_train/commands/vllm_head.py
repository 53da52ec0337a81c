"""Decode one prompt with a draft head in vLLM: ``VLLM_PYTHON vllm_head.py JOB.json``, for `fsd-train doctor --overfit`.

It runs in vLLM's environment and imports nothing of this package. The job has ``target``, ``head`` and ``output``
(paths), ``method`` ("eagle" or "eagle3"), ``prompt`` (ids), ``new`` and ``drafted`` (tokens of the answer, and per
round). It writes the answer's ids, the number of rounds and the accepted drafts by position to ``output``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["target"], max_model_len=len(job["prompt"]) + job["new"] + job["drafted"] + 1, max_num_seqs=1,
        enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False, skip_tokenizer_init=True,
        speculative_config={
            "method": job["method"], "model": job["head"], "num_speculative_tokens": job["drafted"],
        },
    )  # fmt: skip
    params = SamplingParams(max_tokens=job["new"], temperature=0.0, detokenize=False, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": job["prompt"]}], params, use_tqdm=False)
    reply: dict[str, Any] = {"answer": list(answer.outputs[0].token_ids), "drafts": 0, "accepted": []}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            reply["drafts"] = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            reply["accepted"] = list(metric.values)[: job["drafted"]]
    Path(job["output"]).write_text(json.dumps(reply))


if __name__ == "__main__":
    main()
