"""Heads that draft a block in one pass: what is trained is what is drafted, from a row's own text alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import BlockDrafter, DraftRequest
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.errors import CheckpointError, DataError
from fsd_infer.heads.checkpoint import save_head
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.tree import DraftTree
from fsd_train.eagle_module import EagleModule
from fsd_train.unroll import at_positions, unroll
from tests.families import tiny_model, tiny_prompts
from tests.head_toys import make_target

BLOCK = 4


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"))


def block_head(target: Target, **options: object) -> EagleHead:
    options = {"block_size": BLOCK, "markov_rank": 8, "num_layers": 2, "fused_layers": [0], **options}
    torch.manual_seed(3)
    head = EagleHead(EagleConfig.for_target(target, **options))
    assert head.block is not None
    for parameter in (head.block.masks, head.block.write.weight, head.fusion.project.weight):
        torch.nn.init.normal_(parameter, std=0.5)
    return head.eval()


def trees(drafter: BlockDrafter, texts: list[list[int]]) -> list[DraftTree]:
    """Of each round of a batch whose texts grow by three tokens, then by two (the last row by none), then by one."""
    target = drafter.target
    session = drafter.start(torch.tensor([text[0] for text in texts]), DraftRequest(len(texts), 32))
    found = []
    with torch.inference_mode():
        features = [target.features(torch.tensor([text]))[0] for text in texts]
        starts = [0] * len(texts)
        for grown in (3, 2, 1):
            counts = [grown - (grown == 2 and len(texts) > 1 and row == len(texts) - 1) for row in range(len(texts))]
            new = torch.zeros(len(texts), grown, dtype=torch.long)
            known = torch.zeros(len(texts), grown, features[0].shape[-1])
            for row, (start, count) in enumerate(zip(starts, counts)):
                new[row, :count] = torch.tensor(texts[row][start + 1 : start + 1 + count])
                known[row, :count] = features[row][start : start + count]
            session.extend(new, known, torch.tensor(counts))
            starts = [start + count for start, count in zip(starts, counts)]
            found.append(session.draft(torch.tensor([text[start] for text, start in zip(texts, starts)])))
    return found


def q_below(tree: DraftTree, row: int, path: list[int]) -> torch.Tensor | None:
    """The drafter's logits after root and path, if they stand in the tree."""
    nodes = tree.to_rows()[row]
    node = 0
    for token in path:
        below = [n for n, parent in enumerate(nodes.parents) if n and parent == node and nodes.tokens[n] == token]
        if not below:
            return None
        node = below[0]
    index = nodes.q_index[node]
    return None if index < 0 else tree.q_logits[row, index]


def test_a_tree_holds_what_training_computes(target: Target) -> None:
    drafter = BlockDrafter(block_head(target), target, TreeShape(BLOCK, 97, 1024))
    head, text = drafter.head, tiny_prompts((12,))[0]
    assert head.block is not None
    tree = trees(drafter, [text])[0]  # at root 3, hence the pair 2
    with torch.no_grad():
        ids, root = torch.tensor([text]), torch.tensor([[2]])
        features = target.features_of(target.features(ids), head.config.fused_layers)[:, :-1]
        embeds = target.embed(ids[:, 1:])
        estimates = at_positions(unroll(head, embeds, features, BLOCK, root), root)
    compared = 0
    for depth in range(BLOCK):
        found = q_below(tree, 0, text[4 : 4 + depth])
        if found is not None:
            expected = target.lm_logits(estimates[depth, :, 2 + depth])[0]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared >= 2


def test_rows_of_a_batch_are_drafted_as_alone(target: Target) -> None:
    drafter = BlockDrafter(block_head(target, draft_vocab_size=64), target, TreeShape(3, 3, 12))
    texts = tiny_prompts((10, 10, 10))
    together = trees(drafter, texts)
    for row in (0, 1):
        for batch, alone in zip(together, trees(drafter, [texts[row]])):
            assert batch.to_rows()[row].tokens == alone.to_rows()[0].tokens
            torch.testing.assert_close(batch.scores[row], alone.scores[0], atol=1e-4, rtol=1e-4)


def test_deeper_trees_are_cut_to_the_block(target: Target) -> None:
    drafter = BlockDrafter(block_head(target), target, TreeShape(9, 2, 16))
    assert drafter.max_depth == drafter.reshaped(TreeShape(12, 1, 13)).max_depth == BLOCK
    out = FuzzyDecoder(target, drafter).generate(tiny_prompts(), max_new_tokens=12, do_sample=False)
    assert all(len(answer) == 12 for answer in out.sequences)


def test_stored_and_loaded_by_its_directory(target: Target, tmp_path: Path) -> None:
    head = block_head(target)
    save_head(tmp_path, head, target.fingerprint(), dtype=torch.float32)
    drafter = load_drafter(tmp_path, target, TreeShape(3, 2, 7))
    assert type(drafter) is BlockDrafter and drafter.describe()["name"] == "block"
    assert drafter.head.block is not None and head.block is not None
    assert torch.equal(drafter.head.block.masks, head.block.masks)
    grafted = load_drafter(f"{tmp_path}+lookup", target)
    assert grafted.proposers == ("block", "lookup")
    answer = FuzzyDecoder(target, grafted).generate(tiny_prompts(), max_new_tokens=16, do_sample=False)
    plain = FuzzyDecoder(target, load_drafter("none", target)).generate(tiny_prompts(), max_new_tokens=16)
    assert answer.sequences == plain.sequences


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size from 2 to 32 and markov_rank of at least 1, got 1 and 8"),
        ({"markov_rank": 0}, "got 4 and 0"),
        ({"block_size": 33}, "block_size must be a whole number from 0 to 32"),
        ({"layout": "eagle", "fused_layers": []}, "layout eagle has no block_size, markov_rank"),
    ],
)
def test_options_that_make_no_block(options: dict[str, object], message: str, target: Target) -> None:
    with pytest.raises(CheckpointError, match=message):
        block_head(target, **options)


def test_training_has_as_many_steps_as_the_block_has_tokens(tmp_path: Path) -> None:
    head = {"block_size": 3, "markov_rank": 4}
    module = EagleModule(str(make_target(tmp_path)), head=head, unroll_steps=4)
    with pytest.raises(DataError, match="unroll_steps 4.*block_size 3"):
        module.configure_model()
