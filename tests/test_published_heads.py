"""Heads that other programs publish: every layout is read, estimates what its home says, and decodes by the laws."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fsd_core.errors import FsdError
from fsd_infer import Target, parse_rule
from fsd_infer.drafters import Drafter, DraftRequest, DraftSession, NoDrafter, TreeShape
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine import Request, decode
from fsd_infer.tree import DraftTree
from tests.published_heads import H, LAYOUTS, MASK, QWEN3, V, Layout, States, backbone, layout, tiny_target, z_lab
from tests.rules_toy import ALARM, p_value

PROMPTS = [[1, 2, 3, 1, 2, 3, 4], [4, 5, 6], [6, 1]]
CHAIN, TREE = TreeShape.chain(8), TreeShape(depth=3, width=3, nodes=10)


@cache
def target() -> Target:
    return Target(tiny_target())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def load(root: Path, name: str, shape: TreeShape) -> Drafter:
    place = root / name.replace(" ", "-")
    made = load_drafter(str(place if place.exists() else layout(name).write(place)), target(), shape)
    assert made.directory == place
    return made


def drafted(drafter: Drafter, texts: list[list[int]], pieces: int = 2, **options: Any) -> DraftTree:
    """The trees after texts that arrive in pieces of different lengths."""
    batch = len(texts)
    request = DraftRequest(batch, 40, device=target().device, **options)
    session: DraftSession = drafter.start(torch.tensor([text[0] for text in texts]), request)
    states = [target().features(torch.tensor([text]))[0] for text in texts]
    cuts = [[len(text) * i // pieces for i in range(1, pieces)] + [len(text)] for text in texts]
    at = [1] * batch
    for ends in zip(*cuts):
        counts = [max(end - start, 0) for start, end in zip(at, ends)]
        tokens = torch.zeros(batch, max(counts), dtype=torch.long)
        features = torch.randn(batch, max(counts), states[0].shape[-1])  # padding is never read
        for row, (start, count) in enumerate(zip(at, counts)):
            tokens[row, :count] = torch.tensor(texts[row][start : start + count])
            features[row, :count] = states[row][start - 1 : start - 1 + count]
        session.extend(tokens, features, torch.tensor(counts))
        at = [start + count for start, count in zip(at, counts)]
    with torch.no_grad():
        return session.draft(torch.tensor([text[-1] for text in texts]))


def over_all(logits: Tensor, ids: list[int] | None) -> Tensor:
    """Logits over the target's vocabulary."""
    if ids is None:
        return logits
    whole = torch.full((V,), -torch.inf)
    whole[ids] = logits
    return whole


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_node_has_the_estimate_of_a_plain_computation(root: Path, name: str) -> None:
    made = layout(name)
    for shape in (CHAIN, TREE):
        tree = drafted(load(root, name, shape), PROMPTS)
        depths: set[int] = set()
        for row, text in enumerate(PROMPTS):
            states = States.of(tiny_target(), text)
            for node in range(tree.tokens.shape[1]):
                if tree.q_index[row, node] < 0:
                    continue
                path = [int(tree.tokens[row, i]) for i in tree.ancestors[row, node].nonzero()[1:, 0].tolist()]
                q = over_all(tree.q_logits[row, tree.q_index[row, node]], None if tree.draft_ids is None else made.ids)
                with torch.no_grad():
                    wanted = over_all(made.estimate(states, text, path), made.ids)
                torch.testing.assert_close(q, wanted, rtol=1e-5, atol=1e-5)
                children = tree.tokens[row][tree.child[row, node]].tolist()
                assert int(wanted.argmax()) in children
                depths.add(len(path))
        assert depths == set(range(min(shape.depth, made.depth))), "nodes of all depths were compared"
    assert tree.draft_ids is None if made.ids is None else sorted(tree.draft_ids.tolist()) == sorted(made.ids)


@cache
def plain(count: int) -> list[list[int]]:
    return decode(target(), NoDrafter(V), parse_rule("exact"), Request(PROMPTS, count, True)).sequences


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_answers_are_the_targets_own_and_lossy_ones_keep_their_budget(
    root: Path, name: str, shape: TreeShape
) -> None:
    drafter = load(root, name, shape)
    assert decode(target(), drafter, parse_rule("exact"), Request(PROMPTS, 20, True)).sequences == plain(20)
    for rule in ("tilted:1:budget=2", "fuzzy:js:0.3"):
        for greedy in (True, False):
            made = decode(target(), drafter, parse_rule(rule), Request(PROMPTS, 20, greedy))
            assert [len(answer) for answer in made.sequences] == [20] * 3


ROWS, LENGTH, PROMPT = 3000, 3, [1, 2, 3, 4, 0, 6]
DRAWS = {name: (TreeShape(3, 3, 8) if place % 2 else TreeShape.chain(3)) for place, name in enumerate(LAYOUTS)}
DRAWS |= {"dspark of SpecForge": TreeShape(3, 2, 7, 0.3)}  # its confidence head cuts


@cache
def law(open_gate: str = "") -> np.ndarray:
    """[V**LENGTH] what the target alone emits after the prompt; with a head, the second token is one of its three."""
    chances = []
    for text in itertools.product(range(V), repeat=LENGTH - 1):
        with torch.no_grad():
            p = tiny_target()(torch.tensor([[*PROMPT, *text]])).logits[0, -LENGTH:].double().softmax(-1)
        if open_gate:
            made = layout(open_gate)
            known = [*PROMPT, text[0]]
            q = over_all(made.estimate(States.of(tiny_target(), known), known, []), made.ids)
            best = q.topk(3).indices
            kept = torch.zeros(V, dtype=torch.double).index_fill(0, best, 1.0) * p[1]
            p[1] = kept / kept.sum()
        chances += (p[0, text[0]] * p[1, text[1]] * p[2]).tolist()
    return np.array(chances)


def codes(drafter: Drafter, rule: str) -> np.ndarray:
    torch.manual_seed(5)
    made = decode(target(), drafter, parse_rule(rule), Request([PROMPT] * ROWS, LENGTH, False))
    return np.array(made.sequences) @ V ** np.arange(LENGTH)[::-1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_sampled_answers_have_the_targets_law(root: Path, name: str) -> None:
    drafter = load(root, name, DRAWS[name])
    tree = drafted(drafter, [PROMPT] * 64, greedy=False, draws=True)
    assert tree.drawn is not None and tree.drawn.any(), "nodes are drawn"
    assert p_value(codes(drafter, "exact"), law()) > ALARM


@pytest.mark.parametrize("name", ["dflash of speculators", "dspark of DeepSpec, gated", "mlp speculator", "p-eagle"])
def test_a_lossy_rule_has_its_law(root: Path, name: str) -> None:
    """An open gate lets one of the three likeliest drafts follow the first token, and the leaf below the target's own."""
    drafter = load(root, name, TreeShape(1, 3, 4))
    assert p_value(codes(drafter, "fuzzy:js:9"), law(name)) > ALARM
    assert p_value(codes(drafter, "fuzzy:js:9"), law()) < ALARM
