"""The options of `fsd-train`'s commands, without heavy imports, so that `--help` and a mistyped option answer at once.

:mod:`fsd_train.commands.fit` builds those of `fit` and `validate` from the signatures of trainer, modules and data.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from fsd_core.completion import HELP, SHELLS
from fsd_core.console import ConsoleParser
from fsd_core.files import HUB_ID
from fsd_core.options import (
    MAX_COUNT,
    SHARED,
    TARGET_KWARGS,
    add_import,
    json_object,
    positive,
    real_number,
    whole_number,
)  # fmt: skip
from fsd_core.registry import MAX_SEED, read_float
from fsd_infer.heads import FORMATS
from fsd_train import LONGEST, MAX_LENGTH


def _temperature(text: str) -> tuple[float, float]:
    value, _, weight = text.partition(":")
    temperature, share = read_float(value), read_float(weight or "1")
    if temperature is None or share is None or not (0 <= temperature < math.inf and 0 < share < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}: needs a temperature >= 0 and a weight > 0")
    return temperature, share


def _hub_id(text: str) -> str:
    if HUB_ID.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80}: needs the form owner/name")
    return text


def _count(default: int | None, what: str) -> dict[str, Any]:
    return {"type": positive, "default": default, "metavar": "N", "help": what}


_TARGET = {"help": "target: built-in name, directory or hub id"}
_NAMED = {"help": "target: built-in name, directory or hub id (default: the one that the head names)"}
_HUB_ID: dict[str, Any] = {"type": _hub_id, "metavar": "OWNER/NAME"}
Options = dict[str, dict[str, Any]]

_REGENERATE: Options = {
    "--config": {"metavar": "RECIPE", "help": "recipe for target, output (data.train_files) and --max-length"},
    "--target": _TARGET,
    "--target-kwargs": TARGET_KWARGS,
    "--prompts": {"required": True, "nargs": "+", "help": "prompts: files or directories (docs/training.md)"},
    "--output": {"help": "a .jsonl file, or a directory for answers.jsonl"},
    "--max-length": _count(
        None,
        f"tokens of prompt and answer (default: the recipe's data.max_length, or {LONGEST} or the target's context)",
    ),
    "--max-new-tokens": _count(None, "tokens of an answer (default: half of --max-length)"),
    "--max-prompt-tokens": _count(
        None, "longest prompt; longer ones are left out and counted (default: --max-length less --max-new-tokens)"
    ),
    "--temperature": {
        "type": _temperature, "nargs": "+", "default": [(0.0, 1.0)], "metavar": "T[:WEIGHT]",
        "help": "temperature, or several with weights, drawn per row: 0:0.7 0.8:0.3; a row's own temperature, top_k "
        "and top_p take precedence (default: 0, greedy)",
    },
    "--chat-template-args": {
        "type": json_object, "default": {}, "metavar": "JSON",
        "help": """arguments of the chat template, such as '{"enable_thinking": false}'; a row may also have tools """
        "and chat_template_kwargs",
    },
    "--raw": {"action": "store_true", "help": "continue each prompt without the chat template"},
    "--features": {"metavar": "DIR", "help": "also store the local target's features there, like cache-features"},
    "--limit": _count(None, "number of prompts to answer, sampled by --seed (default: all)"),
    "--seed": {"type": whole_number(0, MAX_SEED), "default": 0, "metavar": "N", "help": "seed of all draws"},
    "--batch-size": _count(32, "prompts per batch of the local target"),
    "--dtype": {"help": "data type of the local target: bfloat16, float32 ... (default: bfloat16)"},
    "--device": {"help": "device of the local target (default: CUDA if present)"},
    "--drafter": {
        "default": "none", "metavar": "DRAFTER",
        "help": "drafter of the local target, as fsd-infer takes it; answers follow the target's distribution with any",
    },
    "--endpoint": {"metavar": "URL", "nargs": "+", "help": "OpenAI-compatible servers that answer instead"},
    "--endpoint-model": {"metavar": "NAME", "help": "the server's name for the target (default: --target)"},
    "--concurrency": _count(64, "requests in flight at the endpoint"),
    "--no-request-seeds": {"action": "store_true", "help": "send no seeds, for servers that refuse them"},
    "--strict": SHARED["--strict"],
    "--quiet": {"action": "store_true", "help": "show no progress bar"},
}  # fmt: skip

_CACHE_FEATURES: Options = {
    "--config": {"metavar": "RECIPE", "help": "recipe for target, data, output, layers and --max-length"},
    "--target": _TARGET,
    "--target-kwargs": TARGET_KWARGS,
    "--data": {"nargs": "+", "action": "extend", "metavar": "FILE", "help": "answers: files or directories"},
    "--output": {"metavar": "DIR", "help": "directory of the cache"},
    "--layers": {
        "type": whole_number(0, MAX_COUNT), "nargs": "+", "metavar": "N",
        "help": "decoder layers whose outputs are stored too, for heads with fused_layers",
    },
    "--max-length": _count(None, f"tokens kept per sequence (default: the recipe's data.max_length, or {MAX_LENGTH})"),
    "--max-tokens": _count(None, "tokens that the cache may hold (default: no limit)"),
    "--min-answer-share": {
        "type": real_number, "default": 0.0, "metavar": "SHARE",
        "help": "smallest share of answer tokens in a row; others are left out",
    },
    "--batch-tokens": _count(2048, "tokens per forward"),
    "--dtype": {"default": "bfloat16", "choices": ["bfloat16", "float32"], "help": "data type of the target"},
    "--strict": SHARED["--strict"],
}  # fmt: skip

_EXPORT: Options = {
    "source": {"help": "a .ckpt file of `fsd-train fit`, or a head of any format: directory or hub id"},
    "output": {"help": "directory of the exported head, or of the target with it"},
    "--to": {
        "choices": (*FORMATS, "target"),
        "help": "format of another program; eagle: SafeAILab's code; target: an MTP layer goes into a copy of the "
        "target's checkpoint (default: our own)",
    },
    "--target": _NAMED,
    "--draft-vocab-size": _count(
        None,
        "draft over the N most frequent ids of --data; with the target's LM head this needs no training, and more ids "
        "cover more text at the price of slower drafts (default: the trained ids)",
    ),
    "--data": {"nargs": "+", "metavar": "FILE", "help": "answers in which --draft-vocab-size counts ids"},
    "--target-kwargs": {
        **TARGET_KWARGS,
        "help": "further keywords to load the target with; a recipe's data.allow_control_tokens goes here, for --data",
    },
    "--strict": SHARED["--strict"],
    "--overwrite": {**SHARED["--overwrite"], "help": "replace an existing directory of that name, once all is written"},
}

_PUBLISH: Options = {
    "directory": {"help": "directory of the head, in any supported format"},
    "repository": {**_HUB_ID, "help": "repository, created if missing"},
    "--target": _NAMED,
    "--base-model": {**_HUB_ID, "help": "the target's name on the Hub"},
    "--base-revision": {"metavar": "COMMIT", "help": "commit of the target (default: the one in the cache)"},
    "--license": {"help": "licence of the head as the Hub spells it: apache-2.0, llama3.1 ..."},
    "--dataset": {**_HUB_ID, "nargs": "+", "help": "datasets of the training"},
    "--prompts": {
        "default": "data/quickstart_prompts.jsonl", "metavar": "FILE",
        "help": "prompts for measuring the acceptance length",
    },
    "--strict": SHARED["--strict"],
    "--curve": {"metavar": "FILE", "help": "picture of the training, as LossCurve writes it, to show on the card"},
    "--limit": _count(16, "number of prompts"),
    "--max-new-tokens": _count(64, "tokens of each answer"),
    "--tree": {"default": "5,6,16", "metavar": "D,W,N", "help": "depth, width and nodes of the draft tree"},
    "--revision": {"metavar": "BRANCH", "help": "branch to upload to (default: main)"},
    "--private": {"action": "store_true", "help": "create a private repository"},
    "--yes": {"action": "store_true", "help": "upload without asking"},
}  # fmt: skip

_DOCTOR: Options = {
    "--target": {**_TARGET, "required": True},
    "--target-kwargs": TARGET_KWARGS,
    "--head": {
        "metavar": "DIR",
        "help": 'directory of the head, of any format, or of MTP layers; "mtp": those of the target',
    },
    "--overfit": {
        "type": positive,
        "nargs": "?",
        "const": 60,
        "metavar": "SECONDS",
        "help": "instead of a head, train one on a single answer for SECONDS (%(const)s if no number is given), export "
        "it, decode with it, and name the stage at which acceptance is lost",
    },
    "--config": {"metavar": "RECIPE", "help": "recipe of --overfit (default: what new-recipe writes for the target)"},
    "--trained-on": {
        "metavar": "NAME",
        "help": "target that the head was trained for, to measure the loss of agreement (default: found for adapters "
        "and for a quantization_config in --target-kwargs)",
    },
    "--data": {"required": True, "metavar": "FILE", "help": "rows of answers, as training takes them"},
    "--features": {"metavar": "DIR", "help": "a cache of `fsd-train cache-features` to compare with"},
    "--rows": _count(16, "number of rows to check"),
    "--max-length": _count(512, "tokens of the longest row to check"),
    "--max-new-tokens": _count(48, "tokens of each decoded answer"),
    "--dtype": {"default": "bfloat16", "help": "data type that the head will run in"},
    "--url": {"help": "an OpenAI-compatible server with the same target and head to compare with"},
    "--strict": SHARED["--strict"],
    "--json": {"metavar": "FILE", "help": "also write the findings to this file"},
    "--overwrite": SHARED["--overwrite"],
}

_ESTIMATE: Options = {
    "--config": {"required": True, "metavar": "RECIPE", "help": "recipe of a head"},
    "--strict": SHARED["--strict"],
    "--on-paper": {"action": "store_true", "help": "read only the target's config: memory, and the least time on GPUs"},
    "--target": {"metavar": "NAME", "help": "another target, on paper: llama-3.1-8b, llama-3.1-70b, a directory"},
}

_NEW_RECIPE: Options = {
    "--target": {"required": True, "help": "target: built-in name, directory or hub id; only its config is read"},
    "--data": {"nargs": "+", "default": [], "metavar": "FILE", "help": "answers for training"},
    "--output": {"metavar": "FILE", "help": "file of the recipe (default: standard output)"},
    "--overwrite": SHARED["--overwrite"],
}

_QUICKSTART: Options = {
    "--train-seconds": {
        "type": whole_number(0, MAX_COUNT), "default": 60, "metavar": "S", "help": "seconds of training, 0 for none",
    },
    "--prompts": _count(12, "number of prompts to decode"),
    "--max-new-tokens": _count(64, "tokens of each answer"),
    "--details": {"action": "store_true", "help": "print all tables of the benchmark, not only the first columns"},
}  # fmt: skip


_COMPLETION: Options = {"shell": {"choices": SHELLS, "help": "the shell that reads the script"}}


def _parser(name: str, description: str, options: Options) -> argparse.ArgumentParser:
    parser = ConsoleParser(prog=f"fsd-train {name}", description=description)
    for flag, given in options.items():
        option = dict(given)
        if option.get("default") not in (None, [], {}) and "(default: " not in option["help"]:
            option["help"] += " (default: %(default)s)"
        parser.add_argument(flag, **option)
    if name != "completion":
        add_import(parser)
    return parser


COMMANDS: dict[str, tuple[str, Options]] = {
    "regenerate": (
        "Let the target answer prompts and write training data as JSONL. The same command continues a killed run.",
        _REGENERATE,
    ),
    "cache-features": ("Store the target's features of answers.", _CACHE_FEATURES),
    "new-recipe": ("Write a recipe for a target.", _NEW_RECIPE),
    "quickstart": (
        "Fetch the built-in model, train a head for a minute, decode with the shipped head and compare.",
        _QUICKSTART,
    ),
    "export": ("Write a head for fsd-infer or, with --to, for another engine.", _EXPORT),
    "publish": ("Check a head, show its model card, and upload both to the Hub.", _PUBLISH),
    "doctor": ("Find out why a head accepts less than it should.", _DOCTOR),
    "estimate": ("Estimate memory, disk and time of a recipe by a short measurement.", _ESTIMATE),
    "completion": (f"{HELP[0].upper()}{HELP[1:].replace('PROGRAM', 'fsd-train')}.", _COMPLETION),
}
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    name: partial(_parser, name, *rest) for name, rest in COMMANDS.items()
}
