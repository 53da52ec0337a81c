"""The command line `fsd-infer`: its parser. The commands are in the other modules of this package.

Nothing here imports torch, so `--help` and a mistyped option are answered at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from fsd_core.console import Parser, run
from fsd_core.options import (
    MODELS,
    HelpFormatter,
    add,
    add_counts,
    add_flags,
    gibibytes,
    gibibytes_or_none,
    json_object,
    named_directory,
    positive,
    real_number,
    whole_number,
)
from fsd_infer.cli import commands, env, evidence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, see :func:`fsd_core.console.run`."""
    args = build_parser().parse_args(argv)
    return run("fsd-infer", partial(_command, args), args.debug)


def _command(args: argparse.Namespace) -> int:
    if not args.debug:
        _quiet()
    return int(args.function(args) or 0)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    from fsd_infer import __version__

    parser = Parser(
        prog="fsd-infer", description="Speculative decoding with a dial: exact, or fuzzy within a stated divergence."
    )
    parser.add_argument("--version", action="version", version=f"fsd-infer {__version__}")
    common = Parser(add_help=False)
    add_flags(common, ("--debug", "show tracebacks and the libraries' own messages"))
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command, add_options, help in (
        (commands.generate, _generate_options, "answer one prompt"),
        (commands.bench, _bench_options, "measure methods on a file of prompts: speed, acceptance length, scores"),
        (evidence.sweep, _sweep_options, "measure what rules gain and cost, at several settings and temperatures"),
        (evidence.calibrate, _calibrate_options, "find the fastest setting that keeps a promise, and verify it"),
        (evidence.worth, _worth_options, "forecast what lossy rules gain with a drafter, from a run of exact"),
        (commands.warmup, _warmup_options, "load the models and compile the CPU kernels before the first request"),
        (evidence.estimate, _estimate_options, "compute memory and the least time of a round on GPUs from a config"),
        (evidence.skip_layers, _skip_options, "find layers that a drafter made from the target can skip"),
        (commands.serve, _serve_options, "serve the OpenAI API from one process"),
        (env.env, _env_options, "print what a report of a fault needs: versions, machine, what runs where and why"),
        (commands.rules, None, "list rules, divergences, drafters and built-in targets"),
    ):
        name, described = command.__name__.replace("_", "-"), f"{help[0].upper()}{help[1:]}."
        made = subparsers.add_parser(
            name, help=help, description=described, parents=[common], formatter_class=HelpFormatter
        )
        made.set_defaults(function=command)
        if add_options is not None:
            add_options(made)
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    add(parser.add_argument_group("models"), *MODELS)


def _generate_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the prompt")
    source.add_argument("--prompt-file", metavar="FILE", help='read the prompt from a file, "-": from standard input')
    add(parser, "--raw", help="continue the text as it is, without the chat template")
    _model_options(parser)
    parser.add_argument("--rule", default="exact", help='acceptance rule, such as "fuzzy:js:0.3"; see fsd-infer rules')
    request = parser.add_argument_group("request")
    add(request, "--max-new-tokens", "--temperature")
    request.add_argument(
        "--top-p", type=real_number, metavar="P", help="sample from the fewest tokens of mass P (default: all)"
    )
    add_counts(
        request,
        ("--top-k", None, "sample from the N likeliest tokens (default: all)"),
        ("--num-beams", 1, "width of beam search or beam sampling, 1: no beams"),
    )
    add(request, "--seed", default=None, help="seed of draws; the answer repeats (default: a random one)")
    request.add_argument(
        "--options", type=json_object, metavar="JSON",
        help="further fields of transformers' GenerationConfig, such as '{\"repetition_penalty\": 1.1}'; the model's "
        "own generation config gives special tokens, and does not shape the answer",
    )  # fmt: skip
    request.add_argument(
        "--beam-options", metavar="NAME=NUMBER,...",
        help="how beams are drafted (depth, spread, nodes) and sampled (confidence, min_width, join_every); see "
        "docs/beams.md",
    )  # fmt: skip
    guided = request.add_mutually_exclusive_group()
    guided.add_argument("--schema", metavar="FILE", help="answer with JSON that fits the JSON schema in FILE")
    guided.add_argument("--regex", metavar="PATTERN", help="answer with text that matches this regular expression")
    request.add_argument(
        "--max-cache-gib", type=gibibytes, metavar="GIB",
        help="refuse a request whose KV caches need more GiB (default: the free memory)",
    )  # fmt: skip
    output = parser.add_argument_group("output").add_mutually_exclusive_group()
    add_flags(
        output,
        ("--stream", "print words as they come"),
        ("--json", "print one record: text, tokens, their sources, statistics"),
        ("--show-accepted", "mark each token's source: target, draft, gate"),
    )
    output.add_argument("--html", metavar="FILE", help="write a page: tokens by source, draft trees, time per round")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="when --show-accepted uses colours"
    )


