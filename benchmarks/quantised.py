"""Decode quantised targets with the shipped head: is decoding exact there, and how often is the head still right?

    python -m benchmarks.quantised --decoded 0 --json benchmarks/results/quantised.json
    python -m benchmarks.quantised --limit 0 --json benchmarks/results/quantised-bf16.json

Measures every kind of quantised weights whose library is installed, `plain` (unquantised) first. The texts are the
unquantised target's greedy answers to prompts of `spec_bench_dev`, the same for all kinds. In bf16 `exact` may part
from the plain loop where two tokens are nearly as likely, so each difference is recorded with its gap in ln p.
"""

from __future__ import annotations

import argparse
import json
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
from fsd_infer.cpu import ops
from fsd_infer.errors import FsdError
from fsd_infer.files import append_json
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.builtin import shipped_drafter
from fsd_infer.targets.loading import load_target
from fsd_infer.targets.target import Target
from fsd_train.commands.doctor import Doctor
from fsd_train.commands.feeding import at_step

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
SHORT = 128  # tokens of the longest prompt that is decoded


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


@torch.no_grad()
def compare_decoding(decoder: FuzzyDecoder, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Compare greedy answers of `exact` with the plain loop's, both in one batch.

    Returns:
        {"equal": number of equal answers, "tokens_before": share of tokens before an answer's first difference,
        "gaps": by how many nats the plain loop's token is likelier than the other at each first difference, "tau"}
    """
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "chat": False}
    plain = decoder.generate(prompts, drafter=decoder.load_drafter("none"), **options).sequences
    made = decoder.generate(prompts, **options)
    same, gaps = 0, []
    for prompt, a, b in zip(prompts, plain, made.sequences, strict=True):
        place = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        same += len(a) if place is None else place
        if place is not None:
            logits = decoder.target.model(torch.tensor([[*prompt, *a[:place]]])).logits[0, -1].float()
            gaps.append(round(float(logits[a[place]] - logits[b[place]]), 4))
    return {
        "equal": len(prompts) - len(gaps), "tokens_before": same / sum(map(len, plain)), "gaps": sorted(gaps),
        "tau": made.stats.tau,
    }  # fmt: skip


def measure_kind(
    kind: str, args: argparse.Namespace, scratch: Path, prompts: list[list[int]], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the facts of a kind, or why this machine lacks it."""
    found: dict[str, Any] = {"kind": kind}
    head_dir, start = shipped_drafter(BUILT_IN), time.time()
    assert head_dir is not None
    try:
        target = load(args.target, kind, torch.float32 if rows else torch.bfloat16, scratch)
        found["precision"] = target.precision
        if rows:
            doctor = Doctor(Target(target.model, target.tokenizer), EagleHead.from_pretrained(head_dir), rows)
            found["agreement"] = [doctor.feeding.agreement(at_step(step)) for step in range(3)]
        for form in ("library", "kernels") if prompts else ():
            model = load(args.target, kind, torch.bfloat16, scratch).model
            decoder = FuzzyDecoder.from_pretrained(model, "none", target.tokenizer, pack=form == "kernels")
            decoder.drafter = decoder.load_drafter(str(head_dir), TreeShape(5, 6, 16))
            if form == "library" or kind == "plain" or any(made.kind for made in ops.packed_products(model)):
                found[form] = compare_decoding(decoder, prompts, args.max_new_tokens)
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
    chosen = every[:: max(1, len(every) // max(args.limit, 1))][: args.limit]
    texts, rows = [encode_chat(decoder.tokenizer, row.messages) for row in chosen], []
    encoded = (encode_chat(decoder.tokenizer, row.messages) for row in every)
    prompts = [ids for ids in encoded if len(ids) <= SHORT] if args.decoded else []
    prompts = prompts[:: max(1, len(prompts) // max(args.decoded, 1))]
    if texts:
        made = decoder.generate(texts, max_new_tokens=64, do_sample=False, chat=False, seed=0).sequences
        rows = [{"prompt_ids": p, "response_ids": a} for p, a in zip(texts, made, strict=True)]
    versions = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    with tempfile.TemporaryDirectory() as scratch:
        place = args.scratch or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        file = place / "kinds.jsonl"
        finished = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []
        done = {line["kind"]: line for line in finished}
        for kind in tqdm([kind for kind in args.kinds if kind not in done], unit="kind"):
            done[kind] = measure_kind(kind, args, place, prompts[: args.decoded], rows)
            append_json(file, done[kind])
    lines = [done[kind] for kind in args.kinds]
    return {"libraries": {name: versions[name] for name in LIBRARIES if name in versions}, "kinds": lines}


def report(record: dict[str, Any]) -> str:
    """Return the table of the page."""
    rows = []
    for line in record["kinds"]:
        cells = [line["kind"], " ".join(f"{share:.1%}" for share in line.get("agreement", ()))]
        for form in ("library", "kernels"):
            one = line.get(form)
            cells.append("" if one is None else f"{one['tokens_before']:.0%}, {max(one['gaps'], default=0):.2f}")
        rows.append(["not here" if "refused" in line and not each else each for each in cells])
    return table(["weights", "agreement, steps 1 2 3", "library: tokens equal, largest gap", "kernels"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.quantised", __doc__, target=BUILT_IN, prompts=PROMPTS, limit=(12, "texts to agree on; 0: none"),
        decoded=(8, "prompts that each kind decodes in bf16; 0: none"), max_new_tokens=48,
        kinds=(KINDS, "kinds of weights"),
        scratch=(None, "directory for checkpoints and finished kinds, which a rerun skips"), json=None,
    )  # fmt: skip
    return record_main("benchmarks.quantised", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
