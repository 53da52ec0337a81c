"""Tiny random targets and rows for the training tests."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.distributed import TCPStore
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM

from fsd_infer import Target
from fsd_train.data import AnswersDataModule, cache_features, collate
from fsd_train.losses import LOSSES
from fsd_train.models import EagleModule, HeadOptions, LMModule, MuonAdamW, WarmupCosine
from tests.families import reference
from tests.loss_toys import build_loss
from tests.text_toys import write_rows

VOCAB = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 128, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": True, "alibi": False},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0, "sliding_window": 64, "query_pre_attn_scalar": 8},
}


def toy_model(family: str = "llama", seed: int = 0) -> Any:
    """A random causal LM of two layers, H = 32, V = 64."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **OVERRIDES.get(family, {})})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if family == "gemma2" else "sdpa")
    for parameter in model.parameters():  # larger than the default, so that predictions are far from uniform
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    return model.eval()


def toy_target(family: str = "llama", seed: int = 0) -> Target:
    return Target(toy_model(family, seed), name=f"toy-{family}")


def save_toy_target(directory: Path, seed: int = 0) -> Path:
    """A target directory without a tokenizer."""
    toy_model(seed=seed).save_pretrained(directory)
    return directory


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same weights, bit by bit."""
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def in_bf16(value: torch.Tensor) -> torch.Tensor:
    """A weight as it is once it was exported."""
    return value.bfloat16().float() if value.is_floating_point() else value


def started(argv: list[str], cwd: Path, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """`fsd-train` in a process of its own, as users start it."""
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fsd_train.cli", *argv]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def run_group(rank: Callable[..., None], arguments: Sequence[tuple[Any, ...]], patience: float = 180.0) -> list[Any]:
    """The exit codes of ``rank(number, port, *arguments[number])`` in processes that form one group.

    Where one fails, or none ends within so many seconds, the others are killed: they would wait for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([rank.__module__])  # the imports are paid for once
    # this process holds the port from before the ranks begin until they are done, so no other can take it
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [context.Process(target=rank, args=(n, store.port, *more)) for n, more in enumerate(arguments)]
    for process in ranks:
        process.start()
    running = [process.sentinel for process in ranks]
    while running and not any(process.exitcode for process in ranks):
        ended = wait(running, patience)
        if not ended:
            break
        running = [sentinel for sentinel in running if sentinel not in ended]
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def join_group(rank: int, port: int, **more: int) -> None:
    """What a cluster's launcher does for each process."""
    names = {"MASTER_PORT": port, "LOCAL_RANK": rank, **more}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the launcher serves the port
    torch.set_num_threads(1)


def options(**given: Any) -> dict[str, Any]:
    """Options of a module where ``loss`` with ``loss_args``, ``lr``, ``optimizer`` and ``warmup_steps`` are short."""
    made = dict(given)
    lr, muon, warmup = made.pop("lr", 1e-3), made.pop("optimizer", "adamw") == "muon", made.pop("warmup_steps", 100)
    args = made.pop("loss_args", None)
    if "loss" in made or args:
        made["loss"] = build_loss(made.get("loss", "eagle"), args)
    made["optimizer"] = partial(MuonAdamW, lr=lr) if muon else partial(AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0)
    made["lr_scheduler"] = partial(WarmupCosine, warmup_steps=warmup)
    if isinstance(made.get("head"), dict):
        made["head"] = HeadOptions(**made["head"])
    return made


def eagle_module(toys: Path, **given: Any) -> EagleModule:
    """The training of a head for toys/target."""
    return EagleModule(str(toys / "target"), **options(**given))


def ready(module: Any) -> Any:
    """A module outside of a Trainer, its target whole and in fp32."""
    module._frozen.target = Target.from_pretrained(module.target_name, dtype=torch.float32)
    module.configure_model()
    return module


def small_lm(toys: Path, out: Path, **options: Any) -> LMModule:
    """A small LM in training, outside of a Trainer; an adapter's second matrices, which start at 0, have values."""
    module: LMModule = ready(LMModule(str(toys / "target"), str(save_toy_target(out / "small", seed=1)), **options))
    for name, value in module.head.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    return module


