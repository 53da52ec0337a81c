"""What can be measured: the engine under any rule, and transformers' own ``generate``.

A method is written as text: ``plain``, a rule (``exact``, ``fuzzy:js:0.3`` ...), ``hf-generate`` or ``hf-lookup``
(prompt lookup; ``hf-lookup:8`` sets how many tokens it proposes). A new kind of method is one class and one entry here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import Drafter, NoDrafter, TreeShape
from fsd_infer.errors import FsdError, UnknownNameError
from fsd_infer.models import load_target, parse_dtype
from fsd_infer.registry import Registry
from fsd_infer.rules import RULES, Rule, parse_rule
from fsd_infer.target import Target

LOOKUP_TOKENS = 8


@dataclass
class Answer:
    """One answer and what it took.

    Attributes:
        tokens: new tokens.
        target_forwards: target forwards behind the prefill.
        verified_tokens: tokens that those forwards emitted (all but the prefill's own).
        gate_open_fraction, gate_accepted_fraction: shares of the tokens, see ``RowStats``.
        divergence_spent: nats.
        finish_reason: "stop" or "length".
        log_likelihood: mean raw log-probability of the tokens under the target, nats, if measured.
    """

    tokens: list[int]
    target_forwards: int
    verified_tokens: int
    gate_open_fraction: float = 0.0
    gate_accepted_fraction: float = 0.0
    divergence_spent: float = 0.0
    finish_reason: str = "length"
    log_likelihood: float | None = None


@dataclass
class TimedRun:
    """One timed call on one group of prompts: wall seconds, the part until the first token, seconds by phase."""

    seconds: float
    prefill_seconds: float
    answers: list[Answer]
    phases: dict[str, float] = field(default_factory=dict)


@dataclass
class Models:
    """What methods run on, loaded when first needed.

    ``decoder`` packs the linear layers of its model in place, so transformers' methods get ``reference``: a second,
    untouched copy of the same weights.
    """

    target: str
    drafter: str | None = None
    dtype: str = "bf16"
    device: str | None = None
    tree: TreeShape | None = None
    needs_drafter: bool = True
    reference_loaded: bool = False
    decoder_loaded: bool = False

    @cached_property
    def decoder(self) -> FuzzyDecoder:
        self.decoder_loaded = True
        return FuzzyDecoder.from_pretrained(
            self.target,
            self.drafter if self.needs_drafter else "none",
            dtype=parse_dtype(self.dtype),
            device=self.device,
            tree=self.tree,
        )

    @cached_property
    def reference(self) -> tuple[Any, Any]:
        """(model, tokenizer) as transformers loads them."""
        self.reference_loaded = True
        return load_target(self.target, dtype=self.dtype, device=self.device)

    def scorer(self) -> Target:
        """A target for teacher-forced forwards, whichever model is loaded."""
        if self.decoder_loaded or not self.reference_loaded:
            return self.decoder.target
        return Target(*self.reference, name=self.target)

    @property
    def tokenizer(self) -> Any:
        found = self.decoder.tokenizer if self.decoder_loaded else self.reference[1]
        if found is None:
            raise FsdError(f"target {self.target} has no tokenizer: add its tokenizer files, prompts are text.")
        return found

    @property
    def max_positions(self) -> int | None:
        config = (self.decoder.target.model if self.decoder_loaded else self.reference[0]).config
        return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


class Method(ABC):
    """One way to decode. ``options`` of :meth:`answer` are keyword arguments of transformers' ``generate``."""

    name: str

    @abstractmethod
    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        """Decode one group of prompts, timed."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a record stores about the method."""


class EngineMethod(Method):
    """This package's engine. Its prefill includes the drafter's; time between calls counts as phase ``rest``."""

    def __init__(self, name: str, decoder: FuzzyDecoder, rule: Rule, drafter: Drafter) -> None:
        self.name, self.decoder, self.rule, self.drafter = name, decoder, rule, drafter

    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        start = time.perf_counter()
        made = self.decoder.generate(prompts, self.rule, drafter=self.drafter, seed=seed, **options)
        seconds = time.perf_counter() - start
        stats = made.stats
        answers = [
            Answer(
                tokens=tokens,
                target_forwards=row.target_forwards,
                verified_tokens=row.new_tokens - 1,
                gate_open_fraction=row.gate_open_fraction,
                gate_accepted_fraction=row.gate_accepted_fraction,
                divergence_spent=row.divergence_spent,
                finish_reason=row.finish_reason,
            )
            for tokens, row in zip(made.sequences, stats.rows, strict=True)
        ]
        phases = {**stats.phases, "rest": max(seconds - stats.seconds, 0.0)}
        return TimedRun(seconds, stats.prefill_seconds, answers, phases)

    def describe(self) -> dict[str, Any]:
        return {"by": "fsd_infer", "rule": self.rule.describe(), "drafter": self.drafter.describe()}


class _Rounds(BaseStreamer):
    """Notes when the first new tokens arrived and how many each forward emitted (sizes[0] is the prompt's)."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.first: float | None = None

    def put(self, value: Tensor) -> None:
        if self.sizes and self.first is None:
            self.first = time.perf_counter()
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


class GenerateMethod(Method):
    """transformers' ``generate`` on an untouched model. Prefill is the time until its first new token."""

    def __init__(self, name: str, model: Any, lookup: int | None = None) -> None:
        self.name, self.model, self.lookup = name, model, lookup
        eos = model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        pad = model.generation_config.pad_token_id
        self.pad = int(pad) if pad is not None else min(self.eos, default=0)

    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        if self.lookup is not None:
            if len(prompts) > 1:
                raise FsdError(f"{self.name}: transformers' prompt lookup takes one prompt at a time: --batch-size 1.")
            options = {**options, "prompt_lookup_num_tokens": self.lookup}
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (longest - len(p)) + p for p in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        rounds = _Rounds()
        torch.manual_seed(seed)
        start = time.perf_counter()
        output = self.model.generate(
            ids, attention_mask=mask, pad_token_id=self.pad, streamer=rounds, **options
        ).tolist()
        seconds = time.perf_counter() - start
        first = (rounds.first or start + seconds) - start
        return TimedRun(seconds, first, [self._answer(row[longest:], rounds, len(prompts)) for row in output])

    def _answer(self, tokens: list[int], rounds: _Rounds, batch: int) -> Answer:
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
        tokens = tokens[:end]
        if batch == 1:
            forwards, verified = len(rounds.sizes) - 2, len(tokens) - rounds.sizes[1]
        else:
            forwards = verified = len(tokens) - 1
        return Answer(tokens, forwards, verified, finish_reason="length" if end is None else "stop")

    def describe(self) -> dict[str, Any]:
        record: dict[str, Any] = {"by": "transformers", "model": "separate copy, linear layers not packed"}
        return record if self.lookup is None else {**record, "prompt_lookup_num_tokens": self.lookup}


Factory = Callable[[str, str, Models], Method]  # full text, the part behind the first colon, models
METHODS: Registry[Factory] = Registry("method")


@METHODS.register("plain")
def _plain(text: str, argument: str, models: Models) -> Method:
    _no_argument(text, argument)
    return EngineMethod(text, models.decoder, parse_rule("exact"), NoDrafter(models.decoder.target.vocab_size))


@METHODS.register("hf-generate")
def _hf_generate(text: str, argument: str, models: Models) -> Method:
    _no_argument(text, argument)
    return GenerateMethod(text, models.reference[0])


@METHODS.register("hf-lookup")
def _hf_lookup(text: str, argument: str, models: Models) -> Method:
    return GenerateMethod(text, models.reference[0], _lookup_tokens(text, argument))


def _lookup_tokens(text: str, argument: str) -> int:
    if argument and (not argument.isdigit() or int(argument) < 1):
        raise FsdError(f"method {text!r}: {argument!r} must be a number of tokens, e.g. hf-lookup:{LOOKUP_TOKENS}.")
    return int(argument) if argument else LOOKUP_TOKENS


def _no_argument(text: str, argument: str) -> None:
    if argument:
        raise FsdError(f"method {text!r}: {text.split(':')[0]} takes no parameters.")


def check_methods(texts: Sequence[str]) -> None:
    """Raises, before anything is loaded, UnknownNameError or FsdError for a method that is unknown or repeated."""
    if not texts:
        raise FsdError("no methods: give at least one, e.g. --methods plain,exact.")
    for text in texts:
        name, _, argument = text.partition(":")
        if name == "hf-lookup":
            _lookup_tokens(text, argument)
        elif name in METHODS:
            _no_argument(text, argument)
        elif name in RULES:
            parse_rule(text)
        else:
            known = [*METHODS.names(), *RULES.names()]
            raise UnknownNameError(f"unknown method {text!r}. Known: {', '.join(known)}.")
    repeated = sorted({text for text in texts if list(texts).count(text) > 1})
    if repeated:
        raise FsdError(
            f"method {repeated[0]!r} is named twice: name each once, and use --repeat to measure more often."
        )


def uses_drafter(text: str) -> bool:
    return text.partition(":")[0] not in METHODS


def make_methods(texts: Sequence[str], models: Models) -> list[Method]:
    """The methods that ``texts`` name; loads the models they need."""
    check_methods(texts)
    models.needs_drafter = any(map(uses_drafter, texts))
    made: list[Method] = []
    for text in texts:
        name, _, argument = text.partition(":")
        if name in METHODS:
            made.append(METHODS.get(name)(text, argument, models))
        else:
            made.append(EngineMethod(text, models.decoder, parse_rule(text), models.decoder.drafter))
    return made
