"""Our decoding loop for transformers' ``generate``, which takes it as ``custom_generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fsd_infer.beams import BeamOptions
from fsd_infer.decoder.requests import decode_request, ending, request_of
from fsd_infer.device.transfer import lists
from fsd_infer.drafters import Drafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.request.options import check_config, check_inputs
from fsd_infer.rules import RuleLike
from fsd_infer.targets.target import Target
from fsd_infer.targets.token_ids import pad_id


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
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

    ``generate`` hands neither its ``streamer`` nor its ``assistant_model`` to a loop, so no loop can refuse them: give
    the one as ``stream_to``, and the other as ``drafter``.

    Args:
        model: the target; the other leading arguments are what ``generate`` prepares.
        drafter: see :func:`load_drafter`; None: the shipped head if the model is a built-in target. A name is loaded
            on every call, so pass a Drafter object in a loop.
        rule: acceptance rule or its name, or a list of them, one per prompt; or "calibrated", see
            ``FuzzyDecoder.generate``.
        stopping_criteria: they are called with the text alone, ``scores`` is None. Stop strings need an explicit
            ``StopStringCriteria``: ``generate`` keeps the tokenizer from custom loops.
        seed: of the draws at temperature > 0.
        stream_to: a streamer. It gets the prompt, every token, and ``end()`` also where an error is raised.
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
    with ending(stream_to), (target := target_of(model)).lock:
        check_config(generation_config, model.generation_config)
        kept = check_inputs(input_ids, model_kwargs)
        beams = generation_config.num_beams or 1  # each prompt comes once per beam
        texts, kept = lists(input_ids[::beams], kept[::beams])  # on the host, at once
        prompts = [[token for token, keep in zip(*row) if keep] for row in zip(texts, kept)]
        outcome = decode_request(
            target,
            load_drafter(drafter, target),
            rule,
            request_of(prompts, texts, generation_config, logits_processor, stopping_criteria),
            generation_config,
            streamer=stream_to,
            seed=seed,
            max_cache_bytes=max_cache_bytes,
            beam_options=beam_options,
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
