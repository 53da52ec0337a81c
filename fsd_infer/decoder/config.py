"""The two configurations: :class:`FuzzyConfig` has the options of a request, :class:`RuntimeConfig` how the models run.

Python, the command line, the server, benchmarks and lm-eval all use these two. Both are saved as JSON; objects such
as a streamer, callbacks or a drafter are arguments of ``generate`` instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from typing_extensions import Self, Unpack

from fsd_core.errors import FsdError, ModelLoadError, foreign_errors, shortened
from fsd_core.files import read_json, write_json
from fsd_core.former import Renamed, former_keywords
from fsd_core.options import picked
from fsd_core.registry import did_you_mean, is_whole
from fsd_core.tensors import as_python
from fsd_infer.decoder import former
from fsd_infer.decoder.calibrated import CALIBRATED, QUALITY, with_quality
from fsd_infer.engine.beams import BeamOptions
from fsd_infer.request.guide import Guide
from fsd_infer.request.options import ARGUMENTS, GenerateOptions, at_temperature, check_numbers
from fsd_infer.rules import Rule, RuleLike, parse_rule, rule_text
from fsd_infer.targets.builtin import shipped_drafter
from fsd_infer.trees.shape import TreeShape, parse_tree

WEIGHTS = ("auto", "packed", "expanded", "plain")
DRAFT_WEIGHTS = ("fp8", "plain")
_UNSEEN = frozenset({"_from_model_config", "_commit_hash", "_original_object_hash"})  # transformers' own notes
_TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # these may be lists


class FuzzyOptions(GenerateOptions, total=False):
    """The keywords of ``FuzzyDecoder.generate`` that type checkers know: the fields of :class:`FuzzyConfig`, and what
    ``generate`` of transformers takes in addition to a configuration.
    """

    rule: RuleLike
    quality: float | None
    tree: TreeShape | str | None
    seed: int | None
    adapter: str | None
    apply_chat_template: bool | None
    measure_log_likelihood: bool
    max_cache_bytes: int | None
    users: Sequence[str] | None
    guide: Guide | Mapping[str, Any] | None
    beams: BeamOptions | Mapping[str, Any] | str | None


class FuzzyConfig(GenerationConfig):
    """The options of a request: transformers' GenerationConfig, and how to decode speculatively.

    By default answers follow the target's own distribution: of the model's configuration only special tokens and
    lengths count, and transformers' top_k of 50 does not. Pass the model's own configuration to decode by it.

    Attributes:
        rule: how drafts are accepted: a rule or its text, ``"fuzzy:js:0.3"``; a list of them, one per prompt; or
            "calibrated" for the setting of `fsd-bench calibrate` at the request's temperature.
        quality: in place of a rule, the share of exact's score that answers keep, above 0 and at most 1: 1 is exact,
            below 1 the fastest rule that the drafter's calibration file certifies for it. Short for ``"quality:0.95"``.
        tree: shape of the draft trees, ``"5,6,16"`` (depth, width, nodes) or ``"5,6,16,0.3"`` (and the probability
            below which drafting stops), or a :class:`.TreeShape`, for a head or a small LM. Default: the drafter's own;
            drafters without a model have one shape, that of loading.
        seed: seed of the draws above temperature 0, a whole number of at most 64 bits (default: torch's global
            generator). A seed makes answers reproducible: trees then do not depend on measured times.
        adapter: one of the decoder's LoRA adapters by name, or "none" for the base (default: the active one).
        apply_chat_template: wrap text in the chat template (default: if the tokenizer has one).
        measure_log_likelihood: record the target's mean log-probability of the answer, in nats per token.
        max_cache_bytes: refuse a request whose KV caches take more bytes, at least 1 (default: the free memory).
        users: one text per prompt; only prompts of the same user share the prefix cache (default: all share it).
        guide: what answers must be: ``{"json": schema}``, ``{"regex": pattern}``, ``{"grammar": Lark's notation}`` or a
            :class:`.Guide`. The rule then applies to the masked target.
        beams: how beams are drafted where ``num_beams`` is above 1: ``"depth=4,spread=2"``, the same as a mapping, or
            :class:`.BeamOptions`, which lists the options and their ranges.
        max_new_tokens: most tokens of an answer, at least 1 (default: 128, unless ``max_length`` is set).
        temperature: sampling temperature, 0 or above; 0 is greedy, and above 0 answers are sampled (default: 0).
        top_p: sample from the fewest tokens of this mass, above 0 and at most 1 (default: all).
        top_k: sample from this many of the likeliest tokens, at least 1 (default: all).
        num_beams: width of beam search or beam sampling, at least 1 (default: 1, no beams).

    All other fields are transformers' own. One that speculative decoding cannot honour is an error of ``generate``.

    Raises:
        FsdError: a field that is unknown, or a value of ours that cannot be.
    """

    rule: RuleLike = "exact"
    quality: float | None = None
    tree: TreeShape | str | None = None
    seed: int | None = None
    adapter: str | None = None
    apply_chat_template: bool | None = None
    measure_log_likelihood: bool = False
    max_cache_bytes: int | None = None
    users: Sequence[str] | None = None
    guide: Guide | Mapping[str, Any] | None = None
    beams: BeamOptions | Mapping[str, Any] | str | None = None

    def __init__(self, **values: Unpack[FuzzyOptions]) -> None:
        given = {name: as_python(value) for name, value in values.items()}
        _refuse_unknown(given.keys(), OWN.keys() | vars(GenerationConfig()).keys() | _UNSEEN, "option of FuzzyConfig")
        for name, default in OWN.items():  # before the others, which are validated at once
            setattr(self, name, given.pop(name, default))
        if given.get("temperature") == 0:
            given.update(at_temperature(0))
        elif given.get("temperature") is not None and given.get("do_sample") is None:
            given["do_sample"] = True
        super().__init__(**given)

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Check the values as transformers does, and ours. Raises FsdError for one that cannot be."""
        check_numbers({name: value for name, value in vars(self).items() if value is not None})
        with foreign_errors(FsdError, "transformers refuses these options: {why}"):
            super().validate(strict, user_set_attributes)
        self.named_rules()
        parse_tree(self.tree)
        BeamOptions.of(self.beams)
        if self.max_cache_bytes is not None and not is_whole(self.max_cache_bytes):
            raise FsdError(f"max_cache_bytes is a whole number of bytes, got {self.max_cache_bytes!r:.60}.")
        for name in ("apply_chat_template", "measure_log_likelihood"):
            if not isinstance(value := getattr(self, name), (bool, type(None))):  # "no" would count as true
                raise FsdError(f"{name} is True or False, got {value!r:.60}.")
        if self.seed is not None and not is_whole(self.seed, -(2**63), 2**64 - 1):
            raise FsdError(f"seed must be a whole number of at most 64 bits, got {self.seed!r}.")

    def named_rules(self) -> list[Rule]:
        """Return the rules that are named, and not chosen by a calibration file. Raises FsdError for unknown ones."""
        rule = with_quality(self.rule, self.quality)
        rules: list[Any] = [rule] if isinstance(rule, (str, Rule)) or not isinstance(rule, Sequence) else list(rule)
        return [parse_rule(one) for one in rules if not str(one).startswith((CALIBRATED, QUALITY))]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values: rules and trees as text. Ours are left out where they have defaults."""
        values = super().to_dict()
        for name, default in OWN.items():
            if values[name] == default:
                del values[name]
        if isinstance(bias := values.get("sequence_bias"), dict):  # JSON's keys are texts
            values["sequence_bias"] = [[list(ids), value] for ids, value in bias.items()]
        return {name: _as_json(value) for name, value in values.items()}

    def save_pretrained(
        self, save_directory: Any, config_file_name: Any = None, push_to_hub: bool = False, **options: Any
    ) -> None:
        """Write ``fuzzy_config.json`` to a directory. A model's own generation_config.json there stays.

        Raises FsdError: a rule of your own that is not registered, so that its text would not be read.
        """
        for rule in self.named_rules():
            if parse_rule(rule_text(rule)) != rule:
                raise FsdError(f"{rule!r} cannot be saved as text: give it parameters that are numbers and texts.")
        super().save_pretrained(save_directory, config_file_name or "fuzzy_config.json", push_to_hub, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name: Any, config_file_name: Any = None, **options: Any) -> Self:  # type: ignore[override]
        """Read what :meth:`save_pretrained` wrote, from a directory or a hub id. Keywords change fields.

        Raises FsdError: there is no such file, or it has unknown fields.
        """
        file = config_file_name or "fuzzy_config.json"
        try:
            return super().from_pretrained(pretrained_model_name, file, **options)  # type: ignore[return-value]
        except OSError as error:
            raise FsdError(f"{pretrained_model_name} has no {file} that can be read: {error}") from error
        except FsdError as error:
            raise FsdError(f"{pretrained_model_name}, {file}: {error}") from error
        except (TypeError, ValueError, AttributeError) as error:  # transformers', for no object, or a text as a number
            raise FsdError(f"{pretrained_model_name}, {file} cannot be read: {shortened(error)}") from error


# the fields that FuzzyConfig adds to transformers' own, and their defaults
OWN: dict[str, Any] = {name: getattr(FuzzyConfig, name) for name in FuzzyConfig.__annotations__}


def request_config(given: GenerationConfig | None, overrides: Mapping[str, Any]) -> tuple[FuzzyConfig, dict[str, Any]]:
    """Return a request's own fields, and the rest of its keywords, which are transformers'.

    Args:
        given: a configuration; a plain GenerationConfig has none of our fields.
        overrides: keywords, which win.

    Raises:
        FsdError: a value that cannot be.
    """
    values = {name: getattr(given, name, default) for name, default in OWN.items()}
    values |= {name: overrides[name] for name in OWN.keys() & overrides.keys()}
    rest = {name: value for name, value in overrides.items() if name not in OWN}
    return FuzzyConfig(**values), rest


def from_keywords(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into what a tokenizer or processor returned and the request's options.

    Raises FsdError: there are no ids among them.
    """
    if options.get("input_ids") is None:
        raise FsdError("there is no prompt: give text, messages, token ids or what a tokenizer returns.")
    known = vars(FuzzyConfig()).keys() | ARGUMENTS
    unknown = {name: value for name, value in options.items() if name not in known}
    inputs = {name: value for name, value in unknown.items() if name in _TOKEN_INPUTS or isinstance(value, Tensor)}
    return inputs, {name: value for name, value in options.items() if name not in inputs}


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Renamed):
    """How the models run. No field changes what `exact` answers, except for the rounding of other kernels.

    Attributes:
        weights: how the target's weights are kept. "auto": the device's backend replaces layers by faster ones, and
            computes with the quantised weights of a GGUF file or a built-in target as they are; a model in memory stays
            as it is, since packed weights would be copies. "packed": a model in memory, too. "expanded": quantised
            weights are expanded to bf16 first. "plain": torch's own layers, expanded, for target and drafter.
        draft_weights: how a head's are kept, with our CPU kernels. "fp8": with a scale per output, in half the bytes.
            "plain": as loaded. The target's weights stay, so `exact` stays exact.
        recording: record whole rounds as CUDA graphs and replay them (default: on CUDA). False is for debugging.
        record: (rows, tokens) of requests whose greedy `exact` rounds are recorded at loading, so that none is recorded
            in traffic. Requests of as many rows (in buckets) and tokens (to the next power of two) share a recording.
            For other rules and temperatures call :func:`.record_rounds`.
        prefix_cache_bytes: size in bytes, at least 1, of a cache for prompts that start like an earlier prompt and its
            answer, see :mod:`fsd_infer.targets.prefixes` (default: no cache).

    Raises:
        FsdError: a value that cannot be.
    """

    former_members = {"capture": "recording"}

    weights: str = "auto"
    draft_weights: str = "fp8"
    recording: bool | None = None
    record: Sequence[Sequence[int]] = ()
    prefix_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("weights", WEIGHTS), ("draft_weights", DRAFT_WEIGHTS), ("recording", (None, True, False))):
            value = getattr(self, name)
            if value not in known:
                hint = did_you_mean(value, map(str, known))
                raise FsdError(f"{name} is one of {', '.join(map(str, known))}, got {value!r:.60}.{hint}")
        pairs = tuple(self.record) if isinstance(self.record, Iterable) else (self.record,)
        for pair in pairs:
            if not isinstance(pair, Sized) or len(pair) != 2 or not is_whole(pair[0], 1) or not is_whole(pair[1], 2):
                raise FsdError(f"record lists pairs of rows and tokens, such as (8, 2048), got {pair!r:.60}.")
        object.__setattr__(self, "record", tuple((rows, tokens) for rows, tokens in pairs))
        size = self.prefix_cache_bytes
        if size is not None and not is_whole(size, 1):
            raise FsdError(f"a prefix cache needs a whole number of bytes, at least 1, got {size!r:.60}.")

    def packs(self, named: bool) -> bool:
        """Whether the backend replaces the layers of a target that was loaded by name, or is in memory."""
        return self.weights == "packed" or (named and self.weights != "plain")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration in a file's or a record's values. Raises FsdError for unknown fields."""
        values = former.runtime_options(values)
        _refuse_unknown(values.keys(), [field.name for field in fields(cls)], "option of RuntimeConfig")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write ``runtime_config.json`` to a directory, which is made if there is none."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        write_json(Path(directory) / "runtime_config.json", self.to_dict(), indent=2)

    @classmethod
    def from_pretrained(cls, directory: str | Path, **changes: Any) -> Self:
        """Read what :meth:`save_pretrained` wrote; keywords change fields. Raises FsdError for a malformed file."""
        values = read_json(Path(directory) / "runtime_config.json", "Write one with RuntimeConfig().save_pretrained.")
        if not isinstance(values, dict):
            raise FsdError(f"{directory}, runtime_config.json: expected an object of options.")
        try:
            return cls.from_dict({**values, **changes})
        except FsdError as error:
            raise FsdError(f"{directory}, runtime_config.json: {error}") from error


RuntimeConfig.__init__ = former_keywords(capture="recording")(RuntimeConfig.__init__)  # type: ignore[method-assign]


def runtime_config(given: RuntimeConfig | None, keywords: dict[str, Any]) -> tuple[RuntimeConfig, dict[str, Any]]:
    """Return how the models run, and the rest of the keywords, which are for loading them.

    Raises:
        ModelLoadError: ``config`` is something else, such as a model's own.
        FsdError: a value that cannot be.
    """
    if given is not None and not isinstance(given, RuntimeConfig):
        raise ModelLoadError(
            f"config is a RuntimeConfig, got {type(given).__name__}. To change a model's own, load it by transformers "
            "and pass the object."
        )
    own = {field.name for field in fields(RuntimeConfig)} & keywords.keys()
    changed = replace(given or RuntimeConfig(), **{name: keywords[name] for name in own})
    return changed, {name: value for name, value in keywords.items() if name not in own}


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`fsd_core.options.add_models` as keywords of a benchmark."""
    drafter = args.drafter
    if args.memory is not None:
        main = drafter or ("recycle" if shipped_drafter(args.target) is None else "shipped")
        drafter = f"{main.removesuffix('+memory')}+memory:{args.memory}"
    runtime = RuntimeConfig(**picked(args, "weights draft_weights recording"))
    options = picked(args, "target dtype device target_kwargs")
    return {**options, "drafter": drafter, "tree": parse_tree(args.tree), "runtime": runtime}


def _refuse_unknown(names: Any, known: Any, kind: str) -> None:
    for name in names:
        if name not in known:
            raise FsdError(f"unknown {kind} {name!r}.{did_you_mean(name, known)}")


def _as_json(value: Any) -> Any:
    """Return a field's value as JSON: rules, trees, guides and beams as they are written."""
    if isinstance(value, Rule):
        return rule_text(value)
    if isinstance(value, TreeShape):
        return value.text.replace("x", ",")
    if isinstance(value, Guide):
        return {"llguidance": value.grammar}
    if isinstance(value, BeamOptions):
        return value.given()
    return [_as_json(item) for item in value] if isinstance(value, (list, tuple)) else value
