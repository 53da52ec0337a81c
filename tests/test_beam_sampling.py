"""Sampled beams: their distributions by enumeration, also where steps are narrower, and that drafts do not change
them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import LMDrafter
from fsd_infer.engine.beams import BeamOptions
from fsd_infer.engine.beams.sampling import dynamic_width, width_probabilities
from tests.beam_toys import drafters_for
from tests.families import tiny_model, tiny_prompts
from tests.test_beams import target as target  # a fixture

Live = tuple[tuple[float, tuple[int, ...]], ...]  # scores and texts, best first


def drawn_sets(weights: list[float], count: int) -> dict[frozenset[int], float]:
    """The chance of each set of ``count`` draws without replacement."""
    sets = {frozenset[int](): 1.0}
    for _ in range(min(count, len(weights))):
        larger: dict[frozenset[int], float] = defaultdict(float)
        for taken, chance in sets.items():
            left = sum(weight for place, weight in enumerate(weights) if place not in taken)
            for place, weight in enumerate(weights):
                if place not in taken:
                    larger[taken | {place}] += chance * weight / left
        sets = larger
    return sets


def following(model: Any, prompt: list[int], steps: int) -> dict[tuple[int, ...], list[float]]:
    """The log-probabilities of what follows each text of fewer tokens than ``steps``."""
    found: dict[tuple[int, ...], list[float]] = {}
    for length in range(steps):
        texts = list(product(range(model.config.vocab_size), repeat=length))
        ids = torch.tensor([[*prompt, *text] for text in texts])
        found |= dict(zip(texts, model(ids).logits[:, -1].double().log_softmax(-1).tolist()))
    return found


def distribution_of_beam_sampling(
    known: dict[tuple[int, ...], list[float]], beams: int, steps: int, width: Callable[[int, Live], int] | None = None
) -> dict[tuple[int, ...], float]:
    """Enumerate the distribution of the best answer under transformers' beam sampling, optionally with fewer beams
    after a step.

    Each step draws 2 W candidates without replacement, by the joint weight of beam and token, and keeps the W best. At
    the last step the first W draws are the answers, and the best of them is returned.
    """
    states: dict[Live, float] = {((0.0, ()),): 1.0}
    answers: dict[tuple[int, ...], float] = defaultdict(float)
    for step in range(1, steps + 1):
        after: dict[Live, float] = defaultdict(float)
        for live, chance in states.items():
            candidates = [(score + value, (*text, y)) for score, text in live for y, value in enumerate(known[text])]
            kept = width(step, live) if width and step < steps else beams
            sets = drawn_sets([math.exp(score) for score, _ in candidates], kept if step == steps else 2 * kept)
            for drawn, share in sets.items():
                best = sorted((candidates[place] for place in drawn), reverse=True)[:kept]
                if step == steps:
                    answers[best[0][1]] += chance * share
                else:
                    after[tuple(best)] += chance * share
        states = after
    return answers


def pearson(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's statistic, less its mean, in standard deviations."""
    count = found.total()
    cells = [(found[text], count * share) for text, share in expected.items() if count * share >= 5]
    total = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    return (total - len(cells)) / math.sqrt(2 * len(cells))


TOKENS, ROWS = 6, 500


@cache
def toys() -> tuple[FuzzyDecoder, Any, Any]:
    """A target over six tokens with a drafter that is often wrong, and what follows each text of either."""
    models = [tiny_model("llama", vocab_size=TOKENS) for _ in range(2)]
    with torch.inference_mode():
        for parameter in models[1].parameters():
            parameter.add_(0.3 * parameter.std(unbiased=False) * torch.randn_like(parameter))
        small, other = (Target(model.double()) for model in models)
        follows = (following(target.model, [1, 2], 3) for target in (small, other))
        return FuzzyDecoder(small, LMDrafter(other, small)), *follows


def likeliest_first(log_p: list[float]) -> tuple[list[float], list[int]]:
    values, tokens = torch.tensor(log_p).sort(descending=True)
    return values.tolist(), tokens.tolist()


def dynamic(step: int, live: Live) -> int:
    """The width that a confidence of 0.7 leaves, from both models' distributions."""
    if step == 1:  # the prompt is read before anything is drafted
        return 2
    lists = [[likeliest_first(follows[text]) for _, text in live] for follows in toys()[1:]]
    chances = width_probabilities([score for score, _ in live], *lists, width=2, breadth=2, per_beam=2)
    return dynamic_width(chances, 0.7, 1)


@pytest.mark.parametrize(
    ("options", "width", "too_far"),
    [
        (None, None, 10),
        (BeamOptions(depth=3, spread=1.0, confidence=0.7), dynamic, 5),
        (BeamOptions(join_every=2), lambda step, live: 1 if step == 2 else 2, 6),
    ],
    ids=["transformers", "dynamic", "joined"],
)
def test_distribution_of_sampled_beams(options: BeamOptions | None, width: Any, too_far: float) -> None:
    decoder, known, _ = toys()
    distribution = distribution_of_beam_sampling(known, 2, 3, width)
    assert sum(distribution.values()) == pytest.approx(1.0)
    sampling: dict[str, Any] = dict(max_new_tokens=3, do_sample=True, top_k=0, temperature=1.0, num_beams=2)
    made = decoder.generate([[1, 2]] * ROWS, seed=3, beam_options=options, **sampling)
    assert made.stats.acceptance_length > 1.2, "drafts are of use"
    found = Counter(map(tuple, made.sequences))
    assert set(found) <= set(distribution) and pearson(found, distribution) < 4
    another = distribution_of_beam_sampling(known, 1 if width is None else 2, 3)
    assert pearson(found, another) > too_far, "the test would not notice another distribution"


@pytest.mark.parametrize(("join_every", "tokens"), [(None, 8), (4, 24)])
def test_sampled_beams_do_not_depend_on_drafts(target: Target, join_every: int | None, tokens: int) -> None:
    options: dict[str, Any] = dict(max_new_tokens=tokens, num_beams=4, do_sample=True)
    options["beam_options"] = BeamOptions(depth=3, join_every=join_every)
    drafters = drafters_for(target)
    plain = FuzzyDecoder(target, drafters.pop("none"))
    expected = plain.generate(tiny_prompts(), seed=1, **options).sequences
    assert expected != plain.generate(tiny_prompts(), seed=2, **options).sequences
    for name in ("lookup", "reduced+lookup", "lm") if join_every else drafters:
        drafter = drafters[name]
        made = FuzzyDecoder(target, drafter).generate(tiny_prompts(), seed=1, **options)
        assert made.sequences == expected
        if name == "lookup" and join_every:
            # longest prompt, one answer, the beams of four steps, twice a round's nodes, and the spare slot
            slots = 21 + 24 + 4 * 4 + 2 * (3 * 4 + 4) + 1
            assert made.stats.cache_bytes == 4 * slots * target.cache_bytes_per_token
