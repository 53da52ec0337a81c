"""Trains the same head with several losses or options and compares them at equal divergence spent.

Every arm is trained with every seed by `fsd-train fit`, on the same data for the same number of steps, and then decodes
the same held-out prompts under every rule. An interrupted comparison goes on where it stopped when the same command is
given again: finished heads and results are kept, an unfinished training goes on from its last checkpoint. The record
and its tables (.md) are rewritten after every head.

Run: python -m benchmarks.compare_losses --config benchmarks/compare_losses.yaml --output runs/losses \
         --json benchmarks/results/losses.json
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.equal_divergence import COUNTS, gather, markdown, markdown_runs, summarise
from benchmarks.loss_plan import PARTS, Evaluation, Plan, Run, read_plan
from fsd_bench.environment import commit, environment
from fsd_bench.record import write_record
from fsd_infer.cpu.packing import pack_linears
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import TreeShape
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.errors import CheckpointError, DataError, FsdError
from fsd_infer.files import jsonable, write_json, write_text
from fsd_infer.heads.checkpoint import read_config
from fsd_train.backends import stable_seed
from fsd_train.cli import main as fsd_train
from fsd_train.data import AnswersDataModule
from fsd_train.safety import check_checkpoint, read_checkpoint

Result = dict[str, list[float]]  # a number per prompt for each name of COUNTS


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_losses", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="what is compared (.yaml)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="heads, checkpoints and results")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the record; .md lies beside it")
    parser.add_argument("--arms", metavar="A,B", help="these only, also those marked extra (default: all but extra)")
    parser.add_argument("--seeds", metavar="N,N", help="instead of the configuration's")
    parser.add_argument("--steps", type=int, metavar="N", help="instead of the configuration's")
    parser.add_argument("--part", choices=PARTS, help="of the held-out prompts, instead of the configuration's")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other value, as in --set model.lr=0.001"
    )
    parser.add_argument("--threads", type=int, help="of torch (default: as torch chooses)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


# training ------------------------------------------------------------------------------------------------------------


def fit_config(run: Run, plan: Plan, quiet: bool) -> dict[str, Any]:
    """The configuration of `fsd-train fit` for one run."""
    here = run.directory
    steps = run.arm.steps
    trainer = {
        **plan.trainer,
        "devices": 1,
        "max_steps": steps,
        "max_epochs": -1,
        "check_val_every_n_epoch": None,
        "val_check_interval": steps,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "enable_model_summary": False,
        "enable_progress_bar": not quiet,
        "default_root_dir": str(here),
        "logger": {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": str(here), "name": "logs"},
        },
        "callbacks": [
            {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {
                    "dirpath": str(here / "checkpoints"),
                    "every_n_train_steps": max(1, min(100, steps // 4)),
                    "save_last": True,
                },
            },
            {"class_path": "fsd_train.callbacks.ExportHead", "init_args": {"directory": str(here / "head")}},
            {"class_path": "fsd_train.callbacks.LossCurve", "init_args": {"path": str(here / "curves.png")}},
            {"class_path": "fsd_train.callbacks.TokenRate"},
        ],
    }
    return {
        "seed_everything": run.seed,
        "trainer": trainer,
        "model": {**run.arm.model, "seed": run.seed},
        "data": {**plan.data, "seed": run.seed},
    }


def train(run: Run, plan: Plan, quiet: bool = False) -> None:
    """Train one run's head, from its last checkpoint if there is one; ends with run.json.

    Raises:
        FsdError: training failed; what went wrong stands on stderr.
        KeyboardInterrupt: so does Ctrl-C.
    """
    here = run.directory
    here.mkdir(parents=True, exist_ok=True)
    write_text(here / "fit.yaml", yaml.safe_dump(fit_config(run, plan, quiet), sort_keys=False))
    last = last_checkpoint(here / "checkpoints")
    before = 0.0 if last is None else float(read_checkpoint(last).get("training_seconds", 0.0))
    started = time.monotonic()
    argv = ["fit", "--config", str(here / "fit.yaml"), *(["--ckpt_path", str(last)] if last else [])]
    try:
        status = fsd_train(argv)
    except SystemExit as end:
        if end.code == 1:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from end
        status = 2
    steps = read_config(here / "head")["training"]["steps"] if status == 0 else None
    if steps != run.arm.steps:
        raise FsdError(
            f"training of {run.arm.name} with seed {run.seed} did not reach step {run.arm.steps}: see above and {here}."
        )
    facts = {
        "digest": run.digest,
        "arm": run.arm.name,
        "seed": run.seed,
        "steps": steps,
        "seconds": before + time.monotonic() - started,
        "resumed": last is not None,
        "commit": commit(),
        "validation": read_config(here / "head")["training"]["metrics"],
    }
    write_json(here / "run.json", jsonable(facts), indent=1)
    shutil.rmtree(here / "checkpoints", ignore_errors=True)  # the head is what counts, and moments are twice its size


def last_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that can be read; a kill may have left a truncated one, which is removed."""
    for path in sorted(directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            check_checkpoint(path)
        except CheckpointError:
            path.unlink()
            continue
        return path
    return None


def trained(run: Run) -> dict[str, Any] | None:
    """run.json of a finished run, or None."""
    facts = _read_json(run.directory / "run.json")
    whole = facts is not None and facts["digest"] == run.digest and (run.directory / "head" / "config.json").is_file()
    return facts if whole else None


# decoding ------------------------------------------------------------------------------------------------------------


class Judge:
    """Decodes held-out prompts. Target and prompts are loaded once, when they are first needed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.options: Evaluation = plan.evaluation
        self.tree = None if self.options.tree is None else TreeShape(**self.options.tree)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Token ids of the prompts: of the split that training validates on and never learns from."""
        data = AnswersDataModule(**{**self.plan.data, "features": None})
        data.setup()
        assert data.validation_set is not None
        found: dict[tuple[int, ...], None] = {}
        for number in range(len(data.validation_set)):
            item = data.validation_set[number]
            ids = item["input_ids"][: int(item["loss_mask"].argmax())].tolist()
            half = PARTS[1 + stable_seed("part", ids) % 2]
            if 0 < len(ids) <= self.options.max_prompt_tokens and self.options.part in ("all", half):
                found[tuple(ids)] = None
        if not found:
            raise DataError(
                "no held-out prompt is short enough: raise data.validation_fraction or evaluation.max_prompt_tokens."
            )
        rows = [list(ids) for ids in found]
        count = min(self.options.prompts, len(rows))
        return [rows[number * len(rows) // count] for number in range(count)]

    @cached_property
    def decoder(self) -> FuzzyDecoder:
        return FuzzyDecoder.from_pretrained(self.plan.model["target"], "none")

    @cached_property
    def digest(self) -> str:
        """Of all that a result depends on besides head and rule."""
        facts = {key: value for key, value in vars(self.options).items() if key != "rules"}
        return f"{stable_seed(json.dumps(facts, sort_keys=True), self.prompts):08x}"

    def file(self, run: Run, rule: str) -> Path:
        """Where the result lies."""
        return run.directory / f"decoded-{re.sub(r'[^a-z0-9.]+', '-', rule.lower())}-{self.digest}.json"

    def measure(self, run: Run, rules: Sequence[str]) -> Iterator[tuple[str, Result, float]]:
        """Decode all prompts under each rule with the run's head: (rule, numbers per prompt, seconds)."""
        options = self.options
        drafter = load_drafter(run.directory / "head", self.decoder.target, self.tree)
        for module in drafter.modules():
            pack_linears(module)
        sampled = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
        how: dict[str, Any] = sampled if options.temperature > 0 else {"do_sample": False}
        order = sorted(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))  # little padding in batches
        for rule in rules:
            started = time.monotonic()
            result: Result = {name: [0.0] * len(order) for name in COUNTS}
            for first in range(0, len(order), options.batch_size):
                batch = order[first : first + options.batch_size]
                made = self.decoder.generate(
                    [self.prompts[i] for i in batch], rule, drafter=drafter, chat=False, seed=options.seed + first,
                    max_new_tokens=options.max_new_tokens, measure_log_likelihood=True, **how,
                )  # fmt: skip
                for i, row in zip(batch, made.stats.rows, strict=True):
                    result["tokens"][i] = row.new_tokens
                    result["forwards"][i] = row.target_forwards
                    result["spent"][i] = round(row.divergence_spent, 5)
                    result["gate_open"][i] = round(row.gate_open_fraction * row.new_tokens)
                    result["log_likelihood"][i] = round((row.mean_log_likelihood or 0.0) * row.new_tokens, 4)
                    result["stopped"][i] = float(row.finish_reason == "stop")
                    result["copied"][i] = round((row.copied_4grams or 0.0) * row.new_tokens, 3)
                    result["repeated"][i] = round((row.repeated_4grams or 0.0) * row.new_tokens, 3)
            yield rule, result, time.monotonic() - started


# the whole -----------------------------------------------------------------------------------------------------------


class Comparison:
    """All runs of a plan and what is known of them; everything finished is on disk.

    Args:
        plan: what to do.
        output: directory of the runs.
    """

    def __init__(self, plan: Plan, output: Path) -> None:
        self.plan = plan
        self.data_digest = plan.data_digest()
        self.runs = plan.runs(output)
        self.judge = Judge(plan)

    def result(self, run: Run, rule: str) -> dict[str, Any] | None:
        """{"seconds", "counts"} of a finished decoding, or None."""
        return _read_json(self.judge.file(run, rule))

    def go(self, quiet: bool = False) -> Iterator[Run]:
        """Do what is not done yet; yields each run that lacked something as soon as all of it is there."""
        for number, run in enumerate(self.runs, start=1):
            name = f"[{number}/{len(self.runs)}] {run.arm.name}, seed {run.seed}"
            new = trained(run) is None
            if new:
                if self.plan.data_digest() != self.data_digest:
                    raise FsdError(
                        "the answers or cached features have changed meanwhile: start again when they stand."
                    )
                _say(f"{name}: {run.arm.steps} steps; {self.time_left()}")
                train(run, self.plan, quiet)
            missing = [rule for rule in self.plan.evaluation.rules if self.result(run, rule) is None]
            if missing:
                _say(f"{name}: decoding {len(self.judge.prompts)} held-out prompts; {self.time_left()}")
            for rule, counts, seconds in self.judge.measure(run, missing) if missing else ():
                write_json(self.judge.file(run, rule), {"rule": rule, "seconds": seconds, "counts": counts})
                tau = (sum(counts["tokens"]) - len(counts["tokens"])) / max(sum(counts["forwards"]), 1)
                spent = sum(counts["spent"]) / sum(counts["tokens"])
                _say(f"    {rule}: tau {tau:.3f}, {spent:.4f} nats per token, {seconds:.0f} s")
            if new or missing:
                yield run

    def time_left(self) -> str:
        """An estimate from what is finished, as words."""
        done = {run.directory: facts for run in self.runs if (facts := trained(run)) is not None}
        paces: dict[str, list[float]] = {}
        for facts in done.values():
            paces.setdefault(facts["arm"], []).append(facts["seconds"] / facts["steps"])
        if not paces:
            return "time left not known yet"
        usual = statistics.fmean(pace for values in paces.values() for pace in values)
        seconds = sum(
            run.arm.steps * statistics.fmean(paces.get(run.arm.name, [usual]))
            for run in self.runs
            if run.directory not in done
        )
        rules = self.plan.evaluation.rules
        results = {(run.directory, rule): self.result(run, rule) for run in self.runs for rule in rules}
        known = [result["seconds"] for result in results.values() if result is not None]
        seconds += (len(results) - len(known)) * (statistics.fmean(known) if known else 0.0)
        return f"about {seconds / 60:.0f} min left" + ("" if known else " for training")

    def record(self, command: Sequence[str]) -> dict[str, Any]:
        """What is known by now. ``summary`` is None until every arm has a whole seed."""
        runs, found = [], {}
        for run in self.runs:
            facts = trained(run)
            if facts is None:
                continue
            runs.append(facts)
            for rule in self.plan.evaluation.rules:
                result = self.result(run, rule)
                if result is not None:
                    found[run.arm.name, run.seed, rule] = result["counts"]
        counts = gather(found, [arm.name for arm in self.plan.arms])
        total = len(self.runs) * len(self.plan.evaluation.rules)
        return {
            "environment": environment(command),
            "settings": self.plan.to_dict(),
            "data_sha256": self.data_digest,
            "complete": len(found) == total,
            "runs": runs,
            "summary": None if counts is None else summarise(counts, self.plan.baselines, self.plan.evaluation.seed),
        }


def write_tables(record: Mapping[str, Any], path: Path) -> None:
    """The record, and its tables beside it as .md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, record)
    if record["summary"] is not None:
        write_text(path.with_suffix(".md"), markdown(record["summary"]) + "\n" + markdown_runs(record["runs"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Train, decode, compare. 2 on bad input, 130 after an interrupt."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        plan = read_plan(
            args.config,
            arms=args.arms.split(",") if args.arms else (),
            seeds=[_whole(seed) for seed in args.seeds.split(",")] if args.seeds else (),
            steps=args.steps,
            changes=[*args.set, *([f"evaluation.part={args.part}"] if args.part else [])],
        )
        comparison = Comparison(plan, args.output)
        command = ["python", "-m", "benchmarks.compare_losses", *words]
        for _ in comparison.go(args.quiet):
            write_tables(comparison.record(command), args.json)
        record = comparison.record(command)
        write_tables(record, args.json)
    except FsdError as error:
        _say(f"compare_losses: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on from here.")
        return 130
    print(args.json.with_suffix(".md").read_text(encoding="utf-8"))
    if len({facts["commit"] for facts in record["runs"]}) > 1:
        _say("note: the heads were trained at different commits; `runs` in the record says which.")
    _say(f"{args.json}, with .md beside it")
    return 0


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise FsdError(f"--seeds: {text!r} is no whole number.") from None


def _read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no whole file."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
