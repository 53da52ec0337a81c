"""Choices in training a head of the built-in model, each alone compared with the recipe's, at equal CPU time.

    python -m benchmarks.training_choices --json benchmarks/results/training-choices.json

Each arm of :data:`ARMS` trains the head of recipes/smollm2-135m.yaml in one thread. Its number of steps follows from
the CPU seconds of its first steps, so that all arms take the same time, also on a busy machine. Arms take turns, seed
by seed. The figures are teacher-forced on held-out answers, and by place in held-out chats of nearly 4,096 tokens,
which are answers one after the other; and tokens per forward where the head decodes answers to held-out prompts, by
`exact` with a fixed tree. The same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.optim import AdamW

from benchmarks.positions import answered, chat, up_to
from benchmarks.recorded import BUILT_IN, ROOT, Finished, parser_of, record_main
from fsd_core.errors import FsdError
from fsd_core.files import write_text
from fsd_core.tables import table
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters import NoDrafter
from fsd_infer.targets.builtin import shipped_drafter
from fsd_infer.trees.shape import TreeShape
from fsd_train.callbacks import DecodedTau
from fsd_train.commands.regenerate import AnswerFile, regenerate
from fsd_train.data import AnswersDataModule, cache_features
from fsd_train.data.backends import LocalBackend
from fsd_train.data.plan import plan_jobs
from fsd_train.losses import EagleLoss
from fsd_train.models import EagleModule, HeadOptions, MuonAdamW, WarmupCosine

HEAD = HeadOptions(final_norm=True, feature_scale=True, fused_layers=[5, 14, 23])
TRIED, TOKENS, WARMUP = 8, 1152, 8  # steps whose time is taken; tokens of a batch; steps of warm-up
LONG, CHATS = 4096, 2  # tokens of a held-out chat; chats
PROBLEMS, MATHS = 320, f"{BUILT_IN}-maths"  # word problems that the fine-tuned target answers
HELD_OUT = 7  # every so many-th row
TREE, DECODED = TreeShape(depth=3, width=3, nodes=8), 24  # of the decoded answers; number of held-out prompts


@dataclass(frozen=True)
class Arm:
    """What an arm changes.

    Attributes:
        options: options of :class:`EagleModule`.
        texts: name of its files, see :func:`make_texts`.
        target: whose head it trains; the fine-tuned one's answers are files of their own.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    texts: str = "answers"
    target: str = BUILT_IN

    @property
    def held_out(self) -> str:
        return "problems-held-out" if self.target == MATHS else "held-out"


RECIPE: dict[str, Any] = {
    "optimizer": partial(AdamW, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95)), "step_decay": 0.8, "unroll_steps": 4,
    "draft_vocab_size": 8192, "context_ids": True, "chain_share": 0.35, "noise": 0.1, "eval_steps": 5,
    "loss": EagleLoss(w_feature=0.3, w_ce=1.0), "lr_scheduler": partial(WarmupCosine, warmup_steps=WARMUP),
}  # fmt: skip
ARMS = {
    "recipe": Arm(),
    "3 steps": Arm({"unroll_steps": 3}),
    "5 steps": Arm({"unroll_steps": 5}),
    "whole vocabulary": Arm({"draft_vocab_size": None, "context_ids": False}),
    f"chats of {TOKENS} tokens": Arm(texts="chats"),
    "step_decay 1": Arm({"step_decay": 1.0}),
    "Muon": Arm({"optimizer": partial(MuonAdamW, lr=1e-3, weight_decay=0.01)}),
    "maths target": Arm(texts="problems", target=MATHS),
    "maths target, from the chat head": Arm({"initial_head": str(shipped_drafter(BUILT_IN))}, "problems", MATHS),
}


