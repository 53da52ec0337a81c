"""The commands of `fsd-infer` that plan a drafter before it is trained: estimate and skip-layers."""

from __future__ import annotations

import argparse
from typing import Any

from fsd_infer.cli.commands import set_threads
from fsd_infer.errors import FsdError


def estimate(args: argparse.Namespace) -> int:
    """Run `fsd-infer estimate`."""
    from fsd_bench.estimate import Planned, head_on_paper, lm_on_paper, planned_head
    from fsd_bench.planned import planned_target, read_changes
    from fsd_bench.report import estimate_text
    from fsd_infer.drafters.shape import DEFAULT_SHAPES, TILTED_SHAPES, TreeShape
    from fsd_infer.heads.head import EagleHead
    from fsd_infer.heads.hub import find_head

    tree = None if args.tree is None else TreeShape.parse(args.tree)
    target = planned_target(args.target, read_changes(args.set))
    request: dict[str, Any] = dict(
        batch=args.batch_size, context=args.context, new=args.max_new_tokens, graphs=args.cuda_graphs
    )
    if args.drafter is not None and find_head(args.drafter) is None:
        drafter = lm_on_paper(target, args.drafter)
    elif args.drafter is not None:
        head = EagleHead.from_pretrained(args.drafter)
        drafter, width = head_on_paper(target, head), head.config.target_hidden_size
        if width != target.hidden_size:
            raise FsdError(
                f"{args.drafter} reads features of width {width}, but {args.target} has {target.hidden_size}: name the "
                "target that this head was trained for."
            )
    else:
        vocabulary = min(args.draft_vocab, target.vocab_size)
        drafter = head_on_paper(target, planned_head(target, layout=args.layout, draft_vocab_size=vocabulary))
    planned = Planned(target, drafter, **request)
    print(estimate_text(planned, tree or DEFAULT_SHAPES["cuda"], tree or TILTED_SHAPES["cuda"]))
    return 0


def skip_layers(args: argparse.Namespace) -> int:
    """Run `fsd-infer skip-layers`."""
    from fsd_bench.skip_layers import answers, search
    from fsd_infer.decoder import FuzzyDecoder
    from fsd_infer.drafters.itself import spelled
    from fsd_infer.targets.loading import parse_device, parse_dtype

    set_threads(args.threads)
    decoder = FuzzyDecoder.from_pretrained(args.target, dtype=parse_dtype(args.dtype), device=parse_device(args.device))
    texts = answers(decoder, args.prompts, args.limit, args.max_new_tokens)
    for step in search(decoder.target, texts, args.layers):
        print(f"{len(step.layers)} layers, agreement {step.agreement:.3f}: {spelled(step.layers)}", flush=True)
    return 0
