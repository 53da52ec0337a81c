"""From a training checkpoint to what ``fsd_infer`` loads: `fsd-train export`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fsd_infer.cli.run import Parser
from fsd_infer.errors import DataError
from fsd_train.data import read_answers
from fsd_train.distillation_module import DistillationModule
from fsd_train.eagle_module import EagleModule
from fsd_train.lm_module import LMModule
from fsd_train.safety import read_checkpoint
from fsd_train.vocabulary import choose_draft_ids


def load_module(checkpoint: str | Path) -> DistillationModule:
    """The module of a Lightning checkpoint. Raises CheckpointError if it is missing, truncated or foreign."""
    state = read_checkpoint(checkpoint)
    options = {k: v for k, v in state["hyper_parameters"].items() if not k.startswith("_")}
    if "drafter" in options:
        module: DistillationModule = LMModule(**options)
    else:
        module = EagleModule(**{**options, "initial_layers": None, "initial_head": None})  # the weights are at hand
    module.configure_model()
    module.load_state_dict(state["state_dict"])  # with EMA these are the averaged weights
    return module


def export_main(argv: Sequence[str] | None = None) -> int:
    """`fsd-train export`."""
    parser = Parser(prog="fsd-train export", description="Write a checkpoint's head for fsd-infer.")
    parser.add_argument("checkpoint", help=".ckpt file of `fsd-train fit`")
    parser.add_argument("output", help="directory of the head")
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        metavar="N",
        help="draft over the N most frequent ids of --data instead of those it was trained with (the head estimates "
        "features, so this costs no training: more ids cover more of the text and make drafting slower)",
    )
    parser.add_argument("--data", nargs="+", metavar="FILE", help="answers to count ids in, with --draft-vocab-size")
    args = parser.parse_args(argv)
    if (args.draft_vocab_size is None) != (args.data is None):
        parser.error("--draft-vocab-size and --data go together")
    module = load_module(args.checkpoint)
    if args.data:
        if not isinstance(module, EagleModule):
            raise DataError("a small LM drafts over its whole vocabulary: leave --draft-vocab-size out.")
        answers, _ = read_answers(args.data, module.target.tokenizer, vocab_size=module.target.vocab_size)
        counts = answers.answer_counts(module.target.vocab_size)
        module.head.set_draft_ids(choose_draft_ids(counts, args.draft_vocab_size, module.always_drafted()))
    print(module.export(args.output, {"checkpoint": Path(args.checkpoint).name}), file=sys.stderr)
    return 0
