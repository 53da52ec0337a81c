"""The draft tree: its paths, parts of it, and which candidates of a model, under which distribution, become one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsd_core import functional
from fsd_infer import Target, TreeShape
from fsd_infer.drafters import Drafter, DraftRequest, LMDrafter
from fsd_infer.drafters.growth import TreeSession
from fsd_infer.trees.tree import DraftTree, select_nodes, visit_scores
from tests.families import noisy_model, tell, tiny_head, tiny_model, tiny_prompts
from tests.tree_rounds import check_tree, tree_of, tree_round


@pytest.mark.parametrize("kernels", [True, False])
def test_a_part_of_a_tree_is_a_tree(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.delitem(functional.KERNELS["keep_nodes"], "cpu")
    tree = tree_round(0).tree
    tree = replace(tree, proposers=tree.tokens % 3, drawn=tree.tokens % 2 > 0)
    narrow = replace(tree, tokens=tree.tokens.int(), q_index=tree.q_index.int())  # fields of another type are read, too
    for name in ("tokens", "q_index"):
        part = getattr(narrow.keep(torch.arange(9).expand(6, -1)), name)
        assert torch.equal(part.long(), getattr(tree, name)), name
    assert torch.equal(tree.keep(torch.arange(9).expand(6, -1)).ancestors, tree.ancestors)
    for root in range(9):
        for row, nodes in enumerate(tree.ancestors[:, :, root]):
            kept = nodes.nonzero()[:, 0]
            part = tree.keep(kept.expand(6, -1))
            assert part.tokens[row].tolist() == tree.tokens[row, kept].tolist()
            for new, old in enumerate(kept.tolist()):
                assert kept[part.parents[row, new]] == (tree.parents[row, old] if new else root)
                assert part.q_index[row, new] == tree.q_index[row, old], "only leaves of the part are without q"
            assert torch.equal(part.proposers[row], tree.proposers[row, kept])
            assert torch.equal(part.drawn[row], tree.drawn[row, kept])
            torch.testing.assert_close(part.scores[row], tree.scores[row, kept] - tree.scores[row, root])
    without = tree_of(
        ([0, 1, 2], [0, 0, 1], [0.0, -1.0, -2.0]), vocab=4, q_logits=torch.zeros(1, 2, 4), q_index=[[0, 1, -1]]
    )
    assert without.keep(torch.tensor([[0, 1]])).q_index.tolist() == [[0, -1]], "what became a leaf has no q"


SESSIONS = [
    (shape, draft_bonus, lm) for shape in ("1,3,9", "3,1,4", "5,6,16") for draft_bonus in (0.0, 9.0) for lm in (0, 1)
]


@pytest.mark.parametrize(("shape", "draft_bonus", "lm"), SESSIONS)
def test_the_likeliest_candidates_become_the_tree(
    shape: str, draft_bonus: float, lm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where q is all but 1, so that rounding decides which of parent and child is likelier."""
    target = Target(tiny_model("llama"))
    grown: list[DraftTree] = []
    grow = TreeSession._grow
    monkeypatch.setattr(TreeSession, "_grow", lambda *args: grown.append(grow(*args)) or grown[-1])
    for sharp in (1.0, 60.0):
        drafter: Drafter = tiny_head(target, TreeShape.parse(shape), draft_vocab_size=40)
        if lm:
            drafter = LMDrafter(Target(noisy_model("llama")), target, TreeShape.parse(shape))
        for module in drafter.modules():
            for parameter in module.parameters():
                parameter.data *= 1 + (sharp - 1) * (parameter.dim() == 1)
        for prompts in (tiny_prompts()[:1], [prompt[:5] for prompt in tiny_prompts()]):
            tree = drafted(drafter, target, prompts, draft_bonus)
            check_tree(tree)
            candidates = grown.pop()
            visits = visit_scores(candidates.scores, candidates.parents, 9, draft_bonus).sort(descending=True).values
            kept = select_nodes(candidates.scores, candidates.parents, 9, draft_bonus, tree.tokens.shape[1])
            ours = visit_scores(candidates.scores, candidates.parents, 9, draft_bonus).gather(1, kept)
            assert torch.equal(ours, visits[:, : kept.shape[1]])
            assert tree.tokens.shape[1] <= TreeShape.parse(shape).nodes
            assert torch.equal(tree.tokens, candidates.tokens.gather(1, kept))
            assert_scores_are_q(tree)


def drafted(drafter: Drafter, target: Target, prompts: list[list[int]], draft_bonus: float) -> DraftTree:
    """The trees that follow prompts of one length."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        session = drafter.start(ids[:, 0], DraftRequest(len(ids), 99, draft_bonus=draft_bonus))
        counts = torch.full((len(ids),), ids.shape[1] - 1)
        tell(session, ids[:, 1:], target.features(ids)[:, :-1], counts)
        return session.draft(ids[:, -1])


def assert_scores_are_q(tree: DraftTree) -> None:
    """Each node's q belongs to it: its children's scores say so."""
    log_q = tree.q_logits.float().log_softmax(-1)
    for row, node in tree.is_draft.nonzero().tolist():
        parent, token = int(tree.parents[row, node]), int(tree.tokens[row, node])
        entry = token if tree.draft_ids is None else int((tree.draft_ids == token).nonzero()[0])
        step = log_q[row, tree.q_index[row, parent], entry]
        torch.testing.assert_close(tree.scores[row, node], tree.scores[row, parent] + step, atol=1e-4, rtol=1e-4)
