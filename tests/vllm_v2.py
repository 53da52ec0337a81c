"""Run by vLLM's Python on a CPU: its model runner V2, Triton interpreted, with our processor. Prints answers as JSON.

PYTHONPATH=.:tests/triton_stub VLLM_PYTHON tests/vllm_v2.py MODEL '{"method": "ngram", …}' '[[PARAMS, PROMPTS], …]'
"""

import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="1", TRITON_INTERPRET="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR",
)  # fmt: skip


def allow_scalar_masks() -> None:
    """Scalar masks that are made by & are integers in the interpreter, which then refuses them."""
    from triton.runtime.interpreter import InterpreterBuilder

    def wrap(name: str, place: int) -> None:
        plain = getattr(InterpreterBuilder, name)

        def call(self: Any, *arguments: Any) -> Any:
            arguments[place].data = arguments[place].data.astype(bool)
            return plain(self, *arguments)

        setattr(InterpreterBuilder, name, call)

    wrap("create_masked_load", 1)
    wrap("create_masked_store", 2)


def main() -> None:
    """One engine; the batches one after the other."""
    model, speculative, batches = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    allow_scalar_masks()
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=16, seed=0,
        speculative_config=speculative, logits_processors=["fsd_infer.integrations.vllm:FuzzyRules"],
    )  # fmt: skip
    for params, prompts in batches:
        asked = [SamplingParams(**each) for each in (params if isinstance(params, list) else [params] * len(prompts))]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = engine.generate(inputs, asked, use_tqdm=False)
        print("ANSWERS " + json.dumps([list(one.outputs[0].token_ids) for one in found]), flush=True)


if __name__ == "__main__":
    main()
