"""Score given answers by the target's log-likelihood, in right-padded batches of similar lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fsd_infer.targets.target import Target

BATCH_TOKENS = 4096  # padding included
LOGIT_BYTES = 64 * 2**20  # of one fp32 piece [positions, V]; its reduction allocates at most two more


def mean_log_likelihoods(
    target: Target,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_tokens: int = BATCH_TOKENS,
    *,
    progress: bool = False,
) -> list[float]:
    """Return :func:`log_likelihoods` per token of the answer."""
    sums = log_likelihoods(target, pairs, batch_tokens, progress=progress)
    return [total / len(answer) for (total, _), (_, answer) in zip(sums, pairs, strict=True)]


@torch.inference_mode()
def log_likelihoods(
    target: Target,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_tokens: int = BATCH_TOKENS,
    *,
    progress: bool = False,
) -> list[tuple[float, int]]:
    """Return the raw log-probability of each answer given its prompt, by one forward per batch of pairs.

    Args:
        target: the target.
        pairs: (prompt, answer) as token ids, neither of them empty.
        batch_tokens: largest batch, in tokens with padding. A longer pair goes alone.
        progress: show a progress bar.

    Returns:
        Per pair, in order: the sum over the answer's tokens in nats, and how many of them are the likeliest token.

    Raises:
        ModelLoadError: the LM head does more than a linear map, a scale and a soft cap.
    """
    target.check_lm_head()
    results = [(0.0, 0)] * len(pairs)
    with tqdm(total=len(pairs), desc="log-likelihood", unit="answer", disable=not progress) as bar:
        lengths = [len(prompt) + len(answer) - 1 for prompt, answer in pairs]
        for batch in _batches(lengths, batch_tokens, target.dynamic_rope.fixed_length):
            for index, scored in zip(batch, _batch(target, [pairs[index] for index in batch]), strict=True):
                results[index] = scored
            bar.update(len(batch))
    return results


def _batches(lengths: Sequence[int], tokens: int, max_length: int | None) -> list[list[int]]:
    """Return indices in batches of ascending length whose padded size is at most ``tokens``.

    Texts longer than ``max_length`` go alone: their length decides the angles of all tokens of a forward.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        may_share = max_length is None or lengths[index] <= max_length
        if batches and may_share and (len(batches[-1]) + 1) * lengths[index] <= tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _batch(target: Target, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, int]]:
    """Return :func:`log_likelihoods` of one batch."""
    # the last token is predicted, not read
    ids = pad_sequence([torch.tensor([*prompt, *answer][:-1]) for prompt, answer in pairs], batch_first=True)
    ends = torch.tensor([[len(prompt), len(prompt) + len(answer)] for prompt, answer in pairs]) - 1
    position = torch.arange(ids.shape[1])
    is_read = position < ends[:, 1:]
    scored = is_read & (position >= ends[:, :1])
    labels = torch.tensor([token for _, answer in pairs for token in answer], device=target.device)
    # a mask of ones would only cost time
    features = target.features(ids.to(target.device), None if bool(is_read.all()) else is_read.long().to(target.device))
    final = features[scored.to(target.device)][:, : target.hidden_size]  # the rest are layers for a drafter
    scores, likeliest = _token_scores(target, final, labels)
    lengths = [len(answer) for _, answer in pairs]
    scored_answers = zip(scores.split(lengths), likeliest.split(lengths), strict=True)
    return [(float(part.sum()), int(greedy.sum())) for part, greedy in scored_answers]


def _token_scores(target: Target, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p(labels [K]) at features [K, H] and whether they are likeliest, in pieces without a [K, V] tensor."""
    rows = max(1, LOGIT_BYTES // (4 * target.vocab_size))
    pieces, likeliest = [], []
    for start in range(0, len(labels), rows):
        logits = target.lm_logits(features[start : start + rows]).float()
        chosen = logits.gather(1, labels[start : start + rows, None])[:, 0]
        pieces.append(chosen - logits.logsumexp(-1))
        likeliest.append(chosen == logits.amax(-1))
    return torch.cat(pieces), torch.cat(likeliest)
