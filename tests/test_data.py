"""Rows of answers as token ids and masks, and the order in which they are trained on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from fsd_infer.chat.encoding import encode_chat
from fsd_infer.errors import DataError
from fsd_train.cli import COMMANDS
from fsd_train.cli import main as cli
from fsd_train.data import AnswersDataModule, collate, encode_row, read_answers
from fsd_train.sampler import ResumableLoader, TokenBudgetSampler
from tests.text_toys import OTHERWISE, THINKING, save_tiny_chat_target, tiny_tokenizer, write_rows

USER = {"role": "user", "content": "what is the answer"}
BOT = {"role": "assistant", "content": "it is there"}


def answers(path: Path, count: int = 60) -> Path:
    rows = [
        {
            "id": f"row{i}",
            "messages": [{"role": "user", "content": f"the cat {i}"}],
            "prompt_ids": [1 + i % 7] * (2 + i % 5),
            "response_ids": [10 + i % 11] * (1 + (i * 7) % 30),
        }
        for i in range(count)
    ]
    return write_rows(path, rows)


def test_rows_with_ids_are_taken_as_they_are() -> None:
    row = {"prompt_ids": [4, 5, 6], "response_ids": [7, 2], "messages": [USER], "response": "unused"}
    assert encode_row(row, None) == [([4, 5, 6, 7, 2], [0, 0, 0, 1, 1])]


def test_rows_of_text_get_the_ids_that_decoding_sees() -> None:
    tokenizer = tiny_tokenizer()
    prompt = encode_chat(tokenizer, [USER])
    answer = tokenizer(BOT["content"])["input_ids"]
    # what `fsd-train regenerate` would store for this prompt and this answer
    regenerated = encode_row({"prompt_ids": prompt, "response_ids": [*answer, tokenizer.eos_token_id]}, None)
    assert encode_row({"messages": [USER], "response": BOT["content"]}, tokenizer) == regenerated
    assert encode_row({"messages": [USER, BOT]}, tokenizer) == regenerated
    assert encode_row({"prompt": USER["content"], "response": BOT["content"]}, tokenizer) == regenerated
    [(cut, _)] = encode_row({"messages": [USER], "response": BOT["content"], "finish_reason": "length"}, tokenizer)
    assert cut == prompt + answer


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"prompt_ids": [1], "response_ids": []}', "`response_ids` must be a list"),
        ('{"prompt_ids": [1], "response_ids": [1.5]}', "`response_ids` must be a list"),
        ('{"prompt_ids": [true], "response_ids": [1]}', "`prompt_ids` must be a list"),
        ('{"prompt_ids": [1]}', "`response_ids` must be a list"),
        ('{"prompt_ids": [1], "response_ids": [300]}', "token id 300 is outside the target's vocabulary of 300"),
        ('{"prompt_ids": [1], "response_ids": [3], "messages": [{"role": "user"}]}', "of type text"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no answer"),
        ('{"messages": [{"role": "user", "content": "x"}], "response": 3}', "`response` must hold text"),
        ('{"response": "x"}', "no prompt"),
        ('{"prompt_ids": [1], ', "not JSON"),
    ],
)
def test_malformed_rows_name_file_and_line(tmp_path: Path, row: str, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt_ids": [1], "response_ids": [2]}\n' + row + "\n")
    with pytest.raises(DataError, match=problem) as caught:
        read_answers([path], tiny_tokenizer(), vocab_size=300)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_ids_beyond_a_vocabulary_are_told_without_reading_again(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1, 9], "response_ids": [2]}, {"prompt_ids": [1], "response_ids": [3, 2]}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    found, _ = read_answers([path])
    path.unlink()
    assert found.answer_counts(10).tolist() == [0, 0, 2, 1, 0, 0, 0, 0, 0, 0]
    for rows_found in (found, found.subset([1])):
        with pytest.raises(DataError, match=f"{path}:1: token id 9 is outside .* vocabulary of 9"):
            rows_found.answer_counts(9)


def test_a_template_that_breaks_even_one_answer_is_refused_by_file_and_line(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1], "response_ids": [2]}, {"messages": [USER, BOT]}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match="not a prefix") as caught:
        read_answers([path], tiny_tokenizer(OTHERWISE))
    assert str(caught.value).startswith(f"{path}:2: ")


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


def test_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer"):
        read_answers([write_rows(tmp_path / "a.jsonl", [{"messages": [USER, BOT]}])])


def test_long_rows_are_cut_and_rows_without_answer_tokens_left_out(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1] * 3, "response_ids": [2] * 9}, {"prompt_ids": [1] * 6, "response_ids": [2]}]
    kept, _ = read_answers([write_rows(tmp_path / "a.jsonl", rows)], max_length=6)
    assert kept.lengths == [6] and kept.answer_tokens == 3
    with pytest.raises(DataError, match="no row to train on"):
        read_answers([tmp_path / "a.jsonl"], max_length=3)


def test_split_by_prompt(tmp_path: Path) -> None:
    path = answers(tmp_path / "a.jsonl", 200)
    train, held = read_answers([path], validation_fraction=0.25)
    assert len(train) + len(held) == 200 and 20 < len(held) < 80
    twice = write_rows(tmp_path / "b.jsonl", [{"messages": [USER], "response": text} for text in ("it", "there", "is")])
    sides = read_answers([twice], tiny_tokenizer(), validation_fraction=0.0)
    assert [len(side) for side in sides] == [3, 0]
    few, held = read_answers([answers(tmp_path / "few.jsonl", 6)], validation_fraction=1e-6)
    assert [len(few), len(held)] == [5, 1]  # one prompt at least
    # equal prompts fall on one side whatever the fraction
    for fraction in (0.2, 0.4, 0.6, 0.8):
        with_twin, other = read_answers([path, path], validation_fraction=fraction)
        assert not set(with_twin.row_ids) & set(other.row_ids)


def test_items_and_batches(tmp_path: Path) -> None:
    dataset, _ = read_answers([answers(tmp_path / "a.jsonl", 12)])
    items = [dataset[i] for i in (3, 0, 7)]
    batch = collate(items)
    assert batch["ids"] == ["row3", "row0", "row7"] and batch["index"].tolist() == [3, 0, 7]
    for row, item in enumerate(items):
        length = len(item["input_ids"])
        assert batch["input_ids"][row, :length].equal(item["input_ids"])
        assert batch["attention_mask"][row].sum() == length and batch["attention_mask"][row, :length].all()
        assert batch["loss_mask"][row, :length].equal(item["loss_mask"]) and not batch["loss_mask"][row, length:].any()


def lengths(count: int = 500) -> list[int]:
    return torch.randint(5, 200, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def test_batches_cover_every_row_once_within_the_budget() -> None:
    sampler = TokenBudgetSampler(lengths(), 1000, window=250)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(500)) and len(batches) == len(sampler)
    sizes = sampler.lengths
    padded = [len(batch) * max(sizes[i] for i in batch) for batch in batches]
    assert max(padded) <= 1000
    assert sum(sizes) / sum(padded) > 0.9  # little padding
    assert list(TokenBudgetSampler([300, 10], 100)) in ([[0], [1]], [[1], [0]])  # too long for the budget: alone


@pytest.mark.parametrize(("count", "replicas"), [(500, 1), (503, 1), (503, 2)])
def test_every_epoch_has_as_many_batches_as_the_first(count: int, replicas: int) -> None:
    """Trainer counts the first one's: of a longer one it would leave the end out, in a shorter one lose its place."""
    samplers = [TokenBudgetSampler(lengths(count), 1000, window=60, rank=i, replicas=replicas) for i in range(replicas)]
    sizes, numbers, partners = samplers[0].lengths, set(), []
    for epoch in range(5):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        numbers |= {len(sampler) for sampler in samplers}
        batches = [tuple(batch) for sampler in samplers for batch in sampler]
        partners.append(set(batches))
        assert sorted(index for batch in set(batches) for index in batch) == list(range(count))
        assert max(len(batch) * max(sizes[i] for i in batch) for batch in batches) <= 1000
        assert max(sampler.padding for sampler in samplers) < 0.1
    assert len(numbers) == 1
    assert len(partners[0] & partners[1]) < 0.1 * len(partners[0])  # other rows together each time


