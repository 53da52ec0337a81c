"""`make test-gpu` opens no simulated device, which would break CUDA's pinned memory and autograd in its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COLLECT = """
import sys
import pytest, torch
torch.cuda.is_available = lambda: True  # as on the machine that has a GPU
found = []
class Plugin:
    def pytest_collection_finish(self, session):
        found.extend(session.items)
pytest.main([*sys.argv[1:], "--collect-only", "-q", "-p", "no:cacheprovider"], [Plugin()])
assert len(found) > 15 and all(item.get_closest_marker("gpu") for item in found), len(found)
assert torch._C._get_privateuse1_backend_name() == "privateuseone"  # the slot for others' backends is empty
"""


def test_collecting_gpu_tests_opens_no_simulated_device(repo_root: Path) -> None:
    command = next(line for line in (repo_root / "Makefile").read_text().splitlines() if "-m pytest -m gpu" in line)
    words = command.partition("-m pytest ")[2].replace("$(PYTEST_ARGS)", "").split()
    tests = [path for path in (repo_root / "tests").glob("test_*.py") if path.name != Path(__file__).name]
    words += [str(path) for path in tests if "simulated_device" in path.read_text(encoding="utf-8")]
    done = subprocess.run([sys.executable, "-c", COLLECT, *words], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
