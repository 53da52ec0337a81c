"""Decode with a draft head in vLLM, for ``benchmarks.heads_in_vllm``: ``run_vllm_head.py JOB.json``.

The script runs in vLLM's environment and imports nothing of this repository. The job has ``target``, ``prompts`` (ids),
``new`` (tokens per answer), ``dtype``, ``output`` (a directory), and, to speculate, ``head`` (an exported directory),
``method`` ("eagle" or "eagle3") and ``drafted`` (tokens per round).

It writes ``answers.json`` to ``output``: ids of the answers, number of drafts, accepted ones by position. The file
``call.safetensors`` has the inputs and logits of the head's first call, on the first prompt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from run_vllm import keep_executor, package_version


def watch_first_call(model: Any, tensors: dict[str, Any]) -> None:
    """Keep the inputs and logits of the first call of vLLM's model of a head. Warm-up calls do not count."""
    combine = getattr(model, "combine_hidden_states", None)
    if combine is not None:

        def combined(states: Any) -> Any:
            tensors.setdefault("aux", states.clone())
            return combine(states)

        model.combine_hidden_states = combined

    def called(module: Any, args: Any, inputs: dict[str, Any], outputs: Any) -> None:
        if "logits" not in tensors:
            for name in ("input_ids", "positions", "hidden_states"):
                tensors[name] = inputs[name].clone()
            tensors["logits"] = module.compute_logits(outputs[0]).float().clone()

    model.register_forward_hook(called, with_kwargs=True)


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    version = package_version()
    import torch
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    if not torch.cuda.is_available():
        keep_executor()
    speculation = None
    if "head" in job:
        speculation = {"method": job["method"], "model": job["head"], "num_speculative_tokens": job["drafted"]}
    longest = max(map(len, job["prompts"])) + job["new"] + job.get("drafted", 0) + 1
    llm = LLM(
        job["target"], dtype=job["dtype"], max_model_len=longest, max_num_seqs=1, enable_prefix_caching=False,
        distributed_executor_backend="uni", speculative_config=speculation, disable_log_stats=False,
        skip_tokenizer_init=True, enforce_eager=True,
    )  # fmt: skip
    tensors: dict[str, Any] = {}
    if speculation is not None:
        engine: Any = llm.llm_engine.engine_core
        runner = engine.engine_core.model_executor.driver_worker.worker.model_runner
        watch_first_call(runner.drafter.model, tensors)
    params = SamplingParams(max_tokens=job["new"], temperature=0.0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    reply: dict[str, Any] = {"version": version, "answers": [list(answer.outputs[0].token_ids) for answer in outputs]}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            reply["drafts"] = metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            reply["accepted"] = metric.values[: job.get("drafted", 0)]
    output = Path(job["output"])
    if tensors:
        save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, output / "call.safetensors")
    (output / "answers.json").write_text(json.dumps(reply))


if __name__ == "__main__":
    main()
