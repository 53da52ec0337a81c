"""Draft with Gemma-4 assistants: small models whose layers attend to the target's own keys and values.

The assistant has no keys of its own. Each of its layers reads those that the target's last layer of the same type
(full or sliding attention) keeps of the text. They are computed here once more, by that layer's modules, from the
output of the layer before it, so they lie in a cache of two layers that follows only the text.

A node reads [embedding of its token ; its parent's state], both as wide as the target. At the root the state is the
target's final feature before it; below, the assistant's output after a projection. Nodes do not attend to each other,
and all stand at the position of the root. Ordered heads estimate the tokens of the best ``centroid_intermediate_top_k``
clusters only, and q is 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from fsd_core import functional
from fsd_core.errors import CheckpointError, ModelLoadError, foreign_errors
from fsd_core.functional import NEVER
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters.base import DraftRequest
from fsd_infer.drafters.steps import HEADS, FeatureReader, FeatureSession, StepDrafter
from fsd_infer.heads.kinds import ASSISTANT
from fsd_infer.heads.weights import check_sizes
from fsd_infer.targets.stack import mask_for
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape

DEPTH = 64  # most tokens to draft; one step is used again at every depth


class KeyValueSource(NamedTuple):
    """Where the assistant's layers of one type find keys and values: the target's layer and its type's window."""

    kind: str
    number: int
    window: int | None


