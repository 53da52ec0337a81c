"""Training of MTP layers: rows are packed rightly, the loss falls, what is exported drafts, also from the target."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsd_core.errors import FsdError
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import MtpDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.drafters.mtp import read_layers
from fsd_infer.heads.mtp import find_mtp
from fsd_infer.heads.weights import Weights
from fsd_infer.trees.shape import TreeShape
from fsd_train.cli import main as cli
from fsd_train.models import MtpModule
from fsd_train.models.mtp import IN_TARGET
from fsd_train.models.slim import load_slim
from fsd_train.packed import TextMask
from fsd_train.packed.reading import use_packed_attention
from tests import train_toys
from tests.covering import fast_only
from tests.families import reference
from tests.published_mtp import FAMILIES, MOE, change_config, checkpoint, outputs_of
from tests.seeing_toys import SEEING, save_seeing
from tests.test_recipes import MTP
from tests.test_seeing import PROMPTS as TEXTS
from tests.train_toys import VOCAB, answers_of, logged, ready
from tests.train_toys import options as module_options


def source_of(toys: Path, family: str) -> str:
    return str(toys / "target" if family == "llama" else checkpoint(family, 1, VOCAB))


def module_of(source: str | Path, **given: Any) -> MtpModule:
    chosen = module_options(**{"lr": 3e-3, "warmup_steps": 2, "loss": "kl_pq", "eval_steps": 3, **given})
    return MtpModule(str(source), **chosen)


def make(toys: Path, family: str, **given: Any) -> MtpModule:
    return module_of(source_of(toys, family), **given)


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
    assert isinstance(drafter, MtpDrafter)
    assert json.loads((place / "config.json").read_text())["training"]["steps"] == 25
    wanted, made = outputs_of(module.head, drafter.head, width=target.hidden_size)
    torch.testing.assert_close(made, wanted, rtol=0.1, atol=0.05)  # it is stored in bf16
    prompts = [[5, 9, 11], [7, 3, 20, 33, 8]]
    answers = FuzzyDecoder(target, drafter).generate(prompts, max_new_tokens=12, do_sample=False)
    assert answers.sequences == reference(target.model, prompts, max_new_tokens=12)


def test_a_layer_of_the_targets_files_goes_on_unless_a_new_one_is_wanted(toys: Path) -> None:
    """Also with cached features, for which the target is loaded without its layers."""
    own = read_layers(Target.from_pretrained(source_of(toys, "mimo"), dtype=torch.float32)).state_dict()
    for new in (False, True):
        begun = ready(make(toys, "mimo", new=new)).head.state_dict()
        assert begun.keys() == own.keys()
        assert all(torch.equal(begun[name], value) for name, value in own.items()) != new
        cached = make(toys, "mimo", new=new)
        cached._frozen.target = load_slim(cached.target_name, torch.float32)
        cached.configure_model()
        train_toys.assert_same(cached.head.state_dict(), begun)


@pytest.mark.parametrize("family", fast_only(FAMILIES, ["mimo", "glm4_moe", "nemotron_h"]))
def test_what_is_exported_fits_into_the_targets_own_checkpoint(toys: Path, tmp_path: Path, family: str) -> None:
    module = ready(make(toys, family, new=True))
    place = module.export(tmp_path / "head")
    shutil.copytree(source_of(toys, family), tmp_path / "target")
    weights = tmp_path / "target" / "model.safetensors"
    begun = find_mtp(module.target)
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


# into the checkpoint of the target ------------------------------------------------------------------------------------


def sharded(source: Path, place: Path) -> Path:
    """The checkpoint in three files."""
    place.mkdir()
    state = load_file(source / "model.safetensors")
    names = sorted(state, key=lambda name: ("mtp" in name or "layers.2." in name, name))  # in the last one or two
    count = len(names)
    parts = [names[i * count // 3 : (i + 1) * count // 3] for i in range(3)]
    files = {f"model-0000{i + 1}-of-00003.safetensors": part for i, part in enumerate(parts)}
    places = {name: file for file, held in files.items() for name in held}
    for file in files:
        save_file({name: state[name] for name, at in places.items() if at == file}, place / file, {"format": "pt"})
    assert places.keys() == state.keys()
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for name in ("config.json", "generation_config.json"):
        (place / name).write_text((source / name).read_text())
    return place


def write_layer(place: Path, target: Path) -> None:
    ready(module_of(target, new=True)).export(place)


def values(directory: Path) -> dict[str, Any]:
    weights = Weights(directory)
    return {name: weights.read(name) for name in weights.shapes}


def same(*drafters: Any) -> None:
    """Two MTP drafters of one target compute the same."""
    heads = [drafter.head for drafter in drafters]
    torch.testing.assert_close(*outputs_of(*heads, width=drafters[0].target.hidden_size))


@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "qwen3_5_text"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_layer_goes_into_its_target(tmp_path: Path, family: str, shards: int) -> None:
    source = checkpoint(family, 1, VOCAB)
    source = sharded(source, tmp_path / "sharded") if shards > 1 else source
    write_layer(tmp_path / "layer", source)
    assert cli(["export", str(tmp_path / "layer"), str(tmp_path / "made"), "--to", "target"]) == 0
    old, new = values(source), values(tmp_path / "made")
    changed = {name for name in new if name not in old or not torch.equal(new[name], old[name])}
    assert changed and all("mtp" in name or "layers.2." in name for name in changed | (old.keys() - new.keys()))
    target = Target.from_pretrained(str(tmp_path / "made"), dtype=torch.float32)
    made, beside = load_drafter(None, target), load_drafter(str(tmp_path / "layer"), target)
    assert made.name == "mtp"
    same(made, beside)


SEEN = {"glm_ocr": "model.language_model.layers.2.", "glm4v_moe": "model.language_model.layers.2.", "qwen3_5": "mtp."}


@pytest.mark.parametrize("family", SEEN)
def test_a_layer_goes_into_a_target_that_sees(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose layers' names begin with model.language_model., and whose vision tower may have more layers."""
    for name, sparse in (("glm_ocr", {}), ("glm4v_moe", MOE)):
        toy = copy.deepcopy(SEEING["glm4v"])
        toy["text_config"] |= sparse
        toy["vision_config"] |= {"depth": 4}
        monkeypatch.setitem(SEEING, name, toy)
    save_seeing(tmp_path / "target", family)
    write_layer(tmp_path / "layer", tmp_path / "target")
    assert cli(["export", str(tmp_path / "layer"), str(tmp_path / "made"), "--to", "target"]) == 0
    old, new = values(tmp_path / "target"), values(tmp_path / "made")
    assert all(torch.equal(new[name], value) for name, value in old.items())
    assert len(new) > len(old) and all(name.startswith(SEEN[family]) for name in new.keys() - old.keys())
    assert load_file(tmp_path / "layer" / IN_TARGET).keys() == new.keys() - old.keys()
    config = json.loads((tmp_path / "made" / "config.json").read_text())["text_config"]
    assert config["mtp_num_hidden_layers" if family == "qwen3_5" else "num_nextn_predict_layers"] == 1
    target = Target.from_pretrained(str(tmp_path / "made"), dtype=torch.float32)
    made = load_drafter(None, target)
    assert made.name == "mtp"
    same(made, load_drafter(str(tmp_path / "layer"), target))
    answers = FuzzyDecoder(target, made).generate(TEXTS, max_new_tokens=8, do_sample=False)
    assert answers.sequences == reference(target.model, TEXTS, max_new_tokens=8)


