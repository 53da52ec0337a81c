"""What a learned price could win: decoding by the true labels of `fsd-train label`, beside exact and other rules.

    python -m benchmarks.judge_oracle runs/judge/*.jsonl --prompts three-step.jsonl ... \\
        --rules tilted:4/1 --json benchmarks/results/judge-oracle.json

Each file of labels is a task. The rules answer its prompts in the batches, with the drafter and on the tree that the
labels were made with (``RULE@DEPTHxWIDTHxNODES``: on that tree); their answers are kept in ``--work``, so that a killed
run goes on. ``oracle`` is the semi-greedy search: no learned cost on the same tree that keeps what each answer says
gets further in a round. All numbers are paired with exact decoding, with 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.recorded import record_main
from fsd_bench.environment import environment
from fsd_bench.evidence.settings import EXACT, parse_settings
from fsd_bench.intervals import bootstrap_interval, mean_interval, ratio_interval
from fsd_infer.chat.encoding import read_jsonl
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import TreeShape
from fsd_infer.errors import DataError
from fsd_infer.files import jsonable, read_json
from fsd_infer.targets.loading import parse_dtype
from fsd_train.label import Labeller, Task, read_tasks
from fsd_train.regenerate import AnswerFile

ORACLE = "oracle"
QUALITIES = ("score", "copied", "repeated")
PUBLISHED = ("multiarith", "svamp", "gsm8k")  # labels of these names are also looked at together
Answers = dict[str, dict[str, Any]]  # by id of the prompt, as ANSWER in fsd_train.label


@dataclass
class Labelled:
    """One file of labels, with what it was made by.

    Attributes:
        rows: its lines.
        settings: of the run of `fsd-train label`.
        tasks: all prompts of that run, in its batches.
    """

    name: str
    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    decoder: FuzzyDecoder
    tasks: list[Task]

    @classmethod
    def read(cls, path: Path, prompts: Sequence[Path]) -> Labelled:
        """Raises DataError where nothing is labelled yet, or its prompts are not given."""
        rows = [row for _, row in read_jsonl(path)]
        if not rows:
            raise DataError(f"{path} has no labels yet: let fsd-train label finish a batch.")
        settings: Any = read_json(path.with_suffix(".meta.json"), "Keep it beside the labels.")
        used = [file for file in prompts if file.name in settings["prompts"]]
        if not used:
            raise DataError(f"{path} was made from {', '.join(settings['prompts'])}: name it under --prompts.")
        decoder = _decoder(*(settings[name] for name in ("target", "drafter", "dtype", "tree")))
        score = (settings["score"], settings["limit_per_file"], settings["seed"])
        return cls(path.stem, rows, settings, decoder, read_tasks(used, decoder.tokenizer, *score))

    def answers(self, rules: Sequence[str], work: Path) -> dict[str, Answers]:
        """By method: exact and the oracle, as they were labelled, and the rules, decoded now or in an earlier run."""
        found = {
            name: {row["id"]: row[key] for row in self.rows} for name, key in ((EXACT, "exact"), (ORACLE, "searched"))
        }
        labeller, size = Labeller(self.decoder, self.settings["max_new_tokens"]), self.settings["batch_size"]
        batches = [self.tasks[start : start + size] for start in range(0, len(self.tasks), size)]
        own = self.decoder.drafter
        for setting in parse_settings(rules):
            if setting.name == EXACT:
                continue
            self.decoder.drafter = (
                own if setting.tree is None else self.decoder.load_drafter(self.settings["drafter"], setting.tree)
            )
            output = AnswerFile(work / f"{self.name}-{setting.name.replace(':', '-')}.jsonl", self.settings)
            with output.open() as (done, file):
                for batch in tqdm(batches, desc=f"{self.name} {setting.name}", unit="batch"):
                    if any(task.id in found[EXACT] and task.id not in done for task in batch):
                        lines = [line for line in _answers(labeller, batch, setting.rule) if line["id"] not in done]
                        output.append(file, [(json.dumps(line) + "\n").encode() for line in lines])
            found[setting.name] = {row["id"]: row for _, row in read_jsonl(output.path) if row["id"] in found[EXACT]}
        self.decoder.drafter = own
        return found


@cache
def _decoder(target: str, drafter: str, dtype: str, tree: str) -> FuzzyDecoder:
    return FuzzyDecoder.from_pretrained(target, drafter, dtype=parse_dtype(dtype), tree=TreeShape.parse(tree))


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The record: by task, and for the published tasks together, what each method did beside exact."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    found = [Labelled.read(path, args.prompts) for path in args.labels]
    answers = {task.name: task.answers(args.rules, args.work) for task in found}
    rows = {task.name: task.rows for task in found}
    parts = [task.name for task in found if task.name in PUBLISHED]
    if len(parts) > 1:
        together = " + ".join(parts)
        rows[together] = [row for name in parts for row in rows[name]]
        answers[together] = {
            method: {key: one for name in parts for key, one in answers[name][method].items()}
            for method in answers[parts[0]]
        }
    return jsonable({
        "settings": {"rules": args.rules, "seed": args.seed},
        "labels": {task.name: task.settings for task in found},  # how they were made
        "environment": environment(command),
        "tasks": {
            name: {**beside_exact(methods, args.seed), "labels": agreement(rows[name])}
            for name, methods in answers.items()
        },
    })  # fmt: skip


def _answers(labeller: Labeller, batch: Sequence[Task], rule: Any) -> list[dict[str, Any]]:
    made = labeller.decode([task.prompt for task in batch], rule, seed=0)
    return [
        {"id": task.id, "ids": ids, "forwards": row.target_forwards, **labeller.measures(task, ids)}
        for task, ids, row in zip(batch, made.sequences, made.stats.rows, strict=True)
    ]


def beside_exact(methods: dict[str, Answers], seed: int = 0) -> dict[str, Any]:
    """``prompts``, ``exact`` (means), and by other method its ratios to exact's and differences from it.

    Ratios: ``tau``, tokens per verifying forward, over all prompts and (``solved``) over those that exact solves;
    ``forwards``; ``tokens``. Differences: ``score``, ``copied``, ``repeated``. ``same_final`` is the share of prompts
    where the answer says the same in the end, of those where exact's says anything.
    """
    exact = methods[EXACT]
    ids = list(exact)
    tokens = sum(len(one["ids"]) - 1 for one in exact.values())
    means = {
        "tau": tokens / sum(one["forwards"] for one in exact.values()),
        "forwards": float(np.mean([one["forwards"] for one in exact.values()])),
        "tokens": float(np.mean([len(one["ids"]) for one in exact.values()])),
        **{name: _mean(exact, ids, name, seed) for name in QUALITIES},
    }
    found = {}
    for name, answers in methods.items():
        if name == EXACT:
            continue
        solved = [key for key in ids if exact[key]["score"]]
        said = [key for key in ids if exact[key]["final"] is not None]
        lengths, others = ([float(len(of[key]["ids"])) for key in ids] for of in (answers, exact))
        forwards, exacts = ([float(of[key]["forwards"]) for key in ids] for of in (answers, exact))
        same = [(float(answers[key]["final"] == exact[key]["final"]), 1.0) for key in said]
        found[name] = {
            "tau": _tau_ratio(answers, exact, ids, seed),
            "tau_where_solved": _tau_ratio(answers, exact, solved, seed) if solved else None,
            "forwards": ratio_interval(forwards, exacts, seed),
            "tokens": ratio_interval(lengths, others, seed),
            **{quality: _mean(answers, ids, quality, seed, exact) for quality in QUALITIES},
            "same_final": mean_interval(same, seed=seed) if said else None,
        }
    return {"prompts": len(ids), "exact": means, "methods": found}


def _mean(
    answers: Answers, ids: Sequence[str], quality: str, seed: int, other: Answers | None = None
) -> dict[str, Any] | None:
    """Mean of a quality, or how it differs from the other's; None where no answer has it."""
    has = [key for key in ids if answers[key][quality] is not None and (not other or other[key][quality] is not None)]
    if not has:
        return None
    own = [(answers[key][quality], 1.0) for key in has]
    return mean_interval(own, [(other[key][quality], 1.0) for key in has] if other else None, seed)


