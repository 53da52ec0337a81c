"""The arguments of transformers' ``generate`` that our loop honours. Every other one is refused by name.

The fields of ``GenerationConfig`` are an allow-list. A field that a later version of transformers adds is refused until
this list names it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from typing_extensions import TypedDict

from fsd_core.errors import FsdError
from fsd_core.registry import did_you_mean
from fsd_core.tensors import as_python
from fsd_infer.targets.token_ids import eos_ids, id_list

# without effect on the answers, in ``generate`` too
_WITHOUT_EFFECT = frozenset(
    """
    use_cache compile_config disable_compile prefill_chunk_size decoder_start_token_id
    transformers_version _from_model_config _commit_hash
    """.split()
)
# about the computation, not the answer: the model's own configuration may set them
_ABOUT_SPEED = frozenset(
    """
    cache_implementation cache_config max_cache_len is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_lookbehind target_lookbehind max_matching_ngram_size assistant_early_exit
    prompt_lookup_num_tokens speculation_type use_mtp
    """.split()
)
_CACHES = ("cache", "past_key_values")  # since transformers 5.24, and before
# what answers take from the model's own configuration: its special tokens and lengths, and nothing that shapes the
# distribution
_FACTS = frozenset("max_length max_new_tokens pad_token_id bos_token_id eos_token_id return_dict_in_generate".split())
_INHERITED = _WITHOUT_EFFECT | _ABOUT_SPEED | _FACTS
_ALTERNATIVES = {
    "prompt_lookup_num_tokens": 'use drafter="lookup"',
    "max_matching_ngram_size": 'use drafter="lookup"',
    "assistant_model": "give the small model as drafter",
    "inputs_embeds": "give token ids",
    "input_ids": "give the ids as prompts",
    "attention_mask": "give what the tokenizer returns as prompts",
    "tokenizer": "give it to from_pretrained",
    **dict.fromkeys(_CACHES, "give the whole text as ids"),
    "streamer": "give it as stream_to",
}
# whole numbers and their upper bounds: transformers loops over some before it checks them
_INTEGERS: dict[str, float] = {
    **dict.fromkeys("max_length max_new_tokens min_length min_new_tokens num_beams".split(), math.inf),
    **dict.fromkeys("no_repeat_ngram_size encoder_no_repeat_ngram_size".split(), 2**16),
    "top_k": math.inf,
    "num_return_sequences": 2**12,
}
_NUMBERS = frozenset(
    "max_time temperature top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty length_penalty "
    "encoder_repetition_penalty".split()
)
_FLAGS = ("do_sample", "renormalize_logits", "remove_invalid_values")
_IDS = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")
# bounds that transformers does not check, or checks only if the field has an effect
_RANGES = {
    "temperature": (0, sys.float_info.max, "0 or above, and finite"),
    "top_p": (0, 1, "from 0 to 1"),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0, math.inf, "0 or above")),
}
LENGTHS = frozenset({"max_length", "max_new_tokens"})
NEW_TOKENS = 128  # most of an answer, where nothing says; as on the command line
# fields whose processors keep the prompts, with the values that switch them off
_READ_PROMPTS = {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}
# arguments of FuzzyDecoder.generate that are no fields of the configuration
_LISTS = ("logits_processor", "stopping_criteria")
ARGUMENTS = {*_LISTS, "prefix_allowed_tokens_fn"}
# inputs that ``generate`` prepares for any loop
_PREPARED = frozenset({*"attention_mask position_ids cache_position logits_to_keep use_cache".split(), *_CACHES})


class GenerateOptions(TypedDict, total=False):
    """The options of ``generate`` that are honoured, for type checkers too: fields of a configuration, most of them
    through the logits processors and stopping criteria that ``generate`` makes, and :data:`ARGUMENTS`.
    """

    num_beams: int
    early_stopping: bool | str
    length_penalty: float
    max_length: int
    max_new_tokens: int
    min_length: int
    min_new_tokens: int
    max_time: float
    stop_strings: str | list[str]
    do_sample: bool
    num_return_sequences: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_h: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    encoder_repetition_penalty: float
    encoder_no_repeat_ngram_size: int
    bad_words_ids: list[list[int]]
    sequence_bias: Any
    suppress_tokens: list[int]
    begin_suppress_tokens: list[int]
    forced_bos_token_id: int
    forced_eos_token_id: int | list[int]
    exponential_decay_length_penalty: tuple[int, float]
    renormalize_logits: bool
    remove_invalid_values: bool
    guidance_scale: float
    watermarking_config: Any
    pad_token_id: int
    bos_token_id: int
    eos_token_id: int | list[int]
    return_dict_in_generate: bool
    logits_processor: Any
    stopping_criteria: Any
    prefix_allowed_tokens_fn: Any


_HONOURED = GenerateOptions.__annotations__.keys()


def refusal(name: str, value: Any) -> FsdError:
    """Return the error for an argument that our loop does not honour."""
    shown = f"{name}={value!r}" if isinstance(value, (bool, int, float, str)) else name
    instead = _ALTERNATIVES.get(name, "leave it out, or call the model's own generate")
    return FsdError(f"speculative decoding does not support {shown}: {instead}.")


def check_config(config: GenerationConfig, model_config: GenerationConfig | None) -> None:
    """Raise FsdError for the first field that our loop does not honour.

    Args:
        config: the configuration, with defaults filled in.
        model_config: the model's own configuration.
    """
    eos_ids(config)
    for name in ("num_beams", "num_return_sequences"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise FsdError(f"{name} must be at least 1, got {value}.")
    neutral = _neutral()
    for name in sorted(neutral.keys() - _HONOURED - _WITHOUT_EFFECT):
        value = getattr(config, name, None)
        about_speed = name in _ABOUT_SPEED and value == getattr(model_config, name, None)
        if not (value is None or value is False or value == neutral[name] or about_speed):
            raise refusal(name, value)


def only_stated(config: GenerationConfig, stated: Iterable[str]) -> None:
    """Switch off what neither the request nor :data:`_INHERITED` names, so that answers follow the target's own
    distribution.

    Args:
        config: the configuration, with the model's values and transformers' defaults filled in; changed in place.
        stated: fields that the request names.
    """
    neutral = {**_neutral(), "top_k": None}  # transformers' default is 50
    for name in neutral.keys() - _INHERITED - set(stated):
        setattr(config, name, neutral[name])


def shaping(config: GenerationConfig | None) -> dict[str, Any]:
    """Return the fields of a model's own configuration that would shape answers, were they not left out."""
    neutral, fields = {**_neutral(), "top_k": 0}, {} if config is None else vars(config)
    names = sorted((neutral.keys() & fields.keys()) - _INHERITED)
    stated = {name: fields[name] for name in names if fields[name] is not None and fields[name] is not False}
    return {name: value for name, value in stated.items() if value != neutral[name]}


