"""What a learned price could win: decoding by the true labels of `fsd-train label`, beside exact and published rules.

    python -m benchmarks.judge_oracle runs/judge/*.jsonl --prompts three-step.jsonl ... \\
        --rules tilted:4/2/1 typical random:0.1 --json benchmarks/results/judge-oracle.json

Each file of labels is a task. The rules answer its prompts in the batches, with the drafter and on the tree that the
labels were made with (``RULE@DEPTHxWIDTHxNODES``: on that tree); their answers are kept in ``--work``, so that a killed
run goes on. ``oracle`` is the semi-greedy search, which no learned cost on the same tree beats. All numbers are paired
with exact decoding, with 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.recorded import record_main, settings_of
from fsd_infer.bench.environment import environment
from fsd_infer.bench.intervals import bootstrap_interval, mean_interval, ratio_interval
from fsd_infer.bench.record import jsonable
from fsd_infer.chat.encoding import read_jsonl
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import TreeShape
from fsd_infer.errors import DataError
from fsd_infer.evidence.settings import EXACT, parse_settings
from fsd_infer.files import read_json
from fsd_infer.targets.loading import parse_dtype
from fsd_train.label import Labeller, Task, read_tasks
from fsd_train.regenerate import AnswerFile

ORACLE = "oracle"
TOGETHER = "multiarith + svamp + gsm8k"
Answers = dict[str, dict[str, Any]]  # by id of the prompt, as ANSWER in fsd_train.label


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The record: by task, and for the published tasks together, what each method did beside exact."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    tasks, labels = {}, {}
    for path in args.labels:
        labels[path.stem] = [row for _, row in read_jsonl(path)]
        if not labels[path.stem]:
            raise DataError(f"{path} has no labels yet: let fsd-train label finish a batch.")
        found: dict[str, Answers] = {
            EXACT: {row["id"]: row["exact"] for row in labels[path.stem]},
            ORACLE: {row["id"]: row["searched"] for row in labels[path.stem]},
        }
        tasks[path.stem] = {**found, **_rules(path, found[EXACT], args)}
    record: dict[str, Any] = {
        name: {**beside_exact(methods, args.seed), "labels": agreement(labels[name])} for name, methods in tasks.items()
    }
    parts = [tasks[name] for name in ("multiarith", "svamp", "gsm8k") if name in tasks]
    if len(parts) > 1:
        pooled = {name: {key: one for part in parts for key, one in part[name].items()} for name in parts[0]}
        every = [row for name in ("multiarith", "svamp", "gsm8k") for row in labels.get(name, ())]
        record[TOGETHER] = {**beside_exact(pooled, args.seed), "labels": agreement(every)}
    label_settings = {path.stem: read_json(path.with_suffix(".meta.json"), "It is beside the labels.") for path in args.labels}
    return jsonable(
        {"settings": settings_of(args), "label_settings": label_settings, "environment": environment(command),
         "tasks": record}
    )  # fmt: skip


def _rules(path: Path, wanted: Answers, args: argparse.Namespace) -> dict[str, Answers]:
    """By rule its answers to the prompts of a file of labels."""
    settings = [setting for setting in parse_settings(args.rules) if setting.name != EXACT]
    made_with: Any = read_json(path.with_suffix(".meta.json"), "Keep it beside the labels.")
    prompts = [file for file in args.prompts if file.name in made_with["prompts"]]
    if not prompts:
        raise DataError(f"{path} was made from {', '.join(made_with['prompts'])}: name it under --prompts.")
    decoder = FuzzyDecoder.from_pretrained(
        made_with["target"], made_with["drafter"], dtype=parse_dtype(made_with["dtype"]),
        tree=TreeShape.parse(made_with["tree"]),
    )  # fmt: skip
    labeller = Labeller(decoder, made_with["max_new_tokens"])
    tasks = read_tasks(prompts, decoder.tokenizer, made_with["score"], made_with["limit_per_file"], made_with["seed"])
    size = made_with["batch_size"]
    batches = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    own = decoder.drafter
    found: dict[str, Answers] = {}
    for setting in settings:
        decoder.drafter = own if setting.tree is None else decoder.load_drafter(made_with["drafter"], setting.tree)
        output = AnswerFile(args.work / f"{path.stem}-{setting.name.replace(':', '-')}.jsonl", made_with)
        with output.open() as (done, file):
            for batch in tqdm(batches, desc=f"{path.stem} {setting.name}", unit="batch"):
                if any(task.id in wanted and task.id not in done for task in batch):
                    lines = [line for line in _answers(labeller, batch, setting.rule) if line["id"] not in done]
                    output.append(file, [(json.dumps(line) + "\n").encode() for line in lines])
        found[setting.name] = {row["id"]: row for _, row in read_jsonl(output.path) if row["id"] in wanted}
    return found


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
        **{name: _mean(exact, ids, name, seed) for name in ("score", "copied", "repeated")},
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
            **{quality: _mean(answers, ids, quality, seed, exact) for quality in ("score", "copied", "repeated")},
            "same_final": mean_interval(same, seed=seed) if said else None,
        }
    return {"prompts": len(ids), "exact": means, "methods": found}


def _mean(
    answers: Answers, ids: Sequence[str], quality: str, seed: int, other: Answers | None = None
) -> dict[str, Any] | None:
    """Mean of a quality, or how it differs from the other's; None where no answer has it."""
    has = [
        key for key in ids if answers[key][quality] is not None and (not other or other[key][quality] is not None)
    ]
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
    return {"ratio": float(statistic(*map(np.asarray, columns), axis=-1)), "low": low, "high": high, "prompts": len(ids)}


