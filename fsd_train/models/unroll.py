"""Indexing of draft training, and the head run on its own outputs ("training-time test").

A conversation has tokens x_0 … x_{M-1}. The feature f_i enters the LM head at position i, so LMHead(f_i) is the
target's distribution of x_{i+1}. m_j = 1 if x_j belongs to an answer. A packed sequence has several conversations;
below, i counts places in it. Nothing crosses from one conversation into the next, because each one's first token has
m = 0.

Step 0 at position i reads (embedding of x_{i+1}, f_i), attends to positions ≤ i and estimates f_{i+1}, hence the
distribution of x_{i+2}. Step s ≥ 1 at position i reads (embedding of x_{i+1}, output of step s-1 at position i-1). It
drafts token s+1 of a chain whose round began with known x_0 … x_{i-s+1}, and so with features up to f_{i-s}. It
attends to

- step-0 keys at positions ≤ i-s, made from the target's features,
- one key of every step r = 1 … s, at position i-s+r: the earlier tokens of the chain.

Position ids are those of i in its conversation, in every step. Decoding computes the same with one growing cache; here
all chains run at once.

Step s at position i is supervised iff m holds for x_{i-s+1} … x_{i+2}. x_{i+2} is the predicted token, and x_{i-s+1}
the round's root, which the target emitted. So the first token of an answer is never a draft. The second is drafted from
the feature of the last prompt token and the embedding of the first answer token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fsd_core.tensors import to_device
from fsd_infer.heads.head import EagleHead
from fsd_train.losses.base import LossIndex
from fsd_train.models.compiled import padded_count
from fsd_train.packed import TextMask, use_packed_attention


def supervised(loss_mask: Tensor, steps: int) -> Tensor:
    """Mark the supervised positions of each chain step.

    Args:
        loss_mask: [M] bool or 0/1, m of the module's docstring, 0 on the first token of each conversation, so that no
            chain crosses from one into the next.
        steps: S.

    Returns:
        [S, M] bool
    """
    answer = loss_mask.bool()
    result = torch.zeros(steps, len(answer), dtype=torch.bool, device=answer.device)
    result[0, :-2] = answer[1:-1] & answer[2:]
    for step in range(1, min(steps, len(answer))):
        # also require the root x_{i-s+1} in an answer, and a step-0 position i-s >= 0
        result[step, step:] = result[step - 1, step:] & answer[1 : len(answer) - step + 1]
    return result


def chain_roots(
    is_supervised: Tensor, share: float = 1.0, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the chains that run beyond step 0: all with a supervised later step, or a random share of them.

    Step s of the chain with root position r is at position r+s. The weights compensate, so that the expected gradient
    does not depend on ``share``. There is one chain at least, so that all ranks run the head equally often.

    Args:
        is_supervised: [S, M] bool of :func:`supervised`, S ≥ 2, in host memory like the result.
        share: share of the batch's chains, in (0, 1].
        generator: generator of the choice.

    Returns:
        (roots [K], ascending; weights [K] fp32: number of chains that each root represents, 0 if there are none)
    """
    candidates = is_supervised[1, 1:].nonzero().squeeze(1)
    if not len(candidates):
        return torch.tensor([is_supervised.shape[1] - 1]), torch.zeros(1)
    count = math.ceil(share * len(candidates) - 1e-9)
    chosen = candidates
    if share < 1.0:
        chosen = candidates[torch.randperm(len(candidates), generator=generator)[:count].sort().values]
    return chosen, torch.full((count,), len(candidates) / count)


def unroll(
    head: EagleHead, embeds: Tensor, features: Tensor, mask: TextMask, steps: int, roots: Tensor
) -> list[Tensor]:
    """Run the head at every position, then ``steps`` − 1 times along chains on its own last outputs.

    Args:
        head: the draft head.
        embeds: [1, M, E], embedding of x_{i+1} at position i.
        features: [1, M, F], the target's f_i at position i.
        mask: mask of the packed sequence.
        steps: S ≥ 1.
        roots: [K] root positions of the chains, ascending, in host memory, see :func:`chain_roots`.

    Returns:
        S tensors: [1, M, H] of step 0, then [1, K, H] per step s, of chain k at position roots[k] + s. Outputs at
        positions beyond their conversation are undefined.
    """
    mask = mask if steps == 1 else mask.with_cache()
    positions = mask.rotary if mask.image_prompts and head.turns_as_target else mask.positions  # [1, M], or [3, 1, M]
    with use_packed_attention(head):
        hidden = head(embeds, features, positions, attention_mask=mask)  # [1, M, H]
        outputs = [hidden]
        if steps == 1:
            return outputs
        roots_on_device = to_device(roots, embeds.device)  # [K]
        hidden = hidden.index_select(1, roots_on_device)  # [1, K, H]
        root_positions = positions.index_select(-1, roots_on_device)  # [1, K], or [3, 1, K]
        for step in range(1, steps):
            tokens = embeds.index_select(1, (roots_on_device + step).clamp_max(embeds.shape[1] - 1))  # [1, K, E]
            visible = mask.chains(roots, step, roots_on_device)
            hidden = head(tokens, hidden, root_positions + step, attention_mask=visible)  # [1, K, H]
            outputs.append(hidden)
    return outputs


