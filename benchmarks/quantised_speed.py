"""Speed of quantised targets: by the products of their libraries, and by blocks of our CPU kernels.

    python -m benchmarks.quantised_speed --json benchmarks/results/quantised-speed.json

Every kind decodes the same prompts at temperature 0, plainly and with the shipped head. Reports tokens per second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.quantised import KINDS, LIBRARIES, load
from benchmarks.recorded import BUILT_IN, PROMPTS, parser_of, record_main
from fsd_infer import FuzzyDecoder, TreeShape
from fsd_infer.chat.encoding import read_prompts
from fsd_infer.cpu import ops
from fsd_infer.targets.builtin import shipped_drafter

SHAPE = TreeShape(5, 6, 16)


def rates(decoder: FuzzyDecoder, prompts: Sequence[Any], tokens: int) -> dict[str, float]:
    """Median tokens per second over the prompts, plainly and with the decoder's own head."""
    found = {}
    for name, drafter in (("plain", decoder.load_drafter("none")), ("exact", decoder.drafter)):
        each = []
        for prompt in [prompts[0], *prompts]:  # the first one warms up
            start = time.perf_counter()
            made = decoder.generate([prompt], max_new_tokens=tokens, do_sample=False, drafter=drafter)
            each.append(len(made.sequences[0]) / (time.perf_counter() - start))
        found[name] = statistics.median(each[1:])
    return found


def measure_kind(kind: str, args: argparse.Namespace, prompts: Sequence[Any], scratch: Path) -> dict[str, Any]:
    """A line of the table, or why the kind cannot be measured here."""
    found: dict[str, Any] = {"kind": kind}
    try:
        for form in ("library", "kernels"):
            target = load(args.target, kind, torch.bfloat16, scratch)
            decoder = FuzzyDecoder.from_pretrained(target.model, "none", target.tokenizer, pack=form == "kernels")
            decoder.drafter = decoder.load_drafter(str(shipped_drafter(BUILT_IN)), SHAPE)
            found[form] = rates(decoder, prompts, args.max_new_tokens)
            found["blocks"] = sum(made.kind > 0 for made in ops.packed_products(target.model))
    except Exception as error:  # a library that is not installed, or refuses
        found["refused"] = f"{type(error).__name__}: {error}"[:300]
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the record: a line per kind."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads or torch.get_num_threads())
    prompts = [row.messages for row in list(read_prompts(args.prompts))[:: args.every][: args.limit]]
    with tempfile.TemporaryDirectory() as scratch:
        lines = [measure_kind(kind, args, prompts, Path(scratch)) for kind in args.kinds]
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {"libraries": {name: installed[name] for name in LIBRARIES if name in installed}, "kinds": lines}


def report(record: dict[str, Any]) -> str:
    """Return a line per kind."""
    lines = []
    for line in record["kinds"]:
        forms = [f"{form}: plain {line[form]['plain']:.1f}, exact {line[form]['exact']:.1f} tok/s"
                 for form in ("library", "kernels") if form in line]  # fmt: skip
        said = "; ".join(forms) or line["refused"]
        lines.append(f"{line['kind']} ({line.get('blocks', 0)} layers in blocks): {said}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.quantised_speed", __doc__, target=BUILT_IN, prompts=PROMPTS, limit=4, every=60,
        max_new_tokens=32, kinds=(KINDS, "kinds of weights"), threads=None, json=None,
    )  # fmt: skip
    return record_main("benchmarks.quantised_speed", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
