"""The draft head: its layer kinds, its unrolled training view, its checkpoints."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from fsd_infer.checkpoint import load_head, save_head
from fsd_infer.errors import CheckpointError
from fsd_infer.head import EagleConfig, EagleHead
from fsd_train.unroll import supervised, unroll, unrolled_mask
from tests.train_toys import toy_target

OWN = ["llama", "qwen2", "qwen3", "mistral", "granite", "olmo2", "phi3", "gemma2"]
LLAMA = ["gpt2", "opt", "falcon", "mixtral"]


def make_head(family: str = "llama", seed: int = 0, **options: object) -> EagleHead:
    torch.manual_seed(seed)
    target = toy_target(family)
    head = EagleHead(EagleConfig.for_target(target, **options))
    head.initialise_from(target)
    return head.eval()


@pytest.mark.parametrize("family", OWN)
def test_layer_is_of_the_targets_kind(family: str) -> None:
    head = make_head(family)
    assert head.config.layer["model_type"] == family
    assert type(head.layers[0]).__module__.split(".")[2] == family


@pytest.mark.parametrize("family", LLAMA)
def test_llama_layer_where_the_own_kind_does_not_stand_alone(family: str) -> None:
    head = make_head(family)
    assert head.config.layer["model_type"] == "llama"
    assert head(torch.randn(1, 3, 32), torch.randn(1, 3, 32), torch.arange(3)[None]).shape == (1, 3, 32)


def test_llama_layer_on_request() -> None:
    assert make_head("qwen2", layer="llama").config.layer["model_type"] == "llama"


def decode_chain(
    head: EagleHead, embeds: torch.Tensor, features: torch.Tensor, root: int, steps: int
) -> list[torch.Tensor]:
    """What decoding computes: the text up to position ``root``, then one token at a time on the head's own output."""
    cache = DynamicCache()
    out = head(embeds[:, : root + 1], features[:, : root + 1], torch.arange(root + 1)[None], cache=cache)[:, -1:]
    outputs = [out]
    for step in range(1, steps):
        at = root + step
        out = head(embeds[:, at : at + 1], out, torch.tensor([[at]]), cache=cache)
        outputs.append(out)
    return outputs


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("start", [0, 3])
def test_unrolled_training_is_token_by_token_drafting(family: str, start: int) -> None:
    head = make_head(family, num_layers=2 if family == "llama" else 1, final_norm=True, feature_scale=True)
    length, steps = 9, 4
    torch.manual_seed(1)
    embeds, features = torch.randn(1, length, 32), torch.randn(1, length, 32)
    with torch.no_grad():
        unrolled = unroll(head, embeds, features, steps, start)
        compared = 0
        for root in range(max(start - 1, 0), length):
            for step, out in enumerate(decode_chain(head, embeds, features, root, min(steps, length - root))):
                torch.testing.assert_close(unrolled[step][:, root + step], out[:, 0], atol=2e-5, rtol=1e-4)
                compared += step > 0
    assert compared >= 9


def test_mask_picks_the_chains_own_keys() -> None:
    mask = unrolled_mask(torch.arange(6), torch.arange(6), 2)[0, 0]
    seen = mask[4].nonzero().squeeze(1).tolist()
    # step-0 positions 0..2, own step 1 at position 3, own step 2 at position 4
    assert seen == [0, 1, 2, 6 + 3, 12 + 4]
    assert bool(mask.any(1).all())


def test_supervised_positions() -> None:
    # x_0..x_3 prompt, x_4..x_8 answer, x_9 padding
    answer = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 0]])
    wanted = supervised(answer, 3)
    assert wanted.shape == (3, 1, 9)
    # the second answer token x_5 is drafted at position 3: feature of the last prompt token, embedding of x_4
    assert wanted[0, 0].nonzero().squeeze(1).tolist() == [3, 4, 5, 6]
    # step s predicts x_{i+2} in rounds whose root x_{i-s+1} is an answer token
    assert wanted[1, 0].nonzero().squeeze(1).tolist() == [4, 5, 6]
    assert wanted[2, 0].nonzero().squeeze(1).tolist() == [5, 6]


def test_supervised_positions_of_several_turns() -> None:
    answer = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 1]])
    assert supervised(answer, 2)[0, 0].nonzero().squeeze(1).tolist() == [0, 4, 5, 6]
    assert supervised(answer, 2)[1, 0].nonzero().squeeze(1).tolist() == [5, 6]
    assert not supervised(torch.ones(1, 2), 2).any()


def test_checkpoint_round_trip(tmp_path) -> None:
    target = toy_target()
    head = make_head(final_norm=True, feature_scale=True, draft_vocab_size=20)
    head.draft_ids.copy_(torch.arange(20) * 3)
    save_head(tmp_path / "head", head, target.fingerprint(), dtype=torch.float32)
    again = load_head(tmp_path / "head", target)
    assert again.config == head.config
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_head_of_another_target_and_damaged_files(tmp_path) -> None:
    head = make_head()
    save_head(tmp_path / "head", head, toy_target().fingerprint())
    with pytest.raises(CheckpointError, match="model_type"):
        load_head(tmp_path / "head", toy_target("qwen2"))
    weights = tmp_path / "head" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        load_head(tmp_path / "head")
