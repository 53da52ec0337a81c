"""Run what was never run on a GPU, most valuable steps first: the first hour on a GPU.

    python -m benchmarks.first_gpu [--rehearse] [--minutes M]

Each step is a command of this repository with a time limit. After a kill, a failure or a time limit the same command
continues: it runs the steps that were not tried yet, then retries those that are not done. With --minutes it ends after
so many, where longer commands are killed, with status 1 if steps are left. After every step the record and the page are
written to runs/first-gpu and benchmarks/results (first-gpu.json and .md). Logs and the steps' own records are in
runs/first-gpu. With --rehearse toys go through the same steps on a CPU, in minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.recorded import ROOT
from benchmarks.workplace import shown_command
from fsd_bench.record import write_record
from fsd_bench.report import bench_table
from fsd_core.files import write_text
from fsd_infer.environment import environment
from fsd_train.commands.quickstart import time_limit

RULES = "hf-generate,plain,exact,fuzzy:js:0.3,tilted,tilted:2"
ROUNDS = {  # parts of benchmarks.gpu_round, which go together
    "limit,kernels,products,forwards": "limits, kernels, products and forwards at an 8B model's shape",
    "plain": "its plain rounds, with and without graphs and kernels",
    "rounds": "its exact rounds, by tree",
    "rules,lag": "its rounds by rule, and by when the host reads them",
    "batch": "its rounds by rows",
    "context": "its rounds by context",
    "transformers,static": "transformers at that shape, eager and compiled",
}
MAX_MINUTES = 8.0  # minutes of a step, at most
MIN_MINUTES = 1.5  # minutes in which a step is worth beginning
RECORDED = ("tokens_per_second", "decode_tokens_per_second", "tau", "identical_to_baseline", "gate_open_fraction",
        "divergence_spent")  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A command of this repository.

    Attributes:
        name: also names its log and its record.
        why: what the step shows.
        words: arguments of Python, such as -m and a module.
        minutes: time limit, after which it is killed.
        record: JSON file that it writes, or None.
        missing: why it cannot run here, so that it is left out; or "".
    """

    name: str
    why: str
    words: list[str]
    minutes: float
    record: Path | None = None
    missing: str = ""


def run_steps(
    steps: Sequence[Stage],
    directory: Path,
    record: dict[str, Any],
    save: Callable[[dict[str, Any]], None],
    minutes: float = math.inf,
) -> bool:
    """Run the steps that are not done, those never tried first. Return whether all are done or left out.

    Args:
        steps: in order.
        directory: where logs go.
        record: outcomes by step under "steps"; changed in place.
        save: called with the record after each step.
        minutes: no step goes on for longer.
    """
    end = time.monotonic() + 60 * minutes
    outcomes = record.setdefault("steps", {})
    unfinished = [step for step in steps if outcomes.get(step.name, {}).get("status") != "done"]
    for step in sorted(unfinished, key=lambda step: step.name in outcomes):
        if step.missing:
            outcomes[step.name] = {"status": "left out", "why": step.why, "reason": step.missing}
        else:
            minutes_left = (end - time.monotonic()) / 60
            if minutes_left < MIN_MINUTES:
                print("the rest is for the next run of this command", file=sys.stderr, flush=True)
                return False
            step = replace(step, minutes=min(step.minutes, minutes_left))
            print(f"{step.name}: {step.why} (at most {step.minutes:.3g} min) ...", file=sys.stderr, flush=True)
            outcomes[step.name] = {"why": step.why, **_run(step, directory / f"{step.name}.log")}
            print(f"{step.name}: {outcomes[step.name]['status']}", file=sys.stderr, flush=True)
        save(record)
    return {outcomes[step.name]["status"] for step in steps} <= {"done", "left out"}


def _run(step: Stage, log: Path) -> dict[str, Any]:
    """Run one step and return its outcome."""
    if step.record is not None:
        step.record.unlink(missing_ok=True)
    start, environ = time.perf_counter(), {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *step.words], cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            status = "done" if process.wait(60 * step.minutes) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:  # kill the processes it started too, also after an interrupt
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcome: dict[str, Any] = {
        "status": status,
        "seconds": round(time.perf_counter() - start, 1),
        "command": shlex.join(["python", *step.words]),
        "tail": log.read_text(encoding="utf-8", errors="replace").replace(f"{ROOT}/", "").splitlines()[-12:],
    }
    if status == "done" and step.record is not None:
        written = json.loads(step.record.read_text(encoding="utf-8"))
        outcome["methods"] = {
            name: {key: facts.get(key) for key in RECORDED} for name, facts in written.get("methods", {}).items()
        }
        outcome["table"] = bench_table(written).partition("\n\n")[0]  # of speed
    return outcome


