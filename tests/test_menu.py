"""Trees chosen among recorded shapes: what a round forecasts, what is chosen from it, and that no answer changes."""

from __future__ import annotations

import random
from functools import cache
from statistics import fmean
from typing import Any

import pytest
import torch

from fsd_infer import Target
from fsd_infer.drafters import Drafter, DraftRequest, GraftedDrafter, LMDrafter, LookupDrafter
from fsd_infer.drafters.forced import ForcedDrafter
from fsd_infer.drafters.loading import choose_trees
from fsd_infer.engine import Outcome, Request, decode, loop
from fsd_infer.engine.callback import Callback
from fsd_infer.engine.state import DecodeState
from fsd_infer.rules import parse_rule
from fsd_infer.trees.costs import PRIORS
from fsd_infer.trees.estimates import PolicyStore, RuleProfile
from fsd_infer.trees.menu import MenuPolicy
from fsd_infer.trees.policy import TreeReport
from fsd_infer.trees.shape import MENU, NO_TREE, TreeShape
from tests.families import VOCAB, tiny_head, tiny_model
from tests.sim_graphs import SimRecorder
from tests.simulated_device import SIM, SimulatedDevice, on
from tests.test_device_waits import CPU, PROMPTS, forced, target

NEW = 10
KINDS = ["eagle", "lm", "eagle+lookup", "guided eagle"]
LAGGING = ["eagle", "lm"]
GROWING = ["guided eagle", "eagle+lookup"]  # whose chains or host trees have further shapes
SMALL = (NO_TREE, TreeShape(1, 3, 4), TreeShape(2, 2, 5), TreeShape(3, 3, 8))  # recorded in seconds here


@cache
def drafter(kind: str, device: torch.device, chosen: bool) -> Drafter:
    """A drafter of its own, since a choice changes it."""
    if kind.startswith("lm"):
        small = Target(tiny_model("llama", seed=1, num_hidden_layers=1).to(device))
        small.check_lm_head()
        made: Drafter = LMDrafter(small, target(device))
    else:
        made = tiny_head(target(device), TreeShape(depth=2, width=3, nodes=7), layout="eagle")
    if chosen:
        made.largest = {"cuda": SMALL[-1]}  # type: ignore[attr-defined]
        made.all_shapes = SMALL[1:] if kind == "lm" else SMALL  # type: ignore[attr-defined]
    if kind.endswith("+lookup"):
        made = GraftedDrafter(made, LookupDrafter(VOCAB), 12)
    if chosen:
        choose_trees(made, target(device))
    return ForcedDrafter(made, forced, VOCAB) if kind.startswith("guided") else made


class Shapes(Callback):
    """Notes the shape of every round's tree."""

    reads_tensors = False

    def __init__(self) -> None:
        self.seen: list[TreeShape | None] = []

    def on_start(self, state: DecodeState) -> None:
        self.state = state

    def on_phase(self, phase: str) -> None:
        if phase == "start":
            self.seen.append(self.state.session.shape)


def run(kind: str, rule: str, greedy: bool, where: torch.device, seed: int | None = None) -> tuple[Outcome, Shapes]:
    shapes, generator = Shapes(), None if seed is None else torch.Generator(device=where).manual_seed(seed)
    request = Request(PROMPTS, NEW, greedy, generator=generator, callbacks=[shapes])
    made = drafter(kind, where, where == SIM)
    with on(where):
        return decode(target(where), made, parse_rule(rule), request), shapes