def _tau_ratio(own: Answers, other: Answers, ids: Sequence[str], seed: int) -> dict[str, Any]:
    """(Σ tokens / Σ forwards) / (the other's Σ tokens / Σ forwards): {"ratio", "low", "high", "prompts"}."""
    columns = [
        [number(of[key]) for key in ids]
        for of in (own, other)
        for number in (lambda one: float(len(one["ids"]) - 1), lambda one: float(one["forwards"]))
    ]

    def statistic(*samples: Any, axis: int) -> Any:
        tokens, forwards, other_tokens, other_forwards = (sample.sum(axis) for sample in samples)
        return (tokens * other_forwards) / (forwards * other_tokens)

    low, high = bootstrap_interval(columns, statistic, seed)
    return {
        "ratio": float(statistic(*map(np.asarray, columns), axis=-1)),
        "low": low,
        "high": high,
        "prompts": len(ids),
    }


def agreement(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many changes were tried and were important, and how well what needs no score tells which.

    ``auroc`` of a signal is the chance that an important change has a larger one than a harmless change; 0.5 knows
    nothing. None where one kind of change is missing.
    """
    changes = [change for row in rows for change in row["changes"]]
    signals: dict[str, Callable[[dict[str, Any]], float | None]] = {
        "regret": lambda change: change["regret"],
        "loss": lambda change: change["loss"],
        "not_returned": lambda change: None if change["returned"] is None else -change["returned"],
        "copied": lambda change: change["copied"],
        "repeated": lambda change: change["repeated"],
    }
    found: dict[str, float | None] = {}
    for name, signal in signals.items():
        known = [(value, change["important"]) for change in changes if (value := signal(change)) is not None]
        found[name] = auroc(np.array([value for value, _ in known]), np.array([label for _, label in known], bool))
    return {"changes": len(changes), "important": sum(change["important"] for change in changes), "auroc": found}


def auroc(values: NDArray[np.float64], important: NDArray[np.bool_]) -> float | None:
    """See :func:`agreement`."""
    if important.all() or not important.any():
        return None
    gaps = values[important][:, None] - values[~important]
    return float((gaps > 0).mean() + 0.5 * (gaps == 0).mean())


def report(record: dict[str, Any]) -> str:
    """A Markdown table: a line per task and method, in multiples of exact's and points beside it."""
    headers = ["task, prompts", "method", "× τ (95 %)", "× τ where solved", "× forwards", "× tokens", "score", "copied"]
    lines = ["| " + " | ".join([*headers, "repeated", "same final"]) + " |", "|" + "---|" * (len(headers) + 2)]
    for task, facts in record["tasks"].items():
        exact, name = facts["exact"], f"{task}, {facts['prompts']}"
        means = [f"{exact[key]:.1f}" for key in ("forwards", "tokens")]
        shares = ["–" if not exact[key] else f"{100 * exact[key]['mean']:.1f} %" for key in QUALITIES]
        lines.append("| " + " | ".join([name, "`exact`", f"τ {exact['tau']:.2f}", "", *means, *shares, ""]) + " |")
        for method, found in facts["methods"].items():
            ratios = [_ratio(found[key]) for key in ("tau", "tau_where_solved", "forwards", "tokens")]
            same = "–" if found["same_final"] is None else f"{100 * found['same_final']['mean']:.0f} %"
            row = [name, f"`{method}`", *ratios, *(_points(found[key]) for key in QUALITIES), same]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _ratio(found: dict[str, Any] | None) -> str:
    return "–" if found is None else "{ratio:.2f} ({low:.2f}–{high:.2f})".format(**found)


def _points(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    ends = (100 * found[end] for end in ("mean", "low", "high"))
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*ends).replace("-", "−")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge_oracle", description=__doc__.split("\n\n")[0])
    parser.add_argument("labels", nargs="+", type=Path, help="files of fsd-train label; each is a task, by its name")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, help="the files that they were made from")
    parser.add_argument("--rules", nargs="+", required=True, help="RULE[@TREE], as for fsd-infer sweep")
    parser.add_argument("--json", type=Path, required=True, help="of the record")
    parser.add_argument("--work", type=Path, default=Path("runs/judge-oracle"), help="the rules' answers (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--threads", type=int)
    return record_main("benchmarks.judge_oracle", parser, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
