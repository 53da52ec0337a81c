"""How a head starts: its draft vocabulary, and as weights the identity on its inputs or another head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsd_core.errors import CheckpointError, DataError
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.target import Target


@torch.no_grad()
def _norm_gain(norm: Any, size: int) -> Tensor:
    """Measure the absolute gain per dimension [H] of a layer or RMS norm, because families store w or w - 1."""
    weight = next(norm.parameters())
    probe = torch.ones(1, size, device=weight.device, dtype=weight.dtype)
    probe[:, 1::2] = -1  # mean 0, mean square 1
    return ((norm(probe) - norm(-probe)).float() / 2).abs()[0]


# Names that families give to linear layers whose output is added to the residual stream.
_OUTPUT_PROJECTIONS = ("o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "c_proj")


@torch.no_grad()
def initialise_from(head: EagleHead, target: Target) -> None:
    """Start as the identity on the final feature, with norm and scale of the target's final norm.

    "eagle3" starts with the highest fused layer. Its outputs are large and predict the token before the wanted one, so
    they are scaled down and the head's layer soon outweighs them.
    """
    width, size = head.config.embed_size, head.config.hidden_size
    if head.eagle3:
        scale = 1.0 if head.config.fc_norm else 0.05
        head.fc.weight.normal_(std=0.01 * scale)
        head.fc.weight[:, -size:].add_(scale * torch.eye(size))
    else:
        head.fc.weight[:, :width].normal_(std=0.02)
        head.fc.weight[:, width:].copy_(torch.eye(size))
    final = getattr(target.decoder, "norm", None)
    weight = getattr(final, "weight", None)
    if head.norm is not None and weight is not None:
        head.norm.get_parameter("weight").copy_(weight)
    if head.feature_scale is not None:
        if weight is None:
            raise CheckpointError(f"{target.config.model_type} has no final norm weight. Set feature_scale to false.")
        magnitude = _norm_gain(final, size)  # a near-zero gain would blow up its dimension
        head.feature_scale.copy_(magnitude.clamp_min(0.01 * float(magnitude.mean())))


@torch.no_grad()
def set_draft_vocabulary(head: EagleHead, ids: Tensor | None, target: Target) -> None:
    """Set the draft vocabulary to the ids [Vd], or all; a trained LM head starts with the target's rows."""
    if head.draft_ids is not None and ids is not None:
        head.draft_ids.copy_(ids)
    if head.lm_head is not None:
        head.lm_head.weight.copy_(target.lm_head_rows(ids)[0])


@torch.no_grad()
def continue_from(head: EagleHead, other: EagleHead) -> None:
    """Copy another head's weights; layers and fusion that it lacks start with zero output.

    The draft vocabulary is copied only together with a trained LM head.

    Raises CheckpointError if the weights do not fit.
    """
    state, expected = other.state_dict(), head.state_dict()
    copied = {name: value for name, value in state.items() if name != "draft_ids" or head.lm_head is not None}
    wrong = sorted(name for name in copied if name not in expected or expected[name].shape != copied[name].shape)
    if wrong:
        raise CheckpointError(f"the initial head does not fit this one ({', '.join(wrong)}). Give it the same options.")
    head.load_state_dict(copied, strict=False)
    for layer in head.layers[len(other.layers) :]:
        for name, parameter in layer.named_parameters():
            if name.split(".")[-2] in _OUTPUT_PROJECTIONS:
                parameter.zero_()


def choose_draft_ids(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """Return ``always`` and the most frequent other ids, ascending, [Vd]; the smaller id wins a tie.

    Args:
        counts: [V] occurrences.
        size: Vd ≤ V.
        always: ids to include in any case.
    """
    if size > len(counts) or size < len(set(always)):
        raise DataError(f"draft_vocab_size is {size}; give {len(set(always))} (special tokens) to {len(counts)} (all).")
    scores = counts.double()
    scores[list(always)] = torch.inf
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:size].sort().values
