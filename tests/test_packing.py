"""Packed weights compute what plain ones do and leave the model as it was; the cache of compiled kernels."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fsd_infer import FuzzyDecoder, NoDrafter, Target
from fsd_infer.cpu import build
from fsd_infer.cpu import kernels as module
from fsd_infer.cpu.kernels import Kernels
from fsd_infer.cpu.ops import packed_products, restore, speed_up, stack_of
from fsd_infer.cpu.packing import can_pack, fp8_panels, fp8_values, pack_linears
from tests.families import FAMILIES, VOCAB, reference, tiny_model, tiny_prompts
from tests.kernel_toys import logits_through_cache, needs_kernels

needs_packing = pytest.mark.skipif(not can_pack(), reason="needs oneDNN with bf16")


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_are_close(family: str) -> None:
    model = tiny_model(family, scale=2.0).to(torch.bfloat16)
    target, ids = Target(model), torch.tensor(tiny_prompts((20,)))
    plain = logits_through_cache(target), target.features(ids), model(ids).logits
    linears = sum(type(part) is torch.nn.Linear for part in model.modules())
    speed_up(model, release=True)
    assert len(packed_products(model)) == linears
    assert pack_linears(model) == 0, "nothing is done twice"
    fast = logits_through_cache(target), target.features(ids), model(ids).logits
    for one, other in zip(fast, plain, strict=True):
        assert float((one - other).float().norm()) < 0.03 * float(other.float().norm())
    assert reference(model, tiny_prompts((5,)), max_new_tokens=4)[0], "with transformers' own loop and cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restore_undoes_everything(dtype: torch.dtype) -> None:
    model = tiny_model("llama", tie_word_embeddings=True).to(dtype)
    target = Target(model)
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    plain = logits_through_cache(target)
    speed_up(model)
    state = model.state_dict()
    assert list(state) == list(before)
    assert all(state[name].data_ptr() == pointer for name, (pointer, _) in before.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (restore(model) > 0) == (dtype == torch.bfloat16 and can_pack())
    assert not packed_products(model) and stack_of(target.decoder) is None
    assert not any("forward" in vars(part) for part in model.modules())
    assert torch.equal(logits_through_cache(target), plain)
    assert all(torch.equal(value, before[name][1]) for name, value in model.state_dict().items())


@needs_packing
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "phi3", "gpt2", "opt"])
@pytest.mark.parametrize("tied", [False, True])
def test_released_weights_are_held_once_and_come_back(family: str, tied: bool) -> None:
    model: Any = tiny_model(family, scale=2.0, tie_word_embeddings=tied).to(torch.bfloat16)
    target = Target(model)
    before, digest = {name: value.clone() for name, value in model.state_dict().items()}, target.weights_digest()
    ids = torch.tensor(tiny_prompts((12,)))
    speed_up(model)
    expected = logits_through_cache(target), target.features(ids)
    restore(model)
    speed_up(model, release=True)
    gone = {name for name, value in model.state_dict().items() if value.is_meta}
    head = set() if tied else {"lm_head.weight"}
    assert (len(gone - head) > 0) == any(type(part) is torch.nn.Linear for part in target.decoder.modules())
    assert head <= gone, "an LM head of its own goes; this vocabulary, no multiple of 32, keeps the embedding"
    assert all("proj" in name or "fc" in name for name in gone - head), "embeddings and norms stay"
    rows = torch.tensor([3, 0, 5])
    assert torch.equal(target.lm_head_rows(rows)[0], before["lm_head.weight"][rows])
    assert torch.equal(target.lm_head_rows(None)[0], before["lm_head.weight"])
    assert target.weights_digest() == digest
    assert torch.equal(logits_through_cache(target), expected[0])
    assert torch.equal(target.features(ids), expected[1])
    restore(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], value) for name, value in before.items())
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


@needs_kernels
@pytest.mark.parametrize("tiles", [True, False])
def test_fp8_products_with_and_without_amx(tiles: bool) -> None:
    if tiles and not build._TILES <= module.cpu_flags():
        pytest.skip("needs AMX")
    compiled = build.build_for(Kernels, tiles)
    assert compiled.panel == (32 if tiles else 64)
    weight, x = torch.randn(128, 160).bfloat16(), torch.randn(3, 9, 160).bfloat16()
    numbers, scales = fp8_panels(weight, compiled.panel)
    layer = module.Linear(panels=numbers.data_ptr(), scales=scales.data_ptr(), columns=128, depth=160)
    y = compiled.linear(x, layer)
    sizes = fp8_values()[numbers.transpose(1, 2).reshape(128, 160).int() & 127] * scales[:, None]
    expected = F.linear(x.double(), torch.where(weight.signbit(), -sizes, sizes).double())
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=2**-8)


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
