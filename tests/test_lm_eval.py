"""The evaluation harness: our model class under its evaluator, our task files, and programs that are run to score."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM

from fsd_core.errors import ContextLengthError, DataError, FsdError
from tests.bench_toys import Toy
from tests.text_toys import write_rows

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

import lm_eval
from lm_eval.tasks import TaskManager

from fsd_bench.lm_eval import TASKS, FsdLM, scoring
from fsd_bench.lm_eval.model import generate_options
from fsd_bench.lm_eval.texts import Until, cut

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
def loaded(toy: Toy) -> FsdLM:
    return FsdLM(str(toy.target), str(toy.drafter), "fuzzy:js:0.2", dtype="fp32", tree="5,1,6", batch_size=3)


@pytest.fixture
def model(loaded: FsdLM) -> FsdLM:
    loaded._templated = False
    return loaded


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
    alone = model.decoder.generate([ids], rule=model.rule, max_new_tokens=8, temperature=0)
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
    monkeypatch.setattr("fsd_bench.code.SECONDS", 2)
    assert scoring.passes({"row": json.dumps(PROGRAM)}, [body]) == {"score": right}


def summed(toy: Toy, ids: list[int], first: int) -> float:
    """The plain model's log-likelihood of ids[first:] after ids[:first]."""
    plain = AutoModelForCausalLM.from_pretrained(toy.target, dtype=torch.float32)
    with torch.no_grad():
        logits = plain(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    return float(logits.gather(1, torch.tensor(ids[1:])[:, None])[first - 1 :].sum())


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_text_without_context_follows_bos_which_is_not_scored(
    toy: Toy, model: FsdLM, adds_bos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = copy.deepcopy(model.tokenizer)
    bos, text = tokenizer.bos_token_id, "the cat sat"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if adds_bos:
        single = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", bos)])
        tokenizer.backend_tokenizer.post_processor = single
    monkeypatch.setattr(model, "tokenizer", tokenizer)
    right = pytest.approx(summed(toy, [bos, *ids], 1), abs=1e-4)
    assert model.loglikelihood([asked("", text)], disable_tqdm=True)[0][0] == right
    assert model.loglikelihood_rolling([asked(text), asked("<|start|>" + text)], disable_tqdm=True) == [right] * 2
    assert model.tok_encode("<|start|>" + text) == [bos, *ids], "not twice"
    for role, other in (("bos_token", tokenizer.eos_token_id), ("eos_token", None)):
        setattr(tokenizer, role, None)
        if other is None:
            with pytest.raises(FsdError, match="no BOS and no EOS"):
                model.loglikelihood([asked("", text)], disable_tqdm=True)
        else:
            assert model.prefix_token_id == other


def test_only_generated_text_ends_an_answer(model: FsdLM) -> None:
    tokenizer = model.tokenizer
    ids = tokenizer("the cat\n\nsat \u6f22<|end|>", add_special_tokens=False).input_ids

    def ended(until: list[str], start: int) -> int:
        """The number of tokens after which an answer ends; 0: it does not."""
        stop = Until(tokenizer, until, start)
        ends = [bool(stop(torch.tensor([ids[: start + n]]), None)[0]) for n in range(1, len(ids) - start + 1)]
        return ends.index(True) + 1 if any(ends) else 0

    newline = next(place for place, token in enumerate(ids) if "\n" in tokenizer.decode([token]))
    single = tokenizer("\n", add_special_tokens=False).input_ids
    text = tokenizer.decode(ids[newline + len(single) :])
    assert ended(["\n\n"], 0) and not (text.startswith("\n") and ended(["\n\n"], newline + len(single)))
    assert ended(["<|end|>"], 0) == len(ids) and ended(["\u6f22"], 0) == len(ids) - 1
    assert ended(["", "nothing"], 0) == 0 == ended(["\ufffd"], 0), "half a character is no text"
    assert ended(["\u6f22<|end|>"], 0) == len(ids) and ended(["<|end|>x"], 0) == 0
    assert ended(["catsat"], 0) == 0
    marked = tokenizer("the<|start|>cat", add_special_tokens=False).input_ids
    for until, text in ((["sat", "\n\n", ""], "the cat"), (["t \u6f22<|end|>"], "the cat\n\nsa"), (["x"], None)):
        assert cut(tokenizer, ids, until) == (text or tokenizer.decode(ids[:-1]), text is not None)
    assert cut(tokenizer, marked, ["e<|start|>c"]) == ("th", True) == cut(tokenizer, marked, ["eca"])
    whole = model.generate_until([asked("the cat\n", {"until": [], "max_gen_toks": 8})], disable_tqdm=True)[0]
    short = model.generate_until([asked("the cat\n", {"until": ["\n\n"], "max_gen_toks": 8})], disable_tqdm=True)[0]
    assert short == whole.partition("\n\n")[0]


def test_long_prompts_are_cut_on_the_left_with_a_warning(toy: Toy, model: FsdLM, recwarn: Any) -> None:
    limit = model.decoder.target.max_positions
    assert limit == 256
    long = [3 + number % 50 for number in range(300)]
    before, answer = model.cut_prompts, [7, 8, 9, 10, 11]
    right = pytest.approx(summed(toy, long[-252:] + answer, 252), abs=1e-3)
    assert model._loglikelihood_tokens([(None, long[-252:], answer)])[0][0] == right and not recwarn.list
    with pytest.warns(UserWarning, match="1 of 2 prompts do not fit .* 256 tokens and lost up to 48 tokens"):
        found = model._loglikelihood_tokens([(None, long, answer), (None, long[:9], answer)])
    assert found[0][0] == right and model.cut_prompts == before + 1
    with pytest.raises(ContextLengthError, match="continuation has 257 tokens"):
        model._loglikelihood_tokens([(None, [5], long[:257])])
    with pytest.warns(UserWarning, match="lost up to"):
        model.generate_until([asked("the cat " * 300, {"max_gen_toks": 8})], disable_tqdm=True)
    with pytest.raises(ContextLengthError, match="max_gen_toks=256 leaves no room .* max_gen_toks=128"):
        model.generate_until([asked("the cat", {})], disable_tqdm=True)
    for wrong, words in (({"max_length": 5}, "counts the prompt too"), ({"num_return_sequences": 2}, "one answer")):
        with pytest.raises(FsdError, match=words):
            generate_options(wrong)
    assert generate_options({"max_completion_tokens": 5})[1]["max_new_tokens"] == 5


@pytest.mark.parametrize("as_turns", [True, False])
def test_all_turns_of_a_conversation_are_asked(model: FsdLM, tmp_path: Path, as_turns: bool) -> None:
    turns = [("system", "it is"), ("user", "the cat?"), ("assistant", "sat"), ("user", "on the mat?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    write_rows(tmp_path / "svamp_dev.json", [{"messages": messages, "answer": "4"}])
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"data": str(tmp_path)})
    found = lm_eval.simple_evaluate(
        model=model, tasks=["fsd_svamp"], task_manager=manager, apply_chat_template=True, bootstrap_iters=0,
        gen_kwargs="max_gen_toks=2", fewshot_as_multiturn=as_turns,
    )  # fmt: skip
    prompt = found["samples"]["fsd_svamp"][0]["arguments"][0][0]
    right = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    joined = [{"role": "user", "content": "\n\n".join(text for _, text in turns)}]
    alone = model.tokenizer.apply_chat_template(joined, tokenize=False, add_generation_prompt=True)
    assert prompt == (right if as_turns else alone)


def test_a_template_that_refuses_a_task_is_reported(model: FsdLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for template in ("{{ raise_exception('no system') }}", {"rag": "x"}):
        monkeypatch.setattr(model.tokenizer, "chat_template", template)
        with pytest.raises(DataError, match="chat template refuses a task's messages"):
            model.apply_chat_template([{"role": "user", "content": "hi"}])


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


def test_log_likelihoods_are_the_targets(toy: Toy, model: FsdLM) -> None:
    whole = model.tokenizer("the cat sat on the mat", add_special_tokens=False).input_ids
    context = model.tokenizer("the cat", add_special_tokens=False).input_ids
    (found,) = model.loglikelihood([asked("the cat", " sat on the mat")], disable_tqdm=True)
    assert found == (pytest.approx(summed(toy, whole, len(context)), abs=1e-4), False)
    plain = AutoModelForCausalLM.from_pretrained(toy.target, dtype=torch.float32)
    best = int(plain(torch.tensor([context])).logits[0, -1].argmax())
    assert model._loglikelihood_tokens([(None, context, [best])])[0][1] is True
    assert model.loglikelihood([asked("the", ""), asked("", "")], disable_tqdm=True) == [(0.0, True)] * 2
