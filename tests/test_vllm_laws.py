"""The processor in vLLM's own model runner V2, on a CPU: `make test-vllm`. On a GPU vLLM needs no stub for Triton."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers import vllm_variables
from fsd_infer import Target
from tests.head_toys import make_target
from tests.test_vllm import PYTHON
from tests.test_vllm_rules import law_of

ROOT = Path(__file__).parent.parent
DRAFTS, TOKENS, LENGTH, SAMPLES = 3, (5, 6, 7), 3, 500
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
RULES = {"tilted:0.7:novel=0:floor=0": 1.0, "tilted:0.4:novel=2:floor=0.1": 0.7, "cactus:1": 1.0}
PROMPT = [5, 6, 7, 5, 5, 6, 6, 7, 5]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="no vLLM: make test-vllm installs it, or set VLLM_PYTHON"),
]


def run(target: Path, batches: list[Any]) -> list[list[list[int]]]:
    """vLLM's answers, batch by batch."""
    variables = {**os.environ, **vllm_variables(PYTHON, 1), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/tests/triton_stub"}
    command = [str(PYTHON), str(ROOT / "tests" / "vllm_v2.py"), str(target), json.dumps(NGRAM), json.dumps(batches)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("v2") / "target")


@pytest.fixture(scope="module")
def answers(target: Path) -> dict[str, list[list[int]]]:
    """Of one engine: greedy ones under several rules in one batch or alone, then samples for each law."""
    prompts = [[5 + (n * k) % 3 for k in range(4 + n)] for n in range(16)]
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    rules = [None, "tilted:inf", "tilted:0.3:novel=0:floor=0", "typical:0:0"]

    def asked(rule: str | None) -> dict[str, Any]:
        return {**greedy, **({} if rule is None else {"extra_args": {"rule": rule}})}

    batches: list[Any] = [[asked(rule), prompts] for rule in rules]
    batches.append([[asked(rules[n % 4]) for n in range(16)], prompts])
    for rule, temperature in RULES.items():
        sampled = {
            "temperature": temperature, "max_tokens": LENGTH, "ignore_eos": True, "allowed_token_ids": list(TOKENS),
            "extra_args": {"rule": rule},
        }  # fmt: skip
        batches.append([sampled, [PROMPT] * SAMPLES])
    names = [*map(str, rules), "mixed", *RULES]
    return dict(zip(names, run(target, batches), strict=True))


def test_no_rule_and_an_infinite_price_are_vllms_own_answers(target: Path, answers: dict[str, Any]) -> None:
    model = Target.from_pretrained(str(target), dtype=torch.float32).model
    prompts = [[5 + (n * k) % 3 for k in range(4 + n)] for n in range(16)]
    for prompt, own, other in zip(prompts, answers["None"], answers["tilted:inf"], strict=True):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
        assert own == other == wanted[0, len(prompt) :].tolist()


def test_each_request_of_a_batch_has_its_own_rule(answers: dict[str, Any]) -> None:
    names = ["None", "tilted:inf", "tilted:0.3:novel=0:floor=0", "typical:0:0"]
    assert answers["mixed"] == [answers[names[n % 4]][n] for n in range(16)]
    assert answers[names[2]] != answers["None"] and answers[names[3]] != answers["None"]


def drafts_of(text: list[int]) -> list[int]:
    """vLLM's n-gram drafts: what followed the latest occurrence of the longest suffix."""
    for n in (2, 1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + DRAFTS]
    return []


@pytest.mark.parametrize("rule", RULES)
def test_laws_by_vllms_sampler_are_those_of_enumeration(rule: str, target: Path, answers: dict[str, Any]) -> None:
    temperature = RULES[rule]
    model = Target.from_pretrained(str(target), dtype=torch.float32).model
    logits: dict[tuple[int, ...], torch.Tensor] = {}

    def logits_after(text: list[int]) -> torch.Tensor:
        key = tuple(text)
        if key not in logits:
            with torch.inference_mode():
                logits[key] = model(torch.tensor([text])).logits[0, -1][list(TOKENS)]
        return logits[key]

    def small(tokens: list[int]) -> list[int]:
        return [TOKENS.index(token) for token in tokens]

    def law(lossy: bool) -> dict[tuple[int, ...], float]:
        found = dict.fromkeys(itertools.product(TOKENS, repeat=LENGTH), 0.0)

        def go(text: list[int], chain: list[int] | None, table: torch.Tensor | None, place: int, chance: float) -> None:
            answer = text[len(PROMPT) :]
            if len(answer) == LENGTH:
                found[tuple(answer)] += chance
                return
            if table is None:
                chain = drafts_of(text) if lossy and answer else []
                after = torch.stack([logits_after(text + chain[:k]) for k in range(len(chain) + 1)])
                table = (
                    _laws(rule, temperature, small(text), small(chain), after) if lossy else _plain(after, temperature)
                )
                place = 0
            assert chain is not None
            for token, share in zip(TOKENS, table[place].tolist(), strict=True):
                goes_on = place < len(chain) and chain[place] == token
                go([*text, token], chain, table if goes_on else None, place + 1, chance * share)

        go(PROMPT, None, None, 0, 1.0)
        return found

    counts = Counter(map(tuple, answers[rule]))
    distance = {
        lossy: sum(abs(counts[key] / SAMPLES - share) for key, share in law(lossy).items()) / 2
        for lossy in (True, False)
    }
    print(f"{rule}: TV {distance[True]:.3f} to its law, {distance[False]:.3f} to p")
    assert distance[True] < 0.12 < distance[False]


def _laws(rule: str, temperature: float, text: list[int], drafts: list[int], logits: torch.Tensor) -> torch.Tensor:
    padded = torch.full((len(logits), 11), -1e9)
    padded[:, : len(TOKENS)] = logits
    return law_of(rule, temperature, text, drafts, padded)[:, : len(TOKENS)]


def _plain(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits / temperature).double().softmax(-1)
