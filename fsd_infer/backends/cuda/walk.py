"""The walk over trees in Triton: ten launches above temperature 0 where rules keep the target's distribution.

Those over the vocabulary have a program per chunk of a row, the others one per tree, which holds its nodes in
registers. No two programs of a launch write what another one reads. Probabilities of nodes are in fp64, as in torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsd_core.sampling import FORKS, TINY, Rest
from fsd_infer.backends.cuda.compare import RESIDUAL, compare, with_totals
from fsd_infer.backends.cuda.draws import draw_left
from fsd_infer.backends.cuda.kernels import VARYING, row_pass

MAX_NODES = 128  # of a tree: programs hold matrices of nodes
_TINY = tl.constexpr(TINY)


@triton.jit
def _faults(OUT, RAW, HIGHEST, Q_HIGHEST, Q_INDEX, parent, node, is_draft, score, at, known, tree, rows, nodes,
            SAMPLED: tl.constexpr):  # fmt: skip
    """Whether largest numbers of a tree's raw, processed and drafter's logits are infinite or NaN; and its forks."""
    tl.store(OUT + at, (tl.abs(tl.load(RAW + at, mask=known, other=0.0)) < float("inf")) == 0, mask=known)
    tl.store(OUT + nodes + at, (tl.abs(tl.load(HIGHEST + at, mask=known, other=0.0)) < float("inf")) == 0, mask=known)
    is_right = score == score
    if SAMPLED:
        row = tl.load(Q_INDEX + at, mask=known, other=-1)
        largest = tl.load(Q_HIGHEST + tree * rows + tl.maximum(row, 0), mask=known, other=0.0)
        is_right = (row < 0) | (tl.abs(largest) < float("inf"))
    tl.store(OUT + 2 * nodes + at, is_right == 0, mask=known)
    children = tl.sum(((parent[None, :] == node[:, None]) & is_draft[None, :]).to(tl.int32), 1)
    tl.store(OUT + 3 * nodes + at, children > 1, mask=known)


@triton.jit(do_not_specialize=VARYING)
def _weigh(P, P_HIGHEST, P_TOTAL, Q, Q_TOTAL, INDEX, TOKENS, PARENTS, SCORES, Q_INDEX, DRAWN, RAW, Q_HIGHEST,
           GAP, LOG_P, LOG_Q, WEIGHT, CHILD, Q_ROW, WRONG, count, columns, rows, drafted, depth, nodes,
           SAMPLED: tl.constexpr, CHAIN: tl.constexpr, REDUCED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """ln p and ln q of a tree's drafts, the weights of block verification, and each node's drawn child, -1 for none."""
    first, node = tl.program_id(0).to(tl.int64) * count, tl.arange(0, BLOCK)
    known, at = node < count, first + node
    parent = tl.load(PARENTS + at, mask=known, other=0).to(tl.int32)
    above = first + parent
    token = tl.load(TOKENS + at, mask=known, other=0)
    score = tl.load(SCORES + at, mask=known, other=0.0)
    is_draft = known & (node > 0) & (score != -float("inf"))
    _faults(WRONG, RAW, P_HIGHEST, Q_HIGHEST, Q_INDEX, parent, node, is_draft, score, at, known,
            tl.program_id(0).to(tl.int64), rows, nodes, SAMPLED)  # fmt: skip
    highest = tl.load(P_HIGHEST + above, mask=known, other=0.0)
    own = tl.load(P + above * columns + token, mask=is_draft, other=0.0).to(tl.float32)
    gap = tl.where(is_draft, tl.maximum(highest - own, 0.0), float("inf"))
    log_p = highest - tl.load(P_TOTAL + 2 * above, mask=known, other=0.0) - gap
    tl.store(GAP + at, gap, mask=known)
    tl.store(LOG_P + at, log_p, mask=known)
    if SAMPLED:
        row = tl.load(Q_INDEX + above, mask=known, other=-1)
        is_drawn = is_draft & (row >= 0)
        if not CHAIN:
            is_drawn = is_drawn & (tl.load(DRAWN + at, mask=known, other=0) != 0)
        row = tl.program_id(0).to(tl.int64) * rows + tl.maximum(row, 0)
        entry = token
        if REDUCED:
            entry = tl.load(INDEX + token, mask=is_draft, other=-1)
        log_q = tl.load(Q + row * drafted + entry, mask=is_draft & (entry >= 0), other=-float("inf")).to(tl.float32)
        log_q = tl.where(entry >= 0, log_q - tl.load(Q_TOTAL + 2 * row, mask=known, other=0.0), -float("inf"))
        ratio = tl.exp(log_p.to(tl.float64) - log_q.to(tl.float64))
        weight = tl.full([BLOCK], 1.0, tl.float64)
        for _ in range(depth):
            weight = tl.where(is_drawn, tl.minimum(tl.gather(weight, parent, 0) * ratio, 1.0), 1.0)
        below = (parent[None, :] == node[:, None]) & is_drawn[None, :]
        tl.store(LOG_Q + at, log_q, mask=known)
        tl.store(WEIGHT + at, weight, mask=known)
        child = tl.max(tl.where(below, node[None, :], -1), 1)
        tl.store(CHILD + at, child, mask=known)
        tl.store(Q_ROW + at, tl.where(child >= 0, tl.load(Q_INDEX + at, mask=known, other=-1), -1), mask=known)


@triton.jit
def _accept_probs(own, parent, is_draft, at, above, known, Q_INDEX, DRAWN, LOG_Q, WEIGHT, CHILD, EXCESS, depth,
                  CHAIN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Probabilities [N] that nodes follow their parents: see block_accept_probs in fsd_core/sampling.py."""
    child, weight = tl.load(CHILD + at, mask=known, other=-1), tl.load(WEIGHT + at, mask=known, other=1.0)
    draws, excess = child >= 0, tl.load(EXCESS + at, mask=known, other=0.0)
    here = tl.where(draws & (weight < 1), excess / tl.maximum(excess + 1 - weight, _TINY), weight)
    ends_within, ends_below = here, tl.zeros([BLOCK], tl.float64)
    for _ in range(depth):
        ends_below = tl.where(draws, tl.gather(ends_within, tl.maximum(child, 0), 0), 0.0)
        ends_within = ends_below + (1 - ends_below) * here
    goes_on = tl.gather(tl.minimum(ends_below / tl.maximum(ends_within, _TINY), 1.0), parent, 0)
    log_q = tl.load(LOG_Q + at, mask=known, other=0.0).to(tl.float64)
    rest = tl.maximum(tl.load(WEIGHT + above, mask=known, other=1.0) * own - tl.exp(log_q), 0.0)
    rest = tl.minimum(rest / tl.maximum(tl.gather(excess, parent, 0), _TINY), 1.0)
    is_drawn = is_draft & (tl.load(Q_INDEX + above, mask=known, other=-1) >= 0)
    if not CHAIN:
        is_drawn = is_drawn & (tl.load(DRAWN + at, mask=known, other=0) != 0)
    below_draw = tl.load(CHILD + above, mask=known, other=-1) >= 0
    return tl.where(is_drawn, goes_on, tl.where(below_draw, (1 - goes_on) * rest, own))