@dataclass(frozen=True)
class ChainPlan:
    """The supervised rows of a batch and the chains that it runs for them, in host memory.

    Attributes:
        roots: [K] of :func:`chain_roots`; empty with one step.
        output: [R] index of each row's output in the concatenated outputs of :func:`unroll`; 0 in padding rows.
        rows: the rows.
    """

    roots: Tensor
    output: Tensor
    rows: LossIndex


def plan_chains(
    loss_mask: Tensor,
    steps: int,
    decay: float = 1.0,
    share: float = 1.0,
    generator: torch.Generator | None = None,
    supervised_rows: np.ndarray | None = None,
    static_shapes: bool = False,
) -> ChainPlan:
    """Plan the chains of a batch and their rows.

    Args:
        loss_mask: [M], m of the module's docstring, in host memory.
        steps: S.
        decay: base of the weight decay^s of step s.
        share: share of the chains, see :func:`chain_roots`.
        generator: generator of their choice.
        supervised_rows: [S] number of supervised rows of each chain step, on average over the batches of this optimizer
            step on all ranks (:class:`fsd_train.data.sampler.ResumableLoader`). None: the batch's own.
        static_shapes: pad rows, positions and chains to few different numbers (:attr:`.DraftBatch.compiled`).
    """
    supervised_at = supervised(loss_mask, steps)  # [S, M]
    length, later = supervised_at.shape[1], torch.arange(1, steps)[:, None]  # the steps beyond 0: [S-1, 1]
    roots, chain_weight = _chosen_chains(supervised_at, share, generator, static_shapes)  # [K], [K]
    later_position = (roots + later).clamp_max(length - 1)  # [S-1, K]
    is_supervised = supervised_at[later, later_position] & (roots + later < length) & (chain_weight > 0)  # [S-1, K]
    position = supervised_at[0].nonzero().squeeze(1)  # [N]
    output, weight = _outputs(position, later_position, is_supervised, chain_weight * decay**later, length)
    if static_shapes:
        position = _padded_positions(position, length)
    output, weight = output[position], weight[position]  # [N, S] each
    # a row is a step that has an output at one of the N positions; with static shapes, every step is
    is_row = (output >= 0) | static_shapes  # [N, S]
    position_index, step = is_row.nonzero().unbind(1)  # [R] each
    # the chains whose steps are all supervised: their roots, and how many chains each represents
    complete_roots, complete_weight = roots, chain_weight * is_supervised.all(0)
    if steps == 1:
        complete_roots, complete_weight = position, weight[:, 0]
    if not static_shapes:
        is_complete = complete_weight > 0
        complete_roots, complete_weight = complete_roots[is_complete], complete_weight[is_complete]  # [C] each
    total, chain_total = totals(supervised_at.sum(1) if supervised_rows is None else supervised_rows, steps, decay)
    rows = LossIndex(
        position,
        position_index=position_index,
        step=step,
        weight=weight[is_row],
        chains=_rows_of_chains(is_row, position, complete_roots),
        chain_weight=complete_weight,
        offsets=[0, *is_row.sum(1).cumsum(0).tolist()],
        total=total,
        chain_total=chain_total,
    )
    return ChainPlan(roots, output[is_row].clamp_min(0), rows)


def _chosen_chains(
    is_supervised: Tensor, share: float, generator: torch.Generator | None, static_shapes: bool
) -> tuple[Tensor, Tensor]:
    """Return :func:`chain_roots`, padded if shapes are static; without steps beyond 0 there are no chains."""
    if len(is_supervised) == 1:
        return torch.zeros(0, dtype=torch.long), torch.zeros(0)
    roots, chain_weight = chain_roots(is_supervised, share, generator)
    if not static_shapes:
        return roots, chain_weight
    count = padded_count(len(roots), is_supervised.shape[1])
    return _padded(roots, count, is_supervised.shape[1] - 1), _padded(chain_weight, count, 0)


