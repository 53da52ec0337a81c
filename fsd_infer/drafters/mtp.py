"""Draft with the multi-token-prediction layers of the target's own checkpoint (DeepSeek-V3, arXiv 2412.19437, 2.2).

A layer reads the pair of a token i+1 and the target's final state at i, both normed. Its output g_i, after a norm of
its own, gives the LM head's input for token i+2 and stands for the state at i+1 in the next step. So the states are
normed at the first step and at all later ones, and one layer, used again at each depth, grows trees as an EAGLE head
does: siblings read their parent's g. Only ERNIE-4.5 has no norm after its layer.

Of K > 1 layers, each drafts one depth. Layer k reads g of layer k - 1 at the token before, so every token of the text
and every node has outputs of all layers, and a tree has at most K depths. Layer k begins at the k-th pair of a text.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from fsd_core.errors import FsdError, ModelLoadError
from fsd_core.functional import at_nodes
from fsd_infer.drafters.base import DRAFTERS, Drafter
from fsd_infer.drafters.eagle import EagleDrafter, EagleSession
from fsd_infer.drafters.mtp_layer import MtpLayer
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.steps import HEADS
from fsd_infer.drafters.vocabulary import ContextVocabulary
from fsd_infer.heads.kinds import MTP
from fsd_infer.heads.mtp import MtpFiles, find_mtp, stated_layers
from fsd_infer.heads.mtp_layouts import Layout
from fsd_infer.heads.stored_parts import EMBEDDINGS, LM_HEAD
from fsd_infer.targets.masks import windowed
from fsd_infer.targets.stack import StackOwner
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import MAX_DEPTH, TreeShape

logger = logging.getLogger(__name__)
_COMPARED = 64  # rows of a copied table that are compared with the target's


class MtpHead(nn.Module):
    """MTP layers with the interface that :class:`EagleDrafter` needs of a head.

    Args:
        target: the model of whose layers' class they are.
        layout: layout of the family.
        count: K, number of layers.

    Attributes:
        layout: layout of the family.
        tables: embeddings [V, H] and LM heads [V, H] of layers that have other ones than the target, by our names.
    """

    draft_ids = lm_head = embed_tokens = stack = None
    turns_as_target = True

    def __init__(self, target: Target, layout: Layout, count: int = 1) -> None:
        super().__init__()
        config = copy.deepcopy(target.config)
        for name, value in layout.config.items():
            if hasattr(config, name):
                override = getattr(config, f"mtp_{name}", None)
                setattr(config, name, override or (value * count if isinstance(value, list) else value))
        last: Any = target.decoder.layers[-1]  # type: ignore[index]
        self.layers = nn.ModuleList(MtpLayer(last, layout, config, index) for index in range(count))
        self.layout, self.width, self.tables = layout, target.hidden_size, [dict[str, Tensor]() for _ in range(count)]
        wide = count * self.width  # width of what a node's children read
        self.config = SimpleNamespace(hidden_size=wide, num_layers=count, fused_layers=(), draft_vocab_size=None)
        types = [*(getattr(config, "layer_types", None) or [])[:count], *["full_attention"] * count]
        self._kinds = types[:count]
        self._window = getattr(config, "sliding_window", None)
        self._rotary: tuple[Any, ...] = (_rotary_of(target, config, self._kinds),)  # no part of this module

    def forward(
        self, embeds: Tensor, states: Tensor, positions: Tensor, attention_mask: Any, cache: Any = None
    ) -> Tensor:
        """Run the layers.

        Args:
            embeds: [B, M, H] of tokens.
            states: [B, M, H] the target's of the tokens before, for K > 1 followed by the layers' outputs [B, K · H]
                before the first token, M times; or for nodes [B, M, K · H] their parents' outputs.
            positions, attention_mask, cache: as in :class:`EagleHead`; several layers need a mask that is a tensor.

        Returns:
            [B, M, K · H] each layer's g.
        """
        width, outputs = self.width, list[Tensor]()
        rotary = positions if cache is None else cache.rotary(positions)
        angles = {name: self._angles(name, embeds.to(states.dtype), rotary) for name in set(self._kinds)}
        is_text = states.shape[-1] > len(self.layers) * width
        for index, layer in enumerate(self.layers):
            # of a text: layer k reads layer k - 1 at the token before; of nodes: their parents' outputs
            part = index if is_text else max(index - 1, 0)
            state = states[..., part * width : (part + 1) * width]
            if is_text and index:
                state = torch.cat([state[:, :1], outputs[-1][:, :-1]], 1)
            mask = self._layer_mask(index, attention_mask, positions, cache)
            outputs.append(layer(embeds, state, mask, cache, position_ids=positions, **angles[self._kinds[index]]))
        return torch.cat(outputs, -1)

    def _angles(self, layer_type: str, x: Tensor, positions: Tensor) -> dict[str, Any]:
        rotary = self._rotary[0]
        if rotary is None:
            return {}
        return {"position_embeddings": rotary(x, positions, *([layer_type] if _turns_by_kind(rotary) else []))}

    @property
    def needs_node_positions(self) -> bool:
        """Whether some layer does not attend to all positions. Siblings share a position."""
        return "sliding_attention" in self._kinds or len(self.layers) > 1

    def _layer_mask(self, index: int, mask: Any, positions: Tensor, cache: Any) -> Any:
        """Return a layer's mask. Masks of packed rows are not tensors: their attention knows the layer's window."""
        has_window = self._kinds[index] == "sliding_attention"
        if not index and not has_window or not isinstance(mask, Tensor):
            return mask
        slots: Any = cache or SimpleNamespace(positions=torch.arange(mask.shape[-1], device=mask.device)[None])
        if index:  # the first positions, where this layer has no pairs, are hidden from all tokens after
            at = torch.arange(mask.shape[-1], device=mask.device)[None] if slots.positions is None else slots.positions
            mask = mask & ~((at < index)[:, None, None] & (positions >= index)[:, None, :, None])
        if not has_window:
            return mask
        return windowed(mask[:, 0], positions, slots, {"": self._window})[""][:, None]

    def cast(self, dtype: torch.dtype) -> MtpHead:
        """Convert only the parameters, as :meth:`EagleHead.cast`."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def readout(self, outputs: Tensor) -> Tensor:
        return outputs[..., : self.width]

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        table = self.tables[0].get(EMBEDDINGS)
        return target.embed(ids) if table is None else embedding(ids, table)


