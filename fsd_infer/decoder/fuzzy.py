"""The public API: :class:`FuzzyDecoder`, a target with a drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from fsd_infer.beams import BeamOptions
from fsd_infer.chat.encoding import encode_chat, encode_text, need_tokenizer
from fsd_infer.cpu.ops import speed_up
from fsd_infer.decoder.requests import decode_request, ending, prepare
from fsd_infer.device.cuda_graphs import CudaRecorder, Recorder
from fsd_infer.device.memory import release_freed
from fsd_infer.drafters import Drafter, NoDrafter, TreeShape
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine.rounds import Round
from fsd_infer.engine.stats import GenerationStats, RowRecord
from fsd_infer.errors import FsdError, ModelLoadError
from fsd_infer.request.forced import ForcedDrafter
from fsd_infer.request.guide import Guide, GuideProcessor
from fsd_infer.rules import RuleLike
from fsd_infer.targets.adapters import put_beside
from fsd_infer.targets.prefixes import PrefixCache
from fsd_infer.targets.target import Target
from fsd_infer.targets.token_ids import eos_ids

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass
class Generation:
    """What :meth:`FuzzyDecoder.generate` returns.

    Attributes:
        sequences: new tokens only, one list per prompt; with ``num_return_sequences`` so many, prompt after prompt.
        texts: the same decoded without special tokens (empty strings without a tokenizer).
        stats: see :class:`GenerationStats`.
        records: per answer, per token: source, gate flag, nats spent. With beams of each prompt's best answer, as in
            ``stats``, and without sources and gates.
        scores: with beams of each answer the sum of its log-probabilities / length ** length_penalty, else None.
    """

    sequences: list[list[int]]
    texts: list[str]
    stats: GenerationStats
    records: list[RowRecord]
    scores: list[float] | None = None


class FuzzyDecoder:
    """A target with a drafter. Threads may share it: they take turns, request by request.

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
        target: str | Path | PreTrainedModel = "smollm2-135m",
        drafter: str | Path | Drafter | None = None,
        tokenizer: Any = None,
        *,
        tree: TreeShape | str | None = None,
        pack: bool | None = None,
        expand: bool = False,
        quantize: bool = True,
        cuda_graphs: bool = False,
        prefix_cache_bytes: int | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **model_kwargs: Any,
    ) -> FuzzyDecoder:
        """Load target and drafter, or take a model that is in memory.

        Args:
            target: a built-in name, a local directory, a GGUF file of a Llama model, a hub id; or a model of
                transformers or peft, quantised or not, which stays as it is, in eval mode.
            drafter: see :func:`load_drafter`; None for the head shipped with a built-in target, else "lookup+recycle".
            tokenizer: of a model in memory, which otherwise decodes token ids only; of others their own by default.
            tree: depth, width and nodes of a head's draft tree. "auto", the default on a CPU: chosen round by round
                from the drafter's scores, by what earlier rounds took and accepted (see
                :mod:`fsd_infer.drafters.auto`), or from the text alone where a request has a ``seed``.
            pack: on a CPU, run the usual decoder blocks in fewer operations and, in bf16, keep the linear layers'
                weights in the layout oneDNN computes in, and in that layout alone (see
                :func:`fsd_infer.cpu.ops.speed_up`). ``fsd_infer.cpu.ops.restore(decoder.target.model)`` undoes it.
                Quantised layers stay as they are. None: all but a model that was handed over, whose packed copies are
                extra memory.
            expand: where our CPU kernels run, read a GGUF file's quantised weights (a built-in target is one) as bf16
                too. By default they stay as the file has them, in bf16 and with ``pack``: less to read for a forward,
                and closer to the file's values than their expansion.
            quantize: where our CPU kernels run, keep a head's weights as fp8 numbers with a scale per output (see
                :meth:`fsd_infer.cpu.packing.Packed.quantize`): a draft costs the time in which they are read. The
                target's stay as they are, so `exact` is as exact as without.
            cuda_graphs: see :meth:`use_graphs`.
            prefix_cache_bytes: keep what the target has read, within so many bytes, for prompts that begin like an
                earlier prompt and its answer (see :mod:`fsd_infer.targets.prefixes`). None: nothing is kept.
            adapters: directories of LoRA adapters by names, of which a request may use one; they stay beside the
                weights, which takes a forward more time than a merged one.
            model_kwargs: ``dtype`` of both, by default bf16, ``device``, by default CUDA if there is one, and what
                transformers' ``from_pretrained`` takes: ``quantization_config``, ``token``, ``revision``, ``subfolder``
                ... (see :func:`.load_target`). None for a model in memory.

        Raises:
            ModelLoadError, CheckpointError, VocabularyMismatchError: each names the fault and the fix.
        """
        named = isinstance(target, (str, Path))
        prefixes = None if prefix_cache_bytes is None else PrefixCache(prefix_cache_bytes)
        if named:
            wrapped = Target.from_pretrained(str(target), expand=expand or pack is False, **model_kwargs)
            wrapped.tokenizer = wrapped.tokenizer if tokenizer is None else tokenizer
        elif model_kwargs:
            raise ModelLoadError(f"{', '.join(model_kwargs)}: for loading, but the target is in memory already.")
        else:
            wrapped = Target.of(target, tokenizer)
        wrapped.prefixes = prefixes
        if adapters:
            put_beside(wrapped.model, adapters)
        if named if pack is None else pack:
            speed_up(wrapped.model, release=named)
        decoder = cls(wrapped, NoDrafter(wrapped.vocab_size), quantize)
        if cuda_graphs:
            decoder.use_graphs()
        decoder.drafter = decoder.load_drafter(drafter, tree, pack=pack is not False)
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
        with self.target.lock:
            self._recorder = recorder or CudaRecorder(self.target.device)
            self.target.use_graphs(self._recorder)
            self.drafter.use_graphs(self._recorder)

    def load_drafter(
        self, drafter: str | Path | Drafter | None, tree: TreeShape | str | None = None, *, pack: bool = True
    ) -> Drafter:
        """Another drafter for this target; arguments and errors as for :meth:`from_pretrained`."""
        with self.target.lock:  # a head may widen what the target hands to drafters
            made = load_drafter(drafter, self.target, tree)
            if pack:
                self.pack(made, release=not isinstance(drafter, Drafter))  # what was handed over is not ours alone
            if self._recorder is not None:
                made.use_graphs(self._recorder)
        release_freed()  # weights in the type and layout of their file came and went
        return made

    def pack(self, drafter: Drafter, release: bool) -> None:
        """:func:`.speed_up` for a drafter's modules; with ``release`` a head's weights may become fp8."""
        for module in drafter.modules():
            is_model = isinstance(module, GenerationMixin)
            speed_up(module, release, quantize=release and self.quantize and not is_model)

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
            return self._encode_text(prompt, chat)
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise FsdError(f"a prompt is text, a list of messages or a list of token ids, not {type(prompt).__name__}.")
        items = list(prompt)
        if not items:
            raise FsdError("the prompt is empty: give at least one token.")
        if isinstance(items[0], Mapping):
            return encode_chat(need_tokenizer(self.target.tokenizer, self.target.name), items)  # type: ignore[arg-type]
        size = self.target.vocab_size
        for token in items:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < size:
                raise FsdError(
                    f"a prompt's token ids are whole numbers from 0 to {size - 1}, got {token!r}: "
                    "encode it with the target's own tokenizer."
                )
        return [int(token) for token in items]  # type: ignore[call-overload]

    def _encode_text(self, text: str, chat: bool | None) -> list[int]:
        tokenizer = need_tokenizer(self.target.tokenizer, self.target.name)
        if not text.strip():
            raise FsdError("the prompt is empty: give some text.")
        if chat or (chat is None and tokenizer.chat_template):
            return encode_chat(tokenizer, [{"role": "user", "content": text}])
        ids = encode_text(tokenizer, text)
        if not ids:
            raise FsdError("the prompt encodes to no tokens: give some text.")
        return ids

    def _follow(self, guide: Guide, prompts: list[list[int]], eos: frozenset[int]) -> GuideProcessor:
        """For answers to these prompts, as processors see them: padded to the longest."""
        if not eos:
            raise FsdError(
                "structured answers end with the target's end-of-text token, and it has none: set eos_token_id."
            )
        tokenizer = need_tokenizer(self.target.tokenizer, self.target.name)
        return GuideProcessor(guide, tokenizer, self.target.vocab_size, eos, max(map(len, prompts), default=0))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Tensor,
        rule: RuleLike = "exact",
        *,
        generation_config: GenerationConfig | None = None,
        drafter: Drafter | None = None,
        adapter: str | None = None,
        seed: int | None = None,
        streamer: Any = None,
        on_tokens: Callable[[int, list[int]], object] | None = None,
        on_round: Callable[[int, Round], None] | None = None,
        chat: bool | None = None,
        measure_log_likelihood: bool = False,
        max_cache_bytes: int | None = None,
        cache_keys: Sequence[str] | None = None,
        beam_options: BeamOptions | None = None,
        schema: Mapping[str, Any] | str | None = None,
        guide: Guide | None = None,
        **overrides: Any,
    ) -> Generation:
        """Decode one prompt or a batch of prompts of any lengths.

        Args:
            prompts: text, messages or ids; or a list of these; or a tensor of ids [T] or [B, T].
            rule: a rule or its name, e.g. ``Fuzzy("js", threshold=0.3)`` or ``"fuzzy:js:0.3"``; or a list of them, one
                per prompt; or "calibrated": what `fsd-infer calibrate` wrote beside the drafter for the request's
                temperature.
            generation_config: as in transformers; default the model's own.
            drafter: another drafter for this call.
            adapter: name of the adapter beside the target's weights to decode with, "none" for the base alone; default:
                as the model is.
            seed: of the draws at temperature > 0; default torch's global generator. With one the answer comes again: no
                clock is read to choose trees.
            streamer: a transformers streamer (one prompt only).
            on_tokens: called with (prompt's place, new tokens) as soon as they are final; a true result ends that
                answer.
            on_round: called with (prompt's place, a :class:`.Round`) before the round's tokens; for those who look on.
            chat: see :meth:`encode`.
            measure_log_likelihood: also record the target's mean log-probability of the answer.
            max_cache_bytes: refuse a request whose key-value caches take more; default: more than is free.
            cache_keys: per prompt, whose it is: only prompts with the same key share a prefix cache.
            beam_options: with ``num_beams`` > 1, how beams are drafted.
            schema: answers are JSON of this schema: short for ``guide=Guide.json_schema(schema)``.
            guide: what answers must be, see :class:`.Guide`. The law is the rule's beside the masked target.
            overrides: ``max_new_tokens``, ``temperature``, ``do_sample``, ``num_beams`` ... as in transformers.

        Raises:
            UnknownNameError, FsdError: unknown rule or divergence, empty prompt, an option that is unknown or that
                speculative decoding does not honour.
            ContextLengthError: a prompt that fills the target's context.
            CacheMemoryError: key-value caches that take more memory than is free or allowed; none is allocated then.
            NonFiniteLogitsError: the model's logits are NaN or all -inf.
        """
        with ending(streamer), self.target.lock, self.target.adapted(adapter):
            ids = [self.encode(prompt, chat) for prompt in _as_list(prompts)]
            if schema is not None and guide is not None:
                raise FsdError("schema is short for a guide: give one of the two.")
            guide = guide if schema is None else Guide.json_schema(schema)
            if guide is not None:
                config = generation_config or self.target.model.generation_config
                ends = eos_ids(GenerationConfig(eos_token_id=overrides.get("eos_token_id", config.eos_token_id)))
                followed = self._follow(guide, ids, frozenset(ends))
                overrides["logits_processor"] = [*(overrides.get("logits_processor") or []), followed]
                drafter = self.drafter if drafter is None else drafter
                if isinstance(drafter, Drafter) and (overrides.get("num_beams") or config.num_beams or 1) == 1:
                    drafter = ForcedDrafter(drafter, followed)
            outcome = decode_request(
                self.target,
                self.drafter if drafter is None else drafter,
                rule,
                *prepare(self.target, ids, generation_config, overrides),
                streamer=streamer,
                on_tokens=on_tokens,
                on_round=on_round,
                seed=seed,
                measure_log_likelihood=measure_log_likelihood,
                max_cache_bytes=max_cache_bytes,
                cache_keys=cache_keys,
                beam_options=beam_options,
            )
            tokenizer = self.target.tokenizer
            texts = [tokenizer.decode(s, skip_special_tokens=True) if tokenizer else "" for s in outcome.sequences]
        return Generation(outcome.sequences, texts, outcome.stats, outcome.records, outcome.scores)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many -> a list of prompts."""
    if isinstance(prompts, Tensor):
        if prompts.dim() not in (1, 2):
            raise FsdError(f"a tensor of prompts is [T] or [B, T], got {list(prompts.shape)}.")
        prompts = prompts.tolist()
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    if items and (isinstance(items[0], Mapping) or not isinstance(items[0], (str, bytes, Iterable))):
        return [items]
    return items
