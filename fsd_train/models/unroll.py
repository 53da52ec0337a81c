"""Indexing of draft training, and the head run on its own outputs ("training-time test").

A conversation has tokens x_0 … x_{M-1}. The feature f_i enters the LM head at position i, so LMHead(f_i) is the
target's distribution of x_{i+1}. m_j = 1 if x_j belongs to an answer. A packed row has several conversations; below, i
counts places in the row. Nothing crosses from one conversation into the next, because each one's first token has m = 0.

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
from fsd_train.models.compiled import fixed
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


def chain_roots(wanted: Tensor, share: float = 1.0, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Choose the chains that run beyond step 0: all with a supervised later step, or a random share of them.

    Step s of the chain with root position r is at position r+s. The weights compensate, so that the expected gradient
    does not depend on ``share``. There is one chain at least, so that all ranks run the head equally often.

    Args:
        wanted: [S, M] bool of :func:`supervised`, S ≥ 2, in host memory like the result.
        share: share of the batch's chains, in (0, 1].
        generator: generator of the choice.

    Returns:
        (roots [K], ascending; weights [K] fp32: number of chains that each root represents, 0 if there are none)
    """
    possible = wanted[1, 1:].nonzero().squeeze(1)
    if not len(possible):
        return torch.tensor([wanted.shape[1] - 1]), torch.zeros(1)
    count = math.ceil(share * len(possible) - 1e-9)
    chosen = possible
    if share < 1.0:
        chosen = possible[torch.randperm(len(possible), generator=generator)[:count].sort().values]
    return chosen, torch.full((count,), len(possible) / count)


def unroll(
    head: EagleHead, embeds: Tensor, features: Tensor, text: TextMask, steps: int, roots: Tensor
) -> list[Tensor]:
    """Run the head at every position, then ``steps`` − 1 times along chains on its own last outputs.

    Args:
        head: the draft head.
        embeds: [1, M, E], embedding of x_{i+1} at position i.
        features: [1, M, F], the target's f_i at position i.
        text: mask of the packed row.
        steps: S ≥ 1.
        roots: [K] root positions of the chains, ascending, in host memory, see :func:`chain_roots`.

    Returns:
        S tensors: [1, M, H] of step 0, then [1, K, H] per step s, of chain k at position roots[k] + s. Outputs at
        positions beyond their conversation are undefined.
    """
    text = text if steps == 1 else text.begin()
    with use_packed_attention(head):
        outputs = [head(embeds, features, text.positions, attention_mask=text)]  # [1, M, H]
        if steps == 1:
            return outputs
        at = to_device(roots, embeds.device)  # [K]
        source, positions = outputs[0].index_select(1, at), text.positions.index_select(1, at)
        for step in range(1, steps):
            here = embeds.index_select(1, (at + step).clamp_max(embeds.shape[1] - 1))  # [1, K, E]
            source = head(here, source, positions + step, attention_mask=text.chains(roots, step, at))
            outputs.append(source)  # [1, K, H]
    return outputs


@dataclass(frozen=True)
class ChainIndex:
    """The supervised rows of a batch and the chains that it runs for them, in host memory.

    Attributes:
        roots: [K] of :func:`chain_roots`; empty with one step.
        source: [R] index of each row's output in the concatenated outputs of :func:`unroll`; 0 where a slot is free.
        rows: the rows.
    """

    roots: Tensor
    source: Tensor
    rows: LossIndex


