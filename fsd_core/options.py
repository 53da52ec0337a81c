"""Types of command-line options for argparse, and the options that several commands share."""

from __future__ import annotations

import argparse
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsd_core.console import ConsoleParser
from fsd_core.errors import DataError
from fsd_core.files import parse_json
from fsd_core.registry import MAX_SEED, read_float, read_int

MAX_COUNT = 2**31 - 1  # tokens, prompts, repeats ...
MAX_GIB = 2**20
# fsd_bench.score imports too much for --help
SCORES = ("auto", "number", "choice", "ifeval", "chrf", "rouge", "letter", "math", "text", "code", "none")


def rows_by_tokens(text: str) -> tuple[int, int]:
    """Read "ROWSxTOKENS". An option type."""
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,8})", text)
    if match is None or int(match[2]) < 2:
        raise ArgumentTypeError(f"{text[:60]!r} is not ROWSxTOKENS with at least 2 tokens, such as 8x2048")
    return int(match[1]), int(match[2])


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return an option type: whole numbers from ``low`` to ``high``."""

    def number(text: str) -> int:
        value = read_int(text)
        if value is None:
            raise ArgumentTypeError(f"{text[:60]!r} is not a whole number")
        if value < low:
            raise ArgumentTypeError(f"must be at least {low}, got {value}")
        if value > high:
            raise ArgumentTypeError(f"must be at most {high}, got {value}")
        return value

    return number


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ArgumentTypeError for other text."""
    try:
        value = parse_json(text.encode("utf-8", "surrogatepass"), f"{text!r:.60}", "Give a JSON object.", unique=True)
    except DataError as error:
        raise ArgumentTypeError(str(error)) from error
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text!r:.60}: needs a JSON object")
    return value


def target_keywords(text: str) -> dict[str, Any]:
    """Parse keywords for a target. Raises ArgumentTypeError for other text, and for what options of their own give."""
    keywords = json_object(text)
    for name in {"dtype", "device"} & keywords.keys():
        raise ArgumentTypeError(f"{name} is no such keyword: commands that let you choose it have --{name}")
    return keywords


def named_directory(text: str) -> tuple[str, str]:
    """Parse NAME=DIR. Raises ArgumentTypeError for other text."""
    name, equals, directory = text.partition("=")
    if not (name and equals and directory):
        raise ArgumentTypeError(f"{text!r:.60}: needs NAME=DIR")
    return name, directory


def existing_directory(text: str) -> Path:
    """Parse the path of a directory. Raises ArgumentTypeError if there is none."""
    path = Path(text).expanduser()
    if not path.is_dir():
        raise ArgumentTypeError(f"{text!r:.200}: no such directory")
    return path


positive = whole_number(1, MAX_COUNT)
seed = whole_number(0, MAX_SEED)


def thread_count(text: str) -> int:
    """Parse a number of threads, at most one per core: more would only wait for each other."""
    return whole_number(1, os.cpu_count() or 1)(text)


def real_number(text: str) -> float:
    """Parse a number or ``inf``. Raises ArgumentTypeError for other text."""
    value = read_float(text)
    if value is None:
        raise ArgumentTypeError(f"{text[:60]!r} is not a number that fits a float")
    return value


def gibibytes(text: str) -> int:
    """Parse a positive number of GiB and return bytes. Raises ArgumentTypeError for other text."""
    value = real_number(text)
    if not 0 < value <= MAX_GIB:
        raise ArgumentTypeError(f"must be a number above 0 and at most {MAX_GIB}, got {text}")
    return int(value * 2**30)


def gibibytes_or_none(text: str) -> int | None:
    """Parse a number of GiB and return bytes, None for 0. Raises ArgumentTypeError for other text."""
    return gibibytes(text) if real_number(text) else None


