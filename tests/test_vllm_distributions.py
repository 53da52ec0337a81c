"""The processor in vLLM's own model runner V2, on a CPU: `make test-vllm`. On a GPU vLLM needs no stub for Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import vllm_distributions
from tests.vllm_distributions import (
    ALLOWED,
    CASES,
    FUZZY,
    NEEDS_VLLM,
    NGRAM,
    PROMPT,
    Case,
    Toy,
    flat_target,
    greedy_answer,
)

SAMPLES, MEASURED = 200, CASES[:4]
RULES = [
    None, "tilted:inf", "tilted:0.3:exact_ngram_size=0:min_p=0", "typical:0:0",
    "tilted:0.2:exact_ngram_size=0:min_p=0:budget=1.5",
    "fly:2:0.1", "lenient:0.02", "threshold:0.05", "asd:1", "mars:0.5",
]  # fmt: skip
PROMPTS = [[5 + (n * k * k + k) % 8 for k in range(4 + n % 16)] for n in range(40)]
LENGTHS = [10 + 5 * n % 23 for n in range(40)]

pytestmark = NEEDS_VLLM


def rule_of(n: int) -> str | None:
    """The rule of request ``n``: all in turn."""
    return RULES[n % len(RULES)]


def greedy(n: int) -> dict[str, Any]:
    """What request ``n`` asks for."""
    rule = rule_of(n)
    ruled = {} if rule is None else {"extra_args": {"rule": rule}}
    return {
        "temperature": 0.0, "max_tokens": LENGTHS[n], "ignore_eos": True, "allowed_token_ids": ALLOWED, **ruled,
    }  # fmt: skip


def sampled(n: int) -> dict[str, Any]:
    """An exact request that vLLM samples; its kernel for top-k and top-p does not run in Triton's interpreter."""
    return {
        "temperature": 0.8, "max_tokens": 12, "seed": n, "ignore_eos": True, "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
    }  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flat_target(tmp_path_factory.mktemp("v2") / "target")


@pytest.fixture(scope="module")
def engine(target: Path) -> dict[str, Any]:
    return {"model": str(target), "speculative_config": NGRAM}


@pytest.fixture(scope="module")
def answers(engine: dict[str, Any]) -> dict[str | Case, list[list[int]]]:
    """Of one engine with 16 slots: forty greedy requests under several rules, exact ones, then samples for each
    distribution.
    """
    batches: list[Any] = [[[greedy(n) for n in range(40)], PROMPTS], [[sampled(n) for n in range(16)], PROMPTS[:16]]]
    batches += [[case.params(), [PROMPT] * SAMPLES] for case in MEASURED]
    found, _ = vllm_distributions.run({**engine, "logits_processors": FUZZY}, batches)
    return dict(zip(["greedy", "sampled", *MEASURED], found, strict=True))


def test_requests_come_and_go_each_with_its_own_rule(target: Path, answers: dict[Any, Any]) -> None:
    """As our own walk has it, one request at a time: rules, coefficients and lengths mixed, budgets kept."""
    toy = Toy(target, ALLOWED)
    wanted = [greedy_answer(toy, rule_of(n) or "exact", PROMPTS[n], LENGTHS[n]) for n in range(40)]
    assert answers["greedy"] == wanted
    exact = [greedy_answer(toy, "exact", PROMPTS[n], LENGTHS[n]) for n in range(40)]
    changed = {rule_of(n) for n in range(40) if exact[n] != wanted[n]}
    assert changed == set(RULES[2:])


def test_preempted_requests_go_on(target: Path, engine: dict[str, Any], answers: dict[Any, Any]) -> None:
    """Exact answers are the same; lossy ones depend on where rounds begin, and a preemption begins another."""
    small = {**engine, "logits_processors": FUZZY, "block_size": 32, "num_gpu_blocks_override": 12}
    (found,), preempted = vllm_distributions.run(small, [[[greedy(n) for n in range(40)], PROMPTS]])
    assert preempted > 0
    assert [len(answer) for answer in found] == LENGTHS
    assert all(found[n] == answers["greedy"][n] for n in range(40) if rule_of(n) in RULES[:2])


def test_exact_requests_are_not_touched(engine: dict[str, Any], answers: dict[Any, Any]) -> None:
    """Without a rule: the tokens of a vLLM without the processor, whatever else it does to logits."""
    (found,), _ = vllm_distributions.run(engine, [[[sampled(n) for n in range(16)], PROMPTS[:16]]])
    assert answers["sampled"] == found


@pytest.mark.parametrize("case", MEASURED)
def test_distributions_by_vllms_sampler_are_those_of_enumeration(
    case: Case, target: Path, answers: dict[Any, Any]
) -> None:
    found = vllm_distributions.compare(Toy(target), case, answers[case])
    assert found["tv_to_law"] < found["noise"] < found["tv_to_p"], found
