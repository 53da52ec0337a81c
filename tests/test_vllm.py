"""Exported heads decode in vLLM as they do here: `make test-vllm`, in an environment of vLLM's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import seed_everything

from benchmarks.heads_in_vllm import compare
from fsd_infer import Target
from fsd_infer.chat.encoding import encode_chat
from tests.head_toys import EAGLE3, make_target, train, write_answers

PYTHON = Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
HEADS: dict[str, dict[str, Any]] = {"eagle3": EAGLE3, "eagle": {"layout": "eagle"}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="no vLLM: make test-vllm installs it, or set VLLM_PYTHON"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the comparison gives for a head of each layout, in float32, on 40 prompts."""
    seed_everything(0)
    root = tmp_path_factory.mktemp("vllm")
    target = Target.from_pretrained(str(make_target(root / "target")))
    write_answers(root / "answers.jsonl", target, 96)
    prompts = [
        encode_chat(target.tokenizer, [{"role": "user", "content": f"what is {number * 41 % 103}"}])
        for number in range(40)
    ]
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