class _CPUClock(Callback):
    """CPU seconds of the process at each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, *args: Any, **options: Any) -> None:
        self.seconds.append(time.process_time())

    @property
    def each(self) -> float:
        return (self.seconds[-1] - self.seconds[1]) / (len(self.seconds) - 2)


# texts ----------------------------------------------------------------------------------------------------------------


def make_texts(place: Path, tokens: int, problems: bool) -> None:
    """Write the files of answers that ``place`` lacks, as ``NAME.jsonl``.

    - ``answers`` and ``held-out``: rows of data/smollm2-135m-answers.jsonl.gz of so many tokens, one in
      :data:`HELD_OUT` held out;
    - ``chats``: those of ``answers`` one after the other, as many in each as have :data:`TOKENS` tokens alone;
    - ``long``: later rows in the same way, in :data:`CHATS` conversations of rows with :data:`LONG` tokens alone;
    - ``problems`` and ``problems-held-out``, if wanted: the fine-tuned target's answers to word problems.
    """
    rows = answered()
    taken = list(up_to(rows, tokens))
    answers = [row for index, row in enumerate(taken) if index % HELD_OUT]
    later = [_chat(list(up_to(rows, LONG))) for _ in range(CHATS)]
    chats, rest = [], iter(answers)
    while part := list(up_to(rest, TOKENS)):
        chats.append(_chat(part))
    files = {"answers": answers, "held-out": taken[::HELD_OUT], "chats": chats, "long": later}
    if problems and not (place / "problems.jsonl").exists():
        solved = _answered_problems(place / "problems-answered.jsonl")
        files |= {"problems": [row for index, row in enumerate(solved) if index % HELD_OUT]}
        files |= {"problems-held-out": solved[::HELD_OUT]}
    for name, file_rows in files.items():
        write_text(place / f"{name}.jsonl", "".join(json.dumps(dict(row)) + "\n" for row in file_rows))


def _chat(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of one conversation."""
    return {"id": rows[0]["id"], "messages": chat(rows)}


def _answered_problems(file: Path) -> list[dict[str, Any]]:
    """Let the fine-tuned target answer word problems, and return the rows."""
    decoder = FuzzyDecoder.from_pretrained(MATHS)
    plan = plan_jobs([ROOT / "data" / "word-problems.jsonl.gz"], decoder.tokenizer, limit=PROBLEMS)
    regenerate(plan, LocalBackend(decoder, 160, 0), AnswerFile(file, {"target": MATHS, "problems": PROBLEMS}))
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def cache(target_name: str, arms: Sequence[Arm], place: Path) -> None:
    """Cache the features of the texts of a target's arms in ``place/TARGET``."""
    target = Target.from_pretrained(target_name, dtype=torch.bfloat16)
    target.capture_layers(HEAD.capture_layers(target))
    FuzzyDecoder(target, NoDrafter(target.vocab_size)).prepare()  # with a backend's layers, which are faster
    for arm in arms:
        for data in (texts_of(arm, place), *([chats_of(arm, place)] if target_name == BUILT_IN else [])):
            data.features = None
            data.setup()
            assert data.train_set is not None and data.validation_set is not None
            texts = [*data.train_set.texts, *data.validation_set.texts]
            cache_features(target, texts, place / target_name)


def texts_of(arm: Arm, place: Path) -> AnswersDataModule:
    """Return an arm's texts, for training and held out."""
    return AnswersDataModule(
        [str(place / f"{arm.texts}.jsonl")], [str(place / f"{arm.held_out}.jsonl")], tokenizer=arm.target,
        max_length=TOKENS if arm.texts == "chats" else 512, batch_tokens=TOKENS, features=str(place / arm.target),
    )  # fmt: skip


def chats_of(arm: Arm, place: Path) -> AnswersDataModule:
    """Return the held-out chats; the training rows are not used."""
    file = str(place / "long.jsonl")
    return AnswersDataModule(
        [str(place / f"{arm.held_out}.jsonl")], [file], tokenizer=arm.target, max_length=LONG, batch_tokens=LONG,
        features=str(place / arm.target),
    )  # fmt: skip


# runs -----------------------------------------------------------------------------------------------------------------


