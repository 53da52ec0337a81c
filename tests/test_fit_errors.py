"""Whatever a recipe or an option of `fsd-train fit` says, it ends in one line and status 2, or is understood.

Hypothesis spoils a recipe that works: values of other kinds, misspelt keys, missing parts, other YAML. None may end in
a traceback, and none may be called a bug of ours.
"""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fsd_core.console import run
from fsd_core.errors import FsdError, causes
from fsd_core.options import target_keywords
from fsd_train.cli import main
from fsd_train.commands.fit import HEAD, TrainCLI, config_errors, configured, quiet, run_errors
from fsd_train.commands.recipe_keys import read_yaml
from tests.families import altered, tiny_head
from tests.fuzzing import FUZZ, JUNK, called, changed, places
from tests.text_toys import write_rows
from tests.train_toys import TRAINER, in_recipe, toy_target


def recipe(toys: Path, out: Path) -> dict[str, Any]:
    callbacks = [
        in_recipe("ModelCheckpoint", dirpath=str(out / "checkpoints"), every_n_train_steps=1),
        in_recipe("ExportHead", directory=str(out / "head")),
        in_recipe("DecodedTau", prompts=1, max_new_tokens=4, rules=["exact"]),
    ]
    return {
        "trainer": {
            **TRAINER, "max_steps": 1, "strategy": "auto", "precision": "32-true", "limit_val_batches": 0,
            "default_root_dir": str(out), "callbacks": callbacks,
        },
        "model": {
            "target": str(toys / "target"), "head": {"final_norm": True, "num_layers": 1}, "draft_vocab_size": 40,
            "unroll_steps": 2, "loss": {"class_path": "EagleLoss", "init_args": {"w_feature": 0.1}},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001, "betas": [0.9, 0.95]}},
            "lr_scheduler": {"class_path": "fsd_train.models.WarmupCosine", "init_args": {"warmup_steps": 0}},
            "seed": 0, "eval_rules": ["exact"],
        },
        "data": {
            "train_files": [str(toys / "answers.jsonl")], "validation_fraction": 0.3, "batch_tokens": 256,
            "max_length": 64, "features": str(toys / "features"),
        },
    }  # fmt: skip


call = partial(called, main)


def one_line_or_well(argv: list[str], said: str = "", ends: Callable[[list[str]], tuple[int, str, str]] = call) -> int:
    """Run; whatever comes of it goes well or is said in one line. Returns the exit status."""
    status, _, err = ends(argv)
    last = err.strip().splitlines()[-1] if err.strip() else ""
    assert status in (0, 2), f"{argv}: {err}"
    assert "Traceback" not in err and "a bug" not in err, f"{argv}: {err}"
    if status == 2:
        assert last.startswith("fsd-train fit: ") and len(last) < 2500, err
        others = [line for line in err.strip().splitlines()[:-1] if not line.startswith(("warning", "EagleModule"))]
        assert len(others) <= 2, f"{argv}: {err}"
    assert said in last, f"{argv}: {last}"
    return status


