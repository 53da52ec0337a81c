"""The experiment on stories: its beginnings, its loss, and its replay of `exact` without the target."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import judge_stories
from benchmarks.beginnings import WORDS, beginnings
from benchmarks.judge_stories import Judge
from benchmarks.stories import ValueLoss
from tests.bench_toys import Toy
from tests.loss_toys import check, distributions, make_batch


def test_beginnings_to_judge_by_share_nothing_with_those_to_train_on() -> None:
    train, judge = ([text.strip() for texts in WORDS[kind].values() for text in texts] for kind in ("train", "judge"))
    assert not set(train) & set(judge)
    made = beginnings("train", 400)
    assert len(set(made)) == 400 and made[:50] == beginnings("train", 50) != beginnings("train", 50, seed=1)
    assert not any("{" in text or "  " in text or text != text.strip() for text in made)


def test_the_value_of_a_chain_is_what_tilted_gives_for_it() -> None:
    batch, estimates = make_batch()
    p, q = distributions(batch)
    regret = p.log().amax(-1, keepdim=True) - p.log()
    kept = (q * (1 - 0.3 * regret).clamp_min(0)).sum(-1)  # [S, N]
    # chains that begin at rows 0..4 of the first text, and in the second at those that miss the hole at (1, 11)
    starts = torch.tensor([0, 1, 2, 3, 4, 7, 8, 9, 11])
    steps = torch.arange(3)[:, None]
    lengths = kept[steps, starts + steps].cumprod(0).sum(0)
    anchor = ((p * (p.log() - q.log())).sum(-1) * batch.weights).sum() / batch.weights.sum()
    expected = 0.1 * anchor - (lengths / 3).log().mean()
    check(batch, estimates, ValueLoss(price=0.3)(batch.batch()).loss, expected)


@pytest.mark.parametrize("chain", [1, 4])
def test_exact_is_replayed_as_it_decodes(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chain: int) -> None:
    monkeypatch.setattr(judge_stories, "beginnings", lambda *_, **__: ["the cat sat on", "what is the answer", "it is"])
    judge = Judge(argparse.Namespace(target=str(toy.target), tokens=24, prompts=3, work=tmp_path), torch.float32)
    replayed = judge.replay(str(toy.drafter))
    decoded = judge.decoded(str(toy.drafter), "exact", 0.0, chain)
    assert decoded["nats_per_token"] == 0 and 1 < decoded["tau"]
    assert replayed["forwards"][str(chain)] == decoded["forwards"]
    assert replayed["tau"][str(chain)] == pytest.approx(decoded["tau"])
    record = tmp_path / "speed.json"
    method = f"exact,{chain}"
    words = ["--target", str(toy.target), "--drafters", str(toy.drafter), "--methods", method, "--tokens", "8"]
    assert judge_stories.main([*words, "--json", str(record)]) == 0
    assert json.loads(record.read_text())["methods"].keys() == {"plain", f"drafter {method}"}
