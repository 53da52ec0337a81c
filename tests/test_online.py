"""Trees chosen while decoding: what is learned, under clocks that lie, and that no law changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_infer import EagleDrafter, FsdError, FuzzyDecoder, LMDrafter, NoDrafter, Target, TreeShape
from fsd_infer.cli.main import main
from fsd_infer.drafters import GraftedDrafter, LookupDrafter, RecycleDrafter
from fsd_infer.drafters.auto import AutoTree
from fsd_infer.drafters.eagle import EagleSession
from fsd_infer.drafters.estimates import KNOTS, PRIORS, RETRY, AutoMemory, Costs, Curve, LawKind, Prior
from fsd_infer.drafters.growth import TreeDrafter
from fsd_infer.drafters.loading import choose_trees, main_of
from fsd_infer.drafters.shape import AUTO, parse_tree
from tests.families import (
    VOCAB,
    noisy_model,
    recorded_drafts,
    reference,
    save_head,
    tiny_head,
    tiny_model,
    tiny_prompts,
)
from tests.tree_rounds import tree_of

# a machine and texts, simulated ---------------------------------------------------------------------------------------


class Machine:
    """A clock that a round moves on by what it costs, and by what else the machine does.

    Args:
        forward: seconds of a forward by number of nodes.
        depth: seconds of a depth of drafting.
        trouble: (round, seconds) -> seconds that the clock shows in their place.
    """

    def __init__(
        self, forward: Callable[[int], float], depth: float, trouble: Callable[[int, float], float] = lambda _, s: s
    ) -> None:
        self.forward, self.depth, self.trouble = forward, depth, trouble
        self.now, self.spent, self.round = 100.0, 0.0, 0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float) -> None:
        self.spent += seconds
        self.now += self.trouble(self.round, seconds)


def small_machine(nodes: int) -> float:
    return 8e-3 + 2e-3 * (nodes > 6) + 6e-4 * max(nodes - 6, 0)


def large_machine(nodes: int) -> float:
    return 8e-3 + 1e-5 * nodes


class Text:
    """Drafts that are right with the chance that the drafter gives them, on chains with one sibling a step."""

    def __init__(self, sure: float, seed: int = 0) -> None:
        self.sure, self.random = sure, random.Random(seed)

    def chances(self) -> tuple[float, float]:
        best = min(max(self.random.gauss(self.sure, 0.1), 0.05), 0.98)
        return best, 0.6 * (1.0 - best)

    def right(self, first: float, second: float) -> int:
        """Which of the two is right, 2 if none."""
        draw = self.random.random()
        return 0 if draw < first else 1 if draw < first + second else 2


def round_of(text: Text, machine: Machine, choice: AutoTree | TreeShape) -> int:
    """Drafts a chain with a sibling of each node, verifies it, and returns the tokens emitted."""
    steps: list[tuple[float, float]] = []
    depths = 0
    if isinstance(choice, AutoTree):
        choice.mark()
    if not isinstance(choice, AutoTree) or choice.expands_root():
        while True:
            depths += 1
            machine.takes(machine.depth)
            steps.append(text.chances())
            if isinstance(choice, TreeShape):
                if depths == choice.depth:
                    break
            elif depths == 12 or choice.expand(torch.tensor([[steps[-1]]]).log()) is None:
                break
    scores, parents, spine = [0.0], [0], 0
    for first, second in steps:
        scores += [scores[spine] + math.log(first), scores[spine] + math.log(second)]
        parents += [spine, spine]
        spine = len(scores) - 2
    if isinstance(choice, AutoTree):
        tree = tree_of(([0] * len(scores), parents, scores), vocab=1)
        kept = choice.keep(tree)[0].tolist() if steps else [0]
        choice.mark()
    else:
        kept = sorted(sorted(range(len(scores)), key=lambda n: -scores[n])[: choice.nodes])
    machine.takes(machine.forward(len(kept)))
    path = [0]
    for depth, (first, second) in enumerate(steps):
        child = 2 * depth + 1 + text.right(first, second)
        if child > 2 * depth + 2 or child not in kept:
            break
        path.append(child)
        if child == 2 * depth + 2:
            break
    if isinstance(choice, AutoTree):
        choice.mark()
    machine.takes(1e-3)
    if isinstance(choice, AutoTree):
        choice.end([[kept.index(node) for node in path]], [len(path) - 1], rows=1)
    machine.round += 1
    return len(path)


def speed(choice: AutoTree | TreeShape, machine: Machine, sure: float, rounds: int) -> float:
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
@pytest.mark.parametrize("forward", [small_machine, large_machine])
@pytest.mark.parametrize("sure", [0.3, 0.9])
def test_the_choice_is_as_fast_as_the_best_shape(forward: Callable[[int], float], sure: float, trouble: str) -> None:
    machine = Machine(forward, 6e-4, TROUBLES[trouble])
    choice = AutoTree(AutoMemory("cpu", clock=machine), 1, LawKind(), 48)
    speed(choice, machine, sure, 100)  # the first answers
    assert speed(choice, machine, sure, 400) >= 0.9 * best_speed(forward, sure)


def test_drafting_pauses_where_it_costs_more_than_the_target_and_is_tried_again() -> None:
    machine = Machine(small_machine, 0.02)
    choice = AutoTree(AutoMemory("cpu", clock=machine), 1, LawKind(), 48)
    speed(choice, machine, 0.5, 100)
    assert choice.paused
    before = machine.spent
    speed(choice, machine, 0.5, 2 * RETRY)
    tried = (machine.spent - before - 2 * RETRY * (small_machine(1) + 1e-3)) / 0.02
    assert 1 <= tried < 10, "once in so many rounds"


def test_nothing_is_drafted_beside_what_is_surely_right() -> None:
    """A side's chain of drafts: the surer it is, the less a head adds. What it leaves open counts."""
    choice = AutoTree(AutoMemory("cpu"), 1, LawKind(), 48)
    choice.known.trials = 99  # no trials
    for sure, drafts in ((0.99, False), (0.3, True)):
        chain = [0.0, *(depth * math.log(sure) for depth in range(1, 9))]
        choice._begin(1)
        choice.cover(tree_of(([0] * 9, [0, *range(8)], chain), vocab=1))
        assert choice.expands_root() == drafts
    choice._begin(1)
    choice.cover(tree_of(([0, 0], [0, 0], [0.0, math.log(0.99)]), vocab=1))
    assert choice.expands_root(), "nothing is known of what follows the one sure draft"


