"""`fsd-train estimate`: memory, disk and time of a recipe.

Memory and disk follow from the target's config and the rows. Time follows from a measurement: the target reads
a row, and a few steps are trained. :func:`on_paper` measures nothing; its times are the least
that the data sheets of GPUs allow, and likely ones by :data:`EFFICIENCY`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer

from fsd_bench.estimate import head_on_paper, planned_head, weights_read, weights_used
from fsd_bench.planned import count_weights, planned_target
from fsd_bench.roofline import Hardware, Work, device_rows, seconds, size
from fsd_core.errors import DataError
from fsd_core.tables import table
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.target import Target
from fsd_train.commands.fit import Recipe, quiet, read_recipe, run_errors
from fsd_train.commands.sizing import BatchSize, facts_of, step_memory
from fsd_train.data.features import check_disk, token_bytes
from fsd_train.data.module import AnswersDataModule
from fsd_train.models.eagle import EagleModule
from fsd_train.models.lm import LMModule

_STEPS = 3  # timed batches, after one warm-up
# Least time by the data sheet over measured time. On an H200, bf16-mixed, without cuDNN's attention, a step of 8,192
# tokens at Llama-3.1-8B's shape took 433 ms (0.52), one of 16,384 tokens at TinyLlama-1.1B's 250 ms (0.32).
EFFICIENCY = 0.4
Line = tuple[str, str, str]  # name, amount, source


def head_recipe(path: str | Path) -> Recipe:
    """Read the recipe of a head. Raises DataError for a small LM's, and as :func:`read_recipe`."""
    recipe = read_recipe(path)
    if issubclass(recipe.kind, LMModule):
        raise DataError(f"{path} trains a small LM. Give the recipe of a head.")
    return recipe


def _head(recipe: Recipe, target: Target) -> EagleHead:
    """Plan the recipe's head, without values."""
    options = {name: value for name, value in recipe.model["head"].items() if value is not None}
    return planned_head(target, draft_vocab_size=recipe.model["draft_vocab_size"], **options)


class _Clock(Callback):
    """Callback that times batches, including the wait for them."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any, **options: Any) -> None:
        self.ends.append(time.perf_counter())


def estimate(recipe: Recipe) -> list[Line]:
    """Estimate the needs of a recipe whose answers exist.

    Raises DataError if they are missing, or if the disk has no room for the features.
    """
    facts = facts_of(recipe.model["target"])
    features = recipe.data["features"]
    cache = Path(features) if features and not (Path(features) / "index.json").is_file() else None  # still to be made
    data = AnswersDataModule(**{**recipe.data, "features": None if cache else features})
    data.setup()
    assert data.train_set is not None
    tokens = sum(data.train_set.lengths)
    lines = [("rows", f"{len(data.train_set)}, {tokens} tokens", "of the recipe's files")]
    module, step = _train(recipe, data)
    if cache is not None:
        bytes_per_token = token_bytes(module.target)
        parent = next(parent for parent in cache.absolute().parents if parent.is_dir())
        check_disk(parent, tokens * bytes_per_token)
        lines.append(("disk for features", size(tokens * bytes_per_token), f"{bytes_per_token} B a token"))
    length = min(data.max_length, max(data.train_set.lengths))
    answered = round(data.batch_tokens * data.train_set.answer_tokens / tokens)
    batch = BatchSize(data.batch_tokens, length, module.unroll_steps, answered)
    parts = step_memory(facts, module.head, batch, module.device.type, cached=features is not None)
    lines += [(f"memory: {part.name}", size(part.bytes), part.how) for part in parts]
    lines.append(("memory per device", size(sum(part.bytes for part in parts)), "together"))
    target: Target = module.target
    if any(parameter.is_meta for parameter in target.model.parameters()):
        target = module.whole_target(target.dtype)
    if cache is not None:
        per_token = _forward_seconds(target, data)
        lines.append(("time to cache features", _time(per_token * tokens), f"{1 / per_token:.0f} tokens/s"))
        step = max(step - per_token * data.batch_tokens, 0.2 * step)  # the step was measured with the target in it
    epochs = recipe.steps * recipe.accumulated * data.batch_tokens / max(tokens, 1)
    limit = Timer(recipe.trainer.get("max_time")).time_remaining()
    total = min(recipe.steps * recipe.accumulated * step, float("inf") if limit is None else limit)
    how = f"{recipe.steps} steps of {recipe.accumulated * step:.1f} s, about {epochs:.1f} epochs, on this machine's "
    return [*lines, ("time to train", _time(total), f"{how}one device")]


def _train(recipe: Recipe, data: AnswersDataModule) -> tuple[Any, float]:
    """Train a few batches; return the module and the mean seconds of a batch, except the first."""
    module: Any = recipe.build()
    clock = _Clock()
    options = {name: recipe.trainer[name] for name in ("accelerator", "precision") if name in recipe.trainer}
    with tempfile.TemporaryDirectory() as scratch, quiet(), run_errors():
        Trainer(
            **options, devices=1, max_steps=1 + _STEPS, limit_val_batches=0, logger=False, callbacks=[clock],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, default_root_dir=scratch,
        ).fit(module, data)  # fmt: skip
    if len(clock.ends) < 2:
        raise DataError("the recipe's rows make fewer than two batches. Add rows, or lower data.batch_tokens.")
    return module, (clock.ends[-1] - clock.ends[0]) / (len(clock.ends) - 1)


def _forward_seconds(target: Target, data: AnswersDataModule) -> float:
    """Measure the seconds of the target's forward, per token."""
    rows = data.train_set
    assert rows is not None
    longest = max(range(len(rows)), key=rows.lengths.__getitem__)
    ids = rows[longest]["input_ids"]
    ids = ids[None].to(target.device)
    target.features(ids)
    start = time.perf_counter()
    target.features(ids)
    return (time.perf_counter() - start) / ids.shape[1]


