"""The EAGLE-style draft head: one decoder layer on the target's features.

Li et al., EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858) and EAGLE-3 (arXiv 2503.01840). The input at position i
is [embedding of token i+1 ; feature of token i]. The output at i stands for the feature of token i+1. An LM head turns
it into the drafter's distribution of token i+2.

Layouts "eagle" and "fsd": x = fc [embedding ; f_i], and the output estimates f_{i+1}, the input of the target's frozen
LM head. With ``fused_layers`` (fsd), a projection of inner layers is added to x wherever x comes from the target. The
head's own outputs have no inner layers and skip the projection. So a head without it is a valid start of training.

Layout "eagle3": x = fc of a low, a middle and a high layer, without the final feature. The first decoder layer attends
to [norm(embedding) ; norm(x)]. The head's own output replaces x in later steps, and nothing ties it to the target's
features. ``norm`` and an LM head follow, in general the head's own.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from fsd_core.errors import CheckpointError, foreign_errors
from fsd_core.files import HUB_OPTIONS, disk_errors, replacing
from fsd_core.hub import hub_errors, is_hub_id, load_whole
from fsd_infer.device.cache import SlotCache, cache_argument
from fsd_infer.device.cuda_graphs import CachedModel
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.formats import read_head
from fsd_infer.heads.hub import find_head
from fsd_infer.heads.layers import build_layers, has_mrope, without_progress_bars
from fsd_infer.heads.stored_parts import CONFIG, StoredHead
from fsd_infer.heads.weights import SINGLE
from fsd_infer.targets.stack import HeadStack, Stack, StackInputs

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

__all__ = ["EagleConfig", "EagleHead", "HeadModel"]


_READS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")  # what an attention's input enters


class Eagle3Layer(nn.Module):
    """EAGLE-3's first layer (arXiv 2503.01840): attention reads [norm(embedding) ; norm(x)], the residual is x.

    Args:
        layer: a decoder layer of a pre-norm family, whose modules are reused; its input projections are replaced.
        norm_before_residual: use norm(x) as the residual.
    """

    def __init__(self, layer: Any, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self._cache_argument = cache_argument(type(self.self_attn))
        for name in _READS:
            if (narrow := getattr(self.self_attn, name, None)) is not None:
                wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
                setattr(self.self_attn, name, wide)

    def forward(self, embeds: Tensor, x: Tensor, cache: Any = None, **others: Any) -> Tensor:
        """Map embeds and x [B, M, H] to [B, M, H]; the cache and ``others`` are arguments of the attention."""
        x, attended = self.attended(embeds, x)
        x = x + self.self_attn(attended, **{self._cache_argument: cache}, **others)[0]
        return x + self.mlp(self.post_attention_layernorm(x))

    def attended(self, embeds: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual [B, M, H] and the attention's input [B, M, 2H] for embeds and x [B, M, H]."""
        normed = self.hidden_norm(x)
        attended = torch.cat([self.input_layernorm(embeds), normed], -1)
        return normed if self.norm_before_residual else x, attended


