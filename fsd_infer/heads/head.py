"""The EAGLE-style draft head: one decoder layer on the target's features.

Li et al., EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858) and EAGLE-3 (arXiv 2503.01840). Input at position i is
[embedding of token i+1 ; feature of token i]; the output at i stands for the feature of token i+1, and an LM head turns
it into the drafter's distribution of token i+2.

Layouts "eagle" and "fsd": x = fc [embedding ; f_i], and the output estimates f_{i+1}, which the target's frozen LM head
reads. With ``fused_layers`` (fsd) a projection of inner layers is added to x where the target's own features are read,
so that a head trained without them is where training with them starts, and the head's own outputs, which have no inner
layers, feed back through the same path as before.

Layout "eagle3": x = fc of a low, a middle and a high layer, without the final feature, and the first decoder layer
attends to [norm(embedding) ; norm(x)]. The head's own output replaces x, so nothing ties it to the target's features;
``norm`` and an LM head, in general the head's own, follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fsd_infer.cpu import ops
from fsd_infer.device.cache import SlotCache
from fsd_infer.errors import CheckpointError
from fsd_infer.heads.block import Block
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.layers import Eagle3Layer, build_layers, is_eager, mask_for, run_layers

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

__all__ = ["EagleConfig", "EagleHead", "LayerFusion"]


@torch.no_grad()
def _norm_gain(norm: Any, size: int) -> Tensor:
    """[H] absolute gain per dimension of a layer or RMS norm (families store w or w - 1, so it is measured)."""
    weight = next(norm.parameters())
    probe = torch.ones(1, size, device=weight.device, dtype=weight.dtype)
    probe[:, 1::2] = -1  # mean 0, mean square 1
    return ((norm(probe) - norm(-probe)).float() / 2).abs()[0]


# The linear layers whose output is added to the residual stream, by the names families give them.
_OUTPUT_PROJECTIONS = ("o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "c_proj")


class LayerFusion(nn.Module):
    """Projects the outputs of k inner layers of the target to the head's width: Σ_l W_l · RMSNorm_l(h_l).

    The projection starts at zero.
    """

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(size, eps=1e-6) for _ in range(count))
        self.project = nn.Linear(count * size, size, bias=False)
        nn.init.zeros_(self.project.weight)

    def forward(self, layers: Tensor) -> Tensor:
        """layers [..., k·H] -> [..., H]."""
        parts = layers.chunk(len(self.norms), dim=-1)
        return self.project(torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=-1))


class EagleHead(nn.Module):
    """See the module's docstring. Parameters are named as in the public checkpoints: ``fc``, ``layers.0.*``, ``norm``.

    Buffers: ``draft_ids`` [Vd] target id of each draft vocabulary entry, ascending (if reduced);
    ``feature_scale`` [H] (if configured).
    """

    draft_ids: Tensor | None
    feature_scale: Tensor | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        width, count = config.hidden_size, len(config.fused_layers)
        layers, self.rotary_emb, norm = build_layers(config.layer, config.num_layers)
        self.norm: nn.Module | None = None
        self.fusion: LayerFusion | None = None
        self.fc_norm: nn.ModuleList | None = None
        self.lm_head: nn.Linear | None = None
        self.embed_tokens: nn.Embedding | None = None
        self.eagle3 = config.layout == "eagle3"
        if self.eagle3:
            layers[0] = Eagle3Layer(layers[0], config.norm_before_residual)
            self.fc = nn.Linear(count * config.target_hidden_size, width, bias=False)
            if config.fc_norm:
                like: Any = norm
                epsilon, kind = like.variance_epsilon, type(like)
                self.fc_norm = nn.ModuleList(kind(config.target_hidden_size, epsilon) for _ in range(count))
            if config.own_lm_head:
                self.lm_head = nn.Linear(width, config.draft_vocab_size or config.vocab_size, bias=False)
            if config.own_embeddings:
                self.embed_tokens = nn.Embedding(config.vocab_size, width)
        else:
            self.fc = nn.Linear(config.embed_size + width, width, bias=config.fc_bias)
            if not config.input_norm and hasattr(layers[0], "input_layernorm"):
                layers[0].input_layernorm = nn.Identity()
            if config.fused_layers:
                self.fusion = LayerFusion(count, width)
        self.layers = layers
        self.block = Block(config) if config.block_size else None
        if self.eagle3 or config.final_norm:
            self.norm = norm
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_ids", ids)
        self.register_buffer("feature_scale", torch.ones(width) if config.feature_scale else None)

    def set_draft_ids(self, ids: Tensor | None) -> None:
        """Draft over other target ids [Vd] (ascending; None: all of them).

        Possible at any time where the LM head is the target's. Raises CheckpointError where it is the head's own.
        """
        if self.lm_head is not None:
            raise CheckpointError("the draft vocabulary of a head with an LM head of its own is fixed: train another.")
        self.draft_ids = ids
        self.config.draft_vocab_size = None if ids is None else len(ids)

    def cast(self, dtype: torch.dtype) -> EagleHead:
        """Convert the parameters only: ``.to(dtype)`` would round the rotary frequencies too."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    # where training starts -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def initialise_from(self, target: Target) -> None:
        """Start as the identity on what is read; norm and scale are the target's final norm's.

        What is read is the final feature, or for "eagle3" the highest of the fused layers. Its outputs are large and
        speak of the token before the one that is wanted: scaled down, so that the layer soon outweighs them.
        """
        width, size = self.config.embed_size, self.config.hidden_size
        if self.eagle3:
            scale = 1.0 if self.config.fc_norm else 0.05
            self.fc.weight.normal_(std=0.01 * scale)
            self.fc.weight[:, -size:].add_(scale * torch.eye(size))
        else:
            self.fc.weight[:, :width].normal_(std=0.02)
            self.fc.weight[:, width:].copy_(torch.eye(size))
        final = getattr(target.decoder, "norm", None)
        weight = getattr(final, "weight", None)
        if self.norm is not None and weight is not None:
            self.norm.get_parameter("weight").copy_(weight)
        if self.feature_scale is not None:
            if weight is None:
                raise CheckpointError(
                    f"{target.config.model_type} has no final norm weight: set feature_scale to false."
                )
            magnitude = _norm_gain(final, size)  # near-zero gains would blow their dimension up
            self.feature_scale.copy_(magnitude.clamp_min(0.01 * float(magnitude.mean())))

    @torch.no_grad()
    def choose(self, ids: Tensor | None, target: Target) -> None:
        """Draft over the target ids [Vd], or all; an LM head of its own starts with the target's rows for them."""
        if self.draft_ids is not None and ids is not None:
            self.draft_ids.copy_(ids)
        if self.lm_head is not None:
            self.lm_head.weight.copy_(target.lm_head_rows(ids)[0])

    @torch.no_grad()
    def take_layers(self, layers: Sequence[nn.Module]) -> None:
        """Start the decoder layers with the weights of the target's. Raises CheckpointError if they do not fit."""
        if len(layers) != len(self.layers):
            raise CheckpointError(f"{len(layers)} layer(s) are to be copied to a head that has {len(self.layers)}.")
        for own, source in zip(self.layers, layers, strict=True):
            state, wanted = source.state_dict(), own.state_dict()
            wrong = sorted(name for name in wanted if name not in state or state[name].shape != wanted[name].shape)
            if wrong:
                raise CheckpointError(
                    f"the target's {type(source).__name__} does not fit the head's {type(own).__name__} "
                    f"({', '.join(wrong)}): leave initial_layers out."
                )
            own.load_state_dict({name: state[name] for name in wanted})

    @torch.no_grad()
    def continue_from(self, head: EagleHead) -> None:
        """Start with another head's weights; what that one lacks (layers, fusion) starts by adding nothing.

        The draft vocabulary is that head's only where the LM head is too.

        Raises CheckpointError if its weights do not fit.
        """
        state, wanted = head.state_dict(), self.state_dict()
        taken = {name: value for name, value in state.items() if name != "draft_ids" or self.lm_head is not None}
        wrong = sorted(name for name in taken if name not in wanted or wanted[name].shape != taken[name].shape)
        if wrong:
            raise CheckpointError(
                f"the initial head does not fit this one ({', '.join(wrong)}): give it the same options."
            )
        self.load_state_dict(taken, strict=False)
        for layer in self.layers[len(head.layers) :]:
            for name, parameter in layer.named_parameters():
                if name.split(".")[-2] in _OUTPUT_PROJECTIONS:
                    parameter.zero_()

    # running -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        embeds: Tensor,
        features: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Estimate the next features.

        Args:
            embeds: [B, M, E] embedding of token i+1 at position i.
            features: feature of token i at position i: the target's [B, M, H_t·(1 + k)], the final one and those of
                the k fused layers, or an earlier output of this head [B, M, H].
            position_ids: [B, M].
            attention_mask: [B, 1, M, K] bool, True where a query may attend; None for causal attention.
            cache: receives keys and values, in call order.

        Returns:
            [B, M, H], to be fed back at the next position; :meth:`readout` makes of it what the LM head reads
        """
        if attention_mask is None and is_eager(self.layers) and embeds.shape[1] > 1:
            count = embeds.shape[1]  # eager attention is not causal by itself
            attention_mask = torch.ones(count, count, dtype=torch.bool, device=embeds.device).tril()[None, None]
        embeds = embeds.to(features.dtype)
        x = self._fused(features) if self.eagle3 else self._joined(embeds, features)
        norm = None if self.eagle3 and not self.config.norm_output else self.norm
        stack = ops.stack_of(self)
        if stack is not None and attention_mask is not None and isinstance(cache, SlotCache):
            visible, attended = attention_mask[:, 0], None
            if stack.takes(visible):
                if self.eagle3:
                    first: Any = self.layers[0]
                    x, attended = first.attended(embeds, x)
                return stack(x, position_ids, [visible] * len(self.layers), cache, norm, attended=attended)[0]
        angles = self.rotary_emb(x, position_ids)
        mask = mask_for(self.layers, attention_mask, x.dtype)
        layers = list(self.layers)
        if self.eagle3:
            x = layers.pop(0)(
                embeds, x, attention_mask=mask, position_ids=position_ids, past_key_values=cache,
                position_embeddings=angles,
            )  # fmt: skip
        x = run_layers(layers, x, angles, position_ids, mask, cache)
        return x if norm is None else norm(x)

    def _fused(self, features: Tensor) -> Tensor:
        """Layout "eagle3": fc of the fused layers in [..., H_t·(1 + k)]; outputs of this head stay as they are."""
        if features.shape[-1] == self.config.hidden_size:
            return features
        inner = features[..., self.config.target_hidden_size :]
        if self.fc_norm is not None:
            parts = inner.chunk(len(self.fc_norm), dim=-1)
            inner = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(inner)

    def _joined(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Layouts "eagle" and "fsd": fc of embedding and feature, and the projection of fused layers."""
        inner = features[..., self.config.hidden_size :]
        features = features[..., : self.config.hidden_size]
        if self.feature_scale is not None:
            features = features / self.feature_scale.to(features.dtype)
        x = self.fc(torch.cat([embeds, features], dim=-1))
        if self.fusion is not None and inner.shape[-1]:
            x = x + self.fusion(inner)
        return x

    def readout(self, outputs: Tensor) -> Tensor:
        """What the LM head reads, [..., H] of outputs [..., H] of :meth:`forward`."""
        if self.eagle3 and not self.config.norm_output and self.norm is not None:
            return self.norm(outputs)
        return outputs

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        """ids [...] -> embeddings [..., E]: the head's own where it has them, else the target's.

        -s stands for the s-th mask of a block.
        """
        if self.embed_tokens is not None:
            return self.embed_tokens(ids)
        if self.block is None:
            return target.embed(ids)
        embeds = target.embed(ids.clamp_min(0))
        masks = self.block.masks[(-ids - 1).clamp_min(0)].to(embeds.dtype)
        return torch.where((ids < 0)[..., None], masks, embeds)
