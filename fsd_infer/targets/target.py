"""The target: a transformers causal LM, unchanged, with the few operations that decoding needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fsd_core.errors import ModelLoadError, NonFiniteLogitsError, foreign_errors
from fsd_core.files import HUB_OPTIONS
from fsd_core.functional import is_host
from fsd_infer.device.cache import SlotCache
from fsd_infer.device.cuda_graphs import CachedModel
from fsd_infer.device.lock import RequestLock
from fsd_infer.recurrent.mixers import TreeReader
from fsd_infer.targets.adapters import adapted, unmerged_digest, unwrapped
from fsd_infer.targets.checks import check_decodable
from fsd_infer.targets.digests import vocabulary_digest, weights_digest
from fsd_infer.targets.image_inputs import places_images
from fsd_infer.targets.loading import load_target
from fsd_infer.targets.logit_form import LogitForm
from fsd_infer.targets.masks import fixed_positions, layer_windows, max_positions, windowed
from fsd_infer.targets.precision import decompress, precision_of
from fsd_infer.targets.prefixes import PrefixCache
from fsd_infer.targets.rotary import DynamicRope, recompute_length_of
from fsd_infer.targets.stack import Stack, StackInputs, TransformersStack, layer_list
from fsd_infer.targets.token_ids import eos_ids
from fsd_infer.targets.weights import format_of, shape_of, weight_rows


class Target(CachedModel):
    """A frozen causal LM with its tokenizer.

    Drafters read ``features`` [B, M, F]. The first H columns are the final features, the input of the LM head (the last
    hidden state after the final norm). The outputs of captured layers follow, H columns each, in ascending order of
    layers, the last layer's from before the final norm; see :meth:`capture_layers`. Without such layers F = H.

    Forwards store nothing on the target, so several threads may run them at once, each with its own cache.

    Args:
        model: any decoder-only ``PreTrainedModel`` with an LM head, on one device or, by transformers' ``tp_plan``, on
            one per process.
        tokenizer: its tokenizer, or None (then only token ids can be decoded).
        name: the name in records of runs.

    Raises:
        ModelLoadError: the model is not a causal LM, takes no positions, or lies on several devices.
    """

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = self.cache_config = model.config.get_text_config(decoder=True)
        self.logit_form = LogitForm.of(self.config)  # None: what the LM head returns
        # Mamba's final features; its LM head reads the model's dtype
        self._keeps_fp32 = bool(getattr(self.config, "residual_in_fp32", False))
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__
        check_decodable(model, self.name)
        self.decoder: nn.Module = model.get_decoder()
        self.captured_layers: tuple[int, ...] = ()
        decompress(self.model)
        self.dynamic_rope = rope = DynamicRope(self.decoder, self.config)
        # a context of forwards, given the lengths of texts on which their angles depend
        self.angles_of_texts: Any = nullcontext if rope.fixed_length is None else rope.of_texts
        layers = layer_list(self.decoder, int(self.config.num_hidden_layers))
        self.plain_stack = TransformersStack(model, self.decoder, list(layers or []))
        self.stack: Stack = self.plain_stack
        self.prefixes: PrefixCache | None = None  # see FuzzyDecoder.from_pretrained
        self.processor: Any = None  # of images, loaded when the first one comes
        self.source: tuple[str, dict[str, Any]] | None = None  # the name it was loaded by, and options of the hub
        self.kernels: str | None = None  # of the backend that prepared it, as Backend.describe says

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> Target:
        """Load a built-in name, a local directory or a hub id; options and errors as in :func:`load_target`."""
        model, tokenizer = load_target(name, **options)
        target = cls(model, tokenizer, name=str(name))
        target.source = str(name), {key: options[key] for key in HUB_OPTIONS if key in options}
        return target

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None) -> Target:
        """Wrap a model in memory, set to eval mode. A peft wrapper is replaced by the model inside, with its adapters.

        Raises ModelLoadError: no causal LM, or an adapter outside the model's layers (prompt tuning).
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        target = cls(unwrapped(model), tokenizer)
        for parameter in trained:
            parameter.requires_grad_()
        return target

    # facts ---------------------------------------------------------------------------------------------------------

    @property
    def lock(self) -> RequestLock:
        """The lock that a request holds, shared by all targets of one model: threads take turns, request by request."""
        lock: RequestLock = vars(self.model).setdefault("_fsd_lock", RequestLock())
        return lock

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return inference mode, or no_grad for quantised weights, since some libraries' tensors refuse the former."""
        return torch.no_grad() if self.precision else torch.inference_mode()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def reads_in_turn(self) -> bool:
        """Whether a batch's prompts are read one by one: together is no faster on a CPU, and padding costs time."""
        return is_host(self.device)

    @property
    def is_sharded(self) -> bool:
        """Whether each of several processes holds a shard of the weights (``tp_plan`` of transformers, FSDP).

        All processes must then run the same requests in the same order.
        """
        return any(hasattr(parameter, "full_tensor") for parameter in self.model.parameters())

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether layers keep a state of the text, with or without keys and values."""
        return any(isinstance(part, TreeReader) for part in self.decoder.modules())

    @property
    def weight_format(self) -> str:
        """The format of packed weights, "blocks" if some keep a quantised file's layout; "" if none are packed."""
        formats = {format_of(part) for part in self.decoder.modules()}
        return "blocks" if "blocks" in formats else max(formats)

    @property
    def vocab_size(self) -> int:
        """Width of the logits; padding rows may make it exceed the tokenizer's length."""
        return shape_of(self.model.get_output_embeddings())[0]

    @property
    def hidden_size(self) -> int:
        """H, the width of the final features."""
        return shape_of(self.model.get_output_embeddings())[1]

    @cached_property
    def max_positions(self) -> int | None:
        """Longest text in tokens."""
        return max_positions(self.config)

    @property
    def fixed_positions(self) -> int | None:
        """Longest text in tokens whose rotary angles do not depend on its length; training and beams end there."""
        return fixed_positions(self.config)

    @cached_property
    def places_images(self) -> bool:
        """Whether images move the rotary positions of later tokens (M-RoPE)."""
        return places_images(self.model)

    @cached_property
    def recompute_length(self) -> int | None:
        """Tokens of a text beyond which ``generate`` recomputes it, with other angles (LongRoPE); None: never."""
        return recompute_length_of(self.config)

    @property
    def eos_token_ids(self) -> list[int]:
        return sorted(eos_ids(self.model.generation_config))

    @cached_property
    def layer_windows(self) -> dict[str, int | None]:
        """Attention window by layer type (None: full), e.g. {"full_attention": None, "sliding_attention": 4096}."""
        return layer_windows(self.config)

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts that a drafter checkpoint must match: family, hidden size, vocabulary size and its digest.

        The precision of quantised weights is recorded, too, but need not match.
        """
        return {
            "model_type": self.config.model_type,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "vocabulary_sha256": None if self.tokenizer is None else vocabulary_digest(self.tokenizer),
            **({"precision": self.precision} if self.precision else {}),
        }

    @cached_property
    def precision(self) -> str:
        """The precision of quantised weights, see :func:`precision_of`; "" for plain weights."""
        return precision_of(self.model)

    def weights_digest(self) -> str:
        """Return 16 hexadecimal digits that distinguish this target's weights from others of the same shape.

        They cover the final norm, about a thousand rows each of embeddings and LM head, the merged adapter and the
        precision of quantised layers, so a fine-tuned copy that changed none of these has the same, as has a target
        without its layers (:func:`fsd_train.models.slim.load_slim`). Dtype, device and packing do not matter.
        """
        norm = getattr(self.final_norm, "weight", None)
        text = f"{getattr(self.config, 'merged_adapter', '')}{self.precision}{unmerged_digest(self.model)}"
        return weights_digest(self.model, self.vocab_size, norm, text)

    # operations ----------------------------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """Return the input embeddings [..., H_embed] of ids [...], before any scaling by the model."""
        return self.model.get_input_embeddings()(ids)

    def lm_logits(self, features: Tensor, head: nn.Module | None = None) -> Tensor:
        """Return the logits [..., V] of final features [..., H], with the family's scale and soft cap.

        A ``head`` of chosen rows of the LM head (see :meth:`reduced_lm_head`) gives [..., Vd] instead.
        """
        logits: Tensor = (head or self.model.get_output_embeddings())(features)
        return logits if self.logit_form is None else self.logit_form.apply(logits)

    def lm_head_rows(self, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return (weight [Vd, H], bias [Vd] or None) of the LM head for the target ids [Vd]; None: for all ids."""
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        weight = weight_rows(head, ids).to(self.dtype)
        return weight, bias if bias is None or ids is None else bias[ids].contiguous()

    @torch.no_grad()
    def features(self, ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the features [B, M, F] of right-padded ids [B, M] (attention_mask [B, M], 1 on real tokens).

        Other ``inputs`` go to the model's forward. Only the captured layers' outputs are kept.
        """
        self.dynamic_rope.reset()
        with self.plain_stack.captured(self.captured_layers) as outputs:
            self.decoder(input_ids=ids, attention_mask=attention_mask, use_cache=False, **inputs)
        return self.joined(*outputs)

    def reduced_lm_head(self, ids: Tensor) -> nn.Linear:
        """Return the rows ids [Vd] of the LM head as a frozen linear layer."""
        weight, bias = self.lm_head_rows(ids)
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        head.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            head.bias = nn.Parameter(bias, requires_grad=False)
        return head

    @torch.no_grad()
    def check_lm_head(self) -> None:
        """Raise ModelLoadError unless :meth:`lm_logits` reproduces the model's own logits, as draft heads require.

        Raises NonFiniteLogitsError if these are NaN.
        """
        if not self.lm_head_is_plain:
            raise ModelLoadError(
                f"{self.config.model_type}: the LM head does more than a linear map, a scale and a soft cap, so a "
                "draft head cannot share it. Use an independent small model as drafter."
            )

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm after the last layer, if any."""
        return getattr(self.decoder, "norm", None)

    @cached_property
    def lm_head_is_plain(self) -> bool:
        """Whether :meth:`lm_logits` reproduces the model's own logits. Raises NonFiniteLogitsError for NaN in them."""
        head, probe = self.model.get_output_embeddings(), torch.arange(4, device=self.device)[None] % self.vocab_size
        if self.decoder is head:  # as ModernBERT's `get_decoder` has it
            return False
        with torch.no_grad():
            logits = self.model(input_ids=probe, use_cache=False).logits.float()
            features = self.joined(self.decoder(input_ids=probe, use_cache=False).last_hidden_state)
            if features.shape[-1] != shape_of(head)[1]:
                return False
            ours = self.lm_logits(features).float()
        if logits.isnan().any():
            raise NonFiniteLogitsError(
                f"{self.name} computes NaN. Check its weights and dtype (fp16 overflows; bf16 or fp32 do not)."
            )
        return torch.allclose(logits, ours, atol=1e-2 * float(logits.abs().max()), rtol=1e-2)

    def capture_layers(self, layers: Sequence[int]) -> None:
        """Append the outputs of these decoder layers, counted from 0, to the features. Raises ModelLoadError."""
        self.layers(layers)
        before, self.captured_layers = self.captured_layers, tuple(sorted({*self.captured_layers, *layers}))
        if self.captured_layers != before:
            self.recorded = None

    def layers(self, numbers: Sequence[int]) -> list[nn.Module]:
        """Return these decoder layers, counted from 0. Raises ModelLoadError if there is no such layer."""
        count = int(self.config.num_hidden_layers)
        layers = list(layer_list(self.decoder, count) or [])
        if numbers and not layers:
            raise ModelLoadError(f"{self.name} has no list of {count} decoder layers: use a drafter that reads none.")
        for number in numbers:
            if not 0 <= number < len(layers):
                raise ModelLoadError(f"{self.name} has no layer {number}: give numbers from 0 to {count - 1}.")
        return [layers[number] for number in numbers]

    def features_of(self, features: Tensor, layers: Sequence[int] = ()) -> Tensor:
        """Return the final features and those of ``layers``, [..., H·(1 + len(layers))], of features [..., F]."""
        if tuple(layers) == self.captured_layers:
            return features
        width = self.hidden_size
        parts = [0, *(1 + self.captured_layers.index(number) for number in sorted(layers))]
        return torch.cat([features[..., part * width : (part + 1) * width] for part in parts], dim=-1)

    def _read_one(self, cache: SlotCache, visible: Tensor, zero: Tensor) -> None:
        # the first forward: a config may hold what no model can use
        with foreign_errors(ModelLoadError, f"{self.name} cannot read a token ({{why}})."):
            self.forward(zero, zero, visible, cache, keep=1)
        if len(cache.layers) != cache.num_layers:
            raise ModelLoadError(
                f"{self.name} keeps {len(cache.layers)} layers of keys and values, but has {cache.num_layers} layers. "
                "Use another target."
            )

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: SlotCache, keep: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run the model over new tokens, each of which attends to chosen cache slots.

        Args:
            tokens: [B, M] new token ids, written to the cache's write slots.
            positions: [B, M] their positions.
            visible: [B, M, S] bool; token i may attend to slot s (sliding windows are applied here).
            cache: after :meth:`SlotCache.set_write_slots`.
            keep: return logits of the last ``keep`` tokens only (0: of all).

        Returns:
            (logits [B, M or keep, V] in the model's dtype, features [B, M, F])
        """
        windows = self.layer_windows
        has_window = any(window is not None for window in windows.values())
        masks = windowed(visible, positions, cache, windows) if has_window else dict.fromkeys(windows, visible)
        with self.angles_of_texts(cache.prefilled):
            rotary = cache.rotary(positions)
            call = StackInputs(tokens, rotary, masks, cache, self.captured_layers, keep=keep)
            final, captured, logits = self.stack(call)
        logits = self.lm_logits(final[:, -keep:]) if logits is None else logits  # [-0:] is all
        return logits, self.joined(final, *captured)

    @contextmanager
    def adapted(self, adapter: str | None) -> Iterator[None]:
        """Compute with the adapter of that name (None: as the model is); see :func:`.adapted`. Hold :attr:`lock`.

        Kept prefixes and recorded graphs belong to the model without the adapter, so the block does not use them.
        """
        if adapter is None:
            yield
            return
        saved = self.recorder, self.prefixes, self.stack
        with adapted(self.model, adapter):
            self.recorder = self.prefixes = None
            self.stack = self.plain_stack
            try:
                yield
            finally:
                self.recorder, self.prefixes, self.stack = saved

    def joined(self, final: Tensor, *captured: Tensor) -> Tensor:
        """Final features [B, M, H] and the outputs of captured layers -> [B, M, F]."""
        if self._keeps_fp32:
            final = final.to(self.dtype)
        if any(output.shape != final.shape for output in captured):
            raise ModelLoadError(
                f"{self.name}: its inner layers pass on several streams: use a drafter that reads the last one alone"
            )
        return torch.cat([final, *(output.to(final.dtype) for output in captured)], dim=-1) if captured else final
