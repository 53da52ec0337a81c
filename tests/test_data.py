"""Rows of answers as ids and masks, and their order; what `fsd-train regenerate` asks."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from fsd_core.errors import CheckpointError, DataError, FsdError
from fsd_core.text.encoding import encode_chat
from fsd_train.checkpoints import check_order
from fsd_train.commands.fit import run_errors
from fsd_train.data import AnswersDataModule, PackingSampler, read_answers
from fsd_train.data.answers import AnswersDataset, encode_row
from fsd_train.data.backends import Completion
from fsd_train.data.plan import answer_line, plan_jobs
from tests.test_prompts import BOT, USER
from tests.test_regenerate import prompts_file
from tests.text_toys import CHATML, THINKING, tiny_tokenizer, write_rows
from tests.train_toys import trainer


def answers(path: Path, count: int = 60) -> Path:
    rows = []
    for i in range(count):
        ids = {"prompt_ids": [1 + i % 7] * (2 + i % 5), "response_ids": [10 + i % 11] * (1 + (i * 7) % 30)}
        rows.append({"id": f"row{i}", "messages": [{"role": "user", "content": f"the cat {i}"}], **ids})
    return write_rows(path, rows)


def test_rows_of_text_get_the_ids_that_decoding_sees() -> None:
    tokenizer = tiny_tokenizer()
    prompt, answer = encode_chat(tokenizer, [USER]), tokenizer(BOT["content"])["input_ids"]
    # what `fsd-train regenerate` would store for this prompt and this answer
    ids = {"prompt_ids": prompt, "response_ids": [*answer, tokenizer.eos_token_id]}
    [(whole, mask)] = expected = encode_row({**ids, "messages": [USER], "response": "unused"}, None)
    assert whole == prompt + ids["response_ids"] and mask == [0] * len(prompt) + [1] * len(ids["response_ids"])
    text = {"messages": [USER], "response": BOT["content"]}
    for row in (
        text,
        {**text, "finish_reason": None},
        {"messages": [USER, BOT]},
        {**text, "finish_reason": "stop"},
        {**text, "finish_reason": "tool_calls"},
    ):
        assert encode_row(row, tokenizer) == expected
    assert encode_row({"prompt": USER["content"], "response": BOT["content"]}, tokenizer) == expected
    [(cut, _)] = encode_row({**text, "finish_reason": "length"}, tokenizer)
    assert cut == prompt + answer
    # a row's own arguments of the template
    tokenizer.chat_template = "{% if loud and tools %}{{ tools[0].name }}{% endif %}" + CHATML
    tools = [{"name": "what"}]
    prompt = encode_chat(tokenizer, [USER], options={"tools": tools, "loud": True})
    for given in (tools, json.dumps(tools)):
        [(whole, mask)] = encode_row({**text, "tools": given, "chat_template_kwargs": {"loud": True}}, tokenizer)
        assert whole == prompt + ids["response_ids"] and mask.count(0) == len(prompt)


def test_the_turns_of_a_conversation_are_trained_on_apart_where_the_template_needs_it(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(THINKING)
    turns = [[{**USER, "content": f"the cat {10 + i}"}, BOT, USER, BOT] for i in range(40)]
    rows: list[Any] = [{"id": f"row{i}", "messages": four} for i, four in enumerate(turns[:20])]
    # the other form of rows, whose side is decided by the first prompt's ids
    rows += [{"id": f"row{i + 20}", "prompt": four[:3], "response": "it is"} for i, four in enumerate(turns[20:])]
    path = write_rows(tmp_path / "a.jsonl", rows)
    train, held = read_answers([path], tokenizer, validation_fraction=0.3)
    for side in (train, held):  # both turns of a row on one side, one after the other
        assert side.row_ids[::2] == side.row_ids[1::2]
    assert not set(train.row_ids) & set(held.row_ids) and len(train) + len(held) == 80 and 8 < len(held) < 40
    first, second = (train[i]["input_ids"].tolist() for i in (0, 1))
    asked = turns[int(train.row_ids[0].removeprefix("row"))]
    before, later = (encode_chat(tokenizer, asked[:count]) for count in (1, 3))
    assert first[: len(before)] == before and second[: len(later)] == later
    cut, _ = read_answers([path], tokenizer, max_length=len(later))
    assert cut.row_ids == [f"row{i}" for i in range(40)]  # the later turns have no answer token left


def test_long_rows_are_cut_and_rows_without_answer_tokens_left_out(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1] * 3, "response_ids": [2] * 9}, {"prompt_ids": [1] * 6, "response_ids": [2]}]
    kept, _ = read_answers([write_rows(tmp_path / "a.jsonl", rows)], max_length=6)
    assert kept.lengths == [6] and kept.answer_tokens == 3
    with pytest.raises(DataError, match=r"no row to train on \(2 read, max_length 3\). Raise data.max_length"):
        read_answers([tmp_path / "a.jsonl"], max_length=3)
    with pytest.raises(DataError, match="batch_tokens is 0"):
        PackingSampler([1], 0)


def test_a_prompts_rows_fall_on_one_side_of_the_split(tmp_path: Path) -> None:
    """Equal first questions too, whatever follows them and whatever the fraction."""
    path, tokenizer = answers(tmp_path / "a.jsonl", 200), tiny_tokenizer()
    talks = [[{"role": "user", "content": f"the cat {i}"}, BOT] for i in range(20)]
    longer = [[*talk, {"role": "user", "content": "and then"}, BOT] for talk in talks]
    rows = [{"id": f"{i % 20}", "messages": messages} for i, messages in enumerate(talks + longer)]
    asked = write_rows(tmp_path / "talks.jsonl", rows)
    for fraction in (0.2, 0.4, 0.6, 0.8):
        for paths in ([path, path], [asked]):
            train, held = read_answers(paths, tokenizer, validation_fraction=fraction)
            share = len(held) / (len(train) + len(held))
            assert not set(train.row_ids) & set(held.row_ids) and abs(share - fraction) < 0.2
    twice = write_rows(tmp_path / "b.jsonl", [{"messages": [USER], "response": text} for text in ("it", "there", "is")])
    assert [len(side) for side in read_answers([twice], tokenizer, validation_fraction=0.0)] == [3, 0]
    few = read_answers([answers(tmp_path / "few.jsonl", 6)], validation_fraction=1e-6)
    assert [len(side) for side in few] == [5, 1]  # one prompt at least


def test_repeated_rows_are_counted_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Within files and between them, and rows of training that validation has, too."""
    some, more = answers(tmp_path / "some.jsonl", 6), answers(tmp_path / "more.jsonl", 8)
    data = AnswersDataModule([str(some), str(more)], [str(some)])
    data.setup()
    assert data.train_set is not None and len(data.train_set) == 14
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "6 of 14 sequences repeat an earlier one, token by token; each counts.",
        "6 of their sequences are trained on, too",
    ]  # fmt: skip


