"""Both sides of transformers' ``custom_generate``: our loop for it, and what it hands to a loop as a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fsd_infer.drafters import Drafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine import Request, decode
from fsd_infer.errors import FsdError, ModelLoadError
from fsd_infer.rules import Rule, parse_rule
from fsd_infer.target import Target
from fsd_infer.targets.token_ids import pad_id


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    drafter: str | Path | Drafter | None = None,
    rule: str | Rule = "exact",
    seed: int | None = None,
    stream_to: Any = None,
    max_cache_bytes: int | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The loop for transformers: ``model.generate(ids, custom_generate=fsd_infer.generate, drafter=..., rule=...)``.

    Args:
        model: the target; the other leading arguments are what ``generate`` prepares.
        drafter: see :func:`load_drafter`; None: the shipped head if the model is a built-in target. A name is loaded
            on every call, so pass a Drafter object in a loop.
        rule: acceptance rule or its name.
        stopping_criteria: they are called with the text alone, ``scores`` is None.
        seed: of the draws at temperature > 0.
        stream_to: a streamer. ``generate`` shows its own ``streamer`` argument the prompt but does not hand it on to
            custom loops; for the same reason stop strings need an explicit ``StopStringCriteria``.
        max_cache_bytes: refuse a request whose key-value caches take more (CacheMemoryError); None: more than is free.

    Returns:
        ids [B, prompt + longest answer], right-padded, as ``generate`` returns them; with ``return_dict_in_generate``
        a ``GenerateDecoderOnlyOutput`` that also has ``stats``.
    """
    assert generation_config is not None
    if isinstance(drafter, Drafter) and getattr(drafter, "target", None) is not None:
        target = drafter.target  # type: ignore[attr-defined]
        if target.model is not model:
            raise ModelLoadError("the drafter was made for another model object than the one that generates.")
    else:
        target = target_of(model)
    request = prepared_request(
        input_ids,
        model_kwargs.get("attention_mask"),
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer or stream_to,
        seed,
    )
    request.max_cache_bytes = max_cache_bytes
    outcome = decode(target, load_drafter(drafter, target), parse_rule(rule), request)
    longest = max(len(sequence) for sequence in outcome.sequences)
    pad = pad_id(generation_config)
    answers = [sequence + [pad] * (longest - len(sequence)) for sequence in outcome.sequences]
    sequences = torch.cat([input_ids, input_ids.new_tensor(answers)], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    output = GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    output["stats"] = outcome.stats
    return output


def target_of(model: Any) -> Target:
    """The (one) Target that wraps a transformers model. The model holds it, so that both are freed together."""
    held = vars(model)  # not getattr: wrappers would answer for the model within
    if "_fsd_target" not in held:
        held["_fsd_target"] = Target(model)
    return held["_fsd_target"]


def prepared_request(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    processors: LogitsProcessorList | None,
    criteria: StoppingCriteriaList | None,
    config: GenerationConfig,
    streamer: Any,
    seed: int | None,
) -> Request:
    """A prepared ``generate`` call as a :class:`Request`: padding stripped, end-of-sequence and length taken apart."""
    if (config.num_beams or 1) > 1:
        raise FsdError("beam search cannot be combined with speculative decoding: set num_beams=1.")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise FsdError(f"{name} is not kept by speculative decoding: leave it out, or ask the model itself.")
    if streamer is not None and input_ids.shape[0] > 1:
        raise FsdError("a streamer shows one answer: pass one prompt.")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = [ids[keep.bool()].tolist() for ids, keep in zip(input_ids, mask, strict=True)]
    eos: set[int] = set()
    limit = None
    others = StoppingCriteriaList()
    for criterion in criteria or []:
        if isinstance(criterion, EosTokenCriteria):
            eos |= set(criterion.eos_token_id.tolist())
        elif isinstance(criterion, MaxLengthCriteria):
            limit = criterion.max_length - input_ids.shape[1]
        else:
            others.append(criterion)
    if limit is None:
        raise FsdError("no length limit: give max_new_tokens or max_length.")
    generator = None if seed is None else torch.Generator(device=input_ids.device).manual_seed(seed)

    def stream(row: int, tokens: list[int]) -> None:
        for token in tokens:
            streamer.put(torch.tensor([token]))

    return Request(
        prompts=prompts,
        max_new_tokens=limit,
        greedy=not config.do_sample,
        processors=processors,
        criteria=others,
        eos_token_ids=frozenset(eos),
        generator=generator,
        on_tokens=None if streamer is None else stream,
        on_end=None if streamer is None else streamer.end,
        padded_prompts=list(input_ids),
    )