def page(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    machine = record["environment"]
    lines = [
        f"# {'Rehearsal of the' if record['rehearsal'] else 'The'} first hour on a GPU",
        "",
        f"{machine['gpu'] or machine['cpu']}; torch {machine['torch']}, transformers {machine['transformers']}; commit "
        f"{str(machine['commit'])[:10]}; `{machine['command']}`.",
        *(["", "Toys on a CPU: only the statuses mean anything."] if record["rehearsal"] else []),
        "",
        "| step | what | status | seconds |",
        "|---|---|---|---|",
    ]
    for name, outcome in record["steps"].items():
        why = outcome["why"] + (f": {outcome['reason']}" if "reason" in outcome else "")
        lines.append(f"| {name} | {why} | {outcome['status']} | {outcome.get('seconds', '–')} |")
    for name, outcome in record["steps"].items():
        if "command" in outcome:
            shown = outcome["table"].splitlines() if "table" in outcome else outcome["tail"]
            lines += ["", f"## {name}", "", f"`{outcome['command']}`", "", "```", *shown, "```"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class RunSizes:
    """What differs in a rehearsal.

    Attributes:
        rounds: options of `benchmarks.gpu_round`.
        prompts, built_in, tinyllama: options of `fsd-bench run`.
        answers: options of `fsd-train regenerate`; none where answers are at hand.
        minutes: training time, in two steps. The recipe is in the run's directory.
        padded: options of `benchmarks.padded`.
        distributions: options of pytest.
        can_record: whether decoding can do without CUDA graphs.
    """

    rounds: list[str]
    prompts: list[str]
    built_in: list[str]
    tinyllama: list[str]
    answers: list[str]
    minutes: float
    padded: list[str]
    distributions: list[str]
    can_record: bool = True


def full(args: argparse.Namespace, directory: Path) -> RunSizes:
    """Return the sizes for a GPU."""
    recipe = (ROOT / "recipes" / "tinyllama-1.1b.yaml").read_text(encoding="utf-8")
    for old, new in {
        "runs/tinyllama-1.1b-chat-v1.0/answers.jsonl": str(directory / "answers.jsonl"),
        "runs/tinyllama-1.1b-chat-v1.0": str(directory / "tinyllama"),
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": args.tinyllama,
        "warmup_steps: 500": "warmup_steps: 100",
    }.items():
        recipe = recipe.replace(old, new)
    write_text(directory / "recipe.yaml", recipe)
    answer_files = ["data/tinyllama-1.1b-answers.jsonl.gz", "data/tinyllama-1.1b-answers-2.jsonl.gz"]
    return RunSizes(
        [], ["--prompts", "data/spec_bench_dev.jsonl", "--limit", "24", "--every", "10"], [],
        ["--target", args.tinyllama],
        ["--prompts", *answer_files, "--max-new-tokens", "256", "--batch-size", "128", "--limit", "3000"],
        10, ["--target", args.tinyllama, "--weights", "8.03e9"], ["-m", "gpu", "-k", "distribution"],
    )  # fmt: skip


def toys(directory: Path) -> RunSizes:
    """Return sizes for seconds on a CPU. The first call makes the toys."""
    from fsd_infer.targets.target import Target
    from fsd_train.commands.new_recipe import render
    from fsd_train.commands.sizing import choose, facts_of
    from tests.bench_toys import save_toy
    from tests.head_toys import write_answers

    home = directory / "toys"
    home.mkdir(exist_ok=True)
    toy = save_toy(home)
    answers = write_answers(home / "answers.jsonl", Target.from_pretrained(str(toy.target)), 48)
    facts = facts_of(str(toy.target))
    write_text(directory / "recipe.yaml", render(facts, choose(facts), [str(answers)], run=f"{directory}/tinyllama"))
    small = ["--device", "cpu", "--max-new-tokens", "16"]
    return RunSizes(
        ["--shape", str(toy.target), "--device", "cpu", "--prompt", "8", "--new", "6"],
        ["--prompts", str(toy.prompts), *small], toy.models, ["--target", str(toy.target), "--dtype", "fp32"], [], 0.1,
        ["--target", str(toy.target), "--weights", "1e6"],
        ["tests/test_sampled_requests.py", "-k", "reduced and cpu"],
        can_record=False,
    )  # fmt: skip


def steps_of(sizes: RunSizes, directory: Path) -> list[Stage]:
    """Return all steps, most valuable first. TinyLlama is decoded with the head that an earlier step trains."""

    def tests(name: str, why: str, *more: str, missing: str = "") -> Stage:
        return Stage(name, why, ["-m", "pytest", "-q", "-p", "no:cacheprovider", *more], MAX_MINUTES, missing=missing)

    def measured(name: str, why: str, *words: str) -> Stage:
        file = directory / f"{name}.json"
        return Stage(name, why, ["-m", *words, "--json", str(file)], MAX_MINUTES, file)

    bench = ["fsd_bench.cli", "run", "--methods", RULES, *sizes.prompts]
    drafter = ["--drafter", f"{directory}/tinyllama/head"]
    eager = ["--no-recording"] if sizes.can_record else []
    vllm = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
    peer = ["--peers", "vllm", "--peer-python", f"vllm={vllm}", "--methods", RULES]
    no_vllm = "" if vllm else "no vLLM is installed, nor VLLM_PYTHON set"
    no_deepspeed = "" if importlib.util.find_spec("deepspeed") else "no DeepSpeed is installed"
    padded = ["--target", f"{directory}/padded", *sizes.tinyllama[2:]]
    return [
        *_rounds(sizes, directory),
        tests("device-tests", "the tests that need a GPU", "-m", "gpu", "-k", "not distribution and not strategies"),
        tests("distributions", "sampled answers have the target's distribution", *sizes.distributions),
        measured("built-in", "built-in model: generate, plain, exact and lossy", *bench, *sizes.built_in),
        measured("built-in-eager", "the same without CUDA graphs", *bench, *sizes.built_in, *eager),
        *_training(sizes, directory),
        measured("tinyllama", "TinyLlama with that head", *bench, *sizes.tinyllama, *drafter),
        Stage("padded", "TinyLlama with the weights of an 8B model",
             ["-m", "benchmarks.padded", *sizes.padded, "--output", f"{directory}/padded"], MAX_MINUTES),
        measured("tinyllama-as-8b", "the same tokens at an 8B model's cost", *bench, *padded, *drafter),
        Stage("vllm", "the built-in model and vLLM", ["-m", "benchmarks.compare", *peer, "--output", str(directory)],
             MAX_MINUTES, directory / "compare-smollm2-135m.json", no_vllm),
        tests("strategies", "FSDP and DeepSpeed's stages on the GPU", "-m", "gpu", "-k", "strategies"),
        tests("deepspeed", "its stages by two processes", "tests/test_deepspeed.py", missing=no_deepspeed),
    ]  # fmt: skip


def _rounds(sizes: RunSizes, directory: Path) -> list[Stage]:
    """Rounds at an 8B model's shape, a few parts at a time; what is done stays in one record."""
    words = ["-m", "benchmarks.gpu_round", *sizes.rounds, "--json", f"{directory}/gpu-round.json", "--parts"]
    return [Stage(f"round-{parts.split(',')[0]}", why, [*words, parts], MAX_MINUTES) for parts, why in ROUNDS.items()]


def _training(sizes: RunSizes, directory: Path) -> list[Stage]:
    """Answers of the target, and a head that learns from them in two sittings."""
    recipe = ["--config", f"{directory}/recipe.yaml"]
    answers = ["-m", "fsd_train.cli", "regenerate", *recipe, *sizes.answers]

    def fit(minutes: float, *more: str) -> list[str]:
        return ["-m", "fsd_train.cli", "fit", *recipe, "--trainer.max_time", time_limit(round(60 * minutes)), *more]

    return [
        Stage("answers", "TinyLlama's answers to learn from", answers, MAX_MINUTES,
             missing="" if sizes.answers else "a rehearsal has answers"),
        Stage("training", "a head for TinyLlama", fit(sizes.minutes / 2, "--overwrite", "true"), MAX_MINUTES),
        Stage("training-2", "the rest of its time", fit(sizes.minutes, "--ckpt_path", "auto"), MAX_MINUTES),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the remaining steps. Return 1 if some are left, failed or ran out of time, 2 without a GPU."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="toys on a CPU")
    parser.add_argument("--tinyllama", default="TinyLlama/TinyLlama-1.1B-Chat-v1.0", help="directory or hub id")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many (default: all steps)")
    args = parser.parse_args(words)
    if not args.rehearse and not torch.cuda.is_available():
        print(
            "first_gpu: this machine has no CUDA device. --rehearse goes through the steps with toys.", file=sys.stderr
        )
        return 2
    os.chdir(ROOT)  # commands name files by their place in it
    name = "first-gpu-rehearsal" if args.rehearse else "first-gpu"
    directory, file = Path("runs", name), Path("benchmarks", "results", f"{name}.json")
    directory.mkdir(parents=True, exist_ok=True)
    working_copy = directory / file.name
    record = next((json.loads(path.read_text(encoding="utf-8")) for path in (working_copy, file) if path.is_file()), {})
    record |= {"rehearsal": args.rehearse, "environment": environment(shown_command("benchmarks.first_gpu", words))}

    def save(record: dict[str, Any]) -> None:
        for path in (working_copy, file):
            write_record(path, record)
            write_text(path.with_suffix(".md"), page(record))

    steps = steps_of(toys(directory) if args.rehearse else full(args, directory), directory)
    finished = run_steps(steps, directory, record, save, args.minutes)
    print(page(record))
    return int(not finished)


if __name__ == "__main__":
    sys.exit(main())
