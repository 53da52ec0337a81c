"""Scoring answers in batches gives what scoring them one by one gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsd_bench import likelihood
from fsd_bench.likelihood import mean_log_likelihoods
from fsd_infer.targets.target import Target
from tests.text_toys import save_tiny_chat_target


def draw_pairs(count: int) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(3)

    def draw(least: int, most: int) -> list[int]:
        size = int(torch.randint(least, most, (1,), generator=generator))
        found: list[int] = torch.randint(0, 200, (size,), generator=generator).tolist()
        return found

    return [(draw(1, 30), draw(1, 20)) for _ in range(count)]


def one_by_one(target: Target, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    found = []
    for prompt, answer in pairs:
        logits = target.model(input_ids=torch.tensor([prompt + answer])).logits[0].float()
        scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found.append(float(scores.gather(1, torch.tensor(answer)[:, None]).mean()))
    return found


def test_batches_agree_with_single_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.from_pretrained(str(save_tiny_chat_target(tmp_path)), dtype=torch.float32)
    pairs = draw_pairs(11)
    expected = one_by_one(target, pairs)
    assert max(expected) - min(expected) > 0.1, "the order matters"
    assert mean_log_likelihoods(target, pairs) == pytest.approx(expected, abs=1e-4)

    read: list[int] = []
    scored: list[int] = []
    features, lm_logits = target.features, target.lm_logits
    monkeypatch.setattr(target, "features", lambda ids, mask: (read.append(ids.numel()), features(ids, mask))[1])
    monkeypatch.setattr(target, "lm_logits", lambda x: (scored.append(len(x)), lm_logits(x))[1])
    monkeypatch.setattr(likelihood, "LOGIT_BYTES", 4 * target.vocab_size * 7)
    assert mean_log_likelihoods(target, pairs, batch_tokens=100) == pytest.approx(expected, abs=1e-4)
    assert max(read) <= 100 and len(read) < len(pairs)
    assert max(scored) == 7 and sum(scored) == sum(len(answer) for _, answer in pairs), "answers only, 7 at once"
    assert mean_log_likelihoods(target, []) == []
