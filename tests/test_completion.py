"""Shell completion: the scripts hold every command and option, and a shell completes by them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fsd_bench.cli import main as fsd_bench
from fsd_infer.cli.main import main as fsd_infer
from fsd_train.cli import main as fsd_train
from tests.fuzzing import called

CASES = [
    (fsd_infer, "fsd-infer gen", "generate"),
    (fsd_infer, "fsd-infer wor", "worth"),  # of fsd-bench
    (fsd_infer, "fsd-infer generate --color ", "auto always never"),
    (fsd_infer, "fsd-infer generate --html ", ""),  # a file
    (fsd_bench, "fsd-bench run --met", "--methods"),
    (fsd_train, "fsd-train fit --trainer.max_s", "--trainer.max_steps"),
    (fsd_train, "fsd-train export x --to eag", "eagle"),
]
ZSH = "compdef() { }; compadd() { shift; print -r -- $@ }; _files() { }; "


@pytest.mark.parametrize(("program", "line", "offered"), CASES)
def test_a_shell_completes(program: object, line: str, offered: str, tmp_path: Path) -> None:
    words = line.split(" ")
    name = f"_{words[0].replace('-', '_')}"
    script = tmp_path / "script"
    for shell in filter(shutil.which, ("bash", "zsh")):
        status, text, err = called(program, ["completion", shell])
        assert status == 0 and not err
        script.write_text(text)
        if shell == "bash":
            listed = " ".join(f"'{word}'" for word in words)
            code = f"COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; {name}; echo ${{COMPREPLY[*]}}"
        else:
            code = f"words=({' '.join(words[:-1])} '{words[-1]}'); CURRENT={len(words)}; {ZSH}{name}"
        done = subprocess.run(
            [shell, "-c", f"{ZSH if shell == 'zsh' else ''}source {script}; {code}"], capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        found = done.stdout.split()
        assert found == offered.split() if shell == "bash" else set(offered.split()) <= set(found), (shell, done.stderr)
