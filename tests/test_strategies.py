"""Strategies by config: two processes give one process's loss curve; what they leave is the same file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsd_core.errors import CheckpointError
from fsd_infer import Target
from fsd_infer.drafters.lm import load_lm
from fsd_train.cli import main as cli
from fsd_train.commands.export import load_module
from fsd_train.models import EagleModule
from fsd_train.strategies import ShardedStrategy, whole_head
from tests.families import load_head
from tests.text_toys import write_rows
from tests.train_toys import (
    VOCAB,
    assert_same,
    fit_command,
    in_bf16,
    in_recipe,
    join_group,
    logged,
    run_group,
    started,
    toy_model,
)

RANKS = 2
STEPS = 4
ACCUMULATE = 2  # batches per step and rank
LR = 1e-3


class Record(Callback):
    """Writes what a rank saw to ``rank<n>.pt``: losses per batch, the final head, and how the weights were held."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.losses: list[float] = []
        self.facts: dict[str, Any] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning divides by the number of batches per step
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layer = next(iter(pl_module.target.layers([0])[0].parameters()))
        if isinstance(pl_module.head, FSDPModule):
            pl_module.head.reshard()  # validation leaves it whole
        weight = next(p for p in pl_module.head.parameters() if p.requires_grad and p.ndim == 2)
        self.facts = {
            "target_sharded": isinstance(layer, DTensor), "target_share": _held(layer) / layer.numel(),
            "head_share": _held(weight) / weight.numel(),
            "moment_share": _held(trainer.optimizers[0].state[weight]["exp_avg"]) / weight.numel(),
            "target_frozen": not any(p.requires_grad for p in pl_module.target.model.parameters()),
            "trained": len([p for p in pl_module.parameters() if p.requires_grad]),
        }  # fmt: skip

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with whole_head(pl_module):
            head = {name: value.detach().clone() for name, value in pl_module.head.state_dict().items()}
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics, decoded = ({n: v for n, v in values.items() if n.startswith(part)} for part in ("val_", "decoded_"))
        found = {"losses": self.losses, "head": head, "metrics": metrics, "decoded": decoded, **self.facts}
        self.directory.mkdir(parents=True, exist_ok=True)
        torch.save(found, self.directory / f"rank{trainer.global_rank}.pt")


class OneRankIsKilled(Callback):
    """The second rank, as the system does it where memory is short, after the step that wrote a checkpoint."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class OneRankIsAskedToEnd(Callback):
    """The second rank alone, amid the batches of a step, as by a scheduler or a cloud that takes its machine back."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == ACCUMULATE:
            os.kill(os.getpid(), signal.SIGTERM)


