"""`fsd-train quickstart`: download, short training, and a comparison of plain, exact and lossy decoding.

Training runs in its own process, so that its imports do not affect the timing of decoding.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import shutil
import subprocess
import sys
import time
from pathlib import Path

from fsd_core.errors import FsdError
from fsd_infer.targets.builtin import builtin_dir, shipped_drafter
from fsd_train.repository import find

TARGET = "smollm2-135m"
METHODS = (
    "hf-generate", "plain", "exact", "exact+lookup=exact@shipped+lookup",
    "js 0.3+lookup=fuzzy:js:0.3@shipped+lookup", "tilted+lookup=tilted@shipped+lookup",
)  # fmt: skip
RECIPE = Path("recipes/smollm2-135m.yaml")
ANSWERS = Path("data/quickstart_answers.jsonl.gz")
PROMPTS = Path("data/quickstart_prompts.jsonl")
OVERRIDES = Path(__file__).with_name("quickstart.yaml")
OUTPUT = Path("runs/quickstart")  # as in the overrides
NEXT = "fsd-infer generate --prompt 'Why is the sky blue?' --rule tilted --show-accepted"
STEPS_PER_SECOND = 1.0  # on two cores; the learning rate reaches 0 at the end


def main(args: argparse.Namespace) -> int:
    """Run `fsd-train quickstart`: fetch the built-in model, train a head, decode with the shipped one, print the table.

    Raises:
        FsdError: the shipped head or the prompts are missing, or training is not installed or fails.
    """
    train_seconds, prompts = args.train_seconds, args.prompts
    if train_seconds > 0 and importlib.util.find_spec("lightning") is None:
        raise FsdError("training is not installed. Run pip install 'fsd-toolkit[train]', or use --train-seconds 0.")
    for path in (RECIPE, PROMPTS, ANSWERS):
        if not find(path).is_file():
            raise FsdError(f"{path} is missing. Clone the whole repository, or reinstall the package.")
    if shipped_drafter(TARGET) is None:
        raise FsdError(
            f"no trained head for {TARGET} (fsd_infer/shipped/{TARGET}). Clone the whole repository, "
            f"or train a head: fsd-train fit --config {RECIPE}"
        )
    start = time.perf_counter()
    _say(f"1/3  the built-in model {TARGET}")
    _say(f"     {builtin_dir(TARGET)}")
    if train_seconds > 0:
        _say(f"2/3  training a head for {train_seconds} s, as a demonstration (the shipped one had nearly seven hours)")
        train(train_seconds)
    else:
        _say("2/3  no training")
    _say(f"3/3  decoding {prompts} prompts with the shipped head, methods taking turns on every prompt")
    import fsd_bench
    from fsd_bench.report import bench_table, brief_table

    path = OUTPUT / "bench.json"
    path.with_name(path.name + ".partial.jsonl").unlink(missing_ok=True)  # of an interrupted quickstart
    record = fsd_bench.run(
        find(PROMPTS), METHODS, target=TARGET, limit=prompts, max_new_tokens=args.max_new_tokens,
        json_path=path, overwrite=True, progress=True,
    )  # fmt: skip
    print(bench_table(record) if args.details else f"{brief_table(record)}\n(--details prints all tables)")
    print(f"\nNext: {NEXT}")
    _say(f"record: {OUTPUT / 'bench.json'}; {time.perf_counter() - start:.0f} s in all")
    return 0


def train(seconds: int) -> None:
    """Run the recipe briefly on sample answers and print its first and last loss. Raises FsdError on failure."""
    shutil.rmtree(OUTPUT / "logs", ignore_errors=True)
    done = subprocess.run(train_command(seconds), check=False)
    if done.returncode != 0:
        raise FsdError(f"the training failed with exit status {done.returncode}. Its output is above.")
    losses = read_logged(OUTPUT / "logs", "loss")
    if not losses:
        raise FsdError("the training logged no loss. Give it more time: --train-seconds 60.")
    few = max(1, len(losses) // 10)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    _say(f"     loss {first:.2f} at the start, {last:.2f} at the end; the head: {OUTPUT / 'head'}")


def train_command(seconds: int) -> list[str]:
    """Return the command that trains by the recipe and its overrides in quickstart.yaml."""
    steps = max(10, round(seconds * STEPS_PER_SECOND))
    command = [sys.executable, "-m", "fsd_train.cli", "fit", "--config", str(find(RECIPE)), "--config", str(OVERRIDES)]
    return [*command, f"--trainer.max_steps={steps}", f"--trainer.max_time={time_limit(seconds)}"]


def time_limit(seconds: int) -> str:
    """Return Lightning's ``trainer.max_time``: days:hours:minutes:seconds."""
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 1440:02}:{minutes // 60 % 24:02}:{minutes % 60:02}:{rest:02}"


def read_logged(logs: Path, name: str) -> list[float]:
    """Return the values of a column of a run's log, by step."""
    for path in sorted(logs.rglob("metrics.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]
    return []


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
