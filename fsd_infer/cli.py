"""`fsd-infer`: generate, compare methods, list what there is, fetch the built-in model, quickstart."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsd_infer.errors import DataError, FsdError


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """The console command. Bad input is told in one line on stderr and exits with status 2."""
    args = build_parser().parse_args(argv)
    if not args.debug:
        _quiet()
    try:
        return int(args.function(args) or 0)
    except FsdError as error:
        if args.debug:
            raise
        print(f"fsd-infer: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fsd-infer: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    from fsd_infer import __version__

    parser = argparse.ArgumentParser(
        prog="fsd-infer", description="Speculative decoding with a dial: exact, or fuzzy within a stated divergence."
    )
    parser.add_argument("--version", action="version", version=f"fsd-infer {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks and the libraries' own messages")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, add, help in (
        ("generate", _generate_options, "answer one prompt"),
        ("bench", _bench_options, "measure methods side by side on a file of prompts"),
        ("warmup", _warmup_options, "choose the fastest draft tree ahead of the first `--tree auto`"),
        ("quickstart", _quickstart_options, "fetch the built-in model, train for a minute, decode and compare"),
        ("rules", _rules_options, "list rules, divergences, drafters and built-in targets"),
        ("fetch", _fetch_options, "fetch a built-in target ahead of its first use"),
    ):
        add(commands.add_parser(name, help=help, description=help, parents=[common]))
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument("--target", default="smollm2-135m", help="built-in name, directory or hub id (%(default)s)")
    models.add_argument(
        "--drafter",
        help='head directory, small causal LM, "shipped", "lookup" or "none"; X+lookup grafts n-gram lookup onto X '
        "(default: the head shipped with the target)",
    )
    models.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (%(default)s)")
    models.add_argument("--device", help="e.g. cpu or cuda:1 (default: CUDA where there is one)")
    models.add_argument(
        "--tree",
        metavar="DEPTH,WIDTH,NODES",
        help="shape of the draft tree, or auto: the fastest here by a measurement of some seconds, made once "
        "(default: by device)",
    )
    models.add_argument("--threads", type=positive, help="CPU threads")


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=generate)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-file", metavar="FILE", help='read the prompt from a file, "-": from standard input')
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    _model_options(parser)
    rule = parser.add_argument_group("acceptance rule")
    rule.add_argument("--rule", default="exact", help='a name, or with parameters "fuzzy:js:0.3" (%(default)s)')
    rule.add_argument("--divergence", help="of a fuzzy rule (js)")
    rule.add_argument(
        "--threshold", type=float, help="of a fuzzy rule: gates open where the divergence is at most this"
    )
    rule.add_argument("--budget", type=float, metavar="NATS", help="what open gates may spend on the answer")
    rule.add_argument("--gate", choices=("raw", "processed"), help="which distributions a fuzzy rule compares (raw)")
    request = parser.add_argument_group("request")
    request.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="(%(default)s)")
    request.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    request.add_argument("--top-p", type=float, metavar="P")
    request.add_argument("--top-k", type=positive, metavar="K")
    request.add_argument("--seed", type=int)
    output = parser.add_argument_group("output").add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print words as they come")
    output.add_argument("--json", action="store_true", help="print one record: text, tokens, their sources, statistics")
    output.add_argument("--show-accepted", action="store_true", help="mark every token by where it came from")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="of --show-accepted")


def generate(args: argparse.Namespace) -> int:
    """`fsd-infer generate`."""
    from fsd_infer import report
    from fsd_infer.decoder import FuzzyDecoder
    from fsd_infer.models import parse_dtype
    from fsd_infer.rules import Source

    rule = chosen_rule(args)
    options = request_options(args)
    tree = parse_tree(args.tree)
    dtype = parse_dtype(args.dtype)
    prompt = read_prompt(args)
    _set_threads(args.threads)
    decoder = FuzzyDecoder.from_pretrained(args.target, args.drafter, dtype=dtype, device=args.device, tree=tree)
    streamer = None
    if args.stream:
        from transformers import TextStreamer

        if decoder.tokenizer is not None:
            streamer = TextStreamer(decoder.tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = decoder.generate(prompt, rule, seed=args.seed, streamer=streamer, chat=False if args.raw else None, **options)
    record, tokens = out.records[0], out.sequences[0]
    if args.json:
        print_json(
            {
                "text": out.texts[0],
                "tokens": tokens,
                "sources": [Source(source).name.lower() for source in record.sources],
                "gate_open": record.gates,
                "stats": out.stats.to_dict(),
            }
        )
    elif args.show_accepted:
        colour = report.use_colour(args.color, sys.stdout)
        print(report.show_accepted(report.token_pieces(decoder.tokenizer, tokens), record.sources, colour))
        print(report.legend(colour))
    elif streamer is None:
        print(out.texts[0])
    print(report.stats_line(out.stats), file=sys.stderr)
    return 0


def chosen_rule(args: argparse.Namespace) -> Any:
    """The rule that --rule and the options beside it describe."""
    from fsd_infer.rules import parse_rule

    given = {"divergence": args.divergence, "threshold": args.threshold, "budget": args.budget, "gate_on": args.gate}
    given = {name: value for name, value in given.items() if value is not None}
    rule: Any = parse_rule(args.rule)
    fields = {field.name for field in dataclasses.fields(rule)}
    for name in given:
        option = "--gate" if name == "gate_on" else f"--{name}"
        if name not in fields:
            raise FsdError(f"rule {rule.name!r} has no {name}: leave {option} out, or choose a fuzzy rule.")
        if ":" in args.rule and name != "budget":
            raise FsdError(f"give the rule's parameters either within --rule {args.rule} or as {option}, not both.")
    return dataclasses.replace(rule, **given)


def request_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``FuzzyDecoder.generate``."""
    if not args.temperature >= 0:
        raise FsdError(f"--temperature must not be negative, got {args.temperature}.")
    if args.temperature == 0:
        for option in ("top_p", "top_k"):
            if getattr(args, option) is not None:
                raise FsdError(f"--{option.replace('_', '-')} has no effect at temperature 0: add --temperature.")
        return {"max_new_tokens": args.max_new_tokens, "temperature": 0, "top_p": None, "top_k": None}
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": True, "temperature": args.temperature}
    if args.top_p is not None:
        if not 0 < args.top_p <= 1:
            raise FsdError(f"--top-p must be above 0 and at most 1, got {args.top_p}.")
        options["top_p"] = args.top_p
    if args.top_k is not None:
        options["top_k"] = args.top_k
    return options


