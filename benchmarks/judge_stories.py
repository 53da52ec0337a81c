"""Drafters of stories judged on held-out beginnings: `exact` replayed on the target's text, other rules decoded.

    python -m benchmarks.judge_stories --target DIR --drafters PUBLIC DISTILLED --methods exact,4 exact,6 \
        tilted:1:floor=0,8 --json benchmarks/results/stories-speed.json

measures speed on a quiet machine: all methods and drafters take turns, prompt by prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.beginnings import beginnings
from benchmarks.recorded import record_main
from fsd_bench.environment import environment
from fsd_infer import FuzzyDecoder, TreeShape
from fsd_infer.engine.stats import RowStats
from fsd_infer.files import write_json

CHAINS = (1, 2, 3, 4, 5, 6, 8, 10, 12)  # of `exact`, replayed


class Judge:
    """The target, the held-out beginnings, and the target's own greedy text with its distributions."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype | None = None) -> None:
        self.decoder = FuzzyDecoder.from_pretrained(args.target, "none", dtype=dtype)
        target, self.tokens = self.decoder.target, args.tokens
        self.prompts = [self.decoder.encode(text, chat=False) for text in beginnings("judge", args.prompts, seed=1)]
        path = args.work / "judge.json"
        if not path.exists():
            plain = self.decoder.generate(self.prompts, max_new_tokens=args.tokens, do_sample=False)
            write_json(path, plain.sequences)
        self.answers: list[list[int]] = json.loads(path.read_text())
        self.log_p = []  # [A, V] of each answer's tokens
        with torch.inference_mode():
            for prompt, answer in zip(self.prompts, self.answers, strict=True):
                features = target.features(torch.tensor([[*prompt, *answer]]))[0]
                self.log_p.append(target.lm_logits(features[len(prompt) - 1 : -1]).float().log_softmax(-1))

    def replay(self, directory: str) -> dict[str, Any]:
        """`exact` at temperature 0 on the target's own text: what chains of each length would have drafted is known."""
        drafter = self.decoder.load_drafter(directory, TreeShape(4, 1, 5), pack=False)
        agreeing, regrets, overlaps = [], [], []
        for prompt, answer, log_p in zip(self.prompts, self.answers, self.log_p, strict=True):
            with torch.inference_mode():
                logits = drafter.model.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
            drafts = logits.argmax(-1)
            agreeing.append((drafts == torch.tensor(answer)).tolist())
            regrets.append((log_p.amax(-1) - log_p.gather(1, drafts[:, None])[:, 0]).tolist())
            overlaps.append(float(torch.minimum(log_p, logits.log_softmax(-1)).exp().sum(-1).mean()))
        found: dict[str, Any] = {"tau": {}, "agreement": statistics.fmean(a for row in agreeing for a in row[1:])}
        wrong: list[float] = []
        for chain in CHAINS:
            rounds = [replayed(row, chain) for row in agreeing]
            found["tau"][str(chain)] = sum(len(row) - 1 for row in agreeing) / sum(map(len, rounds))
            found.setdefault("forwards", {})[str(chain)] = [len(starts) for starts in rounds]
            if chain == 4:
                firsts = [(row[i], regret[i]) for row, regret, starts in zip(agreeing, regrets, rounds) for i in starts]
                wrong = [regret for agreed, regret in firsts if not agreed]
                found["first_draft_agreement"] = 1 - len(wrong) / len(firsts)
        shares = {f"regret_below_{nats}": statistics.fmean(r < nats for r in wrong) for nats in (0.5, 1, 2)}
        return {**found, "regret_median": statistics.median(wrong), **shares, "overlap": statistics.fmean(overlaps)}

    def decoded(self, directory: str, rule: str, temperature: float, chain: int) -> dict[str, Any]:
        """The beginnings continued by the rule with chains of one length."""
        drafter = self.decoder.load_drafter(directory, TreeShape(chain, 1, chain + 1))
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        rows, seconds = [], dict.fromkeys(("draft", "target"), 0.0)
        for number, prompt in enumerate(tqdm(self.prompts, desc=f"{Path(directory).name} {rule} {chain}", leave=False)):
            made = self.decoder.generate(
                [prompt], rule, drafter=drafter, max_new_tokens=self.tokens, do_sample=bool(temperature),
                measure_log_likelihood=True, **({"seed": number} if temperature else {}), **sampling,
            )  # fmt: skip
            rows.append(made.stats.rows[0])
            seconds = {phase: sofar + made.stats.phases[phase] for phase, sofar in seconds.items()}
        tokens, forwards = sum(row.new_tokens for row in rows), [row.target_forwards for row in rows]
        return {
            "tau": (tokens - len(rows)) / sum(forwards),
            "forwards": forwards,
            "cost_ratio": seconds["draft"] / chain / seconds["target"],  # of a drafted token to a verifying forward
            "nats_per_token": sum(row.divergence_spent for row in rows) / tokens,
            "repeated_4grams": statistics.fmean(row.repeated_4grams or 0.0 for row in rows),
            "log_likelihood": sum((row.mean_log_likelihood or 0.0) * row.new_tokens for row in rows) / tokens,
        }