def _neutral() -> dict[str, Any]:
    """The fields of a configuration, with what ``generate`` fills in for those that are not set."""
    blank = GenerationConfig()
    return {**vars(blank), **getattr(blank, "_get_default_generation_params", dict)()}


def split_options(
    overrides: Mapping[str, Any], others: Iterable[str] = ()
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Split keyword arguments into fields of the configuration, processors' arguments, and stopping criteria.

    Args:
        overrides: keyword arguments.
        others: names that the caller has taken out, for the error about an unknown one.

    Raises:
        FsdError: an unknown argument, or a malformed one.
    """
    known = vars(GenerationConfig()).keys() | ARGUMENTS
    for name in overrides.keys() - known:
        if name in _ALTERNATIVES:
            raise refusal(name, overrides[name])
        hint = did_you_mean(name, [*known, *others])
        raise FsdError(f"unknown option {name!r}.{hint} Options are those of FuzzyConfig, transformers' among them.")
    further = {name: overrides.get(name) for name in ARGUMENTS}
    for name in _LISTS:
        callables = further[name]
        if callables is not None and not (isinstance(callables, (list, tuple)) and all(map(callable, callables))):
            raise FsdError(f"{name} must be a list of callables, got {callables!r:.60}.")
    # transformers misreads numbers of numpy and torch
    fields = {name: as_python(value) for name, value in overrides.items() if name not in ARGUMENTS}
    if fields.get("temperature") == 0:
        fields.update(at_temperature(0))
    return fields, further, further.pop("stopping_criteria") or []


def with_defaults(fields: dict[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the fields of a request: a temperature implies sampling, and an answer needs a longest length.

    Args:
        fields: options of this request.
        stated: these, those of its configuration, and the model's own lengths.
    """
    result = dict(fields)
    if stated.get("temperature", 0) > 0 and "do_sample" not in stated:
        result["do_sample"] = True
    if not LENGTHS & stated.keys():
        result["max_new_tokens"] = NEW_TOKENS
    return result


def at_temperature(temperature: float | None) -> dict[str, Any]:
    """Return the arguments of ``generate`` that sample at a temperature; 0, which it refuses, and None are greedy."""
    return {"do_sample": bool(temperature), "temperature": temperature or None}


def sampling_temperature(config: GenerationConfig) -> float:
    """Return the temperature of a complete configuration; 0 if it is greedy."""
    if not config.do_sample:
        return 0.0
    return 1.0 if config.temperature is None else config.temperature


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raise FsdError for fields that are not numbers, out of bounds, or so large that they take all memory or time.

    Text for a flag counts as true in Python, "false" too.
    """
    for name in values.keys() & set(_FLAGS):
        if not isinstance(values[name], bool):
            raise FsdError(f"{name} must be true or false, got {values[name]!r:.60}.")
    for name in values.keys() & (_INTEGERS.keys() | _NUMBERS):
        value, number_type = values[name], Integral if name in _INTEGERS else Real
        if isinstance(value, bool) or not isinstance(value, number_type):
            expected = "whole number" if name in _INTEGERS else "number"
            raise FsdError(f"{name} must be a {expected}, got {value!r:.60}.")
        if name in _INTEGERS and value > _INTEGERS[name]:  # type: ignore[operator]
            raise FsdError(f"{name} must be at most {_INTEGERS[name]}, got {value!r:.60}.")
        low, high, bounds = _RANGES.get(name, (-math.inf, math.inf, "a number"))
        if not low <= value <= high:  # type: ignore[operator]
            raise FsdError(f"{name} must be {bounds}, got {value!r:.60}.")


def check_token_ids(values: Mapping[str, Any], size: int) -> None:
    """Raise FsdError for ids in these fields that a vocabulary of this size lacks, which would have no effect."""
    for name in values.keys() & set(_IDS):
        for token in id_list(name, values[name]):
            if not 0 <= token < size:
                hint = " Give None for answers that no token ends." if name == "eos_token_id" else ""
                raise FsdError(f"{name}: there is no token {token}: ids are from 0 to {size - 1}.{hint}")


def reads_prompts(config: GenerationConfig) -> bool:
    """Return whether a processor of this configuration keeps the prompts or their padding."""
    return any(getattr(config, name) not in (None, neutral) for name, neutral in _READ_PROMPTS.items())


def check_inputs(input_ids: Tensor, model_inputs: Mapping[str, Any]) -> Tensor:
    """Return the attention mask of ids [B, T]. Raises FsdError for inputs of the model other than these ids."""
    for name, value in model_inputs.items():
        if name not in _PREPARED and value is not None and value is not False:
            raise refusal(name, value)
    mask = model_inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape:
        raise FsdError(f"attention_mask has shape {list(mask.shape)}, but the ids have {list(input_ids.shape)}.")
    for name in _CACHES:
        past = model_inputs.get(name)
        if past is not None and past.get_seq_length() > 0:
            raise refusal(name, past)
    positions = model_inputs.get("position_ids")
    if positions is not None and positions.shape == input_ids.shape:
        counted = mask.long().cumsum(-1) - 1
        if not bool(((positions == counted) | ~mask.bool()).all()):
            raise refusal("position_ids", positions)
    return mask