@triton.jit
def _down(follows, parent, node, depth):
    """Which nodes a walk reaches, how many there are up to each, the accepted drafts, and the path's last node."""
    reached = node == 0
    for _ in range(depth):
        reached = (node == 0) | (follows & (tl.gather(reached.to(tl.int32), parent, 0) > 0))
    step = tl.cumsum(reached.to(tl.int32), 0) - 1
    accepted, end = tl.sum(reached.to(tl.int32), 0) - 1, tl.max(tl.where(reached, node, 0), 0)
    return reached & (step <= depth), step, accepted, end  # equal siblings may follow together


@triton.jit
def _first_choices(parent, node, is_draft, score, at, known, DRAWN, HAS_DRAWN: tl.constexpr, BLOCK: tl.constexpr):
    """Each node's best child that was not drawn, the first of equals; -1 for none."""
    is_child = (parent[None, :] == node[:, None]) & is_draft[None, :]
    if HAS_DRAWN:
        is_child = is_child & (tl.load(DRAWN + at, mask=known, other=0) == 0)[None, :]
    of_children = tl.where(is_child, score[None, :], -float("inf"))
    is_best = is_child & (of_children == tl.max(of_children, 1)[:, None])
    choice = tl.min(tl.where(is_best, node[None, :], BLOCK), 1)
    return tl.where(choice < BLOCK, choice, -1)


