"""Every recipe trains, exports and decodes on a tiny model of its family; so does what `new-recipe` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from fsd_core.errors import ModelLoadError
from fsd_core.text.encoding import encode_chat
from fsd_infer import FuzzyDecoder
from fsd_infer.heads.formats import read_config
from fsd_train.cli import main as cli
from fsd_train.commands.new_recipe import recipe_for
from fsd_train.commands.short_recipe import expanded
from tests.families import reference, tiny_model
from tests.text_toys import tiny_tokenizer, write_rows
from tests.train_toys import logged

STORIES = Path(__file__).resolve().parent.parent / "recipes" / "stories.yaml"
DSPARK = STORIES.with_name("smollm2-135m-dspark.yaml")  # tests/test_block_training.py
MTP = STORIES.with_name("qwen3.5-0.8b-mtp.yaml")  # tests/test_mtp_training.py
RECIPES = sorted(set(STORIES.parent.glob("*.yaml")) - {STORIES, DSPARK, MTP})  # of EAGLE-like heads
FAMILY = {
    "gemma-2-9b": "gemma2", "gemma-3-1b": "gemma3_text", "llama-3.1-8b": "llama", "mistral-7b": "mistral",
    "phi-4": "phi3", "qwen2.5-7b": "qwen2", "qwen3-30b-a3b": "qwen3_moe", "qwen3-8b": "qwen3",
    "smollm2-135m": "llama", "template": "llama", "tinyllama-1.1b": "llama", "tinyllama-1.1b-cpu": "llama",
}  # fmt: skip
FSD = ("smollm2-135m", "tinyllama-1.1b-cpu")  # recipes for two CPU cores
Targets = Callable[[str], Path]
ANSWERS = ["the cat sat on the mat", "it is there", "that is the answer to the end", "what is on the mat there"]


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """Directory of a tiny fp32 model of a family with the tiny tokenizer, made when first asked for."""
    root = tmp_path_factory.mktemp("families")
    tokenizer = tiny_tokenizer()

    def make(family: str) -> Path:
        directory = root / family
        if not directory.exists():
            special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            tiny_model(family, vocab_size=len(tokenizer), **special).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with token ids."""
    tokenizer = tiny_tokenizer()
    rows: list[dict[str, Any]] = []
    for number in range(24):
        messages = [{"role": "user", "content": f"what is {number}"}]
        answer = " ".join(ANSWERS[(number + turn) % len(ANSWERS)] for turn in range(2)) + "<|end|>"
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        row = {"messages": messages, "response": answer, "response_ids": ids}
        rows.append({**row, "prompt_ids": encode_chat(tokenizer, messages)})
    return write_rows(tmp_path_factory.mktemp("answers") / "answers.jsonl", rows)


def small_config(recipe: Path, target: Path, answers: Path, out: Path) -> Path:
    """The recipe with the tiny target and its answers; written to ``out``."""
    config = yaml.safe_load(recipe.read_text())
    config["model"]["target"] = str(target)
    config["data"]["train_files"] = [str(answers)]
    config["data"].pop("features", None)
    config["data"].pop("tokenizer", None)
    if config["model"].get("draft_vocab_size"):
        config["model"]["draft_vocab_size"] = 200
    if config["model"].get("head", {}).get("fused_layers"):
        config["model"]["head"]["fused_layers"] = [0, 1]  # the tiny target has two layers
    return shortened(config, out)


def shortened(config: dict[str, Any], out: Path) -> Path:
    """The configuration with callbacks that act every second step and decode little; written to ``out``."""
    defaults, own = expanded([config])
    config = {**own, "trainer": defaults["trainer"] | own["trainer"]}
    kept = [one for one in config["trainer"]["callbacks"] if not one["class_path"].endswith("LossCurve")]
    config["trainer"]["callbacks"] = kept  # tests/test_training.py draws a curve
    for callback in kept:
        if "every_n_train_steps" in callback.get("init_args", {}):
            callback["init_args"]["every_n_train_steps"] = 2
        if callback["class_path"].endswith("DecodedTau"):
            callback["init_args"].update(prompts=1, max_new_tokens=4)
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(config: Path, steps: int) -> None:
    fast = f"max_steps={steps} accelerator=cpu devices=1 log_every_n_steps=1 limit_val_batches=1"
    options = [f"--trainer.{one}" for one in f"{fast} enable_progress_bar=false enable_model_summary=false".split()]
    small = [f"--data.{one}" for one in ("batch_tokens=128", "validation_fraction=0.2", "max_length=64")]
    assert cli(["fit", "--config", str(config), *options, *small]) == 0


