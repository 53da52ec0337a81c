"""The cache of compiled kernels: whatever lies there, a process loads a whole library, compiles one, or does without.

Damage is loaded in processes of their own, since what goes wrong there is a signal. The compiler is a script that
writes a library made beforehand and counts its calls.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsd_infer import FuzzyDecoder, NoDrafter, Target
from fsd_infer.cpu import kernels as module
from fsd_infer.cpu.ops import speed_up, stack_of
from tests.families import VOCAB, tiny_model, tiny_prompts

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

LOAD = """
import ctypes, logging, os, sys
from fsd_infer.cpu import build
logging.basicConfig(stream=sys.stdout, format="%(message)s")
build.cpu_flags = lambda: set(os.environ["FLAGS"].split())  # whatever the machine has
print(build.build(lambda path: ctypes.CDLL(str(path)).fsd_answer()))
"""


class Place:
    """A cache of its own and a compiler that counts its calls."""

    def __init__(self, directory: Path) -> None:
        self.cache, self.count = directory / "cache", directory / "count"
        self.library, self.foreign = directory / "made.so", directory / "foreign.so"
        for file, code in (
            (self.library, "int fsd_answer(void) { return 42; } char big[100000] = {1};"),
            (self.foreign, "int something_else(void) { return 1; }"),
        ):
            command = [str(COMPILER), "-shared", "-fPIC", "-x", "c", "-", "-o", str(file)]
            subprocess.run(command, input=code.encode(), check=True)
        self.works = f'echo x >> {self.count}; cat > /dev/null; for out; do :; done; cp {self.library} "$out"'
        self.compiler = self.script("compiler 1", self.works)

    def script(self, version: str, work: str) -> str:
        """A compiler that says so of its version."""
        file = self.count.with_name(version.replace(" ", "-"))
        file.write_text(f'#!/bin/sh\ncase "$*" in *--version) echo "{version}"; exit;; esac\n{work}\n')
        file.chmod(0o755)
        return str(file)

    def run(self, compiler: str | None = None, flags: str = "", **variables: str) -> tuple[str, int]:
        """(last line a new process prints, calls of the compiler so far); "None" where there are no kernels.

        flags: of the processor.
        """
        compiler = self.compiler if compiler is None else compiler
        environment = {**os.environ, "FSD_CACHE": str(self.cache), "FLAGS": flags, "CXX": compiler, **variables}
        done = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-500:]}"
        calls = self.count.read_text().count("x") if self.count.exists() else 0
        return done.stdout.strip().splitlines()[-1], calls

    def run_without_compiler(self) -> tuple[str, int]:
        """As :meth:`run`, on a machine that has none."""
        return self.run("", PATH=str(self.cache / "nothing"))

    @property
    def cached(self) -> Path:
        [file] = (self.cache / "kernels").glob("*.so")
        return file


@pytest.fixture
def place(tmp_path: Path) -> Place:
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    return Place(tmp_path)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_library_is_compiled_once_and_again_if_it_is_damaged(foreign: bool, place: Place) -> None:
    assert place.run_without_compiler() == ("None", 0)
    assert place.run() == ("42", 1) and place.run() == ("42", 1)
    assert place.run_without_compiler() == ("42", 1), "a cache serves where there is no compiler"
    cached, content = place.cached, place.cached.read_bytes()
    damaged = place.foreign.read_bytes() if foreign else content[:-1]
    cached.write_bytes(damaged)
    assert place.run() == ("42", 2)
    assert place.cached == cached and cached.read_bytes() == content
    cached.write_bytes(damaged)
    assert place.run_without_compiler() == ("None", 2)


@pytest.mark.parametrize("flags, found", [("", ("None", 1)), ("amx_tile amx_bf16", ("42", 2))])
def test_an_intact_library_of_another_source_is_not_loaded(flags: str, found: tuple[str, int], place: Place) -> None:
    place.run(flags=flags)
    cached = place.cached
    content = place.foreign.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:32]
    cached.with_name(f"{cached.stem.rpartition('-')[0]}-{digest}.so").write_bytes(content)
    cached.unlink()
    message = "its symbols are not there: kernels without AMX are tried; if none are left, that is a warning"
    assert place.run(flags=flags) == found, message


def test_compilers_that_fail(place: Place) -> None:
    for work in ("echo broken >&2; exit 1", "true"):
        assert place.run(place.script("failing", work)) == ("None", 0)
    assert place.run("/no/such/compiler") == ("None", 0)
    old = place.script("old", f'case "$*" in *amx*) exit 1;; esac\n{place.works}')
    assert place.run(old, flags="amx_tile amx_bf16") == ("42", 1), "one that knows no AMX compiles without"


@pytest.mark.parametrize("compiler, said", [(None, "Install g++"), ("false", "slower")])
def test_without_a_compiler_decoding_runs_and_says_so(
    compiler: str | None, said: str, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fresh.setenv("FSD_CACHE", str(tmp_path))
    fresh.setattr(module, "cpu_flags", lambda: module.NEEDED)
    fresh.setattr(shutil, "which", lambda name: None)
    if compiler:
        fresh.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING, "fsd_infer.cpu.build"):
        assert module.kernels() is None
    assert said in caplog.text
    model = tiny_model("llama").bfloat16()
    speed_up(model)
    assert stack_of(model.model) is None
    assert FuzzyDecoder(Target(model), NoDrafter(VOCAB)).generate(tiny_prompts((5,)), max_new_tokens=3).sequences