class OneRankIsSlow(Callback):
    """The second rank comes late to every batch."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        time.sleep(2.0 * trainer.global_rank)


def _held(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()


@pytest.fixture(scope="module")
def toys(toys: Path) -> Path:
    """With held.jsonl, whose rows make three batches of 64 tokens."""
    held = [[3 + (7 * row + place) % (VOCAB - 3) for place in range(20)] for row in range(9)]
    write_rows(toys / "held.jsonl", [{"prompt_ids": ids[:10], "response_ids": ids[10:]} for ids in held])
    return toys


def command(toys: Path, out: Path, accumulate: int, *more: str, lm: dict[str, Any] | None = None) -> list[str]:
    """`fsd-train fit` of a few steps, everything random switched off; with ``lm``, of a small LM with these options."""
    callbacks = [
        in_recipe("tests.test_strategies.Record", directory=out),
        in_recipe("ModelCheckpoint", dirpath=out / "ckpt", every_n_train_steps=2, save_top_k=-1, save_last=True),
        in_recipe("DecodedTau", rules=["exact"], every_n_train_steps=2, prompts=2, max_new_tokens=8),
        in_recipe("ExportHead", directory=out / "head"),
    ]
    trainer = {
        "max_steps": STEPS, "precision": "32-true", "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5,
        "log_every_n_steps": 1, "val_check_interval": STEPS * accumulate, "callbacks": callbacks,
        "logger": in_recipe("CSVLogger", save_dir=out),
    }  # fmt: skip
    model = {"target": toys / "target", "unroll_steps": 2, "lr": LR, "warmup_steps": 2, "eval_steps": 2}
    if lm is None:
        loss = {"w_feature": 0.3, "w_ce": 1.0}
        model |= {"head": {"final_norm": True}, "draft_vocab_size": 40, "loss_args": loss}
    else:
        model = {"class_path": "LMModule", "init_args": {**model, "drafter": toys / "tied", **lm}}
    files = {"train_files": [toys / "answers.jsonl"], "validation_files": [toys / "held.jsonl"]}
    return [*fit_command(out, trainer, model, {**files, "batch_tokens": 64}), *more]


def _one_rank(rank: int, port: int, argv: list[str], log: Path) -> None:
    sys.stdout = sys.stderr = open(log, "w", buffering=1)
    join_group(rank, port, NODE_RANK=0)
    sys.exit(cli(argv))


def run_ranks(argv: list[str], out: Path, count: int = RANKS) -> list[dict[str, Any]]:
    """Run ``argv`` in so many processes that form one group; return what each recorded."""
    logs = [out / f"rank{rank}.log" for rank in range(count)]
    codes = run_group(_one_rank, [(argv, log) for log in logs])
    assert codes == [0] * count, "\n".join(log.read_text() for log in logs if log.exists())
    return [torch.load(out / f"rank{rank}.pt") for rank in range(count)]


@pytest.fixture(scope="module")
def single(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process that takes as many batches per step as both ranks together."""
    out = tmp_path_factory.mktemp("single")
    assert cli(command(toys, out, RANKS * ACCUMULATE)) == 0
    return {**torch.load(out / "rank0.pt"), "directory": out}


def per_step(losses: list[float], size: int) -> list[float]:
    """Means of consecutive groups."""
    return [sum(losses[i : i + size]) / size for i in range(0, len(losses), size)]


