"""Fine-tuning of a target: loss on answers only, adapters that load as targets, resumption, task scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fsd_infer.errors import CheckpointError, DataError
from fsd_infer.targets.loading import load_target
from fsd_infer.targets.target import Target
from fsd_train.cli import main as cli
from fsd_train.data import AnswersDataModule, collate
from fsd_train.finetune_module import FinetuneModule
from fsd_train.task_score import greedy_answers, read_tasks
from tests.text_toys import save_tiny_chat_target, write_rows

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
LORA = {"r": 8, "lora_alpha": 16}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with target/, and tasks.jsonl, one question with one answer, asked 24 times."""
    root = tmp_path_factory.mktemp("toys")
    save_tiny_chat_target(root / "target")
    rows = [{"prompt": f"a {n % 3}", "response": f"{n % 3}", "answer": f"{n % 3}"} for n in range(24)]
    write_rows(root / "tasks.jsonl", rows)
    return root


def command(toys: Path, out: Path, lora: dict[str, Any] | None, tasks: str = "") -> list[str]:
    """Forty steps by a small version of recipes/smollm2-135m-maths.yaml."""
    tasks = tasks or str(toys / "tasks.jsonl")
    config = yaml.safe_load((Path(__file__).parent.parent / "recipes" / "smollm2-135m-maths.yaml").read_text())
    trainer = config["trainer"]
    trainer.update(accelerator="cpu", max_steps=40, max_epochs=-1, default_root_dir=str(out), precision="32-true")
    trainer.update(enable_progress_bar=False, val_check_interval=20, log_every_n_steps=1)
    trainer["logger"]["init_args"]["save_dir"] = str(out)
    changes: dict[str, dict[str, Any]] = {
        "ModelCheckpoint": {"dirpath": str(out / "checkpoints"), "every_n_train_steps": 20, "save_top_k": -1},
        "ExportHead": {"directory": str(out / "model"), "every_n_train_steps": None},
        "TaskScore": {"tasks": tasks, "count": 6, "max_new_tokens": 4, "every_n_train_steps": 20},
        "LossCurve": {"path": str(out / "curves.png")},
    }
    for callback in trainer["callbacks"]:
        name = callback["class_path"].split(".")[-1]
        if name in changes:
            callback["init_args"].update(changes[name])
    config["model"].update(target=str(toys / "target"), lora=lora, lr=0.02, warmup_steps=2, time_limit=None)
    files = {"train_files": [str(toys / "tasks.jsonl")], "tokenizer": str(toys / "target")}
    config["data"].update(files, validation_fraction=0.3, batch_tokens=512)
    config["data"].pop("validation_batch_tokens")
    out.mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(yaml.safe_dump(config))
    return ["finetune", "--config", str(out / "recipe.yaml")]


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_command_trains_scores_and_exports_a_target(
    toys: Path, tmp_path: Path, lora: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(command(toys, tmp_path, lora)) == 0
    assert "of 6 tasks right" in capsys.readouterr().out
    target = Target.from_pretrained(str(tmp_path / "model"), dtype=torch.float32)
    tasks = read_tasks(toys / "tasks.jsonl", target.tokenizer)
    answers = dict(greedy_answers(target.model, [task.ids for task in tasks], 4, 5))
    texts = [target.tokenizer.decode(answers[number], skip_special_tokens=True) for number in range(len(tasks))]
    assert sum(task.reference.score(text) for task, text in zip(tasks, texts)) / len(tasks) > 0.6
    record = json.loads((tmp_path / "model" / "training.json").read_text())
    assert record["steps"] == 40 and record["metrics"]["val_score"] > 0.6
    if lora:
        settings = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(toys / "target")


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(toys: Path, tmp_path: Path) -> None:
    assert cli(command(toys, tmp_path / "whole", LORA)) == 0
    middle = tmp_path / "whole" / "checkpoints" / "step-20.ckpt"
    assert all("lora_" in name for name in torch.load(middle, weights_only=True)["state_dict"])
    assert cli([*command(toys, tmp_path / "again", LORA), "--ckpt_path", str(middle)]) == 0
    one, two = (load_target(tmp_path / name / "model", dtype="fp32", device="cpu")[0] for name in ("whole", "again"))
    torch.testing.assert_close(two.state_dict(), one.state_dict())


def test_a_run_starts_from_an_exported_adapter(toys: Path, tmp_path: Path) -> None:
    def module(rank: int, start: Path | None) -> FinetuneModule:
        made = FinetuneModule(str(toys / "target"), {"r": rank}, initial_adapter=start and str(start))
        made.configure_model()
        return made

    first = module(4, None)
    trained = {name: value for name, value in first.head.named_parameters() if "lora_" in name}
    for value in trained.values():
        torch.nn.init.normal_(value.data)
    adapter = first.export(tmp_path / "adapter")
    again = module(4, adapter)
    for name, value in trained.items():
        loaded = again.head.get_parameter(name)
        assert loaded.requires_grad and torch.equal(loaded, value.to(torch.bfloat16).float())
    with pytest.raises(CheckpointError, match="another rank"):
        module(8, adapter)
    with pytest.raises(DataError, match="initial_adapter"):
        FinetuneModule(str(toys / "target"), initial_adapter=str(adapter))


def test_the_loss_is_the_cross_entropy_of_answer_tokens(toys: Path) -> None:
    module = FinetuneModule(str(toys / "target"))
    module.configure_model()
    data = AnswersDataModule([str(toys / "tasks.jsonl")], tokenizer=str(toys / "target"), validation_fraction=0.0)
    data.setup()
    assert data.train_set is not None
    items = [data.train_set[i] for i in range(3)]
    losses = module.losses(dict(collate(items)))
    expected = []
    for item in items:
        log_p = module.head.model(item["input_ids"][None]).logits[0].log_softmax(-1)
        for place in item["loss_mask"].nonzero()[:, 0].tolist():
            expected.append(-log_p[place - 1, item["input_ids"][place]])
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_bad_input_is_named(toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="lr must be above 0"):
        FinetuneModule(str(toys / "target"), lr=0.0)
    (tmp_path / "none.jsonl").write_text('{"prompt": "a"}\n')
    assert cli(command(toys, tmp_path, LORA, str(tmp_path / "none.jsonl"))) == 2
    assert "none.jsonl: no row has an `answer`" in capsys.readouterr().err


@pytest.mark.skipif(COMPILER is None, reason="torch.compile needs a C++ compiler")
def test_compiled_training_has_the_losses_and_gradients_of_plain_training(toys: Path, tmp_path: Path) -> None:
    """In batches of two shapes, and the adapter it exports loads under the names that any adapter has."""
    items = [
        {"input_ids": torch.randint(3, 20, (length,)), "loss_mask": torch.arange(length) > 2, "index": 0, "id": "0"}
        for length in (5, 9, 12, 7, 4)
    ]
    batches = [dict(collate(items[:3])), dict(collate(items[3:]))]
    found = []
    for compiled in (False, True):
        module = FinetuneModule(target=str(toys / "target"), lora=LORA, compile=compiled)
        module.configure_model()
        losses = [module.losses(batch) for batch in batches]
        sum(loss.mean() for loss in losses).backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        found.append((losses, gradients))
    (plain, expected), (fast, got) = found
    assert expected.keys() == got.keys() != set()
    torch.testing.assert_close(fast, plain)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert load_target(str(module.export(tmp_path / "adapter")))[0] is not None