def test_costs_keep_what_is_known_of_them() -> None:
    costs, source = Costs(PRIORS["cpu"]), random.Random(0)
    for _ in range(300):
        nodes, depths = source.randrange(1, 30), source.randrange(0, 5)
        seconds = [source.choice((1e-5, 1e-3, 1.0, -5.0)) for _ in range(3)]
        costs.learn(nodes, seconds[0], depths, depths, seconds[1], seconds[2], depths > 0)
        curve = [costs.forward(n) for n in range(1, 200)]
        assert curve[0] == 1.0 and all(less <= more for less, more in pairwise(curve))
        assert costs.drafting(1, 1) > 0 and costs.rest(False) > 0
    fitted = Costs(PRIORS["cpu"])
    for _ in range(200):
        nodes = source.randrange(1, 30)
        fitted.learn(nodes, large_machine(nodes), 2, 3, 2e-3, 1e-3, True)
    assert fitted.forward(24) < 0.6 * (1 + sum(w * (b - a) for w, a, b in zip(PRIORS["cpu"].slopes, KNOTS, KNOTS[1:5])))


def test_the_curve_learns_what_the_drafter_is_wrong_about() -> None:
    curve, source = Curve(), random.Random(0)
    assert curve.chance(math.log(0.4), 1, True) == pytest.approx(0.4)
    assert Curve(tilt=1.0).chance(math.log(0.4), 1, True) > 0.6 and Curve(1.0).chance(math.log(0.4), 1, False) < 0.5
    assert curve.chance(math.nan, 1, True) == curve.chance(-math.inf, 1, True) == 0.0
    for _ in range(600):
        curve.learn(math.log(0.9), 2, True, source.random() < 0.45)  # too sure
        curve.learn(math.log(0.2), 2, True, source.random() < 0.4)  # too modest
    curve.begin_text()
    assert curve.chance(math.log(0.9), 2, True) == pytest.approx(0.45, abs=0.1)
    assert curve.chance(math.log(0.2), 2, True) == pytest.approx(0.4, abs=0.1)


