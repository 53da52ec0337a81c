"""Choosing a tree by measurement, and drafting less deep where more is not worth it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from fsd_infer import EagleDrafter, FsdError, FuzzyDecoder, NoDrafter, Target, TreeShape
from fsd_infer.cli.main import main
from fsd_infer.drafters import GraftedDrafter, LookupDrafter, RecycleDrafter
from fsd_infer.heads.checkpoint import save_head
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.tuning import autotune
from fsd_infer.tuning.autotune import calibration_prompts, head_of, parse_tree, tune
from fsd_infer.tuning.shapes import BATCHES, DEPTHS, STOPS, Candidates, Costs, best_by_batch, best_shape, rate
from tests.families import VOCAB, reference, tiny_model, tiny_prompts


def binary(best: float, second: float, depth: int) -> Candidates:
    """A full binary tree whose siblings have these chances."""
    scores, parents, level = [0.0], [0], [0]
    for _ in range(depth):
        new = []
        for parent in level:
            for chance in (best, second):
                new.append(len(scores))
                scores.append(scores[parent] + math.log(chance))
                parents.append(parent)
        level = new
    return Candidates(scores, parents)


def test_expected_drafts_of_smaller_trees() -> None:
    tree = binary(0.5, 0.25, depth=3)
    wide, chain = tree.growth(2), tree.growth(1)
    assert wide[0].expected == pytest.approx([0, 0.5, 0.75])
    assert chain[2].expected == pytest.approx([0, 0.5, 0.75, 0.875]), "a chain"
    # two depths: .5, .25 and their children .25, .125, .125, .0625
    assert wide[1].expected == pytest.approx([0, 0.5, 0.75, 1.0, 1.125, 1.25, 1.3125])
    # the third depth expands two of the second's four nodes: .25 and the first .125
    assert wide[2].expected[-1] == pytest.approx(1.3125 + 0.75 * (0.25 + 0.125))
    assert [depth.reach for depth in wide[:3]] == pytest.approx([0.75, 0.25 + 0.125, 0.125 + 0.0625])
    assert wide[-1].reach == 0 and wide[-1].expected == wide[2].expected, "the recorded tree ends at depth 3"


SIZES = (1, 2, 4, 8, 16)


def costs(forward: float, per_node: float, level: float) -> Costs:
    return Costs({n: forward + per_node * n for n in SIZES}, {1: level, 2: level}, fixed=0.0)


def test_shape_follows_the_costs() -> None:
    trees = [binary(0.7, 0.2, depth=8)]
    free = best_shape(costs(1.0, 0.0, 0.0), trees)
    assert (free.depth, free.width, free.nodes) == (8, 2, 16), "where nothing more costs anything, take all"
    nodes = best_shape(costs(1.0, 1.0, 0.0), trees)
    assert nodes.nodes < 8, "where every node costs a forward, few nodes"
    slow = best_shape(costs(1.0, 0.0, 2.0), trees)
    assert slow.depth == 1, "where drafting costs more than the target, one depth"
    hopeless = best_shape(costs(1.0, 0.1, 0.1), trees, correction=0.01)
    assert (hopeless.depth, hopeless.nodes) == (1, 2)


def test_chosen_shape_is_the_best_of_all() -> None:
    trees, prices = [binary(0.7, 0.2, depth=8), binary(0.4, 0.3, depth=8)], costs(1.0, 0.03, 0.1)
    chosen = best_shape(prices, trees, correction=0.8)

    def of(shape: TreeShape) -> float:
        return rate(prices, [tree.growth(shape.width) for tree in trees], shape, 0.8)

    every = [
        TreeShape(d, w, n, stop)
        for d in range(1, 9)
        for w in (1, 2)
        for n in range(d + 1, 17)
        for stop in STOPS
        if n <= 1 + TreeShape(d, w, 2).candidates
    ]
    assert of(chosen) == pytest.approx(max(map(of, every)))


def test_rate_of_a_shape_that_stops_where_it_is_not_worth_it() -> None:
    sure, unsure = binary(0.8, 0.1, depth=3), binary(0.3, 0.1, depth=3)
    prices, grown = costs(1.0, 0.1, 0.5), [sure.growth(2), unsure.growth(2)]
    # 0.4 is the reach of the second's first depth: it stops there, with 3 nodes instead of 5
    tokens = (1 + 0.8 + 0.64 + 0.1 + 0.08) + (1 + 0.3 + 0.1)
    seconds = (1.5 + 2 * 0.5) + (1.3 + 0.5)
    assert rate(prices, grown, TreeShape(2, 2, 5, stop_below=0.5)) == pytest.approx(tokens / seconds)
    deep = (1 + 0.8 + 0.64 + 0.1 + 0.08) + (1 + 0.3 + 0.1 + 0.09 + 0.03)
    assert rate(prices, grown, TreeShape(2, 2, 5, stop_below=0.4)) == pytest.approx(deep / (2 * (1.5 + 2 * 0.5)))
    assert best_shape(costs(1.0, 0.0, 0.3), [sure, unsure]).stop_below > 0, (
        "depth pays in one context, not in the other"
    )


def test_costs_between_measured_points() -> None:
    prices = Costs({1: 1.0, 4: 1.3, 8: 2.1}, {2: 0.1, 4: 0.3}, fixed=0.5)
    assert prices.round(6, 3, 2) == pytest.approx(1.7 + 0.5 + 2 * 0.2)
    assert prices.round(8, 4, 1) == pytest.approx(2.1 + 0.5 + 0.3)


def test_costs_of_a_batch() -> None:
    prices = Costs({1: 1.0, 8: 2.0, 32: 5.0}, {2: 0.1}, 0.3, wide_level={2: 0.8}, wide_fixed=1.0)
    assert prices.for_batch(1) is prices
    four = prices.for_batch(4)
    assert max(four.forward) == 8, "32 nodes were measured"
    assert four.round(2, 2, 1) == pytest.approx(2.0 + (0.3 + 3 / 7 * 0.7) + (0.1 + 3 / 7 * 0.7))
    assert prices.for_batch(8).round(4, 2, 2) == pytest.approx(5.0 + 1.0 + 2 * 0.8)
    prices.row = 0.2
    assert prices.round(8, 2, 1) == pytest.approx(2.0 + 0.3 + 0.1), "a single row has no other beside it"
    assert prices.for_batch(8).round(4, 2, 2) == pytest.approx(5.0 + 7 * 0.2 + 1.0 + 2 * 0.8)
    assert prices.for_batch(8).forward[1] == pytest.approx(2.0 + 7 * 0.2)


def test_larger_batches_draft_less_and_then_not_at_all() -> None:
    trees = [binary(0.7, 0.2, depth=8)]
    curve = {n: max(1.0, n / 8) for n in (1, 4, 8, 16, 32, 64, 128)}  # eight nodes are as cheap as one
    prices = Costs(curve, {1: 0.01, 2: 0.01}, 0.0, wide_level={1: 0.02, 2: 0.02}, wide_fixed=0.0)
    shapes = best_by_batch(prices, trees)
    nodes = [0 if shape is None else shape.nodes for shape in shapes.values()]
    assert tuple(shapes) == BATCHES and nodes == sorted(nodes, reverse=True)
    assert nodes[0] >= 8 > nodes[2] >= 2 and nodes[-1] == nodes[-2] == 0
    for batch, shape in shapes.items():
        if shape is not None and batch > 1:
            assert shape.stop_below == 0, "drafting ends when the last row of a batch has no use for it"
    slow = Costs({n: float(n) for n in curve}, {1: 1.0}, 1.0, wide_level={1: 8.0}, wide_fixed=8.0)
    assert best_by_batch(slow, trees, correction=0.01)[1] is not None, "a single row drafts, as it was asked to"


def test_a_drafter_knows_its_batches(drafter: EagleDrafter) -> None:
    drafter.by_batch = {2: TreeShape(2, 2, 4), 4: None}
    assert drafter.for_batch(1) is drafter
    smaller, none = drafter.for_batch(3), drafter.for_batch(7)
    assert isinstance(smaller, EagleDrafter) and smaller.shape == TreeShape(2, 2, 4) and smaller.head is drafter.head
    assert isinstance(none, NoDrafter)
    assert drafter.reshaped(TreeShape(1, 1, 2)).for_batch(7).max_nodes == 2, "a tree that is asked for is what is used"
    grafted = GraftedDrafter(drafter, LookupDrafter(VOCAB))
    assert grafted.for_batch(1) is grafted and isinstance(grafted.for_batch(4), NoDrafter)
    assert grafted.for_batch(2).max_nodes == 4

    target, prompts = drafter.target, tiny_prompts((5, 13, 9, 21))
    expected = reference(target.model, prompts)
    for made in (drafter, grafted):
        for count, nodes in ((1, made.max_nodes), (2, 4), (4, 1)):
            out = FuzzyDecoder(target, made).generate(prompts[:count], max_new_tokens=24, do_sample=False)
            assert out.sequences == expected[:count]
            assert out.stats.drafter["nodes"] == nodes


@pytest.fixture
def drafter() -> EagleDrafter:
    target = Target(tiny_model("llama"))
    torch.manual_seed(0)
    return EagleDrafter(EagleHead(EagleConfig.for_target(target)), target, TreeShape(3, 3, 8))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache and short measurements; the directory of the cache."""
    monkeypatch.setenv("FSD_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "SECONDS", 0.0)
    return tmp_path


def test_tune_measures_once(quick: Path, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = drafter.target, calibration_prompts(None, VOCAB)
    shape = tune(drafter, target, prompts)
    assert drafter.shape == shape
    assert shape.nodes <= max(autotune.SIZES["cpu"].nodes) and shape.width in autotune.SIZES["cpu"].widths
    expected = reference(target.model, tiny_prompts())
    assert FuzzyDecoder(target, drafter).generate(tiny_prompts(), max_new_tokens=24).sequences == expected
    assert drafter.by_batch and tuple(drafter.by_tilt) == autotune.TILTS
    assert all(tuple(shapes) == BATCHES and shapes[1] for shapes in drafter.by_tilt.values())
    (file,) = (quick / "trees").iterdir()

    again = drafter.reshaped(TreeShape(1, 1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(autotune, "measure", None)
        assert tune(again, target, prompts) == shape == again.shape
        assert again.by_tilt == drafter.by_tilt
        assert again.by_batch == drafter.by_batch and tuple(again.by_batch) == BATCHES[1:]
        with pytest.raises(TypeError):
            tune(again, target, prompts, refresh=True)
    file.write_text("{damaged")
    assert tune(again, target, prompts).depth in DEPTHS
    assert tune(drafter, target, prompts) == again.shape, "and what was damaged is written again"


@pytest.mark.parametrize("tilt", [0.0, 1.0])
def test_measurement_of_a_right_and_a_wrong_drafter(quick: Path, drafter: EagleDrafter, tilt: float) -> None:
    sizes = autotune.SIZES["cpu"]
    with torch.inference_mode():
        prices = autotune._costs(drafter, drafter.target, sizes)
    contexts, correction = autotune.met(drafter, drafter.target, tiny_prompts((5,)), tilt, new_tokens=6)
    assert {*sizes.nodes} < set(prices.forward) <= {*sizes.nodes, *sizes.more}
    assert set(prices.level) == set(prices.wide_level) == {1, 2, 4, 6, 8} and prices.wide_fixed > 0
    curve = list(prices.forward.values())
    assert 0 < curve[0] and curve == sorted(curve) and prices.fixed > 0 and prices.row >= 0
    assert all(context.scores[0] == 0 and max(context.scores[1:]) < 0 for context in contexts)
    assert correction > 0


def test_tune_reaches_the_head_in_a_graft_and_nothing_else(
    quick: Path, drafter: EagleDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    target = drafter.target
    grafted = GraftedDrafter(drafter, LookupDrafter(VOCAB), 9)
    shape = tune(grafted, target, calibration_prompts(None, VOCAB))
    assert [record.message[:27] for record in caplog.records] == ["measuring which draft trees"]
    assert drafter.shape == shape and grafted.nodes == shape.nodes
    grafted.nodes, twice = 9, GraftedDrafter(grafted, RecycleDrafter(VOCAB), 9)
    assert head_of(twice) is drafter and tune(twice, target, [[1, 2]]) == shape
    assert twice.nodes == grafted.nodes == shape.nodes and len(caplog.records) == 1
    with pytest.raises(FsdError, match="auto"):
        tune(NoDrafter(VOCAB), target, [[1, 2]])
    plain = FuzzyDecoder(target, NoDrafter(VOCAB)).load_drafter("lookup", "auto")
    assert isinstance(plain, LookupDrafter)
    with pytest.raises(FsdError, match="automatic"):
        FuzzyDecoder(target, NoDrafter(VOCAB)).load_drafter("lookup", "automatic")


def test_warmup_pays_ahead_for_auto(
    quick: Path, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter.target.model.save_pretrained(quick / "target")
    save_head(quick / "head", drafter.head, drafter.target.fingerprint())
    names = ["--target", str(quick / "target"), "--drafter", str(quick / "head"), "--device", "cpu", "--dtype", "fp32"]
    assert main(["warmup", *names]) == 0
    shown, parts = capsys.readouterr()
    assert re.fullmatch(r"load [\d.]+ s, compile [\d.]+ s, pack [\d.]+ s, calibrate [\d.]+ s", parts.splitlines()[-1])
    with monkeypatch.context() as patch:
        patch.setattr(autotune, "measure", None)
        decoder = FuzzyDecoder.from_pretrained(names[1], names[3], device="cpu", dtype=torch.float32, tree="auto")
    made = decoder.drafter
    assert isinstance(made, EagleDrafter)
    assert f"{made.shape.depth},{made.shape.width},{made.shape.nodes}," in shown
    assert main(["warmup", *names, "--tree", "2,2,4"]) == 2
    assert "--tree 2,2,4" in capsys.readouterr().err


def test_drafting_stops_where_depth_is_not_worth_it(drafter: EagleDrafter) -> None:
    target = drafter.target
    expected = reference(target.model, tiny_prompts())
    trees = {}
    for stop in (0.0, 1e-30, 0.5, 0.99):
        recorder = autotune._Recorder(drafter.reshaped(TreeShape(4, 3, 20, stop_below=stop)))
        out = FuzzyDecoder(target, recorder).generate(tiny_prompts(), max_new_tokens=24, do_sample=False)
        assert out.sequences == expected
        trees[stop] = recorder.contexts
    assert trees[1e-30] == trees[0.0], "a threshold that is never reached changes nothing"

    def reach(context: Candidates, width: int) -> float:
        first = [score for score, parent in zip(context.scores[1:], context.parents[1:]) if parent == 0]
        return sum(math.exp(score) for score in sorted(first)[-width:])

    certain = [len(context.scores) for context in trees[0.99]]
    assert min(certain) == 4, "the root and its children"
    for context in trees[0.5]:
        if len(context.scores) == 4:
            assert reach(context, 3) < 0.5
    assert len(trees[0.5]) >= len(trees[0.0])


def test_bad_thresholds_and_names() -> None:
    for stop in (-0.1, 1.0):
        with pytest.raises(FsdError, match="stop_below"):
            TreeShape(2, 2, 4, stop_below=stop)
    assert parse_tree("auto") == "auto" and parse_tree("2,2,4") == TreeShape(2, 2, 4)
    assert parse_tree("2,2,4,0.5") == TreeShape(2, 2, 4, stop_below=0.5)
    with pytest.raises(FsdError, match="stop_below"):
        parse_tree("2,2,4,high")
    with pytest.raises(FsdError, match="auto"):
        parse_tree("car")
