"""Parse and make the methods of a benchmark.

A method is written as ``[label=]kind[:parameters]``. Tables and records call it by the label:

=========================  ============================================================================================
``plain``                  this package's engine without a drafter
``exact``, ``fuzzy:js:0.3``  any rule, with the run's drafter
``exact@DRAFTER``          any rule with another drafter, as ``load_drafter`` takes it: ``exact@none``,
                           ``fuzzy:js:0.3@heads/mine``
``exact@shipped@8x2x16``   with another tree, too: depth, width, nodes and perhaps ``x0.5``, below which drafting stops
``hf-generate``            transformers' ``generate``
``hf-lookup:8``            the same with prompt lookup of this many tokens (default: 8)
``hf-assisted:DIR``        the same with an assistant model, of any vocabulary; ``hf-assisted:DIR#4`` with four drafts a
                           round, instead of as many as transformers chooses
``hf-beams:4``             the same with this many beams
``beams:4``                beams of this package, with the run's drafter; ``beams:4@none`` without
``beams:4:depth=6``        with ``BeamOptions``, separated by colons
``server:URL#MODEL``       a server with the OpenAI completions API; without ``#MODEL`` the first model it names
``command:PROGRAM``        a program with the protocol of :mod:`fsd_bench.process`
=========================  ============================================================================================

A new kind of method is a :class:`MethodKind` in :data:`METHODS`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsd_bench.base import MeasuredAnswer, Method, TimedRun
from fsd_bench.engine import EngineMethod
from fsd_bench.hf import GenerateMethod
from fsd_bench.models import Models
from fsd_bench.process import ProcessMethod
from fsd_bench.server import Server, ServerMethod
from fsd_core.errors import FsdError, UnknownNameError
from fsd_core.registry import Registry, did_you_mean, read_int
from fsd_infer.drafters import TreeShape
from fsd_infer.engine.beams import BeamOptions
from fsd_infer.rules import RULES, parse_rule
from fsd_infer.targets.loading import load_target

__all__ = [
    "METHODS",
    "MeasuredAnswer",
    "MethodKind",
    "Method",
    "Models",
    "MethodSpec",
    "TimedRun",
    "make_methods",
    "parse_methods",
]

LOOKUP_TOKENS, MAX_BEAMS, MAX_DRAFTS = 8, 64, 64
_LABEL = re.compile(r"([\w.+ -]+)=(.+)", re.DOTALL)
_SHAPED = re.compile(r"(.+)@(\d+x\d+x\d+(?:x[\d.]+)?)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class MethodSpec:
    """One requested method.

    Attributes:
        name: its label, else its text.
        text: the text without the label.
        kind: a name in METHODS or RULES.
        argument: the text after the first colon.
        drafter: the text after "@"; None: the run's drafter.
        tree: the tree after a second "@"; None: the run's tree.
    """

    name: str
    text: str
    kind: str
    argument: str
    drafter: str | None = None
    tree: TreeShape | None = None


def _no_parameters(spec: MethodSpec) -> None:
    if spec.argument:
        raise FsdError(f"method {spec.text!r}: {spec.kind} takes no parameters.")


@dataclass(frozen=True)
class MethodKind:
    """A kind of method.

    Attributes:
        make: makes the method, and loads what it needs.
        check: raises FsdError for parameters that can be refused before anything is loaded.
        takes_drafter: whether "@" names a drafter, and perhaps a tree, as with rules.
        own_process: whether its methods always run in their own processes.
    """

    make: Callable[[MethodSpec, Models], Method]
    check: Callable[[MethodSpec], Any] = _no_parameters
    takes_drafter: bool = False
    own_process: bool = False


METHODS: Registry[MethodKind] = Registry("method")


def _plain(spec: MethodSpec, models: Models) -> Method:
    return EngineMethod(spec.name, models.decoder, parse_rule("exact"), models.load("none"))


def _generate(name: str, least: int, most: int, default: int | None = None) -> MethodKind:
    """transformers' ``generate`` with a whole number as argument ``name``."""

    def check(spec: MethodSpec) -> None:
        if spec.argument or default is None:
            _check_number(spec, spec.argument, least, most, default or least)

    def make(spec: MethodSpec, models: Models) -> Method:
        facts = {name: int(spec.argument or default or 0)}
        return GenerateMethod(spec.name, models.reference[0], facts, facts)

    return MethodKind(make, check)


def _check_number(spec: MethodSpec, text: str, least: int, most: int, example: int) -> None:
    """Raise FsdError unless ``text``, a parameter, is a whole number from ``least`` to ``most``."""
    if not least <= (read_int(text) or 0) <= most:
        raise FsdError(f"method {spec.text!r}: give a number from {least} to {most}, e.g. {spec.kind}:{example}.")


def _beams(spec: MethodSpec) -> tuple[int, BeamOptions]:
    beams, _, options = spec.argument.partition(":")
    _check_number(spec, beams, 2, MAX_BEAMS, 4)
    return int(beams), BeamOptions.parse(options) if options else BeamOptions()


def _beam_search(spec: MethodSpec, models: Models) -> Method:
    drafter = models.load(spec.drafter, spec.tree)
    return EngineMethod(spec.name, models.decoder, parse_rule("exact"), drafter, *_beams(spec))


def _assistant(spec: MethodSpec) -> tuple[str, dict[str, Any]]:
    """Return the directory, and the fields of the assistant's generation config that fix the number of drafts."""
    directory, _, drafts = spec.argument.partition("#")
    if not directory:
        raise FsdError(f"method {spec.text!r}: name the assistant model, e.g. hf-assisted:DIRECTORY.")
    if directory == spec.argument:
        return directory, {}
    if not 1 <= (read_int(drafts) or 0) <= MAX_DRAFTS:
        raise FsdError(f"method {spec.text!r}: give 1 to {MAX_DRAFTS} drafts, e.g. hf-assisted:DIRECTORY#4.")
    draft_options = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    return directory, {"num_assistant_tokens": int(drafts), **draft_options}