VALIDATED = ["--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "1", "--trainer.max_steps", "2"]
UNCACHED = ["--data.features", "null"]
AVERAGING = "lightning.pytorch.callbacks.EMAWeightAveraging"
NAMED: dict[str, tuple[list[str], str]] = {
    "key of the model": (["--model.lrr", "3"], "there is no --model.lrr"),
    "section": (["--modl.lr", "3"], "there is no --modl. Did you mean 'model'"),
    "strategy": (["--trainer.strategy", "dpp"], "strategy='dpp'"),
    "strategy that waits for ever": (
        ["--trainer.strategy", "ddp_spawn", "--trainer.devices", "2"], "should end. Use ddp.",
    ),
    "strategy that is not installed": (["--trainer.strategy", "deepspeed_stage_2"], "DeepSpeed"),
    "averaged shards": (
        ["--trainer.strategy", "fsdp", "--trainer.callbacks+", AVERAGING], "fsdp does not support weight averaging",
    ),
    "workers without end": (["--data.num_workers", "1000000"], "num_workers is 1000000, a process each: give at most"),
    "loss": (["--model.loss", "eagel"], "Did you mean 'eagle'?"),
    "earlier name of a loss": (["--model.loss", "reverse_kl"], "kl_pq is KL(p||q)"),
    "rule": (["--model.eval_rules", "[fuzy:js:0.3]"], "Did you mean 'fuzzy'?"),
    "infinite": (["--model.optimizer.lr", ".inf"], "model.optimizer: Invalid learning rate: inf"),
    "precision of weights": (["--trainer.precision", "bf16-true"], "Choose bf16-mixed, 16-mixed, 32-true"),
    "target": (["--model.target", "nowhere/at-all/x"], "nowhere/at-all/x"),
    "head as the target": (["--model.target", "head"], "head is a draft head, not a target: give it as drafter"),
    "type of the target": (["--model.target_kwargs", "{dtype: float16}"], "target_kwargs.dtype: the trainer's options"),
    "tokenizer that is none": (["--data.tokenizer", "head"], "data.tokenizer: head has no tokenizer"),
    "answers": (["--data.train_files", "[none.jsonl]"], "none.jsonl"),
    "draft vocabulary": (["--model.draft_vocab_size", "100"], "draft_vocab_size"),
    "length of rows": (
        ["--data.train_files", "[long.jsonl]", "--data.max_length", "999", *UNCACHED],
        "a row has 202 tokens, but the model has a context of 128",
    ),
    "no files": (["--data.train_files", "[]"], "train_files is empty"),
    "features": (["--data.features", "nowhere"], "nowhere is not a feature cache"),
    "checkpoint": (["--ckpt_path", "none.ckpt"], "none.ckpt: no such checkpoint"),
    "configuration": (["--config", "recipe.yml"], "recipe.yml does not exist. Did you mean 'recipe.yaml'?"),
    "more processes than cores": (["--trainer.devices", "1000"], "trainer.devices is 1000, a process each"),
    "accumulated": (["--trainer.accumulate_grad_batches", "0"], "accumulate_grad_batches: expected a number >= 1"),
    "clipping": (["--trainer.gradient_clip_val", "-1"], "trainer.gradient_clip_val: expected a number >= 0, got -1"),
    "clipping by NaN": (["--trainer.gradient_clip_val", ".nan"], "gradient_clip_val: expected a number >= 0, got nan"),
    "no interval": (["--trainer.val_check_interval", "0"], "trainer.val_check_interval is 0: give a number of steps"),
    "no batches": (["--trainer.limit_train_batches", "0"], "trainer.limit_train_batches is 0, so no step"),
    "no time": (["--trainer.max_time", "00:00:00:00"], "ended before its first step"),
    "null tokens": (
        ["--config", "null.yaml"], "data.batch_tokens is null: give a value, or leave it out, which means 4096",
    ),
    "no depth": (["--model.unroll_steps", "0"], "fit: model.unroll_steps: expected a whole number >= 1 and"),
    "one file": (["--data.train_files", "a.jsonl"], "data.train_files: expected a list, got a.jsonl."),
    "type of a loss": (["--config", "loss.yaml"], "loss: expected a class_path with init_args or text, got 5."),
    "argument of a loss, its type": (
        ["--model.loss", "fsd_train.losses.FsdLoss", "--model.loss.softness", "0"], "softness: expected a number > 0",
    ),
    "option of another optimizer": (
        ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.betas", "[0.9, 0.9]"], "betas",
    ),
    "class of a callback": (["--config", "no-class.yaml"], "trainer.callbacks: Problem with given class_path"),
    "steps between points": (["--config", "curve.yaml"], "every_n_train_steps: expected a whole number > 0, got 0."),
    "schedule by a metric": (
        ["--model.lr_scheduler", "torch.optim.lr_scheduler.ReduceLROnPlateau"], "model.lr_scheduler: ReduceLROnPlateau",
    ),
    "metric that is not there": (["--config", "stopping.yaml", *VALIDATED], "trainer.callbacks: Early stopping"),
    "null optimizer": (["--model.optimizer", "null"], "model.optimizer is null: give a value, or leave it out."),
    "null of a callback": (["--config", "prompts.yaml"], "trainer.callbacks.prompts is null: give a value"),
    # refused before the target is loaded
    "no answers": (["--data.train_files", "[empty.jsonl]", "--model.target", "nowhere/x"], "empty.jsonl: no row"),
    "share held out": (["--data.validation_fraction", "1.0"], "validation_fraction"),
    "answers of one token": (["--data.train_files", "[short.jsonl]", *UNCACHED], "no training row has two tokens"),
    "nothing to validate": (
        ["--data.validation_files", "[short.jsonl]", "--trainer.limit_val_batches", "1", *UNCACHED],
        "no validation row has two tokens",
    ),
    "NaN in the target": (["--model.target", "nan", *UNCACHED], "nan computes NaN. Check its weights"),
    "nothing held out": (["--data.train_files", "[one.jsonl]"], "validation_fraction 0.3 holds out none of one prompt"),
    "unwritable": (["--trainer.default_root_dir", "/dev/null/x"], "/dev/null is a file"),
}  # fmt: skip


VALUES = st.one_of(
    st.sampled_from([*JUNK, KeyError]), st.floats(), st.text(max_size=6),
    st.sampled_from(["none", "1e400", "0_1", "/dev/null", "~", "a.b.C", "[", "{}"]),
)  # fmt: skip


# other numbers of devices start processes
KEYS = [place for place in places(recipe(Path("toys"), Path("out"))) if place[-1] not in ("devices", "strategy")]


@pytest.fixture(scope="module")
def command_line(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainCLI:
    """The command line of `fit` as it stands before it trains, to read other recipes with."""
    out = tmp_path_factory.mktemp("command-line")
    (out / "recipe.yaml").write_text(yaml.safe_dump(recipe(toys, out)))
    return configured(["--config", str(out / "recipe.yaml")])


def read_only(line: TrainCLI, argv: list[str]) -> tuple[int, str, str]:
    """As :func:`call`, up to where a target would be loaded."""

    def begin() -> None:
        with quiet(), config_errors():
            line.parse_arguments(line.parser, [*HEAD, *argv[1:]])
            line.before_instantiate_classes()
            line.instantiate_classes()
            line.prepare_run()

    return called(lambda _: run("fsd-train fit", begin), argv)


# refused before the options are parsed, or not before target and rows are read
BY_THE_WHOLE_COMMAND = {
    "key of the model", "section", "infinite", "precision of weights", "target", "answers", "draft vocabulary",
    "length of rows", "features", "configuration", "schedule by a metric", "metric that is not there", "no time",
    "no answers", "nothing held out", "answers of one token", "nothing to validate", "NaN in the target",
    "tokenizer that is none",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_mistakes_are_named(name: str, toys: Path, here: Path, command_line: TrainCLI) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe(toys, here / "run")))
    Path("null.yaml").write_text("data: {batch_tokens: null}")
    Path("loss.yaml").write_text("model: {loss: 5}")
    for file, kind, options in (
        ("prompts", "DecodedTau", {"prompts": None}),
        ("no-class", "fsd_train.callbacks.Nope", {}), ("curve", "LossCurve", {"every_n_train_steps": 0}),
        ("stopping", "EarlyStopping", {"monitor": "val_los"}),
    ):  # fmt: skip
        callbacks = [{"class_path": kind, "init_args": options}]
        Path(f"{file}.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    tiny_head(toy_target()).head.save_pretrained(Path("head"), torch.bfloat16)
    Path("empty.jsonl").touch()
    write_rows(Path("short.jsonl"), [{"prompt_ids": [3 + row, 7], "response_ids": [5]} for row in range(9)])
    if name == "NaN in the target":
        altered(toys / "target", Path("nan"), tensors={"model.norm.weight": lambda norm: norm * float("nan")})
    write_rows(Path("long.jsonl"), [{"prompt_ids": [3 + row, 7], "response_ids": [5] * 200} for row in range(3)])
    Path("one.jsonl").write_text((toys / "answers.jsonl").read_text().splitlines()[0] + "\n")
    extra, said = NAMED[name]
    ends = call if name in BY_THE_WHOLE_COMMAND else partial(read_only, command_line)
    assert one_line_or_well(["fit", "--config", "recipe.yaml", *extra], said, ends) == 2


@pytest.mark.parametrize(("cases", "trains"), [(30, False), pytest.param(200, True, marks=pytest.mark.slow)])
def test_spoilt_recipes(cases: int, trains: bool, toys: Path, here: Path, command_line: TrainCLI) -> None:
    statuses: Counter[int] = Counter()
    ends = call if trains else partial(read_only, command_line)

    @settings(FUZZ, max_examples=cases)
    @given(changes=st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=2))
    def check(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
        out = here / f"run-{len(list(here.iterdir()))}"
        out.mkdir()
        config = recipe(toys, out)
        for place, value in changes:
            with suppress(KeyError, IndexError, TypeError):  # an earlier change took it away
                config = changed(config, place, value)
        if isinstance(config.get("trainer"), dict):
            config["trainer"]["max_steps"] = config["trainer"].get("max_steps", 1) and 1  # what is understood ends soon
        path = out / "recipe.yaml"
        path.write_text(json.dumps(config))
        statuses[one_line_or_well(["fit", "--config", str(path)], ends=ends)] += 1

    check()
    assert statuses[2] >= cases / 3, statuses  # or this tests little


@pytest.mark.parametrize(
    "text", ["", "- 3", "a: [", "{", "null", "fit:\n  model: 3", "&a [*a]", "model: !!python/object:a.b {}", "\x00"]
)
def test_other_yaml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    one_line_or_well(["fit", "--config", str(path)])
    path.write_bytes(b"\xff\xfe" + text.encode())
    one_line_or_well(["fit", "--config", str(path)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"trainer:\n  max_steps: 1\ndata: {}\ntrainer:\n  max_steps: 2\n", "trainer is there twice, in lines 1 and 4"),
        (b"model: {}\ndata:\n  max_length: 3\n  max_length: 4\n", "max_length is there twice, in lines 3 and 4"),
        (b"model: {seed: 1, seed: 2}", "seed is there twice, in lines 1 and 1"),
        (b"a: [1\n b", "expected ',' or ']'"),
        (b"a: \xff", "can't decode byte 0xff"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_named(text: bytes, said: str, tmp_path: Path) -> None:
    """All but the last of equal keys were dropped, with callbacks and all."""
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text)
    with pytest.raises(FsdError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path} is not a recipe: ") and said in str(caught.value)
    path.write_text("base: &base {a: 1, b: 2}\nmade: {<<: *base, b: 3}\nmore: {<<: *base, b: 4}\n")
    assert read_yaml(path)["made"] == {"a": 1, "b": 3} and read_yaml(path)["more"] == {"a": 1, "b": 4}


def test_a_machine_that_cannot_compile_is_no_bug() -> None:
    """With CUDA steps are compiled by default, and images of containers often have no compiler."""

    def backend(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    with pytest.raises(FsdError, match=r"torch.compile failed .*Failed to find C compiler.*set model.compile to false"):
        with run_errors():
            torch.compile(torch.sin, backend=backend)(torch.ones(2))


def test_a_chain_of_causes_that_leads_into_itself_ends() -> None:
    first, second = FsdError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    with pytest.raises(FsdError, match="first"), config_errors():
        raise second
    assert list(causes(second)) == [second, first]
    with pytest.raises(FsdError, match="^x:3: a fault$"), config_errors():
        try:
            raise FsdError("x:3: a fault") from FsdError("a fault")
        except FsdError as error:
            raise ValueError("of a library") from error


@pytest.mark.parametrize("command", ["new-recipe", "cache-features --data x.jsonl --output features"])
def test_no_command_takes_a_head_for_its_target(command: str, here: Path) -> None:
    """transformers would say that it is too old to know such a model."""
    tiny_head(toy_target()).head.save_pretrained(Path("head"), torch.bfloat16)
    name, *options = command.split()
    status, _, err = call([name, "--target", "head", *options])
    assert (status, err.count("\n")) == (2, 1) and "head is a draft head, not a target: give it as drafter" in err


def test_keywords_of_a_target_leave_out_what_options_choose() -> None:
    """Given twice, they ended in a TypeError."""
    with pytest.raises(ArgumentTypeError, match="dtype is no such keyword: .* have --dtype"):
        target_keywords('{"dtype": "float16"}')
