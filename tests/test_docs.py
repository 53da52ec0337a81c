"""What pages say of the code and of records is what these hold."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from fsd_infer.engine import decode

LOOP = re.compile(r"^ *batch\.prefill\(\)\n(?: *(?!return)\S.*batch\..*\n)+", re.MULTILINE)


def test_the_page_of_a_round_shows_the_engines_loop(repo_root: Path) -> None:
    page = (repo_root / "docs" / "how-a-round-works.md").read_text(encoding="utf-8")
    shown, real = LOOP.search(page), LOOP.search(inspect.getsource(decode))
    assert shown and real and inspect.cleandoc(shown[0]) == inspect.cleandoc(real[0].replace("\n    ", "\n"))


def test_accepted_lengths_on_that_page_are_the_records(repo_root: Path) -> None:
    page = (repo_root / "docs" / "how-a-round-works.md").read_text(encoding="utf-8")
    record = json.loads((repo_root / "benchmarks" / "results" / "compare-smollm2-135m.json").read_text("utf-8"))
    both, alone = (record["methods"][name] for name in ("exact@lookup+recycle", "exact@lookup"))
    assert f"has τ {both['tau']:.2f} where lookup has {alone['tau']:.2f}" in page
    assert f"means over categories {both['tau_category_mean']:.2f} and {alone['tau_category_mean']:.2f};" in page