def _turns_by_kind(rotary: Any) -> bool:
    return "layer_type" in inspect.signature(type(rotary).forward).parameters


def _rotary_of(target: Target, config: Any, layer_types: Sequence[str]) -> Any:
    """Return the target's rotary embedding, or one of its class with the types of the MTP layers; None: no angles."""
    rotary: Any = getattr(target.decoder, "rotary_emb", None)
    if rotary is None or not _turns_by_kind(rotary) or set(layer_types) <= set(target.config.layer_types):
        return rotary
    with torch.device(target.device):
        return type(rotary)(config)


def read_layers(target: Target, directory: Path | None = None, finite: bool = True) -> MtpHead:
    """Read the MTP layers of the target's files, or of a directory of their own. finite: refuse NaN.

    Raises:
        ModelLoadError: there are none, they are of a layout that is not read, or damaged, or quantised.
        CheckpointError: a damaged file.
    """
    files = find_mtp(target, directory)
    if files is None:
        stated = f", although its config says that it has {stated_layers(target)}" if stated_layers(target) else ""
        raise ModelLoadError(
            f"{target.name} has no MTP layer in its files{stated}. Name another drafter, or load the checkpoint as "
            "published."
        )
    files.weights.finite = finite
    head = _planned(target, files)
    parameters = {name for name, _ in head.named_parameters()}
    for index, layer in enumerate(head.layers):
        state = files.read(index, layer.state_dict())
        dtypes = {name: target.dtype if f"layers.{index}.{name}" in parameters else torch.float32 for name in state}
        layer.load_state_dict({name: value.to(dtypes[name]) for name, value in state.items()}, assign=True)
        head.tables[index] = _own_tables(target, files, index)
    return head.requires_grad_(False)


def _planned(target: Target, files: MtpFiles) -> MtpHead:
    """Return the head without weights. Raises ModelLoadError unless the files have them all."""
    with torch.device("meta"):
        head = MtpHead(target, files.layout, files.count)
    for index, layer in enumerate(head.layers):
        files.plan(index, layer.state_dict())
    return head