@pytest.mark.filterwarnings("ignore:lm samples its drafts")
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_chooses_among_recorded_shapes_and_answers_as_a_cpu_does(
    kind: str, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shape is recorded and timed at the first request. Later rounds read nothing on the host but the report, and
    launch at most six operations besides their graph.
    """
    spent: list[tuple[int, int]] = []
    process = loop.handle_report

    def noted(*given: Any) -> Any:
        spent.append((device.launches, len(device.waits)))
        return process(*given)

    wanted = run(kind, "exact", True, CPU)[0].sequences
    recorder, models = SimRecorder(device), [target(SIM), drafter(kind, SIM, True)]
    for model in models:
        model.use_graphs(recorder)  # type: ignore[attr-defined]
    try:
        outcome, _ = run(kind, "exact", True, SIM)
        made, menu = len(recorder.graphs), drafter(kind, SIM, True).menu
        assert outcome.sequences == wanted and made >= len(menu) > 2
        monkeypatch.setattr(loop, "handle_report", noted)
        before = recorder.replayed
        outcome, shapes = run(kind, "exact", True, SIM)
        assert outcome.sequences == wanted and set(shapes.seen) <= set(menu)  # which of them depends on the machine
        rounds = len(spent) - 1
        assert [waits - spent[0][1] for _, waits in spent] == list(range(len(spent)))
        if kind not in GROWING:
            assert len(recorder.graphs) == made and recorder.replayed - before == rounds + (kind in LAGGING)
            assert max(after[0] - before[0] for before, after in zip(spent[1:], spent[2:])) <= 6
        stats, sizes = outcome.stats.trees, [0 if shape is None else shape.max_nodes for shape in shapes.seen]
        assert stats is not None and stats.nodes == sizes[: len(stats.nodes)]
        if kind == "eagle":  # a seed reads no clock, so texts come again
            texts = [run(kind, "tilted:1", False, SIM, 3)[0].sequences for _ in range(2)]
            assert texts[0] == texts[1] != wanted
    finally:
        for model in models:
            model.use_graphs(None)  # type: ignore[attr-defined]


# what a round forecasts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_bonus", [0.0, 1.0])
def test_a_round_forecasts_what_other_shapes_would_draft(draft_bonus: float) -> None:
    """From the candidates of the largest tree, the same as a round of each other shape says of its own tree."""
    shapes = [TreeShape(3, 3, 12), TreeShape(3, 3, 5), TreeShape(2, 3, 9), TreeShape(1, 3, 4), TreeShape(3, 1, 4)]
    made = tiny_head(target(CPU), shapes[0])
    request = DraftRequest(2, 20, draft_bonus=draft_bonus, menu=shapes)
    text = torch.tensor([[1, 2, 3], [7, 8, 9]])
    session = made.start(text[:, 0], request)
    features = torch.randn(2, 3, made.target.hidden_size, generator=torch.Generator().manual_seed(0))
    session.extend(text, features, torch.tensor([3, 3]))
    found = []
    for shape in shapes:
        session.shape = shape
        tree = session.draft(text[:, -1])
        assert tree.forecast is not None and tree.forecast.shape == (2, len(shapes) + 1)
        found.append(tree.forecast)
        if not draft_bonus:  # a node's chance is then its q
            torch.testing.assert_close(tree.forecast[:, shapes.index(shape)], tree.scores[:, 1:].exp().sum(1))
    for place in range(len(shapes)):
        near = 0.2 if draft_bonus else 1e-5  # under a draft bonus a node's chance depends on what lies below it
        torch.testing.assert_close(found[0][:, place], found[place][:, place], rtol=near, atol=1e-5)
    session.shape = NO_TREE
    assert session.draft(text[:, -1]).tokens.shape == (2, 1)


# what is chosen from it -----------------------------------------------------------------------------------------------

SECONDS = [5.28e-3 + 0.6e-3 * shape.depth + 8e-6 * shape.nodes for shape in MENU]  # an 8B model's on an H200


def rounds_of(policy: MenuPolicy, sure: float, said: float, count: int, draws: random.Random) -> tuple[float, float]:
    """Decode rounds of a text whose drafts survive a depth with chance ``sure`` where the drafter says ``said``.

    Returns:
        tokens and seconds.
    """

    def drafts(shape: TreeShape, chance: float) -> list[float]:
        wide = min(1.0, 0.7 + 0.1 * shape.nodes / (shape.depth or 1))  # a narrow tree misses more
        return [(chance * wide) ** depth for depth in range(1, shape.depth + 1)]

    tokens = spent = 0.0
    for _ in range(count):
        shape = policy.choose(1)
        alive, accepted = True, 0
        for before, chance in zip([1.0, *drafts(shape, sure)], drafts(shape, sure)):
            alive = alive and draws.random() < chance / before
            accepted += alive
        known = [sum(drafts(one, said)[: shape.depth]) if shape.depth else float("nan") for one in MENU]
        policy.update(TreeReport(shape, [accepted], forecasts=[[*known, *(drafts(shape, said)[-1:] or known[-1:])]]))
        tokens, spent = tokens + 1 + accepted, spent + SECONDS[MENU.index(shape)]
    return tokens, spent


def best_of(sure: float) -> float:
    """Return the tokens per second of the best fixed shape."""
    rates = []
    for shape, seconds in zip(MENU, SECONDS):
        wide = min(1.0, 0.7 + 0.1 * shape.nodes / (shape.depth or 1))
        rates.append((1 + sum((sure * wide) ** depth for depth in range(1, shape.depth + 1))) / seconds)
    return max(rates)


def policy_of(store: PolicyStore) -> MenuPolicy:
    policy = MenuPolicy(store, 1, RuleProfile(0.0, "exact"), MENU)
    policy.time(SECONDS)
    return policy


@pytest.mark.parametrize("said", [0.9, 1.3])
@pytest.mark.parametrize("sure", [0.03, 0.3, 0.75])
def test_the_choice_is_as_fast_as_the_best_shape(sure: float, said: float) -> None:
    """Whether or not the drafter is as sure as it is right."""
    store, draws, rates = PolicyStore(PRIORS["cuda"]), random.Random(0), []
    for _ in range(12):
        tokens, spent = rounds_of(policy_of(store), sure, min(sure * said, 0.97), 150, draws)
        rates.append(tokens / spent)
    assert fmean(rates[3:]) > 0.93 * best_of(sure)


def test_a_hopeless_passage_does_not_silence_drafts_for_long() -> None:
    policy, draws = policy_of(PolicyStore(PRIORS["cuda"])), random.Random(0)
    rounds_of(policy, 0.02, 0.02, 200, draws)
    assert policy.stats.nodes[-50:].count(1) > 30, "hardly any drafts"
    tokens, spent = rounds_of(policy, 0.8, 0.8, 200, draws)
    assert tokens / spent > 0.85 * best_of(0.8)
