"""Both sides of transformers' ``custom_generate``: our loop for it, and what it hands to a loop as a request."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fsd_infer.beams import BeamOptions, decode_beams
from fsd_infer.decoder.calibrated import CALIBRATED, calibrated
from fsd_infer.device.transfer import lists
from fsd_infer.drafters import Drafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine import Outcome, Request, decode
from fsd_infer.errors import FsdError, ModelLoadError
from fsd_infer.request.options import check_config, check_inputs, refusal
from fsd_infer.rules import Rule, RuleLike, parse_rules
from fsd_infer.targets.target import Target
from fsd_infer.targets.token_ids import pad_id


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: Any = None,
    drafter: str | Path | Drafter | None = None,
    rule: RuleLike = "exact",
    seed: int | None = None,
    stream_to: Any = None,
    max_cache_bytes: int | None = None,
    beam_options: BeamOptions | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The loop for transformers: ``model.generate(ids, custom_generate=fsd_infer.generate, drafter=..., rule=...)``.

    Threads may share a model: they take turns, request by request.

    Args:
        model: the target; the other leading arguments are what ``generate`` prepares.
        streamer: as of ``generate``. It gets the prompt, every token, and ``end()`` also where an error is raised.
        drafter: see :func:`load_drafter`; None: the shipped head if the model is a built-in target. A name is loaded
            on every call, so pass a Drafter object in a loop.
        rule: acceptance rule or its name, or a list of them, one per prompt; or "calibrated", see
            ``FuzzyDecoder.generate``.
        stopping_criteria: they are called with the text alone, ``scores`` is None. Stop strings need an explicit
            ``StopStringCriteria``: ``generate`` keeps the tokenizer from custom loops.
        seed: of the draws at temperature > 0.
        stream_to: another name for ``streamer``.
        max_cache_bytes: refuse a request whose key-value caches take more (CacheMemoryError); None: more than is free.
        beam_options: with ``num_beams`` > 1, how beams are drafted.

    Returns:
        ids [B, prompt + longest answer], right-padded, as ``generate`` returns them; with ``return_dict_in_generate``
        a ``GenerateDecoderOnlyOutput`` that also has ``stats``, and with beams ``sequences_scores``.

    Raises:
        FsdError: an argument of ``generate``, or a field of the configuration, that is not honoured; and as
            :func:`fsd_infer.engine.decode`.
    """
    assert generation_config is not None
    withheld = _withheld(model)
    shown = withheld.get("streamer")  # it has the prompt already
    streamers = [one for one in (shown, streamer, stream_to) if one is not None]
    with ending(streamers[0] if streamers else None) as streamer:
        if any(one is not streamer for one in streamers):
            raise FsdError("streamer and stream_to are two names for one thing: give either.")
        if withheld.get("assistant_model") is not None:
            raise refusal("assistant_model", None)
        target = target_of(model)
        with target.lock:
            outcome = decode_prepared(
                target,
                load_drafter(drafter, target),
                chosen_rules(rule),
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=streamer,
                show_prompt=shown is None,
                seed=seed,
                max_cache_bytes=max_cache_bytes,
                beam_options=beam_options,
                **model_kwargs,
            )
    longest = max(len(sequence) for sequence in outcome.sequences)
    pad = pad_id(generation_config)
    answers = [sequence + [pad] * (longest - len(sequence)) for sequence in outcome.sequences]
    if outcome.scores is not None:  # the prompts came once per beam
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
    """The (one) Target that wraps a transformers model. The model holds it, so that both are freed together."""
    held = vars(model)  # not getattr: wrappers would answer for the model within
    if "_fsd_target" not in held:
        held["_fsd_target"] = Target(model)
    return held["_fsd_target"]


