""":class:`FuzzyDecoder`: a target with a drafter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from typing_extensions import Unpack

from fsd_core.errors import FsdError, ModelLoadError
from fsd_core.registry import is_whole
from fsd_core.text.encoding import encode_chat, encode_text, need_tokenizer
from fsd_infer.backends.choose import choose
from fsd_infer.decoder.calibrated import with_quality
from fsd_infer.decoder.requests import decode_request, ending, prepare
from fsd_infer.decoder.seen import encode_seen, per_prompt, prepared_sight, shows_images
from fsd_infer.device.cuda_graphs import CudaRecorder, Recorder
from fsd_infer.device.memory import release_freed
from fsd_infer.drafters import Drafter, NoDrafter, TreeShape
from fsd_infer.drafters.forced import ForcedDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine.beams import BeamOptions
from fsd_infer.engine.callback import Callback
from fsd_infer.engine.request import Round
from fsd_infer.engine.stats import Outcome
from fsd_infer.heads.formats import head_kind
from fsd_infer.request.guide import Guide, GuideProcessor
from fsd_infer.request.options import GenerateOptions, shaping
from fsd_infer.rules import RuleLike
from fsd_infer.targets.adapters import put_beside
from fsd_infer.targets.loading import parse_device
from fsd_infer.targets.prefixes import PrefixCache
from fsd_infer.targets.processors import is_processor
from fsd_infer.targets.sight import Sight
from fsd_infer.targets.target import Target
from fsd_infer.targets.token_ids import id_list

log = logging.getLogger(__name__)
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass
class Generation(Outcome):
    """The result of :meth:`FuzzyDecoder.generate`.

    Attributes:
        sequences: new tokens only, one list per answer: ``num_return_sequences`` per prompt, prompt by prompt.
        texts: the answers without special tokens (empty strings without a tokenizer).
        stats: see :class:`GenerationStats`.
        records: per answer, the source, gate flag and nats of each token. With beams, per prompt, of the best answer,
            without sources and gates.
        scores: with beams, each answer's sum of log-probabilities / length ** length_penalty; else None.
    """

    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The first answer."""
        return self.texts[0] if self.texts else ""

    def __repr__(self) -> str:
        """Return what a person looks for; ``stats`` and ``records`` have the rest."""
        shown = self.texts if any(self.texts) else self.sequences
        tokens, rate = self.stats.new_tokens, self.stats.tokens_per_second
        return f"Generation({shown!r:.400}, {tokens} tokens, tau {self.stats.tau:.2f}, {rate:.1f} tok/s)"


