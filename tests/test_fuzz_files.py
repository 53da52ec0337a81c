"""Malformed files of every kind that a command reads end in one line and status 2, or in success; none is lost."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from fsd_bench.record import write_record
from fsd_core.console import BAD_INPUT
from fsd_infer.cli.main import main as infer
from fsd_train.cli import main as train
from tests.fuzzing import FUZZ, called, one_line, spoilt
from tests.test_adapters import save_adapter
from tests.test_blocks import save_model
from tests.text_toys import save_tiny_chat_target, write_rows
from tests.train_toys import TRAINER, in_recipe

MODELS = "--target target --drafter head --dtype fp32"
SHORT = f"{MODELS} --prompts prompts.jsonl --limit 2 --max-new-tokens 2"
REGENERATE = "regenerate --config recipe.yaml --prompts prompts.jsonl --output made.jsonl --quiet --max-new-tokens 4"
SWEEP = f"sweep {SHORT} --rules fuzzy:js:0.3 --output sweep.jsonl --html sweep.html"
BENCH = f"bench {SHORT} --methods plain,exact --no-warmup --json bench.json"
CALIBRATE = f"calibrate {SHORT} --verify others.jsonl --rules fuzzy:js:0.3 --at-most-nats 2 --output calibrated"

# command: the files and directories to spoil, one at a time
COMMANDS: dict[str, tuple[str, ...]] = {
    "doctor --target target --head head --data answers.jsonl --features features --rows 2 --max-new-tokens 2": (
        "answers.jsonl", "features", "features/index.json",
        "features/shard-00000.safetensors", "head", "head/config.json", "head/model.safetensors",
    ),
    "estimate --config recipe.yaml": (
        "recipe.yaml", "answers.jsonl", "features/index.json",
    ),
    "export head.ckpt exported": ("head.ckpt", "target", "target/config.json"),
    "export head exported --to vllm": ("head", "head/config.json", "head/model.safetensors", "target/config.json"),
    "export head exported --draft-vocab-size 100 --data answers.jsonl": ("answers.jsonl",),
    "new-recipe --target target --data answers.jsonl --output new.yaml": ("answers.jsonl", "target/config.json"),
    "cache-features --config recipe.yaml --dtype float32": (
        "recipe.yaml", "answers.jsonl", "features", "features/index.json",
        "features/shard-00000.safetensors", "target/model.safetensors",
    ),
    REGENERATE: ("recipe.yaml", "prompts.jsonl", "made.jsonl", "made.meta.json", "target/tokenizer.json"),
    SWEEP: ("prompts.jsonl", "sweep.jsonl", "sweep.html"),
    f"{BENCH} --resume": ("prompts.jsonl", "bench.json", "bench.json.partial.jsonl"),
    CALIBRATE: ("prompts.jsonl", "calibrated", "head/calibrated.json", "calibrated/calibration.jsonl"),
    f"generate {MODELS} --rule calibrated --prompt cat --max-new-tokens 2": ("head/calibrated.json",),
    "generate --target adapter --drafter none --dtype fp32 --prompt cat --max-new-tokens 2": (
        "adapter", "adapter/adapter_config.json", "adapter/adapter_model.safetensors", "target/model.safetensors",
    ),
    "generate --target tiny.gguf --drafter lookup --prompt the --max-new-tokens 2": ("tiny.gguf",),
}  # fmt: skip
CASES = [(command, name) for command, names in COMMANDS.items() for name in names]


def call(command: str) -> tuple[int, str]:
    """Return (exit status, stderr)."""
    argv = command.split()
    status, _, err = called(infer if argv[0] in ("generate", "bench", "sweep", "calibrate") else train, argv)
    return status, err


def keep_partial(path: Path, record: Any) -> None:
    """Write a record, and keep a copy of the runs that the command then removes."""
    shutil.copy(f"{path}.partial.jsonl", "kept.jsonl")
    write_record(path, record)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with all that the commands read, and the output of those that resume."""
    root = tmp_path_factory.mktemp("world")
    save_tiny_chat_target(root / "target")
    save_model(root / "tiny.gguf")
    write_rows(root / "prompts.jsonl", [{"prompt": "the cat", "answer": "1"}, {"turns": ["it is", "the end"]}])
    write_rows(root / "others.jsonl", [{"prompt": "there"}])
    rows = [{"messages": [{"role": "user", "content": "the"}], "response": "cat sat on the mat"}] * 4
    write_rows(root / "answers.jsonl", [{**row, "id": str(number)} for number, row in enumerate(rows)])
    save_adapter(root / "adapter", AutoModelForCausalLM.from_pretrained(root / "target"), "../target")
    checkpoint = in_recipe("ModelCheckpoint", dirpath="run", save_last=True)
    trainer = {"max_steps": 1, "limit_val_batches": 0, "default_root_dir": "run", "callbacks": [checkpoint]}
    recipe = {
        "trainer": {**TRAINER, **trainer},
        "model": {"target": "target", "head": {"final_norm": True}, "unroll_steps": 1},
        "data": {
            "train_files": ["answers.jsonl"], "tokenizer": "target", "validation_fraction": 0.0, "batch_tokens": 256,
            "features": "features",
        },
    }  # fmt: skip
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    made = ["cache-features --config recipe.yaml --dtype float32", "fit --config recipe.yaml"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("fsd_bench.runner.write_record", keep_partial)
        for command in (*made, "export run/last.ckpt head", REGENERATE, SWEEP, BENCH, CALIBRATE):
            status, said = call(command)
            assert status == 0, said
    shutil.move(root / "kept.jsonl", root / "bench.json.partial.jsonl")
    shutil.copy(root / "run" / "last.ckpt", root / "head.ckpt")
    for name in ("made.jsonl", "sweep.jsonl", "bench.json.partial.jsonl", "calibrated/calibration.jsonl"):
        lines = (root / name).read_text().splitlines(keepends=True)
        (root / name).write_text("".join(lines[:-1]))  # so that a row is missing
    (root / "bench.json").unlink()
    return root


KINDS = ("cut", "overwrite", "replace", "value", "value", "value", "remove", "directory", "link", "foreign")
FOREIGN = [
    b"", b"\0" * 100, b"null\n", b"3\n", b"[]", b"{}", b"{}\n", b"[[[[", b"[" * 10**5, b"\xff\xfe{}", b"- 3", b"a: [",
    b"a: b", b"&a [*a]", b"!!python/object:a.b {}", b'{"a": ' + b"9" * 5000 + b"}", b"\x1f\x8b\x08\0", b"PK\3\4",
    b"\xff" * 8 + b"{}", b"\2\0\0\0\0\0\0\0{}", save({"x": torch.ones(2)}), b'{"turns": [1]}', b'"x"\n"y"\n',
]  # fmt: skip


def spoil(path: Path, draw: Any) -> None:
    """Cut, overwrite, replace or remove a file or directory."""
    kind = draw(st.sampled_from(KINDS))
    content = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind in ("cut", "overwrite", "replace") and content:
        at = draw(st.integers(0, len(content)) | st.integers(0, min(len(content), 200)))
        junk = b"" if kind == "cut" else draw(st.binary(max_size=9))
        path.write_bytes(content[:at] + junk + (content[at + len(junk) :] if kind == "overwrite" else b""))
    elif kind == "value" and content and path.suffix in (".json", ".jsonl", ".yaml"):
        text = content.decode()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        place = draw(st.integers(0, len(lines) - 1))
        value = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(lines[place])
        path.write_text("\n".join([*lines[:place], json.dumps(spoilt(value, draw)), *lines[place + 1 :], ""]))
    elif kind == "directory":
        path.mkdir()
        if draw(st.booleans()):
            (path / "x").write_bytes(b"x")
    elif kind == "link":
        path.symlink_to(draw(st.sampled_from([path.name, "nowhere", "/dev/null"])))
    elif kind != "remove":
        path.write_bytes(draw(st.sampled_from(FOREIGN) | st.binary(max_size=20)))


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def check(command: str, name: str, root: Path, draw: Any) -> int:
    """Spoil a file in a copy of the world, run the command there, and check how it ends."""
    spoil(root / name, draw)
    before = files(root)
    status, said = call(command)
    assert status in (0, 1 if command.startswith("doctor") else 0, BAD_INPUT), said
    assert "Traceback" not in said and "(a bug" not in said, said
    if status == BAD_INPUT:
        one_line(said.strip().splitlines()[-1])
        after = files(root)
        for lost in [file for file, content in before.items() if not after.get(file, b"").startswith(content)]:
            whole = before[lost].rpartition(b"\n")[0]
            assert lost in after and len(after[lost]) >= len(whole) > 0, f"{lost} is lost: {said}"
    return status


@pytest.mark.parametrize("cases", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_a_spoilt_file_ends_in_one_line_and_nothing_is_lost(
    cases: int, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "copy"

    @settings(FUZZ, max_examples=cases)
    @given(data=st.data())
    def each(data: st.DataObject) -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(world, root)
        monkeypatch.chdir(root)
        command, name = data.draw(st.sampled_from(CASES))
        check(command, name, root, data.draw)

    each()


LIMITS = [
    ("export head.ckpt head --overwrite", "head/model.safetensors", 5_000),
    ("cache-features --config recipe.yaml --dtype float32", "features/shard-00000.safetensors", 800),
    ("fit --config recipe.yaml --ckpt_path auto --trainer.max_steps 2", ".ckpt", 20_000),
    (REGENERATE, "made.jsonl", 50),
    (SWEEP, "sweep.jsonl", 50),
    (f"{BENCH} --resume", "bench.json.partial.jsonl", 50),
]


@pytest.mark.parametrize(("command", "name", "size"), LIMITS)
def test_a_full_disk_is_named_and_a_rerun_succeeds(
    command: str, name: str, size: int, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that reaches the size limit is named, files from before are kept, and a rerun succeeds."""
    root = shutil.copytree(world, tmp_path / "copy")
    monkeypatch.chdir(root)
    if command.startswith("cache"):
        for file in (root / "features").glob("shard*"):
            file.unlink()
    before = files(root)
    limit = size + (len(before[name]) if name.endswith(".jsonl") else 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        status, said = call(command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == BAD_INPUT, said
    assert said.strip().splitlines()[-1].endswith("File too large") and "Traceback" not in said
    assert name in said
    after = files(root)
    changed_files = [file for file, content in before.items() if not after.get(file, b"").startswith(content)]
    assert set(changed_files) <= {"run/config.yaml"}  # the settings of the resumed run
    status, said = call(command)
    assert status == 0, said