def lengths(count: int = 500) -> list[int]:
    """A few short ones, many of some two hundred tokens, a few beyond a thousand."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(1))
    return (200 * (0.7 * drawn).exp()).long().clamp(5, 1400).tolist()


# tokens of rows, those of a batch, ranks, and the least share of a batch that is no padding
PACKED: list[tuple[list[int], int, int, float]] = [
    (lengths(5000), 2048, 1, 0.97), (lengths(5000), 8192, 1, 0.97), (lengths(503), 2000, 3, 0.8), ([5], 10, 1, 0.5),
    ([7, 7], 10, 1, 0.7), ([9] * 12, 10, 1, 0.9), ([3, 12, 4], 10, 1, 0.9), ([10, 1, 1, 1], 10, 1, 0.6),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "tokens", "ranks", "full"), PACKED, ids=lambda value: str(value)[:20])
def test_every_epoch_has_all_rows_in_as_many_full_batches(
    sizes: list[int], tokens: int, ranks: int, full: float
) -> None:
    """Trainer counts the first one's: of a longer one it would leave the end out, in a shorter one lose its place."""
    samplers = [PackingSampler(sizes, tokens, rank=rank, replicas=ranks) for rank in range(ranks)]
    numbers, epochs = set(), []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        numbers |= {len(sampler) for sampler in samplers}
        epochs.append([batch for sampler in samplers for batch in sampler])
        used = [sum(sizes[row] for row in batch) for batch in epochs[-1]]
        assert {row for batch in epochs[-1] for row in batch} == set(range(len(sizes))) and all(epochs[-1])
        assert sum(map(len, epochs[-1])) - len(sizes) <= (ranks - 1) * 30, (
            "some are repeated, so that ranks have equal numbers"
        )
        assert all(count <= tokens or len(batch) == 1 for count, batch in zip(used, epochs[-1]))
        assert sum(used) >= full * tokens * len(used)
    assert len(numbers) == 1  # or a replica would wait for ever
    if len(sizes) > 500:
        first, second = ({frozenset(batch) for batch in batches} for batches in epochs[:2])
        assert len(first & second) < 0.1 * len(first)  # other rows together each time
        again, other = (list(PackingSampler(sizes, tokens, seed=seed)) for seed in (0, 1))
        assert again != other and (ranks > 1 or again == epochs[0])