class FuzzyDecoder:
    """A target with a drafter. Threads may share it: they take turns, request by request.

    Args:
        target: the wrapped model.
        drafter: made for this target.
        quantize: quantise the weights of draft heads, see :meth:`from_pretrained`.
    """

    def __init__(self, target: Target, drafter: Drafter, quantize: bool = True) -> None:
        self.target = target
        self.drafter = drafter
        self.quantize = quantize
        self.backend = choose(target.device)
        self._recorder: Recorder | None = None
        self._said_raw = False  # that there is no chat template

    def __repr__(self) -> str:
        name = self.target.config.name_or_path or self.target.config.model_type
        return f"FuzzyDecoder({name!r}, {self.drafter.name}, {self.target.dtype} on {self.target.device})"

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel = "smollm2-135m",
        drafter: str | Path | Drafter | PreTrainedTokenizerBase | None = None,
        tokenizer: Any = None,
        *,
        tree: TreeShape | str | None = None,
        pack: bool | None = None,
        expand: bool = False,
        quantize: bool = True,
        cuda_graphs: bool | None = None,
        prefix_cache_bytes: int | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **model_kwargs: Any,
    ) -> FuzzyDecoder:
        """Load a target and a drafter.

        Args:
            target: a built-in name, a local directory, a GGUF file of a Llama model, or a hub id. Or a transformers or
                peft model in memory, quantised or not, which is set to eval mode and not changed otherwise.
            drafter: see :func:`load_drafter` (default: the head of a built-in target, else "lookup+recycle"). A
                tokenizer here is the target's, as in transformers' pipelines.
            tokenizer: of a model in memory, which otherwise decodes token ids only (default for others: their own). Or
                the processor of a model that sees images.
            tree: depth, width and nodes of a head's draft tree. "auto", the default on a CPU, chooses a tree in each
                round from the drafter's scores and earlier rounds' costs and acceptances (see
                :mod:`fsd_infer.drafters.auto`). With a ``seed`` it depends on the text alone.
            pack: on a CPU, fuse operations of the decoder blocks and, in bf16, replace the linear layers' weights by
                packed ones; :meth:`restore` undoes it. Quantised layers stay. Default: True, but False for a
                model in memory, whose packed weights would be copies.
            expand: expand a GGUF file's quantised weights, also a built-in target's, to bf16. By default our CPU
                kernels use the quantised weights: a forward reads less, and no weight is rounded.
            quantize: with our CPU kernels, store a head's weights in fp8 with a scale per output (see
                :meth:`.Packed.quantize`). The target's weights stay, so `exact` stays exact.
            cuda_graphs: see :meth:`use_graphs` (default: True on CUDA). False is for debugging.
            prefix_cache_bytes: size of a cache for prompts that start like an earlier prompt and its answer (see
                :mod:`fsd_infer.targets.prefixes`). None: no cache.
            adapters: directories of LoRA adapters by name, from which each request may choose one. They stay beside the
                weights, so forwards take longer than with a merged adapter.
            model_kwargs: arguments of :func:`.load_target`, such as ``dtype`` (of target and drafter; default: bf16),
                ``device`` (default: CUDA if available), ``quantization_config``, ``token`` or ``revision``. Not allowed
                for a model in memory.

        Raises:
            ModelLoadError: the target or an adapter cannot be loaded.
            CheckpointError: files are damaged, or the head belongs to another target.
            VocabularyMismatchError: target and drafter have different vocabularies.
        """
        if isinstance(drafter, (PreTrainedTokenizerBase, ProcessorMixin)):  # transformers' order
            drafter, tokenizer = None, drafter if tokenizer is None else tokenizer
        processor = tokenizer if is_processor(tokenizer) else None
        tokenizer = tokenizer if processor is None else processor.tokenizer
        _check_objects(target, tokenizer)
        named = isinstance(target, (str, Path))
        prefixes = None if prefix_cache_bytes is None else PrefixCache(prefix_cache_bytes)
        if named:
            _refuse_head(Path(str(target)))
            reads = None if expand or pack is False else choose(parse_device(model_kwargs.get("device"))).reads_blocks
            wrapped = Target.from_pretrained(str(target), reads_blocks=reads, **model_kwargs)
            wrapped.tokenizer = wrapped.tokenizer if tokenizer is None else tokenizer
        elif model_kwargs:
            raise ModelLoadError(f"{', '.join(model_kwargs)}: for loading, but the target is in memory already.")
        else:
            wrapped = Target.of(target, tokenizer)
        wrapped.prefixes, wrapped.processor = prefixes, processor
        if adapters:
            put_beside(wrapped.model, adapters)
        decoder = cls(wrapped, NoDrafter(wrapped.vocab_size), quantize)
        if named if pack is None else pack:
            decoder.prepare(release=named)
        if decoder.backend.capture if cuda_graphs is None else cuda_graphs:
            decoder.use_graphs()
        decoder.drafter = decoder.load_drafter(drafter, tree, pack=pack is not False)
        if left_out := shaping(getattr(wrapped.model, "generation_config", None)):
            listed = ", ".join(f"{name}={value!r:.60}" for name, value in left_out.items())
            log.warning(
                "the generation config of %s sets %s. Answers follow the target's own law without these, unless a "
                "request names them.", wrapped.name, listed,
            )  # fmt: skip
        return decoder

    def use_graphs(self, recorder: Recorder | None = None) -> None:
        """Record whole rounds as CUDA graphs and replay them, see :mod:`fsd_infer.engine.capture`.

        Launching the operations of a round takes the host longer than the GPU computes; a replay is one launch.
        Recording slows the first round of a plan down, and KV memory is kept between requests. A model that cannot be
        recorded, such as many mixtures of experts, runs eagerly, with a warning in the log.

        Args:
            recorder: records a function (default: torch's CUDA graphs).

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
        """Load another drafter for this target; arguments and errors as for :meth:`from_pretrained`."""
        with self.target.lock:  # a head may add layers to the target's features
            loaded = load_drafter(drafter, self.target, tree)
            if pack:  # the caller may use its object elsewhere
                self._prepare_drafter(loaded, release=not isinstance(drafter, Drafter))
            if self._recorder is not None:
                loaded.use_graphs(self._recorder)
        release_freed()  # weights in the file's dtype and layout
        return loaded

    def prepare(self, release: bool = False) -> None:
        """Let the device's backend replace the target's layers by faster ones, see :class:`.Backend`.

        Args:
            release: free the plain weights; :meth:`restore` computes them again.
        """
        self.backend.prepare(self.target.model, release)
        self.target.stack, self.target.kernels = self.backend.stack_for(self.target), self.backend.describe()
        self.target.recorded = None  # rounds of the layers before

    def _prepare_drafter(self, drafter: Drafter, release: bool) -> None:
        for module in drafter.modules():
            narrow = release and self.quantize and not isinstance(module, GenerationMixin)
            self.backend.prepare(module, release, weights="fp8" if narrow else None)
        for owner in drafter.stack_owners():
            owner.stack = self.backend.stack_for(owner)
        self.target.recorded = None

    def restore(self) -> None:
        """Undo what the backend did to target and drafter: layers are plain again, and weights where they were."""
        for owner in (self.target, *self.drafter.stack_owners()):
            owner.stack = owner.plain_stack
        for module in (self.target.model, *self.drafter.modules()):
            self.backend.restore(module)
        self.target.kernels = self.target.recorded = None

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def encode(self, prompt: Prompt, chat: bool | None = None, images: Sequence[Any] = ()) -> list[int]:
        """Return the token ids of one prompt.

        Args:
            prompt: text, chat messages, or ids (returned unchanged).
            chat: wrap text in the chat template (default: if the tokenizer has one).
            images: see :meth:`generate`.
        """
        if images or shows_images(prompt):
            return encode_seen(self.target, prompt, images, chat)[0]
        if isinstance(prompt, str):
            return self._encode_text(prompt, chat)
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise FsdError(f"a prompt is text, a list of messages or a list of token ids, not {type(prompt).__name__}.")
        items = list(prompt)
        if not items:
            raise FsdError("the prompt is empty: give at least one token.")
        if isinstance(items[0], Mapping):
            tokenizer = need_tokenizer(self.target.tokenizer, self.target.name)
            return encode_chat(tokenizer, items, blank=True)  # type: ignore[arg-type]
        size = self.target.vocab_size
        for token in items:
            if not is_whole(token, 0, size - 1):
                raise FsdError(
                    f"a prompt's token ids are whole numbers from 0 to {size - 1}, got {token!r}: "
                    "encode it with the target's own tokenizer."
                )
        return [int(token) for token in items]  # type: ignore[call-overload]

    def _encode_text(self, text: str, chat: bool | None) -> list[int]:
        tokenizer = need_tokenizer(self.target.tokenizer, self.target.name)
        if not text:
            raise FsdError("the prompt is empty: give some text.")
        if chat or (chat is None and tokenizer.chat_template):
            return encode_chat(tokenizer, [{"role": "user", "content": text}], blank=True)
        if chat is None and not self._said_raw:
            self._said_raw = True
            log.warning(
                "%s has no chat template: it continues prompts as they are (chat=False, or --raw, if you mean that).",
                self.target.name,
            )
        ids = encode_text(tokenizer, text)
        if not ids:
            raise FsdError("the prompt encodes to no tokens: give some text.")
        return ids

    def _encode_all(
        self, prompts: Any, padding: int | None, images: Any, chat: bool | None
    ) -> tuple[list[list[int]], list[Sight | None]]:
        """Return each prompt's ids, and its images if it has any."""
        listed = _as_list(prompts, padding)
        shown = per_prompt(images, len(listed))
        made: list[tuple[list[int], Sight | None]] = [
            encode_seen(self.target, prompt, own, chat)
            if own and not isinstance(own, Sight) or shows_images(prompt)
            else (self.encode(prompt, chat), own or None)
            for prompt, own in zip(listed, shown, strict=True)
        ]
        if isinstance(prompts, Mapping) and len(prompts) > 1:  # what a processor returns
            sight = prepared_sight(self.target, prompts, [ids for ids, _ in made])
            made = made if sight is None else [(made[0][0], sight)]
        return [ids for ids, _ in made], [sight for _, sight in made]

    def check_guide(self, guide: Guide) -> None:
        """Compile a guide before a request follows it. Raises FsdError if answers of this target cannot begin."""
        ends = id_list("eos_token_id", getattr(self.target.model.generation_config, "eos_token_id", None))
        self._follow(guide, [], frozenset(ends)).follower(0).masks([], [0], [0])

    def _follow(self, guide: Guide, prompts: list[list[int]], eos: frozenset[int]) -> GuideProcessor:
        """Return the guide's processor for answers to these prompts, which processors see padded to the longest."""
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
        images: Any = None,
        quality: float | None = None,
        generation_config: GenerationConfig | None = None,
        drafter: Drafter | None = None,
        adapter: str | None = None,
        seed: int | None = None,
        streamer: Any = None,
        on_tokens: Callable[[int, list[int]], object] | None = None,
        on_round: Callable[[int, Round], object] | None = None,
        ends: Callable[[int, int], str | None] | None = None,
        callbacks: Sequence[Callback] = (),
        chat: bool | None = None,
        measure_log_likelihood: bool = False,
        max_cache_bytes: int | None = None,
        cache_keys: Sequence[str] | None = None,
        beam_options: BeamOptions | None = None,
        schema: Mapping[str, Any] | str | None = None,
        guide: Guide | None = None,
        **overrides: Unpack[GenerateOptions],
    ) -> Generation:
        """Decode one prompt or a batch of prompts of any lengths.

        Args:
            prompts: text, messages or ids; or a list of these; or a tensor of ids [T] or [B, T], or what a tokenizer
                returns. Padding is left out as in transformers: where the mask is 0, or a tensor has the padding token.
            rule: a rule or its text, ``Fuzzy("js", threshold=0.3)`` or ``"fuzzy:js:0.3"``; or a list of them, one per
                prompt; or "calibrated" for the setting of `fsd-bench calibrate` at the request's temperature.
            images: of a target that sees: paths, data: URLs or PIL images, a list per prompt. They belong to the
                messages' parts {"type": "image"}, or else come before the last user's text. Parts may name their images
                themselves, as "image", "url" or "path".
            quality: in place of a rule, the share of exact's score that answers keep, above 0: 1 is exact, below 1 the
                fastest rule that the drafter's calibration file certifies for it. Short for ``"quality:0.95"``.
            generation_config: as in transformers. By default answers follow the target's own law: of the model's
                configuration only special tokens and lengths count, and transformers' top_k of 50 does not. Pass the
                model's configuration to decode by it.
            drafter: another drafter for this call.
            adapter: the adapter to decode with, one of ``adapters`` of :meth:`from_pretrained`, or "none" for the base
                (default: the model's active adapter).
            seed: of the draws above temperature 0 (default: torch's global generator). A seed makes answers
                reproducible: trees then do not depend on measured times.
            streamer: a transformers streamer (one prompt only).
            on_tokens: called with (prompt's index, new tokens) when tokens are final. If the callback returns a true
                value, that answer stops.
            on_round: called with (prompt's index, a :class:`.Round`) before ``on_tokens``.
            ends: called with (prompt's index, token) for each token, before the other callbacks. It returns why the
                answer ends with this token, "stop" or "length", or None.
            callbacks: that watch the request, see :class:`.Callback`; called after the functions above.
            chat: see :meth:`encode`.
            measure_log_likelihood: record the target's mean log-probability of the answer.
            max_cache_bytes: refuse a request whose KV caches take more (default: the free memory).
            cache_keys: one per prompt; only prompts with the same key share the prefix cache.
            beam_options: with ``num_beams`` > 1, how beams are drafted.
            schema: JSON schema of the answers, short for ``guide=Guide.json_schema(schema)``.
            guide: a constraint on the answers, see :class:`.Guide`. The rule then applies to the masked target.
            overrides: ``max_new_tokens`` (default: 128), ``temperature`` (above 0: answers are sampled), ``num_beams``
                ... as in transformers.

        Raises:
            UnknownNameError: unknown rule or divergence.
            FsdError: an empty prompt, or an option that is unknown or that speculative decoding does not support.
            ContextLengthError: a prompt that fills the target's context.
            CacheMemoryError: KV caches that exceed the free or allowed memory; nothing is allocated then.
            NonFiniteLogitsError: the model's logits are NaN or all -inf.
        """
        rule = with_quality(rule, quality)
        with ending(streamer), self.target.lock, self.target.adapted(adapter):
            config = generation_config or self.target.model.generation_config
            drafter = self.drafter if drafter is None else drafter
            pad, eos = (overrides.get(name, getattr(config, name, None)) for name in ("pad_token_id", "eos_token_id"))
            closing = frozenset(id_list("eos_token_id", eos))
            padding = pad if isinstance(pad, int) and pad not in closing else None
            ids, sights = self._encode_all(prompts, padding, images, chat)
            if schema is not None and guide is not None:
                raise FsdError("schema is short for a guide: give one of the two.")
            guide = guide if schema is None else Guide.json_schema(schema)
            followed = None if guide is None else self._follow(guide, ids, closing)
            if followed is not None:
                overrides["logits_processor"] = [*(overrides.get("logits_processor") or []), followed]
                beams = overrides.get("num_beams") or getattr(generation_config, "num_beams", None) or 1
                if isinstance(drafter, Drafter) and beams == 1:
                    drafter = ForcedDrafter(drafter, followed.forced, followed.vocab_size)
            request, config = prepare(self.target, ids, generation_config, overrides)
            if any(sights):
                request.sights = [sight for sight in sights for _ in range(len(request.prompts) // len(ids))]
            request.on_tokens, request.on_round, request.ends = on_tokens, on_round, ends
            request.cache_keys, request.callbacks = cache_keys, callbacks
            request.measure_log_likelihood, request.max_cache_bytes = measure_log_likelihood, max_cache_bytes
            options: dict[str, Any] = dict(streamer=streamer, seed=seed, beam_options=beam_options)
            outcome = decode_request(self.target, drafter, rule, request, config, **options)
            if followed is not None:
                followed.check(outcome.sequences)
            tokenizer = self.target.tokenizer
            texts = [tokenizer.decode(s, skip_special_tokens=True) if tokenizer else "" for s in outcome.sequences]
        return Generation(**vars(outcome), texts=texts)


def _check_objects(target: Any, tokenizer: Any) -> None:
    if not isinstance(target, (str, Path)) and not hasattr(target, "config"):
        raise ModelLoadError(f"a target is a name or a transformers model, got {type(target).__name__}.")
    if tokenizer is not None and not callable(tokenizer):
        raise ModelLoadError(f"a tokenizer is one of transformers, got {tokenizer!r:.60}: load it first.")


def _refuse_head(directory: Path) -> None:
    """Raise ModelLoadError for the directory of a draft head, of which transformers would say that it is too old."""
    if directory.is_dir() and head_kind(directory) is not None:
        raise ModelLoadError(
            f"{directory} is a draft head, not a target: give it as drafter, beside the model that it was trained for."
        )


def _as_list(prompts: Any, padding: int | None) -> list[Any]:
    """Return a list of prompts, given one prompt or many."""
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return _unpadded(prompts["input_ids"], prompts.get("attention_mask"), None)
    if isinstance(prompts, Tensor):
        if prompts.dim() not in (1, 2):
            raise FsdError(f"a tensor of prompts is [T] or [B, T], got {list(prompts.shape)}.")
        return _unpadded(prompts, None, padding)
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    if items and (isinstance(items[0], Mapping) or not isinstance(items[0], (str, bytes, Iterable))):
        return [items]
    return items


def _unpadded(ids: Any, mask: Any, padding: int | None) -> list[list[int]]:
    """Return the rows of ids [T] or [B, T], tensors or lists, where the mask is 1, or else the padding token is not."""
    rows, masks = (value.tolist() if hasattr(value, "tolist") else value for value in (ids, mask))
    if not rows or not isinstance(rows[0], list):
        rows, masks = [rows], None if masks is None else [masks]
    if masks is None:
        masks = [[token != padding for token in row] for row in rows]
    return [[token for token, kept in zip(row, of_row) if kept] for row, of_row in zip(rows, masks)]
