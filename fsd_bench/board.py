"""A board of measurements: one static page from records of `fsd-bench run` and results of SpecForge's benchmarks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Template

from fsd_bench.base import typed
from fsd_bench.intervals import is_single
from fsd_core.errors import DataError
from fsd_core.files import misshapen, read_json, write_text

log = logging.getLogger(__name__)

ADVICE = "Give records of `fsd-bench run --json`, or results of SpecForge's benchmarks."
SERVER = {"batch_size", "steps", "topk", "num_draft_tokens", "metrics"}  # of an entry of SpecForge's results


@dataclass(frozen=True)
class BoardRow:
    """A method with a drafter on a task.

    Attributes:
        source: the file's name.
        target, drafter, method, task, device: what was measured, as the file names it; "" if it does not.
        batch: prompts decoded together.
        temperature: sampling temperature; None if the file does not say.
        answers: prompts answered.
        tokens_per_second: median over prompts or blocks, prefill included.
        ratio: tokens per second relative to ``baseline``; ``low`` and ``high`` bound its 95 % interval.
        acceptance_length: tokens per target forward, the bonus token included.
        score: mean score of answers with a reference, in points of 100.
        command: what measures it again.
        commit: commit of the toolkit that measured it.
        date: date of the measurement, YYYY-MM-DD.
    """

    source: str
    target: str
    drafter: str
    method: str
    task: str
    device: str = ""
    batch: int | None = None
    temperature: float | None = None
    answers: int | None = None
    tokens_per_second: float | None = None
    baseline: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    acceptance_length: float | None = None
    score: float | None = None
    command: str = ""
    commit: str = ""
    date: str = ""


def read_rows(file: Path) -> list[BoardRow]:
    """Read a record's rows. Raises DataError for a file that is neither of the two kinds, or damaged."""
    record = read_json(file, ADVICE)
    rows: list[BoardRow] = []
    with misshapen(file, ADVICE):
        if isinstance(record, dict):
            of_record = {"methods", "settings"} <= record.keys()
            rows = list(_of_record(file.name, record) if of_record else _of_server(file.name, record))
        for row in rows:
            json.dumps(asdict(typed(asdict(row), BoardRow)), allow_nan=False)
    if not rows:
        raise DataError(f"{file}: holds no measurements that the board knows. {ADVICE}")
    return rows


def write_board(named: Sequence[Path], output: Path, title: str = "Speculative decoding, measured") -> int:
    """Write the page of all rows and return their number. Files without measurements are skipped with a warning.

    Raises:
        DataError: no file has measurements.
    """
    rows: list[BoardRow] = []
    faults: list[DataError] = []
    for file in dict.fromkeys(named):
        try:
            rows += read_rows(file)
        except DataError as error:
            faults.append(error)
    if not rows:
        raise faults[0] if len(faults) == 1 else DataError(f"none of {len(faults)} files is a record: {faults[0]}")
    for fault in faults:
        log.warning("skipped: %s", fault)
    page = Template(files("fsd_bench").joinpath("board.html").read_text(encoding="utf-8"), autoescape=True)
    data = json.dumps([asdict(row) for row in rows], ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    write_text(output, page.render(title=title, data=data))
    return len(rows)


def _of_record(source: str, record: Mapping[str, Any]) -> Iterator[BoardRow]:
    settings, environment = record["settings"], record.get("environment") or {}
    ratios = record.get("ratios") or {}
    baseline = next((name for name in ("plain", record.get("baseline"), *ratios) if name in ratios), "")
    prompts = settings.get("prompts") or ""
    task = prompts if isinstance(prompts, str) else ", ".join(prompts)
    for name, facts in record["methods"].items():
        compared = ((ratios.get(baseline) or {}).get(name) or {}).get("tokens_per_second") or {}
        bounds = {} if is_single(compared) else compared
        drafter = facts.get("drafter") or {}
        yield BoardRow(
            source=source,
            target=str(settings.get("target") or ""),
            drafter=str(drafter.get("name") or facts.get("by") or ""),
            method=name,
            task=Path(task).stem,
            device=str(environment.get("gpu") or environment.get("cpu") or ""),
            batch=settings.get("batch_size"),
            temperature=settings.get("temperature"),
            answers=facts.get("answers"),
            tokens_per_second=facts.get("tokens_per_second"),
            baseline=baseline,
            ratio=1.0 if name == baseline else compared.get("median"),
            low=bounds.get("low"),
            high=bounds.get("high"),
            acceptance_length=facts.get("tau"),
            score=None if facts.get("score") is None else 100 * facts["score"],
            command=str(environment.get("command") or ""),
            commit=str(environment.get("commit") or "")[:7],
            date=str(environment.get("date") or "")[:10],
        )


def _is_served(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) and v.keys() >= SERVER for v in value)


def _of_server(source: str, results: Mapping[str, Any]) -> Iterator[BoardRow]:
    """Read {model: draft head, task: [{batch_size, steps, topk, num_draft_tokens, metrics}]}, without intervals.

    An entry of 0 steps is plain decoding, with which others of its task and batch size are compared.
    """
    for task, entries in results.items():
        if not _is_served(entries):
            continue
        plain = {entry["batch_size"]: _mean(entry, "output_throughput") for entry in entries if entry["steps"] == 0}
        for entry in entries:
            tree = f"{entry['steps']},{entry['topk']},{entry['num_draft_tokens']}"
            speed, against = _mean(entry, "output_throughput"), plain.get(entry["batch_size"])
            accuracy = _mean(entry, "accuracy")
            yield BoardRow(
                source=source,
                target=str(results.get("target") or ""),
                drafter="" if entry["steps"] == 0 else str(results.get("model") or ""),
                method="plain" if entry["steps"] == 0 else f"exact, tree {tree}",
                task=task,
                batch=entry["batch_size"],
                answers=entry.get("num_samples"),
                tokens_per_second=speed,
                baseline="plain" if against else "",
                ratio=speed / against if speed and against else None,
                acceptance_length=_mean(entry, "accept_length"),
                score=None if accuracy is None else 100 * accuracy,
            )


def _mean(entry: Mapping[str, Any], name: str) -> float | None:
    values = [metric[name] for metric in entry["metrics"] if metric.get(name) is not None]
    return sum(values) / len(values) if values else None