def _bench_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "--prompts", "--strict", "--raw")
    add(parser, "--limit", help="take only the first N prompts (default: all)")
    parser.add_argument(
        "--methods", default="hf-generate,plain,exact,fuzzy:js:0.3",
        help="comma-separated: plain, any rule, a rule with its own drafter (exact@none, exact@DIR), hf-generate, "
        "hf-lookup[:TOKENS], hf-assisted:DIR, hf-beams:W, beams:W[@DRAFTER], server:URL[#MODEL], command:PROGRAM; "
        "NAME=METHOD renames one",
    )  # fmt: skip
    parser.add_argument(
        "--isolate", type=positive, nargs="?", const=4, metavar="BLOCKS",
        help="run each method in its own process, in turns over BLOCKS blocks of prompts (%(const)s if no number is "
        "given; default: all methods in one process)",
    )  # fmt: skip
    parser.add_argument(
        "--baseline", metavar="NAMES", help="methods to compare with (default: hf-generate and plain, if measured)"
    )
    add(parser, "--max-new-tokens", "--temperature")
    add_counts(
        parser,
        ("--every", 1, "take every N-th prompt of the file"),
        ("--repeat", 1, "runs per prompt and method"),
        ("--batch-size", 1, "prompts decoded together"),
    )
    add(
        parser, "--seed", default=None,
        help="seed of draws and bootstrap intervals; if given, requests have it too, so answers repeat, and the trees "
        "of auto follow the text instead of the clock (default: draws from 0, and trees as without a seed)",
    )  # fmt: skip
    add_flags(
        parser,
        ("--no-warmup", "skip each method's untimed first run"),
        ("--log-likelihood", "report the answers' mean log-likelihood under the target"),
        ("--resume", "continue the unfinished run of --json FILE"),
    )
    add(parser, "--score")
    add(parser, "--json", help="write the full record to FILE; FILE.partial.jsonl holds the runs until it is done")
    _model_options(parser)


def _sweep_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rules", required=True,
        help="comma-separated rules, whose parameters may be lists (fuzzy:js:0.1/0.2/0.4); RULE@8x2x16 sets its tree; "
        "exact and random gates are added",
    )  # fmt: skip
    parser.add_argument("--temperatures", default="0", metavar="T,...", help="sampling temperatures, 0: greedy")
    add_counts(parser, ("--repeats", 1, "answers per prompt at temperatures above 0"))
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="append each answer to FILE as JSON; rerun to resume"
    )
    parser.add_argument("--html", metavar="FILE", help="write the report to FILE (default: --output with .html)")
    parser.add_argument(
        "--examples", type=whole_number(0, 1000), default=4, metavar="N", help="prompts whose answers the report shows"
    )
    _evidence_options(parser)


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    promise = parser.add_argument_group("promise").add_mutually_exclusive_group(required=True)
    for option, metavar, help in (
        ("--at-most-score-loss", "POINTS", "mean score at most POINTS of 100 below exact's"),
        ("--at-most-nats", "NATS", "at most NATS spent in any answer"),
        ("--at-least-speed", "TIMES", "at least TIMES exact's tokens per second"),
    ):
        promise.add_argument(option, type=real_number, metavar=metavar, help=help)
    for bound, what in (("copies", "4-grams copied from the prompt"), ("repeats", "repeated 4-grams")):
        parser.add_argument(
            f"--at-most-{bound}", type=real_number, metavar="POINTS",
            help=f"also keep the share of {what} at most POINTS of 100 above exact's",
        )  # fmt: skip
    parser.add_argument(
        "--confidence", type=real_number, default=0.9, metavar="P", help="probability that the promise holds"
    )
    parser.add_argument(
        "--rules", default="auto",
        help="as for sweep, in lists from careful to bold: tilted:4/2/1,fuzzy:js:0.1/0.2/0.3; auto: a few that worth "
        "forecasts to be fast on some of the prompts, with their trees",
    )  # fmt: skip
    add(parser, "--temperature")
    parser.add_argument("--verify", metavar="FILE,...", help="other prompts to verify on (default: half of --prompts)")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="write sweeps, reports and record to DIR; rerun to resume"
    )
    _evidence_options(parser)


