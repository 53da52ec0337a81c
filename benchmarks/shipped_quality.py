"""Write the file that maps ``quality`` to rules for the built-in model's shipped head.

    python -m benchmarks.shipped_quality

It does what `fsd-bench calibrate` does, from runs that were measured before: those that count answers which the rule
loses and gains against it. All runs are at temperature 0, on made instructions and even rows of IFEval. A quality has
the rule if a loss of that share of exact's score is ruled out with the confidence, see
:func:`fsd_bench.sweep.certify.loss_p_value`; otherwise it means exact. The rule was chosen on the first two sets,
which flatters it there; so the odd rows of IFEval, which chose and calibrated nothing, verify it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recorded import BUILT_IN
from benchmarks.results_page import RESULTS
from fsd_bench.sweep.certify import QUALITIES, SCORE, loss_p_value
from fsd_infer.decoder.calibrated import Calibrated, write_calibrated
from fsd_infer.targets.builtin import shipped_drafter
from fsd_infer.targets.target import Target

RULE = "fly:window=3:exact_ngram_size=3:exact_sentence_start=5"
FORMER, LATER = "fly:window=3:novel=3:lead=5", "fly:window=3:exact_ngram_size=3:lead=5"  # in records
STUDY, FRESH, ODD = "lead-study", "rules-made-late", "rules-ifeval-odd-lead"
CONFIDENCE = 0.9


def counted() -> dict[str, dict[str, Any]]:
    """Return by set what the rule did compared with exact: prompts, right_by_exact, lost, gained, and differences."""
    sets = {}
    for name, entry in _read(STUDY)["tuned"].items():
        facts = entry["rules"][FORMER]
        sets[f"{STUDY}, {name}"] = {key: entry[key] for key in ("prompts", "right_by_exact")} | {
            key: facts[key] for key in ("lost", "gained", "tau", "ended", "repeated_4grams")
        }
    sets[FRESH] = _beside_exact(_read(FRESH), LATER)
    return sets


def verified() -> dict[str, Any]:
    """Return the same of the odd rows of IFEval."""
    record = _read(ODD)
    difference = record["differences"]["exact"][FORMER]["score"]
    return {"record": ODD, "score_difference": difference, **_beside_exact(record, FORMER)}


def _beside_exact(record: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """Return what a rule did compared with exact by a record of `fsd-bench run`, as in :func:`counted`."""
    differences, flips = record["differences"]["exact"][rule], record["flips"]["exact"][rule]
    prompts = differences["score"]["prompts"]
    return {
        "prompts": prompts, "right_by_exact": round(record["methods"]["exact"]["score"] * prompts),
        "lost": flips["lost"], "gained": flips["gained"], "tau": record["ratios"]["exact"][rule]["tau"],
        "ended": differences["finished_fraction"], "repeated_4grams": differences["repeated_4grams"],
    }  # fmt: skip


def levels(sets: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the highest quality that the rule certainly keeps, as :attr:`.Calibrated.levels`; [] for none."""
    total = {key: sum(entry[key] for entry in sets.values()) for key in ("prompts", "right_by_exact", "lost", "gained")}
    unchanged = total["prompts"] - total["lost"] - total["gained"]
    losses = np.repeat([1.0, -1.0, 0.0], [total["lost"], total["gained"], unchanged])
    score = total["right_by_exact"] / total["prompts"]
    speed = sum(entry["tau"]["ratio"] * entry["prompts"] for entry in sets.values()) / total["prompts"]
    for quality in QUALITIES:
        if loss_p_value(losses, (1 - quality) * score) <= 1 - CONFIDENCE:
            return [{"quality": quality, "rule": RULE, "speed": round(speed, 3)}]
    return []


def setting() -> Calibrated:
    """Return what is written: exact for ``rule="calibrated"``, since no rule is certain to lose less than 1 point."""
    sets = counted()
    inputs = {
        "confidence": CONFIDENCE,
        "calibration": sets,
        "verification": verified(),
        "speed": "ratio of tokens per forward; tree 6,2,12, 128 tokens, shipped head",
    }
    return Calibrated(0.0, "exact", None, {"kind": SCORE, "value": 0.01}, inputs, levels(sets))


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file to the head's directory and print its levels."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.shipped_quality", description=(__doc__ or "").split("\n\n")[0]
    ).parse_args(argv)
    directory, made = shipped_drafter(BUILT_IN), setting()
    assert directory is not None, "the built-in model has a head"
    print(write_calibrated(Path(directory), Target.from_pretrained(BUILT_IN), made))
    for level in made.levels:
        print(f"quality {level['quality']:g}: {level['rule']}, {level['speed']:.2f} times exact's tokens per forward")
    return 0


if __name__ == "__main__":
    sys.exit(main())
