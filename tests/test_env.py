"""`fsd-infer env`: the text of a report, also where a setting is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsd_infer.backends.cpu import sets
from fsd_infer.backends.cpu.kernels import kernels
from fsd_infer.backends.cpu.sets import VARIABLE
from fsd_infer.cli import env as module
from fsd_infer.cli.main import main


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