def train(arm: Arm, seed: int, steps: int, place: Path, measured: bool = True) -> tuple[dict[str, float], float]:
    """Train an arm; return its figures on held-out answers if ``measured``, and the CPU seconds of a step."""
    seed_everything(seed, verbose=False)
    clock = _CPUClock()
    module = EagleModule(arm.target, HEAD, seed=seed, eval_rules=["exact"], **{**RECIPE, **arm.options})
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, limit_val_batches=1.0 if measured else 0, logger=False,
        val_check_interval=steps, check_val_every_n_epoch=None, num_sanity_val_steps=0, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
        default_root_dir=place / "run", callbacks=[clock], gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, texts_of(arm, place))
    if not measured:
        return {}, clock.each
    names = ("val_tau", "val_loss", *(f"val_agreement_{step}" for step in range(RECIPE["eval_steps"])))
    figures = {name: float(trainer.callback_metrics[name]) for name in names}
    figures |= DecodedTau(["exact"], prompts=DECODED, max_new_tokens=64, tree=TREE).measure(trainer, module)
    if arm.target == BUILT_IN:
        trainer.validate(module, chats_of(arm, place), verbose=False)
        metrics = trainer.callback_metrics.items()
        figures |= {name: float(value) for name, value in metrics if name.startswith("val_tau_from")}
    return figures, clock.each


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train all arms; return the runs."""
    torch.set_num_threads(1)
    if unknown := [name for name in args.arms if name not in ARMS]:
        raise FsdError(f"no arm is called {unknown[0]!r}. There are: {', '.join(ARMS)}.")
    arms = {name: ARMS[name] for name in args.arms}
    done = Finished(args.json, {"seconds": args.seconds, "tokens": args.tokens})
    with TemporaryDirectory() as scratch:
        place = Path(args.work or scratch)
        place.mkdir(parents=True, exist_ok=True)
        make_texts(place, args.tokens, any(arm.target == MATHS for arm in arms.values()))
        for target in dict.fromkeys(arm.target for arm in arms.values()):
            cache(target, [arm for arm in arms.values() if arm.target == target], place)
        for name, arm in arms.items():
            if name not in done:
                done[name] = train(arm, 0, TRIED, place, measured=False)[1]
        for seed in range(args.seeds):
            for name, arm in arms.items():
                if f"{name}, {seed}" in done:
                    continue
                steps = max(round(args.seconds / done[name]), 3)  # the first two are not timed
                figures, cost = train(arm, seed, steps, place)
                run = {"arm": name, "seed": seed, "steps": steps, "cpu_seconds_per_step": cost, **figures}
                print(run, file=sys.stderr, flush=True)
                done[f"{name}, {seed}"] = run
    runs = [done[f"{name}, {seed}"] for seed in range(args.seeds) for name in arms]
    return {"runs": runs}


def report(record: dict[str, Any]) -> str:
    """Return a table of the arms, means over seeds."""
    lines = []
    for arm in dict.fromkeys(run["arm"] for run in record["runs"]):
        arm_runs = [run for run in record["runs"] if run["arm"] == arm]
        figures = [
            f"{mean(run[name] for run in arm_runs):.3f}"
            for name in ("val_tau", "val_agreement_0", "val_agreement_3", "decoded_tau/exact")
        ]
        lines.append([arm, str(arm_runs[0]["steps"]), *figures, " ".join(f"{run['val_tau']:.3f}" for run in arm_runs)])
    return table(["arm", "steps", "val_tau", "first draft agrees", "fourth", "decoded", "val_tau by seed"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = parser_of(
        "benchmarks.training_choices", __doc__, seconds=(75.0, "CPU seconds of training per arm and seed"),
        seeds=(2, "number of seeds"), tokens=(24000, "tokens of answers"), arms=(list(ARMS), "arms, by name"),
        json=None,
        work=(None, "directory for texts and features; default: a temporary one"),
    )  # fmt: skip
    return record_main("benchmarks.training_choices", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
