"""What users fear most of a lossy rule: answers that copy the prompt or repeat themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsd_infer import FuzzyDecoder, TreeShape
from fsd_infer.engine.ngrams import copied_ngrams, coverage, kinds, repeated_ngrams

DATA = Path(__file__).parents[1] / "data" / "spec_bench_dev.jsonl"


@pytest.mark.slow
def test_the_default_neither_echoes_nor_loops() -> None:
    """100 prompts of several kinds: copied and repeated 4-grams within 2 points of exact's."""
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    prompts = [row["turns"][0] for row in rows[:: len(rows) // 100]][:100]
    assert len({row["category"] for row in rows}) > 5 and len(prompts) == 100
    decoder = FuzzyDecoder.from_pretrained("smollm2-135m", "shipped+lookup", tree=TreeShape(10, 2, 16, 0.1))
    shares = {}
    for rule in ("exact", "tilted"):
        rows_ = [decoder.generate(text, rule, max_new_tokens=128, do_sample=False).stats.rows[0] for text in prompts]
        shares[rule] = [
            sum(getattr(row, name) or 0.0 for row in rows_) for name in ("copied_4grams", "repeated_4grams")
        ]
    for exact, lossy in zip(*shares.values(), strict=True):
        assert lossy <= exact + 2.0, shares


@pytest.mark.parametrize(
    ("prompt", "answer", "copied", "repeated", "labels"),
    [
        ("abcdefg", "abcdx", 1 / 2, 0.0, "nnncn"), ("xyz", "ababab", 0.0, 1 / 3, "nnnnnr"),
        ("abab", "ababab", 2 / 3, 1 / 3, "nnncnc"), ("abc", "abc", None, None, "nnn"), ("", "", None, None, ""),
    ],
)  # fmt: skip
def test_shares_and_kinds(prompt: str, answer: str, copied: float | None, repeated: float | None, labels: str) -> None:
    assert copied_ngrams(prompt, answer) == (None if copied is None else pytest.approx(copied))
    assert repeated_ngrams(answer) == (None if repeated is None else pytest.approx(repeated))
    assert [kind[0] for kind in kinds(prompt, answer)] == list(labels)


def test_extractive_coverage() -> None:
    """The example of greedy fragments: two words, one word, and a word that the source lacks."""
    assert coverage("the cat sat on the mat".split(), "cat sat near the mat".split()) == pytest.approx(4 / 5)
    assert coverage(["a"], []) is None and coverage([], ["a"]) == 0.0
