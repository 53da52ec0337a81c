"""The loop for transformers: ``model.generate(ids, custom_generate=fsd_infer.generate, drafter=...)``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fsd_core.tensors import lists
from fsd_infer.decoder import former
from fsd_infer.decoder.config import request_config
from fsd_infer.decoder.requests import decode_request, ending, request_of, target_of
from fsd_infer.drafters import Drafter, TreeShape
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine import Outcome, Request
from fsd_infer.engine.beams import BeamOptions
from fsd_infer.engine.callback import Callback
from fsd_infer.request.options import check_config, check_inputs, refusal
from fsd_infer.rules import RuleLike
from fsd_infer.targets.token_ids import pad_id


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    drafter: str | Path | Drafter | None = None,
    stream_to: Any = None,
    callbacks: Sequence[Callback] = (),
    rule: RuleLike | None = None,
    quality: float | None = None,
    tree: TreeShape | str | None = None,
    seed: int | None = None,
    max_cache_bytes: int | None = None,
    beams: BeamOptions | Mapping[str, Any] | str | None = None,
    beam_options: BeamOptions | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode speculatively: ``model.generate(ids, custom_generate=fsd_infer.generate, drafter=..., rule=...)``.

    Threads that share a model take turns, request by request. ``generate`` finds a custom loop's options in its
    signature, so six fields of :class:`.FuzzyConfig` are listed here; a FuzzyConfig as ``generation_config`` holds
    them, too. ``generate`` keeps its ``streamer`` and ``assistant_model`` to itself, so they are refused: use
    ``stream_to`` and ``drafter``.

    Args:
        model: the target.
        input_ids: [B, T] prompts, as ``generate`` prepares them.
        logits_processor: as ``generate`` prepares it.
        stopping_criteria: as ``generate`` prepares them. They receive only the text; ``scores`` is None. Stop strings
            need an explicit ``StopStringCriteria``, since ``generate`` does not pass its tokenizer.
        generation_config: as ``generate`` prepares it.
        drafter: see :func:`load_drafter`; None: the shipped head of a built-in target. A name is loaded on every call,
            so pass a Drafter object in a loop.
        stream_to: a streamer. It receives the prompt, every token, and ``end()``, also after an error.
        callbacks: that watch the request, see :class:`.Callback`.
        rule: see :class:`.FuzzyConfig`, as for ``quality``, ``tree``, ``seed``, ``max_cache_bytes`` and ``beams``.
        beam_options: former name of ``beams``.
        model_kwargs: other arguments of ``generate``.

    Returns:
        ids [B, prompt + longest answer], right-padded, as ``generate`` returns them. With ``return_dict_in_generate`` a
        ``GenerateDecoderOnlyOutput`` with ``stats`` and, with beams, ``sequences_scores``.

    Raises:
        FsdError: an unsupported argument of ``generate`` or field of the configuration; and as
            :func:`fsd_infer.engine.decode`.
    """
    assert generation_config is not None
    kept = _kept_back()
    with ending(kept.get("streamer")):
        for name, value in kept.items():
            raise refusal(name, value)
    named = dict(rule=rule, quality=quality, tree=tree, seed=seed, max_cache_bytes=max_cache_bytes, beams=beams)
    given = {name: value for name, value in {**named, "beam_options": beam_options}.items() if value is not None}
    config, _ = request_config(generation_config, former.request_options(None, (), given)[2])
    with ending(stream_to), (target := target_of(model)).lock:
        request = _prepared(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        request.callbacks, drafter = callbacks, load_drafter(drafter, target)
        outcome = decode_request(target, drafter, config, request, generation_config, stream_to)
    return _output(input_ids, outcome, generation_config)


def _kept_back() -> dict[str, Any]:
    """Return the arguments of transformers' ``generate`` that it does not pass on to its custom loop, our caller."""
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    held = {} if frame is None else frame.f_locals
    loop = held.get("custom_generate")
    if getattr(loop, "func", loop) is not generate:  # another custom loop, which calls us
        return {}
    return {name: held[name] for name in ("streamer", "assistant_model") if held.get(name) is not None}


def _prepared(
    model: Any,
    input_ids: Tensor,
    processors: LogitsProcessorList | None,
    criteria: StoppingCriteriaList | None,
    config: GenerationConfig,
    model_inputs: Mapping[str, Any],
) -> Request:
    """Return a request from what ``generate`` passes to a custom loop."""
    check_config(config, model.generation_config)
    kept = check_inputs(input_ids, model_inputs)
    beams = config.num_beams or 1  # generate repeats each prompt per beam
    texts, kept = lists(input_ids[::beams], kept[::beams])
    prompts = [[token for token, keep in zip(*row) if keep] for row in zip(texts, kept)]
    return request_of(prompts, texts, config, processors, criteria)


def _output(input_ids: Tensor, outcome: Outcome, config: GenerationConfig) -> Tensor | GenerateDecoderOnlyOutput:
    """Return prompts [B, T] and answers as ``generate`` does."""
    longest, pad = max(len(sequence) for sequence in outcome.sequences), pad_id(config)
    answers = [sequence + [pad] * (longest - len(sequence)) for sequence in outcome.sequences]
    if outcome.scores is not None:  # generate repeated each prompt per beam
        input_ids = input_ids[torch.arange(len(answers), device=input_ids.device) * len(input_ids) // len(answers)]
    sequences = torch.cat([input_ids, input_ids.new_tensor(answers)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    output = GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    output["stats"] = outcome.stats
    if outcome.scores is not None:
        output["sequences_scores"] = torch.tensor(outcome.scores, device=input_ids.device)
    return output