def _worth_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "--prompts", "--strict", "--raw", "--temperature")
    add(parser, "--seed", help="seed of draws")
    add(parser, "--limit", default=16, help="take N prompts, evenly spread")
    add(parser, "--max-new-tokens", default=96)
    parser.add_argument("--rules", default="", metavar="RULE,...", help="rules to forecast beside the usual ones")
    add(parser, "--json", help="write forecast and environment to FILE")
    _model_options(parser)


def _evidence_options(parser: argparse.ArgumentParser) -> None:
    """Add what sweep and calibrate share."""
    add(parser, "--prompts", metavar="FILE,...")
    add(parser, "--strict", "--limit", "--max-new-tokens", "--seed", "--score", "--raw")
    _model_options(parser)


def _warmup_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ("--fetch-only", "only fetch a built-in target and print its directory"))
    _model_options(parser)


def _env_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ("--json", "print it as JSON"))


def _estimate_options(parser: argparse.ArgumentParser) -> None:
    add(
        parser, "--target", default="llama-3.1-8b",
        help="llama-3.1-8b or llama-3.1-70b (known shapes), a directory with a config.json, or as for generate; no "
        "weights are read",
    )  # fmt: skip
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=NUMBER", help="change the config: num_hidden_layers=8"
    )
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--layout", default="eagle3", choices=("fsd", "eagle", "eagle3"), help="layout of the draft head")
    head.add_argument(
        "--drafter", metavar="NAME",
        help="directory of a head, whose layout and sizes count; or a small LM, named as targets are, or self:...",
    )  # fmt: skip
    parser.add_argument(
        "--tree", metavar="DEPTH,WIDTH,NODES", help="draft tree (default: a GPU's, for exact and for lossy rules)"
    )
    add_counts(
        parser,
        ("--draft-vocab", 32000, "token ids that a head drafts"),
        ("--batch-size", 1, "prompts decoded together"),
        ("--context", 1024, "tokens before the round"),
    )
    add(parser, "--max-new-tokens", default=1024)
    add_flags(parser, ("--cuda-graphs", "count the memory of CUDA graphs"))


def _skip_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "--target", "--dtype", "--device", "--threads")
    add(parser, "--prompts", help="file of prompts, as for bench; use none of them to judge the drafter")
    add(parser, "--strict")
    parser.add_argument("--layers", type=positive, required=True, metavar="N", help="layers that the drafter keeps")
    add(parser, "--limit", default=16, help="take only the first N prompts")
    add(parser, "--max-new-tokens", default=64)


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rule", default="exact", help="acceptance rule of requests that name none")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=whole_number(0, 65535), default=8000, metavar="N", help="port to listen on")
    parser.add_argument(
        "--adapter", action="append", type=named_directory, metavar="NAME=DIR",
        help="LoRA adapter that answers requests for the model NAME; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--allow-host", action="append", metavar="NAME",
        help="name by which clients may reach this machine, besides its own, its addresses and localhost; '*': any; "
        "may be given several times",
    )  # fmt: skip
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--prefix-cache-gib", type=gibibytes_or_none, default=2**30, metavar="GIB",
        help="memory for prompts that begin like an earlier one, 0: none (default: 1)",
    )  # fmt: skip
    add_counts(
        limits,
        ("--max-batch", 8, "requests decoded together"),
        ("--max-queue", 64, "requests that may wait"),
        ("--max-new-tokens", 4096, "most tokens of an answer"),
        ("--seconds", 600, "seconds before an answer is cut off"),
    )
    _model_options(parser)


def _quiet() -> None:
    """Keep transformers' notes and loading bars out of the output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