# decoding -------------------------------------------------------------------------------------------------------------


class Adversary:
    """A clock that makes trees as different as it can, by how often it was read."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0

    def __call__(self) -> float:
        self.reads += 1
        self.now += (1e-4, 3.0, 1e-2, 1e-3)[(self.reads * 7919) % 11 % 4]
        return self.now


CHEAP = Prior((1e-3,) * len(KNOTS), (1e-3, 1e-4), (1e-3, 1e-3))  # so that even what a toy drafts is worth it


def make_drafter(kind: str) -> TreeDrafter | GraftedDrafter:
    target = Target(tiny_model("llama"))
    main = LMDrafter(Target(noisy_model("llama")), target) if "lm" in kind else tiny_head(target)
    return GraftedDrafter(main, LookupDrafter(VOCAB)) if "graft" in kind else main


@pytest.mark.parametrize("kind", ["head", "graft", "lm", "lm graft"])
@pytest.mark.parametrize("seed", [None, 3])
def test_exact_answers_stay_the_same_whatever_the_clock_says(kind: str, seed: int | None) -> None:
    drafter = make_drafter(kind)
    assert main_of(drafter) is not None and drafter.target is not None
    choose_trees(drafter)
    assert drafter.auto is not None
    drafter.auto.clock, drafter.auto.prior = (clock := Adversary()), CHEAP
    decoder, prompts = FuzzyDecoder(drafter.target, drafter), tiny_prompts((5, 13, 9, 21))
    expected = reference(drafter.target.model, prompts)
    sizes: set[int] = set()
    for count in (1, 4, 2, 1, 4):
        out = decoder.generate(prompts[:count], max_new_tokens=24, do_sample=False, seed=seed)
        assert out.sequences == expected[:count]
        assert out.stats.drafter["tree"] == AUTO and out.stats.trees is not None
        assert len(out.stats.trees.nodes) <= 23 * count
        sizes |= set(out.stats.trees.nodes)
    assert len(sizes) > 2 if seed is None else clock.reads == 0


@pytest.mark.parametrize("kind", ["head", "lm"])
def test_texts_sampled_with_a_seed_come_again(kind: str) -> None:
    drafter = choose_trees(make_drafter(kind))
    assert drafter.target is not None and drafter.auto is not None
    drafter.auto.clock, drafter.auto.prior = Adversary(), CHEAP
    decoder = FuzzyDecoder(drafter.target, drafter)
    options: dict[str, Any] = dict(rule="tilted:2", max_new_tokens=24, temperature=1.0, do_sample=True, seed=3)
    first = decoder.generate(tiny_prompts((7,)), **options).sequences
    decoder.generate(tiny_prompts((19,)), "tilted:2", max_new_tokens=24)  # what this one teaches is not used
    assert decoder.generate(tiny_prompts((7,)), **options).sequences == first


@pytest.mark.parametrize("kind", ["head", "lm"])
def test_the_law_stays_the_targets_whatever_the_clock_says(kind: str) -> None:
    """Test the third token of sampled answers. Trees depend on a clock and on earlier acceptances.

    The length of a small LM's sampled chain also depends on its own draws.
    """
    drafter = choose_trees(make_drafter(kind))
    target, prompt = drafter.target, tiny_prompts((7,))[0]
    rows, seeds = (10, 400) if kind == "head" else (40, 100)
    assert target is not None and drafter.auto is not None
    drafter.auto.clock, drafter.auto.prior = Adversary(), CHEAP
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.7, "top_k": 0}
    with torch.inference_mode():
        law = torch.ones(1, dtype=torch.float64)
        texts = torch.tensor([prompt])
        for _ in range(2):
            chances = (target.model(texts).logits[:, -1].double() / 0.7).softmax(-1)
            law = (law[:, None] * chances).flatten()
            texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
        expected = sum(
            weights @ (target.model(part).logits[:, -1].double() / 0.7).softmax(-1)
            for weights, part in zip(law.split(500), texts.split(500))
        )
    assert isinstance(expected, torch.Tensor)
    seen, nodes = torch.zeros(VOCAB, dtype=torch.float64), set[int]()
    for seed in range(seeds):
        torch.manual_seed(seed)  # a request with a seed of its own reads no clock
        made = FuzzyDecoder(target, drafter).generate([prompt] * rows, **options)
        seen += torch.bincount(torch.tensor([answer[2] for answer in made.sequences]), minlength=VOCAB)
        assert made.stats.trees is not None
        nodes |= set(made.stats.trees.nodes)
    assert len(nodes) > 2, "of all sizes"
    counts = expected * seen.sum()
    surprise = float(((seen - counts) ** 2 / counts).sum())
    assert surprise < VOCAB + 5 * math.sqrt(2 * VOCAB), "chi-square of VOCAB - 1 degrees of freedom"


# names ----------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    drafter = make_drafter("head")
    twice = GraftedDrafter(GraftedDrafter(drafter, LookupDrafter(VOCAB)), RecycleDrafter(VOCAB))
    assert main_of(twice) is drafter and choose_trees(twice) is twice and twice.auto is not None
    assert isinstance(drafter, EagleDrafter) and drafter.auto is None and twice.nodes == drafter.shape.nodes, (
        "one choice for all"
    )
    choose_trees(drafter)
    assert drafter.reshaped(TreeShape(1, 1, 2)).auto is None, "a tree that is asked for is what is used"
    assert drafter.target is not None
    plain = FuzzyDecoder(drafter.target, NoDrafter(VOCAB))
    lookup = plain.load_drafter("lookup", "auto")
    assert isinstance(lookup, LookupDrafter) and lookup.auto is None
    assert parse_tree("auto") == AUTO and parse_tree(None) is None
    assert parse_tree("2,2,4") == TreeShape(2, 2, 4) and parse_tree("2,2,4,0.5") == TreeShape(2, 2, 4, stop_below=0.5)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: choose_trees(NoDrafter(VOCAB)), "auto"),
        (lambda: plain.load_drafter("lookup", "automatic"), "automatic"),
        (lambda: parse_tree("car"), "auto"),
        (lambda: parse_tree("2,2,4,high"), "stop_below"),
        (lambda: TreeShape(2, 2, 4, stop_below=1.0), "stop_below"),
        (lambda: TreeShape(2, 2, 4, stop_below=-0.1), "stop_below"),
    ]
    for make, words in refused:
        with pytest.raises(FsdError, match=words):
            make()


def test_warmup_reads_a_heads_files_and_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = make_drafter("head")
    assert isinstance(drafter, EagleDrafter)
    drafter.target.model.save_pretrained(tmp_path / "target")
    save_head(tmp_path / "head", drafter.head, drafter.target.fingerprint())
    names = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "head"), "--device", "cpu"]
    assert main(["warmup", *names, "--dtype", "fp32"]) == 0
    parts = [part.split()[0] for part in capsys.readouterr().err.splitlines()[-1].split(", ")]
    assert parts == ["compile", "load", "pack"]
    decoder = FuzzyDecoder.from_pretrained(names[1], names[3], device="cpu", dtype=torch.float32)
    assert decoder.drafter.auto is not None, "the default on a CPU"


def test_drafting_stops_where_depth_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter("head")
    assert isinstance(drafter, EagleDrafter)
    expected, trees = reference(drafter.target.model, tiny_prompts()), {}
    for stop in (0.0, 1e-30, 0.5, 0.99):
        with monkeypatch.context() as patch:
            drawn = recorded_drafts(EagleSession, lambda session: None, patch)
            decoder = FuzzyDecoder(drafter.target, drafter.reshaped(TreeShape(4, 3, 20, stop_below=stop)))
            assert decoder.generate(tiny_prompts(), max_new_tokens=24, do_sample=False).sequences == expected
        trees[stop] = [scores for _, tree in drawn for scores in tree.scores.tolist()]
    assert trees[1e-30] == trees[0.0], "a threshold that is never reached changes nothing"
    assert min(map(len, trees[0.99])) == 4, "the root and its children"
    short = [scores for scores in trees[0.5] if len(scores) == 4]
    assert all(sum(map(math.exp, scores[1:])) < 0.5 for scores in short)
    assert len(trees[0.5]) >= len(trees[0.0])