class Former(argparse.Action):
    """A former name of an option with a value. It works until release 0.2, with a warning."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        names = {True: f"--{self.dest}", False: f"--no-{self.dest}"}
        now = names.get(self.const, f"--{self.dest.replace('_', '-')} {self.const}")
        print(f"warning: {option_string} works until fsd-toolkit 0.2: write {now}.", file=sys.stderr)
        setattr(namespace, self.dest, self.const)


TARGET_KWARGS: dict[str, Any] = {
    "type": target_keywords,
    "metavar": "JSON",
    "help": """keywords for transformers to load the target with, such as '{"revision": "v2"}' or a """
    "quantization_config",
}
MODELS: dict[str, dict[str, Any]] = {
    "--target": {
        "metavar": "NAME", "default": "smollm2-135m", "help": "built-in name, directory, GGUF file or hub id"
    },
    "--target-kwargs": TARGET_KWARGS,
    "--drafter": {
        "metavar": "NAME",
        "help": 'head or small causal LM (directory or hub id); part of the target ("self:layers=0-9,20-29" or '
        '"self:bits=3"); "shipped", "mtp", "memory", "lookup", "recycle" or "none"; X+memory, X+lookup and X+recycle '
        "graft one onto X (default: the head shipped with the target, its checkpoint's MTP layer, or lookup+recycle)",
    },
    "--memory": {
        "metavar": "FILE",
        "help": "draft from these texts too (X+memory:FILE): rows with `text`, token ids or conversations, in any "
        "form that --prompts takes, indexed once, next to the file",
    },
    "--dtype": {"metavar": "TYPE", "default": "bf16", "help": "data type of the models: bf16, fp16 or fp32"},
    "--device": {"metavar": "NAME", "help": "such as cpu or cuda:1 (default: CUDA if available, else cpu)"},
    "--tree": {
        "metavar": "DEPTH,WIDTH,NODES[,STOP]",
        "help": "shape of the draft tree, and the probability below which drafting stops; auto: chosen each round by "
        "costs of earlier rounds, with a seed from the text alone (default: auto on a CPU, else a shape)",
    },
    "--weights": {
        "choices": ("auto", "packed", "expanded", "plain"), "default": "auto",
        "help": "how the target's are kept: as the device's backend is fastest (auto), expanded to bf16 from GGUF or a "
        "built-in target, or in torch's own layers (plain)",
    },
    "--draft-weights": {
        "choices": ("fp8", "plain"), "default": "fp8",
        "help": "how a head's are kept, with our CPU kernels: in fp8, or as loaded",
    },
    "--recording": {
        "action": argparse.BooleanOptionalAction,
        "help": "record rounds as CUDA graphs and replay them (default: on a GPU)",
    },
    "--expand": {"action": Former, "nargs": 0, "dest": "weights", "const": "expanded", "help": argparse.SUPPRESS},
    "--no-quantize": {
        "action": Former, "nargs": 0, "dest": "draft_weights", "const": "plain", "help": argparse.SUPPRESS
    },
    **{
        f"--{no}{former}": {
            "action": Former, "nargs": 0, "dest": "recording", "const": not no, "help": argparse.SUPPRESS
        }
        for former in ("capture", "cuda-graphs")
        for no in ("", "no-")
    },
    "--threads": {"type": thread_count, "metavar": "N", "help": "CPU threads (default: torch's)"},
}  # fmt: skip
SHARED: dict[str, dict[str, Any]] = {
    **MODELS,
    "--prompts": {
        "required": True, "metavar": "FILE", "help": "prompts: lines of a .txt file, or rows of .jsonl, .json, .csv "
        "or .parquet with `prompt`, `messages`, `conversations`, `question`, `turns` ...; a row with `answer` is scored"
    },
    "--limit": {"type": positive, "metavar": "N", "help": "take N prompts of each file, evenly spread (default: all)"},
    "--max-new-tokens": {"type": positive, "default": 128, "metavar": "N", "help": "most tokens of an answer"},
    "--temperature": {"type": real_number, "default": 0.0, "metavar": "T", "help": "sampling temperature, 0: greedy"},
    "--seed": {"type": seed, "default": 0, "metavar": "N", "help": "seed of draws and bootstrap intervals"},
    "--raw": {"action": "store_true", "help": "continue the prompts as they are, without the chat template"},
    "--strict": {"action": "store_true", "help": "stop at the first row that cannot be used, not only at 5 %% of them"},
    "--score": {
        "choices": SCORES, "default": "auto", "help": "how answers are scored against the rows' references: last "
        "number, first option named, IFEval's instructions, chrF or ROUGE-L; auto: the first three, by row"
    },
    "--json": {"metavar": "FILE", "help": "also write the record to FILE"},
    "--overwrite": {"action": "store_true", "help": "replace existing files of the names given"},
}  # fmt: skip


def add(parser: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add options of :data:`SHARED` to a parser or group, each with ``changes`` to its argparse keywords."""
    for name in names:
        parser.add_argument(name, **{**SHARED[name], **changes})


def add_counts(parser: argparse._ActionsContainer, *options: tuple[str, int | None, str]) -> None:
    """Add options that take a positive whole number: (name, default, help) each."""
    for name, default, help in options:
        parser.add_argument(name, type=positive, default=default, metavar="N", help=help)


def add_flags(parser: argparse._ActionsContainer, *options: tuple[str, str]) -> None:
    """Add options without a value: (name, help) each."""
    for name, help in options:
        parser.add_argument(name, action="store_true", help=help)


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose and load target and drafter, as a group."""
    add(parser.add_argument_group("models"), *MODELS)


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add --import."""
    parser.add_argument(
        "--import", action="append", dest="imports", metavar="MODULE",
        help="import a module first, which registers a rule or drafter of your own; may be given several times",
    )  # fmt: skip


def command_parser(
    program: str,
    version: str,
    description: str,
    commands: Sequence[tuple[Callable[..., int], Callable[[argparse.ArgumentParser], None] | None, str]],
) -> ConsoleParser:
    """Return the parser of a program with subcommands.

    Args:
        program: its name.
        version: what --version prints.
        description: what it does.
        commands: (function of the parsed options, what adds its options, help) each, named as the function.
    """
    parser, common = ConsoleParser(prog=program, description=description), ConsoleParser(add_help=False)
    parser.add_argument("--version", action="version", version=f"{program} {version}")
    add_flags(common, ("--debug", "show tracebacks and the libraries' own messages"))
    add_import(common)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command, add_options, help in commands:
        name, described = command.__name__.replace("_", "-"), f"{help[0].upper()}{help[1:]}."
        subparser = subparsers.add_parser(
            name, help=help, description=described, parents=[common], formatter_class=HelpFormatter
        )
        subparser.set_defaults(function=command)
        if add_options is not None:
            add_options(subparser)
    return parser


def picked(args: argparse.Namespace, names: str) -> dict[str, Any]:
    """Return the named options, ``names`` with blanks between them, as keywords."""
    return {name: getattr(args, name) for name in names.split()}


def words(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def set_threads(threads: int | None) -> None:
    """Set torch's number of CPU threads, unless None."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


class HelpFormatter(argparse.HelpFormatter):
    """Help that names each option's default, unless its text does so or the default is nothing."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        silent = default is False or default in (None, "", (), [], argparse.SUPPRESS)
        return text if silent or "default:" in text else f"{text} (default: %(default)s)"
