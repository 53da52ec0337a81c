"""The command line `fsd-bench`: its parser. The commands are in :mod:`fsd_bench.commands`.

Nothing here imports torch, so `--help` and a mistyped option are answered at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fsd_bench import commands
from fsd_core.completion import HELP, add_completion, commands_of, script
from fsd_core.console import run_parsed
from fsd_core.options import (
    add,
    add_counts,
    add_flags,
    add_models,
    command_parser,
    positive,
    real_number,
    whole_number,
)  # fmt: skip

BATCH = ("--batch-size", 1, "prompts decoded together")
RUN_COUNTS = (("--every", 1, "take every N-th prompt of a file"), ("--repeat", 1, "runs per prompt and method"), BATCH)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, see :func:`fsd_core.console.run`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:  # as `fsd-infer bench` was called
        words[0] = "run"
    return run_parsed("fsd-bench", build_parser().parse_args(words))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    from fsd_infer import __version__

    table = (
        (commands.run, _bench_options, "measure methods on a file of prompts: speed, acceptance length, scores"),
        (commands.table, _table_options, "print what rules keep of a target's score on sets of prompts, and gain"),
        (commands.sweep, _sweep_options, "measure what rules gain and cost, at several settings and temperatures"),
        (commands.calibrate, _calibrate_options, "find the fastest setting that keeps a promise, and verify it"),
        (commands.worth, _worth_options, "forecast what lossy rules gain with a drafter, from a run of exact"),
        (commands.estimate, _estimate_options, "compute memory and the least time of a round on GPUs from a config"),
        (commands.board, _board_options, "write one page of many records: filters, intervals, commands"),
        (commands.skip_layers, _skip_options, "find layers that a drafter made from the target can skip"),
        (completion, add_completion, HELP.replace("PROGRAM", "fsd-bench")),
    )
    description = "Measure and forecast speculative decoding: speed, scores, cost."
    return command_parser("fsd-bench", __version__, description, table)


def completion(args: argparse.Namespace) -> int:
    """Run `fsd-bench completion`."""
    print(script("fsd-bench", args.shell, commands_of(build_parser())), end="")
    return 0


def _bench_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "--prompts", "--strict", "--raw")
    _layout_options(parser)
    add(parser, "--limit", help="take only the first N prompts (default: all)")
    parser.add_argument(
        "--methods", default="hf-generate,plain,exact,fuzzy:js:0.3",
        help="comma-separated: plain, any rule, a rule with its own drafter (exact@none, exact@DIR), hf-generate, "
        "hf-lookup[:TOKENS], hf-assisted:DIR[#DRAFTS], hf-beams:W, beams:W[@DRAFTER], server:URL[#MODEL], "
        "command:PROGRAM; NAME=METHOD renames one",
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
    add_counts(parser, *RUN_COUNTS)
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
    add(parser, "--overwrite", help="replace the record of a finished run in --json FILE")
    add(parser, "--score")
    add(parser, "--json", help="write the full record to FILE; FILE.partial.jsonl holds the runs until it is done")
    add_models(parser)


def _layout_options(parser: argparse.ArgumentParser) -> None:
    """Add what reads and scores files of other layouts."""
    parser.add_argument(
        "--layout", metavar="NAME", help="layout of a public data set's file: gpqa, aime, math-500, hle, humaneval, "
        "livecodebench, speed-bench, spec-bench or mt-bench",
    )  # fmt: skip
    parser.add_argument(
        "--field", action="append", metavar="NAME=FIELD",
        help="the file's field for prompt, answer, category, ...; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--turns", type=positive, metavar="N", help="user turns asked of a row with turns, each after the method's own "
        "answers to those before (default: all of a public file's, else the first)",
    )  # fmt: skip
    add_flags(parser, ("--run-code", "score answers that are programs by running them, with limits but no sandbox"))


def _table_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sets", required=True, metavar="NAME=FILE,...", help="sets of prompts, each a row of the table per method"
    )
    parser.add_argument(
        "--methods", default="plain,exact,tilted", help="as for run; give exact several trees: exact@shipped@6x4x16"
    )
    parser.add_argument("--work", required=True, metavar="DIR", help="write each set's record to DIR; rerun to resume")
    for name, what in (("json", "as JSON"), ("markdown", "as Markdown"), ("specbundle", "as SpecBundle's data.json")):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"write the table {what} to FILE")
    add(parser, "--overwrite")
    add(parser, "--limit", help="take only the first N prompts of each set (default: all)")
    add(parser, "--max-new-tokens", "--temperature", "--seed", "--score", "--raw", "--strict")
    _layout_options(parser)
    add_counts(parser, *RUN_COUNTS)
    add_models(parser)


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
    add(parser, "--overwrite", help="replace a report of other answers")
    parser.add_argument(
        "--examples", type=whole_number(0, 1000), default=4, metavar="N", help="prompts whose answers the report shows"
    )
    _shared_options(parser)


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
    _shared_options(parser)


def _worth_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "--prompts", "--strict", "--raw", "--temperature")
    add(parser, "--seed", help="seed of draws")
    add(parser, "--limit", default=16, help="take N prompts, evenly spread")
    add(parser, "--max-new-tokens", default=96)
    parser.add_argument("--rules", default="", metavar="RULE,...", help="rules to forecast besides the usual ones")
    add_flags(parser, ("--details", "print the tables of all rules, not only what is recommended"))
    add(parser, "--json", help="write forecast and environment to FILE; rerun to resume")
    add(parser, "--overwrite")
    add_models(parser)


def _shared_options(parser: argparse.ArgumentParser) -> None:
    """Add what sweep and calibrate share."""
    add(parser, "--prompts", metavar="FILE,...")
    add(parser, "--strict", "--limit", "--max-new-tokens", "--seed", "--score", "--raw")
    add_counts(parser, BATCH)
    add_models(parser)


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
        ("--draft-vocab", None, "token ids that a head drafts (default: 32000, or the target's)"),
        BATCH,
        ("--context", 1024, "tokens before the round"),
    )
    add(parser, "--max-new-tokens", default=1024)
    add_flags(parser, ("--cuda-graphs", "count the memory of CUDA graphs"))


def _board_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "records", nargs="+", metavar="FILE", help="records of `fsd-bench run --json`, or SpecForge's results"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="write the page to FILE")
    add(parser, "--overwrite")
    parser.add_argument("--title", default="Speculative decoding, measured", help="the page's title")


def _skip_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "--target", "--dtype", "--device", "--threads")
    add(parser, "--prompts", help="file of prompts, as for bench; use none of them to judge the drafter")
    add(parser, "--strict")
    parser.add_argument("--layers", type=positive, required=True, metavar="N", help="layers that the drafter keeps")
    add(parser, "--limit", default=16, help="take only the first N prompts")
    add(parser, "--max-new-tokens", default=64)


if __name__ == "__main__":
    sys.exit(main())
