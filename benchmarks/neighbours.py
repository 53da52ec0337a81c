"""What a process loses to others: a second method in the same process, and another process that keeps a core busy.

Each setting is a process of its own (``fsd-infer bench``), and the settings take turns.

Run: python -m benchmarks.neighbours [--part shared|busy] --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.recorded import record_main, settings_of
from fsd_infer.bench.environment import environment
from fsd_infer.cli.report import table
from fsd_infer.errors import FsdError

ROOT = Path(__file__).resolve().parent.parent
SPIN = "while True: pass"
SETTLED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")  # here, whatever the caller's are


@dataclass(frozen=True)
class Setting:
    """One process: its methods in turns, its environment, threads beyond --threads, and others that spin meanwhile."""

    methods: str
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int = 0
    busy: int = 0


SHARED = {
    "hf-generate alone": Setting("hf-generate"),
    "hf-generate beside plain": Setting("hf-generate,plain"),
    "exact alone": Setting("exact"),
    "exact beside hf-generate": Setting("hf-generate,exact"),
}
BUSY = {
    "alone": Setting("exact"),
    "alone, passive": Setting("exact", {"OMP_WAIT_POLICY": "PASSIVE"}),
    "alone, a thread less": Setting("exact", threads=-1),
    "busy core": Setting("exact", busy=1),
    "busy core, passive": Setting("exact", {"OMP_WAIT_POLICY": "PASSIVE"}, busy=1),
    "busy core, 1,000 spins": Setting("exact", {"GOMP_SPINCOUNT": "1000"}, busy=1),
    "busy core, a thread less": Setting("exact", threads=-1, busy=1),
}
PARTS = {"shared": SHARED, "busy": BUSY}


def measure(setting: Setting, args: argparse.Namespace) -> dict[str, float]:
    """tok/s per method, the median over prompts, in a process of its own.

    Raises:
        FsdError: it failed; its last line.
    """
    threads = args.threads + setting.threads
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(setting.busy)]
    env = {name: value for name, value in os.environ.items() if name not in SETTLED} | dict(setting.env)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [
            sys.executable, "-m", "fsd_infer.cli.main", "bench", "--target", args.target,
            "--prompts", str(args.prompts), "--limit", str(args.limit), "--max-new-tokens", str(args.tokens),
            "--methods", setting.methods, "--baseline", setting.methods.split(",")[0], "--score", "none",
            "--threads", str(max(threads, 1)), "--json", str(record),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise FsdError((done.stderr.strip() or "the measurement failed").splitlines()[-1])
            methods = json.loads(record.read_text())["methods"]
        finally:
            for process in spinning:
                process.kill()
                process.wait()
    return {name: facts["tokens_per_second"] for name, facts in methods.items()}


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """Every setting once per round, from another one each time."""
    settings = PARTS[args.part]
    names = list(settings)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(args.rounds):
        for name in names[turn:] + names[:turn]:
            found[name].append(measure(settings[name], args))
            print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    medians = {
        name: {method: statistics.median(run[method] for run in runs) for method in runs[0]}
        for name, runs in found.items()
    }
    return {
        "settings": settings_of(args) | {"prompts": args.prompts.name},
        "tokens_per_second": medians,
        "runs": found,
        "environment": environment(command),
    }


def report(record: dict[str, Any]) -> str:
    medians = record["tokens_per_second"]
    rows = [[name, method, f"{rate:.1f}"] for name, rates in medians.items() for method, rate in rates.items()]
    return table(["setting", "method", "tok/s"], rows)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__.split("\n\n")[0])
    parser.add_argument("--part", choices=list(PARTS), default="shared", help="(%(default)s)")
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "quickstart_prompts.jsonl")
    parser.add_argument("--limit", type=int, default=4, help="prompts (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="new ones per answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of all settings (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    parser.add_argument("--json", type=Path, required=True, help="record")
    return parser


if __name__ == "__main__":
    sys.exit(record_main("benchmarks.neighbours", build_parser(), run, report))
