"""The ladder: drafters of rising strength for one target, every rule on each, and what predicts the gain.

``measure`` decodes every prompt with every rule on every rung and appends a line per rung and rule to a file; a killed
run goes on there. Prompts are decoded in batches, so its seconds say nothing: speeds are computed from rounds.
``forecast`` appends what `fsd-infer worth` forecasts for a rung from one run of exact decoding. ``record`` turns such
files into a record and draws it.

A rung is a drafter's name as `--drafter` takes it, or ``noise:0.08``: a copy of the target, each entry of its weight
matrices times 1 + 0.08 · N(0, 1). Every rung drafts chains of ``--depth`` tokens. The rule ``alone`` is the drafter
answering by itself; between it and exact decoding lies routing, which sends a share of the prompts to either.

Run: python -m benchmarks.ladder measure --prompts ifeval_dev.jsonl --rungs noise:0.08 --rules exact tilted --lines F
     python -m benchmarks.ladder forecast --prompts ifeval_dev.jsonl --rungs noise:0.08 --rules --lines F
     python -m benchmarks.ladder record F [F ...] --record benchmarks/results/ladder.json --figure ladder.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.ladder_record import write_figure, write_ladder
from fsd_bench.environment import environment
from fsd_bench.likelihood import mean_log_likelihoods
from fsd_bench.runner import encode_row
from fsd_bench.score import read_references
from fsd_bench.worth import forecast
from fsd_infer import FuzzyDecoder
from fsd_infer.chat.encoding import PromptRow, read_prompts
from fsd_infer.drafters import Drafter, TreeShape
from fsd_infer.drafters.lm import LMDrafter
from fsd_infer.engine.drafts import Drafts
from fsd_infer.errors import FsdError
from fsd_infer.files import jsonable
from fsd_infer.targets.target import Target

ALONE, FORECAST = "alone", "forecast"


def noisy_copy(target: Target, share: float, seed: int) -> Target:
    """The target again, each entry of its layers' weight matrices times 1 + share · N(0, 1)."""
    copy = Target.from_pretrained(target.name, dtype=target.dtype, device=target.device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in copy.model.named_parameters():
            if weight.dim() == 2 and "embed" not in name and "lm_head" not in name:
                weight.mul_((1 + share * torch.randn(weight.shape, generator=generator)).to(weight))
    return copy


def rung_of(name: str, decoder: FuzzyDecoder, depth: int, seed: int) -> Drafter:
    """The drafter of a rung, with chains of ``depth``."""
    chain = TreeShape.chain(depth)
    if name.startswith("noise:"):
        drafter: Drafter = LMDrafter(noisy_copy(decoder.target, float(name[6:]), seed), decoder.target, chain)
        decoder.pack(drafter, release=True)
        return drafter
    return decoder.load_drafter(name, chain)


class Ladder:
    """What is asked of every rung.

    Args:
        args: the command's.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.decoder = FuzzyDecoder.from_pretrained(args.target, "none")
        target = self.decoder.target
        self.rows: list[PromptRow] = list(read_prompts(args.prompts))[:: args.every][: args.limit]
        self.references = read_references(self.rows, args.score)
        for reference in self.references:  # what a checker lacks is said before anything is decoded
            if reference is not None:
                reference.score("")
        tokenizer = self.decoder.tokenizer
        self.prompts = [encode_row(row, target.name, tokenizer, target.max_positions, args.raw) for row in self.rows]

    def line(self, rung: str, drafter: Drafter, rule: str) -> dict[str, Any]:
        """All prompts by one rule on one rung."""
        args, decoder = self.args, self.decoder
        if rule == ALONE:
            if not isinstance(drafter, LMDrafter):
                raise FsdError(f"rung {rung} is no model that could answer alone.")
            decoder = FuzzyDecoder(drafter.model, decoder.load_drafter("none"))
        sampling: dict[str, Any] = {"do_sample": args.temperature > 0, "top_p": None, "top_k": None}
        sampling["temperature"] = args.temperature or None
        order = sorted(range(len(self.prompts)), key=lambda index: len(self.prompts[index]))
        found: list[Any] = [None] * len(order)
        for start in tqdm(range(0, len(order), args.batch), desc=f"{rung} {rule}", unit="batch"):
            batch = order[start : start + args.batch]
            made = decoder.generate(
                [self.prompts[index] for index in batch],
                "exact" if rule == ALONE else rule,
                drafter=None if rule == ALONE else drafter,
                max_new_tokens=args.tokens,
                seed=args.seed + start,
                **sampling,
            )
            for place, index in enumerate(batch):
                found[index] = made.sequences[place], made.texts[place], made.stats.rows[place]
        likelihoods = mean_log_likelihoods(
            self.decoder.target, [(prompt, answer[0]) for prompt, answer in zip(self.prompts, found)]
        )
        return {
            **self.facts(rung, rule),
            "drafts": Drafts.pooled(stats.drafts for _, _, stats in found).summary() if rule == "exact" else None,
            "rows": [
                {
                    "length": len(tokens), "forwards": stats.target_forwards, "nats": stats.divergence_spent,
                    "likelihood": likelihood, "copied": stats.copied_4grams, "repeated": stats.repeated_4grams,
                    "score": None if reference is None else reference.score(text), "text": text,
                }
                for (tokens, text, stats), likelihood, reference in zip(found, likelihoods, self.references)
            ],
        }  # fmt: skip

    def facts(self, rung: str, rule: str) -> dict[str, Any]:
        """What a line begins with."""
        args = self.args
        return {
            "target": args.target, "rung": rung, "rule": rule, "temperature": args.temperature, "depth": args.depth,
            "prompts": Path(args.prompts).name, "every": args.every, "tokens": args.tokens, "seed": args.seed,
            "environment": environment(),
        }  # fmt: skip

    def forecast(self, rung: str, drafter: Drafter) -> dict[str, Any]:
        """What each rule would emit on this rung, from exact's rounds. One row per prompt, so that lines are told apart
        by their number.
        """
        args = self.args
        made = forecast(
            self.decoder, self.prompts, args.rules, drafter=drafter, temperature=args.temperature,
            max_new_tokens=args.tokens, seed=args.seed, progress=True,
        )  # fmt: skip
        return {**self.facts(rung, FORECAST), "rows": [None] * len(self.rows), "forecast": made.to_dict()}

    def run(self) -> None:
        """Append what the file lacks."""
        args, path = self.args, Path(self.args.lines)
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        done = {(line["target"], line["rung"], line["rule"], line["temperature"], len(line["rows"])) for line in lines}
        path.parent.mkdir(parents=True, exist_ok=True)
        rules = [FORECAST] if args.command == FORECAST else args.rules
        for rung in args.rungs:
            drafter: Drafter | None = None
            for rule in rules:
                if (args.target, rung, rule, args.temperature, len(self.rows)) in done:
                    continue
                drafter = drafter or rung_of(rung, self.decoder, args.depth, args.seed)
                if rule == ALONE and not isinstance(drafter, LMDrafter):
                    continue
                line = self.forecast(rung, drafter) if rule == FORECAST else self.line(rung, drafter, rule)
                with path.open("a") as file:
                    file.write(json.dumps(jsonable(line)) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or write the record. 2 after bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--target", default="smollm2-135m")
    shared.add_argument("--rungs", nargs="+", required=True)
    shared.add_argument("--rules", nargs="*", required=True, help="of a forecast: beside the usual ones")
    shared.add_argument("--prompts", required=True)
    shared.add_argument("--raw", action="store_true", help="continue prompts as they are, without the chat template")
    shared.add_argument("--score", default="auto")
    shared.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    shared.add_argument("--limit", type=int, default=10**6)
    shared.add_argument("--tokens", type=int, default=96)
    shared.add_argument("--depth", type=int, default=8)
    shared.add_argument("--batch", type=int, default=48)
    shared.add_argument("--temperature", type=float, default=0.0)
    shared.add_argument("--seed", type=int, default=1)
    shared.add_argument("--lines", required=True)
    commands.add_parser("measure", help="decode, and append lines", parents=[shared])
    commands.add_parser(FORECAST, help="append forecasts from one exact run each", parents=[shared])
    record = commands.add_parser("record", help="write the record and the picture")
    record.add_argument("lines", nargs="+", type=Path)
    record.add_argument("--record", type=Path, required=True)
    record.add_argument("--figure", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.command != "record":
            Ladder(args).run()
        else:
            made = write_ladder(args.lines, args.record)
            if args.figure is not None:
                write_figure(made, args.figure)
    except FsdError as error:
        print(f"ladder: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
