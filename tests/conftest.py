"""Fixtures shared by all tests. Nothing here reaches a hub; the built-in model comes from the user's cache."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("FSD_THREADS", "fixed")  # how busy a machine is says nothing about the code

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined

import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from fsd_infer import FuzzyDecoder
from fsd_infer.backends.choose import choose
from fsd_infer.backends.cpu.kernels import loaded
from fsd_infer.backends.cpu.sets import SETS, VARIABLE
from fsd_infer.targets.loading import builtin_dir
from fsd_infer.targets.weights import warn_once
from tests import small_builtin
from tests.bench_toys import Toy, save_toy

gc.disable()  # until the tests begin: looking for garbage takes a quarter of the time of their imports
choose("cpu")  # its kernels answer, as where a decoder was loaded

# How busy a machine is says nothing about the code. Examples depend on the test alone, so one commit has one result.
settings.register_profile("steady", suppress_health_check=[HealthCheck.too_slow], print_blob=True, derandomize=True)
settings.load_profile("steady")

# One thread per core unless the caller says otherwise, shared out among pytest-xdist's processes: more of them spin
# against each other on small machines.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_THREADS = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // _PROCESSES))
torch.set_num_threads(_THREADS)
if _PROCESSES > 1:  # for what tests start, too
    os.environ["OMP_NUM_THREADS"] = str(_THREADS)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Open the simulated device before the first backward pass, after which autograd takes no new device.

    What was imported is never garbage, so no collection looks at it again: each takes half a second otherwise.
    """
    gc.collect()
    gc.freeze()
    simulated: Any = sys.modules.get("tests.simulated_device")
    if simulated is not None and simulated.is_registered():  # `make test-gpu` imports it too
        raise pytest.UsageError("a test opens a simulated device while it is imported, after which CUDA fails")
    if simulated is not None and not torch.cuda.is_available():
        simulated._register()


def pytest_runtestloop() -> None:
    gc.enable()


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test starts from the same random state and number of threads, whatever ran before it."""
    torch.set_num_threads(_THREADS)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Files that tests may add to but not change."""
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def toy_decoder(toy: Toy) -> FuzzyDecoder:
    return FuzzyDecoder.from_pretrained(str(toy.target), str(toy.drafter), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with target/, answers.jsonl and features/, which tests may add to but not change."""
    from tests.train_toys import make_toys  # loads Lightning, which few tests need

    return make_toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def client(toy_decoder: FuzzyDecoder) -> Iterator[Any]:
    """A client of a server of the toy."""
    from fsd_infer.serving.app import make_app  # loads FastAPI, which few tests need
    from tests.serve_toys import LIMITS, TestClient

    with TestClient(make_app(toy_decoder, "tilted:2", LIMITS)) as found:
        yield found


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def builtin_target_dir() -> Path:
    """Directory of the real smollm2-135m; fetched once (93 MB) where the user's cache does not hold it."""
    return builtin_dir("smollm2-135m")


@pytest.fixture(scope="session")
def cut_builtin_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of :mod:`tests.small_builtin`."""
    return small_builtin.cut_builtin(tmp_path_factory.mktemp("builtin"))


@pytest.fixture
def cut_builtin(cut_builtin_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in model is one of three layers in this process."""
    small_builtin.use(cut_builtin_cache, monkeypatch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    simulated: Any = sys.modules.get("tests.simulated_device")
    if item.get_closest_marker("gpu") and simulated is not None and simulated.is_registered():
        pytest.fail("CUDA fails in a process that has opened a simulated device: run `make test-gpu`", pytrace=False)


@pytest.fixture
def device() -> Iterator[Any]:
    """The simulated device, opened."""
    from tests.simulated_device import SimulatedDevice

    with SimulatedDevice() as opened:
        yield opened


@pytest.fixture
def read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read as one batch, as on other devices: a thousand equal ones in a hundredth of the time."""
    monkeypatch.setattr("fsd_infer.targets.target.Target.reads_in_turn", False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that the test runs in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Former names warn as if for the first time."""
    monkeypatch.setattr("fsd_core.former._warned", set())


@pytest.fixture
def several_threads() -> Iterator[None]:
    """Kernels share their work out among threads, however many the other tests are given."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The kernels are looked for again, and once more when the test is over. What was said is said again."""
    monkeypatch.delenv(VARIABLE, raising=False)
    loaded.cache_clear()
    warn_once.cache_clear()
    yield monkeypatch
    loaded.cache_clear()


@pytest.fixture(params=SETS)
def each_set(request: pytest.FixtureRequest, fresh: pytest.MonkeyPatch) -> str:
    """The test runs with this set of kernels, whichever is the machine's best."""
    from tests.kernel_toys import CAN, TURNED_OFF, need_set

    if TURNED_OFF or not CAN:
        pytest.skip("needs AVX2 and a C++ compiler")
    need_set(request.param)
    fresh.setenv(VARIABLE, request.param)
    return str(request.param)
