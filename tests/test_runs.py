"""A run's directories: nothing is overwritten unasked, `auto` goes on where a run stopped."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_train.cli import main
from fsd_train.data import AnswersDataModule
from fsd_train.models import EagleModule
from tests.families import load_head
from tests.fuzzing import called
from tests.train_toys import assert_same, fit_command, in_recipe, logged


class Run:
    """`fsd-train fit` in one directory, with a checkpoint and a few decoded answers every few steps."""

    def __init__(self, toys: Path, root: Path, every: int = 2, **elsewhere: Path) -> None:
        self.root = root
        places = {name: root / name for name in ("checkpoints", "head", "best")} | elsewhere
        self.checkpoints, self.head, self.best = places["checkpoints"], places["head"], places["best"]
        callbacks = [
            in_recipe(
                "ModelCheckpoint", dirpath=self.checkpoints, filename="step-{step}", auto_insert_metric_name=False,
                every_n_train_steps=every, save_last=True, save_top_k=-1, enable_version_counter=False,
            ),
            in_recipe("ExportHead", directory=self.head),
            in_recipe(
                "DecodedTau", every_n_train_steps=every, prompts=2, max_new_tokens=5, best=self.best, rules=["exact"]
            ),
        ]  # fmt: skip
        model = {"target": toys / "target", "draft_vocab_size": 40, "lr": 1e-2, "warmup_steps": 2}
        data = {"train_files": [toys / "answers.jsonl"], "features": toys / "features", "batch_tokens": 128}
        trainer = {"limit_val_batches": 0, "callbacks": callbacks}
        self.argv = fit_command(root, trainer, model, {**data, "validation_fraction": 0.2})

    def fit(self, steps: int, *more: str) -> tuple[int, str]:
        """(exit status, standard error)"""
        return self.call([*self.argv, "--trainer.max_steps", str(steps), *more])

    def call(self, argv: list[str]) -> tuple[int, str]:
        status, _, err = called(main, argv)
        return status, err

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.root.rglob("*")) if path.is_file()}

    def names(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.glob("*.ckpt"))

    def step(self, name: str = "last.ckpt") -> int:
        return int(torch.load(self.checkpoints / name, weights_only=True)["global_step"])

    def curves(self) -> Any:
        """What DecodedTau has measured, as the last checkpoint holds it."""
        state = torch.load(self.checkpoints / "last.ckpt", weights_only=True)["callbacks"]
        return next(value["points"] for name, value in state.items() if name.startswith("DecodedTau"))


def test_a_run_is_not_overwritten(toys: Path, tmp_path: Path) -> None:
    run = Run(toys, tmp_path / "run")
    assert run.fit(4)[0] == 0
    assert run.names() == ["last.ckpt", "step-2.ckpt", "step-4.ckpt"] and run.step() == 4

    # the same command once more: nothing is left to train, and nothing touched; another run is refused
    before = run.files()
    status, err = run.fit(4)
    assert status == 0 and "last.ckpt has 4 steps: nothing is left to train" in err
    status, err = run.fit(4, "--model.seed", "1")
    assert status == 2 and "a run with another seed is in" in err and "checkpoint: last.ckpt" in err
    assert "--ckpt_path auto" in err and "--overwrite true" in err
    assert run.files() == before

    # the head alone is protected too
    moved, best = run.checkpoints.rename(tmp_path / "elsewhere"), run.best.with_suffix(".ckpt")
    best = best.rename(moved / "best")
    for more in ((), ("--ckpt_path", "auto")):
        status, err = run.fit(4, *more)
        assert status == 2 and f"a run is in {run.head} already" in err
    best.rename(run.best.with_suffix(".ckpt"))
    moved.rename(run.checkpoints)

    # it goes on from the newest; one name stays one file
    status, err = run.fit(8)
    assert status == 0 and "4 done" in err
    assert run.step() == 8 and run.names() == ["last.ckpt", *(f"step-{n}.ckpt" for n in (2, 4, 6, 8))]

    # an older one is refused while newer ones are there, and so is another run's
    status, err = run.fit(10, "--ckpt_path", str(run.checkpoints / "step-4.ckpt"))
    assert status == 2 and "is newer than" in err
    other = Run(toys, tmp_path / "other")
    assert other.fit(2)[0] == 0
    status, err = run.fit(10, "--ckpt_path", str(other.checkpoints / "last.ckpt"))
    assert status == 2 and "another run's" in err
    assert run.step() == 8

    # unless what is newer may go
    assert run.fit(6, "--ckpt_path", str(run.checkpoints / "step-4.ckpt"), "--overwrite", "true")[0] == 0
    assert run.names() == ["last.ckpt", "step-2.ckpt", "step-4.ckpt", "step-6.ckpt"] and run.step() == 6

    # a fresh start in the same place
    head = (run.head / "model.safetensors").read_bytes()
    assert run.fit(2, "--model.seed", "1", "--overwrite", "true")[0] == 0
    assert run.names() == ["last.ckpt", "step-2.ckpt"] and run.step() == 2
    assert (run.head / "model.safetensors").read_bytes() != head


TWO_BATCHES = ["--trainer.accumulate_grad_batches", "2"]


@pytest.fixture(scope="module")
def uninterrupted(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The head of a run of four steps of two batches."""
    run = Run(toys, tmp_path_factory.mktemp("whole"))
    assert run.fit(4, *TWO_BATCHES)[0] == 0
    return run.head


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_saves_and_the_same_command_goes_on(
    number: signal.Signals, toys: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights at the end are those of a run that nobody interrupted, also after a scheduler's SIGTERM.

    The signal comes in the first of a step's two batches; others come in the second, too.
    """
    run = Run(toys, tmp_path / "run")
    step, begun = EagleModule.training_step, list[int]()

    def interrupted(self: Any, *args: Any) -> Any:
        begun.append(self.trainer.global_step)
        if begun[-1] == 2 and (number != signal.SIGINT or begun.count(2) == 1):
            signal.raise_signal(number)
        return step(self, *args)

    monkeypatch.setattr(EagleModule, "training_step", interrupted)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it
    logs = ["--trainer.logger", "lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir", str(run.root)]
    try:
        status, err = run.fit(4, *TWO_BATCHES, *logs, "--trainer.log_every_n_steps", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    saved = run.checkpoints / "interrupted.ckpt"
    assert status == 130 and err.splitlines()[-1] == "fsd-train fit: interrupted"
    assert err.count("ending after this step") == 1 and begun.count(2) == 2
    assert f"the same command goes on from {saved}" in err
    assert len(logged(run.root, "loss")) == 3, "that of the last step, too"
    assert run.step("interrupted.ckpt") == 3 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(EagleModule, "training_step", step)
    status, err = run.fit(4, *TWO_BATCHES)
    assert status == 0 and f"resuming {saved}" in err and run.step() == 4
    assert torch.equal(load_head(run.head).fc.weight, load_head(uninterrupted).fc.weight)


@pytest.mark.parametrize("amid", [True, False])
def test_a_signal_amid_or_before_a_validation_ends_the_run_and_it_comes_again(
    amid: bool, toys: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """The checkpoint holds what was before it, also where it measures averaged weights."""
    more = [*TWO_BATCHES, "--trainer.limit_val_batches", "3", "--trainer.val_check_interval", "4",
            "--data.validation_batch_tokens", "64", "--trainer.callbacks+",
            "lightning.pytorch.callbacks.EMAWeightAveraging"]  # fmt: skip
    whole, run = Run(toys, tmp_path / "whole"), Run(toys, tmp_path / "run")
    assert whole.fit(4, *more)[0] == 0
    begun, measured, trained = list[int](), EagleModule.validation_step, EagleModule.training_step

    def measure(self: Any, *args: Any) -> Any:
        begun.append(self.trainer.global_step)
        if amid and len(begun) == 2:
            signal.raise_signal(signal.SIGTERM)
        return measured(self, *args)

    def train(self: Any, *args: Any) -> Any:
        if not amid and not begun and self.trainer.global_step == 1:
            signal.raise_signal(signal.SIGTERM)
        return trained(self, *args)

    monkeypatch.setattr(EagleModule, "validation_step", measure)
    monkeypatch.setattr(EagleModule, "training_step", train)
    assert run.fit(4, *more)[0] == 130
    status, err = run.fit(4, *more)
    assert status == 0 and f"resuming {run.checkpoints / 'interrupted.ckpt'}" in err
    assert begun == [*[2, 2] * amid, *[2] * 3, *[4] * 3]
    found, wanted = (torch.load(each.checkpoints / "last.ckpt", weights_only=True) for each in (run, whole))
    best = torch.load(whole.root / "best.ckpt", weights_only=True)  # of a callback before the average in the recipe
    own = torch.load(whole.checkpoints / f"step-{best['global_step']}.ckpt", weights_only=True)
    for name in ("state_dict", "current_model_state"):
        assert_same(found[name], wanted[name])
        assert_same(best[name], own[name])
    begun.clear()
    status, err = run.call(["validate", *run.argv[1:], *more])
    assert not amid or status == 130 and err.endswith("fsd-train validate: interrupted\n") and len(begun) == 2


def test_ctrl_c_before_the_first_checkpoint_says_how_to_start_again(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was exported before is protected, so the same command alone would not start again."""
    run = Run(toys, tmp_path / "run")

    def at_once(self: Any, *args: Any) -> Any:
        run.head.mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(EagleModule, "training_step", at_once)
        status, err = run.fit(2)
    assert status == 130 and f"{run.head} is there, but no checkpoint: --overwrite true starts again" in err
    assert run.fit(2)[0] == 2 and run.fit(2, "--overwrite", "true")[0] == 0


def test_a_kill_amid_exports_costs_nothing(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first checkpoint the same command starts again; a head that was being replaced is put back."""
    run, replace, kept = Run(toys, tmp_path / "run", every=3), os.replace, tmp_path / "run" / "head.old"
    recipe = json.loads((run.root / "recipe.json").read_text())
    recipe["trainer"]["callbacks"][1]["init_args"]["every_n_train_steps"] = 1
    (run.root / "recipe.json").write_text(json.dumps(recipe))
    kept.mkdir()

    def renaming(source: Any, place: Any) -> None:
        replace(source, place)
        if Path(source) == run.head:
            raise KeyboardInterrupt

    def training(*_: Any) -> None:
        assert not run.names() and load_head(run.head)
        raise KeyboardInterrupt

    for owner, name, killed in ((os, "replace", renaming), (EagleModule, "training_step", training)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, killed)
            assert run.fit(4)[0] == 130
    status, err = run.fit(4, "--model.seed", "1")
    assert status == 2 and "It has no checkpoint to resume" in err
    status, err = run.fit(4)
    assert status == 0 and f"{run.head} is of a run that was killed before its first checkpoint" in err
    assert kept.is_dir() and not [path for path in run.root.iterdir() if path.name.startswith(".head")]


def test_checkpoints_are_written_beside_their_place(toys: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """They need no room elsewhere, and a full disk leaves the earlier ones, whole."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    run = Run(toys, tmp_path / "run")
    assert run.fit(2)[0] == 0
    save, before = torch.save, (run.checkpoints / "last.ckpt").read_bytes()

    def full(state: Any, place: Any, *args: Any) -> None:
        if not hasattr(place, "name") or ".ckpt" not in place.name or state["global_step"] < 4:
            return save(state, place, *args)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
        try:
            return save(state, place, *args)  # after the disk's error torch's writer raises its own
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(torch, "save", full)
    status, err = run.fit(4)
    assert status == 2 and err.strip().endswith("ckpt: File too large")
    assert (run.checkpoints / "last.ckpt").read_bytes() == before
    assert [path.name for path in run.root.rglob("*.partial")] == []


def test_two_runs_do_not_write_one_directory(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused while the first trains, and what a killed run left of a checkpoint is removed."""
    first, second = (Run(toys, tmp_path / "run") for _ in range(2))
    first.checkpoints.mkdir()
    torn = first.checkpoints / ".step-2.ckpt.1-1.partial"
    torn.write_bytes(b"torn")
    step, refused = EagleModule.training_step, list[tuple[int, str]]()

    def beside(self: Any, *args: Any) -> Any:
        if not refused:
            refused.append(second.fit(2))
        return step(self, *args)

    monkeypatch.setattr(EagleModule, "training_step", beside)
    assert first.fit(2)[0] == 0 and not torn.exists()
    (status, err), *_ = refused
    assert status == 2 and f"another run is writing {first.checkpoints}" in err
    assert first.fit(4)[0] == 0  # the lock ends with the run


def test_what_ended_meanwhile_is_kept(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run chose its checkpoint, none; another one of the same directories ended before this one had read its data."""
    run, read, begun = Run(toys, tmp_path / "run"), AnswersDataModule.setup, list[str]()

    def slowly(self: Any, stage: Any = None) -> None:
        begun.append("")
        assert len(begun) > 1 or run.fit(4)[0] == 0
        read(self, stage)

    monkeypatch.setattr(AnswersDataModule, "setup", slowly)
    status, err = run.fit(2)
    assert status == 2 and f"another run wrote to {run.checkpoints}" in err
    assert run.step() == 4 and run.fit(6)[0] == 0 and run.step() == 6


def test_auto_takes_the_newest_that_is_whole(toys: Path, tmp_path: Path) -> None:
    run = Run(toys, tmp_path / "run")
    validate = ["validate", *run.argv[1:], "--trainer.limit_val_batches", "1", "--ckpt_path", "auto"]
    status, err = run.call(validate)
    assert status == 2 and f"no checkpoint in {run.checkpoints}" in err
    status, err = run.fit(4, "--ckpt_path", "auto")
    assert status == 0 and "from the beginning" in err  # there is none yet
    status, err = run.call(validate)
    assert status == 0 and f"validating {run.checkpoints / 'last.ckpt'}" in err
    status, err = run.call([*validate[:-2], "--data.validation_fraction", "0"])
    assert status == 2 and "the initial weights" in err and "no batch to validate" in err
    for name in ("last.ckpt", "step-4.ckpt"):  # killed while it was saved
        path = run.checkpoints / name
        path.write_bytes(path.read_bytes()[:1000])
    (tmp_path / "run" / "best.ckpt").unlink()
    status, err = run.fit(6)
    assert status == 0 and err.count("step-4.ckpt is truncated") == 1 and "2 done" in err
    assert run.step() == 6
    for path in run.checkpoints.glob("*.ckpt"):
        path.write_bytes(b"no checkpoint")
    (tmp_path / "run" / "best.ckpt").unlink(missing_ok=True)
    status, err = run.fit(8, "--ckpt_path", "auto")
    assert status == 2 and "truncated or no Lightning checkpoint" in err


def test_the_head_that_decodes_best_is_kept(toys: Path, tmp_path: Path) -> None:
    run = Run(toys, tmp_path / "run", every=5)
    before = os.umask(0o022)
    try:
        assert run.fit(15)[0] == 0
    finally:
        os.umask(before)
    files = [path for head in (run.head, run.best) for path in head.iterdir()]
    assert files and {oct(path.stat().st_mode & 0o777) for path in files} == {"0o644"}  # others can read them
    assert run.fit(25, "--ckpt_path", "auto")[0] == 0
    taus: dict[int, float] = dict(run.curves()["decoded_tau/exact"])
    assert sorted(taus) == [5, 10, 15, 20, 25]
    first_best = next(step for step in sorted(taus) if taus[step] == max(taus.values()))
    kept = torch.load(tmp_path / "run" / "best.ckpt", weights_only=True)
    assert kept["global_step"] == first_best
    assert torch.equal(load_head(run.best).fc.weight, kept["state_dict"]["head.fc.weight"].bfloat16().float())
    assert json.loads((run.best / "config.json").read_text())["training"]["steps"] == first_best


def test_an_export_replaces_no_model_and_no_checkpoints(toys: Path, tmp_path: Path) -> None:
    """A head's directory is replaced as a whole, and so are the files that `export` writes."""
    for head in (tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "run" / "best"):
        run = Run(toys, tmp_path / "run", head=head, best=tmp_path / "run" / "best" / "best")
        status, err = run.fit(2)
        assert status == 2 and f"{head} is replaced by each export, and " in err
    copy = Path(shutil.copytree(toys / "target", tmp_path / "copy"))
    before = (copy / "model.safetensors").read_bytes()
    said = f"{copy} holds a model, which the export would replace"
    status, err = Run(toys, tmp_path / "other", head=copy).fit(2, "--overwrite", "true")
    assert status == 2 and said in err
    run = Run(toys, tmp_path / "third")
    assert run.fit(2)[0] == 0
    for more in ([], ["--to", "eagle"]):
        source = str(run.checkpoints / "last.ckpt")
        status, err = run.call(["export", source, str(copy), *more])
        assert status == 2 and said in err and (copy / "model.safetensors").read_bytes() == before
        for _ in range(2):  # a head may be written again
            assert run.call(["export", source, str(tmp_path / "written"), *more, "--overwrite"])[0] == 0


@pytest.mark.parametrize("place", ["checkpoints", "head", "best"])
def test_unwritable_directories(place: str, toys: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    elsewhere: dict[str, Any] = {place: tmp_path / "file" / "x"}
    run = Run(toys, tmp_path / "run", **elsewhere)
    status, err = run.fit(5)
    assert status == 2 and err.count("\n") == 1 and f"{tmp_path / 'file'} is a file" in err