class AssistantModel(FeatureReader):
    """An assistant whose cache slot i holds the target's keys and values of position i, a layer for each type."""

    def __init__(self, head: Any, target: Target, sources: list[KeyValueSource]) -> None:
        self.head, self.target, self.device, self.sources = head, target, target.device, sources
        self.cache_config = SimpleNamespace(num_hidden_layers=len(sources))
        self._rotary: Any = _text_model(target).rotary_emb

    def read(self, cache: SlotCache, features: Tensor) -> None:
        """Write keys and values of the target's features [B, M, F] to the write slots, which are their positions."""
        for index, source in enumerate(self.sources):
            layer: Any = self.target.layers([source.number])[0]
            attention, width = layer.self_attn, self.target.hidden_size
            x = layer.input_layernorm(self.target.features_of(features, [source.number - 1])[..., width:])
            keys = attention.k_proj(x).unflatten(-1, (-1, attention.head_dim))
            values = keys if attention.v_proj is None else attention.v_proj(x).view_as(keys)
            angles = self._rotary(x, cache.slots.expand(x.shape[:2]), source.kind)
            keys = attention.k_norm(keys).transpose(1, 2)
            keys, _ = apply_rotary_pos_emb(keys, keys, *angles)
            cache.update(keys, attention.v_norm(values).transpose(1, 2), index)

    def step(self, cache: SlotCache, lengths: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Read nodes below texts.

        Args:
            cache: cache of the texts.
            lengths: [B] positions that the cache has of each text, and so the position of its root.
            tokens: [B, E].
            states: [B, E, H] before them.

        Returns:
            Logits [B, E, V] of the tokens after the nodes, and the states [B, E, H] before these.
        """
        used = functional.host_max(lengths, cache.window)
        back = lengths[:, None] - torch.arange(used, device=lengths.device)  # distance of each slot from the root
        masks, shared = dict[str, Any](), dict[str, Any]()
        for index, (layer_type, _, window) in enumerate(self.sources):
            seen = back > 0 if window is None else (back > 0) & (back < window)
            seen = seen[:, None, None].expand(-1, 1, tokens.shape[1], -1)
            masks[layer_type] = mask_for(self.head.model.layers, seen, states.dtype)
            layer: Any = cache.layers[index]
            shared[layer_type] = layer.keys[:, :, :used], layer.values[:, :, :used]
        x = self.head.pre_projection(torch.cat([self.target.embed(tokens).to(states.dtype), states], -1))
        positions = lengths[:, None].expand(tokens.shape)
        inputs = {"attention_mask": masks, "shared_kv_states": shared, "use_cache": False}
        inputs["logits_to_keep"] = None  # else transformers drops nodes
        outputs = self.head.model(inputs_embeds=x, position_ids=positions, **inputs).last_hidden_state
        return self._logits(outputs), self.head.post_projection(outputs)

    def _logits(self, outputs: Tensor) -> Tensor:
        """Return logits [B, E, V] of outputs [B, E, Hd]; of ordered heads those of the best clusters' tokens."""
        ordered, lm_head = self.head.masked_embedding, self.head.lm_head
        if ordered is None:
            result: Tensor = lm_head(outputs)
            return result
        best = ordered.centroids(outputs).topk(ordered.centroid_intermediate_top_k).indices
        ids = ordered.token_ordering.long().view(ordered.num_centroids, -1)[best].flatten(2)  # [B, E, tokens]
        logits = (lm_head.weight[ids] @ outputs[..., None])[..., 0]
        return logits.new_full((*outputs.shape[:2], ordered.vocab_size), NEVER).scatter(2, ids, logits)


@HEADS.register(ASSISTANT)
class AssistantDrafter(StepDrafter):
    """A Gemma-4 assistant.

    Args:
        head: transformers' model of it, in the target's dtype and on its device.
        target: the Gemma-4 model to draft for.
        shape: see :class:`StepDrafter`.

    Raises:
        ModelLoadError: a target that is not a Gemma 4, or whose keys the assistant cannot read.
        CheckpointError: a head for other features.
        VocabularyMismatchError: a head for another vocabulary.
    """

    name = "assistant"
    drafts_beams = reads_features = False  # it follows the text's keys
    head: Any
    model: AssistantModel

    def __init__(self, head: nn.Module, target: Target, shape: TreeShape | None = None) -> None:
        sources = _sources(head, target)
        target.capture_layers([source.number - 1 for source in sources])
        super().__init__(head, target, DEPTH, shape, model=AssistantModel(head, target, sources))

    @classmethod
    def read(
        cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None
    ) -> AssistantDrafter:
        with foreign_errors(CheckpointError, f"the Gemma-4 assistant in {directory} cannot be loaded: {{why}}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=target.dtype, use_safetensors=True, output_loading_info=True, local_files_only=True
            )
        head, info = loaded
        faults = {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(faults.values()):
            raise CheckpointError(
                f"the tensors of the Gemma-4 assistant in {directory} do not fit its config: {faults}."
            )
        return cls(head.to(target.device).eval().requires_grad_(False), target, shape)

    def slots(self, max_length: int) -> int:
        return max_length  # nodes have none

    def start(self, first_tokens: Tensor, request: DraftRequest) -> AssistantSession:
        return AssistantSession(self, request)


class AssistantSession(FeatureSession):
    """A session with the target's keys and values."""

    drafter: AssistantDrafter

    def _begin(self, roots: Tensor) -> Tensor:
        return self.last_features[:, None]

    def _step(self, depth: int, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.drafter.model.step(self.cache, self.lengths, tokens, state)


def _text_model(target: Target) -> Any:
    """Return the part of the decoder that holds the layers; a decoder may also hold a vision tower."""
    layer = target.layers([0])[0]
    parts = (module for module in target.decoder.modules() if layer in getattr(module, "layers", ()))
    return next(parts, target.decoder)


def _sources(head: Any, target: Target) -> list[KeyValueSource]:
    """Return the target's layers whose keys the assistant reads. Raises ModelLoadError if it cannot."""
    assistant, config = head.config.get_text_config(), target.config
    refusal = f"this Gemma-4 assistant cannot draft for {target.name}"
    if not (hasattr(config, "num_kv_shared_layers") and hasattr(config, "per_layer_config")):
        raise ModelLoadError(f"{refusal}: it reads the keys of a Gemma-4 target, and this one is {config.model_type}.")
    check_sizes("this Gemma-4 assistant", head.backbone_hidden_size, assistant.vocab_size, target)
    cached_types = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    sources = []
    for layer_type in sorted(set(assistant.layer_types)):
        last = max((i for i, cached_type in enumerate(cached_types) if cached_type == layer_type), default=0)
        if last == 0:
            raise ModelLoadError(f"{refusal}: none of the target's layers but the first keeps keys of {layer_type}.")
        ours = assistant.per_layer_config[assistant.layer_types.index(layer_type)]
        sizes = [(layer.num_key_value_heads, layer.head_dim) for layer in (ours, config.per_layer_config[last])]
        if sizes[0] != sizes[1]:
            raise ModelLoadError(
                f"{refusal}: for {layer_type} it reads {sizes[0]} key heads and widths, the target has {sizes[1]}."
            )
        window = assistant.sliding_window if layer_type == "sliding_attention" else None
        sources.append(KeyValueSource(layer_type, last, window))
    return sources
