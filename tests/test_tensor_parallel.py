"""A target of which each of four processes holds a part, by transformers' ``tp_plan``, decodes as a whole one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsd_core.errors import FsdError, ModelLoadError
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import EagleDrafter, LMDrafter, LookupDrafter, TreeShape
from fsd_infer.drafters.loading import choose_trees
from fsd_infer.heads.head import EagleConfig, EagleHead
from tests.train_toys import SIZES, VOCAB, join_group, run_group, toy_model

RANKS = 4  # of as many attention heads
PROMPTS = [[5, 6, 7, 5, 6], [9, 10, 11, 30, 40, 21]]


def found_with(target: Target, directory: str) -> dict[str, Any]:
    """What a target decodes with each kind of drafter, and what else reads its weights."""

    def head(**options: Any) -> EagleDrafter:
        torch.manual_seed(3)
        return EagleDrafter(EagleHead(EagleConfig.for_target(target, **options)), target, TreeShape(3, 3, 8))

    small = LMDrafter(Target(AutoModelForCausalLM.from_pretrained(directory)), target, TreeShape.chain(3))
    eagle3 = {"layout": "eagle3", "fused_layers": [0, 1], "draft_vocab_size": VOCAB // 2}
    requests: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "lookup": (LookupDrafter(VOCAB), "exact", {"do_sample": False}),
        "reduced head": (head(draft_vocab_size=VOCAB // 2), "fuzzy:js:0.4", {"do_sample": False}),
        "chosen trees": (choose_trees(head(), target), "exact", {"do_sample": False}),
        "eagle3, drawn": (head(**eagle3), "fuzzy:js:0.4", {"do_sample": True, "seed": 4}),
        "small model, drawn": (small, "exact", {"do_sample": True, "seed": 5}),
    }
    made = {
        name: FuzzyDecoder(target, drafter).generate(PROMPTS, rule=rule, max_new_tokens=16, **options).sequences
        for name, (drafter, rule, options) in requests.items()
    }
    beams = FuzzyDecoder(target, LookupDrafter(VOCAB)).generate(PROMPTS, max_new_tokens=8, num_beams=3)
    return {**made, "beams": beams.sequences, "digest": target.weights_digest()}


def _one_rank(rank: int, port: int, directory: str, out: str) -> None:
    join_group(rank, port, RANK=rank, WORLD_SIZE=RANKS)
    target = Target(AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto"))
    held = target.layers([0])[0].mlp.down_proj.weight
    facts = {"share": held.to_local().numel() / held.numel(), "sharded": target.is_sharded}
    decoder = FuzzyDecoder(target, LookupDrafter(VOCAB))
    try:
        decoder.generate(PROMPTS, do_sample=True, max_new_tokens=2)
    except FsdError as error:
        facts["refused"] = str(error)
    torch.save({**facts, "found": found_with(target, directory)}, f"{out}/rank{rank}.pt")


@pytest.mark.slow
def test_four_processes_decode_as_one(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **{**SIZES, "num_key_value_heads": RANKS, "hidden_size": 64})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # far from uniform
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path / "target")
    target, out = str(tmp_path / "target"), str(tmp_path)
    expected = found_with(Target(AutoModelForCausalLM.from_pretrained(target)), target)
    assert run_group(_one_rank, [(target, out)] * RANKS) == [0] * RANKS
    for rank in range(RANKS):
        made = torch.load(tmp_path / f"rank{rank}.pt")
        assert made["found"] == expected
        assert made["share"] == 1 / RANKS and made["sharded"]
        assert "give all of them one seed" in made["refused"]


def test_a_target_over_several_devices_is_refused_by_name() -> None:
    model = toy_model()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}  # as `device_map="auto"` leaves it
    with pytest.raises(ModelLoadError, match=r"several devices \(0, 1\).*tp_plan"):
        Target(model)
    model.hf_device_map = {"": 0}
    assert not Target(model).is_sharded
