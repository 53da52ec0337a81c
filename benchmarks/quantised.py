"""Decode quantised targets with the shipped head: is decoding exact there, and how often is the head still right?

    python -m benchmarks.quantised --json benchmarks/results/quantised.json

Measures every kind of quantised weights whose library is installed, `plain` (unquantised) first. The texts are the
unquantised target's greedy answers to prompts of `spec_bench_dev`, the same for all kinds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.quantised_checkpoints import STORED, write
from benchmarks.recorded import BUILT_IN, PROMPTS, parser_of, record_main
from fsd_infer import FuzzyDecoder, TreeShape
from fsd_infer.chat.encoding import encode_chat, read_prompts
from fsd_infer.cli.report import table
from fsd_infer.errors import FsdError
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.loading import load_target, shipped_drafter
from fsd_infer.targets.target import Target
from fsd_train.commands.doctor import Doctor
from fsd_train.commands.feeding import at_step

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LIBRARIES = ("torchao", "bitsandbytes", "compressed-tensors", "optimum-quanto")


def torchao(kind: str, **options: Any) -> Callable[[], Any]:
    """Return a function that makes a config of torchao's. Options are functions of the library."""

    def made() -> Any:
        import torchao.quantization as library
        from transformers import TorchAoConfig

        return TorchAoConfig(getattr(library, kind)(**{key: value(library) for key, value in options.items()}))

    return made


AT_LOAD: dict[str, Callable[[], Any]] = {
    "plain": lambda: None,
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao int4": torchao(
        "IntxWeightOnlyConfig", weight_dtype=lambda _: torch.int4, granularity=lambda library: library.PerGroup(32)
    ),
    "bitsandbytes nf4": lambda: {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes int8": lambda: {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "quanto int8": lambda: {"quant_method": "quanto", "weights": "int8"},
    "quanto int4": lambda: {"quant_method": "quanto", "weights": "int4"},
}
KINDS = [*AT_LOAD, *STORED]


def load(source: str, kind: str, dtype: torch.dtype, scratch: Path) -> Target:
    """Load the unquantised model ``source`` as a target of this kind. Raises what the kind's library raises."""
    if kind in STORED:
        directory = scratch / kind.replace(" ", "-")
        if not directory.is_dir():
            write(load_target(source, dtype=torch.float32, device="cpu")[0], directory, kind)
        return Target.from_pretrained(str(directory), dtype=dtype, device="cpu")
    config = AT_LOAD[kind]()
    return Target.from_pretrained(
        source, dtype=dtype, device="cpu", **({} if config is None else {"quantization_config": config})
    )


def compare_decoding(decoder: FuzzyDecoder, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Compare greedy answers of `exact` with the plain loop's: how far they agree, and how near a tie they part."""
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "chat": False}
    none = decoder.load_drafter("none")
    plain = [decoder.generate([prompt], drafter=none, **options).sequences[0] for prompt in prompts]
    made = [decoder.generate([prompt], **options) for prompt in prompts]
    parted, same, margin = 0, 0, 0.0
    for prompt, a, b in zip(prompts, plain, (one.sequences[0] for one in made), strict=True):
        place = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        same += len(a) if place is None else place
        if place is not None:
            parted += 1
            with torch.no_grad():
                logits = decoder.target.model(torch.tensor([[*prompt, *a[:place]]])).logits[0, -1].float()
            margin = max(margin, float(logits.log_softmax(-1).topk(2).values.diff().abs()))
    rounds = sum(one.stats.rows[0].target_forwards for one in made)
    emitted = sum(len(one.sequences[0]) - 1 for one in made)
    return {
        "answers": len(prompts), "parted": parted, "tokens_before": same / sum(map(len, plain)), "tie": margin,
        "tau": emitted / max(rounds, 1),
    }  # fmt: skip


def measure_kind(
    kind: str, args: argparse.Namespace, scratch: Path, prompts: list[list[int]], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the facts of a kind, or why this machine lacks it."""
    found: dict[str, Any] = {"kind": kind}
    head_dir, start = shipped_drafter(BUILT_IN), time.time()
    assert head_dir is not None
    try:
        for name, dtype in DTYPES.items() if args.decoded else [("fp32", torch.float32)]:
            target = load(args.target, kind, dtype, scratch)
            if args.decoded:
                decoder = FuzzyDecoder.from_pretrained(target.model, "none", target.tokenizer, pack=kind == "plain")
                decoder.drafter = decoder.load_drafter(str(head_dir), TreeShape(5, 6, 16))
                found[name] = compare_decoding(decoder, prompts[: args.decoded], args.max_new_tokens)
        head = EagleHead.from_pretrained(head_dir, dtype=torch.float32)
        doctor = Doctor(Target(target.model, target.tokenizer), head, rows)
        found["agreement"] = [doctor.feeding.agreement(at_step(step)) for step in range(3)]
        found["precision"] = target.precision
    except Exception as error:  # the library is missing, or refuses
        found["refused"] = f"{type(error).__name__}: {error}"[:300]
    return {**found, "seconds": round(time.time() - start)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return {"libraries", "kinds"}. Raises FsdError."""
    unknown = [kind for kind in args.kinds if kind not in KINDS]
    if unknown:
        raise FsdError(f"unknown kind {unknown[0]!r}. Known: {', '.join(KINDS)}.")
    warnings.simplefilter("ignore")
    decoder = FuzzyDecoder.from_pretrained(args.target)
    every = list(read_prompts(args.prompts))
    chosen = every[:: max(1, len(every) // args.limit)][: args.limit]
    prompts = [encode_chat(decoder.tokenizer, row.messages) for row in chosen]
    made = decoder.generate(prompts, max_new_tokens=64, do_sample=False, chat=False, seed=0).sequences
    rows = [{"prompt_ids": p, "response_ids": a} for p, a in zip(prompts, made, strict=True)]
    versions = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    with tempfile.TemporaryDirectory() as scratch:
        place = args.scratch or Path(scratch)
        lines = [measure_kind(kind, args, place, prompts, rows) for kind in tqdm(args.kinds, unit="kind")]
    return {"libraries": {name: versions[name] for name in LIBRARIES if name in versions}, "kinds": lines}


def report(record: dict[str, Any]) -> str:
    """Return the table of the page."""
    rows = []
    for line in record["kinds"]:
        if "refused" in line:
            rows.append([line["kind"], "not here", *[""] * 4])
            continue
        agreement = " ".join(f"{share:.1%}" for share in line["agreement"])
        both = [line[name] for name in ("fp32", "bf16") if name in line]
        shown = [f"{one['answers'] - one['parted']}/{one['answers']}" for one in both]
        bf16 = [f"{both[1]['tie']:.3f}", f"{both[1]['tau']:.2f}"] if both else ["", "", "", ""]
        rows.append([line["kind"], agreement, *shown, *bf16])
    return table(["weights", "agreement, steps 1 2 3", "fp32 equal", "bf16 equal", "parts at", "tau"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.quantised", __doc__, target=BUILT_IN, prompts=PROMPTS, limit=(12, "texts to agree on"),
        decoded=(3, "prompts that each kind decodes too; 0: none"), max_new_tokens=16,
        kinds=(KINDS, "kinds of weights"), scratch=(None, "directory for checkpoints (default: a temporary one)"),
        json=None,
    )  # fmt: skip
    return record_main("benchmarks.quantised", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
