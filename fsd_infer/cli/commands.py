"""The commands of `fsd-infer`: generate, warmup, serve, rules. Each takes parsed options and returns a status.

Functions import what they use, so a command loads only what it needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fsd_core.console import needed
from fsd_core.errors import DataError, FsdError
from fsd_core.files import jsonable, writable, write_text
from fsd_core.options import picked, set_threads

if TYPE_CHECKING:
    from fsd_infer.decoder import FuzzyConfig

SHARED = (  # the parameters of LossyRule, in their order
    "nats per request, n-grams tested exactly, a phase of the text, exact tokens at the answer's beginning and at each "
    "sentence's, drawn nodes"
)
OWN = {  # fields of --options' objects that have an option of their own
    **{name: f"--{name.replace('_', '-')}" for name in (
        "rule", "quality", "seed", "max_new_tokens", "temperature", "top_p", "top_k", "num_beams",
    )},
    "do_sample": "--temperature", "guide": "--schema or --regex", "beams": "--beam-options",
    "apply_chat_template": "--raw", "max_cache_bytes": "--max-cache-gib",
}  # fmt: skip
LONGEST_PROMPT = 2**27  # characters: a device or a pipe may never end


def generate(args: argparse.Namespace) -> int:
    """Run `fsd-infer generate`."""
    from fsd_core.text.conversations import check_text
    from fsd_core.text.encoding import need_tokenizer
    from fsd_infer.decoder import FuzzyDecoder
    from fsd_infer.engine.callbacks import Streaming

    config = fuzzy_config(args)
    models = _decoder_options(args)
    page = None if args.html is None else writable(args.html, "--html", args.overwrite)
    prompt = check_text(read_text(args.prompt_file) if args.prompt is None else args.prompt, "the prompt")
    shown = {"prompt": prompt, "images": args.image}
    set_threads(args.threads)
    decoder = FuzzyDecoder.from_pretrained(**models)
    tokenizer = need_tokenizer(decoder.tokenizer, decoder.target.name)
    streamer = trace = None
    if args.stream:
        from transformers import TextStreamer

        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if page is not None:
        from fsd_infer.serving.page import PageTrace, answers_page

        ids = decoder.encode(shown, config.apply_chat_template)
        trace = PageTrace(tokenizer, ids, decoder.drafter.proposers)
    live = _live_tokens(args, tokenizer)
    watching = [] if trace is None else [Streaming(on_round=lambda row, round: trace.add(round))]
    callbacks = [*watching, *([] if live is None else [live])]
    out = decoder.generate(shown, config, streamer=streamer, callbacks=callbacks)
    if live is not None:
        live.end()
    _show(args, decoder, out, streamed=streamer is not None or live is not None)
    if page is not None and trace is not None:
        write_text(page, answers_page({args.rule: trace.rounds}))
    return 0


def _live_tokens(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Return the live output of --show-accepted; None without the option, or if the terminal has no cursor."""
    if not args.show_accepted or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return None
    from fsd_infer.cli.report import LiveTokens, use_colour

    width = shutil.get_terminal_size().columns
    return LiveTokens(tokenizer, sys.stdout, use_colour(args.color, sys.stdout), width)


def _show(args: argparse.Namespace, decoder: Any, out: Any, streamed: bool) -> None:
    """Print an answer as the options ask, and its statistics on standard error."""
    from fsd_core.text.pieces import token_pieces
    from fsd_infer.cli import report
    from fsd_infer.rules import TokenOrigin

    record, tokens = out.records[0], out.sequences[0]
    if args.json:
        sources = [TokenOrigin(source).name.lower() for source in record.sources]
        facts = {"text": out.texts[0], "tokens": tokens, "sources": sources, "gate_open": record.relaxed}
        print(json.dumps(jsonable({**facts, "stats": out.stats.to_dict()})))  # ASCII, which every terminal can write
    elif args.show_accepted:
        colour = report.use_colour(args.color, sys.stdout)
        if not streamed:
            print(report.show_accepted(token_pieces(decoder.tokenizer, tokens), record.sources, colour))
        print(report.legend(colour))
    elif not streamed:
        print(out.texts[0])
    if not args.quiet:
        print(report.stats_line(out.stats) if args.stats else report.summary_lines(out.stats), file=sys.stderr)


