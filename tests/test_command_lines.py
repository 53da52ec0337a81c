"""How both command lines end: one line and an exit status, whatever goes wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsd_infer.cli.main import build_parser
from fsd_infer.cli.options import gibibytes, positive, real_number, thread_count, whole_number
from fsd_infer.cli.run import BAD_INPUT, BROKEN_PIPE, INTERRUPTED, UNEXPECTED, run
from fsd_infer.errors import FsdError
from fsd_infer.files import writable, write_text
from fsd_infer.registry import read_float, read_int
from fsd_train.commands.command_lines import PARSERS


def raiser(error: BaseException) -> object:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (FsdError("a bad\n  thing: fix it"), BAD_INPUT, "prog: a bad thing: fix it"),
        (IsADirectoryError(21, "Is a directory", "there"), BAD_INPUT, "prog: there: Is a directory"),
        (OSError("no space"), BAD_INPUT, "prog: no space"),
        (MemoryError(), BAD_INPUT, "prog: out of memory: ask for less"),
        (ModuleNotFoundError(name="peft.tuners"), BAD_INPUT, "prog: the package peft is not installed: pip install"),
        (ModuleNotFoundError("use `pip install x`"), BAD_INPUT, "prog: use `pip install x`"),
        (KeyboardInterrupt(), INTERRUPTED, "prog: interrupted"),
        (BrokenPipeError(32, "Broken pipe"), BROKEN_PIPE, ""),
    ],
)
def test_errors_end_in_one_line(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("prog", raiser(error)) == status  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == bool(line)


def test_an_error_of_the_program_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("fsd-train fit", raiser(TypeError("no\nway"))) == UNEXPECTED  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert err.startswith("fsd-train fit: unexpected TypeError: no way (a bug;") and err.count("\n") == 1
    file = Path(re.findall(r"is in (.*)\)", err)[0])
    assert file.parent == tmp_path and "raise error" in file.read_text()
    with pytest.raises(TypeError):
        run("prog", raiser(TypeError("no")), debug=True)  # type: ignore[arg-type]


def test_a_pipe_that_closes_early_is_no_error() -> None:
    script = "from fsd_infer.cli.run import run; run('p', lambda: print('x\\n' * 10**6))"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 0


@pytest.mark.parametrize(
    ("text", "number", "value"),
    [
        ("-7", -7, -7.0), ("007", 7, 7.0), (".5", None, 0.5), ("1e-3", None, 1e-3), ("inf", None, float("inf")),
        *((text, None, None) for text in ("", "0_1", " 1", "1\n", "\u0661", "1e400", "1e-400", "nan", "0x1", "1,5")),
        ("9" * 5000, None, None),
    ],
)  # fmt: skip
def test_numerals(text: str, number: int | None, value: float | None) -> None:
    assert read_int(text) == number and read_float(text) == value


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (positive, ["0", "-1", "1.5", "2147483648", "9" * 5000]),
        (thread_count, ["0", "100000"]),
        (real_number, ["much", "1e400", "0_1"]),
        (gibibytes, ["0", "-1", "inf", "1e308"]),
        (whole_number(0, 5), ["-1", "6"]),
    ],
)
def test_options_within_what_makes_sense(kind: object, bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    parser.add_argument("--try", type=kind)  # type: ignore[arg-type]
    for text in bad:
        with pytest.raises(SystemExit) as stop:
            parser.parse_args([f"--try={text}", "rules"])
        assert stop.value.code == BAD_INPUT
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and err.startswith("fsd-infer: argument --try: "), "one line, without the usage"


MISSING = [
    ("scipy", "fsd_infer", "bench --prompts none.jsonl", "bench"),
    ("scipy", "fsd_infer", "sweep --prompts none.jsonl --rules exact --output x", "bench"),
    ("scipy", "fsd_infer", "calibrate --prompts x --rules exact --at-most-nats 1 --output x", "bench"),
    ("lightning", "fsd_train", "fit --help", "train"),
    ("jsonargparse", "fsd_train", "fit --help", "train"),
]
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
from fsd_infer.cli.main import main as fsd_infer
from fsd_train.cli import main as fsd_train

class Without(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

sys.meta_path.insert(0, Without())
for package, program, command, _ in CASES:
    print(globals()[program](command.split()))
"""


def test_a_package_that_is_not_installed_is_named() -> None:
    """In a process of its own, which imports none of them before."""
    script = WITHOUT.replace("CASES", repr(MISSING))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(BAD_INPUT)] * len(MISSING), done.stderr
    for line, (package, _, _, extra) in zip(done.stderr.splitlines(), MISSING, strict=True):
        assert f"package {package} is not installed: pip install 'fsd-toolkit[{extra}]'" in line


INFER = ("generate", "bench", "sweep", "calibrate", "warmup")
HELP = {
    "fsd_infer.cli.main": [["--help"], *([name, "--help"] for name in INFER), ["generate", "--no-such-option"]],
    "fsd_train.cli": [["--help"], *([name, "--help"] for name in PARSERS), ["export", "--no-such-option"]],
}
HEAVY = """
import sys
from contextlib import suppress
from MODULE import main
for argv in CASES:
    with suppress(SystemExit):
        main(argv)
    heavy = {"torch", "transformers", "numpy", "lightning"} & set(sys.modules)
    assert not heavy, (argv, heavy)
"""


@pytest.mark.parametrize("module", HELP)
def test_help_imports_nothing_heavy(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes several seconds, where a command should answer in a fraction."""
    monkeypatch.setenv("FSD_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    script = HEAVY.replace("MODULE", module).replace("CASES", repr(HELP[module]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["pipe", "directory", "", "file/x", "a\0b", "x" * 300])
def test_what_cannot_be_written_is_found_before_the_work(name: str, tmp_path: Path) -> None:
    """And nothing but a file is ever replaced, which a rename onto a device would do."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(FsdError, match="cannot be written|no name"):
        writable(f"{tmp_path}/{name}", "the record")
    if name in ("pipe", "directory"):
        with pytest.raises(FsdError, match="is no file and is not replaced"):
            write_text(tmp_path / name, "")
    assert writable(tmp_path / "new" / "record.json", "the record").parent.is_dir()
