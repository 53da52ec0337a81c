"""Run OpenVINO GenAI in this process: ``run_openvino.py MODEL.gguf [--lookup]``."""

from __future__ import annotations

import argparse
import os
import time
from importlib import metadata
from typing import Any

from protocol import Answer, serve

LOOKUP = {"max_ngram_size": 3, "num_assistant_tokens": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="GGUF file, or directory in OpenVINO's format")
    parser.add_argument("--lookup", action="store_true", help="draft by prompt lookup")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(default: %(default)s)")
    args = parser.parse_args()
    drafts = LOOKUP if args.lookup else {}

    def load() -> tuple[Answer, dict[str, Any]]:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.threads}
        pipeline = genai.LLMPipeline(args.model, "CPU", **({"prompt_lookup": True} if drafts else {}), **options)

        def answer(prompt: list[int], new: int, temperature: float, seed: int) -> dict[str, Any]:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.do_sample = new, temperature > 0
            config.eos_token_id = pipeline.get_generation_config().eos_token_id
            config.stop_token_ids = pipeline.get_generation_config().stop_token_ids
            if temperature > 0:
                config.temperature, config.rng_seed = temperature, seed
            for name, value in drafts.items():
                setattr(config, name, value)
            ids = np.array([prompt])
            inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
            start = time.perf_counter()
            result = pipeline.generate(inputs, config)
            seconds = time.perf_counter() - start
            tokens = [int(token) for token in result.tokens[0]]
            return {
                "seconds": seconds, "first": result.perf_metrics.get_ttft().mean / 1e3, "tokens": tokens,
                "stopped": len(tokens) < new,
            }  # fmt: skip

        version = f"openvino-genai {metadata.version('openvino-genai')}"
        return answer, {"by": "openvino", "version": version, "mode": "in-process", "drafts": drafts or None}

    serve(load)


if __name__ == "__main__":
    main()
