"""Compare losses for a drafter where a lossy rule pays: stories15M, trained towards TinyLlama's own stories.

    python -m benchmarks.stories --target TinyLlama/TinyLlama-1.1B-Chat-v1.0 --drafter Xenova/llama2.c-stories15M \\
        --work runs/stories --json benchmarks/results/stories-training.json

The target continues made beginnings. Every loss trains the public drafter on these texts by ``recipes/stories.yaml``,
for the same number of steps. All drafters then continue held-out beginnings of other templates, names and events: one
`fsd-bench run` over rules and chain lengths. Finished parts stay in ``--work``, and the same command continues there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from torch import Tensor

from benchmarks.beginnings import rows
from benchmarks.recorded import ROOT, parser_of, record_main, run_resumed
from benchmarks.workplace import Workplace
from fsd_bench.intervals import ratio_interval, ratio_text
from fsd_bench.report import bench_table
from fsd_core.errors import FsdError
from fsd_core.files import write_text
from fsd_core.tables import percent, table
from fsd_infer.drafters import TreeShape
from fsd_train.cli import main as fsd_train
from fsd_train.losses import FsdLoss
from fsd_train.losses.rows import divergence_rows

_kl_pq = divergence_rows("kl_pq")


class ValueLoss(FsdLoss):
    """The chain loss of `fsd` with E_q[max(0, 1 - kl_coef·gap)], a draft's worth to `tilted` at temperature 0."""

    def __init__(self, kl_coef: float = 0.7, anchor: float = 0.1, chunk_size: int | None = None) -> None:
        super().__init__(threshold=0, anchor=anchor, chunk_size=chunk_size)
        self.kl_coef = kl_coef

    def _rows(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        worth = (1 - self.kl_coef * (log_p.amax(-1, keepdim=True) - log_p)).clamp_min(0)
        expected_worth = torch.linalg.vecdot(log_q.exp(), worth)
        return torch.stack([torch.zeros_like(expected_worth), expected_worth, _kl_pq(log_p, log_q)])


def _fsd(threshold: float) -> dict[str, Any]:
    return {"class_path": "fsd_train.losses.FsdLoss", "init_args": {"threshold": threshold}}


PUBLIC = "public"  # name of the drafter as it was published
DRAFT_COST = 0.06  # forwards of the target per drafted token
_VALUE = {"class_path": "benchmarks.stories.ValueLoss", "init_args": {"kl_coef": 0.7}}
LOSSES: dict[str, dict[str, Any]] = {  # arguments of the module by name
    **{name: {"loss": name} for name in ("kl_qp", "kl_pq", "js", "tv", "lk")},
    "fsd-0.2": {"loss": _fsd(0.2), "unroll_steps": 4},
    "fsd-0.4": {"loss": _fsd(0.4), "unroll_steps": 4},
    "value-0.7": {"loss": _VALUE, "unroll_steps": 4},
    "kl_pq-on-policy": {"loss": "kl_pq", "on_policy": 0.5, "on_policy_tokens": 64},
}


def make_answers(args: argparse.Namespace) -> None:
    """Write the target's continuations of the training beginnings, and its features of them, to the work directory."""
    done, answers, features = (args.work / name for name in ("done", "answers.jsonl", "features"))
    if done.exists():
        return
    write_text(args.work / "beginnings.jsonl", rows("train", args.texts))
    words = ["regenerate", "--target", args.target, "--prompts", str(args.work / "beginnings.jsonl"), "--raw"]
    words += ["--temperature", "0:0.5", "0.8:0.5", "--seed", "44", "--batch-size", "64", "--max-new-tokens", "96"]
    for command in (
        [*words, "--max-prompt-tokens", "96", "--output", str(answers), "--features", str(features)],
        ["cache-features", "--target", args.target, "--data", str(answers), "--output", str(features)],
    ):
        if fsd_train(command):
            raise FsdError(f"fsd-train {command[0]} failed.")
    done.touch()


def write_recipe(args: argparse.Namespace, loss: str, seed: int, directory: Path) -> Path:
    """Write ``recipes/stories.yaml`` with another loss and seed and the run's paths to the directory."""
    text = (ROOT / "recipes" / "stories.yaml").read_text(encoding="utf-8")
    for name in ("answers.jsonl", "features"):
        text = text.replace(f"runs/stories/{name}", str(args.work / name))
    recipe = yaml.safe_load(text.replace("runs/stories", str(directory)))
    recipe["trainer"]["max_steps"], recipe["seed_everything"] = args.steps, seed
    recipe["model"]["init_args"] |= {"target": args.target, "drafter": args.drafter, **LOSSES[loss]}
    directory.mkdir(exist_ok=True)
    write_text(directory / "recipe.yaml", yaml.safe_dump(recipe))
    return directory / "recipe.yaml"


def trained(args: argparse.Namespace, loss: str, seed: int) -> Path:
    """Return the directory of the drafter that the loss trained."""
    directory = args.work / name_of(loss, seed)
    command = ["fit", "--config", str(write_recipe(args, loss, seed, directory)), "--ckpt_path", "auto"]
    if not (directory / "done").exists():
        if fsd_train(command):
            raise FsdError(f"fsd-train {' '.join(command)} failed.")
        (directory / "done").touch()
    return directory / "head"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train what is not trained yet, and return the bench record of all drafters. Raises FsdError."""
    args.work = Workplace(args.work).directory.resolve()
    make_answers(args)
    write_text(args.work / "judge.jsonl", rows("judge", args.prompts_judged, seed=1))
    drafters = {PUBLIC: args.drafter}
    drafters |= {name_of(loss, seed): str(trained(args, loss, seed)) for seed in args.seeds for loss in args.losses}
    methods = {
        label(name, rule, chain): f"{rule}@{drafter}@{TreeShape.chain(chain).text}"
        for rule in args.rules
        for chain in args.chains
        for name, drafter in drafters.items()
    }
    record = run_resumed(
        args.work / "judge.jsonl", [f"{label}={method}" for label, method in methods.items()], args.work / "bench.json",
        target=args.target, raw=True, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
        log_likelihood=True, baselines=list(methods)[:1],
    )  # fmt: skip
    for name, rule, chain in product(drafters, args.rules, args.chains):
        record["methods"][label(name, rule, chain)]["drafter"]["model"] = name  # instead of its path
    record["settings"] |= {"target": Path(args.target).name, "methods": list(methods), "steps": args.steps}
    record["losses"] = {
        loss: {rule: over_seeds(record, loss, rule, args) for rule in args.rules} for loss in (PUBLIC, *args.losses)
    }
    return {part: facts for part, facts in record.items() if part != "environment"}  # whose command has paths


def name_of(loss: str, seed: int) -> str:
    """Return the name of the drafter that a loss trained."""
    return f"{loss}-{seed}"


def label(name: str, rule: str, chain: int) -> str:
    """Return a method's name in the bench: of a drafter with a rule on chains of a length."""
    return f"{name} {rule.replace(':', ' ').replace('=', ' ')} {chain}"


def over_seeds(record: dict[str, Any], loss: str, rule: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return means over a loss's drafters with the rule, on the chain length with the most tokens per cost.

    A round costs 1 + :data:`DRAFT_COST` · drafts. ``x_public`` and ``x_first`` are ratios of tokens per cost to the
    public drafter's and to those of the first loss, with intervals over prompts.
    """

    def names(loss: str) -> list[str]:
        return [PUBLIC] if loss == PUBLIC else [name_of(loss, seed) for seed in args.seeds]

    def pairs(loss: str, chain: int) -> list[tuple[float, float]]:
        """Return tokens and cost by prompt."""
        rows = [
            [prompt["methods"][label(name, rule, chain)][0] for name in names(loss)] for prompt in record["prompts"]
        ]
        emitted = [sum(row["tau"] * row["target_forwards"] for row in of_prompt) for of_prompt in rows]
        rounds = [sum(row["target_forwards"] for row in of_prompt) for of_prompt in rows]
        return [(tokens, (1 + DRAFT_COST * chain) * count) for tokens, count in zip(emitted, rounds)]

    def best(loss: str) -> tuple[float, int, list[tuple[float, float]]]:
        """Return tokens per cost, chain length, and pairs."""
        by_chain = {chain: pairs(loss, chain) for chain in args.chains}
        return max(
            (sum(tokens for tokens, _ in costs) / sum(cost for _, cost in costs), chain, costs)
            for chain, costs in by_chain.items()
        )

    rate, chain, costs = best(loss)
    methods = [record["methods"][label(name, rule, chain)] for name in names(loss)]
    facts: dict[str, Any] = {"chain": chain, "tokens_per_cost": rate}
    for key, other in (("x_public", PUBLIC), ("x_first", args.losses[0])):
        facts[key] = ratio_interval(costs, best(other)[2])
    for key in ("tau", "log_likelihood_per_token", "repeated_4grams"):
        facts[key] = fmean(method[key] for method in methods)
    spent = sum(method["divergence_spent"] or 0.0 for method in methods)
    facts["nats_per_token"] = spent / sum(method["answer_tokens"] for method in methods)
    facts |= {key: fmean(method["drafts"][key] for method in methods) for key in ("agreement", "regret_median")}
    return facts | {"regret_below_1": fmean(method["drafts"]["below"]["1"] for method in methods)}


def losses_table(record: dict[str, Any]) -> str:
    """Return the bench's tables and one row per loss and rule."""
    rows = [
        [loss, rule, str(facts["chain"]), percent(facts["agreement"], 0),
         f"{facts['regret_median']:.2f}", percent(facts["regret_below_1"], 0), f"{facts['tokens_per_cost']:.2f}",
         ratio_text(facts["x_public"]), ratio_text(facts["x_first"]), f"{facts['nats_per_token']:.3f}",
         f"{facts['repeated_4grams']:.2f}"]
        for loss, rules in record["losses"].items()
        for rule, facts in rules.items()
    ]  # fmt: skip
    names = ["loss", "rule", "chain", "agreement", "median gap", "below 1 nat", "tokens/cost", "x public", "x first",
             "nats/token", "repeats"]  # fmt: skip
    return f"{bench_table(record)}\n\n{table(names, rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, decode and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.stories", __doc__, target="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        drafter=("Xenova/llama2.c-stories15M", "the public drafter"), losses=([*LOSSES], "losses to train with"),
        seeds=([0], "seeds of the training runs"),
        texts=(1024, "training beginnings"), steps=(200, "training steps"),
        rules=(["exact", "tilted:1:min_p=0", "typical:exact_ngram_size=3"], "acceptance rules"),
        chains=([8, 4], "drafts per chain"), prompts_judged=(16, "held-out beginnings"), max_new_tokens=64,
        temperature=0.0, work=(Path("runs/stories"), "directory of texts, drafters and runs"), json=None,
    )  # fmt: skip
    return record_main("benchmarks.stories", parser, measure, losses_table, argv)


if __name__ == "__main__":
    sys.exit(main())