def _own_tables(target: Target, files: MtpFiles, index: int) -> dict[str, Tensor]:
    """Read a layer's embeddings and LM head where they are not copies of the target's."""
    result, ids = {}, torch.linspace(0, target.vocab_size - 1, min(_COMPARED, target.vocab_size)).long()
    rows = ids.to(target.device)
    for name, expected in ((EMBEDDINGS, target.embed(rows)), (LM_HEAD, target.lm_head_rows(rows)[0])):
        stored = files.find(name, index)
        if stored is None:
            continue
        table = files.table(stored)
        if not torch.allclose(table[ids].to(expected), expected, rtol=0.05, atol=0.01 * float(expected.abs().max())):
            result[name] = table.to(expected)
            logger.warning("%s: the MTP layer drafts by %s, which is not a copy of the target's.", target.name, stored)
    if EMBEDDINGS in result and index:
        raise ModelLoadError(f"{target.name}: of several MTP layers, all have to share their embeddings.")
    return result


def drafts_by_default(target: Target) -> bool:
    """Whether the target's files have MTP layers that are read; logs one line if so, or why they are not used."""
    try:
        files = find_mtp(target)
        if files is not None:
            _planned(target, files)
    except FsdError as error:
        logger.warning("%s", error)
        return False
    if files is not None:
        logger.warning('%s drafts by the MTP layer of its checkpoint (drafter="mtp").', target.name)
    return files is not None


@HEADS.register(MTP)
@DRAFTERS.register("mtp")
class MtpDrafter(EagleDrafter):
    """The MTP layers of the target's own checkpoint; a single one is used again at every depth.

    Arguments are those of :class:`EagleDrafter`.
    """

    name = "mtp"
    head: Any

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        return cls.of(target, tree) if name == cls.name else None

    @classmethod
    def of(cls, target: Target, tree: TreeShape | None = None) -> MtpDrafter:
        """Read the layers from the target's files. Raises as :func:`read_layers`."""
        head: Any = read_layers(target)
        result = cls(head, target, tree)
        result.public = True
        return result

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None) -> MtpDrafter:
        """Read a layer in a directory of its own, in speculators' layout; arguments as for :meth:`StepDrafter.read`."""
        head: Any = read_layers(target, directory)
        result = cls(head, target, shape)
        result.public = "training" not in config
        return result

    @property
    def depth(self) -> int:  # type: ignore[override]
        count = len(self.head.layers)
        return MAX_DEPTH if count == 1 else count

    def start(self, first_tokens: Tensor, request: DraftRequest) -> MtpSession:
        return MtpSession(self, request)

    def q_logits(self, outputs: Tensor, vocabulary: ContextVocabulary | None) -> Tensor:
        return self.logits(outputs, 0)

    def logits(self, outputs: Tensor, layer: int) -> Tensor:
        """Return draft logits [B, E, V] of a layer's part of outputs [B, E, K · H]."""
        width, layer = self.head.width, min(layer, len(self.head.layers) - 1)
        read, lm_head = outputs[..., layer * width : (layer + 1) * width], self.head.tables[layer].get(LM_HEAD)
        return self.target.lm_logits(read) if lm_head is None else read @ lm_head.T

    def stack_owners(self) -> list[StackOwner]:
        return []  # no backend has these layers


class MtpSession(EagleSession):
    """A session of MTP layers. ``root_output`` holds all layers' outputs, [B, K · H]."""

    drafter: MtpDrafter

    def __init__(self, drafter: MtpDrafter, request: DraftRequest) -> None:
        super().__init__(drafter, request)
        self._chunk_end_output = self.root_output  # [B, K · H] outputs at the end of the chunk that was read last
        self._depth = 0  # depth of the nodes that were expanded last
        if len(drafter.head.layers) > 1:
            self.max_step_unread = 0

    def _read(self, first: int, tokens: Tensor, features: Tensor) -> Tensor:
        if len(self.drafter.head.layers) == 1:
            return super()._read(first, tokens, features)
        before = (self._chunk_end_output if first else self.root_output)[:, None].expand(-1, tokens.shape[1], -1)
        result = super()._read(first, tokens, torch.cat([features, before], -1))
        self._chunk_end_output = result[:, -1]
        return result

    def _expand(self, tokens: Tensor, parents: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        self._depth = depth
        return super()._expand(tokens, parents, ancestors, depth)

    def _read_nodes(self, tokens: Tensor, parents: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        before = at_nodes(self._features, parents)
        if self.drafter.head.needs_node_positions:
            self._add_node_positions(positions, visible.shape[-1])
        self._features = self.drafter.model.forward(self.cache, visible, tokens, before, positions)
        return self.drafter.logits(self._features, self._depth)
