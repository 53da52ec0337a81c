"""Row operations on logits in one pass over the vocabulary, in Triton: top-k with log-sum-exp, and row statistics.

Programs take chunks of a row, and a second kernel joins them. A number and its token are one 64-bit key, whose order is
that of the numbers; of equal numbers the first token is the largest key. NaN is larger than any number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_LIKELY = 32  # top-k by extracting one maximum after the other; torch's selection is faster for more
_CHUNK = 4096  # numbers of a program
_MIN = tl.constexpr(-(2**63))
# Arguments that change as batches shrink and trees vary, for which Triton would compile again where one becomes 1 or a
# multiple of 16. Lengths of rows of logits, whose loads are wider where they are such, are not among them.
VARYING = [
    "count", "nodes", "rows", "depth", "width", "text_width", "row_stride", "stride", "refusals", "above", "extra",
    "used", "most",
]  # fmt: skip


@triton.jit
def _keys(x, ids):
    """Return numbers and ids as sortable int64: the number above, the id below, counted down."""
    x = tl.where(x == 0, 0.0, x)  # -0.0 equals it
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _numbers(keys):
    """Return the numbers of :func:`_keys`."""
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _read(
    X, WHERE, KEYS, SUMS, columns, stride, CHUNKS, COUNT: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr
):
    """A chunk of a row: its COUNT largest keys, its maximum, Σ e^(x - max) and Σ (x - max) e^(x - max)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if CHOSEN:
        if tl.load(WHERE + row) == 0:
            return
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = ids < columns
    x = tl.load(X + row * stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    high = tl.max(x, 0)
    shifted = tl.where(x > -float("inf"), x - tl.where(high > -float("inf"), high, 0.0), -float("inf"))
    weight = tl.exp(shifted)
    out = row * CHUNKS + chunk
    tl.store(SUMS + 3 * out, high)
    tl.store(SUMS + 3 * out + 1, tl.sum(weight, 0))
    tl.store(SUMS + 3 * out + 2, tl.sum(weight * tl.where(weight > 0, shifted, 0.0), 0))
    keys = tl.where(inside, _keys(x, ids), _MIN)
    for rank in tl.static_range(COUNT):
        best = tl.max(keys, 0)
        tl.store(KEYS + out * COUNT + rank, best)
        keys = tl.where(keys == best, _MIN, keys)


@triton.jit
def _join(WHERE, KEYS, SUMS, VALUES, IDS, TOTALS, chunks, COUNT: tl.constexpr, CHUNKS: tl.constexpr,
          BLOCK: tl.constexpr, CHOSEN: tl.constexpr, LOG_PROBS: tl.constexpr):  # fmt: skip
    """Join a row's chunks: the COUNT largest numbers and their ids; ln Σ e^x and the softmax's entropy.

    A row that was not read has id 0 throughout, since an id beyond the vocabulary could not be looked up.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk, place = tl.arange(0, CHUNKS), tl.arange(0, BLOCK)
    sums = SUMS + 3 * (row * chunks + chunk)
    inside, known = chunk < chunks, True
    if CHOSEN:
        known = tl.load(WHERE + row) != 0
    high = tl.load(sums, mask=inside, other=-float("inf"))
    part = tl.load(sums + 1, mask=inside, other=0.0)
    moment = tl.load(sums + 2, mask=inside, other=0.0)
    highest = tl.max(high, 0)
    shift = tl.where(part > 0, high - highest, 0.0)
    weight = tl.where(part > 0, tl.exp(shift), 0.0)
    denominator = tl.sum(weight * part, 0)
    mean = tl.sum(weight * (moment + shift * part), 0) / denominator
    keys = tl.load(KEYS + row * chunks * COUNT + place, mask=place < chunks * COUNT, other=_MIN)
    largest = _numbers(tl.max(keys, 0))  # NaN if the row has one
    total = tl.where(tl.abs(largest) < float("inf"), highest + tl.log(denominator), largest)
    tl.store(TOTALS + 2 * row, total)
    tl.store(TOTALS + 2 * row + 1, tl.log(denominator) - mean)
    for rank in tl.static_range(COUNT):
        best = tl.max(keys, 0)
        value = _numbers(best) - total if LOG_PROBS else _numbers(best)
        tl.store(VALUES + row * COUNT + rank, value)
        tl.store(IDS + row * COUNT + rank, tl.where(known, 0x7FFFFFFF - (best & 0x7FFFFFFF), 0))
        keys = tl.where(keys == best, _MIN, keys)


def chunks_of(columns: int) -> tuple[int, int]:
    """Return how many numbers of a row a program takes, and how many programs take the row."""
    block = min(_CHUNK, max(64, triton.next_power_of_2(columns)))
    return block, triton.cdiv(columns, block)


def read_chunks(logits: Tensor, count: int, where: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Read rows [..., V] in chunks; ``count`` and ``where`` as for :func:`row_pass`.

    Returns:
        The rows [R, V], each contiguous; of their chunks the largest keys [R, C, count], and the largest number, Σ e^x
        and Σ x·e^x relative to it, [R, C, 3]; the size of a chunk.
    """
    shape = logits.shape[:-1]
    flat = logits.reshape(-1, logits.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    number, columns = flat.shape
    block, chunks = chunks_of(columns)
    keys = torch.empty(number, chunks, count, dtype=torch.int64, device=flat.device)
    sums = torch.empty(number, chunks, 3, dtype=torch.float32, device=flat.device)
    chosen = sums if where is None else where.expand(shape).contiguous().view(torch.uint8)
    if number:
        _read[number, chunks](
            flat, chosen, keys, sums, columns, flat.stride(0), chunks,
            COUNT=count, BLOCK=block, CHOSEN=where is not None, num_warps=4,
        )  # fmt: skip
    return flat, keys, sums, block


def row_pass(
    logits: Tensor, count: int, where: Tensor | None = None, log_probs: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read each row once.

    Args:
        logits: [..., V].
        count: how many of the largest numbers to return, at most V.
        where: [...] bool, the rows to read; results of others are arbitrary, their tokens 0. None: all.
        log_probs: return ln softmax of the largest numbers in their place.

    Returns:
        The largest numbers [..., count] in fp32, falling, and their tokens in int64; each row's ln Σ exp, or its
        largest number if that is infinite or NaN, and the entropy of its softmax in nats, [...] in fp32. A row with a
        NaN has NaN first.
    """
    shape, device = logits.shape[:-1], logits.device
    flat, keys, sums, _ = read_chunks(logits, count, where)
    number, chunks = sums.shape[:2]
    values = torch.empty(*shape, count, dtype=torch.float32, device=device)
    ids = torch.empty(*shape, count, dtype=torch.int64, device=device)
    totals = torch.empty(*shape, 2, dtype=torch.float32, device=device)
    chosen = ids if where is None else where.expand(shape).contiguous().view(torch.uint8)
    if number:
        _join[(number,)](
            chosen, keys, sums, values, ids, totals, chunks,
            COUNT=count, CHUNKS=triton.next_power_of_2(chunks), BLOCK=triton.next_power_of_2(chunks * count),
            CHOSEN=where is not None, LOG_PROBS=log_probs,
        )  # fmt: skip
    return values, ids, totals[..., 0], totals[..., 1]


def topk_logprobs(logits: Tensor, count: int, where: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the highest log-probabilities [..., count] in fp32, falling, and their tokens, of logits [..., V]."""
    values, ids, _, _ = row_pass(logits, count, where, log_probs=True)
    return values, ids


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest number and its first token."""
    values, ids, _, _ = row_pass(logits, 1)
    return values[..., 0], ids[..., 0]


def row_stats(logits: Tensor, where: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`row_max` and each row's ln Σ exp, or its largest number if that is infinite or NaN."""
    values, ids, total, _ = row_pass(logits, 1, where)
    return values[..., 0], ids[..., 0], total


def row_entropy(logits: Tensor, where: Tensor | None = None) -> Tensor:
    """Return the entropy of each row's softmax in nats."""
    return row_pass(logits, 1, where)[3]
