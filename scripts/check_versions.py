"""Run the fast tests with the lowest and the highest versions that pyproject.toml allows, in temporary environments.

    make test-versions
    python scripts/check_versions.py highest:3.12 lock:3.11 --tests tests/test_engine.py

A set is ``lowest`` (of every direct dependency), ``highest`` or ``lock`` (requirements.lock), with a version of Python.
uv resolves and installs it under runs/versions, and its environment is removed when its tests have passed. The report
has a paragraph per set.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("train", "dev")
REPORT = ROOT / "benchmarks" / "results" / "versions.txt"


def uv(*words: str) -> list[str]:
    if find_spec("uv") is None:
        sys.exit("check_versions: uv is missing; install it with: python -m pip install uv")
    return [sys.executable, "-m", "uv", "--quiet", *words]


def resolve(kind: str, version: str, into: Path) -> None:
    """Write the exact requirements of a set."""
    words = ["pip", "compile", "--no-header", "--no-annotate", "--python-version", version]
    words += ["--resolution", "lowest-direct" if kind == "lowest" else "highest"]
    words += [word for extra in EXTRAS for word in ("--extra", extra)]
    words += ["--constraint", "requirements.lock"] if kind == "lock" else []
    subprocess.run(uv(*words, "pyproject.toml", "--output-file", str(into)), cwd=ROOT, check=True)


def install(version: str, environment: Path, requirements: Path) -> Path:
    """Return the Python of the environment, which is made unless it has these requirements."""
    python, stamp = environment / "bin" / "python", environment / "installed.txt"
    if not stamp.is_file() or stamp.read_text() != requirements.read_text():
        subprocess.run(uv("venv", "--clear", "--seed", "--python", version, str(environment)), check=True)
        subprocess.run(uv("pip", "install", "--python", str(python), "-r", str(requirements)), check=True)
        subprocess.run(uv("pip", "install", "--python", str(python), "--no-deps", "--editable", str(ROOT)), check=True)
        stamp.write_text(requirements.read_text())
    return python


def run_tests(python: Path, tests: Sequence[str], workers: int) -> tuple[int, list[str]]:
    """Run pytest and print its output. Return its status, and its failures and counts."""
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow and not gpu", "-W", "ignore"]
    command += ["-n", str(workers), "--dist", "worksteal", *tests]
    lines = []
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    last = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return process.wait(), [*last, lines[-1] if lines else ""]


def versions(requirements: Path) -> str:
    """Return the versions of the direct dependencies."""
    direct = set(re.findall(r'^    "([A-Za-z0-9-]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M))
    lines = requirements.read_text().splitlines()
    return ", ".join(line.replace("==", " ") for line in lines if line.split("==")[0] in {n.lower() for n in direct})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sets", nargs="*", default=["lowest:3.10", "highest:3.13"], metavar="SET:PYTHON")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what pytest runs (%(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--report", type=Path, default=REPORT, help="(%(default)s)")
    args = parser.parse_args()
    paragraphs, worst = [], 0
    for text in args.sets:
        kind, _, version = text.partition(":")
        if kind not in ("lowest", "highest", "lock") or not version:
            parser.error(f"{text!r}: write lowest:3.10, highest:3.13 or lock:3.11")
        place = ROOT / "runs" / "versions"
        place.mkdir(parents=True, exist_ok=True)
        requirements = place / f"{kind}-{version}.txt"
        resolve(kind, version, requirements)
        python = install(version, place / f"{kind}-{version}", requirements)
        status, lines = run_tests(python, args.tests, args.workers)
        if status == 0:
            shutil.rmtree(place / f"{kind}-{version}")
        worst = max(worst, status)
        paragraphs.append("\n".join([f"{kind}, Python {version}: {versions(requirements)}", *lines]))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    head = f"python scripts/check_versions.py {' '.join(args.sets)}  ({datetime.date.today()}, commit {commit.strip()})"
    report = "\n\n".join([head, *paragraphs]) + "\n"
    print("\n" + report)
    args.report.write_text(report, encoding="utf-8")
    return worst


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"check_versions: failed: {shlex.join(error.cmd)}. uv must find or download each version of Python.")
