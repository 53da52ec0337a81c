"""Exported heads in vLLM, which lives in an environment of its own: `make test-vllm`.

Their configs by vLLM's own classes; answers, acceptance and logits beside ours.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from benchmarks.heads_in_vllm import compare
from benchmarks.peers import vllm_variables
from fsd_core.text.encoding import encode_chat
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.drafters import EagleDrafter
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.export import export_head
from fsd_infer.heads.head import EagleHead
from fsd_train.cli import main as cli
from fsd_train.commands.export import target_facts
from tests.families import load_head
from tests.head_toys import EAGLE3, WIDTH, make_target, train, write_answers
from tests.test_doctor import RECIPE as OVERFITTED
from tests.vllm_distributions import FUZZY, NEEDS_VLLM, PYTHON, run

HEADS: dict[str, dict[str, Any]] = {"eagle3": EAGLE3, "eagle": {"layout": "eagle"}}

pytestmark = NEEDS_VLLM


def test_what_is_learnt_by_heart_is_accepted_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fsd-train doctor --overfit` with vLLM."""
    target = make_target(tmp_path / "target")
    write_answers(tmp_path / "answers.jsonl", Target.from_pretrained(str(target)), 4)
    (tmp_path / "recipe.yaml").write_text(OVERFITTED.replace("TARGET", str(target)))
    for name, value in {**vllm_variables(PYTHON, 1), "VLLM_PYTHON": str(PYTHON)}.items():
        monkeypatch.setenv(name, value)
    words = ["--target", str(target), "--data", str(tmp_path / "answers.jsonl"), "--json", str(tmp_path / "found.json")]
    status = cli(["doctor", *words, "--overfit", "30", "--config", str(tmp_path / "recipe.yaml")])
    lines = {line["check"]: line for line in json.loads((tmp_path / "found.json").read_text())}
    assert status == 0 and lines["vllm"]["ok"], lines
    assert "its first 48 of 48 tokens" in lines["vllm"]["says"], lines


NEW: dict[str, Any] = {**EAGLE3, "fc_norm": True, "norm_output": True, "num_layers": 2}
EXPORTS: dict[str, tuple[str, dict[str, Any], str]] = {  # head's options, format; how vLLM is asked for it
    "eagle": ("eagle", {"layout": "eagle"}, "vllm"),
    "eagle3": ("eagle3", EAGLE3, "vllm"),
    "eagle3.1": ("eagle3", NEW, "vllm"),
    "speculators": ("speculators", EAGLE3, "speculators"),
    "speculators, 3.1": ("speculators", NEW, "speculators"),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM makes of each export's config."""
    root = tmp_path_factory.mktemp("configs")
    target = Target.from_pretrained(str(make_target(root / "target")))
    facts = target_facts(str(root / "target"))
    for name, (_, options, to) in EXPORTS.items():
        size = 200 if options["layout"] == "eagle3" else None
        head = EagleHead(EagleConfig.for_target(target, draft_vocab_size=size, **options))
        export_head(head, root / name, to, facts)
    script = Path(__file__).parent.parent / "benchmarks" / "peers" / "read_vllm_configs.py"
    heads = [f"{method}={root / name}" for name, (method, _, _) in EXPORTS.items()]
    variables = {**os.environ, **vllm_variables(PYTHON, 1)}
    variables.pop("PYTHONPATH", None)
    command = [str(PYTHON), str(script), str(root / "target"), *heads]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[str(root / name)] for name in EXPORTS}


