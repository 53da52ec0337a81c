"""Training of MTP layers: rows are packed rightly, the loss falls, and what is exported loads and drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import MtpDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.drafters.mtp import read_layers
from fsd_infer.heads.mtp import find_mtp
from fsd_infer.trees.shape import TreeShape
from fsd_train.cli import main as cli
from fsd_train.models import MtpModule
from fsd_train.models.mtp import IN_TARGET
from fsd_train.packed import TextMask
from fsd_train.packed.reading import use_packed_attention
from tests import train_toys
from tests.covering import fast_only
from tests.families import reference
from tests.published_mtp import FAMILIES, checkpoint, outputs_of
from tests.test_recipes import MTP
from tests.train_toys import VOCAB, answers_of, logged, ready
from tests.train_toys import options as module_options


def source_of(toys: Path, family: str) -> str:
    return str(toys / "target" if family == "llama" else checkpoint(family, 1, VOCAB))


def make(toys: Path, family: str, **given: Any) -> MtpModule:
    chosen = module_options(**{"lr": 3e-3, "warmup_steps": 2, "loss": "kl_pq", "eval_steps": 3, **given})
    return MtpModule(source_of(toys, family), **chosen)


@pytest.mark.parametrize("family", ["mimo", "glm4_moe_lite"])
def test_conversations_of_a_packed_row_are_those_of_decoding(toys: Path, family: str) -> None:
    module = ready(make(toys, family))
    head, text = module.head.eval(), TextMask((5, 4), torch.device("cpu"))
    embeds, states = torch.randn(2, 1, 9, 16).unbind(0)
    with torch.no_grad():
        with use_packed_attention(head):
            packed = head(embeds, states, text.positions, attention_mask=text)
        for part in (slice(0, 5), slice(5, 9)):
            size = part.stop - part.start
            causal = torch.ones(size, size, dtype=torch.bool).tril()[None, None]
            apart = head(embeds[:, part], states[:, part], torch.arange(size)[None], causal)
            torch.testing.assert_close(packed[:, part], apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", fast_only(["llama", *FAMILIES], ["llama", "mimo"]))
def test_a_fit_learns_and_its_export_drafts(toys: Path, tmp_path: Path, family: str) -> None:
    """A new layer, and one of the target's files, whose projection reads the state first."""
    module = make(toys, family)
    run = train_toys.trainer(tmp_path, 25, every=25, limit_val_batches=0)
    run.fit(module, answers_of(toys, batch_tokens=400))
    losses = logged(tmp_path, "loss")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    place = module.export(tmp_path / "head")
    target = Target.from_pretrained(source_of(toys, family), dtype=torch.float32)
    drafter = load_drafter(str(place), target, TreeShape(3, 2, 6))
    assert (
        isinstance(drafter, MtpDrafter) and json.loads((place / "config.json").read_text())["training"]["steps"] == 25
    )
    wanted, made = outputs_of(module.head, drafter.head, width=target.hidden_size)
    torch.testing.assert_close(made, wanted, rtol=0.1, atol=0.05)  # it is stored in bf16
    prompts = [[5, 9, 11], [7, 3, 20, 33, 8]]
    answers = FuzzyDecoder(target, drafter).generate(prompts, max_new_tokens=12, do_sample=False)
    assert answers.sequences == reference(target.model, prompts, max_new_tokens=12)


def test_a_layer_of_the_targets_files_goes_on_unless_a_new_one_is_wanted(toys: Path) -> None:
    own = read_layers(Target.from_pretrained(source_of(toys, "mimo"), dtype=torch.float32)).state_dict()
    for new in (False, True):
        begun = ready(make(toys, "mimo", new=new)).head.state_dict()
        assert begun.keys() == own.keys()
        assert all(torch.equal(begun[name], value) for name, value in own.items()) != new


@pytest.mark.parametrize("family", fast_only(FAMILIES, ["mimo", "glm4_moe", "nemotron_h"]))
def test_what_is_exported_fits_into_the_targets_own_checkpoint(toys: Path, tmp_path: Path, family: str) -> None:
    module = ready(make(toys, family, new=True))
    place = module.export(tmp_path / "head")
    shutil.copytree(source_of(toys, family), tmp_path / "target")
    weights = tmp_path / "target" / "model.safetensors"
    begun = find_mtp(module.target)
    assert begun is not None
    state = {name: value for name, value in load_file(weights).items() if name not in begun.names}
    save_file({**state, **load_file(place / IN_TARGET)}, weights, {"format": "pt"})
    target = Target.from_pretrained(str(tmp_path / "target"), dtype=torch.float32)
    made, separate = (load_drafter(name, target) for name in ("mtp", str(place)))
    assert torch.allclose(*outputs_of(made.head, separate.head, width=target.hidden_size), atol=1e-5)


def test_the_recipe_trains_and_exports(toys: Path, tmp_path: Path) -> None:
    changes = {
        "output_dir": tmp_path / "run", "trainer.max_steps": 3, "trainer.precision": "32-true",
        "trainer.accelerator": "cpu", "model.init_args.target": source_of(toys, "mimo"),
        "data.train_files": f"[{toys / 'answers.jsonl'}]", "data.validation_fraction": 0.2, "data.batch_tokens": 256,
    }  # fmt: skip
    given = [part for name, value in changes.items() for part in (f"--{name}", str(value))]
    assert cli(["fit", "--config", str(MTP), *given]) == 0
    target = Target.from_pretrained(source_of(toys, "mimo"), dtype=torch.float32)
    assert load_drafter(str(tmp_path / "run" / "head"), target).name == "mtp"
