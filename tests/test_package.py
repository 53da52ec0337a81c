"""What a package of the toolkit says and lacks, and decoding on systems without what Linux and x86-64 have."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fsd_core.errors import ModelLoadError
from fsd_infer.targets import builtin
from tests.conftest import Toy

README = "[a](docs/a.md#b) [b](recipes) [c](https://x.org/c) [d](#d)\n```python\nf[0](docs/a.md)\n```\n"


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


def test_a_package_without_the_maths_adapter_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "SHIPPED", tmp_path)
    with pytest.raises(ModelLoadError, match="the adapter of smollm2-135m-maths is in the repository alone"):
        builtin.builtin_adapter("smollm2-135m-maths")
    assert builtin.builtin_adapter("smollm2-135m") is None


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
