"""Indexing of draft training, and the head run on its own outputs ("training-time test").

A sequence has tokens x_0 … x_{M-1}. The feature f_i enters the LM head at position i, so LMHead(f_i) is the target's
distribution of x_{i+1}. m_j = 1 if x_j belongs to an answer.

Step 0 at position i reads (embedding of x_{i+1}, f_i), attends to positions ≤ i and estimates f_{i+1}, hence the
distribution of x_{i+2}. Step s ≥ 1 at position i reads (embedding of x_{i+1}, output of step s-1 at position i-1). It
drafts token s+1 of a chain whose round began with known x_0 … x_{i-s+1}, and so with features up to f_{i-s}. It
attends to

- step-0 keys at positions ≤ i-s, made from the target's features,
- one key of every step r = 1 … s, at position i-s+r: the earlier tokens of the chain.

Position ids are i in every step. Decoding computes the same with one growing cache; here all chains run at once.

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
from transformers import DynamicCache

from fsd_infer.heads.head import EagleHead
from fsd_train.losses.base import Rows


def supervised(loss_mask: Tensor, steps: int) -> Tensor:
    """Mark the supervised positions of each chain step.

    Args:
        loss_mask: [B, M] bool or 0/1, m of the module's docstring.
        steps: S.

    Returns:
        [S, B, M−1] bool over the head's input positions.
    """
    answer = loss_mask.bool()
    rows, length = answer.shape
    result = torch.zeros(steps, rows, max(length - 1, 0), dtype=torch.bool, device=answer.device)
    if length < 3:
        return result
    result[0, :, : length - 2] = answer[:, 1:-1] & answer[:, 2:]
    for step in range(1, steps):
        # also require the root x_{i-s+1} in an answer, and a step-0 position i-s >= 0
        result[step, :, step:] = result[step - 1, :, step:] & answer[:, 1 : length - step]
    return result


def chain_roots(wanted: Tensor, share: float = 1.0, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Choose the chains that run beyond step 0: all with a supervised later step, or a random share of them.

    Step s of the chain with root position r is at position r+s. Rows get equally many chains, to avoid padding, and at
    least one, so that all ranks run the head equally often. The weights compensate, so that the expected gradient does
    not depend on ``share``.

    Args:
        wanted: [S, B, L] bool of :func:`supervised`, S ≥ 2, in host memory like the result.
        share: share of the batch's chains, in (0, 1].
        generator: generator of the choice.

    Returns:
        (roots [B, K], ascending, padded with the last position in rows with fewer than K chains;
        weights [B, K] fp32: number of the row's chains that each root represents, 0 for padding)
    """
    rows, length = wanted.shape[1:]
    possible = torch.zeros_like(wanted[0])
    possible[:, : length - 1] = wanted[1, :, 1:]
    counts = possible.sum(1)
    most, drawn = int(counts.max()), math.ceil(share * int(counts.sum()) / rows - 1e-9)
    count = max(1, most if share == 1.0 else min(most, drawn))
    order = torch.rand(rows, length, generator=generator) if share < 1.0 else torch.zeros(rows, length)
    chosen = order.masked_fill(~possible, torch.inf).sort(dim=1, stable=True).indices[:, :count]
    real = torch.arange(count) < counts[:, None]
    roots = chosen.masked_fill(~real, length - 1).sort(dim=1).values  # ascending: neighbours in memory, then padding
    weights = real * (counts / counts.clamp(min=1, max=count))[:, None]
    return roots, weights.float()