def replayed(agreeing: Sequence[bool], chain: int) -> list[int]:
    """Where the rounds of a chain begin in an answer; its first token comes from the prompt."""
    starts, at = [], 1
    while at < len(agreeing):
        starts.append(at)
        kept = 0
        while kept < chain and at + kept < len(agreeing) and agreeing[at + kept]:
            kept += 1
        at += kept + 1
    return starts


def speed(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Speed of every drafter with every method (rule,chain), the turns interleaved, plain decoding beside."""
    decoder = FuzzyDecoder.from_pretrained(args.target, "none")
    prompts = [decoder.encode(text, chat=False) for text in beginnings("judge", args.prompts, seed=1)]
    ways: dict[str, tuple[str, Any]] = {"plain": ("exact", decoder.drafter)}
    for drafter in args.drafters:
        for rule, _, chain in (method.rpartition(",") for method in args.methods):
            shape = TreeShape(int(chain), 1, int(chain) + 1)
            ways[f"{Path(drafter).name} {rule},{chain}"] = (rule, decoder.load_drafter(drafter, shape))
    sampling = {"do_sample": False} if not args.temperature else {"do_sample": True, "temperature": args.temperature}
    found: dict[str, list[RowStats]] = {name: [] for name in ways}
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first turn warms up
        for name, (rule, drafter) in tqdm(ways.items(), desc=f"prompt {number} of {len(prompts)}", leave=False):
            made = decoder.generate(
                [prompt], rule, drafter=drafter, max_new_tokens=args.tokens, seed=number, top_k=0, top_p=1.0, **sampling
            )
            found[name] += [made.stats.rows[0]] * (number > 0)
    methods = {name: _speeds(rows) for name, rows in found.items()}
    return {"environment": environment(command), "temperature": args.temperature, "methods": methods}


def _speeds(rows: Sequence[RowStats]) -> dict[str, float]:
    tokens = sum(row.new_tokens for row in rows)
    return {
        "tokens_per_second": statistics.median(row.tokens_per_second for row in rows),
        "tau": (tokens - len(rows)) / sum(row.target_forwards for row in rows),
        "nats_per_token": sum(row.divergence_spent for row in rows) / tokens,
        "repeated_4grams": statistics.fmean(row.repeated_4grams or 0.0 for row in rows),
    }


def speed_report(record: dict[str, Any]) -> str:
    """A line per drafter and method."""
    lines = [f"{name:45} " + "  ".join(f"{key} {value:.2f}" for key, value in found.items())
             for name, found in record["methods"].items()]  # fmt: skip
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge_stories", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="TinyLlama/TinyLlama-1.1B-Chat-v1.0", help="(%(default)s)")
    parser.add_argument("--drafters", nargs="+", required=True, help="directories or hub ids")
    parser.add_argument(
        "--methods", nargs="+", default=["exact,4", "exact,6", "tilted:1:floor=0,8"], metavar="RULE,CHAIN"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--json", type=Path, required=True, help="where the record goes")
    return record_main("benchmarks.judge_stories", parser, speed, speed_report, argv)


if __name__ == "__main__":
    sys.exit(main())
