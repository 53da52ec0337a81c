"""What ``quality`` means with the built-in model's head: the file beside it is what the records say."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.shipped_quality import CONFIDENCE, counted, levels, setting
from fsd_bench.sweep.certify import QUALITIES, loss_p_value
from fsd_core.files import jsonable


def test_the_shipped_file_is_what_the_records_say(repo_root: Path) -> None:
    file = repo_root / "fsd_infer" / "shipped" / "smollm2-135m" / "calibrated.json"
    (entry,) = json.loads(file.read_text("utf-8"))["settings"]
    del entry["target"]
    assert entry == json.loads(json.dumps(jsonable(asdict(setting())))), "run python -m benchmarks.shipped_quality"
    assert all("odd" not in name for name in counted()), "the odd rows verify, they do not calibrate"


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (4, 4), (10, 2), (60, 0)])
def test_a_level_is_the_highest_quality_that_is_certain(lost: int, gained: int) -> None:
    """Counts of several sets are those of one."""
    tau = {"tau": {"ratio": 1.2}}
    found = levels({
        "one": {"prompts": 100, "right_by_exact": 60, "lost": lost, "gained": gained, **tau},
        "other": {"prompts": 100, "right_by_exact": 40, "lost": 0, "gained": 0, **tau},
    })  # fmt: skip
    losses = np.array([1.0] * lost + [-1.0] * gained + [0.0] * (200 - lost - gained))
    certain = [quality for quality in QUALITIES if loss_p_value(losses, (1 - quality) * 0.5) <= 1 - CONFIDENCE]
    assert [level["quality"] for level in found] == certain[:1] and (lost == 60) == (found == [])
    assert all(level["speed"] == 1.2 for level in found)