def _decoder_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the model options as keywords of ``FuzzyDecoder.from_pretrained``."""
    from fsd_infer.decoder.config import model_options
    from fsd_infer.targets.placing import parse_device, parse_dtype

    options = {**model_options(args), "dtype": parse_dtype(args.dtype), "device": parse_device(args.device)}
    options["config"] = options.pop("runtime")
    return options | (options.pop("target_kwargs") or {})


def fuzzy_config(args: argparse.Namespace) -> FuzzyConfig:
    """Return the decoding config that the options ask for.

    Raises FsdError for options that exclude each other or have impossible values.
    """
    from fsd_infer.decoder import FuzzyConfig

    if not 0 <= args.temperature < math.inf:
        raise FsdError(f"--temperature must be 0 or above and finite, got {args.temperature}.")
    if args.num_beams == 1 and args.beam_options is not None:
        raise FsdError("--beam-options needs beams: add --num-beams, or leave it out.")
    for option in ("stream", "show_accepted", "html") if args.num_beams > 1 else ():
        if getattr(args, option):
            raise FsdError(f"--{option.replace('_', '-')} shows one answer as it grows: leave --num-beams out.")
    if args.overwrite and args.html is None:
        raise FsdError("--overwrite replaces the page of --html: name it, or leave --overwrite out.")
    if args.color == "always" and not args.show_accepted:
        raise FsdError("--color always needs tokens by source: add --show-accepted, or leave it out.")
    for option in ("top_p", "top_k"):
        if args.temperature == 0 and getattr(args, option) is not None:
            raise FsdError(f"--{option.replace('_', '-')} has no effect at temperature 0: add --temperature.")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise FsdError(f"--top-p must be above 0 and at most 1, got {args.top_p}.")
    return FuzzyConfig(
        rule=args.rule, quality=args.quality, seed=args.seed, guide=_guide(args),
        apply_chat_template=False if args.raw else None,
        max_cache_bytes=args.max_cache_gib, beams=args.beam_options, num_beams=args.num_beams,
        **picked(args, "max_new_tokens temperature top_p top_k"), **_extra_fields(args.options or {}),
    )  # fmt: skip


def _extra_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of --options. Raises FsdError for one that is unknown or has an option of its own."""
    from fsd_infer.request.options import ARGUMENTS, split_options

    for name in options:
        if name in ARGUMENTS and options[name]:
            raise FsdError(f"--options: {name} takes functions, which JSON cannot hold: call generate in Python.")
        if name in OWN:
            raise FsdError(f"--options: {name} has an option of its own: use {OWN[name]}.")
    return split_options(options)[0]


def _guide(args: argparse.Namespace) -> Any:
    """Return the guide that the answer must follow, or None."""
    if args.schema is None and args.regex is None:
        return None
    from fsd_infer.request.guide import Guide

    return Guide.regex(args.regex) if args.schema is None else Guide.json_schema(read_text(args.schema))


def read_text(named: str) -> str:
    """Read a text file, or standard input for "-". Raises DataError if it is unreadable or too long."""
    try:
        # sys.stdin is None where it is closed, and has the terminal's encoding; some programs write a byte order mark
        if named == "-" and sys.stdin is not sys.__stdin__:
            text = sys.stdin.read(LONGEST_PROMPT + 1)
        else:
            with open(0 if named == "-" else named, encoding="utf-8-sig", closefd=named != "-") as file:
                text = file.read(LONGEST_PROMPT + 1)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        where = "standard input" if named == "-" else named
        raise DataError(f"{where}: cannot be read as UTF-8 text ({error}). Give a readable text file.") from error
    if len(text) > LONGEST_PROMPT:
        raise DataError(f"{named}: the text has more than {LONGEST_PROMPT:,} characters. Shorten it.")
    return text


def warmup(args: argparse.Namespace) -> int:
    """Run `fsd-infer warmup`: do what a first request would wait for, and print the seconds of each part."""
    from fsd_infer.backends.choose import choose
    from fsd_infer.decoder import FuzzyDecoder
    from fsd_infer.decoder.recording import record_rounds
    from fsd_infer.device.clock import Clock
    from fsd_infer.targets.builtin import builtin_dir

    if args.fetch_only:
        print(builtin_dir(args.target))
        return 0
    options = _decoder_options(args)
    set_threads(args.threads)
    clock = Clock()
    kernels = choose(options["device"]).describe()
    clock.lap("compile")
    decoder = FuzzyDecoder.from_pretrained(**options)
    clock.lap("load")
    if args.record:
        print(record_rounds(decoder, args.record))
        clock.lap("record")
    if decoder.target.device.type == "cpu":
        print("CPU kernels: " + ("none, decoding runs through torch" if kernels is None else "compiled"))
    print(", ".join(f"{part} {seconds:.1f} s" for part, seconds in clock.phases().items()), file=sys.stderr)
    return 0