def step_work(recipe: Recipe, target: Target | None = None, head: EagleHead | None = None) -> list[Work]:
    """Return the work of one optimiser step on paper.

    The target runs over a batch: 2 operations per used weight and token, its LM head with the draft vocabulary's rows.
    The head runs forwards and backwards once per unrolled step: 6 operations per weight and token, 4 per weight of
    LM head rows that it shares with the target. The optimiser reads and writes weights, gradients and moments in fp32
    (28 B per weight).

    Args:
        recipe: the recipe.
        target: a planned target to use instead of the recipe's.
        head: head of that target, instead of the recipe's.
    """
    target = target or planned_target(recipe.model["target"])
    head = head or _head(recipe, target)
    drafter, weights = head_on_paper(target, head), count_weights(head)
    tokens, steps = recipe.data["batch_tokens"], recipe.model["unroll_steps"]
    batches = recipe.accumulated
    # the target's own LM head is not run, except for the draft vocabulary's rows
    skipped = (target.vocab_size - drafter.vocabulary) * target.hidden_size
    read, used = weights_read(target) - skipped, weights_used(target) - skipped
    run, how = 6.0 * weights + 4.0 * drafter.lm_rows, f"(6 x {weights:,} + 4 x {drafter.lm_rows:,}) x {tokens}"
    work = [
        Work("head", run, run * tokens, how, batches * steps, shared=True),
        Work("optimiser", 28.0 * weights, 0.0, f"28 B x {weights:,}"),
    ]
    if recipe.data.get("features") is None:
        target_work = Work("target", 2.0 * read, 2.0 * used * tokens, f"2 x {used:,} x {tokens}", batches, shared=True)
        work.insert(0, target_work)
    return work


def on_paper(recipe: Recipe, name: str | None = None) -> str:
    """Estimate the needs of a recipe from its target's config alone, without weights and answers.

    Args:
        recipe: the recipe.
        name: another target, such as a shape of ``planned_target``.

    Raises:
        DataError: the recipe is of another module than :class:`.EagleModule`.
        ModelLoadError: the target's config cannot be found or used.
        CheckpointError: an option of the head.
    """
    if not issubclass(recipe.kind, EagleModule):
        raise DataError(f"{recipe.path} trains no EAGLE head, and only those are estimated on paper. Omit --on-paper.")
    name = name or recipe.model["target"]
    facts = facts_of(name)
    head = _head(recipe, facts.target)
    batch = BatchSize(recipe.data["batch_tokens"], recipe.data["max_length"], recipe.model["unroll_steps"])
    parts = step_memory(facts, head, batch, "cuda", cached=recipe.data.get("features") is not None)
    work = step_work(recipe, facts.target, head)
    lines = [(f"memory: {part.name}", size(part.bytes), part.how) for part in parts]
    for case in work:
        amount = case.times * case.operations
        lines.append((f"step: {case.name}", f"{amount / 1e12:.1f} TFLOP" if amount else size(case.bytes),
                      f"{case.times} x {case.how}"))  # fmt: skip
    columns = ["device", "count", "seconds a step, at least", "likely", f"{recipe.steps} steps, at least", "likely"]

    def cells(hardware: Hardware, count: int) -> list[str]:
        least = seconds(work, hardware, count)
        likely = least / EFFICIENCY
        return [f"{least:.2f}", f"{likely:.2f}", _time(recipe.steps * least), _time(recipe.steps * likely)]

    devices = table(columns, device_rows(parts, cells, columns))
    return "\n\n".join([table(["what", "needs", "formula"], [list(line) for line in lines]), devices])


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def main(args: argparse.Namespace) -> int:
    """Run `fsd-train estimate`."""
    recipe = head_recipe(args.config)
    if args.on_paper or args.target:
        print(on_paper(recipe, args.target))
        return 0
    recipe.data["strict"] = args.strict or recipe.data["strict"]
    lines = estimate(recipe)
    print(table(["what", "needs", "found by"], [list(line) for line in lines]))
    return 0
