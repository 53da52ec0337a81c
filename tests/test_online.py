"""Trees chosen while decoding: what is learned, under clocks that lie, and that no distribution changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from statistics import mean
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from fsd_infer import FsdError, FuzzyDecoder, Target
from fsd_infer.drafters import (
    Drafter,
    EagleDrafter,
    GraftedDrafter,
    LMDrafter,
    LookupDrafter,
    NoDrafter,
    RecycleDrafter,
)
from fsd_infer.drafters.loading import choose_trees, main_of
from fsd_infer.trees.costs import PRIORS, CostPrior
from fsd_infer.trees.estimates import PolicyStore, RuleProfile
from fsd_infer.trees.policy import TRIALS, PricePolicy, RoundSeconds, TreeReport, policy_store
from fsd_infer.trees.priced_growth import PricedGrowth
from fsd_infer.trees.prices import KNOTS
from fsd_infer.trees.shape import AUTO, TreeShape, parse_tree
from tests.families import VOCAB, drafter_of, reference, tiny_model, tiny_prompts
from tests.tree_rounds import tree_of

# a machine and texts, simulated ---------------------------------------------------------------------------------------


class Machine:
    """A clock that a round moves on by what it costs, and by what else the machine does.

    Args:
        forward: seconds of a forward by number of nodes.
        depth: seconds of a depth of drafting.
        reading: seconds in which the drafter reads accepted tokens.
        trouble: (round, seconds) -> seconds that the clock shows in their place.
    """

    def __init__(
        self,
        forward: Callable[[int], float],
        depth: float,
        trouble: Callable[[int, float], float] = lambda _, s: s,
        reading: float = 0.0,
    ) -> None:
        self.forward, self.depth, self.trouble, self.reading = forward, depth, trouble, reading
        self.now, self.spent, self.round = 100.0, 0.0, 0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float) -> None:
        self.spent += seconds
        self.now += self.trouble(self.round, seconds)


def small_machine(nodes: int) -> float:
    return 8e-3 + 2e-3 * (nodes > 6) + 6e-4 * max(nodes - 6, 0)


def blocks_machine(nodes: int) -> float:
    return 4.1e-3 + 6e-4 * (nodes - 1)


def large_machine(nodes: int) -> float:
    return 8e-3 + 1e-5 * nodes


class Text:
    """Drafts that are right with the chance that the drafter gives them, on chains with one sibling a step."""

    def __init__(self, sure: float, seed: int = 0, sibling: float = 0.6) -> None:
        self.sure, self.random, self.sibling = sure, random.Random(seed), sibling

    def chances(self) -> tuple[float, float]:
        best = min(max(self.random.gauss(self.sure, 0.1), 0.05), 0.98)
        return best, self.sibling * (1.0 - best)

    def right(self, first: float, second: float) -> int:
        """Which of the two is right, 2 if none."""
        draw = self.random.random()
        return 0 if draw < first else 1 if draw < first + second else 2


def policy_of(store: PolicyStore) -> PricePolicy:
    return PricePolicy(store, 1, RuleProfile(), TreeShape(12, 2, 48))


def round_of(text: Text, machine: Machine, choice: PricePolicy | TreeShape) -> int:
    """Drafts a chain with a sibling of each node, verifies it, and returns the tokens emitted."""
    steps: list[tuple[float, float]] = []
    shape, growth, reads = choice, None, True
    if isinstance(choice, PricePolicy):
        shape = choice.choose(1)
        growth, reads = PricedGrowth(shape, 1), choice.state.trials < TRIALS  # texts wait in pauses
    times = [machine()]
    goes_on = growth is None or growth.starts()
    while goes_on:
        machine.takes(machine.depth)
        steps.append(text.chances())
        if len(steps) == shape.depth:
            break
        goes_on = growth is None or growth.expand(torch.tensor([[steps[-1]]]).log()) is not None
    scores, parents, spine = [0.0], [0], 0
    for first, second in steps:
        scores += [scores[spine] + math.log(first), scores[spine] + math.log(second)]
        parents += [spine, spine]
        spine = len(scores) - 2
    if growth is None:
        kept = sorted(sorted(range(len(scores)), key=lambda n: -scores[n])[: shape.nodes])
    else:
        tree = tree_of(([0] * len(scores), parents, scores), vocab=1)
        kept = growth.choose(tree)[0].tolist() if steps else [0]
    times.append(machine())
    machine.takes(machine.forward(len(kept)))
    path = [0]
    for depth, (first, second) in enumerate(steps):
        child = 2 * depth + 1 + text.right(first, second)
        if child > 2 * depth + 2 or child not in kept:
            break
        path.append(child)
        if child == 2 * depth + 2:
            break
    times.append(machine())
    machine.takes(1e-3 + (machine.reading if steps or reads else 0.0))
    if growth is not None and isinstance(choice, PricePolicy):
        seconds = RoundSeconds(times[1] - times[0], times[2] - times[1], machine() - times[2])
        kept_path = [kept.index(node) for node in path]
        choice.update(TreeReport(shape, [len(path) - 1], growth=growth, paths=[kept_path], seconds=seconds))
    machine.round += 1
    return len(path)


def speed(choice: PricePolicy | TreeShape, machine: Machine, sure: float, rounds: int) -> float:
    """Tokens per true second."""
    text, spent = Text(sure), machine.spent
    return sum(round_of(text, machine, choice) for _ in range(rounds)) / (machine.spent - spent)


SHAPES = [TreeShape(d, 2, n) for d in (1, 2, 3, 4, 6, 8, 12) for n in (2, 4, 6, 9, 12, 16, 24) if n <= 2 * d + 1]


@cache
def best_speed(forward: Callable[[int], float], sure: float) -> float:
    return max(speed(shape, Machine(forward, 6e-4), sure, 400) for shape in SHAPES)


TROUBLES: dict[str, Callable[[int, float], float]] = {
    "quiet": lambda _, seconds: seconds,
    "a busy thread": lambda round, seconds: seconds * (3.0 if round // 7 % 2 else 1.0),
    "a noisy one": lambda round, seconds: seconds * math.exp(0.4 * math.sin(12.9898 * round * seconds * 1e4)),
    "a stall of a second": lambda round, seconds: seconds + (1.0 if round % 40 == 0 else 0.0),
    "a clock that jumps": lambda round, seconds: seconds + (3600.0 if round % 50 == 7 else 0.0) * (-1) ** (round // 50),
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize(("forward", "sure"), [(small_machine, 0.9), (large_machine, 0.3)])
def test_the_choice_is_as_fast_as_the_best_shape(forward: Callable[[int], float], sure: float, trouble: str) -> None:
    machine = Machine(forward, 6e-4, TROUBLES[trouble])
    choice = policy_of(PolicyStore(PRIORS["cpu"], machine))
    speed(choice, machine, sure, 100)  # the first answers
    assert speed(choice, machine, sure, 400) >= 0.9 * best_speed(forward, sure)


@pytest.mark.parametrize(
    ("of_node", "of_draft", "sure"), [(0.3, 0.6, 0.6), (0.3, 0.6, 0.2), (0.3, 0.1, 0.2), (0.15, 0.6, 0.6)]
)
def test_a_machine_unlike_the_assumed_one_is_found_out(of_node: float, of_draft: float, sure: float) -> None:
    """Where drafts lose time, the first eight answers take hardly longer than without: what was assumed hid it."""
    machine = Machine(lambda nodes: 5e-3 * (1 + of_node * (nodes - 1)), 2e-3 * of_draft, reading=3e-3 * of_draft)
    store, tokens = PolicyStore(PRIORS["amx blocks"], machine), 0
    for number in range(8):
        text, choice = Text(sure, number, sibling=0.15), policy_of(store)
        tokens += sum(round_of(text, machine, choice) for _ in range(60))
    assert tokens / machine.spent >= 0.9 / 6e-3  # of the speed without drafts


@pytest.mark.parametrize("kinds", [(0.3,), (0.7,), (0.3, 0.3, 0.3, 0.3, 0.9)])
def test_hard_texts_do_not_silence_the_drafts_of_easy_ones(kinds: tuple[float, ...]) -> None:
    """Drafts that cost more than they bring pause, and come back within the first rounds of a text where they pay."""
    machine = Machine(blocks_machine, 7.5e-4, reading=8e-4)
    store = PolicyStore(PRIORS["avx512 blocks"], machine)
    speeds: dict[float, list[float]] = {kind: [] for kind in kinds}
    for number in range(30):
        kind, start = kinds[number % len(kinds)], machine.spent
        text, choice = Text(kind, number, sibling=0.15), policy_of(store)
        tokens = sum(round_of(text, machine, choice) for _ in range(60))
        speeds[kind].append(tokens / (machine.spent - start))
    for kind, each in speeds.items():
        alone = 1.0 / (machine.forward(1) + 1e-3)  # without drafts
        fixed, text = Machine(blocks_machine, 7.5e-4, reading=8e-4), Text(kind, sibling=0.15)
        tokens = sum(round_of(text, fixed, TreeShape(3, 2, 4)) for _ in range(600))
        best = max(alone, tokens / fixed.spent)
        assert mean(each[len(each) // 2 :]) >= 0.95 * best


# decoding -------------------------------------------------------------------------------------------------------------


class Adversary:
    """A clock that makes trees as different as it can, by how often it was read."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0

    def __call__(self) -> float:
        self.reads += 1
        self.now += (1e-4, 3.0, 1e-2, 1e-3)[(self.reads * 7919) % 11 % 4]
        return self.now


