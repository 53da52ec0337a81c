"""Draft with P-EAGLE heads (arXiv 2602.01469): EAGLE-3 heads that estimate all depths in one pass.

After the pair of the newest token and its feature stand K - 1 pairs of a mask token and a learned feature. Slot d of
this chain estimates the token at depth d + 1, whatever is drafted between. The head never reads its own outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsd_core.errors import CheckpointError, foreign_errors
from fsd_infer.drafters.eagle import EagleDrafter, EagleSession
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.steps import HEADS
from fsd_infer.heads.formats import read_kind
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.kinds import EAGLE_3, P_EAGLE
from fsd_infer.heads.stored_parts import our_name
from fsd_infer.heads.weights import Weights
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape

DEPTH = 8  # tokens that are drafted unless the config says how many
_MASK = "mask_hidden"
_MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token")


@HEADS.register(P_EAGLE)
class ParallelEagleDrafter(EagleDrafter):
    """A P-EAGLE head.

    Args:
        head: without its mask.
        target: the model to draft for.
        mask: [H_t·(1 + k)] the learned feature of masks, its first H_t entries 0.
        mask_token_id: the token of masks.
        depth: K, most tokens to draft.
        shape: see :class:`TreeDrafter`.
    """

    name = "p-eagle"
    drafts_beams = reads_features = False

    def __init__(
        self,
        head: EagleHead,
        target: Target,
        mask: Tensor,
        mask_token_id: int,
        depth: int = DEPTH,
        shape: TreeShape | None = None,
    ) -> None:
        self.mask, self.mask_token_id, self.depth = mask, mask_token_id, depth
        super().__init__(head, target, shape)

    @classmethod
    def read(
        cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None
    ) -> ParallelEagleDrafter:
        """Read the head in a directory, as :meth:`StepDrafter.read`."""
        weights = Weights(directory, our_name)
        ids = {config[name] for name in _MASK_TOKENS if type(config.get(name)) is int}
        mask = weights.read(_MASK).flatten() if _MASK in weights.shapes else torch.zeros(0)
        stored = read_kind(directory, config, EAGLE_3, target)
        fused = len(stored.config.fused_layers) * stored.config.target_hidden_size
        if len(ids) != 1 or not 0 <= min(ids) < target.vocab_size:
            raise CheckpointError(
                f"the P-EAGLE head in {directory} needs one token of its masks, {' or '.join(_MASK_TOKENS)} in its "
                f"config.json, and has {sorted(ids) or 'none'}."
            )
        if len(mask) != fused:
            raise CheckpointError(f"{_MASK} of the P-EAGLE head in {directory} has {len(mask)} entries, not {fused}.")
        head = EagleHead.of_stored(stored, dtype=target.dtype)
        mask = torch.nn.functional.pad(mask, (stored.config.target_hidden_size, 0))
        result = cls(head, target, mask.to(target.device, target.dtype), ids.pop(), _depth_of(config), shape)
        result.public = True
        return result

    def start(self, first_tokens: Tensor, request: DraftRequest) -> ParallelEagleSession:
        return ParallelEagleSession(self, request)


class ParallelEagleSession(EagleSession):
    """A session that estimates all depths before it grows a tree."""

    drafter: ParallelEagleDrafter

    def set_rotary(self, prompts: Tensor, offsets: Tensor) -> None:
        """Do nothing: it is trained on tokens' positions in the text, as block heads are."""

    def _read_roots(self) -> tuple[Tensor, Tensor | None]:
        logits, ids = super()._read_roots()
        batch, masks = len(self.lengths), self.shape.depth - 1
        self._estimates = logits  # [B, K, Vd]
        if masks > 0:
            earlier = torch.ones(masks, masks, dtype=torch.bool, device=self.device).tril()
            slots, visible = self.cache.after_text(self.lengths, earlier.expand(batch, -1, -1))
            tokens = torch.full_like(slots, self.drafter.mask_token_id)
            features = self.drafter.mask.expand(batch, masks, -1)
            outputs = self.drafter.model.forward(self.cache, visible, tokens, features, slots)
            self._estimates = torch.cat([logits, self.drafter.q_logits(outputs, self.vocabulary)], 1)
        return logits, ids

    def _expand(self, tokens: Tensor, parents: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        return self._estimates[:, depth, None].expand(*tokens.shape, -1)


def _depth_of(config: Mapping[str, Any]) -> int:
    """Return how many tokens speculators' config proposes, else :data:`DEPTH`."""
    with foreign_errors(
        CheckpointError, "speculators_config in its config.json does not say what it proposes ({why})."
    ):
        proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        count = proposals[0].get("speculative_tokens")
    return count if type(count) is int and count > 0 else DEPTH