def chain_mask(roots: Tensor, keys: int, step: int) -> Tensor:
    """Return the attention mask of step ``step`` ≥ 1 of the chains with these roots.

    Args:
        roots: [B, K] root positions.
        keys: L, the number of step-0 keys; one key per chain follows for each of the steps 1 … ``step``.
        step: s.

    Returns:
        [B, 1, K, L + s·K] bool: True for step-0 keys up to the root, and for the chain's own later keys.
    """
    rows, count = roots.shape
    context = torch.arange(keys, device=roots.device) <= roots[..., None]
    own = torch.eye(count, dtype=torch.bool, device=roots.device).repeat(1, step).expand(rows, -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def unroll(head: EagleHead, embeds: Tensor, features: Tensor, steps: int, roots: Tensor) -> list[Tensor]:
    """Run the head at every position, then ``steps`` − 1 times along chains on its own last outputs.

    Args:
        head: the draft head.
        embeds: [B, L, E], embedding of x_{i+1} at position i.
        features: [B, L, F], the target's f_i at position i.
        steps: S ≥ 1.
        roots: [B, K] root positions of the chains, see :func:`chain_roots`.

    Returns:
        S tensors: [B, L, H] of step 0, then [B, K, H] per step s, of chain k at position roots[k] + s. Outputs at
        positions ≥ L are undefined.
    """
    rows, length = embeds.shape[:2]
    positions = torch.arange(length, device=embeds.device)
    cache = DynamicCache() if steps > 1 else None
    outputs = [head(embeds, features, positions.expand(rows, -1), cache=cache)]
    if steps == 1:
        return outputs
    source = take(outputs[0], roots)
    for step in range(1, steps):
        here = (roots + step).clamp_max(length - 1)
        mask = chain_mask(roots, length, step)
        source = head(take(embeds, here), source, here, attention_mask=mask, cache=cache)
        outputs.append(source)
    return outputs


def take(values: Tensor, positions: Tensor) -> Tensor:
    """Gather values [B, L, X] at positions [B, K]: [B, K, X]."""
    return values.gather(1, positions[..., None].expand(-1, -1, values.shape[-1]))


@dataclass(frozen=True)
class Plan:
    """The supervised rows of a batch and the chains that it runs for them, in host memory.

    Attributes:
        roots: [B, K] of :func:`chain_roots`.
        source: [R] index of each row's output in the concatenated outputs of :func:`unroll`.
        rows: the rows.
    """

    roots: Tensor
    source: Tensor
    rows: Rows


def plan_chains(
    loss_mask: Tensor,
    steps: int,
    decay: float = 1.0,
    share: float = 1.0,
    generator: torch.Generator | None = None,
    supervised_rows: np.ndarray | None = None,
) -> Plan:
    """Plan the chains of a batch and their rows.

    Args:
        loss_mask: [B, M], m of the module's docstring, in host memory.
        steps: S.
        decay: base of the weight decay^s of step s.
        share: share of the chains, see :func:`chain_roots`.
        generator: generator of their choice.
        supervised_rows: rows by chain step that the batch's optimizer step has per batch
            (:class:`fsd_train.data.sampler.ResumableLoader`). None: the batch's own.
    """
    wanted = supervised(loss_mask, steps)
    rows, length = wanted.shape[1:]
    position = wanted[0].flatten().nonzero().squeeze(1)
    roots, stands_for = torch.zeros(rows, 0, dtype=torch.long), torch.zeros(rows, 0)
    if steps > 1:
        roots, stands_for = chain_roots(wanted, share, generator)
    step = torch.arange(steps)[:, None, None]
    here = (roots + step).clamp_max(length - 1)  # [S, B, K]
    there = (roots + step < length) & (stands_for > 0)
    there &= wanted.gather(2, here) if roots.numel() else there
    at = here + torch.arange(rows)[:, None] * length
    # by position and step: index of the output or -1, and its weight
    source, weight = torch.full((rows * length, steps), -1), torch.zeros(rows * length, steps)
    source[position, 0], weight[position, 0] = position, 1.0
    for number in range(1, steps):
        kept = there[number]
        place = at[number][kept]
        source[place, number] = rows * length + (number - 1) * roots.numel() + kept.flatten().nonzero().squeeze(1)
        weight[place, number] = stands_for[kept] * decay**number
    place, step = (source >= 0).nonzero().unbind(1)
    ends = (source[position] >= 0).sum(1).cumsum(0)
    row = torch.zeros_like(source)
    row[place, step] = torch.arange(len(place))
    whole = there.all(0)
    starts, represented = (position, torch.ones(len(position))) if steps == 1 else (at[0][whole], stands_for[whole])
    chains = torch.stack([row[starts + number, number] for number in range(steps)])
    feature = torch.searchsorted(position, place)
    total, chain_total = totals(wanted.flatten(1).sum(1) if supervised_rows is None else supervised_rows, steps, decay)
    planned = Rows(
        position, feature, step, weight[place, step], chains, represented, [0, *ends.tolist()], total, chain_total
    )
    return Plan(roots, source[place, step], planned)


def totals(counts: Tensor | np.ndarray, steps: int, decay: float) -> tuple[Tensor, Tensor]:
    """Return the sums of weights, over rows and over chains, of these counts of supervised rows by chain step."""
    counts = torch.as_tensor(counts[:steps], dtype=torch.float32)
    return (counts * decay ** torch.arange(steps)).sum(), counts[-1]


def plan_positions(
    loss_mask: Tensor, steps: int, decay: float = 1.0, supervised_rows: np.ndarray | None = None
) -> Rows:
    """Return the rows for a drafter whose drafts do not depend on the step: one per position, with summed weights.

    Arguments as of :func:`plan_chains`.
    """
    wanted = supervised(loss_mask, steps)
    position = wanted[0].flatten().nonzero().squeeze(1)
    counted = wanted.flatten(1)[:, position]  # [S, N]
    weight = (counted * decay ** torch.arange(steps)[:, None]).sum(0).float()
    following = torch.arange(len(position)) + torch.arange(steps)[:, None]
    inside = following.clamp_max(max(len(position) - 1, 0))
    whole = (following < len(position)) & (position[inside] == position + torch.arange(steps)[:, None])
    whole &= counted.gather(1, inside)
    zeros, numbers = torch.zeros_like(position), torch.arange(len(position))
    chains, ends = inside[:, whole.all(0)], list(range(len(position) + 1))
    total, chain_total = totals(counted.sum(1) if supervised_rows is None else supervised_rows, steps, decay)
    stands_for = torch.ones(chains.shape[1])
    return Rows(position, numbers, zeros, weight, chains, stands_for, ends, total, chain_total)