class LayerFusion(nn.Module):
    """A projection of k inner layers of the target to the head's width, Σ_l W_l · RMSNorm_l(h_l), initially zero."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(size, eps=1e-6) for _ in range(count))
        self.project = nn.Linear(count * size, size, bias=False)
        nn.init.zeros_(self.project.weight)

    def forward(self, layers: Tensor) -> Tensor:
        """Map layers [..., k·H] to [..., H]."""
        return self.project(_normed(self.norms, layers))


def _normed(norms: nn.ModuleList, layers: Tensor) -> Tensor:
    """Apply the i-th of k norms to the i-th layer in [..., k·H]."""
    parts = layers.chunk(len(norms), dim=-1)
    return torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)


class EagleHead(PreTrainedModel):
    """A draft head as a transformers model: :meth:`from_pretrained`, :meth:`save_pretrained`, ``push_to_hub``.

    Parameters have the names of public checkpoints: ``fc``, ``layers.0.*``, ``norm``. Embeddings and, in general, the
    LM head belong to the target.

    Attributes:
        draft_ids: [Vd] buffer, target id of each draft vocabulary entry, ascending; None for all of V.
        feature_scale: [H] buffer, or None.
    """

    config: EagleConfig
    config_class = EagleConfig
    main_input_name = "embeds"
    _supports_sdpa = True
    if TYPE_CHECKING:  # transformers' wrapper hides the signature
        to = nn.Module.to  # type: ignore[assignment]

    draft_ids: Tensor | None
    feature_scale: Tensor | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.width, self.target_width = config.hidden_size, config.target_hidden_size
        width, count = config.hidden_size, len(config.fused_layers)
        layers, self.rotary_emb, norm = build_layers(config.layer, config.num_layers)
        self.norm: nn.Module | None = None
        self.fusion: LayerFusion | None = None
        self.fc_norm: nn.ModuleList | None = None
        self.input_norm: nn.Module | None = None
        self.lm_head: nn.Linear | None = None
        self.embed_tokens: nn.Embedding | None = None
        self.eagle3 = config.layout == "eagle3"
        self.norms_readout = self.eagle3 and not config.norm_output
        if self.eagle3:
            layers[0] = Eagle3Layer(layers[0], config.norm_before_residual)
            self.fc = nn.Linear(count * config.target_hidden_size, width, bias=False)
            norm_class: Any = type(norm)
            epsilon = getattr(norm, "variance_epsilon", None)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(norm_class(config.target_hidden_size, epsilon) for _ in range(count))
            if config.norm_before_fc:
                self.input_norm = norm_class(count * config.target_hidden_size, epsilon)
            if config.own_lm_head:
                self.lm_head = nn.Linear(width, config.draft_vocab_size or config.vocab_size, bias=False)
        else:
            self.fc = nn.Linear(config.embed_size + width, width, bias=config.fc_bias)
            if not config.input_norm and hasattr(layers[0], "input_layernorm"):
                layers[0].input_layernorm = nn.Identity()
            if config.fused_layers:
                self.fusion = LayerFusion(count, width)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.embed_size)
        self.layers = layers
        if self.eagle3 or config.final_norm:
            self.norm = norm
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_ids", ids)
        self.register_buffer("feature_scale", torch.ones(width) if config.feature_scale else None)
        self.stack: Stack = HeadStack(layers, self.rotary_emb, self.final_norm)
        self.plain_stack = self.stack
        self._no_split_modules = sorted({type(layer).__name__ for layer in layers})
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the initial weights; compute the rotary frequencies, which files lack."""
        if module is self.rotary_emb:
            for name, buffer in type(module)(module.config).named_buffers():
                module.get_buffer(name).copy_(buffer)

    @property
    def decoder(self) -> nn.Module:
        """The module that owns the layers, as for :class:`fsd_infer.targets.stack.StackOwner`."""
        return self

    @property
    def turns_as_target(self) -> bool:
        """Whether tokens after images have the target's rotary positions (M-RoPE), not their positions in the text."""
        return has_mrope(self.config.layer)

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm that :meth:`forward` ends with; :meth:`readout` applies it in other heads."""
        return None if self.norms_readout else self.norm

    @property
    def lm_head_is_plain(self) -> bool:
        return True

    def get_input_embeddings(self) -> nn.Module | None:  # type: ignore[override]
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head

    # files ---------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, source: str | os.PathLike[str], target: Target | None = None, **options: Any
    ) -> EagleHead:
        """Load a head in any format that :mod:`fsd_infer.heads.formats` reads. Nothing is unpickled.

        Args:
            source: a directory, or a hub id.
            target: the target to draft for. Must match the target that the head records; of most public heads only the
                sizes are known. Heads that do not name their fused layers need it.
            options: as in transformers: ``dtype`` (default: that of the files), ``device_map`` ... And of the Hub's
                client: ``revision``, ``token``, ``subfolder``, ``cache_dir``, ``local_files_only``.

        Raises:
            ModelLoadError: no such repository or revision, no access to it, or no connection.
            CheckpointError: missing, malformed or truncated files, unknown format, wrong tensors, or a head of another
                target.
            VocabularyMismatchError: same family but another vocabulary.
        """
        hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}

        def load() -> EagleHead:
            directory = find_head(source, **hub)
            if directory is None and is_hub_id(os.fspath(source)):
                raise CheckpointError(f"{source} holds no draft head: its {CONFIG} is missing or another model's.")
            directory = directory or Path(source)  # read_head reports what a directory without a head lacks
            return cls.of_stored(read_head(directory, target), **options)

        return load_whole(source, load, **hub)

    @classmethod
    def of_stored(cls, stored: StoredHead, **options: Any) -> EagleHead:
        """Build a head that was read. Options and errors as for :meth:`from_pretrained`."""
        directory = stored.weights.directory
        # transformers may fail in any way on another program's values
        with (
            foreign_errors(CheckpointError, f"{directory / CONFIG} does not describe a decoder layer ({{why}})."),
            torch.device("meta"),
        ):
            planned = cls(copy.deepcopy(stored.config))
        state = stored.state(planned.state_dict())
        with without_progress_bars():
            head: EagleHead = super().from_pretrained(None, config=stored.config, state_dict=state, **options)
        head.name_or_path = str(directory)
        return head

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        """Save as in transformers, but replace each file atomically.

        Args:
            save_directory: created if missing.
            dtype: data type of the stored weights (default: the head's).
            options: options of transformers' method.
        """
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        state = options.pop("state_dict", None) or self.state_dict()
        if dtype is not None:
            state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
        with TemporaryDirectory(prefix=".", dir=directory) as draft:
            with disk_errors(directory / SINGLE), without_progress_bars():
                super().save_pretrained(draft, state_dict=state, **options)
                if dtype is not None:
                    config = copy.deepcopy(self.config)
                    config.dtype = dtype
                    config.save_pretrained(draft)
            for file in sorted(Path(draft).iterdir(), key=lambda file: file.name == CONFIG):
                with replacing(directory / file.name) as draft_file:
                    os.replace(file, draft_file)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:  # type: ignore[override]
        """Upload as in transformers. Raises ModelLoadError, which names the repository, if the Hub refuses."""
        with hub_errors(repo_id, options.get("revision")), without_progress_bars():
            return str(super().push_to_hub(repo_id, **options))  # type: ignore[arg-type]

    def set_draft_ids(self, ids: Tensor | None) -> None:
        """Set the draft vocabulary to these target ids [Vd] (ascending; None: all ids).

        Raises CheckpointError for a head with its own LM head, whose vocabulary is fixed.
        """
        if self.lm_head is not None:
            raise CheckpointError("the draft vocabulary of a head with its own LM head is fixed: train another head.")
        self.draft_ids = ids
        self.config.draft_vocab_size = None if ids is None else len(ids)

    def cast(self, dtype: torch.dtype) -> EagleHead:
        """Convert only the parameters: ``.to(dtype)`` would round the rotary frequencies, too."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

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
            features: feature of token i at position i. Either the target's [B, M, H_t·(1 + k)], the final one and those
                of the k fused layers, or an earlier output of this head [B, M, H].
            position_ids: [B, M].
            attention_mask: [B, 1, M, K] bool, True where a query may attend; None for causal attention.
            cache: receives keys and values, in call order.

        Returns:
            [B, M, H], the features at the next position and, after :meth:`readout`, the input of the LM head
        """
        embeds = embeds.to(features.dtype)
        x = self._fused(features) if self.eagle3 else self._joined(embeds, features)
        mask = attention_mask[:, 0] if isinstance(attention_mask, Tensor) else attention_mask  # packed rows have others
        visible = None if mask is None else {"full_attention": mask}
        rotary = cache.rotary(position_ids) if isinstance(cache, SlotCache) else position_ids
        return self.stack(StackInputs(x, rotary, visible, cache, embeds=embeds if self.eagle3 else None)).final

    def _fused(self, features: Tensor) -> Tensor:
        """Layout "eagle3": fc of the fused layers in [..., H_t·(1 + k)]; outputs of this head pass through."""
        if features.shape[-1] == self.width:
            return features
        inner = features[..., self.target_width :]
        if self.fc_norm is not None:
            inner = _normed(self.fc_norm, inner)
        return self.fc(inner if self.input_norm is None else self.input_norm(inner))

    def _joined(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Layouts "eagle" and "fsd": fc of embedding and feature, and the projection of fused layers."""
        final, inner = features, None
        if features.shape[-1] > self.width:
            final, inner = features[..., : self.width], features[..., self.width :]
        if self.feature_scale is not None:
            final = final / self.feature_scale.to(final.dtype)
        x = self.fc(torch.cat([embeds, final], dim=-1))
        return x if self.fusion is None or inner is None else x + self.fusion(inner)

    def readout(self, outputs: Tensor) -> Tensor:
        """Return the input of the LM head [..., H] for outputs [..., H] of :meth:`forward`."""
        return self.norm(outputs) if self.norms_readout and self.norm is not None else outputs

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        """Return embeddings [..., E] of ids [...]: the head's own if it has them, else the target's."""
        return target.embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)


class HeadModel(CachedModel):
    """A draft head as a model with a cache of keys and values, on its target's embeddings and features."""

    def __init__(self, head: EagleHead, target: Target) -> None:
        self.head, self.target, self.device = head, target, target.device
        self.cache_config = SimpleNamespace(num_hidden_layers=head.config.num_layers)

    def forward(self, cache: SlotCache, visible: Tensor, tokens: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """Run the head.

        Args:
            cache: KV cache of the session, after :meth:`SlotCache.set_write_slots`.
            visible: [B, M, S] bool; whether input m attends to slot s.
            tokens: [B, M] for position i, token i+1 of the text.
            features: [B, M, F] for position i, the target's features of token i, or the head's own estimate [B, M, H].
            positions: [B, M].

        Returns:
            [B, M, H] outputs of the head.
        """
        result: Tensor = self.head(self.head.embed(tokens, self.target), features, positions, visible[:, None], cache)
        return result

    def _read_one(self, cache: SlotCache, visible: Tensor, zero: Tensor) -> None:
        width = self.head.config.hidden_size
        none = torch.zeros(1, 1, width, dtype=self.target.dtype, device=self.device)
        self.forward(cache, visible, zero, none, zero)
