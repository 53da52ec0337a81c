""":class:`FuzzyDecoder`: a target with a drafter."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from typing_extensions import Unpack

from fsd_core.errors import FsdError, ModelLoadError
from fsd_core.text.encoding import need_tokenizer
from fsd_infer.backends.choose import choose
from fsd_infer.decoder import former
from fsd_infer.decoder.config import FuzzyOptions, RuntimeConfig, from_keywords, request_config, runtime_config
from fsd_infer.decoder.prompts import Prompt, PromptEncoder
from fsd_infer.decoder.recording import record_rounds
from fsd_infer.decoder.requests import decode_request, ending, prepare
from fsd_infer.device.cuda_graphs import CudaRecorder, GraphRecorder
from fsd_infer.device.memory import release_freed
from fsd_infer.drafters import Drafter, NoDrafter, TreeShape
from fsd_infer.drafters.forced import ForcedDrafter
from fsd_infer.drafters.loading import check_name, load_drafter, refuse_head
from fsd_infer.engine.callback import Callback
from fsd_infer.engine.stats import Outcome
from fsd_infer.request.guide import Guide, GuideProcessor
from fsd_infer.request.options import shaping
from fsd_infer.targets.adapters import add_adapters
from fsd_infer.targets.placing import parse_device, take_device
from fsd_infer.targets.prefixes import PrefixCache
from fsd_infer.targets.processors import is_processor
from fsd_infer.targets.target import Target
from fsd_infer.targets.token_ids import id_list
from fsd_infer.trees.shape import parse_tree

log = logging.getLogger(__name__)


@dataclass
class GenerateOutput(Outcome):
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
        tau = self.stats.acceptance_length
        return f"GenerateOutput({shown!r:.400}, {tokens} tokens, tau {tau:.2f}, {rate:.1f} tok/s)"


class FuzzyDecoder:
    """A target with a drafter. Threads may share it: they take turns, request by request.

    Args:
        target: the wrapped model.
        drafter: made for this target.
        config: how the models run.
    """

    def __init__(self, target: Target, drafter: Drafter, config: RuntimeConfig | None = None, **renamed: Any) -> None:
        if target.device.type == "meta":
            name = target.config.name_or_path or target.config.model_type
            raise ModelLoadError(f'{name} is on the device "meta", which keeps no numbers: load its weights.')
        self.config = runtime_config(config, former.runtime_options(renamed))[0]
        self.target = target
        self.drafter = drafter
        self.backend = choose(target.device)
        self._recorder: GraphRecorder | None = None
        self._prompts = PromptEncoder(target)

    def __repr__(self) -> str:
        name = self.target.config.name_or_path or self.target.config.model_type
        return f"FuzzyDecoder({name!r}, {self.drafter.name}, {self.target.dtype} on {self.target.device})"

    def __reduce__(self) -> str:
        raise FsdError(
            "a decoder is neither pickled nor copied: call FuzzyDecoder.from_pretrained in each process that decodes. "
            "Threads of a process may share one."
        )

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel = "smollm2-135m",
        drafter: str | Path | Drafter | PreTrainedTokenizerBase | None = None,
        tokenizer: Any = None,
        *,
        tree: TreeShape | str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        config: RuntimeConfig | None = None,
        **model_kwargs: Any,
    ) -> FuzzyDecoder:
        """Load a target and a drafter.

        Args:
            target: a built-in name, a local directory, a GGUF file of a Llama model, or a hub id. Or a transformers or
                peft model in memory, quantised or not, which is set to eval mode and not changed otherwise.
            drafter: see :func:`load_drafter` (default: the head of a built-in target, else "lookup+recycle"). A
                tokenizer here is the target's, as in transformers' pipelines.
            tokenizer: tokenizer of a model in memory, which otherwise decodes token ids only (default: the model's). Or
                the processor of an image-text-to-text model.
            tree: shape of the drafter's trees, as in :class:`.FuzzyConfig`. "auto", the default on a CPU, chooses a
                tree in each round from the drafter's scores and earlier rounds' costs and acceptances
                (:mod:`fsd_infer.trees.policy`). With a ``seed`` it depends only on the text.
            adapters: directories of LoRA adapters by name, from which each request may choose one. They stay
                unmerged, so forwards take longer than with a merged adapter.
            config: how the models run.
            model_kwargs: fields of the config, which win; and arguments of :func:`.load_target`, such as ``dtype`` (of
                target and drafter; default: bf16), ``device`` (default: CUDA if available), ``quantization_config``,
                ``token`` or ``revision``. The latter are not allowed for a model in memory.

        Raises:
            ModelLoadError: the target or an adapter cannot be loaded.
            CheckpointError: files are damaged, or the head belongs to another target.
            VocabularyMismatchError: target and drafter have different vocabularies.
        """
        if isinstance(drafter, (PreTrainedTokenizerBase, ProcessorMixin)):  # transformers' order
            drafter, tokenizer = None, drafter if tokenizer is None else tokenizer
        config, model_kwargs = runtime_config(config, former.runtime_options(model_kwargs))
        named, tree = isinstance(target, (str, Path)), parse_tree(tree)
        check_name(drafter)
        wrapped = _wrapped(target, tokenizer, config, model_kwargs)
        if adapters:
            add_adapters(wrapped.model, adapters)
        decoder = cls(wrapped, NoDrafter(wrapped.vocab_size), config)
        if config.packs(named):
            decoder.prepare(release=named)
        if decoder.backend.records if config.recording is None else config.recording:
            decoder.use_graphs()
        decoder.drafter = decoder.load_drafter(drafter, tree)
        if config.record:
            log.info("%s", record_rounds(decoder, [(rows, tokens) for rows, tokens in config.record]))
        _say_what_is_left_out(wrapped)
        return decoder

    def use_graphs(self, recorder: GraphRecorder | None = None) -> None:
        """Record whole rounds as CUDA graphs and replay them, see :mod:`fsd_infer.engine.recording`.

        Launching the operations of a round takes the host longer than the GPU computes; a replay is one launch.
        Recording slows the first round of a shape down, and KV memory is kept between requests. A model that cannot be
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

    def load_drafter(self, drafter: str | Path | Drafter | None, tree: TreeShape | str | None = None) -> Drafter:
        """Load another drafter for this target; arguments and errors as for :meth:`from_pretrained`."""
        with self.target.lock:  # a head may add layers to the target's features
            loaded = load_drafter(drafter, self.target, parse_tree(tree))
            if self.config.weights != "plain":  # the caller may use its object elsewhere
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
            narrow = release and self.config.draft_weights == "fp8" and not isinstance(module, GenerationMixin)
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

    def encode(
        self,
        prompt: Prompt,
        apply_chat_template: bool | None = None,
        images: Any = None,
        **renamed: Any,
    ) -> list[int]:
        """Return the token ids of one prompt.

        Args:
            prompt: as for :meth:`generate`; ids are returned unchanged.
            apply_chat_template: wrap text in the chat template (default: if the tokenizer has one).
            images: a former argument: a prompt carries its images.
            renamed: ``chat``, the former name of ``apply_chat_template``.
        """
        options = {"apply_chat_template": apply_chat_template, **former.request_options(None, (), renamed)[2]}
        if images:
            prompt = former.with_images(prompt, former.former_images({"images": images}), None)[0]
        return self._prompts.encode(prompt, **options)[0]

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
        prompts: Prompt | Sequence[Prompt] | Mapping[str, Any] | Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: Any = None,
        callbacks: Sequence[Callback] = (),
        drafter: Drafter | None = None,
        **overrides: Unpack[FuzzyOptions],
    ) -> GenerateOutput:
        """Decode one prompt or a batch of prompts of any lengths.

        Args:
            prompts: text, messages or ids, alone or as ``{"prompt": ..., "images": [...]}`` for a target that takes
                images; or a list of these; or a tensor of ids [T] or [B, T], or what a tokenizer returns, also as
                keywords (``**inputs``). An image is a path, a data: URL or a PIL image. Images go to the messages'
                parts {"type": "image"}, which may name their own as "image", "url" or "path", or else before the last
                user's text. Padding is dropped as in transformers: where the mask is 0, or a tensor has the padding
                token.
            generation_config: a :class:`.FuzzyConfig`, which lists what can be asked, or transformers' own.
            streamer: a transformers streamer (one prompt only).
            callbacks: that watch the request, see :class:`.Callback`.
            drafter: another drafter for this call.
            overrides: fields of the configuration for this call, and ``logits_processor``, ``stopping_criteria`` and
                ``prefix_allowed_tokens_fn`` as in transformers.

        Raises:
            UnknownNameError: unknown rule or divergence.
            FsdError: an empty prompt, or an option that is unknown or that speculative decoding does not support.
            ContextLengthError: a prompt that fills the target's context.
            CacheMemoryError: KV caches that exceed the free or allowed memory; nothing is allocated then.
            NonFiniteLogitsError: the model's logits are NaN or all -inf.
        """
        given, callbacks, options = former.request_options(generation_config, callbacks, dict(overrides))
        with ending(streamer):
            if prompts is None:
                prompts, options = from_keywords(options)
            images = former.former_images(options)
            config, options = request_config(given, options)
            with self.target.lock, self.target.adapted(config.adapter):
                padding, eos = self._special_tokens(given, options)
                if images is not None:
                    prompts = former.with_images(prompts, images, padding)
                ids, image_inputs = self._prompts.encode_all(prompts, padding, config.apply_chat_template)
                drafter, guide = self.drafter if drafter is None else drafter, Guide.of(config.guide)
                followed = None if guide is None else self._follow(guide, ids, eos)
                if followed is not None:
                    options["logits_processor"] = [*(options.get("logits_processor") or []), followed]
                    beams = options.get("num_beams") or getattr(given, "num_beams", None) or 1
                    if isinstance(drafter, Drafter) and beams == 1:  # else beams compete
                        drafter = ForcedDrafter(drafter, followed.forced, followed.vocab_size)
                request, complete = prepare(self.target, ids, given, options)
                request.callbacks = callbacks
                if any(image_inputs):
                    request.image_inputs = [
                        image_input for image_input in image_inputs for _ in range(len(request.prompts) // len(ids))
                    ]
                outcome = decode_request(self.target, drafter, config, request, complete, streamer)
                if followed is not None:
                    followed.check(outcome.sequences)
                tokenizer = self.target.tokenizer
                texts = [tokenizer.decode(s, skip_special_tokens=True) if tokenizer else "" for s in outcome.sequences]
        return GenerateOutput(**vars(outcome), texts=texts)

    def _special_tokens(
        self, given: GenerationConfig | None, options: Mapping[str, Any]
    ) -> tuple[int | None, frozenset[int]]:
        """Return the padding token of a request, unless it ends answers too, and the tokens that end them."""
        model = self.target.model.generation_config

        def named(name: str) -> Any:  # what a configuration leaves out is the model's, as in transformers
            own = getattr(given, name, None)
            return options.get(name, getattr(model, name, None) if own is None else own)

        pad, ends = (id_list(name, named(name)) for name in ("pad_token_id", "eos_token_id"))
        return next((token for token in pad if token not in ends), None), frozenset(ends)


def _wrapped(target: Any, tokenizer: Any, config: RuntimeConfig, model_kwargs: dict[str, Any]) -> Target:
    """Return the target of a name or of a model in memory. Raises ModelLoadError."""
    processor = tokenizer if is_processor(tokenizer) else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    if not isinstance(target, (str, Path)) and not (isinstance(target, nn.Module) and hasattr(target, "config")):
        raise ModelLoadError(f"a target is a name or a transformers model, got {type(target).__name__}.")
    if tokenizer is not None and not callable(tokenizer):
        raise ModelLoadError(f"a tokenizer is one of transformers, got {tokenizer!r:.60}: load it first.")
    if isinstance(target, (str, Path)):
        refuse_head(Path(str(target)))
        keeps_blocks = config.weights in ("auto", "packed")
        model_kwargs["device"] = take_device(model_kwargs.get("device"), model_kwargs)
        reads = choose(parse_device(model_kwargs["device"])).reads_blocks if keeps_blocks else None
        wrapped = Target.from_pretrained(str(target), reads_blocks=reads, **model_kwargs)
        wrapped.tokenizer = wrapped.tokenizer if tokenizer is None else tokenizer
    elif model_kwargs:
        raise ModelLoadError(f"{', '.join(model_kwargs)}: for loading, but the target is in memory already.")
    else:
        wrapped = Target.of(target, tokenizer)
    size = config.prefix_cache_bytes
    wrapped.prefixes, wrapped.processor = None if size is None else PrefixCache(size), processor
    return wrapped


def _say_what_is_left_out(target: Target) -> None:
    if left_out := shaping(getattr(target.model, "generation_config", None)):
        names = ", ".join(f"{name}={value!r:.60}" for name, value in left_out.items())
        log.warning(
            "the generation config of %s sets %s. Answers follow the target's own distribution without these, unless a "
            "request names them.", target.name, names,
        )  # fmt: skip