def _withheld(model: Any) -> dict[str, Any]:
    """What ``generate`` was given and does not hand to a custom loop, by name: ``streamer``, ``assistant_model``.

    It passes over both without a word (transformers 5.16 to 5.23), so they are read off its frame.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or frame.f_locals.get("self") is not model:
        return {}
    return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model")}


_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


@contextmanager
def ending(streamer: Any) -> Iterator[Any]:
    """Ends the streamer whatever happens: one that hands its text to another thread must not let it wait for ever.

    Raises FsdError for what is no streamer.
    """
    if streamer is not None and not (
        callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))
    ):
        raise FsdError(f"a streamer has put() and end(), as those of transformers; got {type(streamer).__name__}.")
    try:
        yield streamer
    finally:
        if streamer is not None:
            streamer.end()


def chosen_rules(rule: RuleLike) -> list[Rule] | None:
    """Rules as :func:`decode_prepared` takes them; errors as of :func:`.parse_rules`."""
    return None if isinstance(rule, str) and rule == CALIBRATED else parse_rules(rule)


def decode_prepared(
    target: Target,
    drafter: Drafter,
    rules: list[Rule] | None,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    generation_config: GenerationConfig,
    streamer: Any = None,
    show_prompt: bool = True,
    on_tokens: Callable[[int, list[int]], object] | None = None,
    seed: int | None = None,
    measure_log_likelihood: bool = False,
    max_cache_bytes: int | None = None,
    beam_options: BeamOptions | None = None,
    attention_mask: Tensor | None = None,
    **model_inputs: Any,
) -> Outcome:
    """Decode what ``generate`` has prepared for a loop: the one body of every loop of this package.

    Args:
        target, drafter: what decodes.
        rules: one for all prompts, or one per prompt; None: the one that was calibrated for drafter and temperature.
        input_ids: [B, T], with padding.
        logits_processor, stopping_criteria, generation_config, attention_mask, model_inputs: as prepared.
        streamer: gets the prompt, if ``show_prompt``, and the tokens; the caller ends it.
        on_tokens, seed, measure_log_likelihood, max_cache_bytes, beam_options: see ``FuzzyDecoder.generate``.

    Raises:
        FsdError: what would not be honoured; and as :func:`fsd_infer.engine.decode`.
    """
    if not isinstance(drafter, Drafter):
        raise FsdError(f"drafter is a Drafter, got {type(drafter).__name__}: load_drafter makes one of a name.")
    if max_cache_bytes is not None and (isinstance(max_cache_bytes, bool) or not isinstance(max_cache_bytes, int)):
        raise FsdError(f"max_cache_bytes is a whole number of bytes, got {max_cache_bytes!r:.60}.")
    made_for: Target = drafter.target or target
    if made_for.model is not target.model:
        raise ModelLoadError("the drafter was made for another model object than the one that generates.")
    if rules is None:
        temperature = generation_config.temperature if generation_config.do_sample else 0.0
        rule, drafter = calibrated(drafter, made_for, 1.0 if temperature is None else temperature)
        rules = [rule]
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if generation_config.do_sample and seed is None and made_for.is_shared_out:
        raise FsdError("the target is shared out over processes, which must draw the same: give all of them one seed.")
    check_config(generation_config, target.model.generation_config)
    check_inputs(input_ids, mask, model_inputs)
    beams = generation_config.num_beams or 1
    if beams == 1 and beam_options is not None:
        raise FsdError("beam_options are about beams: set num_beams to more than 1, or leave them out.")
    input_ids, mask = input_ids[::beams], mask[::beams]  # each prompt comes once per beam
    if streamer is not None and input_ids.shape[0] > 1:
        raise FsdError("a streamer shows one answer: pass one prompt.")
    criteria = list(stopping_criteria or [])
    limits = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    if not limits:
        raise FsdError("no length limit: give max_new_tokens or max_length.")
    if not all(isinstance(limit, int) for limit in limits):
        raise FsdError(f"max_new_tokens and max_length must be whole numbers, got a limit of {min(limits)} tokens.")
    eos = [set(criterion.eos_token_id.tolist()) for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
    others = [one for one in criteria if not isinstance(one, (MaxLengthCriteria, EosTokenCriteria))]

    texts, kept = lists(input_ids, mask)  # the prompts on the host, at once

    def stream(row: int, tokens: list[int]) -> None:
        for token in tokens:
            streamer.put(torch.tensor([token]))

    request = Request(
        prompts=[[token for token, keep in zip(*row, strict=True) if keep] for row in zip(texts, kept, strict=True)],
        max_new_tokens=min(limits) - input_ids.shape[1],
        greedy=not generation_config.do_sample,
        processors=logits_processor,
        criteria=StoppingCriteriaList(others),
        eos_token_ids=frozenset().union(*eos),
        generator=_generator(seed, input_ids.device),
        on_tokens=on_tokens if streamer is None else stream,
        padded_prompts=list(torch.tensor(texts)),
        measure_log_likelihood=measure_log_likelihood,
        max_cache_bytes=max_cache_bytes,
    )
    if beams > 1:
        return decode_beams(made_for, drafter, rules, request, generation_config, beam_options)
    if streamer is not None and show_prompt:
        streamer.put(torch.tensor(texts))
    answers = generation_config.num_return_sequences or 1  # per prompt, one after the other
    return decode(
        made_for, drafter, rules[0] if len(rules) == 1 else [r for r in rules for _ in range(answers)], request
    )


def _generator(seed: int | None, device: torch.device) -> torch.Generator | None:
    """A generator of that seed; None without one."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise FsdError(f"seed must be a whole number of at most 64 bits, got {seed!r}.")
    return torch.Generator(device=device).manual_seed(seed)
