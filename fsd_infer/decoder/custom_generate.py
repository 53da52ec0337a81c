"""Our decoding loop as the ``custom_generate`` argument of transformers' ``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fsd_infer.decoder.requests import decode_request, ending, request_of
from fsd_infer.device.transfer import lists
from fsd_infer.drafters import Drafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine.beams import BeamOptions
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
    with ending(stream_to), (target := target_of(model)).lock:
        check_config(generation_config, model.generation_config)
        kept = check_inputs(input_ids, model_kwargs)
        beams = generation_config.num_beams or 1  # generate repeats each prompt per beam
        texts, kept = lists(input_ids[::beams], kept[::beams])
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
        held["_fsd_target"] = Target(model)
    return held["_fsd_target"]