@pytest.mark.parametrize("name", EXPORTS)
def test_vllms_config_classes_read_what_we_write(name: str, configs: dict[str, dict[str, Any]]) -> None:
    kind, options, _ = EXPORTS[name]
    found = configs[name]
    eagle3 = options["layout"] == "eagle3"
    assert Path(found["target"]).name == "target"
    assert found["method"] == ("eagle3" if eagle3 else "eagle")
    assert found["model"] == ("Eagle3LlamaForCausalLM" if eagle3 else "EagleLlamaForCausalLM")
    assert found["config"] == ("SpeculatorsConfig" if kind == "speculators" else "EAGLEConfig")
    assert found["hidden_size"] == WIDTH and found["num_hidden_layers"] == options.get("num_layers", 1)
    assert found["rope_parameters"]["rope_theta"] == 10000.0 and found["tie_word_embeddings"] is False
    if eagle3:
        assert found["draft_vocab_size"] == 200 and found["target_hidden_size"] == WIDTH
        assert found["norm_before_residual"] is False
        assert found["fc_norm"] is found["norm_output"] is (options is NEW)
        entering = [number + 1 for number in EAGLE3["fused_layers"]]
        assert found["eagle_aux_hidden_state_layer_ids"] == entering


def prompts_for(target: Target) -> list[list[int]]:
    return [
        encode_chat(target.tokenizer, [{"role": "user", "content": f"what is {number * 41 % 103}"}])
        for number in range(40)
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, dict[str, Any]]:
    """What the comparison gives for a head of each layout, in float32, on 40 prompts."""
    seed_everything(0)
    target = Target.from_pretrained(str(make_target(root / "target")))
    write_answers(root / "answers.jsonl", target, 96)
    prompts = prompts_for(target)
    found: dict[str, dict[str, Any]] = {}
    plain = None
    for name, head in HEADS.items():
        train(root, head)
        (root / "head").rename(root / name)
        found[name] = compare(
            PYTHON, root / "target", root / name, prompts, root / f"vllm-{name}", new=32, dtype="float32", plain=plain
        )
        plain = found[name]["plain"]
    return found


@pytest.mark.parametrize("name", HEADS)
def test_a_head_decodes_in_vllm_as_here(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert result["method"] == name
    assert result["same_answers"] == result["prompts"] == 40
    logits = result["logits"]
    assert logits["positions"] > 4 and logits["same_argmax"] == 1.0
    assert logits["difference"] < 1e-3 * logits["deviation"]
    vllm, ours = result["vllm"], result["ours"]
    assert ours["accepted"][0] > 0.15, "a head that drafts by chance compares nothing"
    noise = 3 * (0.5 / min(vllm["rounds"], ours["rounds"])) ** 0.5
    assert all(abs(a - b) < noise for a, b in zip(vllm["accepted"], ours["accepted"], strict=True)), result


@pytest.mark.parametrize("name", HEADS)
def test_lossy_answers_in_vllm_are_ours(name: str, root: Path, results: dict[str, dict[str, Any]]) -> None:
    """Greedy, the same head, chains of four drafts, with and without a budget: token by token."""
    target = Target.from_pretrained(str(root / "target"), dtype=torch.float32)
    head = load_head(root / name, target)
    if not head.eagle3:
        head.set_draft_ids(None)  # vLLM knows no reduced vocabulary there
    drafter = EagleDrafter(head.cast(torch.float32), target, TreeShape(4, 1, 5), context_ids=False)
    decoder, prompts = FuzzyDecoder(target, drafter), prompts_for(target)[:16]
    speculation = {"method": name, "model": str(root / f"vllm-{name}" / "exported"), "num_speculative_tokens": 4}
    rules = ["exact", "tilted:0.5:exact_ngram_size=0:min_p=0", "tilted:0.3:exact_ngram_size=3:min_p=0:budget=2"]
    params = [{"temperature": 0.0, "max_tokens": 32, "extra_args": {"rule": rule}} for rule in rules]
    engine = {"model": str(root / "target"), "speculative_config": speculation, "logits_processors": FUZZY}
    answers, _ = run(engine, [[each, prompts] for each in params])
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "chat": False}
    for rule, found in zip(rules, answers, strict=True):
        assert found == [decoder.generate([prompt], rule=rule, **options).sequences[0] for prompt in prompts], rule
        assert rule == "exact" or found != answers[0]