def test_repeated_validation_batches_supervise_nothing(tmp_path: Path) -> None:
    rows = [{"id": f"row{i}", "prompt_ids": [1] * 5, "response_ids": [2] * 5} for i in range(8)]
    path = str(write_rows(tmp_path / "a.jsonl", rows))
    given, counted = [], []
    for rank in range(3):
        data = AnswersDataModule([path], validation_files=[path], batch_tokens=20)
        device = SimpleNamespace(root_device=torch.device("cpu"))
        data.trainer = SimpleNamespace(global_rank=rank, world_size=3, strategy=device)  # type: ignore[assignment]
        data.setup()
        batches = list(data.val_dataloader())
        given.append(len(batches))
        counted += [name for batch in batches if batch["loss_mask"].any() for name in batch["ids"]]
    assert given == [2, 2, 2] and sorted(counted) == sorted(row["id"] for row in rows)  # 4 batches for 3 replicas


class Recorder(LightningModule):
    """Notes the rows it is trained on; the loss is that of one weight."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[str]]] = []
        self.stop_after = stop_after

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.stop_after:
            raise KeyboardInterrupt
        self.seen.append((self.current_epoch, batch["ids"]))
        return self.weight + batch["input_ids"].float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("stop", ["within an epoch", "epoch end", "into the second epoch"])
def test_trainer_resumes_with_the_next_batch(tmp_path: Path, stop: str) -> None:
    files = [str(answers(tmp_path / "a.jsonl"))]
    workers = 2 if stop == "within an epoch" else 0  # which run ahead

    def fit(model: Recorder, name: str, ckpt: Path | None = None) -> None:
        data = AnswersDataModule(files, validation_fraction=0.0, batch_tokens=120, num_workers=workers)
        trainer(tmp_path / name, 30).fit(model, data, ckpt_path=ckpt, weights_only=True)

    whole = Recorder()
    fit(whole, "whole")
    per_epoch = sum(epoch == 0 for epoch, _ in whole.seen)
    assert 8 < per_epoch < 15 and whole.seen[0][1] != whole.seen[per_epoch][1]
    at = {"within an epoch": 7, "epoch end": per_epoch, "into the second epoch": per_epoch + 2}[stop]
    first, resumed = Recorder(stop_after=at), Recorder()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(first, "first")
    fit(resumed, "resumed", tmp_path / "first" / "ckpt" / f"step={at}.ckpt")
    assert first.seen + resumed.seen == whole.seen


def refuse(rows: Any, index: int) -> Any:
    raise DataError("a.jsonl:1: bad")


@pytest.mark.parametrize("fault", ["none", "bad row", "killed", "stopped"])
def test_data_workers_end_with_their_parent_alone(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C and schedulers signal all processes, and the run then ends its step, for which it needs batches."""
    file = answers(tmp_path / "a.jsonl")
    data = AnswersDataModule([str(file)], validation_fraction=0.0, batch_tokens=40, num_workers=1)
    data.setup()
    loader, others = data.train_dataloader(), {*multiprocessing.active_children()}
    batches = iter(loader)
    if fault == "bad row":
        monkeypatch.setattr(AnswersDataset, "__getitem__", refuse)
        with pytest.raises(DataError, match="^a.jsonl:1: bad$"):
            next(batches)
        return
    next(batches)
    [worker] = {*multiprocessing.active_children()} - others
    if fault == "killed":
        with pytest.raises(FsdError, match="data worker has ended, as when memory runs out .*data.num_workers"):
            with run_errors():
                worker.kill()  # torch raises wherever its signal comes
                list(batches)
        return
    if fault == "stopped":
        said = list[str]()

        def wake(text: str, seconds: float) -> None:
            said.append(text % seconds)
            os.kill(worker.pid, signal.SIGCONT)

        monkeypatch.setattr("fsd_train.data.sampler.log.warning", wake)
        monkeypatch.setattr("fsd_train.data.sampler.PATIENCE", 0.5)
        os.kill(worker.pid, signal.SIGSTOP)
        assert len(list(batches)) == len(loader) - 1 and "given no batch for 0.5 seconds" in said[0]
        return
    for number in ("INT", "TERM", "HUP"):
        subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)
    assert len(list(batches)) == len(loader) - 1 > 4
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == 0


