"""The EAGLE-style draft head: one decoder layer on the target's features.

Li et al., EAGLE (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858). Input at position i is
[embedding of token i+1 ; feature of token i]; the output estimates the feature of token i+1, and the target's
frozen LM head turns it into the drafter's distribution of token i+2.

With ``fused_layers`` the head also reads the outputs of some inner layers of the target where it has the target's own
features (EAGLE-3, arXiv 2503.01840, reads a low, a middle and a high layer). Ours adds their projection to the final
feature's instead of replacing it, so that a head trained without them is where training with them starts, and the
head's own outputs, which have no inner layers, feed back through the same path as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, DynamicCache
from transformers.cache_utils import Cache

from fsd_infer.errors import CheckpointError

if TYPE_CHECKING:
    from fsd_infer.target import Target

# What a decoder layer's shape depends on; everything else in a target's config is left at the family's default.
_LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "layer_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "use_qkv_bias",
    "use_qk_norm",
    "qk_layernorm",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "attention_multiplier",
    "residual_multiplier",
)


@dataclass
class EagleConfig:
    """Shape and options of a head; everything off by default is the public EAGLE-1/2 layout.

    Attributes:
        hidden_size: H, width of the target's features.
        vocab_size: V of the target.
        layer: transformers config of the decoder layer, with its ``model_type``.
        embed_size: width of the target's input embeddings (H unless the family projects them).
        num_layers: decoder layers.
        input_norm: keep the first layer's input norm (the public checkpoints have none).
        final_norm: normalise the output as the target's final norm does (the public checkpoints do not).
        feature_scale: divide incoming features by a stored vector, the target's final-norm weight: evens out
            outlier dimensions.
        fc_bias: bias of the 2H -> H projection.
        fused_layers: layers of the target (numbers from 0) whose outputs the head reads beside the final features.
        draft_vocab_size: Vd of a reduced draft vocabulary; None for all of V.
    """

    hidden_size: int
    vocab_size: int
    layer: dict[str, Any]
    embed_size: int = 0
    num_layers: int = 1
    input_norm: bool = False
    final_norm: bool = False
    feature_scale: bool = False
    fc_bias: bool = False
    draft_vocab_size: int | None = None
    fused_layers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.embed_size = self.embed_size or self.hidden_size
        self.fused_layers = sorted(set(self.fused_layers or []))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EagleConfig:
        known = {field.name for field in fields(cls)}
        unknown = set(values) - known
        if unknown:
            raise CheckpointError(
                f"unknown head option(s) {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}."
            )
        return cls(**values)

    @classmethod
    def for_target(
        cls, target: Target, layer: str = "auto", intermediate_size: int | None = None, **options: Any
    ) -> EagleConfig:
        """A head for a target.

        Args:
            target: whose features it reads.
            layer: "auto" (the target's own kind of layer where a standalone one works, a Llama layer otherwise)
                or "llama".
            intermediate_size: width of the layers' MLP; None for the target's. A narrower one trains and drafts in
                less time, and the target's layers are no start for it any more.
            options: any other field of the config.

        Raises:
            CheckpointError: ``intermediate_size`` is not positive.
        """
        config = target.config
        llama = _llama_layer(config, target.hidden_size)
        own = None if layer == "llama" else _own_layer(config)
        chosen = own or llama
        if intermediate_size is not None:
            if intermediate_size < 1:
                raise CheckpointError(f"intermediate_size must be positive, got {intermediate_size}.")
            if "intermediate_size" not in chosen:  # a family that calls its MLP's width by another name
                chosen = llama
            chosen["intermediate_size"] = intermediate_size
        return cls(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            layer=chosen,
            embed_size=int(target.model.get_input_embeddings().weight.shape[1]),
            **options,
        )


def _llama_layer(config: Any, hidden_size: int) -> dict[str, Any]:
    heads = int(config.num_attention_heads)
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": int(getattr(config, "intermediate_size", None) or 4 * hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or hidden_size // heads),
        "max_position_embeddings": int(getattr(config, "max_position_embeddings", None) or 2048),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
    }


def _own_layer(config: Any) -> dict[str, Any] | None:
    """The target's own kind of layer as a standalone config, or None where that does not work.

    Mixtures of experts are left out on purpose: a draft layer is meant to be small.
    """
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        return None
    layer = layer_of(config)
    try:
        with torch.random.fork_rng(devices=[]):
            _probe(*_build_layers(layer, 1), hidden_size=int(config.hidden_size))
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError):
        return None  # the family's layer wants more than the common arguments
    return layer


def layer_of(config: Any) -> dict[str, Any]:
    """What a decoder layer of a transformers config depends on, as :attr:`EagleConfig.layer`."""
    values = config.to_dict()
    layer = {name: values[name] for name in _LAYER_FIELDS if values.get(name) is not None}
    return {**layer, "model_type": config.model_type}


def _build_layers(layer: dict[str, Any], count: int) -> tuple[nn.ModuleList, nn.Module, nn.Module]:
    """(decoder layers, rotary embedding, final norm) of a transformers model of that kind with ``count`` layers."""
    values = dict(layer)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.num_hidden_layers = count
    config.vocab_size, config.pad_token_id = 2, None
    config.layer_types = ["full_attention"] * count
    config.sliding_window = None
    config._attn_implementation = "eager" if layer["model_type"] in ("gemma2", "gpt_oss") else "sdpa"
    model = AutoModel.from_config(config, attn_implementation=config._attn_implementation)
    return model.layers, model.rotary_emb, model.norm


def _run_layers(
    layers: nn.ModuleList, rotary: nn.Module, x: Tensor, positions: Tensor, mask: Any, cache: Any
) -> Tensor:
    angles = rotary(x, positions)
    for layer in layers:
        x = layer(x, attention_mask=mask, position_ids=positions, past_key_values=cache, position_embeddings=angles)
        x = x[0] if isinstance(x, tuple) else x
    return x


@torch.no_grad()
def _probe(layers: nn.ModuleList, rotary: nn.Module, norm: nn.Module, hidden_size: int) -> None:
    """Raise ValueError unless the layer is causal through an explicit mask and a cache."""
    x = torch.randn(1, 4, hidden_size)
    positions = torch.arange(4)[None]
    causal = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    whole = _run_layers(layers, rotary, x, positions, mask_for(layers, causal, x.dtype), None)
    cache = DynamicCache()
    steps = [
        _run_layers(
            layers, rotary, x[:, i : i + 1], positions[:, i : i + 1],
            mask_for(layers, causal[:, :, i : i + 1, : i + 1], x.dtype), cache,
        )
        for i in range(4)
    ]  # fmt: skip
    if whole.shape != x.shape or not torch.allclose(whole, torch.cat(steps, 1), atol=1e-4):
        raise ValueError("layer is not usable on its own")
    norm(whole)


def _is_eager(layers: nn.ModuleList) -> bool:
    config = getattr(getattr(layers[0], "self_attn", None), "config", None)
    return getattr(config, "_attn_implementation", "sdpa") == "eager"


@torch.no_grad()
def _norm_gain(norm: Any, size: int) -> Tensor:
    """[H] absolute gain per dimension of a layer or RMS norm (families store w or w - 1, so it is measured)."""
    weight = next(norm.parameters())
    probe = torch.ones(1, size, device=weight.device, dtype=weight.dtype)
    probe[:, 1::2] = -1  # mean 0, mean square 1
    return ((norm(probe) - norm(-probe)).float() / 2).abs()[0]


def mask_for(layers: nn.ModuleList, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask in the form the layers' attention wants: additive for eager attention, boolean otherwise."""
    if mask is None or not _is_eager(layers):
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


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
    """See the module's docstring. Parameters are named as in the public checkpoints: ``fc``, ``layers.0.*``.

    Buffers: ``draft_ids`` [Vd] target id of each draft vocabulary entry, ascending (if reduced);
    ``feature_scale`` [H] (if configured).
    """

    draft_ids: Tensor | None
    feature_scale: Tensor | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.embed_size + config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers, self.rotary, norm = _build_layers(config.layer, config.num_layers)
        if not config.input_norm and hasattr(self.layers[0], "input_layernorm"):
            self.layers[0].input_layernorm = nn.Identity()
        self.norm = norm if config.final_norm else None
        self.fusion = LayerFusion(len(config.fused_layers), config.hidden_size) if config.fused_layers else None
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_ids", ids)
        self.register_buffer("feature_scale", torch.ones(config.hidden_size) if config.feature_scale else None)

    def set_draft_ids(self, ids: Tensor | None) -> None:
        """Draft over other target ids [Vd] (ascending; None: all of them).

        Possible at any time because the head estimates features and the LM head is the target's.
        """
        self.draft_ids = ids
        self.config.draft_vocab_size = None if ids is None else len(ids)

    def cast(self, dtype: torch.dtype) -> EagleHead:
        """Convert the parameters only: ``.to(dtype)`` would round the rotary frequencies too."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    @torch.no_grad()
    def initialise_from(self, target: Target) -> None:
        """Start as the identity on features: fc passes them through, norm and scale are the target's final norm's."""
        width = self.config.embed_size
        self.fc.weight[:, :width].normal_(std=0.02)
        self.fc.weight[:, width:].copy_(torch.eye(self.config.hidden_size))
        final = getattr(target.decoder, "norm", None)
        weight = getattr(final, "weight", None)
        if self.norm is not None and weight is not None:
            self.norm.get_parameter("weight").copy_(weight)
        if self.feature_scale is not None:
            if weight is None:
                raise CheckpointError(
                    f"{target.config.model_type} has no final norm weight: set feature_scale to false."
                )
            magnitude = _norm_gain(final, self.config.hidden_size)  # near-zero gains would blow their dimension up
            self.feature_scale.copy_(magnitude.clamp_min(0.01 * float(magnitude.mean())))

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

        Raises CheckpointError if its weights do not fit.
        """
        state, wanted = head.state_dict(), self.state_dict()
        taken = {name: value for name, value in state.items() if name != "draft_ids"}
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
            features: feature of token i at position i: the target's [B, M, H·(1 + k)], the final one and those of the
                k fused layers, or an earlier output of this head [B, M, H].
            position_ids: [B, M].
            attention_mask: [B, 1, M, K] bool, True where a query may attend; None for causal attention.
            cache: receives keys and values, in call order.

        Returns:
            [B, M, H] in the space the target's LM head reads.
        """
        inner = features[..., self.config.hidden_size :]
        features = features[..., : self.config.hidden_size]
        if self.feature_scale is not None:
            features = features / self.feature_scale.to(features.dtype)
        x = self.fc(torch.cat([embeds.to(features.dtype), features], dim=-1))
        if self.fusion is not None and inner.shape[-1]:
            x = x + self.fusion(inner)
        if (
            attention_mask is None and _is_eager(self.layers) and x.shape[1] > 1
        ):  # eager attention is not causal by itself
            attention_mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[None, None]
        mask = mask_for(self.layers, attention_mask, x.dtype)
        x = _run_layers(self.layers, self.rotary, x, position_ids, mask, cache)
        return x if self.norm is None else self.norm(x)
