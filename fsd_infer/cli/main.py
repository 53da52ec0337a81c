"""The command line `fsd-infer`: its parser. The commands are in the other modules of this package.

Nothing here imports torch, so `--help` and a mistyped option are answered at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from fsd_core.completion import HELP, add_completion, commands_of, script
from fsd_core.console import ConsoleParser, run_parsed
from fsd_core.options import (
    add,
    add_counts,
    add_flags,
    add_models,
    command_parser,
    existing_directory,
    gibibytes,
    gibibytes_or_none,
    json_object,
    named_directory,
    real_number,
    rows_by_tokens,
    whole_number,
)
from fsd_infer.cli import commands, env

GROUP = "fsd_infer.commands"  # of entry points, whose names are commands of ours too
COMMANDS = ("generate", "warmup", "serve", "env", "rules", "completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, see :func:`fsd_core.console.run`."""
    words = list(sys.argv[1:] if argv is None else argv)
    for elsewhere in _elsewhere(words[:1]):
        return int(elsewhere(words))
    parser = build_parser()
    if words and words[0] not in COMMANDS:  # the look-up takes as long as many a help text
        parser.elsewhere = entry_points(group=GROUP).names
    args = parser.parse_args(words)
    return run_parsed("fsd-infer", args)


def _elsewhere(command: Sequence[str]) -> list[Callable[[Sequence[str]], int]]:
    """Return what runs a command that another package offers as ours: `fsd-infer bench` is `fsd-bench run`."""
    if not command or command[0].startswith("-") or command[0] in COMMANDS:
        return []
    return [point.load() for point in entry_points(group=GROUP, name=command[0])]


def build_parser() -> ConsoleParser:
    """Return the parser of all commands and their options."""
    from fsd_infer import __version__

    table = (
        (commands.generate, _generate_options, "answer one prompt"),
        (commands.warmup, _warmup_options, "load the models and compile the CPU kernels before the first request"),
        (commands.serve, _serve_options, "serve the OpenAI API from one process"),
        (env.env, _env_options, "print what a report of a fault needs: versions, machine, what runs where and why"),
        (commands.rules, None, "list rules, divergences, drafters and built-in targets"),
        (completion, add_completion, HELP.replace("PROGRAM", "fsd-infer")),
    )
    description = "Speculative decoding with a dial: exact, or fuzzy within a stated divergence."
    return command_parser("fsd-infer", __version__, description, table)


def completion(args: argparse.Namespace) -> int:
    """Run `fsd-infer completion`."""
    print(script("fsd-infer", args.shell, commands_of(build_parser()), entry_points(group=GROUP).names), end="")
    return 0


class Once(argparse.Action):
    """Stores a value and refuses a second one. Argparse would keep the last."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, name: Any = None
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(
                self, "given twice, but a run answers one prompt: fsd-bench run takes a file of many"
            )
        setattr(namespace, self.dest, value)


def _generate_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action=Once, metavar="TEXT", help="the prompt")
    source.add_argument(
        "--prompt-file", action=Once, metavar="FILE", help='read the prompt from a file, "-": from standard input'
    )
    parser.add_argument(
        "--image", action="append", metavar="FILE",
        help="image of the prompt, for an image-text-to-text target; may be given several times",
    )  # fmt: skip
    add(parser, "--raw", help="continue the text as it is, without the chat template")
    add_models(parser)
    parser.add_argument("--rule", default="exact", help='acceptance rule, such as "fuzzy:js:0.3"; see fsd-infer rules')
    parser.add_argument(
        "--quality", type=real_number, metavar="Q",
        help="instead of a rule: the share of exact's score to keep, at most 1 (exact); needs the drafter's "
        "calibration file (fsd-bench calibrate)",
    )  # fmt: skip
    _request_options(parser)
    _output_options(parser)


def _request_options(parser: argparse.ArgumentParser) -> None:
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
    add(request, "--seed", default=None, help="seed of the draws, for a reproducible answer (default: none)")
    request.add_argument(
        "--options", type=json_object, metavar="JSON",
        help="further fields of transformers' GenerationConfig, such as '{\"repetition_penalty\": 1.1}'; of the "
        "model's own generation config only special tokens and lengths are used",
    )  # fmt: skip
    request.add_argument(
        "--beam-options", metavar="NAME=NUMBER,...",
        help="how beams are drafted (depth, spread, nodes) and sampled (confidence, min_width, join_every); see "
        "docs/decoding.md",
    )  # fmt: skip
    guided = request.add_mutually_exclusive_group()
    guided.add_argument("--schema", metavar="FILE", help="answer with JSON that fits the JSON schema in FILE")
    guided.add_argument("--regex", metavar="PATTERN", help="answer with text that matches this regular expression")
    request.add_argument(
        "--max-cache-gib", type=gibibytes, metavar="GIB",
        help="refuse a request whose KV caches need more GiB (default: the free memory)",
    )  # fmt: skip


def _output_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output").add_mutually_exclusive_group()
    add_flags(
        parser.add_mutually_exclusive_group(),
        ("--stats", "print all statistics of the answer on standard error, not only two lines"),
        ("--quiet", "print only the answer, and errors"),
    )
    add_flags(
        output,
        ("--stream", "print the answer while it is generated"),
        ("--json", "print one record: text, tokens, their sources, statistics"),
        (
            "--show-accepted",
            "colour tokens by their source (target, drafter, lossy rule), on a terminal while they are generated",
        ),
    )
    output.add_argument("--html", metavar="FILE", help="write a page: tokens by source, draft trees, time per round")
    add(parser, "--overwrite", help="replace an existing page of --html")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="when --show-accepted uses colours"
    )


def _warmup_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ("--fetch-only", "only fetch a built-in target and print its directory"))
    _record_option(parser, "and say how long that takes")
    add_models(parser)


def _record_option(parser: argparse.ArgumentParser, why: str) -> None:
    parser.add_argument(
        "--record", nargs="+", type=rows_by_tokens, default=(), metavar="ROWSxTOKENS",
        help=f"on a GPU, record the rounds of batches of ROWS texts of up to TOKENS tokens, {why}",
    )  # fmt: skip


def _env_options(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ("--json", "print it as JSON"))


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
    parser.add_argument(
        "--image-dir", action="append", type=existing_directory, metavar="DIR",
        help="directory whose files requests may name as images (file: URLs); may be given several times",
    )  # fmt: skip
    _record_option(parser, "before the first request")
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
    add_models(parser)


if __name__ == "__main__":
    sys.exit(main())