def check_decoding(target: Path, head: Path) -> None:
    """Drafting with the head gives the target's own greedy answer."""
    decoder = FuzzyDecoder.from_pretrained(str(target), head, dtype=torch.float32, device="cpu")
    prompt = decoder.encode("what is the mat", chat=True)
    out = decoder.generate([prompt], max_new_tokens=12, do_sample=False)
    assert out.sequences == reference(decoder.target.model, [prompt], max_new_tokens=12)
    assert out.stats.rows[0].new_tokens == len(out.sequences[0]) > 0


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_trains_exports_and_decodes(recipe: Path, targets: Targets, answers: Path, here: Path) -> None:
    target = targets(FAMILY[recipe.stem])
    train(small_config(recipe, target, answers, here), steps=2)
    (head,) = here.glob("runs/*/head")
    assert list(here.glob("runs/*/checkpoints/last.ckpt"))
    decoded = logged(here, "decoded_tau/exact")
    assert len(decoded) == 1 and decoded[0] >= 1
    # but for two recipes, heads are of the layout that other programs read
    assert read_config(head)["layout"] == ("fsd" if recipe.stem in FSD else "eagle3")
    exported = here / "exported"
    assert cli(["export", str(head), str(exported), "--to", "vllm"]) == (2 if recipe.stem in FSD else 0)
    check_decoding(target, head if recipe.stem in FSD else exported)


def test_the_recipe_for_stories_trains_a_small_lm(targets: Targets, answers: Path, here: Path) -> None:
    config = yaml.safe_load(STORIES.read_text())
    target = targets("llama")
    config["model"]["init_args"].update(target=str(target), drafter=str(target), loss_vocab_size=200)
    config["data"].update(train_files=[str(answers)], features=None)
    train(shortened(config, here), steps=3)
    check_decoding(target, here / "runs" / "stories" / "head")


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen3_5_text", pytest.param("mamba", marks=pytest.mark.slow)])
def test_new_recipe_can_be_trained(family: str, targets: Targets, answers: Path, here: Path) -> None:
    target = targets(family)
    recipe = here / "recipes" / "new.yaml"
    wanted = ["new-recipe", "--target", str(target), "--data", str(answers), "--output", str(recipe)]
    assert cli(wanted) == 0
    config = yaml.safe_load(recipe.read_text())
    assert config["model"]["target"] == str(target) and config["data"]["train_files"] == [str(answers)]
    head = config["model"]["head"]
    assert head["feature_scale"] is (family not in ("gpt2", "mamba"))  # which call their final norms otherwise
    assert head.get("layer") == ("llama" if family == "gemma2" else None)
    train(shortened(config, here), steps=1)
    (head,) = here.glob("runs/*/head")
    assert logged(here, "decoded_tau/exact")
    check_decoding(target, head)
    assert cli(wanted) == 2  # does not overwrite


def test_a_recipe_for_ids_and_a_few_texts_reads_both(targets: Targets, answers: Path, here: Path) -> None:
    text = [{"prompt": "what is it", "response": "the end"}]
    more, broken = write_rows(here / "text.jsonl", text), write_rows(here / "broken.jsonl", [{"prompt_ids": []}])
    for files, wanted in (([answers], False), ([broken, answers], False), ([broken, answers, more], True)):
        assert ("tokenizer:" in recipe_for(str(targets("llama")), list(map(str, files)))) is wanted


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97,
    "num_attention_heads": 4,
}  # fmt: skip


UNSUPPORTED = [
    ({"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97}, "Rwkv.* takes no positions"),
    ({**LLAMA, "layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
    ({"model_type": "t5"}, "has an encoder beside its decoder"),
]


@pytest.mark.parametrize(("config", "problem"), UNSUPPORTED, ids=["rwkv", "chunked", "t5"])
def test_unsupported_targets_are_refused_by_name(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    save_file({name: torch.zeros(1) for name in "ab"}, tmp_path / "model.safetensors")  # one for each layer
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=problem):
        recipe_for(str(tmp_path))
