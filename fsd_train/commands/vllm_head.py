"""Decode one prompt with a draft head in vLLM: ``VLLM_PYTHON vllm_head.py JOB.json``, for `fsd-train doctor --overfit`.

It runs in vLLM's environment and imports nothing of this package. The job has ``target``, ``head`` and ``output``
(paths), ``method`` ("eagle" or "eagle3"), ``prompt`` and ``answer`` (ids; the head learnt the answer) and ``drafted``
(tokens per round). It writes the number of tokens up to the first that is not the answer's, and the rounds and accepted
drafts by position up to there to ``output``. On a CPU vLLM computes in float32, as the answer was; on a GPU it chooses.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default nearly all memory, which others use
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["target"], max_model_len=len(job["prompt"]) + len(job["answer"]) + job["drafted"] + 1, max_num_seqs=1,
        dtype="auto" if torch.cuda.is_available() else "float32", enforce_eager=True, enable_prefix_caching=False,
        disable_log_stats=False, skip_tokenizer_init=True,
        speculative_config={
            "method": job["method"], "model": job["head"], "num_speculative_tokens": job["drafted"],
        },
    )  # fmt: skip

    def decode(tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": job["prompt"]}], params, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    same = common_length(decode(len(job["answer"])), job["answer"])
    counts = acceptance_counts(llm, job["drafted"])
    if 0 < same < len(job["answer"]):  # drafts of another text say nothing: once more, up to there
        decode(same)
        counts = [after - before for before, after in zip(counts, acceptance_counts(llm, job["drafted"]))]
    reply = {"same": same, "drafts": counts[0], "accepted": counts[1:]}
    Path(job["output"]).write_text(json.dumps(reply))


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    return next((index for index, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def acceptance_counts(llm: Any, drafted: int) -> list[int]:
    """Return the rounds so far, and the accepted drafts by position."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values[:drafted]
    return [int(metrics["vllm:spec_decode_num_drafts"].value), *map(int, accepted)]


if __name__ == "__main__":
    main()
