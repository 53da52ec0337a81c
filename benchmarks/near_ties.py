"""How often a verifying forward and plain decoding choose different tokens, and how near a tie that is.

    python -m benchmarks.near_ties --json benchmarks/results/near-ties.json

In bf16 the order of sums depends on how many rows a forward has. So the target decodes greedily, one row a forward, and
then reads its own answer again in forwards of ``--rows`` tokens, as those that verify drafts. At each position of the
answer both name the likeliest token. In fp32 the same forwards say by how many nats the best token leads the second.
Our CPU kernels compute each row alike whatever its neighbours, so there nothing should differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.recorded import BUILT_IN, PROMPTS, parser_of, record_main, spread
from benchmarks.results_page import ties
from fsd_bench.intervals import mean_interval
from fsd_bench.prompts import Encoder, encode_rows, spread_rows
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.request.prompts import prefill_text
from fsd_infer.targets.target import Target

EDGES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, float("inf"))  # nats
LONGEST = 600  # tokens of a prompt
PAIRS = (("verified", "plain"), ("plain", "fp32"), ("verified", "fp32"))  # whose choices are compared


@torch.inference_mode()
def read_answer(target: Target, prompt: Sequence[int], answer: Sequence[int], rows: int) -> Tensor:
    """Return the logits [A, V] from which each token of the answer is chosen, read ``rows`` tokens a forward."""
    cache, length = target.new_cache(1, len(prompt) + len(answer)), len(prompt)
    _, logits = prefill_text(target, cache, torch.tensor([prompt]))
    logits_of_chunks = [logits[0].float()]
    for start in range(0, len(answer) - 1, rows):
        tokens = torch.tensor([answer[start : min(start + rows, len(answer) - 1)]])
        slots, visible = cache.in_text(torch.tensor([length + start]), tokens.shape[1])
        logits_of_chunks.append(target.forward(tokens, slots, visible, cache)[0][0].float())
    return torch.cat(logits_of_chunks)


def compare(plain: Tensor, verified: Tensor, fp32: Tensor) -> dict[str, list[float]]:
    """Return by position: whether each pair differs, and the lead of fp32's best token over its second in nats."""
    choices = {"plain": plain.argmax(-1), "verified": verified.argmax(-1), "fp32": fp32.argmax(-1)}
    best, second = fp32.topk(2).values.unbind(-1)
    pairs = {f"{a}, {b}": choices[a] != choices[b] for a, b in PAIRS}
    tied = (plain.topk(2).values.diff(dim=-1) == 0)[:, 0]
    return {name: values.double().tolist() for name, values in {**pairs, "tied": tied, "lead": best - second}.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the shares of positions that differ, their leads, and both by lead."""
    decoder = FuzzyDecoder.from_pretrained(args.target, "none", dtype=torch.bfloat16)
    exact = FuzzyDecoder.from_pretrained(args.target, "none", dtype=torch.float32)
    encoder = Encoder.of(decoder, False)
    rows = [row for row in spread_rows([args.prompts], encoder) if len(encode_rows([row], encoder)[0]) <= LONGEST]
    prompts = encode_rows(spread(rows, args.limit), encoder)
    comparisons = []
    for prompt in prompts:
        answer = decoder.generate(prompt, max_new_tokens=args.max_new_tokens, do_sample=False).sequences[0]
        plain, verified = (read_answer(decoder.target, prompt, answer, count) for count in (1, args.rows))
        comparisons.append(compare(plain, verified, read_answer(exact.target, prompt, answer, args.rows)))
    return {"prompts": len(prompts), **summary(comparisons)}


def summary(comparisons: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Return what :func:`measure` does, from the positions of each answer."""
    lead = np.concatenate([answer["lead"] for answer in comparisons])
    pairs = {}
    for name in map(", ".join, PAIRS):
        differs = np.concatenate([answer[name] for answer in comparisons]) > 0
        pairs[name] = {
            "differ": mean_interval([(sum(answer[name]), float(len(answer[name]))) for answer in comparisons]),
            "answers_with_one": sum(any(answer[name]) for answer in comparisons),
            "leads": sorted(round(float(value), 4) for value in lead[differs]),
            "by_lead": [
                [low, int(inside.sum()), int((inside & differs).sum())]
                for low, high in zip(EDGES, EDGES[1:])
                for inside in [(lead >= low) & (lead < high)]
            ],
        }
    tied = np.concatenate([answer["tied"] for answer in comparisons])
    return {"positions": len(lead), "tied_in_bf16": float(tied.mean()), "pairs": pairs}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.near_ties", __doc__, target=BUILT_IN, prompts=PROMPTS, limit=24, max_new_tokens=64,
        rows=(13, "tokens of a verifying forward"), json=None,
    )  # fmt: skip
    return record_main("benchmarks.near_ties", parser, measure, ties, argv)


if __name__ == "__main__":
    sys.exit(main())
