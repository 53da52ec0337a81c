"""Drafts below several beams, of any drafter, and sampled beams, whose distributions drafts do not change."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_core.tensors import padded
from fsd_infer import FuzzyDecoder, Target, TreeShape, drafters
from fsd_infer.drafters import Drafter, DraftRequest, DraftSession, GraftedDrafter, LMDrafter, LookupDrafter
from fsd_infer.drafters.frontier import Frontier, Successors
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine.beams import BeamOptions
from fsd_infer.engine.beams.sampling import dynamic_width, width_probabilities
from tests.beam_toys import doubled, drafters_for
from tests.families import VOCAB, OracleDrafter, noisy_model, tell, tiny_head, tiny_model, tiny_prompts
from tests.published_blocks import tiny_target
from tests.published_heads import layout
from tests.simulated_device import SIM, SimulatedDevice
from tests.test_beams import target as target  # a fixture

SHAPE = TreeShape(depth=3, width=3, nodes=20)


def published(name: str) -> Callable[[Path], tuple[Target, Drafter]]:
    def made(directory: Path) -> tuple[Target, Drafter]:
        target = Target(tiny_target())
        return target, load_drafter(str(layout(name).write(directory / "head")), target, SHAPE)

    return made


def of_llama(kind: Callable[[Target], Drafter]) -> Callable[[Path], tuple[Target, Drafter]]:
    def made(directory: Path) -> tuple[Target, Drafter]:
        target = Target(doubled("llama"))
        return target, kind(target)

    return made


KINDS = {
    "head": of_llama(lambda target: tiny_head(target, SHAPE)),
    "head of fused layers": of_llama(lambda target: tiny_head(target, SHAPE, fused_layers=(0, 1))),
    "small LM": of_llama(lambda target: LMDrafter(Target(noisy_model("llama").double()), target, SHAPE)),
    "windows": of_llama(lambda target: LMDrafter(Target(doubled("mistral")), target, SHAPE)),
    **{name: published(name) for name in ("medusa", "hydra", "mlp speculator")},
}  # fmt: skip


def features_of(target: Target, text: Sequence[int]) -> Tensor:
    return target.features(torch.tensor([text]))[0]


def opened(target: Target, drafter: Drafter, texts: list[list[int]]) -> DraftSession:
    """A session that has read these texts."""
    session = drafter.start(torch.tensor([text[0] for text in texts]), DraftRequest(len(texts), 60))
    read = [features_of(target, text)[:-1] for text in texts]
    features = torch.nn.utils.rnn.pad_sequence(read, batch_first=True)
    tell(session, padded([text[1:] for text in texts]), features, torch.tensor([len(text) - 1 for text in texts]))
    return session


def children(target: Target, drafter: Drafter, text: list[int], path: Sequence[int] = ()) -> dict[int, float]:
    """What a drafter proposes after a text and drafts below it: tokens and log-probabilities."""
    tree = opened(target, drafter, [text]).draft(torch.tensor(text[-1:]))
    tokens, node = tree.tokens[0].tolist(), 0
    for token in path:
        node = next(child for child in tree.is_child[0, node].nonzero()[:, 0].tolist() if tokens[child] == token)
    log_q = tree.scores[0] - tree.scores[0, node]
    return {tokens[child]: float(log_q[child]) for child in tree.is_child[0, node].nonzero()[:, 0].tolist()}


def same(guess: Successors, wanted: dict[int, float]) -> None:
    assert guess[1] == sorted(wanted, key=lambda token: -wanted[token]) and len(wanted) == 3
    assert guess[0] == pytest.approx([wanted[token] for token in guess[1]], abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_successors_of_a_beam_are_those_of_its_text(kind: str, tmp_path: Path) -> None:
    """Below beams that the target has read or not, in rows of different lengths, before and after some are dropped."""
    target, drafter = KINDS[kind](tmp_path)
    texts = [[1, 2, 3, 1, 2, 3, 1], [2, 3]]
    session = opened(target, drafter, texts)

    def frontier(tokens: list[list[int]], parents: list[list[int]], read: list[int], below: list[list[int]]) -> Any:
        ends = [
            [features_of(target, text + path_of(row, node))[-1] for node in range(count)]
            for row, (text, count) in enumerate(zip(below, read))
        ]
        return Frontier(
            tokens,
            parents,
            list(map(len, below)),
            read,
            torch.nn.utils.rnn.pad_sequence(list(map(torch.stack, ends)), True),
        )

    def path_of(row: int, node: int) -> list[int]:
        path = []
        while node:
            path.insert(0, tokens[row][node])
            node = parents[row][node]
        return path

    # the root, two beams that are read, and two that are not; a row with one of each
    tokens, parents = [[1, 0, 2, 3, 1], [3, 1, 2]], [[0, 0, 0, 1, 1], [0, 0, 1]]
    beams = frontier(tokens, parents, [3, 2], texts)
    found = session.successors(beams, [[3, 4], [2]], 3)
    for row, nodes in enumerate([[3, 4], [2]]):
        for node, guess in zip(nodes, found[row], strict=True):
            same(guess, children(target, drafter, texts[row] + path_of(row, node)))
    best = found[0][0][1][0]  # a draft below a beam: from the drafter's own estimate
    tokens[0].append(best)
    parents[0].append(3)
    same(session.successors(beams, [[5], []], 3)[0][0], children(target, drafter, [*texts[0], 0, 3], [best]))

    # the target reads all nodes; the first row's text grows by a token, and node 2 is dropped
    session.follow_beams(beams, [[1, 3, 4, 5], [1, 2]], [1, 0])
    session.extend_on_host([[0], []])
    texts = [[*texts[0], 0], texts[1]]
    tokens, parents = [[0, 3, 1, best, 1, 2], [3, 1, 2, 0]], [[0, 0, 0, 1, 3, 2], [0, 0, 1, 2]]
    beams = frontier(tokens, parents, [4, 3], texts)
    for nodes in ([[5], [3]], [[4], []]):
        for row, guesses in enumerate(session.successors(beams, nodes, 3)):
            for node, guess in zip(nodes[row], guesses, strict=True):
                same(guess, children(target, drafter, texts[row] + path_of(row, node)))
    session.keep_rows(torch.tensor([1]))
    beams = Frontier(tokens[1:], parents[1:], [2], [3], beams.features[1:])
    tokens[1].append(1)
    parents[1].append(3)
    assert len(session.successors(beams, [[4]], 3)[0][0][1]) == 3


def test_a_drafter_below_one_text_leaves_beams_to_those_beside_it_and_is_named() -> None:
    target, prompts, lookup = Target(doubled("llama")), tiny_prompts(), LookupDrafter(VOCAB)
    options: dict[str, Any] = dict(num_beams=2, max_new_tokens=12, do_sample=False)
    alone = FuzzyDecoder(target, lookup).generate(prompts, **options)
    with pytest.warns(UserWarning, match="'oracle' drafts below one text only") as told:
        made = FuzzyDecoder(target, GraftedDrafter(OracleDrafter(target), lookup)).generate(prompts, **options)
    assert len(told) == 1 and made.sequences == alone.sequences
    assert made.stats.target_forwards == alone.stats.target_forwards


def test_beams_on_another_device_are_those_of_the_cpu() -> None:
    """A head with a part of the vocabulary, and a table beside it."""
    options: dict[str, Any] = dict(num_beams=3, max_new_tokens=12, do_sample=False, beams="depth=3,spread=1.5")

    def run(device: torch.device) -> tuple[list[list[int]], int]:
        target = Target(tiny_model("mistral").to(device))
        drafter = GraftedDrafter(tiny_head(target, draft_vocab_size=64), drafters.RecycleDrafter(VOCAB))
        made = FuzzyDecoder(target, drafter).generate(tiny_prompts(), **options)
        return made.sequences, made.stats.target_forwards

    wanted = run(torch.device("cpu"))
    with SimulatedDevice():
        assert run(SIM) == wanted


# sampled beams --------------------------------------------------------------------------------------------------------


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
    every = drafters_for(target)
    plain = FuzzyDecoder(target, every.pop("none"))
    expected = plain.generate(tiny_prompts(), seed=1, **options).sequences
    assert expected != plain.generate(tiny_prompts(), seed=2, **options).sequences
    for name in ("lookup", "reduced+lookup", "lm") if join_every else every:
        drafter = every[name]
        made = FuzzyDecoder(target, drafter).generate(tiny_prompts(), seed=1, **options)
        assert made.sequences == expected
        if name == "lookup" and join_every:
            # longest prompt, one answer, the beams of four steps, twice a round's nodes, and the spare slot
            slots = 21 + 24 + 4 * 4 + 2 * (3 * 4 + 4) + 1
            assert made.stats.cache_bytes == 4 * slots * target.cache_bytes_per_token
