"""The public API: :class:`FuzzyDecoder`, a target with a drafter."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from fsd_infer.chat.encoding import encode_chat
from fsd_infer.cpu.ops import speed_up
from fsd_infer.custom_generate import generate, prepared_request
from fsd_infer.device.cuda_graphs import CudaRecorder, Recorder
from fsd_infer.device.memory import give_back
from fsd_infer.drafters import Drafter, NoDrafter, TreeShape
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine import Outcome, decode
from fsd_infer.errors import FsdError, ModelLoadError
from fsd_infer.rules import Rule, parse_rule
from fsd_infer.stats import GenerationStats, RowRecord
from fsd_infer.target import Target
from fsd_infer.targets.token_ids import left_pad, pad_id
from fsd_infer.tuning.autotune import AUTO, calibration_prompts, head_of, tune

__all__ = ["FuzzyDecoder", "Generation", "Prompt", "generate", "load_drafter"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass
class Generation:
    """What :meth:`FuzzyDecoder.generate` returns.

    Attributes:
        sequences: new tokens only, one list per prompt; with ``num_return_sequences`` so many, prompt after prompt.
        texts: the same decoded without special tokens (empty strings without a tokenizer).
        stats: see :class:`GenerationStats`.
        records: per answer, per token: source, gate flag, nats spent.
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

    def __init__(self, target: Target, drafter: Drafter, quantize: bool = True) -> None:
        self.target = target
        self.drafter = drafter
        self.quantize = quantize
        self._recorder: Recorder | None = None

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
        quantize: bool = True,
        cuda_graphs: bool = False,
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
                tree is fastest here with this target and head, once (see :mod:`fsd_infer.tuning.autotune`).
            pack: on a CPU, run the usual decoder blocks in fewer operations and, in bf16, keep the linear layers'
                weights in the layout oneDNN computes in, and in that layout alone (see
                :func:`fsd_infer.cpu.ops.speed_up`). ``fsd_infer.cpu.ops.restore(decoder.target.model)`` undoes it.
            quantize: where our CPU kernels run, keep a head's weights as fp8 numbers with a scale per output (see
                :meth:`fsd_infer.cpu.packing.Packed.quantize`): a draft costs the time in which they are read. The
                target's stay as they are, so `exact` is as exact as without.
            cuda_graphs: see :meth:`use_graphs`.
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
            speed_up(wrapped.model, release=True)
        decoder = cls(wrapped, NoDrafter(wrapped.vocab_size), quantize)
        if cuda_graphs:
            decoder.use_graphs()
        decoder.drafter = decoder.load_drafter(drafter, tree, pack=pack)
        return decoder

    def use_graphs(self, recorder: Recorder | None = None) -> None:
        """Record what the models compute in a round as CUDA graphs, a shape at a time, and replay it.

        A forward over few tokens of a model in eager mode takes a GPU less time than starting its operations takes the
        host; replayed, it is started at once. A shape's first forward takes longer, keys and values lie in memory
        that is kept between requests, and a model that cannot be recorded (it looks at numbers while it runs, as many
        mixtures of experts do) runs as before, which a line of the log says.

        Args:
            recorder: how to record; by default by torch's CUDA graphs.

        Raises:
            FsdError: the target is not on a CUDA device.
        """
        if recorder is None and self.target.device.type != "cuda":
            raise FsdError(f"CUDA graphs need CUDA, but the target is on {self.target.device}: leave them out.")
        self._recorder = recorder or CudaRecorder(self.target.device)
        self.target.use_graphs(self._recorder)
        self.drafter.use_graphs(self._recorder)

    def load_drafter(
        self, drafter: str | Path | Drafter | None, tree: TreeShape | str | None = None, *, pack: bool = True
    ) -> Drafter:
        """Another drafter for this target; arguments and errors as for :meth:`from_pretrained`."""
        if isinstance(tree, str) and tree != AUTO:
            raise FsdError(f'tree is a TreeShape or "{AUTO}", got {tree!r}.')
        made = load_drafter(drafter, self.target, None if isinstance(tree, str) else tree)
        if pack:
            self.pack(made, release=not isinstance(drafter, Drafter))  # what was handed over is not ours alone
        if self._recorder is not None:
            made.use_graphs(self._recorder)
        if tree == AUTO and head_of(made) is not None:  # other drafters have no tree to choose
            self.tune(made)
        give_back()  # weights in the type and layout of their file came and went
        return made

    def pack(self, drafter: Drafter, release: bool) -> None:
        """:func:`.speed_up` for a drafter's modules; with ``release`` a head's weights may become fp8."""
        for module in drafter.modules():
            is_model = isinstance(module, PreTrainedModel)
            speed_up(module, release, quantize=release and self.quantize and not is_model)

    def tune(self, drafter: Drafter | None = None, *, refresh: bool = False) -> TreeShape:
        """Give the drafter (default: the decoder's own) the fastest tree here; see :func:`fsd_infer.tuning.tune`."""
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
        max_cache_bytes: int | None = None,
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
            max_cache_bytes: refuse a request whose key-value caches take more; default: more than is free.
            overrides: ``max_new_tokens``, ``temperature``, ``do_sample``, ``stop_strings`` ... as in transformers.

        Raises:
            UnknownNameError, FsdError: unknown rule or divergence, empty prompt, unsupported option.
            ContextLengthError: a prompt that fills the target's context.
            CacheMemoryError: key-value caches that take more memory than is free or allowed; none is allocated then.
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
        pad = pad_id(self.target.model.generation_config)
        input_ids, attention_mask = left_pad(ids, pad, self.target.device)
        captured: list[Outcome] = []

        def loop(
            model: Any,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Tensor:
            mask = model_kwargs["attention_mask"]  # as input_ids: repeated for num_return_sequences
            request = prepared_request(
                input_ids, mask, logits_processor, stopping_criteria, generation_config, streamer, seed
            )
            request.measure_log_likelihood, request.max_cache_bytes = measure_log_likelihood, max_cache_bytes
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


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many -> a list of prompts."""
    if isinstance(prompts, Tensor):
        return prompts.tolist() if prompts.dim() == 2 else [prompts.tolist()]
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], (Integral, Mapping)):
        return [items]
    return items