CHEAP = CostPrior((1e-3,) * len(KNOTS), (1e-3, 1e-4), (1e-3, 1e-3))  # so that even what a toy drafts is worth it


def adversary_of(drafter: Drafter, target: Target) -> Adversary:
    """Give a drafter's policy such a clock, and return it."""
    store = policy_store(drafter.learner, target, drafter.learner.relative_cost)
    store.clock, store.prior = (clock := Adversary()), CHEAP
    return clock


@pytest.mark.parametrize(("kind", "seed"), [
    *((kind, None) for kind in ("head+lookup", "lm", "lookup", "lookup+recycle")),
    *((kind, 3) for kind in ("head+lookup", "lm")),
])  # fmt: skip
def test_exact_answers_stay_the_same_whatever_the_clock_says(kind: str, seed: int | None) -> None:
    target = Target(tiny_model("llama"))
    drafter = choose_trees(drafter_of(kind, target), target)
    assert main_of(drafter) is not None
    clock = adversary_of(drafter, target)
    decoder, prompts = FuzzyDecoder(target, drafter), tiny_prompts((5, 13, 9, 21))
    expected = reference(target.model, prompts, max_new_tokens=14)
    sizes: set[int] = set()
    for count in (1, 4, 2):
        out = decoder.generate(prompts[:count], max_new_tokens=14, do_sample=False, seed=seed)
        assert out.sequences == expected[:count]
        assert out.stats.drafter["tree"] == AUTO and out.stats.trees is not None
        assert len(out.stats.trees.nodes) <= 13 * count
        sizes |= set(out.stats.trees.nodes)
    assert len(sizes) > 1 if seed is None else clock.reads == 0