def parse_tree(text: str | None) -> Any:
    """ "5,6,16" -> TreeShape(depth=5, width=6, nodes=16); "auto" and None stay as they are."""
    from fsd_infer.calibrate import AUTO
    from fsd_infer.drafters import TreeShape

    if text is None or text == AUTO:
        return text
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise FsdError(f"--tree takes depth,width,nodes, e.g. 5,6,16, or auto; got {text!r}.")
    return TreeShape(*map(int, parts))


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text. Raises DataError for a file that cannot be read."""
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file == "-":
        return sys.stdin.read()
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{args.prompt_file}: cannot be read as UTF-8 text ({error}).") from error


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=bench)
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL with `turns`, `prompt` or `messages`")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    parser.add_argument("--every", type=positive, default=1, metavar="K", help="only each K-th prompt of the file")
    parser.add_argument(
        "--methods",
        default="hf-generate,plain,exact,fuzzy:js:0.3",
        help="comma-separated: plain, any rule, a rule with a drafter of its own (exact@none, exact@DIR), hf-generate, "
        "hf-lookup[:TOKENS], hf-assisted:DIR, server:URL[#MODEL]; NAME=METHOD names one (%(default)s)",
    )
    parser.add_argument(
        "--baseline", metavar="NAMES", help="methods to compare with (default: hf-generate and plain, where measured)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--repeat", type=positive, default=1, metavar="R", help="runs per prompt and method")
    parser.add_argument("--batch-size", type=positive, default=1, metavar="B", help="prompts decoded together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-warmup", action="store_true", help="time the very first runs too")
    parser.add_argument(
        "--log-likelihood", action="store_true", help="the target's mean log-likelihood of the answers, untimed"
    )
    parser.add_argument("--json", metavar="FILE", help="write the full record; keeps FILE.partial.jsonl until done")
    parser.add_argument("--resume", action="store_true", help="continue the unfinished run of --json FILE")
    _model_options(parser)


def bench(args: argparse.Namespace) -> int:
    """`fsd-infer bench`."""
    import fsd_infer.bench
    from fsd_infer.report import bench_table

    if args.resume and args.json is None:
        raise FsdError("--resume continues the unfinished run of a record: name it with --json FILE.")
    record = fsd_infer.bench.run(
        args.prompts,
        _words(args.methods),
        json_path=args.json,
        resume=args.resume,
        progress=True,
        target=args.target,
        drafter=args.drafter,
        dtype=args.dtype,
        device=args.device,
        tree=parse_tree(args.tree),
        limit=args.limit,
        every=args.every,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        repeat=args.repeat,
        seed=args.seed,
        batch_size=args.batch_size,
        threads=args.threads,
        warmup=not args.no_warmup,
        log_likelihood=args.log_likelihood,
        baselines=_words(args.baseline or ""),
    )
    print(bench_table(record))
    if args.json:
        print(f"record: {args.json}", file=sys.stderr)
    return 0


def _words(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _warmup_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=warmup)
    _model_options(parser)
    parser.add_argument("--refresh", action="store_true", help="measure again what was measured before")


def warmup(args: argparse.Namespace) -> int:
    """`fsd-infer warmup`."""
    import time

    from fsd_infer.calibrate import AUTO
    from fsd_infer.decoder import FuzzyDecoder
    from fsd_infer.models import parse_dtype

    if parse_tree(args.tree) not in (None, AUTO):
        raise FsdError(f"warmup chooses the tree: leave --tree {args.tree} out.")
    dtype = parse_dtype(args.dtype)
    _set_threads(args.threads)
    decoder = FuzzyDecoder.from_pretrained(args.target, args.drafter, dtype=dtype, device=args.device)
    start = time.perf_counter()
    shape = decoder.tune(refresh=args.refresh)
    print(f"--tree {AUTO} is {shape.depth},{shape.width},{shape.nodes}, stopping below {shape.stop_below:.2f}")
    print(f"{time.perf_counter() - start:.1f} s", file=sys.stderr)
    return 0


def _quickstart_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=quickstart)
    parser.add_argument("--train-seconds", type=int, default=60, metavar="S", help="0: do not train (%(default)s)")
    parser.add_argument("--prompts", type=positive, default=12, metavar="N", help="how many to decode (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="(%(default)s)")


def quickstart(args: argparse.Namespace) -> int:
    """`fsd-infer quickstart`."""
    from fsd_infer.quickstart import run_quickstart

    run_quickstart(args.train_seconds, args.prompts, args.max_new_tokens)
    return 0


def _rules_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=rules)


def rules(args: argparse.Namespace) -> int:
    """`fsd-infer rules`."""
    from fsd_infer.divergence import DIVERGENCES
    from fsd_infer.drafters import DRAFTERS
    from fsd_infer.models import BUILTIN_TARGETS, shipped_drafter
    from fsd_infer.rules import RULES

    rows = []
    for name in RULES:
        made: Any = RULES.get(name)
        fields = [
            f"{f.name}={'' if f.default is dataclasses.MISSING else f.default}".rstrip("=")
            for f in dataclasses.fields(made)
        ]
        rows.append((f"{name}({', '.join(fields)})" if fields else name, first_paragraph(made)))
    print(_listing("rules (as text, e.g. fuzzy:js:0.3)", rows))
    measures = []
    for name in DIVERGENCES:
        measure = DIVERGENCES.get(name)
        if measure.k is None:
            low, high = measure.bounds
            measures.append((name, f"{measure.formula}; {measure.direction}; {low:g} to {high:.3g}"))
    forms = [name for name in DIVERGENCES if name.startswith("top_k_")]
    measures.append((", ".join(forms), "the same over the target's most likely tokens (top_k_js:20 sets how many)"))
    print("\n" + _listing("divergences (p the target, q the drafter)", measures))
    drafters = [(name, first_paragraph(DRAFTERS.get(name))) for name in DRAFTERS]
    print("\n" + _listing("drafters", [*drafters, ("none", "Plain decoding.")]))
    targets = []
    for name in BUILTIN_TARGETS:
        entry = BUILTIN_TARGETS.get(name)
        head = "with a trained head" if shipped_drafter(name) else "no head in this installation"
        targets.append((name, f"{entry.origin} ({entry.license}); {head}"))
    print("\n" + _listing("built-in targets", targets))
    return 0


def first_paragraph(thing: Any) -> str:
    """The first paragraph of its docstring as plain text."""
    paragraph = " ".join((thing.__doc__ or "").strip().split("\n\n")[0].split())
    return re.sub(r":\w+:`(\w+)`|``?([^`]+)``?", r"\1\2", paragraph)


def _listing(title: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [title]
    for name, text in rows:
        lines += textwrap.wrap(f"{name}: {text}", 100, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(lines)


def _fetch_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=fetch)
    parser.add_argument("name", nargs="?", default="smollm2-135m", help="built-in target (%(default)s)")


def fetch(args: argparse.Namespace) -> int:
    """`fsd-infer fetch`."""
    from fsd_infer.models import builtin_dir

    print(builtin_dir(args.name))
    return 0


def print_json(record: Any) -> None:
    """One JSON record on standard output."""
    from fsd_infer.bench.record import jsonable

    print(json.dumps(jsonable(record), ensure_ascii=False))


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _quiet() -> None:
    """Keep transformers' notes and loading bars out of the output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
