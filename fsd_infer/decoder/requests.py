"""Requests from the arguments of transformers' ``generate``, for ``FuzzyDecoder`` and for the custom loop.

``FuzzyDecoder.generate`` prepares its options with transformers' own methods (:func:`prepare`). ``generate`` passes
prepared options to its ``custom_generate``, :func:`generate`. Both then call :func:`request_of` and
:func:`decode_request`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fsd_core.errors import FsdError, ModelLoadError, shortened
from fsd_core.registry import is_whole
from fsd_core.tensors import lists
from fsd_core.text.conversations import check_text
from fsd_core.text.encoding import need_tokenizer
from fsd_infer.backends.choose import choose
from fsd_infer.decoder.calibrated import CALIBRATED, calibrated, resolved, with_quality
from fsd_infer.drafters import Drafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine import Outcome, Request, decode
from fsd_infer.engine.beams import BeamOptions, decode_beams
from fsd_infer.request.options import (
    check_config,
    check_inputs,
    check_numbers,
    only_stated,
    reads_prompts,
    split_options,
    with_defaults,
)
from fsd_infer.rules import RuleLike, parse_rules
from fsd_infer.targets.target import Target
from fsd_infer.targets.token_ids import left_pad, left_padded, pad_id

OnTokens = Callable[[int, list[int]], object]


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    drafter: str | Path | Drafter | None = None,
    rule: RuleLike = "exact",
    quality: float | None = None,
    seed: int | None = None,
    stream_to: Any = None,
    max_cache_bytes: int | None = None,
    beam_options: BeamOptions | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode speculatively: ``model.generate(ids, custom_generate=fsd_infer.generate, drafter=..., rule=...)``.

    Threads that share a model take turns, request by request. ``generate`` does not pass its ``streamer`` and
    ``assistant_model`` to custom loops: use ``stream_to`` and ``drafter`` instead.

    Args:
        model: the target.
        input_ids: [B, T] prompts, as ``generate`` prepares them.
        logits_processor: as ``generate`` prepares it.
        stopping_criteria: as ``generate`` prepares them. They receive the text alone; ``scores`` is None. Stop strings
            need an explicit ``StopStringCriteria``, since ``generate`` does not pass its tokenizer.
        generation_config: as ``generate`` prepares it.
        drafter: see :func:`load_drafter`; None: the shipped head of a built-in target. A name is loaded on every call,
            so pass a Drafter object in a loop.
        rule: a rule, its name, a list with one per prompt, or "calibrated"; see ``FuzzyDecoder.generate``.
        quality: in place of a rule, see ``FuzzyDecoder.generate``.
        seed: of the draws above temperature 0.
        stream_to: a streamer. It receives the prompt, every token, and ``end()``, also after an error.
        max_cache_bytes: refuse a request whose KV caches take more (default: the free memory).
        beam_options: with ``num_beams`` > 1, how beams are drafted.
        model_kwargs: other arguments of ``generate``.

    Returns:
        ids [B, prompt + longest answer], right-padded, as ``generate`` returns them. With ``return_dict_in_generate`` a
        ``GenerateDecoderOnlyOutput`` with ``stats`` and, with beams, ``sequences_scores``.

    Raises:
        FsdError: an unsupported argument of ``generate`` or field of the configuration; and as
            :func:`fsd_infer.engine.decode`.
    """
    assert generation_config is not None
    rule = with_quality(rule, quality)
    with ending(stream_to), (target := target_of(model)).lock:
        check_config(generation_config, model.generation_config)
        kept = check_inputs(input_ids, model_kwargs)
        beams = generation_config.num_beams or 1  # generate repeats each prompt per beam
        texts, kept = lists(input_ids[::beams], kept[::beams])
        prompts = [[token for token, keep in zip(*row) if keep] for row in zip(texts, kept)]
        request = request_of(prompts, texts, generation_config, logits_processor, stopping_criteria)
        request.max_cache_bytes, drafter = max_cache_bytes, load_drafter(drafter, target)
        options: dict[str, Any] = dict(streamer=stream_to, seed=seed, beam_options=beam_options)
        outcome = decode_request(target, drafter, rule, request, generation_config, **options)
    longest = max(len(sequence) for sequence in outcome.sequences)
    pad = pad_id(generation_config)
    answers = [sequence + [pad] * (longest - len(sequence)) for sequence in outcome.sequences]
    if outcome.scores is not None:  # generate repeated each prompt per beam
        input_ids = input_ids[torch.arange(len(answers), device=input_ids.device) * len(input_ids) // len(answers)]
    sequences = torch.cat([input_ids, input_ids.new_tensor(answers)], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    output = GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    output["stats"] = outcome.stats
    if outcome.scores is not None:
        output["sequences_scores"] = torch.tensor(outcome.scores, device=input_ids.device)
    return output


def target_of(model: Any) -> Target:
    """Return the one Target of a transformers model. The model stores it, so both are freed together."""
    held = vars(model)  # getattr of a wrapper would read the model inside
    if "_fsd_target" not in held:
        choose(model.device)  # its functions of tensors
        held["_fsd_target"] = Target(model)
    return held["_fsd_target"]


def prepare(
    target: Target, prompts: list[list[int]], given: GenerationConfig | None, overrides: Mapping[str, Any]
) -> tuple[Request, GenerationConfig]:
    """Return a request and its complete configuration, by the methods of ``generate`` (transformers 5.16 to 5.24).

    Args:
        target: its configuration supplies special tokens and lengths, but nothing that shapes the law.
        prompts: token ids, without padding.
        given: a configuration, or None.
        overrides: fields of the configuration, ``logits_processor``, ``stopping_criteria`` and
            ``prefix_allowed_tokens_fn``.

    Raises:
        FsdError: no prompt; an option that is unknown, invalid or not supported.
    """
    if not prompts:
        raise FsdError("no prompts: give at least one.")
    if given is not None and not isinstance(given, GenerationConfig):
        raise FsdError(f"generation_config is a GenerationConfig, got {type(given).__name__}.")
    model = target.model
    fields, processing, stopping = split_options(overrides)
    asked = _set({} if given is None else vars(given)) | _set(fields)
    own = _set(vars(model.generation_config))
    stated = {name: own[name] for name in own.keys() & {"max_length", "max_new_tokens"}} | asked
    check_numbers(stated)
    fields = with_defaults(fields, stated)
    asked, length = asked | _set(fields), max(map(len, prompts))
    stated |= asked
    try:
        config: GenerationConfig = model._prepare_generation_config(given, **fields)[0]
        only_stated(config, asked)
        check_config(config, model.generation_config)
        _check_stop_strings(config, target)
        model._prepare_special_tokens(config, True, device=target.device, batch_size=len(prompts))
        config = model._prepare_generated_length(
            config, "max_length" not in stated, "min_length" not in stated, "input_ids", length, inputs_tensor=None
        )
        model._validate_generated_length(config, length, "max_length" not in stated)
        pad = pad_id(config)
        ids, mask = left_pad(prompts, pad, target.device) if reads_prompts(config) else (None, None)
        processors = model._get_logits_processor(
            config, length, ids, device=target.device, model_kwargs={"attention_mask": mask}, **processing
        )
        criteria = model._get_stopping_criteria(config, stopping, target.tokenizer)
    except FsdError:
        raise
    except Exception as error:
        named = ", ".join([*fields, *([] if given is None else ["generation_config"])]) or "of the model's own config"
        raise FsdError(f"transformers refuses these options ({named}): {shortened(error)}") from error
    if (config.num_beams or 1) == 1:
        prompts = [prompt for prompt in prompts for _ in range(config.num_return_sequences or 1)]
    padded = left_padded(prompts, pad) if any(len(prompt) < length for prompt in prompts) else None
    return request_of(prompts, padded, config, processors, criteria), config


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def request_of(
    prompts: list[list[int]],
    padded: list[list[int]] | None,
    config: GenerationConfig,
    processors: LogitsProcessorList | None,
    criteria: StoppingCriteriaList | None,
) -> Request:
    """Return a request from options that ``generate`` has prepared.

    Args:
        prompts: token ids without padding, a list per answer; for beams a list per prompt.
        padded: the prompts for processors and criteria, padded to one length; None: they have one length.
        config: the complete configuration.
        processors: the configuration's and the user's.
        criteria: the configuration's and the user's, which hold the length limits and the EOS tokens.

    Raises:
        FsdError: there is no length limit.
    """
    limits = [one.max_length for one in criteria or [] if isinstance(one, MaxLengthCriteria)]
    if not limits:
        raise FsdError("no length limit: give max_new_tokens or max_length.")
    if not all(isinstance(limit, Integral) for limit in limits):
        raise FsdError(f"max_new_tokens and max_length must be whole numbers, got a limit of {min(limits)} tokens.")
    ends = [one.eos_token_id for one in criteria or [] if isinstance(one, EosTokenCriteria)]
    others = [one for one in criteria or [] if not isinstance(one, (MaxLengthCriteria, EosTokenCriteria))]
    return Request(
        prompts=prompts,
        max_new_tokens=int(min(limits)) - len((padded or prompts)[0]),
        greedy=not config.do_sample,
        processors=processors,
        criteria=StoppingCriteriaList(others),
        eos_token_ids=frozenset(torch.cat(ends).tolist() if ends else ()),
        padded_prompts=padded,
    )


def decode_request(
    target: Target,
    drafter: Drafter,
    rule: RuleLike,
    request: Request,
    config: GenerationConfig,
    *,
    streamer: Any = None,
    seed: int | None = None,
    beam_options: BeamOptions | None = None,
) -> Outcome:
    """Decode a request with its configuration; the caller ends the streamer. Options: see ``FuzzyDecoder.generate``.

    The request has ``cache_keys`` per prompt; its answers get them here.

    Raises:
        FsdError: an invalid argument; and as :func:`fsd_infer.engine.decode`.
    """
    if not isinstance(drafter, Drafter):
        raise FsdError(f"drafter is a Drafter, got {type(drafter).__name__}: load_drafter loads one by name.")
    target, model = drafter.target or target, target.model
    if target.model is not model:
        raise ModelLoadError(
            "the drafter was made for another model object than the one that generates: take "
            "FuzzyDecoder.from_pretrained(model, head, tokenizer).drafter."
        )
    if request.max_cache_bytes is not None and not is_whole(request.max_cache_bytes):
        raise FsdError(f"max_cache_bytes is a whole number of bytes, got {request.max_cache_bytes!r:.60}.")
    if config.do_sample and seed is None and target.is_sharded:
        raise FsdError("the target is sharded over processes: give all of them one seed, so that they draw the same.")
    temperature = config.temperature if config.do_sample else 0.0
    temperature = 1.0 if temperature is None else temperature
    if isinstance(rule, str) and rule == CALIBRATED:
        rule, drafter = calibrated(drafter, target, temperature)
    rules = parse_rules(resolved(rule, drafter, target, temperature))
    beams, answers = config.num_beams or 1, config.num_return_sequences or 1
    if beams > 1 and (request.on_round is not None or request.callbacks):
        raise FsdError("on_round and callbacks do not work with beams: leave num_beams out, or these.")
    if beams == 1 and beam_options is not None:
        raise FsdError("beam_options are for beams: set num_beams to more than 1, or leave them out.")
    if streamer is not None and len(request.prompts) > 1:
        raise FsdError("a streamer shows one answer: pass one prompt.")
    request = replace(
        request,
        generator=_generator(seed, target.device),
        on_tokens=request.on_tokens if streamer is None else _streamed(streamer, request.on_tokens),
        cache_keys=_per_answer(request.cache_keys, answers if beams == 1 else 1, len(request.prompts)),
    )
    if beams > 1:
        return decode_beams(target, drafter, rules, request, config, beam_options)
    if streamer is not None:
        streamer.put(torch.tensor(request.padded_prompts or request.prompts))
    return decode(target, drafter, rules[0] if len(rules) == 1 else [r for r in rules for _ in range(answers)], request)


def _per_answer(keys: Sequence[str] | None, answers: int, count: int) -> list[str] | None:
    """Repeat the keys per answer. Raises FsdError unless there is one per prompt."""
    if keys is None:
        return None
    if isinstance(keys, str) or len(keys) * answers != count or not all(isinstance(key, str) for key in keys):
        raise FsdError("cache_keys is a list of texts, one per prompt.")
    return [key for key in keys for _ in range(answers)]


def _streamed(streamer: Any, on_tokens: OnTokens | None) -> OnTokens:
    """Return an ``on_tokens`` that also passes the tokens to a streamer, one by one."""

    def tell(row: int, tokens: list[int]) -> object:
        for token in tokens:
            streamer.put(torch.tensor([token]))
        return on_tokens is not None and on_tokens(row, tokens)

    return tell


@contextmanager
def ending(streamer: Any) -> Iterator[None]:
    """End the streamer also after an error, since another thread may wait for its end.

    Raises FsdError if it is no streamer.
    """
    if streamer is not None and not (
        callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))
    ):
        raise FsdError(f"a streamer has put() and end(), as those of transformers; got {type(streamer).__name__}.")
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def _check_stop_strings(config: GenerationConfig, target: Target) -> None:
    """Raise FsdError for stop strings that are no text or empty, or if there is no tokenizer to find them."""
    texts = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings
    if not texts:
        return
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise FsdError(f"stop_strings must be one text, or a list of texts, none of them empty; got {texts!r:.60}.")
    for text in texts:
        check_text(text, "stop_strings")
    need_tokenizer(target.tokenizer, target.name)


def _generator(seed: int | None, device: torch.device) -> torch.Generator | None:
    """Return a generator with that seed; None without one."""
    if seed is None:
        return None
    if not is_whole(seed, -(2**63), 2**64 - 1):
        raise FsdError(f"seed must be a whole number of at most 64 bits, got {seed!r}.")
    return torch.Generator(device=device).manual_seed(seed)
