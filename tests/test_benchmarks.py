"""Every benchmark command with options imports and shows its help."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

BENCHMARKS = sorted(
    file.stem
    for file in (Path(__file__).resolve().parent.parent / "benchmarks").glob("*.py")
    if re.search(r"ArgumentParser\(|= parser_of\(", text := file.read_text(encoding="utf-8")) and "__main__" in text
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{name}").main()
    assert end.value.code == 0 and "usage: " in capsys.readouterr().out
