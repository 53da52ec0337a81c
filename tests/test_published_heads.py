"""Heads that other programs publish: every layout is read, estimates what its home says, and decodes by the
distributions.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import AutoConfig, AutoModel

from fsd_core.errors import FsdError
from fsd_infer import Target
from fsd_infer.drafters import Drafter, DraftRequest, DraftSession, TreeShape
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine import Request, decode
from fsd_infer.rules import parse_rule
from fsd_infer.trees.tree import DraftTree
from tests.covering import covering, fast_only
from tests.published_blocks import BLOCK, MASK, QWEN3, States, block_states, confidence, tiny_target
from tests.published_heads import LAYOUTS, layout
from tests.published_mtp import MTP
from tests.rules_toy import V
from tests.sim_graphs import SimRecorder
from tests.simulated_device import SIM, SimulatedDevice

PROMPTS = [[1, 2, 3, 1, 2, 3, 0], [2, 0, 3], [3, 1]]
FAST = {
    "dspark of SpecForge", "dspark of DeepSpec, rnn", "p-eagle", "hydra", "mtp of mimo, three layers",
    "shared keys of gemma4, ordered",
}  # fmt: skip
NEW = 8
CHAIN, TREE = TreeShape.chain(8), TreeShape(depth=3, width=3, nodes=10)
SHAPES: dict[str, TreeShape | str] = {"chain": CHAIN, "tree": TREE, "auto": "auto"}


def target(name: str = "") -> Target:
    """The target of a layout."""
    return ((name and layout(name).target) or usual_target)()


@cache
def usual_target() -> Target:
    return Target(tiny_target())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def load(root: Path, name: str, shape: TreeShape | str, whole: Target | None = None) -> Drafter:
    if name in MTP:
        return load_drafter("mtp", whole or target(name), shape)
    place = root / name.replace(" ", "-")
    made = load_drafter(str(place if place.exists() else layout(name).write(place)), whole or target(name), shape)
    assert made.directory == place
    return made


def drafted(drafter: Any, texts: list[list[int]], pieces: int = 2, **options: Any) -> DraftTree:
    """The trees after texts that arrive in pieces of different lengths."""
    batch, whole = len(texts), drafter.target
    request = DraftRequest(batch, 40, device=whole.device, **options)
    session: DraftSession = drafter.start(torch.tensor([text[0] for text in texts]), request)
    states = [features_of(whole, tuple(text), whole.captured_layers) for text in texts]
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


@cache
def features_of(whole: Target, text: tuple[int, ...], layers: tuple[int, ...]) -> Tensor:
    return whole.features(torch.tensor([text]))[0]


def over_all(logits: Tensor, ids: list[int] | None) -> Tensor:
    """Logits over the target's vocabulary."""
    if ids is None:
        return logits
    whole = torch.full((V,), -torch.inf)
    whole[ids] = logits
    return whole


@pytest.mark.parametrize(("name", "shape"), covering(list(LAYOUTS), ["chain", "tree"]))
def test_every_node_has_the_estimate_of_a_plain_computation(root: Path, name: str, shape: str) -> None:
    made, asked = layout(name), CHAIN if shape == "chain" else TREE
    drafter = load(root, name, asked)
    assert drafter.max_depth == min(asked.depth, made.depth)
    tree = drafted(drafter, PROMPTS)
    depths: set[int] = set()
    for row, text in enumerate(PROMPTS):
        states = States.of(target(name).model, text)
        for node in range(tree.tokens.shape[1]):
            if tree.q_index[row, node] < 0:
                continue
            path = [int(tree.tokens[row, i]) for i in tree.ancestors[row, node].nonzero()[1:, 0].tolist()]
            q = over_all(tree.q_logits[row, tree.q_index[row, node]], None if tree.draft_ids is None else made.ids)
            with torch.no_grad():
                wanted = over_all(made.estimate(states, text, path), made.ids)
            torch.testing.assert_close(q, wanted, rtol=1e-5, atol=1e-5)
            children = tree.tokens[row][tree.is_child[row, node]].tolist()
            assert int(wanted.argmax()) in children
            depths.add(len(path))
    assert depths >= set(range(drafter.max_depth - (shape == "tree"))), "nodes of these depths"
    assert tree.draft_ids is None if made.ids is None else sorted(tree.draft_ids.tolist()) == sorted(made.ids)


def plain_of(whole: Target, count: int) -> list[list[int]]:
    prompts = [torch.tensor([prompt]) for prompt in PROMPTS]
    made = (whole.model.generate(ids, max_new_tokens=count, do_sample=False) for ids in prompts)
    return [row[0, ids.shape[1] :].tolist() for row, ids in zip(made, prompts)]


@cache
def plain(name: str, count: int) -> list[list[int]]:
    return plain_of(target(name), count)


