"""The field's table: what exact speculation and lossy rules keep of a target's score, and what they gain.

Each set of prompts is one run of `fsd-bench run`. The target decoding alone (``plain``) is the reference of accuracy,
retention and speed. Speeds are also compared with the fastest method that decodes exactly, among those of the run: give
``exact`` several trees, so that the comparison is with its best.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fsd_bench.intervals import interval_text
from fsd_bench.layouts import LAYOUTS
from fsd_bench.runner import run
from fsd_bench.settings import RunOptions
from fsd_core.errors import FsdError
from fsd_core.files import jsonable, misshapen, read_json
from fsd_core.tables import number, percent
from fsd_core.text.encoding import encode_chat
from fsd_infer.targets.loading import load_tokenizer

PLAIN = "plain"
AGAIN = "Delete it to measure again, or name another directory."
MARK = "PROMPT"  # stands for a prompt in the template's text
COLUMNS = (
    *("method", "n", "score %", "retention %", "lost, gained (p)", "ended %", "τ", "τ per answer", "accepted 1, 2, …"),
    *("tok/s", "× plain", "× exact", "nats/token", "copied %", "repeated %"),
)  # fmt: skip


def parse_sets(texts: Sequence[str]) -> dict[str, str]:
    """Return {name: file} of ``NAME=FILE`` or ``FILE``, whose name is then the file's without endings.

    Raises:
        FsdError: no sets, or a name given twice.
    """
    sets: dict[str, str] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or "/" in name or ":" in name:
            name, file = Path(text).name.partition(".")[0], text
        if not name or not file or name in sets:
            raise FsdError(f"set {text!r}: give each set a name of its own, NAME=FILE.")
        sets[name] = file
    if not sets:
        raise FsdError("no sets of prompts: give at least one, NAME=FILE.")
    return sets


def measure_sets(
    sets: Mapping[str, str], methods: Sequence[str], directory: str | Path, *, progress: bool = False, **options: Any
) -> dict[str, dict[str, Any]]:
    """Return the record of each set, by name. Records stay in ``directory``, where the same call continues.

    Args:
        sets: name -> file of prompts. A set with a layout's name is a public file of that layout.
        methods: see :mod:`fsd_bench.methods`; ``plain`` must be among them.
        directory: directory of the records.
        progress: show progress bars.
        options: other fields of :class:`fsd_bench.settings.RunOptions`.

    Raises:
        FsdError: ``plain`` is missing, a record in the way is damaged or was made with other settings, or as
            :func:`.run`.
    """
    if PLAIN not in methods:
        raise FsdError(f"the table compares with the target alone: add {PLAIN} to the methods.")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    baselines = [method for method in methods if method == PLAIN or method.split("@")[0] == "exact"]
    records = {}
    for name, file in sets.items():
        path = directory / f"{name}.json"
        set_options = {**options, "layout": name} if name in LAYOUTS.names() and not options.get("layout") else options
        if not path.exists():
            unfinished = path.with_name(path.name + ".partial.jsonl").exists()
            run(
                file, methods, json_path=path, resume=unfinished, progress=progress, baselines=baselines,
                again="the same command continues it", **set_options,
            )  # fmt: skip
        records[name] = read_json(path, AGAIN)
        with misshapen(path, AGAIN):
            _check(path, records[name], RunOptions(file, methods, baselines=baselines, **set_options))
            markdown(field_table({name: records[name]}))
            specbundle({name: records[name]})
    return records


def _check(path: Path, record: Mapping[str, Any], options: RunOptions) -> None:
    """Raise FsdError for a record of other settings."""
    stored = record["settings"]
    differing = [key for key, value in jsonable(options.to_dict()).items() if stored.get(key) != value]
    if differing:
        listed = ", ".join(differing)
        raise FsdError(f"{path} was made with other settings ({listed}): delete it, or name another directory.")


def best_exact(record: Mapping[str, Any]) -> str | None:
    """Return the fastest of a record's methods that speculate and decode exactly; None without one."""
    speeds = {
        name: facts["tokens_per_second"] or 0.0
        for name, facts in record["methods"].items()
        if (facts.get("rule") or {}).get("rule") == "exact" and (facts.get("drafter") or {}).get("name") != "none"
    }
    return max(speeds, key=lambda name: speeds[name], default=None)