def _assisted(spec: MethodSpec, models: Models) -> Method:
    model, tokenizer = models.reference
    directory, draft_options = _assistant(spec)
    assistant, own_tokenizer = load_target(directory, dtype=models.options.dtype, device=models.options.device)
    assistant.generation_config.update(**draft_options)
    speculation: dict[str, Any] = {"assistant_model": assistant}
    # transformers translates between vocabularies if it has both tokenizers
    if tokenizer is not None and own_tokenizer is not None and tokenizer.get_vocab() != own_tokenizer.get_vocab():
        speculation.update(tokenizer=tokenizer, assistant_tokenizer=own_tokenizer)
    return GenerateMethod(spec.name, model, speculation, {"assistant_model": directory, **draft_options})


def _server(spec: MethodSpec) -> tuple[Server, str | None]:
    url, _, model = spec.argument.partition("#")
    return Server(url), model or None


def _served(spec: MethodSpec, models: Models) -> Method:
    method = ServerMethod(spec.name, *_server(spec))
    target = models.options.target
    if Path(method.model).name.lower() != Path(target).name.lower():
        print(
            f"notice: server {method.server.url} serves {method.model!r} and gets token ids of {target!r}: its figures "
            "count only if both have one tokenizer.",
            file=sys.stderr,
        )
    return method


def _words(spec: MethodSpec) -> list[str]:
    try:
        words = shlex.split(spec.argument)
    except ValueError:  # an unclosed quotation
        words = []
    if not words or "\0" in spec.argument:
        raise FsdError(f"method {spec.text!r}: name the program, e.g. command:python my_engine.py MODEL.")
    return words


for _name, _kind in {
    "plain": MethodKind(_plain),
    "hf-generate": MethodKind(lambda spec, models: GenerateMethod(spec.name, models.reference[0])),
    "hf-lookup": _generate("prompt_lookup_num_tokens", 1, 1024, LOOKUP_TOKENS),
    "hf-beams": _generate("num_beams", 2, MAX_BEAMS),
    "beams": MethodKind(_beam_search, _beams, takes_drafter=True),
    "hf-assisted": MethodKind(_assisted, _assistant),
    "server": MethodKind(_served, _server),
    "command": MethodKind(lambda spec, models: ProcessMethod(spec.name, _words(spec)), _words, own_process=True),
}.items():
    METHODS.register(_name)(_kind)


def parse_methods(texts: Sequence[str]) -> list[MethodSpec]:
    """Parse methods. Loads nothing.

    Raises:
        UnknownNameError, FsdError: a method is unknown, malformed, or has another's name.
    """
    if not texts:
        raise FsdError("no methods: give at least one, e.g. --methods plain,exact.")
    specs = [_parse(text) for text in texts]
    names = [spec.name for spec in specs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise FsdError(
            f"method {repeated[0]!r} is named twice: name it once, and use --repeat to measure it more often."
        )
    return specs


def _parse(text: str) -> MethodSpec:
    kind = re.split("[:@]", text, maxsplit=1)[0]
    label = _LABEL.fullmatch(text) if "=" in kind else None
    name, rest = (label[1], label[2]) if label else (text, text)
    kind = re.split("[:@]", rest, maxsplit=1)[0]
    if kind not in METHODS and kind not in RULES:
        known = [*METHODS.names(), *RULES.names()]
        raise UnknownNameError(f"unknown method {rest!r}.{did_you_mean(kind, known)} Known: {', '.join(known)}.")
    if not _takes_drafter(kind):
        if rest[len(kind) : len(kind) + 1] == "@":
            raise FsdError(f"method {rest!r}: {kind} takes no drafter; a rule does, e.g. exact@none.")
        spec = MethodSpec(name, rest, kind, rest[len(kind) + 1 :])
    else:
        method, at, drafter = rest.partition("@")
        if at and not drafter:
            raise FsdError(f"method {rest!r}: name the drafter after '@', e.g. exact@none.")
        tree = None
        if shaped := _SHAPED.fullmatch(drafter):
            drafter, tree = shaped[1], TreeShape.parse(shaped[2])
        spec = MethodSpec(name, rest, kind, method.partition(":")[2], drafter if at else None, tree)
    if kind in RULES:
        parse_rule(rest.partition("@")[0])
    else:
        METHODS.get(kind).check(spec)
    return spec


def _takes_drafter(kind: str) -> bool:
    return kind in RULES or METHODS.get(kind).takes_drafter


def make_methods(texts: Sequence[str], models: Models) -> list[Method]:
    """Make the methods. Servers are contacted first, then models are loaded.

    Raises:
        UnknownNameError, FsdError: as :func:`parse_methods`, or whatever loading raises.
        ServerError: a server cannot be reached.
    """
    specs = parse_methods(texts)
    drafters = [spec.drafter or models.options.drafter for spec in specs if _takes_drafter(spec.kind)]
    models.first_drafter = drafters[0] if drafters else "none"
    methods: dict[str, Method] = {}
    for spec in sorted(specs, key=lambda spec: spec.kind != "server"):
        if spec.kind in METHODS:
            methods[spec.name] = METHODS.get(spec.kind).make(spec, models)
        else:
            rule = parse_rule(spec.text.partition("@")[0])
            methods[spec.name] = EngineMethod(spec.name, models.decoder, rule, models.load(spec.drafter, spec.tree))
    for method in methods.values():
        if isinstance(method, EngineMethod):
            method.seeded = getattr(models.options, "seed", None) is not None
    return [methods[spec.name] for spec in specs]