def test_order_is_seeded_and_differs_by_epoch() -> None:
    first, again, other = (TokenBudgetSampler(lengths(), 1000, seed=seed) for seed in (0, 0, 1))
    assert list(first) == list(again) != list(other)
    zero = list(first)
    first.set_epoch(1)
    assert list(first) != zero
    first.set_epoch(0)
    assert list(first) == zero
    fixed = TokenBudgetSampler(lengths(), 1000, shuffle=False)
    still = list(fixed)
    fixed.set_epoch(3)
    assert list(fixed) == still == list(TokenBudgetSampler(lengths(), 1000, seed=7, shuffle=False))
    widths = [max(lengths()[row] for row in batch) for batch in still]
    early = widths[: len(widths) // 3]  # as a limit on validation would have it
    assert min(early) < sum(widths) / len(widths) < max(early)
    with pytest.raises(DataError, match="max_tokens is 0"):
        TokenBudgetSampler([1], 0)


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_share_the_batches(replicas: int) -> None:
    parts = [list(TokenBudgetSampler(lengths(), 1000, rank=rank, replicas=replicas)) for rank in range(replicas)]
    whole = list(TokenBudgetSampler(lengths(), 1000))
    assert len({len(part) for part in parts}) == 1  # equal numbers, or a replica would wait for ever
    given = [tuple(batch) for part in parts for batch in part]
    assert set(given) == {tuple(batch) for batch in whole} and len(given) - len(whole) < replicas


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


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_resumes_with_the_next_batch(tmp_path: Path, workers: int) -> None:
    dataset, _ = read_answers([answers(tmp_path / "a.jsonl")])

    def loader() -> ResumableLoader:
        return ResumableLoader(
            dataset, TokenBudgetSampler(dataset.lengths, 120), collate_fn=collate, num_workers=workers
        )

    whole = loader()
    whole.order.set_epoch(2)
    expected = [batch["ids"] for batch in whole]
    stopped, resumed = loader(), loader()
    stopped.order.set_epoch(2)
    for number, batch in enumerate(stopped):
        assert batch["ids"] == expected[number]
        if number == 4:
            break
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.state_dict() == {"epoch": 2, "batch": 5}
    resumed.order.set_epoch(2)  # as Trainer does
    assert [batch["ids"] for batch in resumed] == expected[5:]
    assert resumed.state_dict()["batch"] == len(expected)
    next_one = loader()
    next_one.load_state_dict(resumed.state_dict())  # stopped at the very end: the next epoch begins
    assert next_one.state_dict() == {"epoch": 3, "batch": 0}


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


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 30, "max_epochs": -1}])
@pytest.mark.parametrize("stop", [7, "epoch end", "into the second epoch"])
def test_trainer_resumes_with_the_next_batch(tmp_path: Path, limit: dict[str, int], stop: int | str) -> None:
    answers(tmp_path / "a.jsonl")

    def fit(model: Recorder, ckpt: str | None = None, **callbacks: Any) -> None:
        seed_everything(0)
        data = AnswersDataModule([str(tmp_path / "a.jsonl")], validation_fraction=0.0, batch_tokens=120)
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, use_distributed_sampler=False, **limit, **callbacks,
        )  # fmt: skip
        trainer.fit(model, data, ckpt_path=ckpt, weights_only=False)

    whole = Recorder()
    fit(whole, enable_checkpointing=False)
    per_epoch = sum(epoch == 0 for epoch, _ in whole.seen)
    assert 8 < per_epoch < 15 and whole.seen[0][1] != whole.seen[per_epoch][1]
    at = {"epoch end": per_epoch, "into the second epoch": per_epoch + 2}.get(str(stop), 7)
    first = Recorder(stop_after=at)
    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(first, callbacks=[saver])
    resumed = Recorder()
    fit(resumed, ckpt=str(tmp_path / "saved" / f"step={at}.ckpt"))
    assert first.seen + resumed.seen == whole.seen


