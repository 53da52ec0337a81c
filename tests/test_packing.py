"""Packed weights compute what plain ones do and leave the model as it was; the cache of compiled kernels."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fsd_core.errors import KernelsError
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.backends.cpu import build
from fsd_infer.backends.cpu import kernels as module
from fsd_infer.backends.cpu import sets as kernel_sets
from fsd_infer.backends.cpu.kernels import SIDES, Kernels, in_panels
from fsd_infer.backends.cpu.packing import (
    PackedLinear,
    fp8_panels,
    fp8_values,
    onednn_packs,
    pack_linears,
    packed_products,
)
from fsd_infer.backends.cpu.sets import AVX2, SETS, VARIABLE
from fsd_infer.backends.cpu.structs import Linear
from fsd_infer.device.cpuinfo import cpu_flags
from fsd_infer.drafters import NoDrafter
from tests.families import FAMILIES, VOCAB, reference, tiny_model, tiny_prompts
from tests.kernel_toys import CAN, logits_through_cache, need_set, needs_kernels, prepare, restore

needs_packing = pytest.mark.skipif(not (CAN or onednn_packs()), reason="needs AVX2, or oneDNN with bf16")


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_are_close(family: str) -> None:
    model = tiny_model(family, scale=2.0).to(torch.bfloat16)
    target, ids = Target(model), torch.tensor(tiny_prompts((20,)))
    assert pack_linears(tiny_model(family)) == 0, "fp32 stays as it is"
    plain = logits_through_cache(target), target.features(ids), model(ids).logits
    linears = sum(type(part) is torch.nn.Linear for part in model.modules())
    prepare(target, release=True)
    assert len(packed_products(model)) == linears
    assert pack_linears(model) == 0, "nothing is done twice"
    fast = logits_through_cache(target), target.features(ids), model(ids).logits
    for one, other in zip(fast, plain, strict=True):
        assert float((one - other).float().norm()) < 0.03 * float(other.float().norm())
    assert reference(model, tiny_prompts((5,)), max_new_tokens=4)[0], "with transformers' own loop and cache"


@needs_packing
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "phi3", "gpt2", "opt"])
@pytest.mark.parametrize("tied", [False, True])
def test_restore_undoes_everything_and_released_weights_are_held_once(family: str, tied: bool) -> None:
    model: Any = tiny_model(family, scale=2.0, tie_word_embeddings=tied).to(torch.bfloat16)
    target = Target(model)
    before, digest = {name: value.clone() for name, value in model.state_dict().items()}, target.weights_digest()
    addresses = [value.data_ptr() for value in model.state_dict().values()]
    ids, plain = torch.tensor(tiny_prompts((12,))), logits_through_cache(target)
    prepare(target)
    expected = logits_through_cache(target), target.features(ids)
    assert [value.data_ptr() for value in model.state_dict().values()] == addresses, "weights of others stay in place"
    assert restore(target) > 0 and not packed_products(model) and target.stack is target.plain_stack
    assert torch.equal(logits_through_cache(target), plain)
    prepare(target, release=True)
    gone = {name for name, value in model.state_dict().items() if value.is_meta}
    head = set() if tied else {"lm_head.weight"}
    assert (len(gone - head) > 0) == any(isinstance(part, PackedLinear) for part in target.decoder.modules())
    assert head <= gone, "an LM head of its own goes; this vocabulary, no multiple of 32, keeps the embedding"
    assert all("proj" in name or "fc" in name for name in gone - head), "embeddings and norms stay"
    rows = torch.tensor([3, 0, 5])
    assert torch.equal(target.lm_head_rows(rows)[0], before["lm_head.weight"][rows])
    assert torch.equal(target.lm_head_rows(None)[0], before["lm_head.weight"])
    assert target.weights_digest() == digest
    assert torch.equal(logits_through_cache(target), expected[0])
    assert torch.equal(target.features(ids), expected[1])
    restore(target)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], value) for name, value in before.items())
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


@needs_kernels
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("side", SIDES)
def test_every_set_reads_every_layout(name: str, side: int) -> None:
    """oneDNN chooses panels of 64 or 32 columns by the processor, whatever set of kernels reads them."""
    need_set(name)
    compiled = build.build_for(Kernels, name)
    assert compiled.name == name
    weight, x = torch.randn(128, 160).bfloat16(), torch.randn(3, 9, 160).bfloat16()
    panels = in_panels(weight, side)
    layer = Linear(panels=panels.data_ptr(), side=side, columns=128, depth=160)
    y = compiled.linear(x, layer)
    torch.testing.assert_close(y.double(), F.linear(x.double(), weight.double()), atol=1e-4, rtol=2**-8)
    assert torch.equal(compiled.linear(x[1, 4], layer), y[1, 4])
    ids = torch.tensor([0, 31, 32, 63, 64, 127, 5])
    assert torch.equal(compiled.rows(layer, ids), weight[ids])
    numbers, scales = fp8_panels(weight, side)
    layer = Linear(panels=numbers.data_ptr(), side=side, scales=scales.data_ptr(), columns=128, depth=160)
    y = compiled.linear(x, layer)
    sizes = fp8_values()[numbers.transpose(1, 2).reshape(128, 160).int() & 127] * scales[:, None]
    expected = F.linear(x.double(), torch.where(weight.signbit(), -sizes, sizes).double())
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=2**-8)


ELSEWHERE = """
import torch
from fsd_infer.backends.cpu.packing import Packed
layer = torch.nn.Linear(96, 192, bias=False, dtype=torch.bfloat16).requires_grad_(False)
made, x = Packed(layer), torch.randn(9, 96).bfloat16()
y = made.kernels.linear(x, made.native)
torch.testing.assert_close(y.double(), x.double() @ layer.weight.double().T, atol=1e-4, rtol=2**-8)
print(made.kernels.name, made.native.side)
"""


@needs_kernels
@pytest.mark.parametrize(("name", "isa", "side"), [("avx512", "AVX512_CORE_BF16", "64"), ("avx2", "AVX2", "32")])
def test_a_processor_without_amx_or_avx512_is_emulated(name: str, isa: str, side: str) -> None:
    """oneDNN and our kernels do as they do there."""
    need_set(name)
    limits, command = {VARIABLE: name, "ONEDNN_MAX_CPU_ISA": isa}, [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, env={**os.environ, **limits}, capture_output=True, text=True)
    assert done.stdout.split() == [name, side], done.stderr[-500:]


@needs_kernels
@pytest.mark.parametrize("name", SETS)
def test_every_set_compiles_on_every_machine(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also tiles where no processor has them. What is not run here need not be fast."""
    if not SETS[name] <= cpu_flags():
        monkeypatch.setenv("FSD_CACHE", str(tmp_path))
        monkeypatch.setattr(build, "_FLAGS", [flag.replace("-O3", "-O0") for flag in build._FLAGS])
    assert build.build_for(lambda path: path, name).is_file()


COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

LOAD = """
import ctypes, logging, os, sys
from fsd_infer.backends.cpu import build
logging.basicConfig(stream=sys.stdout, format="%(message)s")
print(*build.build(lambda path: ctypes.CDLL(str(path)).fsd_answer(), os.environ["SETS"].split()))
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

    def run(self, compiler: str | None = None, sets: str = "avx512", **variables: str) -> tuple[str, int]:
        """(first word a new process prints, calls of the compiler so far); "None" where there are no kernels.

        sets: of kernels, to be tried in turn.
        """
        compiler = self.compiler if compiler is None else compiler
        environment = {**os.environ, "FSD_CACHE": str(self.cache), "SETS": sets, "CXX": compiler, **variables}
        done = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-500:]}"
        calls = self.count.read_text().count("x") if self.count.exists() else 0
        return done.stdout.split()[0], calls

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


@pytest.mark.parametrize("sets, found", [("avx512", ("None", 1)), ("amx avx512", ("42", 2))])
def test_an_intact_library_of_another_source_is_not_loaded(sets: str, found: tuple[str, int], place: Place) -> None:
    place.run(sets=sets)
    cached = place.cached
    content = place.foreign.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:32]
    cached.with_name(f"{cached.stem.rpartition('-')[0]}-{digest}.so").write_bytes(content)
    cached.unlink()
    message = "its symbols are not there: kernels without AMX are tried; if none are left, that is a warning"
    assert place.run(sets=sets) == found, message


def test_compilers_that_fail(place: Place) -> None:
    for work in ("echo broken >&2; exit 1", "true"):
        assert place.run(place.script("failing", work)) == ("None", 0)
    assert place.run("/no/such/compiler") == ("None", 0)
    old = place.script("old", f'case "$*" in *-mamx*) exit 1;; esac\n{place.works}')
    assert place.run(old, sets="amx avx512") == ("42", 1), "one that knows no AMX compiles without"


# sets of kernels ---------------------------------------------------------------------------------------------------

OLD = {"avx", "f16c", "popcnt"}  # flags of an x86-64 processor of 2012; an ARM processor's have other names


@pytest.mark.parametrize(("flags", "asked", "names", "why"), [
    (SETS["amx"] | AVX2, None, ["amx", "avx512", "avx2"], "the best there are"),
    (SETS["amx"], " AMX ", ["amx"], "FSD_KERNELS=amx asks for them"),
    (SETS["amx"], "0", [], "FSD_KERNELS=0 turns them off"),
    (SETS["avx512"], None, ["avx512"], "the processor lacks amx_bf16, amx_int8, amx_tile"),
    ((SETS["avx512"] | AVX2) - {"avx512_bf16"}, None, ["avx2"], "the processor lacks avx512_bf16"),
    (SETS["avx512"] | AVX2, "avx2", ["avx2"], "FSD_KERNELS=avx2 asks for them"),
    (OLD, "", [], "the processor lacks avx2, fma"),
])  # fmt: skip
def test_which_sets_a_processor_and_the_variable_allow(
    flags: set[str], asked: str | None, names: list[str], why: str, fresh: pytest.MonkeyPatch
) -> None:
    fresh.setattr(kernel_sets, "cpu_flags", lambda: flags)
    fresh.setattr(kernel_sets.platform, "machine", lambda: "x86_64")
    if asked is not None:
        fresh.setenv(VARIABLE, asked)
    found = kernel_sets.allowed_sets()
    assert (list(found.names), found.why, found.forced) == (names, why, "FSD_KERNELS" in why)


@pytest.mark.parametrize(("machine", "flags", "asked", "says"), [
    ("x86_64", AVX2, "avx512", "FSD_KERNELS=avx512, but the processor lacks avx512_bf16, "),
    ("x86_64", SETS["avx512"], "amx", "the processor lacks amx_bf16, amx_int8, amx_tile. Unset FSD_KERNELS"),
    ("aarch64", set(), "avx512", "they are written for x86-64 processors, and this is aarch64"),
    ("x86_64", SETS["amx"], "sse4", "FSD_KERNELS='sse4' names no kernels: use amx, avx512, avx2, 0 for none, or 1"),
    ("x86_64", SETS["avx512"], "avx512", "cannot be compiled or loaded here (avx512: "),
])  # fmt: skip
def test_a_set_that_cannot_run_is_an_error(
    machine: str, flags: set[str], asked: str, says: str, fresh: Any, tmp_path: Path
) -> None:
    """On another processor, by a name that is none, and where there is no compiler."""
    fresh.setattr(kernel_sets, "cpu_flags", lambda: flags)
    fresh.setattr(kernel_sets.platform, "machine", lambda: machine)
    for name, value in (("FSD_CACHE", str(tmp_path)), ("CXX", "/no/such/compiler"), (VARIABLE, asked)):
        fresh.setenv(name, value)
    with pytest.raises(KernelsError, match=re.escape(says)):
        prepare(Target(tiny_model("llama")))


@pytest.mark.parametrize(("machine", "flags", "compiler", "logger", "says"), [
    ("x86_64", OLD, None, "targets.weights", "lacks avx2.*Our CPU kernels need AVX2"),
    ("aarch64", set(), None, "targets.weights", "this is aarch64.*Our CPU kernels need AVX2"),
    ("x86_64", SETS["avx512"], None, "backends.cpu.kernels", "Install g.."),
    ("x86_64", SETS["avx512"], "false", "backends.cpu.kernels", "slower"),
])  # fmt: skip
def test_without_kernels_decoding_runs_through_torch_and_says_so_once(
    machine: str, flags: set[str], compiler: str | None, logger: str, says: str, fresh: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    fresh.setattr(kernel_sets, "cpu_flags", lambda: flags)
    fresh.setattr(kernel_sets.platform, "machine", lambda: machine)
    fresh.setattr(shutil, "which", lambda name: None)
    for name, value in (("FSD_CACHE", str(tmp_path)), ("CXX", compiler)):
        fresh.delenv(name, raising=False) if value is None else fresh.setenv(name, value)
    model = tiny_model("llama").bfloat16()
    before = reference(model, tiny_prompts((5,)), max_new_tokens=3)
    target = Target(model)
    for made in (target, Target(tiny_model("llama").bfloat16())):
        prepare(made, release=True)
    said = [record.message for record in caplog.records if record.name == f"fsd_infer.{logger}"]
    if onednn_packs() or logger != "targets.weights":
        assert len(said) == 1 and re.search(says, said[0])
    assert module.kernels() is None and target.stack is target.plain_stack
    decoder = FuzzyDecoder(target, NoDrafter(VOCAB))
    assert decoder.generate(tiny_prompts((5,)), max_new_tokens=3, do_sample=False).sequences == before
