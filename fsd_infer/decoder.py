"""The public API: :class:`FuzzyDecoder`, and :func:`generate` for ``model.generate(custom_generate=...)``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fsd_infer.calibrate import AUTO, calibration_prompts, head_of, tune
from fsd_infer.checkpoint import is_head
from fsd_infer.drafters import (
    Drafter,
    EagleDrafter,
    GraftedDrafter,
    LMDrafter,
    LookupDrafter,
    NoDrafter,
    TreeShape,
)
from fsd_infer.drafters.eagle import DEFAULT_SHAPES
from fsd_infer.drafters.lm import load_lm
from fsd_infer.engine import Outcome, Request, decode
from fsd_infer.errors import FsdError, ModelLoadError, UnknownNameError
from fsd_infer.fuse import speed_up
from fsd_infer.models import shipped_drafter
from fsd_infer.prompts import encode_chat
from fsd_infer.rules import Rule, parse_rule
from fsd_infer.stats import GenerationStats, RowRecord
from fsd_infer.target import Target

GRAFT = "+lookup"

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass
class Generation:
    """What :meth:`FuzzyDecoder.generate` returns.

    Attributes:
        sequences: new tokens only, one list per prompt.
        texts: the same decoded without special tokens (empty strings without a tokenizer).
        stats: see :class:`GenerationStats`.
        records: per prompt, per token: source, gate flag, nats spent.
    """

    sequences: list[list[int]]
    texts: list[str]
    stats: GenerationStats
    records: list[RowRecord]


class FuzzyDecoder:
    """A target with a drafter.

    Args:
        target: the wrapped model.
        drafter: see :func:`load_drafter` for what a name may be.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter

    @classmethod
    def from_pretrained(
        cls,
        target: str = "smollm2-135m",
        drafter: str | Path | Drafter | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        tree: TreeShape | str | None = None,
        pack: bool = True,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        revision: str | None = None,
    ) -> FuzzyDecoder:
        """Load target and drafter.

        Args:
            target: a built-in name, a local directory or a hub id.
            drafter: see :func:`load_drafter`; None for the head shipped with a built-in target.
            dtype: of both; default bf16.
            device: default CUDA if there is one.
            tree: depth, width and nodes of the draft tree; default by device. "auto": measure for a few seconds which
                tree is fastest here with this target and head, once (see :mod:`fsd_infer.calibrate`).
            pack: on a CPU, run the usual decoder blocks in fewer operations and, in bf16, keep the linear layers'
                weights in the layout oneDNN computes in (see :func:`fsd_infer.fuse.speed_up`).
            trust_remote_code: allow the model's repository to run its own code.
            attn_implementation: passed to transformers.
            revision: of a hub model.

        Raises:
            ModelLoadError, CheckpointError, VocabularyMismatchError: each names the thing and the mend.
        """
        wrapped = Target.from_pretrained(
            target,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            revision=revision,
        )
        if pack:
            speed_up(wrapped.model)
        decoder = cls(wrapped, NoDrafter(wrapped.vocab_size))
        decoder.drafter = decoder.load_drafter(drafter, tree, pack=pack)
        return decoder

    def load_drafter(
        self, drafter: str | Path | Drafter | None, tree: TreeShape | str | None = None, *, pack: bool = True
    ) -> Drafter:
        """Another drafter for this target; arguments and errors as for :meth:`from_pretrained`."""
        if isinstance(tree, str) and tree != AUTO:
            raise FsdError(f'tree is a TreeShape or "{AUTO}", got {tree!r}.')
        made = load_drafter(drafter, self.target, None if isinstance(tree, str) else tree)
        if pack:
            for module in made.modules():
                speed_up(module)
        if tree == AUTO and head_of(made) is not None:  # other drafters have no tree to choose
            self.tune(made)
        return made

    def tune(self, drafter: Drafter | None = None, *, refresh: bool = False) -> TreeShape:
        """Give the drafter (default: the decoder's own) the fastest tree here; see :func:`fsd_infer.calibrate.tune`."""
        encode = None if self.tokenizer is None else self.encode
        prompts = calibration_prompts(encode, self.target.vocab_size)
        return tune(drafter or self.drafter, self.target, prompts, refresh=refresh)

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def encode(self, prompt: Prompt, chat: bool | None = None) -> list[int]:
        """Token ids of one prompt.

        Args:
            prompt: text, chat messages, or ids (returned as they are).
            chat: wrap text in the chat template; None: if the tokenizer has one.
        """
        if isinstance(prompt, str):
            tokenizer = self._need_tokenizer()
            if not prompt.strip():
                raise FsdError("the prompt is empty: give some text.")
            if chat or (chat is None and tokenizer.chat_template):
                return encode_chat(tokenizer, [{"role": "user", "content": prompt}])
            return list(tokenizer(prompt).input_ids)
        items = list(prompt)
        if items and isinstance(items[0], Mapping):
            return encode_chat(self._need_tokenizer(), items)  # type: ignore[arg-type]
        if not items:
            raise FsdError("the prompt is empty: give at least one token.")
        return [int(token) for token in items]  # type: ignore[call-overload]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Tensor,
        rule: str | Rule = "exact",
        *,
        generation_config: GenerationConfig | None = None,
        drafter: Drafter | None = None,
        seed: int | None = None,
        streamer: Any = None,
        chat: bool | None = None,
        measure_log_likelihood: bool = False,
        **overrides: Any,
    ) -> Generation:
        """Decode one prompt or a batch of prompts of any lengths.

        Args:
            prompts: text, messages or ids; or a list of these; or a tensor of ids [T] or [B, T].
            rule: a rule or its name, e.g. ``Fuzzy("js", threshold=0.3)`` or ``"fuzzy:js:0.3"``.
            generation_config: as in transformers; default the model's own.
            drafter: another drafter for this call.
            seed: of the draws at temperature > 0; default torch's global generator.
            streamer: a transformers streamer (one prompt only).
            chat: see :meth:`encode`.
            measure_log_likelihood: also record the target's mean log-probability of the answer.
            overrides: ``max_new_tokens``, ``temperature``, ``do_sample``, ``stop_strings`` ... as in transformers.

        Raises:
            UnknownNameError, FsdError: unknown rule or divergence, empty prompt, unsupported option.
            ContextLengthError: a prompt that fills the target's context.
            NonFiniteLogitsError: the model's logits are NaN or all -inf.
        """
        chosen = parse_rule(rule)
        ids = [self.encode(prompt, chat) for prompt in _as_list(prompts)]
        if not ids:
            raise FsdError("no prompts: give at least one.")
        if streamer is not None and len(ids) > 1:
            raise FsdError("a streamer shows one answer: pass one prompt.")
        generation_config, overrides = self._stop_strings(generation_config, overrides)
        if overrides.get("temperature") == 0:  # transformers refuses 0; everyone means greedy by it
            overrides.update(do_sample=False, temperature=None)
        input_ids, attention_mask = _left_pad(ids, self.target)
        captured: list[Outcome] = []

        def loop(
            model: Any,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Tensor:
            request = _request(
                input_ids, attention_mask, logits_processor, stopping_criteria, generation_config, streamer, seed
            )
            request.measure_log_likelihood = measure_log_likelihood
            captured.append(decode(self.target, drafter or self.drafter, chosen, request))
            return input_ids

        self.target.model.generate(
            input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            streamer=streamer,  # transformers shows it the prompt and keeps it from `loop`, which has it from here
            custom_generate=loop,
            **overrides,
        )
        outcome = captured[0]
        tokenizer = self.target.tokenizer
        texts = [tokenizer.decode(s, skip_special_tokens=True) if tokenizer else "" for s in outcome.sequences]
        return Generation(outcome.sequences, texts, outcome.stats, outcome.records)

    def _stop_strings(
        self, config: GenerationConfig | None, overrides: dict[str, Any]
    ) -> tuple[GenerationConfig | None, dict[str, Any]]:
        """Stop strings as a stopping criterion: transformers does not hand the tokenizer to custom loops."""
        stop = overrides.get("stop_strings") or (config.stop_strings if config is not None else None)
        if not stop:
            return config, overrides
        if config is not None:
            config = copy.deepcopy(config)
            config.stop_strings = None
        criteria = StoppingCriteriaList(overrides.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(self._need_tokenizer(), stop))
        return config, {**overrides, "stop_strings": None, "stopping_criteria": criteria}

    def _need_tokenizer(self) -> Any:
        if self.target.tokenizer is None:
            raise ModelLoadError(f"{self.target.name} has no tokenizer: pass token ids, or add its tokenizer files.")
        return self.target.tokenizer


def load_drafter(drafter: str | Path | Drafter | None, target: Target, tree: TreeShape | None = None) -> Drafter:
    """The drafter that a name stands for.

    Args:
        drafter: a Drafter (returned as it is), or one of

            ================  ===================================================================================
            None, "shipped"   the head shipped with a built-in target
            "none"            no drafts: plain decoding
            "lookup"          n-gram lookup in prompt and answer (:class:`LookupDrafter`)
            "X+lookup"        the same grafted onto the tree of X, any other of these names (:class:`GraftedDrafter`)
            a directory       a head checkpoint, or a causal LM of the target's vocabulary or a peft adapter for one
            a hub id          a causal LM of the target's vocabulary
            ================  ===================================================================================
        target: what it is to draft for.
        tree: shape of a head's tree; its depth is the chain length of a small LM, its nodes are those of "lookup" and
            of a grafted tree (by default as many as a head's tree has on this device).

    Raises:
        UnknownNameError, ModelLoadError, CheckpointError, VocabularyMismatchError: each names the thing and the mend.
    """
    if isinstance(drafter, Drafter):
        return drafter
    name = None if drafter is None else str(drafter)
    if name is not None and name.endswith(GRAFT):
        return _load_grafted(name[: -len(GRAFT)], target, tree)
    if name == LookupDrafter.name:
        return _load_lookup(target, tree)
    if drafter is None or name == "shipped":
        shipped = shipped_drafter(target.name)
        if shipped is None:
            raise ModelLoadError(
                f"no drafter is shipped for {target.name}: name a head trained with fsd-train, a small model of the "
                'same vocabulary, or "none" for plain decoding.'
            )
        drafter = shipped
    if name == "none":
        return NoDrafter(target.vocab_size)
    if is_head(drafter):
        return EagleDrafter.from_pretrained(drafter, target, tree)
    try:
        model = load_lm(drafter, target)
    except UnknownNameError:
        raise UnknownNameError(
            f"unknown drafter {str(drafter)!r}: it is no directory and no hub id (owner/model), and none of shipped, "
            f"none, lookup and X{GRAFT} (X any other of these)."
        ) from None
    return LMDrafter(model, target, tree.depth if tree else 5)


def _load_lookup(target: Target, tree: TreeShape | None) -> LookupDrafter:
    return LookupDrafter(target.vocab_size) if tree is None else LookupDrafter(target.vocab_size, nodes=tree.nodes)


def _load_grafted(main: str, target: Target, tree: TreeShape | None) -> Drafter:
    """ "X+lookup" for X = main. Grafted onto nothing, lookup is the tree."""
    if not main:
        raise ModelLoadError(f'"{GRAFT}" names no drafter to graft onto: write "shipped{GRAFT}" or "lookup".')
    onto = load_drafter(main, target, tree)
    if isinstance(onto, NoDrafter):
        return _load_lookup(target, tree)
    shape = tree or DEFAULT_SHAPES.get(target.device.type, DEFAULT_SHAPES["cuda"])
    nodes = max(shape.nodes, onto.max_nodes)
    return GraftedDrafter(onto, LookupDrafter(target.vocab_size, nodes=nodes), nodes)


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
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The loop for transformers: ``model.generate(ids, custom_generate=fsd_infer.generate, drafter=..., rule=...)``.

    Args:
        model: the target; the other leading arguments are what ``generate`` prepares.
        drafter: see :func:`load_drafter`; None: the shipped head if the model is a built-in target. A name is loaded
            on every call, so pass a Drafter object in a loop.
        rule: acceptance rule or its name.
        seed: of the draws at temperature > 0.
        stream_to: a streamer. ``generate`` shows its own ``streamer`` argument the prompt but does not hand it on to
            custom loops; for the same reason stop strings need an explicit ``StopStringCriteria``.

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
    request = _request(
        input_ids,
        model_kwargs.get("attention_mask"),
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer or stream_to,
        seed,
    )
    outcome = decode(target, load_drafter(drafter, target), parse_rule(rule), request)
    longest = max(len(sequence) for sequence in outcome.sequences)
    pad = _pad_id(generation_config)
    answers = [sequence + [pad] * (longest - len(sequence)) for sequence in outcome.sequences]
    sequences = torch.cat([input_ids, input_ids.new_tensor(answers)], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    output = GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    output["stats"] = outcome.stats
    return output


_TARGETS: weakref.WeakKeyDictionary[Any, Target] = weakref.WeakKeyDictionary()


def target_of(model: Any) -> Target:
    """The (one) Target that wraps a transformers model."""
    if model not in _TARGETS:
        _TARGETS[model] = Target(model)
    return _TARGETS[model]


def _request(
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


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many -> a list of prompts."""
    if isinstance(prompts, Tensor):
        return prompts.tolist() if prompts.dim() == 2 else [prompts.tolist()]
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and (isinstance(items[0], int) or isinstance(items[0], Mapping)):
        return [items]
    return items


def _left_pad(ids: list[list[int]], target: Target) -> tuple[Tensor, Tensor]:
    """[B, T] ids and mask, padded on the left as ``generate`` expects."""
    longest = max(len(row) for row in ids)
    pad = _pad_id(target.model.generation_config)
    tokens = [[pad] * (longest - len(row)) + row for row in ids]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
    return torch.tensor(tokens, device=target.device), torch.tensor(mask, device=target.device)


def _pad_id(config: GenerationConfig) -> int:
    for value in (config.pad_token_id, config.eos_token_id):
        value = value[0] if isinstance(value, list) else value
        if value is not None:
            return int(value)
    return 0