@pytest.mark.parametrize("kind", ["head", "lm", "lookup+recycle"])
def test_texts_sampled_with_a_seed_come_again(kind: str) -> None:
    target = Target(tiny_model("llama"))
    drafter = choose_trees(drafter_of(kind, target), target)
    adversary_of(drafter, target)
    decoder = FuzzyDecoder(target, drafter)
    options: dict[str, Any] = dict(rule="tilted:2", max_new_tokens=24, temperature=1.0, do_sample=True, seed=3)
    first = decoder.generate(tiny_prompts((7,)), **options).sequences
    decoder.generate(tiny_prompts((19,)), "tilted:2", max_new_tokens=24)  # what this one teaches is not used
    assert decoder.generate(tiny_prompts((7,)), **options).sequences == first


@pytest.mark.usefixtures("read_together")
@pytest.mark.parametrize(("rule", "by_menu"), [("exact:block=false", True), ("exact", True), ("exact", False)])
def test_the_distribution_stays_the_targets_whatever_the_clock_says(rule: str, by_menu: bool) -> None:
    """Test the third token of sampled answers against enumeration over a vocabulary of eight.

    The size of a small LM's tree, and the length of its chain, depend on a clock, on earlier acceptances and on draws,
    or by a menu on forecasts.
    """
    target, prompt = Target(tiny_model("llama", scale=2.0, vocab_size=8)), [1, 2, 3, 4, 5, 6, 7]
    small = LMDrafter(Target(tiny_model("llama", seed=3, scale=2.0, vocab_size=8)), target)
    drafter = choose_trees(small, target)
    adversary_of(drafter, target)
    drafter.menu = small.shapes if by_menu else ()  # as on a device
    options: dict[str, Any] = {"rule": rule, "max_new_tokens": 3, "do_sample": True, "temperature": 0.7, "top_k": 0}
    seen, nodes = torch.zeros(8, dtype=torch.float64), set[int]()
    for seed in range(20):
        torch.manual_seed(seed)  # a request with a seed of its own reads no clock
        answers = FuzzyDecoder(target, drafter).generate([prompt] * 40, **options)
        seen += torch.bincount(torch.tensor([answer[2] for answer in answers.sequences]), minlength=8)
        nodes |= set(answers.stats.trees.nodes)
    assert len(nodes) > 1, "of several sizes"
    texts = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    with torch.inference_mode():
        logits = target.model(torch.cat([torch.tensor([prompt]).expand(64, -1), texts], 1)).logits[:, 6:].double()
    distribution = (logits / 0.7).softmax(-1)
    chances = distribution[:, 0].gather(1, texts[:, :1]) * distribution[:, 1].gather(1, texts[:, 1:])
    assert chisquare(seen, seen.sum() * (chances * distribution[:, 2]).sum(0)).pvalue > 1e-6


# names ----------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    target = Target(tiny_model("llama"))
    drafter = drafter_of("head", target)
    twice = GraftedDrafter(GraftedDrafter(drafter, LookupDrafter(VOCAB)), RecycleDrafter(VOCAB))
    assert main_of(twice) is drafter and choose_trees(twice, target) is twice, "one choice for all"
    assert isinstance(drafter, EagleDrafter) and twice.bounds is not None and drafter.bounds is None
    plain = FuzzyDecoder(target, NoDrafter(VOCAB))
    assert parse_tree("2,2,4,0.5") == TreeShape(2, 2, 4, stop_below=0.5)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: choose_trees(NoDrafter(VOCAB), target), "auto"),
        (lambda: plain.load_drafter("lookup", "automatic"), "automatic"),
        (lambda: parse_tree("2,2,4,high"), "stop_below"),
        (lambda: TreeShape(2, 2, 4, stop_below=1.0), "stop_below"),
    ]
    for make, words in refused:
        with pytest.raises(FsdError, match=words):
            make()
