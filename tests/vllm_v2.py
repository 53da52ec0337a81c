"""Run by vLLM's Python on a CPU: its model runner V2, Triton interpreted, with our processor. Prints answers as JSON.

PYTHONPATH=.:tests/triton_stub VLLM_PYTHON tests/vllm_v2.py < JOB

A job is [arguments of vLLM's LLM, [[PARAMS, PROMPTS], …]] in JSON. The last line has how often requests were preempted.
"""

import json
import os
import sys

V2 = {
    "VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


def main() -> None:
    """One engine; the batches one after the other."""
    options, batches = json.load(sys.stdin)
    os.environ.update(V2, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams

    engine = LLM(
        dtype="float32", enforce_eager=True, seed=0, disable_log_stats=False,
        **{"max_model_len": 128, "max_num_seqs": 16, **options},
    )  # fmt: skip
    for params, prompts in batches:
        asked = [SamplingParams(**each) for each in (params if isinstance(params, list) else [params] * len(prompts))]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = engine.generate(inputs, asked, use_tqdm=False)
        print("ANSWERS " + json.dumps([list(one.outputs[0].token_ids) for one in found]), flush=True)
    counts = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    print(f"PREEMPTED {counts.get('vllm:num_preemptions')}", flush=True)


if __name__ == "__main__":
    main()
