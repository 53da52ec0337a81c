"""The target: a transformers causal LM, unchanged, seen through the few operations decoding needs."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fsd_infer.cpu import ops
from fsd_infer.device.cache import SlotCache
from fsd_infer.device.cuda_graphs import Graphs, Recorder, new_cache, slots_taken
from fsd_infer.device.lock import RequestLock
from fsd_infer.errors import ModelLoadError
from fsd_infer.targets.loading import load_target
from fsd_infer.targets.prefixes import PrefixCache
from fsd_infer.targets.token_ids import eos_ids
from fsd_infer.tree import additive

_DIGEST_ROWS = 1024


class Target:
    """A frozen causal LM with its tokenizer.

    ``features`` are what drafters read, [B, M, F]. The first H columns are the final features, what enters the LM head
    (the last hidden state after the final norm); then come the outputs of the layers given to :meth:`watch`, H columns
    each, in ascending order of layers: transformers' ``hidden_states``, where the last layer's is after the final norm.
    Nobody watching, F = H.

    Forwards leave nothing on the target, so several threads may run them at once, each with a cache of its own.

    Args:
        model: any decoder-only ``PreTrainedModel`` with a language-model head, on one device or, by transformers'
            ``tp_plan``, on one per process.
        tokenizer: its tokenizer, or None (then only token ids can be decoded).
        name: how the target was asked for; kept in records of runs.

    Raises:
        ModelLoadError: no model of that kind, or its layers lie on several devices.
    """

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__
        self._head: nn.Module | None = model.get_output_embeddings()
        if self._head is None:
            raise ModelLoadError(f"{type(model).__name__} has no language-model head: a causal LM is needed as target.")
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.watched: tuple[int, ...] = ()
        self.decoder: nn.Module = model.get_decoder()
        if self.decoder is model or self.decoder is None:
            raise ModelLoadError(f"{type(model).__name__} does not say which module is its decoder (`get_decoder`).")
        if not any("position_ids" in inspect.signature(part.forward).parameters for part in (model, self.decoder)):
            raise ModelLoadError(
                f"{type(model).__name__} takes no positions (it keeps a state, or counts its cache); a token tree "
                "can be verified in one forward only where siblings share a position. Use another target."
            )
        if hasattr(self.config, "altup_num_inputs"):  # Gemma 3n
            raise ModelLoadError(
                f"{type(model).__name__}: its hidden states are of several streams, so there are no features that "
                "enter its LM head. Use another target."
            )
        places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
        if len(places) > 1:
            raise ModelLoadError(
                f"{self.name} lies on several devices ({', '.join(sorted(places))}), layer by layer; a cache lies on "
                'one: load it on one, or by tp_plan="auto" on one per process (docs/scaling.md).'
            )
        self._eager = self.config._attn_implementation == "eager"
        self.graphs: Graphs | None = None
        self.prefixes: PrefixCache | None = None  # what earlier requests read, see FuzzyDecoder.from_pretrained

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        revision: str | None = None,
        expand: bool = True,
    ) -> Target:
        """Load a target, see :func:`load_target`. Raises ModelLoadError or CheckpointError."""
        model, tokenizer = load_target(
            name,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            revision=revision,
            expand=expand,
        )
        return cls(model, tokenizer, name=str(name))

    # facts ---------------------------------------------------------------------------------------------------------

    @property
    def lock(self) -> RequestLock:
        """Held for a request: threads that decode with one model take turns. The model's, so that all its wrappers
        share it.
        """
        lock: RequestLock = vars(self.model).setdefault("_fsd_lock", RequestLock())
        return lock

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def is_shared_out(self) -> bool:
        """Does each of several processes hold a part of the weights (``tp_plan`` of transformers, FSDP)?

        They decode as one does, if all are asked the same at the same time.
        """
        return any(hasattr(parameter, "full_tensor") for parameter in self.model.parameters())

    @property
    def vocab_size(self) -> int:
        """Width of the logits (may exceed the tokenizer's length by padding rows)."""
        return int(self.lm_head_weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """Width of the features."""
        return int(self.lm_head_weight.shape[1])

    @property
    def lm_head_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def max_positions(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)

    @property
    def eos_token_ids(self) -> list[int]:
        return sorted(eos_ids(self.model.generation_config))

    @property
    def layer_windows(self) -> dict[str, int | None]:
        """Attention window by layer type (None: full), e.g. {"full_attention": None, "sliding_attention": 4096}."""
        window = getattr(self.config, "sliding_window", None)
        if hasattr(self.config, "use_sliding_window") and not self.config.use_sliding_window:
            window = None
        types = getattr(self.config, "layer_types", None)
        if types is None and "local" in getattr(self.config, "attention_layers", ()):
            types = ["local"]  # GPT-Neo's windows count slots
        if types is None:
            return {"all": window}
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ModelLoadError(
                f"{self.config.model_type} has layers of type {', '.join(sorted(unknown))}; a token tree "
                "can be verified in one forward only through full or sliding-window attention. Use another target."
            )
        return {kind: (window if kind == "sliding_attention" else None) for kind in sorted(set(types))}

    def fingerprint(self) -> dict[str, Any]:
        """What a drafter checkpoint must match: family, hidden size, vocabulary size and the tokenizer's table."""
        digest = None
        if self.tokenizer is not None:
            vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()), ensure_ascii=False)
            digest = hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
        return {
            "model_type": self.config.model_type,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "vocabulary_sha256": digest,
        }

    def weights_digest(self) -> str:
        """16 hexadecimal digits that tell this target's weights from another's of the same shape.

        They come from the final norm and about a thousand rows each of embeddings and LM head, which a target without
        its layers (:func:`fsd_train.models.slim.load_slim`) has too, and from the adapter that was merged into it, if
        any. Any other fine-tuned copy that left all of these alone has the same digest. Values are rounded to bf16, so
        dtype, device and packing of the weights do not matter.
        """
        rows = torch.arange(0, self.vocab_size, max(1, self.vocab_size // _DIGEST_ROWS))
        tables = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        parts = [ops.weight_rows(table, rows) for table in tables]
        norm = getattr(getattr(self.decoder, "norm", None), "weight", None)
        digest = hashlib.sha256()
        for part in parts if norm is None else [*parts, norm]:
            values = part.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
            digest.update(values.numpy().astype("<i2", copy=False).tobytes())
        digest.update(getattr(self.config, "merged_adapter", "").encode())
        return digest.hexdigest()[:16]

    # operations ----------------------------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] -> input embeddings [..., H_embed], as the target's first layer sees them before any scaling."""
        return self.model.get_input_embeddings()(ids)

    def lm_logits(self, features: Tensor, head: nn.Module | None = None) -> Tensor:
        """features [..., H] -> logits [..., V], with the family's scale and soft cap.

        ``head``, a linear layer of chosen rows of the LM head (see :meth:`reduced_lm_head`), gives [..., Vd] instead.
        """
        logits = (head or self.model.get_output_embeddings())(features)
        scale = getattr(self.config, "logit_scale", None)  # cohere multiplies
        if scale is not None:
            logits = logits * scale
        scale = getattr(self.config, "logits_scaling", None)  # granite divides
        if scale is not None:
            logits = logits / scale
        cap = getattr(self.config, "final_logit_softcapping", None)  # gemma
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def lm_head_rows(self, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(weight [Vd, H], bias [Vd] or None) of the LM head for the target ids [Vd], or the whole head."""
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return ops.weight_rows(head, ids), bias if bias is None or ids is None else bias[ids].contiguous()

    @torch.no_grad()
    def features(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Features [B, M, F] of right-padded sequences ids [B, M] (attention_mask [B, M], 1 on real tokens)."""
        out = self.decoder(
            input_ids=ids, attention_mask=attention_mask, use_cache=False, output_hidden_states=bool(self.watched)
        )
        return self._joined(out.last_hidden_state, self._watched_of(out.hidden_states))

    def reduced_lm_head(self, ids: Tensor) -> nn.Linear:
        """The rows ids [Vd] of the LM head as a frozen linear layer."""
        weight, bias = self.lm_head_rows(ids)
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        head.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            head.bias = nn.Parameter(bias, requires_grad=False)
        return head

    @torch.no_grad()
    def check_lm_head(self) -> None:
        """Raise ModelLoadError unless :meth:`lm_logits` reproduces the model's own logits (drafters rely on it)."""
        if not self._lm_head_is_plain:
            raise ModelLoadError(
                f"{self.config.model_type}: the LM head does more than a linear map, a scale and a soft cap, so a "
                "draft head cannot share it. Use an independent small model as drafter."
            )

    @cached_property
    def _lm_head_is_plain(self) -> bool:
        probe = torch.arange(4, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            logits = self.model(input_ids=probe, use_cache=False).logits.float()
            features = self.decoder(input_ids=probe, use_cache=False).last_hidden_state
            ours = self.lm_logits(features).float()
        return torch.allclose(logits, ours, atol=1e-2 * float(logits.abs().max()), rtol=1e-2)

    def watch(self, layers: Sequence[int]) -> None:
        """Add the outputs of these decoder layers (numbers from 0) to the features. Raises ModelLoadError."""
        self.layers(layers)
        before, self.watched = self.watched, tuple(sorted({*self.watched, *layers}))
        if self.watched != before and self.graphs is not None:
            self.graphs.forget()

    def layers(self, numbers: Sequence[int]) -> list[nn.Module]:
        """These decoder layers, counted from 0. Raises ModelLoadError if there is no such layer."""
        count = int(self.config.num_hidden_layers)
        lists = [module for module in self.decoder.modules() if isinstance(module, nn.ModuleList)]
        found = next((modules for modules in lists if len(modules) == count), None)
        for number in numbers:
            if found is None or not 0 <= number < count:
                raise ModelLoadError(f"{self.name} has no layer {number}: give numbers from 0 to {count - 1}.")
        return [] if found is None else [found[number] for number in numbers]

    def features_of(self, features: Tensor, layers: Sequence[int] = ()) -> Tensor:
        """The columns [..., H·(1 + len(layers))] of features [..., F]: the final features, then those of ``layers``."""
        if tuple(layers) == self.watched:
            return features
        width = self.hidden_size
        parts = [0, *(1 + self.watched.index(number) for number in sorted(layers))]
        return torch.cat([features[..., part * width : (part + 1) * width] for part in parts], dim=-1)

    def new_cache(self, batch: int, slots: int) -> SlotCache:
        """An empty key-value cache with room for ``slots`` tokens per row."""
        return new_cache(self.graphs, self.config, batch, slots)

    @property
    def held_bytes(self) -> int:
        """Memory of earlier requests' caches that :meth:`new_cache` takes from."""
        return 0 if self.graphs is None else self.graphs.held

    def cache_bytes(self, batch: int, slots: int) -> int:
        """What :meth:`new_cache` takes."""
        return batch * slots_taken(self.graphs, slots) * self.cache_bytes_per_token

    @cached_property
    def cache_bytes_per_token(self) -> int:
        """What a token takes in the cache, by a forward over one: configs of families do not agree on it."""
        cache = SlotCache(self.config, 1, 1)
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        cache.set_write_slots(zero, 0, 1)
        try:
            self.forward(zero, zero, torch.ones(1, 1, 1, dtype=torch.bool, device=self.device), cache, keep=1)
        except Exception as error:  # the first forward: a config may hold what no model can use
            raise ModelLoadError(f"{self.name} cannot read a token ({type(error).__name__}: {error}).") from error
        return cache.nbytes

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        cache: SlotCache,
        keep: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One forward over new tokens that see chosen cache slots.

        Args:
            tokens: [B, M] new token ids, written to the slots the cache was given.
            positions: [B, M] their positions.
            visible: [B, M, S] bool, slot s may be attended by token i (window not yet applied).
            cache: after :meth:`SlotCache.set_write_slots`.
            keep: logits of the last ``keep`` tokens only (0: all).

        Returns:
            (logits [B, M or keep, V] in the model's dtype, features [B, M, F])
        """
        scattered = cache.positions is not None and any(self.layer_windows.values())  # a recording does not know where
        if self.graphs is not None and not keep and not scattered:
            logits, features = self.graphs(cache, visible, tokens, positions)
            return logits, features
        return self._forward(cache, visible, tokens, positions, keep)

    def use_graphs(self, recorder: Recorder) -> None:
        """Record forwards over trees and replay them, see :class:`Graphs`."""
        self.graphs = Graphs(self._forward, recorder)

    def _forward(
        self, cache: SlotCache, visible: Tensor, tokens: Tensor, positions: Tensor, keep: int = 0
    ) -> tuple[Tensor, Tensor]:
        masks = self._windowed(visible, positions, cache)
        stack = ops.stack_of(self.decoder)
        if stack is not None and stack.takes(visible) and self._lm_head_is_plain:
            kinds = getattr(self.config, "layer_types", None) or ["all"] * self.config.num_hidden_layers
            of_layers = [masks[kind] for kind in kinds]
            final, others = stack(self.embed(tokens), positions, of_layers, cache, self.decoder.norm, self.watched)
            return self.lm_logits(final[:, -keep:]), self._joined(final, others)  # [-0:] is all
        given = {kind: self._for_attention(mask) for kind, mask in masks.items()}
        extra: dict[str, Any] = {"logits_to_keep": keep} if keep and self._takes_logits_to_keep else {}
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=next(iter(given.values())) if len(given) == 1 else given,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
            **extra,
        )
        return out.logits[:, -keep:], self._joined(out.hidden_states[-1], self._watched_of(out.hidden_states))

    def _watched_of(self, states: Sequence[Tensor] | None) -> list[Tensor]:
        """The outputs of watched layers among what enters the first layer and each layer's output."""
        return [] if states is None else [states[number + 1] for number in self.watched]

    def _joined(self, final: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Final features [B, M, H] and the outputs of watched layers -> [B, M, F]."""
        return torch.cat([final, *(other.to(final.dtype) for other in others)], dim=-1) if others else final

    def _windowed(self, visible: Tensor, positions: Tensor, cache: SlotCache) -> dict[str, Tensor]:
        """[B, M, S] masks by layer type; windows count positions, not slots (tree siblings share a position)."""
        masks = {}
        for kind, window in self.layer_windows.items():
            mask = visible
            if window is not None:
                at = cache.positions
                if at is None:
                    counted = torch.arange(visible.shape[-1], device=visible.device).repeat(visible.shape[0], 1)
                    at = counted.scatter(1, cache.slots, positions)  # the text's tokens lie in the slots of theirs
                mask = mask & (positions[:, :, None] - at[:, None, :] < window)
            masks[kind] = mask
        return masks

    def _for_attention(self, mask: Tensor) -> Tensor:
        """[B, M, S] bool -> [B, 1, M, S] as the model's own attention takes it: additive where it is eager."""
        mask = mask[:, None]
        return additive(mask, self.dtype) if self._eager else mask
