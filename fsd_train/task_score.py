"""Greedy task scores of a model: right answers to prompts that come with a reference, in training and afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from transformers import GenerationConfig

from fsd_bench.score import Reference, read_references
from fsd_infer.chat.encoding import encode_chat, read_prompts
from fsd_infer.errors import DataError
from fsd_infer.targets.token_ids import eos_ids, left_pad, pad_id


@dataclass(frozen=True)
class Task:
    """A prompt as token ids, its reference, and the row's ``source``."""

    ids: list[int]
    reference: Reference
    source: str


def read_tasks(path: str | Path, tokenizer: Any, limit: int | None = None, seed: int = 0) -> list[Task]:
    """The rows of a prompt file that have a reference, a random sample of ``limit``. Raises DataError if none has."""
    rows = list(read_prompts(path))
    found = [(row, reference) for row, reference in zip(rows, read_references(rows)) if reference is not None]
    if not found:
        raise DataError(f"{path}: no row has an `answer` that can be scored: a number, `#### N`, or an option.")
    if limit is not None and limit < len(found):
        found = random.Random(seed).sample(found, limit)
    return [Task(encode_chat(tokenizer, row.messages), reference, row.source) for row, reference in found]


@torch.no_grad()
def greedy_answers(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int
) -> Iterator[tuple[int, list[int]]]:
    """(number of the prompt, ids of its greedy answer), by transformers' ``generate``, like lengths together.

    Nothing but the argmax decides: settings of the model's generation config that shape distributions are left out.
    """
    pad, ends = pad_id(model.generation_config), sorted(eos_ids(model.generation_config))
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad, eos_token_id=ends or None, use_cache=True
    )
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        ids, mask = left_pad([prompts[number] for number in numbers], pad, model.device)
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, ids.shape[1] :].tolist()
        for number, row in zip(numbers, out):
            end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            yield number, row[:end]


class TaskScore(Callback):
    """Lets the model answer tasks greedily, and logs ``val_score``, the share of right answers.

    Args:
        tasks: prompt file whose rows have an ``answer``.
        every_n_train_steps: how often; also at the end.
        count: how many tasks, a random sample.
        max_new_tokens: of each answer.
        batch_size: answers at a time.
    """

    def __init__(
        self,
        tasks: str,
        every_n_train_steps: int | None = None,
        count: int = 200,
        max_new_tokens: int = 160,
        batch_size: int = 64,
    ) -> None:
        self.path, self.count = tasks, count
        self.every_n_train_steps = every_n_train_steps
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self._tasks: list[Task] | None = None
        self._last = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tasks = read_tasks(self.path, pl_module.head.tokenizer, self.count)  # type: ignore[union-attr]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.every_n_train_steps and trainer.global_step % self.every_n_train_steps == 0:
            self.run(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run(trainer, pl_module)

    def run(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Answer, count and log, once per step."""
        if trainer.global_step == self._last or self._tasks is None:
            return
        self._last = trainer.global_step
        head: Any = pl_module.head
        was_training = head.model.training
        head.model.eval()
        with trainer.precision_plugin.forward_context():
            answers = dict(
                greedy_answers(head.model, [task.ids for task in self._tasks], self.max_new_tokens, self.batch_size)
            )
        head.model.train(was_training)
        right = [
            task.reference.score(head.tokenizer.decode(answers[number], skip_special_tokens=True))
            for number, task in enumerate(self._tasks)
        ]
        score = sum(right) / len(right)
        trainer.callback_metrics["val_score"] = torch.tensor(score)
        for logger in trainer.loggers:
            logger.log_metrics({"val_score": score}, step=self._last)
        trainer.print(f"step {self._last}: {score:.1%} of {len(right)} tasks right")
