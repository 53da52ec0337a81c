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

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from fsd_infer.cpu import ops
from fsd_infer.device.cache import SlotCache
from fsd_infer.errors import CheckpointError, shortened
from fsd_infer.files import disk_errors, replacing
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.formats import CONFIG, read_head
from fsd_infer.heads.hub import find_head, hub_errors, is_hub_id
from fsd_infer.heads.layers import Eagle3Layer, LayerFusion, build_layers, is_eager, mask_for, no_bars, run_layers
from fsd_infer.heads.weights import SINGLE

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

__all__ = ["EagleConfig", "EagleHead"]


@torch.no_grad()
def _norm_gain(norm: Any, size: int) -> Tensor:
    """[H] absolute gain per dimension of a layer or RMS norm (families store w or w - 1, so it is measured)."""
    weight = next(norm.parameters())
    probe = torch.ones(1, size, device=weight.device, dtype=weight.dtype)
    probe[:, 1::2] = -1  # mean 0, mean square 1
    return ((norm(probe) - norm(-probe)).float() / 2).abs()[0]


# The linear layers whose output is added to the residual stream, by the names families give them.
_OUTPUT_PROJECTIONS = ("o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "c_proj")


class EagleHead(PreTrainedModel):
    """See the module's docstring. Parameters are named as in the public checkpoints: ``fc``, ``layers.0.*``, ``norm``.

    A model of transformers: :meth:`from_pretrained`, :meth:`save_pretrained`, ``push_to_hub``. Nothing is tied within
    it: embeddings and, in general, the LM head are the target's and no part of it.

    Buffers: ``draft_ids`` [Vd] target id of each draft vocabulary entry, ascending (if reduced);
    ``feature_scale`` [H] (if configured).
    """

    config: EagleConfig
    config_class = EagleConfig
    main_input_name = "embeds"
    _supports_sdpa = True
    if TYPE_CHECKING:  # transformers' wrapper hides its signature
        to = nn.Module.to  # type: ignore[assignment]

    draft_ids: Tensor | None
    feature_scale: Tensor | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
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
        if self.eagle3 or config.final_norm:
            self.norm = norm
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_ids", ids)
        self.register_buffer("feature_scale", torch.ones(width) if config.feature_scale else None)
        self._no_split_modules = sorted({type(layer).__name__ for layer in layers})
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding | None:  # type: ignore[override]
        """The head's own; None: it reads the target's."""
        return self.embed_tokens

    def _init_weights(self, module: nn.Module) -> None:
        """Leave weights as they were made; compute what no file holds, the rotary frequencies."""
        if module is self.rotary_emb:
            for name, buffer in type(module)(module.config).named_buffers():
                module.get_buffer(name).copy_(buffer)

    # files ---------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        source: str | os.PathLike[str],
        target: Target | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        subfolder: str = "",
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        **options: Any,
    ) -> EagleHead:
        """Load a head in any format that :mod:`fsd_infer.heads.formats` reads. Nothing is ever unpickled.

        Args:
            source: a directory, or a hub id.
            target: what it is to draft for: is compared with what the head says of its own. Public heads do not name
                their target, so that its sizes alone are; some do not say which layers they read, and need it.
            revision, token, subfolder, cache_dir, local_files_only: of the Hub's client, as in transformers.
            options: as in transformers: ``dtype`` (by default that of the files), ``device_map`` ...

        Raises:
            ModelLoadError: no such repository or revision, no access to it, or no connection.
            CheckpointError: missing, malformed or truncated files, unknown format, wrong tensors, or a head of another
                target.
            VocabularyMismatchError: same family but another vocabulary.
        """
        hub = dict(revision=revision, token=token, subfolder=subfolder, cache_dir=cache_dir)
        directory = find_head(source, local_files_only=local_files_only, **hub)
        if directory is None and is_hub_id(os.fspath(source)):
            raise CheckpointError(f"{source} holds no draft head, but another model or none: it has no config of one.")
        directory = directory or Path(source)  # a directory without one: what it lacks is said below
        stored = read_head(directory, target)
        try:
            with torch.device("meta"):
                planned = cls(copy.deepcopy(stored.config))
        except CheckpointError:
            raise
        except Exception as error:  # made by transformers from another program's numbers: anything can be wrong
            raise CheckpointError(
                f"{directory / CONFIG} does not describe a decoder layer ({shortened(error)})."
            ) from error
        state = stored.state(planned.state_dict())
        with no_bars():
            head: EagleHead = super().from_pretrained(None, config=stored.config, state_dict=state, **options)
        head.name_or_path = str(directory)
        return head

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        """As in transformers, but each file is written whole or not at all.

        Args:
            save_directory: created if missing.
            dtype: of the stored weights; the head's own unless given.
            options: of transformers' method.
        """
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        state = options.pop("state_dict", None) or self.state_dict()
        if dtype is not None:
            state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
        with TemporaryDirectory(prefix=".", dir=directory) as draft:
            with disk_errors(directory / SINGLE), no_bars():
                super().save_pretrained(draft, state_dict=state, **options)
                if dtype is not None:
                    config = copy.deepcopy(self.config)
                    config.dtype = dtype
                    config.save_pretrained(draft)
            for file in sorted(Path(draft).iterdir(), key=lambda file: file.name == CONFIG):
                with replacing(directory / file.name) as place:
                    os.replace(file, place)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:  # type: ignore[override]
        """As in transformers. Raises ModelLoadError, which names the repository, for whatever the Hub refuses."""
        with hub_errors(repo_id, options.get("revision")), no_bars():
            return str(super().push_to_hub(repo_id, **options))  # type: ignore[arg-type]

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
        """ids [...] -> embeddings [..., E]: the head's own where it has them, else the target's."""
        return target.embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)
