"""What the installed program says of itself and lacks, also on other systems; the report of `env` and completion."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from fsd_bench.cli import build_parser as build_bench_parser
from fsd_bench.cli import main as fsd_bench
from fsd_core.errors import ModelLoadError
from fsd_infer.backends.cpu import sets
from fsd_infer.backends.cpu.kernels import kernels
from fsd_infer.backends.cpu.sets import VARIABLE
from fsd_infer.cli import env as module
from fsd_infer.cli.main import COMMANDS, build_parser, main
from fsd_infer.cli.main import main as fsd_infer
from fsd_infer.targets import builtin
from fsd_train.cli import main as fsd_train
from tests.conftest import Toy
from tests.fuzzing import called


def test_a_package_without_the_maths_adapter_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "SHIPPED", tmp_path)
    with pytest.raises(ModelLoadError, match="the adapter of smollm2-135m-maths is in the repository alone"):
        builtin.builtin_adapter("smollm2-135m-maths")
    assert builtin.builtin_adapter("smollm2-135m") is None


README = "[a](docs/a.md#b) [b](recipes) [c](https://x.org/c) [d](#d)\n```python\nf[0](docs/a.md)\n```\n"
MASKED = """
import os, platform, sys
from importlib.abc import MetaPathFinder
from pathlib import Path
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, LlamaForCausalLM  # not ours to mask

class Lacks(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname in ("fcntl", "resource", "pwd", "grp", "termios"):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Lacks())
for name in ("sched_getaffinity", "sched_setaffinity", "sysconf", "register_at_fork", "getuid", "getloadavg"):
    if hasattr(os, name):
        delattr(os, name)
system, machine = next((each for each in SYSTEMS if os.fork() == 0), (None, None))  # each in a process of its own
if system is None:
    sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in SYSTEMS))
platform.machine, platform.system = lambda: machine, lambda: system
read_text, listdir = Path.read_text, os.listdir

def refuse(read):
    def checked(path, *args, **kwargs):
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(path)
        return read(path, *args, **kwargs)
    return checked

Path.read_text, os.listdir = refuse(read_text), refuse(listdir)
os.environ["PATH"] = ""
os.environ.pop("CXX", None)

from fsd_infer import FuzzyDecoder

def decoded(dtype, drafter):
    decoder = FuzzyDecoder.from_pretrained(TARGET, drafter, device="cpu", dtype=dtype)
    return decoder.generate([[5, 6, 7]], max_new_tokens=8, do_sample=False).sequences

assert decoded("fp32", DRAFTER) == decoded("fp32", "none")
assert len(decoded("bf16", "none")[0]) == 8
assert "fsd_infer.backends.cpu.build" not in sys.modules
print(f"decoded on {system}")
"""
SYSTEMS = [("Darwin", "arm64"), ("Windows", "AMD64")]


def test_decoding_without_what_linux_and_x86_have(toy: Toy) -> None:
    """In processes that lack the modules, files, calls and compiler that only Linux on x86-64 has."""
    script = MASKED
    for name, value in {"SYSTEMS": SYSTEMS, "TARGET": str(toy.target), "DRAFTER": str(toy.drafter)}.items():
        script = script.replace(name, repr(value))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    said = sorted(done.stdout.splitlines())
    assert done.returncode == 0 and said == ["decoded on Darwin", "decoded on Windows"], done.stderr[-3000:]


# `fsd-infer env` ------------------------------------------------------------------------------------------------------


def facts(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["env", "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_it_says_what_a_report_needs(fresh: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fresh.setenv("OMP_WAIT_POLICY", "PASSIVE")
    fresh.setenv("FSD_API_KEY", "not for others")
    found = facts(capsys)
    compiled = kernels()
    assert found["kernels"]["set"] == (None if compiled is None else compiled.name)
    for name in ("fsd_infer", "commit", "torch", "transformers", "python", "system", "cpu", "cores", "threads", "date"):
        assert name in found
    assert found["variables"]["OMP_WAIT_POLICY"] == "PASSIVE" and "FSD_API_KEY" not in found["variables"]
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for word in (found["torch"], found["cpu"], "OMP_WAIT_POLICY=PASSIVE", "what runs where", found["kernels"]["why"]):
        assert word in out
    assert "not for others" not in out


def test_other_machines_and_wrong_settings(fresh: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fresh.setenv("CXX", "/no/such/compiler")
    fresh.setenv(VARIABLE, "fast")
    found = facts(capsys)
    assert found["kernels"]["set"] is None and "FSD_KERNELS='fast' names no kernels" in found["kernels"]["why"]
    assert found["kernels"]["compiler"].startswith("none: ") and "/no/such/compiler" in found["kernels"]["compiler"]
    fresh.delenv(VARIABLE)
    fresh.setattr(sets, "cpu_flags", lambda: {"avx", "fma"})
    fresh.setattr(sets.platform, "machine", lambda: "x86_64")
    assert "torch, because the processor lacks avx2, f16c, popcnt" in module.text(facts(capsys))


# completion -----------------------------------------------------------------------------------------------------------


COMPLETED = [
    (fsd_infer, "fsd-infer gen", "generate"),
    (fsd_infer, "fsd-infer wor", "worth"),  # of fsd-bench
    (fsd_infer, "fsd-infer generate --color ", "auto always never"),
    (fsd_infer, "fsd-infer generate --html ", ""),  # a file
    (fsd_bench, "fsd-bench run --met", "--methods"),
    (fsd_train, "fsd-train fit --trainer.max_s", "--trainer.max_steps"),
    (fsd_train, "fsd-train export x --to eag", "eagle"),
]
ZSH = "compdef() { }; compadd() { shift; print -r -- $@ }; _files() { }; "


@pytest.mark.parametrize(("program", "line", "offered"), COMPLETED)
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


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (
            "https://host/us/it",
            "[a](https://host/us/it/blob/main/docs/a.md#b) [b](https://host/us/it/tree/main/recipes)",
        ),
        ("", "a b"),
    ],
)
def test_the_readme_of_an_index_has_no_dead_links(repo_root: Path, address: str, expected: str) -> None:
    readme = runpy.run_path(str(repo_root / "setup.py"))["readme"]
    rest = README.partition("[c]")[2]
    assert readme(README, address) == f"{expected} [c]{rest}"
    whole = readme((repo_root / "README.md").read_text(encoding="utf-8"), address)
    assert "](docs/" not in whole and "](benchmarks/" not in whole and "](LICENSE" not in whole


def test_each_package_knows_its_own_commands() -> None:
    """And `fsd-infer` finds those that `fsd-bench` offers under the names they had before."""
    [ours], [theirs] = (
        [list(action.choices) for action in parser._actions if isinstance(action.choices, dict)]
        for parser in (build_parser(), build_bench_parser())
    )
    assert tuple(ours) == COMMANDS
    offered = {point.name: point.value for point in entry_points(group="fsd_infer.commands")}
    before = {"bench", "sweep", "calibrate", "worth", "estimate", "skip-layers"}
    assert offered == dict.fromkeys(before, "fsd_bench.cli:main") and before - {"bench"} < set(theirs)
