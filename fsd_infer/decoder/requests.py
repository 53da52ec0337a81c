"""Requests from the arguments of transformers' ``generate``, for ``FuzzyDecoder`` and for the custom loop.

``FuzzyDecoder.generate`` prepares its options with transformers' own methods (:func:`prepare`). ``generate`` passes
prepared options to its ``custom_generate``, :func:`.custom.generate`. Both then call :func:`request_of` and
:func:`decode_request`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fsd_core.errors import FsdError, ModelLoadError, foreign_errors
from fsd_core.text.conversations import check_text
from fsd_core.text.encoding import need_tokenizer
from fsd_infer.backends.choose import choose
from fsd_infer.decoder.calibrated import CALIBRATED, calibrated, resolved, with_quality
from fsd_infer.decoder.config import OWN, FuzzyConfig
from fsd_infer.drafters import Drafter
from fsd_infer.drafters.loading import with_tree
from fsd_infer.engine import Outcome, Request, decode
from fsd_infer.engine.beams import BeamOptions, decode_beams
from fsd_infer.engine.callback import Callback
from fsd_infer.engine.callbacks import Streaming
from fsd_infer.request.options import (
    LENGTHS,
    check_config,
    check_numbers,
    check_token_ids,
    only_stated,
    reads_prompts,
    sampling_temperature,
    split_options,
    with_defaults,
)
from fsd_infer.rules import Rule, parse_rules
from fsd_infer.targets.target import Target
from fsd_infer.targets.token_ids import eos_ids, left_pad, left_padded, pad_id


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
    """Return a request and its complete configuration, by the methods of ``generate`` (transformers 5.20 to 5.24).

    Args:
        target: its configuration supplies special tokens and lengths, but nothing that shapes the distribution.
        prompts: token ids, without padding.
        given: a configuration, or None.
        overrides: fields of the configuration, ``logits_processor``, ``stopping_criteria`` and
            ``prefix_allowed_tokens_fn``.

    Raises:
        FsdError: no prompt; an option that is unknown, invalid or not supported.
    """
    check_any(prompts)
    if given is not None and not isinstance(given, GenerationConfig):
        raise FsdError(f"generation_config is a GenerationConfig, got {type(given).__name__}.")
    model = target.model
    fields, processing, stopping = split_options(overrides, {*OWN, "drafter", "streamer", "callbacks"})
    # what the request sets, and what the model does, whose lengths count unless the request sets one
    requested = _given({} if given is None else vars(given)) | _given(fields)
    model_fields = _given(vars(model.generation_config))
    replaced = LENGTHS - requested.keys() if LENGTHS & requested.keys() else frozenset[str]()
    stated = {name: model_fields[name] for name in model_fields.keys() & LENGTHS - replaced} | requested
    check_numbers(stated)
    check_token_ids(requested, target.vocab_size)
    fields = with_defaults(fields, stated)
    requested = requested | _given(fields)
    named = ", ".join([*fields, *([] if given is None else ["generation_config"])]) or "of the model's own config"
    with foreign_errors(FsdError, f"transformers refuses these options ({named}): {{why}}"):
        if given is not None:  # transformers warns of keywords next to a configuration
            given = copy.deepcopy(given)
            given.update(**_given(fields))
            fields = {name: None for name, value in fields.items() if value is None}
        config: GenerationConfig = model._prepare_generation_config(given, **fields)[0]
        only_stated(config, requested)
        vars(config).update(dict.fromkeys(replaced))
        check_config(config, model.generation_config)
        if not eos_ids(config):  # transformers fails on an empty list, unless there is a padding token
            config.eos_token_id = None
        _check_stop_strings(config, target)
        return _complete_request(
            target, prompts, config, stated.keys() | requested.keys(), processing, stopping
        ), config


def _complete_request(
    target: Target,
    prompts: list[list[int]],
    config: GenerationConfig,
    stated: Collection[str],
    processing: Mapping[str, Any],
    stopping: list[Any],
) -> Request:
    """Fill in a configuration's special tokens and lengths for these prompts, and make its processors and criteria."""
    model, device, length = target.model, target.device, max(map(len, prompts))
    model._prepare_special_tokens(config, True, device=device, batch_size=len(prompts))
    model._prepare_generated_length(
        config, "max_length" not in stated, "min_length" not in stated, "input_ids", length, inputs_tensor=None
    )
    model._validate_generated_length(config, length, "max_length" not in stated)
    pad = pad_id(config)
    ids, mask = left_pad(prompts, pad, device) if reads_prompts(config) else (None, None)
    processors = model._get_logits_processor(
        config, length, ids, device=device, model_kwargs={"attention_mask": mask}, **processing
    )
    criteria = model._get_stopping_criteria(config, stopping, target.tokenizer)
    if (config.num_beams or 1) == 1:
        prompts = [prompt for prompt in prompts for _ in range(config.num_return_sequences or 1)]
    padded = left_padded(prompts, pad) if any(len(prompt) < length for prompt in prompts) else None
    return request_of(prompts, padded, config, processors, criteria)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def check_any(prompts: Sequence[Any]) -> None:
    """Raise FsdError if there are no prompts."""
    if not prompts:
        raise FsdError("no prompts: give at least one.")


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
        FsdError: there is no length limit, or no prompt.
    """
    check_any(prompts)
    limits = [one.max_length for one in criteria or [] if isinstance(one, MaxLengthCriteria)]
    if not limits:
        raise FsdError("no length limit: give max_new_tokens or max_length.")
    if not all(isinstance(limit, Integral) for limit in limits):
        raise FsdError(f"max_new_tokens and max_length must be whole numbers, got a limit of {min(limits)} tokens.")
    length = len((padded or prompts)[0])
    if min(limits) <= length:
        raise FsdError(f"max_length is {min(limits)}, but counts the prompt, which has {length} tokens: raise it.")
    ends = [one.eos_token_id for one in criteria or [] if isinstance(one, EosTokenCriteria)]
    others = [one for one in criteria or [] if not isinstance(one, (MaxLengthCriteria, EosTokenCriteria))]
    return Request(
        prompts=prompts,
        max_new_tokens=int(min(limits)) - length,
        greedy=not config.do_sample,
        processors=processors,
        criteria=StoppingCriteriaList(others),
        eos_token_ids=frozenset(torch.cat(ends).tolist() if ends else ()),
        padded_prompts=padded,
    )


def decode_request(
    target: Target,
    drafter: Drafter,
    config: FuzzyConfig,
    request: Request,
    complete: GenerationConfig,
    streamer: Any = None,
) -> Outcome:
    """Decode a prepared request; the caller ends the streamer.

    Args:
        target: to decode with; a drafter that was loaded for this model brings the target that it reads.
        drafter: drafter of the request.
        config: the request's own fields.
        request: with callbacks, if any.
        complete: all fields of transformers', as prepared.
        streamer: streamer of the only answer.

    Raises:
        FsdError: an invalid argument; and as :func:`fsd_infer.engine.decode`.
    """
    if not isinstance(drafter, Drafter):
        raise FsdError(f"drafter is a Drafter, got {type(drafter).__name__}: decoder.load_drafter(NAME) loads one.")
    target, given = drafter.target or target, target
    if target.model is not given.model:
        raise ModelLoadError(
            "the drafter was made for another model object than the one that generates: take "
            "FuzzyDecoder.from_pretrained(model, head, tokenizer).drafter."
        )
    if complete.do_sample and config.seed is None and target.is_sharded:
        raise FsdError("the target is sharded over processes: give all of them one seed, so that they draw the same.")
    rules, drafter = _rules(config, complete, target, drafter)
    beams, answers = complete.num_beams or 1, complete.num_return_sequences or 1
    _check_watchers(config, request, beams, streamer)
    request = replace(
        request,
        generator=None if config.seed is None else torch.Generator(device=target.device).manual_seed(config.seed),
        callbacks=[*([] if streamer is None else [_streamed(streamer)]), *request.callbacks],
        users=_per_answer(config.users, answers if beams == 1 else 1, len(request.prompts)),
        measure_log_likelihood=config.measure_log_likelihood,
        max_cache_bytes=config.max_cache_bytes,
    )
    if beams > 1:
        return decode_beams(target, drafter, rules, request, complete, BeamOptions.of(config.beams))
    if streamer is not None:
        streamer.put(torch.tensor(request.padded_prompts or request.prompts))
    return decode(target, drafter, rules[0] if len(rules) == 1 else [r for r in rules for _ in range(answers)], request)


def _rules(
    config: FuzzyConfig, complete: GenerationConfig, target: Target, drafter: Drafter
) -> tuple[list[Rule], Drafter]:
    """Return the rules of a request, and the drafter with its trees."""
    temperature = sampling_temperature(complete)
    rule = with_quality(config.rule, config.quality)
    if rule != CALIBRATED:
        return parse_rules(resolved(rule, drafter, target, temperature)), with_tree(drafter, config.tree)
    if config.tree is not None:
        raise FsdError("rule 'calibrated' brings a tree with it: leave tree out, or name a rule.")
    calibrated_rule, drafter = calibrated(drafter, target, temperature)
    return [calibrated_rule], drafter


def _check_watchers(config: FuzzyConfig, request: Request, beams: int, streamer: Any) -> None:
    """Raise FsdError for what needs one text that grows, or beams that compete, where there is none."""
    if beams > 1 and streamer is not None:
        raise FsdError("a streamer shows one growing answer, but beams change places: leave it out, or num_beams=1.")
    if beams == 1 and config.beams is not None:
        raise FsdError("beams are options of beam search: set num_beams to more than 1, or leave them out.")
    if streamer is not None and len(request.prompts) > 1:
        raise FsdError("a streamer shows one answer: pass one prompt.")
    if not isinstance(request.callbacks, Sequence):
        raise FsdError(f"callbacks is a list of fsd_infer.Callback objects, got {request.callbacks!r:.60}.")
    for watcher in request.callbacks:
        if not isinstance(watcher, Callback):
            raise FsdError(f"callbacks lists objects of subclasses of fsd_infer.Callback, got {watcher!r:.60}.")


def _per_answer(users: Sequence[str] | None, answers: int, count: int) -> list[str] | None:
    """Repeat the users per answer. Raises FsdError unless there is one per prompt."""
    if users is None:
        return None
    listed = isinstance(users, Sequence) and not isinstance(users, str)
    if not listed or len(users) * answers != count or not all(isinstance(user, str) for user in users):
        raise FsdError("users is a list of texts, one per prompt.")
    return [user for user in users for _ in range(answers)]


def _streamed(streamer: Any) -> Streaming:
    """Return the callback that passes the tokens to a streamer, one by one."""

    def put(row: int, tokens: list[int]) -> None:
        for token in tokens:
            streamer.put(torch.tensor([token]))

    return Streaming(put)


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
    """Raise FsdError for stop strings that are no text or empty, or if there is no tokenizer to find them.

    An empty list becomes None.
    """
    texts = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings
    if not texts:
        config.stop_strings = None  # transformers fails on an empty list
        return
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise FsdError(f"stop_strings must be one text, or a list of texts, none of them empty; got {texts!r:.60}.")
    for text in texts:
        check_text(text, "stop_strings")
    need_tokenizer(target.tokenizer, target.name)