def plan_chains(
    loss_mask: Tensor,
    steps: int,
    decay: float = 1.0,
    share: float = 1.0,
    generator: torch.Generator | None = None,
    supervised_rows: np.ndarray | None = None,
    slots: bool = False,
) -> ChainIndex:
    """Plan the chains of a batch and their rows.

    Args:
        loss_mask: [M], m of the module's docstring, in host memory.
        steps: S.
        decay: base of the weight decay^s of step s.
        share: share of the chains, see :func:`chain_roots`.
        generator: generator of their choice.
        supervised_rows: rows by chain step that the batch's optimizer step has per batch
            (:class:`fsd_train.data.sampler.ResumableLoader`). None: the batch's own.
        slots: whether rows, positions and chains fill fixed numbers of slots (:attr:`.DraftBatch.compiled`).
    """
    wanted = supervised(loss_mask, steps)
    length, later = wanted.shape[1], torch.arange(1, steps)[:, None]  # steps beyond 0: [S-1, 1]
    position = wanted[0].nonzero().squeeze(1)
    roots, stands_for = torch.zeros(0, dtype=torch.long), torch.zeros(0)
    if steps > 1:
        roots, stands_for = chain_roots(wanted, share, generator)
    if slots and steps > 1:
        count = fixed(len(roots), length)
        roots, stands_for = _filled(roots, count, length - 1), _filled(stands_for, count, 0)
    at = (roots + later).clamp_max(length - 1)  # [S-1, K]
    there = wanted[later, at] & (roots + later < length) & (stands_for > 0)
    source, weight = _outputs(position, at, there, stands_for * decay**later, length)
    if slots:  # the row's last two places are never supervised at step 0
        position = _filled(position, fixed(len(position), length), max(length - 2, 0))
    source, weight = source[position], weight[position]  # [N, S]
    taken = (source >= 0) | slots
    feature, step = taken.nonzero().unbind(1)  # [R] each
    row = taken.flatten().cumsum(0).view_as(taken) - 1  # the rows' numbers
    starts, represented = (position, weight[:, 0]) if steps == 1 else (roots, stands_for * there.all(0))
    if not slots:
        starts, represented = starts[represented > 0], represented[represented > 0]
    # [S, C] place among the N of each step of a chain; a free slot has any
    at = torch.searchsorted(position, starts + torch.arange(steps)[:, None]).clamp_max(len(position) - 1)
    total, chain_total = totals(wanted.sum(1) if supervised_rows is None else supervised_rows, steps, decay)
    planned = LossIndex(
        position,
        feature=feature,
        step=step,
        weight=weight[taken],
        chains=row[at, torch.arange(steps)[:, None]],
        stands_for=represented,
        ends=[0, *taken.sum(1).cumsum(0).tolist()],
        total=total,
        chain_total=chain_total,
    )
    return ChainIndex(roots, source[taken].clamp_min(0), planned)


def _outputs(position: Tensor, at: Tensor, there: Tensor, weights: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return each position's output of every step, as an index or -1, and its weight: [M, S] each.

    Args:
        position: [N] positions that are supervised at step 0.
        at: [S-1, K] positions of K chains at the later steps.
        there: [S-1, K] bool; whether they are supervised.
        weights: [S-1, K] of the chains' outputs.
        length: M.
    """
    steps, chains = len(at) + 1, at.shape[1]
    source, weight = torch.full((length, steps), -1), torch.zeros(length, steps)
    source[position, 0], weight[position, 0] = position, 1.0
    step, chain = there.nonzero().unbind(1)
    place = at[step, chain]
    source[place, step + 1] = length + step * chains + chain
    weight[place, step + 1] = weights[step, chain]
    return source, weight


def _filled(values: Tensor, count: int, value: float) -> Tensor:
    """Append ``value`` to values [n] up to ``count``."""
    return torch.nn.functional.pad(values, (0, count - len(values)), value=value)


def totals(counts: Tensor | np.ndarray, steps: int, decay: float) -> tuple[Tensor, Tensor]:
    """Return the sums of weights, over rows and over chains, of these counts of supervised rows by chain step."""
    counts = torch.as_tensor(counts[:steps], dtype=torch.float32)
    return (counts * decay ** torch.arange(steps)).sum(), counts[-1]


def plan_positions(
    loss_mask: Tensor, steps: int, decay: float = 1.0, supervised_rows: np.ndarray | None = None, slots: bool = False
) -> LossIndex:
    """Return the rows for a drafter whose drafts do not depend on the step: one per position, with summed weights.

    Arguments as of :func:`plan_chains`.
    """
    wanted = supervised(loss_mask, steps)
    position = wanted[0].nonzero().squeeze(1)
    if slots:
        position = _filled(position, fixed(len(position), wanted.shape[1]), max(wanted.shape[1] - 2, 0))
    counted = wanted[:, position]  # [S, N]
    weight = (counted * decay ** torch.arange(steps)[:, None]).sum(0).float()
    following = torch.arange(len(position)) + torch.arange(steps)[:, None]
    inside = following.clamp_max(max(len(position) - 1, 0))
    whole = (following < len(position)) & (position[inside] == position + torch.arange(steps)[:, None])
    whole &= counted.gather(1, inside)
    zeros, numbers = torch.zeros_like(position), torch.arange(len(position))
    represented, ends = whole.all(0).float(), list(range(len(position) + 1))
    if not slots:
        inside, represented = inside[:, represented > 0], represented[represented > 0]
    total, chain_total = totals(counted.sum(1) if supervised_rows is None else supervised_rows, steps, decay)
    return LossIndex(position, numbers, zeros, weight, inside, represented, ends, total, chain_total)