def _rows_of_chains(is_row: Tensor, position: Tensor, roots: Tensor) -> Tensor:
    """Return the row of each step of these chains, [S, C]; of padding, any.

    Args:
        is_row: [N, S] bool; rows are numbered in this order.
        position: [N], ascending.
        roots: [C] their positions.
    """
    row = is_row.flatten().cumsum(0).view_as(is_row) - 1  # [N, S]
    step = torch.arange(is_row.shape[1])[:, None]  # [S, 1]
    position_index = torch.searchsorted(position, roots + step).clamp_max(len(position) - 1)  # [S, C]
    return row[position_index, step]


def _outputs(
    position: Tensor, later_position: Tensor, is_supervised: Tensor, weights: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Return where :func:`unroll`'s concatenated outputs hold each position's output of every step.

    Outputs are numbered as concatenated: M of step 0, then K of each later step.

    Args:
        position: [N] positions that are supervised at step 0.
        later_position: [S-1, K] positions of K chains at the later steps.
        is_supervised: [S-1, K] bool; whether they are supervised.
        weights: [S-1, K] of the chains' outputs.
        length: M.

    Returns:
        (output's number or -1 for none, its weight), [M, S] each.
    """
    steps, chains = len(later_position) + 1, later_position.shape[1]
    output, weight = torch.full((length, steps), -1), torch.zeros(length, steps)
    output[position, 0], weight[position, 0] = position, 1.0
    step, chain = is_supervised.nonzero().unbind(1)
    later = later_position[step, chain]
    output[later, step + 1] = length + step * chains + chain
    weight[later, step + 1] = weights[step, chain]
    return output, weight


def _padded(values: Tensor, count: int, value: float) -> Tensor:
    """Append ``value`` to values [n] up to ``count``."""
    return torch.nn.functional.pad(values, (0, count - len(values)), value=value)


def _padded_positions(position: Tensor, length: int) -> Tensor:
    """Pad positions [N] of a sequence with the second-last one, which is never supervised, to a static shape."""
    return _padded(position, padded_count(len(position), length), max(length - 2, 0))


def totals(counts: Tensor | np.ndarray, steps: int, decay: float) -> tuple[Tensor, Tensor]:
    """Return the sums of weights, over rows and over chains, of these counts of supervised rows by chain step."""
    counts = torch.as_tensor(counts[:steps], dtype=torch.float32)
    return (counts * decay ** torch.arange(steps)).sum(), counts[-1]


def plan_positions(
    loss_mask: Tensor,
    steps: int,
    decay: float = 1.0,
    supervised_rows: np.ndarray | None = None,
    static_shapes: bool = False,
) -> LossIndex:
    """Return the rows for a drafter whose drafts do not depend on the step: one per position, with summed weights.

    Arguments as of :func:`plan_chains`.
    """
    supervised_at, step = supervised(loss_mask, steps), torch.arange(steps)[:, None]  # [S, M], [S, 1]
    position = supervised_at[0].nonzero().squeeze(1)  # [N]
    if static_shapes:
        position = _padded_positions(position, supervised_at.shape[1])
    is_supervised = supervised_at[:, position]  # [S, N]
    weight = (is_supervised * decay**step).sum(0).float()  # [N]
    # a chain is a row and the S-1 rows after it, if these are at the next positions and supervised
    following = torch.arange(len(position)) + step  # [S, N]
    row = following.clamp_max(max(len(position) - 1, 0))
    is_complete = (following < len(position)) & (position[row] == position + step) & is_supervised.gather(1, row)
    complete_weight = is_complete.all(0).float()  # [N]
    if not static_shapes:
        row, complete_weight = row[:, complete_weight > 0], complete_weight[complete_weight > 0]  # [S, C], [C]
    total, chain_total = totals(is_supervised.sum(1) if supervised_rows is None else supervised_rows, steps, decay)
    return LossIndex(
        position,
        position_index=torch.arange(len(position)),
        step=torch.zeros_like(position),
        weight=weight,
        chains=row,
        chain_weight=complete_weight,
        offsets=list(range(len(position) + 1)),
        total=total,
        chain_total=chain_total,
    )