def test_data_module_splits_and_reads_text(tmp_path: Path) -> None:
    target = save_tiny_chat_target(tmp_path / "target")
    rows = [{"messages": [{"role": "user", "content": f"the cat {i}"}], "response": "it is"} for i in range(40)]
    path = str(write_rows(tmp_path / "a.jsonl", rows))
    data = AnswersDataModule([path], validation_fraction=0.2, tokenizer=str(target), batch_tokens=100)
    data.setup()
    seen = [name for batch in data.train_dataloader() for name in batch["ids"]]
    held = [name for batch in data.val_dataloader() for name in batch["ids"]]
    assert len(set(seen)) == len(seen) and len(seen) + len(held) == 40 and held and not set(seen) & set(held)
    apart = AnswersDataModule([path], validation_files=[path], tokenizer=str(target))
    apart.setup()
    assert apart.train_set is not None and apart.validation_set is not None
    assert len(apart.train_set) == len(apart.validation_set) == 40
    alone = AnswersDataModule([path], validation_fraction=0.0, tokenizer=str(target))
    alone.setup()
    assert alone.val_dataloader() == []


@pytest.mark.parametrize(("option", "value"), [("validation_fraction", 1.0), ("max_length", 1)])
def test_bad_options_are_refused(option: str, value: float) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(DataError, match=option):
        AnswersDataModule(["a.jsonl"], **options)


def test_command_line_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in COMMANDS)
    assert {"fit", "validate", "regenerate", "cache-features", "export"} <= set(COMMANDS)
    assert cli([]) == 2
    assert cli(["tarin"]) == 2
    assert "unknown command 'tarin'" in capsys.readouterr().err


def test_command_line_tells_bad_data_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_tiny_chat_target(tmp_path / "target")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("[]\n")
    arguments = ["--target", str(target), "--prompts", str(bad), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert cli(["regenerate", *arguments]) == 2
    assert f"{bad}:1: expected a JSON object" in capsys.readouterr().err.splitlines()[-1]
