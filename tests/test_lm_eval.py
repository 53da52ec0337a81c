"""The evaluation harness: our model class under its evaluator, our task files, and programs that are run to score."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsd_infer.errors import DataError, FsdError
from tests.bench_toys import Toy
from tests.text_toys import write_rows

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

import lm_eval
from lm_eval.tasks import TaskManager

from fsd_infer.integrations.lm_eval import TASKS, FsdLM, scoring

PROGRAM = {"prompt": "def twice(x):\n", "test": "def check(f):\n    assert f(4) == 8\n", "entry_point": "twice"}


@pytest.fixture(scope="module")
def toy(toy: Toy) -> Toy:
    folder = toy.prompts.parent
    sums = [{"question": f"the cat has {n} cats and {n} more?", "answer": f"#### {2 * n}"} for n in range(4)]
    write_rows(folder / "gsm8k_test_dev.jsonl", [*sums, {"question": "no reference"}])
    write_rows(folder / "HumanEval.jsonl.gz", [PROGRAM])
    texts = [{"category": "summarization", "turns": ["the cat sat"], "reference": ["the cat"]}, {"prompt": "it"}]
    write_rows(folder / "spec_bench_dev.jsonl", texts)
    return toy


@pytest.fixture(scope="module")
def model(toy: Toy) -> FsdLM:
    return FsdLM(str(toy.target), str(toy.drafter), "fuzzy:js:0.2", dtype="fp32", tree="5,1,6", batch_size=3)


def asked(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def test_tasks_end_to_end_in_this_process(toy: Toy, model: FsdLM) -> None:
    data = {"data": str(toy.prompts.parent)}
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=data)
    found = lm_eval.simple_evaluate(
        model=model, tasks=["fsd_gsm8k", "fsd_summaries"], task_manager=manager, apply_chat_template=True,
        gen_kwargs="max_gen_toks=8", bootstrap_iters=0,
    )  # fmt: skip
    samples = found["samples"]
    assert [len(samples[name]) for name in ("fsd_gsm8k", "fsd_summaries")] == [4, 1], "rows that have a reference"
    prompts = [sample["arguments"][0][0] for sample in samples["fsd_gsm8k"]]
    assert prompts[1].startswith("<|start|>user\nthe cat has 1 cats") and prompts[1].endswith("assistant\n")
    ids = model.tokenizer(prompts[1], add_special_tokens=False).input_ids
    alone = model.decoder.generate([ids], model.rule, max_new_tokens=8, temperature=0)
    assert samples["fsd_gsm8k"][1]["resps"] == [[alone.texts[0]]], "one answer whatever the batch"
    scores = [sample["score"] for sample in samples["fsd_gsm8k"]]
    assert found["results"]["fsd_gsm8k"]["score,none"] == sum(scores) / 4
    assert 0 <= found["results"]["fsd_summaries"]["score,none"] <= 1
    facts = found["config"]["fsd"]
    assert facts["rule"]["threshold"] == 0.2 and facts["answers"] == 5 and facts["tau"] >= 1
    assert 1 <= facts["target_forwards"] <= facts["answer_tokens"] <= 8 and 0 <= facts["cut_at_limit"] <= 1
    with pytest.raises(ValueError, match="marked as unsafe"):  # programs run only with consent
        lm_eval.simple_evaluate(model=model, tasks=["fsd_humaneval"], task_manager=manager)


PROGRAMS = [
    ("    return x\n", 0.0), ("    return 2 *\n", 0.0), ("    while True: pass\n", 0.0),
    ("    open('big', 'wb').write(b'0' * 2**22)\n    return 2 * x\n", 0.0),
    ("    import os; assert 'HOME' not in os.environ and not os.listdir('.')\n    return 2 * x\n", 1.0),
    ("    y = bytearray(2**33)\n    return 2 * x\n", 0.0), ("    return 2 * x\0\n", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("body", "right"), PROGRAMS)
def test_programs_are_run_within_limits(body: str, right: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SECONDS", 2)
    assert scoring.passes({"row": json.dumps(PROGRAM)}, [body]) == {"score": right}


def test_log_likelihoods_are_the_targets(toy: Toy, model: FsdLM) -> None:
    plain = AutoModelForCausalLM.from_pretrained(toy.target, dtype=torch.float32)
    tokenizer = model.tokenizer
    whole = tokenizer("the cat sat on the mat", add_special_tokens=False).input_ids
    context = tokenizer("the cat", add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = plain(torch.tensor([whole])).logits[0].log_softmax(-1)
    scores = logits[:-1].gather(1, torch.tensor(whole[1:])[:, None])[:, 0][len(context) - 1 :]
    model._templated = True  # no special tokens in front
    (found,) = model.loglikelihood([asked("the cat", " sat on the mat")], disable_tqdm=True)
    assert found[0] == pytest.approx(float(scores.sum()), abs=1e-4) and found[1] is False
    best = int(logits[len(context) - 1].argmax())
    assert model._loglikelihood_tokens([(None, context, [best])])[0][1] is True
    (rolled,) = model.loglikelihood_rolling([asked("the cat sat on the mat")], disable_tqdm=True)
    (first,) = model._loglikelihood_tokens([(None, [model.prefix_token_id], whole)])
    assert rolled == pytest.approx(first[0], abs=1e-4)


def test_bad_input_is_named(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(scoring.DATA, str(tmp_path))
    with pytest.raises(DataError, match=r"svamp_dev.json: no such file. Name its folder with --metadata"):
        scoring.rows("svamp_dev.json")
    write_rows(tmp_path / "rows.jsonl", [{"question": "x"}])
    with pytest.raises(DataError, match="rows.jsonl: no row has a reference"):
        scoring.rows("rows.jsonl")
    with pytest.raises(DataError, match=r"rows.jsonl:1: expected texts in prompt, test and entry_point"):
        scoring.programs("rows.jsonl")
    with pytest.raises(FsdError, match="batch_size must be a whole number from 1 on, got 'auto'"):
        FsdLM(str(toy.target), batch_size="auto")


@pytest.mark.slow
def test_the_harness_own_command_offline(toy: Toy, tmp_path: Path) -> None:
    """``lm_eval --model fsd``: the task file's path is all that makes the model known."""
    words = f"""-m lm_eval --model fsd --apply_chat_template --limit 3 --tasks {TASKS}/gsm8k.yaml,{TASKS}/humaneval.yaml
        --model_args target={toy.target},drafter={toy.drafter},rule=fuzzy:js:0.2:budget=1,dtype=fp32
        --confirm_run_unsafe_code --gen_kwargs max_gen_toks=8 --output_path {tmp_path} --log_samples"""
    argv = [sys.executable, *words.split(), "--metadata", json.dumps({"data": str(toy.prompts.parent)})]
    root = str(Path(__file__).parent.parent)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": root}
    done = subprocess.run(argv, env={**os.environ, **offline}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = tmp_path.rglob("results_*.json")
    record = json.loads(results.read_text())
    assert {"fsd_gsm8k", "fsd_humaneval"} == set(record["results"]) and record["config"]["fsd"]["rule"]["budget"] == 1
    assert record["n-samples"]["fsd_gsm8k"]["effective"] == 3