def rows_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row of numbers per method of a record. Shares are between 0 and 1; None where nothing was measured."""
    exact, rows = best_exact(record), []
    for name, facts in record["methods"].items():
        ratios, tokens = record["ratios"].get(PLAIN, {}).get(name, {}), facts["answer_tokens"]
        exact_ratios = record["ratios"].get(exact, {}).get(name, {})
        rows.append({
            "method": name,
            "best_exact": name == exact,
            "answers": facts["answers"],
            "score": facts["intervals"].get("score"),
            "retention": ratios.get("retention"),
            "flips": record["flips"].get(PLAIN, {}).get(name),
            "ended": facts["finished_fraction"],
            "tau": facts["tau"],
            "tau_answer_mean": facts["tau_answer_mean"],
            "accepted_by_position": facts["accepted_by_position"],
            "tokens_per_second": facts["tokens_per_second"],
            "times_plain": ratios.get("tokens_per_second"),
            "times_exact": exact_ratios.get("tokens_per_second"),
            "nats_per_token": float(facts["divergence_spent"]) / tokens if tokens else None,
            "copied_4grams": facts["copied_4grams"],
            "repeated_4grams": facts["repeated_4grams"],
        })  # fmt: skip
    return rows


def conditions(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changes a record's numbers."""
    settings, machine = record["settings"], record["environment"]
    shapes = {}
    for name, facts in record["methods"].items():
        drafter = facts.get("drafter") or {}
        head = drafter.get("main", drafter)
        if head.get("name", "none") != "none":
            fields = ("name", "tree", "depth", "width", "nodes", "stop_below", "draft_vocab_size", "revision", "sha256")
            shapes[name] = {key: head[key] for key in fields if head.get(key) is not None} | {"rule": facts.get("rule")}
    keys = (
        "target",
        "target_kwargs",
        "dtype",
        "drafter",
        "max_new_tokens",
        "temperature",
        "batch_size",
        "repeat",
        "raw",
    )
    named = ("gpu", "cpu", "cores", "threads", "cpu_kernels", "fsd_infer", "torch", "transformers", "commit", "command")
    return {
        **{key: settings.get(key) for key in keys},
        "seed": settings.get("seed") if settings.get("seed") is not None else "0, and trees may follow the clock",
        "prefill": "in tok/s, not in τ; τ counts the target's own token",
        "template": None if settings.get("raw") else template_of(settings["target"]),
        **{key: machine.get(key) for key in named},
        "drafters": shapes,
    }


@cache
def template_of(target: str) -> str:
    """Return the text around a prompt, which shows a system prompt and thinking; "" for a target without a template."""
    tokenizer = load_tokenizer(target)
    if tokenizer is None or not tokenizer.chat_template:
        return ""
    return str(tokenizer.decode(encode_chat(tokenizer, [{"role": "user", "content": MARK}])))


def field_table(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table's numbers: {"sets": {name: rows}, "conditions": {name: facts}}."""
    return {
        "sets": {name: rows_of(record) for name, record in records.items()},
        "conditions": {name: conditions(record) for name, record in records.items()},
    }


def markdown(table: Mapping[str, Any]) -> str:
    """Return the table as Markdown, with what changes its numbers below. Conditions that all sets share come once."""
    parts = []
    for name, rows in table["sets"].items():
        lines = [f"### {name}", "", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        parts.append("\n".join([*lines, *("| " + " | ".join(_cells(row)) + " |" for row in rows)]))
    notes = [
        "Intervals: 95 % bootstrap over prompts, paired. Retention and lost, gained: against `plain`; p: McNemar's "
        "exact test. Ended: by a stop token. × exact: compared with the fastest exact method of the set, marked *."
    ]
    by_set = list(table["conditions"].values())
    shared = {key: value for key, value in by_set[0].items() if all(other.get(key) == value for other in by_set)}
    notes += [f"- {key}: {_plain_text(value)}" for key, value in shared.items()]
    for name, facts in table["conditions"].items():
        notes += [f"- {name}, {key}: {_plain_text(facts[key])}" for key in facts if key not in shared]
    return "\n\n".join([*parts, "\n".join(notes)]) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    flips, positions = row["flips"], row["accepted_by_position"]
    return [
        f"`{row['method']}`" + ("*" if row["best_exact"] else ""),
        str(row["answers"]),
        _interval(row["score"], "mean", 100, 1),
        _interval(row["retention"], "ratio", 100, 1),
        "–" if flips is None else f"{flips['lost']}, {flips['gained']} ({flips['p']:.2f})",
        percent(row["ended"], 0),
        number(row["tau"]),
        number(row["tau_answer_mean"]),
        " ".join(f"{share:.2f}" for share in positions[:8]) if positions else "–",
        number(row["tokens_per_second"], 1),
        _interval(row["times_plain"], "median", 1, 2),
        _interval(row["times_exact"], "median", 1, 2),
        number(row["nats_per_token"], 3),
        percent(row["copied_4grams"], 1),
        percent(row["repeated_4grams"], 1),
    ]


def _interval(interval: Mapping[str, Any] | None, key: str, scale: float, digits: int) -> str:
    return interval_text(interval, key, f".{digits}f", scale, "({}–{})", "–")


def _plain_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def specbundle(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows of SpecBundle's ``data.json``: {target: {set: {"benchmark_name", "results": [...]}}}.

    A result is a tree's: ``steps`` drafted depths, ``topk`` children, ``num_draft_tokens`` nodes with the root, and
    ``metrics`` of the target alone and of each method with that tree. Throughput is in tokens per second of a run.
    """
    bundle: dict[str, Any] = {}
    for name, record in records.items():
        methods, settings = record["methods"], record["settings"]
        by_tree: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        for method, facts in methods.items():
            drafter = facts.get("drafter") or {}
            head = drafter.get("main", drafter)
            if head.get("depth"):
                tree = head["depth"], head.get("width", 1), head["nodes"]
                by_tree.setdefault(tree, []).append(_metrics(method, facts))
        plain = _metrics("Without drafts", methods[PLAIN])
        results = [
            {"batch_size": settings["batch_size"], "steps": depth, "topk": width, "num_draft_tokens": nodes}
            | {"metrics": [plain, *metrics]}
            for (depth, width, nodes), metrics in by_tree.items()
        ]
        target = Path(settings["target"]).name
        bundle.setdefault(target, {})[name] = {"benchmark_name": name, "results": results}
    return bundle


def _metrics(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    throughput = facts["answers"] * facts["answer_tokens"] / facts["seconds_total"]
    return {"Name": name, "output_throughput": throughput, "accept_length": facts["tau"]}