def serve(args: argparse.Namespace) -> int:
    """Run `fsd-infer serve`."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        needed(package)
    from fsd_infer.serving.gate import checked_key
    from fsd_infer.serving.listen import check_free
    from fsd_infer.serving.listen import serve as serve_app

    key = checked_key(os.environ.get("FSD_API_KEY", ""))  # before torch and the models load
    check_free(args.host, args.port)
    from fsd_infer.decoder import FuzzyDecoder
    from fsd_infer.decoder.recording import record_rounds
    from fsd_infer.serving.app import Limits, make_app
    from fsd_infer.serving.jobs import MAX_WITH_IMAGES
    from fsd_infer.targets.image_inputs import placeholders_of

    set_threads(args.threads)
    options = {**_decoder_options(args), "prefix_cache_bytes": args.prefix_cache_gib}
    decoder = FuzzyDecoder.from_pretrained(**options, adapters=dict(args.adapter or ()))
    limits = Limits(args.max_batch, args.max_queue, args.max_new_tokens, seconds=args.seconds)
    if placeholders_of(decoder.target.model.config):
        limits = dataclasses.replace(limits, max_bytes=MAX_WITH_IMAGES, image_folders=tuple(args.image_dir or ()))
    elif args.image_dir:
        raise FsdError(f"--image-dir: {decoder.target.name} takes no images. Leave it out.")
    if args.record:
        print(record_rounds(decoder, args.record, rule=args.rule), file=sys.stderr)
    app = make_app(decoder, args.rule, limits, key, [args.host, *(args.allow_host or ())])
    serve_app(app, args.host, args.port)
    return 0


def rules(args: argparse.Namespace) -> int:
    """Run `fsd-infer rules`."""
    from fsd_infer.drafters.free import free_drafters
    from fsd_infer.drafters.loading import NAMES

    free = {name: first_paragraph(drafter) for name, drafter in free_drafters().items() if name not in NAMES}
    lists = (
        ("rules (as text, e.g. fuzzy:js:0.3)", _rules()),
        ("divergences (p the target, q the drafter)", _divergences()),
        ("drafters", [*NAMES.items(), *free.items()]),
        ("built-in targets", _builtin_targets()),
    )
    print("\n\n".join(_listing(title, rows) for title, rows in lists))
    return 0


def _rules() -> list[tuple[str, str]]:
    """Return each rule with its parameters, and what it does; first what all lossy rules take."""
    from fsd_infer.rules import RULES, LossyRule

    shared = [_field(field) for field in dataclasses.fields(LossyRule)]
    listed = [(f"each lossy rule takes {', '.join(shared)}", SHARED)]
    for name in RULES:
        rule: Any = RULES.get(name)
        fields = [text for field in dataclasses.fields(rule) if (text := _field(field)) not in shared]
        measured = f" Measured: {rule.measured}." if rule.measured else ""
        listed.append((f"{name}({', '.join(fields)})" if fields else name, first_paragraph(rule) + measured))
    return listed


def _divergences() -> list[tuple[str, str]]:
    """Return each divergence with its formula, direction and range."""
    from fsd_core.divergence import DIVERGENCES

    listed = []
    for name in DIVERGENCES:
        measure = DIVERGENCES.get(name)
        if measure.k is None:
            low, high = measure.bounds
            listed.append((name, f"{measure.formula}; {measure.direction}; {low:g} to {high:.3g}"))
    forms = ", ".join(name for name in DIVERGENCES if name.startswith("top_k_"))
    return [*listed, (forms, "the same over the target's k likeliest tokens (top_k_js:20 sets k = 20)")]


def _builtin_targets() -> list[tuple[str, str]]:
    """Return each built-in target with its origin, and whether a head comes with it."""
    from fsd_infer.targets.builtin import BUILTIN_TARGETS, shipped_drafter

    listed = []
    for name in BUILTIN_TARGETS:
        entry = BUILTIN_TARGETS.get(name)
        head = "with a trained head" if shipped_drafter(name) else "no head in this installation"
        listed.append((name, f"{entry.origin} ({entry.license}); {head}"))
    return listed


def _field(field: dataclasses.Field[Any]) -> str:
    """Return a parameter of a rule with its default, if it has one."""
    return field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default}"


def first_paragraph(thing: Any) -> str:
    """Return the first paragraph of an object's docstring as plain text."""
    paragraph = " ".join((thing.__doc__ or "").strip().split("\n\n")[0].split())
    return re.sub(r":\w+:`(\w+)`|``?([^`]+)``?", r"\1\2", paragraph)


def _listing(title: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [title]
    for name, text in rows:
        lines += textwrap.wrap(f"{name}: {text}", 100, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(lines)
