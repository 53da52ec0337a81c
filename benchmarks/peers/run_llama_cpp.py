"""Run llama.cpp in this process through the package xllamacpp: ``run_llama_cpp.py MODEL.gguf [--ngram simple]``."""

from __future__ import annotations

import argparse
import os
import time
from importlib import metadata
from typing import Any

from protocol import Answer, serve

MATCH, DRAFT = 3, 8  # equal tokens before a draft, drafted tokens
LONGEST = 4096  # tokens of a text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--ngram", metavar="KIND", help="draft by n-grams of the text: simple, map_k or map_k4v")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(default: %(default)s)")
    args = parser.parse_args()
    drafts = {"kind": f"ngram_{args.ngram}", "match": MATCH, "draft": DRAFT} if args.ngram else None

    def load() -> tuple[Answer, dict[str, Any]]:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = args.model
        params.n_ctx, params.n_parallel, params.verbosity = LONGEST, 1, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
        if drafts:
            kind = f"COMMON_SPECULATIVE_TYPE_NGRAM_{args.ngram.upper()}"
            params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
            options = getattr(params.speculative, f"ngram_{args.ngram}")
            options.size_n, options.size_m = MATCH, DRAFT
        server = xllamacpp.Server(params)

        def answer(prompt: list[int], new: int, temperature: float, seed: int) -> dict[str, Any]:
            body = {
                "prompt": prompt, "n_predict": new, "temperature": temperature, "seed": seed, "stream": True,
                "cache_prompt": False, "samplers": ["temperature"] if temperature else ["top_k"], "top_k": 1,
            }  # fmt: skip
            events: list[dict[str, Any]] = []
            times: list[float] = []

            def note(event: dict[str, Any]) -> None:
                times.append(time.perf_counter())
                events.append(event)

            start = time.perf_counter()
            server.handle_completions(body, note)
            seconds = time.perf_counter() - start
            last = events[-1]
            if "usage" not in last:
                raise RuntimeError(str(last.get("error", last)))
            count, accepted = last["usage"]["completion_tokens"], last["timings"].get("draft_n_accepted", 0)
            return {
                "seconds": seconds, "first": times[0] - start, "count": count,
                "text": "".join(event["choices"][0]["text"] for event in events),
                "stopped": last["choices"][0]["finish_reason"] == "stop",
                "verified": count - 1, "forwards": count - 1 - accepted,
            }  # fmt: skip

        version = f"xllamacpp {metadata.version('xllamacpp')}"
        return answer, {"by": "llama.cpp", "version": version, "mode": "in-process", "drafts": drafts}

    serve(load)


if __name__ == "__main__":
    main()
