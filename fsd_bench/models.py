"""Options and models of a measurement: each model is loaded once, when it is first needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from typing_extensions import Self

from fsd_bench.base import TimedRun
from fsd_bench.prompts import Encoder
from fsd_bench.runs import Trial
from fsd_core.errors import FsdError
from fsd_infer.decoder import FuzzyDecoder, RuntimeConfig, former
from fsd_infer.drafters import Drafter, TreeShape
from fsd_infer.targets.loading import load_config, load_target, load_tokenizer
from fsd_infer.targets.masks import max_positions
from fsd_infer.targets.placing import parse_device, parse_dtype
from fsd_infer.targets.target import Target

# options that count something
COUNTS = ("limit", "every", "max_new_tokens", "repeat", "repeats", "batch_size", "threads", "isolate")
FORMER = {"pack", "expand", "quantize", "cuda_graphs"}  # options that older records have


@dataclass(kw_only=True)
class ModelOptions:
    """Which models a run loads, and how: the arguments of ``FuzzyDecoder.from_pretrained``, dtype by name."""

    target: str = "smollm2-135m"
    drafter: str | None = None
    dtype: str = "bf16"
    device: str | None = None
    tree: TreeShape | str | None = None
    target_kwargs: dict[str, Any] | None = None
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the options in a record's JSON values. Absent ones take their default, unknown ones are left out."""
        given = {entry.name: values[entry.name] for entry in fields(cls) if entry.name in values}
        tree, renamed = given.get("tree"), {name: values[name] for name in FORMER & values.keys()}
        runtime = former.runtime_options(given.get("runtime", renamed), warn=False)
        parsed = {"tree": TreeShape(**tree) if isinstance(tree, dict) else tree, "runtime": RuntimeConfig(**runtime)}
        return cls(**{**given, **parsed})

    def check(self) -> None:
        """Raise FsdError for options that can be refused before anything is loaded."""
        parse_dtype(self.dtype)
        parse_device(self.device)
        for name in COUNTS:
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise FsdError(f"{name} must be at least 1, got {value}.")
        for value in getattr(self, "temperatures", [getattr(self, "temperature", 0.0)]):
            if not 0 <= value < math.inf:
                raise FsdError(f"temperature must be 0 or above and finite, got {value}.")

    def load(self, drafter: str | None, **changes: Any) -> FuzzyDecoder:
        """Load the target and the drafter of this name; ``changes`` are fields of the :class:`.RuntimeConfig`."""
        return FuzzyDecoder.from_pretrained(
            self.target, drafter, dtype=parse_dtype(self.dtype), device=self.device, tree=self.tree,
            config=replace(self.runtime, **changes), **(self.target_kwargs or {}),
        )  # fmt: skip


class Models:
    """The models that methods run on.

    ``decoder`` packs the linear layers of its model in place. So transformers' methods get ``reference``, a second copy
    of the same weights.

    Args:
        options: what to load.

    Attributes:
        first_drafter: name of the drafter to load with the target. :meth:`load` loads others.
    """

    def __init__(self, options: ModelOptions) -> None:
        self.options = options
        self.first_drafter: str | None = "none"
        self.decoder_loaded = self.reference_loaded = False
        self._drafters: dict[tuple[str | None, TreeShape | None], Drafter] = {}

    @cached_property
    def decoder(self) -> FuzzyDecoder:
        self.decoder_loaded = True
        decoder = self.options.load(self.first_drafter)
        self._drafters[self.first_drafter, None] = decoder.drafter
        return decoder

    def load(self, drafter: str | None, tree: TreeShape | None = None) -> Drafter:
        """Return the drafter of that name with that tree, loaded and packed once; None: the run's."""
        decoder, name = self.decoder, drafter or self.options.drafter
        if (name, tree) not in self._drafters:
            self._drafters[name, tree] = decoder.load_drafter(name, tree or self.options.tree)
        return self._drafters[name, tree]

    @cached_property
    def reference(self) -> tuple[Any, Any]:
        """(model, tokenizer) as transformers loads them."""
        self.reference_loaded = True
        return load_target(
            self.options.target, dtype=self.options.dtype, device=self.options.device,
            **(self.options.target_kwargs or {}),
        )  # fmt: skip

    def scorer(self) -> Target:
        """Return a target for teacher-forced forwards, from a model that is loaded if there is one."""
        if self.decoder_loaded or not self.reference_loaded:
            return self.decoder.target
        return Target(*self.reference, name=self.options.target)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None. Loads no weights."""
        if self.decoder_loaded:
            return self.decoder.tokenizer
        if self.reference_loaded:
            return self.reference[1]
        return load_tokenizer(self.options.target, **(self.options.target_kwargs or {}))

    @property
    def max_positions(self) -> int | None:
        """Tokens of the target's context, if its config says."""
        return self.decoder.target.max_positions if self.decoder_loaded else max_positions(self.text_config)

    @cached_property
    def text_config(self) -> Any:
        """The config of the target's text model. Loads no weights."""
        if self.decoder_loaded:
            config = self.decoder.target.model.config
        elif self.reference_loaded:
            config = self.reference[0].config
        else:
            config = load_config(self.options.target, **(self.options.target_kwargs or {}))
        return config.get_text_config(decoder=True)

    def check_tokens(self, trial: Trial, run: TimedRun) -> None:
        """Raise FsdError for answers with other ids than the target's, as of a server with another model."""
        size = self.decoder.target.vocab_size if self.decoder_loaded else int(self.text_config.vocab_size)
        outside = [token for answer in run.answers for token in answer.tokens or () if not 0 <= token < size]
        if outside:
            raise FsdError(
                f"method {trial.method!r} answered token {outside[0]}, but {self.options.target} has ids from 0 to "
                f"{size - 1}: it decodes another model."
            )

    def encoder(self, raw: bool = False) -> Encoder:
        """Return what encodes prompts for the target."""
        return Encoder(self.options.target, self.tokenizer, self.max_positions, raw)