def answers_of(toys: Path, **given: Any) -> AnswersDataModule:
    """The rows of toys/answers.jsonl, a fifth of them held out."""
    return AnswersDataModule(
        [str(toys / "answers.jsonl")], **{"validation_fraction": 0.2, "batch_tokens": 256, **given}
    )


def batch_of(toys: Path, count: int = 4) -> dict[str, Any]:
    """A batch of the first rows that are trained on."""
    data = answers_of(toys)
    data.setup()
    return dict(collate([data.train_set[i] for i in range(count)]))


def trainer(out: Path, steps: int, *callbacks: Any, every: int = 1, **given: Any) -> Trainer:
    """A Trainer on one CPU, seeded, with a checkpoint ``out/ckpt/step=<n>.ckpt`` after each ``every`` steps."""
    seed_everything(0)
    checkpoints = ModelCheckpoint(out / "ckpt", filename="{step}", every_n_train_steps=every, save_top_k=-1)
    fixed = {**TRAINER, "default_root_dir": out, "logger": CSVLogger(out), "log_every_n_steps": 1}
    return Trainer(max_steps=steps, callbacks=[checkpoints, *callbacks], **{**fixed, **given})


def recipe_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same in the section of a recipe."""
    if "class_path" in given:
        return {**given, "init_args": recipe_model(given["init_args"])}
    made = dict(given)
    if "loss_args" in made:
        path = f"fsd_train.losses.{LOSSES.get(made.get('loss', 'eagle')).__name__}"
        made["loss"] = {"class_path": path, "init_args": made.pop("loss_args")}
    if "lr" in made:
        made["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": {"lr": made.pop("lr")}}
    if "warmup_steps" in made:
        path = "fsd_train.models.WarmupCosine"
        made["lr_scheduler"] = {"class_path": path, "init_args": {"warmup_steps": made.pop("warmup_steps")}}
    return made


TRAINER: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "max_epochs": -1, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0,
    "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False, "logger": False,
}  # fmt: skip


def in_recipe(class_path: str, **options: Any) -> dict[str, Any]:
    """A callback or logger of Lightning's, or of ours, as recipes write it."""
    homes = {"ModelCheckpoint": "lightning.pytorch.callbacks", "CSVLogger": "lightning.pytorch.loggers"}
    home = "" if "." in class_path else homes.get(class_path, "fsd_train.callbacks") + "."
    return {"class_path": home + class_path, "init_args": options}


def fit_command(out: Path, trainer: dict[str, Any], model: dict[str, Any], data: dict[str, Any]) -> list[str]:
    """`fsd-train fit` by the recipe out/recipe.json, on one CPU unless ``trainer`` says otherwise."""
    out.mkdir(parents=True, exist_ok=True)
    sections = {
        "trainer": {**TRAINER, "default_root_dir": str(out), **trainer},
        "model": recipe_model(model),
        "data": data,
    }
    (out / "recipe.json").write_text(json.dumps(sections, default=str))
    return ["fit", "--config", str(out / "recipe.json")]


def logged(directory: str | Path | None, name: str) -> list[float]:
    """A column of the metrics.csv under a directory, where it has values."""
    (file,) = Path(directory or "").rglob("metrics.csv")
    with file.open(newline="") as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row.get(name)]


def make_toys(root: Path) -> Path:
    """Fill ``root`` with target/, its greedy answers to random prompts as answers.jsonl, and their features/."""
    target = Target.from_pretrained(str(save_toy_target(root / "target")))
    rng, rows = random.Random(0), []
    for number in range(48):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(3, 8))]
        (answer,) = reference(target.model, [prompt], max_new_tokens=rng.randint(12, 24))
        messages = [{"role": "user", "content": f"prompt {number}"}]
        rows.append({"id": f"toy-{number}", "messages": messages, "prompt_ids": prompt, "response_ids": answer})
    data = AnswersDataModule([str(write_rows(root / "answers.jsonl", rows))], validation_fraction=0.0)
    data.setup()
    cache_features(target, [item["input_ids"] for item in data.train_set], root / "features", progress=False)
    return root