def test_another_number_of_batches_per_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    run: Any = SimpleNamespace(strategy=object(), is_global_zero=True, ckpt_path="last.ckpt")
    saved = {"rows": "a", "replicas": 2, "accumulated": 2}
    check_order(run, {**saved, "replicas": 1, "accumulated": 4}, saved)
    check_order(run, saved, {"rows": "a", "replicas": 2})  # of an earlier version, which did not say
    assert not caplog.text
    check_order(run, {**saved, "replicas": 1}, saved)
    assert "last.ckpt had 4 batches per optimizer step, and resumes with 2" in caplog.text
    with pytest.raises(CheckpointError, match=r"another order of batches, by rows \(a, now b\)"):
        check_order(run, {**saved, "rows": "b"}, saved)


def test_plan_limits_lengths_and_order(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    first, second = prompts_file(tmp_path / "a.jsonl", 30), prompts_file(tmp_path / "b.jsonl", 20)
    options: dict[str, Any] = {"max_prompt_tokens": 18, "batch_size": 4, "seed": 3}
    full = plan_jobs([first, second], tokenizer, **options)
    lengths = [len(job.prompt_ids) for batch in full.batches for job in batch]
    assert full.read == 50 and full.too_long == 50 - len(lengths) > 0 and max(lengths) <= 18
    assert all(len(batch) <= 4 for batch in full.batches)
    limited = plan_jobs([first, second], tokenizer, limit=10, **options)
    assert sum(map(len, limited.batches)) == 10
    assert limited.ids < full.ids
    assert plan_jobs([first, first], tokenizer, **options).ids == plan_jobs([first], tokenizer, **options).ids
    assert plan_jobs([first, second], tokenizer, **{**options, "seed": 4}).batches != full.batches


def test_rows_keep_their_ids_sampling_and_template(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "the cat", "temperature": 0.7, "top_p": 0.5, "top_k": 3, "answer": [1, 2]},
        {"id": "a", "prompt": "the mat"},
        {"prompt": "it is", "tools": [{"name": "look"}], "chat_template_kwargs": {"loud": True}},
    ]
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    template = CHATML + "{% if loud %} what{% endif %}{% if tools %} {{ tools[0].name }}{% endif %}"
    tokenizer = tiny_tokenizer(template)
    plan = plan_jobs([prompts], tokenizer, temperatures=[(0.0, 1.0)], template={"loud": False})
    by_text = {job.messages[0]["content"]: job for job in plan.jobs}
    first, second, third = (by_text[row["prompt"]] for row in rows)
    assert first.sampling == (0.7, 3, 0.5) and second.sampling == (0.0, 0, 1.0)
    assert len({first.id, second.id}) == 2 and "a" in {first.id, second.id}
    kept = json.loads(answer_line(Completion(first, "", [3], "stop")))
    assert all(kept[name] == rows[0][name] for name in ("temperature", "top_p", "top_k", "answer"))
    said = tokenizer.decode(third.prompt_ids)
    assert "what" in said and "look" in said and "what" not in tokenizer.decode(first.prompt_ids)


NONSENSE = [
    ({"temperature": -1}, "`temperature` must be a number, 0 or more"),
    ({"top_p": 0}, "`top_p` must be"),
    ({"top_k": 2.5}, "`top_k` must be"),
    ({"tools": {}}, "`tools` must be a list"),
    ({"chat_template_kwargs": [1]}, "`chat_template_kwargs` must be an object"),
    ({"chat_template_kwargs": {"conversation": 1, "chat_template": "{{"}}, "the chat template refuses"),
]


@pytest.mark.parametrize("more, problem", NONSENSE)
def test_rows_of_no_sense_are_named(more: dict[str, Any], problem: str, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "the cat", **more}])
    with pytest.raises(FsdError, match=f"p.jsonl:1: .*{re.escape(problem)}"):
        plan_jobs([prompts], tiny_tokenizer())
