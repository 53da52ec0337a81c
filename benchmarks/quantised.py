"""The shipped head on quantised targets: does decoding follow the plain loop, and how often is the head still right.

    python -m benchmarks.quantised --output benchmarks/results/quantised.json

Every kind of quantised weights that this machine has the library for: `plain` (unquantised) first. The texts are the
unquantised target's greedy answers to prompts of `spec_bench_dev`, the same for all kinds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.quantised_checkpoints import STORED, write
from fsd_bench.environment import environment
from fsd_infer import FuzzyDecoder, TreeShape
from fsd_infer.chat.encoding import encode_chat, read_prompts
from fsd_infer.cli.report import table
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.loading import load_target, shipped_drafter
from fsd_infer.targets.target import Target
from fsd_train.commands.doctor import Doctor
from fsd_train.commands.feeding import at_step

TARGET, DTYPES = "smollm2-135m", {"bf16": torch.bfloat16, "fp32": torch.float32}


def torchao(kind: str, **options: Any) -> Callable[[], Any]:
    """A config of torchao's, made when it is asked for."""

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


def kinds() -> list[str]:
    """All, in the order of the table."""
    return [*AT_LOAD, *STORED]


def load(source: str, kind: str, dtype: torch.dtype, scratch: Path) -> Target:
    """A target of this kind, made of the unquantised model ``source``. Raises what its library raises."""
    if kind in STORED:
        directory = scratch / kind.replace(" ", "-")
        if not directory.is_dir():
            write(load_target(source, dtype=torch.float32, device="cpu")[0], directory, kind)
        return Target.from_pretrained(str(directory), dtype=dtype, device="cpu")
    config = AT_LOAD[kind]()
    return Target.from_pretrained(
        source, dtype=dtype, device="cpu", **({} if config is None else {"quantization_config": config})
    )


def follows(decoder: FuzzyDecoder, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """How far `exact` with the head gives the plain loop's greedy answers, and how near a tie it parts at."""
    options = {"max_new_tokens": tokens, "do_sample": False, "chat": False}
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
    total = sum(map(len, plain))
    rounds = sum(one.stats.rows[0].target_forwards for one in made)
    emitted = sum(len(one.sequences[0]) - 1 for one in made)
    return {"answers": len(prompts), "parted": parted, "tokens_before": same / total, "tie": margin,
            "tau": emitted / max(rounds, 1)}  # fmt: skip


def measure(
    kind: str, args: argparse.Namespace, prompts: list[list[int]], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """A line of the table; for a kind that cannot be had here why."""
    found: dict[str, Any] = {"kind": kind}
    head_dir, start = shipped_drafter(TARGET), time.time()
    assert head_dir is not None
    try:
        for name, dtype in DTYPES.items():
            if name == "bf16" and not args.decoded:
                continue
            target = load(args.target, kind, dtype, Path(args.scratch))
            if not args.decoded:
                continue
            decoder = FuzzyDecoder.from_pretrained(target.model, "none", target.tokenizer, pack=kind == "plain")
            decoder.drafter = decoder.load_drafter(str(head_dir), TreeShape(5, 6, 16))
            found[name] = follows(decoder, prompts[: args.decoded], args.max_new_tokens)
        head = EagleHead.from_pretrained(head_dir, dtype=torch.float32)
        doctor = Doctor(Target(target.model, target.tokenizer), head, rows)
        found["agreement"] = [doctor.feeding.agreement(at_step(step)) for step in range(3)]
        found["precision"] = target.precision
    except Exception as error:  # a library that is not there, or refuses
        found["refused"] = f"{type(error).__name__}: {error}"[:300]
    return {**found, "seconds": round(time.time() - start)}


def libraries() -> dict[str, str]:
    """Versions of the libraries of quantisation that are installed."""
    names = ("torchao", "bitsandbytes", "compressed-tensors", "optimum-quanto")
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {name: found[name] for name in names if name in found}


def text(lines: list[dict[str, Any]]) -> str:
    """The table of the page."""
    rows = []
    for line in lines:
        if "refused" in line:
            rows.append([line["kind"], "not here", *[""] * 4])
            continue
        agreement = " ".join(f"{share:.1%}" for share in line["agreement"])
        both = [line[name] for name in ("fp32", "bf16") if name in line]
        shown = [f"{one['answers'] - one['parted']}/{one['answers']}" for one in both]
        bf16 = [f"{both[1]['tie']:.3f}", f"{both[1]['tau']:.2f}"] if both else ["", "", "", ""]
        rows.append([line["kind"], agreement, *shown, *bf16])
    return table(["weights", "agreement, steps 1 2 3", "fp32 equal", "bf16 equal", "parts at", "tau"], rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default=TARGET, help="built-in name or directory (%(default)s)")
    parser.add_argument("--prompts", default="data/spec_bench_dev.jsonl", help="(%(default)s)")
    parser.add_argument("--limit", type=int, default=12, help="texts to agree on (%(default)s)")
    parser.add_argument(
        "--decoded", type=int, default=3, help="of their prompts, decoded by each kind, 0: none (%(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=16, help="of each of these (%(default)s)")
    parser.add_argument("--kinds", nargs="+", default=kinds(), choices=kinds())
    parser.add_argument("--scratch", help="for checkpoints; default: a folder that is deleted")
    parser.add_argument("--output", help="file of the record")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        args.scratch = args.scratch or scratch
        decoder = FuzzyDecoder.from_pretrained(args.target)
        every = list(read_prompts(args.prompts))
        chosen = every[:: max(1, len(every) // args.limit)][: args.limit]
        prompts = [encode_chat(decoder.tokenizer, row.messages) for row in chosen]
        made = decoder.generate(prompts, max_new_tokens=64, do_sample=False, chat=False, seed=0).sequences
        rows = [{"prompt_ids": p, "response_ids": a} for p, a in zip(prompts, made, strict=True)]
        lines: list[dict[str, Any]] = []
        named = {name: value for name, value in vars(args).items() if name not in ("scratch", "output")}
        command = ["python", "-m", "benchmarks.quantised", "--limit", str(args.limit), "--decoded", str(args.decoded)]
        record = {"options": named, "libraries": libraries(), "environment": environment(command)}
        for kind in args.kinds:
            lines.append(measure(kind, args, prompts, rows))
            print(json.dumps(lines[-1]), flush=True)
            if args.output:
                Path(args.output).write_text(json.dumps({**record, "kinds": lines}, indent=1) + "\n")
    print(text(lines))


if __name__ == "__main__":
    main()