def check_same_run(ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    """Losses within 1e-4 of one another; weights within a tenth of the learning rate (sums in another order)."""
    together = [sum(pair) / RANKS for pair in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert len(together) == STEPS * ACCUMULATE
    expected = per_step(single["losses"], RANKS * ACCUMULATE)
    assert per_step(together, ACCUMULATE) == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == STEPS
    for rank in ranks:
        assert rank["target_frozen"] and rank["trained"] == single["trained"]
        torch.testing.assert_close(rank["head"], single["head"], rtol=0, atol=0.1 * LR)
        # no row counts twice, though some rank gets a batch that another one had, and all decode with the whole head
        assert rank["metrics"] == pytest.approx(single["metrics"], rel=1e-4, nan_ok=True)
        assert rank["decoded"] == pytest.approx(single["decoded"])


def check_logged_loss(out: Path, ranks: list[dict[str, Any]], accumulate: int = ACCUMULATE) -> None:
    """What loggers got at each step is the mean over all ranks' batches, so it can be compared with one device's."""
    means = [sum(losses) / len(ranks) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert logged(out, "loss") == pytest.approx(means[accumulate - 1 :: accumulate], rel=1e-5)


def check_files(out: Path, toys: Path, rank: dict[str, Any]) -> None:
    """The checkpoint and the exported head hold the whole head and nothing of the target."""
    state = torch.load(out / "ckpt" / "last.ckpt", weights_only=False)["state_dict"]
    assert set(state) == {f"head.{name}" for name in rank["head"]}
    module = load_module(out / "ckpt" / "last.ckpt")
    target = Target.from_pretrained(str(toys / "target"), dtype=torch.float32, device="cpu")
    exported = load_head(out / "head", target).state_dict()
    assert_same(module.head.state_dict(), rank["head"])
    assert_same(exported, {name: in_bf16(value) for name, value in rank["head"].items()})


# in one batch: the second rank has none of its own to validate
@pytest.mark.parametrize(("strategy", "validation"), [("ddp", 64), ("fsdp", 1000)])
def test_two_ranks_train_as_one(
    strategy: str, validation: int, toys: Path, single: dict[str, Any], tmp_path: Path
) -> None:
    argv = command(toys, tmp_path, ACCUMULATE, "--trainer.strategy", strategy, "--trainer.devices", str(RANKS))
    ranks = run_ranks([*argv, "--data.validation_batch_tokens", str(validation)], tmp_path)
    check_same_run(ranks, single)
    check_logged_loss(tmp_path, ranks)
    check_logged_loss(single["directory"], [single], RANKS * ACCUMULATE)
    check_files(tmp_path, toys, ranks[0])
    assert {"val_loss", "val_tau", "val_agreement_1", "val_expected_tau/exact"} <= set(single["metrics"])
    assert single["decoded"]["decoded_tau/exact"] > 1
    share = 1 / RANKS if strategy == "fsdp" else 1
    for rank in ranks:
        assert rank["target_sharded"] == (strategy == "fsdp")
        assert rank["target_share"] == rank["head_share"] == rank["moment_share"] == share


RESUMED = [
    ("fsdp", 2, "fsdp", 2), ("fsdp", 2, "ddp", 1), ("fsdp", 2, "fsdp", 1), ("fsdp", 1, "fsdp", 2),
    ("ddp", 1, "ddp", 2),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("first, ranks, second, others", RESUMED)
def test_resume(
    first: str, ranks: int, second: str, others: int, toys: Path, single: dict[str, Any], tmp_path: Path
) -> None:
    """Stopped after half of its steps, a run ends where an uninterrupted one does, on as many devices or others."""

    def run(out: Path, strategy: str, count: int, *more: str) -> list[dict[str, Any]]:
        spread = ["--trainer.devices", str(count), "--trainer.strategy", strategy]
        return run_ranks(command(toys, out, RANKS * ACCUMULATE // count, *spread, *more), out, count)

    run(tmp_path / "first", first, ranks)
    (half,) = (tmp_path / "first" / "ckpt").glob("*step=2.ckpt")
    made = run(tmp_path / "second", second, others, "--ckpt_path", str(half))
    together = [sum(batch) / others for batch in zip(*(rank["losses"] for rank in made), strict=True)]
    expected = per_step(single["losses"], RANKS * ACCUMULATE)[2:]
    assert per_step(together, RANKS * ACCUMULATE // others) == pytest.approx(expected, rel=1e-4)
    for rank in made:
        torch.testing.assert_close(rank["head"], single["head"], rtol=0, atol=0.1 * LR)


def with_callback(callback: str, toys: Path, out: Path, strategy: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Two ranks, started as users do."""
    spread = ["--trainer.strategy", strategy, "--trainer.devices", str(RANKS)]
    argv = command(toys, out, ACCUMULATE, *spread, "--trainer.callbacks+", f"tests.test_strategies.{callback}")
    return started([*argv, *more], out.parent, timeout=180.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_signal_to_one_rank_saves_and_ends_all(
    strategy: str, toys: Path, single: dict[str, Any], tmp_path: Path
) -> None:
    """The same command then goes on, and ends where an uninterrupted run does."""
    done = with_callback("OneRankIsAskedToEnd", toys, tmp_path / "run", strategy)
    saved = tmp_path / "run" / "ckpt" / "interrupted.ckpt"
    assert done.returncode == 130 and f"saved step 2 in {saved}" in done.stderr
    done = with_callback("OneRankIsSlow", toys, tmp_path / "run", strategy)
    assert done.returncode == 0 and f"resuming {saved}" in done.stderr
    for rank in range(RANKS):
        made = torch.load(tmp_path / "run" / f"rank{rank}.pt")
        torch.testing.assert_close(made["head"], single["head"], rtol=0, atol=0.1 * LR)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_ends_the_run(strategy: str, toys: Path, single: dict[str, Any], tmp_path: Path) -> None:
    """The other rank waits for the killed one in a collective operation."""
    done = with_callback("OneRankIsKilled", toys, tmp_path / "first", strategy)
    assert done.returncode != 0 and "another process of this run has ended" in done.stderr
    last = tmp_path / "first" / "ckpt" / "last.ckpt"
    done = with_callback("OneRankIsSlow", toys, tmp_path / "second", strategy, "--ckpt_path", str(last))
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        made = torch.load(tmp_path / "second" / f"rank{rank}.pt")
        torch.testing.assert_close(made["head"], single["head"], rtol=0, atol=0.1 * LR)


def test_a_sharded_checkpoint_of_another_model_is_refused(toys: Path, tmp_path: Path) -> None:
    module, strategy = EagleModule(str(toys / "target")), ShardedStrategy()
    module.configure_model()
    strategy._lightning_module = module
    state, path, ours = module.state_dict(), tmp_path / "step.ckpt", {"hyper_parameters": module.settings}
    fewer = {name: value for name, value in state.items() if name != "head.fc.weight"}
    for written, problem in (
        ({**ours, "state_dict": fewer, "fsd_sharded_optimizer": True}, "other settings: 1 tensors .* 'head.fc.weight'"),
        ({**ours, "state_dict": state}, "another strategy"),
    ):
        torch.save(written, path)
        with pytest.raises(CheckpointError, match=problem):
            strategy.load_checkpoint(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="truncated"):
        strategy.load_checkpoint(path)
    assert module.strict_loading


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_strategies_on_cuda(strategy: str, toys: Path, tmp_path: Path) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    argv = command(toys, tmp_path, ACCUMULATE, "--trainer.strategy", strategy, "--trainer.precision", "bf16-mixed")
    path = tmp_path / "recipe.json"
    config = json.loads(path.read_text())
    config["trainer"]["accelerator"] = "gpu"
    config["trainer"]["callbacks"] = config["trainer"]["callbacks"][-2:]  # DeepSpeed's state is its own
    path.write_text(json.dumps(config))
    done = started(argv, tmp_path)
    assert done.returncode == 0, done.stderr
    head = load_head(tmp_path / "head", Target.from_pretrained(str(toys / "target"), device="cpu"))
    assert all(torch.isfinite(parameter).all() for parameter in head.parameters())


# small LMs

FSDP = ["--trainer.strategy", "fsdp", "--trainer.devices", str(RANKS)]


def save_tied(directory: Path) -> None:
    """Where training starts: a small LM whose LM head is its embeddings, as most small ones' is."""
    model = toy_model(seed=1)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(directory)


def drafter(root: Path, directory: Path) -> Any:
    """An exported drafter's model."""
    return load_lm(directory, Target.from_pretrained(str(root / "target"), dtype=torch.float32)).model


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"lora": {"r": 4, "lora_alpha": 8}}, {"on_policy": 1.0}], ids=["full", "lora", "on-policy"]
)
def test_a_sharded_small_lm_is_trained_and_exported(options: dict[str, Any], toys: Path, tmp_path: Path) -> None:
    save_tied(toys / "tied")
    single, out = tmp_path / "single", tmp_path / "sharded"
    ranks = run_ranks(command(toys, out, ACCUMULATE, *FSDP, lm=options), out)
    if "on_policy" not in options:  # each rank draws answers of its own
        assert cli(command(toys, single, RANKS * ACCUMULATE, lm=options)) == 0
        check_same_run(ranks, torch.load(single / "rank0.pt"))
    for rank in ranks:
        assert rank["target_share"] == rank["head_share"] == rank["moment_share"] == 1 / RANKS
    # what the callback wrote is what rank 0 gathered, and what the command makes of the checkpoint
    assert cli(["export", str(out / "ckpt" / "last.ckpt"), str(out / "again")]) == 0
    written = drafter(toys, out / "head").state_dict()
    again = drafter(toys, out / "again").state_dict()
    assert_same(again, written)
    start = drafter(toys, toys / "tied").state_dict()
    assert set(written) == set(start) and any(not torch.equal(value, start[name]) for name, value in written.items())
    if "lora" not in options:
        assert_same(written, {name: in_bf16(ranks[0]["head"][f"model.{name}"]) for name in written})


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 4, "lora_alpha": 8}], ids=["full", "lora"])
def test_its_sharded_checkpoints_are_continued(lora: dict[str, Any] | None, toys: Path, tmp_path: Path) -> None:
    save_tied(toys / "tied")
    options, whole, part = {"lora": lora}, tmp_path / "whole", tmp_path / "part"
    expected = run_ranks(command(toys, whole, ACCUMULATE, *FSDP, lm=options), whole)[0]["head"]
    (half,) = (whole / "ckpt").glob("*step=2.ckpt")
    resume = ["--ckpt_path", str(half)]
    found = run_ranks(command(toys, part, ACCUMULATE, *FSDP, *resume, lm=options), part)[0]["head"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1 * LR)