def test_the_new_layer_keeps_its_precision_in_a_quantised_target(tmp_path: Path) -> None:
    source = sharded(checkpoint("mimo", 1, VOCAB), tmp_path / "sharded")
    write_layer(tmp_path / "layer", source)
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    change_config(source, quantization_config=quantised)
    assert cli(["export", str(tmp_path / "layer"), str(tmp_path / "made"), "--to", "target"]) == 0
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    kept = config["quantization_config"].pop("modules_to_not_convert")
    assert {"lm_head", "model.mtp_layers.0.input_proj", "model.mtp_layers.0.mlp.up_proj"} <= set(kept)
    assert config["num_nextn_predict_layers"] == 1


def test_what_has_no_place_is_refused_by_name(tmp_path: Path, toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_layer(tmp_path / "layer", toys / "target")
    for given, words in (
        ([str(tmp_path / "layer"), str(tmp_path / "made"), "--to", "target"], "checkpoints of llama have no layout"),
        ([str(tmp_path / "layer"), str(tmp_path / "made"), "--to", "vllm"], "--to target puts it into its target"),
        ([str(tmp_path / "layer"), str(toys / "target"), "--to", "target", "--overwrite"], "is a source of the export"),
    ):
        try:
            assert cli(["export", *given]) != 0
            said = capsys.readouterr().err
        except FsdError as error:
            said = str(error)
        assert words in said


@pytest.mark.parametrize("new", [True, False])
def test_a_checkpoint_of_training_is_exported(tmp_path: Path, new: bool) -> None:
    module, file = ready(module_of(checkpoint("mimo", 1, VOCAB), new=new)), tmp_path / "last.ckpt"
    options = {name: module.hparams[name] for name in ("target", "unroll_steps", "new")}
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": options}, file)
    places = {to: tmp_path / to for to in ("speculators", "target")}
    assert all(cli(["export", str(file), str(place), "--to", to]) == 0 for to, place in places.items())
    target = Target.from_pretrained(str(places["target"]), dtype=torch.float32)
    assert cli(["export", str(file), str(tmp_path / "other"), "--to", "vllm"]) != 0
    same(load_drafter(None, target), load_drafter(str(places["speculators"]), target))