@pytest.mark.parametrize("kind", ["heads", "blocks alone", "a whole model"])
def test_medusa_heads_may_lie_beside_or_inside_a_model(root: Path, kind: str, tmp_path: Path) -> None:
    """In the file of text-generation-inference, where blocks alone draft by the target's LM head, or in Medusa-2's."""
    made, whole = layout("medusa"), target()
    own = {f"{'medusa_head.' * (kind == 'a whole model')}{name}": value for name, value in made.tensors.items()}
    if kind == "blocks alone":
        own = {name: value for name, value in own.items() if ".linear." in name}
    stand_in = replace(made, tensors=own if kind == "a whole model" else {"lm_head.weight": torch.ones(1)})
    place = stand_in.write(tmp_path, model_type="cohere", logit_scale=0.0625)  # the config is the target's
    model = {name: value.clone() for name, value in whole.model.state_dict().items()}
    if kind == "a whole model":
        save_file(model | own, place / "model.safetensors")
    else:
        save_file(own, place / "medusa_lm_head.safetensors")
        save_file(model, place / "model.safetensors")
    found, tree = (
        drafted(load_drafter(str(place), whole, TREE), PROMPTS), drafted(load(root, "medusa", TREE), PROMPTS),
    )  # fmt: skip
    if kind != "blocks alone":
        assert torch.equal(found.tokens, tree.tokens) and torch.equal(found.q_logits, tree.q_logits)
        return
    y = States.of(whole.model, PROMPTS[0]).final[-1]
    for block in range(2):
        weight, bias = (made.tensors[f"0.{block}.linear.{part}"] for part in ("weight", "bias"))
        y = y + silu(linear(y, weight, bias))
    torch.testing.assert_close(found.q_logits[0, 0], whole.lm_logits(y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape"), [*covering(list(LAYOUTS), ["tree", "chain"]), *((name, "auto") for name in sorted(FAST))]
)
def test_greedy_answers_are_the_targets_own(root: Path, name: str, shape: str) -> None:
    """In a batch of prompts of different lengths, by chains, trees, and trees chosen while decoding."""
    made = decode(target(name), load(root, name, SHAPES[shape]), parse_rule("exact"), Request(PROMPTS, NEW, True))
    assert made.sequences == plain(name, NEW)


def test_a_block_is_that_of_transformers(tmp_path: Path) -> None:
    """Muse-Glimmer's assistant has the equations of DFlash, and its own files are read."""
    made = layout("dflash of z-lab")
    config = AutoConfig.for_model("muse_glimmer_assistant", **{
        **{name: value for name, value in QWEN3.items() if name not in ("model_type", "rope_theta", "rope_scaling")},
        "rope_parameters": {"rope_type": "default", "rope_theta": QWEN3["rope_theta"]}, "block_size": BLOCK,
        "mask_token_id": MASK, "target_layer_ids": [0, 2], "sliding_window": 99,
    })  # fmt: skip
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    named = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({named.get(name, name): value for name, value in made.tensors.items()})
    text = PROMPTS[0]
    states = States.of(tiny_target(), text)
    ids = [text[-1], *[MASK] * (BLOCK - 1)]
    context = torch.cat([states.layers[0], states.layers[2]], -1)
    with torch.no_grad():
        z = model(noise_embeds=states.embed(ids)[None], context_hidden_states=context[None]).last_hidden_state[0]
        for slot in range(1, BLOCK):
            wanted = states.lm_head(z[slot])
            found = made.estimate(states, text, [0] * (slot - 1))
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    tree = drafted(load_drafter(str(tmp_path), target(), CHAIN), [text])
    torch.testing.assert_close(tree.q_logits[0], states.lm_head(z[1:]).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threshold", [0.0, 0.6, 0.85])
def test_the_confidence_head_cuts_by_what_comes_before(root: Path, threshold: float) -> None:
    made = layout("dspark of SpecForge")
    tensors = {name.removeprefix("logit_head."): value for name, value in made.tensors.items()}
    drafter = load(root, "dspark of SpecForge", TreeShape.chain(BLOCK, threshold))
    whole = drafted(load(root, "dspark of SpecForge", CHAIN), PROMPTS)
    tree = drafted(drafter, PROMPTS)
    lengths: set[int] = set()
    for row, text in enumerate(PROMPTS):
        states = States.of(tiny_target(), text)
        context = torch.cat([states.layers[2], states.layers[0]], -1)
        embeds = states.embed([text[-1], *[MASK] * (BLOCK - 1)])
        z = block_states(tensors, context, embeds, [None] * 2, [False] * 2)
        kept, survival = 0, 1.0
        for slot, token in enumerate(whole.tokens[row, :BLOCK].tolist()):
            survival *= confidence(tensors, z, slot, token)
            if survival < threshold:
                break
            kept += 1
        drafts = int(tree.is_draft[row].sum())
        assert drafts == kept
        lengths.add(kept)
        assert tree.tokens[row, : drafts + 1].tolist() == whole.tokens[row, : drafts + 1].tolist()
    assert (lengths == {BLOCK}) == (threshold == 0.0)


@pytest.mark.parametrize(("name", "file"), [("medusa", "medusa_lm_head.pt"), ("dflash of z-lab", "pytorch_model.bin")])
def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path: Path, name: str, file: str) -> None:
    place = layout(name).write(tmp_path / "head")
    (place / "model.safetensors").unlink()
    torch.save(layout(name).tensors, place / file)
    with pytest.raises(FsdError, match=rf"(?s)Nothing is unpickled here.*torch.load\('.*{file}'") as caught:
        load_drafter(str(place), target(), None)
    exec(str(caught.value).partition("by\n")[2])  # the advice
    assert load_drafter(str(place), target(), None).name in ("medusa", "block")


RECORDED = [name for name in LAYOUTS if name != "mtp of longcat_flash"]  # whose experts are chosen on the host


@pytest.mark.parametrize("name", fast_only(RECORDED, ["p-eagle", "mtp of mimo, three layers"]))
def test_recorded_rounds_answer_as_eager_ones(root: Path, name: str) -> None:
    """On the simulated device, in one recording and without a wait within a round."""
    with SimulatedDevice() as device:
        model = copy.deepcopy(target(name).model)
        if hasattr(model.config, "_experts_implementation"):
            model.set_experts_implementation("batched_mm")  # the others' CPU code is not the one of devices
        whole = Target(model.to(SIM))
        small = load(root, name, TREE, whole)

        def run(greedy: bool) -> list[list[int]]:
            generator = torch.Generator(device=SIM).manual_seed(0)
            prompts = PROMPTS if greedy else PROMPTS[:1]  # an eager batch draws fewer numbers once a row has left it
            return decode(
                whole, small, parse_rule("exact"), Request(prompts, NEW, greedy, generator=generator)
            ).sequences

        wanted = [run(greedy) for greedy in (True, False)]
        recorder = SimRecorder(device)
        for model in (whole, small):
            model.use_graphs(recorder)
        assert [run(greedy) for greedy in (True, False)] == wanted and wanted[0] == plain(name, NEW)
        assert whole.recorded is not None and whole.recorded.refused is None
        assert len(recorder.graphs) == 2 and recorder.replayed > 4


# the table in docs/heads.md ------------------------------------------------------------------------------------------


def cases_of(test: Any) -> list[dict[str, Any]]:
    """The values of each case that a test is run with, by argument."""
    (mark,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
    rows = [getattr(case, "values", case) for case in mark.args[1]]
    return [dict(zip(names, row if isinstance(row, tuple) else (row,), strict=True)) for row in rows]


def layouts_of(test: Any, named: str = "name", prefix: str = "", **chosen: str) -> set[str]:
    """The layouts that a test is run with, in cases with these values."""
    cases = [case for case in cases_of(test) if all(case[name] == value for name, value in chosen.items())]
    return {prefix + case[named] for case in cases}


def test_the_table_marks_what_is_tested(repo_root: Path) -> None:
    """Each cell, by the cases of the column's test."""
    from tests import test_block_training as blocks  # Lightning loads slowly
    from tests import test_mtp_training as mtp
    from tests import test_published_distributions as sampled  # which imports this file

    fits = (mtp.test_a_fit_learns_and_its_export_drafts, mtp.test_what_is_exported_fits_into_the_targets_own_checkpoint)
    trained, exported = (layouts_of(test, "family", "mtp of ") - {"mtp of llama"} for test in fits)
    block = layouts_of(blocks.test_a_fit_learns_and_its_export_decodes_exactly, "layout")
    chains, trees = (layouts_of(test_greedy_answers_are_the_targets_own, shape=shape) for shape in ("chain", "tree"))
    assert len(PROMPTS) > 1 and len({*map(len, PROMPTS)}) > 1, "of which both are ragged batches"
    columns = {
        "loads": layouts_of(test_every_node_has_the_estimate_of_a_plain_computation, shape="chain")
        & layouts_of(test_every_node_has_the_estimate_of_a_plain_computation, shape="tree"),
        "chain": chains, "tree": trees,
        "sampled": layouts_of(sampled.test_sampled_answers_have_the_targets_distribution),
        "lossy": layouts_of(sampled.test_a_lossy_rule_has_its_distribution), "batch": chains & trees,
        "recorded": layouts_of(test_recorded_rounds_answer_as_eager_ones), "trained": trained | block,
        "exported": exported | block,
    }  # fmt: skip
    assert all(done <= set(LAYOUTS) for done in columns.values())
    assert all(columns[name] == set(LAYOUTS) for name in ("loads", "chain", "tree", "sampled", "lossy", "batch"))
    page = (repo_root / "docs" / "heads.md").read_text(encoding="utf-8")
    rows = [f"|layout|{'|'.join(columns)}|", "|---" * (1 + len(columns)) + "|"]
    rows += [f"|{name}|" + "".join("✓|" if name in done else "–|" for done in columns.values()) for name in LAYOUTS]
    table = page[page.index(rows[0]) :].partition("\n\n")[0]
    assert table.splitlines() == rows