def agreement(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many changes were tried and were important, and how well what needs no score tells which.

    ``auroc`` of a signal is the chance that an important change has a larger one than a harmless change; 0.5 knows
    nothing. None where one kind of change is missing.
    """
    changes = [change for row in rows for change in row["changes"]]
    signals = {
        "regret": lambda change: change["regret"],
        "loss": lambda change: change["loss"],
        "not_returned": lambda change: None if change["returned"] is None else -change["returned"],
        "longer_copies": lambda change: change["copied"],
        "repeats": lambda change: change["repeated"],
    }
    return {
        "changes": len(changes),
        "important": sum(change["important"] for change in changes),
        "auroc": {name: auroc(changes, signal) for name, signal in signals.items()},
    }


def auroc(changes: Sequence[dict[str, Any]], signal: Any) -> float | None:
    """See :func:`agreement`."""
    known = [(signal(change), change["important"]) for change in changes if signal(change) is not None]
    important = np.array([value for value, label in known if label], float)
    harmless = np.array([value for value, label in known if not label], float)
    if not len(important) or not len(harmless):
        return None
    above = (important[:, None] > harmless).mean() + 0.5 * (important[:, None] == harmless).mean()
    return float(above)


def report(record: dict[str, Any]) -> str:
    """A line per task and method."""
    lines = ["| task | method | × τ (95 %) | × τ where solved | × forwards | × tokens | score, points | copied | repeated | same final |", "|" + "---|" * 10]
    for task, facts in record["tasks"].items():
        exact = facts["exact"]
        score = "–" if exact["score"] is None else f"{100 * exact['score']['mean']:.0f} %"
        lines.append(f"| {task}, {facts['prompts']} | `exact` | τ {exact['tau']:.2f} | | {exact['forwards']:.1f} | {exact['tokens']:.1f} | {score} | | | |")
        for name, found in facts["methods"].items():
            ratios = [_ratio(found[key]) for key in ("tau", "tau_where_solved", "forwards", "tokens")]
            points = [_points(found[key]) for key in ("score", "copied", "repeated")]
            same = "–" if found["same_final"] is None else f"{100 * found['same_final']['mean']:.0f} %"
            lines.append(" | ".join(["| ", f"`{name}`", *ratios, *points, same, ""]))
    return "\n".join(lines)


def _ratio(found: dict[str, Any] | None) -> str:
    return "–" if found is None else "{ratio:.2f} ({low:.2f}–{high:.2f})".format(**found)


def _points(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * found[end] for end in ("mean", "low", "high")))


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
