"""`fsd-infer`: its command line. What they do: :mod:`fsd_infer.cli.commands` and :mod:`fsd_infer.cli.evidence`.

Nothing here imports torch: `--help` and a mistyped option are answered at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from fsd_infer.cli import commands, evidence, planning
from fsd_infer.cli.options import (
    SCORES,
    TARGET_KWARGS,
    gibibytes,
    named_directory,
    positive,
    real_number,
    thread_count,
    whole_number,
)
from fsd_infer.cli.run import Parser, run
from fsd_infer.numerals import MOST_SEED


def main(argv: Sequence[str] | None = None) -> int:
    """The console command; how it ends: :func:`fsd_infer.cli.run.run`."""
    args = build_parser().parse_args(argv)
    return run("fsd-infer", partial(_command, args), args.debug)


def _command(args: argparse.Namespace) -> int:
    if not args.debug:
        _quiet()
    return int(args.function(args) or 0)


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    from fsd_infer import __version__

    parser = Parser(
        prog="fsd-infer", description="Speculative decoding with a dial: exact, or fuzzy within a stated divergence."
    )
    parser.add_argument("--version", action="version", version=f"fsd-infer {__version__}")
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks and the libraries' own messages")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, add, help in (
        ("generate", _generate_options, "answer one prompt"),
        ("bench", _bench_options, "measure methods side by side on a file of prompts"),
        ("sweep", _sweep_options, "what rules cost and win: settings x temperatures over tasks, with a report"),
        ("calibrate", _calibrate_options, "find the fastest setting that keeps a promise, and verify it"),
        ("worth", _worth_options, "forecast what lossy rules would be worth with a drafter, from a run of exact"),
        ("warmup", _warmup_options, "fetch and load the models and compile the CPU kernels ahead of the first request"),
        ("estimate", _estimate_options, "memory and the least time of a round on GPUs, from a target's config alone"),
        ("skip-layers", _skip_options, "which layers a drafter made of the target can do without: self:layers=..."),
        ("serve", _serve_options, "a small server with the OpenAI API, for one process"),
        ("rules", _rules_options, "list rules, divergences, drafters and built-in targets"),
    ):
        add(subparsers.add_parser(name, help=help, description=help, parents=[common]))
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target", default="smollm2-135m", help="built-in name, directory, GGUF file or hub id (%(default)s)"
    )
    models.add_argument("--target-kwargs", **TARGET_KWARGS)
    models.add_argument(
        "--drafter",
        help='head or small causal LM (directory or hub id), "self:layers=0-9,20-29" or "self:bits=3" (of the target), '
        '"shipped", "memory", "lookup", "recycle" or "none"; X+memory, X+lookup and X+recycle graft one onto X '
        "(default: the head shipped with the target, or lookup+recycle)",
    )
    models.add_argument(
        "--memory",
        metavar="FILE",
        help="draft from these texts too: JSON lines with `text`, token ids or conversations, indexed once beside the "
        "file (X+memory:FILE)",
    )
    models.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (%(default)s)")
    models.add_argument("--device", help="e.g. cpu or cuda:1 (default: CUDA where there is one)")
    models.add_argument(
        "--tree",
        metavar="DEPTH,WIDTH,NODES[,STOP]",
        help="shape of the draft tree, and below which chance drafting stops; or auto: chosen round by round by what "
        "earlier rounds took and accepted, by the text alone where there is a seed (default: auto on a CPU)",
    )
    models.add_argument(
        "--no-quantize", action="store_true", help="on a CPU: read a head's weights in bf16, not in fp8"
    )
    models.add_argument(
        "--expand",
        action="store_true",
        help="on a CPU: read a GGUF file's or a built-in target's weights in bf16",
    )
    models.add_argument("--cuda-graphs", action="store_true", help="on a GPU: record forwards once and replay them")
    models.add_argument("--threads", type=thread_count, help="CPU threads")


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=commands.generate)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-file", metavar="FILE", help='read the prompt from a file, "-": from standard input')
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    _model_options(parser)
    parser.add_argument("--rule", default="exact", help='a name, or with parameters "fuzzy:js:0.3" (%(default)s)')
    request = parser.add_argument_group("request")
    request.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="(%(default)s)")
    request.add_argument("--temperature", type=real_number, default=0.0, help="0 is greedy (%(default)s)")
    request.add_argument(
        "--num-beams", type=positive, default=1, metavar="W", help="beam search, or sampling, of width W"
    )
    request.add_argument(
        "--beam-options",
        metavar="NAME=NUMBER,...",
        help="how beams are drafted, depth, spread and nodes; of beam sampling confidence, min_width and join_every",
    )
    request.add_argument("--top-p", type=real_number, metavar="P")
    request.add_argument("--top-k", type=positive, metavar="K")
    request.add_argument("--seed", type=whole_number(0, MOST_SEED))
    guided = request.add_mutually_exclusive_group()
    guided.add_argument("--schema", metavar="FILE", help="answer in JSON of this schema")
    guided.add_argument("--regex", metavar="PATTERN", help="answer with what this regular expression matches")
    request.add_argument(
        "--max-cache-gib",
        type=gibibytes,
        metavar="GIB",
        help="refuse a request whose key-value caches take more memory (default: more than is free)",
    )
    output = parser.add_argument_group("output").add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print words as they come")
    output.add_argument("--json", action="store_true", help="print one record: text, tokens, their sources, statistics")
    output.add_argument("--show-accepted", action="store_true", help="mark every token by where it came from")
    output.add_argument("--html", metavar="FILE", help="write a page: tokens by source, draft trees, time per round")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="of --show-accepted")


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=commands.bench)
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="JSONL with `turns`, `prompt` or `messages`; also `question` or `instruction`, with `answer`",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    parser.add_argument("--every", type=positive, default=1, metavar="K", help="only each K-th prompt of the file")
    parser.add_argument(
        "--methods",
        default="hf-generate,plain,exact,fuzzy:js:0.3",
        help="comma-separated: plain, any rule, a rule with a drafter of its own (exact@none, exact@DIR), hf-generate, "
        "hf-lookup[:TOKENS], hf-assisted:DIR, hf-beams:W, beams:W[@DRAFTER], server:URL[#MODEL], command:PROGRAM; "
        "NAME=METHOD names one (%(default)s)",
    )
    parser.add_argument(
        "--isolate",
        type=positive,
        nargs="?",
        const=4,
        metavar="BLOCKS",
        help="each method in a process of its own, so many blocks of prompts in turns (%(const)s)",
    )
    parser.add_argument(
        "--baseline", metavar="NAMES", help="methods to compare with (default: hf-generate and plain, where measured)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="(%(default)s)")
    parser.add_argument("--temperature", type=real_number, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--repeat", type=positive, default=1, metavar="R", help="runs per prompt and method")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="B", help="prompts decoded together")
    parser.add_argument("--seed", type=whole_number(0, MOST_SEED), default=0)
    parser.add_argument("--no-warmup", action="store_true", help="time the very first runs too")
    parser.add_argument(
        "--log-likelihood", action="store_true", help="the target's mean log-likelihood of the answers, untimed"
    )
    parser.add_argument(
        "--score",
        choices=SCORES,
        default="auto",
        help="hold answers against the rows' references: their last number, the first option they name, ROUGE-L "
        "(default: numbers and options where rows have them)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the full record; keeps FILE.partial.jsonl until done")
    parser.add_argument("--resume", action="store_true", help="continue the unfinished run of --json FILE")
    _model_options(parser)


def _sweep_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=evidence.sweep)
    parser.add_argument(
        "--rules",
        required=True,
        help="comma-separated, parameters may be lists: fuzzy:js:0.1/0.2/0.4; RULE@8x2x16 has a tree of its own; exact "
        "and random gates are added",
    )
    parser.add_argument("--temperatures", default="0", metavar="T,...", help="0 is greedy (%(default)s)")
    parser.add_argument("--repeats", type=positive, default=1, metavar="R", help="answers per prompt above 0")
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON lines; a killed run goes on there")
    parser.add_argument("--html", metavar="FILE", help="the report (default: beside the output)")
    parser.add_argument("--examples", type=whole_number(0, 1000), default=4, metavar="N", help="prompts it shows")
    _evidence_options(parser)


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=evidence.calibrate)
    promise = parser.add_argument_group("promise").add_mutually_exclusive_group(required=True)
    promise.add_argument("--at-most-score-loss", type=real_number, metavar="POINTS", help="below exact, of 100")
    promise.add_argument("--at-most-nats", type=real_number, metavar="NATS", help="spent in any answer")
    promise.add_argument("--at-least-speed", type=real_number, metavar="TIMES", help="exact's tokens per second")
    for bound, what in (("copies", "4-grams copied from the prompt"), ("repeats", "repeated 4-grams")):
        parser.add_argument(f"--at-most-{bound}", type=real_number, metavar="POINTS", help=f"of {what} above exact's")
    parser.add_argument("--confidence", type=real_number, default=0.9, help="that the promise holds (%(default)s)")
    parser.add_argument(
        "--rules",
        default="auto",
        help="as for sweep; lists from careful to bold: tilted:4/2/1,fuzzy:js:0.1/0.2/0.3; auto: a few that "
        "worth finds fast on some of the prompts, with their shapes (%(default)s)",
    )
    parser.add_argument("--temperature", type=real_number, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--verify", metavar="FILE,...", help="other prompts to verify on (default: half of --prompts)")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="sweeps, reports and record; a killed run goes on"
    )
    _evidence_options(parser)


def _worth_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=evidence.worth)
    parser.add_argument("--prompts", required=True, metavar="FILE", help="as for bench")
    parser.add_argument("--limit", type=positive, default=16, metavar="N", help="prompts, evenly spread (%(default)s)")
    parser.add_argument("--raw", action="store_true", help="continue the prompts as they are, without chat template")
    parser.add_argument("--rules", default="", metavar="RULE,...", help="to forecast beside the usual ones")
    parser.add_argument("--temperature", type=real_number, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=96, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=whole_number(0, MOST_SEED), default=0)
    parser.add_argument(
        "--check", type=positive, nargs="?", const=5, default=0, metavar="N",
        help="decode with exact and the N fastest rules too, and print what that gives beside the forecast (%(const)s)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write forecast, measurements and environment")
    _model_options(parser)


def _evidence_options(parser: argparse.ArgumentParser) -> None:
    """What sweep and calibrate share."""
    parser.add_argument(
        "--prompts", required=True, metavar="FILE,...", help="as for bench; rows with an `answer` are scored"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="so many prompts of each file, evenly spread")
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=whole_number(0, MOST_SEED), default=0)
    parser.add_argument("--score", choices=SCORES, default="auto")
    parser.add_argument("--raw", action="store_true", help="continue the prompts as they are, without a chat template")
    _model_options(parser)


def _warmup_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=commands.warmup)
    parser.add_argument("--fetch-only", action="store_true", help="fetch a built-in target, and print where it is")
    _model_options(parser)


def _estimate_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=planning.estimate)
    parser.add_argument(
        "--target",
        default="llama-3.1-8b",
        help="llama-3.1-8b or -70b (shapes that are known here), a directory with a config.json, or as for generate; "
        "no weights are read (%(default)s)",
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=NUMBER", help="change a size, num_hidden_layers=8")
    head = parser.add_mutually_exclusive_group()
    layouts = ("fsd", "eagle", "eagle3")
    head.add_argument("--layout", default="eagle3", choices=layouts, help="of its head (%(default)s)")
    head.add_argument(
        "--drafter",
        metavar="NAME",
        help="a head's directory, for its layout and sizes; or a small LM, named as targets are, or self:...",
    )
    parser.add_argument("--draft-vocab", type=positive, default=32000, help="ids that it drafts (%(default)s)")
    parser.add_argument("--tree", metavar="DEPTH,WIDTH,NODES", help="(default: a GPU's, for exact and for lossy rules)")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="B", help="(%(default)s)")
    parser.add_argument("--context", type=positive, default=1024, help="tokens before the round (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=1024, metavar="N", help="(%(default)s)")
    parser.add_argument("--cuda-graphs", action="store_true", help="with their memory")


def _skip_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=planning.skip_layers)
    parser.add_argument(
        "--target", default="smollm2-135m", help="built-in name, directory, GGUF file or hub id (%(default)s)"
    )
    parser.add_argument(
        "--prompts", required=True, metavar="FILE", help="as for bench; prompts that nothing is judged on"
    )
    parser.add_argument("--layers", type=positive, required=True, metavar="N", help="that are left in the end")
    parser.add_argument(
        "--limit", type=positive, default=16, metavar="N", help="only the first N prompts (%(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="(%(default)s)")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (%(default)s)")
    parser.add_argument("--device", help="e.g. cpu or cuda:1 (default: CUDA where there is one)")
    parser.add_argument("--threads", type=thread_count, help="CPU threads")


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=commands.serve)
    parser.add_argument("--rule", default="exact", help="of requests that name none (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="(%(default)s)")
    parser.add_argument("--port", type=whole_number(0, 65535), default=8000, help="(%(default)s)")
    parser.add_argument(
        "--adapter",
        action="append",
        type=named_directory,
        metavar="NAME=DIR",
        help="a LoRA adapter, used by requests for the model NAME; may be given several times",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-batch", type=positive, default=8, help="requests decoded together (%(default)s)")
    limits.add_argument("--max-queue", type=positive, default=64, help="requests that may wait (%(default)s)")
    limits.add_argument("--max-new-tokens", type=positive, default=4096, help="of an answer (%(default)s)")
    limits.add_argument("--seconds", type=positive, default=600, help="until an answer is cut off (%(default)s)")
    _model_options(parser)


def _rules_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=commands.rules)


def _quiet() -> None:
    """Keep transformers' notes and loading bars out of the output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
