"""Scoring answers in batches gives what scoring them one by one gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsd_bench import likelihood
from fsd_bench.likelihood import mean_log_likelihoods
from fsd_infer.targets.target import Target
from tests.text_toys import save_tiny_chat_target


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_target(tmp_path_factory.mktemp("target"))


def draw_pairs(count: int = 11) -> list[tuple[list[int], list[int]]]:
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


def test_batches_agree_with_single_forwards(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.from_pretrained(str(directory), dtype=torch.float32)
    pairs = draw_pairs()
    expected = one_by_one(target, pairs)
    assert max(expected) - min(expected) > 0.1, "the order matters"
    assert mean_log_likelihoods(target, pairs) == pytest.approx(expected, abs=1e-4)
    assert mean_log_likelihoods(target, pairs, batch_tokens=100) == pytest.approx(expected, abs=1e-4)
    assert mean_log_likelihoods(target, []) == []

    sizes: list[int] = []
    lm_logits = target.lm_logits
    monkeypatch.setattr(target, "lm_logits", lambda x: (sizes.append(len(x)), lm_logits(x))[1])
    monkeypatch.setattr(likelihood, "LOGIT_BYTES", 4 * target.vocab_size * 7)
    assert mean_log_likelihoods(target, pairs) == pytest.approx(expected, abs=1e-4)
    assert max(sizes) == 7 and sum(sizes) == sum(len(answer) for _, answer in pairs), (
        "answers only, 7 positions a piece"
    )


def test_a_bar_counts_the_answers(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target.from_pretrained(str(directory), dtype=torch.float32)
    pairs = draw_pairs(6)
    scores = mean_log_likelihoods(target, pairs, progress=True)
    assert "log-likelihood: 100%" in (said := capsys.readouterr().err) and "6/6" in said
    assert scores == mean_log_likelihoods(target, pairs) and not capsys.readouterr().err


def test_batches_agree_in_bf16(directory: Path) -> None:
    target = Target.from_pretrained(str(directory), dtype=torch.bfloat16)
    pairs = draw_pairs(6)
    assert mean_log_likelihoods(target, pairs) == pytest.approx(one_by_one(target, pairs), abs=0.05)


def test_batches_are_bounded_and_lose_nothing() -> None:
    lengths = [5, 90, 7, 300, 6, 80, 7]
    batches = likelihood._batches(lengths, 100)
    assert sorted(index for batch in batches for index in batch) == list(range(7))
    assert [[lengths[i] for i in batch] for batch in batches] == [[5, 6, 7, 7], [80], [90], [300]]
