"""The options of `fsd-train`'s commands, without what they run on: `--help` and a mistyped option are answered at once.

`fit` and `validate` take theirs from the trainer's, modules' and data's own signatures, see
:mod:`fsd_train.commands.fit`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from fsd_infer.cli.options import MOST_COUNT, TARGET_KWARGS, json_object, positive, real_number, whole_number
from fsd_infer.cli.run import Parser
from fsd_infer.heads import FORMATS, HUB_ID
from fsd_infer.registry import MOST_SEED, read_float
from fsd_train import LONGEST, MAX_LENGTH


def _temperature(text: str) -> tuple[float, float]:
    value, _, weight = text.partition(":")
    temperature, share = read_float(value), read_float(weight or "1")
    if temperature is None or share is None or not (0 <= temperature < math.inf and 0 < share < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}: needs a temperature >= 0 and a weight > 0")
    return temperature, share


def regenerate() -> argparse.ArgumentParser:
    """Options of `fsd-train regenerate`."""
    p = Parser(
        prog="fsd-train regenerate",
        description="The target's own answers to prompts, the text a drafter is trained on, as JSONL. A killed run is "
        "continued by the same command: a torn last line is cut off and rows already there are not made again.",
    )
    p.add_argument("--config", metavar="RECIPE", help="take target, output (data.train_files) and --max-length from it")
    p.add_argument("--target", help="built-in name, directory or hub id of the target")
    p.add_argument("--target-kwargs", **TARGET_KWARGS)
    p.add_argument(
        "--prompts", required=True, nargs="+", help="files or directories of prompts: see docs/training-data.md"
    )
    p.add_argument("--output", help="a .jsonl file, or a directory that will hold answers.jsonl")
    p.add_argument(
        "--max-length",
        type=positive,
        metavar="TOKENS",
        help=f"of prompt and answer; default: the recipe's data.max_length, else {LONGEST} or the target's context",
    )
    p.add_argument("--max-new-tokens", type=positive, metavar="TOKENS", help="default: half of --max-length")
    p.add_argument(
        "--max-prompt-tokens",
        type=positive,
        metavar="TOKENS",
        help="longer prompts are left out and counted; default: what --max-new-tokens leaves of --max-length",
    )
    p.add_argument(
        "--temperature",
        type=_temperature,
        nargs="+",
        default=[(0.0, 1.0)],
        metavar="T[:WEIGHT]",
        help="one value, or several that rows are spread over: 0:0.7 0.8:0.3 (default 0: greedy); rows may have "
        "temperature, top_k and top_p of their own",
    )
    p.add_argument(
        "--chat-template-args", type=json_object, default={}, metavar="JSON",
        help="""arguments of the chat template, such as '{"enable_thinking": false}'; rows may have tools and """
        "chat_template_kwargs of their own",
    )  # fmt: skip
    p.add_argument("--raw", action="store_true", help="continue each prompt as it is, without the chat template")
    p.add_argument(
        "--features", metavar="DIR", help="of the local target: store its features there too, as cache-features does"
    )
    p.add_argument("--limit", type=positive, help="answer so many prompts, a sample drawn by --seed")
    p.add_argument("--seed", type=whole_number(0, MOST_SEED), default=0)
    p.add_argument("--batch-size", type=positive, default=32)
    p.add_argument("--dtype", help="of the local target: bfloat16, float32, ...")
    p.add_argument("--device", help="of the local target")
    p.add_argument(
        "--drafter", default="none",
        help="of the local target: what fsd-infer takes, e.g. shipped or shipped+lookup; the answers' law is the "
        "target's own with any (%(default)s)",
    )  # fmt: skip
    p.add_argument("--endpoint", metavar="URL", nargs="+", help="let OpenAI-compatible servers generate instead")
    p.add_argument("--endpoint-model", metavar="NAME", help="name under which the server knows the target")
    p.add_argument("--concurrency", type=positive, default=64, help="requests in flight at the endpoint")
    p.add_argument("--no-request-seeds", action="store_true", help="for servers that cannot seed single requests")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def cache_features() -> argparse.ArgumentParser:
    """Options of `fsd-train cache-features`."""
    parser = Parser("fsd-train cache-features", description="Store the target's features of answers.")
    parser.add_argument(
        "--config", type=Path, metavar="RECIPE",
        help="a recipe to take target, data, output, layers and max-length from, where they are not given here",
    )  # fmt: skip
    parser.add_argument("--target", help="built-in name, directory or hub id")
    parser.add_argument("--target-kwargs", **TARGET_KWARGS)
    parser.add_argument("--data", nargs="+", action="extend", help="answers: files or directories")
    parser.add_argument("--output", help="directory of the cache")
    parser.add_argument(
        "--layers", type=whole_number(0, MOST_COUNT), nargs="+", metavar="N",
        help="also store the outputs of these decoder layers, for heads with fused_layers",
    )  # fmt: skip
    parser.add_argument("--max-length", type=positive, help=f"tokens kept per sequence, as in training ({MAX_LENGTH})")
    parser.add_argument("--max-tokens", type=positive, help="tokens the cache may hold")
    parser.add_argument(
        "--min-answer-share",
        type=real_number,
        default=0.0,
        help="leave out rows with fewer answer tokens, which cost much",
    )
    parser.add_argument("--batch-tokens", type=positive, default=2048, help="padded tokens per forward")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the target's forward")
    return parser


def export() -> argparse.ArgumentParser:
    """Options of `fsd-train export`."""
    parser = Parser(
        prog="fsd-train export", description="Write a head for fsd-infer or, with --to, for another engine."
    )
    parser.add_argument(
        "source", help=".ckpt file of `fsd-train fit`, or a head, ours or a public one: a directory or hub id"
    )
    parser.add_argument("output", help="directory of the head")
    parser.add_argument(
        "--to",
        choices=FORMATS,
        help="write it as this program reads it: eagle is SafeAILab's code; default our own form",
    )
    parser.add_argument(
        "--target", help="built-in name, directory or hub id, where the source does not name it or it moved"
    )
    parser.add_argument(
        "--draft-vocab-size",
        type=positive,
        metavar="N",
        help="draft over the N most frequent ids of --data instead of those it was trained with (where the LM head is "
        "the target's this costs no training: more ids cover more of the text and make drafting slower)",
    )
    parser.add_argument("--data", nargs="+", metavar="FILE", help="answers to count ids in, with --draft-vocab-size")
    return parser


def publish() -> argparse.ArgumentParser:
    """Options of `fsd-train publish`."""
    parser = Parser("fsd-train publish", description="Check a head, show its model card, and upload both to the Hub.")
    parser.add_argument("directory", help="of the head, in any form that other users are to load")
    parser.add_argument("repository", type=_hub_id, metavar="OWNER/NAME", help="made if it is not there")
    parser.add_argument("--target", help="built-in name, directory or hub id, where the head does not name it")
    parser.add_argument("--base-model", type=_hub_id, metavar="OWNER/NAME", help="the target's name on the Hub")
    parser.add_argument("--base-revision", metavar="COMMIT", help="of it; default the one in the cache")
    parser.add_argument("--license", help="of the head, as the Hub spells it: apache-2.0, llama3.1 ...")
    parser.add_argument("--dataset", nargs="+", type=_hub_id, metavar="OWNER/NAME", help="that it was trained on")
    parser.add_argument(
        "--prompts", default="data/quickstart_prompts.jsonl", metavar="FILE",
        help="that the accepted length is measured on (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--limit", type=positive, default=8, help="how many of them (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="of each answer (%(default)s)")
    parser.add_argument("--tree", default="5,6,16", help="depth, width and nodes of the draft tree (%(default)s)")
    parser.add_argument("--revision", metavar="BRANCH", help="to upload to; default main")
    parser.add_argument("--private", action="store_true", help="make the repository a private one")
    parser.add_argument("--yes", action="store_true", help="upload without asking")
    return parser


def _hub_id(text: str) -> str:
    if HUB_ID.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80}: needs the form owner/name")
    return text


def doctor() -> argparse.ArgumentParser:
    """Options of `fsd-train doctor`."""
    parser = Parser("fsd-train doctor", description="Say why a head accepts less than it should.")
    parser.add_argument("--target", required=True, help="built-in name, directory or hub id")
    parser.add_argument("--target-kwargs", **TARGET_KWARGS)
    parser.add_argument("--head", required=True, help="directory of the head, ours or another program's")
    parser.add_argument(
        "--trained-on",
        metavar="NAME",
        help="the target that the head was trained for, where that is another: says what the change costs (known of an "
        "adapter, and of a quantization_config in --target-kwargs)",
    )
    parser.add_argument("--data", required=True, help="rows of answers, as training takes them")
    parser.add_argument("--features", help="a cache of `fsd-train cache-features` to compare with")
    parser.add_argument("--rows", type=positive, default=16, help="how many rows are looked at (%(default)s)")
    parser.add_argument(
        "--max-length", type=positive, default=512, help="rows of more tokens are left out (%(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=48, help="of each answer that is decoded (%(default)s)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="that the head is to run in")
    parser.add_argument("--url", help="an OpenAI-compatible server that runs target and head, to compare with")
    parser.add_argument("--json", metavar="FILE", help="also write the findings there")
    return parser


def estimate() -> argparse.ArgumentParser:
    """Options of `fsd-train estimate`."""
    parser = Parser("fsd-train estimate", description="Memory, disk and time of a recipe, from a short measurement.")
    parser.add_argument("--config", required=True, metavar="RECIPE", help="the recipe of a head")
    parser.add_argument(
        "--on-paper", action="store_true", help="by the target's config alone: memory, and the least time on GPUs"
    )
    parser.add_argument(
        "--target", metavar="NAME", help="on paper, for this target instead: llama-3.1-8b, llama-3.1-70b, a directory"
    )
    parser.add_argument("--prompts", metavar="FILE", help="prompts that are still to be answered")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="of each answer (%(default)s)")
    return parser


def new_recipe() -> argparse.ArgumentParser:
    """Options of `fsd-train new-recipe`."""
    parser = Parser(prog="fsd-train new-recipe", description="Write a recipe for a target.")
    parser.add_argument("--target", required=True, help="built-in name, directory or hub id; its weights are not read")
    parser.add_argument("--data", nargs="+", default=[], metavar="FILE", help="answers that it is to be trained on")
    parser.add_argument("--output", metavar="FILE", help="of the recipe; default standard output")
    return parser


def quickstart() -> argparse.ArgumentParser:
    """Options of `fsd-train quickstart`."""
    parser = Parser(
        prog="fsd-train quickstart",
        description="Fetch the built-in model, train a head for a minute, decode with the shipped head and compare.",
    )
    parser.add_argument(
        "--train-seconds",
        type=whole_number(0, MOST_COUNT),
        default=60,
        metavar="S",
        help="0: do not train (%(default)s)",
    )
    parser.add_argument("--prompts", type=positive, default=12, metavar="N", help="how many to decode (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="(%(default)s)")
    return parser


PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "regenerate": regenerate,
    "cache-features": cache_features,
    "new-recipe": new_recipe,
    "quickstart": quickstart,
    "export": export,
    "publish": publish,
    "doctor": doctor,
    "estimate": estimate,
}
