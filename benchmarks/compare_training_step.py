"""Times an optimiser step of ours beside EAGLE's own, on the same batches with the same weights, in one run.

Before anything is timed, both must give the same loss and the same gradients in fp32 (over the whole vocabulary and
over the draft vocabulary); otherwise the run ends with an error. Then the methods take turns batch by batch. At the
end each method's memory is measured in a process of its own. The same head everywhere: fc with bias and one Llama
layer, the public EAGLE layout; the loss is SmoothL1 + 0.1 soft cross-entropy; the target's features are computed
before, and no noise is added (theirs adds it in the data loader).

Run: python -m benchmarks.compare_training_step --eagle DIR --json benchmarks/results/training-step.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from benchmarks.eagle_step import EagleStep, checkout_facts, eagle_batch
from benchmarks.recorded import quiet_lightning, record_main, settings_of
from benchmarks.training_batches import choose_rows, describe, make_batches
from fsd_infer.bench.environment import environment
from fsd_infer.bench.profile import peak_bytes, resident_bytes, restart_peak
from fsd_infer.bench.record import interval
from fsd_infer.cli.report import number, table
from fsd_infer.device.memory import trim
from fsd_infer.errors import FsdError
from fsd_infer.target import Target
from fsd_train.data import read_answers
from fsd_train.eagle_module import EagleModule
from fsd_train.optim import build_optimizer
from fsd_train.vocabulary import choose_draft_ids

METHODS = {
    "ours": "this package's step, the whole vocabulary",
    "ours-draft-vocab": "the same over the draft vocabulary",
    "eagle": "EAGLE's step",
    "eagle-no-recompute": "EAGLE's step without its gradient checkpointing",
    "eagle-accuracies": "EAGLE's step and the accuracies that its loop computes after each",
}
Step = Callable[[int], Tensor]  # number of a batch -> loss


@dataclass(frozen=True)
class Options:
    """What all methods share.

    Attributes:
        target: built-in name or directory.
        eagle: checkout of EAGLE.
        precision: "bf16-mixed" or "32-true".
        draft_vocab_size: of ``ours-draft-vocab``.
        lr: learning rate.
        seed: of weights and batches.
        threads: of torch.
    """

    target: str
    eagle: str
    precision: str
    draft_vocab_size: int
    lr: float
    seed: int
    threads: int

    @property
    def half(self) -> bool:
        return self.precision == "bf16-mixed"


# the steps -----------------------------------------------------------------------------------------------------------


def our_module(options: Options, draft_ids: Tensor | None, half: bool) -> EagleModule:
    """Our module with the head's initial weights; the target's weights as training in that precision has them."""
    head = {"layer": "llama", "fc_bias": True}
    module = EagleModule(options.target, head=head, loss="eagle", lr=options.lr, seed=options.seed)
    if half:
        # the trainer's precision is what tells the module to hold the target in bf16
        module.trainer = Trainer(
            accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
    module.configure_model()
    module.head.set_draft_ids(draft_ids)
    return module


class OurStep:
    """One optimiser step of ours, as Trainer does it with the shipped recipe's clipping (norm 1.0)."""

    def __init__(self, module: EagleModule, lr: float, half: bool) -> None:
        self.module, self.half = module.train(), half
        self.parameters = list(module.head.parameters())
        self.optimizer = build_optimizer("adamw", self.parameters, lr, 0.01, (0.9, 0.95))
        self.scheduler = get_cosine_schedule_with_warmup(self.optimizer, 100, 10_000)

    def __call__(self, batch: dict[str, Any], update: bool = True) -> Tensor:
        """Forward, loss, backward, clipping, optimiser; returns the loss. Without ``update`` up to backward."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            drafts = self.module.draft(batch, 1)
            if drafts is None:
                raise FsdError("a batch has no supervised token: raise --batch-tokens.")
            loss = self.module.loss(drafts).loss
        loss.backward()
        if update:
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.scheduler.step()
        return loss.detach()


def eagle_step(options: Options, module: EagleModule, half: bool, **choices: bool) -> EagleStep:
    """EAGLE's step with the module's weights and LM head."""
    embedding = module.target.model.get_input_embeddings().weight.detach()
    return EagleStep(options.eagle, module.head, embedding, module.lm_head().weight, options.lr, half, **choices)


def build(name: str, options: Options, batches: Sequence[dict[str, Any]], draft_ids: Tensor) -> Step:
    """A method by its name, ready to step on the batches."""
    module = our_module(options, draft_ids if name == "ours-draft-vocab" else None, options.half)
    if name.startswith("ours"):
        own = OurStep(module, options.lr, options.half)
        return lambda index: own(batches[index])
    if name not in METHODS:
        raise FsdError(f"unknown method {name!r}; known: {', '.join(METHODS)}.")
    theirs = eagle_step(
        options, module, options.half, recompute=name != "eagle-no-recompute", accuracies=name == "eagle-accuracies"
    )
    data = [eagle_batch(batch) for batch in batches]
    return lambda index: theirs(data[index])


# what is measured ----------------------------------------------------------------------------------------------------


def check_equality(options: Options, batch: dict[str, Any], draft_ids: Tensor, tolerance: float) -> dict[str, Any]:
    """Loss and gradients of both on one batch in fp32, over the whole and the draft vocabulary.

    ``gradient_difference`` is the largest difference of any gradient entry, relative to the largest entry of the
    same weight. Raises FsdError if a relative difference exceeds ``tolerance``.
    """
    found = {}
    for vocabulary, ids in (("whole", None), ("draft", draft_ids)):
        module = our_module(options, ids, half=False)
        ours = float(OurStep(module, options.lr, half=False)(batch, update=False))
        theirs, gradients = eagle_step(options, module, half=False).gradients(eagle_batch(batch))
        own = {name: parameter.grad for name, parameter in module.head.named_parameters()}
        differences = [
            float((own[name] - gradient).abs().max() / gradient.abs().max()) if own[name] is not None else float("inf")
            for name, gradient in gradients.items()
        ]
        facts = {"ours": ours, "eagle": theirs, "gradient_difference": max(differences)}
        if not (abs(ours - theirs) <= tolerance * abs(theirs) and max(differences) <= 10 * tolerance):
            raise FsdError(f"ours and EAGLE's do not compute the same ({vocabulary} vocabulary): {facts}.")
        found[vocabulary] = facts
    return found


def time_steps(
    steps: dict[str, Step], batches: int, repeats: int, warmup: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """(seconds of each measured step, loss of the first step) by method.

    Every method steps on the same batch before any goes on to the next; who begins changes each time.
    """
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            loss = steps[name](turn % batches)
            spent = time.perf_counter() - started
            losses.setdefault(name, float(loss))
            if turn >= warmup:
                seconds[name].append(spent)
    return seconds, losses


def peak_memory(name: str, options: Options, workload: str) -> dict[str, int] | None:
    """Memory of a method's steps in this process: {"before", "peak"}, resident bytes; None where it cannot be told.

    ``before`` is what batches, weights and target take, without what the allocator holds in reserve; ``peak`` is the
    highest mark during two steps on the largest batch (the second has the optimiser's state from the start).
    """
    torch.set_num_threads(options.threads)
    quiet_lightning()
    batches, draft_ids = torch.load(workload, weights_only=False)
    largest = max(range(len(batches)), key=lambda index: batches[index]["input_ids"].numel())
    step = build(name, options, batches[largest : largest + 1], draft_ids)
    trim()
    if not restart_peak():
        return None
    before = resident_bytes()
    step(0)
    step(0)
    return {"before": before, "peak": peak_bytes()}


def peak_memories(names: Sequence[str], options: Options, workload: str) -> dict[str, dict[str, int] | None]:
    """:func:`peak_memory` of each method, each in a new process, one after the other."""
    context = multiprocessing.get_context("spawn")
    found = {}
    for name in names:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found[name] = pool.submit(peak_memory, name, options, workload).result()
    return found


# the record ----------------------------------------------------------------------------------------------------------


def summarise(
    seconds: dict[str, list[float]],
    losses: dict[str, float],
    memory: dict[str, dict[str, int] | None],
    supervised_by_repeat: Sequence[int],
) -> dict[str, Any]:
    """``methods`` and ``ratios`` of the record.

    A ratio says how many times faster (or smaller) the first one is: seconds of the other / its own on the same
    batch, median over repeats with a 95 % bootstrap interval; memory: peak above the level before.
    """
    step_bytes = {name: None if found is None else found["peak"] - found["before"] for name, found in memory.items()}
    methods, ratios = {}, {}
    for name, values in seconds.items():
        methods[name] = {
            "what": METHODS[name],
            "seconds": values,
            "median_seconds": statistics.median(values),
            "supervised_tokens_per_second": statistics.median(
                count / value for count, value in zip(supervised_by_repeat, values, strict=True)
            ),
            "first_loss": losses[name],
            "step_bytes": step_bytes.get(name),
            "memory": memory.get(name),
        }
    for own in (name for name in seconds if name.startswith("ours")):
        for other in (name for name in seconds if name.startswith("eagle")):
            sizes = step_bytes.get(own), step_bytes.get(other)
            ratios[f"{own} / {other}"] = {
                "faster": interval([b / a for a, b in zip(seconds[own], seconds[other], strict=True)]),
                "smaller": sizes[1] / sizes[0] if sizes[0] and sizes[1] else None,
            }
    return {"methods": methods, "ratios": ratios}


def report(record: dict[str, Any]) -> str:
    """The record's tables."""
    rows = [
        [
            name,
            number(facts["median_seconds"], 3),
            number(facts["supervised_tokens_per_second"], 0),
            number(None if facts["step_bytes"] is None else facts["step_bytes"] / 2**20, 0),
            number(facts["first_loss"], 4),
        ]
        for name, facts in record["methods"].items()
    ]
    ratios = [
        [
            name,
            number(found["faster"]["median"]),
            f"{number(found['faster']['low'])}-{number(found['faster']['high'])}",
            number(found["smaller"]),
        ]
        for name, found in record["ratios"].items()
    ]
    parts = [table(["method", "s/step", "supervised tok/s", "MiB of a step", "first loss"], rows)]
    if ratios:
        parts.append(table(["ratio", "times faster", "95 %", "times smaller"], ratios))
    check = record["check"]["whole"]
    parts.append(f"fp32 loss on the first batch: ours {check['ours']:.6f}, EAGLE's {check['eagle']:.6f}")
    return "\n\n".join(parts)


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_training_step", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--eagle", required=True, metavar="DIR", help="checkout of SafeAILab/EAGLE")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the record")
    parser.add_argument("--target", default="smollm2-135m", help="built-in name or directory of a Llama-like model")
    parser.add_argument("--data", nargs="+", default=["data/smollm2-135m-answers-2.jsonl.gz"], help="answers")
    parser.add_argument(
        "--methods", default="ours,ours-draft-vocab,eagle,eagle-no-recompute", help="among: " + ", ".join(METHODS)
    )
    parser.add_argument("--precision", default="bf16-mixed", choices=["bf16-mixed", "32-true"])
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--batch-tokens", type=int, default=2304, help="padded tokens per batch")
    parser.add_argument("--batches", type=int, default=3, help="different batches")
    parser.add_argument("--repeats", type=int, default=9, help="measured steps per method")
    parser.add_argument(
        "--warmup", type=int, default=3, help="steps before them; as many as batches, so that no shape is new"
    )
    parser.add_argument("--max-length", type=int, default=768)
    parser.add_argument("--min-answer-share", type=float, default=0.15)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative, of the losses in fp32")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-memory", action="store_true", help="times only")
    return parser


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The whole comparison; returns the record. Raises FsdError."""
    names = args.methods.split(",")
    if unknown := sorted(set(names) - set(METHODS)):
        raise FsdError(f"unknown method {', '.join(unknown)}; known: {', '.join(METHODS)}.")
    torch.set_num_threads(args.threads)
    peer = checkout_facts(args.eagle)
    options = Options(args.target, args.eagle, args.precision, args.draft_vocab_size, args.lr, args.seed, args.threads)
    rows, _ = read_answers(args.data, max_length=args.max_length)
    rows = choose_rows(rows, args.min_answer_share)
    module = our_module(options, None, half=False)
    counts = rows.answer_counts(module.target.vocab_size)
    draft_ids = choose_draft_ids(counts, options.draft_vocab_size, module.always_drafted())
    del module
    target = Target.from_pretrained(options.target, dtype=torch.bfloat16 if options.half else torch.float32)
    batches = make_batches(rows, target, args.batches, args.batch_tokens, options.seed)
    del target
    _say("checking that both compute the same")
    check = check_equality(options, batches[0], draft_ids, args.tolerance)
    _say(f"{json.dumps(check)}; timing {args.warmup + args.repeats} steps of {len(names)} methods")
    steps = {name: build(name, options, batches, draft_ids) for name in names}
    seconds, losses = time_steps(steps, len(batches), args.repeats, args.warmup)
    del steps
    memory: dict[str, dict[str, int] | None] = dict.fromkeys(names)
    if not args.no_memory:
        _say("measuring memory, a process per method")
        with tempfile.TemporaryDirectory() as scratch:
            torch.save((batches, draft_ids), f"{scratch}/workload.pt")
            memory = peak_memories(names, options, f"{scratch}/workload.pt")
    facts = [describe(batch) for batch in batches]
    by_repeat = [facts[turn % len(facts)]["supervised"] for turn in range(args.warmup, args.warmup + args.repeats)]
    return {
        "environment": environment(command),
        "settings": settings_of(args),
        "peer": peer,
        "batches": facts,
        "check": check,
        **summarise(seconds, losses, memory, by_repeat),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return record_main("benchmarks.compare_training_step", build_parser(), run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
