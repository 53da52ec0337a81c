"""Indexing of draft training, and the head run on its own outputs ("training-time test").

A sequence has tokens x_0 … x_{M-1}; f_i is what enters the LM head at position i, so that LMHead(f_i) is the
target's distribution of x_{i+1}. m_j = 1 where x_j belongs to an answer.

Step 0, position i reads (embedding of x_{i+1}, f_i), sees positions ≤ i and estimates f_{i+1}, hence the
distribution of x_{i+2}. Step s ≥ 1, position i reads (embedding of x_{i+1}, output of step s-1 at position i-1): it
is the (s+1)-th token of a chain whose round began when x_0 … x_{i-s+1} were known, so the target's features reach to
f_{i-s}. It therefore sees

- step-0 keys at positions ≤ i-s, made from the target's features,
- of every step r = 1 … s exactly one key, at position i-s+r: the chain's own earlier tokens.

Position ids are i in every step. This is what decoding computes with one growing cache, for all chains at once.

Step s at position i is supervised iff m holds for x_{i-s+1} … x_{i+2}: x_{i+2} is the predicted token, x_{i-s+1} the
round's root, which the target emitted. So the first token of an answer is never a draft, the second one is drafted
from the feature of the last prompt token and the embedding of the first answer token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from fsd_infer.head import EagleHead


def supervised(loss_mask: Tensor, steps: int) -> Tensor:
    """Where each unrolled step counts.

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
        # adds the condition on the root x_{i-s+1}; chains need a step-0 position i-s >= 0
        result[step, :, step:] = result[step - 1, :, step:] & answer[:, 1 : length - step]
    return result


def unrolled_mask(queries: Tensor, keys: Tensor, step: int) -> Tensor:
    """Who sees whom in step ``step`` ≥ 1.

    Args:
        queries: [Q] positions that this step runs at.
        keys: [K0] positions of the step-0 keys; steps 1 … ``step`` have the positions ``queries`` as keys, in that
            order.
        step: s.

    Returns:
        [1, 1, Q, K0 + s·Q] bool, True where the query may attend. Queries too early to have a chain see themselves,
        so that no row is empty.
    """
    parts = [keys[None, :] <= queries[:, None] - step]
    parts += [queries[None, :] == queries[:, None] - step + own for own in range(1, step + 1)]
    return torch.cat(parts, dim=1)[None, None]


def unroll(head: EagleHead, embeds: Tensor, features: Tensor, steps: int, start: int = 0) -> list[Tensor]:
    """Run the head ``steps`` times, each time on its own outputs of the time before, shifted by one position.

    Args:
        head: the draft head.
        embeds: [B, L, E], embedding of x_{i+1} at position i.
        features: [B, L, H], the target's f_i at position i.
        steps: S ≥ 1.
        start: steps ≥ 1 leave out positions below this one (nothing there may be supervised in them).

    Returns:
        S tensors [B, L, H]; outputs of steps ≥ 1 below ``start`` are zero, and those at positions < s mean nothing.
    """
    rows, length = embeds.shape[:2]
    positions = torch.arange(length, device=embeds.device)
    cache = DynamicCache() if steps > 1 else None
    outputs = [head(embeds, features, positions.expand(rows, -1), cache=cache)]
    if steps == 1:
        return outputs
    start = min(max(start, 1), length - 1) if length > 1 else 0
    late = positions[start:]
    source = outputs[0][:, start - 1 : -1] if start else features
    for step in range(1, steps):
        mask = unrolled_mask(late, positions, step)
        out = head(embeds[:, start:], source, late.expand(rows, -1), attention_mask=mask, cache=cache)
        outputs.append(torch.nn.functional.pad(out, (0, 0, start, 0)))
        # the first column has no predecessor in this step; nothing supervised reads it
        source = torch.cat([out[:, :1], out[:, :-1]], dim=1)
    return outputs