@triton.jit
def _offset(UNIFORMS, prob, parent, node, is_draft, known, tree, row_stride, stride):
    """How far contexts' uniform numbers lie from the starts of their children: see child_offsets in sampling.py."""
    siblings = (parent[:, None] == parent[None, :]) & is_draft[None, :]
    before = tl.sum(tl.where(siblings & (node[None, :] < node[:, None]), prob[None, :], 0.0), 1)
    uniform = tl.load(UNIFORMS + tree * row_stride + parent * stride, mask=known, other=0.0)
    return uniform.to(tl.float64) - before


@triton.jit
def _put_path(PATH, NEXT, SOURCES, FIRST, GAPS, ACCEPTED, END, GAP, tree, first, node, known, token, source, last,
              reached, step, accepted, end, choice, width, BLOCK: tl.constexpr):  # fmt: skip
    """Each step of the path is one node's, and what is emitted there its follower's; the rest is padding.

    ``source``: of a node's token; ``last``: of the token after the path, which is left out.
    """
    start, padding, follows = tree * width, tl.arange(0, BLOCK), reached & (node > 0)
    tl.store(PATH + start + step, node.to(tl.int64), mask=reached)
    tl.store(FIRST + start + step, choice.to(tl.int64), mask=reached)
    gap = tl.load(GAP + first + choice, mask=known & (choice >= 0), other=float("nan"))
    tl.store(GAPS + start + step, gap, mask=reached)
    tl.store(NEXT + start + step - 1, token, mask=follows)
    tl.store(SOURCES + start + step - 1, source.to(tl.int64), mask=follows)
    is_padding, none = (padding > accepted) & (padding < width), tl.zeros([BLOCK], tl.int64)
    is_left = (padding >= accepted) & (padding < width)
    tl.store(PATH + start + padding, none + end, mask=is_padding)
    tl.store(FIRST + start + padding, none - 1, mask=is_padding)
    tl.store(GAPS + start + padding, none.to(tl.float32) + float("nan"), mask=is_padding)
    tl.store(NEXT + start + padding, none, mask=is_left)
    tl.store(SOURCES + start + padding, tl.where(padding == accepted, none + last, 0), mask=is_left)
    tl.store(ACCEPTED + tree, accepted.to(tl.int64))
    tl.store(END + tree, end.to(tl.int64))


@triton.jit(do_not_specialize=VARYING)
def _follow(P_DRAFT, R_DRAFT, LOSSY, COST, DENSE_END, GAP, UNIFORMS, TOKENS, PARENTS, SCORES, DRAWN,
            PATH, NEXT, SOURCES, FIRST, GAPS, ACCEPTED, END, RELAXED, SPENT, count, depth, width, row_stride, stride,
            GREEDY: tl.constexpr, COSTS: tl.constexpr, HAS_DRAWN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The path of a tree, and what is emitted along it but for the last token: see accepted_path in rules/walk.py."""
    tree, node = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first, known = tree * count, node < count
    at = first + node
    parent = tl.load(PARENTS + at, mask=known, other=0).to(tl.int32)
    score = tl.load(SCORES + at, mask=known, other=-float("inf"))
    is_draft = known & (node > 0) & (score != -float("inf"))
    lossy = tl.load(LOSSY + at, mask=known, other=0) != 0
    lossy_above = tl.gather(lossy.to(tl.int32), parent, 0) > 0
    p, r = tl.load(P_DRAFT + at, mask=known, other=0), tl.load(R_DRAFT + at, mask=known, other=0)
    prob = tl.where(lossy_above, r, p)
    if GREEDY:
        follows, under_p = is_draft & (prob != 0), p != 0
    else:
        offset = _offset(UNIFORMS, prob, parent, node, is_draft, known, tree, row_stride, stride)
        follows, under_p = is_draft & (offset >= 0) & (offset < prob), offset < p
    reached, step, accepted, end = _down(follows, parent, node, depth)
    choice = _first_choices(parent, node, is_draft, score, at, known, DRAWN, HAS_DRAWN, BLOCK)
    token = tl.load(TOKENS + at, mask=known, other=0)
    source = tl.where(lossy_above & (under_p == 0), 2, 1)
    ends_lossy = tl.max(((node == end) & lossy).to(tl.int32), 0) > 0
    last = tl.where(ends_lossy & (tl.load(DENSE_END + tree) != 0), 2, 0)
    _put_path(PATH, NEXT, SOURCES, FIRST, GAPS, ACCEPTED, END, GAP, tree, first, node, known, token, source, last,
              reached, step, accepted, end, choice, width, BLOCK)  # fmt: skip
    start, padding = tree * width, tl.arange(0, BLOCK)
    is_padding = (padding > accepted) & (padding < width)
    tl.store(RELAXED + start + step, lossy.to(tl.uint8), mask=reached)
    tl.store(RELAXED + start + padding, tl.zeros([BLOCK], tl.uint8), mask=is_padding)
    spent = tl.zeros([BLOCK], tl.float64)
    tl.store(SPENT + start + padding, spent, mask=is_padding)
    if COSTS:
        spent = tl.load(COST + at, mask=known & lossy, other=0.0)
    tl.store(SPENT + start + step, spent, mask=reached)


@triton.jit
def _walk(TOKENS, PARENTS, SCORES, Q_INDEX, DRAWN, UNIFORMS, GAP, LOG_P, LOG_Q, WEIGHT, CHILD, Q_ROW, EXCESS,
          PATH, NEXT, SOURCES, FIRST, GAPS, ACCEPTED, END, OF_END, END_ROW, REFUSED,
          count, depth, width, row_stride, stride, SAMPLED: tl.constexpr, CHAIN: tl.constexpr,
          HAS_DRAWN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The path of a tree, and what is emitted along it but for the last token; what that is drawn from."""
    tree, node = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first, known = tree * count, node < count
    at = first + node
    parent = tl.load(PARENTS + at, mask=known, other=0).to(tl.int32)
    above, token = first + parent, tl.load(TOKENS + at, mask=known, other=0)
    score = tl.load(SCORES + at, mask=known, other=-float("inf"))
    is_draft = known & (node > 0) & (score != -float("inf"))
    prob = tl.exp(tl.load(LOG_P + at, mask=known, other=-float("inf")).to(tl.float64))
    if SAMPLED:
        prob = _accept_probs(prob, parent, is_draft, at, above, known, Q_INDEX, DRAWN, LOG_Q, WEIGHT, CHILD, EXCESS,
                             depth, CHAIN, BLOCK)  # fmt: skip
    prob = tl.where(is_draft, prob, 0.0)
    # a context's uniform number falls on one of its children or on none
    offset = _offset(UNIFORMS, prob, parent, node, is_draft, known, tree, row_stride, stride)
    follows = (offset >= 0) & (offset < prob)
    reached, step, accepted, end = _down(follows, parent, node, depth)
    choice = _first_choices(parent, node, is_draft, score, at, known, DRAWN, HAS_DRAWN, BLOCK)
    _put_path(PATH, NEXT, SOURCES, FIRST, GAPS, ACCEPTED, END, GAP, tree, first, node, known, token, node * 0 + 1, 0,
              reached, step, accepted, end, choice, width, BLOCK)  # fmt: skip
    tl.store(REFUSED + at, tl.where(is_draft & (parent == end), token, -1), mask=known)
    if SAMPLED:  # p where nothing was drawn, to which w·p is in proportion
        row = tl.load(Q_ROW + first + end)
        tl.store(OF_END + tree, tl.where(row >= 0, tl.load(WEIGHT + first + end), 1.0).to(tl.float32))
        tl.store(END_ROW + tree, row)


class _Weighed(NamedTuple):
    """The nodes of trees, as the kernels take them.

    Attributes:
        fields: tokens, parents, scores, rows of q, and which were drawn, [B, N] each.
        results: of :func:`_weigh`: gaps, ln p, ln q, weights, drawn children, and rows of q of contexts with one.
        p, q: logits, and ln Σ exp of their rows; q: None if nothing was drawn.
        highest, likeliest: [B, N] largest logits under p, and their tokens.
        entries: [V] columns of q by token; None: they are equal.
        faults: those of the verdict.
        how: arguments that :func:`_weigh` and :func:`_walk` are compiled for.
    """

    fields: list[Tensor]
    results: list[Tensor]
    p: tuple[Tensor, Tensor]
    q: tuple[Tensor, Tensor] | None
    highest: Tensor
    likeliest: Tensor
    entries: Tensor | None
    faults: dict[str, Tensor]
    how: dict[str, Any]


def exact_walk(scores: Tensor, inputs: Any) -> dict[str, Any]:
    """Return :func:`fsd_infer.rules.walk.exact_walk` of a tree with drafts, whose q_scores are of q_logits' shape."""
    tree, uniforms, weighed = inputs.tree, inputs.round.uniforms, _weighed(scores, inputs)
    (batch, count), width, device = tree.tokens.shape, tree.max_depth + 1, scores.device
    weight, row, excess, ids = weighed.results[3], weighed.results[5], weighed.results[0], tree.draft_ids
    if weighed.q is not None:
        excess = compare(RESIDUAL, weighed.p, weighed.q, ids, row, weight)
    path, tokens, sources, first_choices = torch.empty(4, batch, width, dtype=torch.long, device=device)
    accepted, end, end_row = torch.empty(3, batch, dtype=torch.long, device=device)
    gaps, of_end = torch.empty_like(path, dtype=torch.float32), torch.empty_like(end, dtype=torch.float32)
    refused = torch.empty_like(weighed.fields[0])
    _walk[(batch,)](
        *weighed.fields, uniforms, *weighed.results, excess,
        path, tokens, sources, first_choices, gaps, accepted, end, of_end, end_row, refused,
        count, width - 1, width, *uniforms.stride()[:2], HAS_DRAWN=tree.drawn is not None, **weighed.how,
    )  # fmt: skip
    q, q_total = weighed.q or (None, None)
    rest = Rest(weighed.p[0], end, of_end, refused, q, end_row, weighed.entries)
    draw_left(rest, weighed.p[1], q_total, uniforms, tokens, accepted, weighed.likeliest)
    return {
        "path": path, "accepted": accepted, "tokens": tokens, "sources": sources, "first_choices": first_choices,
        "logprob_gap": gaps, "relaxed": torch.zeros_like(path, dtype=torch.bool),
        "spent": torch.zeros_like(path, dtype=torch.double), "proposers": tree.proposers, "faults": weighed.faults,
    }  # fmt: skip


def _weighed(scores: Tensor, inputs: Any) -> _Weighed:
    tree, logits, scores = inputs.tree, inputs.round.logits, scores.contiguous()
    (batch, count, columns), depth, device = scores.shape, tree.max_depth, scores.device
    highest, likeliest, p_total, _ = row_pass(scores, 1)
    raw = highest if inputs.round.scores is logits else row_pass(logits, 1)[0]
    p, q, q_highest, index = (scores, p_total), None, highest, None
    if inputs.sampled:
        q, q_highest, index = with_totals(tree.q_scores), row_pass(tree.q_logits, 1)[0], inputs.draft_index
    fields = [x.contiguous() for x in (tree.tokens, tree.parents, tree.scores, tree.q_index)]
    fields.append(fields[0] if tree.drawn is None else tree.drawn.contiguous().view(torch.uint8))
    results = [
        *torch.empty(3, batch, count, device=device),
        torch.empty(batch, count, dtype=torch.double, device=device),
    ]
    results += [torch.empty_like(fields[0], dtype=torch.int32), torch.empty_like(fields[0])]
    wrong = torch.empty(4, batch, count, dtype=torch.bool, device=device)
    block = max(16, triton.next_power_of_2(max(count, depth + 1)))
    how = {"SAMPLED": q is not None, "CHAIN": inputs.is_chain, "BLOCK": block, "num_warps": block // 8}
    rows, drafted = (0, 0) if q is None else q[0].shape[1:]
    _weigh[(batch,)](
        scores, highest, p_total, *(q or p), scores if index is None else index, *fields, raw, q_highest, *results,
        wrong.view(torch.uint8), count, columns, rows, drafted, depth, batch * count, REDUCED=index is not None, **how,
    )  # fmt: skip
    faults = {"the target's logits": wrong[0]}
    faults |= {"the target's processed logits": wrong[1]} if raw is not highest else {}
    faults |= {"the drafter's logits": wrong[2]}
    faults |= {FORKS: wrong[3]} if inputs.is_chain else {}
    highest, likeliest = (x.view(batch, count) for x in (highest, likeliest))
    return _Weighed(fields, results, p, q, highest, likeliest, index, faults, how)


def draft_numbers(scores: Tensor, inputs: Any) -> dict[str, Any]:
    """Return :func:`fsd_infer.rules.inputs.draft_numbers`."""
    weighed = _weighed(scores, inputs)
    (gap, log_p, log_q, weight, child, _), stats = weighed.results, (weighed.highest, weighed.likeliest, weighed.p[1])
    faults = {name: wrong for name, wrong in weighed.faults.items() if name != FORKS}
    known = {"_faults": faults, "_maxima": stats[:2], "_row_stats": stats, "logprob_gap": gap, "log_p": log_p}
    if weighed.q is None:
        return known
    known |= {"log_q": log_q, "has_drawn_child": child >= 0}
    if not inputs.is_chain:
        ids, p_itself = inputs.tree.draft_ids, torch.ones_like(weight)
        known["drawn_residual"] = compare(RESIDUAL, weighed.p, weighed.q, ids, weighed.results[5], p_itself)
    return known


def accepted_path(
    p_draft: Tensor, r_draft: Tensor, lossy: Tensor, cost: Tensor | None, final_is_dense: Tensor, inputs: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """Return :func:`fsd_infer.rules.walk.accepted_path`."""
    tree, greedy = inputs.tree, inputs.greedy
    (batch, count), width, device = p_draft.shape, tree.max_depth + 1, p_draft.device
    path, tokens, sources, first_choices = torch.empty(4, batch, width, dtype=torch.long, device=device)
    gaps, spent = (torch.empty(batch, width, dtype=dtype, device=device) for dtype in (torch.float32, torch.double))
    accepted, end = torch.empty(2, batch, 1, dtype=torch.long, device=device)
    relaxed = torch.empty(batch, width, dtype=torch.bool, device=device)
    drawn, uniforms = tree.drawn, p_draft if greedy else inputs.round.uniforms
    given = [p_draft, r_draft, lossy, cost, final_is_dense, inputs.logprob_gap]
    given = [spent if x is None else x.contiguous() for x in given]
    fields = [x.contiguous() for x in (tree.tokens, tree.parents, tree.scores, lossy if drawn is None else drawn)]
    block = max(16, triton.next_power_of_2(max(count, width)))
    _follow[(batch,)](
        *map(_bytes, given), uniforms if not greedy else _bytes(given[0]), *map(_bytes, fields),
        path, tokens, sources, first_choices, gaps, accepted, end, _bytes(relaxed), spent,
        count, width - 1, width, *uniforms.stride()[:2], GREEDY=greedy, COSTS=cost is not None,
        HAS_DRAWN=drawn is not None, BLOCK=block, num_warps=block // 8,
    )  # fmt: skip
    return {
        "path": path, "accepted": accepted[:, 0], "tokens": tokens, "sources": sources, "relaxed": relaxed,
        "spent": spent, "first_choices": first_choices, "logprob_gap": gaps,
    }, end  # fmt: skip


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x
